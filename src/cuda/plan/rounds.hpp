// How many rounds of unpacked keys a plan has, and of what size, from the planned lengths. Host only; no device is
// needed.
#pragma once

#include <string>
#include <vector>

#include "cuda/plan/offers.hpp"
#include "cuda/plan/work.hpp"
#include "cuda/prefill_unpacked/rounds.hpp"

namespace kvant::cuda {

// The tiles of prefill kernels that read pages, for sequences without a round.
struct OtherTiles {
  times::TileTimes times;
  std::int64_t rows;  // a tile's
  int blocks;         // a multiprocessor holds so many
};

// The workspace and the launches for all sequences with at least least_rows rows of queries. `missing` says why there
// is no such rule; empty: there is.
struct RoundsChoice {
  prefill::unpacked::RoundRule rule{};
  std::string missing;
  std::int64_t ns = 0;  // that rounds take, and `other` for the rest
};
RoundsChoice choose_rounds(const PlannedWork& work, const DenseOffer& dense, const OtherTiles& other, bool is_wanted,
                           int multiprocessors);

}  // namespace kvant::cuda
