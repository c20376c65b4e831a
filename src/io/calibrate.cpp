// Bases that spread the rounding error of a vector where nobody looks.
//
// Encoding y = A (x - c) adds rounding noise of energy proportional to |y|^2, the same in every direction (that is what
// the Hadamard in A is for). Back in the vector's own coordinates it is A^-1 n, and a query sees q . A^-1 n, so over
// keys with second moment Sk about c and queries with second moment Sq
//
//   noise(A, c) ~ tr(A Sk A^T) tr(Sq A^-1 A^-T)
//
// whose minimum is A = U M^(1/2) for any orthogonal U, M = Sk^(-1/2) (Sk^(1/2) Sq Sk^(1/2))^(1/2) Sk^(-1/2), which
// balances the two: M Sk M = Sq. U is the signed Hadamard of the default basis. Values are added up as they are, so
// their error counts the same in every direction: Sq = I, A = U Sv^(-1/4). Samples are few beside head_dim^2, so each
// second moment gets 1 % of its mean diagonal before it is trusted.
//
// Float64 throughout; files and caches hold A, its inverse and c in float32.
#include <fmt/ranges.h>
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <new>

#include "core/fmt.hpp"
#include "kvant/io.hpp"

namespace kvant::io {
namespace {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
using RowsF32 = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;

// A fraction of the mean diagonal. For keys 0.1 % to 20 % measure within 3 % of each other on the captured layers.
constexpr double kRidge = 0.01;

Status refused(const std::string& what) {
  return {Code::invalid_argument, "calibrate: " + what};
}

int value_dim(const CapturedLayer& layer) {
  return layer.v_head_dim > 0 ? layer.v_head_dim : layer.head_dim;
}

Status check_finite(const CapturedLayer& layer, const char* name, const std::vector<float>& values, std::int64_t heads,
                    std::int64_t rows, int head_dim) {
  // Divided, not multiplied: the counts come from the caller and may be anything.
  const auto size = static_cast<std::int64_t>(values.size());
  const bool fits = size % head_dim == 0 && size / head_dim % heads == 0 && size / head_dim / heads == rows;
  if (!fits) {
    return refused(fmt::format("{}: {} holds {} values; {} heads of {} rows of {} need another number", layer.name,
                               name, size, heads, rows, head_dim));
  }
  const auto wrong = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (wrong != values.end()) {
    return refused(fmt::format("{}: {} holds {} at element {}; allowed: finite values", layer.name, name, *wrong,
                               wrong - values.begin()));
  }
  return {};
}

Status check_layer(const CapturedLayer& layer) {
  for (const int head_dim : {layer.head_dim, value_dim(layer)}) {
    if (is_supported_head_dim(head_dim)) continue;
    return refused(
        fmt::format("{}: head_dim {} has no rotation, and vectors of this size are stored padded, without a "
                    "calibrated basis; allowed: {}",
                    layer.name, head_dim, fmt::join(supported_head_dims(), ", ")));
  }
  if (layer.kv_heads < 1 || layer.q_heads < 1 || layer.q_heads % layer.kv_heads != 0) {
    return refused(fmt::format("{}: {} query heads over {} kv heads; allowed: a multiple of the kv heads", layer.name,
                               layer.q_heads, layer.kv_heads));
  }
  if (layer.queries < 1 || layer.positions < 1) {
    return refused(fmt::format("{}: {} queries and {} positions; allowed: at least one of each", layer.name,
                               layer.queries, layer.positions));
  }
  if (Status status = check_finite(layer, "q", layer.q, layer.q_heads, layer.queries, layer.head_dim); !status)
    return status;
  if (Status status = check_finite(layer, "k", layer.k, layer.kv_heads, layer.positions, layer.head_dim); !status)
    return status;
  return check_finite(layer, "v", layer.v, layer.kv_heads, layer.positions, value_dim(layer));
}

/// Count, mean and second moment about zero of rows that come in blocks.
class Moments {
 public:
  explicit Moments(int head_dim) : sum_(Vector::Zero(head_dim)), squares_(Matrix::Zero(head_dim, head_dim)) {}

