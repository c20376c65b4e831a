// Whether many rows take prefill kernels, and which kind. Host only; no device is needed.
#pragma once

#include <span>
#include <string>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda::prefill {

// A kind of prefill kernels, for the work of a plan.
struct Candidate {
  const char* name;     // as in AttentionOptions::kernel
  std::string missing;  // why it cannot run; empty: it can
  std::int64_t ns = 0;  // that it takes (plan/times.hpp)
};

struct Choice {
  int candidate = -1;  // -1: decode kernels
  std::string why;     // for explain(); empty: there are few rows
};

// The fastest of the candidates that can run, if it takes less time than decode kernels. `wanted`, of the options: a
// kind's name, that of all prefill kernels for the first that can run (or kPrefillFresh, beside which it runs), or that
// of decode kernels, whatever the time. `fresh_keys`: decode kernels do not serve.
inline Result<Choice> choose(const std::string& wanted, std::span<const Candidate> candidates, std::int64_t decode_ns,
                             std::int64_t most_rows, bool fresh_keys = false) {
  if (wanted.starts_with(core::kDecodeKernels)) {
    if (!fresh_keys) return Choice{-1, "decode kernels, as asked for"};
    return Status{
        Code::unsupported,
        fmt::format("kernel is \"{}\", and with fresh_keys only prefill kernels serve; leave kernel empty", wanted)};
  }
  const bool any = wanted.empty() || wanted == core::kPrefillKernels || wanted == core::kPrefillFresh;
  const Candidate* found = nullptr;
  std::string missing;
  bool faster_is_missing = false;
  for (const Candidate& one : candidates) {
    if (!any && wanted != one.name) continue;
    if (!one.missing.empty()) {
      if (missing != one.missing) missing += (missing.empty() ? "" : "; ") + one.missing;
      faster_is_missing = faster_is_missing || one.ns < decode_ns;
    } else if (found == nullptr || (wanted.empty() && one.ns < found->ns)) {
      found = &one;
    }
  }
  if (found == nullptr) {
    if (fresh_keys) {
      return Status{
          Code::unsupported,
          fmt::format("fresh_keys needs prefill kernels: {}; leave it unset, and all tokens are read from the "
                      "cache",
                      missing)};
    }
    if (!wanted.empty())
      return Status{Code::unsupported, fmt::format("kernel is \"{}\": {}; leave kernel empty", wanted, missing)};
    if (!faster_is_missing) return Choice{};
    return Choice{-1, fmt::format("decode kernels for {} rows: {}", most_rows, missing)};
  }
  if (wanted.empty() && !fresh_keys && decode_ns <= found->ns) return Choice{};
  std::string why = !wanted.empty() ? "as asked for"
                    : fresh_keys
                        ? "for fresh keys"
                        : fmt::format("about {:.0f} us, decode kernels {:.0f}", static_cast<double>(found->ns) / 1000,
                                      static_cast<double>(decode_ns) / 1000);
  if (!missing.empty()) why += "; " + missing;
  return Choice{static_cast<int>(found - candidates.data()), why};
}

}  // namespace kvant::cuda::prefill
