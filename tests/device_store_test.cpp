// A cache's pages on a device: what the DeviceStore refuses and says, and what it makes of a backend's errors. The
// device is a fake one (support/fake_device.hpp). That it holds what a cache in host memory holds is in
// device_cache_test.cpp.
#include <gtest/gtest.h>

#include "core/store/device_store.hpp"
#include "support/fake_device.hpp"

namespace kvant {
namespace {

using core::PageRef;
using core::Pool;
using test::FakeStore;
using test::kFake;

constexpr int kDim = 32;

CacheConfig config() {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 1;
  c.head_dim = kDim;
  c.k = "tq4";
  c.v = "fp8";
  c.k_centre = KeyCentre::none;  // the fake device's kernels make no centres
  c.sink_pages = c.tail_pages = 1;
  c.device = "cuda";
  c.capacity_tokens = 64 * 64;
  c.max_sequences = 2;
  return c;
}

std::unique_ptr<CacheImpl> on_device(const CacheConfig& c = config()) {
  return CacheImpl::create(c, &kFake).value();
}
std::unique_ptr<CacheImpl> on_host(CacheConfig c = config()) {
  c.device = {};
  c.exact = Dtype::bf16;
  return CacheImpl::create(c, &kFake).value();
}

Status append(CacheImpl& cache, SequenceId id, int layer, std::int64_t tokens, std::uint64_t first = 1) {
  const test::CacheRows rows(test::token_range(first, tokens), layer, 1, kDim);
  return cache.append(id, layer, rows.keys(), rows.values());
}
Status append_all(CacheImpl& cache, SequenceId id, std::int64_t tokens, std::uint64_t first = 1) {
  for (int layer = 0; layer < cache.config().layers; ++layer) {
    if (Status s = append(cache, id, layer, tokens, first); !s) return s;
  }
  return {};
}

void expect_refused(const Status& status, Code code, const char* message) {
  EXPECT_EQ(status.code(), code);
  EXPECT_EQ(status.message(), message);
}

TEST(DeviceStore, RefusesSequencesBeyondItsPlaces) {
  const auto cache = on_device();
  const SequenceId a = cache->add_sequence(), b = cache->add_sequence(), third = cache->add_sequence();
  ASSERT_TRUE(append_all(*cache, a, 3).ok());
  ASSERT_TRUE(append_all(*cache, b, 3).ok());
  expect_refused(append_all(*cache, third, 3), Code::out_of_capacity,
                 "1 more sequences are to be stored, and 0 of max_sequences = 2 are free; remove sequences, or create "
                 "the cache with a larger max_sequences");
  expect_refused(cache->fork(a).status(), Code::out_of_capacity,
                 "max_sequences = 2 sequences are there; remove one, or create the cache with a larger max_sequences");
  expect_refused(cache->device_index(third).status(), Code::out_of_capacity,
                 "sequence 3 has no place on the device: max_sequences = 2 others were there first; remove one and "
                 "append, or create the cache with a larger max_sequences");
  EXPECT_EQ(cache->device_index(SequenceId{9}).code(), Code::invalid_argument);
  EXPECT_EQ(cache->fork(SequenceId{9}).code(), Code::invalid_argument);  // not for the lack of places
  ASSERT_TRUE(cache->remove(third).ok());                                // had no place, so none comes back
  EXPECT_EQ(cache->fork(a).code(), Code::out_of_capacity);
}

TEST(DeviceStore, RefusesToReserveAheadBeyondItsSlots) {
  CacheConfig c = config();
  c.max_sequences = 1;
  const auto cache = on_device(c);  // exact slots: 1 sink, and twice the tail page and two more
  const SequenceId id = cache->add_sequence();
  const Append many{id, 20 * 64}, some{id, 7 * 64};
  expect_refused(
      cache->reserve_ahead({&many, 1}), Code::out_of_capacity,
      "this step needs 20 exact page slots in all, and the device has 7; reserve fewer tokens ahead, or create "
      "the cache with a larger max_sequences");
  EXPECT_EQ(cache->table().pages_held(), 0);
  EXPECT_TRUE(cache->reserve_ahead({&some, 1}).ok());
  EXPECT_EQ(cache->table().pages_held(), 7);
}

TEST(DeviceStore, RefusesMorePagesThanItCanNumber) {
  CacheConfig c = config();
  c.capacity_tokens = std::int64_t{64} << 31;
  c.max_sequence_tokens = 64;
  expect_refused(
      CacheImpl::create(c, &kFake).status(), Code::invalid_argument,
      "capacity_tokens = 137438953472 with max_sequences = 2: pages are numbered up to 2^31; lower one of them");
}

// A page and a half in two imports, on a device as in host memory.
TEST(DeviceStore, TakesImportedCodes) {
  std::vector<float> codebook(16);
  for (std::size_t i = 0; i < codebook.size(); ++i) codebook[i] = static_cast<float>(i) - 7.5f;
  LegacyLayout layout;
  layout.bits = 4;
  layout.codebook = codebook;
  CacheConfig c = legacy_config(1, 2, 128, layout, false, false).value();
  const auto host = CacheImpl::create(c).value();
  c.device = "cuda:1";
  c.capacity_tokens = 64 * 64;
  const auto device = on_device(c);
  constexpr std::int64_t kTokens = 96;
  std::vector<std::uint8_t> packed;
  std::vector<float> norms;
  for (std::int64_t i = 0; i < 2 * kTokens * 128; ++i) packed.push_back(static_cast<std::uint8_t>(i * 37 % 251));
  for (std::int64_t i = 0; i < 2 * kTokens; ++i) norms.push_back(1.0f + 0.01f * static_cast<float>(i));
  const LegacyTensors tensors{packed.data(), packed.data(), norms.data(), norms.data(), kTokens};
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < kTokens; ++i) slots.push_back((i * 5 + 3) % kTokens);
  for (CacheImpl* cache : {host.get(), device.get()}) {
    const SequenceId id = cache->add_sequence();
    for (const auto& part : {std::span(slots).first(40), std::span(slots).subspan(40)}) {
      const Status status = cache->import_legacy(id, 0, layout, tensors, part);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    EXPECT_EQ(cache->length(id).value(), kTokens);
  }
  const auto expected = host->view(SequenceId{1}), view = device->view(SequenceId{1});
  ASSERT_TRUE(expected.ok() && view.ok());
  std::vector<std::byte> copy(device->store().load_bytes());
  for (std::size_t page = 0; page < 2; ++page) {
    for (const int head : {0, 1}) {
      const std::byte* mine =
          device->store().load(core::Pool::encoded, view->pages[page].encoded, 0, head, copy.data(), {}).value();
      const std::byte* other = host->block(core::Pool::encoded, expected->pages[page].encoded, 0, head);
      EXPECT_EQ(std::memcmp(mine, other, device->layout(core::Pool::encoded).block_bytes), 0)
          << "page " << page << ", head " << head;
    }
  }
}

// A device stores the next size that it has kernels for, the host the next that has a rotation.
TEST(DeviceStore, PadsToTheSizesOfItsKernels) {
  core::DeviceBackend backend = test::kFake;
  backend.build = [] {
    core::DeviceBuild build;
    build.head_dims = {256, 64, 128};
    return build;
  };
  const std::pair<int, int> sizes[] = {{1, 64}, {64, 64}, {65, 128}, {80, 128}, {129, 256}, {256, 256}, {300, 320}};
  for (const auto& [head_dim, stored] : sizes) EXPECT_EQ(core::stored_head_dim_on(&backend, head_dim), stored);
  EXPECT_EQ(core::stored_head_dim_on(nullptr, 72), 80);
  CacheConfig c;
  c.kv_heads = 1;
  c.head_dim = 72;
  c.device = "cuda";
  c.capacity_tokens = 640;
  const auto cache = CacheImpl::create(c, &backend).value();
  EXPECT_EQ(cache->stored_dims().k, 128);
  EXPECT_NE(cache->describe().find("head_dim 72, stored as 128"), std::string::npos) << cache->describe();
}

TEST(HostStore, RefusesCallsForDevices) {
  const auto cache = on_host();
  const SequenceId id = cache->add_sequence();
  const Append one{id, 1};
  expect_refused(cache->reserve_ahead({&one, 1}), Code::invalid_argument,
                 "reserve_ahead is for caches on a device, whose steps are replayed from graphs; this one is in host "
                 "memory: call reserve and write for every step");
  expect_refused(cache->advance({&one, 1}), Code::invalid_argument,
                 "advance is for caches on a device, whose steps are replayed from graphs; this one is in host memory: "
                 "call reserve and write for every step");
  expect_refused(cache->device_index(id).status(), Code::invalid_argument,
                 "this cache is in host memory: its sequences have no device index");
  EXPECT_EQ(cache->device_index(SequenceId{9}).message().find("sequence = 9: this cache has no such sequence"), 0u);
  EXPECT_EQ(cache->store().load_bytes(), 0u);
}

TEST(DeviceStore, AnErrorOfTheBackendLeavesTheTablesAsTheyWere) {
  const auto cache = on_device();
  const SequenceId id = cache->add_sequence();
  ASSERT_TRUE(append_all(*cache, id, 100).ok());
  FakeStore& store = *FakeStore::newest;
  const std::int32_t index = cache->device_index(id).value();
  const auto unchanged = [&] {
    EXPECT_EQ(cache->length(id).value(), 100);
    EXPECT_EQ(cache->table().pages_held(), 2);
    ASSERT_TRUE(cache->flush({}).ok());
    EXPECT_EQ(store.state_at(index).length, 100);
    const auto view = cache->view(id).value();
    for (std::int64_t p = 0; p < 4; ++p) {
      EXPECT_EQ(store.page_at(index, p), p < 2 ? view.pages[static_cast<std::size_t>(p)] : PageRef{}) << p;
    }
  };
  store.refuses_write = {Code::internal, "the kernel did not start"};
  expect_refused(append(*cache, id, 0, 100), Code::internal, "the kernel did not start");
  unchanged();
  store.refuses_write = {};
  store.refuses_advance = {Code::internal, "the step did not start"};
  const Append step{id, 100};
  expect_refused(cache->reserve({&step, 1}), Code::internal, "the step did not start");
  unchanged();
  store.refuses_advance = {};
  EXPECT_TRUE(append_all(*cache, id, 100).ok());
  EXPECT_EQ(store.state_at(index).length, 200);
}

// Layer 1 of a step is not written: older tokens can be read and decoded, as before the step.
TEST(DeviceStore, DecodesWhatWasThereBeforeAStep) {
  const auto device = on_device(), host = on_host();
  const SequenceId id = device->add_sequence();
  ASSERT_EQ(host->add_sequence(), id);
  for (CacheImpl* cache : {device.get(), host.get()}) {
    ASSERT_TRUE(append_all(*cache, id, 130).ok());
    ASSERT_TRUE(append(*cache, id, 0, 200, 131).ok());
  }
  for (int layer = 0; layer < 2; ++layer) {
    const std::int64_t length = layer == 0 ? 330 : 130;
    const auto decoded = [&](CacheImpl& cache, bool read) {
      std::vector<float> k(static_cast<std::size_t>(length * kDim)), v(k.size());
      const auto keys = MutableTensorView::of(k.data(), length, 1, kDim);
      const auto values = MutableTensorView::of(v.data(), length, 1, kDim);
      const TokenRange range{id, 0, length};
      const Status s =
          read ? cache.read(id, layer, 0, length, keys, values) : cache.decode({&range, 1}, layer, keys, values);
      EXPECT_TRUE(s.ok()) << s.message();
      k.insert(k.end(), v.begin(), v.end());
      return k;
    };
    EXPECT_EQ(decoded(*device, false), decoded(*host, false)) << layer;
    EXPECT_EQ(decoded(*device, true), decoded(*host, false)) << layer;
  }
  std::vector<float> k(kDim);
  const TokenRange beyond{id, 130, 131};
  const Status status = device->decode({&beyond, 1}, 1, MutableTensorView::of(k.data(), 1, 1, kDim), {});
  expect_refused(
      status, Code::invalid_argument,
      "ranges[0]: tokens [130, 131): layer 1 of sequence 1 is written up to token 130 only; write the reserved "
      "tokens first");
}

TEST(DeviceStore, SaysWhatItHolds) {
  const auto device = on_device(), host = on_host();
  const SequenceId id = device->add_sequence();
  ASSERT_EQ(host->add_sequence(), id);
  ASSERT_TRUE(append_all(*device, id, 300).ok());
  ASSERT_TRUE(append_all(*host, id, 300).ok());
  const CacheMemory mine = device->memory(), other = host->memory();
  EXPECT_EQ(mine.tokens, 300);
  EXPECT_EQ(mine.encoded_bytes, other.encoded_bytes);
  EXPECT_EQ(mine.scale_bytes, other.scale_bytes);
  EXPECT_EQ(mine.exact_bytes, other.exact_bytes);
  EXPECT_GT(mine.exact_bytes, 0);
  const std::int64_t taken = FakeStore::newest->reserved_bytes();
  EXPECT_EQ(mine.reserved_bytes, taken + mine.table_bytes);
  EXPECT_EQ(device->trim(), 0);
  const std::string last = "device: cuda:0, " + std::to_string(taken) +
                           " bytes taken: 70 encoded and 14 exact page slots, up to 2 sequences of 4096 tokens\n";
  const std::string text = device->describe();
  EXPECT_EQ(text.substr(text.rfind("device:")), last);
  EXPECT_EQ(text.substr(0, text.rfind("device:")).find("stores with"), std::string::npos);
  EXPECT_NE(host->describe().find("stores with: "), std::string::npos);
}

TEST(DeviceStore, PassesOnWhatKernelsFound) {
  const auto cache = on_device();
  EXPECT_FALSE(cache->take_non_finite().value());
  FakeStore::newest->non_finite = true;
  EXPECT_TRUE(cache->take_non_finite().value());
  EXPECT_FALSE(cache->take_non_finite().value());
}

TEST(DeviceStore, BlocksAreLoadedAndNotReached) {
  const auto cache = on_device();
  const SequenceId id = cache->add_sequence();
  ASSERT_TRUE(append_all(*cache, id, 64).ok());
  EXPECT_EQ(cache->block(Pool::exact, 0, 0, 0), nullptr);
  std::vector<std::byte> copy(cache->store().load_bytes());
  ASSERT_GE(copy.size(), cache->layout(Pool::exact).block_bytes);
  const auto loaded = cache->store().load(Pool::exact, cache->view(id).value().pages[0].exact, 0, 0, copy.data(), {});
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(*loaded, copy.data());
}

}  // namespace
}  // namespace kvant
