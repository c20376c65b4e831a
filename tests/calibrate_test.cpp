// Calibrated bases: they keep scores exactly, promise (and give) less noise where vectors are anisotropic, survive a
// file, and refuse what cannot be a basis.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvant/cache.hpp"
#include "kvant/io.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::io {
namespace {

/// A layer whose keys have loud channels and a mean, and whose queries look elsewhere.
CapturedLayer anisotropic(int head_dim, int q_heads = 4, int kv_heads = 2, std::int64_t queries = 300,
                          std::int64_t positions = 600) {
  CapturedLayer layer;
  layer.name = "layer7";
  layer.layer = 7;
  layer.q_heads = q_heads;
  layer.kv_heads = kv_heads;
  layer.head_dim = head_dim;
  layer.queries = queries;
  layer.positions = positions;
  layer.scale = 1 / std::sqrt(static_cast<double>(head_dim));
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& out, int heads, std::int64_t rows, float loudness, float mean) {
    out.resize(static_cast<std::size_t>(heads * rows * head_dim));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto channel = static_cast<int>(i % static_cast<std::size_t>(head_dim));
      out[i] = normal(random) * std::pow(loudness, static_cast<float>(channel) / static_cast<float>(head_dim)) +
               (channel % 3 == 0 ? mean : 0);
    }
  };
  fill(layer.q, q_heads, queries, 0.05f, 0);
  fill(layer.k, kv_heads, positions, 20, 2);
  fill(layer.v, kv_heads, positions, 10, 1);
  return layer;
}

std::vector<double> times(const std::vector<float>& matrix, const std::vector<double>& x) {
  std::vector<double> y(x.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(matrix[i * x.size() + j]) * x[j];
  }
  return y;
}

std::vector<double> transposed_times(const std::vector<float>& matrix, const std::vector<double>& x) {
  std::vector<double> y(x.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[j] += static_cast<double>(matrix[i * x.size() + j]) * x[i];
  }
  return y;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<double> row(const std::vector<float>& values, std::int64_t index, int head_dim) {
  const auto begin = values.begin() + index * head_dim;
  return {begin, begin + head_dim};
}

std::vector<double> centred(std::vector<double> x, const CalibratedBasis& basis) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] -= static_cast<double>(basis.center[i]);
  return x;
}

/// x as it comes back from storage in `format`, in the given basis or (null) the default one.
std::vector<double> stored(Format format, const std::vector<double>& x, const CalibratedBasis* basis) {
  const std::vector<double> in = basis ? times(basis->matrix, centred(x, *basis)) : x;
  std::vector<float> y(in.begin(), in.end());
  if (!basis) rotate(y).value();
  decode_vector(format, encode_vector(format, y).value(), y).value();
  if (!basis) rotate_back(y).value();
  std::vector<double> out(y.begin(), y.end());
  if (!basis) return out;
  out = times(basis->inverse, out);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += static_cast<double>(basis->center[i]);
  return out;
}

class HeadDims : public testing::TestWithParam<int> {};

TEST_P(HeadDims, TheInverseUndoesTheMatrixAndScoresAreKept) {
  const int head_dim = GetParam();
  const CapturedLayer layer = anisotropic(head_dim);
  const auto calibration = calibrate(std::span(&layer, 1));
  ASSERT_TRUE(calibration.ok()) << calibration.message();
  const BasisSet& set = calibration->layers.at(7);
  EXPECT_EQ(set.layers, 1);
  EXPECT_EQ(set.kv_heads, 2);
  EXPECT_EQ(set.head_dim, head_dim);
  ASSERT_EQ(set.keys.size(), 2u);
  ASSERT_EQ(set.values.size(), 2u);
  for (const std::vector<CalibratedBasis>* side : {&set.keys, &set.values}) {
    const bool is_key = side == &set.keys;
    for (std::size_t head = 0; head < 2; ++head) {
      const CalibratedBasis& basis = (*side)[head];
      for (std::int64_t i = 0; i < 20; ++i) {
        const std::vector<double> x =
            row(is_key ? layer.k : layer.v, static_cast<std::int64_t>(head) * layer.positions + i, head_dim);
        const std::vector<double> q = row(layer.q, static_cast<std::int64_t>(head) * 2 * layer.queries + i, head_dim);
        const std::vector<double> y = times(basis.matrix, centred(x, basis));
        const std::vector<double> back = times(basis.inverse, y);
        for (std::size_t j = 0; j < x.size(); ++j)
          EXPECT_NEAR(back[j], x[j] - static_cast<double>(basis.center[j]), 2e-4);
        const std::vector<double> center(basis.center.begin(), basis.center.end());
        const double score = dot(transposed_times(basis.inverse, q), y) + dot(q, center);
        EXPECT_NEAR(score, dot(q, x), 1e-4 * (1 + std::sqrt(dot(q, q) * dot(x, x))));
      }
    }
  }
}

