// Quantisation: levels, every input that could go wrong, imported levels, the public functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "codec/rotation.hpp"
#include "support/draw.hpp"
#include "support/encoded.hpp"

namespace kvant {
namespace {

using codec::TqSpec;
using testing_support::decode;
using testing_support::Draw;
using testing_support::encode;
using testing_support::Encoded;
using testing_support::kScaledFormats;
using testing_support::kTqFormats;
using testing_support::name_of;

// --- levels ---------------------------------------------------------------------------------------------------------

TEST(Levels, AreSymmetricAscendingAndOnTheHalfGrid) {
  for (const Format f : kTqFormats) {
    const TqSpec s = codec::tq_spec(f);
    SCOPED_TRACE(name_of(f));
    EXPECT_EQ(s.bits, codec::format_bits(f));
    const int count = 1 << s.bits;
    for (int code = 0; code < count; ++code) {
      const int mirrored = s.uniform ? count - 1 - code : code ^ (count / 2);
      EXPECT_EQ(static_cast<float>(codec::tq_level(s, code)) - s.offset,
                s.offset - static_cast<float>(codec::tq_level(s, mirrored)));
    }
    for (int m = 0; m < s.magnitudes; ++m) {
      EXPECT_GE(s.u[m], 64);
      EXPECT_LE(s.u[m], 127);
      if (m == 0) continue;
      EXPECT_GT(s.u[m], s.u[m - 1]);
      EXPECT_EQ(s.threshold[m - 1], 0.5f * static_cast<float>(s.u[m] + s.u[m - 1]) - 63.5f);
    }
    EXPECT_GT(static_cast<float>(codec::tq_level(s, codec::tq_zero_code(s))), s.offset);
    EXPECT_LE(static_cast<float>(codec::tq_level(s, codec::tq_zero_code(s))), s.offset + (s.bits == 2 ? 18.0f : 7.0f));
  }
}

TEST(Levels, FourBitsAsInTheContract) {
  const TqSpec s = codec::tq_spec(Format::tq4);
  const std::array<int, 8> u{66, 72, 78, 84, 91, 99, 109, 124};
  for (int m = 0; m < 8; ++m) {
    EXPECT_EQ(codec::tq_level(s, m), u[static_cast<std::size_t>(m)]);
    EXPECT_EQ(codec::tq_level(s, m + 8), 127 - u[static_cast<std::size_t>(m)]);
  }
}

// --- inputs that could go wrong -------------------------------------------------------------------------------------

TEST(Edges, ZeroTinyAndNegativeZeroDecodeToZero) {
  for (const Format f : kScaledFormats) {
    for (const float v : {0.0f, -0.0f, 1e-45f, -1e-30f, 1e-13f}) {
      const Encoded e = encode(f, std::vector<float>(128, v));
      for (const float z : decode(f, e)) ASSERT_LE(std::fabs(z), f == Format::fp8 ? 1e-12f : 0.0f) << name_of(f) << v;
      if (f != Format::fp8) {
        EXPECT_EQ(e.scales[0], 0);
        EXPECT_EQ(e.codes, std::vector<std::uint8_t>(128, codec::tq_zero_code(codec::tq_spec(f))));
      }
    }
  }
}

TEST(Edges, ScalesInTheSubnormalRangeStillHelp) {
  Draw draw(31);
  for (const Format f : kTqFormats) {
    auto y = draw.gaussian(128);
    for (float& v : y) v *= 3e-6f;
    double error = 0, energy = 0;
    const auto z = decode(f, encode(f, y));
    for (std::size_t i = 0; i < y.size(); ++i) {
      error += (y[i] - z[i]) * static_cast<double>(y[i] - z[i]);
      energy += static_cast<double>(y[i]) * y[i];
    }
    EXPECT_LT(error / energy, 0.2) << name_of(f);
  }
}

TEST(Edges, LargestHalvesSurviveInAnyShape) {
  for (const Format f : kScaledFormats) {
    for (const int head_dim : supported_head_dims()) {
      std::vector<float> x(static_cast<std::size_t>(head_dim), 65504.0f);
      const auto same = decode(f, encode(f, x));
      for (const float z : same) ASSERT_NEAR(z / 65504.0f, 1.0f, 0.01f) << name_of(f) << " D=" << head_dim;
      codec::rotate(x.data(), head_dim);
      for (const float z : decode(f, encode(f, x))) ASSERT_TRUE(base::is_finite(z)) << name_of(f) << " D=" << head_dim;
    }
  }
}

// Levels have no zero, so few bits trade the outlier's size against noise everywhere else: never worse than nothing.
TEST(Edges, OneOutlierKeepsItsPlace) {
  for (const Format f : kScaledFormats) {
    std::vector<float> y(128, 0.0f);
    y[77] = -3.0f;
    const auto z = decode(f, encode(f, y));
    EXPECT_EQ(std::min_element(z.begin(), z.end()) - z.begin(), 77) << name_of(f);
    double error = 0;
    for (std::size_t i = 0; i < y.size(); ++i) error += (y[i] - z[i]) * static_cast<double>(y[i] - z[i]);
    EXPECT_LT(error / 9.0, 1.0) << name_of(f);
    if (format_info(f).bits >= 4) {
      EXPECT_NEAR(z[77], -3.0f, 0.6f) << name_of(f);
    }
  }
}

TEST(Edges, NonFiniteAndUnrepresentableVectorsArePoisoned) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Format f : kScaledFormats) {
    for (const float bad : {inf, -inf, nan, 0x1p32f, -3e38f}) {
      for (const std::size_t at : {std::size_t{0}, std::size_t{300}, std::size_t{511}}) {
        std::vector<float> y(512, 1.0f);
        y[at] = bad;
        const Encoded e = encode(f, y);
        for (int i = 0; i < codec::tq_scale_groups(f, 512); ++i) {
          EXPECT_EQ(e.scales[static_cast<std::size_t>(i)], 0x7E00) << name_of(f) << " " << bad << " at " << at;
        }
        const std::uint8_t zero = f == Format::fp8 ? std::uint8_t{0} : codec::tq_zero_code(codec::tq_spec(f));
        EXPECT_EQ(e.codes, std::vector<std::uint8_t>(512, zero));
      }
    }
    const Encoded wide = encode(f, std::vector<float>(128, 0x1p31f));
    EXPECT_EQ(wide.scales[0], 0x7E00) << name_of(f) << ": a scale above 65504";
  }
}

