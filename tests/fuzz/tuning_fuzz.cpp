// Whatever the bytes are: the reader refuses them with a message, or hands out ratios that are within their limits, as
// are those of any work, and whose text is read as the same.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/tuning.hpp"

namespace {

/// Stops the fuzzer; a failed check must be visible in every build type.
void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvant::core;
  const auto tuning = parse_tuning({reinterpret_cast<const char*>(data), size});
  if (!tuning) {
    require(!tuning.message().empty() && tuning.message().size() < 2000);
    return 0;
  }
  require(!tuning->ratios.empty() && tuning->ratios.size() <= kMostRatios);
  const auto again = parse_tuning(tuning_text(tuning->card, tuning->ratios));
  require(again.ok() && again->card == tuning->card && again->ratios == tuning->ratios);
  for (TunedRatio one : tuning->ratios) {
    require(std::lround(1000 * tuning->ratio(one.work).value()) == one.thousandths);
    one.work.rows *= 3, one.work.heads *= 2;
    const long ratio = std::lround(1000 * tuning->ratio(one.work).value());
    require(ratio >= kLeastRatio && ratio <= kMostRatio);
  }
  return 0;
}
