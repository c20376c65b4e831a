// A device whose limits KVANT_CUDA_LIMITS lowers: plans choose as on a smaller card, and what they compute is right.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "cuda/runtime/limits.hpp"
#include "gpu/gpu_formats.hpp"

namespace kvant::test {
namespace {

// The variable has this value for a scope.
class Lowered {
 public:
  explicit Lowered(const char* text) {
    if (const char* before = std::getenv(cuda::kLimitsVariable)) before_ = before, had_ = true;
    setenv(cuda::kLimitsVariable, text, 1);
  }
  Lowered(const Lowered&) = delete;
  Lowered& operator=(const Lowered&) = delete;
  ~Lowered() { had_ ? setenv(cuda::kLimitsVariable, before_.c_str(), 1) : unsetenv(cuda::kLimitsVariable); }

 private:
  std::string before_;
  bool had_ = false;
};

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(GpuLimits, PlansChooseAsOnASmallerCard) {
  SKIP_WITHOUT_DEVICE();
  for (const char* card : {"rtx3090", "rtx4090", "l40s", "rtx5090", "rtxpro6000"}) {
    const Lowered lowered(card);
    if (const std::string why = core::device_backend()->unavailable(); !why.empty()) GTEST_SKIP() << why;
    for (const int head_dim : {64, 128, 256, 512}) {
      for (const char* format : {"tq6", "tq4", "bf16"}) {
        for (const std::int64_t queries : {1, 4, 16, 300}) {
          SCOPED_TRACE(fmt::format("{}, {}, head_dim {}, {} queries", card, format, head_dim, queries));
          WorldSpec spec = spec_of(format, {{700, queries}});
          spec.head_dim = head_dim;
          const GpuWorld w(spec);
          const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), w.host.options({})).value();
          const std::string text = planned.explain();
          EXPECT_TRUE(has(text, "limits     KVANT_CUDA_LIMITS lowers this device to compute capability")) << text;
          for (const char* kind : {"kernel     prefill_sm90", "kernel     decode_sm90", "kernel     prefill_fresh",
                                   "kernel     prefill_unpacked", "kernel     generic"})
            EXPECT_FALSE(has(text, kind)) << text;
          EXPECT_TRUE(w.matches());
        }
      }
    }
    EXPECT_TRUE(has(GpuWorld(spec_of("tq6", {{100, 1}})).cache.describe(), "KVANT_CUDA_LIMITS lowers this device"));
  }
}

// Kernels in which a page's keys and values take turns in one stage.
TEST(GpuLimits, KernelsOfOneStageAreRight) {
  SKIP_WITHOUT_DEVICE();
  const Lowered lowered("shared=101376");
  if (const std::string why = core::device_backend()->unavailable(); !why.empty()) GTEST_SKIP() << why;
  for (const char* format : {"bf16", "f16"}) {
    for (const int head_dim : {96, 192, 512}) {
      for (const std::int64_t queries : {1, 2, 4, 9}) {
        for (const std::int64_t length : {9, 64, 65, 700, 5000}) {
          SCOPED_TRACE(fmt::format("{}, head_dim {}, {} queries over {}", format, head_dim, queries, length));
          WorldSpec spec = spec_of(format, {{length, queries}, {length / 2 + queries, 1}, {queries, queries}});
          spec.head_dim = head_dim;
          const GpuWorld w(spec);
          AttentionOptions o;
          o.kernel = core::kDecodeKernels;
          EXPECT_TRUE(has(w.attend(o).explain, "keys and values take turns in it"));
          EXPECT_TRUE(w.matches(o));
          o.mask.window = 100;
          EXPECT_TRUE(w.matches(o)) << "window";
          o.softcap = 20.0f;
          EXPECT_TRUE(w.matches(o)) << "softcap";
        }
      }
    }
  }
}

// Small prefill kernels, where a block gets as much shared memory as on compute capability 8.6, 8.9 and 12.x.
class GpuSmallPrefill : public testing::TestWithParam<std::tuple<Formats, int>> {
 protected:
  [[nodiscard]] static WorldSpec spec(std::vector<Lengths> sequences) {
    const auto& [formats, head_dim] = GetParam();
    WorldSpec s = spec_of(formats.k, formats.v, std::move(sequences));
    s.head_dim = head_dim;
    s.kv_heads = 1;
    s.exact = s.input_dtype = s.k == "f16" ? Dtype::f16 : Dtype::bf16;  // as fresh keys are given
    return s;
  }
  void SetUp() override {
    SKIP_WITHOUT_DEVICE();
    const WorldSpec s = spec({});
    const auto rotated = [](const std::string& format) { return format.starts_with("tq"); };
    if (s.k != s.v && !(rotated(s.k) && rotated(s.v))) GTEST_SKIP() << "prefill kernels do not serve the pair";
    if (const std::string why = core::device_backend()->unavailable(); !why.empty()) GTEST_SKIP() << why;
  }

 private:
  const Lowered lowered_{"shared=101376"};
};

AttentionOptions small_prefill(bool fresh_keys, AttentionOptions options = {}) {
  options.kernel = core::kPrefillSm80;
  options.fresh_keys = fresh_keys;
  return options;
}

