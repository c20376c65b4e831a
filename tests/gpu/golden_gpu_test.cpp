// The 27 golden cases (golden_test.cpp) on a device: imported caches, which the generic kernel attends to, and bf16
// ones in each family of kernels.
#include <gtest/gtest.h>

#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_world.hpp"
#include "support/golden.hpp"
#include "support/half.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

CacheConfig on_device(CacheConfig c) {
  c.device = "cuda";
  c.capacity_tokens = 1024;
  c.max_sequences = 2;
  return c;
}

// One run; queries and mask are copied to the device. Outputs are f32.
Result<Attended> attend(const Cache& cache, const std::vector<SequenceId>& ids, AttentionOptions options,
                        const TensorView& q) {
  const TestStream stream;
  const DeviceBuffer mask = copy_mask(options.mask.tensor);
  const Result<Plan> planned = plan(cache, std::span<const SequenceId>(ids), options);
  if (!planned) return planned.status();
  const auto elements = static_cast<std::size_t>(q.shape[0] * q.shape[1] * q.shape[2]);
  const DeviceBuffer queries = DeviceBuffer::of(
      std::span<const std::byte>(static_cast<const std::byte*>(q.data), elements * dtype_size(q.dtype)));
  const DeviceBuffer out(elements * sizeof(float)), workspace(planned->workspace_bytes());
  TensorView there = q;
  there.data = queries.data();
  RunOptions run_options;
  run_options.stream = stream.handle();
  run_options.workspace = workspace.span();
  const Status status =
      run(*planned, 0, there, MutableTensorView::of(out.as<float>(), q.shape[0], q.shape[1], q.shape[2]), run_options);
  if (!status) return status;
  stream.wait();
  Attended a;
  a.out = out.download_as<float>();
  a.explain = planned->explain();
  return a;
}

// --- TurboQuant ------------------------------------------------------------------------------------------------------

class TurboQuantGpu : public Golden<TurboQuantCase> {
 protected:
  void import(const std::vector<std::int64_t>& slots) {
    const TurboQuantCase& g = golden();
    cache_.emplace(
        Cache::create(
            on_device(legacy_config(1, g.kv_heads, g.head_dim, g.layout(), g.queries_unrotated, false).value()))
            .value());
    id_ = cache_->add_sequence();
    const Status status = import_legacy(*cache_, id_, 0, g.layout(), g.tensors(), slots);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void check(const Mask& mask) {
    const TurboQuantCase& g = golden();
    AttentionOptions options;
    options.mask = mask;
    options.q_heads = g.q_heads;
    options.scale = g.scale;
    const Result<Attended> got = attend(*cache_, {id_}, options, TensorView::of(g.q.data(), 1, g.q_heads, g.head_dim));
    ASSERT_TRUE(got.ok()) << got.message();
    EXPECT_TRUE(close(g.out_ref, got->out, tolerance::kCudaGeneric, {g.q_heads, g.head_dim})) << got->explain;
    EXPECT_NE(got->explain.find("kernel     generic lut"), std::string::npos) << got->explain;
  }
  std::optional<Cache> cache_;
  SequenceId id_{};
};

TEST_P(TurboQuantGpu, Matches) {
  SKIP_WITHOUT_DEVICE();
  const TurboQuantCase& g = golden();
  import(g.visible_slots(false));
  check(g.window > 0 ? Mask::sliding(g.window) : Mask::causal());
  import(g.visible_slots(true));
  check(Mask::causal());
  std::vector<std::int64_t> slots;
  for (std::int64_t s = 0; s < g.kv_seq_len; ++s) slots.push_back(s);
  import(slots);
  const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, 1, g.kv_seq_len},
                                   [&](auto, auto, auto, auto slot) { return g.is_visible(slot, true); });
  check(with_mask(mask).mask);
}

