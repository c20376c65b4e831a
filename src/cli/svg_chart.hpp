// A scatter chart as inline SVG, coloured by the style sheet of the page around it (classes series0, series1, ...).
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

struct ChartPoint {
  double x = 0;
  double y = 0;
  std::string label;    ///< drawn beside the point where there is room
  std::string tooltip;  ///< shown on hover
};

struct ChartSeries {
  std::string name;
  std::vector<ChartPoint> points;
};

struct Chart {
  std::string title;
  std::string x_title, y_title;
  bool is_log_y = false;
  double y_floor = 0;  ///< points below are drawn hollow at the floor, with their value in the label
  std::vector<ChartSeries> series;
};

/// Points that are not finite, or not positive on a logarithmic axis, are left out.
std::string render_svg(const Chart& chart);

}  // namespace kvant::cli
