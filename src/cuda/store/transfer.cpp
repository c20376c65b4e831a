#include "cuda/store/transfer.hpp"

#include <algorithm>

#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

// Small enough to stay in the processor's cache between the host's copy and the device's, and large beside the time
// that it takes to wake threads.
constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::size_t kMostBuffers = 4;
constexpr std::size_t kAllBuffersBytes = std::size_t{32} << 20;  // or two slots
constexpr std::size_t kDirectBytes = std::size_t{32} << 20;      // between calls of `done`

// The copies that were enqueued end before a call returns, with an error or an exception, too: the memory on both sides
// is free then.
class InFlight {
 public:
  explicit InFlight(cudaStream_t stream) : stream_(stream) {}
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
  ~InFlight() { (void)cudaStreamSynchronize(stream_); }

 private:
  cudaStream_t stream_;
};

}  // namespace

void Transfer::Batch::clear() {
  to_.clear();
  from_.clear();
  bytes_.clear();
}

void Transfer::Batch::add(std::byte* to, const std::byte* from, std::size_t bytes) {
  to_.push_back(to);
  from_.push_back(from);
  bytes_.push_back(bytes);
}

// Small copies to a device, one call each, leave two thirds of the link idle.
Status Transfer::Batch::enqueue(cudaMemcpyKind kind, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (to_.size() > 1) {
    // Bytes of the host are all there when they are enqueued: they may be read before the stream comes to them.
    cudaMemcpyAttributes how{};
    how.srcAccessOrder = kind == cudaMemcpyHostToDevice ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
    how.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    KVANT_CUDA_TRY(cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &how, &first, 1, stream));
    return {};
  }
#endif
  for (std::size_t i = 0; i < to_.size(); ++i) {
    KVANT_CUDA_TRY(cudaMemcpyAsync(to_[i], from_[i], bytes_[i], kind, stream));
  }
  return {};
}

