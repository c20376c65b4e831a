// The kernel that stores rows (cuda/write.hpp says what its grid is), for one head_dim.
//
// A CTA copies the rows of a page into shared memory (those of the next head while it works on one), encodes them, a vector
// to a few threads, and leaves the codes in place of the rows; keys go from there to the page by warps, values by the whole
// block, since a word of theirs has tokens of several warps. No two CTAs change one word; octets that a step covers in part keep their other tokens' bits.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/search.cuh"

namespace kvant::cuda {

inline constexpr int kWriteCtas = 3;       // on a multiprocessor
inline constexpr int kRowsForCopies = 16;  // that pay for filling tables with copies
inline constexpr int kStepRows = 4;        // of a block of the step kernel

// y = A x, both [D] of one vector in shared memory. Not bit-equal to the host's: sums in the order of j. A few elements at a
// time, because its loads in flight would cost all other bases registers; so would a call.
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

enum class Filled { no, once, copies };  // tables in shared memory

// Tokens [first, last) of the page, for `heads` heads from that of `job` on.
template <class Shape, Format kFormat>
__device__ __forceinline__ Filled encode_heads(PageJob job, int heads, bool from_exact, int first, int last,
                                               Filled filled) {
  using P = Planes<kFormat, Shape>;
  constexpr int kThreads = Shape::kThreads, kOfWarp = 32 / kThreads;
  extern __shared__ __align__(16) std::byte shared[];
  const WriteParams& params = *job.params;
  const codec::SideLayout& layout = job.layout(false);
  const Filled wanted = params.copies && last - first >= kRowsForCopies ? Filled::copies : Filled::once;
  std::byte* rows = shared + Tables<kFormat>::bytes(params.copies);
  const StagedRows staged = staged_rows<Shape>(job);
  __syncthreads();  // whoever still reads what lies in shared memory
  stage_rows<Shape>(job, staged, from_exact, first, min(params.rows, last - first), rows);
  if (filled < wanted) {
    Tables<kFormat>::template fill<Shape::kBlockThreads>(shared, wanted == Filled::copies);
    filled = wanted;
  }
  const Tables<kFormat> tables(ptx::shared_address(shared), filled == Filled::copies);
  int other = params.rows * staged.pitch;  // bytes from `rows` to the other buffer
  const int t = static_cast<int>(threadIdx.x) % kThreads, vector = static_cast<int>(threadIdx.x) / kThreads;
  const int first_of_warp = vector / kOfWarp * kOfWarp;
  const bool rotates = job.side->basis == BasisKind::hadamard;
  // Below this in its basis, a row has nothing in it that could not be stored: the largest of D orthonormal coordinates is
  // at least the largest given one / sqrt(D).
  const float in_doubt = rotates ? 65000.0f * params.rotation_scale : 65000.0f;
  constexpr int kHighAt = P::Low::kWords * kThreads * 4;  // bytes from a row's begin
  bool ahead = true;

  for (int chunk = first; heads > 0;) {
    const int count = min(params.rows, last - chunk);
    if (!ahead) stage_rows<Shape>(job, staged, from_exact, chunk, count, rows);
    ptx::copy_wait<0>();
    __syncthreads();
    ahead = staged.unchecked && count == last - first && heads > 1;
    if (ahead) {
      PageJob next = job;
      next.to_next_head();
      stage_rows<Shape>(next, staged, from_exact, chunk, count, rows + other);
    }
    std::byte* low = job.encoded + layout.plane_offset[0];
    std::byte* high = job.encoded + layout.plane_offset[1];
    for (int base = first_of_warp; base < count; base += Shape::kBlockThreads / kThreads) {
      const int place = base + vector - first_of_warp;
      const int row = min(place, count - 1);  // threads without a vector go along with the last one's
      std::byte* at = rows + row * staged.pitch;
      const std::byte* from_basis = at;
      if (job.side->basis == BasisKind::calibrated) {
        // The other buffer is free: nothing is staged ahead for these rows.
        auto* to = reinterpret_cast<float*>(at + other);
        multiply_row<Shape>(reinterpret_cast<const float*>(at), to, t,
                            job.side->matrix + static_cast<std::size_t>(job.head) * Shape::kD * Shape::kD);
        from_basis = at + other;
      }
      float y[Shape::kElements];
      const std::uint32_t mine =
          load_vector<Shape, codec::is_tq(kFormat)>(from_basis, staged.dtype, rotates, t, params.rotation_scale, y);
      float largest = most_between<kThreads>(mine);
      if (__any_sync(0xFFFFFFFFu, staged.unchecked && !(largest < in_doubt))) {
        const bool storable = check_row<Shape>(job, at, staged.dtype, job.given(chunk + row, from_exact), t);
        if (sum_between<kThreads>(storable ? 0u : 1u) != 0) largest = __int_as_float(0x7FC00000);
      }
      std::uint32_t words[P::kWords];
      std::uint16_t scales[kScaleGroups<kFormat, Shape::kD>];
      encode_vector<kFormat, Shape>(y, t, largest, tables, words, scales);
      __syncwarp();
      if (place < count) {
#pragma unroll
        for (int i = 0; i < P::kWords; ++i) reinterpret_cast<std::uint32_t*>(at)[i * kThreads + t] = words[i];
        if (t == 0) {
#pragma unroll
          for (int g = 0; g < kScaleGroups<kFormat, Shape::kD>; ++g) {
            *reinterpret_cast<std::uint16_t*>(job.encoded + codec::scale_at(layout, chunk + row, g)) = scales[g];
          }
        }
      }
      __syncwarp();
      const int of_warp = min(kOfWarp, count - base);
      std::byte* from = rows + base * staged.pitch;
      if (job.is_value) {
        regroup_rows<Shape, P::kLow, false>(from, staged.pitch, of_warp, nullptr);
        if constexpr (P::kHigh != 0)
          regroup_rows<Shape, P::kHigh, false>(from + kHighAt, staged.pitch, of_warp, nullptr);
      } else {
        const auto row_at = static_cast<std::size_t>(chunk + base) * (Shape::kD / 8);
        regroup_rows<Shape, P::kLow, true>(from, staged.pitch, of_warp, low + row_at * P::kLow);
        if constexpr (P::kHigh != 0) {
          regroup_rows<Shape, P::kHigh, true>(from + kHighAt, staged.pitch, of_warp, high + row_at * P::kHigh);
        }
      }
    }
    __syncthreads();
    if (job.is_value) {
      if (chunk % 8 == 0 && count % 8 == 0) {
        store_values<Shape, P::kLow, true>(rows, staged.pitch, chunk, count, low);
        if constexpr (P::kHigh != 0) {
          store_values<Shape, P::kHigh, true>(rows + kHighAt, staged.pitch, chunk, count, high);
        }
      } else {
        store_values<Shape, P::kLow, false>(rows, staged.pitch, chunk, count, low);
        if constexpr (P::kHigh != 0) {
          store_values<Shape, P::kHigh, false>(rows + kHighAt, staged.pitch, chunk, count, high);
        }
      }
    }
    rows += other;
    other = -other;
    chunk += count;
    if (chunk == last) {
      chunk = first;
      job.to_next_head();
      --heads;
    }
  }
  return filled;
}

template <class Shape>
__device__ __forceinline__ void encode_dense(PageJob job, int heads, bool from_exact, int first, int last) {
  for (; heads > 0; --heads) {
    if (from_exact) {
      store_dense<Shape, true>(job, false, first, last);
    } else {
      store_dense<Shape, false>(job, false, first, last);
    }
    job.to_next_head();
  }
}

template <class Shape>
__device__ __forceinline__ Filled encode_any(const PageJob& job, int heads, bool from_exact, int first, int last,
                                             Filled filled) {
  switch (job.layout(false).format) {
    case Format::fp8: return encode_heads<Shape, Format::fp8>(job, heads, from_exact, first, last, filled);
    case Format::tq2: return encode_heads<Shape, Format::tq2>(job, heads, from_exact, first, last, filled);
    case Format::tq3: return encode_heads<Shape, Format::tq3>(job, heads, from_exact, first, last, filled);
    case Format::tq4: return encode_heads<Shape, Format::tq4>(job, heads, from_exact, first, last, filled);
    case Format::tq5: return encode_heads<Shape, Format::tq5>(job, heads, from_exact, first, last, filled);
    case Format::tq6: return encode_heads<Shape, Format::tq6>(job, heads, from_exact, first, last, filled);
    case Format::tq8: return encode_heads<Shape, Format::tq8>(job, heads, from_exact, first, last, filled);
    default: encode_dense<Shape>(job, heads, from_exact, first, last); return filled;
  }
}

// --- the kernel ------------------------------------------------------------------------------------------------------------

// One page that a step touches.
struct TouchedPage {
  core::PageRef ref;
  std::int64_t first_row;
  int begin, count;  // tokens of the page that get rows
  bool leaves_tail;
};

__device__ __forceinline__ TouchedPage find_page(const WriteParams& params, std::int32_t item) {
  const CacheView& cache = params.cache;
  std::int32_t low = 0;
  if (params.items_each > 0) {
    low = item / params.items_each;
  } else {
    std::int32_t high = params.entries;  // the last entry that begins at the item or before
    while (high - low > 1) {
      const std::int32_t middle = (low + high) / 2;
      (params.entry[middle].item_begin <= item ? low : high) = middle;
    }
  }
  const WriteEntry entry = params.entry[low];
  const SequenceState state = cache.sequences[entry.index];
  const std::int32_t first_page = max(0, state.step_begin / kPageTokens - cache.tail_pages);
  const std::int32_t page = first_page + item - entry.item_begin;
  TouchedPage touched{};
  if (page >= cache.max_pages || page * kPageTokens >= state.length) return touched;
  const auto exact_at = [&](std::int32_t length) {  // core::ExactEnds
    return page < cache.sink_pages || (cache.tail_pages > 0 && length < kPageTokens * (page + 1 + cache.tail_pages));
  };
  const std::int32_t begin = max(state.step_begin, page * kPageTokens);
  const std::int32_t end = min(state.length, (page + 1) * kPageTokens);
  const bool leaves_tail = exact_at(state.step_begin) && !exact_at(state.length);
  if (begin >= end && !leaves_tail) return touched;  // most pages of a step of one token
  touched.ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page];
  touched.first_row = std::int64_t{entry.row_begin} + begin - state.step_begin;
  touched.begin = begin - page * kPageTokens;
  touched.count = end - begin;
  touched.leaves_tail = leaves_tail;
  return touched;
}

