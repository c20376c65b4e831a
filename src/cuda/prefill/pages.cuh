// Which tile a block works on, which pages the tile reads, and codes of a page as halves in shared memory.
#pragma once

#include "cuda/prefill/kernels.hpp"
#include "cuda/schedule/schedule.cuh"
#include "cuda/tile/tiles.cuh"

namespace kvant::cuda::prefill {

// --- which tile ------------------------------------------------------------------------------------------------------

// Pages of fresh keys that some row sees: `sinks` from `first` on, and those from `recent` to `end`.
struct FreshPages {
  int first, sinks, recent, end;
  __device__ int total() const { return sinks + (end - recent); }
  __device__ int page(int use) const { return use < sinks ? first + use : recent + (use - sinks); }
};

struct Tile {
  BatchEntry batch;
  int entry, kv_head, row_block, length;
  int rows;                // the sequence's
  int first, last;         // its queries
  int all_begin, all_end;  // keys that every row sees, if the mask tensor lets it
  VisiblePages pages;      // the cache's
  FreshPages fresh;
};

// Every other round of the blocks goes backwards, so that long tiles and short ones add up.
__device__ __forceinline__ int tile_number(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + ((round & 1) != 0 ? blocks - 1 - block : block);
}

// The rows of row block `row_block` and what is said of its keys, but not its pages. The tile has its entry, and
// the length and rows of that.
template <int kRows>
__device__ __forceinline__ void set_rows(const AttendParams& p, int row_block, Tile& tile) {
  tile.row_block = row_block;
  tile.first = row_block * kRows / p.group;
  tile.last = min(tile.batch.q_len - 1, (row_block * kRows + kRows - 1) / p.group);
  const base::Visibility rule = visibility(p);
  const int before = tile.length - tile.batch.q_len;  // position of the first query
  const base::KeyRange begins = rule.recent_range(tile.length, before + tile.first);
  const base::KeyRange ends = rule.recent_range(tile.length, before + tile.last);
  tile.all_begin = static_cast<int>(ends.begin), tile.all_end = static_cast<int>(begins.end);
}
// kRows: of a tile.
template <int kRows>
__device__ __forceinline__ bool find_rows(const AttendParams& p, const Schedule& schedule, int number, Tile& tile) {
  if (number >= schedule.tiles) return false;
  const int pairs = p.batch * p.cache.kv_heads;
  const int each = schedule.heads_at_once * schedule.row_blocks;
  const int first = number / each * schedule.heads_at_once, at = number % each;
  const int width = min(schedule.heads_at_once, pairs - first);
  const int rank = at / width, pair = first + at % width;
  tile.entry = pair / p.cache.kv_heads, tile.kv_head = pair % p.cache.kv_heads;
  tile.batch = batch_entry(p, tile.entry);
  tile.rows = tile.batch.q_len * p.group;
  const int row_block = (tile.rows + kRows - 1) / kRows - 1 - rank;
  if (row_block < 0) return false;
  tile.length = p.cache.sequences[tile.batch.index].length;
  set_rows<kRows>(p, row_block, tile);
  return true;
}
template <int kRows>
__device__ __forceinline__ bool find_tile(const AttendParams& p, const Schedule& schedule, int number, Tile& tile) {
  if (!find_rows<kRows>(p, schedule, number, tile)) return false;
  const base::Visibility rule = visibility(p);
  const int before = tile.length - tile.batch.q_len;
  const auto seen = base::visible_pages<int>(rule, tile.length, before + tile.first, before + tile.last);
  tile.pages = with_exact_ends(p, tile.length, tile.batch.q_len, seen);
  tile.fresh = {};
  if (p.fresh.keys != nullptr) {
    const int cached = base::pages_for(before), own = before / kPageTokens;
    tile.pages.sinks = min(seen.sinks, cached), tile.pages.recent = min(seen.recent, cached);
    tile.pages.end = min(seen.end, cached);
    tile.fresh = {own, max(seen.sinks - own, 0), max(seen.recent, own), max(seen.end, own)};
  }
  return true;
}

// Whether the launch serves the tile.
__device__ __forceinline__ bool is_served(const Schedule& schedule, const Tile& tile) {
  return schedule.share.has(tile.length > tile.batch.q_len, tile.entry, tile.kv_head);
}
// Whether there are tiles that the launch serves; every warp for itself.
__device__ __forceinline__ bool has_work(const AttendParams& p, const Schedule& schedule) {
  if (schedule.round != nullptr) return schedule.round->tiles > 0;
  if (schedule.share.is_all()) return true;
  for (int first = 0; first < p.batch; first += 32) {
    const int i = first + static_cast<int>(threadIdx.x) % 32;
    bool serves = false;
    if (i < p.batch) {
      const BatchEntry e = batch_entry(p, i);
      const bool has_older = p.cache.sequences[e.index].length > e.q_len;
      serves = e.q_len > 0 && schedule.share.has(has_older, i, p.cache.kv_heads - 1);
    }
    if (__any_sync(~0u, serves)) return true;
  }
  return false;
}

// The sequence's tokens that are in pages; those behind them are fresh keys.
__device__ __forceinline__ int cached_tokens(const AttendParams& p, const Tile& tile) {
  return p.fresh.keys == nullptr ? tile.length : tile.length - tile.batch.q_len;
}

// --- which pages -----------------------------------------------------------------------------------------------------

// A tile and the runs of its pages: those of the cache, then those of fresh keys, which follow pages of dense rows. A
// page that has tokens of both is in both.
struct PageList {
  Tile tile;
  PageRuns runs;
  int cached;  // pages of the runs
  int total;
  __device__ void set(const AttendParams& p, int domain) {
    runs = page_runs(tile.pages, domain == core::kExact);
    cached = runs.total();
    total = cached;
    if (domain == core::kExact || codec::is_dense(p.cache.encoded_layout.k.format)) total += tile.fresh.total();
  }
};

// A stage's page has a name: its number, its place among the sixteen pages whose centres come before them, whether its
// rows are fresh keys, and whether rows see different parts of it. Other numbers are below zero. (A sequence has fewer
// than 2^31 tokens, 2^25 pages.)
struct PageName {
  static __device__ int of(int page, int place, bool fresh, bool partly_seen) {
    return page << 6 | place << 2 | (fresh ? 2 : 0) | (partly_seen ? 1 : 0);
  }
  static __device__ int page(int name) { return name >> 6; }
  static __device__ int place(int name) { return name >> 2 & 15; }
  static __device__ bool is_fresh(int name) { return (name & 2) != 0; }
  static __device__ bool partly_seen(int name) { return (name & 1) != 0; }
};
inline constexpr int kNoPage = -1;   // the domain's pages are at an end
inline constexpr int kCentres = -2;  // centres of the sixteen pages that come next
inline constexpr int kCentresAtOnce = 16;

// The pages of one domain in order; every warp for itself, a lane for each of 32 in the page table.
struct Walk {
  int domain;
  int base;        // the first of these 32
  int use;         // the page that `next` gave, counted in the domain's
  int slot, name;  // this lane's page
  unsigned left;   // pages left, among the 32

