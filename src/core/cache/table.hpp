// The bookkeeping of a paged cache: lengths, page tables, reference counts, and what a step has to do. No bytes here: a
// PageStore holds them (core/store/page_store.hpp), in host memory or in a device's, behind the same tables.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/pages.hpp"
#include "core/store/page_pool.hpp"
#include "core/store/page_ref.hpp"
#include "kvant/cache.hpp"

namespace kvant {
/// A key of tables, and what messages show.
inline std::uint64_t number(SequenceId id) noexcept {
  return static_cast<std::uint64_t>(id);
}
}  // namespace kvant

namespace kvant::core {

using base::pages_for;
using ExactEnds = base::ExactEnds<std::int64_t>;

/// Which pool a slot belongs to: `exact` pages hold vectors as given, `encoded` ones in the cache's formats.
enum class Pool { exact, encoded };

/// A sequence as attention sees it. Borrowed: valid until the cache changes.
struct SequenceView {
  std::int64_t length = 0;         ///< tokens, reserved ones included
  std::int64_t first_page = 0;     ///< pages between those of the window's sink tokens and this one were released
  std::span<const PageRef> pages;  ///< by absolute page number
  std::uint64_t version = 0;       ///< changes with this sequence's length and pages
};

// 2^32 tokens are 2^26 pages: far beyond any context, and small enough that no count of pages can overflow.
inline constexpr std::int64_t kMaxSequenceTokens = std::int64_t{1} << 32;

struct TableConfig {
  int layers = 1;
  ExactEnds ends;
  std::int64_t window = 0;
  std::int64_t window_sinks = 0;
  std::int64_t rollback_tokens = 0;  // below a page: a page
  std::int64_t capacity_pages = 0;   // 0: no limit
  std::int64_t sequence_tokens = kMaxSequenceTokens;
};

/// To copy before anything is written: a page that other sequences share is about to change.
struct SlotCopy {
  Pool pool;
  std::int32_t from;
  std::int32_t to;
  std::int32_t tokens;  // that the page has; what follows them need not be copied
};

/// Refuses a call that names a sequence twice.
Status check_distinct(std::span<const SequenceId> sequences);

struct TableImage;  // core/cache/image.hpp
class ImageBuilder;

class CacheTable {
 public:
  struct Sequence {
    std::int64_t length = 0;
    std::int64_t step_begin = 0;  // the newest step's tokens are [step_begin, length)
    std::int64_t first_page = 0;
    std::vector<PageRef> pages;            // those of `length`, then those reserved ahead
    std::vector<std::int32_t> identities;  // one a page held, shared by forks until one of them writes to it
    std::vector<bool> written;             // by layer: the newest step's rows are stored
    int layers_written = 0;
    std::uint64_t version = 0;
    std::int32_t index = -1;  // its place in a device's tables, kept by the DeviceStore
    bool arriving = false;    // its slots are being filled: calls do not know it yet
    [[nodiscard]] std::int64_t step_tokens() const { return length - step_begin; }
  };

  /// Slots that a reserve takes, before anything has changed.
  struct Demand {
    std::int64_t exact_slots = 0;  // slots that the pools must have in all
    std::int64_t encoded_slots = 0;
    std::int64_t identity_slots = 0;
    bool takes = false;  // any slot at all; false: only lengths change, and pages that a window releases
  };
  /// `ahead`: slots for tokens that later steps bring; nothing advances.
  enum class Reserve { step, ahead };

  explicit CacheTable(const TableConfig& config) : config_(config) {}

  SequenceId add();
  Result<SequenceId> fork(SequenceId parent);
  Status remove(SequenceId id);
  Status truncate(SequenceId id, std::int64_t tokens);

