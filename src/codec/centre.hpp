// The centre of a key page: one vector c, in the keys' basis, that is subtracted from keys of the page before they are
// encoded, and added when they are decoded. Softmax sees the whole key again, since q . k = q . c + q . (k - c): a
// reader computes q . c once for a page and adds it to the scores of the keys that have the centre.
//
// Latents are a part of the keys, and their pages have centres by the same rules. They are values as well: a reader of
// their codes alone adds c times the sum of the weights of the latents that have it.
//
// A key that is nearer to zero than to the centre refuses it: the key is stored as it is, and the sign bits of its
// scales say so (kRefusedScale). Attention sinks do, whose keys are far from all others: around a mean of other keys
// they would be stored worse, and they get most of the attention (docs/page-centres.md).
//
// c is the decoded value of a vector m, stored as one more vector in tq6 with a single scale. Keys are centred on the
// *decoded* c, so what the centre's own rounding loses is not lost: the codes of the keys hold it. How a page comes to
// be encoded decides on m:
//
//   page 0 of a sequence      its first key, m = B(first row), with B the basis (MeanOfRows of one row). So is any page
//                             that a part begins and that has no page before it
//   the whole page at once    its own keys, tokens 0 to 63, as given: m = B(mean) (MeanOfRows)
//   a page that a part        the keys of the page before, as stored: mean_of_page; or B(mean) if that page is exact
//   begins
//
// All sums are in float32, by channel, tokens in ascending order, from zero. A mean that has an element that is not
// finite, or of 2^20 and above in magnitude, is stored as zeros, so that a key that cannot be encoded spoils itself
// alone.
#pragma once

#include "codec/basis.hpp"
#include "codec/store.hpp"

KVANT_NAMESPACE_BEGIN(codec)

// A centre that is the mean of the page's own rows is that of so many.
KVANT_HD constexpr int rows_of_centre(std::int64_t page) {
  return page == 0 ? 1 : kPageTokens;
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

// Whether key y is nearer to zero than to the centre: |y|^2 < |y - c|^2 in float32, each sum in lanes as in
// codec/tq.hpp. No NaN is.
KVANT_HD inline bool refuses_centre(const float* y, const float* c, int head_dim) {
  float from_zero[kLanes] = {}, from_centre[kLanes] = {};
  for (int i = 0; i < head_dim; ++i) {
    const float left = y[i] - c[i];
    from_zero[i % kLanes] += base::mul_rn(y[i], y[i]);
    from_centre[i % kLanes] += base::mul_rn(left, left);
  }
  return detail::fold_lanes(from_zero) < detail::fold_lanes(from_centre);
}

// The sign bits of all scales of a key that has no centre. Zero and NaN have it as well.
KVANT_HD inline void mark_refused(const SideLayout& s, std::byte* block, int token) {
  for (int i = 0; i < s.groups; ++i) {
    std::byte* at = block + scale_at(s, token, i);
    base::store_u16(at, static_cast<std::uint16_t>(base::load_u16(at) | kRefusedScale));
  }
}
KVANT_HD inline bool is_refused(const SideLayout& s, const std::byte* block, int token) {
  return (base::load_u16(block + scale_at(s, token, 0)) & kRefusedScale) != 0;
}

// A key or a latent y [D], in the basis, into a centred page whose decoded centre is c [D].
KVANT_HD inline void store_vector(const PageLayout& p, bool values, std::byte* block, int token, const float* y,
                                  const float* c) {
  const SideLayout& s = side_of(p, values);
  const auto store = values ? store_row_v : store_row_k;
  if (refuses_centre(y, c, s.head_dim)) {
    store(s, s.head_dim, block, token, y, nullptr);
    mark_refused(s, block, token);
    return;
  }
  float left[kMaxHeadDim];
  for (int i = 0; i < s.head_dim; ++i) left[i] = y[i] - c[i];
  store(s, s.head_dim, block, token, left, nullptr);
}

// The code of a token's key or value, without a centre.
KVANT_HD inline void load_row(const PageLayout& p, bool values, const std::byte* block, int token,
                              const float* lut_levels, float* y) {
  (values ? load_row_v : load_row_k)(side_of(p, values), side_of(p, values).head_dim, block, token, lut_levels, y);
}
// Key or value of a token as attention reads it, in its basis.
KVANT_HD inline void load_vector(const PageLayout& p, bool values, const std::byte* block, int token,
                                 const float* lut_levels, float* y) {
  const SideLayout& s = side_of(p, values);
  load_row(p, values, block, token, lut_levels, y);
  if (!is_centred(p, values) || is_refused(s, block, token)) return;
  float c[kMaxHeadDim];
  load_centre(centre_layout(p, values), s.head_dim, block, c);
  for (int i = 0; i < s.head_dim; ++i) y[i] += c[i];
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

// y [D]: the mean of the 64 keys, or latents, of a centred page as they are stored, in the basis and clean. Those that
// refused the centre count without it.
KVANT_HD inline void mean_of_page(const PageLayout& p, bool values, const std::byte* block, float* y) {
  const SideLayout& s = side_of(p, values);
  const int d = s.head_dim;
  float row[kMaxHeadDim], c[kMaxHeadDim];
  load_centre(centre_layout(p, values), d, block, c);
  for (int i = 0; i < d; ++i) y[i] = 0.0f;
  int centred = 0;
  for (int t = 0; t < kPageTokens; ++t) {
    load_row(p, values, block, t, nullptr, row);
    for (int i = 0; i < d; ++i) y[i] += row[i];
    centred += is_refused(s, block, t) ? 0 : 1;
  }
  const float share = base::mul_rn(static_cast<float>(centred), mean_factor(kPageTokens));
  for (int i = 0; i < d; ++i) y[i] = base::mul_rn(c[i], share) + base::mul_rn(y[i], mean_factor(kPageTokens));
  clean_mean(y, d);
}

KVANT_NAMESPACE_END
