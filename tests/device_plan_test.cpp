// The work of plan and run for caches on a device before a backend sees anything: refusals, what is handed over, and
// when a plan is stale. The backend here is a fake that only remembers; what a real one computes is in tests/gpu.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "kvant/kvant.hpp"

namespace kvant::test {
namespace {

struct Seen {
  int flushes = 0, runs = 0, layer = -1;
  std::vector<core::DeviceSequence> sequences;
  std::int32_t batch = 0;
  AttentionOptions options;
  RunOptions run;
} seen;

class FakeStore final : public core::DeviceCache {
 public:
  [[nodiscard]] std::int64_t reserved_bytes() const noexcept override { return 0; }
  void set_page(std::int32_t, std::int32_t, core::PageRef) override {}
  void set_length(std::int32_t, std::int64_t, std::int64_t) override {}
  void copy_slot(core::SlotCopy) override {}
  Status edit(core::Pool, std::int32_t, int, int, const std::function<void(std::byte*)>&) override { return {}; }
  Status flush(Stream) override { return ++seen.flushes, Status(); }
  Status advance(std::span<const core::DeviceAppend>, Stream) override { return {}; }
  Status write(std::span<const core::DeviceAppend>, int, const TensorView&, const TensorView&, Stream) override {
    return {};
  }
  Status decode(std::span<const core::DeviceRange>, int, const MutableTensorView&, const MutableTensorView&,
                Stream) override {
    return {};
  }
  Status download(core::Pool, std::int32_t, int, int, std::byte*, Stream) override { return {}; }
  Status download_slots(core::Pool, std::span<const std::int32_t>, const core::TakeSlots&, Stream) override {
    return {};
  }
  Status upload_slots(core::Pool, std::span<const std::int32_t>, const core::FillSlots&, Stream) override { return {}; }
  Status send_slots(core::Pool, std::span<const std::int32_t>, std::span<std::byte* const>, const core::SlotsDone&,
                    Stream) override {
    return {};
  }
  Status receive_slots(core::Pool, std::span<const std::int32_t>, std::span<std::byte* const>, const core::SlotsDone&,
                       Stream) override {
    return {};
  }
  Result<bool> take_non_finite(Stream) override { return false; }
};

class FakePlan final : public core::DevicePlan {
 public:
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return 640; }
  [[nodiscard]] const char* kernel() const noexcept override { return "decode"; }
  [[nodiscard]] int products() const noexcept override { return 16; }
  [[nodiscard]] int splits() const noexcept override { return 7; }
  [[nodiscard]] std::string explain() const override { return "kernel     remembers"; }
  Status run(int layer, const TensorView&, const MutableTensorView&, const core::FreshRows&,
             const RunOptions& options) const override {
    ++seen.runs;
    seen.layer = layer;
    seen.run = options;
    return {};
  }
};

// Never looked into: device memory.
float* device_memory() {
  return reinterpret_cast<float*>(std::uintptr_t{0x1000});
}

constexpr int kLayers = 2, kKvHeads = 2, kDim = 64;

class DevicePlans : public testing::Test {
 protected:
  void SetUp() override { seen = {}; }

  static CacheConfig config() {
    CacheConfig c;
    c.layers = kLayers;
    c.kv_heads = kKvHeads;
    c.head_dim = kDim;
    c.device = "cuda";
    c.capacity_tokens = 64 * 64;
    return c;
  }
  static TensorView rows(std::int64_t tokens, int heads) {
    return TensorView::of(device_memory(), tokens, heads, kDim);
  }
  static MutableTensorView out(std::int64_t tokens) { return MutableTensorView::of(device_memory(), tokens, 4, kDim); }
  static SequenceId add(Cache& cache, std::int64_t tokens) {
    const SequenceId id = cache.add_sequence();
    step(cache, id, tokens);
    return id;
  }
  static void step(Cache& cache, SequenceId id, std::int64_t tokens) {
    for (int layer = 0; layer < kLayers; ++layer)
      cache.append(id, layer, rows(tokens, kKvHeads), rows(tokens, kKvHeads)).value();
  }
  static AttentionOptions options() {
    AttentionOptions o;
    o.q_heads = 4;
    return o;
  }
  static RunOptions with_workspace() {
    RunOptions run;
    run.workspace = {reinterpret_cast<std::byte*>(device_memory()), 640};
    return run;
  }
  static void expect_seen(const std::vector<core::DeviceSequence>& sequences, std::int32_t batch) {
    ASSERT_EQ(seen.sequences.size(), sequences.size());
    EXPECT_EQ(seen.batch, batch);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      EXPECT_EQ(seen.sequences[i].index, sequences[i].index) << i;
      EXPECT_EQ(seen.sequences[i].q_len, sequences[i].q_len) << i;
      EXPECT_EQ(seen.sequences[i].batch, sequences[i].batch) << i;
      EXPECT_EQ(seen.sequences[i].length, sequences[i].length) << i;
    }
  }
  static void expect_refused(const Status& status, Code code, const std::string& words) {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }

  Cache cache = Cache::create(config()).value();
};

TEST_F(DevicePlans, TheBackendGetsCheckedOptionsAndPlaces) {
  const SequenceId first = add(cache, 100);
  const SequenceId second = add(cache, 70);
  AttentionOptions o = options();
  o.q_len = 3;
  o.softcap = 5;
  const Plan p = plan(cache, {second, first}, o).value();
  expect_seen({{1, 3, 0, 70}, {0, 3, 1, 100}}, 2);
  EXPECT_EQ(seen.options.q_lens, (std::vector<int>{3, 3}));
  EXPECT_EQ(seen.options.scale, 0.125);
  EXPECT_EQ(seen.options.softcap, 5);
  EXPECT_STREQ(p.isa(), "cuda");
  EXPECT_EQ(p.threads(), 0);
  EXPECT_EQ(p.splits(), 7);
  EXPECT_EQ(p.workspace_bytes(), 640u);
  EXPECT_EQ(p.total_queries(), 6);
  EXPECT_GT(p.kv_bytes(), 0);
  EXPECT_EQ(p.explain().rfind("backend    cuda on cuda", 0), 0u) << p.explain();
  EXPECT_NE(p.explain().find("kernel     remembers\n"), std::string::npos) << p.explain();
}

TEST_F(DevicePlans, TheBackendGetsNoSequenceWithoutQueries) {
  const SequenceId first = add(cache, 100), second = add(cache, 70), third = add(cache, 300);
  AttentionOptions o = options();
  o.q_lens = {0, 3, 0, 2};
  const Plan p = plan(cache, {third, second, cache.add_sequence(), first}, o).value();
  expect_seen({{1, 3, 1, 70}, {0, 2, 3, 100}}, 4);
  EXPECT_EQ(p.total_queries(), 5);
  o.q_lens = {0, 0};
  const Plan none = plan(cache, {first, second}, o).value();
  expect_seen({}, 2);
  run(none, 0, TensorView::of(nullptr, 0, 4, kDim), MutableTensorView::of(nullptr, 0, 4, kDim), with_workspace())
      .value();
  EXPECT_EQ(seen.runs, 0);
}

TEST_F(DevicePlans, KvBytesAreThoseOfTheSamePlanOnTheHost) {
  CacheConfig c = config();
  c.device = "";
  c.exact = Dtype::bf16;
  Cache host = Cache::create(c).value();
  const SequenceId here = host.add_sequence();
  const std::vector<float> zeros(300 * kKvHeads * kDim);
  for (int layer = 0; layer < kLayers; ++layer) {
    const TensorView view = TensorView::of(zeros.data(), 300, kKvHeads, kDim);
    host.append(here, layer, view, view).value();
  }
  EXPECT_EQ(plan(cache, {add(cache, 300)}, options()).value().kv_bytes(),
            plan(host, {here}, options()).value().kv_bytes());
}

