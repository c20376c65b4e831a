// The kernel of unpack.hpp. A block of four warps takes one side of a page after another: codes become exact halves in
// shared memory, and each warp takes sixteen tokens from there, scales them, adds the page's centre and rotates back.
// These are the floats of codec/store.hpp and codec/basis.hpp, which are rounded when they are written.
#pragma once

#include "codec/centre.hpp"
#include "codec/digits.hpp"
#include "cuda/prefill/byte_keys.hpp"
#include "cuda/prefill/rotate.cuh"
#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_unpacked/unpack.hpp"

namespace kvant::cuda::prefill::unpacked {

inline constexpr int kThreads = 128;
// The number that a half of the workspace can hold: beyond f16's largest number it is that one.
__device__ __forceinline__ float held(float x, bool is_f16) {
  const bool is_beyond = is_f16 && fabsf(x) > 65504.0f && fabsf(x) <= 3.4028235e38f;
  return is_beyond ? copysignf(65504.0f, x) : x;
}
__device__ __forceinline__ std::uint32_t pair_of(float a, float b, bool is_f16) {
  return is_f16 ? ptx::f16x2(held(a, true), held(b, true)) : ptx::bf16x2(a, b);
}

// A side of a page of a round, and where its tokens come from: the first `stored` from the cache, the others are fresh.
struct SideOfPage {
  bool is_value;
  bool is_hidden;     // no query sees the page
  std::int64_t page;  // in the workspace
  int tokens, stored;
  const codec::PageLayout* page_layout;
  const std::byte* block;  // null: the cache has no such page
  const std::byte* fresh;  // where token 0 of the page would lie
  std::int64_t fresh_stride;
  bool fresh_is_f16;
  [[nodiscard]] __device__ const codec::SideLayout& layout() const {
    return is_value ? page_layout->v : page_layout->k;
  }
};
template <int D>
__device__ __forceinline__ SideOfPage side_of_page(const AttendParams& p, const UnpackTo& all, int item) {
  SideOfPage side{};
  side.is_value = (item & 1) != 0;
  const int page_of_round = item >> 1;
  const Part* const part = part_of(*all.round, all.parts, &Part::page, page_of_round);
  const BatchEntry e = part->batch;
  const int length = part->length, before = length - e.q_len;
  const int of_part = page_of_round - part->page, head_of_part = of_part / part->pages;
  const int use = of_part - head_of_part * part->pages, head = part->head + head_of_part;
  const int page = key_pages(p, length, e.q_len, all.tile_keys).page(use), first_key = page * kPageTokens;
  side.page = part->row / kPageTokens + of_part;
  const int cached = p.fresh.keys == nullptr ? length : before;
  side.tokens = min(length - first_key, kPageTokens), side.stored = min(max(cached - first_key, 0), kPageTokens);
  const auto seen = base::visible_pages<int>(visibility(p), length, before, length - 1);
  side.is_hidden = page >= seen.sinks && page < seen.recent;
  if (side.is_hidden) return side;
  if (side.stored > 0) {
    const core::PageRef ref =
        p.cache.pages[static_cast<std::size_t>(e.index) * static_cast<std::size_t>(p.cache.max_pages) + page];
    const bool is_exact = reads_exact(p.cache, length, e.q_len, page, ref);
    const std::int32_t slot = is_exact ? ref.exact : ref.encoded;
    side.page_layout = is_exact ? &p.cache.exact_layout : &p.cache.encoded_layout;
    const std::byte* block =
        (is_exact ? p.cache.exact : p.cache.encoded) +
        static_cast<std::uint64_t>(max(slot, 0)) * (is_exact ? p.cache.exact_slot_bytes : p.cache.encoded_slot_bytes) +
        static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + head) * side.page_layout->block_bytes;
    side.block = slot < 0 ? nullptr : block;
  }
  if (side.tokens > side.stored) {
    side.fresh_stride = side.is_value ? p.fresh.value_token_bytes : p.fresh.key_token_bytes;
    side.fresh = (side.is_value ? p.fresh.values : p.fresh.keys) +
                 head * (side.is_value ? p.fresh.value_head_bytes : p.fresh.key_head_bytes) +
                 (std::int64_t{e.query_begin} + first_key - before) * side.fresh_stride;
    side.fresh_is_f16 = all.fresh_is_f16;
  }
  return side;
}

// One side of a page of the workspace.
struct Target {
  std::byte* rows;  // of token 0 of the page
  int head_dim;
  bool is_f16;
  __device__ std::byte* row(int token) const { return rows + static_cast<std::int64_t>(token) * 2 * head_dim; }
};

