// Slots between the host and a device, in batches: the link has one batch while the host reads or writes the other.
//
// Copies run in a stream of their own beside the work of the caller's. Host memory that they read and write is pinned,
// without which a copy is staged by the driver and waits; it is taken with the first transfer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/store/slot_calls.hpp"

namespace kvant::cuda {

class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();

  /// Where a slot is on the device, by its place in the list.
  using Address = std::function<std::byte*(std::size_t n)>;

  // The device is current.
  Status download(std::size_t count, std::size_t slot_bytes, const Address& from, const core::TakeSlot& take,
                  cudaStream_t after);
  Status upload(std::size_t count, std::size_t slot_bytes, const Address& to, const core::FillSlot& fill,
                cudaStream_t before);

 private:
  static constexpr std::size_t kBatchBytes = std::size_t{8} << 20;
  struct Half {
    std::byte* memory = nullptr;
    cudaEvent_t done = nullptr;
  };
  Status prepare(std::size_t slot_bytes, cudaStream_t after);
  /// Copies of slots [begin, end), adjacent ones as one.
  Status enqueue(const Half& half, std::size_t begin, std::size_t end, std::size_t slot_bytes, const Address& device,
                 cudaMemcpyKind kind) const;
  /// The copies that were enqueued end before an error is returned: the memory on both sides is free then.
  Status give_up(Status status) const;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  Half halves_[2];
  std::size_t half_bytes_ = 0;
};

}  // namespace kvant::cuda