// Of one format; where steps are short, of any (two launches would take longer).
template <class Shape, bool kAnyFormat, Format kFormat>
__global__ void __launch_bounds__(Shape::kBlockThreads, kWriteCtas * 128 / Shape::kBlockThreads)
    write_kernel(const __grid_constant__ WriteParams params) {
  const CacheView& cache = params.cache;
  const std::int64_t jobs = std::int64_t{params.items} * cache.kv_heads;
  const bool both = params.sides == WriteSides::both,
             is_value = both ? blockIdx.x % 2 != 0 : params.sides == WriteSides::values;
  const std::int64_t blocks = both ? gridDim.x / 2 : gridDim.x, place = both ? blockIdx.x / 2 : blockIdx.x;
  const auto last = static_cast<std::int32_t>(jobs * (place + 1) / blocks);
  Filled filled = Filled::no;
  ptx::wait_prerequisites();
  for (auto i = static_cast<std::int32_t>(jobs * place / blocks); i < last;) {
    const std::int32_t item = i / cache.kv_heads, head = i % cache.kv_heads;
    const int heads = min(cache.kv_heads - head, last - i);
    i += heads;
    const TouchedPage page = find_page(params, item);
    if (page.count <= 0 && !page.leaves_tail) continue;
    const core::PageRef ref = page.ref;
    const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
    const PageJob job{
        .params = &params,
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
        .first_row = page.first_row,
        .begin = page.begin,
        .count = page.count};
    const bool from_exact = ref.exact >= 0;
    if (from_exact && job.count > 0) {
      PageJob kept = job;
      for (int h = 0; h < heads; ++h) {
        store_dense<Shape, false>(kept, true, job.begin, job.begin + job.count);
        kept.to_next_head();
      }
    }
    if (ref.encoded < 0 || (from_exact ? !page.leaves_tail : job.count <= 0)) continue;
    const int first = from_exact ? 0 : job.begin, end = from_exact ? kPageTokens : job.begin + job.count;
    if constexpr (kAnyFormat) {
      filled = encode_any<Shape>(job, heads, from_exact, first, end, filled);
    } else if constexpr (codec::is_dense(kFormat)) {
      encode_dense<Shape>(job, heads, from_exact, first, end);
    } else {
      filled = encode_heads<Shape, kFormat>(job, heads, from_exact, first, end, filled);
    }
  }
}

