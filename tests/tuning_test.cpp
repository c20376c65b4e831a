// Tuning files (core/tuning.hpp): what is read, what is refused, and ratios between measured work. No device is needed.
#include "core/tuning.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "kvant/version.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::core {
namespace {

const TunedCard kDevice = {"NVIDIA H100 80GB HBM3", 90, 132};

TunedRatio ratio_of(const char* kind, std::int64_t heads, std::int64_t rows, int thousandths, int head_dim = 128) {
  return {{tuned_kind(kind), head_dim, Stored::tq, heads, rows}, thousandths};
}
const std::vector<TunedRatio> kRatios = {ratio_of(kDecodeKernels, 8, 20, 1000), ratio_of(kDecodeKernels, 8, 80, 2000),
                                         ratio_of(kDecodeKernels, 8, 320, 500), ratio_of(kDecodeKernels, 32, 20, 3000),
                                         ratio_of(kPrefillSm80, 8, 64, 900)};

testing::AssertionResult says(const std::string& message, const std::string& text) {
  if (message.find(text) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << message << "\" does not say \"" << text << "\"";
}
std::string refusal(const std::string& text) {
  const Result<Tuning> read = parse_tuning(text);
  return read.ok() ? "takes it" : read.message();
}
std::string replaced(const std::string& from, const std::string& to) {
  std::string text = tuning_text(kDevice, kRatios);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Tuning, IsReadAsItWasWritten) {
  const std::string text = tuning_text(kDevice, kRatios);
  const Tuning read = parse_tuning(text).value();
  EXPECT_EQ(read.card, kDevice);
  EXPECT_EQ(read.ratios, kRatios);
  EXPECT_EQ(tuning_text(read.card, read.ratios), text);
  EXPECT_EQ(text.substr(text.find("decode")).substr(0, 25), "decode 128 tq 8 20 1000\nd");
  std::string without_end = text;
  without_end.pop_back();
  EXPECT_EQ(parse_tuning(without_end).value().ratios, kRatios);
}

TEST(Tuning, RefusesWhatIsBroken) {
  EXPECT_TRUE(says(refusal(""), "line 1 is \"\", and should be \"kvant tuning 1\""));
  EXPECT_TRUE(says(refusal(replaced("tuning 1", "tuning 2")), "line 1 is \"kvant tuning 2\""));
  EXPECT_TRUE(says(refusal(replaced(kVersion, "\n")), "line 2 is \"version \", and should be \"version NUMBER\""));
  EXPECT_TRUE(says(refusal(replaced("device NVIDIA H100 80GB HBM3", "device ")), "should be \"device NAME\""));
  EXPECT_TRUE(says(refusal(replaced("HBM3", "\x1b[31m\xff")), "H100 80GB ?[31m?\", and should be"));
  EXPECT_TRUE(says(refusal(replaced("HBM3", std::string(300, 'x'))), "\".., and should be \"device NAME\""));
  for (const char* capability : {"90", "9.", ".0", "9.10", "9.-1", "0.9", "100.0", "9.0 "})
    EXPECT_TRUE(says(refusal(replaced("9.0", capability)), "capability")) << capability;
  for (const char* count : {"0", "-1", "1e3", "99999999999999999999", "132 "})
    EXPECT_TRUE(says(refusal(replaced("multiprocessors 132", fmt::format("multiprocessors {}", count))), "NUMBER"));
  for (const char* count : {"0", "8193", "5.0"})
    EXPECT_TRUE(says(refusal(replaced("ratios 5", fmt::format("ratios {}", count))), "\"ratios NUMBER\""));
  // As many lines as ratios.
  EXPECT_TRUE(says(refusal(replaced("ratios 5", "ratios 6")), "line 12 is \"\", and should be \"KIND HEAD_DIM"));
  EXPECT_TRUE(
      says(refusal(replaced("ratios 5", "ratios 4")), "line 11 is \"prefill_sm80 128 tq 8 64 900\", and should"));
  for (const char* line :
       {"generic 128 tq 8 20 1000", "decode 0 tq 8 20 1000", "decode 577 tq 8 20 1000", "decode 128 tq8 8 20 1000",
        "decode 128 tq 0 20 1000", "decode 128 tq 8 0 1000", "decode 128 tq 8 99999999999 1000", "decode 128 tq 8 20 9",
        "decode 128 tq 8 20 100001", "decode 128 tq 8 20 nan", "decode 128 tq 8 20", "decode 128 tq 8 20 1000 1",
        "decode  128 tq 8 20 1000", "decode 128 tq 8 20 1000\r"})
    EXPECT_TRUE(says(refusal(replaced("decode 128 tq 8 20 1000", line)), "should be \"KIND HEAD_DIM")) << line;
  // No work twice, and in order.
  for (const char* line : {"decode 128 tq 8 80 1000", "decode 128 tq 8 81 1000", "decode 256 tq 8 20 1000"})
    EXPECT_TRUE(says(refusal(replaced("decode 128 tq 8 20 1000", line)), "line 8 is")) << line;
}

TEST(Tuning, RatiosBetweenMeasuredWork) {
  Tuning tuning;
  tuning.ratios = kRatios;
  const auto ratio = [&](const char* kind, std::int64_t heads, std::int64_t rows) {
    return tuning.ratio(ratio_of(kind, heads, rows, 0).work).value_or(-1);
  };
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 20), 1.0);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 80), 2.0);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 40), 1.5) << "half way, by logarithms";
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 160), 1.25);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 1), 1.0);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 8, 4096), 0.5);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 1, 80), 2.0);
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 16, 20), 2.0) << "half way between heads";
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 16, 80), 2.5) << "of 2 for 8 heads, and 3 for 32 with any rows";
  EXPECT_DOUBLE_EQ(ratio(kDecodeKernels, 1000, 80), 3.0);
  EXPECT_DOUBLE_EQ(ratio(kPrefillSm80, 8, 2048), 0.9);
  // Nothing stands for what was not measured.
  EXPECT_FALSE(tuning.ratio(ratio_of(kPrefillSm90, 8, 20, 0).work));
  EXPECT_FALSE(tuning.ratio(ratio_of(kDecodeKernels, 8, 20, 0, 256).work));
  EXPECT_FALSE(tuning.ratio({tuned_kind(kDecodeKernels), 128, Stored::fp8, 8, 20}));
  EXPECT_FALSE(Tuning{}.ratio(kRatios[0].work));
}

