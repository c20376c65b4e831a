// Fresh keys on a device: prefill kernels read them from tensors, with NaN around them, and older tokens from the
// cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/half.hpp"
#include "support/random_world.hpp"

namespace kvant::test {
namespace {

AttentionOptions fresh(AttentionOptions options = {}) {
  options.fresh_keys = true;
  return options;
}

// As a device takes them: in the dtype of exact rows.
WorldSpec spec_for_fresh(WorldSpec spec) {
  if (spec.k == "f16" || spec.k == "bf16") spec.input_dtype = spec.k == "f16" ? Dtype::f16 : Dtype::bf16;
  if (spec.input_dtype == Dtype::f32) spec.input_dtype = Dtype::bf16;
  spec.exact = spec.input_dtype;
  return spec;
}

class GpuFresh : public testing::TestWithParam<std::tuple<Formats, int>> {
 protected:
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences, int ends = 1) const {
    const auto& [formats, head_dim] = GetParam();
    WorldSpec s = spec_of(formats.k, formats.v, std::move(sequences));
    s.head_dim = head_dim;
    s.sink_pages = s.tail_pages = ends;
    return spec_for_fresh(s);
  }
};

TEST_P(GpuFresh, Matches) {
  SKIP_WITHOUT_DEVICE();
  for (const int ends : {1, 0}) {
    const GpuWorld w(spec({{1500, 1}, {257, 3}, {200, 130}, {64, 64}, {328, 64}, {420, 160}, {70, 69}, {90, 0}}, ends));
    EXPECT_TRUE(w.matches(fresh())) << ends << " exact ends";
    EXPECT_TRUE(w.matches(fresh({.mask = Mask::bidirectional()})));
    EXPECT_TRUE(w.matches(fresh({.mask = Mask::sliding(100, 70)})));
    EXPECT_TRUE(w.matches(fresh({.mask = Mask::sliding(250)})));
    Placement p{.q_dtype = Dtype::bf16, .out_dtype = Dtype::bf16, .token_padding = 24, .head_padding = 8, .offset = 8};
    EXPECT_TRUE(w.matches(fresh(), {}, p));
  }
}

TEST_P(GpuFresh, MasksAndTransforms) {
  SKIP_WITHOUT_DEVICE();
  for (const std::int64_t queries : {3, 140}) {
    const GpuWorld w(spec({{450, queries}, {queries + 30, queries}}));
    AttentionOptions options = fresh();
    options.softcap = 30;
    for (int h = 0; h < w.host.q_heads(); ++h) options.alibi_slopes.push_back(0.05f * static_cast<float>(h));
    EXPECT_TRUE(w.matches(options, std::vector<float>(static_cast<std::size_t>(w.host.q_heads()), 0.5f)));
    const OwnedMask hidden = make_mask(Dtype::boolean, {1, 1, queries, 450},
                                       [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0 && k / 64 != 2; });
    EXPECT_TRUE(w.matches(fresh(with_mask(hidden))));
    const OwnedMask added = make_mask(Dtype::f32, {2, 1, queries, 450}, [](auto b, auto, auto q, auto k) {
      return k / 64 == 6 ? 0.0f : (k + q + b) % 13 == 0 ? -INFINITY : static_cast<float>((k + q) % 5) / 4;
    });
    EXPECT_TRUE(w.matches(fresh(with_mask(added, Mask::causal()))));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFresh,
                         testing::Combine(testing::ValuesIn(kFormats), testing::Values(64, 96, 128, 192, 256, 512)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });

TEST(GpuFreshKeys, PageCentres) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : {64, 128}) {
    WorldSpec s = spec_of("tq6", "tq4", {{1500, 2}, {700, 300}, {130, 130}});
    s.head_dim = head_dim;
    s.page_centres = true;
    s.key_offset = 2;
    s.sink_pages = s.tail_pages = 1;
    EXPECT_TRUE(GpuWorld(spec_for_fresh(s)).matches(fresh()));
  }
}

// --- sequences that have no older tokens ----------------------------------------------------------------------------

// Queries in the dtype of keys, as the kernels for them take them.
class GpuFirstPrompts : public testing::TestWithParam<std::tuple<Dtype, int>> {
 protected:
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences, int group = 2) const {
    WorldSpec s = spec_of("tq6", "tq4", std::move(sequences));
    s.input_dtype = std::get<0>(GetParam());
    s.head_dim = std::get<1>(GetParam());
    s.group = group;
    return spec_for_fresh(s);
  }
  [[nodiscard]] static Placement placement(Dtype out = Dtype::f32) {
    return {.q_dtype = std::get<0>(GetParam()), .out_dtype = out};
  }
};

