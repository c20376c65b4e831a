#include "support/inputs.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace kvant::test {

Rng::Rng(std::uint64_t seed) {
  for (std::uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15u;
    std::uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    word = z ^ (z >> 31);
  }
}

std::uint64_t Rng::next() {
  const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const std::uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

double Rng::uniform() {
  return (static_cast<double>(next() >> 12) + 0.5) * 0x1p-52;
}

double Rng::gaussian() {
  const double radius = std::sqrt(-2 * std::log(uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

std::int64_t Rng::below(std::int64_t n) {
  return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
}

std::string inputs_name(Inputs inputs) {
  switch (inputs) {
    case Inputs::gauss: return "gauss";
    case Inputs::loud: return "loud";
    case Inputs::kurtosis70: return "kurtosis70";
    case Inputs::log_normal: return "log_normal";
    case Inputs::near_tied: return "near_tied";
    case Inputs::sink: return "sink";
  }
  return "unknown";
}

std::vector<float> gaussian_vector(std::size_t n, std::uint64_t seed, double scale) {
  Rng rng(seed);
  std::vector<float> values(n);
  for (float& x : values) x = static_cast<float>(scale * rng.gaussian());
  return values;
}

namespace {

/// Kurtosis E x^4 / (E x^2)^2 = 3 * (4096 / 25 + 0.0078) / (64 / 25 + 0.0864)^2 = 70.2.
float heavy_tailed(Rng& rng) {
  const double sigma = rng.below(25) == 0 ? 8.0 : 0.3;
  return static_cast<float>(sigma * rng.gaussian());
}

void fill(std::vector<float>& x, int head_dim, Inputs inputs, Rng& rng) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t channel = i % static_cast<std::size_t>(head_dim);
    switch (inputs) {
      case Inputs::loud: x[i] = static_cast<float>(rng.gaussian() * (channel % 32 == 5 ? 12 : 1)); break;
      case Inputs::kurtosis70: x[i] = heavy_tailed(rng); break;
      case Inputs::log_normal:
        x[i] = static_cast<float>(std::exp(rng.gaussian()) * (rng.below(2) == 0 ? -1 : 1));
        break;
      default: x[i] = static_cast<float>(rng.gaussian());
    }
  }
}

}  // namespace

Qkv make_qkv(const QkvShape& shape, Inputs inputs, std::uint64_t seed) {
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  const int v_dim = shape.v_head_dim > 0 ? shape.v_head_dim : shape.head_dim;
  const std::size_t q_dim = dim + (shape.latent ? static_cast<std::size_t>(v_dim) : 0);
  const std::size_t q_rows = static_cast<std::size_t>(shape.q_len) * static_cast<std::size_t>(shape.q_heads);
  const std::size_t kv_rows = static_cast<std::size_t>(shape.kv_len) * static_cast<std::size_t>(shape.kv_heads);
  Rng rng(seed * 1000003 + static_cast<std::uint64_t>(shape.head_dim));
  Qkv x;
  x.q.resize(q_rows * q_dim);
  x.k.resize(kv_rows * dim);
  x.v.resize(kv_rows * static_cast<std::size_t>(v_dim));
  fill(x.v, v_dim, inputs, rng);
  fill(x.k, shape.head_dim, inputs, rng);
  // Loud queries on top of loud keys would only make one-hot weights; the queries of captured models are calm.
  fill(x.q, static_cast<int>(q_dim), Inputs::gauss, rng);

  if (inputs == Inputs::near_tied) {
    const std::size_t width = static_cast<std::size_t>(shape.kv_heads) * dim;
    for (std::size_t i = width; i < x.k.size(); ++i) {
      x.k[i] = x.k[i % width] + 1e-3f * static_cast<float>(rng.gaussian());
    }
  }
  if (inputs == Inputs::sink) {
    // A shared direction in all queries, and a first key far along it: its logit stands 8 above the others at the
    // default scale, as first tokens of trained models do.
    const std::size_t channel = dim / 2;
    for (std::size_t row = 0; row < q_rows; ++row) x.q[(row + 1) * q_dim - dim + channel] = 4.0f;
    const auto height = static_cast<float>(2.0 * std::sqrt(static_cast<double>(q_dim)));
    for (int head = 0; head < shape.kv_heads; ++head) x.k[static_cast<std::size_t>(head) * dim + channel] = height;
  }
  return x;
}

}  // namespace kvant::test
