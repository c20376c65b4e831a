// Conversions between float and the narrow types, over all values and all ties.
#include "base/bits.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/bytes.hpp"
#include "support/draw.hpp"

namespace kvant {
namespace {

// Sign, `exponent_bits`, `mantissa_bits`, as the formula says.
double by_formula(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = std::ldexp(static_cast<double>(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1.0 + mantissa, exponent - bias);
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

// Every finite value converts back to itself, and between every two neighbours the midpoint goes to the even one and
// anything beside it to the nearer: together with monotonicity, that is round to nearest even for all floats.
template <class Bits, class Widen, class Narrow>
void check_type(int exponent_bits, int mantissa_bits, unsigned largest_finite, Widen widen, Narrow narrow) {
  const unsigned sign = 1u << (exponent_bits + mantissa_bits);
  for (unsigned magnitude = 0; magnitude <= largest_finite; ++magnitude) {
    for (const unsigned s : {0u, sign}) {
      const auto bits = static_cast<Bits>(s | magnitude);
      const float value = widen(bits);
      ASSERT_EQ(static_cast<double>(value), by_formula(bits, exponent_bits, mantissa_bits)) << bits;
      ASSERT_EQ(std::signbit(value), s != 0) << bits;
      ASSERT_EQ(narrow(value), bits) << value;
      if (magnitude == largest_finite) continue;
      const float next = widen(static_cast<Bits>(bits + 1));
      const auto middle = static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
      ASSERT_EQ(narrow(middle), magnitude % 2 == 0 ? bits : static_cast<Bits>(bits + 1)) << middle;
      ASSERT_EQ(narrow(std::nextafter(middle, value)), bits) << middle;
      ASSERT_EQ(narrow(std::nextafter(middle, next)), static_cast<Bits>(bits + 1)) << middle;
    }
  }
}

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Half, EveryValueAndTie) {
  check_type<std::uint16_t>(
      5, 10, 0x7BFF, [](std::uint16_t h) { return base::f16_to_f32(h); }, [](float x) { return base::f32_to_f16(x); });
  EXPECT_EQ(base::f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(base::f32_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(base::f32_to_f16(-kInf), 0xFC00);
  EXPECT_EQ(base::f16_to_f32(0xFC00), -kInf);
  EXPECT_EQ(base::f32_to_f16(0x1p-25f), 0);
  EXPECT_EQ(base::f32_to_f16(std::nextafter(0x1p-25f, 1.0f)), 1);
  for (unsigned bits = 0x7C01; bits <= 0x7FFF; ++bits) {
    EXPECT_TRUE(std::isnan(base::f16_to_f32(static_cast<std::uint16_t>(bits))));
    EXPECT_TRUE(std::isnan(base::f16_to_f32(static_cast<std::uint16_t>(bits | 0x8000))));
  }
}

TEST(Bfloat16, EveryValueAndTie) {
  // Midpoints of subnormals need 24 bits below 2^-126, which float has.
  check_type<std::uint16_t>(
      8, 7, 0x7F7F, [](std::uint16_t b) { return base::bf16_to_f32(b); }, [](float x) { return base::f32_to_bf16(x); });
  EXPECT_EQ(base::f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(base::f32_to_bf16(-kInf), 0xFF80);
}

TEST(E4m3, EveryValueAndTie) {
  check_type<std::uint8_t>(
      4, 3, 0x7E, [](std::uint8_t e) { return base::e4m3_to_f32(e); }, [](float x) { return base::f32_to_e4m3(x); });
  EXPECT_EQ(base::e4m3_to_f32(0x7E), 448.0f);
  for (const float large : {449.0f, 464.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(base::f32_to_e4m3(large), 0x7E) << large;
    EXPECT_EQ(base::f32_to_e4m3(-large), 0xFE) << large;
  }
  EXPECT_TRUE(std::isnan(base::e4m3_to_f32(0x7F)));
  EXPECT_TRUE(std::isnan(base::e4m3_to_f32(0xFF)));
}

TEST(Narrow, NanStaysNanWhateverItsPayload) {
  testing_support::Draw draw(1);
  for (int i = 0; i < 1000; ++i) {
    const auto payload = 1u + static_cast<std::uint32_t>(draw.bits() % 0x7FFFFF);
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float nan = std::bit_cast<float>(sign | 0x7F800000u | payload);
      EXPECT_TRUE(std::isnan(base::f16_to_f32(base::f32_to_f16(nan))));
      EXPECT_TRUE(std::isnan(base::bf16_to_f32(base::f32_to_bf16(nan))));
      EXPECT_TRUE(std::isnan(base::e4m3_to_f32(base::f32_to_e4m3(nan))));
      EXPECT_TRUE(base::is_nan(nan));
      EXPECT_FALSE(base::is_finite(nan));
    }
  }
}

// Any float at all: no neighbour of the result may be nearer.
TEST(Narrow, RandomFloatsGoToTheNearestHalf) {
  testing_support::Draw draw(2);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(draw.bits()));
    if (!(std::fabs(x) < 65504.0f)) continue;
    const std::uint16_t h = base::f32_to_f16(x);
    const double error = std::fabs(static_cast<double>(base::f16_to_f32(h)) - x);
    ASSERT_LE(error, std::fabs(static_cast<double>(base::f16_to_f32(static_cast<std::uint16_t>(h + 1))) - x)) << x;
    if (h & 0x7FFF) {
      ASSERT_LE(error, std::fabs(static_cast<double>(base::f16_to_f32(static_cast<std::uint16_t>(h - 1))) - x)) << x;
    }
  }
}

TEST(Helpers, MinMaxClampAbsFiniteSqrt) {
  static_assert(base::min(2, 3) == 2 && base::max(2, 3) == 3 && base::clamp(5, 0, 3) == 3 &&
                base::clamp(-5, 0, 3) == 0);
  static_assert(base::abs(-1.5f) == 1.5f && base::is_finite(1.0f) && !base::is_finite(kInf));
  static_assert(base::f16_to_f32(0x3C00) == 1.0f && base::f32_to_f16(1.0f) == 0x3C00);
  static_assert(base::e4m3_to_f32(base::f32_to_e4m3(-0.4375f)) == -0.4375f);
  testing_support::Draw draw(3);
  for (int i = 0; i < 10000; ++i) {
    const float x = draw.uniform() * 1e6f;
    EXPECT_EQ(base::sqrt_rn(x), static_cast<float>(std::sqrt(static_cast<double>(x))));
  }
}

TEST(Bytes, AnyAddressLittleEndian) {
  std::byte buffer[16]{};
  for (int at = 0; at < 8; ++at) {
    base::store_u32(buffer + at, 0x04030201u);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(static_cast<int>(buffer[at + i]), i + 1);
    EXPECT_EQ(base::load_u32(buffer + at), 0x04030201u);
    base::store_u16(buffer + at, 0xBEEF);
    EXPECT_EQ(base::load_u16(buffer + at), 0xBEEF);
    base::store_f32(buffer + at, -0.3f);
    EXPECT_EQ(base::load_f32(buffer + at), -0.3f);
  }
}

}  // namespace
}  // namespace kvant
