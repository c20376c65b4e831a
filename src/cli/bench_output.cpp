// Rows of `kvant bench` as text, markdown, CSV and JSON.
#include <algorithm>

#include "cli/bench.hpp"
#include "cli/bench_scores.hpp"
#include "cli/records.hpp"
#include "cli/table.hpp"
#include "core/backend.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

std::string percent(double share) {
  return fmt::format("{:.1f} %", 100 * share);
}

bool is_device(const BenchCase& c) {
  return c.backend != "cpu";
}

Table bench_table(const BenchResult& result) {
  const bool has_scores = std::any_of(result.rows.begin(), result.rows.end(),
                                      [](const BenchRow& row) { return row.bench_case.scores != BenchScores{}; });
  const bool has_products = std::any_of(result.rows.begin(), result.rows.end(), [](const BenchRow& row) {
    return row.bench_case.products != 0 || row.products == 8;
  });
  const bool on_device = !result.device.empty();
  std::vector<Table::Column> columns = {{"op", true},
                                        {"K/V", true},
                                        {"q/kv heads", false, 4},
                                        {"D", false, 3},
                                        {"batch", false, 6},
                                        {"keys"},
                                        {"q_len", false, 7},
                                        {"isa", true, 5},
                                        {"threads", false, 8},
                                        {"median"},
                                        {"spread", false, 11},
                                        {"ns/value", false, 13},
                                        {"GB/s", false, 10},
                                        {"of read", false, 2},
                                        {on_device ? "TFLOP/s" : "GFLOP/s", false, 12},
                                        {on_device ? "of product" : "of FMA", false, 9},
                                        {"error", false, 1}};
  const bool is_any_noisy =
      std::any_of(result.rows.begin(), result.rows.end(), [](const BenchRow& row) { return row.spread > kHighSpread; });
  if (on_device) columns.push_back({"kernel", true, 2});
  if (has_products) columns.push_back({"products", true, 2});
  if (has_scores) columns.push_back({"scores", true, 1});
  Table table(columns);
  for (const BenchRow& row : result.rows) {
    const BenchCase& c = row.bench_case;
    const bool is_append = c.op == BenchOp::append;
    std::vector<std::string> cells = {
        op_name(c.op),
        c.stored_name(),
        is_append ? fmt::format("-/{}", c.kv_heads) : fmt::format("{}/{}", c.q_heads, c.kv_heads),
        c.dims(),
        std::to_string(c.batch),
        c.first_keys > 0 ? fmt::format("{} + {} x {}", c.first_keys, c.batch - 1, c.keys) : std::to_string(c.keys),
        std::to_string(c.q_len),
        c.isa,
        is_device(c) ? "-" : std::to_string(c.threads)};
    if (row.refusal.empty()) {
      cells.insert(cells.end(), {time_text(row.median_ns) + noise_mark(row.spread, is_any_noisy), percent(row.spread),
                                 fmt::format("{:.4f}", row.ns_per_value), fmt::format("{:.2f}", row.gb_per_s),
                                 percent(row.share_of_read_bandwidth),
                                 is_append ? "-" : fmt::format("{:.1f}", on_device ? row.gflops / 1000 : row.gflops),
                                 on_device   ? row.share_of_product > 0 ? percent(row.share_of_product) : "-"
                                 : is_append ? "-"
                                             : percent(row.share_of_fma_peak)});
    } else {
      cells.insert(cells.end(), {"refused", "-", "-", "-", "-", "-", "-"});
    }
    cells.push_back(fmt::format("{:.1e}", row.rel_l2));
    if (on_device) cells.push_back(row.kernel.empty() ? "-" : row.kernel);
    if (has_products) cells.push_back(fmt::format("{} bits{}", row.products, c.products == 0 ? " (chosen)" : ""));
    if (has_scores) cells.push_back(c.scores.text());
    table.add(std::move(cells));
  }
  return table;
}

std::vector<std::string> notes(const BenchResult& result, const Machine& machine) {
  std::vector<std::string> lines;
  for (const BenchPeak& p : result.peaks) {
    lines.push_back(
        fmt::format("Peaks (90th percentile) measured in the same run, {} with {} thread{}: {:.1f} GFLOP/s of float32 "
                    "FMA, {:.1f} GB/s read.",
                    p.isa, p.threads, p.threads == 1 ? "" : "s", p.fma_gflops, p.read_gb_per_s));
  }
  if (!result.device.empty()) {
    lines.push_back(fmt::format("Read bandwidth measured in the same run, {}: {:.0f} GB/s.", result.device,
                                result.device_read_gb_per_s));
    if (result.device_product_tflops > 0) {
      lines.push_back(
          fmt::format("A product of bf16 matrices of 8192 x 8192 by cuBLAS in the same run: {:.0f} TFLOP/s.",
                      result.device_product_tflops));
    } else if (!result.device_product_missing.empty()) {
      lines.push_back(fmt::format("No share of a matrix product: {}.", result.device_product_missing));
    }
    lines.push_back(
        "decode, step, prefill: graph launches between events, caches rotated through four times the L2 cache, bf16 "
        "queries and outputs; append: all calls between two events.");
  }
  const std::int64_t between_mib =
      result.rows.empty() ? 0 : result.rows.front().bench_case.between_mib;  // the same in all rows
  if (between_mib > 0) {
    lines.push_back(
        fmt::format("Between two runs {} MiB of other memory are read, as a model's weights are: what that takes alone "
                    "is taken off.",
                    between_mib));
  }
  lines.push_back(
      "GB/s: stored bytes (append: written). ns/value: per stored key or value scalar. GFLOP/s: 4 x q_heads x D for "
      "each query and visible key.");
  lines.push_back(
      "error: relative L2 against float64 attention over the decoded vectors (append: of the decoded vectors).");
  lines.push_back(fmt::format("{}; kvant {}, {}.", machine_line(machine), kVersion, machine.compiler));
  bool is_noisy = false;
  for (const BenchRow& row : result.rows) {
    is_noisy = is_noisy || row.spread > kHighSpread;
    if (!row.refusal.empty()) {
      lines.push_back(
          fmt::format("REFUSED {} {}: {}.", op_name(row.bench_case.op), row.bench_case.stored_name(), row.refusal));
    }
  }
  if (is_noisy) lines.push_back(noise_note());
  return lines;
}

