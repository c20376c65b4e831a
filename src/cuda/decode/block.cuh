// The attention kernel's block: what a thread holds, and its steps, which the other files of this folder define.
#pragma once

#include "cuda/decode/config.cuh"
#include "cuda/tile/copies.cuh"

namespace kvant::cuda {

// A value that all lanes agree on, shuffled. The compiler then knows, and keeps results of the value in uniform
// registers: a branch that may part lanes costs the whole loop around it these registers.
__device__ __forceinline__ int same_in_warp(int x) {
  return __shfl_sync(~0u, x, 0);
}

// S: a Shape.
template <class S>
struct Attend {
  static constexpr Format KF = S::kKeyFormat, VF = S::kValueFormat;
  static constexpr int D = S::kHeadDim, DV = S::kValueDim;  // DV: values and sums
  static constexpr int NT = S::kColumnTiles, BW = S::kBlockWarps;
  static constexpr int R = S::kRows, W = S::kTeam;

  static constexpr bool kQueriesInRegisters = is_integer(KF) && NT * kQuerySteps<KF, D> <= 8;

  const AttendParams& p;
  std::byte* shared;
  int lane, g, t, warp, team, member;  // member: of the team
  typename S::Info* info;
  float o[2 * (S::kByGroup ? Split<S::kExactTeam, DV, BW>::kUnits : S::kUnits)][NT][2];
  float m[NT], l[NT];
  std::byte* weights;  // operands of the second product
  float* scratch;      // the team's
  Constants<KF> key_constants;
  Constants<VF> value_constants;

  __device__ Attend(const AttendParams& params, std::byte* memory) : p(params), shared(memory) {
    lane = threadIdx.x % 32, warp = same_in_warp(static_cast<int>(threadIdx.x) / 32);
    if constexpr (S::kByTiles) warp %= BW;  // number in its warpgroup
    __builtin_assume(warp >= 0 && warp < BW);
    g = lane / 4, t = lane % 4;
    team = warp / W, member = warp % W;
    info = reinterpret_cast<typename S::Info*>(shared + S::kShared.info);
  }

  // --- shared memory ---
  __device__ std::byte* team_memory() const { return shared + S::kShared.teams + team * S::kShared.team.bytes; }
  __device__ std::byte* key_stage(int stage = 0) const {
    return team_memory() + S::kShared.team.keys + stage * S::kKeyStage;
  }
  __device__ std::byte* value_stage(int stage = 0) const {
    return team_memory() + (S::kOneStage ? S::kShared.team.keys : S::kShared.team.values) + stage * S::Values::kBytes;
  }
  enum Barrier { kKeys, kValues };
  __device__ void wait(Barrier which, std::uint32_t& phases) const {
    ptx::mbarrier_wait(barrier_at(which), phases >> which & 1);
    phases ^= 1u << which;
  }
  __device__ std::uint32_t barrier_at(int index) const {
    return ptx::shared_address(shared + S::kShared.barriers) + 8 * (team * S::kBarriers + index);
  }
  template <int TW>
  __device__ void team_sync() const {
    if constexpr (TW == 1) {
      __syncwarp();
    } else if constexpr (TW == BW) {
      __syncthreads();
    } else {
      ptx::barrier<32 * TW>(1 + warp / TW);
    }
  }

  // --- copies: copies.cuh ---

  template <class Side>
  __device__ __forceinline__ void copy_side(std::byte* to, const std::byte* from, std::uint32_t plane1) const;

  __device__ const std::byte* encoded_block(const Part& part, int slot) const {
    return part.blocks + static_cast<std::uint64_t>(slot) * p.cache.encoded_slot_bytes;
  }
  __device__ const std::byte* exact_block(const Part& part, int slot) const {
    return part.blocks + static_cast<std::uint64_t>(slot) * p.cache.exact_slot_bytes;
  }

  __device__ void copy_keys(const Part& part, int slot) const;
  __device__ void copy_values(const Part& part, int slot) const;

  // --- queries: queries.cuh ---