template <int D>
struct Unpacker {
  static constexpr int kGroups = side_scale_groups(Format::tq8, D);  // of a vector at most
  // A thread's registers have room for its share of sixteen rows of so many columns.
  static constexpr int kColumns = D <= 192 ? D : 128, kParts = D / kColumns;
  static_assert(kParts == 1 || kParts == 2 || (kParts == 4 && codec::rotation_shape(D).paley == 1));
  struct Shared {
    alignas(128) std::byte tile[kPageTokens * D * 2];
    float factors[kGroups][kPageTokens];
    float centre[D];
    std::uint32_t constants[2][4];
  };
  Shared& shared;
  const int thread = static_cast<int>(threadIdx.x);

  // --- dense rows ---

  // Tokens [first, last) of a page: row(token) has D numbers, or head_dim of them.
  template <class Row>
  __device__ __forceinline__ void copy_rows(const Target& to, int first, int last, bool is_f16, Row&& row) const {
    constexpr int kPieces = D / 8;
#pragma unroll 4
    for (int i = thread; i < kPageTokens * kPieces; i += kThreads) {
      const int token = i / kPieces, c = i % kPieces;
      if (token < first || token >= last || 8 * c >= to.head_dim) continue;
      uint4 x = *reinterpret_cast<const uint4*>(row(token) + 16 * c);
      if (is_f16 != to.is_f16) {
        const Dtype dtype = is_f16 ? Dtype::f16 : Dtype::bf16;
        for (std::uint32_t* pair : {&x.x, &x.y, &x.z, &x.w})
          *pair = pair_of(element_of(*pair & 0xFFFFu, dtype), element_of(*pair >> 16, dtype), to.is_f16);
      }
      *reinterpret_cast<uint4*>(to.row(token) + 16 * c) = x;
    }
  }
  __device__ __forceinline__ void clear_rows(const Target& to, int first, int last) const {
    constexpr int kPieces = D / 8;
    for (int i = thread; i < kPageTokens * kPieces; i += kThreads) {
      const int token = i / kPieces, c = i % kPieces;
      if (token >= first && token < last && 8 * c < to.head_dim)
        *reinterpret_cast<uint4*>(to.row(token) + 16 * c) = make_uint4(0, 0, 0, 0);
    }
  }

  // --- codes ---

