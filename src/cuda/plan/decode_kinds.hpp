// Decode kernels for several queries, which round weights. A kind has a line in cuda/instances.cmake, a header with its
// kernels, and a file in kinds/. Host only; no device is needed.
#pragma once

#include "cuda/decode/kernels.hpp"
#include "cuda/plan/times.hpp"

namespace kvant::cuda {

// kinds/NAME.cpp defines NAME_times: of a block of `rows` rows on an H200, where a sequence and kv head has up to
// most_rows.
using DecodeTimes = times::BlockTimes(const DeviceLimits& limits, int head_dim, Format k, int rows,
                                      std::int64_t most_rows);
#define KVANT_DECLARE(name, is_for_hopper) DecodeTimes name##_times;
KVANT_EACH_DECODE_KIND(KVANT_DECLARE)
#undef KVANT_DECLARE

// By DecodeKind, whose first has times of its own.
#define KVANT_TIMES(name, is_for_hopper) &name##_times,
inline constexpr DecodeTimes* kTimesOfDecodeKinds[] = {nullptr, KVANT_EACH_DECODE_KIND(KVANT_TIMES)};
#undef KVANT_TIMES

}  // namespace kvant::cuda
