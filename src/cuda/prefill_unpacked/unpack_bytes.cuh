// Queries and keys to bytes, for products of 8 bits (prefill/byte_keys.hpp).
#pragma once

#include "codec/digits.hpp"
#include "cuda/prefill_unpacked/unpack.cuh"

namespace kvant::cuda::prefill::unpacked {

// Where a page's keys go as bytes.
template <int D>
struct ByteTarget {
  std::byte* rows;
  float* factors;
  __device__ ByteTarget(const UnpackTo& all, std::int64_t page)
      : rows(all.keys + page * kByteKeyRows * D), factors(all.factors + page * kByteKeyRows) {}
  __device__ std::byte* row(int token) const { return rows + token * D; }
};

// Keys as bytes around their page's centre, in the basis. Levels of codes are as they are. Dense rows have a centre,
// the page's own or their mean, and a step each. So have keys that refuse their centre, and those with several scales.
// A warp has sixteen rows at a time, as the sums of a product lie (prefill/rows.cuh).
template <int D>
struct ByteUnpacker {
  const Unpacker<D>& unpacker;
  // In the place of what unpacking to halves has there.
  struct Centre {
    std::int8_t bytes[D];
    float factor;
  };
  using Numbers = float[D / 2];
  __device__ Centre& centre() const { return *reinterpret_cast<Centre*>(unpacker.shared.centre); }
  __device__ int warp() const { return unpacker.thread / 32; }
  __device__ int row_here(int h) const { return unpacker.thread % 32 / 4 + 8 * h; }  // one of sixteen
  __device__ int t() const { return unpacker.thread % 4; }

  // --- sixteen rows ---

