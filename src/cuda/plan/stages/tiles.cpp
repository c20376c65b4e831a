#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/stages/stage.hpp"

namespace kvant::cuda {
namespace {

// Prefill kernels that read pages: prefill_sm90, prefill_sm80.
class TilesOverPages final : public Stage {
 public:
  TilesOverPages(const Planning& planning, const prefill::Kernel& kernel, int blocks)
      : kernel_(kernel),
        schedule_(planning.choice.schedule),
        name_(name_of(planning.choice.tiles)),
        why_(planning.choice.why),
        resident_(blocks),
        blocks_(std::min(schedule_.tiles, planning.limits.multiprocessors * blocks)),
        head_dim_(planning.params.head_dim),
        is_behind_rounds_(planning.choice.rounds) {}

  [[nodiscard]] std::string explain() const override {
    return fmt::format(
        "kernel     {} {}/{}, head_dim {}, tiles of {} query rows: {}\n"
        "products   {}, f32 sums; weights are rounded to the same type\n"
        "blocks     {} ({} a multiprocessor) of {} threads, {} bytes of shared memory each; {} tiles, keys of {} heads "
        "at once\n",
        name_, format_info(kernel_.k).name, format_info(kernel_.v).name, head_dim_, kernel_.rows,
        is_behind_rounds_ ? "the sequences that are left" : why_,
        codec::is_dense(kernel_.k) ? "16-bit floats"
                                   : "encoded pages f16 (levels are exact in it), exact pages as they are stored",
        blocks_, resident_, kernel_.threads, kernel_.shared_bytes, schedule_.tiles, schedule_.heads_at_once);
  }
  Status run(StageRun& run) const override {
    prefill::Schedule schedule = schedule_;
    schedule.share = run.left;
    void* arguments[] = {&run.params, &schedule};
    Launch launch(static_cast<unsigned>(blocks_), kernel_.threads, run.native_stream(), run.limits.overlaps());
    launch.config.dynamicSmemBytes = static_cast<std::size_t>(kernel_.shared_bytes);
    KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, kernel_.function, arguments));
    return {};
  }

 private:
  const prefill::Kernel kernel_;
  const prefill::Schedule schedule_;
  const char* const name_;
  const std::string why_;
  const int resident_, blocks_;  // of a multiprocessor; of a launch
  const int head_dim_;
  const bool is_behind_rounds_;
};

}  // namespace

Result<StagePtr> make_tiles(const Planning& planning) {
  const bool is_sm90 = planning.choice.tiles == Tiles::sm90;
  prefill::Kernel kernel = is_sm90 ? *planning.compiled.sm90 : *planning.compiled.sm80;
  kernel.shared_bytes = shared_bytes_of(kernel, planning.params.cache.encoded_layout);
  const Offers& offers = planning.compiled.offers;
  if (is_sm90) KVANT_CUDA_TRY(prepare_shared(kernel.function, kernel.shared_bytes));  // find_compiled did sm80's
  return StagePtr(
      std::make_unique<TilesOverPages>(planning, kernel, is_sm90 ? offers.sm90->blocks : offers.sm80->blocks));
}

}  // namespace kvant::cuda
