// "did you mean ...?": what a refusal of a name adds when a known name is near.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace kvant::cli {

/// "; did you mean tq4?", or with two names "; did you mean tq4 or tq6?"; "" when no name is near, or more than two
/// are equally near. Near: few letters of it are added, left out, replaced or swapped with a neighbour.
std::string did_you_mean(const std::string& word, std::span<const std::string> known);
/// The number of those edits; capital letters count as small ones.
int edit_distance(const std::string& a, const std::string& b);

}  // namespace kvant::cli
