// How time is taken on a device. Kernels are timed between events, as launches of a graph of many runs, so that neither the
// host's calls nor the gaps between launches count (appends of many tokens are not recorded: their calls are enqueued
// between two events). A cache has as many layers as make four times the L2 cache, and runs rotate through them: keys
// and values come from memory. The read bandwidth that rows are held against is measured before and after all of them.
#include "cli/bench_device.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "cli/bench_append.hpp"
#include "cli/bench_data.hpp"
#include "cli/parallel.hpp"
#include "cli/table.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr double kGraphNs = 2e6;  // a launch of a graph takes at least this long, against the few microseconds it costs
constexpr std::int64_t kMostRuns = 4000;  // in one graph
constexpr std::int64_t kSteps = 128;      // the same, of appends of one token
constexpr int kStepSamples = 15;
constexpr int kStepLayers = 16;
constexpr int kFewestSamples = 7, kMostSamples = 201;
constexpr std::int64_t kSupplyBytes = std::int64_t{128} << 20;  // rows of one write, keys or values

std::int64_t row_values(const BenchCase& c) {
  return static_cast<std::int64_t>(c.kv_heads) * c.head_dim;
}

std::vector<float> widened(const std::vector<std::uint16_t>& bf16) {
  std::vector<float> x;
  x.reserve(bf16.size());
  for (const std::uint16_t h : bf16) x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16));
  return x;
}

class Measurement {
 public:
  Measurement(core::DeviceBench& bench, const BenchSettings& settings, int device)
      : bench_(bench), settings_(settings), device_(device) {}

  Status measure(BenchRow& row) {
    return row.bench_case.op == BenchOp::append ? measure_append(row) : measure_decode(row);
  }

 private:
  Result<Cache> make_cache(const BenchCase& c, int layers) const {
    CacheConfig config = cache_config(c, layers);
    config.device = fmt::format("cuda:{}", device_);
    config.max_sequences = c.batch;
    const auto whole_pages = [](std::int64_t keys) { return (keys + kPageTokens - 1) / kPageTokens * kPageTokens; };
    config.max_sequence_tokens = whole_pages(c.most_keys());
    config.capacity_tokens = whole_pages(c.keys_of(0)) + (c.batch - 1) * whole_pages(c.keys);
    return Cache::create(config);
  }

  // A buffer that later calls reuse; its old content is lost.
  Result<void*> scratch(std::size_t which, std::size_t bytes) {
    if (scratch_.size() <= which) scratch_.resize(which + 1);
    Scratch& s = scratch_[which];
    if (s.bytes < bytes) {
      const Result<void*> made = bench_.allocate(bytes);
      if (!made.ok()) return made.status();
      s = {*made, bytes};
    }
    return s.data;
  }

  // Channels as loud as those of loud_vectors, in device memory.
  Result<const float*> gains(std::size_t which, int heads, int head_dim, double loudness, std::uint64_t seed) {
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
    if (Status s = bench_.upload(*memory, gain.data(), gain.size() * sizeof(float)); !s.ok()) return s;
    return static_cast<const float*>(*memory);
  }

  enum Use : std::size_t {
    kKeys,
    kValues,
    kKeyGains,
    kValueGains,
    kQueries,
    kQueryGains,
    kMask,
    kOut,
    kOut32,
    kWorkspace
  };

  struct Supply {
    void* keys;
    void* values;
    const float* key_gains;
    const float* value_gains;
    std::int64_t rows;
  };
  Result<Supply> make_supply(const BenchCase& c, std::int64_t rows) {
    const auto bytes = static_cast<std::size_t>(rows * row_values(c)) * 2;
    const Result<void*> keys = scratch(kKeys, bytes), values = scratch(kValues, bytes);
    if (!keys.ok()) return keys.status();
    if (!values.ok()) return values.status();
    const Result<const float*> k = gains(kKeyGains, c.kv_heads, c.head_dim, 10, 1);
    const Result<const float*> v = gains(kValueGains, c.kv_heads, c.head_dim, 6, 2);
    if (!k.ok()) return k.status();
    if (!v.ok()) return v.status();
    return Supply{*keys, *values, *k, *v, rows};
  }
  Status fill(const Supply& s, const BenchCase& c, std::int64_t first_row, std::int64_t rows) {
    if (Status status = bench_.fill_normal(s.keys, rows, row_values(c), first_row, 11, s.key_gains); !status.ok())
      return status;
    return bench_.fill_normal(s.values, rows, row_values(c), first_row, 12, s.value_gains);
  }
  static TensorView rows_of(const void* data, const BenchCase& c, std::int64_t first, std::int64_t rows) {
    const auto* bytes = static_cast<const std::byte*>(data) + first * row_values(c) * 2;
    return TensorView::contiguous(bytes, Dtype::bf16, rows, c.kv_heads, c.head_dim);
  }

