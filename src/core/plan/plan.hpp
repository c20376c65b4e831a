// A plan's parts. Built once by plan() (plan.cpp), read by run() (run.cpp) and explain() (explain.cpp); never changed.
// All that depends on where the pages are is a PlanWork, which the cache's PageStore makes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/cache/impl.hpp"
#include "core/plan/attend.hpp"
#include "core/plan/planned.hpp"
#include "kvant/attention.hpp"

namespace kvant {
namespace core {

class PlanWork {
 public:
  virtual ~PlanWork() = default;
  [[nodiscard]] virtual const char* isa() const noexcept = 0;
  [[nodiscard]] virtual const char* kernel() const noexcept = 0;                  // empty: there is but one kind
  [[nodiscard]] virtual int products() const noexcept = 0;                        // bits: Plan::products()
  [[nodiscard]] virtual int threads() const noexcept = 0;                         // 0 on a device
  [[nodiscard]] virtual int splits() const noexcept = 0;                          // the most of any row block
  [[nodiscard]] virtual std::int64_t estimated_ns() const noexcept { return 0; }  // on a device; 0: unknown
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;

  // For explain: a line that comes before all others, or none; what becomes of the mask tensor; and the lines on
  // backend, pages and work.
  [[nodiscard]] virtual std::string explain_place() const = 0;
  [[nodiscard]] virtual std::string explain_mask() const = 0;
  [[nodiscard]] virtual std::string explain_work() const = 0;

  // Refusals of a run: sequences that are no longer what they were at planning; rows that kernels do not read;
  // options.
  virtual Status check_sequences() const = 0;
  virtual Status check_rows(const char* name, const TensorView& rows) const = 0;
  virtual Status check_options(const RunOptions& options) const = 0;
  virtual Status check_fresh(const FreshRows& fresh) const = 0;  // keys and values of a plan that takes them
  // Arguments are checked, and there are queries. Allocates nothing, and waits for nothing but its own workers.
  virtual Status run(int layer, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
                     const RunOptions& options) const = 0;
};

}  // namespace core

class PlanImpl {
 public:
  const CacheImpl* cache = nullptr;
  AttentionOptions options;      // as given, defaults filled in
  bool window_of_cache = false;  // none was given, and the cache has one
  std::vector<SequenceId> ids;
  int group = 1;
  std::vector<PlannedSequence> sequences;
  std::int64_t total_queries = 0;
  std::int64_t keys_read[core::kDomains] = {0, 0};  // keys in pages, per kv head, every visible key once
  std::unique_ptr<core::PlanWork> work;             // has a reference to this

  [[nodiscard]] std::int64_t kv_bytes() const;
  [[nodiscard]] std::string explain() const;
};

// check.cpp: everything that can be refused before looking at pages. Fills defaults into `options`.
Status check_options(const CacheConfig& config, std::size_t sequences, AttentionOptions& options);
Result<const core::Kernels*> choose_kernels(const AttentionOptions& options);
// mask.cpp: validates the mask tensor against the batch.
Status check_mask(const PlanImpl& plan);

// The tiles of a mask tensor in host memory, classified.
struct ClassifiedMask {
  core::MaskData data{};
  std::vector<std::uint8_t> classes;
  std::int64_t tiles[3] = {0, 0, 0};  // by TileClass
};
void classify_mask(const PlanImpl& plan, ClassifiedMask& mask);

}  // namespace kvant