Transfer::~Transfer() {
  if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
  for (const Buffer& buffer : buffers_) {
    if (buffer.memory != nullptr) (void)cudaFreeHost(buffer.memory);
    if (buffer.done != nullptr) (void)cudaEventDestroy(buffer.done);
  }
  if (begun_ != nullptr) (void)cudaEventDestroy(begun_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Status Transfer::begin(cudaStream_t after) {
  if (stream_ == nullptr) KVANT_CUDA_TRY(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (begun_ == nullptr) KVANT_CUDA_TRY(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming));
  buffers_.resize(kMostBuffers);
  for (Buffer& buffer : buffers_) {
    // A thread that waits leaves its processor to others.
    if (buffer.done != nullptr) continue;
    KVANT_CUDA_TRY(cudaEventCreateWithFlags(&buffer.done, cudaEventDisableTiming | cudaEventBlockingSync));
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  KVANT_CUDA_TRY(cudaStreamIsCapturing(after, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return {Code::invalid_argument,
            "the stream is being captured: pages between the host and a device cannot be part of a graph; copy, save "
            "and load before the capture or after"};
  }
  KVANT_CUDA_TRY(cudaEventRecord(begun_, after));
  KVANT_CUDA_TRY(cudaStreamWaitEvent(stream_, begun_, 0));
  return {};
}

std::size_t Transfer::buffers_in_use() const {
  return std::clamp<std::size_t>(kAllBuffersBytes / buffer_bytes_, 2, kMostBuffers);
}

Status Transfer::take_buffers(std::size_t slot_bytes) {
  const std::size_t bytes = std::max(slot_bytes, kBufferBytes / slot_bytes * slot_bytes);
  for (Buffer& buffer : buffers_) {
    if (buffer.memory != nullptr && buffer_bytes_ < bytes) {
      KVANT_CUDA_TRY(cudaFreeHost(buffer.memory));
      buffer.memory = nullptr;
    }
  }
  buffer_bytes_ = std::max(buffer_bytes_, bytes);
  for (std::size_t i = 0; i < buffers_in_use(); ++i) {
    if (buffers_[i].memory != nullptr) continue;
    void* memory = nullptr;
    KVANT_CUDA_TRY(cudaMallocHost(&memory, buffer_bytes_));
    buffers_[i].memory = static_cast<std::byte*>(memory);
  }
  return {};
}

Status Transfer::enqueue(cudaMemcpyKind kind, std::size_t begin, std::size_t end, std::size_t slot_bytes,
                         const Address& device, const Address& host, cudaEvent_t done) {
  const bool up = kind == cudaMemcpyHostToDevice;
  batch_.clear();
  for (std::size_t n = begin; n < end;) {
    std::byte* there = device(n);
    std::byte* here = host(n);
    std::size_t bytes = slot_bytes;
    for (++n; n < end && device(n) == there + bytes && host(n) == here + bytes; ++n) bytes += slot_bytes;
    batch_.add(up ? there : here, up ? here : there, bytes);
  }
  if (Status s = batch_.enqueue(kind, stream_); !s) return s;
  KVANT_CUDA_TRY(cudaEventRecord(done, stream_));
  return {};
}

Status Transfer::download(std::size_t count, std::size_t slot_bytes, const Address& from, const core::TakeSlots& take,
                          cudaStream_t after) {
  if (count == 0) return {};
  const std::lock_guard alone(mutex_);
  if (Status s = begin(after); !s) return s;
  if (Status s = take_buffers(slot_bytes); !s) return s;
  const InFlight copies(stream_);
  const std::size_t batch = buffer_bytes_ / slot_bytes;
  const std::size_t buffers = buffers_in_use();
  const auto end_of = [&](std::size_t begin) { return std::min(begin + batch, count); };
  const auto buffer_of = [&](std::size_t begin) -> const Buffer& { return buffers_[begin / batch % buffers]; };
  const auto send = [&](std::size_t begin) -> Status {
    if (begin >= count) return {};
    const Buffer& buffer = buffer_of(begin);
    const auto here = [&](std::size_t n) { return buffer.memory + (n - begin) * slot_bytes; };
    return enqueue(cudaMemcpyDeviceToHost, begin, end_of(begin), slot_bytes, from, here, buffer.done);
  };
  for (std::size_t i = 0; i + 1 < buffers; ++i) {
    if (Status s = send(i * batch); !s) return s;
  }
  for (std::size_t begin = 0; begin < count; begin += batch) {
    if (Status s = send(begin + (buffers - 1) * batch); !s) return s;
    const Buffer& buffer = buffer_of(begin);
    KVANT_CUDA_TRY(cudaEventSynchronize(buffer.done));
    if (Status s = take(begin, {buffer.memory, (end_of(begin) - begin) * slot_bytes}); !s) return s;
  }
  return {};
}

Status Transfer::upload(std::size_t count, std::size_t slot_bytes, const Address& to, const core::FillSlots& fill,
                        cudaStream_t before) {
  if (count == 0) return {};
  const std::lock_guard alone(mutex_);
  if (Status s = begin(before); !s) return s;
  if (Status s = take_buffers(slot_bytes); !s) return s;
  const InFlight copies(stream_);
  const std::size_t batch = buffer_bytes_ / slot_bytes;
  const std::size_t buffers = buffers_in_use();
  const Buffer* last = nullptr;
  for (std::size_t begin = 0; begin < count; begin += batch) {
    const std::size_t end = std::min(begin + batch, count);
    last = &buffers_[begin / batch % buffers];
    KVANT_CUDA_TRY(cudaEventSynchronize(last->done));
    if (Status s = fill(begin, {last->memory, (end - begin) * slot_bytes}); !s) return s;
    const auto here = [&](std::size_t n) { return last->memory + (n - begin) * slot_bytes; };
    if (Status s = enqueue(cudaMemcpyHostToDevice, begin, end, slot_bytes, to, here, last->done); !s) return s;
  }
  KVANT_CUDA_TRY(cudaEventSynchronize(last->done));
  return {};
}

// The link has a batch while the host hears of the batch before.
Status Transfer::direct(cudaMemcpyKind kind, std::size_t slot_bytes, const Address& device,
                        std::span<std::byte* const> host, const core::SlotsDone& done, cudaStream_t after) {
  if (host.empty()) return {};
  const std::lock_guard alone(mutex_);
  if (Status s = begin(after); !s) return s;
  const InFlight copies(stream_);
  const std::size_t batch = std::max<std::size_t>(1, kDirectBytes / slot_bytes);
  const auto here = [&](std::size_t n) { return host[n]; };
  const auto event_of = [&](std::size_t begin) { return buffers_[begin / batch % 2].done; };
  const auto send = [&](std::size_t begin) -> Status {
    if (begin >= host.size()) return {};
    return enqueue(kind, begin, std::min(begin + batch, host.size()), slot_bytes, device, here, event_of(begin));
  };
  if (Status s = send(0); !s) return s;
  for (std::size_t begin = 0; begin < host.size(); begin += batch) {
    if (Status s = send(begin + batch); !s) return s;
    KVANT_CUDA_TRY(cudaEventSynchronize(event_of(begin)));
    if (Status s = done(begin, std::min(batch, host.size() - begin)); !s) return s;
  }
  return {};
}

namespace {

Status pin(void* memory, std::size_t bytes) {
  KVANT_CUDA_TRY(cudaHostRegister(memory, bytes, cudaHostRegisterPortable));
  return {};
}

// In a forked child, and after the driver has gone, there is nothing to undo.
void unpin(void* memory) noexcept {
  if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace

const core::MemoryPins kMemoryPins{.pin = &pin, .unpin = &unpin};

}  // namespace kvant::cuda
