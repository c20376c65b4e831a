#include <algorithm>
#include <cmath>

#include "cli/eval_cells.hpp"
#include "cli/report_parts.hpp"
#include "cli/svg_chart.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

struct Figure {
  const char* title;
  const char* y_title;
  double (*y)(const EvalRow&);
  double guide;
  const char* guide_label;
  bool has_front;
  bool is_time = false;
};

Chart scatter(const std::vector<EvalRow>& rows, const Figure& figure) {
  Chart chart;
  chart.title = figure.title;
  chart.x_title = "bits per value, all included";
  chart.y_title = figure.y_title;
  chart.guide = figure.guide;
  chart.guide_label = figure.guide_label;
  chart.series = {{"exact ends", Marker::circle, {}},
                  {"all encoded", Marker::square, {}},
                  {"not compressed", Marker::triangle, {}}};
  if (figure.has_front) {  // dense formats are all but exact: to scale they would squeeze everything else into a corner
    double least = INFINITY;
    for (const EvalRow& row : rows) {
      if (!row.formats.is_dense() && figure.y(row) > 0) least = std::min(least, figure.y(row));
    }
    if (std::isfinite(least)) chart.y_floor = least / 2.5;
  }
  std::vector<ChartPoint> compressed;
  for (const EvalRow& row : rows) {
    ChartPoint p{row.bits_per_value, figure.y(row), row.name(), {}, row.is_default()};
    const bool is_noisy = ratio_spread(row) > kHighSpread;
    p.is_noisy = figure.is_time && is_noisy;
    p.tooltip = fmt::format("{}: {:.2f} bits/value, rel. L2 {}, KL {}, {:.2f} x the time of f16{}", variant_text(row),
                            row.bits_per_value, small_number(row.rel_l2), small_number(row.kl_mean), row.time_to_f16,
                            is_noisy ? kNoiseMark : "");
    if (!row.formats.is_dense()) compressed.push_back(p);
    chart.series[row.formats.is_dense() ? 2 : row.has_exact_ends ? 0 : 1].points.push_back(std::move(p));
  }
  if (figure.has_front) chart.front = pareto_front(std::move(compressed));
  return chart;
}

}  // namespace

std::string charts_html(const std::vector<EvalRow>& rows) {
  const Figure figures[] = {
      {"Error of the attention output", "relative L2", [](const EvalRow& r) { return r.rel_l2; }, kGoodError, "2 %",
       true},
      {"Error of the attention weights", "mean KL divergence (nats)", [](const EvalRow& r) { return r.kl_mean; }, 0, "",
       true},
      {"Decode time", "time of the f16 cache", [](const EvalRow& r) { return r.time_to_f16; }, 1, "as f16", false,
       true},
  };
  std::string html = "<div class=\"charts\">\n";
  for (const Figure& figure : figures) html += render_svg(scatter(rows, figure));
  return html + "</div>\n";
}

}  // namespace kvant::cli
