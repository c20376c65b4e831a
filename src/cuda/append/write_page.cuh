// Pages that a step touches: their rows encoded, by a team of warps.
//
// A warp copies rows of a page into shared memory (those of the next head while it works on one), encodes them, a
// vector to a few threads, and leaves the codes in place of the rows. Keys go from there to the page, and values whose
// tokens come in whole octets: a word has eight tokens of a channel. So warps do not wait for each other. Where octets
// are in part of other warps, or of other steps, whose bits stay, a team of warps stores them together. No two teams
// change one word.
#pragma once

#include "cuda/append/centre.cuh"
#include "cuda/append/rows.cuh"
#include "cuda/append/search.cuh"

namespace kvant::cuda {

// y = A x, both [D] of one vector in shared memory. Not bit-equal to the host's: sums in the order of j. A few elements
// at a time, because its loads in flight would cost all other bases registers; so would a call.
template <class Shape>
__device__ __forceinline__ void multiply_row(const float* x, float* y, int t, const float* matrix) {
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int i = t; i < Shape::kD; i += kAtOnce * Shape::kThreads) {
    float sums[kAtOnce] = {};
#pragma unroll 1
    for (int j = 0; j < Shape::kD; j += 4) {
      const float4 b = *reinterpret_cast<const float4*>(x + j);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(matrix + (i + k * Shape::kThreads) * Shape::kD + j));
        sums[k] = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sums[k]))));
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) y[i + k * Shape::kThreads] = sums[k];
  }
  __syncwarp();
}

// Where a team's staged rows begin.
template <class Shape, bool kCentred>
__device__ __forceinline__ std::byte* rows_of_team(const WriteParams& params, int table_bytes, int pitch) {
  extern __shared__ __align__(16) std::byte shared[];
  return shared + (kCentred ? kCentreBytes<Shape> : 0) + table_bytes + 2 * params.rows * pitch * team_of_block<Shape>();
}

// The sum of squares of a vector's elements, four() at a time, in the 32 lanes of the codec. Where a thread has many
// lanes, those that the fold adds first are done first, so that few sums are held at once.
template <class Shape, class Four>
__device__ __forceinline__ float sum_of_squares(const Four& four) {
  constexpr int kSums = Shape::kSums, kElements = Shape::kElements, kQuads = base::max(kSums / 4, 1);
  static_assert(kElements % 4 == 0 && kQuads <= 4);
  const auto add = [](float& sum, float x, bool first) {
    const float square = __fmul_rn(x, x);
    sum = first ? square : __fadd_rn(sum, square);
  };
  float x;
  if constexpr (kSums < 4) {
    float sums[kSums];
#pragma unroll
    for (int k = 0; k < kElements; k += 4) {
      const float4 q = four(k);
      add(sums[0], q.x, k == 0), add(sums[1 % kSums], q.y, k == 0 && kSums > 1);
      add(sums[0], q.z, false), add(sums[1 % kSums], q.w, false);
    }
    fold_inside<kSums>(sums);
    x = sums[0];
  } else {
    const auto quad = [&](int first) {
      float4 sum;
#pragma unroll
      for (int k = first; k < kElements; k += kSums) {
        const float4 q = four(k);
        add(sum.x, q.x, k == first), add(sum.y, q.y, k == first);
        add(sum.z, q.z, k == first), add(sum.w, q.w, k == first);
      }
      return sum;
    };
    const auto both = [](const float4& a, const float4& b) {
      return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
    };
    float4 sum = quad(0);
    if constexpr (kQuads == 2) sum = both(sum, quad(4));
    if constexpr (kQuads == 4) {
      sum = both(sum, quad(8));
      const float4 others = quad(4);
      sum = both(sum, both(others, quad(12)));
    }
    x = __fadd_rn(__fadd_rn(sum.x, sum.z), __fadd_rn(sum.y, sum.w));
  }
#pragma unroll
  for (int h = Shape::kThreads / 2; h > 0; h /= 2) x = __fadd_rn(x, exchange(x, h));
  return x;
}

