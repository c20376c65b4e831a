#include "support/world.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/backend.hpp"
#include "core/cache/impl.hpp"
#include "support/bases.hpp"
#include "support/half.hpp"

namespace kvant::test {

void set_levels(CacheConfig& c) {
  const auto levels = [](const std::string& format) {
    std::vector<float> all;
    if (!format.starts_with("lut")) return all;
    const int count = 1 << (format.back() - '0');
    for (int i = 0; i < count; ++i) {
      const double u = 2.0 * (i + 0.6) / count - 1;
      all.push_back(static_cast<float>(1.5 * u + u * u * u));
    }
    return all;
  };
  c.k_levels = levels(c.k);
  c.v_levels = levels(c.v);
}

CacheConfig cache_config(const WorldSpec& spec, CacheConfig c) {
  c.layers = spec.layers;
  c.kv_heads = spec.kv_heads;
  c.head_dim = spec.head_dim;
  c.v_head_dim = spec.v_head_dim;
  if (spec.latent) {
    c.rope = spec.head_dim;
    c.latent = spec.v_head_dim > 0 ? spec.v_head_dim : spec.head_dim;
    c.v_head_dim = 0;
  }
  c.k = spec.k;
  c.v = spec.v;
  c.sink_pages = spec.sink_pages;
  c.tail_pages = spec.tail_pages;
  c.exact = spec.exact;
  // Exact pages hold the rows as they are appended; a device takes no f32.
  if (!c.exact && spec.input_dtype == Dtype::f32 && c.device.empty()) c.exact = Dtype::f32;
  c.window = spec.window;
  c.window_sinks = spec.window_sinks;
  if (spec.key_bases || spec.value_bases) {
    c.bases = random_bases(spec.layers, spec.kv_heads, spec.head_dim, spec.seed, spec.value_bases, spec.v_head_dim);
    if (spec.key_bases) c.k_basis = BasisKind::calibrated;
    if (spec.value_bases) c.v_basis = BasisKind::calibrated;
  }
  c.k_centre = spec.page_centres ? KeyCentre::page : KeyCentre::none;
  set_levels(c);
  if (spec.adjust) spec.adjust(c);
  return c;
}

bool is_float_format(const std::string& name) {
  return name == "f32" || name == "f16" || name == "bf16" || name == "fp8";
}

const std::vector<std::string>& available_isas() {
  static const std::vector<std::string> names = [] {
    if (const char* name = std::getenv("KVANT_TEST_ISA")) return std::vector<std::string>{name};
    std::vector<std::string> available;
    for (const IsaInfo& isa : isas()) {
      if (isa.available && std::string_view(isa.name) != "emulated") available.emplace_back(isa.name);
    }
    return available;
  }();
  return names;
}

// Whether many rows may go through it, with this instruction set; empty: that which a plan chooses.
static bool has_matrix_unit(const std::string& isa) {
  const auto all = core::all_kernels();
  const auto used =
      std::ranges::find_if(all, [&](const core::Kernels* k) { return isa.empty() ? k->available() : isa == k->name; });
  return used != all.end() && (*used)->has_matrix;
}

Status append_rows(Cache& cache, SequenceId sequence, const Qkv& x, std::int64_t begin, std::int64_t end, Dtype dtype,
                   int layer) {
  const CacheConfig& c = cache.config();
  const auto packed = [&](const std::vector<float>& rows, int head_dim) {
    const auto width = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(head_dim);
    return pack_as(dtype, std::span(rows).subspan(static_cast<std::size_t>(begin) * width,
                                                  static_cast<std::size_t>(end - begin) * width));
  };
  const std::vector<std::byte> k = packed(x.k, c.head_dim), v = packed(x.v, c.v_dim());
  return cache.append(sequence, layer, TensorView::contiguous(k.data(), dtype, end - begin, c.kv_heads, c.head_dim),
                      TensorView::contiguous(v.data(), dtype, end - begin, c.kv_heads, c.v_dim()));
}

Result<Attended> try_attend(const Cache& cache, const std::vector<SequenceId>& ids, const AttentionOptions& options,
                            const std::vector<float>& q, const std::vector<float>& sink_logits, int layer,
                            const TensorView& keys, const TensorView& values) {
  const Result<Plan> planned = plan(cache, std::span<const SequenceId>(ids), options);
  if (!planned) return planned.status();
  const std::int64_t rows = planned->total_queries();
  const int dim = cache.config().q_dim(), v_dim = cache.config().v_dim();
  Attended a;
  // NaN, so that an element the kernel forgets to write cannot pass.
  a.lse.assign(q.size() / static_cast<std::size_t>(dim), NAN);
  a.out.assign(a.lse.size() * static_cast<std::size_t>(v_dim), NAN);
  RunOptions run_options;
  run_options.lse = a.lse.data();
  run_options.sink_logits = sink_logits.empty() ? nullptr : sink_logits.data();
  const Status status =
      run(*planned, layer, TensorView::of(q.data(), rows, options.q_heads, dim),
          MutableTensorView::of(a.out.data(), rows, options.q_heads, v_dim), run_options, keys, values);
  if (!status) return status;
  a.explain = planned->explain();
  a.splits = planned->splits();
  return a;
}

SequenceId grow_sequence(Cache& cache, const WorldSpec& spec, const Lengths& lengths, const Qkv& x,
                         const AppendRows& append_to_layer) {
  Qkv other;
  if (spec.layers > 1) {
    other = spec.v_head_dim == 0 ? Qkv{x.q, x.v, x.k} : x;
    if (spec.v_head_dim > 0) std::reverse(other.k.begin(), other.k.end()), std::reverse(other.v.begin(), other.v.end());
  }
  const auto append = [&](SequenceId id, std::int64_t begin, std::int64_t end) {
    for (int layer = 0; layer < spec.layers; ++layer) {
      append_to_layer(id, layer, layer == spec.layer ? x : other, begin, end);
    }
  };
  SequenceId id = cache.add_sequence();
  const std::int64_t kv_len = lengths.kv_len;
  const bool is_forked = spec.forked && kv_len > 1;
  std::int64_t last = kv_len - (is_forked ? 1 : 0);  // from here on once the parent is gone
  // A window keeps what queries of the last append see.
  const bool keeps_last = spec.window > 0 && (is_forked || !spec.chunks.empty());
  if (keeps_last) last = kv_len - lengths.q_len;
  std::size_t appends = 0;
  const auto fill = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t at = from; at < to; ++appends) {
      std::int64_t end = to;
      if (!spec.chunks.empty()) end = std::min(end, at + spec.chunks[appends % spec.chunks.size()]);
      append(id, at, end);
      at = end;
      if (appends < spec.rewinds.size()) {
        at = std::max<std::int64_t>(0, at - spec.rewinds[appends]);
        cache.truncate(id, at).value();
      }
    }
  };
  if (is_forked) {
    const std::int64_t half = std::min(kv_len / 2, last);
    fill(0, half);
    const SequenceId parent = id;
    id = cache.fork(parent).value();
    append(parent, 0, std::min<std::int64_t>(3, kv_len));  // other rows, where the child's own go in its pages
    fill(half, last);
    cache.remove(parent).value();
  } else {
    fill(0, last);
  }
  if (keeps_last) {
    if (last < kv_len) append(id, last, kv_len);
  } else {
    fill(last, kv_len);
  }
  return id;
}

