// Codes and scales of a vector in its basis (codec/tq.hpp, codec/vector.hpp), by the threads that share it.
//
// tq3 to tq6: one look-up a value of eight costs, which are 16 bits each and added two in a register; then the exact
// try. Formats with more than two magnitudes look levels up as well. Tables lie in shared memory, once for steps of a
// few tokens, else with every entry so often that the threads of a warp never meet in a bank.
#pragma once

#include "cuda/append/encode.cuh"
#include "cuda/tile/pack.cuh"

namespace kvant::cuda {

// --- tables ----------------------------------------------------------------------------------------------------------

constexpr std::uint32_t kMagicBits = 0x4B000000u;  // 2^23: float sums with it end in an integer

// Levels by n, the least integer that is not below v = 2 |z|: thresholds are halves of integers. An entry: the code but
// for its sign in the top bits (from bit 30 on where the sign's plane is the code's, else from bit 31); 2 e as a float,
// e = 2 c, without its topmost set bit and cut after 16 bits; (e^2 - 1) / 8.
template <Format kFormat>
struct LevelTable {
  static constexpr codec::TqSpec kSpec = codec::tq_spec(kFormat);
  static constexpr bool kUsed = kSpec.magnitudes > 2;
  static constexpr int kMagnitudeBits = codec::format_bits(kFormat) - 1;
  static constexpr bool kOnePlane = kMagnitudeBits == 3;
  static constexpr std::uint32_t kLevelMask = 0x07FF0000u, kTopBit = 0x40000000u;
  static constexpr int kWithin =
      !kUsed ? 0 : static_cast<int>(2.0f / kSpec.spread[0]) + 2;  // v of the search's own steps stays below
  static constexpr bool kClamped = kWithin > 160;
  static constexpr int kEntries = !kUsed     ? 0
                                  : kClamped ? static_cast<int>(2 * kSpec.threshold[kSpec.magnitudes - 2]) + 2
                                             : kWithin;
  std::uint32_t entry[kUsed ? kEntries : 1];