// Whether a key is nearer to zero than to the centre: codec::refuses_centre by the threads of its vector.
template <class Shape>
__device__ __forceinline__ bool refuses_centre(const float (&y)[Shape::kElements], const float4* centre) {
  const auto of_zero = [&](int k) { return make_float4(y[k], y[k + 1], y[k + 2], y[k + 3]); };
  const auto of_centre = [&](int k) {
    // Volatile: whoever subtracts the centre loads it again. It and the key do not both fit registers.
    float4 c;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"  // PTX ISA, "ld"
                 : "=f"(c.x), "=f"(c.y), "=f"(c.z), "=f"(c.w)
                 : "r"(ptx::shared_address(centre + k / 4)));
    return make_float4(__fsub_rn(y[k], c.x), __fsub_rn(y[k + 1], c.y), __fsub_rn(y[k + 2], c.z),
                       __fsub_rn(y[k + 3], c.w));
  };
  const float from_zero = sum_of_squares<Shape>(of_zero);
  return from_zero < sum_of_squares<Shape>(of_centre);
}

// The format that a kernel encodes into: one that the compiler knows, of many tokens, or any, of few. with(what) calls
// what<format>(); all else of encode_heads is the same code for all formats.
template <Format kFormat>
struct OneFormat {
  static constexpr bool kOne = true;
  __device__ __forceinline__ static constexpr Format format() { return kFormat; }
  template <class Do>
  __device__ __forceinline__ void with(const Do& what) const {
    what.template operator()<kFormat>();
  }
};
struct AnyFormat {
  static constexpr bool kOne = false;
  Format of;
  __device__ __forceinline__ Format format() const { return of; }
  template <class Do>
  __device__ __forceinline__ void with(const Do& what) const {
    switch (of) {
#define KVANT_TQ_FORMAT(name, ...)            \
  case Format::name: {                        \
    what.template operator()<Format::name>(); \
    break;                                    \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
      default: break;
    }
  }
};

// Values of any format whose words lie in shared memory, by a team.
template <class Shape>
__device__ __forceinline__ void store_any(const codec::SideLayout& layout, const std::byte* rows, int pitch, int token,
                                          int tokens, std::byte* block) {
#pragma unroll 1
  for (int i = 0; i < layout.planes; ++i) {
    const auto store = [&]<int kBits>() {
      store_values<Shape, kBits, false, Shape::kTeamThreads>(rows, pitch, token, tokens,
                                                             block + layout.plane_offset[i]);
    };
    switch (layout.plane_bits[i]) {
      case 1: store.template operator()<1>(); break;
      case 2: store.template operator()<2>(); break;
      case 4: store.template operator()<4>(); break;
      default: store.template operator()<8>(); break;
    }
    const int of_word = 32 / layout.plane_bits[i];
    rows += (Shape::kElements + of_word - 1) / of_word * Shape::kThreads * 4;
  }
}

// Tokens [first, last) of a page, for `heads` heads from that of `page` on.
struct PageWork {
  PageJob page;
  int heads;
  bool from_exact;
  int first, last;
};
// One of its heads. Sides and parameters are constants then, wherever the work lies.
__device__ __forceinline__ PageJob job_of_head(const WriteParams& params, bool is_value, const PageWork& work,
                                               int head) {
  PageJob job = work.page;
  job.params = &params, job.is_value = is_value, job.side = is_value ? &params.v : &params.k;
  job.head += head;
  job.encoded += head * params.cache.encoded_layout.block_bytes;
  job.exact += head * params.cache.exact_layout.block_bytes;
  return job;
}

// The codes of a page's tokens, by a team; of one head into AnyFormat. `work` may lie in shared memory, since registers
// that hold it would be missing.
//   kCentred   keys may be around a centre: the page has its codes, or with AnyFormat the warp
template <class Shape, bool kCentred, class To>
__device__ __forceinline__ void encode_heads(const To& to, const WriteParams& params, bool is_value,
                                             const PageWork& work) {
  constexpr int kElements = Shape::kElements, kThreads = Shape::kThreads, kOfWarp = 32 / kThreads,
                kAtOnce = Shape::kTeamThreads / kThreads;
  extern __shared__ __align__(16) std::byte shared[];
  const codec::SideLayout& layout = is_value ? params.cache.encoded_layout.v : params.cache.encoded_layout.k;
  const WriteSide& side = is_value ? params.v : params.k;
  const StagedRows staged = staged_rows<Shape>(params, side);
  const int pitch = staged.pitch;
  int other = params.rows * pitch;  // bytes from `rows` to the other buffer
  std::byte* tables_at = shared + (kCentred ? kCentreBytes<Shape> : 0);
  std::byte* rows = rows_of_team<Shape, kCentred>(params, table_bytes<To::kOne>(to.format()), pitch);
  const bool centred = kCentred && !is_value && codec::is_centred(params.cache.encoded_layout);
  const auto block_of = [&](int head) { return work.page.encoded + head * params.cache.encoded_layout.block_bytes; };
  const auto stage = [&](int head, int chunk, std::byte* at) {
    copy_rows<Shape>(job_of_head(params, is_value, work, head), staged, work.from_exact, chunk,
                     min(params.rows, work.last - chunk), at);
  };
  const auto stage_centre = [&](int head) {
    if (To::kOne && centred) copy_centre<Shape>(block_of(head) + params.cache.encoded_layout.code_bytes);
  };
  __syncwarp();  // the warp may still read from what it did before
  stage_centre(0);
  if (staged.unchecked) {
    stage(0, work.first, rows);
  } else {
    ptx::copy_commit();
  }
  if constexpr (!To::kOne) {
    TableSource source{};
    to.with([&]<Format kFormat>() { source = Tables<kFormat, false>::source(); });
    fill_tables<Shape::kBlockThreads, false>(source, tables_at);
    __syncthreads();
  }
  const int vector = thread_of_team<Shape>(kThreads), t = static_cast<int>(threadIdx.x % kThreads);
  const int first_of_warp = thread_of_team<Shape>(32) * kOfWarp;
  const bool rotates = side.basis == BasisKind::hadamard;
  // Below this in its basis, a row has nothing in it that could not be stored: the largest of D orthonormal coordinates
  // is at least the largest given one / sqrt(D).
  const float in_doubt = rotates ? 65000.0f * params.rotation_scale : 65000.0f;
  constexpr bool kOctets = kOfWarp % 8 == 0;

  int head = 0;
  for (int chunk = work.first; head < work.heads;) {
    const int count = min(params.rows, work.last - chunk);
    ptx::copy_wait<0>();
    __syncwarp();
    if (centred && chunk == work.first) decode_centre<Shape>();
    const bool ends_head = chunk + count == work.last, goes_on = ends_head && head + 1 < work.heads;
    if (goes_on) stage_centre(head + 1);
    if (staged.unchecked) {
      if (!ends_head || goes_on) {
        stage(ends_head ? head + 1 : head, ends_head ? work.first : chunk + count, rows + other);
      }
    } else {
      ptx::copy_commit();
      team_barrier<Shape>();
      convert_rows<Shape>(job_of_head(params, is_value, work, head), staged, work.from_exact, chunk, count, rows);
      team_barrier<Shape>();
    }
    std::byte* const block = block_of(head);
    std::byte* low = block + layout.plane_offset[0];
    std::byte* high = block + layout.plane_offset[1];
    const bool whole = (chunk | count) % 8 == 0;
    const auto store = [&]<Format kFormat, bool kWhole, int kOf>(const std::byte* from, int token, int tokens) {
      using P = Planes<kFormat, Shape>;
      store_values<Shape, P::kLow, kWhole, kOf>(from, pitch, token, tokens, low);
      if constexpr (P::kHigh != 0) {
        store_values<Shape, P::kHigh, kWhole, kOf>(from + P::Low::kWords * kThreads * 4, pitch, token, tokens, high);
      }
    };
    for (int base = first_of_warp; base < count; base += kAtOnce) {
      const int place = base + vector - first_of_warp;
      const int row = min(place, count - 1);  // threads without a vector go along with the last one's
      std::byte* at = rows + row * pitch;
      const std::byte* from_basis = at;
      if (side.basis == BasisKind::calibrated) {
        // The other buffer is free: nothing is staged ahead for these rows.
        auto* result = reinterpret_cast<float*>(at + other);
        multiply_row<Shape>(reinterpret_cast<const float*>(at), result, t,
                            side.matrix + static_cast<std::size_t>(work.page.head + head) * Shape::kD * Shape::kD);
        from_basis = at + other;
      }
      float y[kElements];
      const std::uint32_t mine =
          load_vector<Shape>(from_basis, staged.dtype, rotates, codec::is_tq(to.format()), t, params.rotation_scale, y);
      float largest = most_between<kThreads>(mine);
      if (__any_sync(0xFFFFFFFFu, staged.unchecked && !(largest < in_doubt))) {
        const bool given = work.page.given(chunk + row, work.from_exact);
        const bool storable = check_row<Shape>(params, at, staged.dtype, given, t);
        if (sum_between<kThreads>(storable ? 0u : 1u) != 0) largest = __int_as_float(0x7FC00000);
      }
      std::uint32_t sign = 0;  // the scales get it
      if (centred) {
        const auto* centre = reinterpret_cast<const float4*>(centre_floats<Shape>() + t * CentreFloats<Shape>::kApart);
        const bool refuses = refuses_centre<Shape>(y, centre);
        sign = refuses ? codec::kRefusedScale : 0u;
        // y - c, rounded once, or y. A product with zero may make 0 of -0, which has a code of its own in fp8.
        const float minus = refuses ? 0.0f : -1.0f;
        const auto left = [&](float x, float c) {
          if (codec::is_fp8(to.format())) return __fsub_rn(x, refuses ? 0.0f : c);
          return __fmaf_rn(c, minus, x);
        };
#pragma unroll
        for (int k = 0; k < kElements; k += 4) {
          const float4 c = centre[k / 4];
          y[k] = left(y[k], c.x), y[k + 1] = left(y[k + 1], c.y);
          y[k + 2] = left(y[k + 2], c.z), y[k + 3] = left(y[k + 3], c.w);
        }
        if (codec::is_tq(to.format()) && !rotates) {
#pragma unroll
          for (int k = 0; k < kElements; ++k) y[k] = flushed(y[k]);
        }
        const float most = most_between<kThreads>(__float_as_uint(largest_or_nan<kElements>(y)));
        if (largest == largest) largest = most;
      }
      to.with([&]<Format kFormat>() {
        using P = Planes<kFormat, Shape>;
        const Tables<kFormat, To::kOne> tables(ptx::shared_address(tables_at));
        std::uint32_t words[P::kWords];
        std::uint16_t scales[kScaleGroups<kFormat, Shape::kD>];
        encode_vector<kFormat, Shape>(y, t, largest, tables, words, scales);
        regroup<typename P::Low, P::kLow>(words, t);
        if constexpr (P::kHigh != 0) regroup<typename P::High, P::kHigh>(words + P::Low::kWords, t);
        __syncwarp();
        if (place < count) {
          auto* codes = reinterpret_cast<std::uint32_t*>(at);
#pragma unroll
          for (int i = 0; i < P::kWords; ++i) {
            codes[i * kThreads + (i < P::Low::kWords ? P::Low::place(t) : P::High::place(t))] = words[i];
          }
          if (t == 0) {
#pragma unroll
            for (int g = 0; g < kScaleGroups<kFormat, Shape::kD>; ++g) {
              *reinterpret_cast<std::uint16_t*>(block + codec::scale_at(layout, chunk + row, g)) =
                  static_cast<std::uint16_t>(scales[g] | sign);
            }
          }
        }
        __syncwarp();
        const int of_warp = min(kOfWarp, count - base);
        const std::byte* from = rows + base * pitch;
        if (!is_value) {
          const auto row_at = static_cast<std::size_t>(chunk + base) * (Shape::kD / 8);
          store_keys<Shape, P::kLow>(from, pitch, of_warp, low + row_at * P::kLow);
          if constexpr (P::kHigh != 0) {
            store_keys<Shape, P::kHigh>(from + P::Low::kWords * kThreads * 4, pitch, of_warp, high + row_at * P::kHigh);
          }
        } else if (kOctets && whole) {
          store.template operator()<kFormat, true, 32>(from, chunk + base, of_warp);
        }
      });
    }
    if (is_value && !(kOctets && whole)) {
      team_barrier<Shape>();
      if constexpr (To::kOne) {
        store.template operator()<To::format(), false, Shape::kTeamThreads>(rows, chunk, count);
      } else {
        store_any<Shape>(layout, rows, pitch, chunk, count, block);
      }
      team_barrier<Shape>();
    }
    rows += other;
    other = -other;
    chunk += count;
    if (ends_head) chunk = work.first, ++head;
  }
}

template <class Shape>
__device__ __forceinline__ void encode_dense(const WriteParams& params, bool is_value, const PageWork& work) {
#pragma unroll 1
  for (int head = 0; head < work.heads; ++head) {
    store_dense<Shape>(job_of_head(params, is_value, work, head), work.from_exact, false, work.first, work.last);
  }
}

// --- pages -----------------------------------------------------------------------------------------------------------

// One page that a step touches.
struct TouchedPage {
  core::PageRef ref;
  std::int64_t first_row;
  int number;        // of the page in its sequence
  int begin, count;  // tokens of the page that get rows
  bool leaves_tail;
  bool follows, goes_on;  // the page before, or the page behind, gets rows, too

