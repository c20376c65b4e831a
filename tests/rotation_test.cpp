// The rotation against its definition, and the bases built on it.
#include "codec/rotation.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "codec/basis.hpp"
#include "kvant/types.hpp"
#include "support/draw.hpp"

namespace kvant {
namespace {

using testing_support::Draw;
using Matrix = std::vector<std::vector<int>>;

// --- the definition, spelled out from docs/formats.md ---------------------------------------------------------------

Matrix sylvester(int n) {
  Matrix m(static_cast<std::size_t>(n), std::vector<int>(static_cast<std::size_t>(n)));
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      m[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] =
          __builtin_popcount(static_cast<unsigned>(i & j)) % 2 ? -1 : 1;
    }
  }
  return m;
}

// The border and the character of C, from the list of squares.
Matrix conference(int q, const std::set<int>& squares, int corner) {
  const auto n = static_cast<std::size_t>(q + 1);
  Matrix c(n, std::vector<int>(n, 0));
  for (std::size_t i = 1; i < n; ++i) {
    c[0][i] = 1;
    c[i][0] = corner;
    for (std::size_t j = 1; j < n; ++j) {
      const int difference = (static_cast<int>(i) - static_cast<int>(j) + q) % q;
      c[i][j] = difference == 0 ? 0 : squares.count(difference) ? 1 : -1;
    }
  }
  return c;
}

Matrix paley(int order) {
  if (order == 28) {
    const Matrix c = conference(13, {1, 3, 4, 9, 10, 12}, 1);
    const int zero[2][2] = {{1, -1}, {-1, -1}}, one[2][2] = {{1, 1}, {1, -1}};
    Matrix h(28, std::vector<int>(28));
    for (std::size_t i = 0; i < 28; ++i) {
      for (std::size_t j = 0; j < 28; ++j) {
        const int entry = c[i / 2][j / 2];
        h[i][j] = entry == 0 ? zero[i % 2][j % 2] : entry * one[i % 2][j % 2];
      }
    }
    return h;
  }
  Matrix h = order == 12 ? conference(11, {1, 3, 4, 5, 9}, -1) : conference(19, {1, 4, 5, 6, 7, 9, 11, 16, 17}, -1);
  for (std::size_t i = 0; i < h.size(); ++i) h[i][i] += 1;
  return h;
}

Matrix kronecker(const Matrix& a, const Matrix& b) {
  const std::size_t n = a.size() * b.size();
  Matrix m(n, std::vector<int>(n));
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) m[i][j] = a[i / b.size()][j / b.size()] * b[i % b.size()][j % b.size()];
  }
  return m;
}

Matrix hadamard(int n) {
  switch (n) {
    case 80: return kronecker(paley(20), sylvester(4));
    case 96: return kronecker(paley(12), sylvester(8));
    case 112: return kronecker(paley(28), sylvester(4));
    case 160: return kronecker(paley(20), sylvester(8));
    case 192: return kronecker(paley(12), sylvester(16));
    case 224: return kronecker(paley(28), sylvester(8));
    case 320: return kronecker(paley(20), sylvester(16));
    case 384: return kronecker(paley(12), sylvester(32));
    case 576: return kronecker(paley(12), kronecker(paley(12), sylvester(4)));
    default: return sylvester(n);
  }
}

bool minus(int i) {
  const std::string hex =
      "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"
      "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85";
  const int byte = std::stoi(hex.substr(static_cast<std::size_t>(i % 512 / 8 * 2), 2), nullptr, 16);
  return byte >> (i % 8) & 1;
}

class Rotation : public ::testing::TestWithParam<int> {};

TEST_P(Rotation, MatchesTheDefinitionEntryByEntry) {
  const int n = GetParam();
  const Matrix h = hadamard(n);
  const double unit = 1.0 / std::sqrt(static_cast<double>(n));
  for (int j = 0; j < n; ++j) {
    std::vector<float> x(static_cast<std::size_t>(n), 0.0f);
    x[static_cast<std::size_t>(j)] = 1.0f;
    codec::rotate(x.data(), n);
    for (int i = 0; i < n; ++i) {
      const int entry = h[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] * (minus(j) ? -1 : 1);
      ASSERT_NEAR(x[static_cast<std::size_t>(i)], entry * unit, 1e-8) << "row " << i << " column " << j;
    }
  }
}

// With every entry +-1 (previous test) this is H H^T = D I: no coordinate is left out, none is favoured.
TEST_P(Rotation, IsOrthogonal) {
  const Matrix h = hadamard(GetParam());
  for (std::size_t i = 0; i < h.size(); ++i) {
    for (std::size_t k = 0; k <= i; ++k) {
      int dot = 0;
      for (std::size_t j = 0; j < h.size(); ++j) dot += h[i][j] * h[k][j];
      ASSERT_EQ(dot, i == k ? GetParam() : 0) << i << " " << k;
    }
  }
}

TEST_P(Rotation, BackUndoesItAndInnerProductsStay) {
  const int n = GetParam();
  Draw draw(static_cast<std::uint64_t>(n));
  const auto x = draw.gaussian(n), y = draw.loud(n);
  auto rx = x, ry = y;
  codec::rotate(rx.data(), n);
  codec::rotate(ry.data(), n);
  double before = 0, after = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    before += static_cast<double>(x[i]) * y[i];
    after += static_cast<double>(rx[i]) * ry[i];
    size += std::fabs(static_cast<double>(x[i]) * y[i]);
  }
  EXPECT_NEAR(before, after, 1e-6 * size);
  codec::rotate_back(rx.data(), n);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(rx[i], x[i], 3e-6) << i;
}

