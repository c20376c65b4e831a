#include "cli/bench_data.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/logits.hpp"
#include "cli/parallel.hpp"
#include "codec/layout.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::cli {

double Random::uniform() {  // splitmix64
  state_ += 0x9E3779B97F4A7C15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
}

float Random::normal() {  // Box-Muller
  if (has_spare_) {
    has_spare_ = false;
    return static_cast<float>(spare_);
  }
  const double radius = std::sqrt(-2 * std::log(uniform()));
  const double angle = 2 * std::numbers::pi * uniform();
  spare_ = radius * std::sin(angle);
  has_spare_ = true;
  return static_cast<float>(radius * std::cos(angle));
}

std::vector<float> loud_vectors(std::int64_t tokens, int heads, int head_dim, double loudness, std::uint64_t seed) {
  Random random(seed);
  const auto row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_dim);
  std::vector<float> gain(row, 1.0f);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < std::max(1, head_dim / 64); ++i) {
      const auto channel = static_cast<std::size_t>(random.uniform() * head_dim);
      gain[static_cast<std::size_t>(h) * static_cast<std::size_t>(head_dim) + channel] =
          static_cast<float>(loudness * (0.5 + random.uniform()));
    }
  }
  std::vector<float> data(static_cast<std::size_t>(tokens) * row);
  parallel_for(core::hardware_threads(), tokens, [&](std::int64_t t) {
    Random own(seed ^ (static_cast<std::uint64_t>(t) * 0xD1342543DE82EF95u + 1));
    float* out = data.data() + static_cast<std::size_t>(t) * row;
    for (std::size_t i = 0; i < row; ++i) out[i] = own.normal() * gain[i];
  });
  return data;
}

bool is_same_workload(const BenchCase& a, const BenchCase& b) {
  return (a.op == BenchOp::step) == (b.op == BenchOp::step) && a.formats == b.formats && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.v_dim() == b.v_dim() && a.latent == b.latent && a.batch == b.batch &&
         a.keys == b.keys && a.first_keys == b.first_keys && a.sink_pages == b.sink_pages &&
         a.tail_pages == b.tail_pages && a.k_centre == b.k_centre;
}

codec::PageLayout bench_page(const BenchCase& c) {
  return codec::page_layout(c.formats.k, c.formats.v,
                            codec::HeadDims{stored_head_dim(c.head_dim), stored_head_dim(c.v_dim())}, 1,
                            c.k_centre == KeyCentre::page);
}

double layer_bytes(const BenchCase& c) {
  const codec::PageLayout page = bench_page(c);
  const double exact_bytes = 2.0 * kPageTokens * (page.k.head_dim + page.v.head_dim);  // bf16
  const auto bytes_of = [&](std::int64_t keys) {
    const double pages = std::ceil(static_cast<double>(keys) / kPageTokens);
    const double exact_pages = c.formats.is_dense() ? 0 : std::min<double>(pages, c.sink_pages + c.tail_pages + 2);
    return pages * page.block_bytes + exact_pages * exact_bytes;
  };
  return (bytes_of(c.keys_of(0)) + (c.batch - 1) * bytes_of(c.keys)) * c.kv_heads;
}

void set_geometry(const BenchCase& c, CacheConfig& config) {
  config.kv_heads = c.kv_heads;
  config.head_dim = c.head_dim;
  config.v_head_dim = c.latent ? 0 : c.v_head_dim;
  if (c.latent) config.latent = c.v_dim(), config.rope = c.head_dim;
}

CacheConfig cache_config(const BenchCase& c, int layers) {
  CacheConfig config;
  config.layers = layers;
  set_geometry(c, config);
  config.k = format_info(c.formats.k).name;
  config.v = format_info(c.formats.v).name;
  config.k_centre = c.k_centre;
  config.sink_pages = c.formats.is_dense() ? 0 : c.sink_pages;
  config.tail_pages = c.formats.is_dense() ? 0 : c.tail_pages;
  config.exact = Dtype::bf16;
  return config;
}

BenchStep bench_step(const Workload& w, std::int64_t done, std::int64_t tokens, std::int64_t left_out) {
  BenchStep step;
  for (std::size_t i = 0; i < w.sequences.size(); ++i) {
    const std::int64_t left = w.bench_case.keys_of(static_cast<std::int64_t>(i)) - left_out - done;
    if (left <= 0) continue;
    step.appends.push_back({w.sequences[i], std::min(tokens, left)});
    step.sequences.push_back(w.sequences[i]);
    step.rows += std::min(tokens, left);
  }
  return step;
}

