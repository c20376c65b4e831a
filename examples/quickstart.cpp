// Decoding with a compressed cache, in the order in which a model does it.
//
// Two ideas carry the whole interface. A cache holds the keys and values of all layers of one geometry, compressed as
// they leave the newest page. A plan is the answer to "how will attention be computed over it": made once per step,
// then run once per layer.
#include <kvant/kvant.hpp>

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int kLayers = 2, kQueryHeads = 8, kKvHeads = 2, kHeadDim = 128;
constexpr int kPrompt = 4000, kSteps = 3;

// Stands in for a model's projections.
std::vector<float> some_numbers(std::size_t count) {
  static std::mt19937 engine(1);
  std::normal_distribution<float> gaussian;
  std::vector<float> x(count);
  for (float& value : x) value = gaussian(engine);
  return x;
}

}  // namespace

int main() try {
  // `.value()` throws when a call failed; without exceptions, look at `.ok()` and `.message()`.
  // The first page and the newest tokens stay exact, here in bf16; what lies between is stored in the formats given.
  auto cache = kvant::Cache::create({.layers = kLayers,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kHeadDim,
                                     .k = "tq6",
                                     .v = "tq4",
                                     .exact = kvant::Dtype::bf16})
                   .value();
  const kvant::SequenceId sequence = cache.add_sequence();

  for (int step = 0; step <= kSteps; ++step) {
    const int tokens = step == 0 ? kPrompt : 1;  // the prompt in one piece, then one token at a time
    std::vector<std::vector<float>> keys, values;
    for (int layer = 0; layer < kLayers; ++layer) {
      keys.push_back(some_numbers(tokens * kKvHeads * kHeadDim));
      values.push_back(some_numbers(tokens * kKvHeads * kHeadDim));
    }

    // Once per step: take room for the new tokens in every layer, and plan. A cache that is full says so here.
    const kvant::Append append{sequence, tokens};
    cache.reserve({&append, 1}).value();
    const auto plan = kvant::plan(cache, {sequence}, {.q_heads = kQueryHeads, .q_len = tokens}).value();

    // Once per layer: hand over the new keys and values, then attend. Queries stand at the end of the sequence.
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto view = [&](const std::vector<float>& x) {
        return kvant::TensorView::of(x.data(), tokens, kKvHeads, kHeadDim);
      };
      cache.write({&sequence, 1}, layer, view(keys[layer]), view(values[layer])).value();

      const std::vector<float> q = some_numbers(tokens * kQueryHeads * kHeadDim);
      std::vector<float> out(q.size());
      kvant::run(plan, layer, kvant::TensorView::of(q.data(), tokens, kQueryHeads, kHeadDim),
                 kvant::MutableTensorView::of(out.data(), tokens, kQueryHeads, kHeadDim))
          .value();
    }
    if (step == kSteps) std::puts(plan.explain().c_str());  // what was chosen, and why
  }

  const kvant::CacheMemory memory = cache.memory();
  const double bf16 = 2.0 * 2 * kLayers * kKvHeads * kHeadDim * static_cast<double>(cache.length(sequence).value());
  std::printf("%s\n%lld bytes, %.0f %% of a bf16 cache\n", cache.describe().c_str(),
              static_cast<long long>(memory.total()), 100 * static_cast<double>(memory.total()) / bf16);
  return 0;
} catch (const kvant::Error& error) {
  std::fprintf(stderr, "%s: %s\n", kvant::code_name(error.status().code()), error.what());
  return 1;
}
