// Buffers between two pages that may not be touched: an access one byte outside crashes the test instead of passing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvant::test {

/// `bytes` bytes that end `slack` bytes before an inaccessible page (slack 0: the first byte past the end faults). The
/// bytes of the mapping before the payload, and the slack, are filled with 0xff (NaN in every dtype). When bytes is a
/// whole number of pages, the byte before the payload faults as well.
class GuardBuffer {
 public:
  explicit GuardBuffer(std::size_t bytes, std::size_t slack = 0);
  GuardBuffer(const GuardBuffer&) = delete;
  GuardBuffer& operator=(const GuardBuffer&) = delete;
  ~GuardBuffer();

  [[nodiscard]] std::byte* data() const { return payload_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  /// Whether the padding around the payload still holds 0xff.
  [[nodiscard]] bool padding_untouched() const;
  /// From now on writing faults too (for inputs).
  void make_read_only() const;

 private:
  std::byte* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::size_t page_ = 0;
  std::byte* payload_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvant::test
