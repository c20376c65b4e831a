// The golden files as C++ values; their layouts are described in tests/golden/README.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"

namespace kvant::test {

/// Families tq4, hb1 and hb2: one query a head over a ring buffer of packed codes.
struct TurboQuantCase {
  explicit TurboQuantCase(const std::string& path);

  int q_heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t kv_seq_len = 0, capacity = 0, ring_start = 0;
  std::int64_t window = 0;  ///< 0: none
  double scale = 0;
  int bits = 0, norms_per_position = 1;
  float scale_factor_d512 = 1;
  bool nibble_pairs = false;
  bool queries_unrotated = false;  ///< fuse_fwht_pre
  std::vector<float> q;            ///< [q_heads, head_dim]
  std::vector<float> codebook;
  std::vector<std::uint8_t> k_packed, v_packed, signs;
  std::vector<float> k_norms, v_norms;
  std::vector<double> out_ref;  ///< [q_heads, head_dim]

  [[nodiscard]] std::size_t row() const {
    return static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(head_dim);
  }
  [[nodiscard]] std::int64_t logical(std::int64_t slot) const { return (slot - ring_start + capacity) % capacity; }
  [[nodiscard]] bool is_visible(std::int64_t slot, bool with_window) const;
  /// Visible slots by logical position.
  [[nodiscard]] std::vector<std::int64_t> visible_slots(bool with_window) const;
  [[nodiscard]] LegacyLayout layout() const;
  [[nodiscard]] LegacyTensors tensors() const;

  // The documented arithmetic in float64, for judging our reference against theirs.
  [[nodiscard]] std::vector<double> rotated_queries() const;
  [[nodiscard]] std::vector<double> dequantise(const std::vector<std::uint8_t>& packed, const std::vector<float>& norms,
                                               const std::vector<std::int64_t>& slots) const;
};

/// Families fa (prefill) and fav (decode): bf16 keys and values, D = 512.
struct Bf16Case {
  explicit Bf16Case(const std::string& path);

  static constexpr int kHeadDim = 512;
  int batch = 0, q_heads = 0, kv_heads = 0, q_len = 0;
  std::int64_t kv_len = 0, kv_rows = 0;
  double scale = 0;
  std::string mask_name;
  std::vector<double> out_ref;  ///< [batch, q_len, q_heads, kHeadDim], reordered from the file's [batch, heads, q_len]

  [[nodiscard]] TensorView queries() const;  ///< [batch * q_len, q_heads, kHeadDim] in the file's dtype
  [[nodiscard]] TensorView keys(int b) const;
  [[nodiscard]] TensorView values(int b) const;
  [[nodiscard]] std::vector<double> queries64(int b) const;
  [[nodiscard]] std::vector<double> keys64(int b) const;
  [[nodiscard]] std::vector<double> values64(int b) const;
  [[nodiscard]] Mask tensor_mask() const;                   ///< bidirectional with the file's mask, if it has one
  [[nodiscard]] std::optional<Mask> position_mask() const;  ///< the same by positions, where that says it all

 private:
  [[nodiscard]] TensorView rows_of(const std::vector<std::uint16_t>& rows, int b) const;
  [[nodiscard]] std::vector<double> rows64_of(const std::vector<std::uint16_t>& rows, int b) const;

  Dtype q_dtype_ = Dtype::f32;
  std::vector<std::byte> q_;          ///< as queries()
  std::vector<std::uint16_t> k_, v_;  ///< [batch, kv_heads, kv_rows, kHeadDim]
  std::vector<std::uint16_t> mask_;   ///< f16
  std::vector<std::int64_t> mask_shape_;
};

}  // namespace kvant::test