inline int table_bytes(Format format, bool copies) {
  switch (format) {
    case Format::fp8: return Tables<Format::fp8>::bytes(copies);
    case Format::tq2: return Tables<Format::tq2>::bytes(copies);
    case Format::tq3: return Tables<Format::tq3>::bytes(copies);
    case Format::tq4: return Tables<Format::tq4>::bytes(copies);
    case Format::tq5: return Tables<Format::tq5>::bytes(copies);
    case Format::tq6: return Tables<Format::tq6>::bytes(copies);
    case Format::tq8: return Tables<Format::tq8>::bytes(copies);
    default: return 0;
  }
}

using WriteFunction = void (*)(WriteParams);

template <int kD>
WriteFunction wide_kernel(Format format) {
  using Shape = WideShape<kD>;
  switch (format) {
    case Format::fp8: return &write_kernel<Shape, false, Format::fp8>;
    case Format::tq2: return &write_kernel<Shape, false, Format::tq2>;
    case Format::tq3: return &write_kernel<Shape, false, Format::tq3>;
    case Format::tq4: return &write_kernel<Shape, false, Format::tq4>;
    case Format::tq5: return &write_kernel<Shape, false, Format::tq5>;
    case Format::tq6: return &write_kernel<Shape, false, Format::tq6>;
    case Format::tq8: return &write_kernel<Shape, false, Format::tq8>;
    default: return &write_kernel<Shape, false, Format::f16>;  // all dense ones
  }
}
template <int kD>
WriteFunction step_kernel() {
  return &write_kernel<StepShape<kD>, true, Format::f16>;
}

