// An engine's blocks in host memory and their twins on a device: the same calls for both.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/bits.hpp"
#include "gpu/device_buffer.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"

namespace kvant::test {

struct Geometry {
  std::string k = "tq4", v = "tq4";
  int head_dim = 128, kv_heads = 2;
  int tail_pages = 0, tail_sequences = 0, layers = 1;
  KeyCentre k_centre = KeyCentre::none;  // page wants begin_step
  int sink_pages = 0, exact_copies = 0;
  int v_head_dim = 0;   // 0: head_dim
  bool latent = false;  // values are latents, and keys rotary keys
  KeyCentre v_centre = KeyCentre::automatic;
  [[nodiscard]] int v_dim() const { return v_head_dim > 0 ? v_head_dim : head_dim; }
};

inline PagesConfig config(const Geometry& g, const char* device) {
  PagesConfig c;
  c.kv_heads = g.kv_heads;
  c.head_dim = g.head_dim;
  c.v_head_dim = g.v_head_dim;
  if (g.latent) c.latent = g.v_dim(), c.rope = g.head_dim;
  c.k = g.k;
  c.v = g.v;
  c.device = device;
  c.tail_pages = g.tail_pages;
  c.tail_sequences = g.tail_sequences;
  c.layers = g.layers;
  c.k_centre = g.k_centre;
  c.v_centre = g.v_centre;
  c.sink_pages = g.sink_pages;
  c.exact_copies = g.exact_copies;
  return c;
}

/// Rows of keys, and of values.
inline std::vector<float> random_rows(std::int64_t tokens, const Geometry& g, std::uint64_t seed) {
  return gaussian_vector(static_cast<std::size_t>(tokens * g.kv_heads * g.head_dim), seed);
}
inline std::vector<float> random_values(std::int64_t tokens, const Geometry& g, std::uint64_t seed) {
  return gaussian_vector(static_cast<std::size_t>(tokens * g.kv_heads * g.v_dim()), seed);
}

// A pool in host memory and its twin on the device.
class Twins {
 public:
  Twins(const Geometry& g, std::int64_t blocks, std::int64_t between_blocks = 192)
      : geometry(g),
        host(Pages::create(config(g, "cpu")).value()),
        device(Pages::create(config(g, "cuda")).value()),
        pool(host, {.blocks = blocks, .between_blocks = between_blocks}),
        memory_(static_cast<std::size_t>(blocks * pool.view.block_stride)),
        device_pool(pool.view) {
    device_pool.data = memory_.data();
  }

  // Rows of both sides, on the host and on the device, in a tensor with room between tokens.
  void write(const std::vector<float>& keys, const std::vector<float>& values, const std::vector<std::int64_t>& slots,
             Dtype dtype = Dtype::f32, std::int64_t padding = 0) {
    const auto count = static_cast<std::int64_t>(slots.size());
    const auto typed = [&](const std::vector<float>& x, int head_dim) {
      const std::int64_t row = std::int64_t{geometry.kv_heads} * head_dim;
      const std::size_t size = dtype_size(dtype);
      std::vector<std::byte> bytes(static_cast<std::size_t>(count * (row + padding)) * size, std::byte{0xFF});
      for (std::int64_t t = 0; t < count; ++t) {
        for (std::int64_t j = 0; j < row; ++j) {
          const float value = x[static_cast<std::size_t>(t * row + j)];
          std::byte* at = bytes.data() + static_cast<std::size_t>(t * (row + padding) + j) * size;
          if (dtype == Dtype::f32) {
            std::memcpy(at, &value, 4);
          } else {
            const std::uint16_t bits = dtype == Dtype::f16 ? base::f32_to_f16(value) : base::f32_to_bf16(value);
            std::memcpy(at, &bits, 2);
          }
        }
      }
      return bytes;
    };
    const std::vector<std::byte> k = typed(keys, geometry.head_dim), v = typed(values, geometry.v_dim());
    const DeviceBuffer k_there = DeviceBuffer::of<std::byte>(k), v_there = DeviceBuffer::of<std::byte>(v);
    const DeviceBuffer slots_there = DeviceBuffer::of<std::int64_t>(slots);
    const auto view = [&](const void* data, int head_dim) {
      const std::int64_t heads = geometry.kv_heads;
      return TensorView{data, dtype, {count, heads, head_dim}, {heads * head_dim + padding, head_dim, 1}, 0};
    };
    const int dim = geometry.head_dim, v_dim = geometry.v_dim();
    host.write(pool.view, view(k.data(), dim), view(v.data(), v_dim), slots.data(), count).value();
    device
        .write(device_pool, view(k_there.data(), dim), view(v_there.data(), v_dim), slots_there.as<std::int64_t>(),
               count, stream.handle())
        .value();
    stream.wait();
  }

  [[nodiscard]] testing::AssertionResult same_bytes() const {
    const std::vector<std::byte> got = memory_.download();
    const auto* expected = pool.view.data;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] == expected[i]) continue;
      const auto stride = static_cast<std::size_t>(pool.view.block_stride);
      return testing::AssertionFailure() << "byte " << i % stride << " of block " << i / stride << " is "
                                         << static_cast<int>(got[i]) << ", not " << static_cast<int>(expected[i]);
    }
    if (!memory_.padding_untouched()) return testing::AssertionFailure() << "bytes around the pool were written";
    return testing::AssertionSuccess();
  }

  const Geometry geometry;
  const Pages host, device;
  EnginePool pool;
  TestStream stream;

 private:
  DeviceBuffer memory_;

 public:
  BlockPool device_pool;
};

// The tables of a step on the device, at addresses that stay.
struct DeviceTables {
  DeviceTables(std::int32_t batch, std::int64_t most_blocks)
      : max_batch(batch),
        columns(most_blocks),
        table(static_cast<std::size_t>(batch * most_blocks) * 4),
        lengths(static_cast<std::size_t>(batch) * 4),
        starts(static_cast<std::size_t>(batch + 1) * 4) {}
  // Sequences that the step has not got are padding: no tokens, no queries.
  StepTables upload(EngineStep step) const {
    while (static_cast<std::int32_t>(step.blocks.size()) < max_batch) step.add({}, 0, 0);
    (void)step.tables(columns);
    table.upload(step.table.data(), step.table.size() * 4);
    lengths.upload(step.seq_lens.data(), step.seq_lens.size() * 4);
    starts.upload(step.query_start_loc.data(), step.query_start_loc.size() * 4);
    return view();
  }
  [[nodiscard]] StepTables view() const {
    return {.block_table = table.as<std::int32_t>(),
            .row_stride = columns,
            .columns = columns,
            .seq_lens = lengths.as<std::int32_t>(),
            .query_start_loc = starts.as<std::int32_t>(),
            .batch = max_batch};
  }
  std::int32_t max_batch;
  std::int64_t columns;
  DeviceBuffer table, lengths, starts;
};

}  // namespace kvant::test