TEST_P(Rotation, ScaleIsCorrectlyRounded) {
  EXPECT_EQ(codec::rotation_scale(GetParam()),
            static_cast<float>(1.0L / std::sqrt(static_cast<long double>(GetParam()))));
}

// Kernels of one head_dim take the scale as a constant, which is computed another way.
TEST(RotationScale, IsTheSameAsAConstant) {
  constexpr int kCount = codec::RotationShapes::kCount;
  constexpr std::array<float, kCount> kScales = [] {
    std::array<float, kCount> scales{};
    for (std::size_t i = 0; i < scales.size(); ++i) {
      scales[i] = codec::rotation_scale(codec::rotation_shapes().shape[i].head_dim);
    }
    return scales;
  }();
  for (std::size_t i = 0; i < kScales.size(); ++i) {
    volatile int head_dim = codec::rotation_shapes().shape[i].head_dim;
    EXPECT_EQ(kScales[i], codec::rotation_scale(head_dim)) << head_dim;
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Rotation,
                         ::testing::Values(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 576));

// --- bases ----------------------------------------------------------------------------------------------------------

// Gauss and Jordan with partial pivoting, in double.
std::vector<float> inverse_of(const std::vector<float>& a, std::size_t n) {
  std::vector<double> m(n * 2 * n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) m[i * 2 * n + j] = a[i * n + j];
    m[i * 2 * n + n + i] = 1.0;
  }
  for (std::size_t c = 0; c < n; ++c) {
    std::size_t pivot = c;
    for (std::size_t r = c; r < n; ++r) {
      if (std::fabs(m[r * 2 * n + c]) > std::fabs(m[pivot * 2 * n + c])) pivot = r;
    }
    for (std::size_t j = 0; j < 2 * n; ++j) std::swap(m[c * 2 * n + j], m[pivot * 2 * n + j]);
    const double d = m[c * 2 * n + c];
    for (std::size_t j = 0; j < 2 * n; ++j) m[c * 2 * n + j] /= d;
    for (std::size_t r = 0; r < n; ++r) {
      if (r == c) continue;
      const double f = m[r * 2 * n + c];
      for (std::size_t j = 0; j < 2 * n; ++j) m[r * 2 * n + j] -= f * m[c * 2 * n + j];
    }
  }
  std::vector<float> out(n * n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) out[i * n + j] = static_cast<float>(m[i * 2 * n + n + j]);
  }
  return out;
}

TEST(Basis, ScoresAndOutputsSurviveEveryKind) {
  for (const int n : {64, 80, 128}) {
    const auto size = static_cast<std::size_t>(n);
    Draw draw(static_cast<std::uint64_t>(n) + 1);
    const auto center = draw.gaussian(n);
    std::vector<float> matrix = draw.gaussian(n * n);
    for (std::size_t i = 0; i < size * size; ++i) matrix[i] = 0.3f * matrix[i] / std::sqrt(static_cast<float>(n));
    for (std::size_t i = 0; i < size; ++i) matrix[i * size + i] += 1.0f;
    const auto inverse = inverse_of(matrix, size);
    const codec::BasisRef bases[] = {{BasisKind::none, nullptr, nullptr, nullptr},
                                     {BasisKind::hadamard, nullptr, nullptr, nullptr},
                                     {BasisKind::calibrated, center.data(), matrix.data(), inverse.data()}};
    for (const codec::BasisRef& basis : bases) {
      const auto q = draw.gaussian(n), k = draw.gaussian(n), v = draw.gaussian(n), w = draw.gaussian(n);
      std::vector<float> qb(size), kb(size), vb(size), wb(size);
      const float shift = codec::query_to_basis(basis, n, q.data(), qb.data());
      codec::to_basis(basis, n, k.data(), kb.data());
      double want = 0, got = shift;
      for (std::size_t i = 0; i < size; ++i) {
        want += static_cast<double>(q[i]) * k[i];
        got += static_cast<double>(qb[i]) * kb[i];
      }
      EXPECT_NEAR(want, got, 1e-4) << n << " kind " << static_cast<int>(basis.kind);
      if (basis.kind != BasisKind::calibrated) {
        EXPECT_EQ(shift, 0.0f);
      }

      codec::to_basis(basis, n, v.data(), vb.data());
      codec::to_basis(basis, n, w.data(), wb.data());
      std::vector<float> o(size);
      for (std::size_t i = 0; i < size; ++i) o[i] = 0.75f * vb[i] + 2.0f * wb[i];
      codec::output_from_basis(basis, n, o.data(), 2.75f);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_NEAR(o[i], 0.75f * v[i] + 2.0f * w[i], 1e-4) << n << " kind " << static_cast<int>(basis.kind);
      }
      auto in_place = k;
      codec::to_basis(basis, n, in_place.data(), in_place.data());
      EXPECT_EQ(in_place, kb);
    }
  }
}

}  // namespace
}  // namespace kvant
