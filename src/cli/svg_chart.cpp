#include "cli/svg_chart.hpp"

#include <algorithm>
#include <cmath>

#include "cli/table.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr double kWidth = 620, kHeight = 380;
constexpr double kLeft = 70, kRight = 20, kTop = 62, kBottom = 52;
constexpr double kLabelHeight = 12, kLetterWidth = 6.1;  // of the 11 px labels

struct Axis {
  double low = 0, high = 1;
  bool is_log = false;
  std::vector<double> ticks;
  [[nodiscard]] double place(double value) const {  // 0 to 1
    return is_log ? (std::log10(value) - std::log10(low)) / (std::log10(high) - std::log10(low))
                  : (value - low) / (high - low);
  }
};

// 1, 2 or 5 times a power of ten, so that about `wanted` steps fit.
double round_step(double span, int wanted) {
  const double raw = span / wanted;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double factor = raw / power;
  return power * (factor <= 1.5 ? 1 : factor <= 3 ? 2 : factor <= 7 ? 5 : 10);
}

Axis linear_axis(double high) {
  Axis axis;
  const double step = round_step(high > 0 ? high : 1, 7);
  axis.high = std::ceil(high / step) * step;
  if (!(axis.high > 0)) axis.high = 1;
  for (int i = 0; i * step <= axis.high * 1.0001; ++i) axis.ticks.push_back(i * step);
  return axis;
}

Axis log_axis(double low, double high) {
  Axis axis;
  axis.is_log = true;
  int first = static_cast<int>(std::floor(std::log10(low) + 1e-9));
  int last = static_cast<int>(std::ceil(std::log10(high) - 1e-9));
  if (last == first) ++last;
  axis.low = std::pow(10, first);
  axis.high = std::pow(10, last);
  for (int e = first; e <= last; ++e) axis.ticks.push_back(std::pow(10, e));
  return axis;
}

bool is_drawn(const Chart& chart, const ChartPoint& p) {
  return std::isfinite(p.x) && std::isfinite(p.y) && (!chart.is_log_y || p.y > 0 || chart.y_floor > 0);
}

struct Box {
  double x, y, width, height;
  [[nodiscard]] bool overlaps(const Box& o) const {
    return x < o.x + o.width && o.x < x + width && y < o.y + o.height && o.y < y + height;
  }
};

class Canvas {
 public:
  Canvas(const Chart& chart, const Axis& x, const Axis& y) : chart_(chart), x_(x), y_(y) {}