  // The scales of the page's tokens. A vector that is not a number reaches those who see it through its key; to others
  // its value is 0. The factor of a key that refuses the page's centre keeps its sign.
  __device__ __forceinline__ void take_factors(const codec::PageLayout& layout, const std::byte* block,
                                               bool is_value) const {
    if (thread >= kPageTokens) return;
    const auto scale_of = [&](const codec::SideLayout& side, int group) {
      const auto* scales = reinterpret_cast<const unsigned short*>(block + side.scale_offset);
      return ptx::f16_to_f32(__ldg(scales + group * kPageTokens + thread));
    };
    const codec::SideLayout& side = is_value ? layout.v : layout.k;
    const float unit = codec::is_fp8(side.format) ? 256.0f : 1.0f;  // (levels<fp8>)
    float scale[kGroups];
    bool poisoned = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      scale[g] = scale_of(side, g < side.groups ? g : 0) * unit;
      const float of_value = scale_of(layout.v, g < layout.v.groups ? g : 0);
      poisoned = poisoned || scale[g] != scale[g] || of_value != of_value;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      shared.factors[g][thread] = !poisoned ? scale[g] : is_value ? 0.0f : __int_as_float(0x7FC00000);
  }
  __device__ __forceinline__ void take_centre(const codec::PageLayout& layout, const std::byte* block) const {
    const codec::SideLayout side = codec::centre_layout(layout);
    const float scale = ptx::f16_to_f32(__ldg(reinterpret_cast<const unsigned short*>(block + side.scale_offset)));
    for (int i = thread; i < D; i += kThreads) {
      shared.centre[i] = codec::centre_element(block + side.plane_offset[0], block + side.plane_offset[1], scale, i);
    }
  }
  // Codes to exact halves in the tile: of keys rows of tokens, of values rows of channels.
  template <Format F, bool kValues>
  __device__ __forceinline__ void take_codes(const codec::SideLayout& side, const std::byte* block) const {
    constexpr int kUnits = (2 * D + kThreads - 1) / kThreads;  // of a thread
    const auto is_there = [&](int i) { return 2 * D % kThreads == 0 || i * kThreads + thread < 2 * D; };
    constexpr int kAtOnce = kUnits < 4 ? kUnits : 4;  // so that they find registers
    Constants<F> constants;
    constants.get(shared.constants[kValues]);
#pragma unroll 1
    for (int first = 0; first < kUnits; first += kAtOnce) {
      Unit<F> unit[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_there(first + i)) load_unit<F, D, kValues>(block, side, (first + i) * kThreads + thread, unit[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_there(first + i)) {
          store_unit<F, D, kValues, false>(shared.tile, (first + i) * kThreads + thread, unit[i], constants, nullptr);
        }
      }
    }
  }
  template <bool kValues>
  __device__ __forceinline__ void take_any_codes(const codec::SideLayout& side, const std::byte* block) const {
    switch (side.format) {
#define KVANT_TQ_FORMAT(name, ...)                         \
  case Format::name: {                                     \
    return take_codes<Format::name, kValues>(side, block); \
  }
#define KVANT_FP8_FORMAT(name, ...)                        \
  case Format::name: {                                     \
    return take_codes<Format::name, kValues>(side, block); \
  }
#include "codec/formats.def"
      default: return;
    }
  }
  __device__ __forceinline__ void put_constants(Format format, std::uint32_t* to) const {
    switch (format) {
#define KVANT_TQ_FORMAT(name, ...)           \
  case Format::name: {                       \
    return Constants<Format::name>::put(to); \
  }
#include "codec/formats.def"
      default: return;
    }
  }
  // Sixteen columns of a warp's sixteen rows, as the sums of a product lie (prefill/rows.cuh), from column `first` on:
  // levels by their factors, with the page's centre.
  __device__ __forceinline__ void load_columns(bool is_value, bool has_centre, int first, float (&x)[8]) const {
    const int lane = thread % 32, warp = thread / 32, matrix = lane / 8, r = lane % 8;
    const std::uint32_t tile = ptx::shared_address(shared.tile);
    std::uint32_t pairs[4];
    if (is_value) {
      ptx::load_transposed(pairs, tile + place_by_channel(first + matrix / 2 * 8 + r, 2 * warp + matrix % 2));
    } else {
      ptx::load_matrices(pairs, tile + place_by_token<D>(16 * warp + matrix % 2 * 8 + r, first / 8 + matrix / 2));
    }
    const float* factors = shared.factors[first / (D / kGroups)] + 16 * warp + lane / 4;
    const float of_rows[2] = {factors[0], factors[8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = fabsf(of_rows[i % 2]);
      float* const at = x + 4 * (i / 2) + 2 * (i % 2);
      at[0] = __fmul_rn(ptx::f16_to_f32(static_cast<std::uint16_t>(pairs[i])), factor);
      at[1] = __fmul_rn(ptx::f16_to_f32(static_cast<std::uint16_t>(pairs[i] >> 16)), factor);
    }
    if (!has_centre) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 c = *reinterpret_cast<const float2*>(shared.centre + first + i / 2 * 8 + 2 * (lane % 4));
      float* const at = x + 4 * (i / 2) + 2 * (i % 2);
      if (is_negative(of_rows[i % 2])) continue;  // the key refuses the centre
      at[0] = __fadd_rn(at[0], c.x), at[1] = __fadd_rn(at[1], c.y);
    }
  }
  // Part kPart of the rows' columns, rotated back: the parts, added with the signs of a Hadamard matrix of their
  // number, are rotated as rows of kColumns.
  template <int kPart>
  __device__ __forceinline__ void load_part(bool is_value, bool has_centre, bool is_rotated,
                                            float (&x)[kColumns / 2]) const {
#pragma unroll
    for (int b = 0; b < kColumns / 16; ++b) {
      float part[8];
      load_columns(is_value, has_centre, 16 * b + (is_rotated ? 0 : kPart * kColumns), part);
      if (kParts > 1 && is_rotated) {
#pragma unroll
        for (int other = 1; other < kParts; ++other) {
          float more[8];
          load_columns(is_value, has_centre, 16 * b + other * kColumns, more);
          const bool minus = ((kPart & other & 1) ^ (kPart & other) >> 1) != 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) part[i] = minus ? part[i] - more[i] : part[i] + more[i];
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) x[8 * b + i] = part[i];
    }
    if (!is_rotated) return;
    hadamard<kColumns, true>(x);
    flip_signs<kColumns, kPart * kColumns>(x);
    if constexpr (kParts > 1) {
      constexpr float kScale = codec::rotation_scale(D) / codec::rotation_scale(kColumns);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) x[i] *= kScale;
    }
  }
  // Rows before `last`.
  __device__ __forceinline__ void store_part(const Target& to, int first_column, int last,
                                             const float (&x)[kColumns / 2]) const {
    const int t = thread % 4, token = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::byte* const row = to.row(token + 8 * h);
      const bool is_there = token + 8 * h < last;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {
        std::uint32_t pieces[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pieces[i] = pair_of(x[4 * (j + i) + 2 * h], x[4 * (j + i) + 2 * h + 1], to.is_f16);
        gather_piece(pieces);
        const int column = first_column + 8 * (j + t);
        if (is_there && column < to.head_dim)
          *reinterpret_cast<uint4*>(row + 2 * column) = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
      }
    }
  }
  // Tokens before `last`.
  __device__ __forceinline__ void unpack(const codec::PageLayout& layout, bool is_value, const std::byte* block,
                                         const Target& to, int last) const {
    const codec::SideLayout& side = is_value ? layout.v : layout.k;
    const bool has_centre = !is_value && codec::is_centred(layout), is_rotated = codec::is_tq(side.format);
    take_factors(layout, block, is_value);
    if (has_centre) take_centre(layout, block);
    if (is_value) {
      take_any_codes<true>(side, block);
    } else {
      take_any_codes<false>(side, block);
    }
    __syncthreads();
    const auto take = [&]<int kPart>() {
      float x[kColumns / 2];
      load_part<kPart>(is_value, has_centre, is_rotated, x);
      if constexpr (kPart == kParts - 1) __syncthreads();  // what is shared is free
      store_part(to, kPart * kColumns, last, x);
    };
    take.template operator()<0>();
    if constexpr (kParts > 1) take.template operator()<1>();
    if constexpr (kParts > 2) take.template operator()<2>(), take.template operator()<3>();
  }

  // --- a page ---

  __device__ __forceinline__ void take(const SideOfPage& side, const Target& to) const {
    if (side.is_hidden) return clear_rows(to, 0, side.tokens);
    if (side.stored > 0) {
      if (side.block == nullptr) {
        clear_rows(to, 0, side.stored);
      } else if (side.layout().planes == 0) {
        copy_rows(to, 0, side.stored, side.layout().format == Format::f16,
                  [&](int token) { return side.block + side.layout().plane_offset[0] + token * 2 * D; });
      } else {
        unpack(*side.page_layout, side.is_value, side.block, to, side.stored);
      }
    }
    if (side.tokens > side.stored) {
      copy_rows(to, side.stored, side.tokens, side.fresh_is_f16,
                [&](int token) { return side.fresh + token * side.fresh_stride; });
    }
  }
};

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
      const codec::DigitStep step = codec::digit_step(largest_of_row(largest), 127);
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

