// A warp's part of a tile: products, softmax and output of its rows.
#pragma once

#include <utility>

#include "cuda/prefill/queries.cuh"
#include "cuda/prefill/rotate.cuh"
#include "cuda/prefill_sm80/codes.cuh"
#include "cuda/prefill_sm80/queue.cuh"

namespace kvant::cuda::prefill::sm80 {

template <bool kBf16>
__device__ __forceinline__ void multiply(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  float(&sums)[4] = *reinterpret_cast<float(*)[4]>(c);
  if constexpr (kBf16) {
    ptx::mma_bf16(sums, a, b0, b1);
  } else {
    ptx::mma_f16(sums, a, b0, b1);
  }
}

// A tile's queries, and what products of its rows are multiplied by. `scratch`: D floats of each warp. (Not inlined:
// then sums at head_dim 128 are spilled less.)
template <class S, bool kRotated>
__device__ __noinline__ void load_queries(const AttendParams& p, const Tile& tile, std::byte* shared, bool bf16,
                                          float* scratch) {
  constexpr int D = S::kHeadDim, kRowsOfWarp = S::kRows / S::kWarps, kRows = S::kQueryRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, first = warp * kRowsOfWarp;
  load_rows<D, kRotated, D <= 128 ? 4 : 2>(
      p, tile.batch.query_begin, kRowsOfWarp, scratch + warp * D,
      [&](int i) { return row_place(p, tile, tile.row_block * S::kRows + first + i); },
      [&](int i, int n, float y) {
        const int r = first + i;
        *half_at<D, kRows>(shared + r / kRows * kRows * D * 2, r % kRows, n) = half_of(y, bf16);
      },
      [&](int i, float to_log2) {
        if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(shared + S::kToLog2At)[first + i] = to_log2;
      });
}

template <class S>
struct Attend {
  static constexpr int D = S::kHeadDim;
  static constexpr int kBox = box_row_bytes(D), kPieces = kBox / 16;
  static constexpr int kSums = S::kColumns / 2;
  static constexpr int kHeld = D / 16 / S::kShares;  // steps of 16 channels of a warp's share

  const AttendParams& p;
  std::byte* shared;
  int warp, lane;
  float m[S::kSixteens][2], l[S::kSixteens][2];  // m: in units of log 2
  float unit;                                    // the sums'
  float o[S::kSixteens][kSums];
  int turn;                                           // pages of the domain before the one that comes next
  std::uint32_t held[S::kShares > 1 ? kHeld : 1][4];  // the warp's share of the queries, as operands

  // Which of the warps that share rows this is.
  __device__ int part() const { return S::kSplit == 1 ? 0 : warp / S::kRowWarps; }
  // Which of the warps that share channels; they share keys, too.
  __device__ int share() const { return part() % S::kShares; }
  __device__ int warp_of(int part) const { return part * S::kRowWarps + warp % S::kRowWarps; }
  // The warp's first row in the tile.
  __device__ int first_row() const { return (S::kSplit == 1 ? warp : warp % S::kRowWarps) * 16 * S::kSixteens; }
  __device__ const PageList& list() const { return *reinterpret_cast<const PageList*>(shared + S::kListAt); }
  __device__ int g() const { return lane / 4; }
  __device__ int t() const { return lane % 4; }
  __device__ bool is_plain() const { return base::is_plain(p.logits) && p.mask.data == nullptr; }
  __device__ float to_log2(int i, int h) const {
    return reinterpret_cast<const float*>(shared + S::kToLog2At)[first_row() + 16 * i + g() + 8 * h];
  }
  __device__ RowPlace place(int i, int h) const {
    return row_place(p, list().tile, list().tile.row_block * S::kRows + first_row() + 16 * i + g() + 8 * h);
  }
  // The warps that share rows.
  __device__ void rows_sync() const { ptx::barrier<32 * S::kSplit>(1 + first_row() / 16); }

  // --- operands: the 16-byte pieces of a row, two for each step of 16 channels ---

