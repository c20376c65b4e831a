// Attention over latents of up to 16 rows: products have tokens or channels as rows and rows of queries as
// columns, two digits a row (tile/tiles.cuh says how these lie).
//
// A block takes pages in rounds. For scores teams of warps have a page each, for sums each warp has 64 channels of all
// pages. The latents of a page are stored by channels, eight tokens of a channel in a word: sums take them as they are,
// and for scores a lane has the words of eight channels of one octet, of which it looks up a token at a time. So codes
// alone pass through shared memory, where two rounds have room: one is copied while the other is multiplied.
//
// Weights are 15-bit integers relative to the round's largest (decode/kernel.cuh).
#pragma once

#include "cuda/decode/centres.cuh"
#include "cuda/decode/group.cuh"
#include "cuda/decode_latent/block.cuh"
#include "cuda/decode_latent/columns.hpp"

namespace kvant::cuda::latent {

template <class S>
struct Columns : Worker<S> {
  using Base = Worker<S>;
  using Base::p, Base::part, Base::shared;
  using Facts = typename S::Facts;
  using Terms = typename S::Terms;
  using Keys = typename S::Keys;
  using Latents = typename S::Latents;
  static constexpr Format KF = S::kKeyFormat, VF = S::kValueFormat;
  static constexpr int D = S::D, DV = S::DV, NT = S::kColumnTiles, R = S::kRows, TW = S::kTeam;
  static constexpr float kLargeSum = 16384.0f;

  Facts& facts;
  int lane, warp, g, t, team, member;
  Constants<KF> key_constants;
  Constants<VF> latent_constants;
  float l[NT];                    // this lane's sums of weights, of rows 4 n + t
  float o[2 * S::kUnits][NT][2];  // sums of channels 64 w + 32 u + 4 g + 2 i + h of warp w, tile 2 u + i

  __device__ Columns(const AttendParams& params, std::byte* memory)
      : Base{params, memory, reinterpret_cast<Facts*>(memory + S::kFactsAt)->item},
        facts(*reinterpret_cast<Facts*>(memory + S::kFactsAt)) {
    const int thread = ptx::thread_here();
    lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0), g = lane / 4, t = lane % 4;
    team = warp / TW, member = warp % TW;
  }

  // The constants that unpacking needs, through this thread's own memory among that of weights (decode/group.cuh).
  __device__ __forceinline__ void get_constants() {
    std::byte* const mine = shared + S::kWeightsAt + 16 * threadIdx.x;
    const auto get = [&]<Format F>(Constants<F>& k) {
      std::uint32_t words[kConstantWords];
      Constants<F>::put(words);
      k.t0 = words[0], k.t2 = words[1], k.signs = words[2], k.one = words[3];
      keep_by_lane(k, mine);
    };
    get(latent_constants), get(key_constants);
  }

  // --- queries ---

