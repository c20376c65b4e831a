#include "cuda/mask/classify.hpp"
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/stages/stage.hpp"

namespace kvant::cuda {
namespace {

std::size_t class_count(const MaskPages& pages) {
  return static_cast<std::size_t>(pages.batches) * static_cast<std::size_t>(pages.kv_heads) *
         static_cast<std::size_t>(pages.pages);
}

// Finds which pages the mask tensor hides, and which it leaves as they are.
class Classify final : public Stage {
 public:
  explicit Classify(const MaskPages& pages) : pages_(pages) {}
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return class_count(pages_); }
  [[nodiscard]] std::string explain() const override {
    return fmt::format(
        "mask       one launch before finds which of {} pages the tensor hides, for {} kv head(s) of {} "
        "sequence(s)\n",
        pages_.pages, pages_.kv_heads, pages_.batches);
  }
  Status run(StageRun& run) const override {
    MaskPages pages = pages_;
    pages.mask = run.params.mask;
    pages.classes = reinterpret_cast<std::uint8_t*>(run.workspace);
    run.params.mask.classes = pages.classes;
    KVANT_CUDA_TRY(classify_pages(pages, run.limits.overlaps(), run.native_stream()));
    return {};
  }

 private:
  const MaskPages pages_;  // but for what a run gives
};

}  // namespace

Result<StagePtr> make_classify(const Planning& planning) {
  const core::DevicePlanConfig& config = planning.config;
  const MaskTensor& mask = config.options->mask.tensor;
  AttendParams& p = planning.params;
  MaskPages pages{};
  const std::int64_t* stride = p.mask.stride;
  pages.batches = stride[0] == 0 ? 1 : config.batch;
  pages.kv_heads = stride[1] == 0 ? 1 : p.cache.kv_heads;
  pages.group = stride[1] == 0 ? 1 : p.group;
  const std::vector<int>& q_lens = config.options->q_lens;
  pages.queries = stride[2] == 0 ? 1 : *std::max_element(q_lens.begin(), q_lens.end());
  pages.first_key = stride[3] == 0 ? 0 : p.mask.first_key;
  const std::int64_t most_keys = std::int64_t{p.cache.max_pages} * kPageTokens;
  pages.keys = stride[3] == 0 ? 1 : std::min(mask.shape[3], most_keys - pages.first_key);
  pages.pages = static_cast<int>((pages.first_key + pages.keys + kPageTokens - 1) / kPageTokens);
  if (class_count(pages) > std::size_t{1} << 31) {
    return Status{
        Code::invalid_argument,
        fmt::format("mask.tensor tells {} sequences, {} kv heads and {} pages apart, more than one plan takes: plan "
                    "smaller batches",
                    pages.batches, pages.kv_heads, pages.pages)};
  }
  p.mask.class_stride[3] = stride[3] == 0 ? 0 : 1;
  p.mask.class_stride[1] = stride[1] == 0 ? 0 : pages.pages;
  p.mask.class_stride[0] = stride[0] == 0 ? 0 : std::int64_t{pages.kv_heads} * pages.pages;
  return StagePtr(std::make_unique<Classify>(pages));
}

}  // namespace kvant::cuda