  __device__ bool has_exact_rows() const { return ref.exact >= 0 && count > 0; }
  // Tokens whose rows are to be encoded, from the exact page where there is one.
  __device__ int encode_begin() const { return ref.exact >= 0 ? 0 : begin; }
  __device__ int encode_end() const {
    if (ref.encoded < 0) return 0;
    return ref.exact < 0 ? begin + count : leaves_tail ? kPageTokens : 0;
  }
  __device__ bool is_encoded_whole() const { return encode_begin() == 0 && encode_end() == kPageTokens; }
  // A part of the step begins a page that has codes alone.
  __device__ bool is_begun_by_part() const {
    return ref.exact < 0 && ref.encoded >= 0 && begin == 0 && count > 0 && count < kPageTokens;
  }
};

// The last entry that begins at `place` or before.
template <std::int32_t WriteEntry::*kBegin>
__device__ __forceinline__ std::int32_t find_entry(const WriteParams& params, std::int32_t place) {
  std::int32_t low = 0, high = params.entries;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (params.entry[middle].*kBegin <= place ? low : high) = middle;
  }
  return low;
}

__device__ __forceinline__ WriteEntry entry_of_item(const WriteParams& params, std::int32_t item) {
  return params
      .entry[params.items_each > 0 ? item / params.items_each : find_entry<&WriteEntry::item_begin>(params, item)];
}

