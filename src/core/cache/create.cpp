// From a CacheConfig to a cache: all that can be wrong with one is said here.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

constexpr std::int64_t kMaxCount = 65536;                   // layers, kv heads
constexpr std::int64_t kMaxEndPages = 1 << 20;              // sink and tail pages
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32;  // window, rollback
constexpr std::int64_t kMaxThreads = 1024;

Status check_counts(const CacheConfig& c) {
  if (Status s = core::check_range("layers", c.layers, 1, kMaxCount); !s) return s;
  if (Status s = core::check_range("kv_heads", c.kv_heads, 1, kMaxCount, "; it has no default"); !s) return s;
  if (Status s = core::check_range("head_dim", c.head_dim, 1, kLargestHeadDim); !s) return s;
  if (Status s = core::check_range("v_head_dim", c.v_head_dim, 0, kLargestHeadDim, " (0: head_dim)"); !s) return s;
  if (Status s = core::check_range("sink_pages", c.sink_pages, -1, kMaxEndPages, " (-1: automatic)"); !s) return s;
  if (Status s = core::check_range("tail_pages", c.tail_pages, -1, kMaxEndPages, " (-1: automatic)"); !s) return s;
  if (Status s = core::check_range("threads", c.threads, 0, kMaxThreads, " (0: all cores)"); !s) return s;
  if (Status s = core::check_range("window", c.window, 0, kMaxTokens, " tokens (0: none)"); !s) return s;
  if (Status s = core::check_range("window_sinks", c.window_sinks, 0, kMaxTokens, " tokens"); !s) return s;
  if (Status s = core::check_range("rollback_tokens", c.rollback_tokens, 0, kMaxTokens, " tokens (0: 64)"); !s)
    return s;
  if (c.window_sinks > 0 && c.window == 0) {
    return {Code::invalid_argument,
            fmt::format("window_sinks = {}: without a window all tokens stay visible; set window, or window_sinks = 0",
                        c.window_sinks)};
  }
  if (c.capacity_tokens < 0 || (c.capacity_tokens > 0 && c.capacity_tokens < kPageTokens)) {
    return {Code::invalid_argument,
            fmt::format("capacity_tokens = {}: must be {} (one page) or more, or 0 for no limit", c.capacity_tokens,
                        kPageTokens)};
  }
  if (c.exact && *c.exact > Dtype::bf16) {
    return {Code::invalid_argument, "exact = bool: exact pages hold f32, f16 or bf16"};
  }
  return {};
}

Status check_levels(const char* name, Format format, const std::vector<float>& levels) {
  const std::size_t wanted = codec::is_lut(format) ? std::size_t{1} << format_info(format).bits : 0;
  if (levels.size() != wanted) {
    return {Code::invalid_argument,
            fmt::format("{} has {} values: format {} takes {}{}", name, levels.size(), format_info(format).name, wanted,
                        wanted == 0 ? " (only lut formats have a table)" : " (one a code)")};
  }
  for (std::size_t i = 0; i < levels.size(); ++i) {
    if (!std::isfinite(levels[i]) || (i > 0 && !(levels[i] > levels[i - 1]))) {
      return {Code::invalid_argument,
              fmt::format("{}[{}] = {}: levels must be finite and strictly ascending", name, i, levels[i])};
    }
  }
  return {};
}

Status check_luts(const CacheConfig& c, Format k, Format v) {
  if (Status s = check_levels("k_levels", k, c.k_levels); !s) return s;
  if (Status s = check_levels("v_levels", v, c.v_levels); !s) return s;
  if (Status s = core::check_range("lut_scales", c.lut_scales, 1, 2); !s) return s;
  if (c.lut_scales == 2 && !codec::is_lut(k) && !codec::is_lut(v)) {
    return {Code::invalid_argument, "lut_scales = 2: neither format is a lut format; leave it at 1"};
  }
  return {};
}

Result<BasisKind> resolve_basis(const char* name, BasisKind kind, Format format) {
  if (kind == BasisKind::automatic) return codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none;
  if (kind > BasisKind::calibrated) {
    return {Code::invalid_argument,
            fmt::format("{} = {}: must be automatic, hadamard, none or calibrated", name, static_cast<int>(kind))};
  }
  if (codec::is_dense(format) && kind != BasisKind::none) {
    return {Code::invalid_argument,
            fmt::format("{} = {}: format {} stores vectors as given; use automatic or none, or a coded format", name,
                        core::basis_name(kind), format_info(format).name)};
  }
  return kind;
}

