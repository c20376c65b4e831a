// The choice that plans make, without a device: the function that they call, on devices of several classes, over the
// kernels of a default build.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/decode/shape.hpp"
#include "cuda/plan/choose.hpp"
#include "cuda/prefill_dense/shape.hpp"
#include "cuda/prefill_sm80/shape.hpp"
#include "cuda/prefill_sm90/shape.hpp"
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

struct TableEntry {
  Format k, v;
  int width;  // cuda/width.hpp
  DecodeOffer offer;
};
// The functions that the tables of src/cuda/instances.cmake call.
template <class S>
TableEntry entry_of() {
  return {S::kKeyFormat,
          S::kValueFormat,
          width_of(codec::HeadDims{S::kHeadDim, S::kValueDim}),
          {.column_tiles = S::kColumnTiles,
           .teams = S::kTeams,
           .shared_bytes = S::kShared.bytes[0],
           .has_eight_warps = S::kHasEightWarps,
           .by_group = S::kByGroup,
           .half_weights = S::kHalfWeights,
           .one_stage = S::kOneStage}};
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry attend_entry() {
  return entry_of<Shape<K, V, kWidth, kTiles, kWarps>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry eight_warps_entry() {
  return entry_of<Shape<K, V, kWidth, kTiles, kEightWarps>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry one_stage_entry() {
  return entry_of<OneStage<K, V, kWidth, kTiles>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry half_weights_entry() {
  return entry_of<HalfWeights<K, V, kWidth, kTiles>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry group_entry() {
  return entry_of<Group<K, V, kWidth, kTiles>>();
}
inline const std::vector<TableEntry> kTable = {
#include "cuda/decode_tables.inc"
};

inline TileOffers& offers_of_kind(const char* name, Offers& offers) {
  const auto is_named = [&](const TileKind* kind) { return kind->name == std::string(name); };
  const auto* found = std::find_if(std::begin(kTileKinds), std::end(kTileKinds), is_named);
  return offers.tiles[static_cast<std::size_t>(found - std::begin(kTileKinds))];
}
template <int D>
void offer_tiles(const PlannedWork& work, const Device& device, Offers& offers) {
  if (D != work.width()) return;
  if constexpr (D <= prefill::kMostHeadDim) {
    if (prefill::has_kernel(work.k, work.v, D))
      offers_of_kind(core::kPrefillSm90, offers).kernel =
          TileOffer{prefill::kRows, prefill::Shape<D>::kBytes, 1, device.limits.has_sm90()};
  }
  if (prefill::has_one_type(work.k, work.v)) {
    std::vector<TileOffer> kernels;
    const auto add = [&]<class S>(S) {
      const int more = codec::is_centred(work.params.cache.encoded_layout) ? S::kMoreIfCentred : 0;
      const int bytes = S::bytes(work.k, work.v) + more;
      const int room = blocks_within(device.limits, S::kThreads, bytes);
      kernels.push_back({S::kRows, bytes, std::min(S::kBlocks, room), true});
    };
    add(prefill::sm80::Shape<D>{});
    if constexpr (prefill::sm80::has_small(D)) add(prefill::sm80::Shape<D, true>{});
    offers_of_kind(core::kPrefillSm80, offers).kernel =
        *first_that_fits(kernels, device.limits, [](const TileOffer& one) { return one.shared_bytes; });
  }
  const auto dense = [&]<class Shape>(Shape) {
    return DenseOffer{.rows = Shape::kRows,
                      .keys = Shape::kKeys,
                      .shared_bytes = Shape::kBytes,
                      .blocks = Shape::kBlocks,
                      .byte_keys = Shape::kByteKeys,
                      .has_code = device.limits.has_sm90()};
  };
  offers.dense = dense(prefill::dense::ShapeFor<D>{});
  if constexpr (prefill::has_byte_keys(D)) {
    if (work.products == 8) offers.byte_keys = dense(prefill::dense::ByteKeysShapeFor<D>{});
  }
}

inline Offers offers_of(const PlannedWork& work, const Device& device) {
  Offers offers{.instances = instances(), .limits = device.limits, .tuning = device.tuning};
  offers.tiles.resize(std::size(kTileKinds));
  for (const TableEntry& one : kTable) {
    if (one.width != work.width()) continue;
    offers.has_decode = true;
    if (one.k != work.k || one.v != work.v) continue;
    offers.decode.push_back(one.offer);
    offers.decode.back().has_code = !one.offer.by_group || device.limits.has_sm90();
  }
#define KVANT_ENTRY(d) \
  if (d <= prefill::kMostHeadDim) offers_of_kind(core::kPrefillSm90, offers).head_dims.push_back(d);
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
#define KVANT_ENTRY(d) offer_tiles<d>(work, device, offers);
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  return offers;
}

// --- work ------------------------------------------------------------------------------------------------------------

// A batch of alike sequences over a cache with one exact page at either end.
struct Case {
  int head_dim = 128, stored_head_dim = 0;  // 0: the same
  int v_head_dim = 0;                       // 0: head_dim; stored as it is
  bool latent = false;                      // values are latents
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
    p_.cache.encoded_layout = codec::page_layout(c.k, c.v, dims, 1, codec::is_tq(c.k));
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
  Offers offers = offers_of(work, device);
  if (!considers_prefill(work)) {
    for (TileOffers& one : offers.tiles) one.kernel.reset();
    offers.dense.reset();  // as plans do
  }
  const Result<Choice> choice = choose(work, offers);
  if (!choice.ok()) return choice.status();
  Chosen chosen{"", choice->why, choice->ns, 0, choice->byte_keys};
  if (choice->first) chosen.kinds += "prefill_fresh, ";
  if (choice->rounds) chosen.kinds += "prefill_unpacked, ";
  chosen.kinds += choice->tiles >= 0 ? kTileKinds[choice->tiles]->name : choice->kernel(offers);
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

struct NamedPair {
  const char* name;
  Format k, v;
};
inline constexpr NamedPair kPairs[] = {{"bf16", Format::bf16, Format::bf16}, {"fp8", Format::fp8, Format::fp8},
                                       {"tq4", Format::tq4, Format::tq4},    {"tq6/tq4", Format::tq6, Format::tq4},
                                       {"tq8", Format::tq8, Format::tq8},    {"tq5/tq4", Format::tq5, Format::tq4}};
// Rows of 32/8 heads up to head_dim 192, 16/2 at 256, 8/1 at 512.
inline Case case_of(int head_dim, const NamedPair& pair) {
  const int kv_heads = head_dim <= 192 ? 8 : head_dim == 256 ? 2 : 1;
  return {.head_dim = head_dim,
          .k = pair.k,
          .v = pair.v,
          .q_heads = kv_heads == 8 ? 32 : 8 * kv_heads,
          .kv_heads = kv_heads};
}

}  // namespace kvant::cuda
