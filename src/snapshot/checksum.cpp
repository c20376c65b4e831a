#include "snapshot/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <new>

#include "core/fmt.hpp"

namespace kvant::snapshot {
namespace {

Checksum of(XXH128_hash_t hash) noexcept {
  return {hash.low64, hash.high64};
}

XXH3_state_t* state_in(void* memory) noexcept {
  return static_cast<XXH3_state_t*>(memory);
}

}  // namespace

Checksum checksum(std::span<const std::byte> bytes) noexcept {
  return of(XXH3_128bits(bytes.data(), bytes.size()));
}

std::string to_text(const Checksum& sum) {
  return fmt::format("{:016x}{:016x}", sum.high, sum.low);
}

void Checksummer::Free::operator()(void* state) const noexcept {
  XXH3_freeState(state_in(state));
}

Checksummer::Checksummer() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state_in(state_.get()));
}

void Checksummer::add(std::span<const std::byte> bytes) noexcept {
  XXH3_128bits_update(state_in(state_.get()), bytes.data(), bytes.size());
}

Checksum Checksummer::take() noexcept {
  const Checksum sum = of(XXH3_128bits_digest(state_in(state_.get())));
  XXH3_128bits_reset(state_in(state_.get()));
  return sum;
}

}  // namespace kvant::snapshot