Result<Workload> make_workload(const BenchCase& c, int layers) {
  Result<Cache> cache = Cache::create(cache_config(c, layers));
  if (!cache.ok()) return cache.status();
  Workload w{c, std::move(*cache), {}, layers};
  for (int i = 0; i < c.batch; ++i) w.sequences.push_back(w.cache.add_sequence());

  // All layers hold the same vectors, and sequences longer than the supply repeat it: only the memory must differ.
  constexpr std::int64_t kSupplyValues = std::int64_t{1} << 24;
  const std::int64_t row = std::int64_t{c.kv_heads} * std::max(c.head_dim, c.v_dim());
  const std::int64_t step =
      std::min(c.most_keys(), std::max<std::int64_t>(1, std::min<std::int64_t>(4096, kSupplyValues / row) / c.batch));
  const std::int64_t supply = std::max(step * c.batch, std::min(c.all_keys(), kSupplyValues / row));
  const std::vector<float> keys = loud_vectors(supply, c.kv_heads, c.head_dim, 10, 1);
  const std::vector<float> values = loud_vectors(supply, c.kv_heads, c.v_dim(), 6, 2);
  std::int64_t from = 0;
  for (std::int64_t done = 0; done < c.most_keys(); done += step) {
    const BenchStep next = bench_step(w, done, step);
    if (from + next.rows > supply) from = 0;
    if (const Status status = w.cache.reserve(next.appends); !status.ok()) return status;
    const auto view = [&](const std::vector<float>& data, int head_dim) {
      return TensorView::of(data.data() + from * c.kv_heads * head_dim, next.rows, c.kv_heads, head_dim);
    };
    const TensorView k = view(keys, c.head_dim), v = view(values, c.v_dim());
    for (int layer = 0; layer < layers; ++layer) {
      if (const Status status = w.cache.write(next.sequences, layer, k, v); !status.ok()) return status;
    }
    from += next.rows;
  }
  return w;
}

double attention_tolerance(const FormatPair& formats) {
  return formats == FormatPair{Format::f32, Format::f32} ? 1e-5 : 2e-4;
}

namespace {

// One query of one head, as an online softmax over chunks of keys.
struct SampledRow {
  const BenchCase* c;
  int head;
  std::int64_t query;  // its number in its sequence
  const float* q;
  const float* out;
  double max = -INFINITY;
  double sum = 0;
  std::vector<double> acc;

  // Adds those keys at positions `begin` and on that the query sees.
  void add(const float* keys, const float* values, std::int64_t begin, std::int64_t end, std::int64_t own_keys) {
    const int dim = c->head_dim, v_dim = c->v_dim();
    const float slope = c->scores.alibi ? alibi_slope(*c, head) : 0.0f;
    const base::LogitRule<double> rule{.scale = 1 / std::sqrt(static_cast<double>(c->q_dim())),
                                       .softcap = c->scores.softcap,
                                       .slopes = c->scores.alibi ? &slope : nullptr};
    const std::int64_t position = own_keys - c->q_len + query;
    const std::int64_t first = c->scores.window > 0 ? position - c->scores.window + 1 : 0;
    for (std::int64_t j = std::max<std::int64_t>(0, first - begin); j < std::min(end, position + 1) - begin; ++j) {
      const float* k = keys + j * c->kv_heads * dim;
      const float* v = values + j * c->kv_heads * v_dim;
      double score = 0;
      const float* of_key = q;  // behind those that latents are multiplied with
      for (int d = 0; c->latent && d < v_dim; ++d, ++of_key)
        score += static_cast<double>(*of_key) * static_cast<double>(v[d]);
      for (int d = 0; d < dim; ++d) score += static_cast<double>(of_key[d]) * static_cast<double>(k[d]);
      score *= rule.scale;
      base::transform_logits<base::ExactVerbs>(
          rule, [&] { return slope; },
          [&](const auto& change) {
            score = change(score, [&] { return static_cast<double>(position - begin - j); });
          });
      if (score > max) {
        const double shrink = std::exp(max - score);
        sum *= shrink;
        for (double& a : acc) a *= shrink;
        max = score;
      }
      const double weight = std::exp(score - max);
      sum += weight;
      for (int d = 0; d < v_dim; ++d) acc[static_cast<std::size_t>(d)] += weight * static_cast<double>(v[d]);
    }
  }
};

std::vector<std::int64_t> spread_over(std::int64_t count, std::int64_t wanted) {
  std::vector<std::int64_t> picked;
  for (std::int64_t i = 0; i < std::min(wanted, count); ++i) {
    picked.push_back(wanted == 1
                         ? count - 1
                         : i * (count - 1) / (std::min(wanted, count) - 1 > 0 ? std::min(wanted, count) - 1 : 1));
  }
  return picked;
}

}  // namespace

