// What a build and a device offer to a plan: kernels by their sizes, and what the driver says of them. Plans read all of
// it from the compiled kernels (find_offers); tests make it up from the same shapes. No device is needed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/runtime/limits.hpp"
#include "cuda/runtime/refusals.hpp"

namespace kvant::cuda {

// A decode kernel of the plan's formats.
struct DecodeOffer {
  int column_tiles;
  int teams;                     // of a block
  int shared_bytes;              // of a block, at least
  bool has_eight_warps = false;  // for short work
  bool by_group = false;         // a block is a warpgroup
  bool has_code = true;          // for this device
  [[nodiscard]] int rows() const { return 4 * column_tiles; }
};

// The kernel of prefill_sm90 or prefill_sm80 for the plan's formats.
struct TileOffer {
  int rows;          // of a tile
  int shared_bytes;  // of a block over the plan's cache
  int blocks = 1;    // that a multiprocessor holds
  bool has_code = true;
};

// Kernels of dense keys: prefill_fresh, and prefill_unpacked's.
struct DenseOffer {
  int rows, keys;    // of a tile
  int shared_bytes;  // of a block
  int blocks = 1;    // that share a tile
  bool has_code = true;
  bool has_maps = true;  // the driver makes tensor maps
};

struct Offers {
  const Instances& instances;
  DeviceLimits limits;
  bool has_decode = false;  // decode kernels of the stored head_dim
  std::vector<DecodeOffer> decode{};
  std::vector<int> sm90_head_dims{};  // that prefill_sm90 has kernels for
  std::optional<TileOffer> sm90{}, sm80{};
  std::optional<DenseOffer> dense{};
};

}  // namespace kvant::cuda
