#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/stages/stage.hpp"

namespace kvant::cuda {
namespace {

// Prefill kernels that read pages (tile_kinds.hpp).
class TilesOverPages final : public Stage {
 public:
  TilesOverPages(const Planning& planning, const prefill::Kernel& kernel, int blocks)
      : kernel_(kernel),
        schedule_(planning.choice.schedule),
        name_(kTileKinds[planning.choice.tiles].name),
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
  const int resident_, blocks_;  // on a multiprocessor; in a launch
  const int head_dim_;
  const bool is_behind_rounds_;
};

}  // namespace

Result<StagePtr> make_tiles(const Planning& planning) {
  const auto kind = static_cast<std::size_t>(planning.choice.tiles);
  prefill::Kernel kernel = *planning.compiled.tiles[kind];
  kernel.shared_bytes = shared_bytes_of(kernel, planning.params.cache.encoded_layout);
  // (find_compiled prepared others.)
  if (kTileKinds[kind].is_for_hopper) KVANT_CUDA_TRY(prepare_shared(kernel.function, kernel.shared_bytes));
  return StagePtr(
      std::make_unique<TilesOverPages>(planning, kernel, planning.compiled.offers.tiles[kind].kernel->blocks));
}

}  // namespace kvant::cuda