// --- where files are -------------------------------------------------------------------------------------------------

// Variables with other values for a test.
class Environment {
 public:
  Environment() {
    for (const char* name : {kTuningVariable, "XDG_CACHE_HOME", "HOME"}) {
      const char* value = std::getenv(name);
      before_.push_back({name, value != nullptr, value != nullptr ? value : ""});
      unsetenv(name);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() {
    for (const Variable& v : before_) v.was_set ? setenv(v.name, v.value.c_str(), 1) : unsetenv(v.name);
  }

 private:
  struct Variable {
    const char* name;
    bool was_set;
    std::string value;
  };
  std::vector<Variable> before_;
};

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

TEST(Tuning, TheDefaultFileIsInTheCacheFolder) {
  const Environment environment;
  EXPECT_EQ(default_tuning_path(kDevice), "");
  setenv("HOME", "/home/me", 1);
  EXPECT_EQ(default_tuning_path(kDevice), "/home/me/.cache/kvant/tuning-nvidia-h100-80gb-hbm3.txt");
  setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(default_tuning_path(kDevice), "/home/me/.cache/kvant/tuning-nvidia-h100-80gb-hbm3.txt");
  setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(default_tuning_path({"../x/\xff", 90, 1}), "/cache/kvant/tuning----x--.txt");
}

TEST(Tuning, TheDefaultFileIsUsedOrSaysWhyNot) {
  const Environment environment;
  const test::TemporaryDirectory folder;
  setenv("XDG_CACHE_HOME", (folder / "cache").c_str(), 1);
  const std::string path = default_tuning_path(kDevice);
  EXPECT_EQ(find_tuning(kDevice, false).value().words(), "") << "there is none";

  write(path, tuning_text(kDevice, kRatios));
  const Tuning used = find_tuning(kDevice, false).value();
  EXPECT_EQ(used.ratios, kRatios);
  EXPECT_EQ(used.words(), "tuned by " + path);
  const Tuning lowered = find_tuning(kDevice, true).value();
  EXPECT_TRUE(lowered.ratios.empty());
  EXPECT_TRUE(says(lowered.words(), path + " is not used: limits of the device are lowered"));

  TunedCard other = kDevice;
  other.multiprocessors = 114;
  EXPECT_TRUE(says(find_tuning(other, false).value().words(),
                   path + " is not used: it was measured on NVIDIA H100 80GB HBM3, compute capability 9.0, 132 "
                          "multiprocessors, and this device is NVIDIA H100 80GB HBM3, compute capability 9.0, 114"));
  EXPECT_TRUE(find_tuning(other, false).value().ratios.empty());
  write(path, replaced(kVersion, "0.0.9"));
  EXPECT_TRUE(says(find_tuning(kDevice, false).value().words(),
                   fmt::format(" is not used: kvant 0.0.9 wrote it, and this is {}; write it anew", kVersion)));
  write(path, "kvant tuning 0\n");
  EXPECT_TRUE(says(find_tuning(kDevice, false).value().words(), "is not used: line 1 is \"kvant tuning 0\""));
  write(path, std::string(kMostTuningBytes + 1, '\n'));
  EXPECT_TRUE(says(find_tuning(kDevice, false).value().words(), "it has 1048577 bytes, and 1048576 are the most"));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_TRUE(says(find_tuning(kDevice, false).value().words(), path + " is not used: "));
}

TEST(Tuning, TheVariableNamesAFileThatMustFit) {
  const Environment environment;
  const test::TemporaryDirectory folder;
  setenv("XDG_CACHE_HOME", (folder / "cache").c_str(), 1);
  write(default_tuning_path(kDevice), tuning_text(kDevice, kRatios));
  for (const char* none : {"", "off"}) {
    setenv(kTuningVariable, none, 1);
    EXPECT_EQ(find_tuning(kDevice, false).value().words(), "");
    EXPECT_TRUE(find_tuning(kDevice, false).value().ratios.empty());
  }
  const std::string path = folder / "mine.txt";
  setenv(kTuningVariable, path.c_str(), 1);
  const auto refusal_for = [](const TunedCard& device) {
    const Result<Tuning> found = find_tuning(device, false);
    return found.ok() ? "takes it" : found.message();
  };
  EXPECT_TRUE(says(refusal_for(kDevice), "KVANT_TUNING: " + path + ": No such file"));
  write(path, tuning_text(kDevice, {kRatios[0]}));
  EXPECT_EQ(find_tuning(kDevice, false).value().ratios.size(), 1u) << "not the default file's";
  EXPECT_EQ(find_tuning(kDevice, true).value().ratios.size(), 1u) << "its numbers are those of the lowered device";
  EXPECT_TRUE(
      says(refusal_for({"NVIDIA A100", 80, 108}), "and this device is NVIDIA A100, compute capability 8.0, 108"));
  write(path, tuning_text(kDevice, {kRatios[0]}) + "more");
  EXPECT_TRUE(says(refusal_for(kDevice),
                   "line 8 is \"more\", and should be absent: there are 1 ratios; write it anew "
                   "with `kvant bench tune`, or set the variable to off"));
}

}  // namespace
}  // namespace kvant::core
