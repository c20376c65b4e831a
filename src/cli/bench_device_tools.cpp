#include "cli/bench_device_tools.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "cli/parallel.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr int kFewestSamples = 7, kMostSamples = 201;

}  // namespace

std::int64_t row_values(const BenchCase& c, bool of_values) {
  return static_cast<std::int64_t>(c.kv_heads) * (of_values ? c.v_dim() : c.head_dim);
}

std::vector<float> widened(const std::vector<std::uint16_t>& bf16) {
  std::vector<float> x;
  x.reserve(bf16.size());
  for (const std::uint16_t h : bf16) x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16));
  return x;
}

Result<Cache> DeviceTools::make_cache(const BenchCase& c, int layers) const {
  CacheConfig config = cache_config(c, layers);
  config.device = fmt::format("cuda:{}", device_);
  config.max_sequences = c.batch;
  const auto whole_pages = [](std::int64_t keys) { return (keys + kPageTokens - 1) / kPageTokens * kPageTokens; };
  config.max_sequence_tokens = whole_pages(c.most_keys());
  config.capacity_tokens = whole_pages(c.keys_of(0)) + (c.batch - 1) * whole_pages(c.keys);
  return Cache::create(config);
}

Result<void*> DeviceTools::scratch(Use which, std::size_t bytes) {
  if (scratch_.size() <= which) scratch_.resize(which + 1);
  Scratch& s = scratch_[which];
  if (s.bytes < bytes) {
    const Result<void*> made = bench.allocate(bytes);
    if (!made.ok()) return made.status();
    s = {*made, bytes};
  }
  return s.data;
}

Result<const float*> DeviceTools::gains(Use which, int heads, int head_dim, double loudness, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> gain(static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_dim), 1.0f);
  for (int h = 0; h < heads && loudness > 1; ++h) {
    for (int i = 0; i < std::max(1, head_dim / 64); ++i) {
      const auto channel = static_cast<std::size_t>(random.uniform() * head_dim);
      gain[static_cast<std::size_t>(h) * static_cast<std::size_t>(head_dim) + channel] =
          static_cast<float>(loudness * (0.5 + random.uniform()));
    }
  }
  const Result<void*> memory = scratch(which, gain.size() * sizeof(float));
  if (!memory.ok()) return memory.status();
  if (Status s = bench.upload(*memory, gain.data(), gain.size() * sizeof(float)); !s.ok()) return s;
  return static_cast<const float*>(*memory);
}

Result<DeviceTools::Supply> DeviceTools::make_supply(const BenchCase& c, std::int64_t rows) {
  const auto bytes = [&](bool of_values) { return static_cast<std::size_t>(rows * row_values(c, of_values)) * 2; };
  const Result<void*> keys = scratch(kKeys, bytes(false)), values = scratch(kValues, bytes(true));
  if (!keys.ok()) return keys.status();
  if (!values.ok()) return values.status();
  const Result<const float*> k = gains(kKeyGains, c.kv_heads, c.head_dim, 10, 1);
  const Result<const float*> v = gains(kValueGains, c.kv_heads, c.v_dim(), 6, 2);
  if (!k.ok()) return k.status();
  if (!v.ok()) return v.status();
  return Supply{*keys, *values, *k, *v, rows};
}
Status DeviceTools::fill(const Supply& s, const BenchCase& c, std::int64_t first_row, std::int64_t rows) {
  if (Status status = bench.fill_normal(s.keys, rows, row_values(c, false), first_row, 11, s.key_gains); !status.ok())
    return status;
  return bench.fill_normal(s.values, rows, row_values(c, true), first_row, 12, s.value_gains);
}
TensorView DeviceTools::rows_of(const Supply& s, bool of_values, const BenchCase& c, std::int64_t first,
                                std::int64_t rows) {
  const auto* bytes =
      static_cast<const std::byte*>(of_values ? s.values : s.keys) + first * row_values(c, of_values) * 2;
  return TensorView::contiguous(bytes, Dtype::bf16, rows, c.kv_heads, of_values ? c.v_dim() : c.head_dim);
}

Result<Workload> DeviceTools::fill_cache(const BenchCase& c, int layers, std::int64_t left_out) {
  Result<Cache> cache = make_cache(c, layers);
  if (!cache.ok()) return cache.status();
  Workload w{c, std::move(*cache), {}, layers};
  for (int i = 0; i < c.batch; ++i) w.sequences.push_back(w.cache.add_sequence());
  const std::int64_t step = std::clamp<std::int64_t>(kSupplyBytes / (2 * row_values(c, false) * c.batch), 1,
                                                     std::min<std::int64_t>(c.most_keys(), 8192));
  const Result<Supply> supply = make_supply(c, step * c.batch);
  if (!supply.ok()) return supply.status();
  for (std::int64_t done = 0; done < c.most_keys() - left_out; done += step) {
    const BenchStep next = bench_step(w, done, step, left_out);
    if (Status s = fill(*supply, c, done * c.batch, next.rows); !s.ok()) return s;
    if (Status s = w.cache.reserve(next.appends, bench.stream()); !s.ok()) return s;
    for (int layer = 0; layer < layers; ++layer) {
      const Status s = w.cache.write(next.sequences, layer, rows_of(*supply, false, c, 0, next.rows),
                                     rows_of(*supply, true, c, 0, next.rows), bench.stream());
      if (!s.ok()) return s;
    }
  }
  if (Status s = bench.wait(); !s.ok()) return s;
  return w;
}

Result<Workload*> DeviceTools::shared_cache(const BenchCase& c, int layers) {
  if (!shared_ || shared_->layers != layers || !is_same_workload(shared_->bench_case, c)) {
    shared_.reset();
    Result<Workload> filled = fill_cache(c, layers, 0);
    if (!filled.ok()) return filled.status();
    shared_ = std::move(*filled);
  }
  return &*shared_;
}

int DeviceTools::samples_for(double ns) const {
  if (settings.rounds > 0) return settings.rounds;
  return static_cast<int>(std::clamp(settings.seconds * 1e9 / ns, double{kFewestSamples}, double{kMostSamples}));
}

Status DeviceTools::finish(BenchRow& row, std::vector<double>& ns) {
  row.samples = static_cast<int>(ns.size());
  row.median_ns = quantile(ns, 0.5);
  row.spread = spread(ns);
  row.ns_per_value = row.median_ns / row.bench_case.stored_values();
  row.gb_per_s = row.bytes / row.median_ns;
  if (row.bench_case.op != BenchOp::append) row.gflops = row.bench_case.flops() / row.median_ns;
  return {};
}

}  // namespace kvant::cli
