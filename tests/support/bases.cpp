#include "support/bases.hpp"

#include "support/inputs.hpp"

namespace kvant::test {
namespace {

// The centre has N(0, center^2) coordinates.
CalibratedBasis random_basis(int head_dim, std::uint64_t seed, double center) {
  const auto n = static_cast<std::size_t>(head_dim);
  Rng rng(seed);
  std::vector<double> v(n), scale(n);
  double norm = 0;
  for (std::size_t i = 0; i < n; ++i) {
    v[i] = rng.gaussian();
    norm += v[i] * v[i];
    scale[i] = 1 + 0.5 * rng.uniform();
  }
  CalibratedBasis basis;
  basis.matrix.resize(n * n);
  basis.inverse.resize(n * n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      const double reflection = (i == j ? 1 : 0) - 2 * v[i] * v[j] / norm;
      basis.matrix[i * n + j] = static_cast<float>(scale[i] * reflection);
      basis.inverse[i * n + j] = static_cast<float>(reflection / scale[j]);
    }
    basis.center.push_back(static_cast<float>(center * rng.gaussian()));
  }
  return basis;
}

}  // namespace

std::shared_ptr<BasisSet> random_bases(int layers, int kv_heads, int head_dim, std::uint64_t seed, bool of_values,
                                       int v_head_dim) {
  if (v_head_dim == 0) v_head_dim = head_dim;
  auto bases = std::make_shared<BasisSet>();
  bases->layers = layers;
  bases->kv_heads = kv_heads;
  bases->head_dim = head_dim;
  bases->v_head_dim = v_head_dim;
  for (int i = 0; i < layers * kv_heads; ++i) {
    bases->keys.push_back(random_basis(head_dim, seed + 2 * static_cast<std::uint64_t>(i), 1.0));
    if (of_values) bases->values.push_back(random_basis(v_head_dim, seed + 2 * static_cast<std::uint64_t>(i) + 1, 0.5));
  }
  return bases;
}

}  // namespace kvant::test
