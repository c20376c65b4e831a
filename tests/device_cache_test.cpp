// The bookkeeping of a cache on a device, on a device that is not one: FakeStore keeps pages and tables in host memory, and
// does what kernels do, from its own tables and never from the host's. Launches can be recorded and replayed.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "codec/basis.hpp"
#include "support/device_replay.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

using core::PageRef;
using core::Pool;
using test::DeviceReplay;

class FakeStore final : public core::DeviceStore {
 public:
  struct State {
    std::int64_t length = 0, step_begin = 0;
  };
  explicit FakeStore(const core::DeviceStoreConfig& c)
      : config(c),
        pages(static_cast<std::size_t>(c.max_sequences) * static_cast<std::size_t>(c.max_pages)),
        states(static_cast<std::size_t>(c.max_sequences)),
        encoded_(static_cast<std::size_t>(c.encoded_slots) * slot_bytes(c.encoded)),
        exact_(static_cast<std::size_t>(c.exact_slots) * slot_bytes(c.exact)) {
    newest = this;
  }
  ~FakeStore() override { newest = nullptr; }

  std::int64_t reserved_bytes() const noexcept override {
    return static_cast<std::int64_t>(encoded_.size() + exact_.size());
  }
  void set_page(std::int32_t index, std::int32_t page, PageRef ref) override {
    recorded_.push_back([=, this] { page_at(index, page) = ref; });
  }
  void set_length(std::int32_t index, std::int64_t length, std::int64_t step_begin) override {
    recorded_.push_back([=, this] { state_at(index) = {length, step_begin}; });
  }
  void copy_slot(core::SlotCopy copy) override {
    recorded_.push_back([=, this] {
      const std::size_t bytes = slot_bytes(layout(copy.pool));
      std::memcpy(block(copy.pool, copy.to, 0, 0), block(copy.pool, copy.from, 0, 0), bytes);
    });
  }
  Status flush(Stream) override {
    if (recorded_.empty()) return {};
    if (capturing) return {Code::invalid_argument, "tables change while a stream is captured"};
    ++flushes;
    for (const auto& change : recorded_) change();
    recorded_.clear();
    return {};
  }
  Status advance(std::span<const core::DeviceAppend> appends, Stream) override {
    enqueue([this, all = std::vector<core::DeviceAppend>(appends.begin(), appends.end())] {
      for (const core::DeviceAppend& a : all) {
        State& s = state_at(a.index);
        s.step_begin = s.length;
        s.length += a.tokens;
      }
    });
    return {};
  }
  Status write(std::span<const core::DeviceAppend> appends, int layer, const TensorView& keys, const TensorView& values,
               Stream) override {
    enqueue([=, this, all = std::vector<core::DeviceAppend>(appends.begin(), appends.end())] {
      std::int64_t row = 0;
      for (const core::DeviceAppend& a : all) {
        store_step(a.index, layer, keys, values, row);
        row += a.tokens;
      }
    });
    return {};
  }
  Status decode(std::span<const core::DeviceRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream) override {
    enqueue([=, this, all = std::vector<core::DeviceRange>(ranges.begin(), ranges.end())] {
      std::int64_t row = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        load_range(all[i], layer, keys, keys.batch_stride != 0 ? 0 : row, static_cast<std::int64_t>(i), false);
        load_range(all[i], layer, values, values.batch_stride != 0 ? 0 : row, static_cast<std::int64_t>(i), true);
        row += all[i].end - all[i].begin;
      }
    });
    return {};
  }
  Status download(Pool pool, std::int32_t slot, int layer, int head, std::byte* to, Stream) override {
    std::memcpy(to, block(pool, slot, layer, head), layout(pool).block_bytes);
    return {};
  }
  Result<bool> take_non_finite(Stream) override { return false; }

  PageRef& page_at(std::int32_t index, std::int64_t page) {
    return pages.at(static_cast<std::size_t>(index) * static_cast<std::size_t>(config.max_pages) +
                    static_cast<std::size_t>(page));
  }
  State& state_at(std::int32_t index) { return states.at(static_cast<std::size_t>(index)); }

  static inline FakeStore* newest = nullptr;
  core::DeviceStoreConfig config;
  std::vector<PageRef> pages;
  std::vector<State> states;
  bool capturing = false;
  std::vector<std::function<void()>> recording;
  int flushes = 0;

 private:
  [[nodiscard]] std::size_t slot_bytes(const codec::PageLayout& l) const {
    return static_cast<std::size_t>(config.layers) * static_cast<std::size_t>(config.kv_heads) * l.block_bytes;
  }
  [[nodiscard]] const codec::PageLayout& layout(Pool pool) const {
    return pool == Pool::exact ? config.exact : config.encoded;
  }
  std::byte* block(Pool pool, std::int32_t slot, int layer, int head) {
    std::vector<std::byte>& bytes = pool == Pool::exact ? exact_ : encoded_;
    const std::size_t at = static_cast<std::size_t>(slot) * slot_bytes(layout(pool)) +
                           static_cast<std::size_t>(layer * config.kv_heads + head) * layout(pool).block_bytes;
    EXPECT_LE(at + layout(pool).block_bytes, bytes.size());
    return bytes.data() + at;
  }
  void enqueue(std::function<void()> work) {
    if (capturing) {
      recording.push_back(std::move(work));
    } else {
      work();
    }
  }

  void store_step(std::int32_t index, int layer, const TensorView& keys, const TensorView& values, std::int64_t row) {
    const State s = state_at(index);
    const std::int64_t first = std::max<std::int64_t>(0, s.step_begin / kPageTokens - config.ends.tail_pages);
    for (std::int64_t p = first; p * kPageTokens < s.length; ++p) {
      const PageRef ref = page_at(index, p);
      const std::int64_t begin = std::max(s.step_begin, p * kPageTokens);
      const std::int64_t end = std::min(s.length, (p + 1) * kPageTokens);
      const bool turns =
          ref.exact >= 0 && ref.encoded >= 0 && config.ends.exact(s.step_begin, p) && !config.ends.exact(s.length, p);
      for (int head = 0; head < config.kv_heads; ++head) {
        for (const bool value : {false, true}) {
          const TensorView& tensor = value ? values : keys;
          for (std::int64_t t = begin; t < end; ++t) {
            const std::vector<float> x = given(tensor, row + t - s.step_begin, head);
            store(ref.exact >= 0 ? Pool::exact : Pool::encoded, ref, layer, head, value, t, x);
          }
          for (std::int64_t t = p * kPageTokens; turns && t < (p + 1) * kPageTokens; ++t) {
            std::vector<float> x(static_cast<std::size_t>(config.head_dim));
            const codec::SideLayout& side = value ? config.exact.v : config.exact.k;
            codec::detail::load_dense(side, config.head_dim, block(Pool::exact, ref.exact, layer, head),
                                      static_cast<int>(t % kPageTokens), x.data());
            store(Pool::encoded, ref, layer, head, value, t, x);
          }
        }
      }
    }
  }
  void load_range(const core::DeviceRange& r, int layer, const MutableTensorView& out, std::int64_t row,
                  std::int64_t range, bool value) {
    if (out.data == nullptr) return;
    const std::int64_t length = r.begin == r.end ? 0
                                : r.before_step  ? state_at(r.index).step_begin
                                                 : state_at(r.index).length;
    for (std::int64_t t = r.begin; t < r.end; ++t) {
      ASSERT_LT(t, length);
      const PageRef ref = page_at(r.index, t / kPageTokens);
      const bool exact = ref.exact >= 0 && (ref.encoded < 0 || config.ends.exact(length, t / kPageTokens));
      const Pool pool = exact ? Pool::exact : Pool::encoded;
      ASSERT_GE(exact ? ref.exact : ref.encoded, 0);
      const codec::SideLayout& side = value ? layout(pool).v : layout(pool).k;
      std::vector<float> x(static_cast<std::size_t>(config.head_dim));
      for (int head = 0; head < config.kv_heads; ++head) {
        (value ? codec::load_row_v : codec::load_row_k)(side, config.head_dim,
                                                        block(pool, exact ? ref.exact : ref.encoded, layer, head),
                                                        static_cast<int>(t % kPageTokens), nullptr, x.data());
        const BasisKind basis = exact ? BasisKind::none : value ? config.v_basis : config.k_basis;
        codec::output_from_basis({.kind = basis}, config.head_dim, x.data(), 1.0f);
        const std::int64_t at = range * out.batch_stride + (row + t - r.begin) * out.stride[0] + head * out.stride[1];
        for (std::size_t j = 0; j < x.size(); ++j)
          test::store_as(out.dtype, out.data, static_cast<std::size_t>(at) + j, x[j]);
      }
    }
  }
  [[nodiscard]] std::vector<float> given(const TensorView& tensor, std::int64_t row, int head) const {
    std::vector<float> x(static_cast<std::size_t>(config.head_dim));
    const auto* from = static_cast<const float*>(tensor.data) + row * tensor.stride[0] + head * tensor.stride[1];
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = config.ends.any() ? test::rounded(from[i], config.exact_dtype) : from[i];
    }
    return x;
  }
  void store(Pool pool, PageRef ref, int layer, int head, bool value, std::int64_t t, std::vector<float> x) {
    const std::int32_t slot = pool == Pool::exact ? ref.exact : ref.encoded;
    if (slot < 0) return;  // a table that was not told: the comparison finds it
    const codec::SideLayout& side = value ? layout(pool).v : layout(pool).k;
    const BasisKind basis = value ? config.v_basis : config.k_basis;
    if (pool == Pool::encoded) codec::to_basis({.kind = basis}, config.head_dim, x.data(), x.data());
    (value ? codec::store_row_v : codec::store_row_k)(side, config.head_dim, block(pool, slot, layer, head),
                                                      static_cast<int>(t % kPageTokens), x.data(), nullptr);
  }

  std::vector<std::byte> encoded_, exact_;
  std::vector<std::function<void()>> recorded_;
};

