// Decode attention over pages: one kernel for each (key format, value format, head_dim, column tiles).
//
// A block has four warps in teams of W; a team takes every (4 / W)-th page of the block's part of a segment. Key and
// value codes have a stage each in shared memory: a page's values arrive while its keys are multiplied, the next page's keys
// while its values are. The only waits of a page are for its copies and, for W > 1, three barriers of the team. The teams of
// a block meet once, when their part is done, and write one partial. Exact pages are shared by the whole block.
//
// Per page: integer scores (tiles.cuh) -> exponentials relative to a reference that seldom moves -> their products with the
// value scales as 15-bit integers relative to the page's largest, so that small but many weights survive beside a large
// one -> integer output sums, folded into f32 once a page.
#pragma once

#include <utility>

#include "cuda/attend.hpp"
#include "cuda/query.cuh"
#include "cuda/schedule.cuh"
#include "cuda/tiles.cuh"

namespace kvant::cuda {

inline constexpr float kNone = -__builtin_huge_valf();
inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
// Blocks that a multiprocessor should hold, by what registers allow: 128, 168 or 255 a thread.
constexpr int most_blocks(int column_tiles, int channels) {
  return column_tiles == 1 ? 4 : column_tiles == 2 || channels <= 64 ? 3 : 2;
}
// Shared memory of a multiprocessor of sm_90, and what each block takes besides its own.
inline constexpr int kSharedMemory = 233472, kSharedOfBlock = 1024;
inline constexpr int kBulkRow = 4096;  // the bulk engine copies rows from so many bytes on
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulk = true;
#else
inline constexpr bool kHasBulk = false;
#endif
inline constexpr float kTopWeight = 32639.0f;  // 127 * 256 + 127

// Warps of a team: as many as keep a page's bytes for each warp near 8 KiB and the channels of each at 128, of sixteen rows
// at 64 where D allows, because their sums are in registers.
__host__ __device__ constexpr int team_warps(Format k, Format v, int head_dim, int column_tiles) {
  const int bytes = 8 * head_dim * (codec::format_bits(k) + codec::format_bits(v));
  const int channels = column_tiles >= 4 ? 64 : 128;
  int warps = bytes > 24576 ? 4 : bytes > 12800 ? 2 : 1;
  while (warps < 4 && head_dim > channels * warps) warps *= 2;
  while (head_dim % (32 * warps) != 0) warps /= 2;
  return warps;
}

// How a team of W warps shares a page of D channels.
template <int W, int D>
struct Split {
  static constexpr int kTeams = kWarps / W;
  static constexpr int kTokens = 8 / W;  // consecutive ones of a lane in the first product
  static constexpr int kTokenTiles = 4 / W;
  static constexpr int kChannels = D / W;  // of a warp in the second product
  static constexpr int kUnits = kChannels / 32;
};
// Exact pages are few and large: as many warps as can share one.
__host__ __device__ constexpr int exact_team_warps(int head_dim) {
  int warps = kWarps;
  while (head_dim % (32 * warps) != 0) warps /= 2;
  return warps;
}

// Where a block stands on the line of work.
struct LinePlace {
  int at, end;
  int base;  // units before `entry`
  int entry;
  int item;  // -1: none yet
};

// One block's part of a segment. In shared memory: registers are scarce, and most of it is needed once in 32 pages.
struct Part {
  BatchEntry batch;
  int entry, kv_head, row_block, domain;
  int length, q_len;
  int use_begin, use_end;
  int all_begin, all_end;  // keys that every row sees and that no transform changes
  int partial;
  PageRuns runs;
};

template <Format KF, Format VF, int D, int NT>
struct Shape : Split<team_warps(KF, VF, D, NT), D> {
  static constexpr int kRows = 4 * NT;
  static constexpr int kTeam = team_warps(KF, VF, D, NT), kTeams = kWarps / kTeam;
  using Keys = StagedSide<KF, D, false>;
  using Values = StagedSide<VF, D, true>;
  static constexpr int kKeyGroups = side_scale_groups(KF, D);
  static constexpr int kValueGroups = side_scale_groups(VF, D);
  static constexpr int kPGroups = kValueGroups > 1 ? kValueGroups : 1;  // versions of the probabilities
  static constexpr int kScaleBytes = (kKeyGroups + kValueGroups) * 2 * kPageTokens;
  static constexpr int kKeyStage = Keys::kBytes + kScaleBytes;
  static constexpr int kValueStage = Values::kBytes;
  // Probabilities: [column][64 tokens], bytes or halves; rows padded against bank conflicts.
  static constexpr int kColumnBytes = is_integer(VF) ? 96 : 192;
  static constexpr int kPBytes = 2 * kRows * kColumnBytes;
  static constexpr int kTeamP = kPGroups * kPBytes;
  static constexpr int kScratch = kTeam > 1 ? kTeam* kRows*(1 + kPGroups) * 4 : 0;
  static constexpr bool kHasExact = !(is_half(KF) && is_half(VF));  // dense caches have one domain
  // Queries: operand pairs [NT][step][32 lanes] of 8 bytes.
  static constexpr int kEncodedQueries = NT * kQuerySteps<KF, D> * 256, kExactQueries = NT * (D / 16) * 256;
  static constexpr int kQueryBytes = kHasExact && kExactQueries > kEncodedQueries ? kExactQueries : kEncodedQueries;
  static constexpr int kSumGroups = kKeyGroups > 1 ? kKeyGroups : 1;

  struct Info {           // of the block's rows
    float scale[kRows];   // of a product, to log2 units
    float center[kRows];  // added to an encoded key's score
    // Of the sums in each column: minus level_origin, less a half, for every key; the half rounded to an integer.
    std::int32_t start[kSumGroups][2 * kRows];
    std::int32_t poisoned[kRows];
    float m[kWarps][kRows], l[kWarps][kRows];
    std::uint32_t constants[2][Constants<KF>::kWords];
    Part part;
    Line line;
    LinePlace place;
    Window window;
  };

  static constexpr int kQueryAt = 0;
  static constexpr int kInfoAt = kQueryAt + kQueryBytes;  // a multiple of 256
  static constexpr int kBarriers = 2;                     // of a team: keys, values
  static constexpr int kBarriersAt = (kInfoAt + static_cast<int>(sizeof(Info)) + 15) / 16 * 16;
  static constexpr int kTeamsAt = (kBarriersAt + kTeams * kBarriers * 8 + 31) / 32 * 32;
  static constexpr int kPAt = kKeyStage + kValueStage, kScratchAt = kPAt + kTeamP;
  static constexpr int kTeamBytes = (kScratchAt + kScratch + 31) / 32 * 32;
  static constexpr int kCombine = kTeams > 1 ? kTeams* kRows* D * 4 : 0;  // reuses the teams' memory
  static constexpr int kEncodedBytes = kTeams * kTeamBytes > kCombine ? kTeams* kTeamBytes : kCombine;
  // Exact pages pass through the same memory, half a side at a time, through 1, 2 or 4 stages (AttendParams::exact_stages).
  static constexpr int kExactTeam = exact_team_warps(D), kExactTeams = kWarps / kExactTeam;
  static constexpr int kExactKeyRow = padded_row(8 * D, 64), kExactValueRow = padded_row(16 * D, kValueResidue);
  static constexpr int kExactHalf = 8 * kExactKeyRow > 4 * kExactValueRow ? 8 * kExactKeyRow : 4 * kExactValueRow;
  static constexpr int kExactP = 2 * kRows * 192, kExactScratch = kExactTeam * kRows * 4;
  static constexpr int kExactRest = (kExactP + kExactScratch + 31) / 32 * 32;
  static constexpr int bytes(int exact_stages) {
    const int exact = kHasExact ? kExactTeams * (exact_stages * kExactHalf + kExactRest) : 0;
    return kTeamsAt + (kEncodedBytes > exact ? kEncodedBytes : exact);
  }
};

template <Format KF, Format VF, int D, int NT>
struct Attend {
  using S = Shape<KF, VF, D, NT>;
  static constexpr int R = S::kRows, W = S::kTeam;