  static consteval LevelTable make() {
    LevelTable table{};
    for (int n = 0; n < kEntries; ++n) {
      int m = 0;
      while (m + 1 < kSpec.magnitudes && static_cast<float>(n) * 0.5f > kSpec.threshold[m]) ++m;
      const int e = 2 * kSpec.u[m] - 127;
      const std::uint32_t bits = base::bit_cast<std::uint32_t>(static_cast<float>(2 * e));
      const int shift = (kOnePlane ? 31 : 32) - kMagnitudeBits;
      if ((bits & ~(kLevelMask | kTopBit)) != 0 || (kLevelMask >> shift) != 0) throw "fields of an entry meet";
      table.entry[n] =
          static_cast<std::uint32_t>(m) << shift | (bits & kLevelMask) | static_cast<std::uint32_t>((e * e - 1) / 8);
    }
    return table;
  }
};

template <Format kFormat>
__device__ const auto kLevels = LevelTable<kFormat>::make();
template <Format kFormat>
__device__ const auto kCosts = codec::cost_table<kFormat>;

// Spreads, and from word 8 on what Tables::spread(8) is.
template <Format kFormat>
struct SpreadTable {
  std::uint32_t word[12];
  static consteval SpreadTable make() {
    constexpr codec::TqSpec kSpec = codec::tq_spec(kFormat);
    SpreadTable table{};
    for (int k = 0; k < kSpec.candidates; ++k) table.word[k] = base::bit_cast<std::uint32_t>(kSpec.spread[k]);
    table.word[8] = LevelTable<kFormat>::kTopBit;
    return table;
  }
};
template <Format kFormat>
__device__ const auto kSpreads = SpreadTable<kFormat>::make();

// A format's tables in global memory.
struct TableSource {
  const uint4* costs;
  int cells;
  const std::uint32_t* levels;
  int entries;
  const std::uint32_t* spreads;
  int spread_words;
};
// Tables to where Tables<.., kCopies> looks them up, by a block.
template <int kThreads, bool kCopies>
__device__ __forceinline__ void fill_tables(const TableSource& from, std::byte* shared) {
  const auto thread = static_cast<int>(threadIdx.x);
  auto* to = reinterpret_cast<uint4*>(shared);
  const int level_pieces = kCopies ? 8 * from.entries : (from.entries + 3) / 4;
  auto* levels = reinterpret_cast<std::uint32_t*>(to + (kCopies ? 8 : 1) * from.cells);
  // All copies of what a thread loaded, neighbours in other banks.
  const auto put = [&](int i, uint4 x) {
    if (!kCopies) to[i] = x;
#pragma unroll
    for (int copy = 0; kCopies && copy < 8; ++copy) to[i * 8 + (copy + i) % 8] = x;
  };
#pragma unroll(kCopies ? 1 : 4)
  for (int i = thread; i < from.cells; i += kThreads) put(i, from.costs[i]);
#pragma unroll(kCopies ? 1 : 4)
  for (int i = thread; i < from.entries; i += kThreads) {
    const std::uint32_t x = from.levels[i];
    if (kCopies) put(from.cells + i, make_uint4(x, x, x, x));
    if (!kCopies) levels[i] = x;
  }
  if (thread < from.spread_words) levels[4 * level_pieces + thread] = from.spreads[thread];
}

// Places of the tables: costs, levels, spreads, and LevelTable::kTopBit. kCopies: every entry so often that a warp's
// threads never meet in a bank.
template <Format kFormat, bool kCopies>
struct Tables {
  static constexpr codec::TqSpec kSpec = codec::tq_spec(kFormat);  // fp8: all 0
  static constexpr int kCells = kSpec.cells;
  static constexpr int kEntries = LevelTable<kFormat>::kEntries;
  static constexpr int kCostStride = kCopies ? 128 : 16, kLevelStride = kCopies ? 128 : 4;
  static constexpr int kLevelsAt = kCells * kCostStride;
  static constexpr int kSpreadsAt = kLevelsAt + (kEntries * kLevelStride + 15) / 16 * 16;
  static constexpr int kBytes = kSpreadsAt + (codec::is_tq(kFormat) ? 48 : 0);

  // Offsets of shared memory that this thread looks up at, less what kMagicBits adds.
  std::uint32_t costs, levels, spreads;

  __device__ __forceinline__ explicit Tables(std::uint32_t base) {
    const std::uint32_t lane = kCopies ? threadIdx.x % 32 : 0;
    costs = base + lane % 8 * 16 - kMagicBits * kCostStride;
    levels = base + kLevelsAt + lane * 4 - kMagicBits * kLevelStride;
    spreads = base + kSpreadsAt;
    // Hides where these came from: the compiler would take kMagicBits off every index instead.
    asm("" : "+r"(costs));
    asm("" : "+r"(levels));
  }

  static __device__ __forceinline__ TableSource source() {
    TableSource of{};
    if constexpr (kCells > 0) of.costs = reinterpret_cast<const uint4*>(kCosts<kFormat>.cost), of.cells = kCells;
    if constexpr (kEntries > 0) of.levels = kLevels<kFormat>.entry, of.entries = kEntries;
    if constexpr (codec::is_tq(kFormat)) of.spreads = kSpreads<kFormat>.word, of.spread_words = 12;
    return of;
  }

  __device__ __forceinline__ uint4 cost(float cell) const {  // 2^23 + the cell
    uint4 x;
    asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"  // PTX ISA, "ld"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "r"(__float_as_uint(cell) * kCostStride + costs));
    return x;
  }
  __device__ __forceinline__ std::uint32_t level(float n) const {
    std::uint32_t x;
    asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(__float_as_uint(n) * kLevelStride + levels));
    return x;
  }
  __device__ __forceinline__ float spread(int k) const {
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(spreads + static_cast<std::uint32_t>(k) * 4));
    return x;
  }
};

