#include "cuda/store/tables.hpp"

#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kEntriesAtOnce) set_entries_kernel(const __grid_constant__ EntryBatch batch) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i >= batch.count) return;
  const EntryChange& change = batch.change[i];
  static_cast<int2*>(batch.entries)[change.at] = make_int2(change.first, change.second);
}

// Between the last step's kernels and this one's, which can begin meanwhile and wait before they read lengths.
__global__ void __launch_bounds__(kAdvancesAtOnce) advance_kernel(const __grid_constant__ AdvanceBatch batch) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const auto i = static_cast<int>(threadIdx.x);
  if (i >= batch.count) return;
  SequenceState& s = batch.sequences[batch.append[i].index];
  const std::int32_t length = s.length;
  s = {.length = length + batch.append[i].tokens, .step_begin = length};
}

// One slot a row of the grid. Slots are whole multiples of 64 bytes.
__global__ void __launch_bounds__(kCopyThreads) copy_slots_kernel(const __grid_constant__ CopyBatch batch) {
  const auto& copy = batch.copy[blockIdx.y];
  std::byte* pool = copy.exact ? batch.exact : batch.encoded;
  const std::uint64_t bytes = copy.exact ? batch.exact_slot_bytes : batch.encoded_slot_bytes;
  const auto* from = reinterpret_cast<const uint4*>(pool + static_cast<std::uint64_t>(copy.from) * bytes);
  auto* to = reinterpret_cast<uint4*>(pool + static_cast<std::uint64_t>(copy.to) * bytes);
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes / sizeof(uint4); i += stride) {
    to[i] = from[i];
  }
}

}  // namespace

cudaError_t set_entries(const EntryBatch& batch, cudaStream_t stream) {
  set_entries_kernel<<<1, kEntriesAtOnce, 0, stream>>>(batch);
  return cudaGetLastError();
}
cudaError_t advance_lengths(const AdvanceBatch& batch, bool overlaps, cudaStream_t stream) {
  const Launch launch(1, kAdvancesAtOnce, stream, overlaps);
  return cudaLaunchKernelEx(&launch.config, advance_kernel, batch);
}
cudaError_t copy_slots(const CopyBatch& batch, cudaStream_t stream) {
  copy_slots_kernel<<<dim3(32, static_cast<unsigned>(batch.count)), kCopyThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace kvant::cuda
