// The HTML report of `kvant eval`: one page, no external resource, light and dark.
#include <algorithm>
#include <cmath>

#include "cli/eval.hpp"
#include "cli/eval_cells.hpp"
#include "cli/svg_chart.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kStyle = R"css(
:root { --back: #ffffff; --panel: #f6f7f9; --text: #1c2128; --faint: #667080; --line: #dde1e7;
        --s0: #1769c2; --s1: #c4561a; --s2: #2f8a4c; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171c; --panel: #1d2229; --text: #e4e8ee; --faint: #97a1b0; --line: #343b46;
          --s0: #6cb1ff; --s1: #ff9d62; --s2: #6fd08c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1340px; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 38px 0 4px; }
p, dl, ul { max-width: 900px; } .faint { color: var(--faint); margin: 0 0 14px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; margin: 12px 0; }
.charts svg { width: 100%; height: auto; background: var(--panel); border-radius: 8px; }
svg text { fill: var(--text); font-size: 12px; } svg .title { font-size: 14px; font-weight: 600; }
svg .tick, svg .label { font-size: 11px; } svg .tick { fill: var(--faint); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .series0 { fill: var(--s0); stroke: var(--s0); } svg .series1 { fill: var(--s1); stroke: var(--s1); }
svg .series2 { fill: var(--s2); stroke: var(--s2); } svg circle.hollow { fill: none; stroke-width: 1.6; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 11px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; } .text { text-align: left; } tbody tr:hover { background: var(--panel); }
dt { color: var(--faint); float: left; clear: left; width: 110px; } dd { margin: 0 0 3px 120px; overflow-wrap: anywhere; }
)css";

// Series: encoded with exact ends, all encoded, dense.
template <class X, class Y>
Chart scatter(const std::vector<EvalRow>& rows, std::string title, std::string x_title, std::string y_title,
              bool is_log, const X& x, const Y& y) {
  Chart chart{std::move(title),
              std::move(x_title),
              std::move(y_title),
              is_log,
              0,
              {{"exact ends", {}}, {"all encoded", {}}, {"dense", {}}}};
  if (is_log) {  // dense formats are all but exact: to scale they would squeeze everything else into a corner
    double least = INFINITY;
    for (const EvalRow& row : rows) {
      if (!row.formats.is_dense() && y(row) > 0) least = std::min(least, y(row));
    }
    if (std::isfinite(least)) chart.y_floor = std::pow(10, std::floor(std::log10(least)));
  }
  for (const EvalRow& row : rows) {
    ChartPoint p{x(row), y(row), row.formats.name(), {}};
    p.tooltip =
        fmt::format("{}, {}: {:.2f} bits/value, rel. L2 {}, KL {}, {:.2f} x the time of f16", p.label, ends_text(row),
                    row.bits_per_value, small_number(row.rel_l2), small_number(row.kl_mean), row.time_to_f16);
    chart.series[row.formats.is_dense() ? 2 : row.has_exact_ends ? 0 : 1].points.push_back(std::move(p));
  }
  std::erase_if(chart.series, [](const ChartSeries& s) { return s.points.empty(); });
  return chart;
}

std::string charts(const std::vector<EvalRow>& rows) {
  const auto bits = [](const EvalRow& r) { return r.bits_per_value; };
  std::string html = "<div class=\"charts\">\n";
  html += render_svg(scatter(rows, "Error of the attention output", "bits per value, all included", "relative L2", true,
                             bits, [](const EvalRow& r) { return r.rel_l2; }));
  html += render_svg(scatter(rows, "Error of the attention weights", "bits per value, all included",
                             "mean KL divergence (nats)", true, bits, [](const EvalRow& r) { return r.kl_mean; }));
  html += render_svg(scatter(rows, "Decode time", "bits per value, all included", "time of the f16 cache", false, bits,
                             [](const EvalRow& r) { return r.time_to_f16; }));
  return html + "</div>\n";
}

std::string facts(const EvalRun& run) {
  std::string html = "<dl>\n";
  const auto fact = [&](const char* name, const std::string& value) {
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, escape_html(value));
  };
  fact("Command", run.command_line);
  fact("Run", fmt::format("{}, {:.1f} s", run.started, run.seconds));
  fact("kvant", fmt::format("{} ({})", kVersion, run.machine.compiler));
  fact("Machine", machine_line(run.machine));
  fact("Kernels", fmt::format("cpu, {}, {} thread{}", run.settings.isa, run.settings.threads,
                              run.settings.threads == 1 ? "" : "s"));
  fact("Basis", run.basis_file.empty() ? "the default of each format" : run.basis_file);
  return html + "</dl>\n";
}

}  // namespace

std::string eval_report(const std::vector<EvalRow>& rows, const EvalRun& run) {
  std::string html =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>kvant eval</title>\n<style>";
  html += kStyle;
  html +=
      "</style>\n</head>\n<body>\n<h1>What each cache format costs</h1>\n"
      "<p class=\"faint\">Decoding replayed over captured queries, keys and values: each query is attended right after "
      "the "
      "keys up to its own position were appended. Lower left is better in every chart.</p>\n";
  html += facts(run);

  const std::vector<LayerRows> groups = group_by_layer(rows);
  if (groups.size() > 1) {
    const std::vector<SummaryRow> summary = summarise(rows);
    std::vector<EvalRow> means;
    for (const SummaryRow& row : summary) means.push_back(row.mean);
    html += fmt::format("<h2>Summary</h2>\n<p class=\"faint\">Mean of {} layers; worst where it says so.</p>\n",
                        groups.size());
    html += charts(means) + summary_table(summary).html();
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    html += fmt::format("<h2>{}</h2>\n<p class=\"faint\">{}</p>\n", escape_html(groups[i].title),
                        escape_html(run.layer_lines[i]));
    html += charts(groups[i].rows) + layer_table(groups[i].rows).html();
  }

  html += "<h2>How to read this</h2>\n<ul>\n";
  for (const std::string& line : legend_lines(rows)) html += "<li>" + escape_html(line) + "</li>\n";
  return html + "</ul>\n</body>\n</html>\n";
}

}  // namespace kvant::cli
