#include "support/random_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/fmt.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

constexpr double kMostProducts = 1e7;  // the float64 reference takes 40 ms for so many

template <class T>
const T& one_of(Rng& rng, const std::vector<T>& values) {
  return values[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(values.size())))];
}
bool chance(Rng& rng, int one_in) {
  return rng.below(one_in) == 0;
}

// Lengths around pages as often as any others.
std::int64_t draw_length(Rng& rng, std::int64_t most) {
  const std::int64_t near_page = kPageTokens * (1 + rng.below(6)) + rng.below(5) - 2;
  const std::int64_t n = chance(rng, 2) ? near_page : 1 + rng.below(chance(rng, 4) ? 3000 : 500);
  return std::clamp<std::int64_t>(n, 1, most);
}

WorldSpec draw_spec(Rng& rng, const RandomChoices& choices) {
  WorldSpec spec;
  spec.head_dim = one_of(rng, choices.head_dims);
  spec.latent = choices.latents;
  if (choices.two_head_dims || choices.latents) spec.v_head_dim = one_of(rng, choices.head_dims);
  const int widest = std::max(spec.head_dim, spec.v_head_dim);
  spec.kv_heads = static_cast<int>(1 + rng.below(4));
  if (choices.latents) spec.kv_heads = 1;
  spec.group = one_of<int>(rng, {1, 2, 3, 4, 5, 7, 8, 12, 16, 20});
  std::tie(spec.k, spec.v) = one_of(rng, choices.formats);
  spec.sink_pages = one_of<int>(rng, {0, 1, 1, 2});
  spec.tail_pages = one_of<int>(rng, {0, 1, 1, 2});
  spec.input_dtype = one_of<Dtype>(rng, {Dtype::f32, Dtype::f16, Dtype::bf16});
  if (chance(rng, 2)) spec.exact = one_of<Dtype>(rng, {Dtype::f16, Dtype::bf16});
  if (chance(rng, 6)) {
    spec.window = 1 + rng.below(chance(rng, 2) ? 300 : 70);
    spec.window_sinks = chance(rng, 2) ? rng.below(140) : 0;
  }
  spec.inputs = one_of<Inputs>(rng, {Inputs::gauss, Inputs::gauss, Inputs::loud, Inputs::near_tied, Inputs::sink});
  spec.seed = static_cast<std::uint64_t>(rng.below(1 << 30));
  const std::int64_t sequences = chance(rng, 3) ? 1 : 1 + rng.below(5);
  spec.sequences.clear();
  double products = 0;
  for (std::int64_t i = 0; i < sequences; ++i) {
    Lengths lengths;
    lengths.q_len = chance(rng, 2) ? 1 : 1 + rng.below(choices.most_queries);
    if (i > 0 && chance(rng, 8)) lengths.q_len = 0;
    const double of_key =
        1.0 * widest * spec.group * spec.kv_heads * static_cast<double>(std::max<std::int64_t>(1, lengths.q_len));
    const auto most = static_cast<std::int64_t>(std::max(1.0, (kMostProducts - products) / of_key));
    lengths.kv_len = std::max(lengths.q_len, draw_length(rng, most));
    products += of_key * static_cast<double>(lengths.kv_len);
    spec.sequences.push_back(lengths);
    if (products > 0.8 * kMostProducts) break;
  }
  for (std::int64_t i = rng.below(4); i > 0; --i) spec.chunks.push_back(1 + rng.below(chance(rng, 2) ? 20 : 200));
  for (std::int64_t i = spec.window > 0 ? 0 : rng.below(4); i > 0; --i) {
    spec.rewinds.push_back(rng.below(chance(rng, 2) ? 10 : 300));
  }
  spec.forked = chance(rng, 4);
  spec.layers = chance(rng, 4) ? static_cast<int>(2 + rng.below(2)) : 1;
  spec.layer = static_cast<int>(rng.below(spec.layers));
  double of_bases = 0;  // products of rows with matrices
  for (const Lengths& lengths : spec.sequences) {
    of_bases += 1.0 * spec.layers * spec.kv_heads * widest * widest * static_cast<double>(lengths.kv_len);
  }
  const auto draw_bases = [&](const std::string& format, int head_dim) {
    return chance(rng, 4) && format.starts_with("tq") && is_supported_head_dim(head_dim) &&
           of_bases < 50 * kMostProducts;
  };
  spec.key_bases = draw_bases(spec.k, spec.head_dim);
  spec.value_bases = draw_bases(spec.v, spec.v_head_dim > 0 ? spec.v_head_dim : spec.head_dim);
  return spec;
}

// A mask of any type, broadcast in any dimensions, with rows of its own length. Some rows see nothing.
OwnedMask draw_mask(Rng& rng, const WorldSpec& spec) {
  std::int64_t longest = 0, most_queries = 0;
  for (const Lengths& lengths : spec.sequences) {
    if (lengths.q_len > 0) longest = std::max(longest, lengths.kv_len);
    most_queries = std::max(most_queries, lengths.q_len);
  }
  const std::int64_t first_key = chance(rng, 3) ? rng.below(longest) : 0;
  std::array<std::int64_t, 4> shape = {static_cast<std::int64_t>(spec.sequences.size()), spec.kv_heads * spec.group,
                                       most_queries + rng.below(2), longest - first_key + rng.below(9)};
  for (std::int64_t& n : shape) n = chance(rng, 3) ? 1 : n;
  if (shape[3] != 1 && shape[0] * shape[1] * shape[2] * shape[3] > 4'000'000) shape[1] = shape[0] = 1;
  const auto dtype = one_of<Dtype>(rng, {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean});
  // Keys of a run of 64 share their fate where runs are hidden, so that whole pages are skipped.
  const std::uint64_t salt = rng.next();
  const std::int64_t hidden_of_64 = one_of<std::int64_t>(rng, {0, 8, 40, 63});
  const bool by_runs = chance(rng, 2);
  OwnedMask mask = make_mask(dtype, shape, [&](auto b, auto h, auto q, auto k) {
    Rng draw(salt + static_cast<std::uint64_t>(((b * 131 + h) * 131 + q) * 65537 + (by_runs ? k / 64 : k)));
    const bool hidden = shape[3] > 1 && draw.below(64) < hidden_of_64;
    if (dtype == Dtype::boolean || hidden) return shown(dtype, !hidden);
    return static_cast<float>(draw.below(17) - 8) / 4;
  });
  mask.tensor.first_key = first_key;
  return mask;
}

