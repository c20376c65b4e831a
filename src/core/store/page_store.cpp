// Which store a cache gets, and what a config must say for it.
#include "core/store/page_store.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "core/fmt.hpp"
#include "core/store/device_store.hpp"
#include "core/store/host_store.hpp"

namespace kvant::core {
namespace {

constexpr std::int64_t kMaxDeviceTokens = std::int64_t{1} << 30;  // in one sequence: kernels count in 32 bits

// A cache on a device needs more than any cache needs.
Status check_device(const CacheConfig& c) {
  if (c.pinned) {
    return {Code::invalid_argument,
            fmt::format("pinned = true with device = \"{}\": memory of the host is pinned; use pinned = false, or "
                        "device = \"cpu\"",
                        c.device)};
  }
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
  return {};
}

}  // namespace

Status check_backend(const DeviceBackend* backend, std::string_view request, std::string_view instead) {
  const std::string why = backend != nullptr ? backend->unavailable()
                                             : "this build of kvant has no CUDA backend; configure it with "
                                               "-DKVANT_CUDA=ON (./dev gpu-build)";
  if (why.empty()) return {};
  const std::string way_out = instead.empty() ? "" : fmt::format("; or use {}", instead);
  return {Code::unsupported, fmt::format("{}: {}{}", request, why, way_out)};
}

int stored_head_dim_on(const DeviceBackend* backend, int head_dim) {
  int found = 0;
  if (backend != nullptr && backend->build != nullptr) {
    for (const int d : backend->build().head_dims) found = d >= head_dim && (found == 0 || d < found) ? d : found;
  }
  return found > 0 ? found : stored_head_dim(head_dim);
}

Result<codec::HeadDims> stored_dims_on(const DeviceBackend* backend, const CacheConfig& config) {
  const codec::HeadDims dims{config.head_dim, config.v_dim()};
  // Without a backend nothing is supported.
  if (backend == nullptr || (dims.k == dims.v && config.latent == 0)) {
    const int stored = stored_head_dim_on(backend, dims.k);
    return codec::HeadDims{stored, stored_head_dim_on(backend, dims.v)};
  }
  DeviceBuild build;
  if (backend->build != nullptr) build = backend->build();
  std::string widths;
  if (config.latent > 0) {
    for (const codec::HeadDims& one : build.latents) {
      if (one.k == dims.k && one.v == dims.v) return dims;
      widths += fmt::format("{}latent = {} with rope = {}", widths.empty() ? "" : ", ", one.v, one.k);
    }
    return {Code::unsupported,
            fmt::format("latent = {} with rope = {} on device \"{}\": kernels there are compiled for {}; use device = "
                        "\"cpu\"",
                        config.latent, config.rope, config.device, widths.empty() ? "no latents" : widths)};
  }
  for (const codec::HeadDims& one : build.widths) {
    if (one.k == dims.k && one.v == dims.v) return dims;
    widths += fmt::format("{}{}/{}", widths.empty() ? "" : ", ", one.k, one.v);
  }
  return {Code::unsupported,
          fmt::format("head_dim = {} with v_head_dim = {} on device \"{}\": kernels there are compiled for keys and "
                      "values of one size ({}){}; leave v_head_dim out and pad the smaller vectors with zeros, or use "
                      "device = \"cpu\"",
                      dims.k, dims.v, config.device, fmt::join(build.head_dims, ", "),
                      widths.empty() ? "" : ", or of head_dim/v_head_dim " + widths)};
}

Result<std::optional<int>> parse_device(const std::string& name) {
  if (name.empty() || name == "cpu") return std::optional<int>();
  int number = 0;
  const char* end = name.data() + name.size();
  if (name == "cuda") return std::optional<int>(0);
  if (name.starts_with("cuda:")) {
    const auto [stop, error] = std::from_chars(name.data() + 5, end, number);
    if (error == std::errc() && stop == end && number >= 0) return std::optional<int>(number);
  }
  return {Code::invalid_argument,
          fmt::format("device = \"{}\": must be \"cpu\" (or empty), \"cuda\", or \"cuda:N\" for device N", name)};
}

Result<Placement> resolve_placement(CacheConfig& config, Format k, Format v, const DeviceBackend* backend) {
  const auto device = parse_device(config.device);
  if (!device) return device.status();
  if (!device->has_value())
    return Placement{.stored = {stored_head_dim(config.head_dim), stored_head_dim(config.v_dim())}};
  if (Status s = check_device(config); !s) return s;
  const bool exact_ends = config.sink_pages > 0 || config.tail_pages > 0;
  // Before the first write, whose dtypes choose on the host.
  if (exact_ends && !config.exact) config.exact = k == Format::f32 || v == Format::f32 ? Dtype::f32 : Dtype::bf16;
  if (config.max_sequence_tokens == 0) config.max_sequence_tokens = config.capacity_tokens;
  const Result<codec::HeadDims> stored = stored_dims_on(backend, config);
  if (!stored) return stored.status();
  const bool calibrated = config.k_basis == BasisKind::calibrated || config.v_basis == BasisKind::calibrated;
  if (calibrated && stored->k != config.head_dim) {  // different sizes are stored as they are
    return {Code::unsupported,
            fmt::format("calibrated bases with head_dim = {} on a device: vectors are stored padded to {} there, and "
                        "calibrated bases are for sizes that are stored as they are; use automatic",
                        config.head_dim, stored->k)};
  }
  return Placement{.device = *device, .sequence_tokens = config.max_sequence_tokens, .stored = *stored};
}

Result<std::unique_ptr<PageStore>> make_store(const Placement& placement, const CacheSpec& spec, CacheTable& table,
                                              const Kernels& kernels, const DeviceBackend* backend) {
  if (placement.device) {
    auto store = DeviceStore::create(spec, table, *placement.device, backend);
    if (!store) return store.status();
    return std::unique_ptr<PageStore>(std::move(*store));
  }
  const MemoryPins* pins = nullptr;
  if (spec.config.pinned) {
    const bool pins_memory = backend != nullptr && backend->pins != nullptr;
    if (Status s = check_backend(pins_memory ? backend : nullptr, "pinned = true", "pinned = false"); !s) return s;
    pins = backend->pins;
  }
  auto store = std::make_unique<HostStore>(spec, table, kernels, pins);
  if (spec.config.exact && table.config().ends.any()) {
    if (Status s = store->make_exact(*spec.config.exact); !s) return s;
  }
  return std::unique_ptr<PageStore>(std::move(store));
}

// --- creation --------------------------------------------------------------------------------------------------------

DeviceStore::DeviceStore(const CacheSpec& spec, CacheTable& table, int device, const DeviceBackend& backend)
    : PageStore(spec, table), backend_(backend), device_(device) {
  if (spec.config.exact && table.config().ends.any()) set_exact(*spec.config.exact);
}

Result<std::unique_ptr<DeviceStore>> DeviceStore::create(const CacheSpec& spec, CacheTable& table, int device,
                                                         const DeviceBackend* backend) {
  const std::string request = fmt::format("device = \"{}\"", spec.config.device);
  if (Status s = check_backend(backend, request, "device = \"cpu\""); !s) return s;
  std::unique_ptr<DeviceStore> store(new DeviceStore(spec, table, device, *backend));
  if (Status s = store->take_memory(); !s) return s;
  return store;
}

// Slots for the worst case, so that the capacity in pages is the only limit that anyone meets.
//   encoded   one for each page held, and for each sequence those that a fork and it encode separately: pages in the
//             tail when they parted (tail_pages and the one being filled), and the one that truncation brings back
//   exact     a sequence holds sink_pages, tail_pages and the one being filled, and the one that outlives its encoding;
//             between reserve and the last write those of before and after the step, sinks once. Reserving ahead takes
//             from the second half, which steps of few tokens leave free
Status DeviceStore::take_memory() {
  const TableConfig& table = table_.config();
  const std::int64_t tail = table.ends.tail_pages > 0 ? table.ends.tail_pages + 2 : 0;
  encoded_slots_ = table.capacity_pages + spec_.config.max_sequences * tail;
  exact_slots_ = std::min(table.capacity_pages, spec_.config.max_sequences * (table.ends.sink_pages + 2 * tail));
  if (std::max(encoded_slots_, exact_slots_) > std::numeric_limits<std::int32_t>::max()) {
    return {
        Code::invalid_argument,
        fmt::format("capacity_tokens = {} with max_sequences = {}: pages are numbered up to 2^31; lower one of them",
                    spec_.config.capacity_tokens, spec_.config.max_sequences)};
  }
  const bool calibrated =
      spec_.config.k_basis == BasisKind::calibrated || spec_.config.v_basis == BasisKind::calibrated;
  const DeviceCacheConfig store{.device = device_,
                                .encoded = spec_.encoded,
                                .exact = layout(Pool::exact),
                                .layers = spec_.config.layers,
                                .kv_heads = spec_.config.kv_heads,
                                .head_dims = spec_.head_dims(),
                                .encoded_slots = encoded_slots_,
                                .exact_slots = exact_slots_,
                                .max_sequences = static_cast<std::int32_t>(spec_.config.max_sequences),
                                .max_pages = static_cast<std::int32_t>(pages_for(table.sequence_tokens)),
                                .ends = table.ends,
                                .exact_dtype = exact_dtype().value_or(Dtype::bf16),
                                .k_basis = spec_.config.k_basis,
                                .v_basis = spec_.config.v_basis,
                                .bases = calibrated ? spec_.config.bases.get() : nullptr,
                                .k_levels = spec_.config.k_levels,
                                .v_levels = spec_.config.v_levels};
  auto made = backend_.make_cache(store);
  if (!made) return made.status();
  pages_ = std::move(*made);
  places_.resize(static_cast<std::size_t>(spec_.config.max_sequences));
  for (std::int64_t i = spec_.config.max_sequences; i > 0; --i)
    free_places_.push_back(static_cast<std::int32_t>(i - 1));
  return {};
}

}  // namespace kvant::core
