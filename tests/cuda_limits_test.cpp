// The variable that lowers the limits of a device (cuda/runtime/limits.hpp). No device is needed.
#include "cuda/runtime/limits.hpp"

#include <gtest/gtest.h>

#include <string>

namespace kvant::cuda {
namespace {

const DeviceLimits& card(const std::string& name) {
  for (const Card& one : cards()) {
    if (name == one.name) return one.limits;
  }
  throw std::runtime_error(name);
}

testing::AssertionResult says(const std::string& message, const std::string& text) {
  if (message.find(text) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << message << "\" does not say \"" << text << "\"";
}
std::string refusal(const char* device, const std::string& text) {
  const Result<DeviceLimits> limits = lowered(card(device), text);
  return limits.ok() ? "takes " + limits_text(*limits) : limits.message();
}

TEST(CudaLimits, WithoutTheVariableADeviceIsAsItIs) {
  for (const Card& one : cards()) EXPECT_EQ(lowered(one.limits, "").value(), one.limits) << one.name;
  EXPECT_EQ(lowered_text(card("h100")), "");
}

TEST(CudaLimits, ACardTakesWhatItHasLessOf) {
  DeviceLimits expected = card("rtx3090");
  expected.is_lowered = true;
  EXPECT_EQ(lowered(card("h100"), "rtx3090").value(), expected);
  // More multiprocessors, L2 cache and clock than an H100.
  const DeviceLimits blackwell = lowered(card("h100"), "rtx5090").value();
  EXPECT_EQ(blackwell.capability, 120);
  EXPECT_EQ(blackwell.multiprocessors, 132);
  EXPECT_EQ(blackwell.shared_bytes, 101376);
  EXPECT_EQ(blackwell.clock, 1980);
  EXPECT_EQ(blackwell.bandwidth, 1792);
  EXPECT_FALSE(blackwell.has_sm90());
  EXPECT_TRUE(blackwell.overlaps());
  for (const Card& one : cards()) EXPECT_TRUE(lowered(card("h200"), one.name).ok()) << one.name;
}

TEST(CudaLimits, NumbersOnlyLower) {
  const DeviceLimits limits = lowered(card("h100"), "capability=8.6,shared=101376,multiprocessors=82").value();
  EXPECT_EQ(limits.capability, 86);
  EXPECT_EQ(limits.shared_bytes, 101376);
  EXPECT_EQ(limits.multiprocessors, 82);
  EXPECT_EQ(limits.multiprocessor_shared_bytes, card("h100").multiprocessor_shared_bytes);
  EXPECT_EQ(lowered(card("h100"), "rtx4090,multiprocessors=64").value().multiprocessors, 64);
  EXPECT_TRUE(says(refusal("h100", "multiprocessors=133"),
                   "KVANT_CUDA_LIMITS: multiprocessors is 133, and the device has 132: limits can only be lowered"));
  EXPECT_TRUE(says(refusal("h100", "rtx4090,multiprocessors=130"), "and the device has 128"));
  // A number that the driver does not tell can be given.
  DeviceLimits unknown = card("rtx3090");
  unknown.bandwidth = 0;
  EXPECT_EQ(lowered(unknown, "bandwidth=5000").value().bandwidth, 5000);
}

TEST(CudaLimits, ACapabilityIsLowerIfItCanDoLess) {
  EXPECT_EQ(lowered(card("h100"), "capability=12.0").value().capability, 120);
  EXPECT_EQ(lowered(card("b200"), "capability=12.0").value().capability, 120);
  EXPECT_EQ(lowered(card("rtx5090"), "capability=8.0").value().capability, 80);
  EXPECT_TRUE(says(refusal("rtx5090", "capability=9.0"), "of compute capability 12.0 cannot stand for one of 9.0"));
  EXPECT_TRUE(says(refusal("rtx3090", "h100"), "of compute capability 8.6 cannot stand for one of 9.0"));
  EXPECT_TRUE(says(refusal("a100", "rtx5090"), "cannot stand for one of 12.0"));
}

TEST(CudaLimits, WordsThatAreNoneSayWhichThereAre) {
  for (const char* text : {"rtx3900", "shard=4", "rtx3090,,shared=1", ",", " rtx3090", "=3", "RTX3090"}) {
    EXPECT_TRUE(says(refusal("h100", text), "is neither the name of a card nor key=number; cards are a100, rtx3090"))
        << text;
    EXPECT_TRUE(says(refusal("h100", text), "keys are capability, multiprocessors, shared, ")) << text;
  }
  for (const char* text : {"shared=", "shared=0", "shared=-1", "shared=1k", "shared=99999999999", "shared= 1"})
    EXPECT_TRUE(says(refusal("h100", text), "has no whole number above zero")) << text;
  for (const char* text : {"capability=8", "capability=86", "capability=7.5", "capability=8.60", "capability=8.x"})
    EXPECT_TRUE(says(refusal("h100", text), "write capability=8.6")) << text;
}

TEST(CudaLimits, TextsNameTheNumbers) {
  const std::string text = lowered_text(lowered(card("h100"), "rtx3090").value());
  for (const char* part : {"KVANT_CUDA_LIMITS lowers this device to compute capability 8.6, 82 multiprocessors",
                           "101376 bytes of shared memory a block", "1536 threads", "936 GB/s"})
    EXPECT_TRUE(says(text, part));
}

// Code of compute_80 on a newer device has neither waits for the previous launch nor clusters.
TEST(CudaLimits, CodeMayBeOlderThanTheDevice) {
  DeviceLimits limits = card("h100");
  EXPECT_TRUE(limits.overlaps() && limits.has_clusters());
  limits.architecture = 80;
  EXPECT_FALSE(limits.overlaps() || limits.has_clusters());
  const DeviceLimits newer = lowered(limits, "rtx5090").value();
  EXPECT_EQ(newer.capability, 120);
  EXPECT_FALSE(newer.overlaps() || newer.has_clusters());
  limits.architecture = 90, limits.capability = 86;
  EXPECT_FALSE(limits.overlaps() || limits.has_clusters());
}

TEST(CudaLimits, BlocksAreWhatFindsRoom) {
  const DeviceLimits& limits = card("rtx3090");
  EXPECT_EQ(blocks_within(limits, 128, 101376), 1);
  EXPECT_EQ(blocks_within(limits, 128, 101377), 0);
  EXPECT_EQ(blocks_within(limits, 128, 50176), 2);
  EXPECT_EQ(blocks_within(limits, 128, 50177), 1);
  EXPECT_EQ(blocks_within(limits, 128, 0), 12);
}

TEST(CudaLimits, GeForceCardsTakeTwiceAsLongForProducts) {
  for (const Card& one : cards()) {
    const std::string name(one.name);
    const bool is_geforce = name == "rtx3090" || name == "rtx4090" || name == "rtx5090";
    EXPECT_EQ(usual_tensor(one.limits.capability, is_geforce ? "NVIDIA GeForce RTX" : "NVIDIA"), one.limits.tensor)
        << name;
  }
}

}  // namespace
}  // namespace kvant::cuda