  // The way from a lane's address of the first two pieces to that of pieces c and c + 1: swapped, and in a later box.
  template <int kTokens>
  static __device__ __forceinline__ std::uint32_t piece(std::uint32_t first, int c) {
    return (first ^ static_cast<std::uint32_t>(c % kPieces * 16)) +
           static_cast<std::uint32_t>(c / kPieces * kTokens * kBox);
  }

  // Products of queries with kMine keys, from `first` on, of the kKeys at `keys`. kSteps: that are unrolled.
  template <bool kBf16, int kKeys, int kMine, int kSteps = D / 16>
  __device__ __forceinline__ void products(const std::byte* keys, int first,
                                           float (&s)[S::kSixteens][kMine / 2]) const {
    const int lane = ptx::thread_here() % 32;
    std::uint32_t q[S::kSixteens];
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
      const int row = first_row() + 16 * i, from = row / 64 * 64 * D * 2;
      q[i] = ptx::shared_address(shared) +
             static_cast<std::uint32_t>(from + place_by_token<D>(row % 64 + lane % 16, lane / 16));
#pragma unroll
      for (int n = 0; n < kMine / 2; ++n) s[i][n] = 0.0f;
    }
    const std::uint32_t k = ptx::shared_address(keys) + static_cast<std::uint32_t>(place_by_token<D, kKeys>(
                                                            first + lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll kSteps
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t a[S::kSixteens][4];
#pragma unroll
      for (int i = 0; i < S::kSixteens; ++i) ptx::load_matrices(a[i], piece<64>(q[i], 2 * step));
#pragma unroll
      for (int n = 0; n < kMine / 16; ++n) {
        std::uint32_t b[4];
        ptx::load_matrices(b, piece<kKeys>(k, 2 * step) + n * 16 * kBox);
#pragma unroll
        for (int i = 0; i < S::kSixteens; ++i) {
          multiply<kBf16>(s[i] + 8 * n, a[i], b[0], b[1]);
          multiply<kBf16>(s[i] + 8 * n + 4, a[i], b[2], b[3]);
        }
      }
    }
  }

