// 27 cases made with the kernels that kvant replaces (mlx-native 0.3 to 0.8, hanzo-quant 0.6), each with a float64
// reference. Four lie in tests/golden, the rest in ../shared/golden (KVANT_SHARED), skipped where that is absent.
//
// First our own reference must reproduce theirs, then the kernels must: through import, through pages or an explicit
// mask, on every instruction set, at several split sizes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvant/cache.hpp"
#include "support/golden.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

/// Every ISA, splits planned and forced.
template <class F>
void for_each_way(F&& check) {
  for (const std::string& isa : available_isas()) {
    for (const std::int64_t split_keys : {0, 64, 128}) {
      AttentionOptions options;
      options.isa = isa;
      options.split_keys = split_keys;
      SCOPED_TRACE(isa + ", split_keys " + std::to_string(split_keys));
      check(options);
    }
  }
}

// --- TurboQuant -----------------------------------------------------------------------------------------------------

class TurboQuant : public Golden<TurboQuantCase> {
 protected:
  /// A cache holding `slots` in this order.
  void import(const std::vector<std::int64_t>& slots) {
    const TurboQuantCase& g = golden();
    Result<CacheConfig> config = legacy_config(1, g.kv_heads, g.head_dim, g.layout(), g.queries_unrotated, false);
    ASSERT_TRUE(config.ok()) << config.message();
    cache_.emplace(Cache::create(*config).value());
    id_ = cache_->add_sequence();
    const Status status = import_legacy(*cache_, id_, 0, g.layout(), g.tensors(), slots);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void check(AttentionOptions options) {
    const TurboQuantCase& g = golden();
    options.q_heads = g.q_heads;
    options.scale = g.scale;
    const Result<Attended> got = try_attend(*cache_, {id_}, options, g.q);
    ASSERT_TRUE(got.ok()) << got.message();
    EXPECT_TRUE(close(g.out_ref, got->out, tolerance::kGoldenTurboQuant, {g.q_heads, g.head_dim})) << got->explain;
  }
  std::optional<Cache> cache_;
  SequenceId id_{};
};

TEST_P(TurboQuant, OurReferenceAgreesWithTheirs) {
  const TurboQuantCase& g = golden();
  std::vector<std::int64_t> slots = g.visible_slots(true);
  const std::vector<double> q = g.rotated_queries();
  const std::vector<double> k = g.dequantise(g.k_packed, g.k_norms, slots);
  const std::vector<double> v = g.dequantise(g.v_packed, g.v_norms, slots);
  AttentionOptions options;
  options.scale = g.scale;
  const reference::Problem p{1, static_cast<std::int64_t>(slots.size()), g.q_heads, g.kv_heads, g.head_dim, q, k, v, {},
                             0};
  const std::vector<double> out = reference::attention(p, options).out;
  EXPECT_TRUE(close(g.out_ref, std::vector<float>(out.begin(), out.end()), tolerance::kGoldenReference));
}

TEST_P(TurboQuant, ImportedInLogicalOrderWithAWindow) {
  const TurboQuantCase& g = golden();
  import(g.visible_slots(false));
  for_each_way([&](AttentionOptions options) {
    if (g.window > 0) options.mask = Mask::sliding(g.window);
    check(options);
  });
}

TEST_P(TurboQuant, ImportedVisibleSlotsOnly) {
  import(golden().visible_slots(true));
  for_each_way([&](const AttentionOptions& options) { check(options); });
}

TEST_P(TurboQuant, ImportedInPhysicalOrderWithAnExplicitMask) {
  const TurboQuantCase& g = golden();
  std::vector<std::int64_t> slots;
  for (std::int64_t s = 0; s < g.kv_seq_len; ++s) slots.push_back(s);
  import(slots);
  const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, 1, g.kv_seq_len},
                                   [&](auto, auto, auto, auto slot) { return g.is_visible(slot, true); });
  for_each_way([&](AttentionOptions options) {
    options.mask = with_mask(mask).mask;
    check(options);
  });
}

