// For tests of snapshots: random histories that several caches share, what is in their pages, and what they answer.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "codec/clear.hpp"
#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_rows.hpp"
#include "support/cache_session.hpp"

namespace kvant::test {

/// Two layers of two kv heads; -1: the library's own exact ends.
inline CacheConfig config(const char* k, const char* v, int sinks = -1, int tails = -1, int head_dim = 32,
                          int v_head_dim = 0) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 2;
  c.head_dim = head_dim;
  c.v_head_dim = v_head_dim;
  c.k = k;
  c.v = v;
  c.sink_pages = sinks;
  c.tail_pages = tails;
  return c;
}

inline CacheImpl& impl_of(Cache& cache) {
  return cache.impl();
}
inline CacheImpl& impl_of(CacheImpl& cache) {
  return cache;
}

inline std::vector<std::byte> file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::byte> bytes(all.size());
  std::memcpy(bytes.data(), all.data(), all.size());
  return bytes;
}

/// All sequences of a cache as a snapshot sees them: numbers of pages, and their bytes.
struct Contents {
  core::TableImage image;
  std::vector<std::vector<std::byte>> encoded, exact;
};

/// Behind the tokens of a page a cache may have remains of others, and a fresh copy has none: what a copy must be is
/// asked `without` them, and what came is taken `as_it_is`.
enum class Remains { without, as_it_is };

inline Contents contents(CacheImpl& cache, std::span<const SequenceId> ids, Remains remains = Remains::without) {
  const core::ImageBuilder built = cache.table().image(ids).value();
  Contents all{built.image(), {}, {}};
  for (const core::Pool pool : {core::Pool::encoded, core::Pool::exact}) {
    for (const core::ImageBuilder::Source& source : built.sources(pool)) {
      std::vector<std::byte> own;
      const auto take = [&](std::size_t, std::span<const std::byte> bytes) -> Status {
        own.assign(bytes.begin(), bytes.end());
        return {};
      };
      cache.store().load_slots(pool, {&source.number, 1}, take, {}).value();
      const codec::PageLayout& layout = cache.layout(pool);
      for (std::size_t at = 0; remains == Remains::without && at < own.size(); at += layout.block_bytes) {
        codec::clear_tokens(layout, own.data() + at, source.tokens);
      }
      (pool == core::Pool::exact ? all.exact : all.encoded).push_back(std::move(own));
    }
  }
  return all;
}

inline void expect_same(const Contents& a, const Contents& b) {
  ASSERT_EQ(a.image.sequences.size(), b.image.sequences.size());
  for (std::size_t i = 0; i < a.image.sequences.size(); ++i) {
    EXPECT_EQ(a.image.sequences[i].length, b.image.sequences[i].length) << "sequence " << i;
    EXPECT_EQ(a.image.sequences[i].first_page, b.image.sequences[i].first_page) << "sequence " << i;
    EXPECT_TRUE(a.image.sequences[i].pages == b.image.sequences[i].pages) << "sequence " << i;
  }
  EXPECT_EQ(a.image.identities, b.image.identities);
  EXPECT_TRUE(a.encoded == b.encoded) << "encoded pages";
  EXPECT_TRUE(a.exact == b.exact) << "exact pages";
}

