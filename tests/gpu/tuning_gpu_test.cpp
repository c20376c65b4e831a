// Tuning files on a device (core/tuning.hpp): plans take the kinds that the file makes the fastest, and say so.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/runtime/tuning.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::test {
namespace {

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// An environment variable with another value for a scope; null: without it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before, had_ = true;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { had_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::string before_;
  bool had_ = false;
};

core::TunedCard this_device() {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) throw std::runtime_error("no device");
  const cuda::DeviceLimits limits = cuda::find_limits(0).value();
  return {properties.name, limits.capability, limits.multiprocessors};
}

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

// A prompt of one sequence of 8 kv heads, and a file by which one kind takes `thousandths` of its estimate.
constexpr int kGroup = 4, kQueries = 512;
WorldSpec prompt() {
  WorldSpec spec = spec_of("tq6", {{2048, kQueries}});
  spec.head_dim = 128;
  spec.kv_heads = 8, spec.group = kGroup;
  return spec;
}
std::string file_with(const core::TunedCard& device, const char* kind, int thousandths) {
  const core::TunedWork work{core::tuned_kind(kind), 128, core::Stored::tq, 8, std::int64_t{kGroup} * kQueries};
  return core::tuning_text(device, {{work, thousandths}});
}
std::string explained(const GpuWorld& w) {
  return plan(w.cache, std::span<const SequenceId>(w.ids), w.host.options({})).value().explain();
}

TEST(GpuTuning, PlansTakeTheKindThatTheFileMakesTheFastest) {
  SKIP_WITHOUT_DEVICE();
  const TemporaryDirectory folder;
  const std::string path = folder / "tuning.txt";
  {
    const Variable none(core::kTuningVariable, "off");
    const GpuWorld w(prompt());
    EXPECT_FALSE(has(explained(w), "\nkernel     decode ")) << explained(w);
    EXPECT_FALSE(has(explained(w), "tuned by"));
    EXPECT_FALSE(has(w.cache.describe(), "tuned by"));
  }
  const Variable mine(core::kTuningVariable, path.c_str());
  for (const char* kind : {core::kDecodeKernels, core::kPrefillSm80}) {
    write(path, file_with(this_device(), kind, core::kLeastRatio));
    const GpuWorld w(prompt());
    const std::string text = explained(w);
    EXPECT_TRUE(has(text, fmt::format("\nkernel     {} ", kind))) << text;
    EXPECT_TRUE(has(text, fmt::format("\ntimes      tuned by {}: {} 0.01 times the estimate\n", path, kind))) << text;
    EXPECT_TRUE(has(w.cache.describe(), "tuned by " + path)) << w.cache.describe();
    EXPECT_TRUE(has(core::device_backend()->detail(), "tuned by " + path)) << core::device_backend()->detail();
    EXPECT_TRUE(w.matches({.kernel = kind}));
  }
}

TEST(GpuTuning, AFileThatDoesNotFitIsRefused) {
  SKIP_WITHOUT_DEVICE();
  const TemporaryDirectory folder;
  const std::string path = folder / "tuning.txt";
  const Variable mine(core::kTuningVariable, path.c_str());
  core::TunedCard other = this_device();
  other.multiprocessors += 1;
  for (const std::string& text : {file_with(other, core::kDecodeKernels, 1000), std::string("kvant tuning 0\n")}) {
    write(path, text);
    const Result<Cache> made = Cache::create(device_config(prompt()));
    ASSERT_FALSE(made.ok()) << text;
    EXPECT_TRUE(has(made.message(), "KVANT_TUNING: " + path + ": ")) << made.message();
    EXPECT_TRUE(has(core::device_backend()->unavailable(), "KVANT_TUNING: ")) << core::device_backend()->unavailable();
  }
}

TEST(GpuTuning, ADefaultFileThatDoesNotFitIsNamed) {
  SKIP_WITHOUT_DEVICE();
  if (cuda::find_limits(0).value().is_lowered) GTEST_SKIP() << "a default file is for the device as it is";
  const TemporaryDirectory folder;
  const Variable none(core::kTuningVariable, nullptr), cache("XDG_CACHE_HOME", (folder / "cache").c_str());
  const std::string path = core::default_tuning_path(this_device());
  write(path, file_with(this_device(), core::kDecodeKernels, core::kLeastRatio));
  EXPECT_TRUE(has(explained(GpuWorld(prompt())), "\nkernel     decode ")) << explained(GpuWorld(prompt()));
  core::TunedCard other = this_device();
  other.capability = 81;
  write(path, file_with(other, core::kDecodeKernels, core::kLeastRatio));
  const GpuWorld w(prompt());
  EXPECT_FALSE(has(explained(w), "\nkernel     decode ")) << explained(w);
  EXPECT_TRUE(has(explained(w), "\ntimes      " + path + " is not used: it was measured on ")) << explained(w);
  EXPECT_TRUE(has(w.cache.describe(), path + " is not used: ")) << w.cache.describe();
}

}  // namespace
}  // namespace kvant::test
