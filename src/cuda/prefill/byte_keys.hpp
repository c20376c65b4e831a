// Keys of a workspace as bytes, for products of 8 bits: integers in the basis of encoded pages, around a centre of each
// page, so that levels of tq formats with up to 6 bits are exact, unless a key has several scales. Host and device.
//
//   key = factor * its bytes + the page's factor * the bytes of its centre
//
// A page has rows of D bytes: its keys, and behind them its centre sixteen times. A product of query rows with all of
// them leaves each thread the products with the centre beside those with its own keys. Each row has a factor.
#pragma once

#include "base/bits.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda::prefill {

// Queries as bytes, by token and head, and the step of each row (codec/digits.hpp); a row that is not finite has none.
struct ByteQueries {
  std::byte* rows;
  float* steps;
};

// Rows of a page, which is a tile of keys: they are the columns of a product, whose number is a multiple of 16.
inline constexpr int kByteKeyRows = kPageTokens + 16;

inline constexpr int kByteBoxRow = 128;  // bytes of a row in a swizzled box

// Where these kernels are faster than those of 16 bits (docs/lab/cuda-prefill.md).
KVANT_HD constexpr bool has_byte_keys(int head_dim) {
  return head_dim == 256;
}

}  // namespace kvant::cuda::prefill