  // Element lane + 32 i of the part of row r that begins at `first`, in x[i]. Returns whether all are finite.
  template <int kDim>
  __device__ __forceinline__ bool load_row(int r, int first, float (&x)[kDim / 32]) const {
    const auto place = this->place_of(r);
    const std::int64_t at = (std::int64_t{part().batch.query_begin} + place.query) * p.q.token_stride +
                            std::int64_t{place.head} * p.q.head_stride + first + lane;
    std::uint32_t bits[kDim / 32];
    load_bits(p.q.data, p.q.dtype, at, r < this->rows() ? kDim : 0, bits);
    elements_of(bits, p.q.dtype, x);
    bool mine = true;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) mine = mine && fabsf(x[i]) < __builtin_huge_valf();
    return __all_sync(~0u, mine) != 0;
  }
  template <int kCount>
  __device__ __forceinline__ static float largest_of(const float (&x)[kCount]) {
    float largest = 0.0f;
#pragma unroll
    for (const float e : x) largest = fmaxf(largest, fabsf(e));
    return warp_max(largest);
  }
  __device__ __forceinline__ static float reciprocal_of(float unit) {
    return unit > 1e-37f ? 1.0f / unit : 0.0f;
  }
  // Where the operands of row r's digit lie, of a lane's register `reg` in a step.
  __device__ __forceinline__ std::byte* query_at(int step, int r, int digit, int lane_t, int reg) const {
    const int n = r / 4, of_lane = 4 * (2 * (r % 4) + digit) + lane_t;
    return shared + step * S::kStep + (n / 2 * 32 + of_lane) * 16 + n % 2 * 8 + reg * 4;
  }

  // Digits of x / unit to the columns of row r. place_of(element) is where an element goes. Returns what the row's
  // integer sums of F begin with.
  template <Format F, int kCount, class Place>
  __device__ __forceinline__ int store_digits(const float (&x)[kCount], float reciprocal, int r, int first_step,
                                              const Place& place_of) const {
    constexpr float kMagic = 12582912.0f + 128.0f;  // decode/queries.cuh
    int high_sum = 0, low_sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t bits = __float_as_uint(fmaf(x[i], reciprocal, kMagic));
      const auto high = static_cast<std::int8_t>(bits >> 8), low = static_cast<std::int8_t>(bits ^ 0x80u);
      high_sum += high, low_sum += low;
      const QueryPlace place = place_of(lane + 32 * i);
#pragma unroll
      for (int digit = 0; digit < 2; ++digit) {
        query_at(first_step + place.step, r, digit, place.t, place.place / 4)[place.place % 4] =
            static_cast<std::byte>(digit == 0 ? high : low);
      }
    }
    high_sum = __reduce_add_sync(~0u, high_sum), low_sum = __reduce_add_sync(~0u, low_sum);
    const int both = 256 * high_sum + low_sum;
    return -level_origin(F) * both + both / 2;
  }
  __device__ __forceinline__ void load_coded_queries() const {
#pragma unroll 1
    for (int r = warp; r < R; r += S::kWarps) {
      float x[DV / 32], y[D / 32];
      bool finite = load_row<DV>(r, 0, x);
      finite = load_row<D>(r, DV, y) && finite;
      if (!finite) {
#pragma unroll
        for (float& e : x) e = 0.0f;
#pragma unroll
        for (float& e : y) e = 0.0f;
      }
      if (p.v_basis.kind == BasisKind::hadamard) rotate<DV>(x, nullptr);
      if (p.k_basis.kind == BasisKind::hadamard) rotate<D>(y, nullptr);
      const float of_latents = largest_of(x) / kTopWeight, of_keys = largest_of(y) / kTopWeight;
      Terms terms;
      terms.latents = of_latents * p.logits.scale, terms.keys = of_keys * p.logits.scale;
      terms.latents_start = store_digits<VF>(x, reciprocal_of(of_latents), r, 0, [](int d) {
        return QueryPlace{d / 32, d % 16 / 4, d % 32 / 16 * 4 + d % 4};
      });
      terms.keys_start =
          store_digits<KF>(y, reciprocal_of(of_keys), r, DV / 32, [](int d) { return query_place<KF, D>(d); });
      if (lane == 0) facts.terms[r] = terms, facts.poisoned[r] = finite ? 0 : 1;
    }
  }
  // Two terms of the dtype of exact pages, both parts of a query in one unit.
  template <bool kBf16>
  __device__ __forceinline__ void load_exact_queries() const {
#pragma unroll 1
    for (int r = warp; r < R; r += S::kWarps) {
      float x[(DV + D) / 32];
      auto& latents = *reinterpret_cast<float(*)[DV / 32]>(x);
      auto& keys = *reinterpret_cast<float(*)[D / 32]>(x + DV / 32);
      bool finite = load_row<DV>(r, 0, latents);
      finite = load_row<D>(r, DV, keys) && finite;
      const float largest = largest_of(x), reciprocal = finite ? reciprocal_of(largest) : 0.0f;
#pragma unroll
      for (int i = 0; i < (DV + D) / 32; ++i) {
        const float q = finite ? x[i] * reciprocal : 0.0f;
        const int d = lane + 32 * i;
        const QueryPlace place = query_place<Format::bf16, 32>(lane);
        const std::uint32_t high = halves<kBf16>(q, 0.0f), low = halves<kBf16>(q - float_of<kBf16>(high), 0.0f);
#pragma unroll
        for (int digit = 0; digit < 2; ++digit) {
          std::byte* to = query_at(d / 32 * 2 + place.step, r, digit, place.t, place.place / 2);
          reinterpret_cast<std::uint16_t*>(to)[place.place % 2] = static_cast<std::uint16_t>(digit == 0 ? high : low);
        }
      }
      if (lane == 0) facts.terms[r] = {largest * p.logits.scale, 0, 0.0f, 0}, facts.poisoned[r] = finite ? 0 : 1;
    }
  }
  template <bool kBf16>
  __device__ __forceinline__ static std::uint32_t halves(float a, float b) {
    return kBf16 ? ptx::bf16x2(a, b) : ptx::f16x2(a, b);
  }
  template <bool kBf16>
  __device__ __forceinline__ static float float_of(std::uint32_t bits) {  // the lower half
    return kBf16 ? __uint_as_float(bits << 16) : ptx::f16_to_f32(static_cast<std::uint16_t>(bits));
  }
  // The operands of this lane in a step.
  __device__ __forceinline__ void load_queries(int step, uint2 (&b)[NT]) const {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      const uint4 x = *reinterpret_cast<const uint4*>(shared + step * S::kStep + (n / 2 * 32 + lane) * 16);
      b[n] = make_uint2(x.x, x.y), b[n + 1] = make_uint2(x.z, x.w);
    }
  }

  // --- pages of a part ---

  struct Page {
    int use, slot;  // its use; its slot, with what is known of it, or -1: there is none
  };
  // Every warp for itself: lane i has the slot of use base + i.
  struct Walk {
    int base, slot;
    unsigned left;
  };
  __device__ __forceinline__ Walk begin() const {
    return {part().use_begin - 32, -1, 0};
  }
  __device__ __forceinline__ Page next(Walk& walk) const {
    while (walk.left == 0) {
      if (walk.base + 32 >= part().use_end) return {0, -1};
      walk.base += 32;
      const int use = walk.base + lane;
      walk.slot = use < part().use_end ? this->slot_of(part().runs.page(use)) : -1;
      walk.left = __ballot_sync(~0u, walk.slot >= 0);
    }
    const int from = __ffs(static_cast<int>(walk.left)) - 1;
    walk.left &= walk.left - 1;
    return {walk.base + from, __shfl_sync(~0u, walk.slot, from)};
  }
  // The team's page of the next round. any: whether the round has a page.
  __device__ __forceinline__ Page next_round(Walk& walk, bool& any) const {
    Page mine{0, -1};
#pragma unroll 1
    for (int i = 0; i < S::kPages; ++i) {
      const Page one = next(walk);
      if (i == 0) any = one.slot >= 0;
      if (i == team) mine = one;
    }
    return mine;
  }
  __device__ int page_number(const Page& page) const {
    return part().runs.page(page.use);
  }
  __device__ std::byte* stage_of(int round, int page) const {
    return shared + S::kStagesAt + (round * S::kPages + page) * S::kStage;
  }

  // The team's page to its stage, by the team.
  __device__ __forceinline__ void copy_page(const Page& page, int round) const {
    if (page.slot < 0) return;
    constexpr int kLanes = 32 * TW;
    const int thread = 32 * member + lane;
    const codec::PageLayout& layout = p.cache.encoded_layout;
    const std::byte* block = this->block_of(page.slot, p.cache.encoded_slot_bytes);
    const std::uint32_t to = ptx::shared_address(stage_of(round, team));
    constexpr int kPieces = Latents::row_bytes(0) / 16;  // an octet's
    static_assert(kPieces % kLanes == 0);
    const std::byte* latents = block + layout.v.plane_offset[0] + 16 * thread;
#pragma unroll
    for (int octet = 0; octet < 8; ++octet) {
      const std::uint32_t at = to + octet * Latents::stride(0) + ((16 * thread) ^ swap_of_row(Latents::swap(0), octet));
#pragma unroll
      for (int i = 0; i < kPieces / kLanes; ++i)
        ptx::copy16<0, 0>(at + 16 * kLanes * i, latents + octet * Latents::row_bytes(0) + 16 * kLanes * i);
    }
    constexpr int kKeyPieces = Keys::row_bytes(0) / 16;
#pragma unroll
    for (int i = thread; i < 8 * kKeyPieces; i += kLanes) {
      const int octet = i / kKeyPieces, swap = swap_of_row(Keys::swap(0), octet);
      ptx::copy16<0, 0>(to + S::kKeysAt + octet * Keys::stride(0) + ((16 * (i % kKeyPieces)) ^ swap),
                        block + layout.k.plane_offset[0] + 16 * i);
    }
    constexpr int kOfSide = S::kScales / 16;
    if (thread < kOfSide) {
      ptx::copy16<0, 0>(to + S::kScalesAt + 16 * thread, block + layout.k.scale_offset + 16 * thread);
    } else if (thread < 2 * kOfSide) {
      ptx::copy16<0, 0>(to + S::kScalesAt + 16 * thread, block + layout.v.scale_offset + 16 * (thread - kOfSide));
    } else if (thread < 2 * kOfSide + S::kCentre / 16 && codec::is_centred(layout)) {
      const int i = thread - 2 * kOfSide;
      ptx::copy16<0, 0>(to + S::kCentreAt + 16 * i, block + codec::centre_layout(layout).plane_offset[0] + 16 * i);
    }
  }

  // --- scores ---

  // The integer, as a float, that two digits' sums of row h make; `start`: what it begins with.
  __device__ __forceinline__ static float sum_of(const std::int32_t (&c)[4], int h, int start) {
    return static_cast<float>(256 * c[2 * h] + (c[2 * h + 1] + start));
  }
  // The products of all rows, in log2 units, with the centre of a page's rotary keys: that of sixteen equal keys.
  __device__ __forceinline__ void centre_scores(const std::byte* stage, float (&s)[NT]) const {
    constexpr Format kFormat = codec::kCentreFormat;
    const std::byte* centre = stage + S::kCentreAt;
    const std::byte* const rows[2] = {centre, centre + D / 2};
    const Constants<kFormat> constants{};
    const Sixteen x = centre_levels<KF>(load_key_codes<kFormat, false>(rows, 0, t, constants));
    const float scale = half_at(centre + D / 2 + D / 4, 0);
    std::int32_t c[NT][4];
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      const std::uint32_t a[4] = {x.first[j], x.first[j], x.second[j], x.second[j]};
      uint2 b[NT];
      load_queries(DV / 32 + j, b);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if (j == 0) {
          ptx::mma_from(c[n], a, b[n].x, b[n].y, 0, 0);
        } else {
          ptx::mma(c[n], a, b[n].x, b[n].y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const Terms& terms = facts.terms[4 * n + t];
      s[n] = sum_of(c[n], 0, terms.keys_start) * (scale * terms.keys);
    }
  }
  // Levels of four codes, the nibbles of a selector.
  __device__ __forceinline__ std::uint32_t levels_of(std::uint32_t codes) const {
    const Constants<VF>& k = latent_constants;
    return k.sum(ptx::prmt(k.t0, table_word<VF>(1), codes), ptx::prmt(k.t2, inverted_word<VF>(1), ~codes));
  }
  // The levels of two tokens of four channels: byte i of each word. both = 0x40 + 0x11 i.
  __device__ __forceinline__ void unpack_tokens(const uint4& words, std::uint32_t both, std::uint32_t& first,
                                                std::uint32_t& second) const {
    const std::uint32_t a = levels_of(ptx::prmt(words.x, words.y, both)),
                        b = levels_of(ptx::prmt(words.z, words.w, both));
    first = ptx::prmt(a, b, 0x6420), second = ptx::prmt(a, b, 0x7531);
  }
  // Scores of tokens 8 g + kTokens member + 2 i + h, in log2 units, and their value scales.
  __device__ __forceinline__ void coded_scores(const std::byte* stage, float (&s)[S::kTokenTiles][NT][2],
                                               float (&v)[S::kTokenTiles][2]) const {
    const int first = S::kTokens * member;  // in the octet
    std::int32_t c[S::kTokenTiles][NT][4];
    const auto multiply = [&](int i, const std::uint32_t(&a)[4], const uint2(&b)[NT], bool begins) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if (begins) {
          ptx::mma_from(c[i][n], a, b[n].x, b[n].y, 0, 0);
        } else {
          ptx::mma(c[i][n], a, b[n].x, b[n].y);
        }
      }
    };
    {
      uint2 b[D / 32][NT];
#pragma unroll
      for (int j = 0; j < D / 32; ++j) load_queries(DV / 32 + j, b[j]);
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
        Sixteen x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = first + 2 * i + h, at = token * (Keys::row_bytes(0) / 8);
          const std::byte* row = stage + S::kKeysAt + g * Keys::stride(0) + at;
          if constexpr (Keys::swap(0) != Swap::none) row += Keys::shift(0, g, at / 16 % 4);
          const std::byte* const rows[2] = {row, row};
          x[h] = load_key_codes<KF, false>(rows, 0, t, key_constants);
        }
