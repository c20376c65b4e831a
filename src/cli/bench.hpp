// `kvant bench`: time of decode, step, prefill and append over shapes. Each shape is first checked against float64
// attention over the decoded vectors; a shape whose error is above the tolerance gets no speed. bench_run.cpp tells how
// time is taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/formats.hpp"
#include "cli/machine.hpp"

namespace kvant::cli {

/// step: what a layer does for the next token, which is to store its key and value and attend to all.
enum class BenchOp { decode, step, prefill, append };
const char* op_name(BenchOp op);
std::optional<BenchOp> parse_op(const std::string& name);
std::vector<std::string> op_names();

/// Options that change scores or hide keys, besides causality (kvant/attention.hpp). The defaults change and hide
/// nothing.
struct BenchScores {
  std::int64_t window = 0;
  double softcap = 0;
  bool alibi = false;  ///< slopes 2^(-8 (head + 1) / q_heads), as of Press et al., "Train short, test long", section 3
  /// A mask tensor [1, 1, q_len, keys] that hides nothing, as frameworks pass along; of its type.
  std::optional<Dtype> mask;
  bool fresh_keys = false;  ///< AttentionOptions::fresh_keys

  bool operator==(const BenchScores&) const = default;
  [[nodiscard]] std::string text() const;  ///< "window 4096, softcap 50"; "": nothing
};

struct BenchCase {
  BenchOp op = BenchOp::decode;
  FormatPair formats;
  int q_heads = 16, kv_heads = 4, head_dim = 128, v_head_dim = 0;  ///< v_head_dim 0: head_dim
  bool latent = false;  ///< values are latents, and keys rotary keys: CacheConfig::latent
  int batch = 1;
  std::int64_t keys = 16384;
  std::int64_t first_keys = 0;  ///< keys of the first sequence; 0: as many as the others
  std::int64_t q_len = 1;       ///< append: tokens of one call; step: these are appended, too
  int threads = 1;              ///< 0 on a device
  std::string backend = "cpu";
  std::string isa;  ///< "cuda" on a device
  int sink_pages = 1, tail_pages = 1;
  KeyCentre k_centre = KeyCentre::none;
  /// On a device: so much other memory is read between two runs, as a model's weights are; the time of that alone is
  /// taken off.
  std::int64_t between_mib = 0;
  std::string kernel;  ///< on a device, as AttentionOptions::kernel
  int products = 0;    ///< as AttentionOptions::products
  BenchScores scores;

  [[nodiscard]] int v_dim() const { return v_head_dim > 0 ? v_head_dim : head_dim; }
  [[nodiscard]] int q_dim() const { return latent ? v_dim() + head_dim : head_dim; }
  /// "128", "192/128", "512+64" of a latent cache
  [[nodiscard]] std::string dims() const;
  /// name_with_centre
  [[nodiscard]] std::string stored_name() const;
  [[nodiscard]] std::int64_t keys_of(std::int64_t sequence) const {
    return sequence == 0 && first_keys > 0 ? first_keys : keys;
  }
  [[nodiscard]] std::int64_t most_keys() const { return std::max(keys_of(0), batch > 1 ? keys : 0); }
  [[nodiscard]] std::int64_t all_keys() const { return keys_of(0) + (batch - 1) * keys; }
  /// The keys of a sequence that some query sees.
  [[nodiscard]] std::int64_t seen_keys_of(std::int64_t sequence) const;
  [[nodiscard]] double stored_values() const;  ///< keys and values of the whole batch that some query sees
  /// 2 * q_heads * (the numbers of a query and of an output) for each pair of a query and a key it sees: a multiply and
  /// an add for K and for V.
  [[nodiscard]] double flops() const;
};

struct BenchRow {
  BenchCase bench_case;
  std::string refusal;  ///< not empty: no speed, and why
  std::string kernel;   ///< on a device: the kernels that the plan took, as AttentionOptions::kernel names them
  int products = 0;     ///< bits, as the plan chose; append: 0
  double rel_l2 = 0;    ///< the kernel's error over the decoded vectors; append: that of the codec
  double median_ns = 0;
  double spread = 0;  ///< (p90 - p10) / median
  int samples = 0;
  double bytes = 0;  ///< stored bytes that one run reads (append: writes)
  double ns_per_value = 0;
  double gb_per_s = 0;
  double gflops = 0;  ///< append: 0
  double share_of_read_bandwidth = 0;
  double share_of_fma_peak = 0;  ///< append, on a device: 0
  double share_of_product = 0;   ///< prefill on a device: of BenchResult::device_product_tflops
};

/// Takes the error that was found; a row whose error is above its tolerance is refused.
void judge(BenchRow& row, double rel_l2);

/// The machine's own limits with one ISA and number of threads, measured between the rows.
struct BenchPeak {
  std::string isa;
  int threads = 1;
  double fma_gflops = 0;
  double read_gb_per_s = 0;
};

struct BenchSettings {
  int rounds = 0;                                     ///< 0: by time
  double seconds = 1.0;                               ///< aim for each row
  std::int64_t cold_bytes = std::int64_t{128} << 20;  ///< caches rotate until this much lies between two uses of one
};

struct BenchResult {
  std::vector<BenchRow> rows;
  std::vector<BenchPeak> peaks;
  std::string device;                  ///< --backend cuda: its name
  double device_read_gb_per_s = 0;     ///< measured in the same run
  double device_product_tflops = 0;    ///< bf16 matrices', measured in the same run if it has prefill; 0: it was not
  std::string device_product_missing;  ///< why it was not
};

Result<BenchResult> run_bench(const std::vector<BenchCase>& cases, const BenchSettings& settings,
                              const std::function<void(double done, const std::string& what)>& on_progress);

/// The shapes of a named suite; formats are crossed with them. Errors: unknown name.
Result<std::vector<BenchCase>> suite_shapes(const std::string& name);

std::string bench_text(const BenchResult& result, const Machine& machine, std::size_t width);
std::string bench_markdown(const BenchResult& result, const Machine& machine);
std::string bench_csv(const BenchResult& result);
std::string bench_json(const BenchResult& result, const Machine& machine, const std::string& started);

}  // namespace kvant::cli