Json number_or_null(bool is_there, double value) {
  return is_there ? Json(value) : Json(nullptr);
}

}  // namespace

std::string bench_text(const BenchResult& result, const Machine& machine, std::size_t width) {
  std::string text = bench_table(result).text(width) + "\n";
  for (const std::string& line : notes(result, machine)) text += wrapped(line, width);
  return text;
}

std::string bench_markdown(const BenchResult& result, const Machine& machine) {
  std::string text = bench_table(result).markdown() + "\n";
  for (const std::string& line : notes(result, machine)) text += "- " + line + "\n";
  return text;
}

namespace {

Json bench_rows(const BenchResult& result) {
  Json rows = Json::array();
  for (const BenchRow& row : result.rows) {
    const BenchCase& c = row.bench_case;
    const bool has_speed = row.refusal.empty();
    Json& json = rows.emplace_back(Json{{"op", op_name(c.op)},
                                        {"backend", c.backend},
                                        {"isa", c.isa},
                                        {"k_format", format_info(c.formats.k).name},
                                        {"v_format", format_info(c.formats.v).name},
                                        {"k_centre", centre_name(c.k_centre)},
                                        {"q_heads", c.q_heads},
                                        {"kv_heads", c.kv_heads},
                                        {"head_dim", c.head_dim},
                                        {"v_head_dim", c.v_dim()},
                                        {"latent", c.latent},
                                        {"batch", c.batch},
                                        {"keys", c.keys},
                                        {"first_keys", c.keys_of(0)},
                                        {"q_len", c.q_len},
                                        {"threads", c.threads}});
    json.update(scores_json(c.scores));
    json.update({{"between_mib", c.between_mib},
                 {"kernel", row.kernel.empty() ? Json(nullptr) : Json(row.kernel)},
                 {"products", row.products == 0 ? Json(nullptr) : Json(row.products)},
                 {"median_ns", number_or_null(has_speed, row.median_ns)},
                 {"spread", number_or_null(has_speed, row.spread)},
                 {"ns_per_value", number_or_null(has_speed, row.ns_per_value)},
                 {"gb_per_s", number_or_null(has_speed, row.gb_per_s)},
                 {"gflops", number_or_null(has_speed && c.op != BenchOp::append, row.gflops)},
                 {"share_of_read_bandwidth", number_or_null(has_speed, row.share_of_read_bandwidth)},
                 {"share_of_fma_peak",
                  number_or_null(has_speed && c.op != BenchOp::append && !is_device(c), row.share_of_fma_peak)},
                 {"share_of_product", number_or_null(has_speed && row.share_of_product > 0, row.share_of_product)},
                 {"rel_l2", row.rel_l2}});
  }
  return rows;
}

}  // namespace

std::string bench_csv(const BenchResult& result) {
  return csv_text(bench_rows(result));
}

std::string bench_json(const BenchResult& result, const Machine& machine, const std::string& started) {
  RunFacts facts;
  facts.started = started;
  for (const BenchRow& row : result.rows) {
    facts.isas.push_back(row.bench_case.isa);
    facts.threads.push_back(row.bench_case.threads);
  }
  Json machine_facts = machine_json(machine, facts);
  Json& peaks = machine_facts["peaks"] = Json::array();
  for (const BenchPeak& p : result.peaks) {
    peaks.push_back(
        {{"isa", p.isa}, {"threads", p.threads}, {"fma_gflops", p.fma_gflops}, {"read_gb_per_s", p.read_gb_per_s}});
  }
  if (!result.device.empty()) {
    machine_facts["device"] = result.device;
    machine_facts["device_read_gb_per_s"] = result.device_read_gb_per_s;
    if (result.device_product_tflops > 0) machine_facts["device_product_tflops"] = result.device_product_tflops;
  }
  return json_text({{"machine", std::move(machine_facts)}, {"rows", bench_rows(result)}});
}

}  // namespace kvant::cli
