// Captured tensors as `kvant eval` and `kvant calibrate` read them, made up.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvant/kvant.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::test {

struct LayerShape {
  int layer, q_heads, kv_heads, head_dim;
  std::int64_t queries, positions;
  std::int64_t window = 0;
};

// A capture with different numbers in every place; channel 3 is loud, and keys have a mean, as real ones do.
inline void write_capture(const std::string& path, const std::vector<LayerShape>& layers, float scale_of_values = 1) {
  std::vector<std::vector<float>> data;
  std::vector<io::TensorToWrite> tensors;
  std::map<std::string, std::string> metadata;
  data.reserve(layers.size() * 3);
  std::uint32_t state = 12345;
  const auto add = [&](const std::string& name, std::int64_t heads, std::int64_t rows, std::int64_t dim, float scale) {
    std::vector<float> values(static_cast<std::size_t>(heads * rows * dim));
    for (std::size_t i = 0; i < values.size(); ++i) {
      float sum = 0;
      for (int k = 0; k < 4; ++k) {
        state = state * 1664525u + 1013904223u;
        sum += static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
      }
      const std::size_t channel = i % static_cast<std::size_t>(dim);
      values[i] = sum * 1.7f * scale * (channel == 3 ? 4.0f : 1.0f);
      if (name.back() == 'k' && channel == 5) values[i] += 8;
    }
    data.push_back(std::move(values));
    tensors.push_back({name, "F32", {heads, rows, dim}, bytes_of(data.back())});
  };
  for (const LayerShape& l : layers) {
    const std::string name = "layer" + std::to_string(l.layer);
    add(name + ".q", l.q_heads, l.queries, l.head_dim, 1);
    add(name + ".k", l.kv_heads, l.positions, l.head_dim, 1);
    add(name + ".v", l.kv_heads, l.positions, l.head_dim, scale_of_values);
    metadata[name + ".scale"] = std::to_string(1 / std::sqrt(static_cast<double>(l.head_dim)));
    metadata[name + ".sliding_window"] = std::to_string(l.window);
  }
  io::write_safetensors(path, tensors, metadata).value();
}

}  // namespace kvant::test
