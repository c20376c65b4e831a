// Keys and values made from numbers: vector (seed, token, layer, head, side) is the same in every call, so a
// test needs to remember only numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvant/cache.hpp"
#include "support/half.hpp"
#include "support/inputs.hpp"

namespace kvant::test {

/// One vector, rounded to `dtype`.
inline std::vector<float> cache_vector(std::uint64_t token, int layer, int head, bool value, int head_dim,
                                       Dtype dtype = Dtype::f32) {
  const std::uint64_t seed =
      (token * 64 + static_cast<std::uint64_t>(layer)) * 128 + static_cast<std::uint64_t>(head) * 2 + (value ? 1 : 0);
  std::vector<float> x = gaussian_vector(static_cast<std::size_t>(head_dim), seed + 1);
  for (float& f : x) f = rounded(f, dtype);
  return x;
}

/// Rows [tokens, heads, head_dim] of these tokens in one dtype, ready to append.
class CacheRows {
 public:
  /// v_head_dim 0: head_dim.
  CacheRows(std::span<const std::uint64_t> tokens, int layer, int heads, int head_dim, Dtype dtype = Dtype::f32,
            int v_head_dim = 0)
      : tokens_(static_cast<std::int64_t>(tokens.size())),
        heads_(heads),
        head_dim_(head_dim),
        v_head_dim_(v_head_dim > 0 ? v_head_dim : head_dim),
        dtype_(dtype) {
    for (const bool value : {false, true}) {
      std::vector<float> all;
      for (const std::uint64_t token : tokens) {
        for (int head = 0; head < heads; ++head) {
          const std::vector<float> x = cache_vector(token, layer, head, value, value ? v_head_dim_ : head_dim_, dtype);
          all.insert(all.end(), x.begin(), x.end());
        }
      }
      (value ? values_ : keys_) = pack_as(dtype, all);
    }
  }
  [[nodiscard]] TensorView keys() const { return view(keys_, head_dim_); }
  [[nodiscard]] TensorView values() const { return view(values_, v_head_dim_); }
  /// For spoiling an input: element of the keys or values.
  void set(bool value, std::size_t element, float x) { store_as(dtype_, (value ? values_ : keys_).data(), element, x); }

 private:
  [[nodiscard]] TensorView view(const std::vector<std::byte>& bytes, int head_dim) const {
    // Never null: an empty vector's data() may be.
    static constexpr std::byte kNothing{};
    return TensorView::contiguous(bytes.empty() ? &kNothing : bytes.data(), dtype_, tokens_, heads_, head_dim);
  }
  std::int64_t tokens_;
  int heads_, head_dim_, v_head_dim_;
  Dtype dtype_;
  std::vector<std::byte> keys_, values_;
};

/// Tokens first, first + 1, ...
inline std::vector<std::uint64_t> token_range(std::uint64_t first, std::int64_t count) {
  std::vector<std::uint64_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<std::uint64_t>(i));
  return tokens;
}

}  // namespace kvant::test
