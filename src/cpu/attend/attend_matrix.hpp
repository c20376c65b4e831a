// The path for many rows on a matrix unit: some pages of a kind at once, so that output sums pass between memory and
// tile registers once for 256 keys, and rows of queries once for as many keys.
//
// Products of 8 bits: queries are integers (codec/digits.hpp) and levels bytes, with exact sums. Weights are one bf16,
// which has 8 bits, too: sums of bytes would have to become floats after every page, which takes longer than the
// products that they save.
#pragma once

#include "cpu/attend/levels.hpp"
#include "cpu/attend/matrix.hpp"
#include "cpu/attend/page_rows.hpp"
#include "cpu/attend/tile.hpp"
#include "cpu/encode/page_centre.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
struct MatrixItem {
  using W = Wide<S>;
  static constexpr int kPages = core::kMatrixPages;
  static constexpr int kStride = kPages * kPageTokens;  // scores are [rows][kStride]

  const core::AttendItem& item;
  const core::RunContext& run;
  const core::ScratchLayout& l;
  ItemRows rows;
  int row_blocks;
  float* scores;

  explicit MatrixItem(const core::AttendItem& which)
      : item(which),
        run(*which.run),
        l(which.layout->scratch),
        rows{which, run, run.sequences[which.sequence], item_state(which), at<float>(which.scratch, l.centers)},
        row_blocks(blocks_of_rows(which.rows)),
        scores(at<float>(which.scratch, l.scores)) {}

  KVANT_INLINE Operand rows_at(std::size_t offset, int depth) const {
    return operand_at(item.scratch + offset, row_blocks, depth);
  }
  // Elements of a key that are multiplied.
  KVANT_INLINE int depth_of(Format f) const {
    return is_integer_format(f) ? run.padded_dim : (run.head_dim.k + kTileDepth - 1) / kTileDepth * kTileDepth;
  }
  // Elements of a latent that are multiplied with queries.
  KVANT_INLINE int latent_depth() const { return (run.head_dim.v + kTileDepth - 1) / kTileDepth * kTileDepth; }
  // A query's part that latents are multiplied with, in the basis.
  KVANT_INLINE float* latent_query(int r) const {
    return at<float>(item.scratch, l.latent_queries) + r * latent_depth();
  }
  KVANT_INLINE SumTiles outputs(int domain) const {
    return {at<float>(item.scratch, l.output[domain]), kTileRows * run.head_dim.v, kTileRows * kTileWords, kTileWords};
  }

  void pack_queries() const {
    const Format f = run.layout[core::kEncoded].k.format;
    const int depth = depth_of(f), raw_depth = depth_of(Format::f32);
    const Operand as_given = rows_at(l.panel_raw, raw_depth), in_basis = rows_at(l.panel_basis, depth);
    std::int16_t element[codec::kMaxHeadDim];
    for (int e = 0; e < depth; ++e)
      element[e] = static_cast<std::int16_t>(is_integer_format(f) ? level_element<W>(f, e) : e);
    for (int r = 0; r < row_blocks * kTileRows; ++r) {
      float raw[codec::kMaxHeadDim], rotated[codec::kMaxHeadDim], ordered[codec::kMaxHeadDim];
      read_keys_row(item, l, rows.state, r, raw, rotated);
      pack_row<W, kQueryTerms>(raw, raw_depth, as_given, r);
      if (run.byte_products) {
        pack_digits(r, rotated);
      } else {
        for (int e = 0; e < depth; ++e) ordered[e] = rotated[element[e]];
        pack_row<W, kQueryTerms>(ordered, depth, in_basis, r);
      }
      if (run.centred) {
        float* panel = at<float>(item.scratch, l.panel_centre) + r / kPanelRows * run.padded_dim * kPanelRows;
        for (int e = 0; e < run.padded_dim; ++e) panel[e * kPanelRows + r % kPanelRows] = rotated[centre_element(e)];
      }
      if (!run.latent) continue;
      read_latents_row(item, l, rows.state, r, raw, rotated);
      pack_row<W, kQueryTerms>(raw, latent_depth(), rows_at(l.latent_raw, latent_depth()), r);
      pack_row<W, kQueryTerms>(rotated, latent_depth(), rows_at(l.latent_basis, latent_depth()), r);
      if (run.latents_centred && r < item.rows)
        __builtin_memcpy(latent_query(r), rotated, static_cast<std::size_t>(latent_depth()) * sizeof(float));
    }
  }

