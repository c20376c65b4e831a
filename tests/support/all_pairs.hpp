// A small all-pairs (pairwise covering) selection: a few hundred points out of a product of millions, so that every
// pair of values of any two dimensions that can occur together does.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace kvant::test {

/// One value index a dimension; -1: not chosen yet.
using Choice = std::vector<int>;

/// Greedy and deterministic. `possible` says whether a partial choice can still be completed.
std::vector<Choice> all_pairs(const std::vector<int>& sizes, const std::function<bool(const Choice&)>& possible);

/// Pairs (dimension, value, dimension, value) that `possible` allows and no point has; for checking a selection.
std::size_t missing_pairs(const std::vector<int>& sizes, const std::function<bool(const Choice&)>& possible,
                          const std::vector<Choice>& points);

}  // namespace kvant::test
