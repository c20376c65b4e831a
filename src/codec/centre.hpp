// The centre of a key page: one vector c, in the keys' basis, that is subtracted from every key of the page before the
// key is encoded, and added when it is decoded. Softmax sees the whole key again, since q . k = q . c + q . (k - c): a
// reader computes q . c once for a page and adds it to the page's scores.
//
// c is the mean m of some keys, stored as one more vector in tq6 with a single scale. Keys are centred on the *decoded*
// c, so what the centre's own rounding loses is not lost: the codes of the keys hold it. Which keys m is of depends on
// how a page comes to be encoded (core/host_store_write.cpp):
//
//   the whole page at once    its own keys, tokens 0 to 63, as given: m = B(mean), with B the basis (MeanOfRows)
//   token by token            the keys of the page before, as stored: m = c' + mean(decoded k' - c') (mean_of_page), or
//                             B(mean) if the page before is exact
//   page 0 of a sequence      none: m = 0. Its first tokens are attention sinks, whose keys are far from all others and
//                             get most of the attention: around a mean of other keys they are stored worse, and the KL
//                             divergence of a cache without an exact first page doubles (docs/page-centres.md)
//
// All sums are in float32, by channel, tokens in ascending order, from zero; then one multiplication by 1 / count
// rounded to float. A mean that has an element that is not finite, or of 2^20 and above in magnitude, is stored as
// zeros, so that a key that cannot be encoded spoils itself alone.
#pragma once

#include "codec/basis.hpp"
#include "codec/store.hpp"

KVANT_NAMESPACE_BEGIN(codec)

// Formats whose keys are centred unless a cache says otherwise. fp8 is not: the format is there to be compared with.
KVANT_HD constexpr bool is_centred_by_default(Format f) {
  return is_tq(f);
}

// The first token of page number `page` of a sequence that counts for the mean of the page that follows. Sinks do not.
inline constexpr int kSinkTokens = 4;
KVANT_HD constexpr int first_of_mean(std::int64_t page) {
  return page == 0 ? kSinkTokens : 0;
}

KVANT_HD constexpr float mean_factor(int count) {
  return 1.0f / static_cast<float>(count);
}

// In place: zeros unless all of y can be a centre.
KVANT_HD inline void clean_mean(float* y, int head_dim) {
  std::uint32_t largest = 0;
  for (int i = 0; i < head_dim; ++i) largest = base::max(largest, base::bit_cast<std::uint32_t>(y[i]) & 0x7FFFFFFFu);
  if (largest < base::bit_cast<std::uint32_t>(0x1p20f)) return;
  for (int i = 0; i < head_dim; ++i) y[i] = 0.0f;
}

// y [D] in the keys' basis and clean.
KVANT_HD inline void store_centre(const SideLayout& s, int head_dim, std::byte* block, const float* y) {
  std::uint8_t codes[kMaxHeadDim];
  std::uint16_t scale = 0;
  encode_group<kCentreFormat>(y, head_dim, codes, &scale);  // below 2^20 no scale overflows
  put_scales(s, block, 0, &scale);
  put_k_codes(s, head_dim, block, 0, codes);
}

// Element i of a centre whose planes are at `low` and `high`.
KVANT_HD inline float centre_element(const std::byte* low, const std::byte* high, float scale, int i) {
  const int code =
      (static_cast<int>(low[i / 2]) >> (4 * (i % 2)) & 15) | (static_cast<int>(high[i / 4]) >> (2 * (i % 4)) & 3) << 4;
  return base::mul_rn(static_cast<float>(code) - level_offset(kCentreFormat), scale);
}

KVANT_HD inline void load_centre(const SideLayout& s, int head_dim, const std::byte* block, float* c) {
  std::uint8_t codes[kMaxHeadDim];
  get_k_codes(s, head_dim, block, 0, codes);
  decode_group<kCentreFormat>(codes, head_dim, get_scale(s, block, 0, 0), c);
}

// Key of a token as attention reads it, in its basis.
KVANT_HD inline void load_key(const PageLayout& p, const std::byte* block, int token, const float* lut_levels,
                              float* y) {
  load_row_k(p.k, p.head_dim, block, token, lut_levels, y);
  if (!is_centred(p)) return;
  float c[kMaxHeadDim];
  load_centre(centre_layout(p), p.head_dim, block, c);
  for (int i = 0; i < p.head_dim; ++i) y[i] += c[i];
}

// The mean of rows in original coordinates, in their basis and clean: add each, then finish. y [D].
class MeanOfRows {
 public:
  KVANT_HD MeanOfRows(int head_dim, float* y) : head_dim_(head_dim), y_(y) {
    for (int i = 0; i < head_dim; ++i) y[i] = 0.0f;
  }
  KVANT_HD void add(const float* row) {
    for (int i = 0; i < head_dim_; ++i) y_[i] += row[i];
    ++count_;
  }
  KVANT_HD void finish(const BasisRef& basis) {
    for (int i = 0; i < head_dim_; ++i) y_[i] = base::mul_rn(y_[i], mean_factor(count_));
    to_basis(basis, head_dim_, y_, y_);
    clean_mean(y_, head_dim_);
  }

 private:
  int head_dim_;
  float* y_;
  int count_ = 0;
};

// y [D]: the mean of tokens [first, 64) of a centred page, in the basis and clean.
KVANT_HD inline void mean_of_page(const PageLayout& p, const std::byte* block, int first, float* y) {
  float row[kMaxHeadDim], c[kMaxHeadDim];
  load_centre(centre_layout(p), p.head_dim, block, c);
  for (int i = 0; i < p.head_dim; ++i) y[i] = 0.0f;
  for (int t = first; t < kPageTokens; ++t) {
    load_row_k(p.k, p.head_dim, block, t, nullptr, row);
    for (int i = 0; i < p.head_dim; ++i) y[i] += row[i];
  }
  for (int i = 0; i < p.head_dim; ++i) y[i] = c[i] + base::mul_rn(y[i], mean_factor(kPageTokens - first));
  clean_mean(y, p.head_dim);
}

KVANT_NAMESPACE_END
