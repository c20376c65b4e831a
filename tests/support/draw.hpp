// Reproducible test vectors from an integer generator: the same floats on every compiler and C library.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvant::testing_support {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x1234567u) {}

  // splitmix64
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // In (0, 1), a multiple of 2^-24 plus 2^-25.
  float uniform() { return (static_cast<float>(bits() >> 40) + 0.5f) * 0x1p-24f; }

  // Box and Muller in double: true Gaussian tails, for statistics (not bit-exact across C libraries).
  float normal() {
    const double radius = std::sqrt(-2.0 * std::log((static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53));
    return static_cast<float>(radius * std::cos(6.283185307179586 * static_cast<double>(uniform())));
  }

  // A sum of four 16-bit integers times 2^-14: bell-shaped and exact, for bytes that must never change.
  float exact() {
    const std::uint64_t b = bits();
    const auto sum = static_cast<std::int32_t>((b & 0xFFFF) + (b >> 16 & 0xFFFF) + (b >> 32 & 0xFFFF) + (b >> 48));
    return static_cast<float>(sum - 131070) * 0x1p-14f;
  }

  std::vector<float> gaussian(int n) {
    return fill(n, [this](int) { return normal(); });
  }
  std::vector<float> log_normal(int n) {
    return fill(n, [this](int) { return (bits() & 1 ? 1.0f : -1.0f) * std::exp(normal()); });
  }
  std::vector<float> cauchy(int n) {
    return fill(
        n, [this](int) { return static_cast<float>(std::tan(3.14159265 * (static_cast<double>(uniform()) - 0.5))); });
  }
  // Every 31st channel twenty times louder.
  std::vector<float> loud(int n) {
    return fill(n, [this](int i) { return normal() * (i % 31 == 5 ? 20.0f : 1.0f); });
  }
  std::vector<float> exact(int n) {
    return fill(n, [this](int) { return exact(); });
  }

 private:
  template <class Make>
  std::vector<float> fill(int n, Make make) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = make(i);
    return v;
  }
  std::uint64_t state_;
};

}  // namespace kvant::testing_support
