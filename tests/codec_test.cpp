// Quantisation: levels, search, distortion, scales, and every input that could go wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "codec/basis.hpp"
#include "codec/store.hpp"
#include "kvant/codec.hpp"
#include "support/draw.hpp"

namespace kvant {
namespace {

using codec::TqSpec;
using testing_support::Draw;

constexpr std::array kTqFormats{Format::tq2, Format::tq3, Format::tq4, Format::tq5, Format::tq6, Format::tq8};
constexpr std::array kScaled{Format::fp8, Format::tq2, Format::tq3, Format::tq4, Format::tq5, Format::tq6, Format::tq8};

std::string name_of(Format f) {
  return format_info(f).name;
}

struct Encoded {
  std::vector<std::uint8_t> codes;
  std::array<std::uint16_t, codec::kMaxScaleGroups> scales{};
};

Encoded encode(Format f, const std::vector<float>& y) {
  Encoded e;
  e.codes.resize(y.size());
  codec::encode(f, static_cast<int>(y.size()), y.data(), e.codes.data(), e.scales.data());
  return e;
}

std::vector<float> decode(Format f, const Encoded& e) {
  std::vector<float> y(e.codes.size());
  codec::decode(f, static_cast<int>(y.size()), e.codes.data(), e.scales.data(), y.data());
  return y;
}

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

// --- the algorithm, written down a second time ----------------------------------------------------------------------

// docs/formats.md read literally, with none of the codec's code but its tables and half conversion.
struct ByTheBook {
  explicit ByTheBook(const TqSpec& spec) : s(spec), costs(exact_costs()) {}

  TqSpec s;
  std::vector<double> costs;  // [cells][8]

  int code(float z) const {
    if (s.uniform) {
      const float half = s.bits == 6 ? 32.0f : 128.0f;
      return static_cast<int>(std::floor(std::clamp(z + half, 0.0f, 2.0f * half - 1.0f)));
    }
    int magnitude = 0;
    for (int m = 0; m + 1 < s.magnitudes; ++m) {
      if (s.threshold[m] < std::fabs(z)) ++magnitude;
    }
    return magnitude + (z < 0.0f ? s.magnitudes : 0);
  }

  static float lane_sum(const std::vector<float>& terms) {
    std::array<float, 32> lane{};
    for (std::size_t i = 0; i < terms.size(); ++i) lane[i % 32] = lane[i % 32] + terms[i];
    for (std::size_t h = 16; h > 0; h /= 2) {
      for (std::size_t i = 0; i < h; ++i) lane[i] = lane[i] + lane[i + h];
    }
    return lane[0];
  }

  struct Try {
    float score, r, g;
  };

  Try attempt(const std::vector<float>& y, float r) const {
    std::vector<float> terms;
    std::int64_t squares = 0;
    for (const float v : y) {
      const int odd = 2 * codec::tq_level(s, code(v * r)) - static_cast<int>(2 * s.offset);
      terms.push_back(v * static_cast<float>(odd));
      squares += odd * odd;
    }
    const float p = lane_sum(terms), q = static_cast<float>(squares);
    const float g = base::f16_to_f32(base::f32_to_f16(std::min((p + p) / q, 65504.0f)));
    const float quarter = q * 0.25f;
    const float back = g * quarter;
    return {g * (p - back), r, g};
  }

  // What a value of i / (cells - 1) anchors costs at spread k, before it is made an integer.
  double exact_cost(int i, int k) const {
    const double a = static_cast<double>(i) / (s.cells - 1), step = s.spread[k];
    double nearest = 1e9;
    for (int c = 0; c < 1 << s.bits; ++c) {
      const double distance = a - (codec::tq_level(s, c) - static_cast<double>(s.offset)) * step;
      nearest = std::min(nearest, distance * distance);
    }
    return nearest;
  }
  std::vector<double> exact_costs() const {  // the largest one is 1023
    std::vector<double> all;
    for (int i = 0; i < s.cells; ++i) {
      for (int k = 0; k < codec::kSpreads; ++k) all.push_back(exact_cost(i, k));
    }
    const double most = all.empty() ? 1 : *std::max_element(all.begin(), all.end());
    for (double& cost : all) cost *= codec::kMostCost / most;
    return all;
  }
  std::size_t cheapest(const std::vector<float>& y, float anchor) const {
    const float per_cell = static_cast<float>(s.cells - 1) / anchor;
    std::array<long, 8> sum{};
    for (const float v : y) {
      const auto cell = static_cast<std::size_t>(std::nearbyint(std::fabs(v) * per_cell));
      for (std::size_t k = 0; k < 8; ++k) sum[k] += std::lround(costs[cell * 8 + k]);
    }
    return static_cast<std::size_t>(std::min_element(sum.begin(), sum.end()) - sum.begin());
  }

