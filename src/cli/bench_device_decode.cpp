// decode, prefill: attention over sequences whose caches are rotated. step: the same, but first the keys and values of
// the next tokens are appended, and lengths advance once for all layers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "cli/bench_device_tools.hpp"
#include "cli/parallel.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr double kGraphNs = 2e6;  // a launch of a graph takes at least this long, against the few microseconds it costs
constexpr std::int64_t kMostRuns = 4000;  // in one graph
constexpr int kStepLayers = 16;

struct Decode {
  const Plan* plan = nullptr;
  int layers = 1;
  TensorView q;
  MutableTensorView out;
  RunOptions options;
  Workload* grows = nullptr;  // null: decode
  TensorView keys, values;    // the newest tokens'
  bool gives_own = false;     // to runs: fresh keys
  std::vector<Append> step;
  bench::DeviceBench* others = nullptr;  // null: nothing else is read between two runs
  std::int64_t other_bytes = 0;
  static Status read_others(void* self, std::int64_t i, Stream stream) {
    const auto& d = *static_cast<const Decode*>(self);
    return d.others->read_others(d.other_bytes, i, stream);
  }
  static Status enqueue(void* self, std::int64_t i, Stream stream) {
    auto& d = *static_cast<Decode*>(self);
    const auto layer = static_cast<int>(i % d.layers);
    if (d.others != nullptr) {
      if (Status s = read_others(self, i, stream); !s.ok()) return s;
    }
    if (d.grows != nullptr) {
      Cache& cache = d.grows->cache;
      if (layer == 0) {  // once for all layers, as in a model
        if (Status s = cache.reserve(d.step, stream); !s.ok()) return s;
      }
      if (Status s = cache.write(d.grows->sequences, layer, d.keys, d.values, stream); !s.ok()) return s;
    }
    d.options.stream = stream;
    return run(*d.plan, layer, d.q, d.out, d.options, d.gives_own ? d.keys : TensorView{},
               d.gives_own ? d.values : TensorView{});
  }
};

// Relative L2 of outputs.
double error_of(const std::vector<float>& got, const std::vector<float>& expected) {
  double error2 = 0, truth2 = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - expected[i];
    error2 += difference * difference;
    truth2 += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(error2 / truth2);
}

// By how much the sequences of step grow while they are timed.
struct Growth {
  std::int64_t passes = 0;  // over all layers, in one graph
  int samples = 0;
  std::int64_t tokens = 0;  // all tokens of each sequence
};
Result<Growth> growth_of(const DeviceTools& tools, const BenchCase& c, int layers) {
  Growth g;
  if (c.op != BenchOp::step) return g;
  g.samples = tools.settings.rounds > 0 ? tools.settings.rounds : kStepSamples;
  const std::int64_t launches = g.samples + 2;  // the graph is launched twice to warm up
  const std::int64_t least = std::min(c.keys_of(0), c.batch > 1 ? c.keys : c.keys_of(0));
  if (launches * c.q_len >= least) {
    return {
        Code::invalid_argument,
        fmt::format("{} samples of --q-len {} make sequences longer than --keys {}; use more keys or fewer --rounds",
                    g.samples, c.q_len, least)};
  }
  // At 3 TB/s a pass takes about so long; and lengths stay near the requested ones.
  const double pass_ns = layers * (layer_bytes(c) / 3000 + 1e4);
  const double most = std::min<double>(static_cast<double>(kMostRuns) / layers,
                                       static_cast<double>(least) / static_cast<double>(16 * launches * c.q_len));
  g.passes = static_cast<std::int64_t>(std::clamp(std::ceil(kGraphNs / pass_ns), 1.0, std::max(1.0, most)));
  g.tokens = g.passes * launches * c.q_len;
  return g;
}

}  // namespace

std::string planned_kernel(const Plan& plan) {
  const std::string name = plan.kernel();
  if (name != core::kPrefillKernels) return name;
  // "kernel     prefill_sm80 tq4/tq4, ..", and perhaps why other kinds do not serve.
  const std::string line = "\nkernel ";
  std::string text("\n");
  text += plan.explain();
  const std::size_t at = text.find_first_not_of(' ', text.find(line) + line.size());
  return text.substr(at, text.find(' ', at) - at);
}

