// Whatever its bytes are, a snapshot is refused with a message, or a cache gets its sequences, reads them and goes on.
// Checksums would stop every mutation, so each input is tried again after its checksums were corrected.
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "core/cache/impl.hpp"
#include "kvant/io.hpp"
#include "snapshot/names.hpp"
#include "snapshot/save.hpp"

namespace {

using namespace kvant;
using snapshot::SnapshotFile;

void require(bool condition) {
  if (!condition) std::abort();
}

/// Writes the checksums that belong to the bytes into the last tensor, if that can hold them.
void repair(std::vector<std::byte>& bytes) {
  const auto file = io::SafeTensors::parse(bytes, "fuzz");
  if (!file || file->tensors().empty() || file->tensors().back().name != snapshot::kChecksums) return;
  const io::TensorInfo& last = file->tensors().back();
  std::vector<snapshot::Checksum> sums{snapshot::checksum(file->header().value())};
  for (const io::TensorInfo& tensor : file->tensors()) {
    if (&tensor == &last) break;
    const bool rows = tensor.name == snapshot::kEncoded || tensor.name == snapshot::kExact;
    const std::int64_t count = rows && !tensor.shape.empty() ? tensor.shape[0] : 1;
    if (count < 1 || static_cast<std::uint64_t>(count) > bytes.size()) return;
    const std::uint64_t each = tensor.bytes / static_cast<std::uint64_t>(count);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t at = tensor.file_offset() + static_cast<std::uint64_t>(i) * each;
      sums.push_back(snapshot::checksum(std::span(bytes).subspan(at, each)));
    }
  }
  sums.push_back(snapshot::checksum(std::as_bytes(std::span(sums))));
  if (last.bytes == sums.size() * sizeof(snapshot::Checksum)) {
    std::memcpy(bytes.data() + last.file_offset(), sums.data(), last.bytes);
  }
}

/// Reads and continues what was loaded. Values may be anything, also not finite.
void use(CacheImpl& cache, std::span<const SequenceId> ids) {
  const CacheConfig& c = cache.config();
  const auto row = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(std::max(c.head_dim, c.v_dim()));
  if (ids.empty() || cache.store().slot_bytes(core::Pool::encoded) > (1 << 20)) return;  // no page of that size exists
  const std::vector<float> zeros(row * 3);
  std::vector<float> keys, values;
  for (const SequenceId id : ids) {
    const std::int64_t length = cache.length(id).value();
    if (length > 4096) continue;
    const auto n = static_cast<std::int64_t>(cache.view(id).value().pages.size());
    for (std::int64_t p = 0; p < n; ++p) {
      const std::int64_t begin = p * kPageTokens, end = std::min(length, begin + kPageTokens);
      keys.assign(row * kPageTokens, 0);
      values.assign(row * kPageTokens, 0);
      // Pages that a window released are refused.
      static_cast<void>(cache.read(id, c.layers - 1, begin, end,
                                   MutableTensorView::of(keys.data(), end - begin, c.kv_heads, c.head_dim),
                                   MutableTensorView::of(values.data(), end - begin, c.kv_heads, c.v_dim())));
    }
    const SequenceId child = cache.fork(id).value();
    const TensorView new_keys = TensorView::of(zeros.data(), 3, c.kv_heads, c.head_dim);
    const TensorView new_values = TensorView::of(zeros.data(), 3, c.kv_heads, c.v_dim());
    for (int layer = 0; layer < std::min(c.layers, 4); ++layer) {
      if (!cache.append(child, layer, new_keys, new_values)) break;  // lut formats, capacities
    }
    static_cast<void>(cache.truncate(child, length));
    static_cast<void>(cache.truncate(child, length / 2));
    require(cache.remove(child).ok());
  }
}

void load(std::span<const std::byte> bytes, bool repaired) {
  const auto file = SnapshotFile::parse(bytes, "fuzz");
  if (!file) {
    require(!file.message().empty() && file.message().size() < 4000);
    return;
  }
  const Status whole = snapshot::verify(**file, {});
  require(whole.ok() || !repaired);
  LoadOptions options;
  options.threads = 1;
  const auto config = snapshot::config_for(**file, options);
  if (!config) return;
  const auto cache = CacheImpl::create(*config);
  if (!cache) return;
  const auto ids = snapshot::load_into(**cache, **file, options);
  if (!ids) {
    require(!ids.message().empty() && (*cache)->table().sequences().empty() && (*cache)->table().pages_held() == 0);
    return;
  }
  require(whole.ok());
  // The same sequences come out again.
  const auto image = (*cache)->table().image(*ids);
  require(image.ok() && image->image().encoded == (*file)->image().encoded);
  require((*cache)->table().check_image(image->image()).ok());
  use(**cache, *ids);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto given = std::as_bytes(std::span(data, size));
  load(given, false);
  std::vector<std::byte> bytes(given.begin(), given.end());
  repair(bytes);
  load(bytes, true);
  return 0;
}