  std::string render() {
    out_ = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight,
                       escape_html(chart_.title));
    out_ += fmt::format("<text class=\"title\" x=\"{}\" y=\"20\">{}</text>\n", kLeft, escape_html(chart_.title));
    legend();
    axes();
    for (std::size_t i = 0; i < chart_.series.size(); ++i) points(i);
    for (std::size_t i = 0; i < chart_.series.size(); ++i) labels(i);
    return out_ + "</svg>\n";
  }

 private:
  [[nodiscard]] double px(double x) const { return kLeft + x_.place(x) * (kWidth - kLeft - kRight); }
  [[nodiscard]] double py(double y) const {
    return kHeight - kBottom - std::max(y_.place(y), 0.0) * (kHeight - kTop - kBottom);
  }
  [[nodiscard]] bool is_below(const ChartPoint& p) const { return p.y < chart_.y_floor; }

  void legend() {
    double at = kLeft;
    for (std::size_t i = 0; i < chart_.series.size(); ++i) {
      const std::string& name = chart_.series[i].name;
      out_ += fmt::format(
          "<circle class=\"series{}\" cx=\"{:.1f}\" cy=\"38\" r=\"4.5\"/><text x=\"{:.1f}\" y=\"42\">{}</text>\n", i,
          at + 5, at + 14, escape_html(name));
      at += 34 + kLetterWidth * static_cast<double>(name.size());
    }
  }

  void axes() {
    const double bottom = kHeight - kBottom, right = kWidth - kRight;
    for (const double tick : y_.ticks) {
      const std::string text = y_.is_log ? fmt::format("{:.0e}", tick) : fmt::format("{:g}", tick);
      out_ += fmt::format(
          "<line class=\"grid\" x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\"/><text class=\"tick end\" x=\"{}\" "
          "y=\"{:.1f}\">{}</text>\n",
          kLeft, py(tick), right, py(tick), kLeft - 8, py(tick) + 4, text);
    }
    for (const double tick : x_.ticks) {
      out_ += fmt::format(
          "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{}\" x2=\"{:.1f}\" y2=\"{}\"/><text class=\"tick middle\" "
          "x=\"{:.1f}\" "
          "y=\"{}\">{:g}</text>\n",
          px(tick), kTop, px(tick), bottom, px(tick), bottom + 17, tick);
    }
    out_ += fmt::format("<text class=\"middle\" x=\"{}\" y=\"{}\">{}</text>\n", (kLeft + right) / 2, kHeight - 12,
                        escape_html(chart_.x_title));
    out_ += fmt::format("<text class=\"middle\" transform=\"rotate(-90)\" x=\"{}\" y=\"18\">{}</text>\n",
                        -(kTop + bottom) / 2, escape_html(chart_.y_title));
  }

  void points(std::size_t i) {
    const ChartSeries& series = chart_.series[i];
    for (const ChartPoint& p : series.points) {
      if (!is_drawn(chart_, p)) continue;
      out_ +=
          fmt::format("<circle class=\"series{}{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4.5\"><title>{}</title></circle>\n",
                      i, is_below(p) ? " hollow" : "", px(p.x), py(p.y), escape_html(p.tooltip));
      taken_.push_back({px(p.x) - 5, py(p.y) - 5, 10, 10});
    }
  }

  // Right, left, above or below the point, whichever is free; a crowded label is dropped, the tooltip remains.
  void labels(std::size_t i) {
    for (const ChartPoint& p : chart_.series[i].points) {
      if (!is_drawn(chart_, p) || p.label.empty()) continue;
      const std::string label = is_below(p) ? fmt::format("{}: {:.0e}", p.label, p.y) : p.label;
      const double x = px(p.x), y = py(p.y), width = kLetterWidth * static_cast<double>(label.size());
      const Box places[] = {{x + 8, y - 6, width, kLabelHeight},          {x - 8 - width, y - 6, width, kLabelHeight},
                            {x - width / 2, y - 19, width, kLabelHeight}, {x - width / 2, y + 7, width, kLabelHeight},
                            {x + 6, y - 17, width, kLabelHeight},         {x + 6, y + 5, width, kLabelHeight}};
      for (const Box& box : places) {
        if (box.x < kLeft || box.x + box.width > kWidth || box.y < kTop - 8 ||
            box.y + box.height > kHeight - kBottom + 4)
          continue;
        if (std::any_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.overlaps(other); })) continue;
        out_ += fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", box.x, box.y + 10,
                            escape_html(label));
        taken_.push_back(box);
        break;
      }
    }
  }

  const Chart& chart_;
  const Axis &x_, &y_;
  std::vector<Box> taken_;
  std::string out_;
};

}  // namespace

std::string render_svg(const Chart& chart) {
  double x_high = 0, y_low = INFINITY, y_high = 0;
  for (const ChartSeries& series : chart.series) {
    for (const ChartPoint& p : series.points) {
      if (!is_drawn(chart, p)) continue;
      x_high = std::max(x_high, p.x);
      y_low = std::min(y_low, std::max(p.y, chart.y_floor));
      y_high = std::max(y_high, p.y);
    }
  }
  if (!std::isfinite(y_low)) y_low = y_high = 1;
  const Axis x = linear_axis(x_high);
  const Axis y = chart.is_log_y ? log_axis(y_low, y_high) : linear_axis(y_high);
  return Canvas(chart, x, y).render();
}

}  // namespace kvant::cli