TEST_P(GpuFirstPrompts, Match) {
  SKIP_WITHOUT_DEVICE();
  // Beside sequences that have older tokens, which the other kernels serve in the same run.
  const GpuWorld w(spec({{300, 300}, {64, 64}, {1, 1}, {420, 200}, {257, 257}, {90, 0}, {130, 130}, {390, 390}}));
  EXPECT_TRUE(w.matches(fresh(), {}, placement()));
  EXPECT_TRUE(w.matches(fresh({.mask = Mask::bidirectional()}), {}, placement()));
  EXPECT_TRUE(w.matches(fresh({.mask = Mask::sliding(100, 70)}), {}, placement()));
  EXPECT_TRUE(w.matches(fresh({.mask = Mask::sliding(250)}), {}, placement()));
  EXPECT_TRUE(w.matches(fresh({.mask = Mask::bounded_below(90, 200)}), {}, placement()));
  const GpuWorld few(spec({{190, 190}, {64, 64}, {150, 20}}));
  for (const Dtype out : {Dtype::bf16, Dtype::f16}) EXPECT_TRUE(few.matches(fresh(), {}, placement(out)));
  for (const Dtype out : {Dtype::f32, Dtype::bf16}) {
    Placement apart = placement(out);
    apart.token_padding = 24, apart.head_padding = 8, apart.offset = 8;
    EXPECT_TRUE(few.matches(fresh(), {}, apart));
  }
}

TEST_P(GpuFirstPrompts, Groups) {
  SKIP_WITHOUT_DEVICE();
  for (const int group : {1, 3, 7, 16}) {
    const GpuWorld w(spec({{190, 190}, {333, 333}, {2, 2}}, group));
    EXPECT_TRUE(w.matches(fresh(), {}, placement())) << "group " << group;
    EXPECT_TRUE(w.matches(fresh({.mask = Mask::sliding(50, 3)}), {}, placement(Dtype::bf16))) << "group " << group;
  }
}

TEST_P(GpuFirstPrompts, Transforms) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec({{450, 450}, {70, 70}, {200, 20}}));
  const std::vector<float> sinks(static_cast<std::size_t>(w.host.q_heads()), 0.5f);
  AttentionOptions options = fresh();
  options.softcap = 3;
  EXPECT_TRUE(w.matches(options, sinks, placement()));
  for (int h = 0; h < w.host.q_heads(); ++h) options.alibi_slopes.push_back(0.05f * static_cast<float>(h));
  EXPECT_TRUE(w.matches(options, sinks, placement()));
  options.softcap = 0;
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(w.matches(options, {}, placement()));
  options.alibi_slopes.clear();
  options.scale = -0.05;
  EXPECT_TRUE(w.matches(options, sinks, placement()));
}

TEST_P(GpuFirstPrompts, TheSameBits) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  const GpuWorld w(spec({{900, 900}, {300, 300}, {301, 300}}));
  AttentionOptions options = fresh();
  for (const char* kernel : {"", "prefill_fresh"}) {
    options.kernel = kernel;
    const Attended once = w.try_attend(options, {}, placement()).value();
    EXPECT_NE(once.explain.find("kernel     prefill_fresh"), std::string::npos) << once.explain;
    for (int i = 0; i < 3; ++i) {
      const Attended again = w.try_attend(options, {}, placement()).value();
      EXPECT_TRUE(same_bits(once.out, again.out, w.host.out_shape()));
      EXPECT_TRUE(same_bits(once.lse, again.lse));
    }
  }
}

// Rows of the sequence that follows lie in the last tile of keys.
TEST_P(GpuFirstPrompts, OtherSequencesStayApart) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  GpuWorld w(spec({{150, 150}, {100, 100}, {70, 70}}));
  for (const Mask& mask : {Mask::causal(), Mask::bidirectional()}) {
    const AttentionOptions options = fresh({.mask = mask});
    const Attended before = w.try_attend(options, {}, placement()).value();
    const Qkv kept = w.host.qkv[1];
    for (std::size_t i = 0; i < kept.v.size(); ++i) {
      w.host.qkv[1].k[i] = i % 2 == 0 ? std::nanf("") : INFINITY;
      w.host.qkv[1].v[i] = i % 3 == 0 ? std::nanf("") : -INFINITY;
    }
    const Attended after = w.try_attend(options, {}, placement()).value();
    w.host.qkv[1] = kept;
    const auto apart = [&](std::vector<float> x, std::size_t width) {
      x.erase(x.begin() + static_cast<std::ptrdiff_t>(150 * width),
              x.begin() + static_cast<std::ptrdiff_t>(250 * width));
      return x;
    };
    const auto heads = static_cast<std::size_t>(w.host.q_heads()), dim = static_cast<std::size_t>(w.host.spec.head_dim);
    EXPECT_TRUE(same_bits(apart(before.out, heads * dim), apart(after.out, heads * dim)));
    EXPECT_TRUE(same_bits(apart(before.lse, heads), apart(after.lse, heads)));
    EXPECT_TRUE(std::isnan(after.lse[151 * heads]));
  }
}