std::vector<std::byte> mask_bytes(const BenchCase& c) {
  if (!c.scores.mask) return {};
  const auto elements = static_cast<std::size_t>(c.q_len * c.most_keys());
  // Visible is 1 for a boolean and 0 for numbers.
  const bool is_boolean = *c.scores.mask == Dtype::boolean;
  return std::vector<std::byte>(elements * dtype_size(*c.scores.mask), std::byte{is_boolean});
}

Result<double> check_attention(const Workload& workload, const BenchCase& c, const std::vector<float>& q,
                               const std::vector<float>& out, const OwnVectors& own, std::int64_t most_sequences) {
  constexpr double kRowBudget = 4e8;  // multiply-adds: about a second on one core
  const double row_cost = static_cast<double>(c.most_keys()) * (c.head_dim + c.v_dim());
  const auto rows_wanted = static_cast<std::int64_t>(std::clamp(kRowBudget / row_cost, 4.0, 64.0));
  const std::vector<std::int64_t> batches = spread_over(c.batch, std::min(most_sequences, rows_wanted));
  const std::vector<std::int64_t> heads = spread_over(c.q_heads, std::min<std::int64_t>(4, rows_wanted));
  const std::int64_t queries_wanted = rows_wanted / static_cast<std::int64_t>(batches.size() * heads.size());
  const std::vector<std::int64_t> queries = spread_over(c.q_len, std::max<std::int64_t>(1, queries_wanted));
  const std::int64_t k_row = std::int64_t{c.kv_heads} * c.head_dim, v_row = std::int64_t{c.kv_heads} * c.v_dim();
  const std::int64_t chunk = std::max<std::int64_t>(64, (std::int64_t{1} << 22) / std::max(k_row, v_row));
  std::vector<float> keys(static_cast<std::size_t>(chunk * k_row)), values(static_cast<std::size_t>(chunk * v_row));

  double error2 = 0, truth2 = 0;
  for (const std::int64_t b : batches) {
    const std::int64_t own_keys = c.keys_of(b);
    std::vector<SampledRow> rows;
    for (const std::int64_t head : heads) {
      for (const std::int64_t query : queries) {
        const std::int64_t at = (b * c.q_len + query) * c.q_heads + head;
        rows.push_back({&c, static_cast<int>(head), query, q.data() + at * c.q_dim(), out.data() + at * c.v_dim(),
                        -INFINITY, 0, std::vector<double>(static_cast<std::size_t>(c.v_dim()))});
      }
    }
    for (std::int64_t begin = 0; begin < own_keys; begin += chunk) {
      const std::int64_t end = std::min(begin + chunk, own_keys);
      const Status status =
          workload.cache.read(workload.sequences[static_cast<std::size_t>(b)], 0, begin, end,
                              MutableTensorView::of(keys.data(), end - begin, c.kv_heads, c.head_dim),
                              MutableTensorView::of(values.data(), end - begin, c.kv_heads, c.v_dim()), {}, c.q_len);
      if (!status.ok()) return status;
      const std::int64_t cached = own_keys - c.q_len;
      for (std::int64_t t = std::max(begin, cached); c.scores.fresh_keys && t < end; ++t) {
        const std::int64_t from = b * c.q_len + t - cached, to = t - begin;
        std::copy_n(own.keys.begin() + from * k_row, k_row, keys.begin() + to * k_row);
        std::copy_n(own.values.begin() + from * v_row, v_row, values.begin() + to * v_row);
      }
      parallel_for(core::hardware_threads(), static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
        SampledRow& row = rows[static_cast<std::size_t>(i)];
        const std::int64_t kv_head = row.head / (c.q_heads / c.kv_heads);
        row.add(keys.data() + kv_head * c.head_dim, values.data() + kv_head * c.v_dim(), begin, end, own_keys);
      });
    }
    for (const SampledRow& row : rows) {
      for (int d = 0; d < c.v_dim(); ++d) {
        const double truth = row.acc[static_cast<std::size_t>(d)] / row.sum;
        const double difference = static_cast<double>(row.out[d]) - truth;
        error2 += difference * difference;
        truth2 += truth * truth;
      }
    }
  }
  return std::sqrt(error2 / truth2);
}

}  // namespace kvant::cli
