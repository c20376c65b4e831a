// Caches on a device, for the tests of what they store.
#pragma once

#include "kvant/kvant.hpp"
#include "support/world.hpp"

namespace kvant::test {

inline CacheConfig config(const char* k, const char* v, int head_dim, int sinks, int tails) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 2;
  c.head_dim = head_dim;
  c.k = k;
  c.v = v;
  c.sink_pages = sinks;
  c.tail_pages = tails;
  c.device = "cuda";
  c.capacity_tokens = 100 * 64;
  c.max_sequences = 4;
  c.max_sequence_tokens = 1 << 16;
  set_levels(c);
  return c;
}

/// Pages that have codes alone: no exact ends.
inline CacheConfig in_place(const char* format, int head_dim) {
  CacheConfig c = config(format, format, head_dim, 0, 0);
  c.layers = 1;
  return c;
}

}  // namespace kvant::test