#pragma unroll
        for (int j = 0; j < D / 32; ++j)
          multiply(i, {x[0].first[j], x[1].first[j], x[0].second[j], x[1].second[j]}, b[j], j == 0);
      }
    }
    float centre[NT] = {};
    if (codec::is_centred(p.cache.encoded_layout)) centre_scores(stage, centre);
    const KeyScales<S::kTokenTiles> key_scales(stage + S::kScalesAt + 2 * (8 * g + first));
    const KeyScales<S::kTokenTiles> scales(stage + S::kScalesAt + S::kScales + 2 * (8 * g + first));
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const Terms& terms = facts.terms[4 * n + t];
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = key_scales.signed_scale(i, h);
          s[i][n][h] = fmaf(sum_of(c[i][n], h, terms.keys_start), fabsf(scale) * terms.keys,
                            is_negative(scale) ? 0.0f : centre[n]);
        }
      }
    }
    const std::byte* mine = stage + g * Latents::stride(0) + ((16 * t) ^ swap_of_row(Latents::swap(0), g));
    const std::uint32_t both = static_cast<std::uint32_t>(first / 2) * 0x11u + 0x40u;
#pragma unroll
    for (auto& tile : c) {
#pragma unroll
      for (auto& column : tile) column[0] = column[1] = column[2] = column[3] = 0;
    }
