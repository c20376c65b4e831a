// BenchScores in the rows of `kvant bench`.
#pragma once

#include "cli/bench.hpp"
#include "cli/records.hpp"

namespace kvant::cli {

Json scores_json(const BenchScores& scores);

}  // namespace kvant::cli
