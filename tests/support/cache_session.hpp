// Short spellings for the cache tests: append known tokens to all layers, read everything back, name the state of each
// page, check a refusal and its message.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/cache/impl.hpp"
#include "kvant/cache.hpp"
#include "support/cache_rows.hpp"
#include "support/compare.hpp"

namespace kvant::test {

inline CacheConfig small_config(int layers = 1) {
  CacheConfig c;
  c.layers = layers;
  c.kv_heads = 2;
  c.head_dim = 32;
  c.exact = Dtype::f32;  // what tests append is what exact pages hold
  return c;
}

inline Cache make(const CacheConfig& config) {
  return Cache::create(config).value();
}

inline CacheRows rows_for(const Cache& cache, std::uint64_t first, std::int64_t count, int layer = 0,
                          Dtype dtype = Dtype::f32) {
  return {token_range(first, count), layer, cache.config().kv_heads,
          cache.config().head_dim,   dtype, cache.config().v_dim()};
}

// Appends tokens first .. first + count - 1 to every layer.
inline Status append(Cache& cache, SequenceId id, std::uint64_t first, std::int64_t count, Dtype dtype = Dtype::f32) {
  for (int layer = 0; layer < cache.config().layers; ++layer) {
    const CacheRows rows = rows_for(cache, first, count, layer, dtype);
    if (Status s = cache.append(id, layer, rows.keys(), rows.values()); !s) return s;
  }
  return {};
}

inline Status reserve(Cache& cache, SequenceId id, std::int64_t tokens) {
  const Append a{id, tokens};
  return cache.reserve({&a, 1});
}

struct Decoded {
  std::vector<float> keys, values;
};

inline Status read(const Cache& cache, SequenceId id, std::int64_t begin, std::int64_t end, Decoded& out,
                   int layer = 0) {
  const CacheConfig& c = cache.config();
  out.keys.assign(static_cast<std::size_t>((end - begin) * c.kv_heads * c.head_dim), 0);
  out.values.assign(static_cast<std::size_t>((end - begin) * c.kv_heads * c.v_dim()), 0);
  return cache.read(id, layer, begin, end, MutableTensorView::of(out.keys.data(), end - begin, c.kv_heads, c.head_dim),
                    MutableTensorView::of(out.values.data(), end - begin, c.kv_heads, c.v_dim()));
}

inline Decoded read_all(const Cache& cache, SequenceId id, int layer = 0) {
  Decoded out;
  read(cache, id, 0, cache.length(id).value(), out, layer).value();
  return out;
}

// One letter a page: E exact, both copies and read exact: B, both and read encoded: b, encoded only: e, released: '-'.
inline std::string states(const Cache& cache, SequenceId id) {
  const auto view = cache.impl().view(id).value();
  std::string text;
  for (std::size_t p = 0; p < view.pages.size(); ++p) {
    const core::PageRef ref = view.pages[p];
    const bool exact = cache.impl().reads_exact(view, static_cast<std::int64_t>(p));
    text += ref.exact >= 0 && ref.encoded >= 0 ? (exact ? 'B' : 'b')
            : ref.exact >= 0                   ? 'E'
            : ref.encoded >= 0                 ? 'e'
                                               : '-';
  }
  return text;
}

inline testing::AssertionResult refused(const Status& status, Code code, std::initializer_list<const char*> parts) {
  if (status.code() != code) {
    return testing::AssertionFailure() << "code is " << code_name(status.code()) << ": " << status.message();
  }
  for (const char* part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return testing::AssertionFailure() << "no '" << part << "' in: " << status.message();
    }
  }
  return testing::AssertionSuccess();
}

inline void expect_same(const Decoded& a, const Decoded& b) {
  EXPECT_TRUE(same_bits(a.keys, b.keys));
  EXPECT_TRUE(same_bits(a.values, b.values));
}

}  // namespace kvant::test