  void encode(const std::vector<float>& y, std::uint8_t* codes, std::uint16_t* scale) const {
    float anchor = 0.0f;
    if (s.peak_anchor) {
      for (const float v : y) anchor = std::max(anchor, std::fabs(v));
    } else {
      std::vector<float> squares;
      for (const float v : y) squares.push_back(v * v);
      anchor = std::sqrt(lane_sum(squares) / static_cast<float>(y.size()));
    }
    Try best{0.0f, 0.0f, 0.0f};
    const auto consider = [&](const Try& t) {
      if (t.score > best.score) best = t;
    };
    if (anchor >= 0x1p-40f && s.cells > 0) {
      const float step = anchor * s.spread[cheapest(y, anchor)];
      consider(attempt(y, 1.0f / step));
    } else if (anchor >= 0x1p-40f) {
      for (int k = 0; k < s.candidates; ++k) {
        const float step = anchor * s.spread[k];
        consider(attempt(y, 1.0f / step));
      }
      if (best.g > 0.0f) consider(attempt(y, 1.0f / best.g));
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
      codes[i] = static_cast<std::uint8_t>(best.g > 0.0f ? code(y[i] * best.r) : codec::tq_zero_code(s));
    }
    *scale = base::f32_to_f16(best.g);
  }
};

TEST(Encoding, MatchesTheWrittenAlgorithmBitForBit) {
  Draw draw(7);
  for (const Format f : kTqFormats) {
    const ByTheBook book{codec::tq_spec(f)};
    for (const int head_dim : supported_head_dims()) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        auto y = repeat % 3 == 2 ? draw.log_normal(head_dim) : draw.gaussian(head_dim);
        const float gain = std::ldexp(1.0f, repeat - 12);
        for (float& v : y) v *= gain;
        const Encoded got = encode(f, y);
        Encoded want;
        want.codes.resize(y.size());
        const int groups = codec::tq_scale_groups(f, head_dim);
        const auto n = static_cast<std::size_t>(head_dim / groups);
        for (std::size_t i = 0; i < static_cast<std::size_t>(groups); ++i) {
          const std::vector<float> part(y.begin() + static_cast<long>(i * n),
                                        y.begin() + static_cast<long>((i + 1) * n));
          book.encode(part, want.codes.data() + i * n, want.scales.data() + i);
        }
        ASSERT_EQ(got.scales, want.scales) << name_of(f) << " D=" << head_dim << " repeat " << repeat;
        ASSERT_EQ(got.codes, want.codes) << name_of(f) << " D=" << head_dim << " repeat " << repeat;
      }
    }
  }
}

// Costs are integers; none is so near to a half that the order of operations in double could round it the other way.
template <Format kFormat>
void check_costs() {
  constexpr TqSpec spec = codec::tq_spec<kFormat>();
  const ByTheBook book{spec};
  ASSERT_EQ(book.costs.size(), static_cast<std::size_t>(spec.cells * codec::kSpreads));
  std::array<int, 2> extremes{codec::kMostCost, 0};
  for (std::size_t i = 0; i < book.costs.size(); ++i) {
    const double want = book.costs[i];
    const int got = codec::cost_table<kFormat>.cost[i / codec::kSpreads][i % codec::kSpreads];
    ASSERT_EQ(got, std::lround(want)) << name_of(kFormat) << " cell " << i / 8 << " spread " << i % 8;
    ASSERT_GT(std::fabs(want - std::floor(want) - 0.5), 1e-9) << name_of(kFormat) << " cell " << i / 8;
    extremes = {std::min(extremes[0], got), std::max(extremes[1], got)};
  }
  EXPECT_EQ(extremes, (std::array<int, 2>{0, codec::kMostCost})) << name_of(kFormat);
}