  static constexpr bool kQueriesInRegisters = is_integer(KF) && NT * kQuerySteps<KF, D> <= 8;

  const AttendParams& p;
  std::byte* shared;
  int lane, g, t, warp, team, member;  // member: of the team
  typename S::Info* info;
  float o[2 * S::kUnits][NT][2];
  float m[NT], l[NT];
  std::byte* weights;  // operands of the second product
  float* scratch;      // of the team
  Constants<KF> key_constants;
  Constants<VF> value_constants;

  __device__ Attend(const AttendParams& params, std::byte* memory) : p(params), shared(memory) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    g = lane / 4, t = lane % 4;
    team = warp / W, member = warp % W;
    info = reinterpret_cast<typename S::Info*>(shared + S::kInfoAt);
  }

  // --- shared memory ---
  __device__ std::byte* team_memory() const { return shared + S::kTeamsAt + team * S::kTeamBytes; }
  __device__ std::byte* key_stage() const { return team_memory(); }
  __device__ std::byte* value_stage() const { return team_memory() + S::kKeyStage; }
  enum Barrier { kKeys, kValues };
  __device__ void wait(Barrier which, std::uint32_t& phases) const {
    ptx::mbarrier_wait(barrier_at(which), phases >> which & 1);
    phases ^= 1u << which;
  }
  __device__ std::uint32_t barrier_at(int index) const {
    return ptx::shared_address(shared + S::kBarriersAt) + 8 * (team * S::kBarriers + index);
  }
  template <int TW>
  __device__ void team_sync() const {
    if constexpr (TW == 1) {
      __syncwarp();
    } else if constexpr (TW == kWarps) {
      __syncthreads();
    } else if (warp / TW == 0) {
      ptx::barrier<1, 32 * TW>();
    } else {
      ptx::barrier<2, 32 * TW>();
    }
  }

  // --- copies ---

  // Rows of 16-bit floats by the bulk engine; others 512 bytes an instruction, because the bulk engine takes about thirty a
  // row.
  template <class Side>
  static constexpr bool kBulk = kHasBulk&& Side::row_bytes(0) >= kBulkRow;

  // Rows `first` .. of kRows in all, `from` contiguous, by all lanes of a warp.
  template <int kRows, int kRowBytes, int kStride, bool kByBulk>
  __device__ __forceinline__ void copy_rows(std::byte* to, const std::byte* from, std::uint32_t barrier,
                                            int first = 0) const {
    to += first * kStride, from += first * kRowBytes;
#if __CUDA_ARCH__ >= 900
    if constexpr (kByBulk) {
      if (lane < kRows)
        ptx::copy_bulk(ptx::shared_address(to + lane * kStride), from + lane * kRowBytes, kRowBytes, barrier);
      return;
    }
#endif
    constexpr int kTotal = kRows * kRowBytes, kSteps = (kTotal + 511) / 512;
    const std::uint32_t base = ptx::shared_address(to);
    const std::byte* mine = from + 16 * lane;
    const auto steps = [&]<int... kStep>(std::integer_sequence<int, kStep...>, auto&& step) {
      (step.template operator()<512 * kStep>(), ...);
    };
    constexpr auto kAll = std::make_integer_sequence<int, kSteps>{};
    if constexpr (kRowBytes % 512 == 0) {
      const std::uint32_t at = base + 16 * lane;
      steps(kAll, [&]<int kAt>() { ptx::copy16<kAt / kRowBytes * kStride + kAt % kRowBytes, kAt>(at, mine); });
    } else if constexpr (512 % kRowBytes == 0) {
      const std::uint32_t at = base + 16 * lane / kRowBytes * kStride + 16 * lane % kRowBytes;
      steps(kAll, [&]<int kAt>() {
        if (kAt + 512 <= kTotal || kAt + 16 * lane < kTotal) ptx::copy16<kAt / kRowBytes * kStride, kAt>(at, mine);
      });
    } else {
      steps(kAll, [&]<int kAt>() {
        const int i = kAt + 16 * lane;
        if (i < kTotal) ptx::copy16<0, kAt>(base + i / kRowBytes * kStride + i % kRowBytes, mine);
      });
    }
  }
  // The warps of a team share the eight rows of a plane, where these are not for the bulk engine.
  template <class Side>
  __device__ __forceinline__ void copy_side(std::byte* to, const std::byte* from, std::uint32_t plane1,
                                            std::uint32_t barrier) const {
    constexpr int kRows = kBulk<Side> ? 8 : 8 / W;
    const int first = kBulk<Side> ? 0 : kRows * member;
    copy_rows<kRows, Side::row_bytes(0), Side::stride(0), kBulk<Side>>(to, from, barrier, first);
    if constexpr (Side::kPlanes == 2) {
      copy_rows<kRows, Side::row_bytes(1), Side::stride(1), kBulk<Side>>(to + Side::offset(1), from + plane1, barrier,
                                                                         first);
    }
  }
  template <class Side>
  __device__ static constexpr int side_bytes() {
    return 8 * (Side::row_bytes(0) + (Side::kPlanes == 2 ? Side::row_bytes(1) : 0));
  }
  // A barrier of bulk copies counts bytes and one arrival; of others, one arrival of each lane that copies.
  template <bool kByBulk>
  __device__ void begin_copy(std::uint32_t barrier, int bytes) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kByBulk) {
      if (lane == 0) ptx::mbarrier_expect(barrier, bytes);
      __syncwarp();
    }
#endif
  }
  template <bool kByBulk>
  __device__ static void end_copy(std::uint32_t barrier) {
    if constexpr (!kByBulk) ptx::mbarrier_arrive_copies(barrier);
  }
  template <bool kByBulk>
  __device__ void skip_copy(std::uint32_t barrier) const {
    if (!kByBulk || lane == 0) ptx::mbarrier_arrive(barrier);
  }
  template <bool kByBulk>
  __device__ static constexpr int arrivals() {
    return kByBulk ? 1 : 32 * W;
  }

  __device__ const std::byte* encoded_block(int slot, int kv_head) const {
    return p.cache.encoded + static_cast<std::uint64_t>(slot) * p.cache.encoded_slot_bytes +
           static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + kv_head) * p.cache.encoded_layout.block_bytes;
  }
  __device__ const std::byte* exact_block(int slot, int kv_head) const {
    return p.cache.exact + static_cast<std::uint64_t>(slot) * p.cache.exact_slot_bytes +
           static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + kv_head) * p.cache.exact_layout.block_bytes;
  }

  __device__ void copy_keys(int slot, int kv_head) const {
    using Keys = typename S::Keys;
    if (kBulk<Keys> && member != 0) return;
    const std::uint32_t barrier = barrier_at(kKeys);
    if (slot < 0) return skip_copy<kBulk<Keys>>(barrier);
    const std::byte* block = encoded_block(slot, kv_head);
    begin_copy<kBulk<Keys>>(barrier, side_bytes<Keys>() + S::kScaleBytes);
    std::byte* to = key_stage();
    copy_side<Keys>(to, block, p.cache.encoded_layout.k.plane_offset[1], barrier);
    if (S::kScaleBytes > 0 && member == 0) {
      copy_rows<1, S::kScaleBytes, S::kScaleBytes, kBulk<Keys>>(to + Keys::kBytes,
                                                                block + p.cache.encoded_layout.code_bytes, barrier);
    }
    end_copy<kBulk<Keys>>(barrier);
  }
  __device__ void copy_values(int slot, int kv_head) const {
    using Values = typename S::Values;
    if (kBulk<Values> && member != 0) return;
    const std::uint32_t barrier = barrier_at(kValues);
    if (slot < 0) return skip_copy<kBulk<Values>>(barrier);
    const codec::SideLayout& v = p.cache.encoded_layout.v;
    const std::byte* block = encoded_block(slot, kv_head) + v.plane_offset[0];
    begin_copy<kBulk<Values>>(barrier, side_bytes<Values>());
    copy_side<Values>(value_stage(), block, v.plane_offset[1] - v.plane_offset[0], barrier);
    end_copy<kBulk<Values>>(barrier);
  }

  // --- queries ---

  // A row of queries on its way to registers: the warp's first one is asked for before the first pages, behind which it would
  // wait for microseconds, the others each before the one ahead of it is rotated.
  struct RawQuery {
    std::uint32_t bits[D / 32];
  };
  // The query of row r of the block; -1: none
  __device__ int query_of(const Part& part, int r, int& q_head) const {
    const int row = part.row_block * R + r;
    const int query = row / p.group;
    q_head = part.kv_head * p.group + row - query * p.group;
    return query < part.q_len ? query : -1;
  }
  __device__ __forceinline__ void ask_for_row(const Part& part, int r, std::uint32_t (&bits)[D / 32]) const {
    int q_head;
    const int query = query_of(part, r, q_head);
    if (query < 0) return;
    load_bits(p.q.data, p.q.dtype,
              static_cast<std::int64_t>(part.batch.query_begin + query) * p.q.token_stride +
                  static_cast<std::int64_t>(q_head) * p.q.head_stride + lane,
              bits);
  }

  // Rows of the block into `info` and the operand layout of `F`, in the basis of encoded keys or as given.
  template <Format F>
  __device__ void load_queries(const Part& part, RawQuery& raw, bool encoded, bool bf16) {
    const DeviceBasis& basis = p.k_basis;
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + part.kv_head);
    float* room = reinterpret_cast<float*>(shared + S::kTeamsAt) + warp * D;  // the rings are idle