TEST_P(HeadDims, ThePromisedGainIsTheMeasuredOne) {
  const int head_dim = GetParam();
  const CapturedLayer layer = anisotropic(head_dim);
  const auto calibration = calibrate(std::span(&layer, 1));
  ASSERT_TRUE(calibration.ok()) << calibration.message();
  ASSERT_EQ(calibration->report.size(), 2u);
  for (const CalibrationReport& report : calibration->report) {
    const auto head = static_cast<std::size_t>(report.kv_head);
    EXPECT_EQ(report.layer, "layer7");
    EXPECT_EQ(report.queries, 600);  // the two query heads of the group
    EXPECT_EQ(report.keys, 600);
    const CalibratedBasis& keys = calibration->layers.at(7).keys[head];
    const CalibratedBasis& values = calibration->layers.at(7).values[head];
    double key_with = 0, key_without = 0, value_with = 0, value_without = 0;
    for (std::int64_t i = 0; i < 100; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(head) * layer.positions + i;
      const std::vector<double> k = row(layer.k, at, head_dim);
      const std::vector<double> v = row(layer.v, at, head_dim);
      std::vector<double> error[4] = {stored(Format::tq4, k, &keys), stored(Format::tq4, k, nullptr),
                                      stored(Format::tq4, v, &values), stored(Format::tq4, v, nullptr)};
      for (int e = 0; e < 4; ++e) {
        for (std::size_t j = 0; j < k.size(); ++j) error[e][j] -= e < 2 ? k[j] : v[j];
      }
      for (std::int64_t n = 0; n < 50; ++n) {
        const std::vector<double> q = row(layer.q, static_cast<std::int64_t>(head) * 2 * layer.queries + n, head_dim);
        key_with += dot(q, error[0]) * dot(q, error[0]);
        key_without += dot(q, error[1]) * dot(q, error[1]);
      }
      value_with += dot(error[2], error[2]);
      value_without += dot(error[3], error[3]);
    }
    EXPECT_LT(report.expected_key_gain, 0.5);
    EXPECT_LT(report.expected_value_gain, 0.8);
    EXPECT_NEAR(key_with / key_without, report.expected_key_gain, 0.25 * report.expected_key_gain)
        << "kv head " << head;
    EXPECT_NEAR(value_with / value_without, report.expected_value_gain, 0.25 * report.expected_value_gain)
        << "kv head " << head;
  }
}

INSTANTIATE_TEST_SUITE_P(Rotations, HeadDims, testing::Values(32, 80, 96, 128, 256), testing::PrintToStringParamName());

TEST(Calibrate, CapturesOfOneLayerAreTakenTogether) {
  const CapturedLayer whole = anisotropic(32, 1, 1, 40, 60);
  const auto part_of = [&](std::int64_t q_from, std::int64_t q_count, std::int64_t k_from, std::int64_t k_count) {
    CapturedLayer part = whole;
    part.queries = q_count;
    part.positions = k_count;
    const auto cut = [](std::vector<float>& rows, std::int64_t from, std::int64_t count) {
      rows = {rows.begin() + from * 32, rows.begin() + (from + count) * 32};
    };
    cut(part.q, q_from, q_count);
    cut(part.k, k_from, k_count);
    cut(part.v, k_from, k_count);
    return part;
  };
  const std::vector<CapturedLayer> parts = {part_of(0, 15, 0, 50), part_of(15, 25, 50, 10)};
  const auto together = calibrate(parts);
  const auto at_once = calibrate(std::span(&whole, 1));
  ASSERT_TRUE(together.ok() && at_once.ok()) << together.message();
  EXPECT_EQ(together->report[0].keys, 60);
  EXPECT_EQ(together->report[0].queries, 40);
  const CalibratedBasis& a = together->layers.at(7).keys[0];
  const CalibratedBasis& b = at_once->layers.at(7).keys[0];
  for (std::size_t i = 0; i < a.matrix.size(); ++i) ASSERT_NEAR(a.matrix[i], b.matrix[i], 1e-5);
  for (std::size_t i = 0; i < a.center.size(); ++i) ASSERT_NEAR(a.center[i], b.center[i], 1e-5);
}

