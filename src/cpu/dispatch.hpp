// From run-time values to template parameters: the only spelling of it in src/cpu.
#pragma once

#include "base/config.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class Fn>
KVANT_INLINE auto with_format(Format f, Fn fn) {
  switch (f) {
    case Format::f32: return fn.template operator()<Format::f32>();
    case Format::f16: return fn.template operator()<Format::f16>();
    case Format::bf16: return fn.template operator()<Format::bf16>();
    case Format::fp8: return fn.template operator()<Format::fp8>();
    case Format::tq2: return fn.template operator()<Format::tq2>();
    case Format::tq3: return fn.template operator()<Format::tq3>();
    case Format::tq4: return fn.template operator()<Format::tq4>();
    case Format::tq5: return fn.template operator()<Format::tq5>();
    case Format::tq6: return fn.template operator()<Format::tq6>();
    case Format::tq8: return fn.template operator()<Format::tq8>();
    case Format::lut4: return fn.template operator()<Format::lut4>();
    case Format::lut5: return fn.template operator()<Format::lut5>();
    case Format::lut6: return fn.template operator()<Format::lut6>();
    case Format::lut8: return fn.template operator()<Format::lut8>();
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

KVANT_NAMESPACE_END
