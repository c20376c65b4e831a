// Random combinations of everything attention and the cache can do, against the float64 reference over the decoded
// vectors.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/fmt.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

RandomChoices choices() {
  RandomChoices all;
  const std::span<const int> dims = supported_head_dims();
  all.head_dims.assign(dims.begin(), dims.end());
  all.head_dims.insert(all.head_dims.end(), {1, 8, 31, 40, 48, 65, 72, 100, 120, 200, 250, 300, 500, 575});
  const char* const kFormats[] = {"f32", "f16", "bf16", "fp8", "tq2", "tq3", "tq4", "tq5", "tq6", "tq8"};
  for (const char* k : kFormats) {
    for (const char* v : kFormats) all.formats.emplace_back(k, v);
  }
  all.most_queries = 90;
  all.page_centres = all.fresh_keys = true;
  return all;
}

class AttentionRandom : public testing::TestWithParam<int> {};

TEST_P(AttentionRandom, MatchesTheReference) {
  const RandomChoices all = choices();
  const std::vector<std::string> isas = available_isas();
  const auto [first, count] = random_seeds(GetParam(), kAddressSanitizer ? 3 : 15);
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

INSTANTIATE_TEST_SUITE_P(Seeds, AttentionRandom, testing::Range(0, 8));

}  // namespace
}  // namespace kvant::test
