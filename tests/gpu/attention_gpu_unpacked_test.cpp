// Unpacked keys on a device (prefill_unpacked): pages are unpacked once to a workspace, a round of sequences and kv
// heads at a time, and kernels of dense keys attend to the workspace, which is full of NaN before.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/half.hpp"

namespace kvant::test {
namespace {

class GpuUnpacked : public testing::TestWithParam<std::tuple<Formats, int>> {
 protected:
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences, int ends, Dtype dtype) const {
    const auto& [formats, width] = GetParam();
    WorldSpec s = spec_of(formats.k, formats.v, std::move(sequences));
    set_width(s, width);
    s.sink_pages = s.tail_pages = ends;
    s.input_dtype = s.k == "f16" || s.k == "bf16" ? (s.k == "f16" ? Dtype::f16 : Dtype::bf16) : dtype;
    s.exact = s.input_dtype;
    return s;
  }
  [[nodiscard]] static AttentionOptions unpacked(AttentionOptions options = {}) {
    options.kernel = "prefill_unpacked";
    return options;
  }
};

// Queries of either dtype, whatever that of exact pages is.
TEST_P(GpuUnpacked, Matches) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const auto& [ends, exact, q_dtype] :
       {std::tuple(1, Dtype::bf16, Dtype::bf16), {0, Dtype::f16, Dtype::bf16}, {2, Dtype::bf16, Dtype::f16}}) {
    SCOPED_TRACE(fmt::format("{} exact ends", ends));
    const GpuWorld w(spec(prefill_lengths(), ends, exact));
    expect_prefill(w, unpacked(),
                   {.q_dtype = q_dtype, .out_dtype = q_dtype, .token_padding = 24, .head_padding = 8, .offset = 8});
  }
}

TEST_P(GpuUnpacked, Windows) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  const GpuWorld w(spec({{1500, 40}, {900, 300}, {400, 399}, {130, 2}}, 1, Dtype::bf16));
  expect_prefill_windows(w, unpacked());
}

TEST_P(GpuUnpacked, Transforms) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  const GpuWorld w(spec({{450, 45}, {700, 300}}, 1, Dtype::bf16));
  expect_prefill_transforms(w, unpacked());
}

INSTANTIATE_TEST_SUITE_P(All, GpuUnpacked,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::Values(64, 96, 128, 192, 256, 512, 192128)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });

TEST(GpuUnpackedKeys, ShortPageCentresAndPadding) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const int head_dim : {64, 80, 112, 128, 256, 320, 512, 192128}) {
    WorldSpec s = spec_of("tq6", "tq4", {{1500, 2}, {700, 300}, {130, 130}});
    set_width(s, head_dim);
    s.page_centres = true;
    s.key_offset = 2;
    s.sink_pages = s.tail_pages = 1;
    s.input_dtype = Dtype::bf16;
    s.exact = Dtype::bf16;
    const GpuWorld w(s);
    AttentionOptions options;
    options.kernel = "prefill_unpacked";
    EXPECT_TRUE(w.matches(options, {}, {.q_dtype = Dtype::bf16})) << head_dim;
    options.mask = Mask::sliding(200, 3);
    EXPECT_TRUE(w.matches(options, {}, {.q_dtype = Dtype::bf16})) << head_dim;
  }
}

TEST(GpuUnpackedKeys, TheSameBitsAndWhatThePlanSays) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  WorldSpec s = spec_of("tq6", "tq4", {{900, 300}, {3000, 700}, {301, 300}});
  s.head_dim = 128;
  s.input_dtype = Dtype::bf16;
  s.exact = Dtype::bf16;
  const GpuWorld w(s);
  AttentionOptions options;
  options.kernel = "prefill_unpacked";
  const Attended once = w.try_attend(options, {}, {.q_dtype = Dtype::bf16}).value();
  EXPECT_NE(once.explain.find("kernel     prefill_unpacked tq6/tq4"), std::string::npos) << once.explain;
  EXPECT_NE(once.explain.find("kernel     prefill_sm90 tq6/tq4"), std::string::npos) << once.explain;
  for (int i = 0; i < 3; ++i) {
    const Attended again = w.try_attend(options, {}, {.q_dtype = Dtype::bf16}).value();
    EXPECT_TRUE(same_bits(once.out, again.out, w.host.out_shape()));
    EXPECT_TRUE(same_bits(once.lse, again.lse));
  }
  const Result<Attended> of_f32 = w.try_attend(options, {}, {.q_dtype = Dtype::f32});
  ASSERT_FALSE(of_f32);
  EXPECT_EQ(of_f32.code(), Code::unsupported);
  EXPECT_NE(of_f32.message().find("q.dtype is neither bf16 nor f16"), std::string::npos) << of_f32.message();
  const Result<Attended> apart = w.try_attend(options, {}, {.q_dtype = Dtype::bf16, .offset = 1});
  ASSERT_FALSE(apart);
  EXPECT_NE(apart.message().find("multiples of 16 bytes"), std::string::npos) << apart.message();
}

