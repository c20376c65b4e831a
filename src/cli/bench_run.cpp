// How time is taken. Cases are cut into groups whose caches fit in memory together. Within a group:
//   1. every case fills its cache (shared with others of the same shape) and is checked
//   2. rounds: each case runs once, then each pair of ISA and threads measures its peaks; so a busy moment of the
//      machine hits all of them alike. The first round is a warm-up. The order is turned by one from round to round.
// A cache has as many layers as it takes for 128 MB to lie between two uses of one, and runs rotate through them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include "cli/bench_append.hpp"
#include "cli/bench_data.hpp"
#include "cli/bench_peaks.hpp"
#include "cli/parallel.hpp"
#include "cli/table.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr int kMostLayers = 4096;
constexpr int kFewestRounds = 7, kMostRounds = 201;

double query_bytes(const BenchCase& c) {
  // Queries and outputs.
  return sizeof(float) * c.batch * static_cast<double>(c.q_len) * c.q_heads * (c.q_dim() + c.v_dim());
}

// Something that is timed once a round.
struct Runner {
  BenchRow row;
  std::vector<double> samples;
  std::shared_ptr<Workload> workload;  // all but append
  std::optional<Plan> plan;
  std::vector<float> q, out;
  std::vector<float> new_keys, new_values;  // step, and fresh keys
  std::vector<std::byte> mask;
  int next_layer = 0;
  std::optional<AppendRun> append;

  Status make_plan() {
    const BenchCase& c = row.bench_case;
    AttentionOptions options = attention_options(c, mask.data());
    options.threads = c.threads;
    options.isa = c.isa;
    Result<Plan> made = kvant::plan(workload->cache, workload->sequences, options);
    if (made.ok()) plan = std::move(*made);
    return made.status();
  }

  // The newest tokens are reserved, and written in no layer. In a model that is once for all layers: it is not timed.
  Status begin_step() {
    const BenchCase& c = row.bench_case;
    std::vector<Append> appends;
    for (std::size_t i = 0; i < workload->sequences.size(); ++i) {
      const SequenceId id = workload->sequences[i];
      const std::int64_t before = c.keys_of(static_cast<std::int64_t>(i)) - c.q_len;
      if (const Status status = workload->cache.truncate(id, before); !status.ok()) return status;
      appends.push_back({id, c.q_len});
    }
    if (const Status status = workload->cache.reserve(appends); !status.ok()) return status;
    return make_plan();
  }

  Result<double> time_once() {
    if (append) return append->time_once();
    const BenchCase& c = row.bench_case;
    const std::int64_t queries = c.batch * c.q_len;
    const auto in = TensorView::of(q.data(), queries, c.q_heads, c.q_dim());
    const auto to = MutableTensorView::of(out.data(), queries, c.q_heads, c.v_dim());
    const int layer = next_layer++ % workload->layers;
    if (c.op == BenchOp::step) {
      if (const Status status = begin_step(); !status.ok()) return status;
    }
    const TensorView keys = TensorView::of(new_keys.data(), queries, c.kv_heads, c.head_dim);
    const TensorView values = TensorView::of(new_values.data(), queries, c.kv_heads, c.v_dim());
    const bool fresh = c.scores.fresh_keys;
    const auto begin = std::chrono::steady_clock::now();
    if (c.op == BenchOp::step) {
      const Status written = workload->cache.write(workload->sequences, layer, keys, values);
      if (!written.ok()) return written;
    }
    const Status status = run(*plan, layer, in, to, {}, fresh ? keys : TensorView{}, fresh ? values : TensorView{});
    const auto end = std::chrono::steady_clock::now();
    if (!status.ok()) return status;
    return std::chrono::duration<double, std::nano>(end - begin).count();
  }
};

Status prepare_attention(Runner& runner) {
  BenchRow& row = runner.row;
  const BenchCase& c = row.bench_case;
  runner.mask = mask_bytes(c);
  if (const Status status = runner.make_plan(); !status.ok()) return status;
  row.bytes = static_cast<double>(runner.plan->kv_bytes());
  row.products = runner.plan->products();
  runner.q = loud_vectors(c.batch * c.q_len, c.q_heads, c.q_dim(), 1, 3);
  runner.out.resize(static_cast<std::size_t>(c.batch * c.q_len * c.q_heads * c.v_dim()));
  if (c.op == BenchOp::step || c.scores.fresh_keys) {
    runner.new_keys = loud_vectors(c.batch * c.q_len, c.kv_heads, c.head_dim, 10, 1);
    runner.new_values = loud_vectors(c.batch * c.q_len, c.kv_heads, c.v_dim(), 6, 2);
  }
  if (const Result<double> first = runner.time_once(); !first.ok()) return first.status();  // layer 0
  const Result<double> error =
      check_attention(*runner.workload, c, runner.q, runner.out, {runner.new_keys, runner.new_values});
  if (!error.ok()) return error.status();
  judge(row, *error);
  return {};
}

