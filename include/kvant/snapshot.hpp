// Caches in files: save, load, and what a file says of itself. See docs/snapshots.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvant/cache.hpp"
#include "kvant/export.hpp"

namespace kvant {

/// Called now and then with the bytes of pages that are done, and all of them. Answers whether to go on: false stops
/// the call, which then fails (io) and has changed nothing. Must not call the cache.
using SnapshotProgress = std::function<bool(std::int64_t done, std::int64_t total)>;

struct SaveOptions {
  /// Unset: all, in ascending order of ids.
  std::optional<std::vector<SequenceId>> sequences{};
  std::string name{};                             ///< for people
  std::string model{};                            ///< the model that the cache belongs to; load can require it
  std::map<std::string, std::string> metadata{};  ///< the caller's own. Keys do not begin with "kvant."
  /// Token ids: none, or a list for each sequence, which is empty or has an id for each token. load can require them.
  std::vector<std::vector<std::int64_t>> tokens{};
  /// An earlier snapshot in the folder that the new file is really in. Pages that it has, by their checksums of 128
  /// bits, are not written again: the new file names it, and needs it. A file needs at most 32 others; behind a base
  /// that needs as many, all pages are written. Empty: the file stands alone.
  std::string base{};
  SnapshotProgress progress{};
  Stream stream{};
};

/// Writes sequences of a cache to a file: pages, lengths and configuration. Sequences that are loaded go on bit for bit
/// as these do. The file is written beside the one that `path` leads to (a symbolic link stays), synced and renamed, so
/// whatever fails, an older file of that name stays as it is; only its owner may read it (mode 0600). Pages are written
/// from where they are, or through buffers from a device. Calls that change the cache wait until it returns. Errors:
/// invalid_argument (unknown sequences, a step that is not written in every layer, tokens or metadata that do not fit,
/// a file that this or another snapshot needs), io (also where `path` is no regular file), and all that reading `base`
/// gives.
KVANT_API Status save(const Cache& cache, const std::string& path, const SaveOptions& options = {});

struct SnapshotSequence {
  std::int64_t length = 0;             ///< tokens
  std::vector<std::int64_t> tokens{};  ///< their ids, if they were saved
};

/// The facts of a file. They were checked when it was opened, all but the bytes of pages and of calibrated bases.
struct SnapshotInfo {
  std::string path{};
  std::string written_by{};  ///< the version of kvant
  std::string name{}, model{};
  std::map<std::string, std::string> metadata{};
  CacheConfig config{};                            ///< the cache's. Without `bases`, which load reads
  std::map<std::string, std::string> fields{};     ///< the configuration as the file has it: "k" is "tq6"
  int stored_head_dim = 0, stored_v_head_dim = 0;  ///< keys; values
  std::optional<Dtype> exact{};                    ///< the dtype of exact pages, unless nothing was written yet
  std::vector<SnapshotSequence> sequences{};
  std::int64_t encoded_pages = 0, exact_pages = 0;  ///< distinct ones, of all layers and kv heads each
  std::int64_t page_bytes = 0;                      ///< all of these pages together
  std::int64_t file_bytes = 0;                      ///< this file alone
  std::vector<std::string> bases{};  ///< files beside this one that have some of the pages; at most 32 of a new file
};

struct LoadOptions {
  std::optional<std::vector<std::int64_t>> sequences{};  ///< places in SnapshotInfo::sequences; unset: all
  std::optional<std::string> model{};                    ///< refused where the file has another
  std::map<std::string, std::string> metadata{};         ///< refused where the file lacks one, or has another value
  /// Refused unless the token ids of the sequences are exactly these: a list for each that is loaded.
  std::optional<std::vector<std::vector<std::int64_t>>> tokens{};
  // The new cache of Snapshot::load; unset: as it was.
  std::string device{};  ///< "" and "cpu": host memory
  std::optional<std::int64_t> capacity_tokens{}, max_sequences{}, max_sequence_tokens{};
  int threads = 0;
  std::string isa{};
  SnapshotProgress progress{};
  Stream stream{};
};

struct Loaded {
  Cache cache;
  std::vector<SequenceId> sequences;  ///< in the order of the file, or of LoadOptions::sequences
};

/// A snapshot that is open. Nothing in the file is trusted: every number is compared with the bytes that there are, and
/// every page with its checksum before a sequence has it. The file is read, never mapped: whoever shortened a mapped
/// file would end this process. Any thread may make any call at any time.
class KVANT_API Snapshot {
 public:
  /// Reads the header and the tables, also those of its bases. Errors: io, bad_file (what is wrong, and where),
  /// unsupported (written by another version of the layout).
  static Result<Snapshot> open(const std::string& path);
  Snapshot(Snapshot&&) noexcept;
  Snapshot& operator=(Snapshot&&) noexcept;
  ~Snapshot();

  [[nodiscard]] const SnapshotInfo& info() const noexcept;
  /// A new cache of the snapshot's configuration with its sequences. Errors: those of Cache::create and of load_into.
  [[nodiscard]] Result<Loaded> load(const LoadOptions& options = {}) const;
  /// Adds the sequences to a cache, whose configuration must be that of the snapshot in all that bytes and visibility
  /// depend on. On any error the cache has the sequences that it had. Errors: invalid_argument (another configuration,
  /// or what options require), out_of_capacity, bad_file (names the first page that is not as it was saved), io.
  [[nodiscard]] Result<std::vector<SequenceId>> load_into(Cache& cache, const LoadOptions& options = {}) const;
  /// Reads all of it and its bases, and compares every checksum. Errors: bad_file (names the first bad part), io.
  [[nodiscard]] Status verify(const SnapshotProgress& progress = {}) const;
  /// Writes it to another file that needs no base, without decoding anything. Errors: as for save; a base of this or of
  /// another snapshot is not replaced.
  [[nodiscard]] Status copy(const std::string& path, const SnapshotProgress& progress = {}) const;

 private:
  struct Impl;
  explicit Snapshot(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct CopyOptions {
  SnapshotProgress progress{};  ///< must call neither cache
  Stream from_stream{};         ///< that the first cache is used on
  Stream to_stream{};
};

/// Copies sequences to another cache, in the host's memory or on a device, wherever the first is: so they can leave a
/// device and return. The copies go on bit for bit, and pages that the sequences share are shared. The sequences stay.
/// The second cache's configuration must be that of the first in all that bytes and visibility depend on. On any error
/// it has the sequences that it had. Copies begin after the work of a device's stream so far, and the call waits for
/// them. Between a device and the host other calls use the device's cache meanwhile, for other sequences; calls that
/// change the cache in host memory wait. Where the latter is pinned (CacheConfig::pinned), its pages travel without the
/// processor, else through buffers, by CacheConfig::threads of the second cache. Answers the ids of the copies. Errors:
/// invalid_argument (unknown sequences, one cache twice, another configuration, a step that is not written in every
/// layer), out_of_capacity, io (stopped by progress), and those of a device.
KVANT_API Result<std::vector<SequenceId>> copy_sequences(const Cache& from, std::span<const SequenceId> sequences,
                                                         Cache& to, const CopyOptions& options = {});

/// Snapshot::open and its load.
KVANT_API Result<Loaded> load(const std::string& path, const LoadOptions& options = {});

}  // namespace kvant
