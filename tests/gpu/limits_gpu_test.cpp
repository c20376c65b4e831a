// A device whose limits KVANT_CUDA_LIMITS lowers: plans choose as on a smaller card, and what they compute is right.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

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