  // Tiles of 16 rows of 64 bytes: the numbers, or their high and their low digits as two terms.
  KVANT_INLINE Operand digits() const {
    const int steps = run.padded_dim / 64;
    return {item.scratch + l.digits, static_cast<std::size_t>(row_blocks * steps) * kTileBytes, steps};
  }
  void pack_digits(int r, const float* rotated) const {
    if (r >= item.rows) return;
    std::int16_t numbers[codec::kMaxHeadDim];
    query_numbers(item, r, rotated, numbers);
    const Format f = run.layout[core::kEncoded].k.format;
    const Operand to = digits();
    for (int step = 0; step < to.steps; ++step) {
      std::uint8_t* first = reinterpret_cast<std::uint8_t*>(to.tile(0, r / kTileRows, step)) + r % kTileRows * 64;
      for (int i = 0; i < 64; ++i) {
        const int number = numbers[step * 64 + word_element(f, 1, i / 4, i % 4)];
        first[i] = static_cast<std::uint8_t>(run.two_digits ? number >> 8 : number);
        if (run.two_digits) first[to.term_bytes + static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(number);
      }
    }
  }

  // Scores of `count` pages from sums of integers.
  template <Format F>
  void multiply_digits(const PageRows* seen, int count) const {
    const codec::SideLayout& side = seen->page.layout->k;
    const Operand queries = digits();
    const int blocks = count * kBlocksOfPage;
    const Operand keys{item.scratch + l.page, 0, queries.steps};
    for (int i = 0; i < count; ++i) {
      pack_key_words<S, F, 1>(side, run.head_dim.k, run.padded_dim, seen[i].page.block, 0, kBlocksOfPage,
                              columns_from(keys, i * kBlocksOfPage, 0));
    }
    const int group_steps = keys.steps / side.groups;
    for (int g = 0; g < side.groups; ++g) {
      float* sums = g == 0 ? scores : at<float>(item.scratch, l.weights);  // as i32
      const SumTiles to = score_tiles(sums, kStride);
      const int begin = g * group_steps, end = begin + group_steps;
      multiply_all<S, 1, 1, false, Numbers::signed_rows>(queries, row_blocks, keys, 0, blocks, begin, end, to);
      if (run.two_digits) {
        for (int r = 0; r < row_blocks * kTileRows; ++r) {
          float* row = sums + r * kStride;
          for (int t = 0; t < count * kPageTokens; t += W::kLanes)
            W::storef(row + t, W::as_f(W::template shl<8>(W::as_i(W::loadf(row + t)))));
        }
        const Operand low{queries.at + queries.term_bytes, 0, queries.steps};
        multiply_all<S, 1, 1, true, Numbers::unsigned_rows>(low, row_blocks, keys, 0, blocks, begin, end, to);
      }
      for (int i = 0; i < count; ++i) {
        scale_digits(seen[i].page.block + side.scale_offset + g * kPageTokens * 2, g, sums + i * kPageTokens,
                     scores + i * kPageTokens);
      }
    }
  }
  // scores = (or, behind the first scale group, +=) (2 sum - correction) * scale of the token * half a step
  void scale_digits(const std::byte* scales, int g, const float* sums, float* to) const {
    for (int r = 0; r < item.rows; ++r, sums += kStride, to += kStride) {
      const int of_row = r * codec::kMaxScaleGroups + g;
      const typename W::I correction = W::seti(at<std::int32_t>(item.scratch, l.corrections)[of_row]);
      const typename W::F half_step = W::setf(at<float>(item.scratch, l.half_steps)[of_row]);
      for (int t = 0; t < kPageTokens; t += W::kLanes) {
        typename W::F s =
            score_of_sums<W>(W::as_i(W::loadf(sums + t)), correction, load_scales<W>(scales + 2 * t), half_step);
        if (g > 0) s = W::add(s, W::loadf(to + t));
        W::storef(to + t, s);
      }
    }
  }

  // scores of `count` pages of a kind
  void multiply_keys(const PageRows* seen, int count) const {
    const codec::SideLayout& side = seen->page.layout->k;
    const int d = run.head_dim.k, depth = depth_of(side.format), blocks = count * kBlocksOfPage;
    const Operand queries = rows_at(seen->page.domain == core::kExact ? l.panel_raw : l.panel_basis, depth);
    const Operand keys = operand_at(item.scratch + l.page, blocks, depth);
    with_format(side.format, [&]<Format F>() {
      if constexpr (is_integer_format(F)) {
        if (run.byte_products) return multiply_digits<F>(seen, count);
        for (int i = 0; i < count; ++i) pack_level_keys<S, F>(side, d, seen[i].page.block, keys, i * kBlocksOfPage);
        const int group_steps = keys.steps / side.groups;
        for (int g = 0; g < side.groups; ++g) {
          float* sums = g == 0 ? scores : at<float>(item.scratch, l.weights);
          multiply_all<S, 2, 1, false>(queries, row_blocks, keys, 0, blocks, g * group_steps, (g + 1) * group_steps,
                                       score_tiles(sums, kStride));
          for (int i = 0; i < count; ++i) {
            scale_scores<S>(seen[i].page.block + side.scale_offset + g * kPageTokens * 2, item.rows, g > 0,
                            sums + i * kPageTokens, scores + i * kPageTokens, kStride);
          }
        }
      } else {
        float* tile = at<float>(item.scratch, l.tile);
        for (int i = 0; i < count; ++i) {
          const PageView& page = seen[i].page;
          decode_keys<S, F>(side, d, run.padded_dim, page.block, 0, kPageTokens, page.k_levels, tile, depth);
          zero_columns(tile, depth, d);
          pack_keys<S, key_terms<F>()>(tile, depth, keys, i * kBlocksOfPage);
        }
        multiply_all<S, kQueryTerms, key_terms<F>(), false>(queries, row_blocks, keys, 0, blocks, 0, keys.steps,
                                                            score_tiles(scores, kStride));
      }
    });
  }

  // scores += queries times the latents' centre of page i, where latents have it.
  void add_latent_centre(const PageView& page, int i) const {
    LatentCentre room;
    const LatentCentre* const centre = find_latent_centre<S>(*page.layout, page.block, room);
    if (centre == nullptr) return;
    float dots[core::kRowBlock] = {};
    add_centre_of_rows<S>(centre->c, latent_query(0), item.rows, latent_depth(), dots);
    for (int r = 0; r < item.rows; ++r) {
      float* s = scores + r * kStride + i * kPageTokens;
      for (int t = 0; t < kPageTokens; t += W::kLanes)
        W::storef(s + t, W::fma(W::setf(dots[r]), W::loadf(centre->share + t), W::loadf(s + t)));
    }
  }
  // Output sums += the same centre times the weights of page i.
  void add_latent_centre_of_weights(const PageView& page, int i) const {
    LatentCentre room;
    const LatentCentre* const centre = find_latent_centre<S>(*page.layout, page.block, room);
    if (centre == nullptr) return;
    for (int r = 0; r < item.rows; ++r) {
      const float* p = scores + r * kStride + i * kPageTokens;
      typename W::F sum = W::setf(0.0f);
      for (int t = 0; t < kPageTokens; t += W::kLanes) sum = W::fma(W::loadf(p + t), W::loadf(centre->share + t), sum);
      const typename W::F weight = W::setf(W::reduce_add(sum));
      each_tile_of_row(outputs(page.domain), run.head_dim.v, r, [&](float* x, int c) {
        for (int j = 0; j < kTileWords; j += W::kLanes)
          W::storef(x + j, W::fma(weight, W::loadf(centre->c + c + j), W::loadf(x + j)));
      });
    }
  }

  // scores += queries times latents. Levels are decoded, transposed and packed once more as values, whose order of
  // elements is another.
  void multiply_latents(const PageRows* seen, int count) const {
    const codec::SideLayout& side = seen->page.layout->v;
    const int d = run.head_dim.v, depth = latent_depth(), blocks = count * kBlocksOfPage;
    const Operand queries = rows_at(seen->page.domain == core::kExact ? l.latent_raw : l.latent_basis, depth);
    const Operand latents = operand_at(item.scratch + l.page, blocks, depth);
    float* tile = at<float>(item.scratch, l.tile);
    with_format(side.format, [&]<Format F>() {
      constexpr bool kLevels = is_integer_format(F);
      constexpr int kTerms = kLevels ? 1 : key_terms<F>();
      for (int i = 0; i < count; ++i) {
        const PageView& page = seen[i].page;
        if constexpr (kLevels) {
          const typename Unpack<S, F>::Tables tables = Unpack<S, F>::tables();
          for (int o = 0; o < kPageTokens / 8; ++o)
            decode_value_octet<S, F, false>(side, d, page.block, o, tables, tile + 8 * o * depth, depth);
        } else {
          LatentCentre room;
          decode_values<S, F>(side, d, page.block, 0, kPageTokens, page.v_levels, tile, depth,
                              find_latent_centre<S>(*page.layout, page.block, room));
        }
        zero_columns(tile, depth, d);
        pack_keys<S, kTerms>(tile, depth, latents, i * kBlocksOfPage);
      }
      if constexpr (kLevels) {
        float* sums = at<float>(item.scratch, l.weights);
        const int group_steps = latents.steps / side.groups;
        for (int g = 0; g < side.groups; ++g) {
          multiply_all<S, 2, 1, false>(queries, row_blocks, latents, 0, blocks, g * group_steps, (g + 1) * group_steps,
                                       score_tiles(sums, kStride));
          for (int i = 0; i < count; ++i) {
            scale_scores<S>(seen[i].page.block + side.scale_offset + g * kPageTokens * 2, item.rows, true,
                            sums + i * kPageTokens, scores + i * kPageTokens, kStride);
          }
        }
        for (int i = 0; i < count; ++i) add_latent_centre(seen[i].page, i);
      } else {
        multiply_all<S, kQueryTerms, kTerms, true>(queries, row_blocks, latents, 0, blocks, 0, latents.steps,
                                                   score_tiles(scores, kStride));
      }
    });
  }

  void find_centers(PageRows* seen) const {
    if (!begin_centers(rows, seen)) return;
    float c[codec::kMaxHeadDim];
    decode_centre<S>(*seen->page.layout, run.padded_dim, seen->page.block, c);
    add_centre_of_panels<S>(c, at<float>(item.scratch, l.panel_centre), item.rows, 0, run.padded_dim, run.padded_dim,
                            seen->page_center);
  }

  // Output sums += weights in `scores` times values of these pages.
  void multiply_values(const PageRows* seen, int count) const {
    const codec::SideLayout& side = seen->page.layout->v;
    const int d = run.head_dim.v, depth = count * kPageTokens;
    const Operand weights = rows_at(l.weights, depth),
                  values = operand_at(item.scratch + l.page, d / kTileWords, depth);
    const SumTiles o = outputs(seen->page.domain);
    with_format(side.format, [&]<Format F>() {
      if constexpr (is_integer_format(F)) {
        for (int i = 0; i < count; ++i) pack_level_values<S, F>(side, d, seen[i].page.block, values, i * kStepsOfPage);
        const int group_blocks = d / side.groups / kTileWords;
        const auto multiply = [&]<int kTerms>() {
          for (int g = 0; g < side.groups; ++g) {
            for (int i = 0; i < count; ++i) {
              const std::byte* scales = seen[i].page.block + side.scale_offset + g * kPageTokens * 2;
              for (int r = 0; r < item.rows; ++r) {
                pack_level_weights<S, F, kTerms>(scores + r * kStride + i * kPageTokens, scales, weights, r,
                                                 i * kPageTokens / 2);
              }
            }
            multiply_all<S, kTerms, 1, true>(weights, row_blocks, values, g * group_blocks, (g + 1) * group_blocks, 0,
                                             values.steps, o);
          }
        };
        run.byte_products ? multiply.template operator()<1>() : multiply.template operator()<2>();
        for (int i = 0; i < count; ++i) add_latent_centre_of_weights(seen[i].page, i);
      } else {
        float* tile = at<float>(item.scratch, l.tile);
        const int stride = d + core::kTilePadding;
        for (int i = 0; i < count; ++i) {
          const PageView& page = seen[i].page;
          LatentCentre room;
          decode_values<S, F>(side, d, page.block, page.t_begin & ~7, page.t_end, page.v_levels, tile, stride,
                              find_latent_centre<S>(*page.layout, page.block, room));
          zero_rows(tile, stride, 0, page.t_begin);
          zero_rows(tile, stride, page.t_end, kPageTokens);
          clear_broken(page, tile, stride);
          pack_values<S>(tile, stride, d, values, i * kStepsOfPage);
        }
        for (int r = 0; r < item.rows; ++r) pack_row<W, 2>(scores + r * kStride, depth, weights, r);
        multiply_all<S, 2, 2, true>(weights, row_blocks, values, 0, d / kTileWords, 0, values.steps, o);
      }
    });
  }

  // Weights of a page are relative to its rows' maxima then; later pages' may have moved these.
  void rescale(int domain, const float (*factors)[core::kRowBlock], int count) const {
    for (int r = 0; r < item.rows; ++r) {
      float factor = 1.0f;
      for (int i = count - 1; i >= 0; --i) {
        if (factor != 1.0f) {
          float* p = scores + r * kStride + i * kPageTokens;
          for (int t = 0; t < kPageTokens; t += W::kLanes) W::storef(p + t, W::mul(W::loadf(p + t), W::setf(factor)));
        }
        factor *= factors[i][r];
      }
      if (factor == 1.0f) continue;
      each_tile_of_row(outputs(domain), run.head_dim.v, r, [&](float* x, int) {
        for (int i = 0; i < kTileWords; i += W::kLanes) W::storef(x + i, W::mul(W::loadf(x + i), W::setf(factor)));
      });
    }
  }

  void attend_pages(PageRows* seen, int count) const {
    const int domain = seen->page.domain;
    if (rows.state.used[domain] == 0) {
      rows.state.used[domain] = 1;
      __builtin_memset(outputs(domain).at, 0,
                       static_cast<std::size_t>(row_blocks * kTileRows * run.head_dim.v) * sizeof(float));
    }
    multiply_keys(seen, count);
    if (run.latent) multiply_latents(seen, count);
    for (int i = 0; i < count; ++i) find_centers(seen + i);
    float factors[kPages][core::kRowBlock];
    for (int i = 0; i < count; ++i) softmax_of_page<S>(rows, seen[i], scores + i * kPageTokens, kStride, factors[i]);
    rescale(domain, factors, count);
    multiply_values(seen, count);
  }

  // Output sums to where partials have theirs.
  void copy_outputs() const {
    const int d = run.head_dim.v;
    for (int domain = 0; domain < core::kDomains; ++domain) {
      if (rows.state.used[domain] == 0) continue;
      for (int r = 0; r < item.rows; ++r) {
        float* to = rows.state.o_of(domain) + r * d;
        each_tile_of_row(outputs(domain), d, r,
                         [&](const float* x, int c) { __builtin_memcpy(to + c, x, kTileWords * sizeof(float)); });
      }
    }
  }
};

template <class S>
void attend_by_matrix(const core::AttendItem& item) {
  const MatrixItem<S> m(item);
  Matrix<S>::configure();
  m.pack_queries();
  PageRows seen[core::kMatrixPages];
  int count = 0;
  for (std::int64_t use = item.use_begin; use < item.use_end; ++use) {
    if (!look_at_page<S>(m.rows, use, &seen[count])) continue;
    if (count > 0 && seen[count].page.layout != seen[0].page.layout) {
      m.attend_pages(seen, count);
      seen[0] = seen[count];
      count = 0;
    }
    if (++count == core::kMatrixPages) {
      m.attend_pages(seen, count);
      count = 0;
    }
  }
  if (count > 0) m.attend_pages(seen, count);
  Matrix<S>::release();
  m.copy_outputs();
  if (item.partial == core::kNoPartial)
    finish_rows<S>(*item.run, item.sequence, item.kv_head, item.row_begin, m.rows.state);
}

KVANT_NAMESPACE_END