  // Where a row lies; null: zeros.
  struct Row {
    const void* data;
    Dtype dtype;
  };
  // from(h): row row_here(h).
  template <class From>
  __device__ __forceinline__ void load(Numbers& x, int head_dim, const From& from) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row row = from(h);
      std::uint32_t bits[D / 4];
      const auto column = [&](int i) { return i / 2 * 8 + 2 * t() + i % 2; };
      const auto load_all = [&](const auto* elements) {
#pragma unroll
        for (int i = 0; i < D / 4; ++i) bits[i] = row.data != nullptr && column(i) < head_dim ? elements[column(i)] : 0;
      };
      // One branch for all loads, which are then under way together.
      if (row.dtype == Dtype::f32) {
        load_all(static_cast<const std::uint32_t*>(row.data));
      } else {
        load_all(static_cast<const std::uint16_t*>(row.data));
      }
      float y[D / 4];
      elements_of<D / 4>(bits, row.dtype, y);
#pragma unroll
      for (int i = 0; i < D / 4; ++i) x[i / 2 * 4 + 2 * h + i % 2] = y[i];
    }
  }
  __device__ __forceinline__ static void rotate(Numbers& x) {
    flip_signs<D>(x);
    hadamard<D, false>(x);
  }
  // From rows for which has(h) says so.
  template <class Has>
  __device__ __forceinline__ void subtract_centre(Numbers& x, const Has& has) const {
    const float factors[2] = {has(0) ? centre().factor : 0.0f, has(1) ? centre().factor : 0.0f};
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const char2 c = *reinterpret_cast<const char2*>(centre().bytes + 8 * j + 2 * t());
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[4 * j + 2 * h] -= __fmul_rn(static_cast<float>(c.x), factors[h]);
        x[4 * j + 2 * h + 1] -= __fmul_rn(static_cast<float>(c.y), factors[h]);
      }
    }
  }
  // As numbers of one digit (codec/digits.hpp): store(h, i, bytes) gets bytes 8 i to 8 i + 7 of row row_here(h), and
  // found(h, step) its step, which is no number if an element is not finite.
  template <class Store, class Found>
  __device__ __forceinline__ void to_digits(const Numbers& x, const Store& store, const Found& found) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.0f;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) {
        const float size = fabsf(x[i / 2 * 4 + 2 * h + i % 2]);
        largest = fmaxf(largest, size);
        finite = finite && size < __builtin_huge_valf();
      }
      const unsigned bad = __ballot_sync(~0u, !finite) >> (unpacker.thread % 32 / 4 * 4) & 15u;
      const codec::DigitStep step = codec::digit_step(largest_of_row(largest), codec::kMostOfOneDigit);
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        std::uint32_t pieces[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const pair = x + 4 * (j + i) + 2 * h;
          pieces[i] = ptx::prmt(codec::digit_of(pair[0], step.inverse), codec::digit_of(pair[1], step.inverse), 0x40);
        }
        gather_piece(pieces);
        store(h, j + t(), make_uint2(ptx::prmt(pieces[0], pieces[1], 0x5410), ptx::prmt(pieces[2], pieces[3], 0x5410)));
      }
      if (t() == 0) found(h, bad != 0 ? __int_as_float(0x7FC00000) : step.inverse > 0.0f ? step.step : 1.0f);
    }
  }
  // To the rows of a page that stores(token) says; token 16 warp + row_here(h).
  template <class Stores>
  __device__ __forceinline__ void store_keys(const Numbers& x, const ByteTarget<D>& to, const Stores& stores) const {
    const auto token = [&](int h) { return 16 * warp() + row_here(h); };
    to_digits(
        x,
        [&](int h, int i, uint2 bytes) {
          if (stores(token(h))) *reinterpret_cast<uint2*>(to.row(token(h)) + 8 * i) = bytes;
        },
        [&](int h, float step) {
          if (stores(token(h))) to.factors[token(h)] = step;
        });
  }

  // --- queries ---

  // 64 rows, by token and head.
  __device__ __forceinline__ void take_queries(const AttendParams& p, const ByteQueries& to, int first,
                                               int count) const {
    first += 16 * warp();
    if (first >= count) return;
    const int element = p.q.dtype == Dtype::f32 ? 4 : 2;
    const auto row = [&](int h) { return first + row_here(h); };
    Numbers x;
    load(x, p.head_dim, [&](int h) {
      const int token = row(h) / p.q_heads, head = row(h) - token * p.q_heads;
      const auto* at =
          static_cast<const std::byte*>(p.q.data) + (token * p.q.token_stride + head * p.q.head_stride) * element;
      return Row{row(h) < count ? at : nullptr, p.q.dtype};
    });
    rotate(x);
    to_digits(
        x,
        [&](int h, int i, uint2 bytes) {
          if (row(h) < count) *reinterpret_cast<uint2*>(to.rows + std::int64_t{row(h)} * D + 8 * i) = bytes;
        },
        [&](int h, float step) {
          if (row(h) < count) to.steps[row(h)] = step;
        });
  }

  // --- centres ---

  __device__ __forceinline__ void take_centre_of_page(const codec::PageLayout& layout, const std::byte* block) const {
    const codec::SideLayout side = codec::centre_layout(layout);
    const std::byte *low = block + side.plane_offset[0], *high = block + side.plane_offset[1];
    for (int i = unpacker.thread; i < D; i += kThreads)
      centre().bytes[i] = static_cast<std::int8_t>(2.0f * codec::centre_element(low, high, 1.0f, i));
    if (unpacker.thread == 0) {
      const auto* scale = reinterpret_cast<const unsigned short*>(block + side.scale_offset);
      centre().factor = 0.5f * ptx::f16_to_f32(__ldg(scale));
    }
  }
  __device__ __forceinline__ void take_zero() const {
    for (int i = unpacker.thread; i < D; i += kThreads) centre().bytes[i] = 0;
    if (unpacker.thread == 0) centre().factor = 0.0f;
  }
  // The mean of tokens [first, last), which have 16 bits.
  template <class Rows>
  __device__ __forceinline__ void take_mean(int head_dim, int first, int last, const Rows& rows) const {
    auto* const mean = reinterpret_cast<float*>(unpacker.shared.tile);
    constexpr int kAtOnce = 16;
    for (int i = unpacker.thread; i < D; i += kThreads) {
      float sum = 0.0f;
      int count = 0;
#pragma unroll 1
      for (int begin = first; begin < last && i < head_dim; begin += kAtOnce) {
        std::uint16_t bits[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          bits[k] = static_cast<const std::uint16_t*>(rows(min(begin + k, last - 1)).data)[i];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float x = element_of(bits[k], rows(min(begin + k, last - 1)).dtype);
          if (begin + k < last && fabsf(x) < 1e18f) sum += x, ++count;  // else that key spoils itself alone
        }
      }
      mean[i] = count > 0 ? sum / static_cast<float>(count) : 0.0f;
    }
    __syncthreads();
    if (warp() > 0) return;
    Numbers x;
    load(x, D, [&](int h) { return Row{row_here(h) == 0 ? mean : nullptr, Dtype::f32}; });
    rotate(x);
    to_digits(
        x,
        [&](int h, int i, uint2 bytes) {
          if (row_here(h) == 0) *reinterpret_cast<uint2*>(centre().bytes + 8 * i) = bytes;
        },
        [&](int h, float step) {
          if (row_here(h) == 0) centre().factor = step;
        });
  }
  __device__ __forceinline__ void store_centre(const ByteTarget<D>& to) const {
    constexpr int kPieces = D / 16, kRows = kByteKeyRows - kPageTokens;
    for (int i = unpacker.thread; i < kRows * kPieces; i += kThreads) {
      *reinterpret_cast<uint4*>(to.row(kPageTokens) + 16 * i) =
          reinterpret_cast<const uint4*>(centre().bytes)[i % kPieces];
    }
    if (unpacker.thread < kRows) to.factors[kPageTokens + unpacker.thread] = centre().factor;
  }

  // --- keys ---

  __device__ __forceinline__ void clear(const ByteTarget<D>& to, int first, int last) const {
    constexpr int kPieces = D / 16;
    for (int i = first * kPieces + unpacker.thread; i < last * kPieces; i += kThreads)
      *reinterpret_cast<uint4*>(to.rows + 16 * i) = make_uint4(0, 0, 0, 0);
    for (int i = first + unpacker.thread; i < last; i += kThreads) to.factors[i] = 0.0f;
  }
  // Twice the levels of four columns, from exact halves.
  __device__ __forceinline__ static std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b) {
    constexpr std::uint32_t kTwo = 0x40004000u, kOffset = 0x66006600u;  // 1536, whose last bit counts 1
    return ptx::prmt(ptx::fma_halves(a, kTwo, kOffset), ptx::fma_halves(b, kTwo, kOffset), 0x6420);
  }
  // After a barrier, so that the centre and the tile are complete.
  __device__ __forceinline__ void take_codes(const SideOfPage& side, const ByteTarget<D>& to, bool has_centre) const {
    constexpr int kPieces = D / 16;
    const std::byte* const tile = unpacker.shared.tile;
    const float* const factors = unpacker.shared.factors[0];
    const bool is_one_scale = side.layout().groups == 1;
    const auto refuses = [&](int token) { return has_centre && is_negative(factors[token]); };
    // Levels are multiplied as they are.
    const auto is_exact = [&](int token) { return is_one_scale && !refuses(token); };
#pragma unroll 2
    for (int i = unpacker.thread; i < side.stored * kPieces; i += kThreads) {
      const int token = i / kPieces, c = 2 * (i % kPieces);
      if (!is_exact(token)) continue;
      const uint4 a = *reinterpret_cast<const uint4*>(tile + place_by_token<D>(token, c));
      const uint4 b = *reinterpret_cast<const uint4*>(tile + place_by_token<D>(token, c + 1));
      *reinterpret_cast<uint4*>(to.rows + 16 * i) =
          make_uint4(bytes_of(a.x, a.y), bytes_of(a.z, a.w), bytes_of(b.x, b.y), bytes_of(b.z, b.w));
      if (c == 0) to.factors[token] = 0.5f * fabsf(factors[token]);
    }
    const auto is_number = [&](int token) { return token < side.stored && !is_exact(token); };
    if (!__any_sync(~0u, is_number(16 * warp() + unpacker.thread % 16))) return;
    Numbers x;
#pragma unroll
    for (int b = 0; b < D / 16; ++b)
      unpacker.load_columns(false, false, 16 * b, reinterpret_cast<float(&)[8]>(x[8 * b]));
    subtract_centre(x, [&](int h) { return refuses(16 * warp() + row_here(h)); });
    store_keys(x, to, is_number);
  }

  __device__ __forceinline__ void take(const SideOfPage& side, const ByteTarget<D>& to, int head_dim) const {
    const bool has_page = !side.is_hidden && side.stored > 0 && side.block != nullptr;
    const bool has_codes = has_page && side.layout().planes > 0;
    const bool has_centre = has_codes && codec::is_centred(*side.page_layout);
    // Dense rows: the page's, and fresh ones behind them.
    const int first = has_page && !has_codes ? 0 : side.stored, last = side.is_hidden ? first : side.tokens;
    const auto dtype = [](bool is_f16) { return is_f16 ? Dtype::f16 : Dtype::bf16; };
    const auto rows = [&](int token) {
      if (token >= side.stored) return Row{side.fresh + token * side.fresh_stride, dtype(side.fresh_is_f16)};
      return Row{side.block + side.layout().plane_offset[0] + token * 2 * D,
                 dtype(side.layout().format == Format::f16)};
    };
    if (has_centre) {
      take_centre_of_page(*side.page_layout, side.block);
    } else if (!has_codes && last > first) {
      take_mean(head_dim, first, last, rows);
    } else {
      take_zero();
    }
    if (has_codes) {
      unpacker.take_factors(*side.page_layout, side.block, false);
      unpacker.template take_any_codes<false>(side.layout(), side.block);
    } else if (!has_page) {
      clear(to, 0, side.is_hidden ? side.tokens : side.stored);
    }
    __syncthreads();
    store_centre(to);
    if (has_codes) take_codes(side, to, has_centre);
    if (last > first) {
      const auto is_dense = [&](int token) { return token >= first && token < last; };
      Numbers x;
      load(x, head_dim, [&](int h) {
        const int token = 16 * warp() + row_here(h);
        return is_dense(token) ? rows(token) : Row{nullptr, Dtype::f16};
      });
      rotate(x);
      subtract_centre(x, [](int) { return true; });
      store_keys(x, to, is_dense);
    }
    __syncthreads();  // what is shared is free
  }
};

}  // namespace kvant::cuda::prefill::unpacked