template <bool kCopies>
__host__ __device__ constexpr int table_bytes(Format format) {
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                \
  case Format::name: {                            \
    return Tables<Format::name, kCopies>::kBytes; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return 0;
  }
}

// --- tries -----------------------------------------------------------------------------------------------------------

// codec::detail::judge.
template <Format kFormat, int kThreads, int kElements, class T>
__device__ __forceinline__ int judge(const float* y, int t, float anchor, const T& tables) {
  static_assert(kElements * codec::kMostCost <= 0xFFFF);
  const float per_cell = __fdiv_rn(static_cast<float>(T::kCells - 1), anchor);
  const auto cost_of = [&](float x) { return tables.cost(__fadd_rn(__fmul_rn(fabsf(x), per_cell), 0x1p23f)); };
  uint4 sums = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int k = 0; k < kElements; k += 2) {
    const uint4 a = cost_of(y[k]), b = cost_of(y[k + 1]);
    sums.x += a.x + b.x;
    sums.y += a.y + b.y;
    sums.z += a.z + b.z;
    sums.w += a.w + b.w;
  }
  // Partners share the spreads: odd threads go on with the last four.
  const bool odd = t % 2 != 0;
  const std::uint32_t kept[2] = {odd ? sums.z : sums.x, odd ? sums.w : sums.y};
  const std::uint32_t given[2] = {odd ? sums.x : sums.z, odd ? sums.y : sums.w};
  std::uint32_t best = ~0u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t other = exchange(given[i], 1);
    std::uint32_t pair[2] = {(kept[i] & 0xFFFFu) + (other & 0xFFFFu), (kept[i] >> 16) + (other >> 16)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 2; h < kThreads; h *= 2) pair[j] += exchange(pair[j], h);
      best = min(best, pair[j] * 8 + static_cast<std::uint32_t>(2 * i + j + (odd ? 4 : 0)));
    }
  }
  return static_cast<int>(min(best, exchange(best, 1)) & 7);
}

struct Fit {
  float score = 0.0f, r = 0.0f, g = 0.0f;
  bool overflow = false;
};

__device__ __forceinline__ Fit make_fit(float p, float q, float r) {
  Fit fit;
  fit.r = r;
  const float g = __fdiv_rn(__fadd_rn(p, p), q);
  fit.overflow = g >= 65520.0f;
  fit.g = fit.overflow ? 65504.0f : __half2float(__float2half_rn(g));
  fit.score = __fmul_rn(fit.g, __fsub_rn(p, __fmul_rn(fit.g, __fmul_rn(q, 0.25f))));
  return fit;
}

// 2^23 plus the code of z (codec::detail::uniform_code), for z that is not NaN.
__device__ __forceinline__ float uniform_code(float z, float offset) {
  return __fadd_rd(__fadd_rn(fminf(fmaxf(z, -offset), offset), offset + 0.5f), 0x1p23f);
}

// One try, and the codes in the top bits of top[k] where kTops.
template <Format kFormat, int kThreads, int kElements, bool kTops>
__device__ __forceinline__ Fit try_step(const float* y, float r, std::uint32_t* top) {
  constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  constexpr int kSums = 32 / kThreads;
  float sums[kSums], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    float e;
    if constexpr (kSpec.uniform) {
      const float code = uniform_code(__fmul_rn(y[k], r), kSpec.offset);
      e = __fmaf_rn(__fadd_rn(code, -0x1p23f), 2.0f, -2.0f * kSpec.offset);
      if (kTops) top[k] = __float_as_uint(code) << (32 - kSpec.bits);
    } else {
      static_assert(kSpec.magnitudes == 2);
      const float z = __fmul_rn(y[k], r);
      const bool outer = fabsf(z) > kSpec.threshold[0];
      e = copysignf(outer ? static_cast<float>(2 * kSpec.u[1] - 127) : static_cast<float>(2 * kSpec.u[0] - 127), z);
      if (kTops) top[k] = (z < 0.0f ? 0x80000000u : 0u) | (outer ? 0x40000000u : 0u);
    }
    const float product = __fmul_rn(y[k], e);
    sums[k % kSums] = k < kSums ? product : __fadd_rn(sums[k % kSums], product);
    squares = __fmaf_rn(e, e, squares);  // integers below 2^24
  }
  const float p = fold<kThreads>(sums);
