// Checksums of a snapshot: XXH3 with 128 bits. They find accidents, and pages that two files share; they are no
// signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace kvant::snapshot {

struct Checksum {
  std::uint64_t low = 0, high = 0;
  bool operator==(const Checksum&) const = default;
};

struct ChecksumHash {
  std::size_t operator()(const Checksum& c) const noexcept { return static_cast<std::size_t>(c.low); }
};

Checksum checksum(std::span<const std::byte> bytes) noexcept;
/// 32 hexadecimal digits, the high half first.
std::string to_text(const Checksum& sum);

/// A checksum of bytes that come in pieces.
class Checksummer {
 public:
  Checksummer();
  void add(std::span<const std::byte> bytes) noexcept;
  [[nodiscard]] Checksum take() noexcept;  ///< covers the bytes added since the last take

 private:
  struct Free {
    void operator()(void* state) const noexcept;
  };
  std::unique_ptr<void, Free> state_;
};

}  // namespace kvant::snapshot
