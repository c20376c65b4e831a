// Decode attention over pages: one kernel for each (key format, value format, head_dim, column tiles).
//
// A block has four warps in teams of W; a team takes every (4 / W)-th page of the block's part of a segment. Key and
// value codes go through two rings of stages in shared memory, filled by bulk copies (cp.async before sm_90) several
// pages ahead, so that the only waits of a page are, for W > 1, two barriers of the team. The teams of a block meet once,
// when their part is done, and write one partial.
//
// Per page: integer scores (tiles.cuh) -> the page's largest score and largest weighted score -> probabilities times the
// value scale as 15-bit integers relative to the latter, so that small but many weights survive beside a large one ->
// integer output sums, folded into f32 once a page.
#pragma once

#include "cuda/attend.hpp"
#include "cuda/query.cuh"
#include "cuda/schedule.cuh"
#include "cuda/tiles.cuh"

namespace kvant::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kNone = -__builtin_huge_valf();
inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr float kTopWeight = 32639.0f;  // 127 * 256 + 127

// Warps of a team: as many as keep a page's bytes for each warp near 8 KiB, and the channels of each at 128 or less.
__host__ __device__ constexpr int team_warps(Format k, Format v, int head_dim) {
  const int bytes = 8 * head_dim * (codec::format_bits(k) + codec::format_bits(v));
  int warps = bytes > 24576 ? 4 : bytes > 12800 ? 2 : 1;
  while (warps < 4 && head_dim > 128 * warps) warps *= 2;
  while (head_dim % (32 * warps) != 0) warps /= 2;
  return warps;
}

template <Format KF, Format VF, int D, int NT>
struct Shape {
  static constexpr int kRows = 4 * NT;
  static constexpr int kTeam = team_warps(KF, VF, D);
  static constexpr int kTeams = kWarps / kTeam;
  static constexpr int kTokens = 8 / kTeam;  // consecutive ones of a lane in the first product
  static constexpr int kTokenTiles = 4 / kTeam;
  static constexpr int kChannels = D / kTeam;  // of a warp in the second product
  static constexpr int kUnits = kChannels / 32;
  using Keys = StagedSide<KF, D, false>;
  using Values = StagedSide<VF, D, true>;
  static constexpr int kKeyGroups = side_scale_groups(KF, D);
  static constexpr int kValueGroups = side_scale_groups(VF, D);
  static constexpr int kPGroups = kValueGroups > 1 ? kValueGroups : 1;  // versions of the probabilities
  static constexpr int kScaleBytes = (kKeyGroups + kValueGroups) * 2 * kPageTokens;
  static constexpr int kKeyStage = Keys::kBytes + kScaleBytes;
  static constexpr int kValueStage = Values::kBytes;
  static constexpr int kKeyStages = 2 * (kKeyStage + kValueStage) > 200000 ? 1 : 2;
  static constexpr int kValueStages = 2;

  // Probabilities: [column][64 tokens], bytes or halves; rows padded against bank conflicts.
  static constexpr int kColumnBytes = is_integer(VF) ? 96 : 192;
  static constexpr int kPBytes = 2 * kRows * kColumnBytes;
  static constexpr int kExactColumnBytes = 192;  // exact pages use halves
  static constexpr int kTeamP = is_half(KF) && is_half(VF)                          ? kPBytes
                                : kPGroups * kPBytes > 2 * kRows* kExactColumnBytes ? kPGroups* kPBytes
                                                                                    : 2 * kRows* kExactColumnBytes;
  static constexpr int kScratch = kTeam * kRows * (1 + kPGroups) * 4;
  static constexpr bool kHasExact = !(is_half(KF) && is_half(VF));  // dense caches have one domain
  // Queries: operand pairs [NT][step][32 lanes] of 8 bytes.
  static constexpr int kQueryBytes = NT * kQuerySteps<KF, D> * 256;
  static constexpr int kExactQueryBytes = NT * (D / 16) * 256;
  static constexpr int kQueryRoom = kHasExact && kExactQueryBytes > kQueryBytes ? kExactQueryBytes : kQueryBytes;
  static constexpr int kSumGroups = kKeyGroups > 1 ? kKeyGroups : 1;

  struct Info {                                // of the block's rows
    float scale[kRows];                        // of a product, to log2 units
    float center[kRows];                       // added to an encoded key's score
    std::int32_t sums[kSumGroups][2 * kRows];  // of the digits in each column
    std::int32_t poisoned[kRows];
    float m[kWarps][kRows], l[kWarps][kRows];
  };

  static constexpr int kQueryAt = 0;
  static constexpr int kInfoAt = kQueryAt + kQueryRoom;
  static constexpr int kBarriersAt = (kInfoAt + static_cast<int>(sizeof(Info)) + 15) / 16 * 16;
  static constexpr int kTeamsAt = (kBarriersAt + kTeams * (kKeyStages + kValueStages) * 8 + 127) / 128 * 128;
  static constexpr int kRings = kKeyStages * kKeyStage + kValueStages * kValueStage;
  static constexpr int kTeamBytes = (kRings + kTeamP + kScratch + 127) / 128 * 128;
  static constexpr int kCombine = kTeams > 1 ? kTeams* kRows* D * 4 : 0;  // reuses the teams' memory
  static constexpr int kBytes = kTeamsAt + (kTeams * kTeamBytes > kCombine ? kTeams * kTeamBytes : kCombine);
};