template <int kD>
cudaError_t prepare_write(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  for (const WriteFunction f :
       {wide_kernel<kD>(layout.k.format), wide_kernel<kD>(layout.v.format), step_kernel<kD>()}) {
    const cudaError_t error = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_write(WriteParams& p, std::int32_t most_tokens, const DeviceLimits& limits, cudaStream_t stream) {
  Launch how(1, WideShape<kD>::kBlockThreads, stream, limits.overlaps);
  cudaLaunchConfig_t& config = how.config;
  const int most_rows = p.cache.tail_pages > 0 ? kPageTokens : base::min(most_tokens, kPageTokens);
  p.copies = most_rows >= kRowsForCopies;
  const auto& layout = p.cache.encoded_layout;
  const std::int64_t jobs = std::int64_t{p.items} * p.cache.kv_heads;
  const auto room_for = [&](int tables, int pitch) {
    p.rows = base::min(most_rows, (limits.shared_bytes - tables) / (2 * pitch));
    config.dynamicSmemBytes = static_cast<std::size_t>(tables + 2 * p.rows * pitch);
  };
  const int k_tables = table_bytes(layout.k.format, p.copies), v_tables = table_bytes(layout.v.format, p.copies);
  const int k_pitch = staged_pitch(kD, staged_dtype(p.k, p.rounding));
  const int v_pitch = staged_pitch(kD, staged_dtype(p.v, p.rounding));
  if (most_rows <= kStepRows) {
    p.sides = WriteSides::both;
    room_for(base::max(k_tables, v_tables), base::max(k_pitch, v_pitch));
    config.gridDim = dim3(static_cast<unsigned>(2 * jobs));
    config.blockDim = dim3(StepShape<kD>::kBlockThreads);
    return cudaLaunchKernelEx(&config, step_kernel<kD>(), p);
  }
  const auto launch = [&](WriteSides sides, Format format, int tables, int pitch) {
    p.sides = sides;
    room_for(tables, pitch);
    const bool is_dense = codec::is_dense(format);
    if (is_dense) config.dynamicSmemBytes = 0;
    // Tables are filled once for all that a block does.
    const int shared = static_cast<int>(config.dynamicSmemBytes) + 1024;
    const int resident = base::clamp(limits.multiprocessor_shared_bytes / shared, 1, kWriteCtas);
    const std::int64_t all = sides == WriteSides::both ? 2 * jobs : jobs;
    const std::int64_t most = (resident * limits.multiprocessors + 1) / 2 * 2;
    config.gridDim = dim3(static_cast<unsigned>(p.copies && !is_dense ? base::min(all, most) : all));
    return cudaLaunchKernelEx(&config, wide_kernel<kD>(format), p);
  };
  if (wide_kernel<kD>(layout.k.format) == wide_kernel<kD>(layout.v.format)) {
    return launch(WriteSides::both, layout.k.format, k_tables, base::max(k_pitch, v_pitch));
  }
  const cudaError_t error = launch(WriteSides::keys, layout.k.format, k_tables, k_pitch);
  return error != cudaSuccess ? error : launch(WriteSides::values, layout.v.format, v_tables, v_pitch);
}

template <int kD>
WriteKernel write_kernel_of() {
  return {kD, &prepare_write<kD>, &launch_write<kD>};
}

}  // namespace kvant::cuda
