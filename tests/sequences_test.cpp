// One cache, many sequences, many threads: a sequence is what it would be alone.
//
// A history draws threads over one cache. Each thread has sequences of its own, which it steps (some at once, layer by
// layer), forks, truncates, reorders, and drops steps of; some begin as forks of a prefix that all share. Those that a
// thread is done with are removed by yet another thread at any time, as a garbage collector does. Attention of a
// sequence, also by a plan from before other changes, has the bits that the same calls give in a cache of its own.
// Nothing is refused, and nothing is stale but a plan whose own sequence changed.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "kvant/kvant.hpp"
#include "support/cache_rows.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

constexpr int kLayers = 2, kDim = 32, kQueryHeads = 2;

using Tokens = std::vector<std::uint64_t>;
using Bits = std::vector<float>;

/// A change of a sequence, or of one that it was forked from: tokens appended, or (no tokens) some reserved, and then a
/// truncation to a length.
struct Deed {
  Tokens appended;
  std::int64_t reserved = 0, truncated = 0;
};
struct Member {
  SequenceId id{};
  std::vector<Deed> deeds;
  std::int64_t length = 0, longest = 0;
};

CacheConfig config_of(std::uint64_t seed) {
  CacheConfig c;
  c.layers = kLayers;
  c.kv_heads = 1;
  c.head_dim = kDim;
  c.threads = 1;
  switch (seed % 5) {
    case 0:  // the defaults: exact ends, centres
      break;
    case 1: c.k = c.v = "f32"; break;
    case 2:  // encoded as they come, centred on the page before
      c.k = c.v = "tq4";
      c.sink_pages = c.tail_pages = 0;
      break;
    case 3:
      c.window = 70;
      c.window_sinks = 4;
      c.sink_pages = c.tail_pages = 1;
      c.rollback_tokens = 100;
      break;
    default:
      c.k = "fp8";
      c.sink_pages = 0;
      c.tail_pages = 2;
  }
  return c;
}

CacheRows rows_of(const Tokens& tokens, int layer) {
  return CacheRows(tokens, layer, 1, kDim);
}

AttentionOptions options_for(const std::vector<int>& q_lens) {
  AttentionOptions o;
  o.q_heads = kQueryHeads;
  o.q_lens = q_lens;
  o.threads = 1;
  return o;
}

/// The newest queries, made from the length: the same for the same sequence anywhere.
Bits queries_of(std::int64_t length, int q_len) {
  Bits q;
  for (int i = 0; i < q_len; ++i) {
    const Bits row = gaussian_vector(std::size_t{kQueryHeads} * kDim, static_cast<std::uint64_t>(length - i) + 7);
    q.insert(q.end(), row.begin(), row.end());
  }
  return q;
}

