// The data of benchmarks: caches filled with random vectors, and the check of a kernel against float64.
#pragma once

#include <vector>

#include "cli/bench.hpp"
#include "codec/layout.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {

/// Normal deviates, the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double uniform();  ///< in (0, 1)
  float normal();

 private:
  std::uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

/// Vectors [tokens, heads, head_dim]: N(0, 1), and in each head a few loud channels, the same for all tokens (one in
/// 64, 5 to 15 times as loud), as real keys have them.
std::vector<float> loud_vectors(std::int64_t tokens, int heads, int head_dim, double loudness, std::uint64_t seed);

/// A page of encoded keys and values.
codec::PageLayout bench_page(const BenchCase& c);

/// A filled cache. Its layers are the replicas that runs rotate through, so that keys and values come from memory.
struct Workload {
  BenchCase bench_case;  ///< the first case that uses it
  Cache cache;
  std::vector<SequenceId> sequences;
  int layers = 1;
};

/// The next tokens of sequences of which `done` are written: at most `tokens` of each, none of the last `left_out`.
struct BenchStep {
  std::vector<Append> appends;
  std::vector<SequenceId> sequences;
  std::int64_t rows = 0;  ///< the rows of all sequences
};
BenchStep bench_step(const Workload& w, std::int64_t done, std::int64_t tokens, std::int64_t left_out = 0);

/// Cases with the same answer can share a workload.
bool is_same_workload(const BenchCase& a, const BenchCase& b);
/// Bytes of one layer of the case's cache.
double layer_bytes(const BenchCase& c);
/// The case's cache in host memory, with bf16 exact pages.
/// Heads and sizes, or those of latents.
void set_geometry(const BenchCase& c, CacheConfig& config);
CacheConfig cache_config(const BenchCase& c, int layers);
Result<Workload> make_workload(const BenchCase& c, int layers);

/// The mask tensor that c.scores asks for; empty: none.
std::vector<std::byte> mask_bytes(const BenchCase& c);
/// Attention as the case has it; `mask` holds mask_bytes, where the cache is.
AttentionOptions attention_options(const BenchCase& c, const void* mask);
float alibi_slope(const BenchCase& c, int head);

/// Relative L2 of `out` ([batch * q_len, q_heads, head_dim], from layer 0) against float64 attention over the vectors
/// that Cache::read decodes, for a sample of sequences, heads and queries that stays quick. With fresh keys the
/// queries' own vectors are those of `own`, [batch * q_len, kv_heads, head_dim].
struct OwnVectors {
  const std::vector<float>& keys;
  const std::vector<float>& values;
};
Result<double> check_attention(const Workload& workload, const BenchCase& c, const std::vector<float>& q,
                               const std::vector<float>& out, const OwnVectors& own, std::int64_t most_sequences = 2);
/// The largest error that a right kernel may have.
double attention_tolerance(const FormatPair& formats);
/// The same for prefill kernels on a device, which round weights to f16 or bf16.
inline constexpr double kPrefillTolerance = 4e-3;
/// The same for products of 8 bits; tests/support/tolerances.hpp derives it.
inline constexpr double kByteTolerance = 2.5e-2;

}  // namespace kvant::cli
