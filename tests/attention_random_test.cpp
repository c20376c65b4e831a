// Random combinations of everything attention and the cache can do, against the float64 reference over the decoded
// vectors.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/random_world.hpp"

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
  expect_host_matches(choices(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Seeds, AttentionRandom, testing::Range(0, 8));

}  // namespace
}  // namespace kvant::test