// One block's part of a segment.
struct Part {
  int entry, kv_head, row_block, domain;
  int use_begin, use_end;
  int length, q_len;
  BatchEntry batch;
  PageRuns runs;
  int partial;
};

template <Format KF, Format VF, int D, int NT>
struct Attend {
  using S = Shape<KF, VF, D, NT>;
  static constexpr int R = S::kRows, W = S::kTeam;
  static constexpr bool kTeamOfOne = W == 1;

  const AttendParams& p;
  std::byte* shared;
  int lane, g, t, warp, team, member;  // member: of the team
  typename S::Info* info;
  float o[2 * S::kUnits][NT][2];
  float half_sum[NT];  // what level_origin leaves out of o: half the sum of weights
  float m[NT], l[NT];

  __device__ Attend(const AttendParams& params, std::byte* memory) : p(params), shared(memory) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    g = lane / 4, t = lane % 4;
    team = warp / W, member = warp % W;
    info = reinterpret_cast<typename S::Info*>(shared + S::kInfoAt);
  }

  // --- shared memory ---
  __device__ std::byte* team_memory() const { return shared + S::kTeamsAt + team * S::kTeamBytes; }
  __device__ std::byte* key_stage(int stage) const { return team_memory() + stage * S::kKeyStage; }
  __device__ std::byte* value_stage(int stage) const {
    return team_memory() + S::kKeyStages * S::kKeyStage + stage * S::kValueStage;
  }
  __device__ std::byte* weights() const { return team_memory() + S::kRings; }
  __device__ float* scratch() const { return reinterpret_cast<float*>(team_memory() + S::kRings + S::kTeamP); }
  __device__ std::uint32_t barrier_at(int index) const {
    return ptx::shared_address(shared + S::kBarriersAt) + 8 * (team * (S::kKeyStages + S::kValueStages) + index);
  }
  __device__ void team_sync() const {
    if constexpr (kTeamOfOne) {
      __syncwarp();
    } else {
      ptx::barrier(1 + team, 32 * W);
    }
  }

  // --- copies ---

  // Eight rows of `bytes` each; called by all lanes of one warp, which share the work.
  __device__ static void copy_rows(std::byte* to, int stride, const std::byte* from, int bytes, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x % 32;
    if (lane < 8) ptx::copy_bulk(ptx::shared_address(to + lane * stride), from + lane * bytes, bytes, barrier);
#else
    for (int i = 16 * (threadIdx.x % 32); i < 8 * bytes; i += 512) {
      ptx::copy16(ptx::shared_address(to + i / bytes * stride + i % bytes), from + i);
    }
#endif
  }
  template <class Side>
  __device__ static void copy_side(std::byte* to, const std::byte* from, std::uint32_t plane1, std::uint32_t barrier) {
    copy_rows(to, Side::stride(0), from, Side::row_bytes(0), barrier);
    if constexpr (Side::kPlanes == 2) {
      copy_rows(to + Side::offset(1), Side::stride(1), from + plane1, Side::row_bytes(1), barrier);
    }
  }
  template <class Side>
  __device__ static constexpr int side_bytes() {
    return 8 * (Side::row_bytes(0) + (Side::kPlanes == 2 ? Side::row_bytes(1) : 0));
  }
  __device__ static void begin_copy(std::uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) ptx::mbarrier_expect(barrier, bytes);
    __syncwarp();
