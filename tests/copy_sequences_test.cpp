// Sequences between caches, in host memory and on devices: the copies have the pages, the sharing and the answers of
// the first ones, and go on so.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "snapshot/save.hpp"
#include "support/asleep.hpp"
#include "support/bases.hpp"
#include "support/fake_device.hpp"
#include "support/sanitized.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using namespace test;

TEST(CopySequences, GoOnBitForBit) {
  CacheConfig window = config("tq4", "fp8"), calibrated = config("tq4", "tq4");
  window.window = 100;
  window.rollback_tokens = 150;
  calibrated.k_basis = calibrated.v_basis = BasisKind::calibrated;
  calibrated.bases = random_bases(2, 2, 32, 5, true);
  std::uint64_t seed = 0;
  for (const CacheConfig& c : {config("tq6", "tq4"), config("tq4", "tq4", 0, 0), config("f32", "f32"), window,
                               calibrated, config("tq8", "tq3", 2, 2, 72), config("tq5", "fp8", 1, 1, 128, 72)}) {
    SCOPED_TRACE(testing::Message() << "case " << ++seed);
    Cache from = Cache::create(c).value();
    Histories<Cache> history(seed);
    history.twins.push_back({&from, {}});
    for (int i = 0; i < random_steps(60); ++i) history.random_step();
    CacheConfig other = c;  // that do not change bytes
    other.capacity_tokens = 64 * 512;
    other.isa = "scalar";
    Cache to = Cache::create(other).value();
    append(to, to.add_sequence(), 7777, 100).value();
    std::int64_t done = 0, all = -1;
    CopyOptions options;
    options.progress = [&](std::int64_t d, std::int64_t t) { return done = d, all = t, true; };
    const auto copies = copy_sequences(from, history.twins[0].ids, to, options);
    ASSERT_TRUE(copies.ok()) << copies.message();
    EXPECT_EQ(done, all);
    expect_same(contents(from.impl(), history.twins[0].ids), contents(to.impl(), *copies, Remains::as_it_is));
    history.twins.push_back({&to, *copies});
    for (int step = 0; step < random_steps(40); ++step) {
      history.random_step();
      for (std::size_t i = 0; i < history.sequences(); ++i) {
        const auto s = static_cast<std::uint64_t>(step) * 8 + i;
        ASSERT_TRUE(same_bits(answers(from, history.twins[0].ids[i], 1, s), answers(to, history.twins[1].ids[i], 1, s)))
            << "step " << step << ", sequence " << i;
      }
    }
    history.expect_same_contents();
  }
}

CacheConfig on_device(CacheConfig c, std::int64_t pages = 256) {
  c.k_centre = KeyCentre::none;  // the fake device's kernels make no centres
  c.exact = Dtype::f32;
  c.device = "cuda";
  c.capacity_tokens = 64 * pages;
  c.max_sequences = 8;
  return c;
}

CacheConfig on_host(CacheConfig c) {
  c.device.clear();
  c.capacity_tokens = 0;
  return c;
}

TEST(CopySequences, LeaveADeviceAndReturn) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const int ends = seed % 2 == 0 ? 1 : 0;
    CacheConfig c = on_device(config("tq4", "fp8", ends, ends));
    if (seed == 3) c.window = 100;
    const auto device = CacheImpl::create(c, &kFake).value();
    Histories<CacheImpl> history(seed);
    history.twins.push_back({device.get(), {}});
    for (int i = 0; i < random_steps(60); ++i) history.random_step();
    if (history.sequences() > 0) {  // slots that are reserved ahead have no bytes yet
      const Append ahead{history.twins[0].ids[0], 130};
      ASSERT_TRUE(device->reserve_ahead({&ahead, 1}).ok());
    }
    const auto host = CacheImpl::create(on_host(c)).value();
    const auto back = CacheImpl::create(c, &kFake).value();  // FakeStore::newest, until the next
    const auto down = snapshot::copy_sequences(*device, history.twins[0].ids, *host, {});
    ASSERT_TRUE(down.ok()) << down.message();
    const auto up = snapshot::copy_sequences(*host, *down, *back, {});
    ASSERT_TRUE(up.ok()) << up.message();
    for (const SequenceId id : *up) fake_hooks().check_tables(*back, id);
    const auto beside = CacheImpl::create(c, &kFake).value();
    const auto across = snapshot::copy_sequences(*device, history.twins[0].ids, *beside, {});
    ASSERT_TRUE(across.ok()) << across.message();
    const Contents first = contents(*device, history.twins[0].ids);
    expect_same(first, contents(*host, *down, Remains::as_it_is));
    expect_same(first, contents(*back, *up, Remains::as_it_is));
    expect_same(first, contents(*beside, *across, Remains::as_it_is));
    history.twins.push_back({host.get(), *down});
    history.twins.push_back({back.get(), *up});
    history.twins.push_back({beside.get(), *across});
    history.expect_same_contents();
    for (int i = 0; i < random_steps(40) && !HasFailure(); ++i) history.random_step();
    history.expect_same_contents();
  }
}

