#include "cli/suggest.hpp"

#include <algorithm>
#include <cctype>

namespace kvant::cli {

int edit_distance(const std::string& a, const std::string& b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  };
  // Three rows of the table of distances between the beginnings of a and b.
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = last;
    last = row;
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      const bool is_swapped = i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]);
      if (is_swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string did_you_mean(const std::string& word, std::span<const std::string> known) {
  constexpr std::size_t kLongest = 64;  // letters of a name; longer words are paths or mistakes of another kind
  if (word.empty() || word.size() > kLongest) return "";
  // One edit in names of up to five letters, two in longer ones: half a short name is another name.
  int least = word.size() > 5 ? 2 : 1;
  std::vector<std::string> near;
  for (const std::string& name : known) {
    const int distance = edit_distance(word, name);
    if (distance > least || std::find(near.begin(), near.end(), name) != near.end()) continue;
    if (distance < least) near.clear();
    least = distance;
    near.push_back(name);
  }
  if (near.empty() || near.size() > 2) return "";
  return "; did you mean " + near[0] + (near.size() == 2 ? " or " + near[1] : "") + "?";
}

}  // namespace kvant::cli