  // Where this warp's share of channels begins in a tile of kTokens tokens.
  template <int kTokens>
  __device__ __forceinline__ std::uint32_t share_at() const {
    return static_cast<std::uint32_t>(share() * (2 * kHeld / kPieces) * kTokens * kBox);
  }
  // The queries lie in shared memory, and nobody writes there until all warps hold theirs.
  __device__ __forceinline__ void hold_queries() {
    const std::uint32_t q =
        ptx::shared_address(shared) + share_at<S::kQueryRows>() +
        static_cast<std::uint32_t>(place_by_token<D, S::kQueryRows>(first_row() + lane % 16, lane / 16));
#pragma unroll
    for (int step = 0; step < kHeld; ++step) ptx::load_matrices(held[step], piece<S::kQueryRows>(q, 2 * step));
  }
  // This warp's share of the products with sixteen of the kKeys keys at `keys`, from `first` on.
  template <bool kBf16, int kKeys>
  __device__ __forceinline__ void share_of_products(const std::byte* keys, int first, float (&s)[8]) const {
    const int lane = ptx::thread_here() % 32;
    const std::uint32_t k =
        ptx::shared_address(keys) + share_at<kKeys>() +
        static_cast<std::uint32_t>(place_by_token<D, kKeys>(first + lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll
    for (int n = 0; n < 8; ++n) s[n] = 0.0f;
#pragma unroll
    for (int step = 0; step < kHeld; ++step) {
      std::uint32_t b[4];
      ptx::load_matrices(b, piece<kKeys>(k, 2 * step));
      multiply<kBf16>(s, held[step], b[0], b[1]);
      multiply<kBf16>(s + 4, held[step], b[2], b[3]);
    }
  }

  // Products with this warp's part of the keys.
  template <bool kBf16, int kKeys>
  __device__ __forceinline__ void scores(const std::byte* keys, float (&s)[S::kSixteens][kKeys / S::kSplit / 2]) const {
    constexpr int kMine = kKeys / S::kSplit;
    if constexpr (S::kShares == 1) {
      products<kBf16, kKeys, kMine>(keys, part() * kMine, s);
    } else {
      // Two warps have their shares of the products with the keys of both, and give away those with the other's.
      static_assert(S::kShares == 2 && kMine == 8);
      float both[2 * kMine / 2];
      share_of_products<kBf16, kKeys>(keys, part() / 2 * 2 * kMine, both);
      auto* given = reinterpret_cast<float4*>(shared + S::kSharesAt);
      const bool second = share() != 0;
      given[32 * warp + lane] =
          second ? make_float4(both[0], both[1], both[2], both[3]) : make_float4(both[4], both[5], both[6], both[7]);
      rows_sync();
      const float4 x = given[32 * warp_of(part() ^ 1) + lane];
      s[0][0] = (second ? both[4] : both[0]) + x.x, s[0][1] = (second ? both[5] : both[1]) + x.y;
      s[0][2] = (second ? both[6] : both[2]) + x.z, s[0][3] = (second ? both[7] : both[3]) + x.w;
    }
  }

  // --- page centres: sixteen at a time, as keys of a tile ---

  __device__ float* centre_products() const {
    return reinterpret_cast<float*>(shared + S::kCentresAt) + (first_row() + g()) * S::kCentreRow;  // the first row's
  }
  // Nobody reads the tile of keys when this is called, nor when it returns.
  __device__ __forceinline__ void find_centres() const {
    const PageQueue::Page& here = queue().page[turn & 3];
    const std::uint32_t at = p.cache.encoded_layout.code_bytes;
    unpack_centres<S>(at, shared + S::kKeysAt, [&](int place) { return block_at(false, here.centres[place]); });
    __syncthreads();
    float c[S::kSixteens][kCentresAtOnce / 2];
    if constexpr (S::kShares == 1) {
      products<false, S::kKeys, kCentresAtOnce, 1>(shared + S::kKeysAt, 0, c);
    } else {
      share_of_products<false, S::kKeys>(shared + S::kKeysAt, 0, c[0]);
    }
#pragma unroll
    for (int of = 0; of < S::kShares; ++of) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int place = n / 2 * 8 + 2 * (ptx::thread_here() % 4) + n % 2;
        const float factor = centre_scale<D>(at, block_at(false, here.centres[place]));
        if (part() != of) break;  // warps that share rows have the same, or as many shares of it
#pragma unroll
        for (int i = 0; i < 2 * S::kSixteens; ++i) {
          float& to = centre_products()[8 * i * S::kCentreRow + place];
          const float product = c[i / 2][n / 2 * 4 + i % 2 * 2 + n % 2] * factor;
          to = of == 0 ? product : to + product;
        }
      }
      __syncthreads();
    }
  }

