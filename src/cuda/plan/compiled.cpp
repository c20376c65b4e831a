#include "cuda/plan/compiled.hpp"

#include <algorithm>

#include "cuda/plan/kernels_of.hpp"
#include "cuda/prefill/units.hpp"
#include "cuda/prefill_dense/kernels.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

using prefill::Kernel;

// Null: there is none for the formats.
const Kernel* find_kernel(std::span<const Kernel> kernels, const PlannedWork& work, const DeviceLimits& limits) {
  std::vector<const Kernel*> of_pair;
  for (const Kernel& one : kernels) {
    if (one.k == work.k && one.v == work.v) of_pair.push_back(&one);
  }
  const auto found = first_that_fits(
      of_pair, limits, [&](const Kernel* one) { return shared_bytes_of(*one, work.params.cache.encoded_layout); });
  return found == of_pair.end() ? nullptr : *found;
}

// Whether the device has code of a kernel for compute capability 9.0 alone. A kernel that does not fit is not loaded.
Status find_hopper_code(const void* function, int shared_bytes, const DeviceLimits& limits, bool& has_code) {
  has_code = false;
  if (limits.has_sm90() && shared_bytes <= limits.shared_bytes) KVANT_CUDA_TRY(has_sm90_code(function, has_code));
  return {};
}

Status find_decode(const PlannedWork& work, Compiled& found) {
  static const DecodeKernels kAll[] = {
#define KVANT_ENTRY(width) decode_kernels<width>(),
      KVANT_CUDA_EACH_DECODE_WIDTH(KVANT_ENTRY)
#undef KVANT_ENTRY
  };
  const auto all = std::find_if(std::begin(kAll), std::end(kAll),
                                [&](const DecodeKernels& one) { return one.width == work.width(); });
  if (all == std::end(kAll)) return {};
  found.offers.has_decode = true;
  found.generic = &all->generic;
  found.merge = all->merge;
  for (const AttendKernel& one : all->attend) {
    if (one.k != work.k || one.v != work.v) continue;
    DecodeOffer offer{one};
    // Plans of few rows ask nothing of the driver.
    if (one.is_for_hopper() &&
        (work.is_latent() || work.kernel == one.name() || work.most_rows() >= times::kLeastSeveralRows)) {
      if (Status s = find_hopper_code(one.function, one.shared_bytes[0], found.offers.limits, offer.has_code); !s.ok())
        return s;
    }
    found.offers.decode.push_back(offer);
  }
  return {};
}

Status find_tiles(const PlannedWork& work, std::size_t i, Compiled& found) {
  TileOffers& offers = found.offers.tiles[i];
  const TileKind& kind = kTileKinds[i];
  std::span<const Kernel> kernels;
  for (const prefill::TileUnit& unit : prefill::kTileUnits) {
    if (unit.kind != kind.name || unit.kernels().empty()) continue;
    offers.head_dims.push_back(unit.head_dim);
    if (unit.head_dim == work.width()) kernels = unit.kernels();
  }
  const DeviceLimits& limits = found.offers.limits;
  const Kernel* kernel = found.tiles[i] = find_kernel(kernels, work, limits);
  if (kernel == nullptr) return {};
  TileOffer offer{.rows = kernel->rows, .shared_bytes = shared_bytes_of(*kernel, work.params.cache.encoded_layout)};
  if (kind.is_for_hopper) {
    if (Status s = find_hopper_code(kernel->function, offer.shared_bytes, limits, offer.has_code); !s.ok()) return s;
  } else if (offer.shared_bytes > limits.shared_bytes) {
    offer.blocks = 0;
  } else {
    // Kernels of several pairs are one function, which gets once what the largest of them needs: plans of other threads
    // use it.
    int most = 0;
    for (const Kernel& one : kernels) {
      if (one.function != kernel->function) continue;
      for (const int bytes : {one.shared_bytes, one.shared_bytes + one.centre_bytes}) {
        if (bytes <= limits.shared_bytes) most = std::max(most, bytes);
      }
    }
    KVANT_CUDA_TRY(prepare_shared(kernel->function, most));
    KVANT_CUDA_TRY(find_resident(kernel->function, kernel->threads, offer.shared_bytes, limits, offer.blocks));
  }
  offers.kernel = offer;
  return {};
}

Status offer_dense(std::span<const prefill::dense::DenseKernel> kernels, Compiled& found,
                   std::optional<DenseOffer>& offered) {
  if (kernels.empty()) return {};
  const prefill::dense::DenseKernel& first = kernels[0];
  DenseOffer offer{.rows = first.rows,
                   .keys = first.keys,
                   .shared_bytes = first.shared_bytes,
                   .blocks = first.blocks,
                   .byte_keys = first.key_rows > 0};
  for (const prefill::dense::DenseKernel& one : kernels) {
    bool has_code = false;
    if (Status s = find_hopper_code(one.function, one.shared_bytes, found.offers.limits, has_code); !s.ok()) return s;
    offer.has_code = offer.has_code && has_code;
  }
  if (offer.has_code) KVANT_CUDA_TRY(prefill::dense::find_encode(found.encode));
  offer.has_maps = found.encode != nullptr;
  offered = offer;
  return {};
}
Status find_dense(const PlannedWork& work, Compiled& found) {
  found.dense = kernels_of<units::prefill_dense>(work.width(), []<int W>() { return prefill::dense::kernels<W>(); });
  if (Status s = offer_dense(found.dense, found, found.offers.dense); !s.ok() || work.products != 8) return s;
  found.byte_keys =
      kernels_of<units::prefill_dense>(work.width(), []<int W>() { return prefill::dense::byte_keys_kernel<W>(); });
  if (found.byte_keys == nullptr) return {};
  return offer_dense({found.byte_keys, 1}, found, found.offers.byte_keys);
}

}  // namespace

Result<Compiled> find_compiled(const PlannedWork& work, const DeviceLimits& limits, const core::Tuning& tuning) {
  Compiled found{.offers = {.instances = instances(), .limits = limits, .tuning = &tuning}};
  found.offers.tiles.resize(std::size(kTileKinds));
  if (Status s = find_decode(work, found); !s.ok()) return s;
  if (!considers_prefill(work)) return found;
  for (std::size_t i = 0; i < std::size(kTileKinds); ++i) {
    if (Status s = find_tiles(work, i, found); !s.ok()) return s;
  }
  if (Status s = find_dense(work, found); !s.ok()) return s;
  return found;
}

}  // namespace kvant::cuda
