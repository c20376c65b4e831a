// Rows of a page encoded, by a team of warps.
//
// A warp copies rows of a page into shared memory (those of the next head while it works on one), encodes them, a
// vector to a few threads, and leaves the codes in place of the rows. Keys go from there to the page, and values whose
// tokens come in whole octets: a word has eight tokens of a channel. So warps do not wait for each other. Where octets
// are in part of other warps, or of other steps, whose bits stay, a team of warps stores them together. Teams of many
// tokens never change one word; of few tokens they may, and do so with atomic operations.
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

// Tokens [first, last) of a page, for `heads` heads from that of `page` on.
struct PageWork {
  PageJob page;
  int heads;
  bool from_exact;
  bool clears;  // what lies behind the tokens
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

// The tables of a format, for encode_heads into AnyFormat, by a block.
template <class Shape, bool kCentred>
__device__ __forceinline__ void fill_tables_of(Format format) {
  extern __shared__ __align__(16) std::byte shared[];
  TableSource source{};
  AnyFormat{format}.with([&]<Format kFormat>() { source = Tables<kFormat, false>::source(); });
  fill_tables<Shape::kBlockThreads, false>(source, shared + (kCentred ? kCentreBytes<Shape> : 0));
  __syncthreads();
}

// A row less its page's centre, or as it is, where the centre does not help: then its scales get the returned bit.
template <class Shape>
__device__ __forceinline__ std::uint32_t leave_centre(Format format, int t, bool rotates, float (&y)[Shape::kElements],
                                                      float& largest) {
  constexpr int kElements = Shape::kElements;
  const auto* centre = reinterpret_cast<const float4*>(centre_floats<Shape>() + t * CentreFloats<Shape>::kApart);
  const bool refuses = refuses_centre<Shape>(y, centre);
  const std::uint32_t sign = refuses ? codec::kRefusedScale : 0u;
  // y - c, rounded once, or y. A product with zero may make 0 of -0, which has a code of its own in fp8.
  const float minus = refuses ? 0.0f : -1.0f;
  const auto left = [&](float x, float c) {
    if (codec::is_fp8(format)) return __fsub_rn(x, refuses ? 0.0f : c);
    return __fmaf_rn(c, minus, x);
  };
#pragma unroll
  for (int k = 0; k < kElements; k += 4) {
    const float4 c = centre[k / 4];
    y[k] = left(y[k], c.x), y[k + 1] = left(y[k + 1], c.y);
    y[k + 2] = left(y[k + 2], c.z), y[k + 3] = left(y[k + 3], c.w);
  }
  if (codec::is_tq(format) && !rotates) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) y[k] = flushed(y[k]);
  }
  const float most = most_between<Shape::kThreads>(__float_as_uint(largest_or_nan<kElements>(y)));
  if (largest == largest) largest = most;
  return sign;
}

// Below this in its basis, a row has nothing in it that could not be stored: the largest of D orthonormal coordinates
// is at least the largest given one / sqrt(D).
__device__ __forceinline__ float least_in_doubt(const WriteParams& params, bool rotates) {
  return rotates ? 65000.0f * params.rotation_scale : 65000.0f;
}

// A token's row in its basis: this thread's elements, and the largest magnitude of all of them, NaN where the row
// cannot be stored. `other`: bytes to the other buffer, which is free where rows are multiplied by a matrix, because
// nothing is staged ahead for these rows. in_doubt: a row that is smaller can be stored.
template <class Shape>
__device__ __forceinline__ float load_row(const WriteParams& params, const WriteSide& side, const StagedRows& staged,
                                          const PageWork& work, int head, int token, std::byte* at, int other,
                                          bool rotates, bool is_tq, float in_doubt, int t,
                                          float (&y)[Shape::kElements]) {
  constexpr int kThreads = Shape::kThreads;
  const std::byte* from_basis = at;
  if (side.basis == BasisKind::calibrated) {
    auto* result = reinterpret_cast<float*>(at + other);
    multiply_row<Shape>(reinterpret_cast<const float*>(at), result, t,
                        side.matrix + static_cast<std::size_t>(work.page.head + head) * Shape::kD * Shape::kD);
    from_basis = at + other;
  }
  const std::uint32_t mine = load_vector<Shape>(from_basis, staged.dtype, rotates, is_tq, t, params.rotation_scale, y);
  float largest = most_between<kThreads>(mine);
  if (__any_sync(0xFFFFFFFFu, staged.unchecked && !(largest < in_doubt))) {
    const bool given = work.page.given(token, work.from_exact);
    const bool storable = check_row<Shape>(params, at, staged.dtype, given, t);
    if (sum_between<kThreads>(storable ? 0u : 1u) != 0) largest = __int_as_float(0x7FC00000);
  }
  return largest;
}

