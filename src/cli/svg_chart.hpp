// A scatter chart as inline SVG. Both axes are logarithmic and end near the outermost points. The style sheet of the
// page around the chart gives the colours (classes series0, series1, ..., default, front, link, guide, hollow, noise).
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

struct ChartPoint {
  double x = 0;
  double y = 0;
  std::string label;        ///< drawn once, beside one of the points that have it, where there is room
  std::string tooltip;      ///< shown on hover
  bool is_default = false;  ///< has a ring around it, and its label is always drawn
  bool is_noisy = false;    ///< a time with a large spread: has the mark of noise beside it
};

enum class Marker { circle, square, triangle };

struct ChartSeries {
  std::string name;
  Marker marker = Marker::circle;
  std::vector<ChartPoint> points;
};

struct Chart {
  std::string title;
  std::string x_title, y_title;
  double y_floor = 0;  ///< where the scale begins: points below are drawn hollow there, with their value in the label
  double guide = 0;    ///< a horizontal line at this value, if the scale reaches it
  std::string guide_label;
  std::vector<ChartSeries> series;  ///< points of two series that have the same label are connected
  std::vector<ChartPoint> front;    ///< connected by a line; see pareto_front
};

/// The points that no other point beats: for each of them, every point that is as small in x is larger in y. In order
/// of x. Points that a logarithmic chart cannot show (not finite, not positive, beyond 1e30) are left out.
std::vector<ChartPoint> pareto_front(std::vector<ChartPoint> points);

/// Points outside 1e-30 to 1e30 are left out; a y of 0 below a floor is drawn.
std::string render_svg(const Chart& chart);

}  // namespace kvant::cli
