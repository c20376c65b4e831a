// A cache with known inputs: appends them in given chunks, plans, runs, and judges with two references. Attention over
// the true inputs is the loose one and measures the codec; over the decoded vectors, the tight one, measures the
// kernel.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "kvant/reference.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/tolerances.hpp"

namespace kvant::test {

struct Lengths {
  std::int64_t kv_len = 1;
  std::int64_t q_len = 1;
};

struct WorldSpec {
  int head_dim = 64;
  int v_head_dim = 0;  ///< 0: head_dim
  /// Values are latents, keys rotary keys (CacheConfig::latent). The reference's keys are both, one behind the other.
  bool latent = false;
  int kv_heads = 2;
  int group = 2;
  std::string k = "tq4";
  std::string v = "tq4";
  std::vector<Lengths> sequences = {{100, 1}};
  int sink_pages = 1;
  int tail_pages = 1;
  int layers = 1;                               ///< the cache's
  int layer = 0;                                ///< the world's rows are here; other layers have other rows
  bool key_bases = false, value_bases = false;  ///< calibrated: support/bases.hpp
  bool page_centres = false;                    ///< KeyCentre::page
  Dtype input_dtype = Dtype::f32;               ///< what is appended; values are rounded to it first
  std::optional<Dtype> exact;
  std::int64_t window = 0;  ///< the cache's
  std::int64_t window_sinks = 0;
  Inputs inputs = Inputs::gauss;
  float key_offset = 0;    ///< added to every element of every key
  float value_offset = 0;  ///< likewise, of every value but those of each fifth token, which refuse a centre then
  std::uint64_t seed = 1;
  std::vector<std::int64_t> chunks;          ///< sizes of the appends, cycled; empty: all tokens at once
  std::vector<std::int64_t> rewinds;         ///< so many tokens are truncated and appended again, one after each append
  bool forked = false;                       ///< half of the tokens come from a parent, which goes on and is removed
  std::function<void(CacheConfig&)> adjust;  ///< last word on the config
};
inline WorldSpec spec_of(const std::string& k, const std::string& v, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = k;
  spec.v = v;
  spec.sequences = std::move(sequences);
  return spec;
}

/// Rows of a and of b, one behind the other: the reference's keys in a latent cache.
std::vector<double> joined(const std::vector<float>& a, int a_dim, const std::vector<float>& b, int b_dim);

/// Outputs and lse of all sequences, rows one after another.
struct Attended {
  std::vector<float> out;  ///< [total_queries, q_heads, v_head_dim]
  std::vector<float> lse;  ///< [total_queries, q_heads]
  std::string explain;
  int splits = 0;
};

/// Keys and values of the queries' own tokens, rows one after another.
struct FreshTensors {
  std::vector<std::byte> k, v;
  TensorView keys, values;  ///< views of these; without data: none
};

struct Expected {
  std::vector<double> out;
  std::vector<double> lse;
};

class World {
 public:
  explicit World(const WorldSpec& spec);  ///< throws kvant::Error

  const WorldSpec spec;
  Cache cache;
  std::vector<SequenceId> ids;
  std::vector<Qkv> qkv;  ///< one a sequence

  [[nodiscard]] int v_dim() const { return spec.v_head_dim > 0 ? spec.v_head_dim : spec.head_dim; }
  [[nodiscard]] int q_dim() const { return spec.head_dim + (spec.latent ? v_dim() : 0); }
  [[nodiscard]] int q_heads() const { return spec.kv_heads * spec.group; }
  [[nodiscard]] std::int64_t total_queries() const;
  /// The caller's options with q_heads and q_lens filled in.
  [[nodiscard]] AttentionOptions options(AttentionOptions base = {}) const;
  [[nodiscard]] std::vector<float> queries() const;  ///< all sequences' rows
  [[nodiscard]] FreshTensors fresh() const;          ///< in the world's input dtype
  [[nodiscard]] std::vector<std::int64_t> out_shape() const { return {total_queries(), q_heads(), v_dim()}; }

  [[nodiscard]] Attended attend(const AttentionOptions& base = {}, const std::vector<float>& sink_logits = {}) const;
  [[nodiscard]] Expected expect_decoded(const AttentionOptions& base = {},
                                        const std::vector<float>& sink_logits = {}) const;
  [[nodiscard]] Expected expect_true(const AttentionOptions& base = {},
                                     const std::vector<float>& sink_logits = {}) const;
  /// Keys and values of one sequence as the cache decodes them, [kv_len, kv_heads, head_dim]. Tokens that a window
  /// released cannot be read and no query sees them: the true ones stand there.
  void decode(std::size_t sequence, std::vector<float>& keys, std::vector<float>& values) const;

  /// Kernel error bound for out, with this instruction set (empty: whichever a plan chooses).
  [[nodiscard]] double tolerance(const std::string& isa = {}) const;
  [[nodiscard]] double lse_tolerance(const std::string& isa = {}) const;
  [[nodiscard]] double codec_tolerance() const;

  /// Runs and compares with attention over the decoded vectors, out and lse (to lse_tolerance(), unless given).
  [[nodiscard]] testing::AssertionResult kernel_matches(const AttentionOptions& base = {},
                                                        const std::vector<float>& sink_logits = {},
                                                        std::optional<double> allowed_of_lse = {}) const;

 private:
  [[nodiscard]] Result<Attended> try_attend_here(const AttentionOptions& base,
                                                 const std::vector<float>& sink_logits) const;
  [[nodiscard]] Expected expect(const AttentionOptions& base, const std::vector<float>& sink_logits,
                                bool decoded) const;
};

/// The cache that a spec describes; what it says nothing of is as in `c`. `spec.adjust` has the last word.
CacheConfig cache_config(const WorldSpec& spec, CacheConfig c = {});

/// Level tables for imported formats (lut): ascending, neither even nor symmetric.
void set_levels(CacheConfig& c);

/// Appends rows [begin, end) of x to one layer of a sequence.
Status append_rows(Cache& cache, SequenceId sequence, const Qkv& x, std::int64_t begin, std::int64_t end,
                   Dtype dtype = Dtype::f32, int layer = 0);

/// A new sequence that comes to hold kv_len tokens, by the chunks, rewinds and fork that spec says; with a window,
/// those that queries belong to come at once. `append_to_layer(id, layer, rows, begin, end)` stores rows of x, or what
/// another layer than the world's is given.
using AppendRows = std::function<void(SequenceId, int, const Qkv&, std::int64_t, std::int64_t)>;
SequenceId grow_sequence(Cache& cache, const WorldSpec& spec, const Lengths& lengths, const Qkv& x,
                         const AppendRows& append_to_layer);

/// World::decode for a sequence of any cache, on a device by way of `stream`.
void decode_sequence(const Cache& cache, SequenceId id, int layer, const Lengths& lengths, const Qkv& given,
                     std::vector<float>& keys, std::vector<float>& values, Stream stream = {});

/// Plans and runs with q and out in f32, contiguous.
Result<Attended> try_attend(const Cache& cache, const std::vector<SequenceId>& ids, const AttentionOptions& options,
                            const std::vector<float>& q, const std::vector<float>& sink_logits = {}, int layer = 0,
                            const TensorView& keys = {}, const TensorView& values = {});

/// This machine's ISAs, best first; or that of KVANT_TEST_ISA alone. Asked for once: a virtual machine's cpuid is slow.
const std::vector<std::string>& available_isas();

/// Computed in float arithmetic: f32, f16, bf16, fp8.
bool is_float_format(const std::string& name);

}  // namespace kvant::test
