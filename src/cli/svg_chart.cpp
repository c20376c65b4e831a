#include "cli/svg_chart.hpp"

#include <algorithm>
#include <cmath>

#include "cli/chart_axis.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr double kWidth = 460, kHeight = 370;
constexpr double kLeft = 64, kRight = 14, kBottom = 48, kLegendTop = 40, kLegendRow = 17;
constexpr double kLabelHeight = 13, kLetterWidth = 6.6, kRadius = 4;  // letters of the 12 px labels

// Far beyond any figure, and such that no power of ten on the way overflows.
constexpr double kLeast = 1e-30, kMost = 1e30;

bool is_shown(const ChartPoint& p, double y_floor) {
  return p.x >= kLeast && p.x <= kMost && p.y <= kMost && (p.y >= kLeast || (p.y >= 0 && p.y < y_floor));
}

struct Box {
  double x, y, width, height;
  [[nodiscard]] bool overlaps(const Box& o) const {
    return x < o.x + o.width && o.x < x + width && y < o.y + o.height && o.y < y + height;
  }
};

std::string marker_svg(Marker marker, const std::string& classes, double x, double y, const std::string& tooltip) {
  const std::string title = tooltip.empty() ? "" : "<title>" + escape_html(tooltip) + "</title>";
  switch (marker) {
    case Marker::square:
      return fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"7.6\" height=\"7.6\">{}</rect>\n",
                         classes, x - 3.8, y - 3.8, title);
    case Marker::triangle:
      return fmt::format("<path class=\"{}\" d=\"M{:.1f} {:.1f}l5 8.6h-10z\">{}</path>\n", classes, x, y - 5.4, title);
    case Marker::circle: break;
  }
  return fmt::format("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\">{}</circle>\n", classes, x, y, kRadius,
                     title);
}

std::string noise_svg(double x, double y) {
  return fmt::format("<text class=\"noise\" x=\"{:.1f}\" y=\"{:.1f}\">!</text>\n", x, y);
}

class Canvas {
 public:
  Canvas(const Chart& chart, const LogAxis& x, const LogAxis& y) : chart_(chart), x_(x), y_(y) {}