Result<Bits> run_plan(const Plan& p, int layer, const Bits& q) {
  Bits out(q.size());
  const auto rows = static_cast<std::int64_t>(q.size()) / (kQueryHeads * kDim);
  const Status s = run(p, layer, TensorView::of(q.data(), rows, kQueryHeads, kDim),
                       MutableTensorView::of(out.data(), rows, kQueryHeads, kDim));
  if (!s) return s;
  return out;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

/// Attention of the newest queries in the last layer, after the same calls in a cache of its own.
Bits alone(const CacheConfig& config, const Member& m, int q_len) {
  Cache cache = Cache::create(config).value();
  const SequenceId id = cache.add_sequence();
  for (const Deed& d : m.deeds) {
    if (d.appended.empty()) {
      cache.reserve(id, d.reserved).value();
      cache.truncate(id, d.truncated).value();
      continue;
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      const CacheRows rows = rows_of(d.appended, layer);
      cache.append(id, layer, rows.keys(), rows.values()).value();
    }
  }
  const Plan p = plan(cache, {id}, options_for({q_len})).value();
  return run_plan(p, kLayers - 1, queries_of(m.length, q_len)).value();
}

/// Sequences that nobody needs, for the collector.
class Unused {
 public:
  void push(SequenceId id) {
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
  }
  std::vector<SequenceId> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(ids_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<SequenceId> ids_;
};

/// One thread's part of a history. The first thing that is not as it should be is in `wrong`.
class Part {
 public:
  Part(Cache& cache, const Member& prefix, Unused& unused, std::uint64_t seed)
      : cache_(cache), prefix_(prefix), unused_(unused), rng_(seed), next_token_(seed << 20) {}

  void work(int deeds) {
    for (int i = 0; i < deeds && wrong.empty(); ++i) deed();
    for (const Member& m : mine_) {
      if (wrong.empty()) compare(m);
      unused_.push(m.id);
    }
  }

  std::string wrong;
  std::int64_t steps = 0, compared = 0;

 private:
  Member& any() { return mine_[static_cast<std::size_t>(rng_.below(static_cast<std::int64_t>(mine_.size())))]; }
  void expect(bool right, const std::string& what) {
    if (!right && wrong.empty()) wrong = what;
  }
  void expect(const Status& s, const char* call) {
    expect(s.ok(), std::string(call) + ": " + std::string(s.message()));
  }

  void deed() {
    const std::int64_t what = mine_.empty() ? 0 : rng_.below(20);
    if (what < 3 && mine_.size() < 5) {
      begin();
    } else if (what < 11) {
      step();
    } else if (what < 13) {
      truncate();
    } else if (what < 15) {
      drop_step();
    } else if (what < 16) {
      reorder();
    } else if (what < 17) {
      remove();
    } else if (what < 18) {
      static_cast<void>(cache_.trim());
      static_cast<void>(cache_.memory());
    } else {
      compare(any());
    }
  }

  void begin() {
    Member m;
    const std::int64_t from = rng_.below(4);
    if (from == 0) {
      m.id = cache_.add_sequence();
    } else {
      m = from == 1 && !mine_.empty() ? any() : prefix_;
      const auto child = cache_.fork(m.id);
      expect(child.status(), "fork");
      if (!child) return;
      m.id = *child;
    }
    mine_.push_back(m);
  }

  std::int64_t tokens() { return rng_.below(4) == 0 ? 1 + rng_.below(90) : 1 + rng_.below(4); }

  /// Some sequences at once. A plan made before other deeds of this thread is run again after them.
  void step() {
    std::vector<Member*> batch;
    std::vector<Append> appends;
    std::vector<SequenceId> ids;
    std::vector<int> q_lens;
    Tokens all;
    Bits q;
    for (Member& m : mine_) {
      if (rng_.below(2) != 0 && !(batch.empty() && &m == &mine_.back())) continue;
      const Tokens more = token_range(next_token_, tokens());
      next_token_ += more.size();
      all.insert(all.end(), more.begin(), more.end());
      m.deeds.push_back({.appended = more});
      m.length += static_cast<std::int64_t>(more.size());
      m.longest = std::max(m.longest, m.length);
      q_lens.push_back(static_cast<int>(1 + rng_.below(static_cast<std::int64_t>(more.size()))));
      const Bits own = queries_of(m.length, q_lens.back());
      q.insert(q.end(), own.begin(), own.end());
      batch.push_back(&m);
      appends.push_back({m.id, static_cast<std::int64_t>(more.size())});
      ids.push_back(m.id);
    }
    expect(cache_.reserve(appends), "reserve");
    const auto p = plan(cache_, ids, options_for(q_lens));
    expect(p.status(), "plan");
    Bits out;
    for (int layer = 0; layer < kLayers && wrong.empty(); ++layer) {
      const CacheRows rows = rows_of(all, layer);
      expect(cache_.write(ids, layer, rows.keys(), rows.values()), "write");
      const auto got = run_plan(*p, layer, q);
      expect(got.status(), "run");
      if (got) out = *got;
      if (rng_.below(4) == 0) std::this_thread::yield();
    }
    ++steps;
    if (!wrong.empty()) return;
    if (rng_.below(3) == 0) {  // what shares pages with the batch changes; the batch does not
      const auto child = cache_.fork(ids[0]);
      expect(child.status(), "fork");
      if (!child) return;
      const CacheRows rows = rows_of({next_token_++}, 0);
      expect(cache_.append(*child, 0, rows.keys(), rows.values()), "append to a fork");
      unused_.push(*child);
      const auto again = run_plan(*p, kLayers - 1, q);
      expect(again.status(), "run after a fork");
      expect(again.ok() && same_bits(*again, out), "a plan gives other bits after a fork has grown");
    }
    if (rng_.below(2) != 0) return;
    std::size_t at = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const Bits wanted = alone(cache_.config(), *batch[i], q_lens[i]);
      expect(same_bits(std::span(out).subspan(at, wanted.size()), wanted), "a batch has not the bits of each alone");
      at += wanted.size();
      ++compared;
    }
  }

  /// By up to as many tokens as a window keeps.
  void truncate() {
    Member& m = any();
    const std::int64_t least = std::max<std::int64_t>(0, m.longest - 100);
    if (least >= m.length) return;
    const std::int64_t to = least + rng_.below(m.length - least);
    const auto p = plan(cache_, {m.id}, options_for({1}));
    expect(p.status(), "plan");
    expect(cache_.truncate(m.id, to), "truncate");
    m.deeds.push_back({{}, 0, to});
    m.length = to;
    if (p)
      expect(run_plan(*p, 0, queries_of(1, 1)).code() == Code::stale, "a plan of a truncated sequence is not stale");
  }

  /// A step that ends before its last layer leaves nothing.
  void drop_step() {
    Member& m = any();
    const Tokens more = token_range(next_token_, tokens());
    next_token_ += more.size();
    expect(cache_.reserve(m.id, static_cast<std::int64_t>(more.size())), "reserve");
    if (rng_.below(2) == 0) {
      const CacheRows rows = rows_of(more, 0);
      expect(cache_.write(m.id, 0, rows.keys(), rows.values()), "write");
    }
    expect(cache_.truncate(m.id, m.length), "truncate of a step");
    m.deeds.push_back({{}, static_cast<std::int64_t>(more.size()), m.length});
    m.longest = std::max(m.longest, m.length + static_cast<std::int64_t>(more.size()));
  }

  void reorder() {
    std::vector<SequenceId> ids;
    std::vector<std::int64_t> parents;
    const std::vector<Member> before = mine_;
    for (const Member& m : mine_) ids.push_back(m.id);
    for (Member& m : mine_) {
      parents.push_back(rng_.below(static_cast<std::int64_t>(before.size())));
      m = before[static_cast<std::size_t>(parents.back())];
    }
    for (std::size_t i = 0; i < ids.size(); ++i) mine_[i].id = ids[i];
    expect(cache_.reorder(ids, parents), "reorder");
  }

  void remove() {
    const auto at = rng_.below(static_cast<std::int64_t>(mine_.size()));
    unused_.push(mine_[static_cast<std::size_t>(at)].id);
    mine_.erase(mine_.begin() + at);
  }

  void compare(const Member& m) {
    if (m.length == 0) return;
    const auto p = plan(cache_, {m.id}, options_for({1}));
    expect(p.status(), "plan");
    if (!p) return;
    const auto got = run_plan(*p, kLayers - 1, queries_of(m.length, 1));
    expect(got.status(), "run");
    if (got) expect(same_bits(*got, alone(cache_.config(), m, 1)), "a sequence has not the bits that it has alone");
    ++compared;
  }

  Cache& cache_;
  const Member& prefix_;
  Unused& unused_;
  Rng rng_;
  std::uint64_t next_token_;
  std::vector<Member> mine_;
};

TEST(Sequences, EachEqualsItselfAlone) {
  const auto [first, count] = random_seeds(0, kThreadSanitizer || kAddressSanitizer ? 40 : 150);
  std::int64_t steps = 0, compared = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    Cache cache = Cache::create(config_of(seed)).value();
    Member prefix;
    prefix.id = cache.add_sequence();
    prefix.deeds.push_back({.appended = token_range(1, 1 + rng.below(200))});
    prefix.length = prefix.longest = static_cast<std::int64_t>(prefix.deeds[0].appended.size());
    for (int layer = 0; layer < kLayers; ++layer) {
      const CacheRows rows = rows_of(prefix.deeds[0].appended, layer);
      cache.append(prefix.id, layer, rows.keys(), rows.values()).value();
    }
    Unused unused;
    std::atomic<bool> over{false};
    std::string collector_wrong;
    std::thread collector([&] {
      for (bool last = false; !last;) {
        last = over;
        for (const SequenceId id : unused.take()) {
          if (const Status s = cache.remove(id); !s) collector_wrong = s.message();
        }
        std::this_thread::yield();
      }
    });
    std::vector<Part> parts;
    const std::int64_t threads = 1 + rng.below(3);
    for (std::int64_t i = 0; i < threads; ++i) {
      parts.emplace_back(cache, prefix, unused, (seed * 4 + static_cast<std::uint64_t>(i) + 1));
    }
    const int deeds = static_cast<int>(5 + rng.below(25));
    std::vector<std::thread> running;
    for (Part& part : parts) running.emplace_back([&part, deeds] { part.work(deeds); });
    for (std::thread& t : running) t.join();
    over = true;
    collector.join();
    for (const Part& part : parts) {
      ASSERT_EQ(part.wrong, "") << "seed " << seed;
      steps += part.steps;
      compared += part.compared;
    }
    ASSERT_EQ(collector_wrong, "") << "seed " << seed;
    ASSERT_TRUE(cache.remove(prefix.id).ok());
    ASSERT_EQ(cache.memory().encoded_bytes + cache.memory().exact_bytes, 0) << "seed " << seed;
  }
  std::printf("%llu histories, %lld steps, %lld comparisons\n", static_cast<unsigned long long>(count),
              static_cast<long long>(steps), static_cast<long long>(compared));
  EXPECT_GT(compared, steps / 4);
}

}  // namespace
}  // namespace kvant::test
