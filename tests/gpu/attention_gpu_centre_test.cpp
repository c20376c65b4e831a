// Page-centred keys in attention on a device: a page's scores get q . c, in decode and in prefill kernels.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

// Without an offset more than half of the keys of a first page refuse its centre, which is the first key, and a few of
// the others.
WorldSpec centred(const Formats& formats, std::vector<Lengths> sequences, int head_dim, int sinks = 1, float offset = 2,
                  int tails = 1) {
  WorldSpec s = spec_of(formats.k, formats.v, std::move(sequences));
  s.head_dim = head_dim;
  s.sink_pages = sinks;
  s.tail_pages = tails;
  s.page_centres = true;
  s.key_offset = offset;  // a constant part, so that centres are far from zero
  return s;
}

class GpuCentres : public testing::TestWithParam<std::tuple<Formats, int>> {
 protected:
  [[nodiscard]] static bool takes_centres() {
    const std::string k = std::get<0>(GetParam()).k;
    return k.starts_with("tq") || k == "fp8";
  }
};

// More pages than sixteen for a team, few pages, and many rows; with and without exact ends, and keys that refuse.
TEST_P(GpuCentres, Matches) {
  SKIP_WITHOUT_DEVICE();
  if (!takes_centres()) GTEST_SKIP() << "keys without centres";
  const auto& [formats, head_dim] = GetParam();
  for (const float offset : {2.0f, 0.0f}) {
    for (const auto& [sinks, tails] : {std::pair{1, 1}, {0, 1}, {0, 0}}) {
      const GpuWorld w(centred(formats, {{1500, 1}, {257, 3}, {200, 130}, {65, 5}}, head_dim, sinks, offset, tails));
      EXPECT_TRUE(w.matches()) << sinks << " sink pages, " << tails << " tail pages, offset " << offset;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCentres,
                         testing::Combine(testing::ValuesIn(kFormats), testing::Values(64, 96, 128, 192, 256, 512)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });

// There are so many rows of work that a block has a whole one, and a team has more pages than its lanes hold at a time.
TEST(GpuCentred, MoreThan64PagesATeam) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kTimes = 80;
  for (const Formats& formats : {Formats{"tq6", "tq4"}, Formats{"fp8", "fp8"}}) {
    WorldSpec spec = centred(formats, {{21000, 1}}, 64);
    spec.kv_heads = 8;
    spec.group = 1;
    const GpuWorld world(spec);
    AttentionOptions o = world.options();
    o.q_lens.assign(kTimes, 1);
    const std::vector<SequenceId> ids(kTimes, world.ids[0]);
    const Plan planned = plan(world.cache, std::span<const SequenceId>(ids), o).value();
    const std::vector<float> q = world.host.queries();
    std::vector<float> all;
    for (std::int64_t i = 0; i < kTimes; ++i) all.insert(all.end(), q.begin(), q.end());
    const DeviceRows q_rows(all, Dtype::f32, kTimes, o.q_heads, 64);
    const DeviceBuffer out(all.size() * 4), workspace(planned.workspace_bytes());
    RunOptions options;
    options.stream = world.stream.handle();
    options.workspace = workspace.span();
    run(planned, 0, q_rows.view, MutableTensorView::of(out.as<float>(), kTimes, o.q_heads, 64), options).value();
    world.stream.wait();
    const std::vector<float> got = out.download_as<float>();
    const Expected expected = world.expect();
    for (std::int64_t i = 0; i < kTimes; ++i) {
      const auto one = std::span<const float>(got).subspan(static_cast<std::size_t>(i) * q.size(), q.size());
      ASSERT_TRUE(close(expected.out, one, world.tolerance(), world.host.out_shape())) << formats.k << ", copy " << i;
    }
  }
}

TEST(GpuCentred, MasksAndTransforms) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : {128, 256}) {
    for (const std::int64_t queries : {3, 140}) {
      const GpuWorld w(centred({"tq4", "tq4"}, {{700, queries}}, head_dim));
      AttentionOptions options;
      options.softcap = 30;
      for (int h = 0; h < w.host.q_heads(); ++h) options.alibi_slopes.push_back(0.05f * static_cast<float>(h));
      EXPECT_TRUE(w.matches(options, std::vector<float>(static_cast<std::size_t>(w.host.q_heads()), 0.5f)));
      for (const auto& [window, sinks] : {std::pair{100, 0}, {64, 4}, {300, 70}}) {
        AttentionOptions sliding;
        sliding.mask = Mask::sliding(window, sinks);
        EXPECT_TRUE(w.matches(sliding)) << "window " << window << ", sinks " << sinks;
      }
      const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, queries, 700},
                                       [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0 && k / 64 != 2; });
      EXPECT_TRUE(w.matches(with_mask(mask)));
    }
  }
}

// Keys of a model with a key bias: a constant part many times as long as the rest. The rounding of a query times a long
// key gives more than other errors of kernels, and stays far below those of the formats, which are 3e-2 and more here.
// Queries have 16 bits in products of decode kernels. Those of prefill_sm90 have 22 bits with centres, and those of
// prefill_sm80 have 11. Both take queries for exact pages in the dtype of these, so f32 queries are rounded there.
TEST(GpuCentred, AKeyBias) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& formats : {Formats{"tq6", "tq4"}, Formats{"tq4", "tq4"}}) {
    for (const float offset : {10.0f, 80.0f}) {
      WorldSpec s = centred(formats, {{2048, 1}, {2048, 140}}, 128);
      s.exact = Dtype::f16;
      s.input_dtype = Dtype::f16;
      s.key_offset = offset;
      const GpuWorld w(s);
      const std::tuple<const char*, Dtype, double> cases[] = {{core::kDecodeKernels, Dtype::f32, 3e-3},
                                                              {core::kDecodeSm90, Dtype::f32, 3e-3},
                                                              {core::kPrefillSm90, Dtype::f16, 3e-3},
                                                              {core::kPrefillSm90, Dtype::f32, 1e-2},
                                                              {core::kPrefillSm80, Dtype::f32, 1e-2}};
      for (const auto& [kernel, dtype, bound] : cases) {
        AttentionOptions options;
        options.kernel = kernel;
        const Result<Attended> got = w.try_attend(options, {}, {.q_dtype = dtype});
        if (!got && got.code() == Code::unsupported) continue;  // no such kernels for this device
        ASSERT_TRUE(got) << got.message();
        const Expected expected = w.expect(options, {}, dtype);
        EXPECT_TRUE(close(expected.out, got->out, bound, w.host.out_shape()))
            << kernel << " with queries in " << dtype_name(dtype) << ", " << offset;
      }
    }
  }
}

TEST(GpuShort, Centred) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& formats : {Formats{"tq6", "tq4"}, Formats{"fp8", "fp8"}}) {
    const GpuWorld w(centred(formats, {{400, 1}, {300, 70}}, 64));
    EXPECT_TRUE(w.matches());
  }
}

}  // namespace
}  // namespace kvant::test