#pragma unroll 1
    for (int j = 0; j < NT; ++j) {
      const int r = warp + kWarps * j;
      int q_head;
      const bool used = query_of(part, r, q_head) >= 0;
      float x[D / 32];
      float center = 0.0f;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        x[i] = used ? element_of(raw.bits[i], p.q.dtype) : 0.0f;
        finite = finite && base::is_finite(x[i]);
      }
      if (j + 1 < NT) ask_for_row(part, r + kWarps, raw.bits);
      const bool poisoned = __any_sync(~0u, !finite);
      if (poisoned) {
#pragma unroll
        for (int i = 0; i < D / 32; ++i) x[i] = 0.0f;
      }
      if (encoded && basis.kind == BasisKind::hadamard) rotate<D>(x, room);
      if (encoded && basis.kind == BasisKind::calibrated) {
        const float* c = basis.center + at * D;
        const float* inverse = basis.inverse + at * D * D;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
          center += x[i] * c[lane + 32 * i];
          room[lane + 32 * i] = x[i];
        }
        center = warp_sum(center);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < D / 32; ++i) x[i] = 0.0f;
        for (int j = 0; j < D; ++j) {
          const float q = room[j];
#pragma unroll
          for (int i = 0; i < D / 32; ++i) x[i] += inverse[j * D + lane + 32 * i] * q;
        }
      }
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) largest = fmaxf(largest, fabsf(x[i]));
      largest = warp_max(largest);
      const float unit = is_integer(F) ? largest / kTopWeight : largest;
      const float inverse = unit > 1e-37f ? 1.0f / unit : 0.0f;
      int sums[S::kSumGroups][2];
#pragma unroll
      for (int i = 0; i < S::kSumGroups; ++i) sums[i][0] = sums[i][1] = 0;
      std::byte* operands = shared + S::kQueryAt + r / 4 * kQuerySteps<F, D> * 256;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const QueryPlace place = query_place<F, D>(lane + 32 * i);
        std::byte* pair = operands + place.step * 256 + (2 * (r % 4) * 4 + place.t) * 8;  // column 2 r: the high digit
        if constexpr (is_integer(F)) {
          const int q = __float2int_rn(x[i] * inverse);
          const int high = (q + 128) >> 8, low = q - 256 * high;
          pair[place.place] = static_cast<std::byte>(high);
          pair[32 + place.place] = static_cast<std::byte>(low);
          const int group = S::kSumGroups > 1 ? i / 4 : 0;
          sums[group][0] += high, sums[group][1] += low;
        } else {
          const float q = x[i] * inverse;
          const std::uint32_t high = bf16 ? ptx::bf16x2(q, 0.0f) : ptx::f16x2(q, 0.0f);
          const float rest =
              q - (bf16 ? __uint_as_float(high << 16) : ptx::f16_to_f32(static_cast<std::uint16_t>(high)));
          const std::uint32_t low = bf16 ? ptx::bf16x2(rest, 0.0f) : ptx::f16x2(rest, 0.0f);
          reinterpret_cast<std::uint16_t*>(pair)[place.place] = static_cast<std::uint16_t>(high);
          reinterpret_cast<std::uint16_t*>(pair + 32)[place.place] = static_cast<std::uint16_t>(low);
        }
      }
      if constexpr (is_integer(F)) {
#pragma unroll
        for (int i = 0; i < S::kSumGroups; ++i) {
          for (int digit = 0; digit < 2; ++digit) sums[i][digit] = __reduce_add_sync(~0u, sums[i][digit]);
          if (lane == 0) {
            info->start[i][2 * r] = -level_origin(KF) * sums[i][0];
            info->start[i][2 * r + 1] = -level_origin(KF) * sums[i][1] + (256 * sums[i][0] + sums[i][1]) / 2;
          }
        }
      }
      if (lane == 0) {
        const float to_log2 = p.scale * kLog2e;
        info->scale[r] = unit * to_log2 * (F == Format::fp8 ? 256.0f : 1.0f);
        info->center[r] = center * to_log2;
        info->poisoned[r] = poisoned && used ? 1 : 0;
      }
    }
  }

  // --- first product ---

  struct Registers {  // of a part
    uint2 pairs[NT][kQueriesInRegisters ? kQuerySteps<KF, D> : 1];
  };

  // Scores in log2 units, scaled, of this lane's tokens (tile i, row half h). Encoded pages.
  __device__ __forceinline__ void key_scores(const std::byte* stage, const Registers& held,
                                             float (&s)[S::kTokenTiles][NT][2]) const {
    using Keys = typename S::Keys;
    const std::byte* scales = stage + Keys::kBytes;
    if constexpr (is_integer(KF)) {
      constexpr int kTiles = NT >= 4 ? 1 : NT == 2 && S::kTokenTiles == 4 ? 2 : S::kTokenTiles;  // at a time
      constexpr int kGroups = S::kSumGroups, kBlocks = (D + 63) / 64 / kGroups;  // blocks of 64 channels
#pragma unroll
      for (int first = 0; first < S::kTokenTiles; first += kTiles) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          std::int32_t c[kTiles][NT][4];
          int2 start[NT];
#pragma unroll
          for (int n = 0; n < NT; ++n) start[n] = *reinterpret_cast<const int2*>(&info->start[group][2 * (4 * n + t)]);
          const auto multiply = [&]<bool kFirst, bool kHalfBlock>(int block) {
            constexpr int kSteps = kHalfBlock ? 1 : 2;
            uint2 b[kSteps][NT];
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
#pragma unroll
              for (int n = 0; n < NT; ++n) {
                if constexpr (kQueriesInRegisters) {
                  b[j][n] = held.pairs[n][2 * block + j];
                } else {
                  b[j][n] = query_pair<KF>(n, 2 * block + j);
                }
              }
            }
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              const int token = S::kTokens * member + 2 * (first + i);  // of octet g
              const std::byte* rows[2][2];
#pragma unroll
              for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int plane = 0; plane < 2; ++plane) {
                  const int at = plane < Keys::kPlanes ? plane : 0;
                  rows[h][plane] =
                      stage + Keys::offset(at) + g * Keys::stride(at) + (token + h) * (Keys::row_bytes(at) / 8);
                }
              }
              const Sixteen x = load_key_codes<KF, kHalfBlock>(rows[0], block, t, key_constants);
              const Sixteen y = load_key_codes<KF, kHalfBlock>(rows[1], block, t, key_constants);
