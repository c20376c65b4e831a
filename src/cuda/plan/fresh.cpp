// Kernels for sequences that have no tokens but their queries' own (prefill_fresh): when a plan with fresh keys has
// them, and how they are launched. Lengths are found at each run, so the plan's other prefill kernels follow in the
// stream, for the sequences that have older tokens then.
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/dense.hpp"
#include "cuda/runtime/built.hpp"

namespace kvant::cuda {
namespace {

using prefill::fresh::FreshKernel;

// A sequence without older tokens has at least so many; with fewer, a second launch costs what the kernel gains.
constexpr std::int64_t kLeastRows = 256;

}  // namespace

Status DecodePlan::choose_fresh(const core::DevicePlanConfig& config, bool any_length) {
  const AttentionOptions& o = *config.options;
  const bool wanted = o.kernel == core::kPrefillFresh;
  if (!o.fresh_keys) {
    if (!wanted) return {};
    return {Code::unsupported,
            fmt::format("kernel is \"{}\", which plans with fresh_keys have; leave kernel empty", o.kernel)};
  }
  if (!wanted && !o.kernel.empty() && o.kernel != core::kPrefillKernels) return {};
  Fresh& f = fresh_;
  const std::span<const FreshKernel> kernels = dense_kernels(params_.cache.encoded_layout.head_dim);
  const Result<std::string> missing = missing_of_dense(core::kPrefillFresh, config, kernels, store_.limits(), f.encode);
  if (!missing.ok()) return missing.status();
  if (!missing->empty()) {
    if (wanted) return {Code::unsupported, fmt::format("kernel is \"{}\": {}; leave kernel empty", o.kernel, *missing)};
    why_ += "; " + *missing;
    return {};
  }
  std::int64_t longest = 0;  // rows
  for (const core::DeviceSequence& s : config.sequences) {
    if (any_length || s.length == s.q_len) longest = std::max(longest, std::int64_t{s.q_len} * params_.group);
  }
  if (!wanted && longest < kLeastRows) return {};
  if (Status status = prepare_dense(kernels); !status.ok()) return status;
  const std::int64_t pairs = std::int64_t{params_.batch} * params_.cache.kv_heads;
  const std::int64_t bytes = std::max<std::int64_t>(longest / params_.group, 1) * 4 * config.head_dim;
  const std::int64_t row_blocks = (most_rows_of(config) + kernels[0].rows - 1) / kernels[0].rows;
  // As many in each group of heads, so that all of them take as many rounds.
  const std::int64_t most = heads_in_cache(static_cast<double>(bytes), pairs), groups = (pairs + most - 1) / most;
  f.schedule.heads_at_once = static_cast<int>((pairs + groups - 1) / groups);
  f.schedule.row_blocks = static_cast<int>(row_blocks);
  f.schedule.tiles = static_cast<int>(pairs * row_blocks);  // no more than those of prefill_, which fit
  f.schedule.serves = prefill::Serves::without_older;
  f.kernels = kernels;
  f.is_wanted = wanted;
  return {};
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
