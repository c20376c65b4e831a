// Clears the tokens of a page from one on. Behind a sequence's last token a page may keep tokens that were truncated,
// or those of another sequence that had the page before: they must not go into a file.
#pragma once

#include <cstring>

#include "codec/pack.hpp"

KVANT_NAMESPACE_BEGIN(codec)

namespace detail {

inline void clear_rows(std::byte* rows, int first, int row_bytes) {
  const auto bytes = static_cast<std::size_t>(row_bytes);
  std::memset(rows + static_cast<std::size_t>(first) * bytes, 0, static_cast<std::size_t>(kPageTokens - first) * bytes);
}

// Words of tokens: those that begin before `first` lose its tokens only.
inline void clear_words(std::byte* plane, int head_dim, int bits, int first) {
  const int tokens = bits == 8 ? 4 : 8;
  const int whole = (first + tokens - 1) / tokens;
  for (int token = first; token < whole * tokens; ++token) {
    for (int j = 0; j < head_dim; ++j) put_field(plane, v_field(bits, head_dim, token, j), bits, 0);
  }
  const auto bytes = static_cast<std::size_t>(head_dim * tokens * bits / 8);
  std::memset(plane + static_cast<std::size_t>(whole) * bytes, 0,
              static_cast<std::size_t>(kPageTokens / tokens - whole) * bytes);
}

}  // namespace detail

inline void clear_tokens(const PageLayout& page, std::byte* block, int first) {
  for (const SideLayout* s : {&page.k, &page.v}) {
    const int d = s->head_dim;
    if (s->planes == 0) detail::clear_rows(block + s->plane_offset[0], first, d * s->element_bytes);
    for (int i = 0; i < s->planes; ++i) {
      std::byte* plane = block + s->plane_offset[i];
      if (s == &page.k) {
        detail::clear_rows(plane, first, d * s->plane_bits[i] / 8);
      } else {
        detail::clear_words(plane, d, s->plane_bits[i], first);
      }
    }
    for (int group = 0; group < s->groups; ++group) {
      detail::clear_rows(block + scale_at(*s, 0, group), first, s->scale_bytes);
    }
  }
}

KVANT_NAMESPACE_END