TEST_P(GpuSmallPrefill, Matches) {
  for (const int ends : {1, 0}) {
    // Halves of pages, few pages and many, tiles that end within a query's heads.
    WorldSpec s = spec({{1500, 1}, {257, 3}, {200, 30}, {64, 64}, {33, 33}, {300, 60}, {90, 0}});
    s.group = 3;
    s.sink_pages = s.tail_pages = ends;
    const GpuWorld w(s);
    EXPECT_TRUE(has(w.attend(small_prefill(false)).explain, "tiles of 32 query rows"));
    for (const bool fresh : {false, true}) {
      SCOPED_TRACE(fmt::format("{} exact ends, {} keys", ends, fresh ? "fresh" : "cached"));
      EXPECT_TRUE(w.matches(small_prefill(fresh)));
      EXPECT_TRUE(w.matches(small_prefill(fresh, {.mask = Mask::bidirectional()})));
      EXPECT_TRUE(w.matches(small_prefill(fresh, {.mask = Mask::sliding(100, 70)})));
      EXPECT_TRUE(w.matches(small_prefill(fresh), {}, {.q_dtype = Dtype::bf16, .out_dtype = Dtype::bf16}));
    }
  }
}

TEST_P(GpuSmallPrefill, MasksAndTransforms) {
  for (const std::int64_t queries : {3, 140}) {
    const GpuWorld w(spec({{450, queries}, {queries + 30, queries}}));
    const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, queries, 450},
                                     [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0 && k / 64 != 2; });
    for (const bool fresh : {false, true}) {
      SCOPED_TRACE(fmt::format("{} queries, {} keys", queries, fresh ? "fresh" : "cached"));
      AttentionOptions options = small_prefill(fresh);
      options.softcap = 30;
      for (int h = 0; h < w.host.q_heads(); ++h) options.alibi_slopes.push_back(0.05f * static_cast<float>(h));
      EXPECT_TRUE(w.matches(options, std::vector<float>(static_cast<std::size_t>(w.host.q_heads()), 0.5f)));
      EXPECT_TRUE(w.matches(small_prefill(fresh, with_mask(mask))));
    }
  }
}

TEST_P(GpuSmallPrefill, PageCentres) {
  WorldSpec s = spec({{1500, 1}, {257, 3}, {200, 30}, {2100, 20}});
  if (s.k == "bf16" || s.k == "f16") GTEST_SKIP() << "keys without centres";
  s.page_centres = true;
  for (const float offset : {2.0f, 0.0f}) {
    s.key_offset = offset;
    const GpuWorld w(s);
    for (const bool fresh : {false, true})
      EXPECT_TRUE(w.matches(small_prefill(fresh))) << "offset " << offset << (fresh ? ", fresh keys" : "");
  }
}

// Warps that share tiles wait for each other.
TEST_P(GpuSmallPrefill, TheSameBits) {
  WorldSpec s = spec({{3000, 200}, {300, 300}});
  s.kv_heads = 4;
  const GpuWorld w(s);
  for (const bool fresh : {false, true}) {
    const Attended once = w.attend(small_prefill(fresh));
    for (int i = 0; i < 20; ++i) {
      const Attended again = w.attend(small_prefill(fresh));
      EXPECT_TRUE(same_bits(once.out, again.out, w.host.out_shape()));
      EXPECT_TRUE(same_bits(once.lse, again.lse));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuSmallPrefill, testing::Combine(testing::ValuesIn(kFormats), testing::Values(264, 512)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });

TEST(GpuShort, SmallPrefill) {
  SKIP_WITHOUT_DEVICE();
  const Lowered lowered("shared=101376");
  if (const std::string why = core::device_backend()->unavailable(); !why.empty()) GTEST_SKIP() << why;
  for (const char* format : {"tq6", "bf16"}) {
    WorldSpec s = spec_of(format, {{200, 40}});
    s.head_dim = 512;
    EXPECT_TRUE(GpuWorld(s).matches(small_prefill(false))) << format;
  }
}

TEST(GpuLimits, MergesOfCapability8HaveNoClusters) {
  SKIP_WITHOUT_DEVICE();
  const Lowered lowered("capability=8.6");
  if (const std::string why = core::device_backend()->unavailable(); !why.empty()) GTEST_SKIP() << why;
  const GpuWorld w(spec_of("tq4", {{20000, 1}}));  // as many partials as clusters merge
  const std::string text = w.attend().explain;
  EXPECT_TRUE(has(text, "merge      one more launch, 1 block of ")) << text;
  EXPECT_FALSE(has(text, "overlaps")) << text;
  EXPECT_TRUE(w.matches());
}

TEST(GpuLimits, WhatIsNotLowerIsRefused) {
  SKIP_WITHOUT_DEVICE();
  for (const char* text : {"rtx9090", "multiprocessors=100000", "capability=7.5"}) {
    const Lowered lowered(text);
    const Result<Cache> made = Cache::create(device_config(spec_of("tq6", {{100, 1}})));
    ASSERT_FALSE(made.ok()) << text;
    EXPECT_TRUE(has(made.message(), "KVANT_CUDA_LIMITS: ")) << made.message();
    const std::string why = core::device_backend()->unavailable();
    EXPECT_TRUE(has(why, "KVANT_CUDA_LIMITS: ")) << why;
  }
}

}  // namespace
}  // namespace kvant::test