TEST(Calibrate, ValuesMayHaveASizeOfTheirOwn) {
  CapturedLayer layer = anisotropic(64);
  const CapturedLayer narrow = anisotropic(32);
  const auto wide_alone = calibrate(std::span(&layer, 1)), narrow_alone = calibrate(std::span(&narrow, 1));
  layer.v_head_dim = 32;
  layer.v = narrow.v;
  const auto calibration = calibrate(std::span(&layer, 1));
  ASSERT_TRUE(calibration.ok()) << calibration.message();
  const test::TemporaryDirectory directory;
  const std::string path = directory / "bases.safetensors";
  save_bases(path, *calibration, "test").value();
  const Calibration loaded = load_bases(path).value();
  for (const BasisSet& set : {calibration->layers.at(7), loaded.layers.at(7), select_bases(loaded, {}).value()}) {
    EXPECT_EQ(set.head_dim, 64);
    EXPECT_EQ(set.v_head_dim, 32);
    for (std::size_t head = 0; head < 2; ++head) {
      EXPECT_EQ(set.keys[head].matrix, wide_alone->layers.at(7).keys[head].matrix);
      EXPECT_EQ(set.values[head].matrix, narrow_alone->layers.at(7).values[head].matrix);
      EXPECT_EQ(set.values[head].center, narrow_alone->layers.at(7).values[head].center);
    }
  }
  CacheConfig config;
  config.kv_heads = 2, config.head_dim = 64, config.v_head_dim = 32;
  config.k = config.v = "tq4";
  config.k_basis = config.v_basis = BasisKind::calibrated;
  config.bases = std::make_shared<BasisSet>(select_bases(loaded, {}).value());
  EXPECT_TRUE(Cache::create(config).ok());
  config.v_head_dim = 64;
  EXPECT_NE(Cache::create(config).message().find("head_dim = 64, v_head_dim = 32; this cache has"), std::string::npos)
      << Cache::create(config).message();
  config.v_basis = BasisKind::hadamard;  // the keys' bases fit
  EXPECT_TRUE(Cache::create(config).ok());
}

TEST(Calibrate, VectorsWithoutSpreadKeepTheDefaultRotation) {
  CapturedLayer layer = anisotropic(64, 2, 1, 5, 9);
  std::ranges::fill(layer.k, 3.0f);
  std::ranges::fill(layer.v, 0.0f);
  const auto calibration = calibrate(std::span(&layer, 1));
  ASSERT_TRUE(calibration.ok()) << calibration.message();
  const BasisSet& set = calibration->layers.at(7);
  std::vector<float> unit(64);
  unit[5] = 1;
  std::vector<float> rotated = unit;
  rotate(rotated).value();
  for (const CalibratedBasis* basis : {&set.keys[0], &set.values[0]}) {
    for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(basis->matrix[i * 64 + 5], rotated[i], 1e-6);
  }
  EXPECT_EQ(set.keys[0].center[0], 3.0f);
  EXPECT_EQ(calibration->report[0].expected_value_gain, 1.0);
}

TEST(Calibrate, FewSamplesOfManyDimensionsStayInvertible) {
  const CapturedLayer layer = anisotropic(256, 1, 1, 1, 2);
  const auto calibration = calibrate(std::span(&layer, 1));
  ASSERT_TRUE(calibration.ok()) << calibration.message();
  const CalibratedBasis& basis = calibration->layers.at(7).keys[0];
  const std::vector<double> x = row(layer.q, 0, 256);
  const std::vector<double> back = times(basis.inverse, times(basis.matrix, x));
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], 1e-4);
}