TEST(CopySequences, ErrorsChangeNothing) {
  const CacheConfig c = config("tq6", "tq4");
  Cache from = Cache::create(c).value(), to = Cache::create(c).value();
  const SequenceId id = from.add_sequence();
  append(from, id, 1, 300).value();
  const auto refused_copy = [&](Cache& target, std::span<const SequenceId> ids, Code code,
                                std::initializer_list<const char*> parts, const CopyOptions& options = {}) {
    const CacheMemory before = target.memory();
    EXPECT_TRUE(refused(copy_sequences(from, ids, target, options).status(), code, parts));
    EXPECT_EQ(target.memory().tokens, before.tokens);
    EXPECT_EQ(target.memory().encoded_bytes, before.encoded_bytes);
    EXPECT_EQ(target.impl().table().sequences().size(), &target == &from ? 1u : 0u);
  };
  refused_copy(from, {&id, 1}, Code::invalid_argument, {"one cache", "fork"});
  const SequenceId unknown{9};
  refused_copy(to, {&unknown, 1}, Code::invalid_argument, {"9"});
  Cache other = Cache::create(config("tq4", "tq4")).value();
  refused_copy(other, {&id, 1}, Code::invalid_argument, {"differ in k = tq6 and tq4"});
  CacheConfig small = c;
  small.capacity_tokens = 64 * 4;
  Cache full = Cache::create(small).value();
  refused_copy(full, {&id, 1}, Code::out_of_capacity, {"the copy needs 5 more pages", "4 of the cache's 4 are free"});
  CopyOptions stopped;
  stopped.progress = [](std::int64_t, std::int64_t) { return false; };
  refused_copy(to, {&id, 1}, Code::io, {"stopped"}, stopped);
  EXPECT_FALSE(to.impl().exact_dtype().has_value());  // its first write still chooses
  const Append half{id, 1};
  from.reserve({&half, 1}).value();
  refused_copy(to, {&id, 1}, Code::invalid_argument, {"written"});
  EXPECT_EQ(to.impl().table().sequences().size(), 0u);
  EXPECT_TRUE(copy_sequences(from, {}, to).value().empty());
}

TEST(CopySequences, AFailedUploadLeavesNoSequence) {
  const CacheConfig c = on_device(config("tq4", "fp8"), 8);
  const auto host = CacheImpl::create(on_host(c)).value();
  const SequenceId id = host->add_sequence();
  for (int layer = 0; layer < 2; ++layer) {
    const CacheRows rows(token_range(1, 300), layer, 2, 32, Dtype::f32);
    host->append(id, layer, rows.keys(), rows.values(), {}).value();
  }
  const auto device = CacheImpl::create(c, &kFake).value();
  FakeStore::newest->refuses_upload = {Code::io, "the bus is gone"};
  EXPECT_TRUE(refused(snapshot::copy_sequences(*host, {&id, 1}, *device, {}).status(), Code::io, {"the bus is gone"}));
  EXPECT_TRUE(device->table().sequences().empty());
  EXPECT_EQ(device->table().pages_held(), 0);
  FakeStore::newest->refuses_upload = {};
  EXPECT_TRUE(snapshot::copy_sequences(*host, {&id, 1}, *device, {}).ok());
  EXPECT_TRUE(refused(snapshot::copy_sequences(*host, {&id, 1}, *device, {}).status(), Code::out_of_capacity,
                      {"the copy needs 5 more pages", "3 of the cache's 8 are free"}));
  EXPECT_EQ(device->table().sequences().size(), 1u);
}