/// Attention of one sequence's newest queries in all layers.
inline std::vector<float> answers(const Cache& cache, SequenceId id, int q_len, std::uint64_t seed) {
  const CacheConfig& c = cache.config();
  const int q_heads = 2 * c.kv_heads;
  if (cache.length(id).value() < q_len) return {};
  const double scale = 1 / std::sqrt(static_cast<double>(c.q_dim()));
  const Plan p = plan(cache, {&id, 1}, {.q_heads = q_heads, .q_len = q_len, .scale = scale, .threads = 1}).value();
  std::vector<float> all;
  for (int layer = 0; layer < c.layers; ++layer) {
    const auto n = static_cast<std::size_t>(q_len) * static_cast<std::size_t>(q_heads * c.q_dim());
    std::vector<float> q = gaussian_vector(n, seed + static_cast<std::uint64_t>(layer));
    std::vector<float> out(n / static_cast<std::size_t>(c.q_dim()) * static_cast<std::size_t>(c.v_dim()));
    run(p, layer, TensorView::of(q.data(), q_len, q_heads, c.q_dim()),
        MutableTensorView::of(out.data(), q_len, q_heads, c.v_dim()))
        .value();
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

/// One history for several caches, whose sequences correspond by their place in `ids`.
template <class CacheT>
class Histories {
 public:
  struct Twin {
    CacheT* cache;
    std::vector<SequenceId> ids;
  };
  explicit Histories(std::uint64_t seed, Dtype input = Dtype::f32) : rng_(seed), input_(input) {}

  std::vector<Twin> twins;

  [[nodiscard]] std::size_t sequences() const { return twins[0].ids.size(); }
  [[nodiscard]] std::int64_t length(std::size_t i) const { return twins[0].cache->length(twins[0].ids[i]).value(); }

  void random_step() {
    const std::int64_t what = rng_.below(100);
    if (sequences() == 0 || (what < 8 && sequences() < 6)) {
      for (Twin& t : twins) t.ids.push_back(t.cache->add_sequence());
      append(sequences() - 1, rng_.below(150));
    } else if (what < 20 && sequences() < 6) {
      const std::size_t parent = pick();
      for (Twin& t : twins) t.ids.push_back(t.cache->fork(t.ids[parent]).value());
    } else if (what < 26) {
      const std::size_t gone = pick();
      for (Twin& t : twins) {
        t.cache->remove(t.ids[gone]).value();
        t.ids.erase(t.ids.begin() + static_cast<std::ptrdiff_t>(gone));
      }
    } else if (what < 40) {
      const std::size_t which = pick();
      const std::int64_t most = rng_.below(3) == 0 ? length(which) : std::min<std::int64_t>(length(which), 64);
      const std::int64_t to = length(which) - rng_.below(most + 1);
      const bool done = twins[0].cache->truncate(twins[0].ids[which], to).ok();
      for (std::size_t t = 1; t < twins.size(); ++t) {
        EXPECT_EQ(twins[t].cache->truncate(twins[t].ids[which], to).ok(), done);
      }
    } else if (what < 46) {
      std::vector<std::int64_t> parents;
      for (std::size_t i = 0; i < sequences(); ++i) {
        parents.push_back(rng_.below(static_cast<std::int64_t>(sequences())));
      }
      for (Twin& t : twins) t.cache->reorder(t.ids, parents).value();
    } else {
      append(pick(), 1 + rng_.below(what < 70 ? 200 : 3));
    }
  }

  /// Tokens that no other append has.
  void append(std::size_t which, std::int64_t tokens) {
    if (tokens == 0) return;
    const CacheConfig& c = twins[0].cache->config();
    for (int layer = 0; layer < c.layers; ++layer) {
      const CacheRows rows(token_range(next_, tokens), layer, c.kv_heads, c.head_dim, input_, c.v_dim());
      for (Twin& t : twins) t.cache->append(t.ids[which], layer, rows.keys(), rows.values(), {}).value();
    }
    next_ += static_cast<std::uint64_t>(tokens);
  }

  void expect_same_contents() {
    const Contents first = contents(impl_of(*twins[0].cache), twins[0].ids);
    for (std::size_t t = 1; t < twins.size(); ++t) {
      SCOPED_TRACE(testing::Message() << "twin " << t);
      expect_same(first, contents(impl_of(*twins[t].cache), twins[t].ids));
    }
  }

 private:
  std::size_t pick() { return static_cast<std::size_t>(rng_.below(static_cast<std::int64_t>(sequences()))); }

  Rng rng_;
  Dtype input_;
  std::uint64_t next_ = 1;
};

}  // namespace kvant::test