TEST_P(GpuFirstPrompts, AQueryThatIsNotFinite) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  GpuWorld w(spec({{150, 150}, {70, 70}}));
  const auto heads = static_cast<std::size_t>(w.host.q_heads()), dim = static_cast<std::size_t>(w.host.spec.head_dim);
  for (const double softcap : {0.0, 5.0}) {
    AttentionOptions options = fresh({.mask = Mask::bidirectional()});
    options.softcap = softcap;
    const Attended before = w.try_attend(options, {}, placement()).value();
    const std::size_t row = 37 * heads + 1;
    float& element = w.host.qkv[0].q[row * dim + dim - 1];
    for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      const float kept = std::exchange(element, bad);
      Attended after = w.try_attend(options, {}, placement()).value();
      element = kept;
      EXPECT_TRUE(std::isnan(after.lse[row]));
      after.lse[row] = before.lse[row];
      for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
        EXPECT_TRUE(std::isnan(after.out[i])) << i;
        after.out[i] = before.out[i];
      }
      EXPECT_TRUE(same_bits(before.out, after.out, w.host.out_shape()));
      EXPECT_TRUE(same_bits(before.lse, after.lse));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFirstPrompts,
                         testing::Combine(testing::Values(Dtype::bf16, Dtype::f16),
                                          testing::Values(64, 80, 96, 128, 192, 256, 264, 504, 512)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", dtype_name(std::get<0>(i.param)), std::get<1>(i.param));
                         });

TEST(GpuFreshKeys, PrefillFreshRefuses) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  const GpuWorld w(spec_for_fresh(spec_of("tq6", "tq4", {{300, 300}})));
  const auto refusal = [&](AttentionOptions options, const Placement& p) {
    options.kernel = "prefill_fresh";
    const Result<Attended> got = w.try_attend(options, {}, p);
    EXPECT_EQ(got.code(), Code::unsupported);
    return got.ok() ? std::string() : got.message();
  };
  EXPECT_NE(refusal(fresh(), {}).find("q.dtype is not that of keys"), std::string::npos);
  EXPECT_NE(refusal(fresh(), {.q_dtype = Dtype::bf16, .head_padding = 4}).find("multiples of 16 bytes"),
            std::string::npos);
  EXPECT_NE(refusal({}, {.q_dtype = Dtype::bf16}).find("plans with fresh_keys have"), std::string::npos);
  const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, 300, 300}, [](auto, auto, auto q, auto k) { return k <= q; });
  EXPECT_NE(refusal(fresh(with_mask(mask)), {.q_dtype = Dtype::bf16}).find("no mask tensor"), std::string::npos);
  // Without the name other kernels serve all of these.
  EXPECT_TRUE(w.matches(fresh(), {}, {.q_dtype = Dtype::bf16, .head_padding = 4}));
  EXPECT_TRUE(w.matches(fresh(with_mask(mask)), {}, {.q_dtype = Dtype::bf16}));
}

class GpuFreshRandom : public testing::TestWithParam<int> {};

TEST_P(GpuFreshRandom, Matches) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = {64, 96, 128, 192, 256, 512};
  all.page_centres = true;
  all.most_queries = 200;
  for (const Formats& f : kFormats) all.formats.emplace_back(f.k, f.v);
  const auto [first, count] = random_seeds(GetParam(), 25);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, all);
    c.spec = spec_for_fresh(c.spec);
    Placement p;
    if (rng.below(3) == 0) p.token_padding = rng.below(40);
    if (rng.below(3) == 0) p.head_padding = rng.below(40);
    if (rng.below(2) == 0) {  // what kernels for first prompts take
      p.q_dtype = c.spec.input_dtype;
      p.token_padding = p.token_padding / 8 * 8, p.head_padding = p.head_padding / 8 * 8;
      for (Lengths& lengths : c.spec.sequences) {
        const bool is_first = rng.below(2) == 0 && c.options.mask.tensor.data == nullptr;
        if (is_first) lengths.q_len = lengths.kv_len;
      }
    }
    SCOPED_TRACE(fmt::format("seed {}, padding {} and {}\n{}", seed, p.token_padding, p.head_padding, c.description));
    const GpuWorld w(c.spec);
    EXPECT_TRUE(w.matches(fresh(c.options), c.sink_logits, p, tolerance::kCudaFreshLse));
    const Result<Attended> once = w.try_attend(fresh(c.options), c.sink_logits, p),
                           again = w.try_attend(fresh(c.options), c.sink_logits, p);
    if (!once) continue;
    EXPECT_TRUE(same_bits(once->out, again->out, w.host.out_shape()));
    EXPECT_TRUE(same_bits(once->lse, again->lse));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuFreshRandom, testing::Range(0, 6));

