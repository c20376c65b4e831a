// Mask tensors: shapes checked against the batch, tiles of one query by one page classified once per plan, so that
// fully masked tiles cost nothing in a run and all-zero ones no addition. A mask in device memory is not looked into.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "base/mask_element.hpp"
#include "core/fmt.hpp"
#include "core/plan/plan.hpp"

namespace kvant {
namespace {

core::TileClass classify(const MaskTensor& m, std::int64_t at, std::int64_t key_stride, std::int64_t keys) {
  bool masked = true, zero = true;
  for (std::int64_t j = 0; j < keys; ++j) {
    const float x = base::mask_element(m.data, m.dtype, at + j * key_stride);
    masked &= x == -HUGE_VALF;
    zero &= x == 0.0f;
    if (!masked && !zero) return core::kTileMixed;
  }
  return masked ? core::kTileMasked : core::kTileZero;
}

// The mask's dimensions, none broadcast: batch, query heads, most queries, most keys from its first one on.
std::array<std::int64_t, 4> mask_extent(const PlanImpl& plan) {
  std::int64_t longest = 0, most_queries = 0;
  for (const PlannedSequence& s : plan.sequences) {
    if (s.q_len > 0) longest = std::max(longest, s.length);
    most_queries = std::max(most_queries, s.q_len);
  }
  const std::int64_t keys = std::max<std::int64_t>(0, longest - plan.options.mask.tensor.first_key);
  return {static_cast<std::int64_t>(plan.sequences.size()), plan.options.q_heads, most_queries, keys};
}

}  // namespace

Status check_mask(const PlanImpl& plan) {
  const MaskTensor& m = plan.options.mask.tensor;
  if (m.data == nullptr) return {};
  constexpr std::int64_t kFar = std::int64_t{1} << 44;
  if (m.first_key < 0 || m.first_key > kFar) {
    return {Code::invalid_argument,
            fmt::format("mask.tensor.first_key is {}: must be 0 to {}, the position of the key that column 0 is for",
                        m.first_key, kFar)};
  }
  const std::array<std::int64_t, 4> needed = mask_extent(plan);
  static constexpr const char* kNames[4] = {"batch", "q_heads", "queries", "keys"};
  for (std::size_t i = 0; i < 4; ++i) {
    const std::int64_t n = m.shape[i];
    if (i == 3 && n == 0) {
      return {Code::invalid_argument,
              "mask.tensor.shape[3] (keys) is 0: must be at least 1; to hide all keys broadcast one that is hidden"};
    }
    const bool ok = n == 1 || (i < 2 ? n == needed[i] : n >= needed[i]);
    if (!ok) {
      return {Code::invalid_argument,
              fmt::format("mask.tensor.shape[{}] ({}) is {}: must be {}{}{}, or 1 to broadcast", i, kNames[i], n,
                          i < 2 ? "" : "at least ", needed[i],
                          i == 3 && m.first_key > 0 ? fmt::format(" from first_key {} on", m.first_key) : "")};
    }
    if (m.stride[i] > kFar || m.stride[i] < -kFar || n > kFar) {
      return {Code::invalid_argument, fmt::format("mask.tensor.stride[{}] is {}: beyond any memory", i, m.stride[i])};
    }
  }
  if (reinterpret_cast<std::uintptr_t>(m.data) % dtype_size(m.dtype) != 0) {
    return {Code::invalid_argument,
            fmt::format("mask.tensor.data is not aligned to its {}-byte elements: copy the mask to aligned memory",
                        dtype_size(m.dtype))};
  }
  return {};
}

void classify_mask(const PlanImpl& plan, ClassifiedMask& mask) {
  const MaskTensor& m = plan.options.mask.tensor;
  if (m.data == nullptr || plan.total_queries == 0) return;
  const std::array<std::int64_t, 4> needed = mask_extent(plan);
  core::MaskData& out = mask.data;
  out.data = m.data;
  out.dtype = m.dtype;
  out.first_key = m.first_key;
  std::int64_t extent[4];
  for (std::size_t i = 0; i < 4; ++i) {
    out.stride[i] = m.shape[i] == 1 ? 0 : m.stride[i];
    extent[i] = out.stride[i] == 0 ? 1 : needed[i];
  }
  // Classes are by page of the sequence. Those of pages that lie before the first key are masked, others speak of the
  // keys from there on.
  const std::int64_t end = needed[3] > 0 ? m.first_key + needed[3] : 0;
  const std::int64_t key_pages = (end + kPageTokens - 1) / kPageTokens;
  const std::int64_t pages = out.stride[3] == 0 ? 1 : key_pages;
  const std::int64_t count = extent[0] * extent[1] * extent[2] * pages;
  mask.classes.resize(static_cast<std::size_t>(count));
  std::int64_t at = 0;
  for (std::int64_t b = 0; b < extent[0]; ++b) {
    for (std::int64_t h = 0; h < extent[1]; ++h) {
      for (std::int64_t q = 0; q < extent[2]; ++q) {
        for (std::int64_t p = 0; p < pages; ++p) {
          std::int64_t first = 0, keys = 1;  // columns
          if (out.stride[3] != 0) {
            first = std::max<std::int64_t>(0, p * kPageTokens - m.first_key);
            keys = std::min((p + 1) * kPageTokens, end) - m.first_key - first;
          }
          const core::TileClass c =
              classify(m, b * out.stride[0] + h * out.stride[1] + q * out.stride[2] + first * out.stride[3],
                       out.stride[3], keys);
          mask.classes[static_cast<std::size_t>(at++)] = c;
          ++mask.tiles[c];
        }
      }
    }
  }
  out.classes = mask.classes.data();
  out.class_stride[3] = pages == 1 ? 0 : 1;
  out.class_stride[2] = extent[2] == 1 ? 0 : pages;
  out.class_stride[1] = extent[1] == 1 ? 0 : extent[2] * pages;
  out.class_stride[0] = extent[0] == 1 ? 0 : extent[1] * extent[2] * pages;
}

}  // namespace kvant
