// Decode attention over a cache in device memory (core::DevicePlan).
//
// A plan holds what does not change with lengths: which kernel, how many blocks, the batch's places in the device's
// tables. How the work is cut follows the lengths at each run, on the device (schedule/schedule.cuh).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "cuda/decode/kernels.hpp"
#include "cuda/mask/classify.hpp"
#include "cuda/plan/choose.hpp"
#include "cuda/plan/compiled.hpp"
#include "cuda/prefill_unpacked/unpack.hpp"
#include "cuda/schedule/params.hpp"
#include "cuda/schedule/schedule.hpp"
#include "cuda/store/store.hpp"

namespace kvant::cuda {

// The batch of a plan over an engine's blocks: a launch in the stream makes its entries (blocks/tables.hpp), entry i of
// sequence i of the tables. The sequences of the DevicePlanConfig are the largest ones then.
struct StepBatch {
  const BatchEntry* entries = nullptr;  // [sequences]
};

class DecodePlan final : public core::DevicePlan {
 public:
  explicit DecodePlan(const core::DevicePlanConfig& config);
  explicit DecodePlan(const PlannedPages& pages) : store_(pages) {}
  DecodePlan(const DecodePlan&) = delete;
  DecodePlan& operator=(const DecodePlan&) = delete;
  ~DecodePlan() override;
  // Once, before anything else. config.pages is not read.
  Status prepare(const core::DevicePlanConfig& config, const StepBatch& batch = {});

  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return workspace_bytes_; }
  [[nodiscard]] const char* kernel() const noexcept override {
    if (is_generic_) return core::kGenericKernels;
    return prefill_.function != nullptr ? core::kPrefillKernels
           : attend_.by_group           ? core::kDecodeSm90
                                        : core::kDecodeKernels;
  }
  [[nodiscard]] int splits() const noexcept override { return splits_; }
  [[nodiscard]] std::string explain() const override;
  Status run(int layer, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
             const RunOptions& options) const override;
  // The same over a pool, and exact pages, that are known now.
  Status run_over(std::byte* encoded, std::uint64_t slot_bytes, std::byte* exact, const TensorView& q,
                  const MutableTensorView& out, const core::FreshRows& fresh, const RunOptions& options) const;

 private:
  void prepare_decode(const Work& work, const Compiled& compiled, const Choice& choice);
  Status count_work(const core::DevicePlanConfig& config);
  Status choose_blocks();
  Status choose_merge(std::span<const MergeKernel> kernels, const Line& line);
  // Rows of work: sequences, kv heads and row blocks.
  [[nodiscard]] std::int64_t segments() const {
    return std::int64_t{params_.batch} * params_.cache.kv_heads * params_.row_blocks;
  }
  Status prepare_mask(const core::DevicePlanConfig& config);
  [[nodiscard]] std::size_t class_count() const;  // of pages under the mask tensor
  Status upload(const core::DevicePlanConfig& config, const StepBatch& batch);

  Status run(AttendParams& p, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
             const RunOptions& options) const;
  Status run_prefill(AttendParams& p, const core::FreshRows& fresh, std::byte* workspace, Stream stream) const;
  Status prepare_prefill(const Compiled& compiled, const Choice& choice);
  // Kernels that come before prefill_ (unpacked.cpp).
  Status prepare_unpacked(const Compiled& compiled, const prefill::unpacked::RoundRule& rule, bool is_wanted);
  [[nodiscard]] std::string explain_unpacked() const;
  Status run_unpacked(const AttendParams& p, const core::FreshRows& fresh, std::byte* workspace, prefill::Serves serves,
                      Stream stream, bool& launched) const;
  // Kernels that come before all of these (fresh.cpp).
  Status prepare_fresh(const Compiled& compiled, const prefill::Schedule& schedule, bool is_wanted);
  [[nodiscard]] std::string explain_fresh() const;
  // launched: they serve the tensors of this run.
  Status run_fresh(const AttendParams& p, const core::FreshRows& rows, Stream stream, bool& launched) const;
  Status classify(AttendParams& p, std::byte* workspace, Stream stream) const;

  const PlannedPages& store_;
  AttendParams params_{};      // but for what run gives
  prefill::Kernel prefill_{};  // no function: decode kernels are used
  const char* prefill_name_ = "";
  bool is_generic_ = false;
  prefill::Schedule schedule_{};
  struct Fresh {
    std::span<const prefill::fresh::FreshKernel> kernels;  // of both dtypes; none: prefill_ serves all sequences
    prefill::Schedule schedule{};
    prefill::fresh::Encode encode = nullptr;
    bool is_wanted = false;  // the options name them
  };
  Fresh fresh_;
  struct Unpacked {
    std::span<const prefill::fresh::FreshKernel> kernels;  // of both dtypes
    prefill::unpacked::UnpackKernel unpack{};
    prefill::fresh::Encode encode = nullptr;
    prefill::unpacked::RoundRule rule{};
    unsigned blocks = 0;                                                   // that unpack
    std::size_t parts_at = 0, served_at = 0, keys_at = 0, side_bytes = 0;  // in the workspace, behind the rounds
    std::size_t bytes = 0;                                                 // of the workspace
    bool is_chosen = false, is_wanted = false;                             // the options name the kind
  };
  Unpacked unpacked_;
  std::string why_;  // these kernels
  AttendKernel attend_{};
  MergeKernel merge_{};
  int blocks_ = 1;        // of a multiprocessor
  int shared_bytes_ = 0;  // of each
  int cluster_ = 1;       // blocks that merge one row
  int splits_ = 1;
  int least_exact_cost_ = 1;  // of an exact page, in encoded ones
  int units_ = 0;             // of the line of work, at planning
  int longest_ = 0;           // of a row of work
  MaskPages mask_{};          // but for what run gives
  std::size_t ml_at_ = 0, o_at_ = 0, classes_at_ = 0, workspace_bytes_ = 0;
  void* memory_ = nullptr;  // batch entries, slopes, places in the mask
};

Result<std::unique_ptr<core::DevicePlan>> make_plan(const core::DevicePlanConfig& config);

}  // namespace kvant::cuda