TEST(GpuFreshKeys, ThePlanSaysSo) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_for_fresh(spec_of("tq6", "tq4", {{300, 2}})));
  const Attended a = w.attend(fresh());
  EXPECT_NE(a.explain.find("fresh      keys and values"), std::string::npos) << a.explain;
  EXPECT_NE(a.explain.find("for fresh keys"), std::string::npos) << a.explain;
}

TEST(GpuFreshKeys, Refusals) {
  SKIP_WITHOUT_DEVICE();
  WorldSpec spec = spec_of("tq6", "tq4", {{300, 2}});
  spec.input_dtype = Dtype::f16;
  spec.exact = Dtype::bf16;  // fresh rows are f16 then
  const GpuWorld w(spec);
  const Result<Attended> other = w.try_attend(fresh());
  ASSERT_EQ(other.code(), Code::unsupported);
  EXPECT_NE(other.message().find("keys.dtype is f16"), std::string::npos) << other.message();
  AttentionOptions options = fresh();
  options.kernel = "decode";
  const Result<Attended> decode = w.try_attend(options);
  ASSERT_EQ(decode.code(), Code::unsupported);
  EXPECT_NE(decode.message().find("fresh_keys"), std::string::npos) << decode.message();
  options.kernel = "generic";
  const Result<Attended> generic = w.try_attend(options);
  ASSERT_EQ(generic.code(), Code::unsupported);
  EXPECT_NE(generic.message().find("leave fresh_keys unset"), std::string::npos) << generic.message();
  const Result<Attended> f32 = GpuWorld(spec_of("f32", "f32", {{300, 2}})).try_attend(fresh());
  ASSERT_EQ(f32.code(), Code::unsupported);
  EXPECT_NE(f32.message().find("k = f32 has no other kernel"), std::string::npos) << f32.message();
}

// A graph of reserve, write and run: its replays attend to what the tensors hold then, at the lengths then.
void graph_follows(bool is_first, Dtype q_dtype) {
  constexpr int kDim = 64, kStep = 140, kReplays = 5;
  WorldSpec spec = spec_for_fresh(spec_of("tq6", "tq4", {{100, 1}}));
  spec.head_dim = kDim;
  const GpuWorld w(spec);
  Cache& cache = const_cast<Cache&>(w.cache);
  const SequenceId id = is_first ? cache.add_sequence() : w.ids[0];
  const Qkv all =
      make_qkv({kStep * (kReplays + 1), kStep * (kReplays + 1), w.host.q_heads(), 2, kDim}, Inputs::gauss, 5);
  AttentionOptions o = w.host.options(fresh());
  o.q_lens = {kStep};
  if (is_first) o.kernel = "prefill_fresh";  // and not what takes the least time at each replay's lengths
  const std::size_t width = 2 * kDim, q_width = static_cast<std::size_t>(w.host.q_heads()) * kDim;
  const DeviceBuffer k(kStep * width * 2), v(kStep * width * 2), q(kStep * q_width * 4), out(kStep * q_width * 4);
  const auto put = [&](const DeviceBuffer& to, const std::vector<float>& from, std::size_t of_token, int step,
                       Dtype dtype) {
    const std::vector<std::byte> bytes =
        pack_as(dtype, std::span(from).subspan(static_cast<std::size_t>(step) * kStep * of_token, kStep * of_token));
    to.upload(bytes.data(), bytes.size());
  };
  const auto load = [&](int step) {
    put(k, all.k, width, step, Dtype::bf16);
    put(v, all.v, width, step, Dtype::bf16);
    put(q, all.q, q_width, step, q_dtype);
  };
  const TensorView keys = TensorView::contiguous(k.data(), Dtype::bf16, kStep, 2, kDim),
                   values = TensorView::contiguous(v.data(), Dtype::bf16, kStep, 2, kDim),
                   queries = TensorView::contiguous(q.data(), q_dtype, kStep, w.host.q_heads(), kDim);
  const auto at_once = [&] { return MutableTensorView::of(out.as<float>(), kStep, w.host.q_heads(), kDim); };
  const Append step{id, kStep}, ahead{id, kStep * (kReplays + 1)};
  cache.reserve_ahead({&ahead, 1}, w.stream.handle()).value();
  load(0);
  cache.reserve({&step, 1}, w.stream.handle()).value();
  cache.write({&id, 1}, 0, keys, values, w.stream.handle()).value();
  const Plan planned = plan(cache, {id}, o).value();
  EXPECT_EQ(planned.explain().find("kernel     prefill_fresh") != std::string::npos, is_first) << planned.explain();
  const DeviceBuffer workspace(planned.workspace_bytes());
  const RunOptions options{.stream = w.stream.handle(), .workspace = workspace.span()};
  run(planned, 0, queries, at_once(), options, keys, values).value();
  w.stream.wait();
  const TestGraph graph(w.stream, [&] {
    cache.reserve({&step, 1}, w.stream.handle()).value();
    cache.write({&id, 1}, 0, keys, values, w.stream.handle()).value();
    run(planned, 0, queries, at_once(), options, keys, values).value();
  });
  for (int replay = 1; replay <= kReplays; ++replay) {
    if (replay > 1) cache.advance({&step, 1}).value();
    load(replay);
    graph.launch(w.stream);
    w.stream.wait();
    const std::vector<float> got = out.download_as<float>();
    run(plan(cache, {id}, o).value(), 0, queries, at_once(), options, keys, values).value();
    w.stream.wait();
    EXPECT_TRUE(same_bits(out.download_as<float>(), got)) << "replay " << replay;
  }
}