#pragma unroll
              for (int j = 0; j < kSteps; ++j) {
                const std::uint32_t a[4] = {x.first[j], y.first[j], x.second[j], y.second[j]};
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                  if (kFirst && j == 0) {
                    ptx::mma_from(c[i][n], a, b[j][n].x, b[j][n].y, start[n].x, start[n].y);
                  } else {
                    ptx::mma(c[i][n], a, b[j][n].x, b[j][n].y);
                  }
                }
              }
            }
          };
          constexpr int kWhole = D % 64 == 0 ? kBlocks : kBlocks - 1;
          multiply.template operator()<true, false>(group * kBlocks);
#pragma unroll(kBlocks <= 3 ? 2 : kBlocks == 4 ? 3 : 7)
          for (int block = 1; block < kWhole; ++block)
            multiply.template operator()<false, false>(group * kBlocks + block);
          if constexpr (D % 64 != 0) multiply.template operator()<false, true>(kBlocks - 1);
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int token = 8 * g + S::kTokens * member + 2 * (first + i) + h;
              const float scale = half_at(scales, group * kPageTokens + token);
#pragma unroll
              for (int n = 0; n < NT; ++n) {
                const float product = static_cast<float>(256 * c[i][n][2 * h] + c[i][n][2 * h + 1]);
                const float x = product * (scale * info->scale[4 * n + t]);
                s[first + i][n][h] = group == 0 ? x : s[first + i][n][h] + x;
              }
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
        const int token = S::kTokens * member + 2 * i;  // of octet g
        const std::byte* first = stage + g * Keys::stride(0) + token * (Keys::row_bytes(0) / 8);
        const std::byte* const row[2] = {first, first + Keys::row_bytes(0) / 8};
        float c[NT][4];
#pragma unroll
        for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
        if constexpr (KF == Format::fp8) {
          fp8_key_product(row, c);
        } else {
          half_key_product(row, KF == Format::bf16, c);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = S::kKeyGroups > 0 ? half_at(scales, 8 * g + token + h) : 1.0f;
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            s[i][n][h] = (c[n][2 * h] + c[n][2 * h + 1]) * (scale * info->scale[4 * n + t]);
          }
        }
      }
    }
  }

  template <Format F>
  __device__ uint2 query_pair(int n, int step) const {
    return *reinterpret_cast<const uint2*>(shared + S::kQueryAt + (n * kQuerySteps<F, D> + step) * 256 + lane * 8);
  }

  __device__ void fp8_key_product(const std::byte* const (&row)[2], float (&c)[NT][4]) const {
#pragma unroll
    for (int block = 0; block < (D + 63) / 64; ++block) {
      const bool tail = D % 64 != 0 && block == D / 64;
      std::uint32_t x[4], y[4];
      if (tail) {
        load_words<8>(row[0] + 64 * block + 8 * t, x);
        load_words<8>(row[1] + 64 * block + 8 * t, y);
      } else {
        load_words<16>(row[0] + 64 * block + 16 * t, x);
        load_words<16>(row[1] + 64 * block + 16 * t, y);
      }
#pragma unroll
      for (int j = 0; j < (tail ? 2 : 4); ++j) {
        std::uint32_t a[4];
        unpack_fp8(x[j], a[0], a[2]);
        unpack_fp8(y[j], a[1], a[3]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint2 b = query_pair<Format::fp8>(n, 4 * block + j);
          ptx::mma_f16(c[n], a, b.x, b.y);
        }
      }
    }
  }

  // Keys of 16-bit floats at row[h], in shared or global memory.
  __device__ void half_key_product(const std::byte* const (&row)[2], bool bf16, float (&c)[NT][4]) const {
#pragma unroll(is_half(KF) ? 4 : 2)
    for (int block = 0; block < D / 32; ++block) {
      std::uint32_t x[4], y[4];
      load_words<16>(row[0] + 64 * block + 16 * t, x);
      load_words<16>(row[1] + 64 * block + 16 * t, y);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const std::uint32_t a[4] = {x[2 * j], y[2 * j], x[2 * j + 1], y[2 * j + 1]};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint2 b = query_pair<Format::bf16>(n, 2 * block + j);
          mma_half(c[n], a, b.x, b.y, bf16);
        }
      }
    }
  }

  // --- between the products ---

  // Logit transforms and visibility, token by token. Scores in log2 units in and out. Rolled up, through local memory: pages
  // that need this are few, or the transform is what takes the time; unrolled it is a seventh of the kernel.
  template <int TW>
  __device__ __forceinline__ void transform(const Part& part, int page, float (&s)[4 / TW][NT][2]) const {
    using L = Split<TW, D>;
    const int member = warp % TW;
    float copy[NT * L::kTokens];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int k = 0; k < L::kTokens; ++k) copy[n * L::kTokens + k] = s[k / 2][n][k % 2];
    }
    const base::Visibility rule{p.causal, p.window, p.window_sinks};
#pragma unroll 1
    for (int at = 0; at < NT * L::kTokens; ++at) {
      const int r = 4 * (at / L::kTokens) + t, row = part.row_block * R + r;
      const int query = row / p.group, q_head = part.kv_head * p.group + row % p.group;
      const std::int64_t position = part.length - part.q_len + query;
      const std::int64_t key = page * kPageTokens + 8 * g + L::kTokens * member + at % L::kTokens;
      float x = copy[at] * kLn2;
      if (part.domain == core::kEncoded) x += info->center[r] * kLn2;
      if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
      const bool sees = query < part.q_len && key < part.length && rule.sees(part.length, position, key);
      if (sees && p.slopes != nullptr) x -= p.slopes[q_head] * fabsf(static_cast<float>(position - key));
      if (sees && p.mask.data != nullptr) {
        const std::int64_t from = part.entry * p.mask.stride[0] + q_head * p.mask.stride[1] + query * p.mask.stride[2] +
                                  key * p.mask.stride[3];
        if (p.mask.dtype == Dtype::boolean) {
          if (static_cast<const std::uint8_t*>(p.mask.data)[from] == 0) x = kNone;
        } else {
          x += load_element(p.mask.data, p.mask.dtype, from);
        }
      }
      copy[at] = sees ? x * kLog2e : kNone;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int k = 0; k < L::kTokens; ++k) s[k / 2][n][k % 2] = copy[n * L::kTokens + k];
    }
  }

  __device__ static float over_tokens(float x) {  // the largest over the lanes that share a row
#pragma unroll
    for (int h = 4; h < 32; h *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, h));
    return x;
  }

  // Of a row and a version of the probabilities: what the page's sums are multiplied by when they join the running ones.
  using Fold = float[S::kPGroups][NT];

  // Scores to weights in shared memory, for values of format F; value scales at `scales` (none: null). Exponentials are
  // relative to a reference `m` that moves only when some are large: after the first pages, rarely.
  template <Format F, int TW>
  __device__ __forceinline__ void weigh(const float (&s)[4 / TW][NT][2], const std::byte* scales, bool bf16,
                                        Fold& fold) {
    using L = Split<TW, D>;
    const int member = warp % TW;
    constexpr int kGroups = is_half(F) ? 1 : S::kPGroups;
    constexpr bool kScaled = !is_half(F);
    constexpr float kLargeSum = 16384.0f;
    float v[kGroups][L::kTokenTiles][2];
    float poison = 0.0f;
    if constexpr (kScaled) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            v[q][i][h] = half_at(scales, q * kPageTokens + 8 * g + L::kTokens * member + 2 * i + h);
            poison = fmaf(v[q][i][h], 0.0f, poison);
          }
        }
      }
    }
    float e[L::kTokenTiles][NT][2], sum[NT], peak[kGroups][NT];
    const auto exponentials = [&] {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        sum[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) sum[n] += e[i][n][h] = ptx::ex2(s[i][n][h] - m[n]);
        }
      }
    };
    const auto is_large = [&] {
      bool is = false;
#pragma unroll
      for (int n = 0; n < NT; ++n) is = is || !(sum[n] <= kLargeSum);
      return __any_sync(~0u, is);
    };
    // The largest product of each row and version.
    const auto find_peaks = [&] {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          float x = 0.0f;
#pragma unroll
          for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) x = fmaxf(x, kScaled ? e[i][n][h] * v[q][i][h] : e[i][n][h]);
          }
          peak[q][n] = over_tokens(x);
        }
      }
    };
    // The largest of `x` over the team's warps.
    const auto over_team = [&](float(&x)[kGroups][NT]) {
      if constexpr (TW > 1) {
        float* mine = scratch + member * R * kGroups;
        if (g == 0) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int q = 0; q < kGroups; ++q) mine[(4 * n + t) * kGroups + q] = x[q][n];
          }
        }
        team_sync<TW>();
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int other = 0; other < TW; ++other) {
            const float* theirs = scratch + (other * R + 4 * n + t) * kGroups;
#pragma unroll
            for (int q = 0; q < kGroups; ++q) x[q][n] = fmaxf(x[q][n], theirs[q]);
          }
        }
      }
    };
    exponentials();
    if (__any_sync(~0u, poison != poison)) {
      // A scale that is not a number poisons whoever sees its key; to others it is 0.
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float bad = v[q][i][h] * 0.0f;
            v[q][i][h] = fmaxf(v[q][i][h], 0.0f);
#pragma unroll
            for (int n = 0; n < NT; ++n) l[n] += e[i][n][h] != 0.0f ? bad : 0.0f;
          }
        }
      }
    }
    bool large = is_large();
    if constexpr (TW > 1) {
      find_peaks();
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int n = 0; n < NT; ++n) peak[q][n] = large ? -kNone : peak[q][n];
      }
      over_team(peak);
      bool is = false;
