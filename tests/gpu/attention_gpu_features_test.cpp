// Masks and logit transforms on a device.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

// --- masks -----------------------------------------------------------------------------------------------------------

class GpuPositions : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] GpuWorld world() const {
    const auto& [format, q_len] = GetParam();
    return GpuWorld(spec_of(format, {{330, q_len}, {q_len, q_len}}));
  }
};

TEST_P(GpuPositions, Bidirectional) {
  SKIP_WITHOUT_DEVICE();
  AttentionOptions options;
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(world().matches(options));
}

TEST_P(GpuPositions, SlidingWindow) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const std::int64_t window : {1, 2, 31, 63, 64, 65, 100, 128, 329, 330, 331, 100000}) {
    AttentionOptions options;
    options.mask = Mask::sliding(window);
    EXPECT_TRUE(w.matches(options)) << "window " << window;
  }
}

TEST_P(GpuPositions, SlidingWindowWithSinks) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const std::int64_t window : {1, 64, 90, 300}) {
    for (const std::int64_t sinks : {1, 4, 63, 64, 65, 130, 1000}) {
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      EXPECT_TRUE(w.matches(options)) << "window " << window << ", sinks " << sinks;
    }
  }
}

TEST_P(GpuPositions, WindowWithoutCausality) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const std::int64_t window : {1, 64, 90, 300, 100000}) {
    for (const std::int64_t sinks : {0, 4, 65, 1000}) {
      AttentionOptions options;
      options.mask = Mask::bounded_below(window, sinks);
      EXPECT_TRUE(w.matches(options)) << "window " << window << ", sinks " << sinks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, GpuPositions,
                         testing::Combine(testing::Values("bf16", "fp8", "tq4", "tq6"), testing::Values(1, 5, 16)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

TEST(GpuWindowedCache, ReleasedPagesGiveTheSameAsAWindowOverAll) {
  SKIP_WITHOUT_DEVICE();
  for (const std::int64_t sinks : {0, 4, 70}) {
    for (const std::int64_t window : {1, 64, 100}) {
      WorldSpec spec = spec_of("tq6", {{500, 1}, {130, 1}});
      spec.window = window;
      spec.window_sinks = sinks;
      spec.chunks = {1, 40, 3};
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      EXPECT_TRUE(GpuWorld(spec).matches(options)) << window << " " << sinks;
    }
  }
}

/// A deterministic bias in [-2, 2], different in each coordinate, exact in f16 and bf16; some keys are out of sight.
float bias(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t k) {
  const std::int64_t n = b * 7 + h * 5 + q * 3 + k;
  return n % 13 == 0 ? -kInf : static_cast<float>(n % 17 - 8) / 4;
}

class GpuMaskTensors : public testing::TestWithParam<std::tuple<std::string, Dtype>> {};

TEST_P(GpuMaskTensors, AnyBroadcast) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{300, 5}, {150, 5}}));
  for (const std::array<std::int64_t, 4>& shape : {std::array<std::int64_t, 4>{2, 4, 5, 300},
                                                   {1, 4, 5, 300},
                                                   {2, 1, 5, 300},
                                                   {2, 4, 1, 300},
                                                   {1, 1, 5, 300},
                                                   {1, 1, 1, 300},
                                                   {2, 4, 5, 1},
                                                   {2, 1, 1, 310},
                                                   {1, 1, 1, 1}}) {
    // With one key for all, -inf would hide whole rows; that is a case of its own below.
    const OwnedMask mask = make_mask(dtype, shape, [&](auto b, auto h, auto q, auto k) {
      const float x = bias(b, h, q, k);
      return dtype == Dtype::boolean ? (std::isinf(x) && shape[3] > 1 ? 0.0f : 1.0f) : shape[3] > 1 ? x : x > 0 ? x : 0;
    });
    const std::string what = fmt::format("{} {} {} {}", shape[0], shape[1], shape[2], shape[3]);
    EXPECT_TRUE(w.matches(with_mask(mask))) << what;
    EXPECT_TRUE(w.matches(with_mask(mask, Mask::causal()))) << what;
    EXPECT_TRUE(w.matches(with_mask(mask, Mask::sliding(100, 3)))) << what;
  }
}

TEST_P(GpuMaskTensors, StridesOfTheirOwn) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{200, 3}, {70, 3}}));
  OwnedMask mask = make_mask(dtype, {2, 4, 6, 201}, [](auto b, auto h, auto q, auto k) {
    return bias(b, h, q, k);  // boolean: -inf is not zero, so all is visible but where a bias is 0
  });
  mask.tensor.shape = {2, 4, 3, 200};
  mask.tensor.stride[2] *= 2;  // every other query row, in rows of odd length
  EXPECT_TRUE(w.matches(with_mask(mask)));
  mask.tensor.stride = {201 * 6 * 4, 201 * 6, 0, 1};  // a stride of 0 in a dimension that is not 1
  EXPECT_TRUE(w.matches(with_mask(mask)));
}