  // With a list of the warp's own.
  __device__ void begin(const AttendParams& p, PageList& list, int of) {
    begin(of);
    __syncwarp();  // every lane writes the same
    list.set(p, of);
    __syncwarp();
  }
  // The list is set.
  __device__ void begin(int of) { domain = of, base = -32, left = 0; }

  __device__ __forceinline__ void load(const AttendParams& p, const PageList& list) {
    const Tile& tile = list.tile;
    const int lane = threadIdx.x % 32, use = base + lane;
    slot = -1, name = 0;
    if (use < list.total) {
      const bool fresh = use >= list.cached;
      const int page = fresh ? tile.fresh.page(use - list.cached) : list.runs.page(use);
      if (fresh) {
        slot = 0;
      } else {
        const int2 pair = *reinterpret_cast<const int2*>(
            p.cache.pages + static_cast<std::size_t>(tile.batch.index) * static_cast<std::size_t>(p.cache.max_pages) +
            page);
        const core::PageRef ref{pair.x, pair.y};
        const bool exact = reads_exact(p.cache, tile.length, tile.batch.q_len, page, ref);
        if (exact == (domain == core::kExact)) slot = exact ? ref.exact : ref.encoded;
      }
      const int cached = cached_tokens(p, tile);
      bool full = page * kPageTokens >= max(tile.all_begin, fresh ? cached : 0) &&
                  (page + 1) * kPageTokens <= min(tile.all_end, fresh ? tile.length : cached);
      if (p.mask.data != nullptr) {
        const int batch = mask_batch(p, tile.entry);
        const int kind = p.mask.classes[batch * p.mask.class_stride[0] + tile.kv_head * p.mask.class_stride[1] +
                                        page * p.mask.class_stride[3]];
        if (kind == core::kTileMasked) slot = -1;
        full = full && kind == core::kTileZero;
      }
      name = PageName::of(page, lane % kCentresAtOnce, fresh, !full);
    }
    left = __ballot_sync(~0u, slot >= 0);
  }
  // The next page's slot and its name; kNoPage: none is left.
  __device__ __forceinline__ int next(const AttendParams& p, const PageList& list, int& page) {
    while (left == 0) {
      base += 32;
      if (base >= list.total) return page = kNoPage;
      load(p, list);
    }
    const int lane = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    use = base + lane;
    page = __shfl_sync(~0u, name, lane);
    return __shfl_sync(~0u, slot, lane);
  }
};

// --- what a page holds -----------------------------------------------------------------------------------------------

// Dense rows of a page's keys or values. Where a token is not there, the row of the nearest one that is stands for it:
// no query sees it.
struct DenseRows {
  const std::byte* rows;
  int stride;       // bytes
  int first, last;  // row of the page's first token, below zero where that has none; last row
  __device__ __forceinline__ bool are_whole() const { return first >= 0 && first + kPageTokens - 1 <= last; }
  __device__ __forceinline__ const std::byte* of(int token) const {
    return rows + static_cast<std::int64_t>(min(max(first + token, 0), last)) * stride;
  }
};
template <int D>
__device__ __forceinline__ DenseRows rows_of_page(const std::byte* rows) {
  return {rows, 2 * D, 0, kPageTokens - 1};
}
__device__ __forceinline__ DenseRows fresh_rows(const AttendParams& p, const Tile& tile, int page, bool values) {
  const FreshRows& f = p.fresh;
  const int stride = values ? f.value_token_bytes : f.key_token_bytes;
  const std::byte* rows = (values ? f.values : f.keys) + static_cast<std::int64_t>(tile.batch.query_begin) * stride +
                          tile.kv_head * (values ? f.value_head_bytes : f.key_head_bytes);
  return {rows, stride, page * kPageTokens - (tile.length - tile.batch.q_len), tile.batch.q_len - 1};
}

// 32 codes: of keys, 32 channels of a token; of values, four channels of eight tokens. `low`, `high`: words of its
// planes.
template <Format F>
struct Unit {
  static constexpr int kLow = plane_bits(F, 0), kHigh = plane_count(F) == 2 ? plane_bits(F, 1) : 0;
  std::uint32_t low[kLow], high[kHigh > 0 ? kHigh : 1];
};

template <int kWords>
__device__ __forceinline__ void load_global(const std::byte* from, std::uint32_t* to) {
  if constexpr (kWords == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = __ldg(reinterpret_cast<const unsigned int*>(from));
  }
}

// Unit `i` of 2 D: eight neighbouring lanes have eight tokens of a page's keys, or its eight octets of values, so that
// what they store meets no bank twice. Its words lie in pieces: visit.operator()<words, first>(offset in the block),
// `first` of its low words, then of its high ones.
template <Format F, int D, bool kValues, class Visit>
__device__ __forceinline__ void each_piece(const codec::SideLayout& side, int i, Visit&& visit) {
  constexpr int kLow = Unit<F>::kLow, kHigh = Unit<F>::kHigh;
  const std::uint32_t low = side.plane_offset[0], high = side.plane_offset[1];
  const auto at = [&](int token, int piece, int bits) {
    return static_cast<std::uint32_t>((token * (D / 32) + piece) * 4 * bits);
  };
  const int octet = i % 8, channel = i / 8 * 4;                              // a place among values
  const int token = i / 8 / (D / 32) * 8 + i % 8, piece = i / 8 % (D / 32);  // a place among keys
  if constexpr (kLow == 8) {
    const std::uint32_t first = kValues ? (2 * octet * D + channel) * 4 : at(token, piece, kLow);
    visit.template operator()<4, 0>(low + first);
    visit.template operator()<4, 4>(low + first + (kValues ? 4 * D : 16));
  } else {
    visit.template operator()<kLow, 0>(low + (kValues ? (octet * D + channel) * kLow : at(token, piece, kLow)));
  }
  if constexpr (kHigh > 0)
    visit.template operator()<kHigh, kLow>(high + (kValues ? (octet * D + channel) * kHigh : at(token, piece, kHigh)));
}

template <Format F, int D, bool kValues>
__device__ __forceinline__ void load_unit(const std::byte* block, const codec::SideLayout& side, int i, Unit<F>& unit) {
  each_piece<F, D, kValues>(side, i, [&]<int kWords, int kFirst>(std::uint32_t offset) {
    if constexpr (kFirst < Unit<F>::kLow) {
      load_global<kWords>(block + offset, unit.low + kFirst);
    } else {
      load_global<kWords>(block + offset, unit.high + (kFirst - Unit<F>::kLow));
    }
  });
}

// Half i (16 codes) of a unit as pairs of halves, in the codes' order: exact levels, around zero. (fp8: 2^-8 of each.)
// kSmall: 2^-9 of each.
template <Format F, bool kValues, bool kSmall = false>
__device__ __forceinline__ void levels(const Unit<F>& unit, int i, const Constants<F>& constants,
                                       std::uint32_t (&pairs)[8]) {
  if constexpr (F == Format::fp8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t codes = kValues ? unit.low[(k & 1) * 4 + 2 * i + k / 2] : unit.low[4 * i + k];
      unpack_fp8(codes, pairs[2 * k], pairs[2 * k + 1]);
    }
  } else {
    std::uint32_t low[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < plane_bits(F, 0) / 2; ++k) {
      low[k] = plane_bits(F, 0) == 8 && kValues ? unit.low[(k & 1) * 4 + 2 * i + k / 2]
                                                : unit.low[plane_bits(F, 0) / 2 * i + k];
    }
    std::uint32_t high = 0;
    if constexpr (Unit<F>::kHigh == 2) high = unit.high[i];
    if constexpr (Unit<F>::kHigh == 1) high = unit.high[0] >> (16 * i);
    if constexpr (kSmall) {
      to_small_halves<F>(unpack<F>(low, high, constants), pairs);
    } else {
      to_halves<F>(unpack<F>(low, high, constants), pairs);
    }
  }
}