TEST(Encoding, CostsAreThoseOfTheContract) {
  static_assert(64 * codec::kMostCost < 65536, "the vector encoders sum 64 of them in 16 bits");
  check_costs<Format::tq3>();
  check_costs<Format::tq4>();
  check_costs<Format::tq5>();
  check_costs<Format::tq6>();
}

TEST(Encoding, ScaleIsTheLeastSquaresOneForItsCodes) {
  Draw draw(11);
  for (const Format f : kTqFormats) {
    const TqSpec s = codec::tq_spec(f);
    for (int repeat = 0; repeat < 50; ++repeat) {
      const auto y = draw.gaussian(128);
      const Encoded e = encode(f, y);
      double p = 0, q = 0;
      for (std::size_t i = 0; i < y.size(); ++i) {
        const double c = codec::tq_level(s, e.codes[i]) - static_cast<double>(s.offset);
        p += y[i] * c;
        q += c * c;
      }
      EXPECT_NEAR(base::f16_to_f32(e.scales[0]) / (p / q), 1.0, 0.0005) << name_of(f);  // half an fp16 ulp
    }
  }
}

// Few candidates must find nearly what a dense search finds. The bounds are the measured ratio plus a third of it.
TEST(Encoding, SearchIsWithinPercentsOfADenseOne) {
  const std::array<double, 6> allowed{1.002, 1.0084, 1.0096, 1.02, 1.0143, 1.0173};
  for (std::size_t k = 0; k < kTqFormats.size(); ++k) {
    Draw draw(13);
    const ByTheBook book{codec::tq_spec(kTqFormats[k])};
    double found = 0, dense = 0;
    for (int repeat = 0; repeat < 300; ++repeat) {
      const auto y = draw.gaussian(128);
      double energy = 0;
      float peak = 0;
      for (const float v : y) {
        energy += static_cast<double>(v) * v;
        peak = std::max(peak, std::fabs(v));
      }
      const auto z = decode(kTqFormats[k], encode(kTqFormats[k], y));
      for (std::size_t i = 0; i < y.size(); ++i) found += (y[i] - z[i]) * static_cast<double>(y[i] - z[i]);
      const float top = book.s.uniform ? book.s.offset : static_cast<float>(book.s.u[book.s.magnitudes - 1]) - 63.5f;
      double best = 0;
      for (float spread = 0.3f; spread < 1.3f; spread += 0.004f) {
        best = std::max(best, static_cast<double>(book.attempt(y, top / (peak * spread)).score));
      }
      dense += energy - best;
    }
    EXPECT_LT(found / dense, allowed[k]) << name_of(kTqFormats[k]);
    EXPECT_GT(found / dense, 0.98) << name_of(kTqFormats[k]);
  }
}

TEST(Encoding, PowersOfTwoScaleTheScaleOnly) {
  Draw draw(17);
  for (const Format f : kTqFormats) {
    auto y = draw.gaussian(256);
    const Encoded one = encode(f, y);
    for (float& v : y) v *= 8.0f;
    const Encoded eight = encode(f, y);
    EXPECT_EQ(one.codes, eight.codes) << name_of(f);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(base::f16_to_f32(one.scales[i]) * 8.0f, base::f16_to_f32(eight.scales[i])) << name_of(f);
    }
  }
}

// --- distortion -----------------------------------------------------------------------------------------------------

// Mean squared error over mean square, so 1 means that nothing was kept.
template <class Make>
double distortion(Format f, int head_dim, int vectors, Make make) {
  double error = 0, energy = 0;
  for (int n = 0; n < vectors; ++n) {
    const std::vector<float> y = make(head_dim);
    const auto z = decode(f, encode(f, y));
    double e = 0, s = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      e += (y[i] - z[i]) * static_cast<double>(y[i] - z[i]);
      s += static_cast<double>(y[i]) * y[i];
    }
    error += e / s;
    energy += 1;
  }
  return error / energy;
}

