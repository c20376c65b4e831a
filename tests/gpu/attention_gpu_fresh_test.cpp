// Fresh keys on a device: prefill kernels read them from tensors, with NaN around them, and older tokens from the
// cache.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
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
    const GpuWorld w(spec({{1500, 1}, {257, 3}, {200, 130}, {64, 64}, {328, 64}, {500, 300}, {70, 69}, {90, 0}}, ends));
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
    c.spec.page_centres = c.spec.page_centres && c.spec.tail_pages > 0;
    c.spec = spec_for_fresh(c.spec);
    Placement p;
    if (rng.below(3) == 0) p.token_padding = rng.below(40);
    if (rng.below(3) == 0) p.head_padding = rng.below(40);
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
TEST(GpuFreshKeys, AGraphFollowsLengthsAndTensors) {
  SKIP_WITHOUT_DEVICE();
  constexpr int kDim = 64, kStep = 40, kReplays = 5;
  WorldSpec spec = spec_for_fresh(spec_of("tq6", "tq4", {{100, 1}}));
  spec.head_dim = kDim;
  const GpuWorld w(spec);
  const SequenceId id = w.ids[0];
  const Qkv all =
      make_qkv({kStep * (kReplays + 1), kStep * (kReplays + 1), w.host.q_heads(), 2, kDim}, Inputs::gauss, 5);
  AttentionOptions o = w.host.options(fresh());
  o.q_lens = {kStep};
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
    put(q, all.q, q_width, step, Dtype::f32);
  };
  const TensorView keys = TensorView::contiguous(k.data(), Dtype::bf16, kStep, 2, kDim),
                   values = TensorView::contiguous(v.data(), Dtype::bf16, kStep, 2, kDim),
                   queries = TensorView::contiguous(q.data(), Dtype::f32, kStep, w.host.q_heads(), kDim);
  const auto at_once = [&] { return MutableTensorView::of(out.as<float>(), kStep, w.host.q_heads(), kDim); };
  Cache& cache = const_cast<Cache&>(w.cache);
  const Append step{id, kStep}, ahead{id, kStep * (kReplays + 1)};
  cache.reserve_ahead({&ahead, 1}, w.stream.handle()).value();
  load(0);
  cache.reserve({&step, 1}, w.stream.handle()).value();
  cache.write({&id, 1}, 0, keys, values, w.stream.handle()).value();
  const Plan planned = plan(cache, {id}, o).value();
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

}  // namespace
}  // namespace kvant::test
