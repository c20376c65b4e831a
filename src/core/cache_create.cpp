// From a CacheConfig to a cache: all that can be wrong with one is said here.
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <new>

#include "core/cache_impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

constexpr std::int64_t kMaxCount = 65536;                   // layers, kv heads
constexpr std::int64_t kMaxEndPages = 1 << 20;              // sink and tail pages
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32;  // window, rollback
constexpr std::int64_t kLeastWindowWithEnds = 1024;         // of automatic exact ends
constexpr std::int64_t kMaxThreads = 1024;
constexpr std::int64_t kMaxDeviceTokens = std::int64_t{1} << 30;  // of one sequence: kernels count in 32 bits

Status check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* hint = "") {
  if (value >= low && value <= high) return {};
  return {Code::invalid_argument, fmt::format("{} = {}: must be {} to {}{}", name, value, low, high, hint)};
}

Status check_counts(const CacheConfig& c) {
  if (Status s = check_range("layers", c.layers, 1, kMaxCount); !s) return s;
  if (Status s = check_range("kv_heads", c.kv_heads, 1, kMaxCount, "; it has no default"); !s) return s;
  if (Status s = check_range("head_dim", c.head_dim, 1, kLargestHeadDim); !s) return s;
  if (Status s = check_range("sink_pages", c.sink_pages, -1, kMaxEndPages, " (-1: automatic)"); !s) return s;
  if (Status s = check_range("tail_pages", c.tail_pages, -1, kMaxEndPages, " (-1: automatic)"); !s) return s;
  if (Status s = check_range("threads", c.threads, 0, kMaxThreads, " (0: all cores)"); !s) return s;
  if (Status s = check_range("window", c.window, 0, kMaxTokens, " tokens (0: none)"); !s) return s;
  if (Status s = check_range("window_sinks", c.window_sinks, 0, kMaxTokens, " tokens"); !s) return s;
  if (Status s = check_range("rollback_tokens", c.rollback_tokens, 0, kMaxTokens, " tokens (0: 64)"); !s) return s;
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
  if (Status s = check_range("lut_scales", c.lut_scales, 1, 2); !s) return s;
  if (c.lut_scales == 2 && !codec::is_lut(k) && !codec::is_lut(v)) {
    return {Code::invalid_argument, "lut_scales = 2: neither format is a lut format; leave it at 1"};
  }
  return {};
}

const char* basis_name(BasisKind kind) {
  switch (kind) {
    case BasisKind::automatic: return "automatic";
    case BasisKind::hadamard: return "hadamard";
    case BasisKind::none: return "none";
    case BasisKind::calibrated: return "calibrated";
  }
  return "unknown";
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
                        basis_name(kind), format_info(format).name)};
  }
  return kind;
}

const char* centre_name(KeyCentre centre) {
  switch (centre) {
    case KeyCentre::automatic: return "automatic";
    case KeyCentre::none: return "none";
    case KeyCentre::page: return "page";
  }
  return "unknown";
}

Result<KeyCentre> resolve_centre(KeyCentre centre, Format k, bool on_device) {
  if (centre == KeyCentre::automatic) return KeyCentre::none;
  if (centre > KeyCentre::page) {
    return {Code::invalid_argument,
            fmt::format("k_centre = {}: must be automatic, none or page", static_cast<int>(centre))};
  }
  if (centre == KeyCentre::none) return centre;
  if (!codec::takes_centre(k)) {
    return {
        Code::invalid_argument,
        fmt::format("k_centre = page with k = {}: {}; use k_centre = none, or one of tq2, tq3, tq4, tq5, tq6, tq8, fp8",
                    format_info(k).name,
                    codec::is_dense(k) ? "dense keys are stored as given, and there is nothing to gain"
                                       : "imported keys keep their codes, which have no centre")};
  }
  if (on_device) {
    return {
        Code::unsupported,
        "k_centre = page with a device: kernels on devices do not read centres yet; use k_centre = none, or keep the "
        "cache in host memory (device = \"cpu\")"};
  }
  return centre;
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

Status check_side(const char* side, const std::vector<CalibratedBasis>& list, const BasisSet& set) {
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
    if (Status s = check_basis(name, list[i], set.head_dim); !s) return s;
  }
  return {};
}