Status measure_decode(DeviceTools& tools, BenchRow& row, FirstOutputs* of_first) {
  const BenchCase& c = row.bench_case;
  const auto needed_for = [&](int layers) {
    return 1.1 * layers * layer_bytes(c) + 3.0 * static_cast<double>(kSupplyBytes);
  };
  const double wanted = std::ceil(4.0 * static_cast<double>(tools.bench.facts().l2_bytes) / layer_bytes(c));
  auto layers = static_cast<int>(std::clamp(wanted, 1.0, 4096.0));
  if (c.op == BenchOp::step) {  // lengths advance once for all layers: so many as a model has, if they fit
    int more = std::max(layers, kStepLayers);
    while (more > layers && needed_for(more) > 0.5 * static_cast<double>(tools.bench.facts().free_bytes)) more /= 2;
    layers = std::max(layers, more);
  }
  const double needed = needed_for(layers);
  if (needed > 0.9 * static_cast<double>(tools.bench.facts().free_bytes)) {
    return {Code::out_of_memory,
            fmt::format("takes {} of the device's memory, {} are free; use fewer --keys or a smaller --batch",
                        bytes_text(needed), bytes_text(static_cast<double>(tools.bench.facts().free_bytes)))};
  }
  const Result<Growth> growth = growth_of(tools, c, layers);
  if (!growth.ok()) return growth.status();
  // Sequences of step grow, so that no other row can use them.
  std::optional<Workload> own;
  Workload* filled = nullptr;
  if (c.op == BenchOp::step) {
    tools.drop_shared();
    Result<Workload> made = tools.fill_cache(c, layers, growth->tokens);
    if (!made.ok()) return made.status();
    filled = &own.emplace(std::move(*made));
  } else {
    const Result<Workload*> shared = tools.shared_cache(c, layers);
    if (!shared.ok()) return shared.status();
    filled = *shared;
  }
  const std::vector<std::byte> mask = mask_bytes(c);
  const Result<void*> mask_memory = tools.scratch(DeviceTools::kMask, mask.size());
  if (!mask_memory.ok()) return mask_memory.status();
  if (!mask.empty()) {
    if (Status s = tools.bench.upload(*mask_memory, mask.data(), mask.size()); !s.ok()) return s;
  }
  const AttentionOptions options = attention_options(c, *mask_memory);
  const Result<Plan> plan = kvant::plan(filled->cache, std::span<const SequenceId>(filled->sequences), options);
  if (!plan.ok()) return plan.status();
  row.bytes = static_cast<double>(plan->kv_bytes());

  const std::int64_t queries = c.batch * c.q_len;
  const auto values = static_cast<std::size_t>(queries * c.q_heads * c.q_dim()),
             out_values = static_cast<std::size_t>(queries * c.q_heads * c.v_dim());
  const Result<void*> q = tools.scratch(DeviceTools::kQueries, values * 2),
                      out = tools.scratch(DeviceTools::kOut, out_values * 2);
  const Result<void*> out32 = tools.scratch(DeviceTools::kOut32, out_values * 4);
  const Result<void*> workspace = tools.scratch(DeviceTools::kWorkspace, plan->workspace_bytes() + 64);
  const Result<const float*> gain = tools.gains(DeviceTools::kQueryGains, c.q_heads, c.q_dim(), 1, 3);
  for (const Result<void*>* r : {&q, &out, &out32, &workspace}) {
    if (!r->ok()) return r->status();
  }
  if (!gain.ok()) return gain.status();
  const std::int64_t q_row = static_cast<std::int64_t>(c.q_heads) * c.q_dim();
  if (Status s = tools.bench.fill_normal(*q, queries, q_row, 0, 13, *gain); !s.ok()) return s;

  // Speed with a bf16 output, as serving has it; the check of the error with one in f32.
  Decode decode;
  decode.plan = &*plan;
  decode.layers = layers;
  decode.q = TensorView::contiguous(*q, Dtype::bf16, queries, c.q_heads, c.q_dim());
  decode.out = MutableTensorView::contiguous(*out, Dtype::bf16, queries, c.q_heads, c.v_dim());
  if (c.between_mib > 0) decode.others = &tools.bench, decode.other_bytes = c.between_mib << 20;
  decode.options.workspace = {static_cast<std::byte*>(*workspace), plan->workspace_bytes()};
  if (c.op == BenchOp::step || c.scores.fresh_keys) {
    const Result<DeviceTools::Supply> supply = tools.make_supply(c, queries);
    if (!supply.ok()) return supply.status();
    if (Status s = tools.fill(*supply, c, 0, queries); !s.ok()) return s;
    decode.keys = DeviceTools::rows_of(*supply, false, c, 0, queries);
    decode.values = DeviceTools::rows_of(*supply, true, c, 0, queries);
  }
  std::vector<float> own_keys, own_values;  // fresh ones
  for (const auto& [host, view] : {std::pair(&own_keys, &decode.keys), std::pair(&own_values, &decode.values)}) {
    if (!c.scores.fresh_keys) continue;
    decode.gives_own = true;
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(queries * row_values(c, host == &own_values)));
    if (Status s = tools.bench.download(bits.data(), view->data, bits.size() * 2); !s.ok()) return s;
    *host = widened(bits);
  }
  const auto check = [&]() -> Status {
    Decode once = decode;
    once.grows = nullptr;
    once.others = nullptr;
    once.out = MutableTensorView::of(static_cast<float*>(*out32), queries, c.q_heads, c.v_dim());
    if (Status s = Decode::enqueue(&once, 0, tools.bench.stream()); !s.ok()) return s;
    std::vector<float> got(out_values);
    std::vector<std::uint16_t> q_host(values);
    if (Status s = tools.bench.download(got.data(), *out32, out_values * 4); !s.ok()) return s;
    row.kernel = planned_kernel(*plan);
    row.products = plan->products();
    if (of_first != nullptr && !of_first->values.empty()) {
      judge(row, error_of(got, of_first->values));
      return {};
    }
    if (of_first != nullptr && of_first->are_right) {
      of_first->values = std::move(got);
      return {};
    }
    if (Status s = tools.bench.download(q_host.data(), *q, values * 2); !s.ok()) return s;
    const Result<double> error = check_attention(*filled, c, widened(q_host), got, {own_keys, own_values}, 1);
    if (of_first != nullptr) of_first->values = std::move(got);
    if (error.ok()) judge(row, *error);
    return error.status();
  };
  const bench::DeviceBench::TimedRun work{&decode, &Decode::enqueue};
  // The time of what is done between runs taken off.
  const auto time = [&](std::int64_t runs, int samples) -> Result<std::vector<double>> {
    Result<std::vector<double>> ns = tools.bench.time_graph(work, runs, samples);
    if (!ns.ok() || decode.others == nullptr) return ns;
    Result<std::vector<double>> others = tools.bench.time_graph({&decode, &Decode::read_others}, runs, samples);
    if (!others.ok()) return others.status();
    const double alone = quantile(*others, 0.5);
    for (double& x : *ns) x -= alone;
    return ns;
  };

  if (c.op == BenchOp::step) {
    // Sequences reach their lengths with the last of the recorded steps: then they can be checked.
    decode.grows = filled;
    std::vector<Append> all, later;
    for (const SequenceId id : filled->sequences) {
      decode.step.push_back({id, c.q_len});
      all.push_back({id, growth->tokens});
      later.push_back({id, growth->tokens - growth->passes * c.q_len});
    }
    if (Status s = filled->cache.reserve_ahead(all, tools.bench.stream()); !s.ok()) return s;
    Result<std::vector<double>> ns = time(layers * growth->passes, growth->samples);
    if (!ns.ok()) return ns.status();
    if (Status s = filled->cache.advance(later); !s.ok()) return s;
    if (Status s = check(); !s.ok() || !row.refusal.empty()) return s;
    return DeviceTools::finish(row, *ns);
  }

  if (Status s = check(); !s.ok() || !row.refusal.empty()) return s;
  Result<std::vector<double>> first = time(layers, 3);
  if (!first.ok()) return first.status();
  const double estimate = std::max(100.0, quantile(*first, 0.5));
  const double rounds =
      std::clamp(std::ceil(kGraphNs / (estimate * layers)), 1.0,
                 std::max(1.0, std::floor(static_cast<double>(kMostRuns) / static_cast<double>(layers))));
  const std::int64_t runs = layers * static_cast<std::int64_t>(rounds);
  Result<std::vector<double>> ns = time(runs, tools.samples_for(estimate * static_cast<double>(runs)));
  if (!ns.ok()) return ns.status();
  return DeviceTools::finish(row, *ns);
}

}  // namespace kvant::cli
