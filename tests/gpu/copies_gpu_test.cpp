// Sequences between the host and a device: their bits, what goes on meanwhile, and how fast they are.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <iostream>
#include <optional>
#include <thread>

#include "core/fmt.hpp"
#include "gpu/gpu_world.hpp"
#include "kvant/snapshot.hpp"
#include "support/cache_session.hpp"
#include "support/inputs.hpp"
#include "support/snapshots.hpp"

namespace kvant::test {
namespace {

CacheConfig config_of(const char* k, const char* v, int layers = 2, int kv_heads = 2) {
  CacheConfig c;
  c.layers = layers;
  c.kv_heads = kv_heads;
  c.head_dim = 128;
  c.k = k;
  c.v = v;
  c.exact = Dtype::bf16;
  return c;
}
CacheConfig on_host(CacheConfig c, bool pinned) {
  c.device = "";
  c.capacity_tokens = 0;
  c.pinned = pinned;
  return c;
}
CacheConfig on_device(CacheConfig c, std::int64_t tokens) {
  c.device = "cuda";
  c.capacity_tokens = tokens;
  c.max_sequences = 8;
  return c;
}

// To a cache in host memory.
void append(Cache& cache, SequenceId id, std::int64_t tokens, std::uint64_t seed) {
  const CacheConfig& c = cache.config();
  const auto n = static_cast<std::size_t>(tokens * c.kv_heads * c.head_dim);
  const std::vector<float> k = gaussian_vector(n, seed), v = gaussian_vector(n, seed + 1);
  for (int layer = 0; layer < c.layers; ++layer) {
    cache
        .append(id, layer, TensorView::of(k.data(), tokens, c.kv_heads, c.head_dim),
                TensorView::of(v.data(), tokens, c.kv_heads, c.head_dim))
        .value();
  }
}

void expect_equal(Cache& a, std::span<const SequenceId> ids, Cache& b, std::span<const SequenceId> others) {
  expect_same(contents(impl_of(a), ids), contents(impl_of(b), others));
}

// Decode steps of one sequence of a cache on a device, with the same rows in each layer.
class Steps {
 public:
  Steps(Cache& cache, SequenceId id, const TestStream& stream, int q_heads)
      : cache_(cache), id_(id), stream_(stream), q_heads_(q_heads) {
    const CacheConfig& c = cache.config();
    rows_ = DeviceBuffer::of<float>(gaussian_vector(static_cast<std::size_t>(c.kv_heads * c.head_dim), 3));
    queries_ = DeviceBuffer::of<float>(gaussian_vector(static_cast<std::size_t>(q_heads * c.head_dim), 4));
    out_ = DeviceBuffer(queries_.size());
  }
  void step() {
    const CacheConfig& c = cache_.config();
    const Append one{id_, 1};
    cache_.reserve({&one, 1}, stream_.handle()).value();
    if (!plan_) {
      plan_.emplace(plan(cache_, {id_}, {.q_heads = q_heads_}).value());
      workspace_ = DeviceBuffer(std::max<std::size_t>(plan_->workspace_bytes(), 1));
    }
    const TensorView rows = TensorView::of(rows_.as<float>(), 1, c.kv_heads, c.head_dim);
    for (int layer = 0; layer < c.layers; ++layer) {
      cache_.write({&id_, 1}, layer, rows, rows, stream_.handle()).value();
      run(*plan_, layer, TensorView::of(queries_.as<float>(), 1, q_heads_, c.head_dim),
          MutableTensorView::of(out_.as<float>(), 1, q_heads_, c.head_dim),
          {.stream = stream_.handle(), .workspace = workspace_.span()})
          .value();
    }
    stream_.wait();
  }
  /// The last layer's answer.
  [[nodiscard]] std::vector<float> answer() const { return out_.download_as<float>(); }

 private:
  Cache& cache_;
  SequenceId id_;
  const TestStream& stream_;
  int q_heads_;
  DeviceBuffer rows_, queries_, out_, workspace_;
  std::optional<Plan> plan_;
};

TEST(CopiesGpu, KeepTheirBitsInAllMemory) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair("tq6", "tq4"), std::pair("fp8", "tq3"), std::pair("bf16", "bf16")}) {
    for (const auto& [layers, kv_heads] : {std::pair(1, 1), std::pair(3, 8)}) {  // slots of 8 KiB to 2 MiB
      SCOPED_TRACE(fmt::format("{}/{}, {} layers", k, v, layers));
      const CacheConfig c = config_of(k, v, layers, kv_heads);
      Cache plain = Cache::create(on_host(c, false)).value(), pinned = Cache::create(on_host(c, true)).value();
      for (Cache* host : {&plain, &pinned}) {
        const SequenceId gone = host->add_sequence(), id = host->add_sequence();
        append(*host, gone, 5000, 50);  // remains behind the tokens of pages
        host->remove(gone).value();
        append(*host, id, 2000, 1);
        const SequenceId child = host->fork(id).value();
        append(*host, child, 77, 2);
        append(*host, id, 10, 3);
        const std::vector<SequenceId> ids{id, child};
        Cache device = Cache::create(on_device(c, 64 * 256)).value();
        const std::vector<SequenceId> up = copy_sequences(*host, ids, device).value();
        expect_equal(*host, ids, device, up);
        for (Cache* back : {&plain, &pinned}) {
          const std::vector<SequenceId> down = copy_sequences(device, up, *back).value();
          expect_equal(*host, ids, *back, down);
          for (const SequenceId copy : down) back->remove(copy).value();
        }
        Cache beside = Cache::create(on_device(c, 64 * 256)).value();
        expect_equal(*host, ids, beside, copy_sequences(device, up, beside).value());
      }
    }
  }
}

TEST(CopiesGpu, ErrorsChangeNothing) {
  SKIP_WITHOUT_DEVICE();
  const CacheConfig c = config_of("tq4", "tq4", 8, 8);
  for (const bool pinned : {false, true}) {
    SCOPED_TRACE(pinned ? "pinned" : "plain");
    Cache host = Cache::create(on_host(c, pinned)).value();
    const SequenceId id = host.add_sequence();
    append(host, id, 64 * 100, 1);
    Cache small = Cache::create(on_device(c, 64 * 120)).value();
    const SequenceId there = copy_sequences(host, {&id, 1}, small).value()[0];
    const auto as_before = [&] {
      EXPECT_EQ(small.impl().table().sequences().size(), 1u);
      EXPECT_EQ(host.impl().table().sequences().size(), 1u);
      EXPECT_EQ(small.memory().tokens, 64 * 100);
      expect_equal(host, {&id, 1}, small, {&there, 1});
    };
    EXPECT_TRUE(refused(copy_sequences(host, {&id, 1}, small).status(), Code::out_of_capacity, {"20 of the cache's"}));
    as_before();
    // In the middle: the second call of progress.
    Cache large = Cache::create(on_device(c, 64 * 240)).value();
    for (const bool up : {true, false}) {
      int calls = 0;
      CopyOptions stops;
      stops.progress = [&](std::int64_t done, std::int64_t all) { return done == all || ++calls < 2; };
      const auto stopped =
          up ? copy_sequences(host, {&id, 1}, large, stops) : copy_sequences(small, {&there, 1}, host, stops);
      EXPECT_TRUE(refused(stopped.status(), Code::io, {"stopped"}));
      EXPECT_TRUE(large.impl().table().sequences().empty());
      EXPECT_EQ(large.impl().table().pages_held(), 0);
      as_before();
    }
    const std::vector<SequenceId> twice{copy_sequences(host, {&id, 1}, large).value()[0],
                                        copy_sequences(host, {&id, 1}, large).value()[0]};
    for (const SequenceId copy : twice) expect_equal(host, {&id, 1}, large, {&copy, 1});
  }
}

// Steps give the same bits beside copies in both directions as alone.
TEST(CopiesGpu, StepsOfOthersGoOnMeanwhile) {
  SKIP_WITHOUT_DEVICE();
  for (const bool pinned : {false, true}) {
    const CacheConfig c = config_of("tq6", "tq4", 4, 8);
    Cache host = Cache::create(on_host(c, pinned)).value();
    const SequenceId idle = host.add_sequence(), busy = host.add_sequence();
    append(host, idle, 64 * 128, 1);
    append(host, busy, 1000, 5);
    Cache device = Cache::create(on_device(c, 64 * 600)).value(), alone = Cache::create(on_device(c, 64 * 60)).value();
    const SequenceId id = copy_sequences(host, {&busy, 1}, device).value()[0];
    const SequenceId twin = copy_sequences(host, {&busy, 1}, alone).value()[0];
    const TestStream stream;
    std::atomic<bool> ends = false;
    std::atomic<int> copies = 0;
    std::thread mover([&] {
      const CopyOptions up{.progress = {}, .from_stream = {}, .to_stream = stream.handle()};
      const CopyOptions down{.progress = {}, .from_stream = stream.handle(), .to_stream = {}};
      while (!ends || copies < 2) {
        const SequenceId there = copy_sequences(host, {&idle, 1}, device, up).value()[0];
        const SequenceId here = copy_sequences(device, {&there, 1}, host, down).value()[0];
        expect_equal(host, {&idle, 1}, host, {&here, 1});
        device.remove(there).value();
        host.remove(here).value();
        ++copies;
      }
    });
    Steps beside(device, id, stream, 32), quiet(alone, twin, stream, 32);
    for (int i = 0; i < 150; ++i) {
      beside.step();
      quiet.step();
      EXPECT_EQ(beside.answer(), quiet.answer()) << "step " << i;
    }
    ends = true;
    mover.join();
    expect_equal(device, {&id, 1}, alone, {&twin, 1});
  }
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
double best_of(int times, const std::function<void()>& work) {
  double best = 1e9;
  for (int i = 0; i < times; ++i) best = std::min(best, seconds_of(work));
  return best;
}
double median_of(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

// How fast a long sequence leaves and returns, beside one pinned copy of as many bytes, and how long a decode step of
// another sequence takes meanwhile.
TEST(CopiesGpu, Speed) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [layers, tokens] : {std::pair(32, 4096), std::pair(1, 131072)}) {
    const CacheConfig c = config_of("tq4", "tq4", layers, 8);
    const TestStream stream;
    double plain[2] = {};
    for (const bool pinned : {false, true}) {
      Cache device = Cache::create(on_device(c, 3 * tokens + 64 * 1024)).value();
      Cache host = Cache::create(on_host(c, pinned)).value();
      const SequenceId idle = host.add_sequence(), busy = host.add_sequence();
      const Append all{idle, tokens};
      const double taken = seconds_of([&] { host.reserve({&all, 1}).value(); });
      host.truncate(idle, 0).value();
      for (int piece = 0; piece < 8; ++piece) append(host, idle, tokens / 8, 1);
      append(host, busy, 16384, 5);
      std::size_t bytes = 0;
      CopyOptions to{.progress = {}, .from_stream = {}, .to_stream = stream.handle()};
      to.progress = [&](std::int64_t, std::int64_t total) { return bytes = static_cast<std::size_t>(total), true; };
      const SequenceId kept = copy_sequences(host, {&idle, 1}, device, to).value()[0];
      to.progress = {};
      const auto rate = [&](double s) { return static_cast<double>(bytes) / s / 1e9; };
      if (!pinned) {
        void* memory = nullptr;
        CUDA_CHECK(cudaMallocHost(&memory, bytes));
        const DeviceBuffer there(bytes);
        for (const bool up : {true, false}) {
          plain[up ? 0 : 1] = rate(best_of(5, [&] {
            if (up) CUDA_CHECK(cudaMemcpyAsync(there.data(), memory, bytes, cudaMemcpyHostToDevice, stream.get()));
            if (!up) CUDA_CHECK(cudaMemcpyAsync(memory, there.data(), bytes, cudaMemcpyDeviceToHost, stream.get()));
            stream.wait();
          }));
        }
        CUDA_CHECK(cudaFreeHost(memory));
        std::cout << fmt::format(
            "{} layers, slots of {} KiB, {} MB: a pinned copy to the device {:.1f} GB/s, from it {:.1f}\n", layers,
            impl_of(host).store().slot_bytes(core::Pool::encoded) >> 10, bytes >> 20, plain[0], plain[1]);
      }
      const CopyOptions from{.progress = {}, .from_stream = stream.handle(), .to_stream = {}};
      SequenceId there{}, here{};
      const auto up = [&] { there = copy_sequences(host, {&idle, 1}, device, to).value()[0]; };
      const auto down = [&] { here = copy_sequences(device, {&kept, 1}, host, from).value()[0]; };
      double best[2] = {1e9, 1e9};
      for (int i = 0; i < 6; ++i) {
        best[0] = std::min(best[0], seconds_of(up));
        device.remove(there).value();
        best[1] = std::min(best[1], seconds_of(down));
        host.remove(here).value();
      }
      std::cout << fmt::format(
          "  {} memory (taken at {:.1f} GB/s): to the device {:.1f} GB/s ({:.0f} %), from it {:.1f} ({:.0f} %)\n",
          pinned ? "pinned" : "plain", rate(taken), rate(best[0]), 100 * rate(best[0]) / plain[0], rate(best[1]),
          100 * rate(best[1]) / plain[1]);

      Steps steps(device, copy_sequences(host, {&busy, 1}, device, to).value()[0], stream, 32);
      const auto timed = [&] {
        std::vector<double> each;
        for (int i = 0; i < 200; ++i) each.push_back(seconds_of([&] { steps.step(); }));
        return median_of(each);
      };
      (void)timed();
      for (const bool goes_up : {true, false}) {
        const double alone = timed();
        std::atomic<bool> ends = false;
        std::atomic<int> copies = 0;
        std::vector<double> moved;
        std::thread mover([&] {
          while (!ends) {
            moved.push_back(seconds_of(goes_up ? std::function<void()>(up) : std::function<void()>(down)));
            goes_up ? device.remove(there).value() : host.remove(here).value();
            ++copies;
          }
        });
        while (copies == 0) std::this_thread::yield();
        const double beside = timed();
        ends = true;
        mover.join();
        std::cout << fmt::format(
            "    a decode step of another sequence: {:.0f} us alone, {:.0f} beside copies {} the device ({:+.1f} %), "
            "which reach {:.1f} GB/s\n",
            1e6 * alone, 1e6 * beside, goes_up ? "to" : "from", 100 * (beside / alone - 1), rate(median_of(moved)));
      }
    }
  }
}

}  // namespace
}  // namespace kvant::test