constexpr core::DeviceBackend kFake{
    .name = "fake",
    .detail = [] { return std::string("fake"); },
    .unavailable = [] { return std::string(); },
    .make_store = [](const core::DeviceStoreConfig& c) -> Result<std::unique_ptr<core::DeviceStore>> {
      return std::unique_ptr<core::DeviceStore>(std::make_unique<FakeStore>(c));
    },
    .make_plan = nullptr,
    .make_bench = nullptr};

test::DeviceHooks hooks() {
  test::DeviceHooks h;
  h.backend = &kFake;
  h.upload = [buffers = std::make_shared<std::map<std::size_t, std::vector<std::byte>>>()](
                 std::size_t buffer, const std::vector<std::byte>& bytes) -> const void* {
    std::vector<std::byte>& to = (*buffers)[buffer];
    if (to.size() < bytes.size()) to.resize(bytes.size());
    std::copy(bytes.begin(), bytes.end(), to.begin());
    return to.data();
  };
  h.capture = [](const std::function<void()>& work) {
    FakeStore& store = *FakeStore::newest;
    store.recording.clear();
    store.capturing = true;
    work();
    store.capturing = false;
  };
  h.replay = [] {
    for (const auto& launch : FakeStore::newest->recording) launch();
  };
  h.decode_into = [](std::size_t bytes, const std::function<void(void*)>& decode) {
    std::vector<std::byte> out(bytes);
    decode(out.data());
    return out;
  };
  // What a kernel finds there leads it where the host's tables lead.
  h.check_tables = [](const CacheImpl& cache, SequenceId id) {
    FakeStore& store = *FakeStore::newest;
    const std::int32_t index = cache.device_index(id).value();
    const auto view = cache.view(id).value();
    ASSERT_EQ(store.state_at(index).length, view.length);
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      if (view.pages[p] == PageRef{}) continue;
      const auto page = static_cast<std::int64_t>(p);
      const PageRef seen = store.page_at(index, page);
      const bool exact = seen.exact >= 0 && (seen.encoded < 0 || store.config.ends.exact(view.length, page));
      ASSERT_EQ(exact, cache.reads_exact(view, page)) << "page " << p << " of " << view.length;
      ASSERT_EQ(exact ? seen.exact : seen.encoded, exact ? view.pages[p].exact : view.pages[p].encoded);
    }
  };
  return h;
}

