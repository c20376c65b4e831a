// The smallest program that proves an installed kvant: it links, and it attends.
#include <kvant/kvant.hpp>

#include <cstdio>
#include <vector>

int main() {
  auto cache = kvant::Cache::create({.kv_heads = 1, .head_dim = 64});
  if (!cache) return std::fprintf(stderr, "%s\n", cache.message().c_str()), 1;
  const kvant::SequenceId sequence = cache->add_sequence();

  const std::vector<float> key(64, 0.5f), value(64, 2.0f);
  std::vector<float> out(64);
  cache->append(sequence, 0, kvant::TensorView::of(key.data(), 1, 1, 64), kvant::TensorView::of(value.data(), 1, 1, 64))
      .value();
  const auto plan = kvant::plan(*cache, {sequence}, {.q_heads = 1}).value();
  kvant::run(plan, 0, kvant::TensorView::of(key.data(), 1, 1, 64), kvant::MutableTensorView::of(out.data(), 1, 1, 64))
      .value();
  std::printf("kvant %s: one key, so the output is its value: %.3f\n", kvant::kVersion, out[0]);
  return out[0] > 1.99f && out[0] < 2.01f ? 0 : 1;
}
