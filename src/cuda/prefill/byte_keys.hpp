// Keys of a workspace as bytes, for products of 8 bits: integers in the basis of encoded pages, around a centre of each
// page, so that levels of tq formats with up to 6 bits are exact. Host and device.
//
//   key = factor * its bytes + the page's factor * the bytes of its centre
//
// A page has rows of D bytes: its keys, and behind them its centre, eight times or more. A product of query rows with
// all of them leaves each thread the products with the centre beside those with its own keys. Each row has a factor.
#pragma once

#include "base/bits.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda::prefill {

// Queries as bytes, by token and head, and the step of each row (codec/digits.hpp); a row that is not finite has none.
struct ByteQueries {
  std::byte* rows;
  float* steps;
};

// Pages of a tile. A tile's rows are the columns of a product, whose number is a multiple of 16.
KVANT_HD constexpr int byte_key_pages(int head_dim) {
  return head_dim <= 96 ? 2 : 1;
}
KVANT_HD constexpr int byte_key_rows(int head_dim) {  // of a page
  return kPageTokens + 16 / byte_key_pages(head_dim);
}

// Wider rows have no kernel.
inline constexpr int kMostByteKeyDim = 256;

// Swizzled boxes of a tile: so many bytes of each row.
KVANT_HD constexpr int byte_box_row(int head_dim) {
  return head_dim % 128 == 0 ? 128 : head_dim % 64 == 0 ? 64 : 32;
}

}  // namespace kvant::cuda::prefill