CacheConfig config(int sinks, int tails) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 1;
  c.head_dim = 32;
  c.k = "tq4";
  c.v = "fp8";
  c.sink_pages = sinks;
  c.tail_pages = tails;
  c.device = "cuda";
  c.capacity_tokens = 64 * 64;
  c.max_sequences = 5;
  c.max_sequence_tokens = 1 << 20;
  return c;
}

struct Trial {
  const char* name;
  CacheConfig config;
};
void PrintTo(const Trial& t, std::ostream* out) {
  *out << t.name;
}

class DeviceCacheModel : public testing::TestWithParam<Trial> {};

TEST_P(DeviceCacheModel, HoldsWhatAHostCacheHolds) {
  DeviceReplay replay(GetParam().config, Dtype::f32, hooks());
  for (int i = 0; i < test::random_steps(400); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    replay.random_step();
    if (HasFailure()) return;
    replay.check_all();
    if (i % 8 == 0) replay.check_decoded();
    if (HasFailure()) return;
  }
  EXPECT_GT(replay.replays, test::random_steps(500));
  replay.remove_all();
}

std::vector<Trial> trials() {
  std::vector<Trial> all{{"defaults", config(1, 1)},
                         {"in_place", config(0, 0)},
                         {"sinks_only", config(2, 0)},
                         {"long_tail", config(0, 3)}};
  CacheConfig window = config(1, 1);
  window.window = 100;
  window.window_sinks = 4;
  all.push_back({"window", window});
  window.rollback_tokens = 150;
  all.push_back({"window_rollback", window});
  CacheConfig f16 = config(1, 1);
  f16.exact = Dtype::f16;
  all.push_back({"exact_f16", f16});
  CacheConfig dense = config(1, 1);
  dense.k = dense.v = "f16";
  all.push_back({"dense", dense});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, DeviceCacheModel, testing::ValuesIn(trials()),
                         [](const testing::TestParamInfo<Trial>& each) { return std::string(each.param.name); });

