// The bookkeeping of a cache on a device, on a fake one (support/fake_device.hpp).
#include <gtest/gtest.h>

#include "core/fmt.hpp"
#include "support/fake_device.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

using core::PageRef;
using core::Pool;
using test::DeviceReplay;
using test::fake_hooks;
using test::FakeStore;
using test::kFake;

CacheConfig config(int sinks, int tails) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 1;
  c.head_dim = 32;
  c.k = "tq4";
  c.v = "fp8";
  c.k_centre = KeyCentre::none;  // the fake device's kernels make no centres
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
  DeviceReplay replay(GetParam().config, Dtype::f32, fake_hooks());
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

// A collector may remove what nobody needs at any time, also while a step of others is recorded.
TEST(DeviceCache, ARemovalIsSentWithTheNextStepThatTakesSlots) {
  const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
  const SequenceId id = cache->add_sequence(), gone = cache->add_sequence();
  std::vector<float> zeros;
  ASSERT_TRUE(write_zeros(*cache, id, 100, zeros).ok());
  ASSERT_TRUE(write_zeros(*cache, gone, 200, zeros).ok());
  const Append ahead{id, 10};
  ASSERT_TRUE(cache->reserve_ahead({&ahead, 1}).ok());
  FakeStore& store = *FakeStore::newest;
  const std::int32_t index = cache->device_index(gone).value();
  store.capturing = true;
  ASSERT_TRUE(cache->remove(gone).ok());
  EXPECT_TRUE(cache->flush({}).ok());
  const Append one{id, 1};
  EXPECT_TRUE(cache->reserve({&one, 1}).ok());
  EXPECT_TRUE(cache->truncate(id, 100).ok());
  store.capturing = false;
  EXPECT_NE(store.page_at(index, 0), PageRef{});
  ASSERT_TRUE(write_zeros(*cache, id, 64, zeros).ok());
  for (int page = 0; page < 4; ++page) EXPECT_EQ(store.page_at(index, page), PageRef{}) << page;
  EXPECT_EQ(store.state_at(index).length, 0);
}

// Its place may have another sequence before the device has learnt that it went.
TEST(DeviceCache, APlaceOfARemovedSequenceBeginsAnew) {
  for (const bool by_fork : {false, true}) {
    const auto cache = CacheImpl::create(config(1, 1), &kFake).value();
    const SequenceId id = cache->add_sequence(), gone = cache->add_sequence();
    std::vector<float> zeros;
    ASSERT_TRUE(write_zeros(*cache, id, 100, zeros).ok());
    ASSERT_TRUE(write_zeros(*cache, gone, 300, zeros).ok());
    const std::int32_t index = cache->device_index(gone).value();
    ASSERT_TRUE(cache->remove(gone).ok());
    const SequenceId next = by_fork ? cache->fork(id).value() : cache->add_sequence();
    ASSERT_TRUE(write_zeros(*cache, next, 1, zeros).ok());
    ASSERT_EQ(cache->device_index(next).value(), index);
    FakeStore& store = *FakeStore::newest;
    EXPECT_EQ(store.state_at(index).length, by_fork ? 101 : 1);
    const auto view = cache->view(next).value();
    for (std::int64_t page = 0; page < 5; ++page) {
      const bool held = page < static_cast<std::int64_t>(view.pages.size());
      EXPECT_EQ(store.page_at(index, page), held ? view.pages[static_cast<std::size_t>(page)] : PageRef{}) << page;
    }
  }
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
    DeviceReplay replay(config(ends, ends), Dtype::f32, fake_hooks());
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
  refused([](CacheConfig&) {}, Code::unsupported, "no CUDA backend", nullptr);
  static constexpr core::DeviceBackend kAbsent{.name = "fake",
                                               .detail = nullptr,
                                               .unavailable = [] { return std::string("there is no driver"); },
                                               .make_cache = nullptr,
                                               .make_plan = nullptr};
  refused([](CacheConfig&) {}, Code::unsupported, "there is no driver", &kAbsent);

  CacheConfig with_f32 = config(1, 1);
  with_f32.k = "f32";
  EXPECT_EQ(CacheImpl::create(with_f32, &kFake).value()->config().exact, Dtype::f32);
  EXPECT_EQ(CacheImpl::create(config(1, 1), &kFake).value()->config().exact, Dtype::bf16);

  for (const int tails : {0, 1}) {
    CacheConfig automatic = config(1, tails);
    automatic.k_centre = KeyCentre::automatic;
    const auto made = CacheImpl::create(automatic, &kFake).value();
    EXPECT_EQ(made->config().k_centre, KeyCentre::page);
    EXPECT_NE(made->describe().find("centre: k page; chosen: the default"), std::string::npos) << made->describe();
  }

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
  EXPECT_FALSE(host->takes_streams());
  EXPECT_TRUE(cache->takes_streams());
  EXPECT_EQ(host->reserve_ahead({}).code(), Code::invalid_argument);
  EXPECT_EQ(host->advance({}).code(), Code::invalid_argument);
  EXPECT_FALSE(host->take_non_finite().value());
}