  // All layers hold the same vectors: only the memory must differ. The last tokens of each sequence may be left out.
  Result<Workload> fill_cache(const BenchCase& c, int layers, std::int64_t left_out) {
    Result<Cache> cache = make_cache(c, layers);
    if (!cache.ok()) return cache.status();
    Workload w{c, std::move(*cache), {}, layers};
    for (int i = 0; i < c.batch; ++i) w.sequences.push_back(w.cache.add_sequence());
    const std::int64_t step = std::clamp<std::int64_t>(kSupplyBytes / (2 * row_values(c) * c.batch), 1,
                                                       std::min<std::int64_t>(c.most_keys(), 8192));
    const Result<Supply> supply = make_supply(c, step * c.batch);
    if (!supply.ok()) return supply.status();
    for (std::int64_t done = 0; done < c.most_keys() - left_out; done += step) {
      const BenchStep next = bench_step(w, done, step, left_out);
      if (Status s = fill(*supply, c, done * c.batch, next.rows); !s.ok()) return s;
      if (Status s = w.cache.reserve(next.appends, bench_.stream()); !s.ok()) return s;
      for (int layer = 0; layer < layers; ++layer) {
        const Status s = w.cache.write(next.sequences, layer, rows_of(supply->keys, c, 0, next.rows),
                                       rows_of(supply->values, c, 0, next.rows), bench_.stream());
        if (!s.ok()) return s;
      }
    }
    if (Status s = bench_.wait(); !s.ok()) return s;
    return w;
  }

  // --- decode and step ---

  struct Decode {
    const Plan* plan;
    int layers;
    TensorView q;
    MutableTensorView out;
    RunOptions options;
    Workload* grows;  // null: decode
    TensorView keys, values;
    std::vector<Append> step;
    static Status enqueue(void* self, std::int64_t i, Stream stream) {
      auto& d = *static_cast<Decode*>(self);
      const auto layer = static_cast<int>(i % d.layers);
      if (d.grows != nullptr) {
        Cache& cache = d.grows->cache;
        if (layer == 0) {  // once for all layers, as in a model
          if (Status s = cache.reserve(d.step, stream); !s.ok()) return s;
        }
        if (Status s = cache.write(d.grows->sequences, layer, d.keys, d.values, stream); !s.ok()) return s;
      }
      d.options.stream = stream;
      return run(*d.plan, layer, d.q, d.out, d.options);
    }
  };

  // By how much the sequences of step grow while they are timed.
  struct Growth {
    std::int64_t passes = 0;  // over all layers, in one graph
    int samples = 0;
    std::int64_t tokens = 0;  // of each sequence in all
  };
  Result<Growth> growth_of(const BenchCase& c, int layers) const {
    Growth g;
    if (c.op != BenchOp::step) return g;
    g.samples = settings_.rounds > 0 ? settings_.rounds : kStepSamples;
    const std::int64_t launches = g.samples + 2;  // the graph is launched twice to warm up
    const std::int64_t least = std::min(c.keys_of(0), c.batch > 1 ? c.keys : c.keys_of(0));
    if (launches * c.q_len >= least) {
      return {
          Code::invalid_argument,
          fmt::format("{} samples of --q-len {} make sequences longer than --keys {}; use more keys or fewer --rounds",
                      g.samples, c.q_len, least)};
    }
    // At 3 TB/s a pass takes about so long; and lengths stay near those that were asked for.
    const double pass_ns = layers * (layer_bytes(c) / 3000 + 1e4);
    const double most = std::min<double>(static_cast<double>(kMostRuns) / layers,
                                         static_cast<double>(least) / static_cast<double>(16 * launches * c.q_len));
    g.passes = static_cast<std::int64_t>(std::clamp(std::ceil(kGraphNs / pass_ns), 1.0, std::max(1.0, most)));
    g.tokens = g.passes * launches * c.q_len;
    return g;
  }

