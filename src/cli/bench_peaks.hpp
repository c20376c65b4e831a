// The machine's own limits, measured beside the rows: float32 multiply-adds, and reading memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/peaks.hpp"
#include "cli/bench.hpp"
#include "core/backend.hpp"

namespace kvant::cli {

class PeakMeter {
 public:
  /// Takes a buffer far larger than the last-level cache.
  explicit PeakMeter(const Machine& machine);
  /// Samples both limits a few times for each pair of ISA and threads that was added.
  void add(const core::Kernels* kernels, int threads);
  void measure();
  /// The 90th percentile over all samples: a peak that a busy moment pulled down would flatter every row.
  [[nodiscard]] BenchPeak peak(const std::string& isa, int threads) const;
  [[nodiscard]] std::vector<BenchPeak> peaks() const;

 private:
  struct Entry {
    const core::Kernels* kernels;
    const bench::PeakLoops* loops;
    int threads;
    std::int64_t iterations;  // that take about a millisecond, as long as a row: what hits one can miss the other
    std::vector<double> gflops, gb_per_s;
  };
  static BenchPeak peak_of(const Entry& entry);

  std::size_t bytes_;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t next_ = 0;  // where the next sample starts to read
  std::vector<Entry> entries_;
  std::uint64_t sink_ = 0;  // keeps the sums alive
};

}  // namespace kvant::cli
