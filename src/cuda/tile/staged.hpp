// How a side of a page is staged in shared memory: plane by plane, eight rows of eight tokens each, padded so that the
// loads of the products meet no bank twice. Host and device.
#pragma once

#include "base/config.hpp"
#include "codec/layout.hpp"
#include "codec/tq.hpp"

namespace kvant::cuda {

KVANT_HD constexpr bool is_integer(Format f) {
  return codec::is_tq(f);
}
KVANT_HD constexpr bool is_half(Format f) {
  return codec::is_dense(f) && codec::format_bits(f) == 16;
}
using codec::plane_bits;
using codec::plane_count;
KVANT_HD constexpr int side_scale_groups(Format f, int head_dim) {
  return is_half(f) ? 0 : codec::tq_scale_groups(f, head_dim);
}

// Bytes from one row of eight tokens to the next in shared memory: at least those of the row, and `residue` modulo 128.
KVANT_HD constexpr int padded_row(int bytes, int residue) {
  return bytes + (residue + 128 - bytes % 128) % 128;
}
KVANT_HD constexpr int key_residue(int bits) {
  return bits >= 8 ? 64 : bits == 4 ? 32 : 16;
}
// Copies are faster where rows begin at multiples of 64 bytes (docs/lab/cuda-decode.md), so rows are 64 apart modulo
// 128, and the parts of every 64 bytes change places from row to row. Halves, in rows 2, 3, 6 and 7: where four
// neighbouring rows are read at once, 32 bytes of each. Quarters: where all eight are, 16 bytes of each.
enum class Swap { none, halves, quarters };
KVANT_HD constexpr int swap_of_row(Swap swap, int row) {  // to be xored to an offset in it
  return swap == Swap::halves ? (row & 2) << 4 : swap == Swap::quarters ? (row & 6) << 3 : 0;
}

template <Format F, int D, bool kValues>
struct StagedSide {
  static constexpr int kPlanes = plane_count(F);
  KVANT_HD static constexpr int bits(int plane) { return plane_bits(F, plane); }
  KVANT_HD static constexpr int row_bytes(int plane) { return D * bits(plane); }
  // Not fields of one bit, nor keys of other bits or dims: a thread's loads from them would not all be at fixed
  // distances. Two bits at D = 512 stay as they are, because blocks of tq6 just fit a multiprocessor three times.
  KVANT_HD static constexpr Swap swap(int plane) {
    if (kValues) return bits(plane) > 1 ? Swap::halves : Swap::none;
    if (D % 64 != 0) return Swap::none;
    return bits(plane) == 4 ? Swap::halves : bits(plane) == 2 && D < 512 ? Swap::quarters : Swap::none;
  }
  KVANT_HD static constexpr int stride(int plane) {
    const int residue = swap(plane) != Swap::none ? 64 : kValues ? 32 : key_residue(bits(plane));
    return padded_row(row_bytes(plane), residue);
  }
  // The way from an offset in this quarter of 64 bytes to its place in `row`.
  KVANT_HD static constexpr int shift(int plane, int row, int quarter) {
    return ((16 * quarter) ^ swap_of_row(swap(plane), row)) - 16 * quarter;
  }
  KVANT_HD static constexpr int offset(int plane) { return plane == 0 ? 0 : 8 * stride(0); }
  static constexpr int kBytes = kPlanes == 1 ? 8 * stride(0) : 8 * (stride(0) + stride(1));
};

// Steps of the first product over a query: 32 channels each, or 16 of halves.
template <Format F, int D>
constexpr int kQuerySteps = is_integer(F) ? D / 32 : D / 16;

inline constexpr int kConstantWords = 4;  // that unpacking a format reads (Constants)

}  // namespace kvant::cuda
