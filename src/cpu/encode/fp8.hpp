// The encoder of fp8 (codec/vector.hpp), eight lanes at a time; the same bits.
#pragma once

#include "cpu/encode/encode.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// e4m3 of eight finite values below 2^32 / g.
template <class S>
KVANT_INLINE typename S::I to_e4m3(typename S::F x) {
  using I = typename S::I;
  const I bits = S::as_i(x);
  const I sign = S::and_(S::template shr<24>(bits), S::seti(0x80));
  const typename S::F magnitude = S::min(S::as_f(S::and_(bits, S::seti(0x7FFFFFFF))), S::setf(448.0f));
  const I m = S::as_i(magnitude);
  const I odd = S::and_(S::template shr<20>(m), S::seti(1));
  const I normal = S::template shr<20>(S::addi(S::addi(m, odd), S::seti(0x7FFFF - 0x3C000000)));
  const I small = S::subi(S::as_i(S::add(magnitude, S::setf(0x1p14f))), S::seti(0x46800000));
  return S::or_(sign, choose<S>(S::less(magnitude, S::setf(0x1p-6f)), small, normal));
}

template <class S>
__attribute__((noinline)) void encode_fp8_rows(const EncodeRows& in, EncodedRows& out) {
  for (int i = 0; i < in.count; ++i) {
    in.ahead->fetch();
    const float largest = base::bit_cast<float>(in.largest[i]);
    out.refused[i] = in.largest[i] >= base::bit_cast<std::int32_t>(0x1p32f);
    if (out.refused[i]) continue;
    std::uint16_t half = base::f32_to_f16(largest / 448.0f);
    if (base::f16_to_f32(half) * 448.0f < largest) ++half;
    out.refused[i] = half >= 0x7C00u;
    if (out.refused[i]) continue;
    out.scale[i] = half;
    std::uint8_t* codes = out.codes + i * in.stride;
    if (half == 0) {
      __builtin_memset(codes, 0, static_cast<std::size_t>(in.stride));
      continue;
    }
    const typename S::F r = S::setf(1.0f / base::f16_to_f32(half));
    const float* y = in.y + i * in.stride;
    for (int j = 0; j < in.stride; j += 8) S::store_u8(codes + j, to_e4m3<S>(S::mul(S::loadf(y + j), r)));
  }
}

KVANT_NAMESPACE_END