__device__ __forceinline__ TouchedPage find_page(const WriteParams& params, std::int32_t item) {
  const CacheView& cache = params.cache;
  const WriteEntry entry = entry_of_item(params, item);
  const SequenceState state = cache.sequences[entry.index];
  const std::int32_t first_page = max(0, state.step_begin / kPageTokens - cache.tail_pages);
  const std::int32_t page = first_page + item - entry.item_begin;
  TouchedPage touched{};
  if (page >= cache.max_pages || page * kPageTokens >= state.length) return touched;
  const ExactEnds ends = cache.exact_ends();
  const std::int32_t begin = max(state.step_begin, page * kPageTokens);
  const std::int32_t end = min(state.length, (page + 1) * kPageTokens);
  const bool leaves_tail = ends.exact(state.step_begin, page) && !ends.exact(state.length, page);
  if (begin >= end && !leaves_tail) return touched;  // most pages of a step of one token
  touched.ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page];
  touched.first_row = std::int64_t{entry.row_begin} + begin - state.step_begin;
  touched.number = page;
  touched.begin = begin - page * kPageTokens;
  touched.count = end - begin;
  touched.leaves_tail = leaves_tail;
  touched.follows = state.step_begin < page * kPageTokens;
  touched.goes_on = state.length > (page + 1) * kPageTokens;
  return touched;
}