// Where 16 bytes go: channels 8 c .. of a token in a tile of rows of tokens; tokens 8 o .. of a channel in one of rows
// of channels.
template <int D, int kTokens = kPageTokens>
__device__ __forceinline__ int place_by_token(int token, int c) {
  constexpr int kRow = box_row_bytes(D), kOfRow = kRow / 16;
  const int swap = kRow == 128 ? token & 7 : token >> 1 & 3;
  return c / kOfRow * kTokens * kRow + token * kRow + ((c % kOfRow) ^ swap) * 16;
}
// (Half a page has two channels in 128 bytes.)
template <int kTokens = kPageTokens>
__device__ __forceinline__ int place_by_channel(int channel, int o) {
  if constexpr (kTokens == kPageTokens) return channel * 128 + ((o ^ (channel & 7)) * 16);
  static_assert(kTokens == kPageTokens || 2 * kTokens == kPageTokens);
  const int line = channel / 2, swap = (line & 3) | (line << 1 & 4);
  return line * 128 + ((channel % 2 * 4 + o) ^ swap) * 16;
}

// kTokens: of the tile, which has all of a page or half of it.
template <Format F, int D, bool kValues, bool kManyScales, int kTokens = kPageTokens>
__device__ __forceinline__ void store_unit(std::byte* tile, int i, const Unit<F>& unit, const Constants<F>& constants,
                                           const std::uint16_t* ratios) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t pairs[8];
    levels<F, kValues>(unit, half, constants, pairs);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t* x = pairs + 4 * k;
      if constexpr (kValues) {
        const int octet = i % 8, channel = i / 8 * 4 + 2 * half + k;
        if constexpr (kManyScales) {
          const uint4 r = *reinterpret_cast<const uint4*>(ratios + channel / 128 * kPageTokens + 8 * octet);
          x[0] = ptx::multiply_halves(x[0], r.x), x[1] = ptx::multiply_halves(x[1], r.y);
          x[2] = ptx::multiply_halves(x[2], r.z), x[3] = ptx::multiply_halves(x[3], r.w);
        }
        const int o = kTokens == kPageTokens ? octet : octet % (kTokens / 8);
        *reinterpret_cast<uint4*>(tile + place_by_channel<kTokens>(channel, o)) = make_uint4(x[0], x[1], x[2], x[3]);
      } else {
        constexpr int kPieces = D / 32;
        const int token = i / 8 / kPieces * 8 + i % 8, c = i / 8 % kPieces * 4 + 2 * half + k;
        if constexpr (kManyScales) {
          const std::uint32_t r = ratios[c / 16 * kPageTokens + token] * 0x10001u;
          for (int n = 0; n < 4; ++n) x[n] = ptx::multiply_halves(x[n], r);
        }
        const int row = kTokens == kPageTokens ? token : token % kTokens;
        *reinterpret_cast<uint4*>(tile + place_by_token<D, kTokens>(row, c)) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

}  // namespace kvant::cuda::prefill
