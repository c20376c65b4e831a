// A warp's part of a tile: encoded pages by 8-bit products, everything else as prefill_sm80 does it.
//
// A row's weights are relative to the largest of a page, in which the values' scales are: with z = score + log2(scale),
// a weight is 255 ex2(z - largest z), rounded to a byte. The row's sum of weights gets the same over the scale, before
// it is rounded. A scale of 0 counts as 2^-64 for that: its token has a weight, and adds next to nothing.
#pragma once

#include "cuda/prefill_int8/queries.cuh"
#include "cuda/prefill_sm80/attend.cuh"

namespace kvant::cuda::prefill::int8 {

inline constexpr float kLogOfZero = -64.0f;

template <int D>
struct Attend : sm80::Attend<Shape<D>> {
  using S = Shape<D>;
  using Base = sm80::Attend<S>;
  using Base::p, Base::shared, Base::m, Base::l, Base::o, Base::first_row, Base::list, Base::is_plain, Base::to_log2,
      Base::g, Base::t;
  static constexpr int kSixteens = S::kSixteens, kGroups = S::kGroups, kSteps = D / 32, kScores = kPageTokens / 2;
  static_assert(S::kSplit == 1 && S::kCentreTile == kCentresAtOnce);

  struct Weights {
    std::uint32_t w[kSixteens][kGroups][kPageTokens / 32][4];
    float unit[kSixteens][2];  // a weight of 1 (ByteUnit)
  };

  __device__ const codec::PageLayout& layout() const { return p.cache.encoded_layout; }
  __device__ int key_groups() const { return kGroups > 1 ? layout().k.groups : 1; }
  __device__ int value_groups() const { return kGroups > 1 ? layout().v.groups : 1; }
  __device__ bool even_odd() const { return order_of(layout().v.format) == Order::even_odd; }
  // Floats of columns, from this thread's on.
  __device__ const float* columns(int at) const {
    return reinterpret_cast<const float*>(shared + at) + 2 * (ptx::thread_here() % 4);
  }
  static __device__ __forceinline__ float2 pair(const float* columns, int n) {
    return *reinterpret_cast<const float2*>(columns + 8 * n);
  }

  // --- what a page holds ---

  __device__ __forceinline__ void load_encoded() const {
    __syncthreads();  // nobody reads the old queries or tiles any more
    load_digits<S>(p, list().tile, shared, reinterpret_cast<float*>(shared + S::kTilesAt));
    __syncthreads();
  }
  __device__ __forceinline__ void begin_encoded() {
    if (threadIdx.x < kPageTokens) reinterpret_cast<float*>(shared + S::kZerosAt)[threadIdx.x] = 0.0f;
    each_lost([](int, int, int, float& x) { x = 0.0f; });
  }

