#include "support/all_pairs.hpp"

#include <numeric>

namespace kvant::test {
namespace {

/// The pairs still to cover, as one flag for each two values of different dimensions.
class PairSet {
 public:
  PairSet(const std::vector<int>& sizes, const std::function<bool(const Choice&)>& possible) : offset_(sizes.size()) {
    std::exclusive_scan(sizes.begin(), sizes.end(), offset_.begin(), 0);
    total_ = offset_.back() + sizes.back();
    open_.assign(static_cast<std::size_t>(total_) * static_cast<std::size_t>(total_), false);
    for (int a = 0; a < dims(); ++a) {
      for (int b = a + 1; b < dims(); ++b) {
        for (int x = 0; x < sizes[static_cast<std::size_t>(a)]; ++x) {
          for (int y = 0; y < sizes[static_cast<std::size_t>(b)]; ++y) {
            Choice choice(sizes.size(), -1);
            choice[static_cast<std::size_t>(a)] = x;
            choice[static_cast<std::size_t>(b)] = y;
            if (!possible(choice)) continue;
            open_[index(a, x, b, y)] = true;
            ++count_;
          }
        }
      }
    }
  }

  [[nodiscard]] int dims() const { return static_cast<int>(offset_.size()); }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] bool is_open(int a, int x, int b, int y) const { return open_[index(a, x, b, y)]; }

  /// Open pairs that choosing x in dimension a would close, given the rest of the choice.
  [[nodiscard]] int gain(const Choice& choice, int a, int x) const {
    int n = 0;
    for (int b = 0; b < dims(); ++b) {
      const int y = choice[static_cast<std::size_t>(b)];
      if (b != a && y >= 0 && is_open(a, x, b, y)) ++n;
    }
    return n;
  }

  void close(const Choice& choice) {
    for (int a = 0; a < dims(); ++a) {
      for (int b = a + 1; b < dims(); ++b) {
        const std::size_t i = index(a, choice[static_cast<std::size_t>(a)], b, choice[static_cast<std::size_t>(b)]);
        if (open_[i]) --count_;
        open_[i] = false;
      }
    }
  }

  /// The first open pair, as a choice with two values.
  [[nodiscard]] Choice first(const std::vector<int>& sizes) const {
    Choice choice(sizes.size(), -1);
    for (int a = 0; a < dims(); ++a) {
      for (int x = 0; x < sizes[static_cast<std::size_t>(a)]; ++x) {
        for (int b = a + 1; b < dims(); ++b) {
          for (int y = 0; y < sizes[static_cast<std::size_t>(b)]; ++y) {
            if (!is_open(a, x, b, y)) continue;
            choice[static_cast<std::size_t>(a)] = x;
            choice[static_cast<std::size_t>(b)] = y;
            return choice;
          }
        }
      }
    }
    return choice;
  }

 private:
  [[nodiscard]] std::size_t index(int a, int x, int b, int y) const {
    if (a > b) return index(b, y, a, x);
    const int row = offset_[static_cast<std::size_t>(a)] + x;
    const int column = offset_[static_cast<std::size_t>(b)] + y;
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(total_) + static_cast<std::size_t>(column);
  }

  std::vector<int> offset_;
  int total_ = 0;
  std::vector<bool> open_;
  std::size_t count_ = 0;
};

}  // namespace

std::vector<Choice> all_pairs(const std::vector<int>& sizes, const std::function<bool(const Choice&)>& possible) {
  PairSet open(sizes, possible);
  std::vector<Choice> points;
  while (open.count() > 0) {
    Choice choice = open.first(sizes);
    // Values that tie start at another place in each point, so that no value becomes the filler of all of them.
    const int turn = static_cast<int>(points.size());
    for (int d = 0; d < open.dims(); ++d) {
      int& value = choice[static_cast<std::size_t>(d)];
      if (value >= 0) continue;
      const int n = sizes[static_cast<std::size_t>(d)];
      int best = -1;
      int best_gain = -1;
      for (int i = 0; i < n; ++i) {
        value = (turn + i) % n;
        if (!possible(choice)) continue;
        const int gain = open.gain(choice, d, value);
        if (gain > best_gain) {
          best = value;
          best_gain = gain;
        }
      }
      value = best;
    }
    open.close(choice);
    points.push_back(choice);
  }
  return points;
}

std::size_t missing_pairs(const std::vector<int>& sizes, const std::function<bool(const Choice&)>& possible,
                          const std::vector<Choice>& points) {
  PairSet open(sizes, possible);
  for (const Choice& point : points) open.close(point);
  return open.count();
}

}  // namespace kvant::test