  /// Refuses a reorder that cannot be done; changes nothing.
  Status check_reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) const;
  static bool reorder_changes_nothing(std::span<const std::int64_t> parents) noexcept;
  /// Does one that was checked: ids[i] becomes what ids[parents[i]] was. May throw std::bad_alloc, and then has changed
  /// nothing.
  void reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents);

  /// Validates a reserve and says what it needs; changes nothing.
  Result<Demand> check(std::span<const Append> appends, Reserve what = Reserve::step);
  /// Does it. `demand` as check returned it, nothing having changed since. May throw std::bad_alloc, and then has
  /// changed no sequence. Returns the copies that must be made before rows are stored.
  std::vector<SlotCopy> commit(std::span<const Append> appends, const Demand& demand, Reserve what = Reserve::step);

  /// An image of these sequences, whose sources are slots. Errors: unknown sequences, and steps that wait for a write.
  Result<ImageBuilder> image(std::span<const SequenceId> ids) const;
  /// Refuses an image, whatever is in it, that no sequences of a table of this config could have.
  [[nodiscard]] Status check_image(const TableImage& image) const;
  /// Also refuses what this table has no room for, and says what the image takes.
  Result<Demand> check_restore(const TableImage& image) const;
  /// Sequences and slots that a restore added: slots are those of the image's numbers.
  struct Restored {
    std::vector<SequenceId> ids;
    std::vector<std::int32_t> exact, encoded;
    [[nodiscard]] const std::vector<std::int32_t>& slots(Pool pool) const noexcept {
      return pool == Pool::exact ? exact : encoded;
    }
  };
  /// Adds the sequences of a checked image. May throw std::bad_alloc, and then has changed no sequence.
  Restored restore(const TableImage& image, const Demand& demand);

  /// While their slots are filled beside other calls, sequences of a restore are unknown to find.
  void set_arriving(std::span<const SequenceId> ids, bool arriving) noexcept;

  /// The pages of a sequence's tokens, without those that were reserved ahead.
  [[nodiscard]] static std::span<const PageRef> pages_of(const Sequence& s) noexcept {
    return std::span<const PageRef>(s.pages).first(static_cast<std::size_t>(pages_for(s.length)));
  }
  /// Which copy attention of the newest q_len queries reads: the exact one where the rule of exact ends says so and the
  /// page has one (base::exact_length).
  [[nodiscard]] bool reads_exact(const SequenceView& s, std::int64_t page, std::int64_t q_len = 1) const noexcept {
    const PageRef& ref = s.pages[static_cast<std::size_t>(page)];
    const std::int64_t length = base::exact_length(s.length, q_len);
    return ref.exact >= 0 && (ref.encoded < 0 || config_.ends.exact(length, page));
  }
  [[nodiscard]] bool layer_ready(const Sequence& s, int layer) const;
  [[nodiscard]] int first_unwritten(const Sequence& s) const;  // in a step that is not done
  [[nodiscard]] bool step_done(const Sequence& s) const { return s.layers_written == config_.layers; }
  /// Marks the newest step's rows of a layer as stored; after the last layer, exact copies that no truncation of up to
  /// 64 tokens can ask for are given back. Changes no view that attention can tell: those pages are read encoded.
  void mark_written(Sequence& s, int layer) noexcept;

  /// True when this step encodes the whole of a page from its exact copy.
  [[nodiscard]] bool turns(const Sequence& s, std::int64_t page) const;
  /// First and last + 1 page that the step of `s` stores to.
  struct Range {
    std::int64_t begin, end;
  };
  [[nodiscard]] Range step_pages(const Sequence& s) const;
  /// The pages of the newest step whose exact copies mark_written may give back.
  [[nodiscard]] Range kept_pages(const Sequence& s) const;

  Result<Sequence*> find(SequenceId id, const char* argument);
  Result<const Sequence*> find(SequenceId id, const char* argument) const;
  /// ids[i], of the argument `sequences`, whose newest step must be written in all layers before `what`.
  Result<const Sequence*> find_written(std::span<const SequenceId> ids, std::size_t i, const char* what) const;
  [[nodiscard]] const std::unordered_map<std::uint64_t, Sequence>& sequences() const { return sequences_; }

  [[nodiscard]] const TableConfig& config() const noexcept { return config_; }
  [[nodiscard]] const PagePool& pool(Pool which) const noexcept { return which == Pool::exact ? exact_ : encoded_; }
  /// Distinct 64-token pages held, whatever their copies: what the capacity limits.
  [[nodiscard]] std::int64_t pages_held() const noexcept { return identities_.used_slots(); }
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  [[nodiscard]] std::int64_t table_bytes() const noexcept;
  /// Forgets the slots of a pool that has none in use.
  void clear(Pool which) noexcept { slots(which).clear(); }

 private:
  [[nodiscard]] Range released_by(const Sequence& s, std::int64_t tokens) const;
  template <class Visitor>
  void walk_step(const Sequence& s, std::int64_t tokens, Reserve what, Visitor&& visit) const;
  struct Counter;
  struct Taker;
  Result<std::vector<Sequence*>> check_appends(std::span<const Append> appends);
  /// `what` needs the pages, for the message.
  [[nodiscard]] Status check_capacity(const char* what, std::int64_t pages_needed, std::int64_t pages_freed) const;
  void retain_page(const Sequence& s, std::int64_t page) noexcept;
  void release_page(Sequence& s, std::int64_t page) noexcept;
  PagePool& slots(Pool which) noexcept { return which == Pool::exact ? exact_ : encoded_; }
  void touch(Sequence& s) noexcept { s.version = ++version_; }

  TableConfig config_;
  PagePool exact_, encoded_, identities_;
  std::unordered_map<std::uint64_t, Sequence> sequences_;
  std::uint64_t next_id_ = 1;
  std::uint64_t version_ = 0;
};

}  // namespace kvant::core