TEST(Fp8, ScaleNeverSaturatesAValueAndErrorIsAnEighthOfAnOctave) {
  Draw draw(37);
  for (const float gain : {1.0f, 1e-3f, 3e-6f, 1e-8f, 1e4f}) {
    for (int repeat = 0; repeat < 200; ++repeat) {
      auto y = draw.log_normal(96);
      for (float& v : y) v *= gain;
      const Encoded e = encode(Format::fp8, y);
      const float g = base::f16_to_f32(e.scales[0]);
      const auto z = decode(Format::fp8, e);
      for (std::size_t i = 0; i < y.size(); ++i) {
        ASSERT_LE(std::fabs(y[i]), g * 448.0f);
        ASSERT_LE(std::fabs(y[i] - z[i]), std::fabs(y[i]) / 15.9f + g * 0x1p-10f * 1.001f);
      }
    }
  }
}

// --- imported levels ------------------------------------------------------------------------------------------------

std::vector<float> gaussian_levels(int bits) {
  std::vector<float> levels;
  for (int i = 0; i < 1 << bits; ++i) {
    const float t = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(1 << bits) - 1.0f;
    levels.push_back(t * (2.0f + t * t));
  }
  return levels;
}

TEST(Lut, CodesAreTheNearestLevelsAndScalesAreLeastSquares) {
  Draw draw(41);
  for (const int bits : {4, 5, 6, 8}) {
    const auto levels = gaussian_levels(bits);
    const int groups = 2, n = 256;
    const auto y = draw.gaussian(2 * n);
    std::vector<std::uint8_t> codes(2 * n);
    float scales[2];
    codec::encode_lut(bits, 2 * n, groups, levels.data(), y.data(), codes.data(), scales);
    double error = 0;
    for (int group = 0; group < groups; ++group) {
      double p = 0, q = 0;
      for (int i = group * n; i < (group + 1) * n; ++i) {
        const float level = levels[codes[static_cast<std::size_t>(i)]];
        p += y[static_cast<std::size_t>(i)] * level;
        q += level * level;
        error += std::pow(y[static_cast<std::size_t>(i)] - level * scales[group], 2.0);
      }
      EXPECT_NEAR(scales[group] * q / p, 1.0, 1e-5);
    }
    EXPECT_LT(error / (2 * n), bits == 4 ? 0.013 : bits == 5 ? 0.0035 : bits == 6 ? 0.001 : 0.0001) << bits << " bits";

    std::vector<float> decoded(2 * n);
    codec::decode_lut(bits, 2 * n, groups, levels.data(), codes.data(), scales, decoded.data());
    for (int i = 0; i < 2 * n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(decoded[at], levels[codes[at]] * scales[i / n]);
    }
  }
}