  std::string render() {
    const std::string key = legend();
    out_ = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight,
                       escape_html(chart_.title));
    out_ += fmt::format("<text class=\"title\" x=\"12\" y=\"22\">{}</text>\n", escape_html(chart_.title));
    out_ += key;
    axes();
    guide();
    links();
    front();
    for (std::size_t i = 0; i < chart_.series.size(); ++i) points(i);
    labels();
    return out_ + "</svg>\n";
  }

 private:
  [[nodiscard]] double px(double x) const { return kLeft + x_.place(x) * (kWidth - kLeft - kRight); }
  [[nodiscard]] double py(double y) const {
    const double place = is_below(y) ? 0 : y_.place(y);
    return kHeight - kBottom - place * (kHeight - top_ - kBottom);
  }
  [[nodiscard]] bool is_below(double y) const { return y < chart_.y_floor; }

  template <class F>
  void each_point(const F& use) const {
    for (std::size_t i = 0; i < chart_.series.size(); ++i) {
      for (const ChartPoint& p : chart_.series[i].points) {
        if (is_shown(p, chart_.y_floor)) use(i, p);
      }
    }
  }

  // Names what the chart has, no more; sets where the plot begins below it.
  std::string legend() {
    struct Entry {
      std::string sign, name;  // the sign around 0, 0
    };
    std::vector<Entry> entries;
    bool has_default = false, has_below = false, has_noise = false;
    std::vector<bool> has_points(chart_.series.size());
    each_point([&](std::size_t i, const ChartPoint& p) {
      has_points[i] = true;
      has_noise = has_noise || p.is_noisy;
      has_default = has_default || p.is_default;
      has_below = has_below || is_below(p.y);
    });
    for (std::size_t i = 0; i < chart_.series.size(); ++i) {
      const ChartSeries& s = chart_.series[i];
      if (!has_points[i]) continue;
      entries.push_back({marker_svg(s.marker, fmt::format("series{}", i), 0, 0, ""), s.name});
    }
    if (chart_.front.size() > 1) entries.push_back({"<path class=\"front\" d=\"M-7 0h14\"/>", "Pareto line"});
    if (has_default) entries.push_back({"<circle class=\"default\" cx=\"0\" cy=\"0\" r=\"7\"/>", "the default"});
    if (has_below) {
      entries.push_back({"<circle class=\"hollow\" cx=\"0\" cy=\"0\" r=\"4\"/>", "hollow = below the scale"});
    }
    if (has_noise) entries.push_back({noise_svg(-2, 4), "noisy time"});
    std::string out;
    double x = 12, y = kLegendTop;
    for (const auto& [sign, name] : entries) {
      const double width = 34 + kLetterWidth * static_cast<double>(name.size());
      if (x > 12 && x + width > kWidth) {
        x = 12;
        y += kLegendRow;
      }
      out += fmt::format("<g transform=\"translate({:.1f} {})\">{}<text x=\"12\" y=\"4\">{}</text></g>\n", x + 7, y,
                         sign, escape_html(name));
      x += width;
    }
    top_ = y + kLegendRow;
    return out;
  }

  void axes() {
    const double bottom = kHeight - kBottom, right = kWidth - kRight;
    for (const double tick : y_.ticks) {
      const double y = py(tick);
      out_ += fmt::format(
          "<path class=\"grid\" d=\"M{} {:.1f}H{}\"/><text class=\"tick end\" x=\"{}\" y=\"{:.1f}\">{}</text>\n", kLeft,
          y, right, kLeft - 6, y + 4, tick_text(tick));
    }
    for (const double tick : x_.ticks) {
      const double x = px(tick);
      out_ += fmt::format(
          "<path class=\"grid\" d=\"M{:.1f} {}V{}\"/><text class=\"tick middle\" x=\"{:.1f}\" y=\"{}\">{}</text>\n", x,
          top_, bottom, x, bottom + 16, tick_text(tick));
    }
    out_ += fmt::format("<path class=\"axis\" d=\"M{} {}V{}H{}\"/>\n", kLeft, top_, bottom, right);
    out_ += fmt::format("<text class=\"middle\" x=\"{}\" y=\"{}\">{}</text>\n", (kLeft + right) / 2, kHeight - 11,
                        escape_html(chart_.x_title));
    out_ += fmt::format("<text class=\"middle\" transform=\"rotate(-90)\" x=\"{}\" y=\"14\">{}</text>\n",
                        -(top_ + bottom) / 2, escape_html(chart_.y_title));
  }

  void guide() {
    if (!(chart_.guide > y_.low && chart_.guide < y_.high)) return;
    const double y = py(chart_.guide), width = kLetterWidth * static_cast<double>(chart_.guide_label.size());
    out_ +=
        fmt::format("<path class=\"guide\" d=\"M{} {:.1f}H{}\"/><text class=\"tick\" x=\"{}\" y=\"{:.1f}\">{}</text>\n",
                    kLeft, y, kWidth - kRight, kLeft + 4, y - 4, escape_html(chart_.guide_label));
    taken_.push_back({kLeft + 4, y - 14, width, kLabelHeight});
  }

  void links() {
    each_point([&](std::size_t i, const ChartPoint& p) {
      each_point([&](std::size_t j, const ChartPoint& other) {
        if (j <= i || p.label.empty() || p.label != other.label) return;
        out_ += fmt::format("<path class=\"link\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n", px(p.x), py(p.y),
                            px(other.x), py(other.y));
      });
    });
  }

  void front() {
    std::string path;
    for (const ChartPoint& p : chart_.front) {
      if (is_shown(p, chart_.y_floor)) {
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(p.x), py(p.y));
      }
    }
    if (chart_.front.size() > 1) out_ += fmt::format("<path class=\"front\" d=\"{}\"/>\n", path);
  }

  void points(std::size_t i) {
    const ChartSeries& series = chart_.series[i];
    for (const ChartPoint& p : series.points) {
      if (!is_shown(p, chart_.y_floor)) continue;
      const double x = px(p.x), y = py(p.y);
      if (p.is_default) {
        out_ += fmt::format("<circle class=\"default\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"7.5\"/>\n", x, y);
      }
      out_ += marker_svg(series.marker, fmt::format("series{}{}", i, is_below(p.y) ? " hollow" : ""), x, y, p.tooltip);
      if (p.is_noisy) {
        const double left = x + (p.is_default ? 8 : 5);
        out_ += noise_svg(left, y - 3);
        taken_.push_back({left, y - 14, 5, kLabelHeight});
      }
      const double reach = p.is_default ? 8 : 5;
      taken_.push_back({x - reach, y - reach, 2 * reach, 2 * reach});
    }
  }

  // The default first, which gets a label in any case; then the front; then what room is left for. The tooltip remains.
  void labels() {
    const auto is_on_front = [&](const ChartPoint& p) {
      return std::ranges::any_of(chart_.front, [&](const ChartPoint& f) { return f.x == p.x && f.y == p.y; });
    };
    std::vector<const ChartPoint*> order;
    each_point([&](std::size_t, const ChartPoint& p) {
      if (!p.label.empty()) order.push_back(&p);
    });
    const auto rank = [&](const ChartPoint* p) { return p->is_default ? 0 : is_on_front(*p) ? 1 : 2; };
    std::ranges::stable_sort(order, {}, rank);
    std::vector<std::string> written;
    for (const ChartPoint* p : order) {
      if (std::ranges::find(written, p->label) != written.end()) continue;
      if (label(*p)) written.push_back(p->label);
    }
  }

  bool label(const ChartPoint& p) {
    const std::string text = is_below(p.y) ? fmt::format("{}: {}", p.label, p.y > 0 ? tick_text(p.y) : "0") : p.label;
    const double x = px(p.x), y = py(p.y), gap = p.is_default ? 11 : 8;
    const double width = kLetterWidth * static_cast<double>(text.size()) * (p.is_default ? 1.08 : 1);
    const Box places[] = {{x + gap, y - 7, width, kLabelHeight},
                          {x - gap - width, y - 7, width, kLabelHeight},
                          {x - width / 2, y - gap - 13, width, kLabelHeight},
                          {x - width / 2, y + gap, width, kLabelHeight},
                          {x + gap - 2, y - 19, width, kLabelHeight},
                          {x + gap - 2, y + 6, width, kLabelHeight},
                          {x - gap + 2 - width, y - 19, width, kLabelHeight},
                          {x - gap + 2 - width, y + 6, width, kLabelHeight}};
    const Box* best = nullptr;
    std::ptrdiff_t fewest =
        p.is_default ? std::ssize(taken_) + 1 : 1;  // others are drawn where nothing else is, or not
    for (const Box& box : places) {
      if (box.x < kLeft + 2 || box.x + box.width > kWidth - 2 || box.y < top_ - 12 ||
          box.y + box.height > kHeight - kBottom + 2)
        continue;
      const auto covered = std::ranges::count_if(taken_, [&](const Box& other) { return box.overlaps(other); });
      if (covered < fewest) fewest = covered, best = &box;
    }
    if (best == nullptr && p.is_default) best = &places[0];
    if (best == nullptr) return false;
    out_ += fmt::format("<text class=\"label{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                        p.is_default ? " default-label" : "", best->x, best->y + 11, escape_html(text));
    taken_.push_back(*best);
    return true;
  }

  const Chart& chart_;
  const LogAxis &x_, &y_;
  double top_ = 0;
  std::vector<Box> taken_;
  std::string out_;
};

}  // namespace

