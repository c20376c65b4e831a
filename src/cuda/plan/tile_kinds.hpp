// Prefill kernels that read pages, a tile of rows to a block of threads. A kind has a line in cuda/instances.cmake, a
// folder with its kernels, and a file in kinds/. Host only; no device is needed.
#pragma once

#include <iterator>
#include <optional>
#include <span>
#include <string>

#include "cuda/plan/offers.hpp"
#include "cuda/plan/times.hpp"
#include "cuda/plan/work.hpp"
#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda {

// kinds/NAME.cpp defines two functions. NAME_missing: why these kernels cannot do the work, apart from what all prefill
// kernels lack; empty: they can. NAME_times: on a device, for tiles of so many rows, of which a multiprocessor holds
// `blocks`.
using TileMissing = std::string(const PlannedWork& work, const Offers& offers, const TileOffers& mine);
using TileTimesOf = times::TileTimes(const DeviceLimits& limits, int stored_head_dim, Format k, int rows, int blocks);
#define KVANT_DECLARE(name, is_for_hopper) \
  TileMissing name##_missing;              \
  TileTimesOf name##_times;
KVANT_EACH_TILE_KIND(KVANT_DECLARE)
#undef KVANT_DECLARE

struct TileKind {
  const char* name;    // as in AttentionOptions::kernel
  bool is_for_hopper;  // there is code for compute capability 9.0 alone, and nothing else
  TileMissing* missing;
  TileTimesOf* times;
};
#define KVANT_KIND(name, is_for_hopper) {#name, is_for_hopper, &name##_missing, &name##_times},
inline constexpr TileKind kTileKinds[] = {KVANT_EACH_TILE_KIND(KVANT_KIND)};
#undef KVANT_KIND

// "tq6/tq4 at head_dim 128", "tq6/tq4 at head_dim 192/128"
inline std::string pair_at(const PlannedWork& work) {
  return pair_name({work.k, work.v}) + " at head_dim " + work.head_dim_words();
}
// The reason why kernels that are made for compute capability 9.0 alone do not run; empty: they do.
std::string missing_of_hopper(const char* kind, int shared_bytes, bool has_code, const DeviceLimits& limits);

}  // namespace kvant::cuda
