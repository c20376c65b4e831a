// `kvant eval`: what a cache format costs on captured queries, keys and values. See eval_layer.cpp for what is
// computed, eval_report.cpp and eval_tables.cpp for how it is shown.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/formats.hpp"
#include "cli/machine.hpp"
#include "kvant/codec.hpp"
#include "kvant/io.hpp"

namespace kvant::cli {

/// One way to store a layer.
struct Variant {
  FormatPair formats;
  /// One sink and one tail page, whatever the window; false: all but the query's own token encoded.
  bool has_exact_ends = true;
  KeyCentre k_centre = KeyCentre::none;
};

/// One captured layer and how to compute on it.
struct EvalLayer {
  std::string file;
  io::CapturedLayer captured;
  std::shared_ptr<const BasisSet> bases;  ///< null: the default basis of each format
};

struct EvalSettings {
  int threads = 0;  ///< resolved: at least 1
  std::string isa;  ///< resolved name
};

struct EvalRow {
  std::string file;
  std::string layer_name;
  int layer = 0;
  FormatPair formats;
  bool has_exact_ends = true;
  KeyCentre k_centre = KeyCentre::none;
  std::string basis;  ///< "hadamard", "none", "calibrated", or two of them as keys/values; and "page" for page centres
  std::int64_t cache_bytes = 0;  ///< everything the cache holds at the last position: codes, scales, exact ends, tables
  std::int64_t bf16_bytes = 0;   ///< the same tokens as plain bf16
  double bits_per_value = 0;     ///< cache_bytes over the values stored
  double page_bits = 0;          ///< bits a value inside an encoded page, scales included: the limit for long sequences
  double rel_l2 = 0;             ///< |out - ref| / |ref| over all queries and heads
  double cosine_min = 1;         ///< worst row (one query, one head)
  double kl_mean = 0, kl_max = 0;  ///< KL(exact weights || weights with the cache's keys), nats
  double top1 = 1;                 ///< share of rows whose largest weight is on the same token
  double kernel_rel_l2 = 0;        ///< run against float64 attention over the decoded vectors: the kernel's own error
  double ns_per_token = 0;         ///< median time of attending one query at the last position
  double time_to_f16 = 0;          ///< the same over that of the f16 cache
  double spread = 0;               ///< the times' (p90 - p10) / median
  double f16_spread = 0;           ///< the same of the f16 cache's times
  [[nodiscard]] std::string name() const { return name_with_centre(formats, k_centre); }
  [[nodiscard]] bool is_default() const { return formats == kDefaultPair && k_centre == default_centre(formats); }
};

/// All variants of one layer. `on_progress` is called with what has just been finished, once a variant.
Result<std::vector<EvalRow>> evaluate_layer(const EvalLayer& layer, const std::vector<Variant>& variants,
                                            const EvalSettings& settings,
                                            const std::function<void(const std::string&)>& on_progress);

/// The facts about the run that the report gives.
struct EvalRun {
  std::string command_line;
  std::string started;  ///< UTC
  double seconds = 0;
  Machine machine;
  EvalSettings settings;
  std::string basis_file;
  std::vector<std::string> layer_lines;  ///< one line of geometry a layer
};

/// Rows of one layer, in order, as the tables and the report group them.
struct LayerRows {
  std::string title;
  std::vector<EvalRow> rows;
};
std::vector<LayerRows> group_by_layer(const std::vector<EvalRow>& rows);
/// One row a variant over all layers: sizes summed, errors averaged (rel_l2, kl_mean, top1, time) or worst (cosine_min,
/// kl_max). `rel_l2_worst` beside them.
struct SummaryRow {
  EvalRow mean;
  double rel_l2_worst = 0;
};
std::vector<SummaryRow> summarise(const std::vector<EvalRow>& rows);

std::string eval_tables(const std::vector<EvalRow>& rows, const EvalRun& run, std::size_t width);
std::string eval_json(const std::vector<EvalRow>& rows, const EvalRun& run);
std::string eval_csv(const std::vector<EvalRow>& rows);
std::string eval_report(const std::vector<EvalRow>& rows, const EvalRun& run);

}  // namespace kvant::cli
