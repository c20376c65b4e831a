// Kernels for sequences that have no tokens but their queries' own (prefill_fresh): when a plan with fresh keys has
// them, and how they are launched. Lengths are found at each run, so the plan's other prefill kernels follow in the
// stream, for the sequences that have older tokens then.
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/prefill.hpp"
#include "cuda/prefill_fresh/maps.hpp"
#include "cuda/runtime/built.hpp"

namespace kvant::cuda {
namespace {

using prefill::fresh::FreshKernel;

std::span<const FreshKernel> fresh_kernels(int head_dim) {
  return kernels_of<FreshKernel>(head_dim, []<int D>() { return prefill::fresh::kernels<D>(); });
}

// A sequence without older tokens has at least so many; with fewer, a second launch costs what the kernel gains.
constexpr std::int64_t kLeastRows = 256;

// Why there is none; empty: there is.
Result<std::string> missing_fresh(const core::DevicePlanConfig& config, std::span<const FreshKernel> kernels,
                                  const DeviceLimits& limits, bool has_encode) {
  if (config.options->mask.tensor.data != nullptr) return std::string("prefill_fresh kernels take no mask tensor");
  if (kernels.empty() || config.head_dim % 8 != 0)
    return fmt::format("prefill_fresh kernels are not compiled for head_dim {}", config.head_dim);
  for (const FreshKernel& one : kernels) {
    Result<std::string> missing = missing_of_hopper(core::kPrefillFresh, one.function, one.shared_bytes, limits);
    if (!missing.ok() || !missing->empty()) return missing;
  }
  if (!has_encode) return std::string("prefill_fresh kernels need a driver for CUDA 12 or newer");
  return std::string();
}

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
  const std::span<const FreshKernel> kernels = fresh_kernels(params_.cache.encoded_layout.head_dim);
  KVANT_CUDA_TRY(prefill::fresh::find_encode(f.encode));
  const Result<std::string> missing = missing_fresh(config, kernels, store_.limits(), f.encode != nullptr);
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
  for (const FreshKernel& one : kernels) KVANT_CUDA_TRY(prepare_shared(one.function, one.shared_bytes));
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
      "first      {}, tiles of {} query rows by {} keys, {} threads, {} bytes of shared memory: the sequences that "
      "have no older tokens at a run, if queries are of the dtype of keys and lie at multiples of 16 bytes, and "
      "strides of keys and values are above zero\n"
      "then       the others, by {}\n",
      core::kPrefillFresh, one.rows, one.keys, one.threads, one.shared_bytes, prefill_name_);
}

Status DecodePlan::run_fresh(const AttendParams& p, const core::FreshRows& rows, Stream stream, bool& launched) const {
  const Fresh& f = fresh_;
  const auto side = [](const TensorView& t) {
    return prefill::fresh::Side{t.data, t.shape[0], 2 * t.stride[0], 2 * t.stride[1]};
  };
  const prefill::fresh::Side keys = side(rows.keys), values = side(rows.values);
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(p.q.data) % 16 == 0 && p.q.token_stride % 8 == 0 && p.q.head_stride % 8 == 0;
  const char* missing = nullptr;
  if (p.q.dtype != rows.keys.dtype) {
    missing = "q.dtype is not that of keys";
  } else if (!aligned) {
    missing = "q does not lie at multiples of 16 bytes";
  } else if (!takes(keys, p.cache.kv_heads) || !takes(values, p.cache.kv_heads)) {
    missing = "a stride of keys or values is not above zero";
  }
  if (missing != nullptr) {
    if (!f.is_wanted) return {};
    return {Code::unsupported, fmt::format("kernel is \"{}\", and {}: copy the tensor, or leave kernel empty",
                                           core::kPrefillFresh, missing)};
  }
  const FreshKernel& kernel = f.kernels[f.kernels[0].dtype == rows.keys.dtype ? 0 : 1];
  prefill::fresh::Maps maps;
  for (const auto& [map, of] : {std::pair(&maps.keys, &keys), std::pair(&maps.values, &values)}) {
    if (!encode_map(f.encode, kernel, *of, p.cache.kv_heads, p.head_dim, *map))
      return {Code::internal, "cuTensorMapEncodeTiled refused keys or values; set kernel to \"prefill_sm90\""};
  }
  prefill::Schedule schedule = f.schedule;
  void* arguments[] = {const_cast<AttendParams*>(&p), &schedule, &maps};
  Launch launch(static_cast<unsigned>(std::min(schedule.tiles, store_.limits().multiprocessors)), kernel.threads,
                native(stream), store_.limits().overlaps);
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, kernel.function, arguments));
  launched = true;
  return {};
}

}  // namespace kvant::cuda
