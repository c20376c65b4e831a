// How a block shares its work and its shared memory: teams of warps, stages, sizes, all known to the compiler. Host and
// device.
#pragma once

#include "cuda/decode/kernels.hpp"
#include "cuda/decode/shared_plan.hpp"
#include "cuda/runtime/limits.hpp"
#include "cuda/schedule/item.hpp"
#include "cuda/tile/staged.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {

inline constexpr int kWarps = kAttendWarps,
                     kEightWarps = 8;  // in a block; in a block of the kernels in eight_warps.cuh
// Blocks that a multiprocessor should hold, by what registers allow: 128, 168 or 255 a thread.
constexpr int most_blocks(int column_tiles, int channels) {
  return column_tiles == 1 ? 4 : column_tiles == 2 || channels <= 64 ? 3 : 2;
}
// The same for kernels of a warpgroup. Their launches do not overlap: beside the previous launch's merge one of four
// blocks would find no room, and come when others have ended (docs/lab/cuda-decode.md).
template <int NT>
inline constexpr int kGroupBlocks = NT == 4   ? 4
                                    : NT == 8 ? 3
                                              : 2;
// Threads that a kernel of eight warps is compiled for, more than it has: so many that each gets 128, 168 or 255
// registers. With 128 for eight rows at D = 512 it spilled little, but took 0.5 us longer; what is left finds room for
// a block of the merge before.
constexpr int eight_warps_bound(int column_tiles, int warps) {
  const int threads = column_tiles == 1 ? 512 : column_tiles == 2 ? 384 : 256;
  return 32 * warps > threads ? 32 * warps : threads;
}
// Shared memory of a multiprocessor of sm_90, and of one of compute capability 8.6, 8.9 and 12.x.
inline constexpr int kSharedMemory = 233472, kSmallSharedMemory = 102400;
inline constexpr int kGroupCentres = 32;  // that a warpgroup multiplies with queries at a time

// Warps of a team: as many as keep a page's bytes for each warp near 8 KiB and the channels of each at 128, of sixteen
// rows at 64 where D allows, because their sums are in registers.
// Warps of a team begin their keys at multiples of 64 bytes in planes whose parts change places (Swap).
KVANT_HD constexpr bool can_share_keys(Format k, int head_dim, int warps) {
  if (head_dim % 64 != 0) return true;
  for (int plane = 0; plane < plane_count(k); ++plane) {
    if (plane_bits(k, plane) > 1 && 8 / warps * head_dim * plane_bits(k, plane) / 8 % 64 != 0) return false;
  }
  return true;
}
KVANT_HD constexpr int team_warps(Format k, Format v, codec::HeadDims dims, int column_tiles) {
  const int bytes = 8 * (dims.k * codec::format_bits(k) + dims.v * codec::format_bits(v));
  const int channels = column_tiles >= 4 ? 64 : 128;
  int warps = bytes > 24576 ? 4 : bytes > 12800 ? 2 : 1;
  while (warps < 4 && dims.v > channels * warps) warps *= 2;
  while (dims.v % (32 * warps) != 0 || !can_share_keys(k, dims.k, warps)) warps /= 2;
  return warps;
}
// The same blocks for kernels of half weights, whose teams are all of a block's warps.
constexpr int most_half_blocks(int head_dim, int column_tiles) {
  return column_tiles == 4 || head_dim <= 128 ? 3 : 2;
}

// How a team of W warps, of BW in the block, shares a page whose values have D channels.
template <int W, int D, int BW>
struct Split {
  static constexpr int kTeams = BW / W;
  static constexpr int kTokens = 8 / W;  // consecutive ones of a lane in the first product
  static constexpr int kTokenTiles = 4 / W;
  static constexpr int kChannels = D / W;  // a warp's in the second product
  static constexpr int kUnits = kChannels / 32;
};
// Exact pages are few and large: as many warps as can share one.
KVANT_HD constexpr int exact_team_warps(codec::HeadDims dims) {
  int warps = kWarps;
  while (dims.v % (32 * warps) != 0) warps /= 2;
  return warps;
}

enum class Way {
  usual,
  one_stage,     // keys and values of a page take turns in one stage, for multiprocessors with little shared memory
  half_weights,  // weights are halves, of one column a row, whose sums need no fold page by page (weights.cuh)
  group,         // all four warps are one team, whose products are a warpgroup's (group.cuh)
  tiles,         // a warpgroup unpacks pages to tiles, which another one multiplies (tile_block.cuh)
};
KVANT_HD constexpr int warps_of_team(Way way, Format k, Format v, int width, int column_tiles) {
  return way == Way::group || way == Way::tiles || way == Way::half_weights
             ? kWarps
             : team_warps(k, v, dims_of(width), column_tiles);
}

