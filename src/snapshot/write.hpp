// Writes a snapshot: what it is of comes as Content, from a cache or from another snapshot.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/cache/image.hpp"
#include "core/store/slot_calls.hpp"
#include "kvant/snapshot.hpp"
#include "snapshot/config_text.hpp"
#include "snapshot/file.hpp"

namespace kvant::snapshot {

struct Content {
  StoredConfig stored;  // with bases and levels
  std::string name, model;
  std::map<std::string, std::string> metadata;
  const core::TableImage* image;
  std::vector<std::span<const std::int64_t>> tokens;  // one for each sequence; may be empty
  std::size_t encoded_bytes = 0, exact_bytes = 0;     // bytes of a slot
  /// Has `take` see the bytes of slots, by their numbers in the image: one slot a call, in order. The same bytes each
  /// time.
  std::function<Status(Pool pool, std::span<const std::int32_t> numbers, const core::TakeSlots& take)> slots;
  const SnapshotFile* source = nullptr;  // that the content is a copy of: its bases are not replaced
};

/// `base`: null, or an open snapshot in the same folder, whose pages are not written again unless the new file would
/// need more than kMostBases files. Errors: invalid_argument where the new file would take the place of one that it or
/// another snapshot needs.
Status write(const std::string& path, const Content& content, const SnapshotFile* base,
             const SnapshotProgress& progress);

/// Counts bytes and asks `progress` whether to go on, not at every page.
class Progress {
 public:
  Progress(const SnapshotProgress& progress, std::int64_t total) : progress_(progress), total_(total) {}
  [[nodiscard]] Status add(std::int64_t bytes);

 private:
  const SnapshotProgress& progress_;
  std::int64_t total_, done_ = 0, told_ = 0;
};

}  // namespace kvant::snapshot
