// Rows of `kvant eval` as tables, JSON and CSV.
#include <algorithm>

#include "cli/eval.hpp"
#include "cli/eval_cells.hpp"
#include "cli/records.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {

std::vector<LayerRows> group_by_layer(const std::vector<EvalRow>& rows) {
  std::vector<LayerRows> groups;
  for (const EvalRow& row : rows) {
    const std::string title = fmt::format("{}: {}", row.file, row.layer_name);
    if (groups.empty() || groups.back().title != title) groups.push_back({title, {}});
    groups.back().rows.push_back(row);
  }
  return groups;
}

std::vector<SummaryRow> summarise(const std::vector<EvalRow>& rows) {
  std::vector<SummaryRow> summary;
  std::vector<double> counts;
  for (const EvalRow& row : rows) {
    auto at = std::find_if(summary.begin(), summary.end(), [&](const SummaryRow& s) {
      return s.mean.formats == row.formats && s.mean.has_exact_ends == row.has_exact_ends && s.mean.basis == row.basis;
    });
    if (at == summary.end()) {
      summary.push_back({row, row.rel_l2});
      summary.back().mean.page_bits *= static_cast<double>(row.bf16_bytes);
      counts.push_back(1);
      continue;
    }
    EvalRow& m = at->mean;
    m.cache_bytes += row.cache_bytes;
    m.bf16_bytes += row.bf16_bytes;
    m.page_bits += row.page_bits * static_cast<double>(row.bf16_bytes);
    m.rel_l2 += row.rel_l2;
    m.kl_mean += row.kl_mean;
    m.top1 += row.top1;
    m.ns_per_token += row.ns_per_token;
    m.time_to_f16 += row.time_to_f16;
    m.cosine_min = std::min(m.cosine_min, row.cosine_min);
    m.kl_max = std::max(m.kl_max, row.kl_max);
    m.kernel_rel_l2 = std::max(m.kernel_rel_l2, row.kernel_rel_l2);
    m.spread = std::max(m.spread, row.spread);
    m.f16_spread = std::max(m.f16_spread, row.f16_spread);
    at->rel_l2_worst = std::max(at->rel_l2_worst, row.rel_l2);
    counts[static_cast<std::size_t>(at - summary.begin())] += 1;
  }
  for (std::size_t i = 0; i < summary.size(); ++i) {
    EvalRow& m = summary[i].mean;
    m.bits_per_value = 16.0 * static_cast<double>(m.cache_bytes) / static_cast<double>(m.bf16_bytes);
    m.page_bits /= static_cast<double>(m.bf16_bytes);
    for (double* figure : {&m.rel_l2, &m.kl_mean, &m.top1, &m.ns_per_token, &m.time_to_f16}) *figure /= counts[i];
  }
  return summary;
}

std::string small_number(double value) {
  if (value == 0) return "0";
  return value >= 0.01 && value < 1000 ? fmt::format("{:.4f}", value) : fmt::format("{:.2e}", value);
}

std::string ends_text(const EvalRow& row) {
  return row.formats.is_dense() ? "dense" : row.has_exact_ends ? "exact ends" : "all encoded";
}

double ratio_spread(const EvalRow& row) {
  return std::max(row.spread, row.f16_spread);
}

namespace {

std::string time_ratio(const EvalRow& row, bool is_any_noisy) {
  return fmt::format("{:.2f} x", row.time_to_f16) + noise_mark(ratio_spread(row), is_any_noisy);
}

}  // namespace

Table layer_table(const std::vector<EvalRow>& rows) {
  Table table({{"K/V", true},
               {"stored", true},
               {"basis", true, 5},
               {"bits/value"},
               {"in pages", false, 8},
               {"cache", false, 10},
               {"of bf16", false, 6},
               {"rel. L2"},
               {"worst cos", false, 9},
               {"KL mean", false, 3},
               {"KL max", false, 7},
               {"top-1", false, 2},
               {"time/token", false, 4},
               {"of f16", false, 1}});
  const auto is_noisy = [](const EvalRow& row) { return row.spread > kHighSpread; };
  const auto is_ratio_noisy = [](const EvalRow& row) { return ratio_spread(row) > kHighSpread; };
  const bool any = std::any_of(rows.begin(), rows.end(), is_noisy);
  const bool any_ratio = std::any_of(rows.begin(), rows.end(), is_ratio_noisy);
  for (const EvalRow& row : rows) {
    table.add(
        {row.formats.name() + (row.is_default() ? " *" : ""), ends_text(row), row.basis,
         fmt::format("{:.2f}", row.bits_per_value), fmt::format("{:.2f}", row.page_bits),
         bytes_text(static_cast<double>(row.cache_bytes)),
         fmt::format("{:.1f} %", 100.0 * static_cast<double>(row.cache_bytes) / static_cast<double>(row.bf16_bytes)),
         small_number(row.rel_l2), fmt::format("{:.5f}", row.cosine_min), small_number(row.kl_mean),
         small_number(row.kl_max), fmt::format("{:.1f} %", 100 * row.top1),
         time_text(row.ns_per_token) + noise_mark(row.spread, any), time_ratio(row, any_ratio)});
  }
  return table;
}