Status prepare_append(Runner& runner) {
  Result<AppendRun> append = AppendRun::create(runner.row.bench_case);
  if (!append.ok()) return append.status();
  runner.append.emplace(std::move(*append));
  BenchRow& row = runner.row;
  row.bytes = append_bytes(row.bench_case);
  const Result<double> error = runner.append->check();
  if (!error.ok()) return error.status();
  judge(row, *error);
  return {};
}

int layers_for(const BenchCase& c, const BenchSettings& settings) {
  if (c.op == BenchOp::append) return 1;
  const double wanted = std::ceil(static_cast<double>(settings.cold_bytes) / layer_bytes(c));
  return static_cast<int>(std::clamp(wanted, 1.0, static_cast<double>(kMostLayers)));
}

double memory_of(const BenchCase& c, int layers) {
  return 1.1 * layers * layer_bytes(c) + query_bytes(c);
}

void finish(Runner& runner, const PeakMeter& meter) {
  BenchRow& row = runner.row;
  if (!row.refusal.empty() || runner.samples.empty()) return;
  const BenchCase& c = row.bench_case;
  row.samples = static_cast<int>(runner.samples.size());
  row.median_ns = quantile(runner.samples, 0.5);
  row.spread = spread(runner.samples);
  row.ns_per_value = row.median_ns / c.stored_values();
  row.gb_per_s = row.bytes / row.median_ns;
  const BenchPeak peak = meter.peak(c.isa, c.threads);
  row.share_of_read_bandwidth = row.gb_per_s / peak.read_gb_per_s;
  if (c.op == BenchOp::append) return;
  row.gflops = c.flops() / row.median_ns;
  row.share_of_fma_peak = row.gflops / peak.fma_gflops;
}

class Group {
 public:
  Group(std::vector<BenchCase> cases, const BenchSettings& settings, double free_bytes)
      : settings_(settings), free_bytes_(free_bytes) {
    for (BenchCase& c : cases) {
      Runner runner;
      runner.row.bench_case = std::move(c);
      runners_.push_back(std::move(runner));
    }
  }

  Status prepare(const std::function<void(const std::string&)>& on_case) {
    std::vector<std::shared_ptr<Workload>> workloads;
    for (Runner& runner : runners_) {
      const BenchCase& c = runner.row.bench_case;
      const std::string name = fmt::format("{} {} D {}, {} keys", op_name(c.op), c.stored_name(), c.dims(), c.keys);
      Status status;
      if (c.op == BenchOp::append) {
        status = prepare_append(runner);
      } else {
        const auto same = std::find_if(workloads.begin(), workloads.end(),
                                       [&](const auto& w) { return is_same_workload(w->bench_case, c); });
        if (same == workloads.end()) {
          int layers = layers_for(c, settings_);
          while (layers > 1 && memory_of(c, layers) > 0.8 * free_bytes_) layers /= 2;
          Result<Workload> made = make_workload(c, layers);
          if (!made.ok()) return {made.code(), name + ": " + made.message()};
          workloads.push_back(std::make_shared<Workload>(std::move(*made)));
          runner.workload = workloads.back();
        } else {
          runner.workload = *same;
        }
        status = prepare_attention(runner);
      }
      if (!status.ok()) return {status.code(), name + ": " + status.message()};
      on_case(name);
    }
    return {};
  }

  Status measure(PeakMeter& meter) {
    std::vector<Runner*> timed;
    for (Runner& runner : runners_) {
      if (runner.row.refusal.empty()) timed.push_back(&runner);
    }
    if (timed.empty()) return {};
    const double budget_ns = settings_.seconds * 1e9 * static_cast<double>(timed.size());
    double spent_ns = 0;
    for (int round = 0; !is_done(round, spent_ns, budget_ns); ++round) {
      for (std::size_t i = 0; i < timed.size(); ++i) {
        Runner& runner = *timed[(i + static_cast<std::size_t>(round)) % timed.size()];
        const Result<double> ns = runner.time_once();
        if (!ns.ok()) return ns.status();
        if (round == 0) continue;
        spent_ns += *ns;
        runner.samples.push_back(*ns);
      }
      meter.measure();
    }
    for (Runner* runner : timed) finish(*runner, meter);
    return {};
  }

  void take_rows(std::vector<BenchRow>& rows) {
    for (Runner& runner : runners_) rows.push_back(std::move(runner.row));
  }

 private:
  [[nodiscard]] bool is_done(int round, double spent_ns, double budget_ns) const {
    if (settings_.rounds > 0) return round > settings_.rounds;
    return round > kMostRounds || (round > kFewestRounds && spent_ns > budget_ns);
  }

  BenchSettings settings_;
  double free_bytes_;
  std::vector<Runner> runners_;
};