TEST_P(TurboQuantGpu, DecodesToTheirNumbers) {
  SKIP_WITHOUT_DEVICE();
  const TurboQuantCase& g = golden();
  if (g.queries_unrotated) GTEST_SKIP() << "keys are read in unrotated coordinates";
  const std::vector<std::int64_t> slots = g.visible_slots(false);
  import(slots);
  const auto n = static_cast<std::int64_t>(slots.size());
  const TestStream stream;
  const DeviceBuffer k(static_cast<std::size_t>(n) * g.row() * sizeof(float)), v(k.size());
  const TokenRange range{id_, 0, n};
  cache_
      ->decode({&range, 1}, 0, MutableTensorView::of(k.as<float>(), n, g.kv_heads, g.head_dim),
               MutableTensorView::of(v.as<float>(), n, g.kv_heads, g.head_dim), stream.handle())
      .value();
  stream.wait();
  EXPECT_TRUE(close(g.dequantise(g.k_packed, g.k_norms, slots), k.download_as<float>(), tolerance::kGoldenDecode));
  EXPECT_TRUE(close(g.dequantise(g.v_packed, g.v_norms, slots), v.download_as<float>(), tolerance::kGoldenDecode));
}

INSTANTIATE_TEST_SUITE_P(Cases, TurboQuantGpu, testing::ValuesIn(kTurboQuantCases),
                         [](const auto& i) { return std::string(i.param); });

// --- bf16, D = 512 ---------------------------------------------------------------------------------------------------

class Bf16Gpu : public Golden<Bf16Case> {};

TEST_P(Bf16Gpu, Matches) {
  SKIP_WITHOUT_DEVICE();
  const Bf16Case& g = golden();
  CacheConfig config;
  config.kv_heads = g.kv_heads;
  config.head_dim = Bf16Case::kHeadDim;
  for (const char* format : {"bf16", "f32"}) {
    config.k = config.v = format;
    Cache cache = Cache::create(on_device(config)).value();
    std::vector<SequenceId> ids;
    const TestStream stream;
    for (int b = 0; b < g.batch; ++b) {
      ids.push_back(cache.add_sequence());
      TensorView rows[2] = {g.keys(b), g.values(b)};
      const auto bytes = static_cast<std::size_t>(g.kv_heads * g.kv_rows * Bf16Case::kHeadDim) * 2;
      std::vector<DeviceBuffer> there;
      for (TensorView& t : rows) {  // strides and junk rows behind the last key, as in the file
        const auto used = static_cast<std::size_t>((g.kv_heads - 1) * t.stride[1] + g.kv_len * t.stride[0]) * 2;
        there.push_back(DeviceBuffer::of(std::span(static_cast<const std::byte*>(t.data), std::min(used, bytes))));
        t.data = there.back().data();
      }
      cache.append(ids.back(), 0, rows[0], rows[1], stream.handle()).value();
      stream.wait();
    }
    std::vector<Mask> masks = {g.tensor_mask()};
    if (const std::optional<Mask> mask = g.position_mask()) masks.push_back(*mask);
    for (const Mask& mask : masks) {
      for (const char* kernel : {"decode", "prefill", "generic"}) {
        const bool is_generic = kernel == std::string("generic");
        if (!is_generic && format == std::string("f32")) continue;
        AttentionOptions options;
        options.kernel = kernel;
        options.mask = mask;
        options.q_heads = g.q_heads;
        options.q_len = g.q_len;
        options.scale = g.scale;
        SCOPED_TRACE(fmt::format("{}, {} kernels, {}", format, kernel, mask.tensor.data ? "mask tensor" : "positions"));
        const Result<Attended> got = attend(cache, ids, options, g.queries());
        const bool is_prefill = kernel == std::string("prefill");
        ASSERT_TRUE(got.ok()) << got.message();
        EXPECT_TRUE(close(g.out_ref, got->out, is_prefill ? tolerance::kGoldenBf16Prefill : tolerance::kGoldenBf16,
                          {g.batch * g.q_len, g.q_heads, Bf16Case::kHeadDim}))
            << got->explain;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Bf16Gpu, testing::ValuesIn(kBf16Cases),
                         [](const auto& i) { return std::string(i.param); });

}  // namespace
}  // namespace kvant::test
