// The stages of a plan: launches that follow each other in the stream of a run. Host only.
//
//   classify, attend and merge                      decode kernels, generic
//   classify, fresh, unpacked, tiles                prefill kernels: each serves what those before have left
//   unpacked, attend and merge                      the same of keys and values of different head_dims
//
// A plan has those of its Choice, in this order.
#pragma once

#include <memory>
#include <string>

#include "core/device.hpp"
#include "cuda/plan/choose.hpp"
#include "cuda/plan/compiled.hpp"
#include "cuda/prefill/kernels.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {

// A run of a plan, as its stages see it one after the other.
struct StageRun {
  AttendParams params;
  const core::FreshRows& fresh;
  std::byte* workspace;  // the stage's own
  Stream stream;
  const DeviceLimits& limits;
  prefill::Share left{};  // what stages before have not served

  [[nodiscard]] cudaStream_t native_stream() const { return native(stream); }
};

class Stage {
 public:
  Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  virtual ~Stage() = default;
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept { return 0; }
  [[nodiscard]] virtual std::string explain() const = 0;  // lines
  virtual Status run(StageRun& run) const = 0;
};
using StagePtr = std::unique_ptr<Stage>;

// Stages are made from this. The device is current.
struct Planning {
  const core::DevicePlanConfig& config;
  const PlannedWork& work;
  const Compiled& compiled;
  const Choice& choice;
  const DeviceLimits& limits;
  AttendParams& params;  // those of all runs; decode kernels add how rows are cut
  int splits = 1;        // the most shares of one sequence at the planned lengths

  [[nodiscard]] bool is_named(const char* kernel) const { return config.options->kernel == kernel; }
};

// classify.cpp. Pages under the plan's mask tensor.
Result<StagePtr> make_classify(const Planning& planning);
// attend.cpp. Decode kernels, and the merge of their partials.
Result<StagePtr> make_attend(Planning& planning);
// fresh.cpp. Sequences without older tokens: Choice::first.
Result<StagePtr> make_fresh(const Planning& planning);
// unpacked.cpp. Sequences that find room in rounds: Choice::rounds.
Result<StagePtr> make_unpacked(const Planning& planning);
// tiles.cpp. All that is left: Choice::tiles.
Result<StagePtr> make_tiles(const Planning& planning);

}  // namespace kvant::cuda