Status write_zeros(CacheImpl& cache, SequenceId id, std::int64_t tokens, std::vector<float>& zeros) {
  zeros.assign(static_cast<std::size_t>(tokens * cache.config().head_dim), 0.0f);
  const TensorView rows = TensorView::of(zeros.data(), tokens, 1, cache.config().head_dim);
  for (int layer = 0; layer < cache.config().layers; ++layer) {
    if (Status s = cache.append(id, layer, rows, rows); !s) return s;
  }
  return {};
}

TEST(DeviceCache, TheCapacityIsTheOnlyLimitThatAppendsMeet) {
  // All sequences at once, by steps that hold the most exact copies: old tail and new tail in one step.
  for (const int tails : {0, 1, 2}) {
    CacheConfig c = config(1, tails);
    c.capacity_tokens = 5 * 20 * 64;
    const auto cache = CacheImpl::create(c, &kFake).value();
    std::vector<Append> appends;
    for (int i = 0; i < 5; ++i) appends.push_back({cache->add_sequence(), 10 * 64 - 1});
    std::vector<SequenceId> ids;
    for (const Append& a : appends) ids.push_back(a.sequence);
    std::vector<float> zeros(5 * 640 * 32);
    for (int round = 0; round < 2; ++round) {
      const Status status = cache->reserve(appends);
      ASSERT_TRUE(status.ok()) << tails << status.message();
      const TensorView rows = TensorView::of(zeros.data(), 5 * 639, 1, 32);
      for (int layer = 0; layer < 2; ++layer) ASSERT_TRUE(cache->write(ids, layer, rows, rows).ok());
    }
    const Append more{ids[0], 64};
    EXPECT_EQ(cache->reserve({&more, 1}).code(), Code::out_of_capacity);
  }
}