  // Minus the origin of levels times the sum of weights, of each row and scale group: `o` lacks half a level of each.
  // In shared memory, because registers are few; the first of four lanes has the row's.
  __device__ float& lost(int i, int group, int h) const {
    const int row = first_row() + 16 * i + ptx::thread_here() % 32 / 4 + 8 * h;
    return reinterpret_cast<float*>(shared + S::kLostAt)[row * kGroups + group];
  }
  template <class Change>
  __device__ __forceinline__ void each_lost(const Change& change) const {
    if (ptx::thread_here() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int h = 0; h < 2; ++h) change(i, group, h, lost(i, group, h));
      }
    }
  }

  // A vector that is not a number reaches those who see it through its key's factor; to others it is 0.
  __device__ __forceinline__ void store_scales(const sm80::Scales<S>& scales) const {
    const int thread = ptx::thread_here(), token = thread % kPageTokens, column = column_of(token, even_odd());
    if (thread >= 2 * kPageTokens) return;
    const auto scale_of = [](std::uint32_t bits) {
      return ptx::f16_to_f32(static_cast<std::uint16_t>(bits & 0x7FFFu));
    };
    float largest = 0.0f;
    bool finite = true;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float scale = scale_of(scales.own[n]);
      finite = finite && scale < __builtin_huge_valf();
      largest = fmaxf(largest, scale);
    }
    if (thread < kPageTokens) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) finite = finite && scale_of(scales.values[n]) < __builtin_huge_valf();
      auto* const factors = reinterpret_cast<float*>(shared + S::kKeyFactorsAt);
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        factors[n * kPageTokens + column] = finite ? scale_of(scales.own[n]) : __int_as_float(0x7FC00000);
      const unsigned refused = __ballot_sync(~0u, (scales.own[0] & 0x8000u) != 0);
      if (token % 32 == 0) reinterpret_cast<unsigned*>(shared + S::kRefusedAt)[token / 32] = refused;
    } else {
      const bool has_values = finite && largest > 0.0f;
      reinterpret_cast<float*>(shared + S::kLogsAt)[column] = has_values ? __log2f(largest) : kLogOfZero;
      const float inverse = has_values ? 1.0f / largest : 0x1p64f;
      reinterpret_cast<float*>(shared + S::kInversesAt)[column] = inverse;
      if constexpr (kGroups > 1) {
        auto* const ratios = reinterpret_cast<float*>(shared + S::kRatiosAt);
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          ratios[n * kPageTokens + column] = has_values ? scale_of(scales.own[n]) * inverse : 0.0f;
      }
    }
  }

  template <bool kValues>
  __device__ __forceinline__ void unpack(const std::byte* codes) const {
    std::byte* const tile = shared + (kValues ? S::kValuesAt : S::kKeysAt);
    sm80::with_format<kValues>((kValues ? layout().v : layout().k).format, [&]<Format F>() {
      if constexpr (codec::is_tq(F)) {
        [[maybe_unused]] const bool swapped = !kValues && even_odd();
        sm80::each_unit<S, kValues, F>(
            this->shared, codes, [&](int i, const Unit<F>& x, const Constants<F>& constants) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const Sixteen levels = byte_levels<F, kValues>(x, half, constants);
                if constexpr (kValues) {
                  const int octet = i % 8, channel = i / 8 * 4 + 2 * half;
#pragma unroll
                  for (int k = 0; k < 2; ++k) {
                    *reinterpret_cast<uint2*>(tile + place_of_values(channel + k, octet / 2) + octet % 2 * 8) =
                        make_uint2(levels.first[k], levels.second[k]);
                  }
                } else {
                  constexpr int kPieces = D / 32;
                  const int token = i / 8 / kPieces * 8 + i % 8, c = i / 8 % kPieces * 2 + half;
                  *reinterpret_cast<uint4*>(tile + place_of_bytes<D>(column_of(token, swapped), c)) =
                      make_uint4(levels.first[0], levels.second[0], levels.first[1], levels.second[1]);
                }
              }
            });
      }
    });
  }

  // --- scores ---

  // Adds the products of a digit with the page's keys, of elements 32 `first` .. .
  template <bool kSigned, int kCount>
  __device__ __forceinline__ void multiply(const std::byte* digits, int first, int (&sums)[kSixteens][kScores]) const {
    constexpr int kPieces = S::kBox / 16;
    const auto piece = [](std::uint32_t from, int c) {
      return (from ^ static_cast<std::uint32_t>(c % kPieces * 16)) +
             static_cast<std::uint32_t>(c / kPieces * kPageTokens * S::kBox);
    };
    const int lane = ptx::thread_here() % 32;
    std::uint32_t q[kSixteens];
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
      const int row = first_row() + 16 * i;
      q[i] =
          ptx::shared_address(digits) +
          static_cast<std::uint32_t>(row / 64 * 64 * S::kByteRow + place_of_bytes<D>(row % 64 + lane % 16, lane / 16));
    }
    const std::uint32_t k = ptx::shared_address(shared + S::kKeysAt) +
                            static_cast<std::uint32_t>(place_of_bytes<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      const int c = 2 * (first + step);
      std::uint32_t a[kSixteens][4];
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) ptx::load_matrices(a[i], piece(q[i], c));
#pragma unroll
      for (int n = 0; n < kPageTokens / 16; ++n) {
        std::uint32_t b[4];
        ptx::load_matrices(b, piece(k, c) + n * 16 * S::kBox);
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int(&to)[4] = *reinterpret_cast<int(*)[4]>(sums[i] + 8 * n + 4 * e);
            if constexpr (kSigned) {
              ptx::mma_s8_u8(to, a[i], b[2 * e], b[2 * e + 1]);
            } else {
              ptx::mma_u8_u8(to, a[i], b[2 * e], b[2 * e + 1]);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ const RowFact& fact(int i, int h, int group) const {
    const int row = first_row() + 16 * i + ptx::thread_here() % 32 / 4 + 8 * h;
    return reinterpret_cast<const RowFact*>(shared + S::kRowFactsAt)[row * kGroups + group];
  }

  // z: the scores of the page, in units of log 2 and without the page's centre, plus the floats of columns at `more`.
  __device__ __forceinline__ void scores(const float* more, float (&z)[kSixteens][kScores]) const {
    constexpr int kPart = kSteps / kGroups;
    const bool two = codec::takes_two_digits(layout().k.format, codec::is_centred(layout()));
    const std::byte* const digits =
        shared + S::digits_at(layout().k.format, layout().v.format, codec::is_centred(layout()));
    int sums[kSixteens][kScores];
#pragma unroll 1
    for (int part = 0; part < kGroups; ++part) {
      const int group = key_groups() > 1 ? part : 0;
      const bool begins = part == group, ends = part == kGroups - 1 || key_groups() > 1;
      if (begins) {
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int start = two ? 0 : fact(i, h, group).start;
#pragma unroll
            for (int n = 0; n < kScores; n += 4) sums[i][n + 2 * h] = sums[i][n + 2 * h + 1] = start;
          }
        }
      }
      multiply<true, kPart>(digits, part * kPart, sums);
      if (two && ends) {
        // The second digit of the whole group, so that sums of the first are moved up once.
        const int from = kGroups > 1 && key_groups() == 1 ? 0 : part;
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int start = fact(i, h, group).start;
#pragma unroll
            for (int n = 0; n < kScores; n += 4) {
              sums[i][n + 2 * h] = sums[i][n + 2 * h] * 256 + start;
              sums[i][n + 2 * h + 1] = sums[i][n + 2 * h + 1] * 256 + start;
            }
          }
        }
#pragma unroll 1
        for (int again = from; again <= part; ++again) multiply<false, kPart>(digits + S::kDigit, again * kPart, sums);
      }
      if (!ends) continue;
      const float* const factors = columns(S::kKeyFactorsAt + group * S::kColumns64);
      RowFact facts[kSixteens][2];
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) facts[i][0] = fact(i, 0, group), facts[i][1] = fact(i, 1, group);
      const auto add = [&](auto&& product) {
#pragma unroll
        for (int n = 0; n < kPageTokens / 8; ++n) {
          const float2 factor = pair(factors, n), before = pair(more, n);
#pragma unroll
          for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float f = j % 2 == 0 ? factor.x : factor.y;
              float& to = z[i][4 * n + j];
              const float from = group == 0 ? (j % 2 == 0 ? before.x : before.y) : to;
              to = fmaf(product(sums[i][4 * n + j], f), facts[i][j / 2].to_log2, fmaf(f, facts[i][j / 2].half, from));
            }
          }
        }
      };
      if (two) {
        add([](int sum, float f) { return static_cast<float>(sum) * f; });
      } else {  // exact: a scale has eleven bits
        add([](int sum, float f) { return fmaf(__int_as_float(sum), f, -kMagic * f); });
      }
    }
  }

  // --- softmax ---

  // From a page's keys to operands for the product with its values.
  __device__ __forceinline__ void weigh_page(int page, Weights& w) {
    const bool transforms = PageName::partly_seen(page) || !is_plain();
    const bool centred = codec::is_centred(layout());
    float z[kSixteens][kScores];
    scores(columns(transforms ? S::kZerosAt : S::kLogsAt), z);
    bool same = true;
    float alpha[kSixteens][2];
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
      float base[2] = {0.0f, 0.0f};  // to be added to z
      if (centred) with_centre(i, page, base, z[i]);
      if (transforms) transform(i, page, base, z[i]);
      weigh(i, base, z[i], alpha[i], w);
#pragma unroll
      for (int h = 0; h < 2; ++h) same = same && alpha[i][h] == 1.0f;
    }
    if (__all_sync(~0u, same) != 0) return;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
      for (int n = 0; n < D / 2; ++n) o[i][n] *= alpha[i][n / 2 % 2];
    }
    each_lost([&](int i, int, int h, float& x) { x *= alpha[i][h]; });
  }

  // All keys of a page have its centre, but for those that refuse it.
  __device__ __forceinline__ void with_centre(int i, int page, float (&base)[2], float (&z)[kScores]) const {
    const float* const of_row = this->centre_products() + 16 * i * S::kCentreRow + PageName::place(page);
    base[0] = of_row[0] * to_log2(i, 0), base[1] = of_row[8 * S::kCentreRow] * to_log2(i, 1);
    const uint2 refused = *reinterpret_cast<const uint2*>(shared + S::kRefusedAt);
    if ((refused.x | refused.y) == 0) return;
    const bool swapped = even_odd();
    const int quad = ptx::thread_here() % 4;
#pragma unroll
    for (int n = 0; n < kPageTokens / 8; ++n) {
      const unsigned bits = (n < 4 ? refused.x : refused.y) >> (token_of(n % 4, quad, swapped));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((bits >> (j % 2 * token_step(swapped)) & 1u) != 0) z[4 * n + j] -= base[j / 2];
      }
    }
  }

  // Scores may be so low or high afterwards that the logarithms of scales would be lost in them. So they are relative
  // to the page's largest one.
  __device__ __forceinline__ void transform(int i, int page, float (&base)[2], float (&z)[kScores]) const {
    const int quad = ptx::thread_here() % 4,
              row = list().tile.row_block * S::kRows + first_row() + 16 * i + ptx::thread_here() % 32 / 4;
    const bool swapped = even_odd();
    const RowPlace rows[2] = {row_place(p, list().tile, row), row_place(p, list().tile, row + 8)};
#pragma unroll
    for (int n = 0; n < kScores; ++n) z[n] += base[n / 2 % 2];
    transform_scores(
        p, list().tile, rows, page, 0, [=](int n) { return token_of(n, quad, swapped); }, token_step(swapped), z);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(largest_of_row(largest_score(z, h)), kNone);  // (NaN gives way)
      base[h] = top == kNone ? 0.0f : top;
    }
    const float* const logs = columns(S::kLogsAt);
