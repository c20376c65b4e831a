// Captured layers are read as documented, and whatever does not fit together is refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "kvant/io.hpp"
#include "support/paths.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::io {
namespace {

using test::bytes_of;
using test::TemporaryDirectory;

/// A well-formed capture of one layer, to be spoilt one field at a time.
struct Capture {
  std::vector<std::int64_t> q_shape = {4, 2, 32}, k_shape = {2, 3, 32}, v_shape = {2, 3, 32};
  std::string q_dtype = "F32", k_dtype = "F32", v_dtype = "F32";
  std::string q_name = "layer3.q", k_name = "layer3.k", v_name = "layer3.v";
  std::map<std::string, std::string> metadata = {{"layer3.scale", "0.5"}, {"layer3.sliding_window", "7"}};
  std::size_t poisoned = static_cast<std::size_t>(-1);  // element of k
  float poison = 0;

  Result<std::vector<CapturedLayer>> read() const {
    const TemporaryDirectory directory;
    const std::string path = directory / "c";
    std::vector<std::vector<float>> data;
    std::vector<TensorToWrite> tensors;
    data.reserve(3);
    const auto add = [&](const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape) {
      std::size_t elements = 1;
      for (auto extent : shape) elements *= static_cast<std::size_t>(extent);
      std::vector<float>& values = data.emplace_back(elements * (dtype == "F64" ? 2 : 1));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
      if (name == k_name && poisoned < values.size()) values[poisoned] = poison;
      tensors.push_back({name, dtype, shape, bytes_of(values)});
    };
    add(q_name, q_dtype, q_shape);
    add(k_name, k_dtype, k_shape);
    add(v_name, v_dtype, v_shape);
    const Status written = write_safetensors(path, tensors, metadata);
    EXPECT_TRUE(written.ok()) << written.message();
    const auto file = SafeTensors::open(path);
    EXPECT_TRUE(file.ok()) << file.message();
    auto layers = read_captured_layers(*file);
    if (layers) return layers;
    EXPECT_EQ(layers.code(), Code::bad_file);
    return Status(layers.code(), layers.message().substr(std::min(layers.message().size(), path.size() + 2)));
  }
  std::string message() const { return read().message(); }
};

TEST(CapturedLayers, AreReadWithTheirNumbers) {
  const auto layers = Capture().read();
  ASSERT_TRUE(layers.ok()) << layers.message();
  ASSERT_EQ(layers->size(), 1u);
  const CapturedLayer& layer = layers->front();
  EXPECT_EQ(layer.name, "layer3");
  EXPECT_EQ(layer.layer, 3);
  EXPECT_EQ(layer.q_heads, 4);
  EXPECT_EQ(layer.kv_heads, 2);
  EXPECT_EQ(layer.head_dim, 32);
  EXPECT_EQ(layer.queries, 2);
  EXPECT_EQ(layer.positions, 3);
  EXPECT_EQ(layer.scale, 0.5);
  EXPECT_EQ(layer.window, 7);
  EXPECT_EQ(layer.dtype, "F32");
  EXPECT_EQ(layer.q.size(), 256u);
  EXPECT_EQ(layer.k[191], 191.0f);
  EXPECT_EQ(layer.assumed, "");
}

TEST(CapturedLayers, DefaultsStandForWhatTheFileGivesForNoLayer) {
  Capture capture;
  capture.metadata = {
      {"model", "mine"}, {"scale", "4"}, {"layer3.kv_of", "1"}};  // for no layer, or known to be for none
  auto layers = capture.read();
  ASSERT_TRUE(layers.ok()) << layers.message();
  EXPECT_NEAR(layers->front().scale, 0.17677669529663687, 1e-15);  // 1 / sqrt(32)
  EXPECT_EQ(layers->front().window, 0);
  EXPECT_EQ(layers->front().assumed, "scale 1/sqrt(32), no window");
  capture.metadata = {{"layer3.sliding_window", "7"}};
  layers = capture.read();
  ASSERT_TRUE(layers.ok()) << layers.message();
  EXPECT_EQ(layers->front().window, 7);
  EXPECT_EQ(layers->front().assumed, "scale 1/sqrt(32)");
}

TEST(CapturedLayers, DefaultsDoNotHideWhatWasMeant) {
  Capture capture;
  capture.metadata = {{"layer3.scale", "0.5"}, {"layer4.sliding_window", "7"}};
  EXPECT_EQ(capture.message(),
            "no metadata \"layer3.sliding_window\", though there is \"layer4.sliding_window\"; allowed: a number of "
            "tokens from 0 (no window) to 2^63 - 1, as text");
  capture.metadata = {{"layer1.scale", "0.5"}};
  EXPECT_EQ(capture.message(),
            "no metadata \"layer3.scale\", though there is \"layer1.scale\"; allowed: a positive number, as text");
  capture.metadata = {{"layer3.scale", "0.5"}, {"layer3.window", "7"}};
  EXPECT_EQ(capture.message(),
            "no metadata \"layer3.sliding_window\", but \"layer3.window\", which is not known; known: scale, "
            "sliding_window, softcap, sinks, kv_of");
}

TEST(CapturedLayers, ValuesThatBf16RoundsUp) {
  Capture of_bf16;  // which makes 65536 of 65504: caches take it and give it back
  of_bf16.poisoned = 32, of_bf16.poison = 65536;
  const auto loud = of_bf16.read();
  ASSERT_TRUE(loud.ok()) << loud.message();
  EXPECT_EQ(loud->front().k[32], 65536.0f);
}

TEST(CapturedLayers, RefusalsNameTheTensorAndWhatFits) {
  const auto spoilt = [](auto&& change) {
    Capture capture;
    change(capture);
    return capture.message();
  };
  EXPECT_EQ(spoilt([](Capture& c) { c.q_name = "q", c.k_name = "layer03.k", c.v_name = "layer-1.v"; }),
            "holds no captured layer among its 3 tensors; expected: layerN.q, layerN.k and layerN.v");
  EXPECT_EQ(spoilt([](Capture& c) { c.v_name = "layer3.values"; }),
            "no tensor \"layer3.v\"; it has 3 tensors, the nearest: \"layer3.values\", \"layer3.k\", \"layer3.q\"");
  EXPECT_EQ(spoilt([](Capture& c) { c.k_dtype = "I32"; }),
            "tensor \"layer3.k\": dtype is \"I32\"; allowed: F32, F16, BF16");
  EXPECT_EQ(spoilt([](Capture& c) { c.k_dtype = "F64"; }),
            "tensor \"layer3.k\": dtype is \"F64\"; allowed: F32, F16, BF16");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = {8, 32};
            }),
            "tensor \"layer3.q\": shape is [8, 32]; allowed: [heads, positions, head_dim], none of them 0");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = {4, 0, 32};
            }),
            "tensor \"layer3.q\": shape is [4, 0, 32]; allowed: [heads, positions, head_dim], none of them 0");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.v_shape = {2, 4, 32};
            }),
            "layer3: k is [2, 3, 32] and v is [2, 4, 32]; allowed: the same heads and positions");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = {4, 2, 64};
            }),
            "layer3: head_dim of q is 64, of k 32; allowed: the same");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = c.k_shape = c.v_shape = {1, 1, 577};
            }),
            "layer3: head_dim is 577; allowed: 1 to 576");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = {3, 2, 32};
            }),
            "layer3: 3 query heads over 2 kv heads; allowed: a multiple of the kv heads");
  EXPECT_EQ(spoilt([](Capture& c) {
              c.q_shape = {4, 4, 32};
            }),
            "layer3: 4 queries over 3 positions; allowed: at most one query a position");
  for (const char* scale : {"", "x", "0.5 ", "1,5", "1e999"}) {
    EXPECT_EQ(spoilt([&](Capture& c) { c.metadata["layer3.scale"] = scale; }),
              std::string("metadata \"layer3.scale\" is \"") + scale + "\"; allowed: a positive number, as text");
  }
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.scale"] = "0"; }),
            "metadata \"layer3.scale\" is 0; allowed: a positive number");
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.scale"] = "-1"; }),
            "metadata \"layer3.scale\" is -1; allowed: a positive number");
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.scale"] = "nan"; }),
            "metadata \"layer3.scale\" is nan; allowed: a positive number");
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.scale"] = "inf"; }),
            "metadata \"layer3.scale\" is inf; allowed: a positive number");
  const std::string window = "; allowed: a number of tokens from 0 (no window) to 2^63 - 1, as text";
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.sliding_window"] = "None"; }),
            "metadata \"layer3.sliding_window\" is \"None\"" + window);
  EXPECT_EQ(spoilt([](Capture& c) { c.metadata["layer3.sliding_window"] = "-1"; }),
            "metadata \"layer3.sliding_window\" is -1" + window);
  EXPECT_EQ(spoilt([](Capture& c) { c.poisoned = 97, c.poison = std::nanf(""); }),
            "tensor \"layer3.k\": the value at [1, 0, 1] is nan; allowed: finite, magnitude at most 65536");
  EXPECT_EQ(spoilt([](Capture& c) { c.poisoned = 191, c.poison = -std::numeric_limits<float>::infinity(); }),
            "tensor \"layer3.k\": the value at [1, 2, 31] is -inf; allowed: finite, magnitude at most 65536");
  EXPECT_EQ(spoilt([](Capture& c) { c.poisoned = 32, c.poison = 65537; }),
            "tensor \"layer3.k\": the value at [0, 1, 0] is 65537; allowed: finite, magnitude at most 65536");
}

TEST(CapturedLayers, TheTensorsOfThisRepositoryAreWhatTheirReadmeSays) {
  const auto file = SafeTensors::open(test::source_path("data/gemma4-nano-qkv.safetensors"));
  ASSERT_TRUE(file.ok()) << file.message();
  const auto layers = read_captured_layers(*file);
  ASSERT_TRUE(layers.ok()) << layers.message();
  ASSERT_EQ(layers->size(), 2u);
  const CapturedLayer& local = (*layers)[0];
  const CapturedLayer& global = (*layers)[1];
  EXPECT_EQ(local.name, "layer4");
  EXPECT_EQ(local.window, 512);
  EXPECT_EQ(local.head_dim, 256);
  EXPECT_EQ(local.kv_heads, 2);
  EXPECT_EQ(local.q_heads, 4);
  EXPECT_EQ(global.name, "layer5");
  EXPECT_EQ(global.window, 0);
  EXPECT_EQ(global.head_dim, 512);
  EXPECT_EQ(global.queries, 128);
  EXPECT_EQ(global.positions, 2048);
}

}  // namespace
}  // namespace kvant::io