#pragma unroll 2  // or instructions take the time to come
    for (int step = 0; step < DV / 32; ++step) {
      uint2 b[NT];
      load_queries(step, b);
      const uint4 low = *reinterpret_cast<const uint4*>(mine + 128 * step);
      const uint4 high = *reinterpret_cast<const uint4*>(mine + 128 * step + 64);
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
        std::uint32_t a[4];
        unpack_tokens(low, both + 0x11u * i, a[0], a[1]);
        unpack_tokens(high, both + 0x11u * i, a[2], a[3]);
        multiply(i, a, b, false);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) v[i][h] = scales.signed_scale(i, h);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const Terms& terms = facts.terms[4 * n + t];
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          s[i][n][h] = fmaf(sum_of(c[i][n], h, terms.latents_start), v[i][h] * terms.latents, s[i][n][h]);
      }
    }
  }
  // Transforms and visibility, token by token, rolled up: pages that need this are few. first: the lane's first token.
  template <int kTiles>
  __device__ __forceinline__ void transform(const Page& page, int first, float (&s)[kTiles][NT][2]) const {
    constexpr int kCount = 2 * NT * kTiles;
    float copy[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) copy[i] = s[i / (2 * NT)][i / 2 % NT][i % 2];
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t key = std::int64_t{page_number(page)} * kPageTokens + first + i / (2 * NT) * 2 + i % 2;
      copy[i] = this->transform_one(this->place_of(4 * (i / 2 % NT) + t), key, (page.slot & kSeen) != 0, copy[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i / (2 * NT)][i / 2 % NT][i % 2] = copy[i];
  }

  // --- weights ---

  __device__ __forceinline__ static float over_warps(const float (&x)[S::kWarps]) {
    const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
    return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
  }
  // Exponentials of scores relative to the references, and this lane's sums of them. Returns whether one is so large
  // that references must move.
  template <int kTiles>
  __device__ __forceinline__ bool exponentials(const float (&s)[kTiles][NT][2], float (&e)[kTiles][NT][2],
                                               float (&sum)[NT]) const {
    bool large = false;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float m = facts.m[4 * n + t];
      sum[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) sum[n] += e[i][n][h] = ptx::ex2(s[i][n][h] - m);
      }
      large = large || !(sum[n] <= kLargeSum);
    }
    return large;
  }
  // New references, by all warps.
  template <int kTiles>
  __device__ __forceinline__ void move_references(const float (&s)[kTiles][NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float x = kLowest;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) x = fmaxf(x, fmaxf(s[i][n][0], s[i][n][1]));
      x = over_tokens(x);
      if (g == 0) facts.top[4 * n + t][warp] = x;
    }
    __syncthreads();
    float top[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float before = facts.m[4 * n + t];
      top[n] = fmaxf(before, over_warps(facts.top[4 * n + t]));
      const float alpha = ptx::ex2(before - top[n]);
      l[n] *= alpha;
#pragma unroll
      for (auto& tile : o) tile[n][0] *= alpha, tile[n][1] *= alpha;
    }
    __syncthreads();
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int n = 0; n < NT; ++n) facts.m[4 * n + t] = top[n];
    }
    __syncthreads();
  }

  // Scores to digits of weights in shared memory. Returns in `fold` the factors of the round's sums.
  __device__ __forceinline__ void weigh(const float (&s)[S::kTokenTiles][NT][2], float (&v)[S::kTokenTiles][2],
                                        float (&fold)[NT]) {
    float e[S::kTokenTiles][NT][2], sum[NT];
    bool large = exponentials(s, e, sum);
    float poison = 0.0f;
#pragma unroll
    for (const auto& pair : v) poison = fmaf(pair[0], 0.0f, fmaf(pair[1], 0.0f, poison));
    const auto find_peaks = [&] {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float x = 0.0f;
#pragma unroll
        for (int i = 0; i < S::kTokenTiles; ++i) x = fmaxf(x, fmaxf(e[i][n][0] * v[i][0], e[i][n][1] * v[i][1]));
        x = over_tokens(x);
        if (g == 0) facts.peak[4 * n + t][warp] = x;
      }
    };
    find_peaks();
    if (__syncthreads_or(large || poison != poison ? 1 : 0) != 0) {
      move_references(s);
      exponentials(s, e, sum);
      // A scale that is not a number poisons whoever sees its token; to others it is 0.
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float bad = v[i][h] * 0.0f;
          v[i][h] = fmaxf(v[i][h], 0.0f);
          if (bad == bad) continue;
          v[i][h] = 0.0f;
#pragma unroll
          for (int n = 0; n < NT; ++n) l[n] += e[i][n][h] != 0.0f ? bad : 0.0f;
        }
      }
      find_peaks();
      __syncthreads();
    }
    std::byte* to = shared + S::kWeightsAt + team * S::kPageWeights + 2 * t * S::kColumn + 8 * g + S::kTokens * member;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      l[n] += sum[n];
      const float peak = fmaxf(over_warps(facts.peak[4 * n + t]), 1e-33f), up = kTopWeight * ptx::rcp(peak);
      fold[n] = peak * (1.0f / kTopWeight);
      float w[S::kTokens];
