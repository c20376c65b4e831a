// Launches of kernels for many tokens and of those that stage rows, for one head_dim.
#pragma once

#include <bit>

#include "cuda/append/many.cuh"

namespace kvant::cuda {

using ManyFunction = void (*)(WriteParams, SlotList);

// Formats with a kernel for values alone and keys without a centre: tq4, the default of values. Others take the kernel
// for centres then, which is up to 13 % slower (docs/lab/cuda-append.md).
constexpr bool has_plain_kernel(Format format) {
  return format == Format::tq4;
}
struct ManyKernel {
  ManyFunction function;
  int bytes;  // shared memory in front of tables
};
// centred: keys are around centres.
template <int kD>
ManyKernel many_kernel_of(Format format, bool centred) {
  using Shape = BulkShape<kD>;
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                                         \
  case Format::name: {                                                     \
    if constexpr (has_plain_kernel(Format::name)) {                        \
      if (!centred) return {&many_kernel<Shape, Format::name, false>, 0};  \
    }                                                                      \
    return {&many_kernel<Shape, Format::name, true>, kCentreBytes<Shape>}; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return {&many_dense_kernel<DenseShape<kD>>, 0};
  }
}

// A launch of kernels that stage rows in shared memory: of many tokens, or of few.
template <int kD>
struct StagedLaunch {
  using Bulk = BulkShape<kD>;
  WriteParams& p;
  const DeviceLimits& limits;
  int shared_bytes;
  Launch how;
  int k_pitch, v_pitch;  // elements from one staged row to the next

  const WriteSides wanted;  // what all launches together write

  StagedLaunch(WriteParams& params, const DeviceLimits& device, cudaStream_t stream)
      : p(params),
        limits(device),
        shared_bytes(staging_bytes(device)),
        how(1, Bulk::kBlockThreads, stream, device.overlaps()),
        k_pitch(staged_pitch(kD, staged_dtype(params, params.k))),
        v_pitch(staged_pitch(kD, staged_dtype(params, params.v))),
        wanted(params.sides) {}
  // Blocks of a launch with so many for each side that is written.
  [[nodiscard]] std::int64_t blocks_of_sides(std::int64_t each) const {
    return wanted == WriteSides::both ? 2 * each : each;
  }

  // A launch in front of the others, of a kernel that stages no rows.
  template <class... Params>
  cudaError_t launch_before(std::int64_t blocks, int threads, void (*kernel)(Params...),
                            const Params&... params) const {
    Launch before(static_cast<unsigned>(blocks), threads, how.config.stream, limits.overlaps());
    return cudaLaunchKernelEx(&before.config, kernel, params...);
  }
  // Sets p.rows and the bytes of shared memory; `before`: bytes in front of the rows.
  void room_for(int teams, int before, int pitch, int most_rows) {
    const int fit = (shared_bytes - before) / (2 * teams * pitch);
    p.rows = most_rows <= fit ? most_rows : static_cast<int>(std::bit_floor(static_cast<unsigned>(fit)));
    how.config.dynamicSmemBytes = static_cast<std::size_t>(before + 2 * teams * p.rows * pitch);
  }
  // For steps of few tokens: blocks of one warp, of any format; so many a side.
  void size_step(WriteSides sides, std::int64_t blocks, int before, int most_rows) {
    const auto& layout = p.cache.encoded_layout;
    p.sides = sides;
    room_for(1, before + base::max(table_bytes<false>(layout.k.format), table_bytes<false>(layout.v.format)),
             base::max(k_pitch, v_pitch), most_rows);
    how.config.gridDim = dim3(static_cast<unsigned>(sides == WriteSides::both ? 2 * blocks : blocks));
    how.config.blockDim = dim3(StepShape<kD>::kBlockThreads);
  }
  // For a kernel of one format. `dense_blocks`: of a dense format's, a side; `before`: bytes in front of tables.
  void size_many(WriteSides sides, Format format, std::int64_t jobs, std::int64_t dense_blocks, int before,
                 int most_rows) {
    p.sides = sides;
    const int pitch = sides == WriteSides::both   ? base::max(k_pitch, v_pitch)
                      : sides == WriteSides::keys ? k_pitch
                                                  : v_pitch;
    const std::int64_t of_sides = sides == WriteSides::both ? 2 : 1;
    std::int64_t blocks = dense_blocks;
    if (codec::is_dense(format)) {
      how.config.blockDim = dim3(DenseShape<kD>::kBlockThreads);
      how.config.dynamicSmemBytes = 0;
    } else {
      how.config.blockDim = dim3(Bulk::kBlockThreads);
      room_for(kTeams<Bulk>, before + table_bytes<true>(format), pitch, most_rows);
      // Tables are filled once for all that a block does.
      const int shared = static_cast<int>(how.config.dynamicSmemBytes) + 1024;
      const int resident = base::clamp(limits.multiprocessor_shared_bytes / shared, 1, kWriteCtas);
      blocks = base::min((jobs + kTeams<Bulk> - 1) / kTeams<Bulk>,
                         base::max(std::int64_t{resident} * limits.multiprocessors / of_sides, std::int64_t{1}));
    }
    p.key_blocks = 0;
    if (sides == WriteSides::both && codec::is_centred(p.cache.encoded_layout)) {
      // Teams with few jobs get equally many.
      const int share = jobs < 4 * kTeams<Bulk> * blocks ? 50 : kKeyShare;
      p.key_blocks = static_cast<std::uint32_t>(2 * blocks * share / 100);
    }
    how.config.gridDim = dim3(static_cast<unsigned>(of_sides * blocks));
  }
};

// Prepares the kernels for many tokens, and `few`, the kernel for few tokens.
template <int kD>
cudaError_t prepare_staged(const codec::PageLayout& layout, const void* few, const DeviceLimits& limits) {
  const ManyFunction of_keys = many_kernel_of<kD>(layout.k.format, codec::is_centred(layout)).function,
                     of_values = many_kernel_of<kD>(layout.v.format, false).function;
  for (const void* f : {few, reinterpret_cast<const void*>(of_keys), reinterpret_cast<const void*>(of_values)}) {
    const cudaError_t error = prepare_shared(f, staging_bytes(limits));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Launches the kernels of many tokens, one for both sides if one does both; `jobs` a side.
template <int kD>
cudaError_t launch_many(StagedLaunch<kD>& launch, const SlotList& list, std::int64_t jobs, std::int64_t dense_blocks,
                        int most_rows) {
  const codec::PageLayout& layout = launch.p.cache.encoded_layout;
  const bool centred = codec::is_centred(layout);
  const ManyKernel of_keys = many_kernel_of<kD>(layout.k.format, centred);
  const auto launch_of = [&](WriteSides sides, Format format, const ManyKernel& kernel) {
    launch.size_many(sides, format, jobs, dense_blocks, kernel.bytes, most_rows);
    return cudaLaunchKernelEx(&launch.how.config, kernel.function, launch.p, list);
  };
  // A kernel of centred keys stores values, too: they have no centre.
  if (launch.wanted == WriteSides::both && many_kernel_of<kD>(layout.v.format, centred).function == of_keys.function) {
    return launch_of(WriteSides::both, layout.k.format, of_keys);
  }
  const cudaError_t error =
      has_keys(launch.wanted) ? launch_of(WriteSides::keys, layout.k.format, of_keys) : cudaSuccess;
  if (error != cudaSuccess || !has_values(launch.wanted)) return error;
  return launch_of(WriteSides::values, layout.v.format, many_kernel_of<kD>(layout.v.format, false));
}

}  // namespace kvant::cuda