// Codes of values, from rows of words in shared memory, to both planes of a block.
template <class Shape, class P, Octets kOctets, int kOf>
__device__ __forceinline__ void store_planes(const std::byte* from, int pitch, int token, int tokens, int zeros_to,
                                             std::byte* low, std::byte* high) {
  store_values<Shape, P::kLow, kOctets, kOf>(from, pitch, token, tokens, zeros_to, low);
  if constexpr (P::kHigh != 0) {
    from += P::Low::kWords * Shape::kThreads * 4;
    store_values<Shape, P::kHigh, kOctets, kOf>(from, pitch, token, tokens, zeros_to, high);
  }
}

// The same of keys.
template <class Shape, class P>
__device__ __forceinline__ void store_key_planes(const std::byte* from, int pitch, int token, int tokens,
                                                 std::byte* low, std::byte* high) {
  const auto row_at = static_cast<std::size_t>(token) * (Shape::kD / 8);
  store_keys<Shape, P::kLow>(from, pitch, tokens, low + row_at * P::kLow);
  if constexpr (P::kHigh != 0) {
    store_keys<Shape, P::kHigh>(from + P::Low::kWords * Shape::kThreads * 4, pitch, tokens, high + row_at * P::kHigh);
  }
}

// A vector's words to its row's place in shared memory, and its scales to the block.
template <class Shape, class P, int kGroups>
__device__ __forceinline__ void put_vector(const std::uint32_t (&words)[P::kWords],
                                           const std::uint16_t (&scales)[kGroups], std::uint32_t sign, int t,
                                           std::byte* at, std::byte* block, const codec::SideLayout& layout,
                                           int token) {
  auto* codes = reinterpret_cast<std::uint32_t*>(at);
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    codes[i * Shape::kThreads + (i < P::Low::kWords ? P::Low::place(t) : P::High::place(t))] = words[i];
  }
  if (t == 0) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      *reinterpret_cast<std::uint16_t*>(block + codec::scale_at(layout, token, g)) =
          static_cast<std::uint16_t>(scales[g] | sign);
    }
  }
}

// The codes of a page's tokens, by a team; of one head into AnyFormat. `work` may lie in shared memory, since registers
// that hold it would be missing.
//   kCentred   keys may be around a centre: the page has its codes, or with AnyFormat the warp
// With AnyFormat, work that clears makes zeros of values' codes behind the tokens, in the octet of the last one.
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
  const int vector = thread_of_team<Shape>(kThreads), t = static_cast<int>(threadIdx.x % kThreads);
  const int first_of_warp = thread_of_team<Shape>(32) * kOfWarp;
  const bool rotates = side.basis == BasisKind::hadamard;
  const float in_doubt = least_in_doubt(params, rotates);
  constexpr Octets kParts = To::kOne ? Octets::parts : Octets::shared;

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
    const bool by_octet = kOfWarp % 8 == 0 && (chunk | count) % 8 == 0;
    const auto store = [&]<Format kFormat, Octets kOctets, int kOf>(const std::byte* from, int token, int tokens,
                                                                    int zeros_to) {
      store_planes<Shape, Planes<kFormat, Shape>, kOctets, kOf>(from, pitch, token, tokens, zeros_to, low, high);
    };
    for (int base = first_of_warp; base < count; base += kAtOnce) {
      const int place = base + vector - first_of_warp;
      const int row = min(place, count - 1);  // threads without a vector go along with the last one's
      std::byte* at = rows + row * pitch;
      float y[kElements];
      float largest = load_row<Shape>(params, side, staged, work, head, chunk + row, at, other, rotates,
                                      codec::is_tq(to.format()), in_doubt, t, y);
      std::uint32_t sign = 0;  // the scales get it
      if (centred) sign = leave_centre<Shape>(to.format(), t, rotates, y, largest);
      to.with([&]<Format kFormat>() {
        using P = Planes<kFormat, Shape>;
        const Tables<kFormat, To::kOne> tables(ptx::shared_address(tables_at));
        std::uint32_t words[P::kWords];
        std::uint16_t scales[kScaleGroups<kFormat, Shape::kD>];
        encode_vector<kFormat, Shape>(y, t, largest, tables, words, scales);
        regroup<typename P::Low, P::kLow>(words, t);
        if constexpr (P::kHigh != 0) regroup<typename P::High, P::kHigh>(words + P::Low::kWords, t);
        __syncwarp();
        if (place < count) put_vector<Shape, P>(words, scales, sign, t, at, block, layout, chunk + row);
        __syncwarp();
        const int of_warp = min(kOfWarp, count - base);
        const std::byte* from = rows + base * pitch;
        if (!is_by_channel<Shape>(is_value)) {
          store_key_planes<Shape, P>(from, pitch, chunk + base, of_warp, low, high);
        } else if (by_octet) {
          store.template operator()<kFormat, Octets::whole, 32>(from, chunk + base, of_warp, of_warp);
        }
      });
    }
    if (is_by_channel<Shape>(is_value) && !by_octet) {
      team_barrier<Shape>();
      const int zeros = !To::kOne && work.clears ? -work.last & 7 : 0;
      to.with([&]<Format kFormat>() {
        store.template operator()<kFormat, kParts, Shape::kTeamThreads>(rows, chunk, count, count + zeros);
      });
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

}  // namespace kvant::cuda