TEST(GpuFreshKeys, AGraphFollowsLengthsAndTensors) {
  SKIP_WITHOUT_DEVICE();
  graph_follows(false, Dtype::f32);
}
// The plan is made of a first prompt, and replayed for the tokens that come next.
TEST(GpuFreshKeys, AGraphOfAFirstPromptGoesOn) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  graph_follows(true, Dtype::bf16);
}
TEST(GpuFreshKeys, AGraphOfFirstPrompts) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  constexpr int kDim = 128, kTokens = 300;
  WorldSpec spec = spec_for_fresh(spec_of("tq6", "tq4", {{kTokens, kTokens}}));
  spec.head_dim = kDim;
  GpuWorld w(spec);
  AttentionOptions o = w.host.options(fresh());
  o.kernel = "prefill_fresh";
  const Plan planned = plan(w.cache, {w.ids[0]}, o).value();
  const DeviceBuffer workspace(planned.workspace_bytes());
  const RunOptions options{.stream = w.stream.handle(), .workspace = workspace.span()};
  const int heads = w.host.q_heads();
  const DeviceBuffer q(static_cast<std::size_t>(kTokens * heads * kDim) * 2), k(kTokens * 2 * kDim * 2),
      v(kTokens * 2 * kDim * 2), out(static_cast<std::size_t>(kTokens * heads * kDim) * 4);
  const auto run_now = [&] {
    run(planned, 0, TensorView::contiguous(q.data(), Dtype::bf16, kTokens, heads, kDim),
        MutableTensorView::of(out.as<float>(), kTokens, heads, kDim), options,
        TensorView::contiguous(k.data(), Dtype::bf16, kTokens, 2, kDim),
        TensorView::contiguous(v.data(), Dtype::bf16, kTokens, 2, kDim))
        .value();
  };
  const TestGraph graph(w.stream, run_now);
  for (int replay = 0; replay < 3; ++replay) {
    const Qkv x = make_qkv({kTokens, kTokens, heads, 2, kDim}, Inputs::gauss, static_cast<std::uint64_t>(replay) + 7);
    for (const auto& [to, from] : {std::pair(&q, &x.q), std::pair(&k, &x.k), std::pair(&v, &x.v)}) {
      const std::vector<std::byte> bytes = pack_as(Dtype::bf16, std::span<const float>(*from));
      to->upload(bytes.data(), bytes.size());
    }
    graph.launch(w.stream);
    w.stream.wait();
    const std::vector<float> got = out.download_as<float>();
    std::vector<float> poison(got.size(), std::nanf(""));
    out.upload(poison.data(), poison.size() * sizeof(float));
    run_now();
    w.stream.wait();
    EXPECT_TRUE(same_bits(out.download_as<float>(), got)) << "replay " << replay;
    EXPECT_TRUE(std::isfinite(got[got.size() / 2]));
  }
}

}  // namespace
}  // namespace kvant::test
