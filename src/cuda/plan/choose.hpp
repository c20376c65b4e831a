// The rule by which a plan takes its kernels. No device is needed: plans and tests call the same function, and
// tests/cuda_choices.txt records its answers for a table of work.
//
//   decode, decode_sm90, decode_sm80, generic   one launch and a merge
//   prefill_sm90, prefill_sm80              one launch over pages
//   prefill_unpacked, then one of these     pages are unpacked first, in rounds; the other takes what is in no round
//   prefill_fresh, then one of these two    sequences without older tokens first, found at each run
//   prefill_unpacked, then decode           of keys and values of different head_dims
//
// A kind serves if the option names it, or if its estimated time (times.hpp) is the least.
#pragma once

#include <optional>
#include <string>

#include "cuda/plan/offers.hpp"
#include "cuda/plan/tile_kinds.hpp"
#include "cuda/plan/work.hpp"
#include "cuda/prefill_unpacked/rounds.hpp"

namespace kvant::cuda {

struct Choice {
  std::string why;      // these kernels; empty: there are few rows
  std::int64_t ns = 0;  // estimated
  int tiles = -1;       // which of kTileKinds; -1: decode kernels or the generic kernel serve
  // For prefill kernels, and rounds before decode kernels:
  prefill::Schedule schedule{};                        // how tiles are scheduled
  std::optional<prefill::unpacked::RoundRule> rounds;  // prefill_unpacked comes before
  bool byte_keys = false;                              // for which keys are bytes
  std::optional<prefill::Schedule> first;              // prefill_fresh comes before all
  // For decode kernels:
  bool is_generic = false;
  int decode = -1;           // index in Offers::decode; -1: prefill kernels or the generic kernel serve
  int least_exact_cost = 1;  // cost of an exact page, in encoded ones

  [[nodiscard]] const char* kernel(const Offers& offers) const {
    if (is_generic) return core::kGenericKernels;
    if (tiles >= 0 || rounds) return core::kPrefillKernels;
    return offers.decode[static_cast<std::size_t>(decode)].name();
  }
};

// Whether choose() looks at the prefill kernels of `offers`. Asking the driver about kernels loads their code, so plans
// of few rows do not.
bool considers_prefill(const PlannedWork& work);

// A tuning's part in the estimates of the work: "tuned by FILE: decode 1.04, .. times the estimate"; empty: there is no
// file.
std::string tuned_words(const PlannedWork& work, const core::Tuning& tuning);

Result<Choice> choose(const PlannedWork& work, const Offers& offers);

}  // namespace kvant::cuda