#pragma unroll
  for (int h = 1; h < kThreads; h *= 2) squares = __fadd_rn(squares, exchange(squares, h));
  return make_fit(p, squares, r);
}

// tq2 and tq8: every spread, and once more at the step that came out.
template <Format kFormat, int kThreads, int kElements, class T>
__device__ __forceinline__ Fit search(const float* y, float anchor, const T& tables) {
  Fit best;
  const auto take = [&](float r) {
    const Fit fit = try_step<kFormat, kThreads, kElements, false>(y, r, nullptr);
    if (fit.score > best.score) best = fit;
  };
#pragma unroll 1
  for (int k = 0; k <= T::kSpec.candidates; ++k) {
    const bool again = k == T::kSpec.candidates;
    const Fit before = best;
    take(again ? __frcp_rn(best.g) : __frcp_rn(__fmul_rn(anchor, tables.spread(k))));
    if (again && !(before.score > 0.0f)) best = before;
  }
  return best;
}

// --- a vector --------------------------------------------------------------------------------------------------------

// The planes of a format and the words of a thread in them: low bits first.
template <Format kFormat, class Shape>
struct Planes {
  static constexpr int kLow = codec::plane_bits(kFormat, 0), kHigh = codec::plane_bits(kFormat, 1);
  using Low = Fields<Shape::kThreads, Shape::kElements, kLow>;
  using High = Fields<Shape::kThreads, Shape::kElements, kHigh == 0 ? 32 : kHigh>;
  static constexpr int kWords = Low::kWords + (kHigh == 0 ? 0 : High::kWords);
};

// Formats that look levels up: the spread judged best, its try, and the codes in words.
template <Format kFormat, class Shape, class T>
__device__ __forceinline__ Fit encode_levels(const float* y, int t, float anchor, const T& tables, std::uint32_t* low,
                                             std::uint32_t* high) {
  using P = Planes<kFormat, Shape>;
  using Levels = LevelTable<kFormat>;
  constexpr int kThreads = Shape::kThreads, kElements = Shape::kElements;
  constexpr int kSums = 32 / kThreads, kChunk = P::Low::kOfWord;
  const int k_best = judge<kFormat, kThreads, kElements>(y, t, anchor, tables);
  const float r = __frcp_rn(__fmul_rn(anchor, tables.spread(k_best)));
  const float twice = 2.0f * r;
  // Loaded, so that one lop3 with one immediate sets it and masks.
  const std::uint32_t top_bit = __float_as_uint(tables.spread(8));
  float sums[kSums];
  std::uint32_t squares[(kElements + 31) / 32] = {};  // 32 of them fit the low 16 bits of entries' sums
#pragma unroll
  for (int w = 0; w < P::Low::kWords; ++w) {
    std::uint32_t entry[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      entry[j] = 0;
      if (w * kChunk + j >= kElements) continue;
      float v = __fmul_rn(fabsf(y[w * kChunk + j]), twice);
      if constexpr (Levels::kClamped) v = fminf(v, static_cast<float>(Levels::kEntries - 1));
      entry[j] = tables.level(__fadd_ru(v, 0x1p23f));
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const int k = w * kChunk + j;
      if (k >= kElements) continue;
      const float twice_e = __uint_as_float((entry[j] & Levels::kLevelMask) | top_bit);
      const float product = __fmul_rn(fabsf(y[k]), twice_e);
      sums[k % kSums] = k < kSums ? product : __fadd_rn(sums[k % kSums], product);
      if (j % 2 == 1) squares[k / 32] += entry[j - 1] + entry[j];
    }
    pack_words<typename P::Low, P::kLow, kElements>(low, w, w + 1, [&](int k) {
      const std::uint32_t x = entry[k - w * kChunk];
      return Levels::kOnePlane ? x | (__float_as_uint(y[k]) & 0x80000000u) : x;
    });
  }
  if constexpr (P::kHigh != 0) {
    pack_words<typename P::High, P::kHigh, kElements>(high, 0, P::High::kWords,
                                                      [&](int k) { return __float_as_uint(y[k]); });
  }
  std::uint32_t eighths = 0;
#pragma unroll
  for (const std::uint32_t s : squares) eighths += s & 0xFFFFu;
  const std::uint32_t q = 8 * sum_between<kThreads>(eighths) + Shape::kD;
  return make_fit(0.5f * fold<kThreads>(sums), static_cast<float>(q), r);
}

