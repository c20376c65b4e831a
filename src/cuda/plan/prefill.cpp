// How the prefill kernels that read pages (prefill_sm90, prefill_sm80) are launched.
#include <algorithm>

#include "cuda/plan/decode_plan.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {

Status DecodePlan::prepare_prefill(const Compiled& compiled, const Choice& choice) {
  const bool is_sm90 = choice.tiles == Tiles::sm90;
  prefill_ = is_sm90 ? *compiled.sm90 : *compiled.sm80;
  prefill_.shared_bytes = shared_bytes_of(prefill_, params_.cache.encoded_layout);
  prefill_name_ = name_of(choice.tiles);
  blocks_ = is_sm90 ? compiled.offers.sm90->blocks : compiled.offers.sm80->blocks;
  schedule_ = choice.schedule;
  if (is_sm90) KVANT_CUDA_TRY(prepare_shared(prefill_.function, prefill_.shared_bytes));  // find_compiled did sm80's
  return {};
}

Status DecodePlan::run_prefill(AttendParams& p, const core::FreshRows& fresh, std::byte* workspace,
                               Stream stream) const {
  prefill::Schedule schedule = schedule_;
  if (!fresh_.kernels.empty()) {
    bool launched = false;
    if (Status s = run_fresh(p, fresh, stream, launched); !s.ok()) return s;
    if (launched) schedule.serves = prefill::Serves::with_older;
  }
  if (unpacked_.is_chosen) {
    bool launched = false;
    if (Status s = run_unpacked(p, fresh, workspace, schedule.serves, stream, launched); !s.ok()) return s;
    if (launched) schedule.served = reinterpret_cast<const std::int32_t*>(workspace + unpacked_.served_at);
  }
  void* arguments[] = {&p, &schedule};
  Launch launch(static_cast<unsigned>(std::min(schedule.tiles, store_.limits().multiprocessors * blocks_)),
                prefill_.threads, native(stream), store_.limits().overlaps);
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(prefill_.shared_bytes);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, prefill_.function, arguments));
  return {};
}

}  // namespace kvant::cuda