TEST(Lut, NearestLevelAgreesWithALinearScan) {
  const auto levels = gaussian_levels(5);
  for (float z = -4.0f; z < 4.0f; z += 0.0137f) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < levels.size(); ++i) {
      if (std::fabs(z - levels[i]) < std::fabs(z - levels[best])) best = i;
    }
    EXPECT_EQ(codec::detail::nearest_level(levels.data(), 5, z), best) << z;
  }
}

TEST(Lut, ZeroAndNonFinite) {
  const auto levels = gaussian_levels(4);
  std::vector<float> y(64, 0.0f);
  std::vector<std::uint8_t> codes(64);
  float scale = 1.0f;
  codec::encode_lut(4, 64, 1, levels.data(), y.data(), codes.data(), &scale);
  EXPECT_EQ(scale, 0.0f);
  y[3] = std::numeric_limits<float>::infinity();
  codec::encode_lut(4, 64, 1, levels.data(), y.data(), codes.data(), &scale);
  EXPECT_TRUE(base::is_nan(scale));
}

// --- the public functions -------------------------------------------------------------------------------------------

TEST(CodecApi, RoundTripsAndAgreesWithTheCodec) {
  Draw draw(43);
  for (const Format f : kScaledFormats) {
    const auto y = draw.gaussian(256);
    const auto encoded = encode_vector(f, y);
    ASSERT_TRUE(encoded.ok()) << encoded.message();
    EXPECT_EQ(encoded->codes, encode(f, y).codes);
    EXPECT_EQ(static_cast<int>(encoded->scales.size()), scale_groups(f, 256));
    std::vector<float> z(256);
    ASSERT_TRUE(decode_vector(f, *encoded, z).ok());
    EXPECT_EQ(z, decode(f, encode(f, y)));
  }
}