// An e4m3 vector: codes in words, and its scale.
template <class Shape, class P>
__device__ __forceinline__ void encode_fp8(const float (&y)[Shape::kElements], float largest, bool refused,
                                           std::uint32_t (&words)[P::kWords], std::uint16_t& scale) {
  std::uint16_t half = base::f32_to_f16(__fdiv_rn(largest, 448.0f));
  if (__fmul_rn(base::f16_to_f32(half), 448.0f) < largest) ++half;
  refused = refused || half >= 0x7C00u;
  scale = refused ? codec::kPoisonedScale : half;
  const bool zero = refused || half == 0;
  const float r = zero ? 0.0f : __frcp_rn(base::f16_to_f32(half));
  pack_words<typename P::Low, 8, Shape::kElements>(words, 0, P::Low::kWords, [&](int k) {
    return zero ? 0u : static_cast<std::uint32_t>(base::f32_to_e4m3(__fmul_rn(y[k], r))) << 24;
  });
}

// The magnitude that steps of a group of elements are relative to.
template <class Shape, bool kPeak, int kElements>
__device__ __forceinline__ float anchor_of(const float* part, float largest) {
  constexpr int kThreads = Shape::kThreads;
  if constexpr (!kPeak) {
    float sums[Shape::kSums];
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const float square = __fmul_rn(part[k], part[k]);
      sums[k % Shape::kSums] = k < Shape::kSums ? square : __fadd_rn(sums[k % Shape::kSums], square);
    }
    return __fsqrt_rn(__fdiv_rn(fold<kThreads>(sums), static_cast<float>(kElements * kThreads)));
  } else if constexpr (kElements == Shape::kElements) {
    return largest;
  } else {
    return most_between<kThreads>(largest_magnitude<kElements>(part));
  }
}

__device__ __forceinline__ std::uint16_t stored_scale(bool refused, bool zero, float scale) {
  if (refused) return codec::kPoisonedScale;
  return zero ? std::uint16_t{0} : __half_as_ushort(__float2half_rn(scale));
}

// Codes of zeros, for group g of kGroups.
template <class P, int kGroups>
__device__ __forceinline__ void put_zero_codes(std::uint32_t (&words)[P::kWords], std::uint32_t code, int g) {
  constexpr int kLowWords = P::Low::kWords / kGroups;
#pragma unroll
  for (int i = 0; i < kLowWords; ++i) words[g * kLowWords + i] = (code & P::Low::kField) * (~0u / P::Low::kField);
  if constexpr (P::kHigh != 0) {
    std::uint32_t* high_words = words + P::Low::kWords;
#pragma unroll
    for (int i = 0; i < P::High::kWords / kGroups; ++i) {
      high_words[g * (P::High::kWords / kGroups) + i] = (code >> P::kLow) * (~0u / P::High::kField);
    }
  }
}