#pragma unroll
      for (int n = 0; n < NT; ++n) is = is || peak[0][n] == -kNone;
      large = __any_sync(~0u, is);
    }
    if (large) {
      float top[kGroups][NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float x = kLowest;
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) x = fmaxf(x, fmaxf(s[i][n][0], s[i][n][1]));
#pragma unroll
        for (int q = 0; q < kGroups; ++q) top[q][n] = over_tokens(x);
      }
      team_sync<TW>();
      over_team(top);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float m_new = fmaxf(m[n], top[0][n]);
        const float alpha = ptx::ex2(m[n] - m_new);
        m[n] = m_new;
        l[n] *= alpha;
#pragma unroll
        for (int i = 0; i < 2 * L::kUnits; ++i) o[i][n][0] *= alpha, o[i][n][1] *= alpha;
      }
      exponentials();
      team_sync<TW>();
    }
    if (TW == 1 || large) {
      find_peaks();
      over_team(peak);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      l[n] += sum[n];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        constexpr float kTop = is_integer(F) ? kTopWeight : 1.0f;
        const float largest = fmaxf(peak[q][n], 1e-33f);
        const float up = kTop * ptx::rcp(largest);
        fold[q][n] = largest * (F == Format::fp8 ? 256.0f : 1.0f / kTop);
        float w[L::kTokenTiles][2];
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) w[i][h] = kScaled ? e[i][n][h] * v[q][i][h] : e[i][n][h];
        }
        store_weights<F, TW>(w, up, n, q, bf16);
      }
    }
  }

  // w * up of this lane's tokens and row 4 n + t, as digits, to its two columns.
  template <Format F, int TW>
  __device__ __forceinline__ void store_weights(const float (&w)[4 / TW][2], float up, int n, int q, bool bf16) const {
    using L = Split<TW, D>;
    const int member = warp % TW;
    constexpr int kStride = is_integer(F) ? 96 : 192;
    std::byte* high = weights + q * S::kPBytes + 2 * (4 * n + t) * kStride + (is_integer(F) ? 8 : 16) * g;
    std::byte* low = high + kStride;
    if constexpr (is_integer(F)) {
      // The sum with 2^15 has the integer in the two bytes above its last. 128 more make the upper one the nearest multiple
      // of 256, and the lower one what remains, plus 128.
      std::uint32_t bits[8] = {};
#pragma unroll
      for (int k = 0; k < L::kTokens; ++k) {
        // Ordered dither: many equal weights far below one unit, beside a large one, keep their sum.
        const float dither = (static_cast<float>(L::kTokens * member + k) - 3.5f) * 0.125f;
        bits[k] = __float_as_uint(fmaf(w[k / 2][k % 2], up, dither + (32768.0f + 128.0f + 0.5f)));
      }
      constexpr Order kOrder = order_of(F);
      // Bytes low, low, high, high of two tokens.
      const auto two = [&](int i, int j) { return ptx::prmt(bits[i], bits[j], 0x6251); };
      const auto lows = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x5410) ^ 0x80808080u; };
      const auto highs = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x7632); };
      if constexpr (TW == 1) {
        const std::uint32_t a = kOrder == Order::natural ? two(0, 1) : two(0, 2);
        const std::uint32_t b = kOrder == Order::natural ? two(2, 3) : two(4, 6);
        const std::uint32_t c = kOrder == Order::natural ? two(4, 5) : two(1, 3);
        const std::uint32_t d = kOrder == Order::natural ? two(6, 7) : two(5, 7);
        *reinterpret_cast<uint2*>(high) = make_uint2(highs(a, b), highs(c, d));
        *reinterpret_cast<uint2*>(low) = make_uint2(lows(a, b), lows(c, d));
      } else if constexpr (TW == 2 && kOrder == Order::natural) {
        const std::uint32_t a = two(0, 1), b = two(2, 3);
        *reinterpret_cast<std::uint32_t*>(high + 4 * member) = highs(a, b);
        *reinterpret_cast<std::uint32_t*>(low + 4 * member) = lows(a, b);
      } else {
        // Pairs that end up side by side.
        constexpr int kPairs = L::kTokens / 2;
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          if constexpr (TW == 2) {
            const std::uint32_t x = two(k, k + 2);
            *reinterpret_cast<std::uint16_t*>(high + 4 * k + 2 * member) = static_cast<std::uint16_t>(x >> 16);
            *reinterpret_cast<std::uint16_t*>(low + 4 * k + 2 * member) = static_cast<std::uint16_t>(x ^ 0x8080u);
          } else if constexpr (kOrder == Order::natural) {
            const std::uint32_t x = two(0, 1);
            *reinterpret_cast<std::uint16_t*>(high + 2 * member) = static_cast<std::uint16_t>(x >> 16);
            *reinterpret_cast<std::uint16_t*>(low + 2 * member) = static_cast<std::uint16_t>(x ^ 0x8080u);
          } else {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              high[4 * j + member] = static_cast<std::byte>(bits[j] >> 16 & 0xFFu);
              low[4 * j + member] = static_cast<std::byte>(((bits[j] >> 8) ^ 0x80u) & 0xFFu);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < L::kTokens; k += 2) {
        const float a = w[k / 2][0] * up, b = w[k / 2][1] * up;
        std::uint32_t top, rest;
        if (bf16) {
          top = ptx::bf16x2(a, b);
          rest = ptx::bf16x2(a - __uint_as_float(top << 16), b - __uint_as_float(top & 0xFFFF0000u));
        } else {
          top = ptx::f16x2(a, b);
          rest = ptx::f16x2(a - ptx::f16_to_f32(static_cast<std::uint16_t>(top)),
                            b - ptx::f16_to_f32(static_cast<std::uint16_t>(top >> 16)));
        }
        const int at = 2 * (L::kTokens * member + k);
        *reinterpret_cast<std::uint32_t*>(high + at) = top;
        *reinterpret_cast<std::uint32_t*>(low + at) = rest;
      }
    }
  }

  // --- second product ---

  __device__ void fold_tile(int tile, const float (&x)[NT][2], const float (&page)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) o[tile][n][h] = fmaf(x[n][h], page[n], o[tile][n][h]);
    }
  }

  __device__ void add_values(const std::byte* stage, const Fold& fold) {
    using Values = typename S::Values;
    const int group = S::kPGroups > 1 ? member * S::kChannels / 128 : 0;
    float page[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      page[n] = fold[0][n];
#pragma unroll
      for (int q = 1; q < S::kPGroups; ++q) page[n] = q == group ? fold[q][n] : page[n];
    }
    const std::byte* operands = weights + group * S::kPBytes;
    if constexpr (is_integer(VF)) {
      uint2 b[NT][2];
      std::int32_t start[NT][2];
      constexpr std::uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        std::int32_t sums[4];
        b[n][0] = *reinterpret_cast<const uint2*>(operands + (8 * n + g) * 96 + t * 8);
        b[n][1] = *reinterpret_cast<const uint2*>(operands + (8 * n + g) * 96 + (4 + t) * 8);
        ptx::mma_from(sums, kOnes, b[n][0].x, b[n][0].y, 0, 0);
        ptx::mma(sums, kOnes, b[n][1].x, b[n][1].y);
        start[n][0] = -level_origin(VF) * sums[0];
        start[n][1] = -level_origin(VF) * sums[1] + (256 * sums[0] + sums[1]) / 2;
      }
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        std::int32_t c[2][NT][4];
        const int channel = member * S::kChannels + 32 * unit + 4 * g;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const int octet = 4 * step + t;
          std::uint32_t first[4], second[4];  // of four channels
          if constexpr (codec::format_bits(VF) == 8) {
            const std::byte* from = stage + octet * Values::stride(0) + channel * 4;
            load_words<16>(from, first);
            load_words<16>(from + 4 * D, second);
          } else {
            std::uint32_t low[4], high[2] = {0, 0};
            load_words<2 * 2 * plane_bits(VF, 0)>(stage + octet * Values::stride(0) + channel * plane_bits(VF, 0), low);
            if constexpr (Values::kPlanes == 2) {
              load_words<4 * plane_bits(VF, 1)>(
                  stage + Values::offset(1) + octet * Values::stride(1) + channel * plane_bits(VF, 1), high);
              if constexpr (plane_bits(VF, 1) == 1) high[1] = high[0] >> 16;
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              const Sixteen x = unpack<VF>(low + pair * (plane_bits(VF, 0) / 2), high[pair], value_constants);
              first[2 * pair] = x.first[0], first[2 * pair + 1] = x.first[1];
              second[2 * pair] = x.second[0], second[2 * pair + 1] = x.second[1];
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const std::uint32_t a[4] = {first[2 * tile], first[2 * tile + 1], second[2 * tile], second[2 * tile + 1]};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              if (step == 0) {
                ptx::mma_from(c[tile][n], a, b[n][0].x, b[n][0].y, start[n][0], start[n][1]);
              } else {
                ptx::mma(c[tile][n], a, b[n][1].x, b[n][1].y);
              }
            }
          }
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          float x[NT][2];
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) x[n][h] = static_cast<float>(256 * c[tile][n][2 * h] + c[tile][n][2 * h + 1]);
          }
          fold_tile(2 * unit + tile, x, page);
        }
      }
    } else if constexpr (VF == Format::fp8) {
      half_values<true, 2, W>(stage, Values::stride(0), 4 * D, 0, false, page);
    } else {
      half_values<false, 2, W>(stage, Values::stride(0), 2 * D, 0, VF == Format::bf16, page);
    }
  }

  // Values of 16-bit floats (rows of `row` bytes a token) or e4m3 (of a quad), octets `stride` bytes apart; kSteps times
  // four octets, from 4 `first_step` on.
  template <bool kFp8, int kSteps, int TW>
  __device__ void half_values(const std::byte* values, int stride, int row, int first_step, bool bf16,
                              const float (&page)[NT]) {
    using L = Split<TW, D>;
    const int member = warp % TW;
#pragma unroll
    for (int unit = 0; unit < L::kUnits; ++unit) {
      float c[2][NT][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int n = 0; n < NT; ++n) c[tile][n][0] = c[tile][n][1] = c[tile][n][2] = c[tile][n][3] = 0.0f;
      }
      const int channel = member * L::kChannels + 32 * unit + 4 * g;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const std::byte* octet = values + (4 * step + t) * stride;
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(weights + (8 * n + g) * 192 + (4 * (first_step + step) + t) * 16);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // tokens 4 k .. of the octet
          std::uint32_t first[4], second[4];
          if constexpr (kFp8) {
            std::uint32_t codes[4];
            load_words<16>(octet + k * row + channel * 4, codes);
#pragma unroll
            for (int i = 0; i < 4; ++i) unpack_fp8(codes[i], first[i], second[i]);
          } else {
            std::uint32_t x[4][2];
#pragma unroll
            for (int j = 0; j < 4; ++j) load_words<8>(octet + (4 * k + j) * row + channel * 2, x[j]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const std::uint32_t selector = i % 2 == 0 ? 0x5410 : 0x7632;
              first[i] = ptx::prmt(x[0][i / 2], x[1][i / 2], selector);
              second[i] = ptx::prmt(x[2][i / 2], x[3][i / 2], selector);
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const std::uint32_t a[4] = {first[2 * tile], first[2 * tile + 1], second[2 * tile], second[2 * tile + 1]};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              mma_half(c[tile][n], a, k == 0 ? b[n].x : b[n].z, k == 0 ? b[n].y : b[n].w, bf16);
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float x[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) x[n][0] = c[tile][n][0] + c[tile][n][1], x[n][1] = c[tile][n][2] + c[tile][n][3];
        fold_tile(2 * unit + tile, x, page);
      }
    }
  }

  // --- a part ---

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      m[n] = kLowest, l[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * S::kUnits; ++i) o[i][n][0] = o[i][n][1] = 0.0f;
    }
  }

  // Keys that every row of the part sees, if nothing but visibility changes scores.
  __device__ void set_seen_by_all(Part& part) const {
    part.all_begin = part.all_end = 0;
    if (p.softcap > 0.0f || p.slopes != nullptr || p.mask.data != nullptr) return;
    if (part.domain == core::kEncoded && p.k_basis.kind == BasisKind::calibrated) return;
    const base::Visibility rule{p.causal, p.window, p.window_sinks};
    const int first = part.row_block == 0 ? 0 : part.row_block * R / p.group;
    const std::int64_t position = part.length - part.q_len;
    part.all_end = static_cast<int>(rule.recent_range(part.length, position + first).end);
    if (p.window == 0) return;
    int last = (part.row_block * R + R - 1) / p.group;
    last = last < part.q_len ? last : part.q_len - 1;
    part.all_begin = static_cast<int>(rule.recent_range(part.length, position + last).begin);
  }

  // A team's pages are use_begin + team, + kTeams, ... of its part. Lane i holds numbers base + i and base + 32 + i, each
  // as twice its slot, plus 1 where every row sees the whole page; -1: not of this domain, or past the end.
  struct Slots {
    int base, here, next;
  };
  template <int TW>
  __device__ int page_at(const Part& part, int number) const {
    return part.runs.page(part.use_begin + warp / TW + kWarps / TW * number);
  }
  template <int TW>
  __device__ int find_slot(const Part& part, int number) const {
    if (part.use_begin + warp / TW + kWarps / TW * number >= part.use_end) return -1;
    const int page = page_at<TW>(part, number);
    const core::PageRef ref =
        p.cache.pages[static_cast<std::size_t>(part.batch.index) * static_cast<std::size_t>(p.cache.max_pages) +
                      static_cast<std::size_t>(page)];
    const bool exact = reads_exact(p.cache, part.length, page, ref);
    if (exact != (part.domain == core::kExact)) return -1;
    const bool is_full = page * kPageTokens >= part.all_begin && (page + 1) * kPageTokens <= part.all_end;
    return 2 * (exact ? ref.exact : ref.encoded) + (is_full ? 1 : 0);
  }
  __device__ static int slot_at(const Slots& s, int number) {
    const int i = number - s.base;
    const int a = __shfl_sync(~0u, s.here, i & 31), b = __shfl_sync(~0u, s.next, i & 31);
    return i < 32 ? a : b;
  }
  template <int TW>
  __device__ int count_pages(const Part& part) const {
    const int uses = part.use_end - part.use_begin - warp / TW;
    return uses > 0 ? (uses + kWarps / TW - 1) / (kWarps / TW) : 0;
  }

  // One stage a side is enough: a page's values arrive while its keys are multiplied, the next page's keys while its values
  // are, and four blocks of four warps on a multiprocessor hide what is left.
  __device__ Slots first_pages(const Part& part) const {
    const Slots slots{0, find_slot<W>(part, lane), find_slot<W>(part, 32 + lane)};
    const int slot = slot_at(slots, 0);
    if (count_pages<W>(part) > 0) {
      copy_keys(slot >> 1, part.kv_head);
      copy_values(slot >> 1, part.kv_head);
    }
    return slots;
  }
  __device__ void encoded_pages(const Part& part, Slots slots, std::uint32_t& phases) {
    const int pages = count_pages<W>(part);
    int slot = slot_at(slots, 0);
    Registers held;
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < kQuerySteps<KF, D>; ++i) held.pairs[n][i] = query_pair<KF>(n, i);
      }
    }