  Status measure_decode(BenchRow& row) {
    const BenchCase& c = row.bench_case;
    const auto needed_for = [&](int layers) {
      return 1.1 * layers * layer_bytes(c) + 3.0 * static_cast<double>(kSupplyBytes);
    };
    const double wanted = std::ceil(4.0 * static_cast<double>(bench_.facts().l2_bytes) / layer_bytes(c));
    auto layers = static_cast<int>(std::clamp(wanted, 1.0, 4096.0));
    if (c.op == BenchOp::step) {  // lengths advance once for all layers: so many as a model has, if they fit
      int more = std::max(layers, kStepLayers);
      while (more > layers && needed_for(more) > 0.5 * static_cast<double>(bench_.facts().free_bytes)) more /= 2;
      layers = std::max(layers, more);
    }
    const double needed = needed_for(layers);
    if (needed > 0.9 * static_cast<double>(bench_.facts().free_bytes)) {
      return {Code::out_of_memory,
              fmt::format("takes {} of the device's memory, {} are free; use fewer --keys or a smaller --batch",
                          bytes_text(needed), bytes_text(static_cast<double>(bench_.facts().free_bytes)))};
    }
    const Result<Growth> growth = growth_of(c, layers);
    if (!growth.ok()) return growth.status();
    Result<Workload> filled = fill_cache(c, layers, growth->tokens);
    if (!filled.ok()) return filled.status();
    const std::vector<std::byte> mask = mask_bytes(c);
    const Result<void*> mask_memory = scratch(kMask, mask.size());
    if (!mask_memory.ok()) return mask_memory.status();
    if (!mask.empty()) {
      if (Status s = bench_.upload(*mask_memory, mask.data(), mask.size()); !s.ok()) return s;
    }
    const AttentionOptions options = attention_options(c, *mask_memory);
    const Result<Plan> plan = kvant::plan(filled->cache, std::span<const SequenceId>(filled->sequences), options);
    if (!plan.ok()) return plan.status();
    row.bytes = static_cast<double>(plan->kv_bytes());

    const std::int64_t queries = c.batch * c.q_len;
    const auto values = static_cast<std::size_t>(queries * c.q_heads * c.head_dim);
    const Result<void*> q = scratch(kQueries, values * 2), out = scratch(kOut, values * 2);
    const Result<void*> out32 = scratch(kOut32, values * 4);
    const Result<void*> workspace = scratch(kWorkspace, plan->workspace_bytes() + 64);
    const Result<const float*> gain = gains(kQueryGains, c.q_heads, c.head_dim, 1, 3);
    for (const Result<void*>* r : {&q, &out, &out32, &workspace}) {
      if (!r->ok()) return r->status();
    }
    if (!gain.ok()) return gain.status();
    const std::int64_t q_row = static_cast<std::int64_t>(c.q_heads) * c.head_dim;
    if (Status s = bench_.fill_normal(*q, queries, q_row, 0, 13, *gain); !s.ok()) return s;

    // Speed with a bf16 output, as serving has it; the check of the error with one in f32.
    Decode decode{&*plan,
                  layers,
                  TensorView::contiguous(*q, Dtype::bf16, queries, c.q_heads, c.head_dim),
                  MutableTensorView::contiguous(*out, Dtype::bf16, queries, c.q_heads, c.head_dim),
                  {},
                  nullptr,
                  {},
                  {},
                  {}};
    decode.options.workspace = {static_cast<std::byte*>(*workspace), plan->workspace_bytes()};
    const auto check = [&]() -> Status {
      Decode once = decode;
      once.grows = nullptr;
      once.out = MutableTensorView::of(static_cast<float*>(*out32), queries, c.q_heads, c.head_dim);
      if (Status s = Decode::enqueue(&once, 0, bench_.stream()); !s.ok()) return s;
      std::vector<float> got(values);
      std::vector<std::uint16_t> q_host(values);
      if (Status s = bench_.download(got.data(), *out32, values * 4); !s.ok()) return s;
      if (Status s = bench_.download(q_host.data(), *q, values * 2); !s.ok()) return s;
      const Result<double> error = check_attention(*filled, c, widened(q_host), got, 1);
      if (error.ok()) judge(row, *error);
      return error.status();
    };
    const core::DeviceBench::Work work{&decode, &Decode::enqueue};

    if (c.op == BenchOp::step) {
      // Sequences reach their lengths with the last of the recorded steps: then they can be checked.
      const Result<Supply> supply = make_supply(c, queries);
      if (!supply.ok()) return supply.status();
      if (Status s = fill(*supply, c, 0, queries); !s.ok()) return s;
      decode.grows = &*filled;
      decode.keys = rows_of(supply->keys, c, 0, queries);
      decode.values = rows_of(supply->values, c, 0, queries);
      std::vector<Append> all, later;
      for (const SequenceId id : filled->sequences) {
        decode.step.push_back({id, c.q_len});
        all.push_back({id, growth->tokens});
        later.push_back({id, growth->tokens - growth->passes * c.q_len});
      }
      if (Status s = filled->cache.reserve_ahead(all, bench_.stream()); !s.ok()) return s;
      Result<std::vector<double>> ns = bench_.time_graph(work, layers * growth->passes, growth->samples);
      if (!ns.ok()) return ns.status();
      if (Status s = filled->cache.advance(later); !s.ok()) return s;
      if (Status s = check(); !s.ok() || !row.refusal.empty()) return s;
      return finish(row, *ns);
    }

    if (Status s = check(); !s.ok() || !row.refusal.empty()) return s;
    Result<std::vector<double>> first = bench_.time_graph(work, layers, 3);
    if (!first.ok()) return first.status();
    const double estimate = std::max(100.0, quantile(*first, 0.5));
    const double rounds =
        std::clamp(std::ceil(kGraphNs / (estimate * layers)), 1.0,
                   std::max(1.0, std::floor(static_cast<double>(kMostRuns) / static_cast<double>(layers))));
    const std::int64_t runs = layers * static_cast<std::int64_t>(rounds);
    Result<std::vector<double>> ns = bench_.time_graph(work, runs, samples_for(estimate * static_cast<double>(runs)));
    if (!ns.ok()) return ns.status();
    return finish(row, *ns);
  }