// Codes in words, and all the vector's scales. `largest`: magnitude of this thread's elements, as bits, or NaN for a
// vector that cannot be stored.
template <Format kFormat, class Shape, int kGroups = kScaleGroups<kFormat, Shape::kD>, class T>
__device__ __forceinline__ void encode_vector(float (&y)[Shape::kElements], int t, float largest, const T& tables,
                                              std::uint32_t (&words)[Planes<kFormat, Shape>::kWords],
                                              std::uint16_t (&scales)[kGroups]) {
  using P = Planes<kFormat, Shape>;
  constexpr int kThreads = Shape::kThreads;
  constexpr int kElements = Shape::kElements / kGroups;
  constexpr int kLowWords = P::Low::kWords / kGroups;  // words of a group
  std::uint32_t* high_words = words + P::Low::kWords;
  bool refused = !(largest < 0x1p32f);
  if (refused) {  // its values are not used; zeros keep the arithmetic in range
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = 0.0f;
    largest = 0.0f;
  }
  if constexpr (codec::is_fp8(kFormat)) {
    encode_fp8<Shape, P>(y, largest, refused, words, scales[0]);
  } else {
    constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
    Fit fits[kGroups];
    bool zeros[kGroups];
    // Where groups meet in a word, words are made of all of them.
    constexpr bool kMeet =
        kGroups > 1 && (kElements % P::Low::kOfWord != 0 || (P::kHigh != 0 && kElements % P::High::kOfWord != 0));
    std::uint32_t tops[kMeet ? Shape::kElements : kElements];
    const auto pack = [](const std::uint32_t* top, std::uint32_t* low, std::uint32_t* high) {
      constexpr int kCount = kMeet ? Shape::kElements : kElements;
      pack_words<typename P::Low, P::kLow, kCount>(low, 0, (kCount + P::Low::kOfWord - 1) / P::Low::kOfWord,
                                                   [&](int k) { return top[k] << P::kHigh; });
      if constexpr (P::kHigh != 0) {
        pack_words<typename P::High, P::kHigh, kCount>(high, 0, (kCount + P::High::kOfWord - 1) / P::High::kOfWord,
                                                       [&](int k) { return top[k]; });
      }
    };
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* part = y + g * kElements;
      std::uint32_t* low = words + g * kLowWords;
      float anchor = anchor_of<Shape, kSpec.peak_anchor, kElements>(part, largest);
      const bool zero = !(anchor >= 0x1p-40f);
      if (zero) anchor = 1.0f;
      if constexpr (LevelTable<kFormat>::kUsed) {
        fits[g] = encode_levels<kFormat, Shape>(part, t, anchor, tables, low, high_words);
      } else {
        std::uint32_t* top = tops + (kMeet ? g * kElements : 0);
        if constexpr (kSpec.cells > 0) {
          const int k = judge<kFormat, kThreads, kElements>(part, t, anchor, tables);
          const float r = __frcp_rn(__fmul_rn(anchor, tables.spread(k)));
          fits[g] = try_step<kFormat, kThreads, kElements, true>(part, r, top);
        } else {
          fits[g] = search<kFormat, kThreads, kElements>(part, anchor, tables);
          (void)try_step<kFormat, kThreads, kElements, true>(part, fits[g].r, top);
        }
        if constexpr (!kMeet) pack(top, low, high_words + g * (P::High::kWords / kGroups));
      }
      zeros[g] = zero || !(fits[g].score > 0.0f);
      refused = refused || (!zeros[g] && fits[g].overflow);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool zero = refused || zeros[g];
      scales[g] = stored_scale(refused, zero, fits[g].g);
      if (!zero) continue;
      constexpr std::uint32_t kCode = codec::tq_zero_code(kSpec);
      if constexpr (kMeet) {
#pragma unroll
        for (int k = 0; k < kElements; ++k) tops[g * kElements + k] = kCode << (32 - kSpec.bits);
      } else {
        put_zero_codes<P, kGroups>(words, kCode, g);
      }
    }
    if constexpr (kMeet) pack(tops, words, high_words);
  }
}

}  // namespace kvant::cuda
