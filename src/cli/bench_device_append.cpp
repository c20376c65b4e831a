// append: calls that fill empty caches, between two events; of one token a sequence: steps, replayed as a graph.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/bench_append.hpp"
#include "cli/bench_device_tools.hpp"
#include "cli/parallel.hpp"

namespace kvant::cli {
namespace {

constexpr std::int64_t kSteps = 128;  // in one graph

struct Fill {
  Cache* cache;
  const BenchCase* c;
  DeviceTools::Supply supply;
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
      const Status s = f.cache->write(f.sequences, 0, DeviceTools::rows_of(f.supply, false, *f.c, from, rows),
                                      DeviceTools::rows_of(f.supply, true, *f.c, from, rows), stream);
      if (!s.ok()) return s;
      done += tokens;
      from += rows;
    }
    return {};
  }
};

// Relative L2 of the first tokens of the first sequence, whose rows lie `row_step` apart.
Result<double> append_error(DeviceTools& tools, const Cache& cache, SequenceId sequence, const BenchCase& c,
                            const DeviceTools::Supply& supply, std::int64_t tokens, std::int64_t row_step) {
  std::vector<float> keys(static_cast<std::size_t>(tokens * row_values(c, false))),
      vals(static_cast<std::size_t>(tokens * row_values(c, true)));
  const Status status =
      cache.read(sequence, 0, 0, tokens, MutableTensorView::of(keys.data(), tokens, c.kv_heads, c.head_dim),
                 MutableTensorView::of(vals.data(), tokens, c.kv_heads, c.v_dim()), tools.bench.stream());
  if (!status.ok()) return status;
  double error2 = 0, truth2 = 0;
  for (const auto& [decoded, source] : {std::pair(&keys, supply.keys), {&vals, supply.values}}) {
    const std::size_t values = decoded->size();
    std::vector<std::uint16_t> given(values);
    const auto row = static_cast<std::size_t>(row_values(c, decoded == &vals));
    const auto apart = static_cast<std::size_t>(row_step) * row;
    const auto parts = static_cast<std::size_t>(row_step == 1 ? 1 : tokens);
    for (std::size_t i = 0; i < parts; ++i) {
      const auto* from = static_cast<const std::uint16_t*>(source) + i * apart;
      if (Status s = tools.bench.download(given.data() + i * row, from, values / parts * 2); !s.ok()) return s;
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
  DeviceTools::Supply supply;
  std::vector<SequenceId> sequences;
  std::vector<Append> appends;
  static Status enqueue(void* self, std::int64_t i, Stream stream) {
    auto& step = *static_cast<Step*>(self);
    const std::int64_t rows = step.c->batch, from = i * rows;
    if (Status s = step.cache->reserve(step.appends, stream); !s.ok()) return s;
    return step.cache->write(step.sequences, 0, DeviceTools::rows_of(step.supply, false, *step.c, from, rows),
                             DeviceTools::rows_of(step.supply, true, *step.c, from, rows), stream);
  }
};

Status measure_steps(DeviceTools& tools, BenchRow& row) {
  BenchCase c = row.bench_case;
  const int samples = tools.settings.rounds > 0 ? tools.settings.rounds : kStepSamples;
  c.keys = kSteps * (samples + 2);  // the graph is launched twice to warm up
  Result<Cache> cache = tools.make_cache(c, 1);
  if (!cache.ok()) return cache.status();
  const Result<DeviceTools::Supply> supply = tools.make_supply(c, kSteps * c.batch);
  if (!supply.ok()) return supply.status();
  if (Status s = tools.fill(*supply, c, 0, supply->rows); !s.ok()) return s;
  Step step{&*cache, &c, *supply, {}, {}};
  std::vector<Append> all, later;
  for (int i = 0; i < c.batch; ++i) {
    step.sequences.push_back(cache->add_sequence());
    step.appends.push_back({step.sequences.back(), 1});
    all.push_back({step.sequences.back(), c.keys});
    later.push_back({step.sequences.back(), c.keys - kSteps});
  }
  if (Status s = cache->reserve_ahead(all, tools.bench.stream()); !s.ok()) return s;
  Result<std::vector<double>> ns = tools.bench.time_graph({&step, &Step::enqueue}, kSteps, samples);
  if (!ns.ok()) return ns.status();
  if (Status s = cache->advance(later); !s.ok()) return s;
  const Result<double> error = append_error(tools, *cache, step.sequences.front(), c, *supply, kSteps, c.batch);
  if (!error.ok()) return error.status();
  judge(row, *error);
  if (!row.refusal.empty()) return {};
  row.bench_case.keys = c.keys = 1;
  row.bytes = append_bytes(c);
  return DeviceTools::finish(row, *ns);
}

}  // namespace

Status measure_append(DeviceTools& tools, BenchRow& row) {
  tools.drop_shared();
  if (row.bench_case.q_len == 1 && row.bench_case.keys > 1) return measure_steps(tools, row);
  const BenchCase& c = row.bench_case;
  row.bytes = append_bytes(c);
  Result<Cache> cache = tools.make_cache(c, 1);
  if (!cache.ok()) return cache.status();
  const std::int64_t rows_of_call = std::min(c.q_len, c.keys) * c.batch;
  const std::int64_t rows =
      std::max(rows_of_call, std::min(kSupplyBytes / (2 * row_values(c, false)), c.keys * c.batch));
  const Result<DeviceTools::Supply> supply = tools.make_supply(c, rows);
  if (!supply.ok()) return supply.status();
  if (Status s = tools.fill(*supply, c, 0, rows); !s.ok()) return s;
  Fill work{&*cache, &c, *supply, {}};
  if (Status s = Fill::enqueue(&work, 0, tools.bench.stream()); !s.ok()) return s;
  const Result<double> error = append_error(tools, *cache, work.sequences.front(), c, *supply,
                                            std::min({c.q_len, c.keys, std::int64_t{1024}}), 1);
  if (!error.ok()) return error.status();
  judge(row, *error);
  if (!row.refusal.empty()) return {};
  const bench::DeviceBench::TimedRun timed{&work, &Fill::enqueue};
  Result<std::vector<double>> first = tools.bench.time_each(timed, 3);
  if (!first.ok()) return first.status();
  Result<std::vector<double>> ns = tools.bench.time_each(timed, tools.samples_for(quantile(*first, 0.5)));
  if (!ns.ok()) return ns.status();
  return DeviceTools::finish(row, *ns);
}

}  // namespace kvant::cli
