// Which kernels many rows take (cuda/prefill/choice.hpp), and the shared memory of those for any device
// (cuda/prefill_sm80/shape.hpp), which need no device.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/prefill/choice.hpp"
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
template <class S>
void check_shape() {
  constexpr int D = S::kHeadDim;
  SCOPED_TRACE(fmt::format("{}{}", D, S::kSmall ? ", small" : ""));
  EXPECT_EQ(S::kTilesAt, S::kSmall ? 0 : S::kRows * D * 2);
  EXPECT_EQ(S::kRows, 16 * S::kSixteens * S::kWarps / S::kSplit);
  EXPECT_EQ(S::kTilesAt % 1024, 0);  // swapped pieces: an address and its tile differ in lower bits alone
  EXPECT_EQ(S::kValuesAt % 1024, 0);
  EXPECT_EQ(S::kDenseValuesAt % 1024, 0);
  EXPECT_EQ(S::kWeightsAt % 1024, 0);
  for (const int at : {S::kTopsAt, S::kToLog2At, S::kFactorsAt, S::kFactors, S::kListAt, S::kQueueAt, S::kConstantsAt,
                       S::kSharesAt, S::kCodesAt}) {
    EXPECT_EQ(at % 16, 0);
  }
  EXPECT_LE(S::kDenseValuesAt + S::kDenseKeys * D * 2, S::kWeightsAt);
  EXPECT_LE(S::kValuesAt + S::kTile, S::kWeightsAt);
  EXPECT_LE(S::kScratchAt + S::kWarps * D * 4, S::kWeightsAt);
  if (S::kSmall) {  // queries are loaded through the tile of keys
    EXPECT_LE(S::kRows * D * 2, S::kScratchAt);
  }
  if (S::kTiles > 1) {
    EXPECT_EQ(S::kValuesAt, S::kKeysAt + S::kTile);
  }
  const int both = S::bytes(Format::tq6, Format::tq4) - S::kCodesAt;
  EXPECT_EQ(both, S::kKeys * D * 6 / 8 + (S::kTwoTiles ? kPageTokens * D * 4 / 8 : 0));
  EXPECT_EQ(S::bytes(Format::bf16, Format::bf16), S::kCodesAt);
  // A block of compute capability 8.6 or 8.9 has 99 KiB, of 8.0 163, of 9.0 227. Where a device has too little, small
  // kernels serve.
  const bool is_long = sm80::has_small(D) && !S::kSmall;
  EXPECT_LE(S::bytes(Format::tq8, Format::tq8), (is_long ? 227 : 99) * 1024);
  EXPECT_LE(S::bytes(Format::tq6, Format::tq6), (is_long ? 163 : 99) * 1024);
  // In page-centred caches.
  EXPECT_LE(S::bytes(Format::tq8, Format::tq8) + S::kMoreIfCentred, (is_long ? 227 : 99) * 1024);
  EXPECT_LE(S::bytes(Format::tq4, Format::tq4) + S::kMoreIfCentred, (is_long ? 163 : 99) * 1024);
  EXPECT_EQ(S::kCentreBytes % 16, 0);  // codes follow
}

TEST(PrefillShape, EverySizeFits) {
  check_shape<sm80::Shape<64>>();
  check_shape<sm80::Shape<96>>();
  check_shape<sm80::Shape<128>>();
  check_shape<sm80::Shape<192>>();
  check_shape<sm80::Shape<256>>();
  check_shape<sm80::Shape<512>>();
  check_shape<sm80::Shape<512, true>>();
}

}  // namespace
}  // namespace kvant::cuda::prefill