#pragma unroll 1
    for (int k = 0; k < pages; ++k) {
      const int next = slot_at(slots, k + 1);
      float s[S::kTokenTiles][NT][2];
      wait(kKeys, phases);
      Fold fold;
      if (slot >= 0) {
        const bool is_full = (slot & 1) != 0;
        key_scores(key_stage(), held, s);
        if (!is_full) transform<W>(part, page_at<W>(part, k), s);
        weigh<VF, W>(s, key_stage() + S::Keys::kBytes + S::kKeyGroups * 2 * kPageTokens, VF == Format::bf16, fold);
      }
      team_sync<W>();  // every lane has read its keys and scales, and written its weights
      if (k + 1 < pages) copy_keys(next >> 1, part.kv_head);
      wait(kValues, phases);
      if (slot >= 0) add_values(value_stage(), fold);
      team_sync<W>();  // every lane has read its values and weights
      if (k + 1 < pages) copy_values(next >> 1, part.kv_head);
      slot = next;
      if (k + 2 - slots.base == 64) {
        slots.base += 32;
        slots.here = slots.next;
        slots.next = find_slot<W>(part, slots.base + 32 + lane);
      }
    }
  }

  // Half a side of an exact page: tokens 0 to 3 or 4 to 7 of every octet of the keys (0, 1), octets 0 to 3 or 4 to 7 of the
  // values (2, 3). By all warps of the team.
  __device__ __forceinline__ void copy_exact(std::byte* to, const std::byte* block, int half) const {
    constexpr int TW = S::kExactTeam;
    const int member = warp % TW;
    if (half < 2) {
      // Octet by octet, since a row of copy_rows is followed by the next: here every other one is another half's.
      const std::byte* from = block + half * 8 * D;
#pragma unroll
      for (int i = 0; i < 8 / TW; ++i) {
        const int octet = 8 / TW * member + i;
        copy_rows<1, 8 * D, S::kExactKeyRow, false>(to + octet * S::kExactKeyRow, from + octet * 16 * D, 0);
      }
    } else {
      const std::byte* from = block + p.cache.exact_layout.v.plane_offset[0] + (half - 2) * 64 * D;
      copy_rows<4 / TW, 16 * D, S::kExactValueRow, false>(to, from, 0, 4 / TW * member);
    }
  }

  __device__ __forceinline__ void exact_part(const Part& part) {
    clear();
    std::byte* memory = shared + S::kTeamsAt + warp / S::kExactTeam * (p.exact_stages * S::kExactHalf + S::kExactRest);
    weights = memory + p.exact_stages * S::kExactHalf;
    scratch = reinterpret_cast<float*>(weights + S::kExactP);
    exact_pages(part, memory);
    __syncthreads();
    write_partial<S::kExactTeam>(part);
  }
  // A page's four halves pass through the stages in turn; each makes room for the one that is as many later, of this page or
  // the next.
  __device__ __forceinline__ void exact_pages(const Part& part, std::byte* memory) {
    constexpr int TW = S::kExactTeam;
    const int stages = p.exact_stages;
    using L = Split<TW, D>;
    const int member = warp % TW;
    const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
    const int pages = count_pages<TW>(part);
    const auto stage = [&](int half) { return memory + (half & (stages - 1)) * S::kExactHalf; };
    // The pages of this domain, in order: lane i knows number base + i, `left` are those still to come.
    struct Found {
      int number, slot;  // slot -1: none
    };
    int base = 0, slot = find_slot<TW>(part, lane);
    unsigned left = __ballot_sync(~0u, slot >= 0);
    const auto next_page = [&] {
      while (left == 0) {
        base += 32;
        if (base >= pages) return Found{0, -1};
        slot = find_slot<TW>(part, base + lane);
        left = __ballot_sync(~0u, slot >= 0);
      }
      const int i = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      return Found{base + i, __shfl_sync(~0u, slot, i)};
    };
    // A group of copies for each half, also where there is none: so the wait for a half is for all but the last stages - 1.
    const auto copy = [&](const Found& page, int half) {
      if (page.slot >= 0) copy_exact(stage(half), exact_block(page.slot >> 1, part.kv_head), half);
      ptx::copy_commit();
    };
    RawQuery raw;
    ask_for_row(part, warp, raw.bits);
    Found here = next_page();
#pragma unroll 1
    for (int half = 0; half < stages; ++half) copy(here, half);
    Found ahead = next_page();
    load_queries<Format::bf16>(part, raw, false, bf16);
    __syncthreads();
    const auto wait = [&] {
      if (stages == 1) ptx::copy_wait<0>();
      if (stages == 2) ptx::copy_wait<1>();
      if (stages == 4) ptx::copy_wait<3>();
      team_sync<TW>();
    };
    const auto next = [&](int half) {
      team_sync<TW>();
      half += stages;
      copy(half < 4 ? here : ahead, half % 4);
    };
#pragma unroll 1
    while (here.slot >= 0) {
      float s[L::kTokenTiles][NT][2];
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wait();
#pragma unroll
        for (int i = 0; i < L::kTokenTiles; ++i) {
          const int token = L::kTokens * member + 2 * i;
          if (token / 4 != half) continue;
          const std::byte* key = stage(half) + g * S::kExactKeyRow + token % 4 * 2 * D;
          const std::byte* const row[2] = {key, key + 2 * D};
          float c[NT][4];
#pragma unroll
          for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
          half_key_product(row, bf16, c);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) s[i][n][h] = (c[n][2 * h] + c[n][2 * h + 1]) * info->scale[4 * n + t];
          }
        }
        next(half);
      }
      if ((here.slot & 1) == 0) transform<TW>(part, page_at<TW>(part, here.number), s);
      Fold fold;
      weigh<Format::bf16, TW>(s, nullptr, bf16, fold);