World::World(const WorldSpec& s) : spec(s), cache(Cache::create(cache_config(s)).value()) {
  for (std::size_t i = 0; i < spec.sequences.size(); ++i) {
    const Lengths& lengths = spec.sequences[i];
    Qkv x =
        make_qkv({lengths.q_len, lengths.kv_len, q_heads(), spec.kv_heads, spec.head_dim, spec.v_head_dim, spec.latent},
                 spec.inputs, spec.seed + 1000 * i);
    for (float& value : x.k) value = rounded(value + spec.key_offset, spec.input_dtype);
    const auto of_token = static_cast<std::size_t>(spec.kv_heads) * static_cast<std::size_t>(v_dim());
    for (std::size_t j = 0; j < x.v.size(); ++j)
      x.v[j] = rounded(x.v[j] + (j / of_token % 5 == 0 ? 0.0f : spec.value_offset), spec.input_dtype);
    const auto append = [&](SequenceId id, int layer, const Qkv& rows, std::int64_t begin, std::int64_t end) {
      append_rows(cache, id, rows, begin, end, spec.input_dtype, layer).value();
    };
    ids.push_back(grow_sequence(cache, spec, lengths, x, append));
    qkv.push_back(std::move(x));
  }
}

std::int64_t World::total_queries() const {
  std::int64_t n = 0;
  for (const Lengths& lengths : spec.sequences) n += lengths.q_len;
  return n;
}