TEST(DeviceCache, AReservedStepOnlyAdvances) {
  const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
  const SequenceId id = cache->add_sequence();
  std::vector<float> zeros;
  ASSERT_TRUE(write_zeros(*cache, id, 100, zeros).ok());
  const Append ahead{id, 300};
  ASSERT_TRUE(cache->reserve_ahead({&ahead, 1}).ok());
  const int flushes = FakeStore::newest->flushes;
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(write_zeros(*cache, id, 1, zeros).ok());
  EXPECT_EQ(FakeStore::newest->flushes, flushes);
  EXPECT_EQ(cache->length(id).value(), 400);
}

TEST(DeviceCache, NoTableKeepsASlotThatCameBackOnceSlotsAreTaken) {
  CacheConfig c = config(1, 1);
  c.window = 100;
  const auto cache = CacheImpl::create(c, &kFake).value();
  const SequenceId id = cache->add_sequence(), other = cache->add_sequence();
  std::vector<float> zeros;
  ASSERT_TRUE(write_zeros(*cache, id, 100, zeros).ok());
  const Append ahead{id, 500};
  ASSERT_TRUE(cache->reserve_ahead({&ahead, 1}).ok());
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(write_zeros(*cache, id, 1, zeros).ok());
  FakeStore& store = *FakeStore::newest;
  const std::int32_t index = cache->device_index(id).value();
  const auto same = [&] {
    const auto view = cache->view(id).value();
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      if (store.page_at(index, static_cast<std::int64_t>(p)) != view.pages[p]) return false;
    }
    return true;
  };
  EXPECT_FALSE(same());
  ASSERT_TRUE(write_zeros(*cache, other, 1, zeros).ok());
  EXPECT_TRUE(same());
}

TEST(DeviceCache, AdvanceWantsWhatWasReservedAhead) {
  const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
  const SequenceId id = cache->add_sequence();
  std::vector<float> zeros;
  ASSERT_TRUE(write_zeros(*cache, id, 100, zeros).ok());
  const Append one{id, 1}, ahead{id, 28}, many{id, 29};
  ASSERT_TRUE(cache->reserve_ahead({&ahead, 1}).ok());
  const Status beyond = cache->advance({&many, 1});
  EXPECT_EQ(beyond.code(), Code::invalid_argument);
  EXPECT_NE(beyond.message().find("reserve_ahead"), std::string::npos) << beyond.message();
  EXPECT_TRUE(cache->advance({&one, 1}).ok());
  EXPECT_EQ(cache->length(id).value(), 101);
  // A fork shares the page that the next token goes to.
  ASSERT_TRUE(cache->fork(id).ok());
  EXPECT_EQ(cache->advance({&one, 1}).code(), Code::invalid_argument);
  ASSERT_TRUE(cache->reserve_ahead({&one, 1}).ok());
  EXPECT_TRUE(cache->advance({&one, 1}).ok());
}

TEST(DeviceCache, ACaptureRefusesWhatAReplayCouldNotRepeat) {
  const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
  const SequenceId id = cache->add_sequence();
  std::vector<float> zeros;
  ASSERT_TRUE(write_zeros(*cache, id, 128, zeros).ok());
  FakeStore::newest->capturing = true;
  const Append one{id, 1};
  EXPECT_EQ(cache->reserve({&one, 1}).code(), Code::invalid_argument);
  EXPECT_EQ(cache->length(id).value(), 128);
  FakeStore::newest->capturing = false;
  EXPECT_TRUE(write_zeros(*cache, id, 1, zeros).ok());
  EXPECT_EQ(cache->length(id).value(), 129);
}