TEST_P(GpuMaskTensors, RowsThatSeeNothing) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{1200, 4}, {100, 4}}));
  const OwnedMask mask = make_mask(dtype, {2, 1, 4, 1200}, [&](auto b, auto, auto q, auto k) {
    const bool visible = q == 1 ? k >= 700 && b == 0 : q == 2 ? k == 64 : q == 3 ? k / 64 % 3 == 1 : false;
    return shown(dtype, visible);
  });
  const AttentionOptions options = with_mask(mask);
  EXPECT_TRUE(w.matches(options));
  const Attended got = w.attend(options);
  for (std::size_t i = 0; i < 4 * 64; ++i) ASSERT_EQ(got.out[i], 0.0f) << i;  // the first query's rows
  EXPECT_EQ(got.lse[0], -kInf);
  EXPECT_TRUE(w.matches(options, {0.5f, -kInf, 1.0f, -2.0f}));  // a sink gives an empty row an lse, and still no output
}

// Pages of 64 keys that the mask hides from all, shows to all, and shows in part, in another order for each sequence
// and head.
TEST_P(GpuMaskTensors, WholePages) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{1200, 4}, {700, 4}}));
  for (const std::array<std::int64_t, 4>& shape : {std::array<std::int64_t, 4>{2, 4, 4, 1200},
                                                   {1, 4, 4, 1200},
                                                   {2, 1, 4, 1200},
                                                   {2, 4, 1, 1200},
                                                   {1, 1, 1, 1230}}) {
    const OwnedMask mask = make_mask(dtype, shape, [&](auto b, auto h, auto q, auto k) {
      const std::int64_t kind = (k / 64 + h + 2 * b) % 4;
      const bool visible = kind == 0 || (kind == 1 && k % 3 != 0) || (kind == 2 && q % 2 == 1);
      return shown(dtype, visible);
    });
    const std::string what = fmt::format("{} {} {} {}", shape[0], shape[1], shape[2], shape[3]);
    EXPECT_TRUE(w.matches(with_mask(mask))) << what;
    AttentionOptions options = with_mask(mask, Mask::sliding(500, 70));
    options.softcap = 20;
    EXPECT_TRUE(w.matches(options)) << what;
  }
}

TEST_P(GpuMaskTensors, MayChangeBetweenRuns) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{400, 2}, {150, 2}}));
  const auto mask_of = [&](std::int64_t hidden) {
    return make_mask(dtype, {1, 1, 2, 400}, [&](auto, auto, auto, auto k) {
      const bool visible = k / 64 != hidden;
      return shown(dtype, visible);
    });
  };
  AttentionOptions options = w.options(with_mask(mask_of(0)));
  const DeviceBuffer memory(mask_of(0).bytes.size());
  options.mask.tensor.data = memory.data();
  const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), options).value();
  const DeviceRows q(w.host.queries(), Dtype::f32, w.host.total_queries(), w.host.q_heads(), w.host.spec.head_dim);
  const DeviceBuffer out(w.host.queries().size() * 4), workspace(planned.workspace_bytes());
  RunOptions run_options;
  run_options.stream = w.stream.handle();
  run_options.workspace = workspace.span();
  for (const std::int64_t hidden : {0, 2, 1, 99}) {
    const OwnedMask mask = mask_of(hidden);
    memory.upload(mask.bytes.data(), mask.bytes.size());
    run(planned, 0, q.view,
        MutableTensorView::of(out.as<float>(), w.host.total_queries(), w.host.q_heads(), w.host.spec.head_dim),
        run_options)
        .value();
    w.stream.wait();
    EXPECT_EQ(out.download_as<float>(), w.attend(with_mask(mask)).out) << hidden;
  }
}

TEST_P(GpuMaskTensors, ATreeOfDrafts) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  // Sixteen drafted tokens: a binary tree over the last positions, each seeing itself, its ancestors and the context.
  constexpr std::int64_t kKeys = 400, kDrafts = 16, kContext = kKeys - kDrafts;
  const OwnedMask mask = make_mask(dtype, {1, 1, kDrafts, kKeys}, [&](auto, auto, auto q, auto k) {
    bool visible = k < kContext;
    for (std::int64_t node = q;; node = (node - 1) / 2) {
      visible |= k == kContext + node;
      if (node == 0) break;
    }
    return shown(dtype, visible);
  });
  for (const int group : {1, 4, 8}) {
    WorldSpec spec = spec_of(format, {{kKeys, kDrafts}});
    spec.group = group;
    EXPECT_TRUE(GpuWorld(spec).matches(with_mask(mask))) << group;
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, GpuMaskTensors,
                         testing::Combine(testing::Values("bf16", "tq6"),
                                          testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean)),
                         [](const auto& i) {
                           return fmt::format("{}_{}", std::get<0>(i.param), dtype_name(std::get<1>(i.param)));
                         });

