// Cases that a device refuses to attend, and the messages (cuda/runtime/refusals.hpp).
#include "cuda/runtime/refusals.hpp"

#include <gtest/gtest.h>

#include <string>

namespace kvant::cuda {
namespace {

constexpr int kHeadDims[] = {64, 128};
constexpr FormatPair kPairs[] = {{Format::tq6, Format::tq4}, {Format::bf16, Format::bf16}};
constexpr FormatPair kOthers[] = {{Format::tq8, Format::tq3}};
constexpr codec::HeadDims kWidths[] = {{128, 64}, {64, 128}};
constexpr Instances kHave = {kHeadDims, kWidths, {}, kPairs, kOthers, "tq6/tq4;bf16/bf16"};

testing::AssertionResult says(const std::string& message, const std::string& text) {
  if (message.find(text) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << message << "\" does not say \"" << text << "\"";
}

TEST(Refusals, AHeadDimSaysWhichThereAre) {
  const std::string message = refuse_head_dim(kHave, {80, 80});
  for (const char* text : {"head_dim = 80", "64, 128,", "stored padded", "device = \"cpu\""})
    EXPECT_TRUE(says(message, text));
}

TEST(Refusals, TwoHeadDimsSayWhichThereAre) {
  const std::string message = refuse_head_dim(kHave, {128, 96});
  for (const char* text :
       {"head_dim = 128 with v_head_dim = 96", "of one size, or of 128/64, or of 64/128;", "device = \"cpu\""})
    EXPECT_TRUE(says(message, text));
}

TEST(Refusals, APairThatWasLeftOutNamesTheOption) {
  const std::string message = refuse_pair(kHave, {Format::tq8, Format::tq3});
  for (const char* text :
       {"k = tq8, v = tq3", "tq6/tq4, bf16/bf16;", "-DKVANT_CUDA_PAIRS=\"tq6/tq4;bf16/bf16;tq8/tq3\"",
        "kernel = \"generic\"", "device = \"cpu\""}) {
    EXPECT_TRUE(says(message, text));
  }
}

TEST(Refusals, APairThatNoBuildHasNamesTheList) {
  const std::string message = refuse_pair(kHave, {Format::tq2, Format::tq6});
  for (const char* text : {"k = tq2, v = tq6", "tq6/tq4, bf16/bf16;", "src/cuda/instances.cmake"}) {
    EXPECT_TRUE(says(message, text));
  }
  EXPECT_FALSE(says(message, "KVANT_CUDA_PAIRS"));
}

}  // namespace
}  // namespace kvant::cuda
