// Centres of latents: where their bytes are; that they follow the rules of keys' centres, whatever becomes of pages;
// and what they gain. A latent cache's latents and the keys of another cache, of the same format and with the same
// rows, go through the same steps: both decode to the same bits.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "codec/centre.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/sanitized.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

constexpr int kRope = 32;
constexpr float kOffset = 2.5f;  // a channel that latents have in common

// --- bytes -----------------------------------------------------------------------------------------------------------

TEST(LatentCentreLayout, PutsTheCentreBeforeTheScalesOfLatents) {
  for (const Format rope : {Format::tq8, Format::fp8, Format::bf16}) {
    for (const Format latent : {Format::tq4, Format::tq6, Format::fp8}) {
      for (const int d : {32, 80, 512, 576}) {
        for (const bool keys : {false, true}) {
          if (keys && codec::is_dense(rope)) continue;
          const codec::HeadDims dims{32, d};
          const codec::PageLayout plain = codec::page_layout(rope, latent, dims, 1, keys),
                                  centred = codec::page_layout(rope, latent, dims, 1, keys, true);
          EXPECT_EQ(codec::is_centred(centred), keys);
          EXPECT_FALSE(codec::has_latent_centre(plain));
          ASSERT_TRUE(codec::has_latent_centre(centred));
          EXPECT_EQ(centred.k.scale_offset, plain.k.scale_offset);
          EXPECT_EQ(centred.v.plane_offset[0], plain.v.plane_offset[0]);
          const codec::SideLayout c = codec::latent_centre_layout(centred);
          EXPECT_EQ(c.head_dim, d);
          EXPECT_EQ(c.plane_offset[0], plain.v.scale_offset);  // where scales would be
          EXPECT_EQ(c.plane_offset[1], c.plane_offset[0] + static_cast<std::uint32_t>(d / 2));
          EXPECT_EQ(c.scale_offset, c.plane_offset[1] + static_cast<std::uint32_t>(d / 4));
          EXPECT_LE(c.scale_offset + 2, centred.v.scale_offset);
          EXPECT_LT(centred.v.scale_offset, c.scale_offset + 2 + 16);
          EXPECT_EQ(centred.v.scale_offset % 16, 0u);
          EXPECT_GE(centred.block_bytes, centred.v.scale_offset + static_cast<std::uint32_t>(128 * centred.v.groups));
          EXPECT_EQ(centred.scale_bytes - plain.scale_bytes, centred.v.scale_offset - plain.v.scale_offset);
        }
      }
    }
  }
}

// --- the rules -------------------------------------------------------------------------------------------------------

// Tokens' vectors: a constant, and noise; some are far from all others, and refuse a centre.
std::vector<float> rows_of(std::int64_t first, std::int64_t count, int dim) {
  std::vector<float> x;
  for (std::int64_t t = first; t < first + count; ++t) {
    std::mt19937_64 random(static_cast<std::uint64_t>(t) + 1);
    std::normal_distribution<float> noise;
    const float share = t % 5 == 0 ? 0.1f : 1.0f;
    for (int i = 0; i < dim; ++i) x.push_back(share * (i % 3 == 0 ? kOffset : -1.0f) + noise(random));
  }
  return x;
}

struct Trial {
  const char *name, *format;
  int dim, sinks, tails, window = 0;
  const char* rope = "tq8";
};

