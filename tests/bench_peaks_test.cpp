// The loops that kvant bench holds a machine's figures against (bench/peaks.hpp).
#include "bench/peaks.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/backend.hpp"

namespace kvant::bench {
namespace {

TEST(BenchPeaks, EveryIsaHasLoops) {
  for (const core::Kernels* kernels : core::all_kernels()) {
    EXPECT_NE(find_peak_loops(kernels->name), nullptr) << kernels->name;
  }
  EXPECT_EQ(find_peak_loops("sse9"), nullptr);
}

// Twelve chains, two operations each, of at least four lanes.
TEST(BenchPeaks, OperationsAreCounted) {
  for (const core::Kernels* kernels : core::all_kernels()) {
    if (!kernels->available()) continue;
    const PeakLoops* loops = find_peak_loops(kernels->name);
    ASSERT_NE(loops, nullptr) << kernels->name;
    EXPECT_EQ(loops->fma_flops(0), 0) << kernels->name;
    const double one = loops->fma_flops(1);
    EXPECT_GE(one, 12 * 2 * 4) << kernels->name;
    EXPECT_EQ(loops->fma_flops(100), 100 * one) << kernels->name;
  }
}

TEST(BenchPeaks, EveryWordIsRead) {
  std::vector<std::uint64_t> words(64, 0);
  for (const core::Kernels* kernels : core::all_kernels()) {
    if (!kernels->available()) continue;
    const PeakLoops* loops = find_peak_loops(kernels->name);
    ASSERT_NE(loops, nullptr) << kernels->name;
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = 0x5EED + i;
      EXPECT_EQ(loops->read_bytes(reinterpret_cast<const std::byte*>(words.data()), 8 * words.size()), words[i])
          << kernels->name << ", word " << i;
      words[i] = 0;
    }
  }
}

}  // namespace
}  // namespace kvant::bench