  // Rows of queries on their way to registers: the warp's first two are requested before the first pages, behind which
  // they would wait for microseconds, the others two rows ahead.
  static constexpr int kRowsOfWarp = (R + BW - 1) / BW;
  struct RawQuery {
    std::uint32_t bits[kRowsOfWarp > 1 ? 2 : 1][D / 32];
  };
  __device__ __forceinline__ void ask_for_rows(const Part& part, RawQuery& raw) const {
    ask_for_row(part, warp, raw.bits[0]);
    if constexpr (kRowsOfWarp > 1) ask_for_row(part, warp + BW, raw.bits[1]);
  }
  // The query of row r of the block; -1: none
  __device__ int query_of(const Part& part, int r, int& q_head) const {
    const int row = part.row_block * R + r;
    const int query = query_of_row(p, row);
    q_head = part.kv_head * p.group + row - query * p.group;
    return query < part.q_len ? query : -1;
  }
  // Elements first .. first + kCount of row r, of which `there` exist.
  template <int kCount>
  __device__ __forceinline__ void ask_for_row(const Part& part, int r, int first, int there,
                                              std::uint32_t (&bits)[kCount / 32]) const;
  __device__ __forceinline__ void ask_for_row(const Part& part, int r, std::uint32_t (&bits)[D / 32]) const {
    ask_for_row<D>(part, r, 0, p.head_dim, bits);
  }

  template <Format F>
  __device__ __forceinline__ std::byte* query_at(std::byte* operands, int r, int i, int digit = 0) const;
  template <Format F>
  __device__ __forceinline__ void store_digits(std::byte* operands, int r, const float (&x)[D / 32],
                                               float inverse) const;
  template <Format F>
  __device__ __forceinline__ void store_halves(std::byte* operands, int r, const float (&x)[D / 32], float inverse,
                                               bool bf16) const;
  template <Format F>
  __device__ void load_queries(const Part& part, RawQuery& raw, bool encoded, bool bf16);

  // A team's pages are use_begin + team, + kTeams, ... of its part. Lane i holds numbers base + i and base + 32 + i,
  // each as its slot shifted, with what is known of it below; -1: not of this domain, hidden from every row by the mask
  // tensor, or past the end.
  struct Slots {
    int base, here, next;
  };

  // To the next 32 pages, where page k + 2 begins them.
  template <int TW>
  __device__ __forceinline__ void advance(const Part& part, Slots& slots, int k, bool centred) const;

  // --- first product: scores.cuh ---

  struct Registers {  // what a part has in registers
    uint2 pairs[NT][kQueriesInRegisters ? kQuerySteps<KF, D> : 1];
  };

  // Codes of block `block` (64 channels) of this lane's keys, rows g and g + 8 of the member's tile i.
  template <bool kHalfBlock>
  __device__ __forceinline__ void load_keys(const std::byte* stage, int i, int block, Sixteen& x, Sixteen& y) const;

  template <Format F>
  __device__ uint2 query_pair(int n, int step) const {
    return *reinterpret_cast<const uint2*>(shared + S::kShared.queries + (n * kQuerySteps<F, D> + step) * 256 +
                                           lane * 8);
  }
  __device__ uint2 held_pair(const Registers& held, int n, int step) const {
    if constexpr (kQueriesInRegisters) {
      return held.pairs[n][step];
    } else {
      return query_pair<KF>(n, step);
    }
  }