  // --- append ---

  struct Fill {
    Cache* cache;
    const BenchCase* c;
    Supply supply;
    std::vector<SequenceId> sequences;
    static Status enqueue(void* self, std::int64_t /*i*/, Stream stream) {
      auto& f = *static_cast<Fill*>(self);
      for (const SequenceId id : f.sequences) {
        if (Status s = f.cache->remove(id); !s.ok()) return s;
      }
      f.sequences.clear();
      for (int i = 0; i < f.c->batch; ++i) f.sequences.push_back(f.cache->add_sequence());
      std::vector<Append> appends(f.sequences.size());
      for (std::int64_t done = 0, from = 0; done < f.c->keys;) {
        const std::int64_t tokens = std::min(f.c->q_len, f.c->keys - done);
        const std::int64_t rows = tokens * f.c->batch;
        if (from + rows > f.supply.rows) from = 0;
        for (std::size_t i = 0; i < appends.size(); ++i) appends[i] = {f.sequences[i], tokens};
        if (Status s = f.cache->reserve(appends, stream); !s.ok()) return s;
        const Status s = f.cache->write(f.sequences, 0, rows_of(f.supply.keys, *f.c, from, rows),
                                        rows_of(f.supply.values, *f.c, from, rows), stream);
        if (!s.ok()) return s;
        done += tokens;
        from += rows;
      }
      return {};
    }
  };

