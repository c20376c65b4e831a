// A cache as kernels see it: pools, page tables and lengths in device memory. Passed to kernels by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/config.hpp"
#include "base/pages.hpp"
#include "codec/layout.hpp"
#include "core/store/page_ref.hpp"

namespace kvant::cuda {

// The state of one sequence. The newest step's tokens are [step_begin, length).
struct SequenceState {
  std::int32_t length;
  std::int32_t step_begin;
};

using ExactEnds = base::ExactEnds<std::int32_t>;

struct CacheView {
  std::byte* encoded;  // slot s, layer l, head h: encoded + s * encoded_slot_bytes + (l * kv_heads + h) * block bytes
  std::byte* exact;
  std::uint64_t encoded_slot_bytes, exact_slot_bytes;
  codec::PageLayout encoded_layout, exact_layout;
  const core::PageRef* pages;      // [max_sequences][max_pages]
  const SequenceState* sequences;  // [max_sequences]
  std::int32_t max_pages;
  std::int32_t layers, kv_heads;
  std::int32_t sink_pages, tail_pages;
  std::int32_t
      steps_keep_exact;    // 1: pages that were exact when a step began are, for all its queries (base/copies.hpp)
  const float* levels[2];  // imported formats (lut), keys and values: [256], or null
  KVANT_HD ExactEnds exact_ends() const { return {sink_pages, tail_pages}; }
};

}  // namespace kvant::cuda
