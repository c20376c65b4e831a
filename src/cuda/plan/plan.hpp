// Attention over a cache in device memory (core::DevicePlan).
//
// A plan holds what does not change with lengths: the stages of its choice (choose.hpp), and the batch's places in the
// device's tables. How the work is cut follows the lengths at each run, on the device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "cuda/plan/stages/stage.hpp"
#include "cuda/schedule/params.hpp"
#include "cuda/store/store.hpp"

namespace kvant::cuda {

// The batch of a plan over an engine's blocks: a launch in the stream makes its entries (blocks/tables.hpp), entry i of
// sequence i of the tables. The sequences of the DevicePlanConfig are the largest ones then.
struct StepBatch {
  const BatchEntry* entries = nullptr;  // [sequences]
};

class AttentionPlan final : public core::DevicePlan {
 public:
  explicit AttentionPlan(const PlannedPages& pages) : pages_(pages) {}
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;
  ~AttentionPlan() override;
  // Once, before anything else. config.pages is not read.
  Status prepare(const core::DevicePlanConfig& config, const StepBatch& batch = {});

  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return workspace_bytes_; }
  [[nodiscard]] const char* kernel() const noexcept override { return kernel_; }
  [[nodiscard]] int products() const noexcept override { return products_; }
  [[nodiscard]] int splits() const noexcept override { return splits_; }
  [[nodiscard]] std::int64_t estimated_ns() const noexcept override { return estimated_ns_; }
  [[nodiscard]] std::string explain() const override;
  Status run(int layer, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
             const RunOptions& options) const override;
  // The same over a pool, and exact pages, that are known now.
  Status run_over(std::byte* encoded, std::uint64_t slot_bytes, std::byte* exact, const TensorView& q,
                  const MutableTensorView& out, const core::FreshRows& fresh, const RunOptions& options) const;
  // Lists the work of the step that a StepBatch now has, for the runs that follow (schedule/list.hpp).
  Status list_items(Stream stream) const;

 private:
  Status make_stages(const core::DevicePlanConfig& config, const PlannedWork& work);
  Status add_stage(Result<StagePtr> stage);
  Status upload(const core::DevicePlanConfig& config, const StepBatch& batch);
  Status run(const AttendParams& params, const TensorView& q, const MutableTensorView& out,
             const core::FreshRows& fresh, const RunOptions& options) const;

  struct Placed {
    StagePtr stage;
    std::size_t at;  // its workspace, in the plan's
  };
  const PlannedPages& pages_;
  AttendParams params_{};       // but for what a run gives
  std::vector<Placed> stages_;  // in the order of launches
  std::string estimates_;       // lines on how times were tuned or scaled; empty: they were not, or none were compared
  std::int64_t estimated_ns_ = 0;
  const char* kernel_ = core::kDecodeKernels;
  int products_ = 16, splits_ = 1;
  std::size_t workspace_bytes_ = 0;
  void* memory_ = nullptr;  // the list of a step's items, batch entries, slopes, places in the mask
};

Result<std::unique_ptr<core::DevicePlan>> make_plan(const core::DevicePlanConfig& config);

}  // namespace kvant::cuda