#pragma unroll
      for (int k = 0; k < S::kTokens; ++k) w[k] = e[k / 2][n][k % 2] * v[k / 2][k % 2];
      int sum_of_digits = store_weights(to + 8 * n * S::kColumn, w, up);
#pragma unroll
      for (int h = 4; h < 32; h *= 2) sum_of_digits += __shfl_xor_sync(~0u, sum_of_digits, h);
      if (g == 0) facts.digits[4 * n + t][warp] = sum_of_digits;
    }
  }
  // w * up as digits, to two columns (decode/weights.cuh). Returns their sum, 256 for each unit of the higher one.
  __device__ __forceinline__ int store_weights(std::byte* high, const float (&w)[S::kTokens], float up) const {
    static_assert(order_of(VF) == Order::natural && S::kTokens == 4);
    constexpr int kOnes = 0x01010101;
    std::uint32_t bits[S::kTokens], both[S::kTokens / 2];
#pragma unroll
    for (int k = 0; k < S::kTokens; ++k) {
      const float dither = (static_cast<float>(S::kTokens * member + k) - 3.5f) * 0.125f;
      bits[k] = __float_as_uint(fmaf(w[k], up, dither + (32768.0f + 128.0f + 0.5f)));
    }
#pragma unroll
    for (int k = 0; k < S::kTokens / 2; ++k) both[k] = ptx::prmt(bits[2 * k], bits[2 * k + 1], 0x6251);
    const std::uint32_t highs = ptx::prmt(both[0], both[1], 0x7632),
                        lows = ptx::prmt(both[0], both[1], 0x5410) ^ 0x80808080u;
    *reinterpret_cast<std::uint32_t*>(high) = highs;
    *reinterpret_cast<std::uint32_t*>(high + S::kColumn) = lows;
    return 256 * __dp4a(static_cast<int>(highs), kOnes, 0) + __dp4a(static_cast<int>(lows), kOnes, 0);
  }

  // --- sums ---

  // The round's weights by its pages' latents.
  __device__ __forceinline__ void add_latents(int round, const float (&fold)[NT]) {
    std::int32_t c[2 * S::kUnits][NT][4];
#pragma unroll
    for (auto& tile : c) {
#pragma unroll
      for (auto& column : tile) column[0] = column[1] = column[2] = column[3] = 0;
    }
#pragma unroll 1  // or instructions take the time to come
    for (int page = 0; page < S::kPages; ++page) {
      const std::byte* mine = stage_of(round, page) + t * Latents::stride(0) +
                              ((16 * g) ^ swap_of_row(Latents::swap(0), t)) + 4 * S::kChannels * warp;
      const std::byte* weights = shared + S::kWeightsAt + page * S::kPageWeights + g * S::kColumn + 8 * t;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint2 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = *reinterpret_cast<const uint2*>(weights + 8 * n * S::kColumn + 32 * step);
#pragma unroll
        for (int unit = 0; unit < S::kUnits; ++unit) {
          std::uint32_t low[4];
          load_words<16>(mine + 4 * step * Latents::stride(0) + 128 * unit, low);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Sixteen x = unpack<VF>(low + 2 * i, 0, latent_constants);
            const std::uint32_t a[4] = {x.first[0], x.first[1], x.second[0], x.second[1]};
#pragma unroll
            for (int n = 0; n < NT; ++n) ptx::mma(c[2 * unit + i][n], a, b[n].x, b[n].y);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      int both = 0;
#pragma unroll
      for (const int digits : facts.digits[4 * n + t]) both += digits;
      const int start = -level_origin(VF) * both + both / 2;
#pragma unroll
      for (int tile = 0; tile < 2 * S::kUnits; ++tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) o[tile][n][h] = fmaf(sum_of(c[tile][n], h, start), fold[n], o[tile][n][h]);
      }
    }
  }

  __device__ __forceinline__ void take_coded() {
    load_coded_queries();
    Walk walk = begin();
    bool any;
    Page here = next_round(walk, any);
    copy_page(here, 0);
    ptx::copy_commit();
    clear();
#pragma unroll 1
    for (int round = 0; any; round ^= 1) {
      const Page later = next_round(walk, any);
      ptx::copy_wait<0>();
      __syncthreads();  // queries and pages have arrived, and the round before is done
      copy_page(later, round ^ 1);
      ptx::copy_commit();
      float s[S::kTokenTiles][NT][2], v[S::kTokenTiles][2], fold[NT];
      if (here.slot >= 0) {
        coded_scores(stage_of(round, team), s, v);
        if ((here.slot & kPlain) == 0) transform(here, 8 * g + S::kTokens * member, s);
      } else {
#pragma unroll
        for (int i = 0; i < S::kTokenTiles; ++i) {
          v[i][0] = v[i][1] = 0.0f;
#pragma unroll
          for (int n = 0; n < NT; ++n) s[i][n][0] = s[i][n][1] = kNone;
        }
      }
      weigh(s, v, fold);
      __syncthreads();  // weights have arrived
      add_latents(round, fold);
      here = later;
    }
    write_partial();
  }

  // --- exact pages: rows of tokens, straight from global memory. Four warps have scores of a page. ---

  template <bool kBf16>
  __device__ __forceinline__ void exact_scores(const std::byte* latents, const std::byte* keys, int tokens,
                                               float (&s)[1][NT][2]) const {
    const int token = 8 * g + 2 * warp;  // and the next
    const auto load = [&](int block, int h) {
      const std::byte* from = block < DV / 32 ? latents + (token + h) * 2 * DV + 64 * block + 16 * t
                                              : keys + (token + h) * 2 * D + 64 * (block - DV / 32) + 16 * t;
      return token + h < tokens ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
    };
    float c[NT][4] = {};
    std::uint32_t most[2] = {0, 0};
    constexpr int kAhead = 3;  // blocks of 32 channels
    static_assert((DV + D) / 32 % kAhead == 0);
#pragma unroll 1
    for (int first = 0; first < (DV + D) / 32; first += kAhead) {
      uint4 x[kAhead][2];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) x[i][0] = load(first + i, 0), x[i][1] = load(first + i, 1);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const uint4 &a = x[i][0], &b = x[i][1];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          for (const std::uint32_t bits : {x[i][h].x, x[i][h].y, x[i][h].z, x[i][h].w})
            most[h] = __vmaxu2(most[h], bits & 0x7FFF7FFFu);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint2 q[NT];
          load_queries(2 * (first + i) + j, q);
          const std::uint32_t operand[4] = {j == 0 ? a.x : a.z, j == 0 ? b.x : b.z, j == 0 ? a.y : a.w,
                                            j == 0 ? b.y : b.w};
#pragma unroll
          for (int n = 0; n < NT; ++n) ptx::mma_half(c[n], operand, q[n].x, q[n].y, kBf16);
        }
      }
    }
    constexpr std::uint32_t kInfinite = kBf16 ? 0x7F80u : 0x7C00u;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned all = __ballot_sync(~0u, (most[h] & 0xFFFFu) >= kInfinite || most[h] >> 16 >= kInfinite);
      const bool bad = (all >> (4 * g) & 15u) != 0;
      if (bad && t == 0) atomicOr(facts.bad + (token + h) / 32, 1u << (token + h) % 32);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float x = (c[n][2 * h] + c[n][2 * h + 1]) * facts.terms[4 * n + t].latents;
        s[0][n][h] = bad ? __int_as_float(0x7FC00000) : x;
      }
    }
  }
  template <bool kBf16>
  __device__ __forceinline__ void add_exact(const std::byte* latents, int tokens) {
    const std::uint64_t bad = static_cast<std::uint64_t>(facts.bad[1]) << 32 | facts.bad[0];
    const std::byte* weights = shared + S::kWeightsAt;
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      float c[2][NT][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // four tokens a lane
        const int token = 8 * (4 * (step / 2) + t) + 4 * (step % 2);
        uint2 x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[k] = make_uint2(0, 0);
          if (token + k < tokens && (bad >> (token + k) & 1u) == 0) {
            x[k] = __ldg(reinterpret_cast<const uint2*>(
                latents + ((token + k) * DV + S::kChannels * warp + 32 * unit + 4 * g) * 2));
          }
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint2 b = *reinterpret_cast<const uint2*>(weights + (8 * n + g) * (2 * S::kColumn) + 2 * token);
          const std::uint32_t first[4] = {ptx::prmt(x[0].x, x[1].x, 0x5410), ptx::prmt(x[0].x, x[1].x, 0x7632),
                                          ptx::prmt(x[2].x, x[3].x, 0x5410), ptx::prmt(x[2].x, x[3].x, 0x7632)};
          const std::uint32_t second[4] = {ptx::prmt(x[0].y, x[1].y, 0x5410), ptx::prmt(x[0].y, x[1].y, 0x7632),
                                           ptx::prmt(x[2].y, x[3].y, 0x5410), ptx::prmt(x[2].y, x[3].y, 0x7632)};
          ptx::mma_half(c[0][n], first, b.x, b.y, kBf16);
          ptx::mma_half(c[1][n], second, b.x, b.y, kBf16);
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) o[2 * unit + tile][n][h] += c[tile][n][2 * h] + c[tile][n][2 * h + 1];
        }
      }
    }
  }
  template <bool kBf16>
  __device__ __forceinline__ void take_exact() {
    load_exact_queries<kBf16>();
    clear();
    const codec::PageLayout& layout = p.cache.exact_layout;
    Walk walk = begin();
#pragma unroll 1
    for (Page here = next(walk); here.slot >= 0; here = next(walk)) {
      const std::byte* block = this->block_of(here.slot, p.cache.exact_slot_bytes);
      const std::byte* latents = block + layout.v.plane_offset[0];
      const int tokens = min(part().length - page_number(here) * kPageTokens, kPageTokens);
      __syncthreads();  // queries have arrived, and the page before is done
      if (threadIdx.x == 0) facts.bad[0] = facts.bad[1] = 0;
      __syncthreads();
      float s[1][NT][2], e[1][NT][2], sum[NT];
      if (warp < 4) {
        exact_scores<kBf16>(latents, block + layout.k.plane_offset[0], tokens, s);
        if ((here.slot & kPlain) == 0) transform(here, 8 * g + 2 * warp, s);
      } else {
#pragma unroll
        for (int n = 0; n < NT; ++n) s[0][n][0] = s[0][n][1] = kNone;
      }
      if (__syncthreads_or(exponentials(s, e, sum) ? 1 : 0) != 0) {
        move_references(s);
        exponentials(s, e, sum);
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        l[n] += sum[n];
        if (warp >= 4) continue;
        const float a = e[0][n][0], b = e[0][n][1];
        const std::uint32_t high = halves<kBf16>(a, b);
        std::byte* to = shared + S::kWeightsAt + 2 * (4 * n + t) * (2 * S::kColumn) + 2 * (8 * g + 2 * warp);
        *reinterpret_cast<std::uint32_t*>(to) = high;
        *reinterpret_cast<std::uint32_t*>(to + 2 * S::kColumn) =
            halves<kBf16>(a - float_of<kBf16>(high), b - float_of<kBf16>(high >> 16));
      }
      __syncthreads();
      add_exact<kBf16>(latents, tokens);
    }
    write_partial();
  }

  // --- a part ---

  __device__ __forceinline__ void clear() {
    if (threadIdx.x < R) facts.m[threadIdx.x] = kLowest;
#pragma unroll
    for (float& sum : l) sum = 0.0f;
#pragma unroll
    for (auto& tile : o) {
#pragma unroll
      for (auto& pair : tile) pair[0] = pair[1] = 0.0f;
    }
  }
  __device__ __forceinline__ void write_partial() {
    __syncthreads();
    if (this->is_last()) ptx::launch_dependents();
    const auto partial = static_cast<std::size_t>(part().partial);
    float* out = p.partial_o + partial * (R * DV) + S::kChannels * warp + 4 * g;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float sum = l[n];
#pragma unroll
      for (int h = 4; h < 32; h *= 2) sum += __shfl_xor_sync(~0u, sum, h);
      if (g == 0) facts.top[4 * n + t][warp] = sum;
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        const float(&x)[2] = o[2 * unit][n], (&y)[2] = o[2 * unit + 1][n];
        *reinterpret_cast<float4*>(out + (4 * n + t) * DV + 32 * unit) = make_float4(x[0], x[1], y[0], y[1]);
      }
    }
    __syncthreads();
    if (threadIdx.x < R) {
      const int row = static_cast<int>(threadIdx.x);
      float sum = 0.0f;
#pragma unroll
      for (const float one : facts.top[row]) sum += one;
      if (facts.poisoned[row] != 0) sum = __int_as_float(0x7FC00000);
      float* ml = p.partial_ml + partial * (2 * R);
      ml[row] = facts.m[row], ml[R + row] = sum;
    }
    if (threadIdx.x == S::kThreads - 1 && !are_listed(p)) publish(p, part());
  }
  __device__ __forceinline__ void take_part() {
    if (part().domain != core::kExact) {
      take_coded();
    } else if (p.cache.exact_layout.v.format == Format::bf16) {
      take_exact<true>();
    } else {
      take_exact<false>();
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) column_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte column_memory[];
  Columns<S> block(p, column_memory);
  block.get_constants();
  ptx::wait_prerequisites();
#pragma unroll 1
  for (bool first = true, last = false; !last; first = false) {
    Columns<S>::meet();  // the part before is done
    if (block.warp == 0) block.find_part(first);
    Columns<S>::meet();
    if (block.part().partial < 0) break;
    last = block.is_last();
    block.take_part();
  }
}

}  // namespace kvant::cuda::latent
