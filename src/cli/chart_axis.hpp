// A logarithmic axis: its ends, its ticks, and how a tick is written.
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

struct LogAxis {
  double low = 1, high = 10;
  std::vector<double> ticks;  ///< round numbers within the ends
  /// 0 at the low end, 1 at the high end.
  [[nodiscard]] double place(double value) const;
};

/// An axis from `low` to `high` (both positive), made at least a factor of 2 long, with at most `most_ticks` ticks.
LogAxis log_axis(double low, double high, int most_ticks);

/// 0.02 -> "0.02", 1e-5 -> "1e-5"
std::string tick_text(double value);

}  // namespace kvant::cli
