#include "cli/bench_append.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cli/bench_data.hpp"
#include "codec/layout.hpp"

namespace kvant::cli {
namespace {

constexpr std::int64_t kMostSupply = 4096;  // tokens; longer sequences repeat them

// As a square. For codes, a margin of 1.5 is enough for vectors with loud channels, far too little for a wrong code.
double side_tolerance(Format format) {
  return (codec::is_dense(format) ? 1.0 : 1.5) * codec::gaussian_error(format);
}

}  // namespace

double append_bytes(const BenchCase& c) {
  const codec::PageLayout page = bench_page(c);
  return static_cast<double>(page.code_bytes + page.scale_bytes) / kPageTokens * static_cast<double>(c.keys) *
         c.kv_heads * c.batch;
}

double append_tolerance(const FormatPair& formats) {
  return std::sqrt(std::max(side_tolerance(formats.k), side_tolerance(formats.v)));
}

Result<AppendRun> AppendRun::create(const BenchCase& c) {
  CacheConfig config;
  set_geometry(c, config);
  config.k = format_info(c.formats.k).name;
  config.v = format_info(c.formats.v).name;
  config.k_centre = c.k_centre;
  config.sink_pages = c.formats.is_dense() ? 0 : c.sink_pages;
  config.tail_pages = c.formats.is_dense() ? 0 : c.tail_pages;
  config.exact = Dtype::f32;
  config.threads = c.threads;
  config.isa = c.isa;
  Result<Cache> cache = Cache::create(config);
  if (!cache.ok()) return cache.status();
  return AppendRun(c, std::move(*cache));
}

AppendRun::AppendRun(const BenchCase& c, Cache cache) : case_(c), cache_(std::move(cache)) {
  const std::int64_t supply = std::max(std::min(c.keys, kMostSupply), c.q_len);
  keys_ = loud_vectors(supply, c.kv_heads, c.head_dim, 10, 1);
  values_ = loud_vectors(supply, c.kv_heads, c.v_dim(), 6, 2);
}

Status AppendRun::refill() {
  for (const SequenceId sequence : sequences_) {
    if (const Status status = cache_.remove(sequence); !status.ok()) return status;
  }
  sequences_.clear();
  for (int i = 0; i < case_.batch; ++i) sequences_.push_back(cache_.add_sequence());
  return {};
}

Status AppendRun::append_all() {
  const std::int64_t row = static_cast<std::int64_t>(case_.kv_heads) * case_.head_dim;
  const std::int64_t supply = static_cast<std::int64_t>(keys_.size()) / row;
  for (const SequenceId sequence : sequences_) {
    for (std::int64_t done = 0, from = 0; done < case_.keys;) {
      const std::int64_t tokens = std::min(case_.q_len, case_.keys - done);
      if (from + tokens > supply) from = 0;
      const auto view = [&](const std::vector<float>& data, int head_dim) {
        return TensorView::of(data.data() + from * case_.kv_heads * head_dim, tokens, case_.kv_heads, head_dim);
      };
      // In two calls, as on a device: so a step's layers but the first are stored, too, when they are appended.
      const Append step{sequence, tokens};
      Status status = cache_.reserve({&step, 1});
      if (status.ok())
        status = cache_.write({&sequence, 1}, 0, view(keys_, case_.head_dim), view(values_, case_.v_dim()));
      if (!status.ok()) return status;
      done += tokens;
      from += tokens;
    }
  }
  return {};
}

Result<double> AppendRun::check() {
  if (const Status status = refill(); !status.ok()) return status;
  if (const Status status = append_all(); !status.ok()) return status;
  const std::int64_t row = static_cast<std::int64_t>(case_.kv_heads) * case_.head_dim;
  // The start of the supply always comes first, in calls of q_len tokens; whole calls up to its end are in order.
  const std::int64_t supply = static_cast<std::int64_t>(keys_.size()) / row;
  const std::int64_t tokens =
      std::min(case_.keys, std::max(supply / case_.q_len * case_.q_len, std::min(case_.q_len, supply)));
  std::vector<float> keys(static_cast<std::size_t>(tokens * row)),
      values(static_cast<std::size_t>(tokens * case_.kv_heads * case_.v_dim()));
  const Status status = cache_.read(sequences_.back(), 0, 0, tokens,
                                    MutableTensorView::of(keys.data(), tokens, case_.kv_heads, case_.head_dim),
                                    MutableTensorView::of(values.data(), tokens, case_.kv_heads, case_.v_dim()));
  if (!status.ok()) return status;
  double error2 = 0, truth2 = 0;
  const auto add = [&](const std::vector<float>& decoded, const std::vector<float>& given) {
    for (std::size_t i = 0; i < decoded.size(); ++i) {
      const double difference = static_cast<double>(decoded[i]) - static_cast<double>(given[i]);
      error2 += difference * difference;
      truth2 += static_cast<double>(given[i]) * static_cast<double>(given[i]);
    }
  };
  add(keys, keys_);
  add(values, values_);
  return std::sqrt(error2 / truth2);
}

Result<double> AppendRun::time_once() {
  if (const Status status = refill(); !status.ok()) return status;
  const auto begin = std::chrono::steady_clock::now();
  const Status status = append_all();
  const auto end = std::chrono::steady_clock::now();
  if (!status.ok()) return status;
  return std::chrono::duration<double, std::nano>(end - begin).count();
}

}  // namespace kvant::cli
