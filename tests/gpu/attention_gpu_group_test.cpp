// Several queries a sequence with kernels that round weights to halves: decode_sm80 (decode/weights.cuh), and
// decode_sm90, whose blocks are warpgroups (decode/group.cuh). `matches` compares these, asked for by name, with
// the float64 reference, beside the other kinds.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

WorldSpec spec_for(const std::string& keys, int head_dim, int group, std::vector<Lengths> sequences) {
  WorldSpec spec = spec_of(keys, keys == "tq8" ? "tq8" : "tq4", std::move(sequences));
  spec.head_dim = head_dim;
  spec.group = group;
  return spec;
}
bool has_kernels(const GpuWorld& w) {
  AttentionOptions options;
  options.kernel = core::kDecodeSm80;
  return w.try_attend(options).ok();
}
#define SKIP_WITHOUT_KERNELS(w) \
  if (!has_kernels(w)) GTEST_SKIP() << "a build without kernels for several queries of these formats"

// Rows of a sequence and kv head: fewer than a block's, as many, and more than the largest's; ragged.
class GpuGroup : public testing::TestWithParam<std::tuple<int, std::string, std::int64_t>> {};

TEST_P(GpuGroup, Matches) {
  SKIP_WITHOUT_DEVICE();
  const auto& [head_dim, keys, queries] = GetParam();
  for (const auto& [sinks, tails] : {std::pair{1, 1}, {0, 0}, {2, 0}, {0, 3}}) {
    WorldSpec spec = spec_for(keys, head_dim, 4, {{1349, queries}, {70, 1}, {queries, queries}, {333, 2}});
    spec.sink_pages = sinks;
    spec.tail_pages = tails;
    spec.exact = sinks == 2 ? Dtype::f16 : Dtype::bf16;
    spec.page_centres = tails > 0 && sinks != 1;
    spec.key_offset = spec.page_centres ? 2.0f : 0.0f;
    const GpuWorld w(spec);
    SKIP_WITHOUT_KERNELS(w);
    EXPECT_TRUE(w.matches()) << sinks << " and " << tails << " exact pages";
  }
}

TEST_P(GpuGroup, MasksAndTransforms) {
  SKIP_WITHOUT_DEVICE();
  const auto& [head_dim, keys, queries] = GetParam();
  const GpuWorld w(spec_for(keys, head_dim, 4, {{700, queries}, {queries, queries}, {queries + 130, queries}}));
  SKIP_WITHOUT_KERNELS(w);
  expect_masks_and_transforms(w);
}

INSTANTIATE_TEST_SUITE_P(Rows, GpuGroup,
                         testing::Combine(testing::Values(128, 256), testing::Values("tq6", "tq4", "tq8"),
                                          testing::Values(1, 3, 4, 5, 8, 13, 16, 20)),
                         [](const auto& i) {
                           return fmt::format("d{}_{}_q{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param));
                         });

// Magnitudes of keys and values over decades: references and units of value scales move, again and again.
TEST(GpuGroupNumbers, OddInputs) {
  SKIP_WITHOUT_DEVICE();
  for (const char* keys : {"tq6", "tq4"}) {
    for (const Inputs inputs :
         {Inputs::loud, Inputs::kurtosis70, Inputs::log_normal, Inputs::near_tied, Inputs::sink}) {
      for (const int ends : {0, 1}) {
        WorldSpec spec = spec_for(keys, 128, 4, {{1500, 16}, {700, 8}, {64, 1}});
        spec.inputs = inputs;
        spec.sink_pages = spec.tail_pages = ends;
        spec.page_centres = ends == 0;
        const GpuWorld w(spec);
        SKIP_WITHOUT_KERNELS(w);
        AttentionOptions options;
        options.kernel = core::kDecodeSm90;
        const Result<Attended> got = w.try_attend(options);
        if (!got.ok()) GTEST_SKIP() << got.message();
        EXPECT_TRUE(close(w.expect(options).out, got->out, tolerance::kCudaPrefill, w.host.out_shape()))
            << inputs_name(inputs) << ", exact ends " << ends << "\n"
            << got->explain;
      }
    }
  }
}

// A value that is not finite spoils the rows that see its key, and no others.
TEST(GpuGroupNumbers, AValueThatIsNotFinite) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kQueries = 16;
  for (const float bad : {NAN, INFINITY}) {
    const std::int64_t length = 700, first = length - kQueries, from = first + 3;  // seen from query 3 on
    WorldSpec spec = spec_for("tq4", 128, 4, {{length, kQueries}});
    spec.sink_pages = spec.tail_pages = 0;
    GpuWorld w(spec);
    SKIP_WITHOUT_KERNELS(w);
    AttentionOptions options;
    options.kernel = core::kDecodeSm90;
    const Result<Attended> before = w.try_attend(options);
    if (!before.ok()) GTEST_SKIP() << before.message();
    const Qkv& x = w.host.qkv[0];
    const std::size_t token = static_cast<std::size_t>(w.host.spec.kv_heads) * 128;
    Qkv again = x;
    again.k.assign(x.k.begin() + static_cast<std::ptrdiff_t>(token) * first, x.k.end());
    again.v.assign(x.v.begin() + static_cast<std::ptrdiff_t>(token) * first, x.v.end());
    again.v[3 * token + 5] = bad;
    w.cache.truncate(w.ids[0], first).value();
    append_on_device(w.cache, w.ids[0], again, 0, kQueries, Dtype::f32, w.stream);
    (void)w.cache.take_non_finite(w.stream.handle()).value();
    const Attended after = w.try_attend(options).value();
    const std::size_t row = static_cast<std::size_t>(w.host.q_heads()) * 128;
    for (std::size_t i = 0; i < after.out.size(); ++i) {
      const bool sees = first + static_cast<std::int64_t>(i / row) >= from, own = i % row / 128 < 4;  // kv head 0
      if (sees && own) {
        ASSERT_TRUE(std::isnan(after.out[i])) << i;
      } else {
        ASSERT_NEAR(after.out[i], before->out[i], 1e-3f) << i;
      }
    }
  }
}

// A block has a whole row of work, of more pages than its lanes hold at a time, in several groups of
// centres.
TEST(GpuGroupLong, ManyPagesABlock) {
  SKIP_WITHOUT_DEVICE();
  for (const bool centres : {false, true}) {
    WorldSpec spec = spec_for("tq6", 128, 2, {{9000, 6}, {8100, 5}});
    spec.kv_heads = 8;
    spec.page_centres = centres;
    spec.key_offset = centres ? 2.0f : 0.0f;
    const GpuWorld w(spec);
    SKIP_WITHOUT_KERNELS(w);
    EXPECT_TRUE(w.matches());
    for (const char* kind : {core::kDecodeSm80, core::kDecodeSm90}) {
      AttentionOptions options;
      options.kernel = kind;
      if (!w.try_attend(options).ok()) continue;  // another device
      const Attended first = w.attend(options), second = w.attend(options);
      EXPECT_EQ(first.out, second.out) << "the same call gives the same bits";
      EXPECT_EQ(first.lse, second.lse);
    }
  }
}

}  // namespace
}  // namespace kvant::test
