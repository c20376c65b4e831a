// Page blocks: the layout's parts, packing bit by bit, and whole rows of every format.
#include "codec/pack.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "codec/store.hpp"
#include "kvant/types.hpp"
#include "support/draw.hpp"

namespace kvant {
namespace {

using codec::PageLayout;
using codec::SideLayout;
using testing_support::Draw;

std::vector<std::byte> noise(std::size_t n, Draw& draw) {
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(draw.bits() & 0xFF);
  return bytes;
}

TEST(Layout, PartsAreAlignedDisjointAndInsideTheBlock) {
  for (const FormatInfo& k : formats()) {
    for (const FormatInfo& v : formats()) {
      for (const int head_dim : supported_head_dims()) {
        const PageLayout page = codec::page_layout(k.format, v.format, head_dim, 2);
        std::vector<std::pair<std::uint32_t, std::uint32_t>> parts;  // offset, bytes
        const auto tokens = static_cast<std::uint32_t>(kPageTokens * head_dim);
        std::uint64_t code_bits = 0;
        for (const SideLayout* s : {&page.k, &page.v}) {
          if (s->planes == 0)
            parts.emplace_back(s->plane_offset[0], tokens * static_cast<std::uint32_t>(s->element_bytes));
          int bits = 8 * s->element_bytes;
          for (int p = 0; p < s->planes; ++p) {
            parts.emplace_back(s->plane_offset[p], tokens * static_cast<std::uint32_t>(s->plane_bits[p]) / 8);
            bits += s->plane_bits[p];
          }
          EXPECT_EQ(bits, codec::format_bits(s->format));
          code_bits += static_cast<std::uint64_t>(bits) * tokens;
          parts.emplace_back(s->scale_offset, static_cast<std::uint32_t>(kPageTokens * s->groups * s->scale_bytes));
        }
        std::sort(parts.begin(), parts.end());
        std::uint32_t end = 0;
        for (const auto& [offset, bytes] : parts) {
          ASSERT_EQ(offset % 16, 0u) << k.name << "/" << v.name << " D=" << head_dim;
          ASSERT_GE(offset, end) << k.name << "/" << v.name << " D=" << head_dim;
          end = std::max(end, offset + bytes);
        }
        ASSERT_LE(end, page.block_bytes);
        ASSERT_EQ(page.block_bytes % 64, 0u);
        ASSERT_LT(page.block_bytes - end, 64u + 16u * 6u);
        ASSERT_EQ(page.code_bytes, code_bits / 8);
      }
    }
  }
}

// Where bit `bit` of the code of element j of a token is, from layout.hpp's prose, as a bit index into the block.
std::size_t bit_index(const SideLayout& s, bool values, int head_dim, int token, int j, int bit) {
  const int plane = s.planes == 2 && bit >= s.plane_bits[0] ? 1 : 0;
  const int in_plane = plane == 1 ? bit - s.plane_bits[0] : bit;
  const auto p = static_cast<std::size_t>(s.plane_bits[plane]);
  const auto d = static_cast<std::size_t>(head_dim), t = static_cast<std::size_t>(token),
             e = static_cast<std::size_t>(j);
  const std::size_t base = 8u * static_cast<std::size_t>(s.plane_offset[plane]) + static_cast<std::size_t>(in_plane);
  if (!values) return base + (t * d + e) * p;
  const std::size_t tokens = p == 8 ? 4 : 8;
  return base + ((t / tokens) * d + e) * tokens * p + t % tokens * p;
}

TEST(Pack, EveryFieldIsWhereTheLayoutSaysAndNothingElseChanges) {
  Draw draw(3);
  for (const FormatInfo& info : formats()) {
    if (info.dense) continue;
    for (const int head_dim : supported_head_dims()) {
      const PageLayout page = codec::page_layout(info.format, info.format, head_dim);
      for (const bool values : {false, true}) {
        const SideLayout& s = values ? page.v : page.k;
        std::vector<std::byte> storage = noise(page.block_bytes + 1, draw);
        std::byte* block = storage.data() + 1;  // no alignment
        std::vector<std::byte> want(block, block + page.block_bytes);
        for (const int token : {0, 1, 2, 3, 4, 5, 6, 7, 8, 31, 62, 63}) {
          std::vector<std::uint8_t> codes(static_cast<std::size_t>(head_dim)), back(codes.size());
          for (auto& c : codes) c = static_cast<std::uint8_t>(draw.bits() & ((1u << info.bits) - 1));
          for (int j = 0; j < head_dim; ++j) {
            for (int bit = 0; bit < info.bits; ++bit) {
              const std::size_t at = bit_index(s, values, head_dim, token, j, bit);
              const auto mask = static_cast<std::byte>(1u << (at % 8));
              if (codes[static_cast<std::size_t>(j)] >> bit & 1) {
                want[at / 8] |= mask;
              } else {
                want[at / 8] &= ~mask;
              }
            }
          }
          if (values) {
            codec::put_v_codes(s, head_dim, block, token, codes.data());
            codec::get_v_codes(s, head_dim, block, token, back.data());
          } else {
            codec::put_k_codes(s, head_dim, block, token, codes.data());
            codec::get_k_codes(s, head_dim, block, token, back.data());
          }
          ASSERT_EQ(codes, back) << info.name << " D=" << head_dim << " token " << token << " values " << values;
          ASSERT_EQ(std::memcmp(block, want.data(), want.size()), 0)
              << info.name << " D=" << head_dim << " token " << token << " values " << values;
        }
      }
    }
  }
}

TEST(Pack, ScalesAreGroupsOfSixtyFour) {
  Draw draw(5);
  const PageLayout page = codec::page_layout(Format::tq6, Format::lut8, 512, 2);
  std::vector<std::byte> block = noise(page.block_bytes, draw), want = block;
  const std::uint16_t k_scales[4] = {0x3C00, 0x4000, 0x4200, 0x7E00};
  const float v_scales[2] = {0.25f, 12.5f};
  codec::put_scales(page.k, block.data(), 37, k_scales);
  codec::put_scales_f32(page.v, block.data(), 37, v_scales);
  for (std::size_t g = 0; g < 4; ++g)
    std::memcpy(want.data() + page.k.scale_offset + (g * 64 + 37) * 2, k_scales + g, 2);
  for (std::size_t g = 0; g < 2; ++g)
    std::memcpy(want.data() + page.v.scale_offset + (g * 64 + 37) * 4, v_scales + g, 4);
  EXPECT_EQ(block, want);
  EXPECT_EQ(codec::get_scale(page.k, block.data(), 37, 2), 3.0f);
  EXPECT_TRUE(std::isnan(codec::get_scale(page.k, block.data(), 37, 3)));
  EXPECT_EQ(codec::get_scale(page.v, block.data(), 37, 1), 12.5f);
}

std::vector<float> levels_for(Format f) {
  const int count = codec::is_lut(f) ? 1 << codec::format_bits(f) : 0;
  std::vector<float> levels;
  for (int i = 0; i < count; ++i) {
    levels.push_back((static_cast<float>(i) - 0.5f * static_cast<float>(count - 1)) * 6.0f / static_cast<float>(count));
  }
  return levels;
}

// A whole page through store and load; bounds are loose (encode_test has the tight ones), dense formats are exact.
TEST(Store, RowsOfEveryFormatComeBack) {
  for (const FormatInfo& info : formats()) {
    for (const int head_dim : supported_head_dims()) {
      Draw draw(static_cast<std::uint64_t>(head_dim));
      const auto levels = levels_for(info.format);
      const PageLayout page = codec::page_layout(info.format, info.format, head_dim);
      std::vector<std::byte> block = noise(page.block_bytes, draw);
      std::vector<std::vector<float>> keys, values;
      for (int t = 0; t < kPageTokens; ++t) {
        keys.push_back(draw.exact(head_dim));
        values.push_back(draw.exact(head_dim));
        codec::store_row_k(page.k, head_dim, block.data(), t, keys.back().data(), levels.data());
        codec::store_row_v(page.v, head_dim, block.data(), t, values.back().data(), levels.data());
      }
      for (int t = 0; t < kPageTokens; ++t) {
        const auto at = static_cast<std::size_t>(t);
        std::vector<float> k(static_cast<std::size_t>(head_dim)), v(k.size());
        codec::load_row_k(page.k, head_dim, block.data(), t, levels.data(), k.data());
        codec::load_row_v(page.v, head_dim, block.data(), t, levels.data(), v.data());
        double error = 0, energy = 0;
        for (std::size_t i = 0; i < k.size(); ++i) {
          error += std::pow(k[i] - keys[at][i], 2) + std::pow(v[i] - values[at][i], 2);
          energy += std::pow(keys[at][i], 2) + std::pow(values[at][i], 2);
          if (info.format == Format::f16) {
            ASSERT_EQ(k[i], base::f16_to_f32(base::f32_to_f16(keys[at][i])));
          }
          if (info.format == Format::bf16) {
            ASSERT_EQ(v[i], base::bf16_to_f32(base::f32_to_bf16(values[at][i])));
          }
        }
        const double allowed = info.bits >= 32   ? 0.0
                               : info.bits >= 16 ? 2e-5
                               : info.bits == 8  ? 1e-3
                                                 : std::ldexp(1.0, 2 - 2 * info.bits);
        ASSERT_LE(error, allowed * energy) << info.name << " D=" << head_dim << " token " << t;
      }
    }
  }
}

TEST(Store, PoisonStaysInItsRow) {
  const int head_dim = 128;
  for (const FormatInfo& info : formats()) {
    if (info.dense) continue;
    const auto levels = levels_for(info.format);
    const PageLayout page = codec::page_layout(info.format, info.format, head_dim);
    std::vector<std::byte> block(page.block_bytes);
    Draw draw(9);
    for (int t = 0; t < kPageTokens; ++t) {
      auto x = draw.exact(head_dim);
      if (t == 10) x[100] = NAN;
      codec::store_row_v(page.v, head_dim, block.data(), t, x.data(), levels.data());
    }
    for (int t = 0; t < kPageTokens; ++t) {
      float v[128];
      codec::load_row_v(page.v, head_dim, block.data(), t, levels.data(), v);
      for (const float x : v) ASSERT_EQ(std::isnan(x), t == 10) << info.name << " token " << t;
    }
  }
}

}  // namespace
}  // namespace kvant