// Rounds that have no room for all heads: decode kernels attend to what is left, whole sequences and some heads alike.
TEST(GpuUnpackedKeys, DecodeKernelsTakeWhatIsLeftOfUnequalWidths) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const int width : kUnequalWidths) {
    WorldSpec s = spec_of("tq4", "tq4", {{2000, 1}, {700, 300}, {333, 5}, {130, 130}, {64, 0}, {500, 60}});
    set_width(s, width);
    s.input_dtype = Dtype::bf16;
    s.exact = Dtype::bf16;
    const GpuWorld w(s);
    AttentionOptions options;
    options.kernel = "prefill";  // rounds for sequences of many rows alone
    const Attended got = w.try_attend(options, {}, {.q_dtype = Dtype::bf16}).value();
    EXPECT_NE(got.explain.find("kernel     prefill_unpacked tq4/tq4"), std::string::npos) << got.explain;
    EXPECT_NE(got.explain.find("the sequences that are left"), std::string::npos) << got.explain;
    EXPECT_TRUE(w.matches(options, {}, {.q_dtype = Dtype::bf16}));
    EXPECT_TRUE(w.matches(options, {}, {.q_dtype = Dtype::f32}));  // nothing is in a round
    options.mask = Mask::sliding(100, 3);
    EXPECT_TRUE(w.matches(options, {}, {.q_dtype = Dtype::bf16}));
  }
}

// A vector that is not a number makes those rows NaN that see it, and no others.
TEST(GpuUnpackedKeys, AVectorThatIsNotFinite) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const bool is_value : {false, true}) {
    WorldSpec s = spec_of("tq4", "tq4", {{700, 300}});
    s.head_dim = 64;
    GpuWorld w(s);
    const auto row = static_cast<std::size_t>(w.host.spec.kv_heads * 64);
    Qkv spoiled = w.host.qkv[0];
    (is_value ? spoiled.v : spoiled.k)[500 * row] = std::nanf("");
    const SequenceId id = w.cache.add_sequence();
    append_on_device(w.cache, id, spoiled, 0, 700, Dtype::f32, w.stream);
    w.ids[0] = id;
    AttentionOptions options;
    options.kernel = "prefill_unpacked";
    const Attended got = w.try_attend(options, {}, {.q_dtype = Dtype::bf16}).value();
    const auto heads = static_cast<std::size_t>(w.host.q_heads());
    EXPECT_FALSE(std::isnan(got.lse[99 * heads]));  // at position 499
    EXPECT_FALSE(std::isnan(got.out[99 * heads * 64]));
    EXPECT_TRUE(std::isnan(got.out[100 * heads * 64]));
  }
}

// More keys than a workspace takes at once: rounds, the last of which has fewer heads.
TEST(GpuUnpackedKeys, ManyRounds) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  constexpr int kDim = 256, kKvHeads = 3, kGroup = 2, kQueries = 70, kTokens = 140000, kPiece = 20000;
  WorldSpec s = spec_of("tq4", "tq4", {});
  s.head_dim = kDim;
  CacheConfig config = device_config(s);
  config.kv_heads = kKvHeads;
  config.capacity_tokens = kTokens + 64;
  Cache cache = Cache::create(config).value();
  const TestStream stream;
  const std::vector<SequenceId> ids = {cache.add_sequence()};
  const Qkv x = make_qkv({kQueries, kPiece, kKvHeads * kGroup, kKvHeads, kDim}, Inputs::gauss, 5);
  for (int i = 0; i < kTokens / kPiece; ++i) append_on_device(cache, ids[0], x, 0, kPiece, Dtype::f32, stream);
  const DeviceRows q(x.q, Dtype::bf16, kQueries, kKvHeads * kGroup, kDim);
  const std::size_t count = std::size_t{kQueries} * kKvHeads * kGroup * kDim;
  std::vector<std::vector<float>> outs;
  for (const char* kernel : {"decode", "prefill_unpacked"}) {
    AttentionOptions options;
    options.q_heads = kKvHeads * kGroup;
    options.q_lens = {kQueries};
    options.kernel = kernel;
    const Plan planned = plan(cache, std::span<const SequenceId>(ids), options).value();
    if (kernel == std::string("prefill_unpacked")) {
      EXPECT_NE(planned.explain().find("rounds     3"), std::string::npos) << planned.explain();
    }
    const DeviceBuffer out(count * 4), workspace(planned.workspace_bytes());
    RunOptions run_options;
    run_options.stream = stream.handle();
    run_options.workspace = workspace.span();
    run(planned, 0, q.view, MutableTensorView::of(out.as<float>(), kQueries, kKvHeads * kGroup, kDim), run_options)
        .value();
    outs.push_back(out.download_as<float>());
  }
  EXPECT_TRUE(
      close(std::span<const float>(outs[0]), outs[1], tolerance::kCudaPrefill, {kQueries, kKvHeads * kGroup, kDim}));
}

}  // namespace
}  // namespace kvant::test
