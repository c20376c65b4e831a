// Latent caches: one latent and one rotary key a token, which all query heads share. The latent is the value and a part
// of the key, and is stored once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/layout.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "kvant/pages.hpp"
#include "support/engine_pool.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

// --- attention -------------------------------------------------------------------------------------------------------

RandomChoices choices() {
  RandomChoices all;
  all.head_dims = {32, 64, 80, 128, 256, 512, 1, 31, 72, 100, 576};
  all.latents = true;
  for (const FormatInfo& k : formats()) {
    for (const FormatInfo& v : formats()) all.formats.emplace_back(k.name, v.name);
  }
  all.most_queries = 40;
  all.page_centres = all.fresh_keys = true;
  return all;
}

class Latents : public testing::TestWithParam<int> {};

TEST_P(Latents, MatchTheReference) {
  const RandomChoices all = choices();
  const std::vector<std::string> isas = available_isas();
  const auto [first, count] = random_seeds(200 + GetParam(), kAddressSanitizer ? 3 : 15);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, all);
    c.options.isa = isas[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(isas.size())))];
    c.options.threads = static_cast<int>(1 + rng.below(3));
    c.options.split_keys = rng.below(3) == 0 ? kPageTokens * (1 + rng.below(4)) : 0;
    SCOPED_TRACE(fmt::format("seed {}, {}, {} threads, splits of {}\n{}", seed, c.options.isa, c.options.threads,
                             c.options.split_keys, c.description));
    EXPECT_TRUE(World(c.spec).kernel_matches(c.options, c.sink_logits, tolerance::kLseOfFewKeys));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Latents, testing::Range(0, 6));

}  // namespace
}  // namespace kvant::test