std::string describe(const RandomCase& c) {
  const WorldSpec& s = c.spec;
  const AttentionOptions& o = c.options;
  std::string text = fmt::format(
      "{}/{}{} head_dim {}/{} kv_heads {} group {} sinks {} tails {} input {} exact {} window {}+{} {} seed {}", s.k,
      s.v, s.latent ? " latent" : "", s.head_dim, s.v_head_dim, s.kv_heads, s.group, s.sink_pages, s.tail_pages,
      dtype_name(s.input_dtype), s.exact ? dtype_name(*s.exact) : "-", s.window, s.window_sinks, inputs_name(s.inputs),
      s.seed);
  for (const Lengths& lengths : s.sequences) text += fmt::format(" {}x{}", lengths.kv_len, lengths.q_len);
  text += fmt::format(" chunks [{}] rewinds [{}]{}", fmt::join(s.chunks, " "), fmt::join(s.rewinds, " "),
                      s.forked ? " forked" : "");
  if (s.layers > 1) text += fmt::format(" layer {} of {}", s.layer, s.layers);
  text += fmt::format("{}{}", s.key_bases ? " key bases" : "", s.value_bases ? " value bases" : "");
  if (s.page_centres) text += " page centres";
  if (o.fresh_keys) text += " fresh keys";
  text += fmt::format("\n{} window {}+{} scale {} softcap {}{}{}", o.mask.is_causal ? "causal" : "bidirectional",
                      o.mask.window, o.mask.window_sinks, o.scale, o.softcap, o.alibi_slopes.empty() ? "" : " alibi",
                      c.sink_logits.empty() ? "" : " sink logits");
  if (const MaskTensor& m = o.mask.tensor; m.data != nullptr) {
    text += fmt::format(" mask {} [{}] from key {}", dtype_name(m.dtype), fmt::join(m.shape, " "), m.first_key);
  }
  return text;
}

}  // namespace

RandomCase draw_case(Rng& rng, const RandomChoices& choices) {
  RandomCase c;
  c.spec = draw_spec(rng, choices);
  AttentionOptions& o = c.options;
  const int q_heads = c.spec.kv_heads * c.spec.group;
  if (c.spec.window > 0) {
    o.mask = Mask::sliding(c.spec.window, c.spec.window_sinks);
  } else if (chance(rng, 4)) {
    o.mask = Mask::bidirectional();
  } else if (chance(rng, 3)) {
    o.mask = Mask::sliding(1 + rng.below(chance(rng, 2) ? 500 : 80), chance(rng, 2) ? rng.below(200) : 0);
  }
  if (o.mask.window > 0) o.mask.is_causal = !chance(rng, 3);
  if (chance(rng, 3)) {
    c.mask = draw_mask(rng, c.spec);
    o.mask.tensor = c.mask.tensor;
  }
  if (chance(rng, 4)) o.scale = (0.25 + rng.uniform()) / std::sqrt(static_cast<double>(c.spec.head_dim));
  if (chance(rng, 4)) o.softcap = 1 + 30 * rng.uniform();
  if (chance(rng, 4)) {
    for (int h = 0; h < q_heads; ++h) o.alibi_slopes.push_back(static_cast<float>(0.1 * rng.uniform()));
  }
  if (chance(rng, 4)) {
    for (int h = 0; h < q_heads; ++h) {
      c.sink_logits.push_back(chance(rng, 8) ? -INFINITY : static_cast<float>(2 * rng.gaussian()));
    }
  }
  const bool takes_centre = c.spec.k.starts_with("tq") || c.spec.k == "fp8";
  c.spec.page_centres = choices.page_centres && takes_centre && chance(rng, 2);
  o.fresh_keys = choices.fresh_keys && chance(rng, 2);
  c.description = describe(c);
  return c;
}

std::pair<std::uint64_t, std::uint64_t> random_seeds(int part, std::uint64_t count) {
  std::uint64_t first = 0;
  if (const char* given = std::getenv("KVANT_RANDOM_CASES")) {
    char* end = nullptr;
    first = std::strtoull(given, &end, 10);
    if (*end == ':') count = std::strtoull(end + 1, nullptr, 10);
  }
  return {first + static_cast<std::uint64_t>(part) * count, count};
}

void expect_host_matches(const RandomChoices& choices, int part) {
  const std::vector<std::string> isas = available_isas();
  const auto [first, count] = random_seeds(part, kAddressSanitizer ? 3 : 15);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, choices);
    c.options.isa = isas[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(isas.size())))];
    c.options.threads = static_cast<int>(1 + rng.below(3));
    c.options.split_keys = rng.below(3) == 0 ? kPageTokens * (1 + rng.below(4)) : 0;
    SCOPED_TRACE(fmt::format("seed {}, {}, {} threads, splits of {}\n{}", seed, c.options.isa, c.options.threads,
                             c.options.split_keys, c.description));
    EXPECT_TRUE(World(c.spec).kernel_matches(c.options, c.sink_logits, tolerance::kLseOfFewKeys));
  }
}

}  // namespace kvant::test