  // Relative L2 of the first tokens of the first sequence, whose rows lie `row_step` apart.
  Result<double> append_error(const Cache& cache, SequenceId sequence, const BenchCase& c, const Supply& supply,
                              std::int64_t tokens, std::int64_t row_step) {
    const auto values = static_cast<std::size_t>(tokens * row_values(c));
    std::vector<float> keys(values), vals(values);
    const Status status =
        cache.read(sequence, 0, 0, tokens, MutableTensorView::of(keys.data(), tokens, c.kv_heads, c.head_dim),
                   MutableTensorView::of(vals.data(), tokens, c.kv_heads, c.head_dim), bench_.stream());
    if (!status.ok()) return status;
    std::vector<std::uint16_t> given(values);
    double error2 = 0, truth2 = 0;
    for (const auto& [decoded, source] : {std::pair(&keys, supply.keys), {&vals, supply.values}}) {
      const auto row = static_cast<std::size_t>(row_values(c));
      const auto apart = static_cast<std::size_t>(row_step) * row;
      const auto parts = static_cast<std::size_t>(row_step == 1 ? 1 : tokens);
      for (std::size_t i = 0; i < parts; ++i) {
        const auto* from = static_cast<const std::uint16_t*>(source) + i * apart;
        if (Status s = bench_.download(given.data() + i * row, from, values / parts * 2); !s.ok()) return s;
      }
      const std::vector<float> truth = widened(given);
      for (std::size_t i = 0; i < values; ++i) {
        const double difference = static_cast<double>((*decoded)[i]) - static_cast<double>(truth[i]);
        error2 += difference * difference;
        truth2 += static_cast<double>(truth[i]) * static_cast<double>(truth[i]);
      }
    }
    return std::sqrt(error2 / truth2);
  }

  // One token of each sequence, its lengths' advance included.
  struct Step {
    Cache* cache;
    const BenchCase* c;
    Supply supply;
    std::vector<SequenceId> sequences;
    std::vector<Append> appends;
    static Status enqueue(void* self, std::int64_t i, Stream stream) {
      auto& step = *static_cast<Step*>(self);
      const std::int64_t rows = step.c->batch, from = i * rows;
      if (Status s = step.cache->reserve(step.appends, stream); !s.ok()) return s;
      return step.cache->write(step.sequences, 0, rows_of(step.supply.keys, *step.c, from, rows),
                               rows_of(step.supply.values, *step.c, from, rows), stream);
    }
  };

  Status measure_steps(BenchRow& row) {
    BenchCase c = row.bench_case;
    const int samples = settings_.rounds > 0 ? settings_.rounds : kStepSamples;
    c.keys = kSteps * (samples + 2);  // the graph is launched twice to warm up
    Result<Cache> cache = make_cache(c, 1);
    if (!cache.ok()) return cache.status();
    const Result<Supply> supply = make_supply(c, kSteps * c.batch);
    if (!supply.ok()) return supply.status();
    if (Status s = fill(*supply, c, 0, supply->rows); !s.ok()) return s;
    Step step{&*cache, &c, *supply, {}, {}};
    std::vector<Append> all, later;
    for (int i = 0; i < c.batch; ++i) {
      step.sequences.push_back(cache->add_sequence());
      step.appends.push_back({step.sequences.back(), 1});
      all.push_back({step.sequences.back(), c.keys});
      later.push_back({step.sequences.back(), c.keys - kSteps});
    }
    if (Status s = cache->reserve_ahead(all, bench_.stream()); !s.ok()) return s;
    Result<std::vector<double>> ns = bench_.time_graph({&step, &Step::enqueue}, kSteps, samples);
    if (!ns.ok()) return ns.status();
    if (Status s = cache->advance(later); !s.ok()) return s;
    const Result<double> error = append_error(*cache, step.sequences.front(), c, *supply, kSteps, c.batch);
    if (!error.ok()) return error.status();
    judge(row, *error);
    if (!row.refusal.empty()) return {};
    row.bench_case.keys = c.keys = 1;
    row.bytes = append_bytes(c);
    return finish(row, *ns);
  }