TEST_P(TurboQuant, DecodesToTheirNumbers) {
  const TurboQuantCase& g = golden();
  const std::vector<std::int64_t> slots = g.visible_slots(false);
  import(slots);
  const auto n = static_cast<std::int64_t>(slots.size());
  std::vector<float> k(static_cast<std::size_t>(n) * g.row(), NAN), v = k;
  // Queries that come unrotated make keys of original coordinates: read() would rotate them back.
  if (g.queries_unrotated) GTEST_SKIP() << "keys are read in unrotated coordinates";
  cache_
      ->read(id_, 0, 0, n, MutableTensorView::of(k.data(), n, g.kv_heads, g.head_dim),
             MutableTensorView::of(v.data(), n, g.kv_heads, g.head_dim))
      .value();
  EXPECT_TRUE(close(g.dequantise(g.k_packed, g.k_norms, slots), k, tolerance::kGoldenDecode));
  EXPECT_TRUE(close(g.dequantise(g.v_packed, g.v_norms, slots), v, tolerance::kGoldenDecode));
}

INSTANTIATE_TEST_SUITE_P(Cases, TurboQuant, testing::ValuesIn(kTurboQuantCases),
                         [](const auto& i) { return std::string(i.param); });

// --- bf16, D = 512 ---------------------------------------------------------------------------------------------------

class Bf16 : public Golden<Bf16Case> {
 protected:
  void check(AttentionOptions options) {
    const Bf16Case& g = golden();
    CacheConfig config;
    config.kv_heads = g.kv_heads;
    config.head_dim = Bf16Case::kHeadDim;
    config.k = config.v = "bf16";
    Cache cache = Cache::create(config).value();
    std::vector<SequenceId> ids;
    for (int b = 0; b < g.batch; ++b) {
      ids.push_back(cache.add_sequence());
      cache.append(ids.back(), 0, g.keys(b), g.values(b)).value();
    }
    options.q_heads = g.q_heads;
    options.q_len = g.q_len;
    options.scale = g.scale;
    const Plan planned = plan(cache, std::span<const SequenceId>(ids), options).value();
    std::vector<float> out(g.out_ref.size(), NAN);
    const std::int64_t rows = g.batch * g.q_len;
    const Status status =
        run(planned, 0, g.queries(), MutableTensorView::of(out.data(), rows, g.q_heads, Bf16Case::kHeadDim));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(close(g.out_ref, out, tolerance::kGoldenBf16, {rows, g.q_heads, Bf16Case::kHeadDim}))
        << planned.explain();
  }
};

TEST_P(Bf16, OurReferenceAgreesWithTheirs) {
  const Bf16Case& g = golden();
  AttentionOptions options;
  options.scale = g.scale;
  options.mask = g.tensor_mask();
  std::vector<float> out;
  for (int b = 0; b < g.batch; ++b) {
    const std::vector<double> q = g.queries64(b), k = g.keys64(b), v = g.values64(b);
    const reference::Problem p{g.q_len, g.kv_len, g.q_heads, g.kv_heads, Bf16Case::kHeadDim, q, k, v, {}, b};
    for (const double x : reference::attention(p, options).out) out.push_back(static_cast<float>(x));
  }
  EXPECT_TRUE(close(g.out_ref, out, tolerance::kGoldenReference));
}

TEST_P(Bf16, WithTheirMaskTensor) {
  for_each_way([&](AttentionOptions options) {
    options.mask = golden().tensor_mask();
    check(options);
  });
}

TEST_P(Bf16, WithPositionsInsteadOfAMaskTensor) {
  const std::optional<Mask> mask = golden().position_mask();
  if (!mask) GTEST_SKIP() << "mask " << golden().mask_name << " needs a tensor";
  for_each_way([&](AttentionOptions options) {
    options.mask = *mask;
    check(options);
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Bf16, testing::ValuesIn(kBf16Cases),
                         [](const auto& i) { return std::string(i.param); });

}  // namespace
}  // namespace kvant::test
