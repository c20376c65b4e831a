#include "cli/bench_peaks.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cli/parallel.hpp"

namespace kvant::cli {
namespace {

template <class Fn>
double seconds_of(const Fn& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

constexpr std::size_t kShare = std::size_t{1} << 20;        // the buffer is a multiple of this
constexpr std::size_t kReadAtOnce = std::size_t{16} << 20;  // a sample of one worker: one to two milliseconds

}  // namespace

PeakMeter::PeakMeter(const Machine& machine) {
  const std::int64_t wanted =
      std::clamp<std::int64_t>(2 * machine.l3_bytes, std::int64_t{256} << 20, std::int64_t{512} << 20);
  const std::int64_t spare = machine.available_bytes > 0 ? machine.available_bytes / 4 : wanted;
  bytes_ = static_cast<std::size_t>(std::max<std::int64_t>(std::min(wanted, spare), std::int64_t{16} << 20)) / kShare *
           kShare;
  buffer_ = std::make_unique_for_overwrite<std::byte[]>(bytes_);
  parallel_for(core::hardware_threads(), static_cast<std::int64_t>(bytes_ / kShare), [&](std::int64_t i) {
    std::memset(buffer_.get() + static_cast<std::size_t>(i) * kShare, static_cast<int>(i % 251 + 1), kShare);
  });
}

void PeakMeter::add(const core::Kernels* kernels, int threads) {
  for (const Entry& e : entries_) {
    if (e.kernels == kernels && e.threads == threads) return;
  }
  const bench::PeakLoops* loops = bench::find_peak_loops(kernels->name);
  if (loops == nullptr) return;  // peak() then has none; bench_peaks_test looks for one of every ISA
  std::int64_t iterations = 1 << 12;
  while (iterations < (std::int64_t{1} << 40)) {
    const double seconds = seconds_of([&] { sink_ += loops->fma_flops(iterations) > 0; });
    if (seconds > 1e-3) break;
    iterations *= 2;
  }
  entries_.push_back({kernels, loops, threads, iterations, {}, {}});
}

void PeakMeter::measure() {
  constexpr int kSamples = 6;
  for (Entry& e : entries_) {
    const auto threads = static_cast<std::size_t>(e.threads);
    std::vector<double> flops(threads * 8);  // a cache line each
    std::vector<std::uint64_t> sums(threads * 8);
    const std::size_t part = std::min(kReadAtOnce * threads, bytes_) / threads / 64 * 64;
    for (int sample = 0; sample < kSamples; ++sample) {
      const double fma_seconds = seconds_of([&] {
        parallel_for(e.threads, e.threads, [&](std::int64_t w) {
          flops[static_cast<std::size_t>(w) * 8] = e.loops->fma_flops(e.iterations);
        });
      });
      double total = 0;
      for (const double f : flops) total += f;
      e.gflops.push_back(total / fma_seconds * 1e-9);

      if (next_ + part * threads > bytes_) next_ = 0;
      const std::byte* from = buffer_.get() + next_;
      const double read_seconds = seconds_of([&] {
        parallel_for(e.threads, e.threads, [&](std::int64_t w) {
          const auto worker = static_cast<std::size_t>(w);
          sums[worker * 8] = e.loops->read_bytes(from + worker * part, part);
        });
      });
      for (const std::uint64_t s : sums) sink_ += s;
      next_ += part * threads;
      e.gb_per_s.push_back(static_cast<double>(part * threads) / read_seconds * 1e-9);
    }
  }
}

BenchPeak PeakMeter::peak_of(const Entry& e) {
  std::vector<double> gflops = e.gflops, gb_per_s = e.gb_per_s;
  return {e.kernels->name, e.threads, quantile(gflops, 0.9), quantile(gb_per_s, 0.9)};
}

BenchPeak PeakMeter::peak(const std::string& isa, int threads) const {
  for (const Entry& e : entries_) {
    if (isa == e.kernels->name && threads == e.threads) return peak_of(e);
  }
  return {isa, threads, 0, 0};
}

std::vector<BenchPeak> PeakMeter::peaks() const {
  std::vector<BenchPeak> list;
  for (const Entry& e : entries_) list.push_back(peak_of(e));
  return list;
}

}  // namespace kvant::cli
