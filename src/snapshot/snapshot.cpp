// The public calls: they wait for others that work on the cache, and let no exception out.
#include "kvant/snapshot.hpp"

#include <exception>
#include <functional>
#include <new>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "io/text.hpp"
#include "snapshot/save.hpp"

namespace kvant {
namespace {

template <class Body>
auto without_exceptions(const std::string& path, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory,
                  fmt::format("{}: not enough memory for tables; nothing was changed", io::printable(path)));
  } catch (const std::exception& error) {
    return Status(Code::internal, fmt::format("{}: {}", io::printable(path), io::printable(error.what())));
  }
}

}  // namespace

Status save(const Cache& cache, const std::string& path, const SaveOptions& options) {
  return without_exceptions(path, [&] {
    const auto use = cache.impl().reading();
    return snapshot::save(cache.impl(), path, options);
  });
}

Result<std::vector<SequenceId>> copy_sequences(const Cache& from, std::span<const SequenceId> sequences, Cache& to,
                                               const CopyOptions& options) {
  return without_exceptions("copy_sequences", [&]() -> Result<std::vector<SequenceId>> {
    const CacheImpl& source = from.impl();
    CacheImpl& target = to.impl();
    if (&source == &target) {
      return {Code::invalid_argument, "from and to are one cache: fork makes copies within a cache, which share pages"};
    }
    return snapshot::copy_sequences(source, sequences, target, options);
  });
}

struct Snapshot::Impl {
  std::unique_ptr<snapshot::SnapshotFile> file;
};

Snapshot::Snapshot(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Snapshot::Snapshot(Snapshot&&) noexcept = default;
Snapshot& Snapshot::operator=(Snapshot&&) noexcept = default;
Snapshot::~Snapshot() = default;

Result<Snapshot> Snapshot::open(const std::string& path) {
  return without_exceptions(path, [&]() -> Result<Snapshot> {
    auto file = snapshot::SnapshotFile::open(path);
    if (!file) return file.status();
    return Snapshot(std::make_unique<Impl>(Impl{std::move(*file)}));
  });
}

const SnapshotInfo& Snapshot::info() const noexcept {
  return impl_->file->info();
}

Result<Loaded> Snapshot::load(const LoadOptions& options) const {
  return without_exceptions(info().path, [&]() -> Result<Loaded> {
    const auto config = snapshot::config_for(*impl_->file, options);
    if (!config) return config.status();
    auto cache = Cache::create(*config);
    if (!cache) return cache.status();
    auto ids = snapshot::load_into(cache->impl(), *impl_->file, options);
    if (!ids) return ids.status();
    return Loaded{std::move(*cache), std::move(*ids)};
  });
}

Result<std::vector<SequenceId>> Snapshot::load_into(Cache& cache, const LoadOptions& options) const {
  return without_exceptions(info().path, [&] {
    const auto use = cache.impl().changing();
    return snapshot::load_into(cache.impl(), *impl_->file, options);
  });
}

Status Snapshot::verify(const SnapshotProgress& progress) const {
  return without_exceptions(info().path, [&] { return snapshot::verify(*impl_->file, progress); });
}

Status Snapshot::copy(const std::string& path, const SnapshotProgress& progress) const {
  return without_exceptions(path, [&] { return snapshot::copy(*impl_->file, path, progress); });
}

Result<Loaded> load(const std::string& path, const LoadOptions& options) {
  const auto snapshot = Snapshot::open(path);
  if (!snapshot) return snapshot.status();
  return snapshot->load(options);
}

}  // namespace kvant
