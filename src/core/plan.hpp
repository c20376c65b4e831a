// A plan's parts. Built once by plan() (plan.cpp), read by run() (run.cpp) and explain() (explain.cpp); never changed.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "core/attend.hpp"
#include "core/cache_impl.hpp"
#include "core/device.hpp"
#include "kvant/attention.hpp"

namespace kvant {

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

class PlanImpl {
 public:
  const CacheImpl* cache = nullptr;
  std::uint64_t version = 0;     // of the cache
  AttentionOptions options;      // as given, defaults filled in
  bool window_of_cache = false;  // none was given, and the cache has one
  std::vector<SequenceId> ids;
  // A cache on a device: this computes, and there are no kernels, work lists, mask classes nor own workspace.
  std::unique_ptr<core::DevicePlan> device;
  const core::Kernels* kernels = nullptr;
  // "amx: the reason": better kernels that the machine has, and the system refuses to this process
  std::string refused;
  int threads = 1;  // 0 on a device
  int group = 1;
  int padded_dim = 0;

  std::vector<core::PageUse> pages;
  std::vector<core::SequenceUse> sequences;
  std::vector<std::uint8_t> mask_classes;
  core::MaskData mask{};
  std::int64_t mask_tiles[3] = {0, 0, 0};  // by TileClass

  std::deque<core::ItemLayout> layouts;  // a deque: items point to them
  std::vector<AttendWork> attend;        // most expensive first
  std::vector<MergeWork> merge;
  bool any_vector = false, any_tiles = false;
  int splits = 1;  // the most of any row block
  std::int64_t pages_per_split = 0;
  std::int64_t total_queries = 0;
  std::int64_t keys_read[core::kDomains] = {0, 0};  // per kv head, every visible key once

  std::size_t splits_done = 0;    // in the workspace: i32 for each merge
  std::size_t scratch_bytes = 0;  // of one worker
  std::size_t scratch_begin = 0;  // in the workspace
  std::size_t workspace_bytes = 0;

  // The plan's own workspace, for callers that bring none; one run at a time.
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> own_workspace;
  // 0: free; else 1 + the fork generation of the run that uses it. A forked child has none of its parent's runs.
  mutable std::atomic<std::uint32_t> own_workspace_user{0};

  [[nodiscard]] std::int64_t kv_bytes() const;
  [[nodiscard]] std::string explain() const;
};

// plan_check.cpp: everything that can be refused before looking at pages. Fills defaults into `options`.
Status check_options(const CacheConfig& config, std::size_t sequences, AttentionOptions& options);
// Refuses a backend that the cache's pages are out of reach of, and options that only the other backend has.
Status check_backend(const CacheImpl& cache, const AttentionOptions& options);
Result<const core::Kernels*> choose_kernels(const AttentionOptions& options);
// plan_mask.cpp: validates the mask tensor against the batch; classifies its tiles (of caches in host memory).
Status check_mask(const PlanImpl& plan);
void classify_mask(PlanImpl& plan);

}  // namespace kvant
