// Encoding: the algorithm written down a second time, its search, the error it leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
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
using testing_support::kTqFormats;
using testing_support::name_of;

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

  // The cost of a value of i / (cells - 1) anchors at spread k, before the cost is made an integer.
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

}  // namespace
}  // namespace kvant
