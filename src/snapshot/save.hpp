// From a cache to a file and back. The shells in kvant/snapshot.hpp call these.
#pragma once

#include "core/cache/impl.hpp"
#include "kvant/snapshot.hpp"
#include "snapshot/file.hpp"

namespace kvant::snapshot {

Status save(const CacheImpl& cache, const std::string& path, const SaveOptions& options);
Result<std::vector<SequenceId>> load_into(CacheImpl& cache, const SnapshotFile& file, const LoadOptions& options);
/// From a cache to another one. Waits for other calls that use them, and has a cache on a device only while its tables
/// are read and changed: other calls go on beside the bytes.
Result<std::vector<SequenceId>> copy_sequences(const CacheImpl& from, std::span<const SequenceId> ids, CacheImpl& to,
                                               const CopyOptions& options);
/// The configuration of a cache that load makes.
Result<CacheConfig> config_for(const SnapshotFile& file, const LoadOptions& options);
Status copy(const SnapshotFile& file, const std::string& path, const SnapshotProgress& progress);
Status verify(const SnapshotFile& file, const SnapshotProgress& progress);

}  // namespace kvant::snapshot