// Consecutive cases whose caches fit together in half of the free memory; one that does not fit alone is refused.
Result<std::vector<std::vector<BenchCase>>> cut_groups(const std::vector<BenchCase>& cases,
                                                       const BenchSettings& settings, double free_bytes) {
  std::vector<std::vector<BenchCase>> groups;
  double held = 0;
  for (const BenchCase& c : cases) {
    const double least = memory_of(c, 1);
    if (least > 0.8 * free_bytes) {
      return {Code::out_of_memory,
              fmt::format("{} {}, {} keys, batch {}: takes {}, {} are free; use fewer --keys or a smaller --batch",
                          op_name(c.op), c.stored_name(), c.keys, c.batch, bytes_text(least), bytes_text(free_bytes))};
    }
    const bool is_shared = !groups.empty() && c.op != BenchOp::append &&
                           std::any_of(groups.back().begin(), groups.back().end(),
                                       [&](const BenchCase& other) { return is_same_workload(other, c); });
    const double own = is_shared ? query_bytes(c) : memory_of(c, layers_for(c, settings));
    if (groups.empty() || held + own > 0.5 * free_bytes) {
      groups.emplace_back();
      held = 0;
    }
    groups.back().push_back(c);
    held += own;
  }
  return groups;
}

}  // namespace

namespace {

constexpr std::pair<BenchOp, const char*> kOps[] = {
    {BenchOp::decode, "decode"}, {BenchOp::step, "step"}, {BenchOp::prefill, "prefill"}, {BenchOp::append, "append"}};

}  // namespace

const char* op_name(BenchOp op) {
  return std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& o) { return o.first == op; })->second;
}

std::optional<BenchOp> parse_op(const std::string& name) {
  for (const auto& [op, text] : kOps) {
    if (name == text) return op;
  }
  return {};
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const auto& [op, text] : kOps) names.emplace_back(text);
  return names;
}

void judge(BenchRow& row, double rel_l2) {
  const bool is_append = row.bench_case.op == BenchOp::append;
  const FormatPair& formats = row.bench_case.formats;
  const bool rounds_weights = row.kernel.starts_with(core::kPrefillKernels) ||
                              (row.kernel.starts_with(core::kDecodeKernels) && row.kernel != core::kDecodeKernels);
  const double allowed = is_append           ? append_tolerance(formats)
                         : row.products == 8 ? kByteTolerance
                         : rounds_weights    ? kPrefillTolerance
                                             : attention_tolerance(formats);
  row.rel_l2 = rel_l2;
  if (rel_l2 <= allowed) return;
  row.refusal =
      fmt::format("the error {:.1e} is above {:.{}e}: no speed for wrong results", rel_l2, allowed, is_append ? 1 : 0);
}

std::int64_t BenchCase::seen_keys_of(std::int64_t sequence) const {
  const std::int64_t own = keys_of(sequence);
  return scores.window > 0 ? std::min(own, scores.window + q_len - 1) : own;
}

std::string BenchCase::dims() const {
  if (latent) return fmt::format("{}+{}", v_dim(), head_dim);
  return v_dim() == head_dim ? std::to_string(head_dim) : fmt::format("{}/{}", head_dim, v_dim());
}

std::string BenchCase::stored_name() const {
  return name_with_centre(formats, k_centre);
}

double BenchCase::stored_values() const {
  const std::int64_t seen = seen_keys_of(0) + (batch - 1) * seen_keys_of(1);
  return static_cast<double>(seen) * kv_heads * (head_dim + v_dim());
}

double BenchCase::flops() const {
  // The query at position i sees i + 1 keys, or as many as the window has.
  const auto pairs_of = [&](std::int64_t sequence) {
    const std::int64_t own = keys_of(sequence), first = own - q_len + 1;
    const std::int64_t growing = scores.window > 0 ? std::clamp<std::int64_t>(scores.window - first, 0, q_len) : q_len;
    return static_cast<double>(growing) * (static_cast<double>(first) + static_cast<double>(growing - 1) / 2) +
           static_cast<double>(q_len - growing) * static_cast<double>(scores.window);
  };
  return 2.0 * q_heads * (q_dim() + v_dim()) * (pairs_of(0) + (batch - 1) * pairs_of(1));
}

Result<BenchResult> run_bench(const std::vector<BenchCase>& cases, const BenchSettings& settings,
                              const std::function<void(double, const std::string&)>& on_progress) {
  const Machine machine = describe_machine();
  PeakMeter meter(machine);
  for (const BenchCase& c : cases) {
    const Result<const core::Kernels*> kernels = find_isa(c.isa);
    if (!kernels.ok()) return kernels.status();
    meter.add(*kernels, c.threads);
  }
  const Machine now = describe_machine();
  const double free_bytes = now.available_bytes > 0 ? static_cast<double>(now.available_bytes) : 4e9;
  const Result<std::vector<std::vector<BenchCase>>> groups = cut_groups(cases, settings, free_bytes);
  if (!groups.ok()) return groups.status();

  BenchResult result;
  for (const std::vector<BenchCase>& group_cases : *groups) {
    Group group(group_cases, settings, free_bytes);
    const Status prepared = group.prepare([&](const std::string& what) { on_progress(0.7, what); });
    if (!prepared.ok()) return prepared;
    on_progress(0, "timing");
    if (const Status status = group.measure(meter); !status.ok()) return status;
    on_progress(0.3 * static_cast<double>(group_cases.size()), "timing");
    group.take_rows(result.rows);
  }
  result.peaks = meter.peaks();
  return result;
}

}  // namespace kvant::cli
