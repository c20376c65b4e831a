// The figures of one layer.
//   truth     float64 attention of every query over the exact keys and values (kvant::reference), outputs and weights
//   replay    the same queries over a cache in use (eval_replay.hpp): outputs of the real kernels
//   weights   the run does not expose them, so they come from the decoded keys (Cache::read), softmax in float64
//   time      the last query over each finished cache, in turn, so that a noisy moment hits all of them alike
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>

#include "cli/eval.hpp"
#include "cli/eval_replay.hpp"
#include "cli/parallel.hpp"
#include "cli/table.hpp"
#include "codec/layout.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

struct Truth {
  std::vector<std::vector<double>> out;      // a query: [q_heads, v_head_dim]
  std::vector<std::vector<double>> weights;  // a query: [q_heads, visible keys]
};

// The file keeps heads outermost, the reference wants them inside.
std::vector<double> rows_first(const std::vector<float>& data, std::int64_t heads, std::int64_t rows,
                               std::int64_t dim) {
  std::vector<double> out(data.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t d = 0; d < dim; ++d)
        out[(r * heads + h) * dim + d] = static_cast<double>(data[(h * rows + r) * dim + d]);
    }
  }
  return out;
}

Truth compute_truth(const io::CapturedLayer& c, int threads) {
  const std::vector<double> q = rows_first(c.q, c.q_heads, c.queries, c.head_dim);
  const std::vector<double> k = rows_first(c.k, c.kv_heads, c.positions, c.head_dim);
  const std::vector<double> v = rows_first(c.v, c.kv_heads, c.positions, c.v_head_dim);
  const auto q_row = static_cast<std::size_t>(c.q_heads) * static_cast<std::size_t>(c.head_dim);
  const auto k_row = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(c.head_dim);
  const auto v_row = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(c.v_head_dim);
  AttentionOptions options;
  options.q_heads = c.q_heads;
  options.scale = c.scale;
  Truth truth;
  truth.out.resize(static_cast<std::size_t>(c.queries));
  truth.weights.resize(static_cast<std::size_t>(c.queries));
  parallel_for(threads, c.queries, [&](std::int64_t query) {
    const auto i = static_cast<std::size_t>(query);
    const std::int64_t position = c.positions - c.queries + query;
    const std::int64_t first = first_visible(c, position);
    const std::int64_t count = position + 1 - first;
    reference::Problem problem;
    problem.q_len = 1;
    problem.kv_len = count;
    problem.q_heads = c.q_heads;
    problem.kv_heads = c.kv_heads;
    problem.head_dim = c.head_dim;
    problem.q = std::span(q).subspan(i * q_row, q_row);
    problem.v_head_dim = c.v_head_dim;
    const auto visible = [&](const std::vector<double>& rows, std::size_t row) {
      return std::span(rows).subspan(static_cast<std::size_t>(first) * row, static_cast<std::size_t>(count) * row);
    };
    problem.k = visible(k, k_row);
    problem.v = visible(v, v_row);
    truth.out[i] = reference::attention(problem, options, &truth.weights[i]).out;
  });
  return truth;
}