TEST(Calibrate, RefusalsNameTheLayerAndTheValue) {
  const auto message = [](auto&& spoil) {
    CapturedLayer layer = anisotropic(32, 4, 2, 3, 5);
    spoil(layer);
    const auto calibration = calibrate(std::span(&layer, 1));
    EXPECT_EQ(calibration.code(), Code::invalid_argument);
    return calibration.message();
  };
  EXPECT_EQ(calibrate({}).message(), "calibrate: no layers; allowed: at least one captured layer");
  EXPECT_EQ(message([](CapturedLayer& l) { l.head_dim = 33; }),
            "calibrate: layer7: head_dim 33 has no rotation, and vectors of this size are stored padded, without a "
            "calibrated basis; allowed: 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 576");
  EXPECT_EQ(message([](CapturedLayer& l) { l.q_heads = 3; }),
            "calibrate: layer7: 3 query heads over 2 kv heads; allowed: a multiple of the kv heads");
  EXPECT_EQ(message([](CapturedLayer& l) { l.kv_heads = 0; }),
            "calibrate: layer7: 4 query heads over 0 kv heads; allowed: a multiple of the kv heads");
  EXPECT_EQ(message([](CapturedLayer& l) { l.queries = 0; }),
            "calibrate: layer7: 0 queries and 5 positions; allowed: at least one of each");
  EXPECT_EQ(message([](CapturedLayer& l) { l.positions = std::numeric_limits<std::int64_t>::max(); }),
            "calibrate: layer7: k holds 320 values; 2 heads of 9223372036854775807 rows of 32 need another number");
  EXPECT_EQ(message([](CapturedLayer& l) { l.q.pop_back(); }),
            "calibrate: layer7: q holds 383 values; 4 heads of 3 rows of 32 need another number");
  EXPECT_EQ(message([](CapturedLayer& l) { l.v[17] = std::nanf(""); }),
            "calibrate: layer7: v holds nan at element 17; allowed: finite values");
  EXPECT_EQ(message([](CapturedLayer& l) { l.q[3] = -std::numeric_limits<float>::infinity(); }),
            "calibrate: layer7: q holds -inf at element 3; allowed: finite values");
  const std::vector<CapturedLayer> two = {anisotropic(32, 4, 2, 3, 5), anisotropic(64, 4, 4, 3, 5)};
  EXPECT_EQ(calibrate(two).message(),
            "calibrate: layer7 comes with 4 query heads, 2 kv heads, head_dim 32 and with 4, 4, 64; allowed: captures "
            "of one model");
}

// --- Files -----------------------------------------------------------------------------------------------------------

class BasisFile : public testing::Test {
 protected:
  void SetUp() override {
    const CapturedLayer layer = anisotropic(32, 2, 2, 30, 40);
    calibration_ = calibrate(std::span(&layer, 1)).value();
  }

  /// The error of loading the spoilt calibration, without the file's name.
  std::string message() {
    save_bases(path_, calibration_, "a test").value();
    return loading();
  }
  std::string loading() {
    const auto loaded = load_bases(path_);
    if (!loaded) {
      EXPECT_EQ(loaded.code(), Code::bad_file);
    }
    return loaded.ok() ? "" : loaded.message().substr(path_.size() + 2);
  }
  BasisSet& set() { return calibration_.layers.at(7); }

  const test::TemporaryDirectory directory_;
  const std::string path_ = directory_ / "b";
  Calibration calibration_;
};