TEST_F(DevicePlans, OptionsOfTheOtherBackendAreRefused) {
  const SequenceId id = add(cache, 100);
  const auto refused = [&](auto change, const std::string& words) {
    AttentionOptions o = options();
    change(o);
    expect_refused(plan(cache, {id}, o).status(), Code::invalid_argument, words);
  };
  refused([](auto& o) { o.backend = "cpu"; }, "lives on device \"cuda\"");
  refused([](auto& o) { o.backend = "metal"; }, "backend is \"metal\"");
  refused([](auto& o) { o.threads = 2; }, "threads is 2");
  refused([](auto& o) { o.isa = "avx2"; }, "isa is \"avx2\"");
  refused([](auto& o) { o.split_keys = 64; }, "split_keys is 64");
  refused([](auto& o) { o.kernel = "merge"; }, "kernel is \"merge\"");
  refused([](auto& o) { o.q_len = 101; }, "q_len of sequence 0 of the batch is 101");
  refused([](auto& o) { o.q_heads = 3; }, "q_heads is 3");
  EXPECT_EQ(seen.sequences.size(), 0u);  // the backend saw none of them
  AttentionOptions o = options();
  o.backend = "cuda";
  EXPECT_TRUE(plan(cache, {id}, o).ok());

  CacheConfig c = config();
  c.device = "cpu";
  Cache host = Cache::create(c).value();
  expect_refused(plan(host, {host.add_sequence()}, o).status(), Code::invalid_argument, "lives in host memory");
  o = options();
  o.kernel = "decode";
  expect_refused(plan(host, {host.add_sequence()}, o).status(), Code::invalid_argument,
                 "only caches on a device have two kinds of kernels");
}

TEST_F(DevicePlans, MasksAreCheckedByShapeAndNotLookedInto) {
  const SequenceId id = add(cache, 100);
  AttentionOptions o = options();
  o.mask.tensor = {device_memory(), Dtype::f16, {1, 4, 1, 100}, {400, 100, 100, 1}};
  const std::string words = plan(cache, {id}, o).value().explain();
  EXPECT_NE(words.find("causal; f16 mask tensor, read anew in each run: pages that it hides from all are skipped"),
            std::string::npos)
      << words;
  o.mask.tensor.shape[3] = 99;
  expect_refused(plan(cache, {id}, o).status(), Code::invalid_argument, "shape[3] (keys) is 99");
  o.mask.tensor.shape[3] = 100;
  o.mask.tensor.data = reinterpret_cast<const void*>(std::uintptr_t{0x1001});
  expect_refused(plan(cache, {id}, o).status(), Code::invalid_argument, "not aligned");
  o.mask.tensor.data = device_memory();
  o.mask.tensor.first_key = 30;
  o.mask.tensor.shape[3] = 70;
  EXPECT_TRUE(plan(cache, {id}, o).ok());
  EXPECT_EQ(seen.options.mask.tensor.first_key, 30);
  o.mask.tensor.shape[3] = 69;
  expect_refused(plan(cache, {id}, o).status(), Code::invalid_argument, "at least 70 from first_key 30 on");
}

TEST_F(DevicePlans, ReleasedPagesAreRefused) {
  CacheConfig c = config();
  c.window = 64;
  c.sink_pages = c.tail_pages = 1;
  Cache windowed = Cache::create(c).value();
  const SequenceId id = add(windowed, 400);
  step(windowed, id, 1);  // queries of the first step could see all of it
  AttentionOptions o = options();
  o.mask = Mask::sliding(400);
  expect_refused(plan(windowed, {id}, o).status(), Code::invalid_argument, "were released");
  const Plan planned = plan(windowed, {id}, options()).value();  // has the cache's window
  EXPECT_EQ(seen.options.mask.window, 64);
  EXPECT_NE(planned.explain().find("the cache's window"), std::string::npos) << planned.explain();
  o.mask = Mask::sliding(64);
  EXPECT_TRUE(plan(windowed, {id}, o).ok());
  o.mask = Mask::bounded_below(64);
  o.mask.tensor = {device_memory(), Dtype::boolean, {1, 1, 1, 401}, {401, 401, 401, 1}};
  EXPECT_TRUE(plan(windowed, {id}, o).ok());
  EXPECT_FALSE(seen.options.mask.is_causal);
}