  // Adds the products of weights with kKeys values at `values`. kByToken: the tile has a row for each token, as dense
  // pages have; otherwise one for each channel.
  template <bool kBf16, int kKeys, bool kByToken>
  __device__ __forceinline__ void add_values(const std::byte* values,
                                             const std::uint32_t (&w)[S::kSixteens][kKeys / 16][4]) {
    const int lane = ptx::thread_here() % 32;
    std::uint32_t v = ptx::shared_address(values);
    if constexpr (kByToken) {
      v += static_cast<std::uint32_t>(place_by_token<D, kKeys>(lane % 16, lane / 16) +
                                      part() * (S::kColumns / 8 / kPieces) * kKeys * kBox);
    } else {
      v += static_cast<std::uint32_t>(
          place_by_channel<kKeys>(part() * S::kColumns + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int n = 0; n < S::kColumns / 16; ++n) {
        std::uint32_t b[4];
        if constexpr (kByToken) {
          ptx::load_transposed(b, piece<kKeys>(v, 2 * n) + step * 16 * kBox);
        } else {
          ptx::load_matrices(b, (v ^ static_cast<std::uint32_t>(step * 32)) + n * 16 * 2 * kKeys);
        }
#pragma unroll
        for (int i = 0; i < S::kSixteens; ++i) {
          multiply<kBf16>(o[i] + 8 * n, w[i][step], b[0], b[1]);
          multiply<kBf16>(o[i] + 8 * n + 4, w[i][step], b[2], b[3]);
        }
      }
    }
  }

  // --- softmax ---

  // Products to scores, as the softmax takes them. `page`: its name (PageName); `first`: of this warp's keys in it.
  template <bool kScaled, int kCount>
  __device__ __forceinline__ void scale(int i, float (&s)[kCount], int page, int first, const float* factors) const {
    if constexpr (kScaled) {
      float c[2] = {0.0f, 0.0f};  // the query's product with the page's centre
      if (codec::is_centred(p.cache.encoded_layout)) {
        const float* of_row = centre_products() + 16 * i * S::kCentreRow + PageName::place(page);
        c[0] = of_row[0], c[1] = of_row[8 * S::kCentreRow];
      }
      scale_products<true>(s, factors + 2 * t(), c);  // (another way for pages without a refusal would spill)
    }
    if (!is_plain()) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) s[n] *= to_log2(i, n / 2 % 2);
    }
    if (PageName::partly_seen(page) || !base::is_plain(p.logits)) {
      const int row = list().tile.row_block * S::kRows + first_row() + 16 * i + ptx::thread_here() % 32 / 4;
      const RowPlace rows[2] = {row_place(p, list().tile, row), row_place(p, list().tile, row + 8)};
      transform_scores(p, list().tile, rows, page, first, s);
    }
  }