#pragma unroll 1
      for (int half = 2; half < 4; ++half) {
        wait();
        half_values<false, 1, TW>(stage(half), S::kExactValueRow, 2 * D, half - 2, bf16, fold[0]);
        next(half);
      }
      here = ahead;
      ahead = next_page();
    }
    ptx::copy_wait<0>();
  }

  // The teams' sums together, in team order, and to global memory.
  template <int TW>
  __device__ void write_partial(const Part& part) {
    using L = Split<TW, D>;
    const int team = warp / TW, member = warp % TW;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int h = 4; h < 32; h *= 2) l[n] += __shfl_xor_sync(~0u, l[n], h);
      if (g == 0) info->m[warp][4 * n + t] = m[n], info->l[warp][4 * n + t] = l[n];
    }
    __syncthreads();
    float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * D);
    float* sums = L::kTeams > 1 ? reinterpret_cast<float*>(shared + S::kTeamsAt) + team * R * D : out;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int r = 4 * n + t;
      float top = kLowest;
#pragma unroll
      for (int i = 0; i < L::kTeams; ++i) top = fmaxf(top, info->m[i * TW][r]);
      const float factor = ptx::ex2(m[n] - top);
#pragma unroll
      for (int unit = 0; unit < L::kUnits; ++unit) {
        const float4 x = {o[2 * unit][n][0] * factor, o[2 * unit][n][1] * factor, o[2 * unit + 1][n][0] * factor,
                          o[2 * unit + 1][n][1] * factor};
        *reinterpret_cast<float4*>(sums + r * D + member * L::kChannels + 32 * unit + 4 * g) = x;
      }
    }
    if constexpr (L::kTeams > 1) {
      __syncthreads();
      const float4* from = reinterpret_cast<const float4*>(shared + S::kTeamsAt);
      for (int i = threadIdx.x; i < R * D / 4; i += kThreads) {
        float4 x = from[i];
#pragma unroll
        for (int other = 1; other < L::kTeams; ++other) {
          const float4 y = from[other * (R * D / 4) + i];
          x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        reinterpret_cast<float4*>(out)[i] = x;
      }
    }
    if (threadIdx.x < R) {
      const int r = threadIdx.x;
      float top = kLowest;
      for (int i = 0; i < kWarps; ++i) top = fmaxf(top, info->m[i][r]);
      float sum = 0.0f;
      for (int i = 0; i < kWarps; ++i) sum += info->l[i][r] * ptx::ex2(info->m[i][r] - top);
      if (info->poisoned[r] != 0) sum = __int_as_float(0x7FC00000);
      float* ml = p.partial_ml + static_cast<std::size_t>(part.partial) * (2 * R);
      ml[r] = top, ml[R + r] = sum;
    }
    ptx::copy_fence();  // the next part's bulk copies come after these accesses to the stages
    __syncthreads();
  }

  // The item after `last` (-1: the block's first), by the block's first warp. Where there is none, `end` is `at`.
  __device__ LinePlace next_item(const Line& line, int last) const {
    int item = last < 0 ? static_cast<int>(blockIdx.x) : line.items();
    if (last >= 0 && line.rounds > 1) {
      if (lane == 0) item = line.shares + claim(p);
      item = __shfl_sync(~0u, item, 0);
    } else if (item >= line.shares) {
      item = line.items();
    }
    if (item >= line.items()) return {line.total, line.total, 0, p.batch, item};
    const int mine = line.begin(item + lane % 2);
    const int begin = __shfl_sync(~0u, mine, 0), end = __shfl_sync(~0u, mine, 1);
    int base;
    const int entry = find_sequence(p, info->window, begin, base);
    return {begin, end, base, entry, item};
  }

  // The next part of the block's work, by its first warp; no partial where there is none.
  __device__ void next_part() const {
    LinePlace line = info->place;
    __syncwarp();
    if (line.at >= line.end) line = next_item(info->line, line.item);
    SequenceCost cost;
    BatchEntry batch;
    int length, in_sequence;
    while (true) {
      if (line.at >= line.end) {
        if (lane == 0) info->part.partial = -1;
        return;
      }
      show(p, info->window, line.entry);
      const int i = line.entry - info->window.first;
      cost = info->window.cost[i], batch = info->window.batch[i], length = info->window.length[i];
      const int all = cost.head() * p.cache.kv_heads;
      in_sequence = line.at - line.base;
      if (in_sequence < all) break;
      line.base += all;
      ++line.entry;
    }
    if (lane == 0) describe(info->part, line, cost, batch, length, in_sequence);
  }
  __device__ void describe(Part& part, LinePlace line, const SequenceCost& cost, const BatchEntry& batch, int length,
                           int in_sequence) const {
    part.entry = line.entry, part.batch = batch, part.length = length, part.q_len = batch.q_len;
    const int segment = cost.exact + cost.encoded;
    const int index = quotient(in_sequence, segment), offset = in_sequence - index * segment;
    part.kv_head = index, part.row_block = 0;
    if (cost.row_blocks > 1) part.kv_head = index / cost.row_blocks, part.row_block = index % cost.row_blocks;
    const bool is_exact = offset < cost.exact;
    part.domain = is_exact ? core::kExact : core::kEncoded;
    const int begin = is_exact ? 0 : cost.exact, last = is_exact ? cost.exact : segment;
    const int stop = line.end - line.at < last - offset ? offset + (line.end - line.at) : last;
    part.runs = page_runs(p, part.length, part.q_len, is_exact);
    const int page_cost = is_exact ? p.exact_cost : 1;
    part.use_begin = pages_before(offset - begin, p.part_cost, page_cost);
    part.use_end = pages_before(stop - begin, p.part_cost, page_cost);
    part.partial = line.item + segment_index(p, part.entry, part.kv_head, part.row_block, part.domain);
    set_seen_by_all(part);
    // Where the merge finds the partials of this row block: [exact first, exact last, encoded first, encoded last].
    int* found = p.segments + 4 * static_cast<std::ptrdiff_t>(
                                      (part.entry * p.cache.kv_heads + part.kv_head) * p.row_blocks + part.row_block);
    const int bounds = is_exact ? 0 : 2;
    if (offset == begin) found[bounds] = part.partial;
    if (stop == last) found[bounds + 1] = part.partial;
    if (offset == 0 && cost.exact == 0) found[0] = 0, found[1] = -1;
    if (stop == segment && cost.encoded == 0) found[2] = 0, found[3] = -1;
    line.at += stop - offset;
    info->place = line;
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < S::kTeams * S::kBarriers; ++i) {
        const int count =
            i % S::kBarriers == kKeys ? arrivals<kBulk<typename S::Keys>>() : arrivals<kBulk<typename S::Values>>();
        ptx::mbarrier_init(ptx::shared_address(shared + S::kBarriersAt) + 8 * i, count);
      }