CacheConfig pinned(CacheConfig c) {
  c = on_host(c);
  c.pinned = true;
  return c;
}

void fill(CacheImpl& cache, SequenceId id, std::int64_t first, std::int64_t tokens) {
  for (int layer = 0; layer < 2; ++layer) {
    const CacheRows rows(token_range(first, tokens), layer, 2, 32, Dtype::f32);
    cache.append(id, layer, rows.keys(), rows.values(), {}).value();
  }
}

TEST(CopySequences, PinnedPagesTravelWithoutBuffers) {
  const CacheConfig c = on_device(config("tq4", "fp8"));
  const auto device = CacheImpl::create(c, &kFake).value();
  FakeStore& fake = *FakeStore::newest;
  {
    const auto host = CacheImpl::create(pinned(c), &kFake).value();
    EXPECT_NE(host->describe().find("memory: pinned for devices"), std::string::npos);
    const SequenceId gone = host->add_sequence(), id = host->add_sequence();
    fill(*host, gone, 9000, 400);  // remains behind the tokens of pages
    fill(*host, id, 1, 300);
    host->remove(gone).value();
    const SequenceId child = host->fork(id).value();
    fill(*host, child, 500, 70);
    const std::vector<SequenceId> ids{id, child};
    std::int64_t done = 0, all = -1;
    CopyOptions options;
    options.progress = [&](std::int64_t d, std::int64_t t) { return done = d, all = t, true; };
    const auto up = snapshot::copy_sequences(*host, ids, *device, options);
    ASSERT_TRUE(up.ok()) << up.message();
    EXPECT_EQ(done, all);
    expect_same(contents(*host, ids), contents(*device, *up, Remains::as_it_is));
    const auto other = CacheImpl::create(pinned(c), &kFake).value();
    const SequenceId mine = other->add_sequence();
    fill(*other, mine, 7000, 100);
    const auto down = snapshot::copy_sequences(*device, *up, *other, options);
    ASSERT_TRUE(down.ok()) << down.message();
    EXPECT_EQ(done, all);
    expect_same(contents(*host, ids), contents(*other, *down, Remains::as_it_is));
    // Memory that a device reads stays where it is.
    other->remove(mine).value();
    EXPECT_EQ(other->trim(), 0);
    // An error in the middle.
    fake.refuses_upload = {Code::io, "the bus is gone"};
    fake.uploads_before_refusal = 2;
    const std::int64_t held = device->table().pages_held();
    EXPECT_TRUE(refused(snapshot::copy_sequences(*host, ids, *device, {}).status(), Code::io, {"the bus is gone"}));
    EXPECT_EQ(device->table().pages_held(), held);
    EXPECT_EQ(device->table().sequences().size(), 2u);
    options.progress = [](std::int64_t, std::int64_t) { return false; };
    EXPECT_TRUE(refused(snapshot::copy_sequences(*device, *up, *other, options).status(), Code::io, {"stopped"}));
    EXPECT_EQ(other->table().sequences().size(), 2u);
    EXPECT_FALSE(pinned_memory().empty());
  }
  EXPECT_TRUE(pinned_memory().empty());
}

