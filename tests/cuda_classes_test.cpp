// The table of what devices of each compute capability run (cuda/runtime/classes.hpp), and its copy in docs/cuda.md. No
// device is needed.
#include "cuda/runtime/classes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <sstream>

#include "core/fmt.hpp"
#include "support/paths.hpp"

namespace kvant::cuda {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(test::source_path(path));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}
// The code of the wheel, between spaces.
std::string wheel_architectures() {
  const std::string text = text_of("pyproject.toml");
  std::smatch found;
  EXPECT_TRUE(std::regex_search(text, found, std::regex("KVANT_CUDA_ARCHITECTURES = \"([^\"]*)\"")));
  std::string list = found[1];
  std::replace(list.begin(), list.end(), ';', ' ');
  return list;
}
const core::DeviceClass& class_of(const std::vector<core::DeviceClass>& all, const std::string& capability) {
  return *std::find_if(all.begin(), all.end(),
                       [&](const core::DeviceClass& one) { return one.capability == capability; });
}

TEST(CudaClasses, TheDocumentHasTheTableOfTheWheel) {
  std::string table =
      "| compute capability | cards | kinds of kernels | code in the wheel | |\n"
      "|---|---|---|---|---|\n";
  for (const core::DeviceClass& one : device_classes(wheel_architectures())) {
    table += fmt::format("| {} | {} | `{}` | {} | {} |\n", one.capability, one.cards, fmt::join(one.kernels, "`, `"),
                         one.code, one.state());
  }
  EXPECT_NE(text_of("docs/cuda.md").find(table), std::string::npos) << "docs/cuda.md lacks this table:\n" << table;
}

// In README.md's words.
TEST(CudaClasses, TheReadmeSaysFromWhichOnAndWhatWasTested) {
  const auto all = device_classes(wheel_architectures());
  std::string tested;
  for (const core::DeviceClass& one : all) {
    if (!one.tested.empty()) tested += (tested.empty() ? "" : ", ") + one.capability;
  }
  const std::string words = std::regex_replace(text_of("README.md"), std::regex("\\s+"), " ");
  const std::string expected =
      fmt::format("(compute capability {} or newer; tested on {})", all.front().capability, tested);
  EXPECT_NE(words.find(expected), std::string::npos) << "README.md lacks " << expected;
}

TEST(CudaClasses, CodeIsThatOfTheBuild) {
  const auto wheel = device_classes("80 90a 90-virtual"), one = device_classes("80-virtual"),
             hopper = device_classes("90a");
  EXPECT_EQ(class_of(wheel, "8.6").code, "machine code");
  EXPECT_EQ(class_of(wheel, "12.x").code, "compiled by the driver");
  for (const core::DeviceClass& all : one) EXPECT_EQ(all.code, "compiled by the driver") << all.capability;
  EXPECT_EQ(class_of(hopper, "8.0").code, "none");
  EXPECT_EQ(class_of(hopper, "8.0").state(), "no code in this build");
  EXPECT_FALSE(class_of(hopper, "10.x").runs);
}

TEST(CudaClasses, TestedIsWhatWasRun) {
  for (const core::DeviceClass& one : device_classes("80 90a 90-virtual"))
    EXPECT_EQ(one.state(), one.capability == "9.0" ? "tested on H100, H200" : "should run, not tested");
}

TEST(CudaClasses, KindsOfHopperAreForHopper) {
  for (const core::DeviceClass& one : device_classes("80 90a 90-virtual")) {
    const bool has = std::find(one.kernels.begin(), one.kernels.end(), "prefill_sm90") != one.kernels.end();
    EXPECT_EQ(has, one.capability == "9.0") << one.capability;
    EXPECT_EQ(one.kernels.front(), "decode");
    EXPECT_EQ(one.kernels.back(), "generic");
  }
}

}  // namespace
}  // namespace kvant::cuda
