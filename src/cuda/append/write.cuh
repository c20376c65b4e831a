// The launches that store rows in a cache (cuda/append/write.hpp), for one head_dim.
#pragma once

#include "cuda/append/launch.cuh"

namespace kvant::cuda {

template <int kD>
cudaError_t prepare_write(const WriteParams& p, const DeviceLimits& limits) {
  return prepare_staged<kD>(p.cache.encoded_layout, reinterpret_cast<const void*>(&step_kernel<StepShape<kD>>), limits);
}

template <int kD>
cudaError_t launch_write(WriteParams& p, std::int32_t most_tokens, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const bool has_tail = p.cache.tail_pages > 0;
  const auto& layout = p.cache.encoded_layout;
  const std::int64_t jobs = std::int64_t{p.items} * p.cache.kv_heads;
  const bool of_keys = has_keys(launch.wanted);
  p.begins = 0;
  if (most_tokens <= (has_tail ? kTailStepRows : kStepRows)) {
    p.storing = has_tail ? p.tokens * head_groups<Step>(p.cache.kv_heads) : 0;
    std::int64_t blocks = jobs;
    if (has_tail) {
      const std::int64_t looking = base::min(jobs * kOctets, std::int64_t{kLookingCtas} * limits.multiprocessors / 2);
      blocks = p.storing + base::max(looking, std::int64_t{p.items + 31} / 32);
    }
    launch.size_step(launch.wanted, blocks, kCentreBytes<Step>, has_tail ? kOctet : most_tokens);
    return cudaLaunchKernelEx(&launch.how.config, &step_kernel<Step>, p);
  }
  const bool centred = codec::is_centred(layout);
  if (p.cache.exact_ends().any()) {
    using Dense = DenseShape<kD>;
    const std::int64_t blocks =
        base::max(std::int64_t{kDenseCtas} * limits.multiprocessors / 2, std::int64_t{p.items + 31} / 32);
    const cudaError_t error =
        launch.launch_before(launch.blocks_of_sides(blocks), Dense::kBlockThreads, &exact_rows_kernel<Dense>, p);
    if (error != cudaSuccess) return error;
  }
  if (centred && of_keys) {
    const cudaError_t error =
        launch.launch_before((jobs + kCentresOfWarp - 1) / kCentresOfWarp, kCentreThreads, &centres_kernel<kD>, p);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error =
      launch_many(launch, {}, jobs, jobs, has_tail ? kPageTokens : base::min(most_tokens, kPageTokens));
  if (error != cudaSuccess || !centred || !of_keys || has_tail) return error;
  p.begins = 1, p.storing = 0;
  const std::int64_t octets = std::int64_t{p.entries} * p.cache.kv_heads * kOctets;  // one page a sequence
  const std::int64_t blocks = base::max(base::min(octets, std::int64_t{kBeginningCtas} * limits.multiprocessors),
                                        std::int64_t{p.items + 31} / 32);
  launch.size_step(WriteSides::keys, blocks + blocks % 2, kCentreBytes<Step>, kOctet);
  return cudaLaunchKernelEx(&launch.how.config, &step_kernel<Step>, p);
}

template <int kD>
WriteKernel write_entry() {
  return {kD, &prepare_write<kD>, &launch_write<kD>};
}

}  // namespace kvant::cuda