  void add(const float* rows, std::int64_t count, int head_dim) {
    constexpr std::int64_t kBlock = 4096;  // bounds the float64 copy
    for (std::int64_t at = 0; at < count; at += kBlock) {
      const Matrix block = RowsF32(rows + at * head_dim, std::min(kBlock, count - at), head_dim).cast<double>();
      sum_ += block.colwise().sum().transpose();
      squares_.selfadjointView<Eigen::Lower>().rankUpdate(block.transpose());
    }
    count_ += count;
  }

  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] Vector mean() const { return sum_ / static_cast<double>(count_); }
  [[nodiscard]] Matrix about(const Vector& center) const {
    const Vector m = mean();
    Matrix full = squares_.selfadjointView<Eigen::Lower>();
    full /= static_cast<double>(count_);
    return full - m * center.transpose() - center * m.transpose() + center * center.transpose();
  }

 private:
  std::int64_t count_ = 0;
  Vector sum_;
  Matrix squares_;  // lower triangle
};

/// Scaled to a mean diagonal of 1 and lifted by the ridge; nothing where all rows were (nearly) zero.
bool regularise(Matrix& moment) {
  const double mean_diagonal = moment.trace() / static_cast<double>(moment.rows());
  if (!(mean_diagonal > 1e-30)) return false;
  moment /= mean_diagonal;
  moment.diagonal().array() += kRidge;
  return true;
}

/// f(S) for a symmetric positive S, f applied to its eigenvalues.
template <class F>
Matrix spectral(const Matrix& symmetric, F f) {
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(symmetric);
  // Rounding may leave a tiny negative eigenvalue where the ridge is the smallest true one.
  const Vector values = solver.eigenvalues().cwiseMax(kRidge * 1e-6).unaryExpr(f);
  return solver.eigenvectors() * values.asDiagonal() * solver.eigenvectors().transpose();
}

/// M^(1/2), symmetric, scaled so that it keeps the mean square of the vectors: scales of encoded ones are 16 bits wide.
Matrix balance(const Matrix& vectors, const Matrix& queries) {
  const auto root = [](double x) { return std::sqrt(x); };
  Matrix sk = vectors, sq = queries;
  if (!regularise(sk) || !regularise(sq)) return Matrix::Identity(vectors.rows(), vectors.rows());
  const Matrix sk_root = spectral(sk, root);
  const Matrix sk_inverse_root = spectral(sk, [](double x) { return 1 / std::sqrt(x); });
  const Matrix middle = spectral(sk_root * sq * sk_root, root);
  const Matrix balanced = spectral(sk_inverse_root * middle * sk_inverse_root, root);
  return balanced * std::sqrt(vectors.trace() / (balanced * vectors * balanced).trace());
}

/// The signed Hadamard of the default basis, its entries exactly +-1/sqrt(D).
Result<Matrix> hadamard(int head_dim) {
  Matrix out(head_dim, head_dim);
  std::vector<float> column(static_cast<std::size_t>(head_dim));
  const double entry = 1 / std::sqrt(static_cast<double>(head_dim));
  for (int j = 0; j < head_dim; ++j) {
    std::ranges::fill(column, 0.0f);
    column[static_cast<std::size_t>(j)] = 1;
    if (Status status = rotate(column); !status) return status;
    for (int i = 0; i < head_dim; ++i) out(i, j) = std::copysign(entry, column[static_cast<std::size_t>(i)]);
  }
  return out;
}

CalibratedBasis to_basis(const Vector& center, const Matrix& exact) {
  using RowsOut = Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  const Eigen::Index n = exact.rows();
  CalibratedBasis basis;
  basis.center.resize(static_cast<std::size_t>(n));
  basis.matrix.resize(static_cast<std::size_t>(n * n));
  basis.inverse.resize(static_cast<std::size_t>(n * n));
  Eigen::Map<Eigen::VectorXf>(basis.center.data(), n) = center.cast<float>();
  RowsOut matrix(basis.matrix.data(), n, n);
  matrix = exact.cast<float>();
  // The inverse of the matrix as it is stored, so that its rounding is undone as well.
  RowsOut(basis.inverse.data(), n, n) = matrix.cast<double>().eval().inverse().cast<float>();
  return basis;
}

struct Side {
  CalibratedBasis basis;
  double expected_gain;  // noise energy over that of the default basis
};

/// The basis of vectors that are seen by queries of the given second moment.
Side calibrate_side(const Moments& vectors, const Matrix& queries, const Matrix& rotation) {
  const Vector center = vectors.mean();
  const Matrix moment = vectors.about(center);
  const Matrix balanced = balance(moment, queries);
  const Matrix inverse = balanced.inverse();
  const double noise = (balanced * moment * balanced).trace() * (inverse * queries * inverse).trace();
  const double default_noise = vectors.about(Vector::Zero(center.size())).trace() * queries.trace();
  return {to_basis(center, rotation * balanced), default_noise > 0 ? noise / default_noise : 1};
}

struct HeadResult {
  CalibratedBasis keys, values;
  CalibrationReport report;
};

/// One kv head over all captures of its layer.
HeadResult calibrate_head(std::span<const CapturedLayer* const> captures, int head, const Matrix& rotation,
                          const Matrix& rotation_of_values) {
  const CapturedLayer& first = *captures.front();
  const int head_dim = first.head_dim, v_head_dim = value_dim(first);
  const int group = first.q_heads / first.kv_heads;
  Moments queries(head_dim), keys(head_dim), values(v_head_dim);
  for (const CapturedLayer* capture : captures) {
    const std::int64_t key_rows = capture->positions * head_dim;
    queries.add(capture->q.data() + head * group * capture->queries * head_dim, group * capture->queries, head_dim);
    keys.add(capture->k.data() + head * key_rows, capture->positions, head_dim);
    values.add(capture->v.data() + head * capture->positions * v_head_dim, capture->positions, v_head_dim);
  }
  Side key_side = calibrate_side(keys, queries.about(Vector::Zero(head_dim)), rotation);
  Side value_side = calibrate_side(values, Matrix::Identity(v_head_dim, v_head_dim), rotation_of_values);
  return {std::move(key_side.basis),
          std::move(value_side.basis),
          {first.name, head, queries.count(), keys.count(), key_side.expected_gain, value_side.expected_gain}};
}

Result<Calibration> calibrate_checked(const std::map<int, std::vector<const CapturedLayer*>>& by_number) {
  Calibration out;
  for (const auto& [number, captures] : by_number) {
    const CapturedLayer& first = *captures.front();
    const Result<Matrix> rotation = hadamard(first.head_dim);
    if (!rotation) return rotation.status();
    const Result<Matrix> of_values = hadamard(value_dim(first));
    if (!of_values) return of_values.status();
    BasisSet& set = out.layers[number];
    set.layers = 1;
    set.kv_heads = first.kv_heads;
    set.head_dim = first.head_dim;
    set.v_head_dim = value_dim(first);
    for (int head = 0; head < first.kv_heads; ++head) {
      HeadResult result = calibrate_head(captures, head, *rotation, *of_values);
      set.keys.push_back(std::move(result.keys));
      set.values.push_back(std::move(result.values));
      out.report.push_back(std::move(result.report));
    }
  }
  return out;
}

}  // namespace

Result<Calibration> calibrate(std::span<const CapturedLayer> layers) {
  if (layers.empty()) return refused("no layers; allowed: at least one captured layer");
  std::map<int, std::vector<const CapturedLayer*>> by_number;
  for (const CapturedLayer& layer : layers) {
    if (Status status = check_layer(layer); !status) return status;
    auto& captures = by_number[layer.layer];
    if (!captures.empty()) {
      const CapturedLayer& first = *captures.front();
      if (layer.q_heads != first.q_heads || layer.kv_heads != first.kv_heads || layer.head_dim != first.head_dim ||
          value_dim(layer) != value_dim(first)) {
        return refused(fmt::format(
            "{} comes with {} query heads, {} kv heads, head_dim {} and with {}, {}, {}; allowed: captures "
            "of one model",
            layer.name, first.q_heads, first.kv_heads, first.head_dim, layer.q_heads, layer.kv_heads, layer.head_dim));
      }
    }
    captures.push_back(&layer);
  }
  try {
    return calibrate_checked(by_number);
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "calibrate: not enough memory");
  }
}

}  // namespace kvant::io