  template <bool kFirst, bool kHalfBlock, int kTiles>
  __device__ __forceinline__ void multiply_key_block(const std::byte* stage, const Registers& held, int first,
                                                     int block, const int2 (&start)[NT],
                                                     std::int32_t (&c)[kTiles][NT][4]) const;
  template <bool kChooses, int kTiles>
  __device__ __forceinline__ void scale_key_sums(const std::int32_t (&c)[kTiles][NT][4],
                                                 const KeyScales<kTiles>& of_tiles, int first, int group,
                                                 const float (&centre)[NT], float (&s)[S::kTokenTiles][NT][2]) const;
  __device__ __forceinline__ void integer_key_scores(const std::byte* stage, const Registers& held,
                                                     const float (&centre)[NT],
                                                     float (&s)[S::kTokenTiles][NT][2]) const;
  __device__ __forceinline__ void float_key_scores(const std::byte* stage, const float (&centre)[NT],
                                                   float (&s)[S::kTokenTiles][NT][2]) const;
  // Scores in log2 units, scaled, of this lane's tokens (tile i, row half h) of an encoded page.
  // centre[n]: what every score of the page gets in row 4 n + t.
  __device__ __forceinline__ void key_scores(const std::byte* stage, const Registers& held, const float (&centre)[NT],
                                             float (&s)[S::kTokenTiles][NT][2]) const {
    if constexpr (is_integer(KF)) {
      integer_key_scores(stage, held, centre, s);
    } else {
      float_key_scores(stage, centre, s);
    }
  }

  __device__ void fp8_key_product(const std::byte* const (&row)[2], float (&c)[NT][4]) const;
  __device__ void half_key_product(const std::byte* const (&row)[2], bool bf16, float (&c)[NT][4]) const;
  __device__ void half_key_chains(const std::byte* const (&row)[2], int first, bool bf16, float (&c)[NT][4]) const;

  // --- centres of key pages: centres.cuh ---

  // Their products with this lane's rows, 4 n + t, for sixteen of the team's pages at a time: numbers g and g + 8 of
  // these.
  struct Centres {
    float of[2][NT];
  };
  static constexpr int kCentresAtOnce = 16;
  __device__ bool is_centred() const { return S::kTakesCentres && codec::is_centred(p.cache.encoded_layout); }
  __device__ void prefetch_centre(const Part& part, int slot) const;
  // Where they pass through shared memory: those of pages `first` .. + 15 are on their way.
  __device__ std::byte* centre_rows() const { return team_memory() + S::kShared.team.centres; }
  __device__ void ask_for_centres(const Part& part, const Slots& slots, int first) const;
  __device__ __forceinline__ void multiply_centres(const std::byte* const (&rows)[2][2], const float (&scale)[2],
                                                   const Registers& held, Centres& centres) const;
  __device__ __forceinline__ void multiply_centres_by_halves(const std::byte* const (&rows)[2][2],
                                                             const float (&scale)[2], Centres& centres) const;
  __device__ __forceinline__ void find_centres(const Part& part, const Slots& slots, int first, const Registers& held,
                                               Centres& centres) const;
  __device__ __forceinline__ void centre_of(const Centres& centres, int number, float (&centre)[NT]) const;

  // --- between the products: weights.cuh ---

  __device__ __forceinline__ void transform_seen(const Part& part, int page, float (&s)[S::kTokenTiles][NT][2]) const;
  __device__ __forceinline__ float transform_one(const Part& part, const base::Visibility& rule, int r, int query,
                                                 int q_head, std::int64_t key, float x) const;
  template <int TW>
  __device__ __forceinline__ void transform(const Part& part, int page, float (&s)[4 / TW][NT][2]) const;

  __device__ __forceinline__ void transform_page(const Part& part, int slot, int k,
                                                 float (&s)[S::kTokenTiles][NT][2]) const;

  // The factor of the page's sums when they join the running ones, for each row and version of the probabilities.
  using Fold = float[S::kPGroups][NT];