TEST_F(BasisFile, ComesBackBitForBit) {
  calibration_.layers[12] = set();
  calibration_.layers[12].values.clear();
  save_bases(path_, calibration_, "this test").value();
  const auto loaded = load_bases(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  ASSERT_EQ(loaded->layers.size(), 2u);
  EXPECT_TRUE(loaded->layers.at(12).values.empty());
  for (const auto& [number, expected] : calibration_.layers) {
    const BasisSet& got = loaded->layers.at(number);
    EXPECT_EQ(got.layers, 1);
    EXPECT_EQ(got.kv_heads, 2);
    EXPECT_EQ(got.head_dim, 32);
    ASSERT_EQ(got.keys.size(), expected.keys.size());
    ASSERT_EQ(got.values.size(), expected.values.size());
    for (std::size_t i = 0; i < got.keys.size(); ++i) {
      EXPECT_EQ(got.keys[i].center, expected.keys[i].center);
      EXPECT_EQ(got.keys[i].matrix, expected.keys[i].matrix);
      EXPECT_EQ(got.keys[i].inverse, expected.keys[i].inverse);
    }
  }
  EXPECT_EQ(SafeTensors::open(path_)->metadata().at("kvant.source"), "this test");
}

TEST_F(BasisFile, NumbersThatAreNoBasisAreRefused) {
  ASSERT_EQ(message(), "");
  set().keys[1].center[3] = std::nanf("");
  EXPECT_EQ(message(), "tensor \"layer7.k.center\": element 35 is nan; allowed: finite values");
  set().keys[1].center[3] = -70000;
  EXPECT_EQ(message(), "layer7.k.center of kv head 1 holds -70000; allowed: magnitude at most 65536");
  set().keys[1].center[3] = 0;
  auto& values = set().values[0];
  values.matrix[0] = 1e6;
  EXPECT_EQ(message(), "layer7.v.matrix of kv head 0 has a row of norm 1e+06; allowed: at most 1000");
  values.matrix = set().values[1].matrix;
  EXPECT_TRUE(message().starts_with(
      "layer7.v.inverse of kv head 0 is not the inverse of layer7.v.matrix: their product is off by "))
      << message();
  values.inverse = set().values[1].inverse;
  EXPECT_EQ(message(), "");
  std::ranges::fill(values.matrix, 0.0f);
  EXPECT_EQ(
      message(),
      "layer7.v.inverse of kv head 0 is not the inverse of layer7.v.matrix: their product is off by 1; allowed: 0.001");
}

TEST_F(BasisFile, WhatCannotBeSavedIsRefused) {
  set().keys.pop_back();
  EXPECT_EQ(
      save_bases(path_, calibration_, "").message(),
      path_ + ": not written: layer7.k holds 1 bases for 1 layers of 2 kv heads; allowed: one layer, one basis a head");
  set().keys.push_back(set().keys[0]);
  set().keys[1].matrix.pop_back();
  EXPECT_EQ(
      save_bases(path_, calibration_, "").message(),
      path_ + ": not written: tensor \"layer7.k.matrix\": 8188 bytes of data, but shape [2, 32, 32] of F32 needs 8192");
  EXPECT_EQ(directory_.files(), 0u);
}

TEST_F(BasisFile, FormsOfOtherFilesAreRefused) {
  const std::vector<float> zeros(64);
  using Metadata = std::map<std::string, std::string>;
  const Metadata right = {{"kvant.kind", "basis"}, {"kvant.version", "1"}};
  const auto file = [&](const Metadata& metadata,
                        std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors) {
    std::vector<TensorToWrite> out;
    for (auto& [name, shape] : tensors) {
      std::size_t bytes = sizeof(float);
      for (auto extent : shape) bytes *= static_cast<std::size_t>(extent);
      out.push_back({name, "F32", shape, std::as_bytes(std::span(zeros)).first(bytes)});
    }
    write_safetensors(path_, out, metadata).value();
    return loading();
  };
  EXPECT_EQ(file({}, {}),
            "no metadata \"kvant.kind\"; allowed: \"basis\" (is this a basis file? kvant calibrate writes one)");
  EXPECT_EQ(file({{"kvant.kind", "cache"}}, {}), "metadata \"kvant.kind\" is \"cache\"; allowed: \"basis\"");
  EXPECT_EQ(file({{"kvant.kind", "basis"}, {"kvant.version", "2"}}, {}),
            "metadata \"kvant.version\" is \"2\"; allowed: \"1\"");
  EXPECT_EQ(file(right, {}), "holds no basis; expected: layerN.k.center, layerN.k.matrix, layerN.k.inverse");
  const std::string foreign = "; allowed: layerN.k or .v, then .center, .matrix or .inverse";
  EXPECT_EQ(file(right, {{"layer1.q.center", {1}}}), "tensor \"layer1.q.center\" is not part of a basis" + foreign);
  EXPECT_EQ(file(right, {{"layer01.k.center", {1}}}), "tensor \"layer01.k.center\" is not part of a basis" + foreign);
  EXPECT_EQ(file(right, {{"layer99999999999.k.center", {1}}}),
            "tensor \"layer99999999999.k.center\" is not part of a basis" + foreign);
  EXPECT_EQ(file(right, {{"layer1.v.center", {1, 32}}}),
            "no tensor \"layer1.k.center\"; it has 1 tensors, the nearest: \"layer1.v.center\"");
  EXPECT_EQ(file(right, {{"layer1.k.center", {1, 31}}}),
            "tensor \"layer1.k.center\": shape is [1, 31]; allowed: [kv_heads, a supported head_dim]");
  EXPECT_EQ(file(right, {{"layer1.k.center", {1, 32}}, {"layer1.k.matrix", {1, 32, 2}}}),
            "tensor \"layer1.k.matrix\": \"F32\" of [1, 32, 2]; allowed: F32 of [1, 32, 32]");
}

}  // namespace
}  // namespace kvant::io
