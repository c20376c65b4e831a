// One ISA's function table: everything of src/cpu instantiated for the Simd of this unit. Included by isa_*.cpp only.
#pragma once

#include "cpu/attend/attend.hpp"
#include "cpu/attend/decode.hpp"
#include "cpu/encode/centre.hpp"
#include "cpu/encode/store.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
const char* product_name(Format f) {
  if (is_integer_format(f)) {
    return dots_bytes<S>() ? "int16 digits as two bytes x integer levels" : "int16 digits x integer levels";
  }
  if (codec::is_lut(f)) return "decoded to an f32 tile";
  return "converted to f32";
}

// The table itself.
template <class S>
constexpr core::Kernels kernels_of(const char* name, const char* detail, bool (*available)()) {
  return {
      .name = name,
      .detail = detail,
      .available = available,
      .store_k = store<true>,
      .store_v = store<false>,
      .centre = centre<>,
      .decode_k = decode<true>,
      .decode_v = decode<false>,
      .prepare = prepare<S>,
      .attend = attend<S>,
      .merge = merge<S>,
      .product_name = product_name<S>,
      .tile_products = has_matrix<S>() ? kMatrixProducts : "pages become f32, f32 products",
      .has_matrix = has_matrix<S>(),
      .multiplies_bytes = multiplies_bytes<S>(Format::tq4),
  };
}

KVANT_NAMESPACE_END