  template <int kTiles>
  __device__ __forceinline__ void exponentials(const float (&s)[kTiles][NT][2], float (&e)[kTiles][NT][2],
                                               float (&sum)[NT]) const;
  template <bool kScaled, int kGroups, int kTiles>
  __device__ __forceinline__ void find_peaks(const float (&e)[kTiles][NT][2], const float (&v)[kGroups][kTiles][2],
                                             float (&peak)[kGroups][NT]) const;
  template <int TW, int kGroups>
  __device__ __forceinline__ void over_team(float (&x)[kGroups][NT]) const;
  template <int kGroups, int kTiles>
  __device__ __forceinline__ void poison_rows(const float (&e)[kTiles][NT][2], float (&v)[kGroups][kTiles][2]);
  __device__ __forceinline__ bool any_large(const float (&sum)[NT]) const;
  template <int TW, int kGroups>
  __device__ __forceinline__ bool any_large_of_team(bool large, float (&peak)[kGroups][NT]) const;
  template <int TW, int kGroups>
  __device__ __forceinline__ void move_references(const float (&s)[4 / TW][NT][2]);
  template <Format F, int TW>
  __device__ __forceinline__ void weigh(const float (&s)[4 / TW][NT][2], const std::byte* scales, bool bf16,
                                        Fold& fold);

  // Value scales of half weights: multiplied by `inverse`, the reciprocal of a unit that moves as references do.
  struct WeightUnit {
    float unit = 1e-30f, inverse = 1e30f;
  };
  __device__ __forceinline__ void weigh_halves(const float (&s)[S::kTokenTiles][NT][2], const std::byte* scales,
                                               WeightUnit& unit);

  template <Format F, int TW>
  __device__ __forceinline__ void store_weights(const float (&w)[4 / TW][2], float up, int n, int q, bool bf16) const;

  // --- second product: values.cuh ---

