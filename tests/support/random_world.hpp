// Attention cases drawn from a seed, in which everything that can be combined is: geometry, formats, exact ends, what
// happened to the sequences before, masks, transforms of logits. Grids vary one or two options at a time. Here three
// and more meet.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {

struct RandomCase {
  WorldSpec spec;
  AttentionOptions options;  ///< its mask points into `mask`
  std::vector<float> sink_logits;
  OwnedMask mask;
  std::string description;
};

/// The choices that a backend takes.
struct RandomChoices {
  std::vector<int> head_dims;
  bool two_head_dims = false;  ///< values have a size of their own
  bool latents = false;        ///< all caches are latent
  std::vector<std::pair<std::string, std::string>> formats;
  std::int64_t most_queries = 16;
  bool page_centres = false;  ///< keys are page-centred in half of the cases whose format takes it
  bool fresh_keys = false;    ///< half of the cases have them
};

RandomCase draw_case(Rng& rng, const RandomChoices& choices);

/// First seed and number of seeds of one of a test's parts. KVANT_RANDOM_CASES=FIRST:COUNT in the environment asks for
/// COUNT a part, from FIRST on.
std::pair<std::uint64_t, std::uint64_t> random_seeds(int part, std::uint64_t count);

/// Expects the cases of a part's seeds to match the reference on the host, each on an instruction set, with a number of
/// threads and with splits that its seed draws.
void expect_host_matches(const RandomChoices& choices, int part);

}  // namespace kvant::test
