// Pages to halves, for the kernel of unpack.hpp. A block of four warps takes one side of a page after another: codes
// become exact halves in shared memory. Each warp takes sixteen tokens from there, scales them, adds the page's centre
// and rotates back. These are the floats of codec/store.hpp and codec/basis.hpp, which are rounded when they are
// written.
#pragma once

#include "codec/centre.hpp"
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
// A launch has one side's pages, or keys and values take turns.
__device__ __forceinline__ int items_of_page(const UnpackTo& all) {
  return all.keys != nullptr && all.values != nullptr ? 2 : 1;
}
template <int D>
__device__ __forceinline__ SideOfPage side_of_page(const AttendParams& p, const UnpackTo& all, int item) {
  SideOfPage side{};
  const bool has_both = items_of_page(all) == 2;
  side.is_value = has_both ? (item & 1) != 0 : all.keys == nullptr;
  const int page_of_round = has_both ? item >> 1 : item;
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
  std::byte* rows;  // token 0 of the page begins here
  int head_dim;
  bool is_f16;
  __device__ std::byte* row(int token) const { return rows + static_cast<std::int64_t>(token) * 2 * head_dim; }
};

template <int D>
struct Unpacker {
  static constexpr int kGroups = side_scale_groups(Format::tq8, D);  // a vector has at most so many
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
    constexpr int kUnits = (2 * D + kThreads - 1) / kThreads;  // a thread's
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

}  // namespace kvant::cuda::prefill::unpacked