// Products of 16 bits unless a case asks for 8: the choice between them has tests of its own.
AttentionOptions World::options(AttentionOptions base) const {
  if (base.products == 0) base.products = 16;
  if (spec.latent && base.scale == 0) base.scale = 1 / std::sqrt(static_cast<double>(q_dim()));
  base.q_heads = q_heads();
  base.q_lens.clear();
  for (const Lengths& lengths : spec.sequences) base.q_lens.push_back(static_cast<int>(lengths.q_len));
  return base;
}

std::vector<float> World::queries() const {
  std::vector<float> q;
  for (const Qkv& x : qkv) q.insert(q.end(), x.q.begin(), x.q.end());
  return q;
}

FreshTensors World::fresh() const {
  FreshTensors f;
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    const auto add = [&](std::vector<std::byte>& to, const std::vector<float>& from, int head_dim) {
      const auto count = static_cast<std::size_t>(spec.sequences[i].q_len * spec.kv_heads * head_dim);
      const std::vector<std::byte> rows = pack_as(spec.input_dtype, std::span(from).last(count));
      to.insert(to.end(), rows.begin(), rows.end());
    };
    add(f.k, qkv[i].k, spec.head_dim);
    add(f.v, qkv[i].v, v_dim());
  }
  f.keys = TensorView::contiguous(f.k.data(), spec.input_dtype, total_queries(), spec.kv_heads, spec.head_dim);
  f.values = TensorView::contiguous(f.v.data(), spec.input_dtype, total_queries(), spec.kv_heads, v_dim());
  return f;
}

Result<Attended> World::try_attend_here(const AttentionOptions& base, const std::vector<float>& sink_logits) const {
  const FreshTensors f = base.fresh_keys ? fresh() : FreshTensors{};
  return try_attend(cache, ids, options(base), queries(), sink_logits, spec.layer, f.keys, f.values);
}

Attended World::attend(const AttentionOptions& base, const std::vector<float>& sink_logits) const {
  return try_attend_here(base, sink_logits).value();
}

void World::decode(std::size_t sequence, std::vector<float>& keys, std::vector<float>& values) const {
  decode_sequence(cache, ids[sequence], spec.layer, spec.sequences[sequence], qkv[sequence], keys, values);
}

void decode_sequence(const Cache& cache, SequenceId id, int layer, const Lengths& lengths, const Qkv& given,
                     std::vector<float>& keys, std::vector<float>& values, Stream stream) {
  const CacheConfig& c = cache.config();
  keys = given.k;
  values = given.v;
  const std::int64_t k_row = std::int64_t{c.kv_heads} * c.head_dim, v_row = std::int64_t{c.kv_heads} * c.v_dim();
  const auto read = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    std::fill(keys.begin() + begin * k_row, keys.begin() + end * k_row, NAN);
    std::fill(values.begin() + begin * v_row, values.begin() + end * v_row, NAN);
    cache
        .read(id, layer, begin, end,
              MutableTensorView::of(keys.data() + begin * k_row, end - begin, c.kv_heads, c.head_dim),
              MutableTensorView::of(values.data() + begin * v_row, end - begin, c.kv_heads, c.v_dim()), stream)
        .value();
  };
  const std::int64_t visible =
      c.window > 0 ? std::max<std::int64_t>(0, lengths.kv_len - lengths.q_len - c.window + 1) : 0;
  read(0, std::min(c.window_sinks, visible));
  read(visible, lengths.kv_len);
  // Pages that were exact for the first query are exact for all of them.
  const CacheImpl& impl = cache.impl();
  const CacheImpl::SequenceView view = impl.view(id).value();
  for (std::int64_t t = 0; t < lengths.kv_len && lengths.q_len > 0; ++t) {
    if (t >= c.window_sinks && t < visible) continue;
    const std::int64_t page = t / kPageTokens;
    if (impl.reads_exact(view, page) || !impl.reads_exact(view, page, lengths.q_len)) continue;
    const auto round_rows = [&](std::vector<float>& to, const std::vector<float>& from, std::int64_t row) {
      for (std::int64_t i = t * row; i < (t + 1) * row; ++i)
        to[static_cast<std::size_t>(i)] = rounded(from[static_cast<std::size_t>(i)], *impl.exact_dtype());
    };
    round_rows(keys, given.k, k_row);
    round_rows(values, given.v, v_row);
  }
}

