#include "core/fmt.hpp"
#include "cuda/plan/stages/dense.hpp"
#include "cuda/plan/stages/stage.hpp"

namespace kvant::cuda {
namespace {

using prefill::dense::DenseKernel;
using prefill::dense::Side;

// prefill_fresh: sequences that have no tokens but their queries' own.
class Fresh final : public Stage {
 public:
  explicit Fresh(const Planning& planning)
      : kernels_(planning.compiled.dense),
        schedule_(*planning.choice.first),
        encode_(planning.compiled.encode),
        is_named_(planning.is_named(core::kPrefillFresh)) {}

  [[nodiscard]] std::string explain() const override {
    const DenseKernel& one = kernels_[0];
    return fmt::format(
        "kernel     {}, tiles of {} query rows by {} keys, blocks of {}\n"
        "serves     the sequences that have no older tokens at a run, if queries are of the dtype of keys and lie at "
        "multiples of 16 bytes, and strides of keys and values are above zero\n",
        core::kPrefillFresh, one.rows, one.keys, describe_block(one));
  }
  Status run(StageRun& run) const override {
    const AttendParams& p = run.params;
    const auto side = [](const TensorView& t) { return Side{t.data, t.shape[0], 2 * t.stride[0], 2 * t.stride[1]}; };
    const Side keys = side(run.fresh.keys), values = side(run.fresh.values);
    const char* missing = nullptr;
    if (p.q.dtype != run.fresh.keys.dtype) {
      missing = "q.dtype is not that of keys";
    } else if (!lies_at_16_bytes(p.q)) {
      missing = "q does not lie at multiples of 16 bytes";
    } else if (!takes(keys, p.cache.kv_heads) || !takes(values, p.cache.kv_heads)) {
      missing = "a stride of keys or values is not above zero";
    }
    if (missing != nullptr) return leave_to_others(core::kPrefillFresh, is_named_, missing);
    const DenseKernel& kernel = *kernel_of_dtype(kernels_, run.fresh.keys.dtype);
    if (Status s = launch_dense(kernel, encode_, run, schedule_, schedule_.tiles, keys, values, p.cache.kv_heads);
        !s.ok())
      return s;
    run.left.serves = prefill::Serves::with_older;
    return {};
  }

 private:
  const std::span<const DenseKernel> kernels_;  // one for each dtype
  const prefill::Schedule schedule_;
  const prefill::dense::Encode encode_;
  const bool is_named_;  // by the options
};

}  // namespace

Result<StagePtr> make_fresh(const Planning& planning) {
  if (Status s = prepare_dense(planning.compiled.dense); !s.ok()) return s;
  return StagePtr(std::make_unique<Fresh>(planning));
}

}  // namespace kvant::cuda
