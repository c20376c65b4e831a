#include "cuda/store/transfer.hpp"

#include <algorithm>

#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {

Transfer::~Transfer() {
  if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
  for (const Half& half : halves_) {
    if (half.memory != nullptr) (void)cudaFreeHost(half.memory);
    if (half.done != nullptr) (void)cudaEventDestroy(half.done);
  }
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Status Transfer::prepare(std::size_t slot_bytes, cudaStream_t after) {
  if (stream_ == nullptr) KVANT_CUDA_TRY(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (begun_ == nullptr) KVANT_CUDA_TRY(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming));
  const std::size_t bytes = std::max(slot_bytes, kBatchBytes / slot_bytes * slot_bytes);
  for (Half& half : halves_) {
    if (half.done == nullptr) KVANT_CUDA_TRY(cudaEventCreateWithFlags(&half.done, cudaEventDisableTiming));
    KVANT_CUDA_TRY(cudaEventSynchronize(half.done));  // an earlier upload may still read the memory
    if (half.memory != nullptr && half_bytes_ < bytes) {
      KVANT_CUDA_TRY(cudaFreeHost(half.memory));
      half.memory = nullptr;
    }
  }
  half_bytes_ = std::max(half_bytes_, bytes);
  for (Half& half : halves_) {
    if (half.memory != nullptr) continue;
    void* memory = nullptr;
    KVANT_CUDA_TRY(cudaMallocHost(&memory, half_bytes_));
    half.memory = static_cast<std::byte*>(memory);
  }
  KVANT_CUDA_TRY(cudaEventRecord(begun_, after));
  KVANT_CUDA_TRY(cudaStreamWaitEvent(stream_, begun_, 0));
  return {};
}

Status Transfer::enqueue(const Half& half, std::size_t begin, std::size_t end, std::size_t slot_bytes,
                         const Address& device, cudaMemcpyKind kind) const {
  for (std::size_t n = begin; n < end;) {
    std::byte* there = device(n);
    std::byte* here = half.memory + (n - begin) * slot_bytes;
    std::size_t bytes = slot_bytes;
    for (++n; n < end && device(n) == there + bytes; ++n) bytes += slot_bytes;
    const bool up = kind == cudaMemcpyHostToDevice;
    KVANT_CUDA_TRY(cudaMemcpyAsync(up ? there : here, up ? here : there, bytes, kind, stream_));
  }
  KVANT_CUDA_TRY(cudaEventRecord(half.done, stream_));
  return {};
}

Status Transfer::give_up(Status status) const {
  (void)cudaStreamSynchronize(stream_);
  return status;
}

Status Transfer::download(std::size_t count, std::size_t slot_bytes, const Address& from, const core::TakeSlot& take,
                          cudaStream_t after) {
  if (count == 0) return {};
  if (Status s = prepare(slot_bytes, after); !s) return s;
  const std::size_t batch = half_bytes_ / slot_bytes;
  const auto send = [&](std::size_t begin) -> Status {
    if (begin >= count) return {};
    return enqueue(halves_[begin / batch % 2], begin, std::min(begin + batch, count), slot_bytes, from,
                   cudaMemcpyDeviceToHost);
  };
  if (Status s = send(0); !s) return give_up(s);
  for (std::size_t begin = 0; begin < count; begin += batch) {
    if (Status s = send(begin + batch); !s) return give_up(s);
    const Half& half = halves_[begin / batch % 2];
    KVANT_CUDA_TRY(cudaEventSynchronize(half.done));
    for (std::size_t n = begin; n < std::min(begin + batch, count); ++n) {
      if (Status s = take(n, {half.memory + (n - begin) * slot_bytes, slot_bytes}); !s) return give_up(s);
    }
  }
  return {};
}

Status Transfer::upload(std::size_t count, std::size_t slot_bytes, const Address& to, const core::FillSlot& fill,
                        cudaStream_t before) {
  if (count == 0) return {};
  if (Status s = prepare(slot_bytes, before); !s) return s;
  const std::size_t batch = half_bytes_ / slot_bytes;
  const Half* last = nullptr;
  for (std::size_t begin = 0; begin < count; begin += batch) {
    const std::size_t end = std::min(begin + batch, count);
    last = &halves_[begin / batch % 2];
    KVANT_CUDA_TRY(cudaEventSynchronize(last->done));
    for (std::size_t n = begin; n < end; ++n) {
      if (Status s = fill(n, {last->memory + (n - begin) * slot_bytes, slot_bytes}); !s) return give_up(s);
    }
    if (Status s = enqueue(*last, begin, end, slot_bytes, to, cudaMemcpyHostToDevice); !s) return give_up(s);
  }
  KVANT_CUDA_TRY(cudaStreamWaitEvent(before, last->done, 0));
  return {};
}

}  // namespace kvant::cuda