Status check_bases(const CacheConfig& c) {
  const bool keys = c.k_basis == BasisKind::calibrated;
  const bool values = c.v_basis == BasisKind::calibrated;
  if (!keys && !values) return {};
  if (!c.bases) {
    return {Code::invalid_argument,
            fmt::format("bases is empty: {} = calibrated needs it; load a basis file or use automatic",
                        keys ? "k_basis" : "v_basis")};
  }
  if (!is_supported_head_dim(c.head_dim)) {
    return {
        Code::unsupported,
        fmt::format("{} = calibrated with head_dim = {}: vectors are stored padded to {}, and calibrated bases are for "
                    "sizes that are stored as they are ({}); use automatic",
                    keys ? "k_basis" : "v_basis", c.head_dim, stored_head_dim(c.head_dim),
                    fmt::join(supported_head_dims(), ", "))};
  }
  const BasisSet& set = *c.bases;
  if (set.layers != c.layers || set.kv_heads != c.kv_heads || set.head_dim != c.head_dim) {
    return {Code::invalid_argument,
            fmt::format("bases were made for layers = {}, kv_heads = {}, head_dim = {}; this cache has layers = {}, "
                        "kv_heads = {}, head_dim = {}: calibrate on tensors of this model",
                        set.layers, set.kv_heads, set.head_dim, c.layers, c.kv_heads, c.head_dim)};
  }
  if (keys) {
    if (Status s = check_side("keys", set.keys, set); !s) return s;
  }
  if (values) {
    if (Status s = check_side("values", set.values, set); !s) return s;
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

// The number of the device that a cache is to live on, -1 for host memory.
Result<int> parse_device(const std::string& name) {
  if (name.empty() || name == "cpu") return -1;
  int number = 0;
  const char* end = name.data() + name.size();
  if (name == "cuda") return 0;
  if (name.starts_with("cuda:")) {
    const auto [stop, error] = std::from_chars(name.data() + 5, end, number);
    if (error == std::errc() && stop == end && number >= 0) return number;
  }
  return {Code::invalid_argument,
          fmt::format("device = \"{}\": must be \"cpu\" (or empty), \"cuda\", or \"cuda:N\" for device N", name)};
}

// What a cache on a device needs beyond what any cache needs.
Status check_device(const CacheConfig& c, bool exact_ends) {
  if (c.capacity_tokens == 0) {
    return {Code::invalid_argument,
            fmt::format("capacity_tokens = 0 with device = \"{}\": a device's memory is taken once, so say how many "
                        "tokens are to fit ({} or more)",
                        c.device, kPageTokens)};
  }
  if (Status s = check_range("max_sequences", c.max_sequences, 1, 65536); !s) return s;
  if (Status s = check_range("max_sequence_tokens", c.max_sequence_tokens, 0, kMaxDeviceTokens,
                             " tokens (0: capacity_tokens)");
      !s) {
    return s;
  }
  if (c.max_sequence_tokens == 0 && c.capacity_tokens > kMaxDeviceTokens) {
    return {Code::invalid_argument,
            fmt::format("max_sequence_tokens = 0 means capacity_tokens = {}, and a sequence on a device has {} tokens "
                        "at most; set max_sequence_tokens",
                        c.capacity_tokens, kMaxDeviceTokens)};
  }
  if (exact_ends && c.exact == Dtype::f32) {
    return {Code::unsupported,
            "exact = f32: exact pages on a device are f16 or bf16; choose one, or set sink_pages = tail_pages = 0"};
  }
  return {};
}

bool has_short_window(const CacheConfig& c) {
  return c.window > 0 && c.window < kLeastWindowWithEnds;
}

// A cache with a window of W tokens holds W + 64 to W + 127, and of these two to four pages are in exact ends.
void resolve_ends(CacheConfig& c, bool dense) {
  const int automatic = has_short_window(c) ? 0 : 1;
  for (int* pages : {&c.sink_pages, &c.tail_pages}) {
    if (*pages < 0) *pages = automatic;
    if (dense) *pages = 0;
  }
}

Format format_of(Dtype dtype) {
  return dtype == Dtype::f32 ? Format::f32 : dtype == Dtype::f16 ? Format::f16 : Format::bf16;
}

}  // namespace

CacheImpl::CacheImpl(const CacheConfig& config, Format k, Format v, const core::TableConfig& table,
                     const codec::PageLayout& layout, const core::Kernels& kernels)
    : config_(config),
      k_format_(k),
      v_format_(v),
      table_(table),
      encoded_(layout, config.layers, config.kv_heads),
      provisional_(codec::page_layout(Format::bf16, Format::bf16, layout.head_dim)),
      kernels_(&kernels) {}

Result<std::unique_ptr<CacheImpl>> CacheImpl::create(const CacheConfig& given, const core::DeviceBackend* backend) try {
  if (Status s = check_counts(given); !s) return s;
  const auto k = parse_format(given.k);
  if (!k) return {k.code(), "k: " + k.message()};
  const auto v = parse_format(given.v);
  if (!v) return {v.code(), "v: " + v.message()};
  CacheConfig config = given;
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
  const auto device = parse_device(config.device);
  if (!device) return device.status();
  const auto k_centre = resolve_centre(config.k_centre, *k, *device >= 0);
  if (!k_centre) return k_centre.status();
  config.k_centre = *k_centre;
  const bool exact_ends = config.sink_pages > 0 || config.tail_pages > 0;
  if (*device >= 0) {
    if (Status s = check_device(config, exact_ends); !s) return s;
    if (exact_ends && !config.exact) config.exact = Dtype::bf16;
    if (config.max_sequence_tokens == 0) config.max_sequence_tokens = config.capacity_tokens;
  }

  const core::TableConfig table{
      .layers = config.layers,
      .ends = {config.sink_pages, config.tail_pages},
      .window = config.window,
      .window_sinks = config.window_sinks,
      .rollback_tokens = config.rollback_tokens,
      .capacity_pages = config.capacity_tokens / kPageTokens,
      .sequence_tokens = *device >= 0 ? config.max_sequence_tokens : core::kMaxSequenceTokens};
  const codec::PageLayout layout = codec::page_layout(*k, *v, stored_head_dim(config.head_dim), config.lut_scales,
                                                      config.k_centre == KeyCentre::page);
  std::unique_ptr<CacheImpl> impl(new CacheImpl(config, *k, *v, table, layout, **kernels));
  impl->automatic_ends_ = !dense && (given.sink_pages < 0 || given.tail_pages < 0);
  if (config.exact && table.ends.any()) {
    if (Status s = impl->make_exact(*config.exact); !s) return s;
  }
  if (*device >= 0) {
    impl->device_number_ = *device;
    if (Status s = impl->make_device(backend); !s) return s;
  }
  return impl;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the cache's tables could not be allocated"};
}

Status CacheImpl::make_exact(Dtype dtype) {
  const Format format = format_of(dtype);
  auto made = std::make_unique<core::Storage>(codec::page_layout(format, format, stored_dim()), config_.layers,
                                              config_.kv_heads);
  if (Status s = made->grow(table_.pool(Pool::exact).slots()); !s) return s;
  exact_ = std::move(made);
  exact_dtype_ = dtype;
  return {};
}

core::BasisView CacheImpl::basis_view(bool values, int layer, int head) const noexcept {
  const BasisKind kind = values ? config_.v_basis : config_.k_basis;
  if (kind != BasisKind::calibrated) return {.kind = kind};
  const std::vector<CalibratedBasis>& list = values ? config_.bases->values : config_.bases->keys;
  const CalibratedBasis& b = list[static_cast<std::size_t>(layer) * static_cast<std::size_t>(config_.kv_heads) +
                                  static_cast<std::size_t>(head)];
  return {.kind = kind, .center = b.center.data(), .matrix = b.matrix.data(), .inverse = b.inverse.data()};
}

CacheMemory CacheImpl::memory() const noexcept {
  CacheMemory m;
  for (const auto& [id, s] : table_.sequences()) {
    const std::int64_t kept_sinks = (config_.window_sinks + kPageTokens - 1) / kPageTokens;
    const std::int64_t released = s.first_page > 0 ? s.first_page - kept_sinks : 0;
    m.tokens += s.length - released * kPageTokens;
  }
  const auto blocks = static_cast<std::int64_t>(config_.layers) * config_.kv_heads;
  const std::int64_t encoded_blocks = table_.pool(Pool::encoded).used_slots() * blocks;
  m.encoded_bytes = encoded_blocks * encoded_.layout().code_bytes;
  m.scale_bytes = encoded_blocks * encoded_.layout().scale_bytes;
  m.table_bytes = table_.table_bytes();
  m.reserved_bytes = encoded_.reserved_bytes() + m.table_bytes;
  if (exact_) {
    m.exact_bytes = table_.pool(Pool::exact).used_slots() * exact_->slot_bytes();
    m.reserved_bytes += exact_->reserved_bytes();
  }
  if (device_) m.reserved_bytes += device_->reserved_bytes();
  return m;
}

// Exact ends are a constant number of bytes a sequence: much of a short one.
std::string CacheImpl::held() const {
  const CacheMemory m = memory();
  if (m.tokens == 0) return "held: nothing\n";
  const double vectors = 2.0 * static_cast<double>(m.tokens) * config_.layers * config_.kv_heads;
  const double percent = 100 / (vectors * config_.head_dim * 2);
  return fmt::format("held: {} tokens, {} bytes, {:.0f} % of a bf16 cache's; exact ends are {} of them, {:.0f} %\n",
                     m.tokens, m.total(), static_cast<double>(m.total()) * percent, m.exact_bytes,
                     static_cast<double>(m.exact_bytes) * percent);
}

std::int64_t CacheImpl::trim() noexcept {
  if (device_) return 0;
  std::int64_t bytes = 0;
  for (const Pool which : {Pool::encoded, Pool::exact}) {
    if (which == Pool::exact && !exact_) continue;
    const core::PagePool& pool = table_.pool(which);
    if (pool.used_slots() > 0) {
      bytes += storage(which).give_back(pool.free_list());
      continue;
    }
    bytes += storage(which).clear();
    table_.clear(which);
  }
  return bytes;
}

std::string CacheImpl::head_dim_words() const {
  const int padding = stored_dim() - config_.head_dim;
  if (padding == 0) return fmt::format("head_dim {}", config_.head_dim);
  return fmt::format("head_dim {}, stored as {} ({:.1f} % of the codes are padding)", config_.head_dim, stored_dim(),
                     100.0 * padding / stored_dim());
}

std::string CacheImpl::describe() const {
  std::string text =
      fmt::format("geometry: {} layers, {} kv heads, {}\n", config_.layers, config_.kv_heads, head_dim_words());
  const auto page_bits = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) * 8 / (2.0 * kPageTokens * config_.head_dim);
  };
  const codec::PageLayout& page = encoded_.layout();
  text += fmt::format("formats: k {}, v {}: {:.3f} bits per value with scales{}{}\n", format_info(k_format_).name,
                      format_info(v_format_).name, page_bits(page.code_bytes + page.scale_bytes),
                      is_centred() ? " and centres" : "", stored_dim() > config_.head_dim ? " and padding" : "");
  text += fmt::format("page: {} tokens, {} bytes per layer and kv head\n", kPageTokens, page.block_bytes);
  if (!table_.config().ends.any()) {
    text += "exact ends: none";
  } else {
    text += fmt::format("exact ends: {} sink and {} tail pages, {}", config_.sink_pages, config_.tail_pages,
                        exact_dtype_                                            ? dtype_name(*exact_dtype_)
                        : automatic_exact(Dtype::f32, Dtype::f32) == Dtype::f32 ? "f32"
                                                                                : "bf16, or f16 if the first write is");
  }
  if (automatic_ends_) {
    text += has_short_window(config_)
                ? fmt::format("; chosen: of a window below {} tokens they would take most of what compression saves",
                              kLeastWindowWithEnds)
                : "; chosen: the default";
  }
  text += '\n';
  text += fmt::format("basis: k {}, v {}\n", basis_name(config_.k_basis), basis_name(config_.v_basis));
  text += fmt::format("centre: k {}\n", centre_name(config_.k_centre));
  if (config_.window > 0) {
    text += fmt::format("window: {} tokens and the first {}; truncation back by {} tokens\n", config_.window,
                        config_.window_sinks, std::max<std::int64_t>(kPageTokens, config_.rollback_tokens));
  } else {
    text += "window: none\n";
  }
  const std::int64_t capacity = table_.config().capacity_pages;
  text += capacity > 0 ? fmt::format("capacity: {} of {} pages held\n", table_.pages_held(), capacity)
                       : fmt::format("capacity: no limit, {} pages held\n", table_.pages_held());
  text += held();
  if (!device_) return text + fmt::format("stores with: {}\n", kernels_->name);
  text += fmt::format(
      "device: cuda:{}, {} bytes taken: {} encoded and {} exact page slots, up to {} sequences of {} tokens\n",
      device_number_, device_->reserved_bytes(), device_encoded_slots_, device_exact_slots_, config_.max_sequences,
      config_.max_sequence_tokens);
  return text;
}

}  // namespace kvant
