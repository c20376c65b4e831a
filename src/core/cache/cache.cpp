// The public Cache: a thin shell over CacheImpl. Calls wait here for others that they cannot go beside.
#include "kvant/cache.hpp"

#include "core/cache/impl.hpp"

namespace kvant {

Cache::Cache(std::unique_ptr<CacheImpl> impl) : impl_(std::move(impl)) {}
Cache::Cache(Cache&&) noexcept = default;
Cache& Cache::operator=(Cache&&) noexcept = default;
Cache::~Cache() = default;

Result<Cache> Cache::create(const CacheConfig& config) {
  auto impl = CacheImpl::create(config);
  if (!impl) return impl.status();
  return Cache(std::move(*impl));
}

const CacheConfig& Cache::config() const noexcept {
  return impl_->config();
}
Format Cache::k_format() const noexcept {
  return impl_->k_format();
}
Format Cache::v_format() const noexcept {
  return impl_->v_format();
}

SequenceId Cache::add_sequence() {
  const auto use = impl_->changing();
  return impl_->add_sequence();
}
Result<SequenceId> Cache::fork(SequenceId parent) {
  const auto use = impl_->changing();
  return impl_->fork(parent);
}
Status Cache::remove(SequenceId sequence) {
  const auto use = impl_->changing();
  return impl_->remove(sequence);
}
Status Cache::truncate(SequenceId sequence, std::int64_t tokens) {
  const auto use = impl_->changing();
  return impl_->truncate(sequence, tokens);
}
Status Cache::reorder(std::span<const SequenceId> sequences, std::span<const std::int64_t> parents) {
  const auto use = impl_->changing();
  return impl_->reorder(sequences, parents);
}
Result<std::int64_t> Cache::length(SequenceId sequence) const {
  const auto use = impl_->reading();
  return impl_->length(sequence);
}

Status Cache::reserve(std::span<const Append> appends, Stream stream) {
  const auto use = impl_->changing();
  return impl_->reserve(appends, stream);
}
Status Cache::reserve_ahead(std::span<const Append> appends, Stream stream) {
  const auto use = impl_->changing();
  return impl_->reserve_ahead(appends, stream);
}
Status Cache::advance(std::span<const Append> appends) {
  const auto use = impl_->changing();
  return impl_->advance(appends);
}
Status Cache::write(std::span<const SequenceId> sequences, int layer, const TensorView& keys, const TensorView& values,
                    Stream stream) {
  const auto use = impl_->changing();
  return impl_->write(sequences, layer, keys, values, stream);
}
Status Cache::append(SequenceId sequence, int layer, const TensorView& keys, const TensorView& values, Stream stream) {
  const auto use = impl_->changing();
  return impl_->append(sequence, layer, keys, values, stream);
}
Status Cache::read(SequenceId sequence, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
                   const MutableTensorView& values, Stream stream, std::int64_t q_len) const {
  const auto use = impl_->reading();
  return impl_->read(sequence, layer, begin, end, keys, values, stream, q_len);
}
Status Cache::decode(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                     const MutableTensorView& values, Stream stream) const {
  const auto use = impl_->reading();
  return impl_->decode(ranges, layer, keys, values, stream);
}
Result<bool> Cache::take_non_finite(Stream stream) {
  const auto use = impl_->changing();
  return impl_->take_non_finite(stream);
}

std::int64_t Cache::trim() noexcept {
  const auto use = impl_->changing();
  return impl_->trim();
}
CacheMemory Cache::memory() const noexcept {
  const auto use = impl_->reading();
  return impl_->memory();
}
ExactEnds Cache::exact_ends() const noexcept {
  const auto use = impl_->reading();
  return impl_->exact_ends();
}
std::string Cache::describe() const {
  const auto use = impl_->reading();
  return impl_->describe();
}

Status import_legacy(Cache& cache, SequenceId sequence, int layer, const LegacyLayout& layout,
                     const LegacyTensors& tensors, std::span<const std::int64_t> slots) {
  const auto use = cache.impl().changing();
  return cache.impl().import_legacy(sequence, layer, layout, tensors, slots);
}

}  // namespace kvant
