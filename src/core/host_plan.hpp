// The work of a plan over pages in host memory: lists of independent items for CPU kernels (core/attend.hpp).
#pragma once

#include <atomic>
#include <deque>

#include "core/host_store.hpp"
#include "core/plan.hpp"

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

class HostPlan final : public PlanWork {
 public:
  static Result<std::unique_ptr<HostPlan>> create(const PlanImpl& plan, const HostStore& store);

  [[nodiscard]] const char* isa() const noexcept override { return kernels->name; }
  [[nodiscard]] const char* kernel() const noexcept override { return ""; }
  [[nodiscard]] int threads() const noexcept override { return workers; }
  [[nodiscard]] int splits() const noexcept override { return most_splits; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return bytes; }
  [[nodiscard]] std::string explain_place() const override { return {}; }
  [[nodiscard]] std::string explain_mask() const override;
  [[nodiscard]] std::string explain_work() const override;
  Status check_sequences() const override;
  Status check_rows(const char* name, const TensorView& rows) const override;
  Status check_options(const RunOptions& options) const override;
  Status run(int layer, const TensorView& q, const MutableTensorView& out, const RunOptions& options) const override;

  const PlanImpl& plan;
  const HostStore& store;
  const Kernels* kernels = nullptr;
  // "amx: the reason": better kernels that the machine has, and the system refuses to this process
  std::string refused;
  int workers = 1;
  int padded_dim = 0;

  std::vector<PageUse> pages;
  std::vector<SequenceUse> sequences;
  ClassifiedMask mask;

  std::deque<ItemLayout> layouts;  // a deque: items point to them
  std::vector<AttendWork> attend;  // most expensive first
  std::vector<MergeWork> merge;
  bool any_vector = false, any_tiles = false;
  int most_splits = 1;  // of any row block
  std::int64_t pages_per_split = 0;

  std::size_t splits_done = 0;    // in the workspace: i32 for each merge
  std::size_t scratch_bytes = 0;  // of one worker
  std::size_t scratch_begin = 0;  // in the workspace
  std::size_t bytes = 0;          // of the workspace

  // The plan's own workspace, for callers that bring none; one run at a time.
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> own_workspace;
  // 0: free; else 1 + the fork generation of the run that uses it. A forked child has none of its parent's runs.
  mutable std::atomic<std::uint32_t> own_workspace_user{0};

 private:
  HostPlan(const PlanImpl& of, const HostStore& where) : plan(of), store(where) {}
  Status permit_kernels();
};

}  // namespace kvant::core