// A basis must be finite, of head_dim, and its inverse must undo its matrix: tried on one vector that touches every
// column, which costs head_dim^2 where the whole product would cost its cube.
Status check_basis(const std::string& name, const CalibratedBasis& b, int head_dim) {
  const auto d = static_cast<std::size_t>(head_dim);
  if (b.center.size() != d || b.matrix.size() != d * d || b.inverse.size() != d * d) {
    return {Code::invalid_argument,
            fmt::format("{}: center, matrix, inverse have {}, {}, {} values; head_dim {} takes {}, {}, {}", name,
                        b.center.size(), b.matrix.size(), b.inverse.size(), head_dim, d, d * d, d * d)};
  }
  for (const std::vector<float>* part : {&b.center, &b.matrix, &b.inverse}) {
    for (const float x : *part) {
      if (!std::isfinite(x)) return {Code::invalid_argument, name + ": holds a NaN or an infinity; calibrate again"};
    }
  }
  const auto times = [d](const std::vector<float>& m, const std::vector<double>& x) {
    std::vector<double> y(d, 0.0);
    for (std::size_t i = 0; i < d; ++i) {
      for (std::size_t j = 0; j < d; ++j) y[i] += static_cast<double>(m[i * d + j]) * x[j];
    }
    return y;
  };
  std::vector<double> x(d);
  for (std::size_t i = 0; i < d; ++i) x[i] = (i * 7 + i * i * 3) % 11 < 5 ? 1.0 : -1.0;
  const std::vector<double> back = times(b.inverse, times(b.matrix, x));
  double error = 0;
  for (std::size_t i = 0; i < d; ++i) error += (back[i] - x[i]) * (back[i] - x[i]);
  error = std::sqrt(error / static_cast<double>(d));
  if (!(error < 1e-2)) {
    return {Code::invalid_argument,
            fmt::format("{}: inverse is not the inverse of matrix (relative error {:.2g}; below 0.01 is accepted)",
                        name, error)};
  }
  return {};
}

Status check_side(const char* side, const std::vector<CalibratedBasis>& list, const BasisSet& set, int head_dim) {
  const auto wanted = static_cast<std::size_t>(set.layers) * static_cast<std::size_t>(set.kv_heads);
  if (list.size() != wanted) {
    return {Code::invalid_argument,
            fmt::format("bases.{} holds {} bases: {} layers of {} kv heads take {}{}", side, list.size(), set.layers,
                        set.kv_heads, wanted,
                        list.empty() ? fmt::format("; use hadamard for {}, or calibrate them", side) : "")};
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto heads = static_cast<std::size_t>(set.kv_heads);
    const std::string name = fmt::format("bases.{} of layer {}, kv head {}", side, i / heads, i % heads);
    if (Status s = check_basis(name, list[i], head_dim); !s) return s;
  }
  return {};
}

Status check_bases(const CacheConfig& c) {
  const bool keys = c.k_basis == BasisKind::calibrated;
  const bool values = c.v_basis == BasisKind::calibrated;
  if (!keys && !values) {
    if (!c.bases) return {};
    return {Code::invalid_argument,
            fmt::format("bases is given, which k_basis = {} and v_basis = {} do not read: set k_basis, v_basis or both "
                        "to calibrated, or leave bases out",
                        core::basis_name(c.k_basis), core::basis_name(c.v_basis))};
  }
  if (!c.bases) {
    return {Code::invalid_argument,
            fmt::format("bases is empty: {} = calibrated needs it; load a basis file or use automatic",
                        keys ? "k_basis" : "v_basis")};
  }
  for (const bool of_values : {false, true}) {
    const core::RowWidth width = core::row_width(c, of_values);
    if (!(of_values ? values : keys) || is_supported_head_dim(width.values)) continue;
    return {Code::unsupported,
            fmt::format("{} = calibrated with {} = {}: vectors are stored padded to {}, and calibrated bases are for "
                        "sizes that are stored as they are ({}); use automatic",
                        of_values ? "v_basis" : "k_basis", width.name, width.values, stored_head_dim(width.values),
                        fmt::join(supported_head_dims(), ", "))};
  }
  const BasisSet& set = *c.bases;
  const int set_v_head_dim = set.v_head_dim == 0 ? set.head_dim : set.v_head_dim;
  if (set.layers != c.layers || set.kv_heads != c.kv_heads || set.head_dim != c.head_dim ||
      (values && set_v_head_dim != c.v_dim())) {
    const bool is_one = set.head_dim == set_v_head_dim && c.head_dim == c.v_dim();
    const auto dims = [is_one](int head_dim, int v_head_dim) {
      return is_one ? fmt::format("head_dim = {}", head_dim)
                    : fmt::format("head_dim = {}, v_head_dim = {}", head_dim, v_head_dim);
    };
    return {Code::invalid_argument,
            fmt::format("bases were made for layers = {}, kv_heads = {}, {}; this cache has layers = {}, kv_heads = "
                        "{}, {}: calibrate on tensors of this model",
                        set.layers, set.kv_heads, dims(set.head_dim, set_v_head_dim), c.layers, c.kv_heads,
                        dims(c.head_dim, c.v_dim()))};
  }
  if (keys) {
    if (Status s = check_side("keys", set.keys, set, c.head_dim); !s) return s;
  }
  if (values) {
    if (Status s = check_side("values", set.values, set, c.v_dim()); !s) return s;
  }
  return {};
}

