// Whether many rows take prefill kernels, and which kind. Host only; no device is needed.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda::prefill {

// A kind of prefill kernels, for the work of a plan.
struct Candidate {
  const char* name;          // as in AttentionOptions::kernel
  std::string missing;       // why it cannot run; empty: it can
  std::int64_t as_long = 0;  // it takes the time of so many row blocks of decode kernels
};

struct Choice {
  int candidate = -1;  // -1: decode kernels
  std::string why;     // for explain(); empty: there are few rows
};

// Rounds of tiles, `at_once` in each, take as long as so many row blocks of decode kernels, which have sixteen rows.
constexpr std::int64_t time_of_rounds(std::int64_t tiles, std::int64_t at_once, std::int64_t of_a_round) {
  return (tiles + at_once - 1) / at_once * of_a_round;
}

// The first of the candidates that can run, if it takes less time than `row_blocks` of decode kernels. `wanted`, of the
// options: a kind's name, that of all prefill kernels for the first that can run, or that of decode kernels, whatever
// the time. `fresh_keys`: decode kernels do not serve.
inline Result<Choice> choose(const std::string& wanted, std::span<const Candidate> candidates, std::int64_t row_blocks,
                             std::int64_t most_rows, bool fresh_keys = false) {
  if (wanted == core::kDecodeKernels || wanted == core::kDecodeSm90) {
    if (!fresh_keys) return Choice{-1, "decode kernels, as asked for"};
    return Status{
        Code::unsupported,
        fmt::format("kernel is \"{}\", and with fresh_keys only prefill kernels serve; leave kernel empty", wanted)};
  }
  int found = -1;
  std::string missing;
  std::int64_t least = 0;
  for (int i = 0; i < static_cast<int>(candidates.size()) && found < 0; ++i) {
    const Candidate& one = candidates[static_cast<std::size_t>(i)];
    if (!wanted.empty() && wanted != core::kPrefillKernels && wanted != one.name) continue;
    if (one.missing.empty()) {
      found = i;
    } else {
      if (missing != one.missing) missing += (missing.empty() ? "" : "; ") + one.missing;
      least = least == 0 ? one.as_long : std::min(least, one.as_long);
    }
  }
  if (found < 0) {
    if (fresh_keys) {
      return Status{
          Code::unsupported,
          fmt::format("fresh_keys needs prefill kernels: {}; leave it unset, and all tokens are read from the "
                      "cache",
                      missing)};
    }
    if (!wanted.empty())
      return Status{Code::unsupported, fmt::format("kernel is \"{}\": {}; leave kernel empty", wanted, missing)};
    if (row_blocks < least) return Choice{};
    return Choice{-1, fmt::format("decode kernels for {} rows: {}", most_rows, missing)};
  }
  const std::int64_t as_long = candidates[static_cast<std::size_t>(found)].as_long;
  if (wanted.empty() && !fresh_keys && row_blocks < as_long) return Choice{};
  std::string why = !wanted.empty() ? "as asked for"
                    : fresh_keys    ? "for fresh keys"
                                    : fmt::format("{} row blocks of decode kernels, which would take longer than {}",
                                                  row_blocks, as_long);
  if (!missing.empty()) why += "; " + missing;
  return Choice{found, why};
}

}  // namespace kvant::cuda::prefill