#if __CUDA_ARCH__ >= 900
      ptx::mbarrier_init_fence();
#endif
      Constants<KF>::put(info->constants[0]);
      Constants<VF>::put(info->constants[1]);
    }
    ptx::wait_prerequisites();
    if (threadIdx.x < 32) {
      const int total = sum_costs(p, info->window);
      if (lane == 0) {
        if (blockIdx.x == 0) open_claims(p);
        info->line = make_line(p, total);
        info->place = {0, 0, 0, 0, -1};
      }
    }
    __syncthreads();
    key_constants.get(info->constants[0]);
    value_constants.get(info->constants[1]);
    std::uint32_t phases = 0;
    while (true) {
      Part& part = info->part;
      if (threadIdx.x < 32) {
        next_part();
      }
      __syncthreads();
      if (part.partial < 0) break;
      if (part.use_begin >= part.use_end) {  // no page begins in it
        clear();
        if (threadIdx.x < R) info->poisoned[threadIdx.x] = 0;
        write_partial<W>(part);
      } else if (S::kHasExact && part.domain == core::kExact) {
        if constexpr (S::kHasExact) {
          exact_part(part);
        }
      } else {
        clear();
        weights = team_memory() + S::kPAt;
        scratch = reinterpret_cast<float*>(team_memory() + S::kScratchAt);
        // The first pages are on their way while queries are read and rotated, unless these need the stages' memory.
        const bool early = codec::rotation_shape(D).paley == 1 && p.k_basis.kind != BasisKind::calibrated;
        RawQuery raw;
        ask_for_row(part, warp, raw.bits);
        Slots slots;
        if (early) slots = first_pages(part);
        load_queries<KF>(part, raw, true, KF == Format::bf16);
        ptx::copy_fence();
        __syncthreads();
        if (!early) slots = first_pages(part);
        encoded_pages(part, slots, phases);
        __syncthreads();
        write_partial<W>(part);
      }
    }
    ptx::launch_dependents();
  }
};

// The same where shared memory is the limit.
template <Format KF, Format VF, int D, int NT>
constexpr int kBlocks = kSharedMemory / (Shape<KF, VF, D, NT>::bytes(1) + kSharedOfBlock) <
                                most_blocks(NT, Shape<KF, VF, D, NT>::kChannels)
                            ? kSharedMemory / (Shape<KF, VF, D, NT>::bytes(1) + kSharedOfBlock)
                            : most_blocks(NT, Shape<KF, VF, D, NT>::kChannels);

template <Format KF, Format VF, int D, int NT>
__global__ void __launch_bounds__(kThreads, kBlocks<KF, VF, D, NT>)
    attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<KF, VF, D, NT>(p, memory).run();
}

}  // namespace kvant::cuda