// The two caches, and their sequences.
struct Twins {
  explicit Twins(const Trial& t) : dim(t.dim) {
    CacheConfig c;
    c.layers = 1;
    c.sink_pages = t.sinks, c.tail_pages = t.tails, c.window = t.window;
    c.exact = Dtype::f32;
    c.k = t.rope, c.v = t.format;
    CacheConfig other = c;
    c.latent = t.dim, c.rope = kRope;
    other.kv_heads = 1, other.head_dim = t.dim, other.k = t.format;
    latents.emplace(Cache::create(c).value());
    keys.emplace(Cache::create(other).value());
    EXPECT_EQ(latents->config().v_centre, KeyCentre::page);
    EXPECT_EQ(keys->config().v_centre, KeyCentre::none);
    add(latents->add_sequence(), keys->add_sequence());
  }
  void add(SequenceId a, SequenceId b) {
    of_latents.push_back(a);
    of_keys.push_back(b);
    lengths.push_back(0);
  }
  void append(std::size_t which, std::int64_t count) {
    const std::int64_t first = next;
    next += count;
    const std::vector<float> rotary = rows_of(first, count, kRope), x = rows_of(first, count, dim);
    const TensorView rows = TensorView::of(x.data(), count, 1, dim);
    latents->append(of_latents[which], 0, TensorView::of(rotary.data(), count, 1, kRope), rows).value();
    keys->append(of_keys[which], 0, rows, rows).value();
    lengths[which] += count;
  }
  void fork(std::size_t which) {
    add(latents->fork(of_latents[which]).value(), keys->fork(of_keys[which]).value());
    lengths.back() = lengths[which];
  }
  void truncate(std::size_t which, std::int64_t tokens) {
    const Status a = latents->truncate(of_latents[which], tokens), b = keys->truncate(of_keys[which], tokens);
    ASSERT_EQ(a.ok(), b.ok());
    if (a.ok()) lengths[which] = tokens;
  }
  // Tokens whose latents refused their centres, of those that can be read; -1: latents and keys differ.
  int compare(std::size_t which) {
    const auto view = latents->impl().view(of_latents[which]).value();
    const std::int64_t begin = std::min(view.first_page * kPageTokens, lengths[which]), count = lengths[which] - begin;
    const auto n = static_cast<std::size_t>(count * dim);
    std::vector<float> a(n), b(n), read(n);
    const auto out = [&](std::vector<float>& x) { return MutableTensorView::of(x.data(), count, 1, dim); };
    const TokenRange a_range{of_latents[which], begin, lengths[which]}, b_range{of_keys[which], begin, lengths[which]};
    latents->decode({&a_range, 1}, 0, {}, out(a)).value();
    keys->decode({&b_range, 1}, 0, out(b), {}).value();
    latents->read(of_latents[which], 0, begin, lengths[which], {}, out(read)).value();
    int refused = 0;
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      if (view.pages[p].encoded < 0) continue;
      const codec::PageLayout& layout = latents->impl().layout(core::Pool::encoded);
      const std::byte* block = latents->impl().block(core::Pool::encoded, view.pages[p].encoded, 0, 0);
      for (int t = 0; t < kPageTokens; ++t) refused += codec::is_refused(layout.v, block, t) ? 1 : 0;
    }
    return n == 0 || (std::memcmp(a.data(), b.data(), 4 * n) == 0 && std::memcmp(read.data(), b.data(), 4 * n) == 0)
               ? refused
               : -1;
  }

  int dim;
  std::int64_t next = 0;
  std::optional<Cache> latents, keys;
  std::vector<SequenceId> of_latents, of_keys;
  std::vector<std::int64_t> lengths;
};

class LatentCentres : public testing::TestWithParam<Trial> {};

TEST_P(LatentCentres, AreThoseOfKeys) {
  Twins twins(GetParam());
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  int refused = 0;
  for (int step = 0; step < (kAddressSanitizer ? 60 : 150); ++step) {
    const std::size_t which = below(twins.lengths.size()), what = below(10);
    SCOPED_TRACE(fmt::format("step {}, sequence {} of {} tokens", step, which, twins.lengths[which]));
    const std::int64_t length = twins.lengths[which];
    if (what < 6 || length == 0) {
      const std::size_t most[] = {3, 64, 200};
      twins.append(which, static_cast<std::int64_t>(1 + below(most[what % 3])));
    } else if (what < 8) {
      twins.truncate(which, length - static_cast<std::int64_t>(below(static_cast<std::size_t>(length))) / 2);
    } else if (twins.lengths.size() < 6) {
      twins.fork(which);
    }
    const int found = twins.compare(which);
    ASSERT_GE(found, 0);
    refused += found;
  }
  EXPECT_GT(refused, 100);
}

constexpr Trial kTrials[] = {{"tq4", "tq4", 128, 1, 1},         {"in_place", "tq4", 512, 0, 0},
                             {"behind_sinks", "fp8", 64, 2, 0}, {"tails", "tq6", 256, 0, 1},
                             {"window", "tq3", 80, 0, 0, 100},  {"window_tail", "tq8", 40, 0, 1, 70},
                             {"padded", "fp8", 100, 0, 0},      {"tq5", "tq5", 96, 1, 0},
                             {"tq2_in_place", "tq2", 32, 0, 0}, {"beside_dense_keys", "tq4", 64, 0, 0, 0, "bf16"}};
