// Prefill kernels that read pages, a tile of rows to a block of threads. A kind has a folder with its kernels, files in
// kinds/, a line in core/kernels.def, and its units in cuda/instances.cmake. Host only; no device is needed.
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

struct TileKind {
  const char* name;  // as in AttentionOptions::kernel
  bool for_hopper;   // there is code for compute capability 9.0 alone, and nothing else
  // Why these kernels cannot do the work, apart from what all prefill kernels lack; empty: they can.
  std::string (*missing)(const PlannedWork& work, const Offers& offers, const TileOffers& mine);
  // On a device, for tiles of so many rows, of which a multiprocessor holds `blocks`.
  times::TileTimes (*times)(const DeviceLimits& limits, int stored_head_dim, Format k, int rows, int blocks);
};

// kinds/NAME.cpp defines NAME_kind, and kinds/NAME_kernels.cpp what finds the kernels of a head_dim.
#define KVANT_TILE_KERNEL(constant, name) \
  extern const TileKind name##_kind;      \
  std::span<const prefill::Kernel> name##_kernels(int head_dim);
#include "core/kernels.def"

#define KVANT_TILE_KERNEL(constant, name) &name##_kind,
inline const TileKind* const kTileKinds[] = {
#include "core/kernels.def"
};

// "tq6/tq4 at head_dim 128", "tq6/tq4 at head_dim 192/128"
inline std::string pair_at(const PlannedWork& work) {
  return pair_name({work.k, work.v}) + " at head_dim " + work.head_dim_words();
}
// The reason why kernels that are made for compute capability 9.0 alone do not run; empty: they do.
std::string missing_of_hopper(const char* kind, int shared_bytes, bool has_code, const DeviceLimits& limits);

}  // namespace kvant::cuda