// The shared memory of a block of Way::tiles. Places are in bytes from its begin.
//
// A tile of keys has the page's keys, the centre as one more, and seven rows without a meaning, because products have a
// multiple of eight columns.
inline constexpr int kTileKeys = kPageTokens + 8, kTileStages = 2;
struct TilePlan {
  int rests, keys, values, raw, factors, pages, barriers, tops, info, bytes;
  int raw_stages, raw_page;  // pages of codes; bytes of one
};
// rests: bytes of the queries' second terms; page: bytes of a page as it is stored; info: bytes.
constexpr TilePlan tile_plan(int head_dim, int rests, int page, int info) {
  TilePlan plan{};
  plan.raw_page = (page + 15) / 16 * 16;
  plan.keys = rests;
  plan.values = plan.keys + kTileStages * kTileKeys * head_dim * 2;
  plan.factors = plan.values + kTileStages * kPageTokens * head_dim * 2;
  plan.pages = plan.factors + kTileStages * kPageTokens * 8;
  plan.barriers = plan.pages + kTileStages * 16;
  plan.tops = plan.barriers + 4 * kTileStages * 8;
  plan.info = plan.tops + 2 * kWarps * 4;
  plan.raw = (plan.info + info + 15) / 16 * 16;
  const int room = kSharedMemory / 2 - kSharedOfBlock - plan.raw, fit = room / plan.raw_page;
  plan.raw_stages = fit < 4 ? fit : 4;
  plan.bytes = plan.raw + plan.raw_stages * plan.raw_page;
  return plan;
}

template <Format KF, Format VF, int kWidth, int NT, int BW, Way kWay = Way::usual>
struct Shape : Split<warps_of_team(kWay, KF, VF, kWidth, NT), value_dim(kWidth), BW> {
  static constexpr Format kKeyFormat = KF, kValueFormat = VF;
  static constexpr int D = key_dim(kWidth), DV = value_dim(kWidth);
  static constexpr int kHeadDim = D, kValueDim = DV, kColumnTiles = NT, kBlockWarps = BW;
  static constexpr int kThreads = 32 * BW;
  static constexpr bool kHasEightWarps = BW > kWarps;
  static constexpr bool kByTiles = kWay == Way::tiles, kByGroup = kWay == Way::group || kByTiles;
  static constexpr bool kOneStage = kWay == Way::one_stage;
  static constexpr bool kHalfWeights = kWay == Way::half_weights;
  static constexpr DecodeKind kKind = kByGroup       ? DecodeKind::decode_sm90
                                      : kHalfWeights ? DecodeKind::decode_sm80
                                                     : DecodeKind::decode;
  static_assert(!kHalfWeights || (is_integer(KF) && is_integer(VF) && DV % (32 * kWarps) == 0));
  static_assert(can_share_keys(KF, D, warps_of_team(kWay, KF, VF, kWidth, NT)));
  static constexpr codec::PageLayout kLayout = codec::page_layout(KF, VF, dims_of(kWidth));
  static constexpr codec::PageLayout kExactLayout =
      codec::page_layout(Format::f16, Format::f16, dims_of(kWidth));  // or bf16
  static constexpr int kRows = 4 * NT;
  static constexpr int kTeam = warps_of_team(kWay, KF, VF, kWidth, NT), kTeams = BW / kTeam;
  static constexpr int kStages = kByGroup ? 2 : 1;  // pages in flight
  using Keys = StagedSide<KF, D, false>;
  using Values = StagedSide<VF, DV, true>;
  static constexpr int kKeyGroups = side_scale_groups(KF, D);
  static constexpr int kValueGroups = side_scale_groups(VF, DV);
  static constexpr int kPGroups = kValueGroups > 1 ? kValueGroups : 1;  // versions of the probabilities
  static constexpr int kScaleBytes = (kKeyGroups + kValueGroups) * 2 * kPageTokens;
  static constexpr int kKeyStage = Keys::kBytes + kScaleBytes;
  // Probabilities: [column][64 tokens], bytes or halves; rows padded against bank conflicts.
  static constexpr int kColumnBytes = is_integer(VF) && !kHalfWeights ? 96 : 192;
  static constexpr int kPBytes = (kHalfWeights ? 1 : 2) * kRows * kColumnBytes;
  // A warpgroup's are halves: two pages' [64 tokens][rows].
  static constexpr int kTeamP = kByGroup ? 2 * kPageTokens * kRows * 2 : kPGroups * kPBytes;
  static constexpr bool kTakesCentres = codec::takes_centre(KF);
  static constexpr bool kHasExact = !(is_half(KF) && is_half(VF));  // dense caches have one domain
  // Queries: operand pairs [NT][step][32 lanes] of 8 bytes.
  static constexpr int kEncodedQueries = NT * kQuerySteps<KF, D> * 256, kExactQueries = NT * (D / 16) * 256;
  static constexpr int kSumGroups = kKeyGroups > 1 ? kKeyGroups : 1;

