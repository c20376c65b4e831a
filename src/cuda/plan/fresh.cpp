// How kernels for sequences that have no tokens but their queries' own (prefill_fresh) are launched. Lengths are found
// at each run, so the plan's other prefill kernels follow in the stream, for the sequences that have older tokens then.
#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/dense.hpp"

namespace kvant::cuda {
namespace {

using prefill::fresh::FreshKernel;

}  // namespace

Status DecodePlan::prepare_fresh(const Compiled& compiled, const prefill::Schedule& schedule, bool is_wanted) {
  fresh_ = {compiled.dense, schedule, compiled.encode, is_wanted};
  return prepare_dense(compiled.dense);
}

std::string DecodePlan::explain_fresh() const {
  if (fresh_.kernels.empty()) return {};
  const FreshKernel& one = fresh_.kernels[0];
  return fmt::format(
      "first      {}, tiles of {} query rows by {} keys, blocks of {}: the sequences that "
      "have no older tokens at a run, if queries are of the dtype of keys and lie at multiples of 16 bytes, and "
      "strides of keys and values are above zero\n"
      "then       the others, by {}\n",
      core::kPrefillFresh, one.rows, one.keys, describe_block(one),
      unpacked_.is_chosen ? core::kPrefillUnpacked : prefill_name_);
}

Status DecodePlan::run_fresh(const AttendParams& p, const core::FreshRows& rows, Stream stream, bool& launched) const {
  const Fresh& f = fresh_;
  const auto side = [](const TensorView& t) {
    return prefill::fresh::Side{t.data, t.shape[0], 2 * t.stride[0], 2 * t.stride[1]};
  };
  const prefill::fresh::Side keys = side(rows.keys), values = side(rows.values);
  const char* missing = nullptr;
  if (p.q.dtype != rows.keys.dtype) {
    missing = "q.dtype is not that of keys";
  } else if (!lies_at_16_bytes(p.q)) {
    missing = "q does not lie at multiples of 16 bytes";
  } else if (!takes(keys, p.cache.kv_heads) || !takes(values, p.cache.kv_heads)) {
    missing = "a stride of keys or values is not above zero";
  }
  if (missing != nullptr) return refuse_tensors(core::kPrefillFresh, f.is_wanted, missing);
  const FreshKernel& kernel = *dense_kernel(f.kernels, rows.keys.dtype);
  if (Status status = launch_dense(kernel, f.encode, p, f.schedule, f.schedule.tiles, keys, values, p.cache.kv_heads,
                                   store_.limits(), stream);
      !status.ok())
    return status;
  launched = true;
  return {};
}

}  // namespace kvant::cuda
