// Prefill over pages of tq formats by 8-bit products (mma.m16n8k32) and cp.async, on any device of compute capability
// 8.0 or newer. Host and device.
//
// The walk over pages, centres, exact pages and fresh keys are those of prefill_sm80, from which Attend is derived.
// Encoded pages are multiplied in another way (attend.cuh): queries are integers of one or two digits
// (codec/digits.hpp), levels of keys and values stay the bytes that they are, and so do their tiles. A page's weights,
// with the scales of its values, are bytes relative to the largest of a row.
//
// Columns of scores have the tokens of a page in an order in which a thread's weights are the bytes of its operands of
// the product with values, without an exchange between threads.
#pragma once

#include "codec/digits.hpp"
#include "cuda/prefill_sm80/shape.hpp"

namespace kvant::cuda::prefill::int8 {

inline constexpr int kMostHeadDim = 256;  // above, two warps share rows

template <int D>
struct Shape : sm80::Rows<D> {
  using Of = sm80::Rows<D>;
  using Of::kRows, Of::kTwoTiles, Of::kDenseKeys, Of::kGroups;

  // A row of D bytes lies as D / 2 halves do, filled up to whole boxes.
  static constexpr int kBox = box_row_bytes(D / 2), kByteRow = (D + kBox - 1) / kBox * kBox;
  static constexpr int kKeyTile = kPageTokens * kByteRow, kValueTile = kPageTokens * D;
  static constexpr int kDigit = kRows * kByteRow;  // the bytes of one, for all queries
  // Queries as halves: for exact pages, and for centres. Without centres they come after the digits, in their place.
  static constexpr int kQueries = kRows * D * 2 > 2 * kDigit ? kRows* D * 2 : 2 * kDigit;

  static constexpr int kToLog2At = kQueries;                        // factors of rows as halves
  static constexpr int kRowFact = 16, kRowFacts = kRows * kGroups;  // RowFact, by row and scale group
  static constexpr int kRowFactsAt = kToLog2At + kRows * 4;
  static constexpr int kLostAt = kRowFactsAt + kRowFacts * kRowFact;  // a float of each row and scale group
  static constexpr int kColumns64 = 4 * kPageTokens;                  // a float of each column
  static constexpr int kKeyFactorsAt = kLostAt + kRowFacts * 4;       // by scale group
  // Of values: the logarithm of their factor, its inverse, zeros, and the scales in relation to it by scale group.
  static constexpr int kLogsAt = kKeyFactorsAt + kGroups * kColumns64, kInversesAt = kLogsAt + kColumns64;
  static constexpr int kZerosAt = kInversesAt + kColumns64, kRatiosAt = kZerosAt + kColumns64;
  static constexpr int kRefusedAt = kRatiosAt + (kGroups > 1 ? kGroups : 0) * kColumns64;  // a bit of each token
  static constexpr int kListAt = kRefusedAt + 16;
  static constexpr int kQueueAt = kListAt + Of::kList;
  static constexpr int kConstantsAt = kQueueAt + Of::kQueue;
  static constexpr int kCentresAt = kConstantsAt + 2 * Of::kConstants;

  static constexpr int kTilesAt = (kCentresAt + Of::kCentreBytes + 1023) / 1024 * 1024;
  static constexpr int kKeysAt = kTilesAt, kValuesAt = kTwoTiles ? kTilesAt + kKeyTile : kTilesAt;
  static constexpr int kDenseValuesAt = kTilesAt + kDenseKeys * D * 2, kDenseEnd = kDenseValuesAt + kDenseKeys * D * 2;
  static constexpr int kCentreTile = 16;  // (kCentresAtOnce)
  static constexpr int kTiles = kTwoTiles ? kKeyTile + kValueTile : kKeyTile > kValueTile ? kKeyTile : kValueTile;
  static constexpr int kCodesAt = kTilesAt + kTiles, kMoreIfCentred = 0;
  KVANT_HD static constexpr int codes_end(Format k, Format v) {
    const int keys = Of::code_bytes(k), values = Of::code_bytes(v);
    return kCodesAt + (kTwoTiles ? keys + values : keys > values ? keys : values);
  }
  // Digits: in the place of halves, unless centres need these.
  KVANT_HD static constexpr int digits_at(Format k, Format v, bool centred) { return centred ? codes_end(k, v) : 0; }
  static constexpr int bytes(Format k, Format v, bool centred) {
    const int end = codes_end(k, v) + (centred ? (codec::takes_two_digits(k, true) ? 2 : 1) * kDigit : 0);
    return end > kDenseEnd ? end : kDenseEnd;
  }
};

// The row of a key in its tile, which is its column of scores. even_odd: the order of the values' levels.
KVANT_HD constexpr int column_of(int token, bool even_odd) {
  const int quad =
      token / 8 % 2 * 2 + (even_odd ? token % 2 : token / 4 % 2);  // whose columns are 2 quad and 2 quad + 1
  const int place = even_odd ? token / 2 % 4 : token % 4;          // among the bytes of a register
  return token / 16 * 16 + place / 2 * 8 + 2 * quad + place % 2;
}
// The token of column 2 `quad` of eight columns `n`; that of the next column is so many behind.
KVANT_HD constexpr int token_of(int n, int quad, bool even_odd) {
  return n / 2 * 16 + (even_odd ? quad / 2 * 8 + quad % 2 + n % 2 * 4 : 4 * quad + n % 2 * 2);
}
KVANT_HD constexpr int token_step(bool even_odd) {
  return even_odd ? 2 : 1;
}

// Where 16 bytes go. In a tile of rows of bytes (keys, digits): elements 16 c .. of a row. Eight rows that a product
// reads together meet no bank twice, and neither do the eight tokens of an octet, which are stored together.
template <int D>
KVANT_HD constexpr int place_of_bytes(int row, int c) {
  constexpr int kRow = Shape<D>::kBox, kOfRow = kRow / 16;
  const int swap = kRow == 128 ? (row & 7) ^ (row >> 1 & 4) : (row >> 1 & 3) ^ (row >> 2 & 2);
  return c / kOfRow * kPageTokens * kRow + row * kRow + ((c % kOfRow) ^ swap) * 16;
}
// In a tile of values: tokens 16 c .. of a channel, two registers of each octet. The same holds for eight channels that
// are read together, and for what two groups of eight lanes store: eight octets of channels four apart.
KVANT_HD constexpr int place_of_values(int channel, int c) {
  return channel / 2 * 128 + ((((channel ^ channel >> 2) & 1) << 2) | (c ^ (channel >> 1 & 3))) * 16;
}

}  // namespace kvant::cuda::prefill::int8