#endif
  }
  __device__ static void end_copy(std::uint32_t barrier) {
#if __CUDA_ARCH__ < 900
    ptx::mbarrier_arrive_copies(barrier);
#endif
  }
  __device__ static void skip_copy(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
#else
    ptx::mbarrier_arrive(barrier);
#endif
  }

  __device__ const std::byte* encoded_block(int slot, int kv_head) const {
    return p.cache.encoded + static_cast<std::uint64_t>(slot) * p.cache.encoded_slot_bytes +
           static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + kv_head) * p.cache.encoded_layout.block_bytes;
  }
  __device__ const std::byte* exact_block(int slot, int kv_head) const {
    return p.cache.exact + static_cast<std::uint64_t>(slot) * p.cache.exact_slot_bytes +
           static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + kv_head) * p.cache.exact_layout.block_bytes;
  }

  __device__ void copy_keys(int stage, int slot, int kv_head) const {
    const std::uint32_t barrier = barrier_at(stage);
    if (slot < 0) return skip_copy(barrier);
    const std::byte* block = encoded_block(slot, kv_head);
    begin_copy(barrier, side_bytes<typename S::Keys>() + S::kScaleBytes);
    std::byte* to = key_stage(stage);
    copy_side<typename S::Keys>(to, block, p.cache.encoded_layout.k.plane_offset[1], barrier);
    if constexpr (S::kScaleBytes > 0) {
      const std::byte* scales = block + p.cache.encoded_layout.code_bytes;
#if __CUDA_ARCH__ >= 900
      if (lane == 8) ptx::copy_bulk(ptx::shared_address(to + S::Keys::kBytes), scales, S::kScaleBytes, barrier);
#else
      for (int i = 16 * lane; i < S::kScaleBytes; i += 512) {
        ptx::copy16(ptx::shared_address(to + S::Keys::kBytes + i), scales + i);
      }
#endif
    }
    end_copy(barrier);
  }
  __device__ void copy_values(int stage, int slot, int kv_head) const {
    const std::uint32_t barrier = barrier_at(S::kKeyStages + stage);
    if (slot < 0) return skip_copy(barrier);
    const codec::SideLayout& v = p.cache.encoded_layout.v;
    const std::byte* block = encoded_block(slot, kv_head) + v.plane_offset[0];
    begin_copy(barrier, side_bytes<typename S::Values>());
    copy_side<typename S::Values>(value_stage(stage), block, v.plane_offset[1] - v.plane_offset[0], barrier);
    end_copy(barrier);
  }

  // --- queries ---

  // Rows of the block into `info` and the operand layout of `F`, in the basis of encoded keys or as given.
  template <Format F>
  __device__ void load_queries(const Part& part, bool encoded, bool bf16) {
    const DeviceBasis& basis = p.k_basis;
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + part.kv_head);
    float* room = reinterpret_cast<float*>(shared + S::kTeamsAt) + warp * D;  // the rings are idle
    for (int r = warp; r < R; r += kWarps) {
      const int row = part.row_block * R + r;
      const int query = row / p.group, q_head = part.kv_head * p.group + row % p.group;
      const bool used = query < part.q_len;
      float x[D / 32];
      float center = 0.0f;
      const std::int64_t from = static_cast<std::int64_t>(part.batch.query_begin + query) * p.q.token_stride +
                                static_cast<std::int64_t>(q_head) * p.q.head_stride;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        x[i] = used ? load_element(p.q.data, p.q.dtype, from + lane + 32 * i) : 0.0f;
        finite = finite && base::is_finite(x[i]);
      }
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
#pragma unroll
          for (int digit = 0; digit < 2; ++digit) {
            const int sum = __reduce_add_sync(~0u, sums[i][digit]);
            if (lane == 0) info->sums[i][2 * r + digit] = sum;
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

  // Scores in log2 units, scaled, of this lane's tokens (tile i, row half h). Encoded pages.
  __device__ void key_scores(const std::byte* stage, float (&s)[S::kTokenTiles][NT][2]) const {
    using Keys = typename S::Keys;
    const std::byte* scales = stage + Keys::kBytes;
#pragma unroll
    for (int i = 0; i < S::kTokenTiles; ++i) {
      const int token = S::kTokens * member + 2 * i;  // of octet g
      const std::byte* rows[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          const int at = plane < Keys::kPlanes ? plane : 0;
          rows[h][plane] = stage + Keys::offset(at) + g * Keys::stride(at) + (token + h) * (Keys::row_bytes(at) / 8);
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) s[i][n][0] = s[i][n][1] = 0.0f;
      if constexpr (is_integer(KF)) {
        std::int32_t c[NT][4];
        constexpr int kBlocks = (D + 63) / 64;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          constexpr int kGroupBlocks = S::kKeyGroups > 1 ? 2 : kBlocks;
          const int group = block / kGroupBlocks;
          if (block % kGroupBlocks == 0) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const int* sums = &info->sums[group][2 * (4 * n + t)];
              c[n][0] = c[n][2] = -level_origin(KF) * sums[0];
              c[n][1] = c[n][3] = -level_origin(KF) * sums[1];
            }
          }
          const auto multiply = [&]<bool kHalfBlock>() {
            const Sixteen x = load_key_codes<KF, kHalfBlock>(rows[0], block, t);
            const Sixteen y = load_key_codes<KF, kHalfBlock>(rows[1], block, t);
#pragma unroll
            for (int j = 0; j < (kHalfBlock ? 1 : 2); ++j) {
              const std::uint32_t a[4] = {x.first[j], y.first[j], x.second[j], y.second[j]};
#pragma unroll
              for (int n = 0; n < NT; ++n) {
                const uint2 b = query_pair<KF>(n, 2 * block + j);
                ptx::mma(c[n], a, b.x, b.y);
              }
            }
          };
          if (D % 64 != 0 && block == kBlocks - 1) {
            multiply.template operator()<true>();
          } else {
            multiply.template operator()<false>();
          }
          if (block % kGroupBlocks == kGroupBlocks - 1 || block == kBlocks - 1) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float scale = half_at(scales, group * kPageTokens + 8 * g + token + h);
#pragma unroll
              for (int n = 0; n < NT; ++n) {
                const int* sums = &info->sums[group][2 * (4 * n + t)];
                const float rest = 0.5f * static_cast<float>(256 * sums[0] + sums[1]);
                const float product = static_cast<float>(256 * c[n][2 * h] + c[n][2 * h + 1]) + rest;
                s[i][n][h] += product * (scale * info->scale[4 * n + t]);
              }
            }
          }
        }
      } else {
        float c[NT][4];
#pragma unroll
        for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
        const std::byte* const row[2] = {rows[0][0], rows[1][0]};
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

  // Logit transforms and visibility, token by token. Scores in log2 units in and out.
  __device__ __forceinline__ void transform(const Part& part, int page, float (&s)[S::kTokenTiles][NT][2]) const {
    const base::Visibility rule{p.causal, p.window, p.window_sinks};
    for (int n = 0; n < NT; ++n) {
      const int row = part.row_block * R + 4 * n + t;
      const int query = row / p.group, q_head = part.kv_head * p.group + row % p.group;
      const bool used = query < part.q_len;
      const std::int64_t position = part.length - part.q_len + query;
      const float slope = used && p.slopes != nullptr ? p.slopes[q_head] : 0.0f;
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::int64_t key = page * kPageTokens + 8 * g + S::kTokens * member + 2 * i + h;
          float x = s[i][n][h] * kLn2;
          if (part.domain == core::kEncoded) x += info->center[4 * n + t] * kLn2;
          if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
          if (slope != 0.0f) x -= slope * fabsf(static_cast<float>(position - key));
          const bool sees = used && key < part.length && rule.sees(part.length, position, key);
          if (sees && p.mask.data != nullptr) {
            const std::int64_t at = part.entry * p.mask.stride[0] + q_head * p.mask.stride[1] +
                                    query * p.mask.stride[2] + key * p.mask.stride[3];
            if (p.mask.dtype == Dtype::boolean) {
              if (static_cast<const std::uint8_t*>(p.mask.data)[at] == 0) x = kNone;
            } else {
              x += load_element(p.mask.data, p.mask.dtype, at);
            }
          }
          s[i][n][h] = sees ? x * kLog2e : kNone;
        }
      }
    }
  }

  __device__ static float over_tokens(float x) {  // the largest over the lanes that share a row
#pragma unroll
    for (int h = 4; h < 32; h *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, h));
    return x;
  }

  // What a page's sums are multiplied by when they join the running ones.
  struct Fold {
    float alpha[NT];              // older sums
    float page[S::kPGroups][NT];  // this page's
    bool same;                    // alpha is 1 in every lane
  };

  // Scores to weights in shared memory, for values of format F; value scales at `scales` (none: null).
  template <Format F>
  __device__ void weigh(float (&s)[S::kTokenTiles][NT][2], const std::byte* scales, bool is_full, bool bf16,
                        Fold& fold) {
    constexpr int kGroups = is_half(F) ? 1 : S::kPGroups;
    constexpr int kMaxima = 1 + kGroups;
    constexpr bool kScaled = !is_half(F);
    float v[kGroups][S::kTokenTiles][2], log_v[kGroups][S::kTokenTiles][2];
    float poison = 0.0f;
    if constexpr (kScaled) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            v[q][i][h] = half_at(scales, q * kPageTokens + 8 * g + S::kTokens * member + 2 * i + h);
            log_v[q][i][h] = ptx::lg2(v[q][i][h]);
            poison += v[q][i][h] * 0.0f;
          }
        }
      }
    }
    float top[NT], top_v[kGroups][NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      top[n] = kNone;
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) top[n] = fmaxf(top[n], fmaxf(s[i][n][0], s[i][n][1]));
      top[n] = over_tokens(top[n]);
      if constexpr (kScaled) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          float x = kNone;