Table summary_table(const std::vector<SummaryRow>& rows) {
  Table table({{"K/V", true},
               {"stored", true},
               {"basis", true, 5},
               {"bits/value"},
               {"in pages", false, 8},
               {"of bf16", false, 6},
               {"rel. L2"},
               {"worst layer", false, 4},
               {"worst cos", false, 9},
               {"KL mean", false, 3},
               {"KL max", false, 7},
               {"top-1", false, 2},
               {"time of f16", false, 1}});
  bool any = false;
  for (const SummaryRow& row : rows) any = any || ratio_spread(row.mean) > kHighSpread;
  for (const auto& [m, rel_l2_worst] : rows) {
    table.add({m.formats.name() + (m.is_default() ? " *" : ""), ends_text(m), m.basis,
               fmt::format("{:.2f}", m.bits_per_value), fmt::format("{:.2f}", m.page_bits),
               fmt::format("{:.1f} %", 100.0 * static_cast<double>(m.cache_bytes) / static_cast<double>(m.bf16_bytes)),
               small_number(m.rel_l2), small_number(rel_l2_worst), fmt::format("{:.5f}", m.cosine_min),
               small_number(m.kl_mean), small_number(m.kl_max), fmt::format("{:.1f} %", 100 * m.top1),
               time_ratio(m, any)});
  }
  return table;
}

std::vector<std::string> legend_lines(const std::vector<EvalRow>& rows, const std::vector<std::string>& left_out) {
  const auto any = [&](auto&& is) { return std::any_of(rows.begin(), rows.end(), is); };
  const auto has = [&](const char* column) {
    return std::find(left_out.begin(), left_out.end(), column) == left_out.end();
  };
  std::vector<std::string> lines;
  const auto explain = [&](bool is_there, std::string line) {
    if (is_there) lines.push_back(std::move(line));
  };
  explain(any([](const EvalRow& row) { return row.is_default(); }), "* the library's default.");
  explain(any([](const EvalRow& row) { return !row.formats.is_dense() && row.has_exact_ends; }),
          "exact ends: the first page and the newest 64 to 127 tokens are kept as given (the default).");
  explain(any([](const EvalRow& row) { return !row.formats.is_dense() && !row.has_exact_ends; }),
          "all encoded: everything but the query's own token is encoded.");
  explain(has("basis") && any([](const EvalRow& row) { return row.k_centre == KeyCentre::page; }),
          "page: keys are encoded around the mean key of their page.");
  lines.push_back("bits/value: all the cache holds (codes, scales, exact ends, tables) at this length" +
                  std::string(has("in pages") ? "; in pages: the limit for long sequences." : "."));
  lines.push_back(fmt::format("rel. L2{}: attention output against float64 attention over the exact keys and values.",
                              has("worst cos") ? ", worst cos" : ""));
  explain(has("KL mean") || has("top-1"), "KL, top-1: attention weights likewise.");
  explain(has("time/token"),
          "time/token: median of attending one query at the last position, all formats taking turns.");
  explain((has("time/token") && any([](const EvalRow& row) { return row.spread > kHighSpread; })) ||
              (has("of f16") && any([](const EvalRow& row) { return ratio_spread(row) > kHighSpread; })),
          noise_note());
  double kernel = 0;
  for (const EvalRow& row : rows) kernel = std::max(kernel, row.kernel_rel_l2);
  lines.push_back(fmt::format(
      "The kernels' own error (against float64 attention over the decoded vectors) is at most {:.1e}.", kernel));
  return lines;
}

std::string eval_tables(const std::vector<EvalRow>& rows, const EvalRun& run, std::size_t width) {
  std::string text;
  std::vector<std::string> left_out;  // columns that no table shows: the legend does not explain them
  const std::vector<LayerRows> groups = group_by_layer(rows);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const Table table = layer_table(groups[i].rows);
    text += wrapped(groups[i].title + "  " + run.layer_lines[i], width);
    text += table.text(width) + "\n";
    std::vector<std::string> own = table.left_out(width);
    if (i == 0) left_out = own;
    std::erase_if(left_out,
                  [&](const std::string& title) { return std::find(own.begin(), own.end(), title) == own.end(); });
  }
  if (groups.size() > 1) {
    text += fmt::format("Summary of {} layers (mean; worst where it says so)\n", groups.size());
    text += summary_table(summarise(rows)).text(width) + "\n";
  }
  for (const std::string& line : legend_lines(rows, left_out)) text += wrapped(line, width);
  return text + wrapped(fmt::format("{}; kvant {}, {}; isa {}, {} thread{}.", machine_line(run.machine), kVersion,
                                    run.machine.compiler, run.settings.isa, run.settings.threads,
                                    run.settings.threads == 1 ? "" : "s"),
                        width);
}

namespace {

Json eval_rows(const std::vector<EvalRow>& rows) {
  Json list = Json::array();
  for (const EvalRow& row : rows) {
    list.push_back({{"file", row.file},
                    {"layer", row.layer},
                    {"k_format", format_info(row.formats.k).name},
                    {"v_format", format_info(row.formats.v).name},
                    {"exact_ends", row.has_exact_ends},
                    {"basis", row.basis},
                    {"k_centre", centre_name(row.k_centre)},
                    {"bits_per_value", row.bits_per_value},
                    {"cache_bytes", row.cache_bytes},
                    {"rel_l2", row.rel_l2},
                    {"cosine_min", row.cosine_min},
                    {"kl_mean", row.kl_mean},
                    {"kl_max", row.kl_max},
                    {"top1", row.top1},
                    {"ns_per_token", row.ns_per_token},
                    {"spread", row.spread}});
  }
  return list;
}

}  // namespace

std::string eval_json(const std::vector<EvalRow>& rows, const EvalRun& run) {
  const RunFacts facts{{run.settings.isa}, {run.settings.threads}, run.started};
  return json_text({{"machine", machine_json(run.machine, facts)}, {"rows", eval_rows(rows)}});
}

std::string eval_csv(const std::vector<EvalRow>& rows) {
  return csv_text(eval_rows(rows));
}

}  // namespace kvant::cli