__device__ __forceinline__ PageJob page_job(const WriteParams& params, const TouchedPage& page, int head,
                                            bool is_value) {
  const CacheView& cache = params.cache;
  const core::PageRef ref = page.ref;
  const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = ref.encoded < 0
                         ? nullptr
                         : cache.encoded + static_cast<std::uint64_t>(ref.encoded) * cache.encoded_slot_bytes +
                               block * cache.encoded_layout.block_bytes,
          .exact = ref.exact < 0 ? nullptr
                                 : cache.exact + static_cast<std::uint64_t>(ref.exact) * cache.exact_slot_bytes +
                                       block * cache.exact_layout.block_bytes,
          .head = head,
          .is_value = is_value,
          .is_first_page = page.number == 0,
          .first_row = page.first_row,
          .begin = page.begin,
          .count = page.count};
}

// --- centres of pages ------------------------------------------------------------------------------------------------

// Whose centre is to be found, and how: the mean of the first `rows` rows of `page`; 0: as `encoded` has it.
struct CentreJob {
  PageJob page;
  bool from_exact;
  int rows;
  std::byte* encoded;  // the block whose centre it is; null: none
};
// The centre of a page that is encoded whole, from its own rows.
__device__ __forceinline__ CentreJob own_centre(const PageJob& page, bool from_exact, bool makes) {
  return {page, from_exact, !makes ? 0 : page.is_first_page ? 1 : kPageTokens, page.encoded};
}