  Status measure_append(BenchRow& row) {
    if (row.bench_case.q_len == 1 && row.bench_case.keys > 1) return measure_steps(row);
    const BenchCase& c = row.bench_case;
    row.bytes = append_bytes(c);
    Result<Cache> cache = make_cache(c, 1);
    if (!cache.ok()) return cache.status();
    const std::int64_t rows_of_call = std::min(c.q_len, c.keys) * c.batch;
    const std::int64_t rows = std::max(rows_of_call, std::min(kSupplyBytes / (2 * row_values(c)), c.keys * c.batch));
    const Result<Supply> supply = make_supply(c, rows);
    if (!supply.ok()) return supply.status();
    if (Status s = fill(*supply, c, 0, rows); !s.ok()) return s;
    Fill work{&*cache, &c, *supply, {}};
    if (Status s = Fill::enqueue(&work, 0, bench_.stream()); !s.ok()) return s;
    const Result<double> error =
        append_error(*cache, work.sequences.front(), c, *supply, std::min({c.q_len, c.keys, std::int64_t{1024}}), 1);
    if (!error.ok()) return error.status();
    judge(row, *error);
    if (!row.refusal.empty()) return {};
    const core::DeviceBench::Work timed{&work, &Fill::enqueue};
    Result<std::vector<double>> first = bench_.time_each(timed, 3);
    if (!first.ok()) return first.status();
    Result<std::vector<double>> ns = bench_.time_each(timed, samples_for(quantile(*first, 0.5)));
    if (!ns.ok()) return ns.status();
    return finish(row, *ns);
  }

  [[nodiscard]] int samples_for(double ns) const {
    if (settings_.rounds > 0) return settings_.rounds;
    return static_cast<int>(std::clamp(settings_.seconds * 1e9 / ns, double{kFewestSamples}, double{kMostSamples}));
  }

  static Status finish(BenchRow& row, std::vector<double>& ns) {
    row.samples = static_cast<int>(ns.size());
    row.median_ns = quantile(ns, 0.5);
    row.spread = (quantile(ns, 0.9) - quantile(ns, 0.1)) / row.median_ns;
    row.ns_per_value = row.median_ns / row.bench_case.stored_values();
    row.gb_per_s = row.bytes / row.median_ns;
    if (row.bench_case.op != BenchOp::append) row.gflops = row.bench_case.flops() / row.median_ns;
    return {};
  }

  struct Scratch {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  core::DeviceBench& bench_;
  BenchSettings settings_;
  int device_;
  std::vector<Scratch> scratch_;
};

}  // namespace

Status check_device_backend() {
  const core::DeviceBackend* backend = core::device_backend();
  if (backend == nullptr) {
    return {Code::unsupported,
            "--backend cuda: not compiled in; configure with -DKVANT_CUDA=ON (./dev gpu-build), or use --backend cpu"};
  }
  if (const std::string why = backend->unavailable(); !why.empty())
    return {Code::unsupported, fmt::format("--backend cuda: {}", why)};
  return {};
}

Result<BenchResult> run_device_bench(const std::vector<BenchCase>& cases, const BenchSettings& settings, int device,
                                     const std::function<void(double, const std::string&)>& on_progress) {
  if (Status s = check_device_backend(); !s.ok()) return s;
  const Result<std::unique_ptr<core::DeviceBench>> made = core::device_backend()->make_bench(device);
  if (!made.ok()) return made.status();
  core::DeviceBench& bench = **made;
  BenchResult result;
  result.device = bench.facts().name;
  const Result<double> before = bench.read_gb_per_s();
  if (!before.ok()) return before.status();
  Measurement measurement(bench, settings, device);
  for (const BenchCase& c : cases) {
    const std::string name =
        fmt::format("{} {} D {}, {} keys, batch {}", op_name(c.op), c.formats.name(), c.head_dim, c.keys, c.batch);
    on_progress(0, name);
    BenchRow row;
    row.bench_case = c;
    if (Status s = measurement.measure(row); !s.ok()) return {s.code(), name + ": " + s.message()};
    result.rows.push_back(std::move(row));
    on_progress(1, name);
  }
  const Result<double> after = bench.read_gb_per_s();
  if (!after.ok()) return after.status();
  result.device_read_gb_per_s = std::max(*before, *after);
  for (BenchRow& row : result.rows) row.share_of_read_bandwidth = row.gb_per_s / result.device_read_gb_per_s;
  return result;
}

}  // namespace kvant::cli
