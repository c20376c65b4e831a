// The compiled attention kernels, as the host finds them. One list (src/cuda/instances.cmake) says what is
// instantiated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/kinds.hpp"
#include "cuda/instances.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

inline constexpr int kAttendWarps = 4;  // in a block; kernels of eight warps have more

enum class DecodeKind : std::int8_t {
  decode,
#define KVANT_KIND(name, is_for_hopper) name,
  KVANT_EACH_DECODE_KIND(KVANT_KIND)
#undef KVANT_KIND
};
struct DecodeKindEntry {
  const char* name;    // as in AttentionOptions::kernel
  bool is_for_hopper;  // there is code for compute capability 9.0 alone
};
#define KVANT_KIND(name, is_for_hopper) {#name, is_for_hopper},
inline constexpr DecodeKindEntry kDecodeKinds[] = {{"decode", false}, KVANT_EACH_DECODE_KIND(KVANT_KIND)};
#undef KVANT_KIND

// Attends row blocks of 4 * column_tiles rows. `function` takes an AttendParams.
struct AttendKernel {
  Format k, v;
  int column_tiles;
  const void* function;
  std::array<int, 3> shared_bytes;  // dynamic, of a block: with 1, 2 and 4 stages for exact pages
  int team;                         // warps that share a page
  int teams;                        // in a block
  DecodeKind kind = DecodeKind::decode;
  bool overlaps = true;             // launches may begin while the previous one ends
  bool one_stage = false;           // for both sides of a page: where the usual kernel does not fit
  bool has_producer = false;        // as many warps of a block unpack pages for the others (decode/tile_block.cuh)
  bool unpacks_latents = false;     // to 16-bit floats, for all rows (decode_latent/kernel.cuh)
  bool has_latent_centres = false;  // takes pages with these; others take pages without
  [[nodiscard]] constexpr const char* name() const { return kDecodeKinds[static_cast<int>(kind)].name; }
  [[nodiscard]] constexpr bool is_for_hopper() const { return kDecodeKinds[static_cast<int>(kind)].is_for_hopper; }
  // For several queries: faster and less exact.
  [[nodiscard]] constexpr bool rounds_weights() const { return kind != DecodeKind::decode; }
  [[nodiscard]] constexpr int rows() const { return 4 * column_tiles; }
  [[nodiscard]] constexpr int least_shared_bytes() const { return shared_bytes[0]; }
  [[nodiscard]] constexpr int warps() const { return (has_producer ? 2 : 1) * team * teams; }
  [[nodiscard]] constexpr bool has_eight_warps() const { return team * teams > kAttendWarps; }  // for short work
};

/// The kernel that `function` is, of a Shape (shape.hpp).
template <class S>
constexpr AttendKernel kernel_of(const void* function) {
  return {.k = S::kKeyFormat,
          .v = S::kValueFormat,
          .column_tiles = S::kColumnTiles,
          .function = function,
          .shared_bytes = {S::kShared.bytes[0], S::kShared.bytes[1], S::kShared.bytes[2]},
          .team = S::kTeam,
          .teams = S::kTeams,
          .kind = S::kKind,
          .overlaps = !S::kByGroup,
          .one_stage = S::kOneStage,
          .has_producer = S::kByTiles};
}

// Merges the partials of a row of queries and head, a block or a cluster of blocks each.
struct MergeKernel {
  const void* function;  // takes an AttendParams
  int shared_bytes;
  int warps;  // in a block
};

struct DecodeKernels {
  int width;  // cuda/width.hpp
  std::span<const AttendKernel> attend;
  AttendKernel generic;              // takes any formats (generic.cuh)
  std::array<MergeKernel, 2> merge;  // with many warps, which alone may be in clusters; with few
};

// All of a width. Each is defined in a unit of its own (attend.cu.in).
template <int kWidth>
DecodeKernels decode_kernels();
#define KVANT_DECLARE(width) \
  template <>                \
  DecodeKernels decode_kernels<width>();
KVANT_CUDA_EACH_DECODE_WIDTH(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda
