// Snapshots over devices: a cache that was saved on a GPU goes on, on the CPU and back on the GPU, as if nothing had
// happened: the same bytes in its pages, the same bits in its answers.
#include <gtest/gtest.h>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "kvant/snapshot.hpp"
#include "support/draw.hpp"
#include "support/inputs.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::test {
namespace {

constexpr int kLayers = 2, kQHeads = 8;

// A cache on either side, and its sequences.
struct Side {
  Cache cache;
  std::vector<SequenceId> ids;

  [[nodiscard]] bool is_device() const { return cache.config().device == "cuda"; }
  void append(std::size_t which, std::int64_t tokens, std::uint64_t seed) {
    const int d = cache.config().head_dim, v_d = cache.config().v_dim(), heads = cache.config().kv_heads;
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto rows = [&](int dim, std::uint64_t which_side) {
        return gaussian_vector(static_cast<std::size_t>(tokens * heads * dim),
                               seed + 2 * static_cast<std::uint64_t>(layer) + which_side);
      };
      const std::vector<float> k = rows(d, 0), v = rows(v_d, 1);
      const auto put = [&](const float* keys, const float* values) {
        cache
            .append(ids[which], layer, TensorView::of(keys, tokens, heads, d),
                    TensorView::of(values, tokens, heads, v_d))
            .value();
      };
      if (!is_device()) {
        put(k.data(), v.data());
      } else {
        const DeviceBuffer there_k = DeviceBuffer::of<float>(k), there_v = DeviceBuffer::of<float>(v);
        put(there_k.as<float>(), there_v.as<float>());
        CUDA_CHECK(cudaDeviceSynchronize());
      }
    }
  }
  [[nodiscard]] std::vector<float> answers(std::uint64_t seed) const {
    const int d = cache.config().q_dim(), v_d = cache.config().v_dim();
    const auto batch = static_cast<std::int64_t>(ids.size());
    const Plan p = plan(cache, std::span<const SequenceId>(ids), {.q_heads = kQHeads, .scale = 0.1}).value();
    const auto rows = static_cast<std::size_t>(batch * kQHeads);
    const std::vector<float> q = gaussian_vector(rows * static_cast<std::size_t>(d), seed);
    std::vector<float> all, out(rows * static_cast<std::size_t>(v_d));
    for (int layer = 0; layer < kLayers; ++layer) {
      if (!is_device()) {
        run(p, layer, TensorView::of(q.data(), batch, kQHeads, d),
            MutableTensorView::of(out.data(), batch, kQHeads, v_d))
            .value();
      } else {
        const DeviceBuffer there_q = DeviceBuffer::of<float>(q), there(out.size() * sizeof(float));
        const DeviceBuffer workspace(std::max<std::size_t>(p.workspace_bytes(), 1));
        run(p, layer, TensorView::of(there_q.as<float>(), batch, kQHeads, d),
            MutableTensorView::of(there.as<float>(), batch, kQHeads, v_d), {.workspace = workspace.span()})
            .value();
        out = there.download_as<float>();
      }
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
};

Side load_on(const std::string& path, const char* device) {
  LoadOptions options;
  options.device = device;
  Loaded loaded = load(path, options).value();
  return {std::move(loaded.cache), std::move(loaded.sequences)};
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
Side new_side(const char* k, const char* v, int width, const char* device) {
  CacheConfig c;
  c.layers = kLayers;
  c.kv_heads = 2;
  set_width(c, width);
  c.k = k;
  c.v = v;
  if (c.latent > 0) c.v_centre = std::string(v) == "bf16" ? KeyCentre::none : KeyCentre::page;
  c.device = device;
  c.capacity_tokens = 64 * 256;
  c.max_sequences = 4;
  c.max_sequence_tokens = 4096;
  Side side{Cache::create(c).value(), {}};
  side.ids.push_back(side.cache.add_sequence());
  side.append(0, 300, 1);
  side.ids.push_back(side.cache.fork(side.ids[0]).value());
  side.append(0, 37, 2);
  side.append(1, 150, 3);
  return side;
}

TEST(SnapshotGpu, GoesOnOnEitherSide) {
  SKIP_WITHOUT_DEVICE();
  const TemporaryDirectory folder;
  for (const auto& [k, v] : {std::pair("tq6", "tq4"), std::pair("tq4", "tq4"), std::pair("tq8", "tq8"),
                             std::pair("fp8", "fp8"), std::pair("bf16", "bf16"), std::pair("tq3", "tq3")}) {
    for (const int width : {64, 128, 256, 192128, 1064512}) {
      SCOPED_TRACE(fmt::format("{}/{}, width {}", k, v, width));
      Side device = new_side(k, v, width, "cuda"), host = new_side(k, v, width, "cpu");
      const std::string from_device = folder / "device.kvs", from_host = folder / "host.kvs";
      save(device.cache, from_device).value();
      Side moved = load_on(from_device, "cpu");
      expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(moved.cache), moved.ids));
      save(moved.cache, from_host).value();
      Side back = load_on(from_host, "cuda");
      expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(back.cache), back.ids));
      for (std::uint64_t step = 0; step < 64; ++step) {
        const std::size_t which = step % 2;
        for (Side* side : {&device, &host, &moved, &back})
          side->append(which, 1 + static_cast<std::int64_t>(step % 3), 100 + 10 * step);
        ASSERT_TRUE(same_bits(device.answers(step), back.answers(step))) << "on the device, step " << step;
        ASSERT_TRUE(same_bits(host.answers(step), moved.answers(step))) << "on the CPU, step " << step;
      }
      expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(back.cache), back.ids));
      expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(moved.cache), moved.ids));
    }
  }
}

// The same without a file.
TEST(SnapshotGpu, CopiesLeaveTheDeviceAndReturn) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair("tq6", "tq4"), std::pair("tq4", "tq4"), std::pair("bf16", "bf16")}) {
    SCOPED_TRACE(fmt::format("{}/{}", k, v));
    Side device = new_side(k, v, 128, "cuda"), other = new_side(k, v, 128, "cpu");
    Cache back = Cache::create(device.cache.config()).value();
    const std::vector<SequenceId> down = copy_sequences(device.cache, device.ids, other.cache).value();
    const std::vector<SequenceId> up = copy_sequences(other.cache, down, back).value();
    Side host{std::move(other.cache), down}, again{std::move(back), up};
    expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(host.cache), host.ids));
    expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(again.cache), again.ids));
    for (std::uint64_t step = 0; step < 16; ++step) {
      for (Side* side : {&device, &host, &again}) {
        side->append(step % 2, 1 + static_cast<std::int64_t>(step % 3), 100 + 10 * step);
      }
      ASSERT_TRUE(same_bits(device.answers(step), again.answers(step))) << "step " << step;
    }
    expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(again.cache), again.ids));
    expect_same(contents(impl_of(device.cache), device.ids), contents(impl_of(host.cache), host.ids));
  }
}

}  // namespace
}  // namespace kvant::test
