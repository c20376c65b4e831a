// The golden files as C++ values; their layouts are described in tests/golden/README.md.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "support/paths.hpp"

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

inline constexpr const char* kTurboQuantCases[] = {"tq4_d256_len1",
                                                   "tq4_d256_len300_nwg32",
                                                   "tq4_d256_len31_causal",
                                                   "tq4_d256_ring_partial",
                                                   "tq4_d256_ring_scale1",
                                                   "tq4_d256_ring_w64",
                                                   "tq4_d512_len300_nwg4",
                                                   "tq4_d512_ring_w64",
                                                   "hb1_d256_b5_len300_highbits",
                                                   "hb1_d256_b8_len31_mha",
                                                   "hb2_d256_b5_nsg2_fwht",
                                                   "hb2_d256_b8_nsg1",
                                                   "hb2_d256_b8_nsg4_fwht_outlier",
                                                   "hb2_d512_b5_sf16_nsg4_fwht_w64",
                                                   "hb2_d512_b6_len31_nsg2_fwht",
                                                   "hb2_d512_b8_sf1_nsg2"};
inline constexpr const char* kBf16Cases[] = {
    "fa_q19_kv160_causal",  "fa_q5_kv64_b2_perhead_bias", "fa_q5_kv64_nomask",     "fa_q8_kv128_causal_at40_maxhalf",
    "fa_q8_kv160_emptyrow", "fa_q8_kv64_causal",          "fav_b2_q3_kv40_causal", "fav_kv1_nsg1",
    "fav_kv20_nsg4_defect", "fav_kv33_nsg2_w20",          "fav_kv33_nsg4"};
static_assert(std::size(kTurboQuantCases) + std::size(kBf16Cases) == 27);

/// A test of one case, by name. Skipped where its file is absent.
template <class Case>
class Golden : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string file = std::string("golden/") + GetParam() + ".safetensors";
    std::optional<std::string> path = source_path("tests/" + file);
    if (!std::filesystem::exists(*path)) path = shared_path(file);
    if (!path) GTEST_SKIP() << file << " is not in ../shared (KVANT_SHARED)";
    golden_.emplace(*path);
  }
  [[nodiscard]] const Case& golden() const { return *golden_; }

 private:
  std::optional<Case> golden_;
};

}  // namespace kvant::test
