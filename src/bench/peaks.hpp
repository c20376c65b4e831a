// A machine's own limits, by the instructions of each ISA: f32 multiply-adds, and bytes read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvant::bench {

struct PeakLoops {
  const char* isa;                               // as core::Kernels::name
  double (*fma_flops)(std::int64_t iterations);  // runs that many rounds of independent FMAs; returns the flops done
  std::uint64_t (*read_bytes)(const std::byte* data, std::size_t n);  // combines all words, so that nothing is skipped
};

// Null: there is no such ISA in this build. The processor must have it.
const PeakLoops* find_peak_loops(std::string_view isa);

}  // namespace kvant::bench