TEST(CopySequences, PinnedIsRefusedWhereNothingPins) {
  const CacheConfig c = on_device(config("tq4", "fp8"));
  EXPECT_TRUE(refused(CacheImpl::create(pinned(c), nullptr).status(), Code::unsupported, {"pinned = true", "CUDA"}));
  CacheConfig both = c;
  both.pinned = true;
  EXPECT_TRUE(refused(CacheImpl::create(both, &kFake).status(), Code::invalid_argument, {"pinned = true", "cuda"}));
  const auto host = CacheImpl::create(pinned(c), &kFake).value();
  const SequenceId id = host->add_sequence();
  refuses_pins = {Code::out_of_memory, "too much is pinned"};
  const Append step{id, 10};
  EXPECT_TRUE(refused(host->reserve({&step, 1}, {}), Code::out_of_memory, {"pinned = true", "too much is pinned"}));
  refuses_pins = {};
  EXPECT_EQ(host->length(id).value(), 0);
  fill(*host, id, 1, 100);
}

// Bytes of the last thread's share, which is larger than those of the others: all of them arrive.
TEST(CopySequences, SharesOfSeveralThreads) {
  CacheConfig c = config("f32", "f32", 0, 0, 64);
  Cache from = Cache::create(c).value();
  const SequenceId id = from.add_sequence();
  for (const std::int64_t pages : {5, 8, 3}) {
    append(from, id, static_cast<std::uint64_t>(pages) * 5000, 64 * pages).value();
    for (int threads = 1; threads <= 7; ++threads) {
      c.threads = threads;
      Cache to = Cache::create(c).value();
      const auto copies = copy_sequences(from, {&id, 1}, to);
      ASSERT_TRUE(copies.ok()) << copies.message();
      expect_same(contents(from.impl(), {&id, 1}), contents(to.impl(), *copies, Remains::as_it_is));
    }
  }
}

// Steps of other sequences go on while bytes travel, and nobody meets a sequence that has not arrived.
TEST(CopySequences, OthersUseTheDeviceMeanwhile) {
  const HangGuard guard;
  for (const bool pins : {false, true}) {
    const CacheConfig c = on_device(config("tq4", "fp8"));
    const auto host = CacheImpl::create(pins ? pinned(c) : on_host(c), &kFake).value();
    const auto device = CacheImpl::create(c, &kFake).value();
    FakeStore& fake = *FakeStore::newest;
    const SequenceId idle = host->add_sequence(), busy = device->add_sequence();
    fill(*host, idle, 1, 300);
    fill(*device, busy, 1000, 100);
    int calls = 0;
    bool saves = false;
    fake.during_transfer = [&] {
      if (saves) return;  // a save of the device's cache transfers, too
      ++calls;
      const TemporaryDirectory directory;
      saves = true;
      ASSERT_TRUE(snapshot::save(*device, directory / "meanwhile.kvs", {}).ok());
      saves = false;
      EXPECT_EQ(Snapshot::open(directory / "meanwhile.kvs").value().info().sequences.size(), 1u);
      auto others = std::async(std::launch::async, [&] {
        const auto use = device->changing();
        fill(*device, busy, 2000 + 10 * calls, 1);
        for (std::uint64_t id = 1; id <= 8; ++id) {
          EXPECT_EQ(device->length(SequenceId{id}).ok(), SequenceId{id} == busy);
        }
      });
      others.get();
    };
    const auto up = snapshot::copy_sequences(*host, {&idle, 1}, *device, {});
    ASSERT_TRUE(up.ok()) << up.message();
    fake.during_transfer = {};
    EXPECT_GT(calls, 0);
    EXPECT_EQ(device->length(busy).value(), 100 + calls);
    EXPECT_EQ(device->length(up->front()).value(), 300);
    expect_same(contents(*host, {&idle, 1}), contents(*device, *up));
    calls = 0;
    fake.during_transfer = [&] {
      ++calls;
      auto others = std::async(std::launch::async, [&] {
        const auto use = device->changing();
        fill(*device, busy, 3000 + 10 * calls, 1);
      });
      others.get();
    };
    const auto down = snapshot::copy_sequences(*device, *up, *host, {});
    ASSERT_TRUE(down.ok()) << down.message();
    EXPECT_GT(calls, 0);
    fake.during_transfer = {};
    expect_same(contents(*host, {&idle, 1}), contents(*host, *down));
  }
}