#pragma unroll
          for (int i = 0; i < S::kTokenTiles; ++i) {
            x = fmaxf(x, fmaxf(s[i][n][0] + log_v[q][i][0], s[i][n][1] + log_v[q][i][1]));
          }
          top_v[q][n] = over_tokens(x);
        }
      }
    }
    if constexpr (!kTeamOfOne) {
      float* mine = scratch() + member * R * kMaxima;
      if (g == 0) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mine[(4 * n + t) * kMaxima] = top[n];
          if constexpr (kScaled) {
#pragma unroll
            for (int q = 0; q < kGroups; ++q) mine[(4 * n + t) * kMaxima + 1 + q] = top_v[q][n];
          }
        }
      }
      team_sync();
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int other = 0; other < W; ++other) {
          const float* theirs = scratch() + (other * R + 4 * n + t) * kMaxima;
          top[n] = fmaxf(top[n], theirs[0]);
          if constexpr (kScaled) {
#pragma unroll
            for (int q = 0; q < kGroups; ++q) top_v[q][n] = fmaxf(top_v[q][n], theirs[1 + q]);
          }
        }
      }
    }
    bool same = true;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float m_new = fmaxf(m[n], top[n]);
      const bool any = m_new != kNone;
      const float alpha = any ? ptx::ex2(m[n] - m_new) : 1.0f;
      const float beta = any ? ptx::ex2(top[n] - m_new) : 0.0f;
      const float base = top[n] == kNone ? 0.0f : top[n];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float e = ptx::ex2(s[i][n][h] - base);
          s[i][n][h] = e;
          sum += e;
        }
      }
      if constexpr (kScaled) {
        if (is_full) {
          sum += poison;
        } else {
#pragma unroll
          for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              // A key that is not seen has weight 0; its scale may be anything.
#pragma unroll
              for (int q = 0; q < kGroups; ++q) sum += s[i][n][h] != 0.0f ? v[q][i][h] * 0.0f : 0.0f;
            }
          }
        }
      }
      l[n] = l[n] * alpha + beta * sum;
      m[n] = m_new;
      fold.alpha[n] = alpha;
      same = same && alpha == 1.0f;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float up;
        if constexpr (kScaled) {
          const bool some = top_v[q][n] != kNone;
          constexpr float kTop = is_integer(F) ? kTopWeight : 1.0f;
          up = some ? kTop * ptx::ex2(base - top_v[q][n]) : 0.0f;
          fold.page[q][n] = some ? ptx::ex2(top_v[q][n] - m_new) * (F == Format::fp8 ? 256.0f : 1.0f / kTop) : 0.0f;
        } else {
          up = 1.0f;
          fold.page[q][n] = beta;
        }
        float w[S::kTokens];