INSTANTIATE_TEST_SUITE_P(, LatentCentres, testing::ValuesIn(kTrials),
                         [](const auto& each) { return std::string(each.param.name); });

// The same in an engine's blocks: without exact copies, with copies for all, and with one, so that a block without a
// copy begins behind one that has it.
TEST(LatentCentrePages, AreThoseOfKeys) {
  constexpr int kBlocks = 7, kDim = 64;
  for (const auto& [tail_pages, copies] : {std::pair{0, 0}, {1, 0}, {1, 1}}) {
    for (const char* format : {"tq4", "fp8"}) {
      SCOPED_TRACE(fmt::format("{} tail {} copies {}", format, tail_pages, copies));
      PagesConfig c, k;
      c.latent = kDim, c.rope = kRope, c.v = format, c.k = std::string(format) == "tq4" ? "bf16" : "tq8";
      k.kv_heads = 1, k.head_dim = kDim, k.k = k.v = format;
      for (PagesConfig* p : {&c, &k}) {
        p->tail_pages = tail_pages, p->tail_sequences = tail_pages, p->exact_copies = copies;
        p->exact = Dtype::f32, p->threads = 1;
      }
      const Pages latents = Pages::create(c).value(), keys = Pages::create(k).value();
      EnginePool a(latents, {.blocks = kBlocks}), b(keys, {.blocks = kBlocks});
      const std::vector<std::int32_t> table = {4, 1, 5, 2, 0, 6};
      std::vector<std::int64_t> slots;
      for (int t = 0; t < 384; ++t)
        slots.push_back(std::int64_t{table[static_cast<std::size_t>(t / 64)]} * 64 + t % 64);
      std::int64_t begin = 0;
      for (const int tokens : {1, 40, 30, 64, 1, 70, 130, 1, 40}) {
        EngineStep step;
        step.add(table, static_cast<std::int32_t>(begin + tokens), tokens);
        const std::vector<float> rotary = rows_of(begin, tokens, kRope), x = rows_of(begin, tokens, kDim);
        const TensorView rows = TensorView::of(x.data(), tokens, 1, kDim);
        latents.begin_step(step.tables(8)).value();
        keys.begin_step(step.tables(8)).value();
        latents.write(a.view, TensorView::of(rotary.data(), tokens, 1, kRope), rows, slots.data() + begin, tokens)
            .value();
        keys.write(b.view, rows, rows, slots.data() + begin, tokens).value();
        begin += tokens;
        const std::int64_t encoded = tail_pages == 0 ? (begin + 63) / 64 : begin / 64 - 1;  // blocks, at least
        if (encoded <= 0) continue;
        std::vector<float> of_latents(static_cast<std::size_t>(encoded * 64 * kDim)), of_keys = of_latents;
        latents
            .decode(a.view, table.data(), encoded, {}, MutableTensorView::of(of_latents.data(), encoded * 64, 1, kDim))
            .value();
        keys.decode(b.view, table.data(), encoded, MutableTensorView::of(of_keys.data(), encoded * 64, 1, kDim), {})
            .value();
        ASSERT_EQ(of_latents, of_keys) << begin;
      }
    }
  }
  PagesConfig c;
  c.latent = kDim, c.rope = kRope, c.k = "bf16", c.v = "tq4";
  const Pages pages = Pages::create(c).value();
  EnginePool pool(pages, {.blocks = 1});
  const std::vector<float> x = rows_of(0, 1, kDim);
  const std::int64_t slot = 0;
  EXPECT_TRUE(refuses(
      pages.write(pool.view, TensorView::of(x.data(), 1, 1, kRope), TensorView::of(x.data(), 1, 1, kDim), &slot, 1),
      Code::invalid_argument, {"latents have centres", "begin_step", "k_centre = none"}));
}

// --- attention -------------------------------------------------------------------------------------------------------

WorldSpec world_of(const char* latent, int dim, int heads, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.latent = true;
  spec.head_dim = kRope, spec.v_head_dim = dim;
  spec.kv_heads = 1, spec.group = heads;
  spec.k = "tq8", spec.v = latent;
  spec.page_centres = true;
  spec.value_offset = kOffset;
  spec.sequences = std::move(sequences);
  return spec;
}