TEST_F(DevicePlans, RunsCheckTheirArguments) {
  const SequenceId id = add(cache, 100);
  const Plan p = plan(cache, {id}, options()).value();
  int something = 0;
  RunOptions good = with_workspace();
  good.stream = {&something};
  run(p, 1, rows(1, 4), out(1), good).value();
  EXPECT_EQ(seen.runs, 1);
  EXPECT_EQ(seen.layer, 1);
  EXPECT_EQ(seen.run.stream.handle, &something);

  const auto refused = [&](const Status& s, const std::string& words) {
    expect_refused(s, Code::invalid_argument, words);
  };
  refused(run(p, kLayers, rows(1, 4), out(1), good), "layer is 2");
  refused(run(p, 0, rows(2, 4), out(1), good), "q.shape");
  refused(run(p, 0, rows(1, 4), out(2), good), "out.shape");
  TensorView strided = rows(1, 4);
  strided.stride[2] = 2;
  refused(run(p, 0, strided, out(1), good), "q.stride[2]");
  refused(run(p, 0, TensorView::of(nullptr, 1, 4, kDim), out(1), good), "q.data is null");
  refused(run(p, 0, rows(1, 4), out(1)), "workspace is empty");
  RunOptions bad = good;
  bad.workspace = good.workspace.first(639);
  refused(run(p, 0, rows(1, 4), out(1), bad), "workspace has 639 bytes");
  bad.workspace = {reinterpret_cast<std::byte*>(std::uintptr_t{0x1010}), 640};
  refused(run(p, 0, rows(1, 4), out(1), bad), "aligned");
  bad = good;
  bad.executor.execute = [](void*, int, void (*)(void*, int), void*) {};
  refused(run(p, 0, rows(1, 4), out(1), bad), "executor is set");
  EXPECT_EQ(seen.runs, 1);
}

TEST_F(DevicePlans, RowsMustLieOneAfterAnother) {
  const SequenceId id = add(cache, 100);
  const Plan one = plan(cache, {id}, options()).value();
  TensorView q = rows(1, 4);
  q.batch_stride = 12345;
  EXPECT_TRUE(run(one, 0, q, out(1), with_workspace()).ok());  // rows of the only sequence lie where they lie
  const Plan two = plan(cache, {id, add(cache, 50)}, options()).value();
  expect_refused(run(two, 0, q, out(2), with_workspace()), Code::unsupported, "q.batch_stride = 12345");
  q.batch_stride = q.stride[0];
  EXPECT_TRUE(run(two, 0, q, out(2), with_workspace()).ok());
}

TEST_F(DevicePlans, StayValidWhileTheirSequencesLive) {
  const SequenceId id = add(cache, 100);
  AttentionOptions o = options();
  o.q_len = 2;
  const Plan p = plan(cache, {id}, o).value();
  const auto try_run = [&] { return run(p, 0, rows(2, 4), out(2), with_workspace()); };
  step(cache, id, 5);
  add(cache, 10);
  EXPECT_TRUE(try_run().ok()) << try_run().message();
  const std::vector<Append> more = {{id, 1}};
  cache.reserve(more).value();
  expect_refused(try_run(), Code::invalid_argument, "not written");
  step(cache, id, 1);
  EXPECT_TRUE(try_run().ok()) << try_run().message();
  cache.truncate(id, 2).value();
  EXPECT_TRUE(try_run().ok()) << try_run().message();
  const int flushes = seen.flushes;
  EXPECT_TRUE(try_run().ok());
  EXPECT_GT(seen.flushes, flushes);  // what truncate changed goes before the kernels
  cache.truncate(id, 1).value();
  expect_refused(try_run(), Code::stale, "plan again");
  step(cache, id, 50);
  EXPECT_TRUE(try_run().ok()) << try_run().message();
  cache.remove(id).value();
  expect_refused(try_run(), Code::stale, "plan again");
}

}  // namespace
}  // namespace kvant::test

// In place of the library's own: a linker takes a definition from the program before it looks into archives.
namespace kvant::core {

const DeviceBackend* device_backend() {
  static const DeviceBackend kFake{"cuda", [] { return std::string("a fake"); }, [] { return std::string(); },
                                   [](const DeviceCacheConfig&) -> Result<std::unique_ptr<DeviceCache>> {
                                     return std::unique_ptr<DeviceCache>(new test::FakeStore);
                                   },
                                   [](const DevicePlanConfig& c) -> Result<std::unique_ptr<DevicePlan>> {
                                     test::seen.sequences.assign(c.sequences.begin(), c.sequences.end());
                                     test::seen.batch = c.batch;
                                     test::seen.options = *c.options;
                                     return std::unique_ptr<DevicePlan>(new test::FakePlan);
                                   }};
  return &kFake;
}

}  // namespace kvant::core