TEST(DeviceCache, PlacesAreFewAndComeBack) {
  CacheConfig c = config(1, 1);
  c.max_sequences = 2;
  const auto cache = CacheImpl::create(c, &kFake).value();
  std::vector<float> zeros;
  const SequenceId a = cache->add_sequence(), b = cache->add_sequence(), third = cache->add_sequence();
  ASSERT_TRUE(write_zeros(*cache, a, 3, zeros).ok());
  ASSERT_TRUE(write_zeros(*cache, b, 3, zeros).ok());
  const Status full = write_zeros(*cache, third, 3, zeros);
  EXPECT_EQ(full.code(), Code::out_of_capacity);
  EXPECT_NE(full.message().find("max_sequences"), std::string::npos) << full.message();
  EXPECT_EQ(cache->fork(a).code(), Code::out_of_capacity);
  EXPECT_EQ(cache->device_index(third).code(), Code::out_of_capacity);
  ASSERT_TRUE(cache->remove(a).ok());
  EXPECT_TRUE(write_zeros(*cache, third, 3, zeros).ok());
  EXPECT_EQ(cache->device_index(third).value(), 0);
}

TEST(DeviceCache, BeamsHoldWhatThoseOfAHostCacheHold) {
  for (const int ends : {0, 1, 2}) {
    DeviceReplay replay(config(ends, ends), Dtype::f32, hooks());
    replay.beams(120);
    if (HasFailure()) return;
    replay.check_all();
    EXPECT_EQ(replay.device().length(replay.ids()[3]).value(), 150 + 120 + 2 * 24);
    replay.remove_all();
  }
}

TEST(DeviceCache, ReorderedSequencesKeepTheirPlaces) {
  CacheConfig c = config(1, 1);
  c.max_sequences = 2;
  const auto cache = CacheImpl::create(c, &kFake).value();
  std::vector<float> zeros;
  const SequenceId a = cache->add_sequence(), b = cache->add_sequence(), third = cache->add_sequence();
  ASSERT_TRUE(write_zeros(*cache, a, 300, zeros).ok());
  ASSERT_TRUE(write_zeros(*cache, b, 70, zeros).ok());
  const std::int32_t place_a = cache->device_index(a).value(), place_b = cache->device_index(b).value();
  const SequenceId two[] = {a, b};
  const std::int64_t exchange[] = {1, 0};
  ASSERT_TRUE(cache->reorder(two, exchange).ok());
  EXPECT_EQ(cache->device_index(a).value(), place_a);
  EXPECT_EQ(cache->device_index(b).value(), place_b);
  ASSERT_TRUE(cache->flush({}).ok());
  FakeStore& store = *FakeStore::newest;
  EXPECT_EQ(store.state_at(place_a).length, 70);
  EXPECT_EQ(store.state_at(place_b).length, 300);
  const auto view = cache->view(b).value();
  for (std::size_t p = 0; p < 5; ++p) EXPECT_EQ(store.page_at(place_b, static_cast<std::int64_t>(p)), view.pages[p]);
  EXPECT_EQ(store.page_at(place_a, 4), PageRef{});
  // A third becomes one of two that have all the places: refused, and nothing changed.
  const SequenceId three[] = {a, b, third};
  const std::int64_t all_a[] = {0, 0, 0};
  const Status full = cache->reorder(three, all_a);
  EXPECT_EQ(full.code(), Code::out_of_capacity);
  EXPECT_NE(full.message().find("max_sequences"), std::string::npos) << full.message();
  EXPECT_EQ(cache->length(a).value(), 70);
  EXPECT_EQ(cache->length(b).value(), 300);
}

