// Attention of a batch by CPU kernels: lists of independent items (core/plan/attend.hpp), and their run. Who has the
// pages says which slots a sequence's pages have, and at each run where the slots are: a cache's HostStore through a
// HostPlan, or an engine's pool through a HostPagePlan.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/cache/spec.hpp"
#include "core/plan/attend.hpp"
#include "core/plan/planned.hpp"
#include "core/plan/products.hpp"
#include "kvant/attention.hpp"

namespace kvant::core {

// A row block of one (sequence, kv head) over some of its visible pages: an AttendItem without its run's pointers.
struct AttendWork {
  int sequence, kv_head;
  int row_begin, rows;
  const core::ItemLayout* layout;
  std::int64_t sink_pages, recent_page;
  std::int64_t use_begin, use_end;
  std::size_t partial;
  std::int64_t merge;  // its block's place in the list of merges; -1: a single split
};
struct MergeWork {
  int sequence, kv_head;
  int row_begin, rows;
  const core::ItemLayout* layout;
  std::size_t first_partial;
  int splits;
};

// Where a run's pages are.
struct RunPages {
  codec::PageLayout layout[kDomains];
  BlockTable blocks[kDomains];
  int layer;  // the bases' layer
  FreshRows fresh;
};

// Tokens of one page that come as fresh keys; their page in the workspace has the same place in the list.
struct FreshPage {
  int sequence;
  std::int64_t row;  // the first one's number among its sequence's rows
  int first, count;  // in the page
};

class HostWork {
 public:
  // Both outlive this. `options` are complete, but for the lengths in q_lens, which are not read.
  HostWork(const CacheSpec& spec, const AttentionOptions& options);
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  // Once, before all else.
  Status choose_kernels();

  // Whether so many rows of a sequence go through tiles: those of latents always, as integer kernels read keys and
  // values that are stored apart.
  [[nodiscard]] bool takes_tiles(std::int64_t rows) const { return spec.is_latent() || rows > kVectorRows; }

  // Asks for what the kernels need where they will use it. Refused ones are replaced by the next best, unless the
  // caller named them. `many_rows`: some sequence's rows go through tiles.
  Status permit_kernels(bool many_rows);

  // A batch: clear, add for each sequence, build. Allocates, and keeps what it allocated for the next batch.
  void clear();
  // The sequence's pages by absolute number, those of sequence.cached tokens, for the caller to fill in before the next
  // call: those that are visible.
  PageUse* add(const PlannedSequence& sequence);
  void build();

  // Arguments are checked, and there are queries. Allocates nothing, and waits for nothing but its own workers.
  Status run(const RunPages& where, const MaskData& mask, const TensorView& q, const MutableTensorView& out,
             const RunOptions& options) const;

  // Plan::products()
  [[nodiscard]] int product_bits() const;
  // The lines of explain on the backend, and on splits and work.
  [[nodiscard]] std::string explain_backend() const;
  [[nodiscard]] std::string explain_items() const;

  const CacheSpec& spec;
  const AttentionOptions& options;
  const int group;
  const Kernels* kernels = nullptr;
  Products products;
  // "amx: the reason": better kernels that the machine has, and the system refuses to this process
  std::string refused;
  int workers = 1;
  int padded_dim = 0;

  std::vector<PlannedSequence> planned;
  std::vector<PageUse> pages;
  std::vector<SequenceUse> sequences;
  std::vector<FreshPage> fresh;

  std::deque<ItemLayout> layouts;  // a deque: items point to them
  std::vector<AttendWork> attend;  // most expensive first
  std::vector<MergeWork> merge;
  bool any_vector = false, any_tiles = false;
  int most_splits = 1;  // the most of any row block
  std::int64_t pages_per_split = 0;

  std::size_t splits_done = 0;    // in the workspace: i32 for each merge
  std::size_t fresh_begin = 0;    // in the workspace: pages of fresh keys
  std::size_t scratch_bytes = 0;  // one worker's
  std::size_t scratch_begin = 0;  // in the workspace
  std::size_t bytes = 0;          // the workspace's

 private:
  const ItemLayout* layout_of(int rows, RowPath path);
  void add_work(int sequence);
  void add_rows(int sequence, int head, int row, int rows, RowPath path, bool single_block);

  std::vector<std::size_t> first_page_;  // each sequence's
  std::size_t workspace_ = 0;            // taken so far

  // For callers that bring no workspace; one run at a time.
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> own_workspace_;
  std::size_t own_bytes_ = 0;
  // 0: free; else 1 + the fork generation of the run that uses it. A forked child has none of its parent's runs.
  mutable std::atomic<std::uint32_t> own_workspace_user_{0};
  [[nodiscard]] bool take_own_workspace() const;
};

}  // namespace kvant::core