// The codes of the centres of at most kCentresOfWarp jobs, by one warp. job(i): i < count. `means`: room [4][D].
// `stores`: also where the pages have them; otherwise another block does.
// `before`: codes of a page whose mean one job's centre is, instead of the mean of rows; null: none. The job has rows.
template <class Shape, class Job>
__device__ __forceinline__ void find_centres(const Job& job, int count, bool stores, float* means, std::byte* codes,
                                             const std::byte* before = nullptr) {
  constexpr int kD = Shape::kD;
  bool makes = before != nullptr;  // one of them
  if (before == nullptr) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const CentreJob found = job(i);
      if (found.rows > 0) {
        mean_of_rows<Shape>(found.page, staged_rows<Shape>(*found.page.params, *found.page.side), found.from_exact,
                            found.rows, means + i * kD);
        makes = true;
      }
    }
    __syncwarp();
  }
  const int which = static_cast<int>(threadIdx.x % 32) / CentreShape<kD>::kThreads;
  const CentreJob mine = job(min(which, count - 1));
  const WriteSide& side = *mine.page.side;
  if (before != nullptr) mean_of_codes<kD>(mine.page.params->cache.encoded_layout, before, means);
  if (makes) {
    const float* matrix =
        side.matrix == nullptr ? nullptr : side.matrix + static_cast<std::size_t>(mine.page.head) * kD * kD;
    encode_means<kD>(means, count, matrix, before != nullptr ? BasisKind::none : side.basis,
                     mine.page.params->rotation_scale, codes);
  }
  if (which < count && mine.encoded != nullptr) {
    std::byte* stored = mine.encoded + mine.page.params->cache.encoded_layout.code_bytes;
    std::byte* here = codes + which * CentreCodes<kD>::kBytes;
    if (mine.rows == 0) {
      copy_codes<kD>(stored, here);
    } else if (stores) {
      copy_codes<kD>(here, stored);
    }
  }
  __syncwarp();
}

// The centre of a page of one head, which every block that encodes of the page finds for itself, with the same bits; by
// one warp. `item`: the page's. (A function of its own: inlined, it takes registers from the encoding.)
template <class Shape>
__device__ __noinline__ void find_page_centre(const WriteParams& params, std::int32_t item, const TouchedPage& page,
                                              const PageJob& job, bool stores) {
  CentreJob centre = own_centre(job, page.ref.exact >= 0, page.is_encoded_whole());
  const std::byte* before = nullptr;
  if (page.is_begun_by_part()) {
    centre.rows = 1;  // the first key, unless a page comes before
    const CacheView& cache = params.cache;
    const WriteEntry entry = entry_of_item(params, item);
    core::PageRef ref;
    if (page.number > 0) ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page.number - 1];
    const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + job.head);
    if (ref.exact >= 0) {
      centre.page.exact = cache.exact + static_cast<std::uint64_t>(ref.exact) * cache.exact_slot_bytes +
                          block * cache.exact_layout.block_bytes;
      centre.from_exact = true, centre.rows = kPageTokens;
      const std::int32_t step_begin = cache.sequences[entry.index].step_begin;
      centre.page.begin = max(step_begin - (page.number - 1) * kPageTokens, 0);
      centre.page.first_row = page.first_row - (kPageTokens - centre.page.begin);
    } else if (ref.encoded >= 0) {
      before = cache.encoded + static_cast<std::uint64_t>(ref.encoded) * cache.encoded_slot_bytes +
               block * cache.encoded_layout.block_bytes;
    }
  }
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape>([&](int) { return centre; }, 1, stores, centre_floats<Shape>(), centre_codes<Shape>(), before);
}

// New rows of a page that is exact.
template <class Shape>
__device__ __forceinline__ void store_exact_rows(const PageJob& job) {
  store_dense<Shape>(job, false, true, job.begin, job.begin + job.count);
}

// Jobs of those among 32 items for which has_work(item), dealt to the blocks that look at the same items; by whole
// warps.
struct DealtJobs {
  std::int32_t first_item;
  unsigned items;    // with work, by bits
  int number, step;  // the block's first job, and from one to its next
  __device__ std::int32_t item(int of_items) const {
    return first_item + static_cast<std::int32_t>(__fns(items, 0, of_items + 1));
  }
};
template <class HasWork>
__device__ __forceinline__ DealtJobs deal(std::int32_t count, int place, int blocks, const HasWork& has_work) {
  const int groups = (count + 31) / 32, group = place % groups;
  const int mine = 32 * group + static_cast<int>(threadIdx.x % 32);
  const bool works = mine < count && has_work(mine);
  return {32 * group, __ballot_sync(~0u, works), place / groups, (blocks - group + groups - 1) / groups};
}

}  // namespace kvant::cuda
