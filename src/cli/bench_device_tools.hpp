// Tools that measurements on a device share: caches, rows to fill them with, memory that later rows of the table use
// again.
#pragma once

#include <optional>
#include <vector>

#include "bench/device.hpp"
#include "cli/bench.hpp"
#include "cli/bench_data.hpp"
#include "core/device.hpp"

namespace kvant::cli {

class DeviceTools {
 public:
  DeviceTools(bench::DeviceBench& device_bench, const BenchSettings& bench_settings, int device)
      : bench(device_bench), settings(bench_settings), device_(device) {}

  bench::DeviceBench& bench;
  const BenchSettings& settings;

  [[nodiscard]] Result<Cache> make_cache(const BenchCase& c, int layers) const;

  /// The use of a buffer of scratch().
  enum Use : std::size_t {
    kKeys,
    kValues,
    kKeyGains,
    kValueGains,
    kQueries,
    kQueryGains,
    kMask,
    kOut,
    kOut32,
    kWorkspace
  };
  /// Device memory that later calls use again; its old content is lost.
  Result<void*> scratch(Use which, std::size_t bytes);
  /// Channels as loud as those of loud_vectors, in device memory.
  Result<const float*> gains(Use which, int heads, int head_dim, double loudness, std::uint64_t seed);

  /// Rows of keys and values, bf16 [rows, kv_heads, their head_dim] in device memory.
  struct Supply {
    void* keys;
    void* values;
    const float* key_gains;
    const float* value_gains;
    std::int64_t rows;
  };
  Result<Supply> make_supply(const BenchCase& c, std::int64_t rows);
  Status fill(const Supply& s, const BenchCase& c, std::int64_t first_row, std::int64_t rows);
  static TensorView rows_of(const Supply& s, bool of_values, const BenchCase& c, std::int64_t first, std::int64_t rows);

  /// All layers hold the same vectors: only the memory must differ. The last tokens of each sequence may be left out.
  Result<Workload> fill_cache(const BenchCase& c, int layers, std::int64_t left_out);
  /// The same with all tokens. The next row of the table that can share it gets it again; it goes with the row before
  /// one that cannot.
  Result<Workload*> shared_cache(const BenchCase& c, int layers);
  void drop_shared() { shared_.reset(); }

  [[nodiscard]] int samples_for(double ns) const;
  /// The row's figures from its samples.
  static Status finish(BenchRow& row, std::vector<double>& ns);

 private:
  struct Scratch {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  int device_;
  std::vector<Scratch> scratch_;
  std::optional<Workload> shared_;
};

constexpr std::int64_t kSupplyBytes = std::int64_t{128} << 20;  // rows of one write, keys or values
constexpr int kStepSamples = 15;

/// Elements of a token's keys, or of its values.
std::int64_t row_values(const BenchCase& c, bool of_values);
std::vector<float> widened(const std::vector<std::uint16_t>& bf16);

/// Outputs of the first of several kinds of kernels for the same work, with which those of the others are compared.
struct FirstOutputs {
  std::vector<float> values;  ///< empty: the next row's are the first
  bool are_right = false;     ///< the first kind is known to be right, so that float64 attention is left out
};

/// The kernels that a plan takes, as AttentionOptions::kernel names them: of prefill kernels the kind.
std::string planned_kernel(const Plan& plan);

/// Fill in a row whose case is set. A row whose error is above its tolerance is refused, and ok.
Status measure_decode(DeviceTools& tools, BenchRow& row, FirstOutputs* of_first = nullptr);  // and step
Status measure_append(DeviceTools& tools, BenchRow& row);

}  // namespace kvant::cli