// Eight sums, because a single one would wait for each addition.
double dot(const float* a, const float* b, int n) {
  double sum[8] = {};
  for (int i = 0; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sum[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  }
  double total = 0;
  for (int i = n - n % 8; i < n; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (const double s : sum) total += s;
  return total;
}

// The part of one query row (one head) in the layer's figures.
struct RowFigures {
  double error2 = 0, truth2 = 0;           // the output's
  double kernel_error2 = 0, decoded2 = 0;  // the output's against attention over the decoded vectors
  double cosine = 1;
  double kl = 0;
  bool is_top1_same = true;
};

double cosine(const float* a, const double* b, int n) {
  double ab = 0, aa = 0, bb = 0;
  for (int d = 0; d < n; ++d) {
    ab += static_cast<double>(a[d]) * b[d];
    aa += static_cast<double>(a[d]) * static_cast<double>(a[d]);
    bb += b[d] * b[d];
  }
  if (aa == 0 && bb == 0) return 1;
  return aa == 0 || bb == 0 ? 0 : ab / std::sqrt(aa * bb);
}

RowFigures compare_row(const io::CapturedLayer& c, const Truth& truth, const Replay& replay, std::int64_t query,
                       int head, const float* out) {
  const std::int64_t position = c.positions - c.queries + query;
  const std::int64_t first = first_visible(c, position);
  const std::int64_t count = position + 1 - first;
  const std::int64_t kv_head = head / (c.q_heads / c.kv_heads);
  const std::int64_t k_row = std::int64_t{c.kv_heads} * c.head_dim, v_row = std::int64_t{c.kv_heads} * c.v_head_dim;
  const float* q = c.q.data() + (head * c.queries + query) * c.head_dim;
  const float* keys = replay.keys().data() + first * k_row + kv_head * c.head_dim;
  const float* values = replay.values().data() + first * v_row + kv_head * c.v_head_dim;
  const double* exact_weights = truth.weights[static_cast<std::size_t>(query)].data() + head * count;
  const double* exact_out = truth.out[static_cast<std::size_t>(query)].data() + head * c.v_head_dim;

  std::vector<double> scores(static_cast<std::size_t>(count));
  for (std::int64_t j = 0; j < count; ++j)
    scores[static_cast<std::size_t>(j)] = c.scale * dot(q, keys + j * k_row, c.head_dim);
  const auto largest = std::max_element(scores.begin(), scores.end());
  double denominator = 0;
  for (const double s : scores) denominator += std::exp(s - *largest);
  const double lse = *largest + std::log(denominator);

  RowFigures f;
  f.is_top1_same = largest - scores.begin() == std::max_element(exact_weights, exact_weights + count) - exact_weights;
  std::vector<double> decoded_out(static_cast<std::size_t>(c.v_head_dim));
  for (std::int64_t j = 0; j < count; ++j) {
    const double log_weight = scores[static_cast<std::size_t>(j)] - lse;
    const double p = exact_weights[j];
    if (p > 0) f.kl += p * (std::log(p) - log_weight);
    const double weight = std::exp(log_weight);
    if (weight < 1e-18) continue;  // cannot change a figure, and values are most of the work
    const float* value = values + j * v_row;
    for (int d = 0; d < c.v_head_dim; ++d)
      decoded_out[static_cast<std::size_t>(d)] += weight * static_cast<double>(value[d]);
  }
  f.kl = std::max(f.kl, 0.0);  // rounding leaves -1e-17 where nothing differs
  for (int d = 0; d < c.v_head_dim; ++d) {
    const double decoded = decoded_out[static_cast<std::size_t>(d)];
    const double value = static_cast<double>(out[d]);
    f.error2 += (value - exact_out[d]) * (value - exact_out[d]);
    f.truth2 += exact_out[d] * exact_out[d];
    f.kernel_error2 += (value - decoded) * (value - decoded);
    f.decoded2 += decoded * decoded;
  }
  f.cosine = cosine(out, exact_out, c.v_head_dim);
  return f;
}

double relative(double error2, double reference2) {
  if (error2 == 0) return 0;
  return reference2 > 0 ? std::sqrt(error2 / reference2) : std::numeric_limits<double>::infinity();
}

Status measure_quality(const EvalLayer& layer, const Truth& truth, Replay& replay, EvalRow& row) {
  const io::CapturedLayer& c = layer.captured;
  std::vector<float> out(static_cast<std::size_t>(c.q_heads) * static_cast<std::size_t>(c.v_head_dim));
  RowFigures sum;
  std::int64_t top1 = 0;
  for (std::int64_t query = 0; query < c.queries; ++query) {
    if (const Status status = replay.attend(query, out.data()); !status.ok()) return status;
    for (int head = 0; head < c.q_heads; ++head) {
      const RowFigures f = compare_row(c, truth, replay, query, head, out.data() + head * c.v_head_dim);
      sum.error2 += f.error2;
      sum.truth2 += f.truth2;
      sum.kernel_error2 += f.kernel_error2;
      sum.decoded2 += f.decoded2;
      sum.kl += f.kl;
      row.kl_max = std::max(row.kl_max, f.kl);
      row.cosine_min = std::min(row.cosine_min, f.cosine);
      top1 += f.is_top1_same ? 1 : 0;
    }
  }
  const double rows = static_cast<double>(c.queries) * c.q_heads;
  row.rel_l2 = relative(sum.error2, sum.truth2);
  row.kernel_rel_l2 = relative(sum.kernel_error2, sum.decoded2);
  row.kl_mean = sum.kl / rows;
  row.top1 = static_cast<double>(top1) / rows;
  return {};
}

void measure_memory(const io::CapturedLayer& c, const Replay& replay, EvalRow& row) {
  const CacheMemory memory = replay.cache().memory();
  const double values = static_cast<double>(memory.tokens) * c.kv_heads * (c.head_dim + c.v_head_dim);
  row.cache_bytes = memory.total();
  row.bf16_bytes = static_cast<std::int64_t>(values) * 2;
  row.bits_per_value = static_cast<double>(row.cache_bytes) * 8 / values;
  const codec::PageLayout page = codec::page_layout(
      row.formats.k, row.formats.v, codec::HeadDims{stored_head_dim(c.head_dim), stored_head_dim(c.v_head_dim)}, 1,
      row.k_centre == KeyCentre::page);
  row.page_bits = page.block_bytes * 8.0 / (double{kPageTokens} * (c.head_dim + c.v_head_dim));
}

struct Times {
  double median_ns = 0, spread = 0;
};

// Times of each replay's last query; the replays take turns.
Result<std::vector<Times>> measure_time(std::vector<Replay>& replays) {
  constexpr int kWarmUp = 2, kFewest = 11, kMost = 301;
  constexpr double kBudgetNs = 1.5e9;
  std::vector<std::vector<double>> samples(replays.size());
  double spent = 0;
  for (int round = 0; round < kWarmUp + kMost && (round < kWarmUp + kFewest || spent < kBudgetNs); ++round) {
    for (std::size_t i = 0; i < replays.size(); ++i) {
      const Result<double> ns = replays[i].time_once();
      if (!ns.ok()) return ns.status();
      spent += *ns;
      if (round >= kWarmUp) samples[i].push_back(*ns);
    }
  }
  std::vector<Times> times;
  for (auto& own : samples) times.push_back({quantile(own, 0.5), spread(own)});
  return times;
}

Status replay_variant(const EvalLayer& layer, const Variant& variant, const Truth& truth, const EvalSettings& settings,
                      std::optional<Replay>& replay, EvalRow& row) {
  Result<Replay> made = Replay::create(layer, variant, settings);
  if (!made.ok()) return made.status();
  replay = std::move(*made);
  row.file = layer.file;
  row.layer_name = layer.captured.name;
  row.layer = layer.captured.layer;
  row.formats = variant.formats;
  row.has_exact_ends = variant.has_exact_ends;
  row.k_centre = variant.k_centre;
  row.basis = replay->basis();
  if (const Status status = measure_quality(layer, truth, *replay, row); !status.ok()) return status;
  if (const Status status = replay->finish(); !status.ok()) return status;
  measure_memory(layer.captured, *replay, row);
  return {};
}

// As many as there are threads and the decoded keys and values leave room for.
int replays_at_once(const io::CapturedLayer& c, const EvalSettings& settings, const Machine& machine) {
  const double bytes = 4.0 * static_cast<double>(c.k.size() + c.v.size());
  if (machine.available_bytes == 0 || bytes == 0) return settings.threads;
  const double room = 0.4 * static_cast<double>(machine.available_bytes) / bytes;
  return std::clamp(static_cast<int>(std::min(room, 1e6)), 1, settings.threads);
}

std::string where(const EvalLayer& layer, const Variant& variant) {
  return fmt::format("{}: {}, {} {} exact ends: ", layer.file, layer.captured.name, variant.formats.name(),
                     variant.has_exact_ends ? "with" : "without");
}

}  // namespace

Result<std::vector<EvalRow>> evaluate_layer(const EvalLayer& layer, const std::vector<Variant>& variants,
                                            const EvalSettings& settings,
                                            const std::function<void(const std::string&)>& on_progress) {
  const io::CapturedLayer& c = layer.captured;
  const double weights = static_cast<double>(c.queries) * c.q_heads * static_cast<double>(c.positions) * sizeof(double);
  const Machine machine = describe_machine();
  if (machine.available_bytes > 0 && weights > 0.5 * static_cast<double>(machine.available_bytes)) {
    return {Code::out_of_memory,
            fmt::format("{}: {}: the exact attention weights of {} queries, {} heads and {} keys take {}, {} are free; "
                        "capture fewer queries",
                        layer.file, c.name, c.queries, c.q_heads, c.positions, bytes_text(weights),
                        bytes_text(static_cast<double>(machine.available_bytes)))};
  }
  const Truth truth = compute_truth(c, settings.threads);

  // Replays run side by side, each on one thread (the number of threads does not change a bit of what they compute):
  // threads inside of every decode step would mostly wait for each other.
  struct Slot {
    std::optional<Replay> replay;
    EvalRow row;
    Status status;
  };
  std::vector<Slot> slots(variants.size());
  std::mutex progress;
  parallel_for(replays_at_once(c, settings, machine), static_cast<std::int64_t>(variants.size()), [&](std::int64_t i) {
    Slot& slot = slots[static_cast<std::size_t>(i)];
    const Variant& variant = variants[static_cast<std::size_t>(i)];
    slot.status = replay_variant(layer, variant, truth, settings, slot.replay, slot.row);
    const std::lock_guard lock(progress);
    on_progress(fmt::format("{} {}", c.name, variant.formats.name()));
  });
  std::vector<EvalRow> rows;
  std::vector<Replay> replays;
  std::size_t f16 = variants.size();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const Status& status = slots[i].status;
    if (!status.ok()) return {status.code(), where(layer, variants[i]) + status.message()};
    if (variants[i].formats == FormatPair{Format::f16, Format::f16}) f16 = i;
    rows.push_back(std::move(slots[i].row));
    replays.push_back(std::move(*slots[i].replay));
  }

  if (f16 == variants.size()) {  // times are relative to it, so it runs along even when nobody asked for its errors
    const Variant variant{{Format::f16, Format::f16}, true};
    Result<Replay> replay = Replay::create(layer, variant, settings);
    Status status = replay.ok() ? replay->finish() : replay.status();
    if (!status.ok()) return {status.code(), where(layer, variant) + status.message()};
    replays.push_back(std::move(*replay));
  }
  const Result<std::vector<Times>> times = measure_time(replays);
  if (!times.ok()) return {times.code(), fmt::format("{}: {}: {}", layer.file, c.name, times.message())};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].ns_per_token = (*times)[i].median_ns;
    rows[i].time_to_f16 = (*times)[i].median_ns / (*times)[f16].median_ns;
    rows[i].spread = (*times)[i].spread;
    rows[i].f16_spread = (*times)[f16].spread;
  }
  return rows;
}

}  // namespace kvant::cli