  static constexpr int kDigitRows = kByTiles ? 1 : kRows;  // rows whose queries have digits
  struct Info : ItemSearch {                               // with facts of the block's rows
    alignas(16) float scale[kDigitRows];                   // from a product to log2 units
    float center[kRows];                                   // added to an encoded key's score
    // Integer sums of a row begin with -(level_origin - 1/2) times the sum of its query's digits, two for each number.
    std::int32_t start[kSumGroups][2 * kDigitRows];
    std::int32_t poisoned[kRows];
    float slope[kRows];  // ALiBi's, in log2 units
    std::int32_t position[kRows];
    float m[BW][kDigitRows], l[BW][kDigitRows];
    std::uint32_t constants[2][kConstantWords];
    int found;  // what the first part is: kGuessed ..
  };

  static constexpr int kBarriers = kByGroup ? 0 : 2;  // a team's: keys, values
  // A warpgroup's scratch: what group.cuh says.
  static constexpr int kGroupScratch =
      (kWarps + 4) * kRows * 4 + 32 * kWarps * NT * 4 + 2 * kWarps * 4 + kGroupCentres * kRows * 4;
  static constexpr int kCombine = kTeams > 1 ? kTeams* kRows* DV * 4 : 0;
  static constexpr int kExactTeam = exact_team_warps(dims_of(kWidth)), kExactTeams = BW / kExactTeam;
  static constexpr int kExactKeyRow = padded_row(8 * D, 64), kExactValueRow = padded_row(16 * DV, 64);
  // Codes of sixteen centres a team, if these cost no multiprocessor a block.
  static constexpr int kCentreRow = static_cast<int>(codec::centre_bytes(D));
  static constexpr auto plan_with = [](int centres) {
    return shared_plan({
        .eight_warps = kHasEightWarps,
        .info = static_cast<int>(sizeof(Info)),
        .encoded_queries = kEncodedQueries,
        .exact_queries = kHasExact ? kExactQueries : 0,
        .teams = kTeams,
        .barriers = kBarriers,
        .keys = kOneStage && Values::kBytes > kKeyStage ? Values::kBytes : kStages * kKeyStage,
        .values = kOneStage ? 0 : kStages * Values::kBytes,
        .weights = kTeamP,
        .weights_alignment = kByGroup ? 16 * kRows : 1,
        .scratch = kByGroup       ? kGroupScratch
                   : kHalfWeights ? kTeam * (kRows + 1) * 4
                   : kTeam > 1    ? kTeam * kRows * kPGroups * 4
                                  : 0,
        .centres = centres,
        .sums = kCombine,
        .exact_teams = kExactTeams,
        .exact_half = 8 * kExactKeyRow > 4 * kExactValueRow ? 8 * kExactKeyRow : 4 * kExactValueRow,
        .exact_weights = 2 * kRows * 192,
        .exact_scratch = kExactTeam * kRows * 4,
    });
  };
  static constexpr auto blocks_with = [](int bytes) {
    const int fit = (kOneStage ? kSmallSharedMemory : kSharedMemory) / (bytes + kSharedOfBlock),
              most = kHasEightWarps ? 1
                     : kHalfWeights ? most_half_blocks(DV, NT)
                                    : most_blocks(NT, Split<kTeam, DV, BW>::kChannels);
    return fit < most ? fit : most;
  };
  static constexpr bool kCentresPass =
      kTakesCentres && !kByGroup &&
      blocks_with(plan_with(16 * kCentreRow).bytes[0]) == blocks_with(plan_with(0).bytes[0]);
  static constexpr TilePlan kTilePlan = tile_plan(
      D, kRows* D * 2, static_cast<int>(kLayout.code_bytes) + kScaleBytes + kCentreRow, static_cast<int>(sizeof(Info)));
  static constexpr SharedPlan kShared = [] {
    SharedPlan plan = plan_with(kCentresPass ? 16 * kCentreRow : 0);
    if (!kByTiles) return plan;
    plan.info = kTilePlan.info;
    for (int& bytes : plan.bytes) bytes = kTilePlan.bytes;
    return plan;
  }();
};

// A kernel for devices whose blocks get too little shared memory for the usual one.
template <Format KF, Format VF, int kWidth, int NT>
using OneStage = Shape<KF, VF, kWidth, NT, kWarps, Way::one_stage>;
// For several queries a sequence.
template <Format KF, Format VF, int kWidth, int NT>
using HalfWeights = Shape<KF, VF, kWidth, NT, kWarps, Way::half_weights>;
template <Format KF, Format VF, int kWidth, int NT>
using Group = Shape<KF, VF, kWidth, NT, kWarps, (NT > 8 ? Way::tiles : Way::group)>;

}  // namespace kvant::cuda
