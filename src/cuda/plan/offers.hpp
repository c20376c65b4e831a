// The kernels that a build and a device offer to a plan, by their sizes. Plans find them in the compiled kernels
// (compiled.hpp); tests derive them from the same shapes. No device is needed.
#pragma once

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "core/tuning.hpp"
#include "cuda/decode/kernels.hpp"
#include "cuda/runtime/limits.hpp"
#include "cuda/runtime/refusals.hpp"

namespace kvant::cuda {

// A decode kernel of the plan's formats.
struct DecodeOffer : AttendKernel {
  bool has_code = true;  // for this device
};

// The kernel of a kind for the plan's formats.
struct TileOffer {
  int rows;          // a tile's
  int shared_bytes;  // for a block that reads the plan's cache
  int blocks = 1;    // a multiprocessor holds so many
  bool has_code = true;
};

// The kernels of a kind (tile_kinds.hpp).
struct TileOffers {
  std::optional<TileOffer> kernel{};  // none: not compiled for the plan's formats and head_dim
  std::vector<int> head_dims{};       // that there are kernels for
};
// A kind may have several kernels for the same work, in the order of kinds' tables: the first whose block fits is
// offered, else the last, which needs the least.
template <class Kernels, class Bytes>
auto first_that_fits(const Kernels& kernels, const DeviceLimits& limits, const Bytes& bytes_of) {
  auto found = std::begin(kernels);
  while (found != std::end(kernels) && std::next(found) != std::end(kernels) && bytes_of(*found) > limits.shared_bytes)
    ++found;
  return found;
}

// Kernels of dense keys: prefill_fresh, and prefill_unpacked's.
struct DenseOffer {
  int rows, keys;    // a tile's
  int shared_bytes;  // for a block
  int blocks = 1;    // so many share a tile
  bool byte_keys = false;
  bool has_code = true;
  bool has_maps = true;  // the driver makes tensor maps
};

struct Offers {
  const Instances& instances;
  DeviceLimits limits;
  const core::Tuning* tuning = nullptr;  // null: estimates are as they are
  bool has_decode = false;               // the stored width has decode kernels
  std::vector<DecodeOffer> decode{};
  std::vector<TileOffers> tiles{};  // by kind, in the order of kTileKinds; empty: not asked for
  std::optional<DenseOffer> dense{};
  std::optional<DenseOffer> byte_keys{};  // for plans that ask for products of 8 bits
};

}  // namespace kvant::cuda