// kByteKeys: keys become bytes.
template <int D, bool kByteKeys>
__global__ void __launch_bounds__(kThreads, D <= 64    ? 5
                                            : D == 128 ? 3
                                                       : 2)
    unpack_kernel(const __grid_constant__ AttendParams p, const UnpackTo to) {
  using Shared = typename Unpacker<D>::Shared;
  extern __shared__ __align__(1024) std::byte dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Unpacker<D> unpacker{shared};
  if (threadIdx.x == 0) unpacker.put_constants(p.cache.encoded_layout.k.format, shared.constants[0]);
  if (threadIdx.x == 32) unpacker.put_constants(p.cache.encoded_layout.v.format, shared.constants[1]);
  ptx::wait_prerequisites();
  if constexpr (kByteKeys) {
    if (to.queries.rows != nullptr) {
      int& tokens = *reinterpret_cast<int*>(shared.factors);
      if (threadIdx.x == 0) tokens = 0;
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < p.batch; i += kThreads) {
        const BatchEntry e = batch_entry(p, i);
        if (e.q_len > 0) atomicMax(&tokens, e.query_begin + e.q_len);
      }
      __syncthreads();
      const int rows = min(tokens, to.most_queries) * p.q_heads;
      for (int i = static_cast<int>(64 * blockIdx.x); i < rows; i += static_cast<int>(64 * gridDim.x))
        ByteUnpacker<D>{unpacker}.take_queries(p, to.queries, i, rows);
    }
  }
  const int items = 2 * to.round->pages;
  __syncthreads();
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SideOfPage side = side_of_page<D>(p, to, item);
    if constexpr (kByteKeys) {
      if (!side.is_value) {
        ByteUnpacker<D>{unpacker}.take(side, ByteTarget<D>(to, side.page), p.head_dim);
        continue;
      }
    }
    std::byte* const rows = (side.is_value ? to.values : to.keys) + side.page * kPageTokens * 2 * p.head_dim;
    unpacker.take(side, {rows, p.head_dim, to.is_f16});
  }
}

template <int D>
UnpackKernel kernel_of_unit(bool byte_keys) {
  const void* function = reinterpret_cast<const void*>(&unpack_kernel<D, false>);
  if constexpr (has_byte_keys(D)) {
    if (byte_keys) function = reinterpret_cast<const void*>(&unpack_kernel<D, true>);
  }
  return {D, function, kThreads, static_cast<int>(sizeof(typename Unpacker<D>::Shared))};
}

}  // namespace kvant::cuda::prefill::unpacked
