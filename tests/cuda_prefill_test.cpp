// Which kernels many rows take (cuda/prefill/choice.hpp), and the shared memory of those for any device
// (cuda/prefill_sm80/shape.hpp), which need no device.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/prefill/choice.hpp"
#include "cuda/prefill_int8/shape.hpp"
#include "cuda/prefill_sm80/shape.hpp"

namespace kvant::cuda::prefill {
namespace {

using core::kPrefillSm80;
using core::kPrefillSm90;

Choice chosen(const std::string& wanted, const std::vector<Candidate>& candidates, std::int64_t decode_ns,
              bool fresh_keys = false) {
  return choose(wanted, candidates, decode_ns, 700, fresh_keys).value();
}
bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

const std::vector<Candidate> kBoth = {{kPrefillSm90, "", 5000}, {kPrefillSm80, "", 8000}};
const std::vector<Candidate> kOne = {{kPrefillSm90, "needs 9.0", 5000}, {kPrefillSm80, "", 8000}};
const std::vector<Candidate> kNone = {{kPrefillSm90, "needs 9.0", 5000}, {kPrefillSm80, "is centred", 8000}};

TEST(PrefillChoice, TheFastestThatCanRunIfItTakesLessTime) {
  EXPECT_EQ(chosen("", kBoth, 5000).candidate, -1);
  EXPECT_EQ(chosen("", kBoth, 5001).candidate, 0);
  EXPECT_EQ(chosen("", kOne, 8000).candidate, -1);  // by the time of the kind that would run
  EXPECT_EQ(chosen("", kOne, 8001).candidate, 1);
  EXPECT_TRUE(chosen("", kOne, 8000).why.empty());
  EXPECT_TRUE(has(chosen("", kOne, 9000).why, "about 8 us, decode kernels 9")) << chosen("", kOne, 9000).why;
  EXPECT_TRUE(has(chosen("", kOne, 9000).why, "needs 9.0"));
  const std::vector<Candidate> second = {{kPrefillSm90, "", 5000}, {kPrefillSm80, "", 4000}};
  EXPECT_EQ(chosen("", second, 5001).candidate, 1);
  EXPECT_EQ(chosen("", second, 1, true).candidate, 1);
  EXPECT_EQ(chosen("prefill", second, 5001).candidate, 0);  // the name of both is the first
}

TEST(PrefillChoice, WithoutAnyDecodeKernelsServeAndSayWhy) {
  EXPECT_EQ(chosen("", kNone, 100000).candidate, -1);
  EXPECT_EQ(chosen("", kNone, 100000).why, "decode kernels for 700 rows: needs 9.0; is centred");
  EXPECT_TRUE(chosen("", kNone, 5000).why.empty());  // they would take longer
  const std::vector<Candidate> same = {{kPrefillSm90, "bases", 5000}, {kPrefillSm80, "bases", 8000}};
  EXPECT_EQ(chosen("", same, 5001).why, "decode kernels for 700 rows: bases");
}

TEST(PrefillChoice, OptionsForceAKind) {
  EXPECT_EQ(chosen("decode", kBoth, 100000).candidate, -1);
  EXPECT_TRUE(has(chosen("decode", kBoth, 100000).why, "as asked for"));
  EXPECT_EQ(chosen("prefill", kBoth, 1).candidate, 0);
  EXPECT_EQ(chosen("prefill_sm80", kBoth, 1).candidate, 1);
  EXPECT_EQ(chosen("prefill_fresh", kBoth, 1).candidate, 0);  // what serves beside it
  EXPECT_EQ(chosen("prefill_fresh", kOne, 1).candidate, 1);
  EXPECT_EQ(chosen("prefill", kOne, 1).candidate, 1);
  EXPECT_EQ(chosen("prefill", kOne, 1).why, "as asked for; needs 9.0");
  const auto refusal = [](const std::string& wanted, const std::vector<Candidate>& candidates, bool fresh = false) {
    const Result<Choice> choice = choose(wanted, candidates, 1, 16, fresh);
    EXPECT_EQ(choice.code(), Code::unsupported);
    return choice.ok() ? std::string() : choice.message();
  };
  EXPECT_EQ(refusal("prefill_sm90", kOne), "kernel is \"prefill_sm90\": needs 9.0; leave kernel empty");
  EXPECT_EQ(refusal("prefill", kNone), "kernel is \"prefill\": needs 9.0; is centred; leave kernel empty");
  EXPECT_TRUE(has(refusal("", kNone, true), "fresh_keys needs prefill kernels: needs 9.0; is centred"));
  EXPECT_TRUE(has(refusal("decode", kBoth, true), "only prefill kernels serve"));
}

// Pieces of shared memory follow each other, aligned for what reads them, and are as large as their content.
template <int D>
void check_shape() {
  using S = sm80::Shape<D>;
  SCOPED_TRACE(D);
  EXPECT_EQ(S::kTilesAt, S::kRows * D * 2);
  EXPECT_EQ(S::kRows, 16 * S::kSixteens * S::kWarps / S::kSplit);
  EXPECT_EQ(S::kTilesAt % 1024, 0);  // swapped pieces: an address and its tile differ in lower bits alone
  EXPECT_EQ(S::kValuesAt % 1024, 0);
  EXPECT_EQ(S::kDenseValuesAt % 1024, 0);
  EXPECT_EQ(S::kWeightsAt % 1024, 0);
  for (const int at : {S::kTopsAt, S::kToLog2At, S::kKeyFactorsAt, S::kValueFactorsAt, S::kListAt, S::kQueueAt,
                       S::kConstantsAt, S::kCodesAt}) {
    EXPECT_EQ(at % 16, 0);
  }
  EXPECT_LE(S::kDenseValuesAt + S::kDenseKeys * D * 2, S::kWeightsAt);
  EXPECT_LE(S::kValuesAt + S::kTile, S::kWeightsAt);
  if (S::kTwoTiles) {
    EXPECT_EQ(S::kValuesAt, S::kKeysAt + S::kTile);
  }
  const int both = S::bytes(Format::tq6, Format::tq4) - S::kCodesAt;
  EXPECT_EQ(both, kPageTokens * D * 6 / 8 + (S::kTwoTiles ? kPageTokens * D * 4 / 8 : 0));
  EXPECT_EQ(S::bytes(Format::bf16, Format::bf16), S::kCodesAt);
  // A block of compute capability 8.6 or 8.9 has 99 KiB, of 8.0 163, of 9.0 227. Where a device has too little, decode
  // kernels serve.
  const bool is_long = D == 512;
  EXPECT_LE(S::bytes(Format::tq8, Format::tq8), (is_long ? 227 : 99) * 1024);
  EXPECT_LE(S::bytes(Format::tq6, Format::tq6), (is_long ? 163 : 99) * 1024);
  // In page-centred caches.
  EXPECT_LE(S::bytes(Format::tq8, Format::tq8) + S::kMoreIfCentred, (is_long ? 227 : 99) * 1024);
  EXPECT_LE(S::bytes(Format::tq4, Format::tq4) + S::kMoreIfCentred, (is_long ? 163 : 99) * 1024);
  EXPECT_EQ(S::kCentreBytes % 16, 0);  // codes follow
}

// prefill_int8.
template <int D>
void check_int8_shape() {
  using S = int8::Shape<D>;
  SCOPED_TRACE(D);
  for (const int at : {S::kRowFactsAt, S::kLostAt, S::kKeyFactorsAt, S::kLogsAt, S::kInversesAt, S::kZerosAt,
                       S::kRatiosAt, S::kRefusedAt, S::kListAt, S::kQueueAt, S::kConstantsAt, S::kCentresAt})
    EXPECT_EQ(at % 16, 0);
  EXPECT_EQ(S::kTilesAt % 1024, 0);
  for (const int at : {S::kKeysAt, S::kValuesAt, S::kDenseValuesAt, S::kCodesAt}) EXPECT_EQ(at % 128, 0);
  EXPECT_LE(S::kCentresAt + S::kCentreBytes, S::kTilesAt);
  EXPECT_LE(2 * S::kDigit, S::kToLog2At);                                                 // digits without centres
  EXPECT_LE(S::kRows * D * 2, S::kToLog2At);                                              // halves
  EXPECT_LE(S::kTilesAt + S::kCentreTile * D * 2, S::kCodesAt);                           // centres as halves
  EXPECT_LE(S::kTilesAt + S::kWarps * D * 4, S::bytes(Format::tq2, Format::tq2, false));  // rotations
  for (const Format k : {Format::tq4, Format::tq6, Format::tq8}) {
    EXPECT_EQ(S::digits_at(k, Format::tq4, true) % 128, 0);
    EXPECT_EQ(S::digits_at(k, Format::tq4, false), 0);
    EXPECT_LE(S::digits_at(k, Format::tq4, true) + (k == Format::tq8 ? 2 : 1) * S::kDigit,
              S::bytes(k, Format::tq4, true));
  }
  EXPECT_LE(S::kDenseValuesAt + S::kDenseKeys * D * 2, S::bytes(Format::tq2, Format::tq2, false));
  // 99 KiB of compute capability 8.6, 8.9 and 12.x; two blocks in the 227 KiB of 9.0.
  for (const Format v : {Format::tq4, Format::tq6}) {
    EXPECT_LE(S::bytes(Format::tq6, v, true), 99 * 1024);
    EXPECT_LE(S::bytes(Format::tq6, v, false), 99 * 1024);
  }
  EXPECT_LE(S::bytes(Format::tq8, Format::tq8, true), 227 * 512);
}

TEST(PrefillShape, EverySizeOfBytesFits) {
  check_int8_shape<64>();
  check_int8_shape<96>();
  check_int8_shape<128>();
  check_int8_shape<192>();
  check_int8_shape<256>();
}

// Every token has a column, and the thread that has a token's score has the byte of its value's level: byte `place` of
// register `word` of block 32 / 32 of an A operand stands beside byte `place` of the same register of B.
TEST(PrefillInt8, ColumnsAreWhereValuesWantThem) {
  for (const bool even_odd : {false, true}) {
    std::vector<int> seen(kPageTokens, 0);
    for (int n = 0; n < kPageTokens / 8; ++n) {
      for (int quad = 0; quad < 4; ++quad) {
        for (int e = 0; e < 2; ++e) {
          const int token = int8::token_of(n, quad, even_odd) + e * int8::token_step(even_odd);
          ++seen[static_cast<std::size_t>(token)];
          EXPECT_EQ(int8::column_of(token, even_odd), 8 * n + 2 * quad + e);
          // Where a value's byte is in its channel: 16 bytes a piece, two registers of an octet each.
          const int octet = token / 8, code = token % 8;
          const int of_octet = even_odd ? code % 2 * 4 + code / 2 : code;
          const int at = octet / 2 * 16 + octet % 2 * 8 + of_octet;
          // The operand: registers of pieces 2 b and 2 b + 1, lane `quad` has bytes 4 quad and on.
          const int block = n / 4, word = n / 2 % 2, place = n % 2 * 2 + e;
          EXPECT_EQ(at, (2 * block + word) * 16 + 4 * quad + place);
        }
      }
    }
    for (const int times : seen) EXPECT_EQ(times, 1);
  }
}

// Eight rows of 16 bytes that ldmatrix reads, and those that eight lanes store, meet no bank twice.
template <int D>
void check_places() {
  using S = int8::Shape<D>;
  SCOPED_TRACE(D);
  const auto bank = [](int place) { return place % 128 / 16; };
  std::vector<int> used(static_cast<std::size_t>(S::kKeyTile / 16), 0);
  for (int row = 0; row < kPageTokens; ++row) {
    for (int c = 0; c < D / 16; ++c) ++used[static_cast<std::size_t>(int8::place_of_bytes<D>(row, c) / 16)];
  }
  for (const int times : used) EXPECT_LE(times, 1);
  for (int c = 0; c < D / 16; ++c) {
    for (int first = 0; first < kPageTokens; first += 8) {
      unsigned read = 0, stored[2] = {0, 0};
      for (int i = 0; i < 8; ++i) {
        read |= 1u << bank(int8::place_of_bytes<D>(first + i, c));
        for (const bool even_odd : {false, true}) {
          stored[even_odd ? 1 : 0] |= 1u << bank(int8::place_of_bytes<D>(int8::column_of(first + i, even_odd), c));
        }
      }
      EXPECT_EQ(read, 0xFFu);
      EXPECT_EQ(stored[0], 0xFFu);
      EXPECT_EQ(stored[1], 0xFFu);
    }
    // Sixteen rows further on the place is as far behind, and pieces two apart differ by a bit.
    EXPECT_EQ(int8::place_of_bytes<D>(16, c) - int8::place_of_bytes<D>(0, c), 16 * S::kBox);
    EXPECT_EQ(int8::place_of_bytes<D>(24 + 5, c) - int8::place_of_bytes<D>(8 + 5, c), 16 * S::kBox);
  }
  std::vector<int> values(static_cast<std::size_t>(S::kValueTile / 16), 0);
  for (int channel = 0; channel < D; ++channel) {
    for (int c = 0; c < 4; ++c) {
      ++values[static_cast<std::size_t>(int8::place_of_values(channel, c) / 16)];
      EXPECT_EQ(int8::place_of_values(channel, c) - int8::place_of_values(channel % 8, c), channel / 8 * 512);
    }
  }
  for (const int times : values) EXPECT_EQ(times, 1);
  for (int c = 0; c < 4; ++c) {
    unsigned read = 0;
    for (int i = 0; i < 8; ++i) read |= 1u << bank(int8::place_of_values(i, c));
    EXPECT_EQ(read, 0xFFu);
  }
  // Sixteen lanes store 8 bytes each: eight octets of channels k and k + 4.
  for (int k = 0; k < 4; ++k) {
    unsigned stored = 0;
    for (int i = 0; i < 16; ++i) stored |= 1u << (int8::place_of_values(i / 8 * 4 + k, i % 8 / 2) % 128 / 8 + i % 2);
    EXPECT_EQ(stored, 0xFFFFu);
  }
}

TEST(PrefillInt8, NoBankIsMetTwice) {
  check_places<64>();
  check_places<96>();
  check_places<128>();
  check_places<192>();
  check_places<256>();
}

TEST(PrefillShape, EverySizeFits) {
  check_shape<64>();
  check_shape<96>();
  check_shape<128>();
  check_shape<192>();
  check_shape<256>();
  check_shape<512>();
}

}  // namespace
}  // namespace kvant::cuda::prefill
