#include "cli/chart_axis.hpp"

#include <algorithm>
#include <cmath>

#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

// Every set is round numbers of one decade; the first whose ticks are few enough is taken.
const std::vector<std::vector<double>> kMantissas = {{1, 1.2, 1.6, 2, 2.5, 3, 4, 5, 6, 8}, {1, 2, 3, 5}, {1, 3}, {1}};

std::vector<double> ticks_between(double low, double high, const std::vector<double>& mantissas, int every) {
  std::vector<double> ticks;
  const int first = static_cast<int>(std::floor(std::log10(low))), last = static_cast<int>(std::log10(high)) + 1;
  for (int decade = first; decade <= last; ++decade) {
    if (decade % every != 0) continue;
    for (const double mantissa : mantissas) {
      const double tick = mantissa * std::pow(10, decade);
      if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push_back(tick);
    }
  }
  return ticks;
}

}  // namespace

double LogAxis::place(double value) const {
  return std::log(value / low) / std::log(high / low);
}

LogAxis log_axis(double low, double high, int most_ticks) {
  LogAxis axis;
  const double widen = std::sqrt(std::max(1.0, 2 / (high / low)));
  axis.low = low / widen;
  axis.high = high * widen;
  const auto few = static_cast<std::size_t>(most_ticks);
  for (const std::vector<double>& mantissas : kMantissas) {
    axis.ticks = ticks_between(axis.low, axis.high, mantissas, 1);
    if (axis.ticks.size() <= few) return axis;
  }
  for (int every = 2; axis.ticks.size() > few; ++every) {
    axis.ticks = ticks_between(axis.low, axis.high, kMantissas.back(), every);
  }
  return axis;
}

std::string tick_text(double value) {
  if (value >= 0.999e-3 && value < 1e5) return fmt::format("{:g}", value);
  const double exponent = std::floor(std::log10(value) + 1e-9);
  return fmt::format("{:g}e{:g}", std::round(value / std::pow(10, exponent) * 10) / 10, exponent);
}

}  // namespace kvant::cli