TEST(CodecApi, RefusalsNameTheValueAndTheWayOut) {
  const auto expect = [](const Status& status, Code code, std::initializer_list<const char*> parts) {
    EXPECT_EQ(status.code(), code) << status.message();
    for (const char* part : parts) EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  std::vector<float> y(100, 1.0f);
  expect(rotate(y), Code::unsupported, {"100", "96, 112, 128", "Pad"});
  expect(rotate_back(y), Code::unsupported, {"100"});
  expect(encode_vector(Format::tq4, y).status(), Code::unsupported, {"100"});
  y.resize(128);
  expect(encode_vector(Format::bf16, y).status(), Code::unsupported, {"bf16", "are fp8, tq2, tq3, tq4, tq5, tq6, tq8"});
  expect(encode_vector(Format::lut4, y).status(), Code::unsupported,
         {"lut4", "import", "one of fp8, tq2, tq3, tq4, tq5, tq6, tq8"});
  expect(encode_vector(static_cast<Format>(77), y).status(), Code::invalid_argument, {"77"});
  y[5] = std::numeric_limits<float>::quiet_NaN();
  expect(encode_vector(Format::tq4, y).status(), Code::non_finite, {"y[5]", "nan"});
  y.assign(128, 1e30f);
  expect(encode_vector(Format::tq4, y).status(), Code::non_finite, {"1e+30", "scale"});
  y.assign(128, 1.0f);
  EncodedVector e = encode_vector(Format::tq4, y).value();
  e.codes[9] = 16;
  expect(decode_vector(Format::tq4, e, y), Code::invalid_argument, {"codes[9]", "16"});
  e.codes.pop_back();
  expect(decode_vector(Format::tq4, e, y), Code::invalid_argument, {"127", "128"});
  e = encode_vector(Format::tq4, y).value();
  e.scales.push_back(1.0f);
  expect(decode_vector(Format::tq4, e, y), Code::invalid_argument, {"2 scales", "has 1"});
}

TEST(Formats, NamesRoundTripAndUnknownOnesListTheKnown) {
  EXPECT_EQ(formats().size(), static_cast<std::size_t>(kFormatCount));
  for (const FormatInfo& info : formats()) {
    const auto parsed = parse_format(info.name);
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, info.format);
    EXPECT_STREQ(format_info(info.format).name, info.name);
  }
  const auto unknown = parse_format("int4");
  EXPECT_EQ(unknown.code(), Code::invalid_argument);
  for (const FormatInfo& info : formats()) EXPECT_NE(unknown.message().find(info.name), std::string::npos);
  const std::pair<const char*, const char*> hints[] = {
      {"int4", "; for int4 write tq4"},
      {"q4_0", "; for q4_0 write tq4"},
      {"Q8_0", "; for Q8_0 write tq8"},
      {"iq4_nl", "; for iq4_nl write tq4"},
      {"q7_0", "; for q7_0 write tq8"},
      {"int1", "; for int1 write tq2"},
      {"TQ6", "; for TQ6 write tq6"},
      {"kvant_tq5", "; for kvant_tq5 write tq5"},
      {"fp8_e4m3", "; for fp8_e4m3 write fp8"},
      {"bfloat16", "; for bfloat16 write bf16"},
      {"tq6/tq4", "; keys and values are given separately: k = tq6, v = tq4"},
      {"tq8/tq2", "; keys and values are given separately: k = tq8, v = tq2"},
      {"tq8/q4", "; keys and values are given separately: k = tq6, v = tq4"},
      {"q8/q4", "; keys and values are given separately: k = tq6, v = tq4"},
  };
  for (const auto& [name, hint] : hints) {
    EXPECT_TRUE(parse_format(name).message().ends_with(hint)) << parse_format(name).message();
  }
  for (const char* name : {"", "x", "q", "int16", "int9", "uint", "fast8"}) {
    EXPECT_EQ(parse_format(name).message().find(';'), std::string::npos) << parse_format(name).message();
  }
  for (const Dtype d : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean}) EXPECT_EQ(*parse_dtype(dtype_name(d)), d);
  EXPECT_EQ(dtype_size(Dtype::f32), 4u);
  EXPECT_EQ(dtype_size(Dtype::bf16), 2u);
  EXPECT_EQ(dtype_size(Dtype::boolean), 1u);
  EXPECT_FALSE(parse_dtype("f64").ok());
  EXPECT_STREQ(code_name(Code::out_of_capacity), "out_of_capacity");
}

TEST(Formats, HeadDims) {
  const std::vector<int> want{32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 576};
  EXPECT_EQ(std::vector<int>(supported_head_dims().begin(), supported_head_dims().end()), want);
  for (int d = -1; d < 1100; ++d) {
    EXPECT_EQ(is_supported_head_dim(d), std::find(want.begin(), want.end(), d) != want.end()) << d;
  }
}

}  // namespace
}  // namespace kvant
