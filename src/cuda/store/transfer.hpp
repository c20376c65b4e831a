// Slots between the host and a device, in batches, in a stream of their own beside the work of the caller's. The calls
// of one Transfer wait for each other.
//
//   download, upload   through some buffers of pinned memory: the link has the batches of all but one while the host
//                      reads or writes that one. The buffers are taken with the first transfer: from other memory the
//                      driver would copy to buffers of its own, and wait
//   direct             between the device and pinned memory of the caller's
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "core/store/memory_pins.hpp"
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
  Status download(std::size_t count, std::size_t slot_bytes, const Address& from, const core::TakeSlots& take,
                  cudaStream_t after);
  Status upload(std::size_t count, std::size_t slot_bytes, const Address& to, const core::FillSlots& fill,
                cudaStream_t before);
  Status direct(cudaMemcpyKind kind, std::size_t slot_bytes, const Address& device, std::span<std::byte* const> host,
                const core::SlotsDone& done, cudaStream_t after);

 private:
  struct Buffer {
    std::byte* memory = nullptr;
    cudaEvent_t done = nullptr;
  };
  /// Copies that the driver is given together.
  class Batch {
   public:
    void clear();
    void add(std::byte* to, const std::byte* from, std::size_t bytes);
    Status enqueue(cudaMemcpyKind kind, cudaStream_t stream);

   private:
    std::vector<void*> to_;
    std::vector<const void*> from_;
    std::vector<std::size_t> bytes_;
  };
  /// The stream, which waits for all that `after` has to do now.
  Status begin(cudaStream_t after);
  Status take_buffers(std::size_t slot_bytes);
  [[nodiscard]] std::size_t buffers_in_use() const;
  /// Copies of slots [begin, end), those that are adjacent on both sides as one.
  Status enqueue(cudaMemcpyKind kind, std::size_t begin, std::size_t end, std::size_t slot_bytes, const Address& device,
                 const Address& host, cudaEvent_t done);

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  Batch batch_;
  std::vector<Buffer> buffers_;
  std::size_t buffer_bytes_ = 0;
};

// cudaHostRegister, for all devices.
extern const core::MemoryPins kMemoryPins;

}  // namespace kvant::cuda
