// Deterministic inputs for attention tests, the same on every machine and standard library.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvant::test {

/// xoshiro256** seeded by splitmix64 (Blackman and Vigna).
class Rng {
 public:
  explicit Rng(std::uint64_t seed);
  std::uint64_t next();
  double uniform();                    ///< (0, 1)
  double gaussian();                   ///< Box-Muller
  std::int64_t below(std::int64_t n);  ///< [0, n)

 private:
  std::uint64_t state_[4];
};

enum class Inputs {
  gauss,       ///< independent N(0, 1)
  loud,        ///< one channel in 32 is 12 times louder, the same channels for all tokens
  kurtosis70,  ///< 1 value in 25 has standard deviation 8, the rest 0.3: the kurtosis of captured values
  log_normal,  ///< sign * exp(N(0, 1)): magnitudes over three decades
  near_tied,   ///< all keys are one vector plus noise of 1e-3: weights nearly equal, values decide
  sink,        ///< the first key is aligned with every query and takes most of the weight
};
inline constexpr Inputs kAllInputs[] = {Inputs::gauss,      Inputs::loud,      Inputs::kurtosis70,
                                        Inputs::log_normal, Inputs::near_tied, Inputs::sink};
std::string inputs_name(Inputs inputs);

/// One sequence: q [q_len, q_heads, D], k [kv_len, kv_heads, D], v with its own D. Where v are latents, q has both.
struct Qkv {
  std::vector<float> q, k, v;
};
struct QkvShape {
  std::int64_t q_len = 1, kv_len = 1;
  int q_heads = 1, kv_heads = 1, head_dim = 64, v_head_dim = 0;  ///< v_head_dim 0: head_dim
  bool latent = false;
};
Qkv make_qkv(const QkvShape& shape, Inputs inputs, std::uint64_t seed);

std::vector<float> gaussian_vector(std::size_t n, std::uint64_t seed, double scale = 1);

}  // namespace kvant::test