// Latents that have much in common, with prompts, masks of a window and pages that are not full; in one step, and in
// small ones.
TEST(LatentCentreAttention, MatchTheReferenceOnEveryInstructionSet) {
  struct Shape {
    int dim, heads;
    std::vector<Lengths> sequences;
  };
  const Shape shapes[] = {{512, 16, {{200, 1}, {67, 2}}}, {128, 20, {{700, 4}}}, {80, 3, {{130, 40}}}};
  for (const char* format : {"tq4", "tq8", "fp8"}) {
    for (const Shape& shape : shapes) {
      WorldSpec spec = world_of(format, shape.dim, shape.heads, shape.sequences);
      if (shape.dim == 128) spec.chunks = {70, 1, 30};
      spec.sink_pages = spec.tail_pages = shape.dim == 80 ? 1 : 0;
      const World world(spec);
      ASSERT_EQ(world.cache.config().v_centre, KeyCentre::page);
      for (const std::string& isa : available_isas()) {
        SCOPED_TRACE(fmt::format("{} {} {}", format, shape.dim, isa));
        AttentionOptions options;
        options.isa = isa;
        EXPECT_TRUE(world.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
        options.mask.window = 75;
        options.split_keys = 128;
        EXPECT_TRUE(world.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
      }
    }
  }
}

double error_of(const World& world) {
  return difference(world.expect_true().out, world.attend().out).rel_l2;
}

TEST(LatentCentreAttention, MakeErrorsSmaller) {
  for (const char* format : {"tq4", "fp8"}) {
    WorldSpec spec = world_of(format, 128, 16, {{640, 1}});
    spec.sink_pages = spec.tail_pages = 0;
    const double with = error_of(World(spec));
    spec.adjust = [](CacheConfig& c) { c.v_centre = KeyCentre::none; };
    EXPECT_LT(1.5 * with, error_of(World(spec))) << format << ' ' << with;
  }
}

// --- what is chosen and refused --------------------------------------------------------------------------------------

TEST(LatentCentreOptions, FollowTheFormatAndTheKeys) {
  CacheConfig c;
  c.latent = 64, c.rope = kRope;
  const auto chosen = [&] {
    const Cache cache = Cache::create(c).value();
    EXPECT_EQ(Cache::create(cache.config()).value().config().v_centre, cache.config().v_centre);
    PagesConfig p;
    p.latent = c.latent, p.rope = c.rope, p.k = c.k, p.v = c.v, p.k_centre = c.k_centre, p.v_centre = c.v_centre;
    const std::int64_t bytes = cache.impl().layout(core::Pool::encoded).block_bytes;
    EXPECT_EQ(Pages::create(p).value().block_bytes(), (bytes + 63) / 64 * 64);
    return cache.config().v_centre;
  };
  EXPECT_EQ(chosen(), KeyCentre::page);
  EXPECT_NE(Cache::create(c).value().describe().find("centre: k page, v page; chosen: the default\n"),
            std::string::npos);
  c.k_centre = KeyCentre::none;
  EXPECT_EQ(chosen(), KeyCentre::none);
  c.v_centre = KeyCentre::page;
  EXPECT_EQ(chosen(), KeyCentre::page);
  EXPECT_NE(Cache::create(c).value().describe().find("centre: k none, v page\n"), std::string::npos);
  c.k_centre = KeyCentre::automatic, c.v_centre = KeyCentre::none;
  EXPECT_EQ(chosen(), KeyCentre::none);
  c.v_centre = KeyCentre::automatic, c.k = "bf16";
  EXPECT_EQ(chosen(), KeyCentre::page);
  c.k = "tq8", c.v = "bf16";
  EXPECT_EQ(chosen(), KeyCentre::none);

  const auto refused = [&](const CacheConfig& config) { return Cache::create(config).status().message(); };
  c.v_centre = KeyCentre::page;
  EXPECT_EQ(refused(c),
            "v_centre = page with v = bf16: dense latents are stored as given, and there is nothing to gain; use "
            "v_centre = none, or latents in a tq format or fp8");
  c.v_centre = static_cast<KeyCentre>(3);
  EXPECT_EQ(refused(c), "v_centre = 3: must be automatic, none or page");
  CacheConfig heads;
  heads.kv_heads = 1, heads.head_dim = 64, heads.v_centre = KeyCentre::page;
  EXPECT_EQ(refused(heads),
            "v_centre = page with latent = 0: values have no centres, but latents have, which are keys as well; use "
            "v_centre = none, or set latent");
}

}  // namespace
}  // namespace kvant::test
