// The choice that plans make, without a device: the function that they call, on devices of several classes, over the
// kernels of a default build.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/plan/choose.hpp"
#include "cuda/plan/compiled.hpp"
#include "cuda/runtime/built.hpp"

namespace kvant::cuda {

// --- what builds and devices offer -----------------------------------------------------------------------------------

struct Device {
  const char* name;
  DeviceLimits limits;
  const core::Tuning* tuning = nullptr;
};
inline const DeviceLimits& limits_of(const std::string& card) {
  return std::find_if(cards().begin(), cards().end(), [&](const Card& one) { return one.name == card; })->limits;
}
inline const Device kDevices[] = {{"8.0", limits_of("a100")},
                                  {"8.6", limits_of("rtx3090")},
                                  {"8.9", limits_of("rtx4090")},
                                  {"9.0", limits_of("h200")},
                                  {"12.0", limits_of("rtx5090")}};
inline const Device& device_of(const std::string& name) {
  return *std::find_if(std::begin(kDevices), std::end(kDevices), [&](const Device& one) { return one.name == name; });
}

// The kernels that plans find for some work. A build's units are those of fake_cuda/kernels.cpp.
inline Compiled compiled_for(const PlannedWork& work, const Device& device) {
  static const core::Tuning kNone;
  return find_compiled(work, device.limits, device.tuning != nullptr ? *device.tuning : kNone).value();
}
inline Offers offers_of(const PlannedWork& work, const Device& device) {
  return compiled_for(work, device).offers;
}
inline const TileOffers& offers_of_kind(const char* name, const Offers& offers) {
  const auto is_named = [&](const TileKind& kind) { return kind.name == std::string(name); };
  const auto* found = std::find_if(std::begin(kTileKinds), std::end(kTileKinds), is_named);
  return offers.tiles[static_cast<std::size_t>(found - std::begin(kTileKinds))];
}

// --- work ------------------------------------------------------------------------------------------------------------

// A batch of alike sequences over a cache with one exact page at either end.
struct Case {
  int head_dim = 128, stored_head_dim = 0;  // 0: the same
  int v_head_dim = 0;                       // 0: head_dim; stored as it is
  bool latent = false, v_centre = false;    // values are latents, which have centres
  Format k = Format::tq6, v = Format::tq4;
  int q_heads = 32, kv_heads = 8;
  int sequences = 1;
  std::int64_t length = 32768;
  int queries = 1;
  std::int32_t window = 0;
  bool mask = false, fresh_keys = false, any_length = false, calibrated = false;
  Format exact = Format::bf16;
  std::string kernel{};
  int products = 0;
};

class Asked {
 public:
  explicit Asked(const Case& c) : c_(c) {
    const int stored = c.stored_head_dim > 0 ? c.stored_head_dim : c.head_dim;
    const codec::HeadDims dims{stored, c.v_head_dim > 0 ? c.v_head_dim : stored};
    p_.cache.encoded_layout = codec::page_layout(c.k, c.v, dims, 1, codec::is_tq(c.k), c.v_centre);
    p_.cache.exact_layout = codec::page_layout(c.exact, c.exact, dims);
    p_.cache.sink_pages = p_.cache.tail_pages = codec::is_dense(c.k) ? 0 : 1;
    p_.cache.kv_heads = c.kv_heads;
    p_.cache.max_pages = static_cast<std::int32_t>(2 * c.length / kPageTokens + 2);
    p_.batch = c.sequences;
    p_.q_heads = c.q_heads, p_.group = c.q_heads / c.kv_heads, p_.head_dim = c.head_dim;
    p_.v_head_dim = c.v_head_dim > 0 ? c.v_head_dim : c.head_dim;
    p_.latent = c.latent;
    p_.causal = true;
    p_.window = c.window;
    if (c.mask) p_.mask.data = this;
    const auto basis = [&](Format f) {
      return c.calibrated ? BasisKind::calibrated : codec::is_tq(f) ? BasisKind::hadamard : BasisKind::none;
    };
    p_.k_basis.kind = basis(c.k), p_.v_basis.kind = basis(c.v);
    for (int i = 0; i < c.sequences; ++i) sequences_.push_back({i, c.queries, i, c.length});
  }
  Asked(const Asked&) = delete;
  [[nodiscard]] PlannedWork work() const {
    return {p_, sequences_, c_.k, c_.v, c_.kernel, c_.fresh_keys, c_.products, c_.any_length};
  }

 private:
  const Case c_;
  AttendParams p_{};
  std::vector<core::DeviceSequence> sequences_;
};

struct Chosen {
  std::string kinds;  // "prefill_fresh, prefill_unpacked, prefill_sm90", in the order of launches
  std::string why;
  std::int64_t ns = 0;
  int rows = 0;            // a decode kernel's
  bool byte_keys = false;  // prefill_unpacked's
};
inline Result<Chosen> try_choose(const Case& c, const Device& device) {
  const Asked asked(c);
  const PlannedWork work = asked.work();
  const Offers offers = offers_of(work, device);
  const Result<Choice> choice = choose(work, offers);
  if (!choice.ok()) return choice.status();
  Chosen chosen{"", choice->why, choice->ns, 0, choice->byte_keys};
  if (choice->first) chosen.kinds += "prefill_fresh, ";
  if (choice->rounds) chosen.kinds += "prefill_unpacked, ";
  chosen.kinds += choice->tiles >= 0    ? kTileKinds[choice->tiles].name
                  : choice->decode >= 0 ? offers.decode[static_cast<std::size_t>(choice->decode)].name()
                                        : choice->kernel(offers);
  if (choice->decode >= 0) chosen.rows = offers.decode[static_cast<std::size_t>(choice->decode)].rows();
  return chosen;
}
inline Chosen choose_for(const Case& c, const char* device = "9.0") {
  return try_choose(c, device_of(device)).value();
}
inline std::string kinds(const Case& c, const char* device = "9.0") {
  return choose_for(c, device).kinds;
}
inline std::string refusal(const Case& c, const char* device = "9.0") {
  const Result<Chosen> chosen = try_choose(c, device_of(device));
  return chosen.ok() ? "takes " + chosen->kinds : chosen.message();
}
inline bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// "192", "192/128"
inline std::string width_name(int width) {
  const int keys = key_dim(width), values = value_dim(width);
  return keys == values ? std::to_string(keys) : fmt::format("{}/{}", keys, values);
}

struct NamedPair {
  const char* name;
  Format k, v;
};
inline constexpr NamedPair kPairs[] = {{"bf16", Format::bf16, Format::bf16}, {"fp8", Format::fp8, Format::fp8},
                                       {"tq4", Format::tq4, Format::tq4},    {"tq6/tq4", Format::tq6, Format::tq4},
                                       {"tq8", Format::tq8, Format::tq8},    {"tq5/tq4", Format::tq5, Format::tq4}};
// Rows of 32/8 heads up to head_dim 192, 16/2 at 256, 8/1 at 512.
inline Case case_of(int width, const NamedPair& pair) {
  const int head_dim = key_dim(width), v_head_dim = value_dim(width);
  const int kv_heads = head_dim <= 192 ? 8 : head_dim == 256 ? 2 : 1;
  return {.head_dim = head_dim,
          .v_head_dim = v_head_dim == head_dim ? 0 : v_head_dim,
          .k = pair.k,
          .v = pair.v,
          .q_heads = kv_heads == 8 ? 32 : 8 * kv_heads,
          .kv_heads = kv_heads};
}

}  // namespace kvant::cuda
