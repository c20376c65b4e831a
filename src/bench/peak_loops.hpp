// The loops of one ISA. Included by peaks_*.cpp only, which are compiled as the ISA's own unit in src/cpu is.
#pragma once

#include "base/config.hpp"
#include "bench/peaks.hpp"

KVANT_NAMESPACE_BEGIN(bench)

// Twelve independent chains of fused multiply-adds: more than the latency of two units (8 on Zen 3, 8 to 10 on recent
// Intel) asks for, and few enough to stay in sixteen registers with the two factors.
template <class S>
double fma_flops(std::int64_t iterations) {
  using V = typename S::F;
  const V a = S::setf(0.999f), b = S::setf(0.001f);
  V c0 = S::setf(0.0f), c1 = S::setf(0.1f), c2 = S::setf(0.2f), c3 = S::setf(0.3f), c4 = S::setf(0.4f),
    c5 = S::setf(0.5f);
  V c6 = S::setf(0.6f), c7 = S::setf(0.7f), c8 = S::setf(0.8f), c9 = S::setf(0.9f), c10 = S::setf(1.0f),
    c11 = S::setf(1.1f);
  for (std::int64_t n = 0; n < iterations; ++n) {
    c0 = S::fma(c0, a, b), c1 = S::fma(c1, a, b), c2 = S::fma(c2, a, b), c3 = S::fma(c3, a, b);
    c4 = S::fma(c4, a, b), c5 = S::fma(c5, a, b), c6 = S::fma(c6, a, b), c7 = S::fma(c7, a, b);
    c8 = S::fma(c8, a, b), c9 = S::fma(c9, a, b), c10 = S::fma(c10, a, b), c11 = S::fma(c11, a, b);
  }
  float lanes[S::kLanes];
  volatile float sink = 0.0f;  // the chains must not be optimised away
  const V all[12] = {c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11};
  for (const V& c : all) {
    S::storef(lanes, c);
    sink = sink + lanes[0];
  }
  return static_cast<double>(iterations) * 12.0 * S::kLanes * 2.0;
}

template <class S>
std::uint64_t read_bytes(const std::byte* data, std::size_t n) {
  typename S::I acc[4] = {S::seti(0), S::seti(0), S::seti(0), S::seti(0)};
  for (std::size_t i = 0; i + 128 <= n; i += 128) {
    for (std::size_t j = 0; j < 4; ++j) acc[j] = S::xor_(acc[j], S::loadi(data + i + 32 * j));
  }
  std::uint64_t words[4];
  S::storei(words, S::xor_(S::xor_(acc[0], acc[1]), S::xor_(acc[2], acc[3])));
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

// `Peak` has the widest FMA of this ISA.
template <class S, class Peak = S>
constexpr PeakLoops loops_of(const char* isa) {
  return {.isa = isa, .fma_flops = fma_flops<Peak>, .read_bytes = read_bytes<S>};
}

KVANT_NAMESPACE_END
