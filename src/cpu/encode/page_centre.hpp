// Centres of pages as attention reads them.
//
// q . c of a key page's centre (codec/centre.hpp): decoded once for a page and an item, and multiplied with the queries
// as floats, since a centre may be far longer than what is left of the keys. Queries come in the order in which a
// format's codes are unpacked (tile_key_element), padded with zeros; there the centre needs no transposition.
#pragma once

#include "codec/centre.hpp"
#include "cpu/attend/decode.hpp"
#include "cpu/attend/tile.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// c [head_dim], in the order of channels; c has room for head_dim rounded up to 64.
template <class S>
KVANT_INLINE void load_centre(const codec::SideLayout& side, int head_dim, const std::byte* block, float* c) {
  using U = Unpack<S, codec::kCentreFormat>;
  decode_key_in_order<S, codec::kCentreFormat>(side, head_dim, block, 0, U::tables(), c);
}

// The centre of the page's latents, with zeros up to the next multiple of 32; null where they have none.
template <class S>
const LatentCentre* find_latent_centre(const codec::PageLayout& page, const std::byte* block, LatentCentre& room) {
  if (!codec::has_latent_centre(page)) return nullptr;
  const int d = page.v.head_dim;
  load_centre<S>(codec::latent_centre_layout(page), d, block, room.c);
  for (int i = d; i < ((d + 31) & ~31); ++i) room.c[i] = 0.0f;
  for (int t = 0; t < kPageTokens; ++t) room.share[t] = codec::is_refused(page.v, block, t) ? 0.0f : 1.0f;
  return &room;
}

// The order in which decode_centre unpacks.
KVANT_INLINE int centre_element(int at) {
  return tile_key_element(codec::kCentreFormat, at);
}

// c [padded_dim]; what is behind head_dim is finite.
template <class S>
KVANT_INLINE void decode_centre(const codec::PageLayout& page, int padded_dim, const std::byte* block, float* c) {
  decode_keys<S, codec::kCentreFormat>(codec::centre_layout(page), page.head_dim, padded_dim, block, 0, 1, nullptr, c,
                                       0);
}

// The same in the order of another format's codes.
template <class S>
void decode_centre_for(Format order, const codec::PageLayout& page, int padded_dim, const std::byte* block, float* c) {
  if (is_integer_format(order) && !is_eight_bit(order)) return decode_centre<S>(page, padded_dim, block, c);
  float unpacked[codec::kMaxHeadDim], in_order[codec::kMaxHeadDim];
  decode_centre<S>(page, padded_dim, block, unpacked);
  for (int e = 0; e < padded_dim; ++e) in_order[centre_element(e)] = unpacked[e];
  for (int e = 0; e < tile_depth(order, page.head_dim, padded_dim); ++e) c[e] = in_order[tile_key_element(order, e)];
}

// out[r] += q_r . c for queries [rows][padded_dim].
template <class S>
void add_centre_of_rows(const float* c, const float* queries, int rows, int padded_dim, float* out) {
  using W = Wide<S>;
  in_chunks_of_four(rows, [&]<int R>(int r) {
    typename W::F sum[R][2];
    for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = W::setf(0.0f);
    for (int e = 0; e < padded_dim; e += 2 * W::kLanes) {
      const typename W::F c0 = W::loadf(c + e), c1 = W::loadf(c + e + W::kLanes);
      for (int i = 0; i < R; ++i) {
        const float* q = queries + (r + i) * padded_dim + e;
        sum[i][0] = W::fma(W::loadf(q), c0, sum[i][0]);
        sum[i][1] = W::fma(W::loadf(q + W::kLanes), c1, sum[i][1]);
      }
    }
    for (int i = 0; i < R; ++i) out[r + i] += W::reduce_add(W::add(sum[i][0], sum[i][1]));
  });
}

// The same for panels [rows / 16][panel_depth][16], as tile.hpp has them: their elements from `begin` on, so many that
// they are `depth`, which is even.
template <class S>
void add_centre_of_panels(const float* c, const float* panels, int rows, int begin, int depth, int panel_depth,
                          float* out) {
  using W = Wide<S>;
  constexpr int kParts = kPanelRows / W::kLanes;
  for (int first = 0; first < rows; first += kPanelRows) {
    const float* panel = panels + static_cast<std::size_t>(first) * static_cast<std::size_t>(panel_depth) +
                         static_cast<std::size_t>(begin * kPanelRows);
    typename W::F sum[2][kParts];
    for (int p = 0; p < kParts; ++p) sum[0][p] = sum[1][p] = W::setf(0.0f);
    for (int e = 0; e < depth; e += 2) {
      for (int half = 0; half < 2; ++half) {
        const typename W::F k = W::setf(c[e + half]);
        for (int p = 0; p < kParts; ++p) {
          const float* q = panel + (e + half) * kPanelRows + p * W::kLanes;
          sum[half][p] = W::fma(k, W::loadf(q), sum[half][p]);
        }
      }
    }
    float dots[kPanelRows];
    for (int p = 0; p < kParts; ++p) W::storef(dots + p * W::kLanes, W::add(sum[0][p], sum[1][p]));
    for (int r = first; r < rows && r < first + kPanelRows; ++r) out[r] += dots[r - first];
  }
}

KVANT_NAMESPACE_END