TEST(DeviceCache, RowsMustLieOneAfterAnother) {
  const auto cache = CacheImpl::create(config(0, 0), &kFake).value();
  const SequenceId ids[] = {cache->add_sequence(), cache->add_sequence()};
  std::vector<float> zeros(1000);
  const auto write = [&](std::int64_t first, std::int64_t second, std::int64_t batch_stride) {
    const Append appends[] = {{ids[0], first}, {ids[1], second}};
    EXPECT_TRUE(cache->reserve(appends).ok());
    TensorView rows = TensorView::of(zeros.data(), std::max(first, second), 1, 32);
    rows.batch_stride = batch_stride;
    const Status status = cache->write(ids, 0, rows, rows);
    for (const Append& a : appends) EXPECT_TRUE(cache->truncate(a.sequence, 0).ok());
    return status;
  };
  EXPECT_TRUE(write(3, 3, 3 * 32).ok());
  EXPECT_TRUE(write(3, 0, 7 * 32).ok());
  for (const Status& status : {write(3, 3, 4 * 32), write(2, 3, 3 * 32)}) {
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_NE(status.message().find("keys.batch_stride"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("copy them"), std::string::npos) << status.message();
  }
}

TEST(DeviceCache, Refusals) {
  const auto refused = [](auto change, Code code, const char* word, const core::DeviceBackend* backend = &kFake) {
    CacheConfig c = config(1, 1);
    change(c);
    const auto made = CacheImpl::create(c, backend);
    EXPECT_EQ(made.code(), code) << made.message();
    EXPECT_NE(made.message().find(word), std::string::npos) << made.message();
  };
  refused([](CacheConfig& c) { c.capacity_tokens = 0; }, Code::invalid_argument, "capacity_tokens");
  refused([](CacheConfig& c) { c.device = "gpu"; }, Code::invalid_argument, "cuda:N");
  refused([](CacheConfig& c) { c.device = "cuda:x"; }, Code::invalid_argument, "cuda:N");
  refused([](CacheConfig& c) { c.max_sequences = 0; }, Code::invalid_argument, "max_sequences");
  refused([](CacheConfig& c) { c.max_sequence_tokens = -1; }, Code::invalid_argument, "max_sequence_tokens");
  refused([](CacheConfig& c) { c.exact = Dtype::f32; }, Code::unsupported, "exact");
  refused([](CacheConfig&) {}, Code::unsupported, "no CUDA backend", nullptr);
  static constexpr core::DeviceBackend kAbsent{.name = "fake",
                                               .detail = nullptr,
                                               .unavailable = [] { return std::string("there is no driver"); },
                                               .make_store = nullptr,
                                               .make_plan = nullptr,
                                               .make_bench = nullptr};
  refused([](CacheConfig&) {}, Code::unsupported, "there is no driver", &kAbsent);

  CacheConfig c = config(1, 1);
  c.max_sequence_tokens = 100;
  const auto cache = CacheImpl::create(c, &kFake).value();
  const SequenceId id = cache->add_sequence();
  std::vector<float> zeros;
  const Status longer = write_zeros(*cache, id, 101, zeros);
  EXPECT_EQ(longer.code(), Code::out_of_capacity);
  EXPECT_NE(longer.message().find("max_sequence_tokens"), std::string::npos) << longer.message();
  EXPECT_NE(cache->describe().find("device: cuda:0"), std::string::npos) << cache->describe();

  c.device = "cpu";
  const auto host = CacheImpl::create(c, &kFake).value();
  EXPECT_EQ(host->device(), nullptr);
  EXPECT_EQ(host->reserve_ahead({}).code(), Code::invalid_argument);
  EXPECT_EQ(host->advance({}).code(), Code::invalid_argument);
  EXPECT_FALSE(host->take_non_finite().value());
}

TEST(DeviceCache, ReadsWhatWasStored) {
  const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
  CacheConfig on_host = config(1, 1);
  on_host.device = {};
  on_host.exact = Dtype::bf16;
  const auto host = CacheImpl::create(on_host).value();
  const SequenceId id = cache->add_sequence();
  ASSERT_EQ(host->add_sequence(), id);
  const auto tokens = test::token_range(1, 250);
  for (int layer = 0; layer < 2; ++layer) {
    const test::CacheRows rows(tokens, layer, 1, 32);
    ASSERT_TRUE(cache->append(id, layer, rows.keys(), rows.values()).ok());
    ASSERT_TRUE(host->append(id, layer, rows.keys(), rows.values()).ok());
    std::vector<float> k(250 * 32), v(250 * 32), host_k(250 * 32), host_v(250 * 32);
    const auto view = [](std::vector<float>& x) { return MutableTensorView::of(x.data(), 250, 1, 32); };
    ASSERT_TRUE(cache->read(id, layer, 0, 250, view(k), view(v)).ok());
    ASSERT_TRUE(host->read(id, layer, 0, 250, view(host_k), view(host_v)).ok());
    EXPECT_EQ(k, host_k);
    EXPECT_EQ(v, host_v);
  }
}

}  // namespace
}  // namespace kvant