Result<const core::Kernels*> choose_kernels(const std::string& isa) {
  std::string names;
  for (const core::Kernels* k : core::all_kernels()) {
    names += (names.empty() ? "" : ", ") + std::string(k->name);
    if (isa.empty() ? !k->available() : isa != k->name) continue;
    if (k->available()) return k;
    return {
        Code::unsupported,
        fmt::format("isa = \"{}\": this machine lacks it ({}); leave it empty for the best it has", isa, k->detail)};
  }
  return {Code::invalid_argument,
          fmt::format("isa = \"{}\": this build has {}; leave it empty for the best", isa, names)};
}

// One page each, under windows of any length: layers with a window of 512 that have no exact tail lose ten times as
// much. A window frees the sink page as it frees others.
void resolve_ends(CacheConfig& c, bool dense) {
  for (int* pages : {&c.sink_pages, &c.tail_pages}) {
    if (*pages < 0) *pages = 1;
    if (dense) *pages = 0;
  }
}

}  // namespace

Result<std::unique_ptr<CacheImpl>> CacheImpl::create(const CacheConfig& given, const core::DeviceBackend* backend) try {
  CacheConfig config = given;
  if (Status s = core::resolve_latent(config); !s) return s;
  if (Status s = check_counts(config); !s) return s;
  const auto k = parse_format(config.k);
  if (!k) return {k.code(), "k: " + k.message()};
  const auto v = parse_format(config.v);
  if (!v) return {v.code(), "v: " + v.message()};
  if (config.v_head_dim == config.head_dim) config.v_head_dim = 0;
  const auto k_basis = resolve_basis("k_basis", config.k_basis, *k);
  if (!k_basis) return k_basis.status();
  const auto v_basis = resolve_basis("v_basis", config.v_basis, *v);
  if (!v_basis) return v_basis.status();
  config.k_basis = *k_basis;
  config.v_basis = *v_basis;
  if (Status s = check_luts(config, *k, *v); !s) return s;
  if (Status s = check_bases(config); !s) return s;
  const bool dense = codec::is_dense(*k) && codec::is_dense(*v);
  resolve_ends(config, dense);
  const auto kernels = choose_kernels(config.isa);
  if (!kernels) return kernels.status();
  if (Status s = core::resolve_centres(config, *k, *v); !s) return s;
  const auto placement = core::resolve_placement(config, *k, *v, backend);
  if (!placement) return placement.status();

  const core::TableConfig table{.layers = config.layers,
                                .ends = {config.sink_pages, config.tail_pages},
                                .window = config.window,
                                .window_sinks = config.window_sinks,
                                .rollback_tokens = config.rollback_tokens,
                                .capacity_pages = config.capacity_tokens / kPageTokens,
                                .sequence_tokens = placement->sequence_tokens};
  std::unique_ptr<CacheImpl> impl(new CacheImpl(config, *k, *v, placement->stored, table));
  impl->automatic_centre_ = (codec::takes_centre(*k) && given.k_centre == KeyCentre::automatic) ||
                            (config.latent > 0 && codec::takes_centre(*v) && given.v_centre == KeyCentre::automatic);
  impl->automatic_ends_ = !dense && (given.sink_pages < 0 || given.tail_pages < 0);
  auto store = core::make_store(*placement, impl->spec_, impl->table_, **kernels, backend);
  if (!store) return store.status();
  impl->store_ = std::move(*store);
  return impl;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the cache's tables could not be allocated"};
}

}  // namespace kvant
