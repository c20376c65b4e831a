// Prefill kernels (prefill_sm90): when a plan takes them, and how they are launched.
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

std::span<const prefill::Kernel> prefill_kernels(int head_dim) {
#define KVANT_ENTRY(d) \
  if (head_dim == d) return prefill::kernels<d>();
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  return {};
}

std::string prefill_head_dims() {
  std::string list;
  for (const int d : instances().head_dims) {
    if (!prefill_kernels(d).empty()) list += fmt::format("{}{}", list.empty() ? "" : ", ", d);
  }
  return list;
}

// A round of tiles takes as long as so many row blocks of decode kernels, which are sixteen rows (H100, 32768 keys:
// docs/lab, cuda-prefill.md).
constexpr std::int64_t row_blocks_of_a_round(Format k) {
  return codec::is_dense(k) ? 250 : 550;
}
// The share of the L2 cache for keys and values that blocks read at the same time, in bytes.
constexpr std::int64_t kKeysInCache = std::int64_t{24} << 20;

}  // namespace

// Chooses prefill kernels if the options name them or there are enough rows; else why_ says why decode kernels serve.
Status DecodePlan::choose_prefill(const core::DevicePlanConfig& config) {
  const std::string& wanted = config.options->kernel;
  if (wanted == "decode") {
    why_ = "decode kernels, as asked for";
    return {};
  }
  AttendParams& p = params_;
  const std::int64_t pairs = std::int64_t{p.batch} * p.cache.kv_heads;
  std::int64_t most_rows = 0, longest = 0, row_blocks = 0, tiles = 0;
  for (const core::DeviceSequence& s : config.sequences) {
    const std::int64_t rows = std::int64_t{s.q_len} * p.group;
    most_rows = std::max(most_rows, rows);
    longest = std::max(longest, s.length);
    row_blocks += p.cache.kv_heads * ((rows + 15) / 16);
    tiles += p.cache.kv_heads * ((rows + prefill::kRows - 1) / prefill::kRows);
  }
  const std::int64_t rounds = (tiles + store_.limits().multiprocessors - 1) / store_.limits().multiprocessors;
  const std::int64_t as_long = rounds * row_blocks_of_a_round(config.k);
  if (wanted.empty() && row_blocks < as_long) return {};
  std::string missing;
  const std::span<const prefill::Kernel> kernels = prefill_kernels(config.head_dim);
  const auto kernel = std::find_if(kernels.begin(), kernels.end(),
                                   [&](const prefill::Kernel& k) { return k.k == config.k && k.v == config.v; });
  cudaFuncAttributes attributes{};
  const auto usual = [](const DeviceBasis& basis, Format format) {
    return basis.kind == (codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none);
  };
  if (!usual(p.k_basis, config.k) || !usual(p.v_basis, config.v)) {
    missing = "bases other than the formats' own are for decode kernels only";
  } else if (kernels.empty()) {
    missing = fmt::format("prefill kernels are compiled for head_dim {}", prefill_head_dims());
  } else if (kernel == kernels.end()) {
    missing = fmt::format("prefill kernels are not compiled for {}/{} at head_dim {}", format_info(config.k).name,
                          format_info(config.v).name, config.head_dim);
  } else if (kernel->shared_bytes > store_.limits().shared_bytes) {
    missing = "prefill kernels need a device of compute capability 9.0";
  } else {
    KVANT_CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel->function));
    // The kernel is empty in code for other architectures, and in what the driver compiles from PTX.
    if (attributes.numRegs < 64) missing = "prefill kernels need machine code for compute capability 9.0 (sm_90a)";
  }
  if (!missing.empty()) {
    if (!wanted.empty())
      return {Code::unsupported, fmt::format("kernel is \"{}\": {}; leave kernel empty", wanted, missing)};
    why_ = fmt::format("decode kernels for {} rows: {}", most_rows, missing);
    return {};
  }
  KVANT_CUDA_TRY(prepare_shared(kernel->function, kernel->shared_bytes));
  prefill_ = *kernel;
  why_ = !wanted.empty()
             ? std::string("as asked for")
             : fmt::format("{} row blocks of decode kernels, which would take longer than {}", row_blocks, as_long);
  const double bytes =
      static_cast<double>(std::max<std::int64_t>(longest, 1)) * p.cache.encoded_layout.block_bytes / kPageTokens;
  const std::int64_t blocks_of_rows = (most_rows + prefill::kRows - 1) / prefill::kRows;
  schedule_.heads_at_once =
      static_cast<int>(std::clamp<std::int64_t>(static_cast<std::int64_t>(kKeysInCache / bytes), 1, pairs));
  if (pairs * blocks_of_rows > (1 << 30) || most_rows > kMostRows) {
    return {
        Code::invalid_argument,
        fmt::format("{} sequences of {} kv heads with up to {} rows each are more than one plan takes: plan smaller "
                    "batches",
                    p.batch, config.kv_heads, most_rows)};
  }
  schedule_.row_blocks = static_cast<int>(blocks_of_rows);
  schedule_.tiles = static_cast<int>(pairs * blocks_of_rows);
  return {};
}

Status DecodePlan::run_prefill(AttendParams& p, Stream stream) const {
  prefill::Schedule schedule = schedule_;
  void* arguments[] = {&p, &schedule};
  Launch launch(static_cast<unsigned>(std::min(schedule.tiles, store_.limits().multiprocessors)), prefill_.threads,
                native(stream), store_.limits().overlaps);
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(prefill_.shared_bytes);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, prefill_.function, arguments));
  return {};
}

}  // namespace kvant::cuda