// Two calls in opposite directions wait for the same cache first, so neither has what the other one waits for.
TEST(CopySequences, OppositeDirectionsWaitForTheSameCacheFirst) {
  const HangGuard guard;
  const CacheConfig c = config("tq4", "tq4");
  Cache a = Cache::create(c).value(), b = Cache::create(c).value();
  if (&b.impl() < &a.impl()) std::swap(a, b);
  const SequenceId x = a.add_sequence(), y = b.add_sequence();
  append(a, x, 1, 200).value();
  append(b, y, 1000, 200).value();
  Result<std::vector<SequenceId>> there = Status(), back = Status();
  {
    core::CacheUse first = a.impl().changing();
    const WatchedThread one([&] { there = copy_sequences(a, {&x, 1}, b); });
    const WatchedThread two([&] { back = copy_sequences(b, {&y, 1}, a); });
    one.wait_until_it_sleeps();
    two.wait_until_it_sleeps();
    b.impl().changing().end();  // nobody has it
    first.end();
  }
  ASSERT_TRUE(there.ok() && back.ok());
  expect_same(contents(a.impl(), {&x, 1}), contents(b.impl(), *there, Remains::as_it_is));
  expect_same(contents(b.impl(), {&y, 1}), contents(a.impl(), *back, Remains::as_it_is));
}

// A copy to a device gives the device back while bytes travel. One in the other direction may take the device then, and
// wait for the host's cache.
TEST(CopySequences, ACopyBackWaitsForACopyThere) {
  const HangGuard guard;
  const CacheConfig c = on_device(config("tq4", "fp8"));
  std::vector<std::unique_ptr<CacheImpl>> hosts;
  const auto device = CacheImpl::create(c, &kFake).value();
  while (hosts.empty() || hosts.back().get() < device.get()) hosts.push_back(CacheImpl::create(on_host(c)).value());
  CacheImpl& host = *hosts.back();  // whose turn comes after the device's
  const SequenceId idle = host.add_sequence(), other = device->add_sequence();
  fill(host, idle, 1, 300);
  fill(*device, other, 1000, 100);
  std::unique_ptr<WatchedThread> opposite;
  Result<std::vector<SequenceId>> back = Status();
  std::atomic<bool> started = false;
  FakeStore::newest->during_transfer = [&] {
    if (started.exchange(true)) return;  // the opposite copy's
    opposite = std::make_unique<WatchedThread>([&] {
      back = snapshot::copy_sequences(*device, {&other, 1}, host, {});
    });
    opposite->wait_until_it_sleeps();
  };
  const auto there = snapshot::copy_sequences(host, {&idle, 1}, *device, {});
  opposite.reset();
  ASSERT_TRUE(there.ok() && back.ok());
  expect_same(contents(host, {&idle, 1}), contents(*device, *there, Remains::as_it_is));
  expect_same(contents(*device, {&other, 1}), contents(host, *back, Remains::as_it_is));
}

TEST(CopySequences, ThreadsCopyInBothDirections) {
  const HangGuard guard;
  const CacheConfig c = config("tq4", "tq4");
  Cache a = Cache::create(c).value(), b = Cache::create(c).value();
  const SequenceId x = a.add_sequence(), y = b.add_sequence();
  append(a, x, 1, 200).value();
  append(b, y, 1000, 200).value();
  const std::vector<float> first = answers(a, x, 1, 3), second = answers(b, y, 1, 3);
  std::atomic<int> wrong = 0;
  const auto work = [&](Cache& from, SequenceId id, Cache& to, const std::vector<float>& wanted) {
    for (int i = 0; i < 30; ++i) {
      const auto copies = copy_sequences(from, {&id, 1}, to);
      if (!copies.ok() || !same_bits(answers(to, copies->front(), 1, 3), wanted)) ++wrong;
      if (copies.ok()) to.remove(copies->front()).value();
    }
  };
  std::thread one(work, std::ref(a), x, std::ref(b), std::cref(first));
  std::thread two(work, std::ref(b), y, std::ref(a), std::cref(second));
  one.join();
  two.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace kvant