#pragma unroll
        for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) w[2 * i + h] = kScaled ? v[q][i][h] * up : 1.0f;
        }
        store_weights<F>(s, n, q, w, bf16);
      }
    }
    fold.same = __all_sync(~0u, same);
  }

  // e * w of this lane's tokens and row, as digits, to the two columns of row 4 n + t.
  template <Format F>
  __device__ void store_weights(const float (&e)[S::kTokenTiles][NT][2], int n, int q, const float (&w)[S::kTokens],
                                bool bf16) const {
    constexpr int kStride = is_integer(F) ? 96 : 192;
    std::byte* high = weights() + q * S::kPBytes + 2 * (4 * n + t) * kStride + (is_integer(F) ? 8 : 16) * g;
    std::byte* low = high + kStride;
    if constexpr (is_integer(F)) {
      // The sum with 1.5 * 2^23 rounds to an integer and leaves it in the low bits; 128 more make the high byte the
      // nearest multiple of 256, and the low byte what remains, plus 128.
      std::uint32_t bits[8] = {};
#pragma unroll
      for (int k = 0; k < S::kTokens; ++k) {
        bits[k] = __float_as_uint(fmaf(e[k / 2][n][k % 2], w[k], 12583040.0f));
      }
      constexpr Order kOrder = order_of(F);
      // Bytes low, low, high, high of two tokens.
      const auto two = [&](int i, int j) { return ptx::prmt(bits[i], bits[j], 0x5140); };
      const auto lows = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x5410) ^ 0x80808080u; };
      const auto highs = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x7632); };
      if constexpr (W == 1) {
        const std::uint32_t a = kOrder == Order::natural ? two(0, 1) : two(0, 2);
        const std::uint32_t b = kOrder == Order::natural ? two(2, 3) : two(4, 6);
        const std::uint32_t c = kOrder == Order::natural ? two(4, 5) : two(1, 3);
        const std::uint32_t d = kOrder == Order::natural ? two(6, 7) : two(5, 7);
        *reinterpret_cast<uint2*>(high) = make_uint2(highs(a, b), highs(c, d));
        *reinterpret_cast<uint2*>(low) = make_uint2(lows(a, b), lows(c, d));
      } else if constexpr (W == 2 && kOrder == Order::natural) {
        const std::uint32_t a = two(0, 1), b = two(2, 3);
        *reinterpret_cast<std::uint32_t*>(high + 4 * member) = highs(a, b);
        *reinterpret_cast<std::uint32_t*>(low + 4 * member) = lows(a, b);
      } else {
        // Pairs that end up side by side.
        constexpr int kPairs = S::kTokens / 2;
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          if constexpr (W == 2) {
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
              high[4 * j + member] = static_cast<std::byte>(bits[j] >> 8 & 0xFFu);
              low[4 * j + member] = static_cast<std::byte>((bits[j] ^ 0x80u) & 0xFFu);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < S::kTokens; k += 2) {
        const float a = e[k / 2][n][0] * w[k], b = e[k / 2][n][1] * w[k + 1];
        std::uint32_t top, rest;
        if (bf16) {
          top = ptx::bf16x2(a, b);
          rest = ptx::bf16x2(a - __uint_as_float(top << 16), b - __uint_as_float(top & 0xFFFF0000u));
        } else {
          top = ptx::f16x2(a, b);
          rest = ptx::f16x2(a - ptx::f16_to_f32(static_cast<std::uint16_t>(top)),
                            b - ptx::f16_to_f32(static_cast<std::uint16_t>(top >> 16)));
        }
        const int at = 2 * (S::kTokens * member + k);
        *reinterpret_cast<std::uint32_t*>(high + at) = top;
        *reinterpret_cast<std::uint32_t*>(low + at) = rest;
      }
    }
  }

  // --- second product ---

  __device__ void fold_tile(int tile, const float (&x)[NT][2], const Fold& fold, const float (&page)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float old = fold.same ? o[tile][n][h] : o[tile][n][h] * fold.alpha[n];
        o[tile][n][h] = fmaf(x[n][h], page[n], old);
      }
    }
  }

  __device__ void add_values(const std::byte* stage, const Fold& fold) {
    using Values = typename S::Values;
    const int group = S::kPGroups > 1 ? member * S::kChannels / 128 : 0;
    float page[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      page[n] = fold.page[0][n];
#pragma unroll
      for (int q = 1; q < S::kPGroups; ++q) page[n] = q == group ? fold.page[q][n] : page[n];
    }
    const std::byte* operands = weights() + group * S::kPBytes;
    if constexpr (is_integer(VF)) {
      uint2 b[NT][2];
      std::int32_t start[NT][4];
      constexpr std::uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        std::int32_t sums[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          b[n][step] = *reinterpret_cast<const uint2*>(operands + (8 * n + g) * 96 + (4 * step + t) * 8);
          ptx::mma(sums, kOnes, b[n][step].x, b[n][step].y);
        }
        start[n][0] = start[n][2] = -level_origin(VF) * sums[0];
        start[n][1] = start[n][3] = -level_origin(VF) * sums[1];
        half_sum[n] = fmaf(static_cast<float>(256 * sums[0] + sums[1]), 0.5f * page[n], half_sum[n] * fold.alpha[n]);
      }
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        std::int32_t c[2][NT][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) c[tile][n][i] = start[n][i];
          }
        }
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
              const Sixteen x = unpack<VF>(low + pair * (plane_bits(VF, 0) / 2), high[pair]);
              first[2 * pair] = x.first[0], first[2 * pair + 1] = x.first[1];
              second[2 * pair] = x.second[0], second[2 * pair + 1] = x.second[1];
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const std::uint32_t a[4] = {first[2 * tile], first[2 * tile + 1], second[2 * tile], second[2 * tile + 1]};
#pragma unroll
            for (int n = 0; n < NT; ++n) ptx::mma(c[tile][n], a, b[n][step].x, b[n][step].y);
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
          fold_tile(2 * unit + tile, x, fold, page);
        }
      }
    } else if constexpr (VF == Format::fp8) {
      half_values<true>(stage, Values::stride(0), 4 * D, false, fold, page);
    } else {
      half_values<false>(stage, Values::stride(0), 2 * D, VF == Format::bf16, fold, page);
    }
  }

  // Values of 16-bit floats (rows of `row` bytes a token) or e4m3 (of a quad), octets `stride` bytes apart.
  template <bool kFp8>
  __device__ void half_values(const std::byte* values, int stride, int row, bool bf16, const Fold& fold,
                              const float (&page)[NT]) {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      float c[2][NT][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int n = 0; n < NT; ++n) c[tile][n][0] = c[tile][n][1] = c[tile][n][2] = c[tile][n][3] = 0.0f;
      }
      const int channel = member * S::kChannels + 32 * unit + 4 * g;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::byte* octet = values + (4 * step + t) * stride;
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(weights() + (8 * n + g) * 192 + (4 * step + t) * 16);
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
        fold_tile(2 * unit + tile, x, fold, page);
      }
    }
  }

  // --- a part ---

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      m[n] = kNone, l[n] = half_sum[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * S::kUnits; ++i) o[i][n][0] = o[i][n][1] = 0.0f;
    }
  }

  // Keys that every row of the part sees; pages within need no transform if there is no other.
  __device__ base::KeyRange seen_by_all(const Part& part) const {
    if (p.softcap > 0.0f || p.slopes != nullptr || p.mask.data != nullptr || p.k_basis.kind == BasisKind::calibrated) {
      return {0, 0};
    }
    const base::Visibility rule{p.causal, p.window, p.window_sinks};
    const int first = part.row_block * R / p.group;
    int last = (part.row_block * R + R - 1) / p.group;
    last = last < part.q_len ? last : part.q_len - 1;
    const std::int64_t position = part.length - part.q_len;
    const base::KeyRange a = rule.recent_range(part.length, position + first);
    const base::KeyRange b = rule.recent_range(part.length, position + last);
    return {b.begin, a.end};
  }

  // This team's pages, as slots of the part's domain: use_begin + team, + kTeams, ... Lane i holds number base + i.
  struct Slots {
    int base = 0, here = -1, next = -1;
  };
  __device__ int slot_of(const Part& part, int number) const {
    const int use = part.use_begin + team + S::kTeams * number;
    if (use >= part.use_end) return -1;
    const int page = part.runs.page(use);
    const core::PageRef ref =
        p.cache.pages[static_cast<std::size_t>(part.batch.index) * static_cast<std::size_t>(p.cache.max_pages) +
                      static_cast<std::size_t>(page)];
    const bool exact = reads_exact(p.cache, part.length, page, ref);
    if (part.domain == core::kExact) return exact ? ref.exact : -1;
    return exact ? -1 : ref.encoded;
  }
  __device__ void first_slots(const Part& part, Slots& s) const {
    s.base = 0;
    s.here = slot_of(part, lane);
    s.next = slot_of(part, 32 + lane);
  }
  __device__ int slot_at(const Part& part, Slots& s, int number) const {
    const int i = number - s.base;
    return i < 32 ? __shfl_sync(~0u, s.here, i & 31) : __shfl_sync(~0u, s.next, i & 31);
  }
  __device__ void advance_slots(const Part& part, Slots& s, int number) const {
    if (number - s.base < 32) return;
    s.base += 32;
    s.here = s.next;
    s.next = slot_of(part, s.base + 32 + lane);
  }

  __device__ void encoded_pages(const Part& part, std::uint32_t& phases) {
    const int uses = part.use_end - part.use_begin;
    const int pages = uses > team ? (uses - team + S::kTeams - 1) / S::kTeams : 0;
    const base::KeyRange all = seen_by_all(part);
    Slots slots;
    first_slots(part, slots);
    if (member == 0) {
      for (int k = 0; k < S::kKeyStages && k < pages; ++k) copy_keys(k, slot_at(part, slots, k), part.kv_head);
      for (int k = 0; k < S::kValueStages - 1 && k < pages; ++k) copy_values(k, slot_at(part, slots, k), part.kv_head);
    }
    int key = 0, value = 0;  // stages of page k
    for (int k = 0; k < pages; ++k) {
      advance_slots(part, slots, k);
      const int slot = slot_at(part, slots, k);
      const int page = part.runs.page(part.use_begin + team + S::kTeams * k);
      float s[S::kTokenTiles][NT][2];
      ptx::mbarrier_wait(barrier_at(key), phases >> key & 1);
      phases ^= 1u << key;
      const std::byte* scales = key_stage(key) + S::Keys::kBytes + S::kKeyGroups * 2 * kPageTokens;
      const bool is_full = page * kPageTokens >= all.begin && (page + 1) * kPageTokens <= all.end;
      Fold fold;
      if (slot >= 0) {
        key_scores(key_stage(key), s);
        if (!is_full) transform(part, page, s);
        weigh<VF>(s, scales, is_full, VF == Format::bf16, fold);
      } else if (!kTeamOfOne) {
        team_sync();
      }
      team_sync();  // every lane has read its keys and scales, and written its weights
      const int after_key = k + S::kKeyStages, after_value = k + S::kValueStages - 1;
      if (member == 0) {
        if (after_key < pages) copy_keys(key, slot_at(part, slots, after_key), part.kv_head);
        const int free = value == 0 ? S::kValueStages - 1 : value - 1;
        if (after_value < pages) copy_values(free, slot_at(part, slots, after_value), part.kv_head);
      }
      ptx::mbarrier_wait(barrier_at(S::kKeyStages + value), phases >> (S::kKeyStages + value) & 1);
      phases ^= 1u << (S::kKeyStages + value);
      if (slot >= 0) add_values(value_stage(value), fold);
      if (kTeamOfOne) __syncwarp();  // weights are read before the next page's are written
      key = key + 1 == S::kKeyStages ? 0 : key + 1;
      value = value + 1 == S::kValueStages ? 0 : value + 1;
    }
  }

  // Exact pages are few: straight from global memory.
  __device__ void exact_pages(const Part& part) {
    const codec::PageLayout& layout = p.cache.exact_layout;
    const bool bf16 = layout.k.format == Format::bf16;
    const int uses = part.use_end - part.use_begin;
    const int pages = uses > team ? (uses - team + S::kTeams - 1) / S::kTeams : 0;
    const base::KeyRange all = seen_by_all(part);
    for (int k = 0; k < pages; ++k) {
      const int slot = slot_of(part, k);
      if (slot < 0) continue;
      const int page = part.runs.page(part.use_begin + team + S::kTeams * k);
      const std::byte* block = exact_block(slot, part.kv_head);
      float s[S::kTokenTiles][NT][2];
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
        const std::byte* key = block + (8 * g + S::kTokens * member + 2 * i) * 2 * D;
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
      const bool is_full = page * kPageTokens >= all.begin && (page + 1) * kPageTokens <= all.end;
      if (!is_full) transform(part, page, s);
      Fold fold;
      weigh<Format::bf16>(s, nullptr, is_full, bf16, fold);
      team_sync();
      float factors[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) factors[n] = fold.page[0][n];
      half_values<false>(block + layout.v.plane_offset[0], 16 * D, 2 * D, bf16, fold, factors);
      team_sync();
    }
  }

  // The teams' sums together, in team order, and to global memory.
  __device__ void write_partial(const Part& part) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int h = 4; h < 32; h *= 2) l[n] += __shfl_xor_sync(~0u, l[n], h);
      if (g == 0) info->m[warp][4 * n + t] = m[n], info->l[warp][4 * n + t] = l[n];
    }
    __syncthreads();
    float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * D);
    float* sums = S::kTeams > 1 ? reinterpret_cast<float*>(shared + S::kTeamsAt) + team * R * D : out;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int r = 4 * n + t;
      float top = kNone;