// A backend refuses sizes without kernels. Its choice needs the size of the tensors: kernels for 80 do not take 72.
TEST(DeviceCache, BackendsAreToldTheSizeOfTheTensors) {
  CacheConfig c = config(1, 1);
  c.head_dim = 72;
  const auto cache = CacheImpl::create(c, &kFake).value();
  const core::DeviceCacheConfig& seen = FakeStore::newest->config;
  EXPECT_EQ(seen.head_dims.k, 72);
  EXPECT_EQ(seen.head_dims.v, 72);
  EXPECT_EQ(seen.encoded.head_dim, 80);
  EXPECT_EQ(seen.exact.head_dim, 80);
}

// A backend that has kernels for some.
TEST(DeviceCache, KeysAndValuesOfTwoSizesAreStoredWhereThereAreKernels) {
  core::DeviceBackend backend = kFake;
  backend.build = [] {
    return core::DeviceBuild{
        .architectures = "", .head_dims = {64, 128, 192}, .widths = {{192, 128}}, .latents = {}, .pairs = {}};
  };
  CacheConfig c = config(1, 1);
  c.head_dim = 192, c.v_head_dim = 128;
  {
    const auto cache = CacheImpl::create(c, &backend).value();
    const core::DeviceCacheConfig& seen = FakeStore::newest->config;
    EXPECT_EQ(seen.head_dims.k, 192);
    EXPECT_EQ(seen.head_dims.v, 128);
    for (const codec::PageLayout& layout : {seen.encoded, seen.exact}) {
      EXPECT_EQ(layout.k.head_dim, 192);
      EXPECT_EQ(layout.v.head_dim, 128);
    }
  }
  for (const auto& [k, v] : {std::pair(128, 192), {192, 64}, {191, 128}, {192, 127}, {576, 512}}) {
    c.head_dim = k, c.v_head_dim = v;
    const auto refused = CacheImpl::create(c, &backend);
    EXPECT_EQ(refused.code(), Code::unsupported);
    for (const std::string& text :
         {fmt::format("head_dim = {} with v_head_dim = {} on device", k, v), std::string("of one size (64, 128, 192)"),
          std::string("or of head_dim/v_head_dim 192/128;"), std::string("device = \"cpu\"")})
      EXPECT_NE(refused.message().find(text), std::string::npos) << refused.message();
  }
  c.head_dim = 100, c.v_head_dim = 100;  // padded
  EXPECT_TRUE(CacheImpl::create(c, &backend).ok());
}

TEST(DeviceCache, LatentsAreStoredWhereThereAreKernels) {
  core::DeviceBackend backend = kFake;
  backend.build = [] {
    return core::DeviceBuild{
        .architectures = "", .head_dims = {64, 512}, .widths = {{64, 512}}, .latents = {{64, 512}}, .pairs = {}};
  };
  CacheConfig c = config(1, 1);
  c.kv_heads = c.head_dim = 0;
  c.latent = 512, c.rope = 64;
  {
    const auto cache = CacheImpl::create(c, &backend).value();
    const core::DeviceCacheConfig& seen = FakeStore::newest->config;
    EXPECT_EQ(seen.kv_heads, 1);
    for (const codec::PageLayout& layout : {seen.encoded, seen.exact}) {
      EXPECT_EQ(layout.k.head_dim, 64);
      EXPECT_EQ(layout.v.head_dim, 512);
    }
  }
  c.rope = 32;
  EXPECT_EQ(
      CacheImpl::create(c, &backend).message(),
      "latent = 512 with rope = 32 on device \"cuda\": kernels there are compiled for latent = 512 with rope = 64; "
      "use device = \"cpu\"");
  c.latent = 64, c.rope = 64;  // not a head_dim of 64
  EXPECT_EQ(CacheImpl::create(c, &backend).code(), Code::unsupported);
  backend.build = [] {
    return core::DeviceBuild{
        .architectures = "", .head_dims = {64, 512}, .widths = {{64, 512}}, .latents = {}, .pairs = {}};
  };
  c.latent = 512;
  EXPECT_EQ(CacheImpl::create(c, &backend).message(),
            "latent = 512 with rope = 64 on device \"cuda\": kernels there are compiled for no latents; use device = "
            "\"cpu\"");
}

TEST(DeviceCache, KeysAndValuesOfTwoSizesAreRefused) {
  CacheConfig c = config(1, 1);
  c.head_dim = 192, c.v_head_dim = 128;
  const auto refused = CacheImpl::create(c, &kFake);
  EXPECT_EQ(refused.code(), Code::unsupported);
  EXPECT_NE(
      refused.message().find("head_dim = 192 with v_head_dim = 128 on device \"cuda\": kernels there are compiled "
                             "for keys and values of one size ("),
      std::string::npos)
      << refused.message();
  EXPECT_NE(refused.message().find("or use device = \"cpu\""), std::string::npos);
  c.v_head_dim = 192;
  EXPECT_TRUE(CacheImpl::create(c, &kFake).ok());
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
