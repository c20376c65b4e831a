// The limits of a device that plans know, and how KVANT_CUDA_LIMITS lowers them. No device is needed.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "kvant/types.hpp"

namespace kvant::cuda {

// Whether devices have products of warpgroups and copies of tensors: instructions that no others have.
constexpr bool has_sm90(int capability) {
  return capability == 90;
}

// A number that the driver does not tell is 0.
struct DeviceLimits {
  int capability;  // 86: compute capability 8.6
  int multiprocessors;
  int shared_bytes;  // a block gets at most so many
  int multiprocessor_shared_bytes, multiprocessor_threads;
  int l2_bytes;
  int clock;      // MHz
  int bandwidth;  // GB/s to memory
  int tensor;     // 16-bit products of warps (mma.sync) with f32 sums: operations a clock and multiprocessor
  bool is_lowered = false;
  // The code that this build has for the device may be older than the device, and lack these instructions; 80:
  // compute_80. 0: that of the device.
  int architecture = 0;
  [[nodiscard]] constexpr int instructions() const {
    return architecture == 0 ? capability : std::min(architecture, capability);
  }

  // Launches may begin before those before them have ended.
  [[nodiscard]] constexpr bool overlaps() const { return instructions() >= 90; }
  [[nodiscard]] constexpr bool has_clusters() const { return instructions() >= 90; }
  [[nodiscard]] constexpr bool has_sm90() const { return cuda::has_sm90(capability); }

  friend bool operator==(const DeviceLimits&, const DeviceLimits&) = default;
};

// Bytes of a multiprocessor's shared memory that the driver keeps for each block.
inline constexpr int kSharedOfBlock = 1024;

// Blocks that a multiprocessor has room for by these limits. Registers may allow fewer.
constexpr int blocks_within(const DeviceLimits& limits, int threads, int shared_bytes) {
  if (shared_bytes > limits.shared_bytes) return 0;
  return std::min(limits.multiprocessor_shared_bytes / (shared_bytes + kSharedOfBlock),
                  limits.multiprocessor_threads / threads);
}

// The card on which the times of plan/times.hpp were measured.
inline constexpr DeviceLimits kH200 = {.capability = 90,
                                       .multiprocessors = 132,
                                       .shared_bytes = 232448,
                                       .multiprocessor_shared_bytes = 233472,
                                       .multiprocessor_threads = 2048,
                                       .l2_bytes = 60 << 20,
                                       .clock = 1980,
                                       .bandwidth = 4917,
                                       .tensor = 2048};

// Cards by the names that KVANT_CUDA_LIMITS takes, with the numbers of their data sheets.
struct Card {
  const char* name;
  DeviceLimits limits;
};
std::span<const Card> cards();

inline constexpr const char* kLimitsVariable = "KVANT_CUDA_LIMITS";

// The limits of a device, lowered as `text`, the variable's value, says: names of cards and key=number, between commas.
// A name takes the card's numbers where they are lower than the device's; a number that is not lower is refused. Later
// words count on what those before have left.
Result<DeviceLimits> lowered(const DeviceLimits& device, std::string_view text);

// DeviceLimits::tensor of a device, which the driver does not tell, from its capability and name.
int usual_tensor(int capability, std::string_view name);

// "8.6"
std::string capability_text(int capability);
// "compute capability 8.6, 82 multiprocessors, ..."
std::string limits_text(const DeviceLimits& limits);
// "KVANT_CUDA_LIMITS lowers this device to compute capability 8.6, ..."; empty where the limits are the device's own.
std::string lowered_text(const DeviceLimits& limits);

}  // namespace kvant::cuda