  // Scores to weights, relative to the largest of the row so far. The sums before are to be multiplied by `alpha`.
  template <int kCount>
  __device__ __forceinline__ void weigh(int i, float (&s)[kCount], float (&alpha)[2]) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = largest_of_row(largest_score(s, h));
    if constexpr (S::kSplit > 1) {
      auto* tops = reinterpret_cast<float*>(shared + S::kTopsAt);
      const int row = first_row() + g();
      if (t() == 0) tops[part() * S::kRows + row] = top[0], tops[part() * S::kRows + row + 8] = top[1];
      rows_sync();
#pragma unroll
      for (int other = 1; other < S::kSplit; ++other) {
#pragma unroll
        for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], tops[(part() ^ other) * S::kRows + row + 8 * h]);
      }
    }
    const bool plain = is_plain();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float in_log2 = plain ? to_log2(i, h) : 1.0f;
      const Reference raised = raise_top(m[i][h], top[h] == kNone ? kNone : top[h] * in_log2, 1.0f);
      alpha[h] = raised.alpha;
      l[i][h] = fmaf(l[i][h], alpha[h], weigh_row(s, h, in_log2, raised.reference));
    }
  }

  // Weights, times value factors in units of the sums where there are such (`factors`: of this warp's keys), to
  // operands.
  template <bool kBf16, bool kScaled, int kKeys>
  __device__ __forceinline__ void pack(float (&s)[kKeys / S::kSplit / 2], const float* factors, float inverse,
                                       std::uint32_t (&w)[kKeys / 16][4]) const {
    constexpr int kMine = kKeys / S::kSplit;
    if constexpr (kScaled) {
      scale_weights(s, factors + 2 * t(), inverse);
    }
    const auto pair = [&](int n) { return kBf16 ? ptx::bf16x2(s[n], s[n + 1]) : ptx::f16x2(s[n], s[n + 1]); };
    if constexpr (S::kSplit == 1) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) w[n][r] = pair(8 * n + 2 * r);
      }
    } else {
      std::byte* weights = shared + S::kWeightsAt;
#pragma unroll
      for (int j = 0; j < kMine / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = place_by_token<kKeys>(first_row() + g() + 8 * h, part() * (kMine / 8) + j) + 4 * t();
          *reinterpret_cast<std::uint32_t*>(weights + at) = pair(4 * j + 2 * h);
        }
      }
      rows_sync();
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        const int at = place_by_token<kKeys>(first_row() + lane % 16, 2 * n + lane / 16);
        ptx::load_matrices(w[n], ptx::shared_address(weights) + static_cast<std::uint32_t>(at));
      }
    }
  }

  // From products of a page's keys (kKeys of them, from `of_page` on) to operands for those with its values. The
  // factors are those of the whole page.
  template <bool kBf16, bool kScaled, int kKeys>
  __device__ __forceinline__ void soften(float (&s)[S::kSixteens][kKeys / S::kSplit / 2], int page, int of_page,
                                         const float* key_factors, const float* value_factors,
                                         std::uint32_t (&w)[S::kSixteens][kKeys / 16][4]) {
    const int mine = of_page + part() * (kKeys / S::kSplit);
    float alpha[S::kSixteens][2];
    ValueUnit value{1.0f, 1.0f};
    if constexpr (kScaled) value = raise_unit(value_factors, unit);
    bool same = true;
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
      scale<kScaled>(i, s[i], page, mine, kScaled ? key_factors + mine : nullptr);
      weigh(i, s[i], alpha[i]);
      pack<kBf16, kScaled, kKeys>(s[i], kScaled ? value_factors + mine : nullptr, value.inverse, w[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kScaled) alpha[i][h] *= value.shrink;
        same = same && alpha[i][h] == 1.0f;
      }
    }
    if (__all_sync(~0u, same) != 0) return;
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) o[i][n] *= alpha[i][n / 2 % 2];
    }
  }

  // --- pages ---

  // The first warp finds pages, one more ahead than anybody needs: it writes down a page while others still read an
  // older one.
  __device__ PageQueue& queue() const {
    return *reinterpret_cast<PageQueue*>(shared + S::kQueueAt);
  }
  __device__ void begin_pages(int domain) {
    turn = 0;
    if (threadIdx.x < 32) {
      reinterpret_cast<PageList*>(shared + S::kListAt)->set(p, domain);
      queue().begin(p, list(), domain);
    }
    __syncthreads();
  }
  // To the next page. There is a __syncthreads() between two calls.
  __device__ void next_page(int domain) {
    ++turn;
    if (threadIdx.x < 32) queue().find(p, list(), domain, turn + 1);
  }
  // of: -1 for the page before, which next_page() keeps until its next call; 1 for the one behind.
  __device__ int number(int of = 0) const {
    return queue().page[(turn + of) & 3].name;
  }
  __device__ const std::byte* block_of(bool exact, int of = 0) const {
    return block_at(exact, queue().page[(turn + of) & 3].slot);
  }
  __device__ const std::byte* block_at(bool exact, int slot) const {
    const CacheView& c = p.cache;
    const std::uint64_t in_slot = static_cast<std::uint64_t>(p.layer * c.kv_heads + list().tile.kv_head) *
                                  (exact ? c.exact_layout : c.encoded_layout).block_bytes;
    return (exact ? c.exact : c.encoded) +
           static_cast<std::uint64_t>(slot) * (exact ? c.exact_slot_bytes : c.encoded_slot_bytes) + in_slot;
  }

  // The factors of a turn's page.
  __device__ std::byte* factors_of(int at) const {
    return shared + S::kFactorsAt + at % S::kFactorPlaces * 2 * S::kFactors;
  }

  __device__ __forceinline__ void encoded_pages() {
    const codec::PageLayout& layout = p.cache.encoded_layout;
    std::byte* key_codes = shared + S::kCodesAt + (codec::is_centred(layout) ? S::kMoreIfCentred : 0);
    std::byte* value_codes = key_codes + (S::kTwoTiles ? S::code_bytes(layout.k.format) : 0);
    std::byte* const factors = factors_of(0);
    const auto* key_factors = reinterpret_cast<const float*>(factors);
    const auto* value_factors = reinterpret_cast<const float*>(factors + S::kFactors);
    [[maybe_unused]] const bool waits = !S::kTwoTiles && !lie_alike(layout.k.format, layout.v.format);
    Scales<S> scales;
    const auto ask = [&] {
      if (number() < 0) return;
      const std::byte* block = block_of(false);
      ask_for_codes<S, false>(layout.k, block, key_codes);
      if constexpr (S::kTwoTiles) ask_for_codes<S, true>(layout.v, block, value_codes);
      ptx::copy_commit();
      scales.load(layout, block);
    };
    begin_pages(core::kEncoded);
    if (number() < 0) return;
    unit = 1e-30f;
    ask();
    if constexpr (!S::kTwoTiles) scales.store(layout, factors);
#pragma unroll 1
    while (number() >= 0) {
      float s[S::kSixteens][kPageTokens / S::kSplit / 2];
      std::uint32_t w[S::kSixteens][kPageTokens / 16][4];
      ptx::copy_wait<0>();
      __syncthreads();  // all products of the page before are done
      if (codec::is_centred(layout) && queue().page[turn & 3].starts != 0) find_centres();
      unpack_codes<S, false>(layout.k.format, shared, factors, key_codes, shared + S::kKeysAt);
      if constexpr (S::kTwoTiles) {
        unpack_codes<S, true>(layout.v.format, shared, factors, value_codes, shared + S::kValuesAt);
        scales.store(layout, factors);
        next_page(core::kEncoded);
      } else {
        if (waits) __syncthreads();
        ask_for_codes<S, true>(layout.v, block_of(false), value_codes);
        ptx::copy_commit();
      }
      __syncthreads();
      if constexpr (S::kTwoTiles) ask();
      scores<false, kPageTokens>(shared + S::kKeysAt, s);
      soften<false, true, kPageTokens>(s, number(S::kTwoTiles ? -1 : 0), 0, key_factors, value_factors, w);
      if constexpr (!S::kTwoTiles) {
        ptx::copy_wait<0>();
        __syncthreads();  // all products with the keys are done
        unpack_codes<S, true>(layout.v.format, shared, factors, value_codes, shared + S::kValuesAt);
        next_page(core::kEncoded);
        if (waits) __syncthreads();
        ask();
        __syncthreads();
      }
      add_values<false, kPageTokens, false>(shared + S::kValuesAt, w);
      if constexpr (!S::kTwoTiles) {
        if (number() >= 0) scales.store(layout, factors);
      }
    }
    to_given_basis();
  }

  // The same by halves of pages, whose keys and values have a tile each.
  __device__ __forceinline__ void encoded_halves() {
    const codec::PageLayout& layout = p.cache.encoded_layout;
    std::byte* codes = shared + S::kCodesAt;
    int half = 0;
    const auto ask = [&]<bool kValues>() {
      ask_for_codes<S, kValues>(kValues ? layout.v : layout.k, block_of(false), codes, half);
      ptx::copy_commit();
    };
    begin_pages(core::kEncoded);
    if (number() < 0) return;
    unit = 1e-30f;
    ask.template operator()<false>();
    Scales<S> scales;
    scales.load(layout, block_of(false));
    scales.store(layout, factors_of(turn));
    __syncthreads();
#pragma unroll 1
    while (number() >= 0) {
      float s[S::kSixteens][S::kKeys / S::kSplit / 2];
      std::uint32_t w[S::kSixteens][S::kKeys / 16][4];
      const std::byte* factors = factors_of(turn);
      if (half == 0 && codec::is_centred(layout) && queue().page[turn & 3].starts != 0) find_centres();
      ptx::copy_wait<0>();
      unpack_codes<S, false>(layout.k.format, shared, factors, codes, shared + S::kKeysAt, half);
      __syncthreads();  // the keys are unpacked, and all products with the values before are done
      ask.template operator()<true>();
      const bool before_next = half == 0 && number(1) >= 0;
      if (before_next) scales.load(layout, block_of(false, 1));
      scores<false, S::kKeys>(shared + S::kKeysAt, s);
      soften<false, true, S::kKeys>(s, number(), half * S::kKeys, reinterpret_cast<const float*>(factors),
                                    reinterpret_cast<const float*>(factors + S::kFactors), w);
      ptx::copy_wait<0>();
      unpack_codes<S, true>(layout.v.format, shared, factors, codes, shared + S::kValuesAt, half);
      if (before_next) scales.store(layout, factors_of(turn + 1));
      if (half != 0) next_page(core::kEncoded);
      half ^= 1;
      __syncthreads();  // the values are unpacked, and all products with the keys are done
      if (number() >= 0) ask.template operator()<false>();
      add_values<false, S::kKeys, false>(shared + S::kValuesAt, w);
    }
    to_given_basis();
  }

  // From sums over encoded values to sums over values as they were.
  __device__ __forceinline__ void to_given_basis() {
    float factor = unit;
    if (codec::is_tq(p.cache.encoded_layout.v.format)) {
      if constexpr (S::kSplit == 1) {
#pragma unroll
        for (int i = 0; i < S::kSixteens; ++i) {
          hadamard<D, true>(o[i]);
          flip_signs<D>(o[i]);
        }
      } else {
        // Each part for itself; then sums and differences of two, which the other warp's same lane has.
        static_assert(codec::rotation_shape(D).sylvester == D);
        constexpr int kAtOnce = 16;
        hadamard<S::kColumns, true>(o[0]);
        const int warp = static_cast<int>(threadIdx.x) / 32;
        auto* between = reinterpret_cast<float*>(shared + S::kTilesAt);
        __syncthreads();  // all products are done
#pragma unroll
        for (int bit = 1; bit < S::kSplit; bit *= 2) {
          factor *= 0.70710678118654752f;
          const int other = warp_of(part() ^ bit);
#pragma unroll
          for (int from = 0; from < kSums; from += kAtOnce) {
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) between[(warp * kAtOnce + n) * 32 + lane] = o[0][from + n];
            rows_sync();
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
              const float x = between[(other * kAtOnce + n) * 32 + lane];
              o[0][from + n] = (part() & bit) == 0 ? o[0][from + n] + x : x - o[0][from + n];
            }
            rows_sync();
          }
        }
        [&]<int... kParts>(std::integer_sequence<int, kParts...>) {
          ((part() == kParts ? flip_signs<S::kColumns, kParts * S::kColumns>(o[0]) : void()), ...);
        }
        (std::make_integer_sequence<int, S::kSplit>());
      }
    }
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) o[i][n] *= factor;
    }
  }

  // Pages of dense rows, kDenseKeys at once.
  template <bool kBf16>
  __device__ __forceinline__ void dense_pages(int domain) {
    constexpr int kKeys = S::kDenseKeys, kParts = kPageTokens / kKeys, kMine = kKeys / S::kSplit;
    const bool exact = domain == core::kExact;
    const codec::PageLayout& layout = exact ? p.cache.exact_layout : p.cache.encoded_layout;
    int of_page = 0;  // which part of the page
    const auto copy = [&](bool values, int at) {
      const std::uint32_t to = ptx::shared_address(shared + at);
      const int thread = ptx::thread_here();
      const auto pieces = [&](const auto& row_of) {
#pragma unroll
        for (int i = 0; i < kKeys * D / 8 / S::kThreads; ++i) {
          const int piece = i * S::kThreads + thread, token = piece / (D / 8), c = piece % (D / 8);
          ptx::copy16<0, 0>(to + static_cast<std::uint32_t>(place_by_token<D, kKeys>(token, c)),
                            row_of(piece, token, c));
        }
      };
      if (PageName::is_fresh(number())) {
        const DenseRows rows = fresh_rows(p, list().tile, PageName::page(number()), values);
        // The caller's rows may be shorter than D. Their first piece stands for what is not theirs: queries are zeros
        // there, and sums are not stored.
        pieces([&](int, int token, int c) {
          return rows.of(of_page * kKeys + token) + (8 * c < p.head_dim ? 16 * c : 0);
        });
      } else {
        const std::byte* from =
            block_of(exact) + (values ? layout.v : layout.k).plane_offset[0] + of_page * (kKeys * D * 2);
        pieces([&](int piece, int, int) { return from + 16 * piece; });
      }
      ptx::copy_commit();
    };
    begin_pages(domain);
    if (number() < 0) return;
    copy(false, S::kKeysAt);
#pragma unroll 1
    while (number() >= 0) {
      float s[S::kSixteens][kMine / 2];
      std::uint32_t w[S::kSixteens][kKeys / 16][4];
      ptx::copy_wait<0>();
      __syncthreads();  // the keys have come, and all products with the values before are done
      copy(true, S::kDenseValuesAt);
      scores<kBf16, kKeys>(shared + S::kKeysAt, s);
      ptx::copy_wait<0>();
      __syncthreads();  // the values have come, and all products with the keys are done
      soften<kBf16, false, kKeys>(s, number(), of_page * kKeys, nullptr, nullptr, w);
      if (kParts == 1 || ++of_page == kParts) {
        of_page = 0;
        next_page(domain);
      }
      if (number() >= 0) copy(false, S::kKeysAt);
      add_values<kBf16, kKeys, true>(shared + S::kDenseValuesAt, w);
    }
  }

  // --- a tile ---

  template <bool kRotated>
  __device__ __forceinline__ void load(bool bf16) {
    __syncthreads();  // nobody reads the old queries or tiles any more
    load_queries<S, kRotated>(p, list().tile, shared, bf16, reinterpret_cast<float*>(shared + S::kScratchAt));
    __syncthreads();
    if constexpr (S::kShares > 1) {
      hold_queries();
      __syncthreads();
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
      m[i][0] = m[i][1] = kNone, l[i][0] = l[i][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < kSums; ++n) o[i][n] = 0.0f;
    }
  }
  __device__ __forceinline__ void attend() {
    const Format keys = p.cache.encoded_layout.k.format;
    bool bf16 = keys == Format::bf16;
    int domain = core::kEncoded;
    if (codec::is_dense(keys)) {
      load<false>(bf16);
      clear();
    } else {
      if (codec::is_tq(keys)) {
        load<true>(false);
      } else {
        load<false>(false);
      }
      clear();
      if constexpr (S::kSmall) {
        encoded_halves();
      } else {
        encoded_pages();
      }
      bf16 = p.cache.exact_layout.k.format == Format::bf16;
      domain = core::kExact;
      load<false>(bf16);
    }
    if (bf16) {
      dense_pages<true>(domain);
    } else {
      dense_pages<false>(domain);
    }
    finish();
  }

  __device__ __forceinline__ void finish() {
    float sum[S::kSixteens][2];
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[i][h] = sum_of_row(l[i][h]);
    }
    if constexpr (S::kSplit > 1) {
      auto* sums = reinterpret_cast<float*>(shared + S::kTopsAt);
      rows_sync();  // all have read the old scores
      if (t() == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) sums[part() * S::kRows + first_row() + g() + 8 * h] = sum[0][h];
      }
      rows_sync();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[0][h] = 0.0f;  // in the same order for all
#pragma unroll
        for (int of = 0; of < S::kSplit; ++of) sum[0][h] += sums[of * S::kRows + first_row() + g() + 8 * h];
      }
    }
    const Tile& tile = list().tile;
#pragma unroll
    for (int i = 0; i < S::kSixteens; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowPlace row = place(i, h);
        const float factor = to_log2(i, h);
        const RowEnd end = end_row(p, row.head, m[i][h], sum[i][h], factor != factor);
        if (tile.row_block * S::kRows + first_row() + 16 * i + g() + 8 * h >= tile.rows) continue;
        const std::int64_t token = tile.batch.query_begin + row.query;
        if (p.lse != nullptr && t() == 0 && part() == 0) p.lse[token * p.q_heads + row.head] = end.lse;
        const int column = part() * S::kColumns + 2 * t();
        store_row(p, token * p.out.token_stride + row.head * p.out.head_stride + column, p.head_dim - column, h, end,
                  o[i]);
      }
    }
  }
};

}  // namespace kvant::cuda::prefill::sm80