struct Interval {
  Format format;
  int head_dim;
  double low, high;
};

// Measured values in the middle, one percent to either side (three at D = 64). A better codec fails here too: move the
// interval and the table in docs/formats.md with it. The contract's upper bounds are in the test after this one.
constexpr Interval kGaussian[] = {
#include "frozen/gaussian_distortion.inc"
};

TEST(Distortion, GaussianVectorsStayInTheirIntervals) {
  for (const Interval& want : kGaussian) {
    Draw draw(static_cast<std::uint64_t>(want.head_dim));
    const int vectors = 512 * 1200 / want.head_dim;
    const double got = distortion(want.format, want.head_dim, vectors, [&](int n) { return draw.gaussian(n); });
    EXPECT_TRUE(got >= want.low && got <= want.high) << name_of(want.format) << " D=" << want.head_dim << ": " << got
                                                     << " outside [" << want.low << ", " << want.high << "]";
  }
}

TEST(Distortion, ContractBounds) {
  const std::array<double, 6> bound{0.1175, 0.0340, 0.0090, 0.00235, 0.00067, 0.00005};
  for (const Interval& want : kGaussian) {
    if (want.head_dim < 128 || want.format == Format::fp8) continue;
    EXPECT_LE(want.high, 1.01 * bound[static_cast<std::size_t>(want.format) - static_cast<std::size_t>(Format::tq2)]);
    EXPECT_LE((want.low + want.high) / 2,
              bound[static_cast<std::size_t>(want.format) - static_cast<std::size_t>(Format::tq2)]);
  }
}

// Inputs that the levels were not made for, unrotated: what a calibrated basis or a custom one may produce.
TEST(Distortion, HeavyTailsStayInTheirIntervals) {
  struct Case {
    Format format;
    double log_normal, cauchy, loud;  // centre, +- 15 percent
  };
  const Case cases[] = {
#include "frozen/heavy_distortion.inc"
  };
  for (const Case& c : cases) {
    Draw draw(23);
    const auto check = [&](const char* kind, double centre, double got) {
      EXPECT_TRUE(got > 0.85 * centre && got < 1.15 * centre) << name_of(c.format) << " " << kind << ": " << got;
    };
    check("log-normal", c.log_normal, distortion(c.format, 128, 2000, [&](int n) { return draw.log_normal(n); }));
    check("Cauchy", c.cauchy, distortion(c.format, 128, 2000, [&](int n) { return draw.cauchy(n); }));
    check("loud", c.loud, distortion(c.format, 128, 2000, [&](int n) { return draw.loud(n); }));
  }
}

// The rotation is what makes loud channels harmless: after it they cost what Gaussian vectors cost.
TEST(Distortion, RotationTamesLoudChannels) {
  Draw draw(29);
  const auto rotated = [&](int n) {
    auto x = draw.loud(n);
    codec::rotate(x.data(), n);
    return x;
  };
  EXPECT_LT(distortion(Format::tq4, 256, 1000, rotated), 0.0095);
  EXPECT_LT(distortion(Format::tq6, 256, 1000, rotated), 0.00067);
}

TEST(Scales, CostAtMostAnEighthOfABit) {
  for (const Format f : kTqFormats) {
    for (const int head_dim : supported_head_dims()) {
      if (head_dim < 128) continue;
      EXPECT_LE(16.0 * scale_groups(f, head_dim) / head_dim, 0.13) << name_of(f) << " D=" << head_dim;
    }
  }
}

// --- inputs that could go wrong -------------------------------------------------------------------------------------

TEST(Edges, ZeroTinyAndNegativeZeroDecodeToZero) {
  for (const Format f : kScaled) {
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
  for (const Format f : kScaled) {
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
  for (const Format f : kScaled) {
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
  for (const Format f : kScaled) {
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
  for (const Format f : kScaled) {
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
  expect(encode_vector(Format::bf16, y).status(), Code::unsupported, {"bf16", "tq4"});
  expect(encode_vector(Format::lut4, y).status(), Code::unsupported, {"lut4", "import"});
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
