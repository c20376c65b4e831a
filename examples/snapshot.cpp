// A conversation that outlives its process: a cache is saved in a file, loaded again, and goes on bit for bit.
//
//     example_snapshot [FILE]          # default: chat.kvs
#include <kvant/kvant.hpp>

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int kLayers = 2, kQueryHeads = 8, kKvHeads = 2, kHeadDim = 64, kPrompt = 1000;

// Stands in for a model's projections of `tokens` tokens.
std::vector<float> some_numbers(int tokens, int heads, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> gaussian;
  std::vector<float> x(static_cast<std::size_t>(tokens) * heads * kHeadDim);
  for (float& value : x) value = gaussian(engine);
  return x;
}

void append(kvant::Cache& cache, kvant::SequenceId sequence, int tokens, unsigned seed) {
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::vector<float> keys = some_numbers(tokens, kKvHeads, seed + 2 * layer);
    const std::vector<float> values = some_numbers(tokens, kKvHeads, seed + 2 * layer + 1);
    cache
        .append(sequence, layer, kvant::TensorView::of(keys.data(), tokens, kKvHeads, kHeadDim),
                kvant::TensorView::of(values.data(), tokens, kKvHeads, kHeadDim))
        .value();
  }
}

// One more token, and the attention of its query in the last layer.
std::vector<float> next_token(kvant::Cache& cache, kvant::SequenceId sequence) {
  append(cache, sequence, 1, 100);
  const std::vector<float> q = some_numbers(1, kQueryHeads, 200);
  std::vector<float> out(q.size());
  const auto plan = kvant::plan(cache, {sequence}, {.q_heads = kQueryHeads}).value();
  kvant::run(plan, kLayers - 1, kvant::TensorView::of(q.data(), 1, kQueryHeads, kHeadDim),
             kvant::MutableTensorView::of(out.data(), 1, kQueryHeads, kHeadDim))
      .value();
  return out;
}

}  // namespace

int main(int argc, char** argv) try {
  const char* path = argc > 1 ? argv[1] : "chat.kvs";
  auto cache = kvant::Cache::create({.layers = kLayers, .kv_heads = kKvHeads, .head_dim = kHeadDim}).value();
  const kvant::SequenceId sequence = cache.add_sequence();
  append(cache, sequence, kPrompt, 1);

  // A file without a model and without token ids loads as well. With them a load can insist on what it expects.
  std::vector<std::int64_t> ids(kPrompt);
  for (int i = 0; i < kPrompt; ++i) ids[i] = 7 * i % 1000;
  kvant::save(cache, path, {.name = "a chat", .model = "example", .tokens = {ids}}).value();

  // In another process the work begins here. `info` tells what the file has before any page is read.
  const kvant::Snapshot snapshot = kvant::Snapshot::open(path).value();
  for (const kvant::SnapshotSequence& s : snapshot.info().sequences) {
    std::printf("%s: %lld tokens, %zu token ids\n", path, static_cast<long long>(s.length), s.tokens.size());
  }
  kvant::Loaded loaded = snapshot.load({.model = "example", .tokens = {{ids}}}).value();  // refused if they differ
  const bool same = next_token(loaded.cache, loaded.sequences[0]) == next_token(cache, sequence);
  std::printf("the loaded sequence %s; look at the file with: kvant snapshot info %s\n",
              same ? "goes on bit for bit" : "DIFFERS", path);
  return same ? 0 : 1;
} catch (const kvant::Error& error) {
  std::fprintf(stderr, "%s: %s\n", kvant::code_name(error.status().code()), error.what());
  return 1;
}