std::vector<ChartPoint> pareto_front(std::vector<ChartPoint> points) {
  std::erase_if(points, [](const ChartPoint& p) { return !is_shown(p, 0); });
  std::ranges::stable_sort(points,
                           [](const ChartPoint& a, const ChartPoint& b) { return a.x != b.x ? a.x < b.x : a.y < b.y; });
  std::vector<ChartPoint> front;
  for (ChartPoint& p : points) {
    if (front.empty() || p.y < front.back().y) front.push_back(std::move(p));
  }
  return front;
}

std::string render_svg(const Chart& chart) {
  double x_low = INFINITY, x_high = 0, y_low = INFINITY, y_high = 0;
  for (const ChartSeries& series : chart.series) {
    for (const ChartPoint& p : series.points) {
      if (!is_shown(p, chart.y_floor)) continue;
      x_low = std::min(x_low, p.x);
      x_high = std::max(x_high, p.x);
      if (p.y < chart.y_floor) continue;
      y_low = std::min(y_low, p.y);
      y_high = std::max(y_high, p.y);
    }
  }
  if (!std::isfinite(x_low)) x_low = 1, x_high = 16;  // nothing can be shown: an empty chart
  if (!std::isfinite(y_low)) y_low = 0.01, y_high = 1;
  const LogAxis x = log_axis(x_low / 1.1, x_high * 1.12, 9);
  const LogAxis y = log_axis(chart.y_floor > 0 ? chart.y_floor : y_low / 1.5, std::max(y_high * 1.5, chart.y_floor), 8);
  return Canvas(chart, x, y).render();
}

}  // namespace kvant::cli