std::vector<double> joined(const std::vector<float>& a, int a_dim, const std::vector<float>& b, int b_dim) {
  std::vector<double> all;
  for (std::size_t row = 0; row < a.size() / static_cast<std::size_t>(a_dim); ++row) {
    const auto add = [&](const std::vector<float>& from, int dim) {
      const auto at = from.begin() + static_cast<std::ptrdiff_t>(row) * dim;
      all.insert(all.end(), at, at + dim);
    };
    add(a, a_dim), add(b, b_dim);
  }
  return all;
}

Expected World::expect(const AttentionOptions& base, const std::vector<float>& sink_logits, bool decoded) const {
  Expected all;
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    std::vector<float> k = qkv[i].k;
    std::vector<float> v = qkv[i].v;
    if (decoded) decode(i, k, v);
    if (base.fresh_keys) {  // the queries' own tokens as they were given
      const std::int64_t rows = spec.sequences[i].q_len * spec.kv_heads;
      std::copy(qkv[i].k.end() - rows * spec.head_dim, qkv[i].k.end(), k.end() - rows * spec.head_dim);
      std::copy(qkv[i].v.end() - rows * v_dim(), qkv[i].v.end(), v.end() - rows * v_dim());
    }
    const std::vector<double> q64 = widen(qkv[i].q);
    std::vector<double> k64 = widen(k);
    if (spec.latent) k64 = joined(v, v_dim(), k, spec.head_dim);
    const std::vector<double> v64 = widen(v);
    reference::Problem p;
    p.q_len = spec.sequences[i].q_len;
    p.kv_len = spec.sequences[i].kv_len;
    p.q_heads = q_heads();
    p.kv_heads = spec.kv_heads;
    p.head_dim = q_dim();
    p.v_head_dim = v_dim();
    p.q = q64;
    p.k = k64;
    p.v = v64;
    p.sink_logits = sink_logits;
    p.batch = static_cast<std::int64_t>(i);
    const reference::Output r = reference::attention(p, base);
    all.out.insert(all.out.end(), r.out.begin(), r.out.end());
    all.lse.insert(all.lse.end(), r.lse.begin(), r.lse.end());
  }
  return all;
}

Expected World::expect_decoded(const AttentionOptions& base, const std::vector<float>& sink_logits) const {
  return expect(base, sink_logits, true);
}

Expected World::expect_true(const AttentionOptions& base, const std::vector<float>& sink_logits) const {
  return expect(base, sink_logits, false);
}

double World::tolerance(const std::string& isa) const {
  if (!is_float_format(spec.k) || !is_float_format(spec.v)) return tolerance::kCoded;
  return has_matrix_unit(isa) ? tolerance::kMatrixFloat : tolerance::kFloat;
}

double World::lse_tolerance(const std::string& isa) const {
  return is_float_format(spec.k) && !has_matrix_unit(isa) ? tolerance::kLseFloat : tolerance::kLseCoded;
}

double World::codec_tolerance() const {
  const double k = tolerance::vector_error(spec.k);
  const double v = tolerance::vector_error(spec.v);
  return 1.5 * std::sqrt(k * k * (1 + v * v) + v * v);
}

testing::AssertionResult World::kernel_matches(const AttentionOptions& base, const std::vector<float>& sink_logits,
                                               std::optional<double> allowed_of_lse) const {
  const Result<Attended> got = try_attend_here(base, sink_logits);
  if (!got) return testing::AssertionFailure() << code_name(got.code()) << ": " << got.message();
  const Expected expected = expect_decoded(base, sink_logits);
  const bool in_bytes = base.products == 8;
  if (auto r = close(expected.out, got->out, in_bytes ? tolerance::kByteProducts : tolerance(base.isa), out_shape());
      !r) {
    return r << "\nout, against attention over the decoded vectors\n" << got->explain;
  }
  const double of_lse = allowed_of_lse.value_or(in_bytes ? tolerance::kByteLse : lse_tolerance(base.isa));
  if (auto r = lse_close(expected.lse, got->lse, of_lse, {total_queries(), q_heads()}); !r) {
    return r << "\nlse, against attention over the decoded vectors\n" << got->explain;
  }
  return testing::AssertionSuccess();
}

}  // namespace kvant::test