  __device__ void fold_tile(int tile, const float (&x)[NT][2], const float (&page)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) o[tile][n][h] = fmaf(x[n][h], page[n], o[tile][n][h]);
    }
  }

  // The offset of this lane's channels, kBytes each, in the row of an octet that is t modulo 4.
  template <int kBytes, Swap kSwap, int kChannels = 4>
  __device__ int lane_offset() const {
    return (kChannels * kBytes * g) ^ swap_of_row(kSwap, t);
  }

  // Codes of `octet` and 2 kPairs channels, from `channel` on for lanes g = 0.
  template <int kPairs>
  __device__ __forceinline__ void load_values(const std::byte* stage, int octet, int channel,
                                              Sixteen (&x)[kPairs]) const;

  __device__ void add_values(const std::byte* stage, const Fold& fold);
  __device__ __forceinline__ void add_values_by_halves(const std::byte* stage);

  template <bool kFp8>
  __device__ __forceinline__ void half_operands(const std::byte* octet, int row, int k, int channel,
                                                std::uint32_t (&first)[4], std::uint32_t (&second)[4]) const;
  template <bool kFp8, int kSteps, int TW, Swap kSwap>
  __device__ void half_values(const std::byte* values, int stride, int row, int first_step, bool bf16,
                              const float (&page)[NT]);

  // --- a part: pages.cuh ---

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      m[n] = kLowest, l[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * S::kUnits; ++i) o[i][n][0] = o[i][n][1] = 0.0f;
    }
  }

  template <int TW>
  __device__ int page_at(const Part& part, int number) const {
    return part.runs.page(part.use_begin + warp / TW + BW / TW * number);
  }
  __device__ const core::PageRef* page_ref_at(const Part& part, int page) const {
    return p.cache.pages + static_cast<std::size_t>(part.batch.index) * static_cast<std::size_t>(p.cache.max_pages) +
           static_cast<std::size_t>(page);
  }
  template <int TW>
  __device__ core::PageRef page_ref(const Part& part, int number) const;
  __device__ void prefetch_refs(const Part& part) const;
  template <int TW>
  __device__ int slot_of(const Part& part, int number, core::PageRef ref) const;
  template <int TW>
  __device__ int find_slot(const Part& part, int number) const {
    return slot_of<TW>(part, number, page_ref<TW>(part, number));
  }
  __device__ static int slot_at(const Slots& s, int number) {
    const int i = number - s.base;
    const int a = __shfl_sync(~0u, s.here, i & 31), b = __shfl_sync(~0u, s.next, i & 31);
    return i < 32 ? a : b;
  }
  template <int TW>
  __device__ int count_pages(const Part& part) const {
    const int uses = part.use_end - part.use_begin - warp / TW;
    return uses <= 0 ? 0 : (uses + BW / TW - 1) / (BW / TW);
  }

  // One stage a side is enough: a page's values arrive while its keys are multiplied, the next page's keys while its
  // values are, and four blocks of four warps on a multiprocessor hide what is left. With one stage for both sides
  // (Shape::kOneStage) a team waits for each side, and other teams hide that.
  __device__ void first_pages(const Part& part, const Slots& slots) const {
    const int slot = slot_at(slots, 0);
    if (count_pages<W>(part) > 0) {
      copy_keys(part, slot >> kSlotShift);
      if constexpr (!S::kOneStage) copy_values(part, slot >> kSlotShift);
    }
  }
  __device__ void encoded_pages(const Part& part, Slots slots, std::uint32_t& phases);
  __device__ __forceinline__ void copy_exact(std::byte* to, const std::byte* block, int half) const;
  __device__ __forceinline__ void exact_pages(const Part& part);
  __device__ __forceinline__ void exact_pages_by_eight_warps(const Part& part);  // eight_warps.cuh

  // Each warp's maxima and sums of its rows, to where all warps see them. Every warp has ended its products.
  __device__ __forceinline__ void leave_rows();
  template <int TW>
  __device__ bool write_partial(const Part& part);
  template <int TW>
  __device__ bool write_partial_of_eight_warps(const Part& part);  // eight_warps.cuh
  __device__ __forceinline__ bool end_partial(const Part& part);
  template <int TW>
  __device__ bool partial_of(const Part& part) {
    if constexpr (S::kHasEightWarps) {
      return write_partial_of_eight_warps<TW>(part);
    } else {
      return write_partial<TW>(part);
    }
  }

  // --- by a warpgroup: group.cuh ---

  __device__ __forceinline__ void copy_page(const Part& part, int slot, int stage) const;
  __device__ __forceinline__ void multiply_keys(std::uint32_t query_operand, const std::uint32_t (&a)[D / 32][4],
                                                std::int32_t (&c)[4 * NT]) const;
  __device__ __forceinline__ void find_group_centres(const Part& part, const Slots& slots, int first,
                                                     std::uint32_t query_operand) const;
  __device__ __forceinline__ void group_scores(const std::int32_t (&c)[4 * NT], const std::byte* scales, bool centred,
                                               int number, float (&s)[1][NT][2]) const;
  __device__ __forceinline__ void store_group_weights(std::byte* to, const int (&places)[2], const float (&e)[NT][2],
                                                      const float (&v)[2]) const;
  __device__ __forceinline__ void move_group_references(const float (&s)[1][NT][2], const float (&v)[2], float& unit,
                                                        float& inverse);
  __device__ __forceinline__ void lower_group_sums(float (&sums)[D / 64][R / 2]) const;
  __device__ __forceinline__ void poison_group_rows(const float (&e)[NT][2], float (&v)[2]) const;
  __device__ __forceinline__ void unpack_group_values(const std::byte* stage,
                                                      std::uint32_t (&codes)[D / 64][4][4]) const;
  __device__ __forceinline__ void write_group_sums(const Part& part, const float (&sums)[D / 64][R / 2],
                                                   float unit) const;
  __device__ __forceinline__ bool group_part(const Part& part, Slots slots);

  // --- the work list: schedule/item.cuh ---

  // Whether nothing follows the part: the merge's blocks may begin to come.
  __device__ bool is_last() const {
    return info->place.left == 0;
  }
  // The block's first or next part, by one warp.
  __device__ void find_part(bool first) const {
    const auto item = static_cast<int>(blockIdx.x);
    if (!first) {
      next_part(p, *info, item);
    } else if (are_listed(p)) {
      listed_part(p, *info, item);
    } else {
      first_part(p, *info, item);
    }
  }

  __device__ __forceinline__ Slots begin_encoded(const Part& part);  // kernel.cuh
  __device__ __forceinline__ void begin_block();                     // kernel.cuh
  __device__ __forceinline__ void run();                             // kernel.cuh
};

}  // namespace kvant::cuda