TEST(GpuShort, Masks) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{150, 2}, {66, 2}}));
  const OwnedMask mask = make_mask(Dtype::f16, {2, 1, 2, 150}, bias);
  EXPECT_TRUE(w.matches(with_mask(mask)));
  AttentionOptions options;
  options.mask = Mask::sliding(65, 3);
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::bidirectional();
  options.softcap = 5;
  options.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(w.matches(options, {0.0f, -3.0f, 2.5f, 20.0f}));
}

// --- logits ----------------------------------------------------------------------------------------------------------

class GpuTransforms : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] GpuWorld world() const {
    const auto& [format, q_len] = GetParam();
    WorldSpec spec = spec_of(format, {{200, q_len}, {90, q_len}});
    spec.inputs = Inputs::loud;
    return GpuWorld(spec);
  }
};

TEST_P(GpuTransforms, Scale) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const double scale : {0.0, 0.01, 0.125, 0.3, -0.1}) {
    AttentionOptions options;
    options.scale = scale;
    EXPECT_TRUE(w.matches(options)) << "scale " << scale;
  }
}

TEST_P(GpuTransforms, Softcap) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const double cap : {0.5, 5.0, 30.0, 1000.0}) {
    AttentionOptions options;
    options.softcap = cap;
    EXPECT_TRUE(w.matches(options)) << "softcap " << cap;
  }
}

TEST_P(GpuTransforms, Alibi) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  AttentionOptions options;
  options.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::sliding(70, 2);
  EXPECT_TRUE(w.matches(options));
}

// Pages that every query sees have a path of their own, by how many warps share a page.
TEST(GpuTransformsOf, WholePages) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : {96, 128, 256, 512}) {
    for (const char* format : {"bf16", "fp8", "tq8", "tq6", "tq4"}) {
      for (const int group : {1, 8}) {
        WorldSpec spec = spec_of(format, {{700, 1}, {330, 3}});
        spec.head_dim = head_dim;
        spec.group = group;
        const GpuWorld w(spec);
        AttentionOptions options;
        options.softcap = 3;
        EXPECT_TRUE(w.matches(options)) << format << " " << head_dim << " " << group;
        for (int h = 0; h < w.host.q_heads(); ++h) options.alibi_slopes.push_back(0.3f / static_cast<float>(1 + h));
        EXPECT_TRUE(w.matches(options)) << format << " " << head_dim << " " << group << ", ALiBi";
        options.softcap = 0;
        options.mask = Mask::bidirectional();
        EXPECT_TRUE(w.matches(options)) << format << " " << head_dim << " " << group << ", ALiBi, bidirectional";
      }
    }
  }
}

TEST_P(GpuTransforms, SinkLogits) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  EXPECT_TRUE(w.matches({}, {0.0f, -3.0f, 2.5f, 20.0f}));
  EXPECT_TRUE(w.matches({}, {-kInf, -100.0f, 90.0f, 0.0f}));
}

TEST_P(GpuTransforms, AllTogether) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  const OwnedMask mask = make_mask(Dtype::bf16, {1, 4, 1, 200}, [](auto, auto h, auto, auto k) {
    return (k + h) % 11 == 0 ? -kInf : static_cast<float>((k + h) % 5) / 4;
  });
  AttentionOptions options = with_mask(mask, Mask::sliding(120, 4));
  options.scale = 0.2;
  options.softcap = 8;
  options.alibi_slopes = {0.1f, 0.03f, 0.01f, 0.002f};
  EXPECT_TRUE(w.matches(options, {0.5f, -1.0f, 2.0f, 0.0f}));
}