#pragma unroll
      for (int i = 0; i < S::kTeams; ++i) top = fmaxf(top, info->m[i * W][r]);
      const float factor = m[n] == kNone ? 0.0f : ptx::ex2(m[n] - top);
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        const float4 x = {(o[2 * unit][n][0] + half_sum[n]) * factor, (o[2 * unit][n][1] + half_sum[n]) * factor,
                          (o[2 * unit + 1][n][0] + half_sum[n]) * factor,
                          (o[2 * unit + 1][n][1] + half_sum[n]) * factor};
        *reinterpret_cast<float4*>(sums + r * D + member * S::kChannels + 32 * unit + 4 * g) = x;
      }
    }
    if constexpr (S::kTeams > 1) {
      __syncthreads();
      const float4* from = reinterpret_cast<const float4*>(shared + S::kTeamsAt);
      for (int i = threadIdx.x; i < R * D / 4; i += kThreads) {
        float4 x = from[i];
#pragma unroll
        for (int other = 1; other < S::kTeams; ++other) {
          const float4 y = from[other * (R * D / 4) + i];
          x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        reinterpret_cast<float4*>(out)[i] = x;
      }
    }
    if (threadIdx.x < R) {
      const int r = threadIdx.x;
      float top = kNone;
      for (int i = 0; i < kWarps; ++i) top = fmaxf(top, info->m[i][r]);
      float sum = 0.0f;
      for (int i = 0; i < kWarps; ++i)
        sum += info->m[i][r] == kNone ? 0.0f : info->l[i][r] * ptx::ex2(info->m[i][r] - top);
      if (info->poisoned[r] != 0) sum = __int_as_float(0x7FC00000);
      float* ml = p.partial_ml + static_cast<std::size_t>(part.partial) * (2 * R);
      ml[r] = top, ml[R + r] = sum;
    }
    __syncthreads();
  }

  __device__ void run() {
    long long* found = reinterpret_cast<long long*>(shared + S::kTeamsAt);
    if (threadIdx.x < 32) {
      long long before, total;
      sum_costs(p, 0, before, total);
      const Line line = make_line(p, total);
      const int share = static_cast<int>(blockIdx.x);
      long long begin = total, end = total, base = 0;
      int entry = p.batch;
      if (share < line.shares) {
        begin = line.begin(share), end = line.begin(share + 1);
        entry = find_sequence(p, begin, base);
      }
      if (lane == 0) found[0] = begin, found[1] = end, found[2] = base, found[3] = entry;
    }
    const int barriers = S::kTeams * (S::kKeyStages + S::kValueStages);
    if (threadIdx.x < barriers) {
#if __CUDA_ARCH__ >= 900
      ptx::mbarrier_init(ptx::shared_address(shared + S::kBarriersAt) + 8 * threadIdx.x, 1);
      ptx::mbarrier_init_fence();
#else
      ptx::mbarrier_init(ptx::shared_address(shared + S::kBarriersAt) + 8 * threadIdx.x, 32);
#endif
    }
    __syncthreads();
    long long at = found[0], base = found[2];
    const long long end = found[1];
    int entry = static_cast<int>(found[3]);
    __syncthreads();
    std::uint32_t phases = 0;
    while (at < end) {
      Part part;
      part.entry = entry;
      part.batch = p.entries[entry];
      part.length = p.cache.sequences[part.batch.index].length;
      part.q_len = part.batch.q_len;
      const SequenceCost cost = sequence_cost(p, part.length, part.q_len);
      const int segment = cost.exact + cost.encoded;
      const long long in_sequence = at - base;
      if (in_sequence >= static_cast<long long>(cost.head()) * p.cache.kv_heads) {
        base += static_cast<long long>(cost.head()) * p.cache.kv_heads;
        ++entry;
        continue;
      }
      const int index = static_cast<int>(in_sequence / segment);
      const int offset = static_cast<int>(in_sequence % segment);
      part.kv_head = index / cost.row_blocks, part.row_block = index % cost.row_blocks;
      part.domain = offset < cost.exact ? core::kExact : core::kEncoded;
      const int last = part.domain == core::kExact ? cost.exact : segment;
      const int stop = static_cast<int>(end - at < last - offset ? offset + (end - at) : last);
      part.runs = page_runs(p, part.length, part.q_len, part.domain == core::kExact);
      if (part.domain == core::kExact) {
        part.use_begin = (offset + p.exact_cost - 1) / p.exact_cost;
        part.use_end = (stop + p.exact_cost - 1) / p.exact_cost;
      } else {
        part.use_begin = offset - cost.exact, part.use_end = stop - cost.exact;
      }
      part.partial =
          static_cast<int>(blockIdx.x) + segment_index(p, part.entry, part.kv_head, part.row_block, part.domain);
      clear();
      if (S::kHasExact && part.domain == core::kExact) {
        load_queries<Format::bf16>(part, false, p.cache.exact_layout.k.format == Format::bf16);
        __syncthreads();
        exact_pages(part);
      } else {
        load_queries<KF>(part, true, KF == Format::bf16);
        ptx::copy_fence();  // the rings were used for other things
        __syncthreads();
        encoded_pages(part, phases);
      }
      __syncthreads();
      write_partial(part);
      at += stop - offset;
    }
    ptx::launch_dependents();
  }
};

template <Format KF, Format VF, int D, int NT>
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<KF, VF, D, NT>(p, memory).run();
}

}  // namespace kvant::cuda
