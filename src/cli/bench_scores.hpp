// What the rows of `kvant bench` say of BenchScores.
#pragma once

#include "cli/bench.hpp"
#include "cli/records.hpp"

namespace kvant::cli {

Json scores_json(const BenchScores& scores);

}  // namespace kvant::cli