#pragma unroll
    for (int n = 0; n < kPageTokens / 8; ++n) {
      const float2 log = pair(logs, n);
#pragma unroll
      for (int j = 0; j < 4; ++j) z[4 * n + j] = (z[4 * n + j] - base[j / 2]) + (j % 2 == 0 ? log.x : log.y);
    }
  }

  // The sums before are to be multiplied by `alpha`.
  __device__ __forceinline__ void weigh(int i, const float (&base)[2], float (&z)[kScores], float (&alpha)[2],
                                        Weights& w) {
    ByteUnit units[2];
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(largest_of_row(largest_score(z, h)), kNone);
      alpha[h] = raise_top(m[i][h], base[h], top, units[h]).alpha;
      w.unit[i][h] = units[h].unit;
    }
    weigh_rows(z, units, columns(S::kInversesAt), sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[i][h] = fmaf(l[i][h], alpha[h], w.unit[i][h] * sum[h]);
    if (kGroups == 1 || value_groups() == 1) {
      pack([&](int n) { return z[n] + kMagic; }, w.w[i][0]);
#pragma unroll
      for (int n = 1; n < kGroups; ++n) {
#pragma unroll
        for (int r = 0; r < 8; ++r) w.w[i][n][r / 4][r % 4] = w.w[i][0][r / 4][r % 4];
      }
    } else {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* const ratios = columns(S::kRatiosAt + group * S::kColumns64);
        pack([&](int n) { return fmaf(z[n], ratios[n / 4 * 8 + n % 2], kMagic); }, w.w[i][group]);
      }
    }
  }
  // The last bytes of rounded(n), the numbers of the page's columns.
  template <class Rounded>
  static __device__ __forceinline__ void pack(const Rounded& rounded, std::uint32_t (&w)[kPageTokens / 32][4]) {
#pragma unroll
    for (int r = 0; r < kPageTokens / 8; ++r) {
      const int n = 16 * (r / 4) + r % 4 / 2 * 8 + r % 2 * 2;  // half a block of 32; its row
      const auto bits = [&](int k) { return __float_as_uint(rounded(k)); };
      const std::uint32_t low = ptx::prmt(bits(n), bits(n + 1), 0x0040),
                          high = ptx::prmt(bits(n + 4), bits(n + 5), 0x0040);
      w[r / 4][r % 4] = ptx::prmt(low, high, 0x5410);
    }
  }

  // --- values ---

  __device__ __forceinline__ void add_page(const Weights& w) {
    constexpr int kOfGroup = D / 8 / kGroups;
    const int lane = ptx::thread_here() % 32, origin = level_origin(layout().v.format);
    const std::uint32_t less = static_cast<std::uint32_t>(-origin & 0xFF) * 0x01010101u;
    const std::uint32_t v =
        ptx::shared_address(shared + S::kValuesAt) + static_cast<std::uint32_t>(place_of_values(lane % 8, lane / 8));
    int start[kSixteens][kGroups][2];  // kMagic - origin * sum of weights
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        int sums[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
        ptx::mma(sums, w.w[i][n][0], less, less);
        ptx::mma(sums, w.w[i][n][1], less, less);
#pragma unroll
        for (int h = 0; h < 2; ++h) start[i][n][h] = sums[2 * h];
      }
    }
    each_lost([&](int i, int group, int h, float& x) {
      x = fmaf(w.unit[i][h], __int_as_float(start[i][group][h]) - kMagic, x);
    });
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      std::uint32_t b[4];
      ptx::load_matrices(b, v + n * 512);
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
        int sums[4];
        ptx::mma_u8_u8_from(sums, w.w[i][n / kOfGroup][0], b[0], b[1], start[i][n / kOfGroup]);
        ptx::mma_u8_u8(sums, w.w[i][n / kOfGroup][1], b[2], b[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          o[i][4 * n + j] = fmaf(w.unit[i][j / 2], __int_as_float(sums[j]) - kMagic, o[i][4 * n + j]);
      }
    }
  }

  // To sums as those over exact pages are. Weights are relative to their sum then: relative to the largest score with
  // its value's scale, those of exact pages could be beyond halves.
  __device__ __forceinline__ void end_encoded() {
    const float half = -0.5f / static_cast<float>(level_origin(layout().v.format));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = sum_of_row(l[i][h]), inverse = total > 0.0f ? 1.0f / total : 1.0f;
        if (total > 0.0f) m[i][h] += log2f(total);
        l[i][h] *= inverse;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          const float more = lost(i, n / (D / 8 / kGroups), h) * half;
          o[i][4 * n + 2 * h] = (o[i][4 * n + 2 * h] + more) * inverse;
          o[i][4 * n + 2 * h + 1] = (o[i][4 * n + 2 * h + 1] + more) * inverse;
        }
      }
    }
    this->to_given_basis(1.0f);
  }

  __device__ __forceinline__ void attend() {
    Base::attend(*this);
  }
};

}  // namespace kvant::cuda::prefill::int8