INSTANTIATE_TEST_SUITE_P(Features, GpuTransforms,
                         testing::Combine(testing::Values("f16", "fp8", "tq4", "tq6"), testing::Values(1, 5, 16)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

// One key takes half, or nine tenths, of the weight; 131072 others share the rest evenly. Their probabilities are 4e-6
// and less of the largest, and must not round to nothing.
TEST(GpuSink, ManySmallWeightsBesideALargeOne) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kOthers = 131072, kKeys = kOthers + 1;
  constexpr int kDim = 128, kGroup = 4;
  Qkv x;
  const std::vector<float> u = gaussian_vector(kDim, 5, 1 / std::sqrt(static_cast<double>(kDim)));
  double norm2 = 0;
  for (const float f : u) norm2 += static_cast<double>(f) * static_cast<double>(f);
  for (int h = 0; h < kGroup; ++h) {
    for (const float f : u) x.q.push_back(8 * f);
  }
  x.k = gaussian_vector(static_cast<std::size_t>(kKeys * kDim), 6, 1e-3);
  const std::vector<float> a = gaussian_vector(kDim, 7), b = gaussian_vector(kDim, 8);
  for (std::int64_t t = 0; t < kKeys; ++t) x.v.insert(x.v.end(), (t == 0 ? a : b).begin(), (t == 0 ? a : b).end());
  std::vector<float> keys(x.k.size()), values(x.v.size());
  AttentionOptions options;
  options.q_heads = kGroup;
  const DeviceRows q(x.q, Dtype::f32, 1, kGroup, kDim);

  for (const double share : {0.5, 0.9}) {
    const double logit = std::log(share / (1 - share) * static_cast<double>(kOthers));
    for (std::size_t d = 0; d < kDim; ++d) {
      x.k[d] = static_cast<float>(static_cast<double>(u[d]) * logit * std::sqrt(double{kDim}) / (8 * norm2));
    }
    for (const auto& [k, v, sink_pages] :
         {std::tuple{"bf16", "bf16", 0}, {"tq4", "tq4", 0}, {"tq4", "tq4", 1}, {"tq6", "tq4", 1}, {"tq8", "tq8", 0}}) {
      WorldSpec spec = spec_of(k, v, {{1, 1}});
      spec.head_dim = kDim;
      spec.kv_heads = 1;
      spec.exact = Dtype::bf16;
      spec.sink_pages = sink_pages;
      CacheConfig config = device_config(spec);
      config.capacity_tokens = kKeys + 1024;
      Cache cache = Cache::create(config).value();
      const SequenceId id = cache.add_sequence();
      const TestStream stream;
      append_on_device(cache, id, x, 0, kKeys, Dtype::bf16, stream);

      const Plan planned = plan(cache, {id}, options).value();
      const DeviceBuffer out(kGroup * kDim * 4), workspace(planned.workspace_bytes());
      RunOptions run_options;
      run_options.stream = stream.handle();
      run_options.workspace = workspace.span();
      run(planned, 0, q.view, MutableTensorView::of(out.as<float>(), 1, kGroup, kDim), run_options).value();
      stream.wait();

      cache
          .read(id, 0, 0, kKeys, MutableTensorView::of(keys.data(), kKeys, 1, kDim),
                MutableTensorView::of(values.data(), kKeys, 1, kDim), stream.handle())
          .value();
      const std::vector<double> q64 = widen(x.q), k64 = widen(keys), v64 = widen(values);
      const reference::Problem p{1, kKeys, kGroup, 1, kDim, q64, k64, v64, {}, 0};
      EXPECT_TRUE(close(reference::attention(p, options).out, out.download_as<float>(), tolerance::kCoded))
          << k << "/" << v << ", sink pages " << sink_pages << ", share " << share << "\n"
          << planned.explain();
    }
  }
}

// --- calibrated bases ------------------------------------------------------------------------------------------------

// Queries meet the inverse on their way in, sums on their way out of the merge; centres are added to both.
class GpuCalibrated : public testing::TestWithParam<std::tuple<std::string, int, std::string>> {};

TEST_P(GpuCalibrated, Matches) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, head_dim, sides] = GetParam();
  for (const int ends : {0, 1}) {
    WorldSpec spec = spec_of(format, {{300, 1}, {130, 5}, {65, 3}, {2000, 2}});
    spec.head_dim = head_dim;
    spec.group = 3;
    spec.layers = 2;
    spec.layer = 1;
    spec.sink_pages = spec.tail_pages = ends;
    spec.key_bases = sides != "values";
    spec.value_bases = sides != "keys";
    const GpuWorld w(spec);
    SCOPED_TRACE(fmt::format("{} exact ends", ends));
    EXPECT_TRUE(w.matches());
    AttentionOptions options;
    options.softcap = 3;  // caps absolute logits, as sink logits and lse are
    EXPECT_TRUE(w.matches(options, {0.5f, 1.0f, -1.0f, 0.0f, 4.0f, 2.0f}, {Dtype::bf16, Dtype::f16}));
    // A row without weights gets no part of the values' centre.
    const OwnedMask mask =
        make_mask(Dtype::boolean, {1, 1, 5, 2000}, [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0; });
    EXPECT_TRUE(w.matches(with_mask(mask)));
    EXPECT_TRUE(w.matches(with_mask(mask), {0.5f, 4.0f, -1.0f, 0.0f, 1.0f, 2.0f}));
  }
}

INSTANTIATE_TEST_SUITE_P(Bases, GpuCalibrated,
                         testing::Combine(testing::Values("tq4", "tq6", "tq8"),
                                          testing::Values(64, 96, 128, 192, 256, 512),
                                          testing::Values("keys", "values", "both")),
                         [](const auto& i) {
                           return fmt::format("{}_d{}_{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param));
                         });

}  // namespace
}  // namespace kvant::test
