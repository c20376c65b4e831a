// From run-time values to template parameters: the only spelling of it in src/cpu.
#pragma once

#include "base/config.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class Fn>
KVANT_INLINE auto with_format(Format f, Fn fn) {
  switch (f) {
#define KVANT_FORMAT(family, name, ...)            \
  case Format::name: {                             \
    return fn.template operator()<Format::name>(); \
  }
#include "codec/formats.def"
  }
  __builtin_unreachable();
}

// Calls fn<R>(first row) over rows 0 .. rows - 1 in chunks of eight, then four, the rest in one chunk of one to three.
template <class Fn>
KVANT_INLINE void in_chunks_of_eight(int rows, Fn fn) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) fn.template operator()<8>(r);
  for (; r + 4 <= rows; r += 4) fn.template operator()<4>(r);
  if (rows - r == 3) fn.template operator()<3>(r);
  if (rows - r == 2) fn.template operator()<2>(r);
  if (rows - r == 1) fn.template operator()<1>(r);
}

// Calls fn<R>(first row) over rows 0 .. rows - 1 in chunks of four, the rest in one chunk of one to three.
template <class Fn>
KVANT_INLINE void in_chunks_of_four(int rows, Fn fn) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) fn.template operator()<4>(r);
  if (rows - r == 3) fn.template operator()<3>(r);
  if (rows - r == 2) fn.template operator()<2>(r);
  if (rows - r == 1) fn.template operator()<1>(r);
}

// Calls fn<N>(first) over 0 .. count - 1 in chunks of six and four, whose 12 and 8 accumulators hide the latency of two
// FMAs a cycle; fewer do not, and are only the end of an odd count.
template <class Fn>
KVANT_INLINE void in_sixes_and_fours(int count, Fn fn) {
  int at = 0;
  for (; count - at >= 6 && count - at != 8; at += 6) fn.template operator()<6>(at);
  for (; count - at >= 4; at += 4) fn.template operator()<4>(at);
  for (; count - at >= 2; at += 2) fn.template operator()<2>(at);
  if (count - at == 1) fn.template operator()<1>(at);
}

KVANT_NAMESPACE_END
