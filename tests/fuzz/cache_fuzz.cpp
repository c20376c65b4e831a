// Bytes become a cache configuration and a list of operations on it: appends (of raw bytes as floats too), steps that
// are left half done, forks, truncations, removals, reads, attention. Whatever is asked, the cache answers with a
// status; what it holds stays consistent, a refusal changes nothing, and when all sequences are gone nothing is held.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "core/cache/impl.hpp"
#include "kvant/attention.hpp"
#include "kvant/cache.hpp"

namespace {

using namespace kvant;

void require(bool condition) {
  if (!condition) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  [[nodiscard]] bool empty() const { return left_.empty(); }
  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const std::uint8_t b = left_.front();
    left_ = left_.subspan(1);
    return b;
  }
  std::int64_t below(int n) { return byte() % n; }
  // Small numbers mostly, any 64-bit one sometimes.
  std::int64_t number() {
    const std::uint8_t kind = byte();
    if (kind < 128) return kind % 8;
    if (kind < 250) return (kind - 128) * 3;
    std::uint64_t x = 0;
    for (int i = 0; i < 8; ++i) x = x << 8 | byte();
    return static_cast<std::int64_t>(x);
  }
  void fill(std::span<std::byte> out) {
    for (std::byte& b : out) b = static_cast<std::byte>(byte());
  }

 private:
  std::span<const std::uint8_t> left_;
};

CacheConfig config_from(Input& in) {
  static constexpr const char* kNames[] = {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16", "f32"};
  CacheConfig c;
  c.layers = 1 + static_cast<int>(in.below(2));
  c.kv_heads = 1 + static_cast<int>(in.below(2));
  c.head_dim = 32;
  c.k = kNames[in.below(10)];
  c.v = kNames[in.below(10)];
  c.sink_pages = static_cast<int>(in.below(3));
  c.tail_pages = static_cast<int>(in.below(3));
  if (const std::int64_t exact = in.below(5); exact < 3) c.exact = static_cast<Dtype>(exact);
  if (in.below(2) == 0) c.window = in.number();
  if (c.window != 0) c.window_sinks = in.number();
  if (c.window != 0) c.rollback_tokens = in.number();
  if (in.below(2) == 0) c.capacity_tokens = 64 * in.below(32);
  if (in.below(2) == 1) c.k_centre = KeyCentre::page;
  switch (in.below(4)) {
    case 0: c.latent = static_cast<int>(in.below(100)), c.rope = 32, c.kv_heads = 1; break;
    case 1: c.v_head_dim = static_cast<int>(in.below(100)); break;
    default: break;
  }
  c.threads = 1;
  return c;
}

class Session {
 public:
  Session(Cache cache, Input& in) : cache_(std::move(cache)), in_(in) {}

  void run() {
    for (int steps = 0; steps < 64 && !in_.empty(); ++steps) {
      operation();
      check();
    }
    for (const auto& [id, length] : lengths_) require(cache_.remove(id).ok());
    lengths_.clear();
    check();
    const CacheMemory m = cache_.memory();
    require(m.tokens == 0 && m.encoded_bytes == 0 && m.exact_bytes == 0 && m.scale_bytes == 0);
  }

 private:
  SequenceId pick() {
    if (lengths_.empty() || in_.below(16) == 0) return SequenceId{in_.byte()};
    auto it = lengths_.begin();
    std::advance(it, in_.below(static_cast<int>(lengths_.size())));
    return it->first;
  }

  void operation() {
    switch (in_.below(10)) {
      case 0:
        if (lengths_.size() < 8) lengths_[cache_.add_sequence()] = 0;
        return;
      case 1: {
        const SequenceId parent = pick();
        if (lengths_.size() >= 8) return;
        if (const auto child = cache_.fork(parent); child) lengths_[*child] = lengths_[parent];
        return;
      }
      case 2: {
        const SequenceId id = pick();
        require(cache_.remove(id).ok() == (lengths_.erase(id) == 1));
        return;
      }
      case 3:
      case 4: {
        const SequenceId id = pick();
        const std::int64_t tokens = in_.number();
        if (cache_.truncate(id, tokens).ok()) lengths_[id] = tokens;
        return;
      }
      case 5: {
        std::vector<Append> appends;
        for (std::int64_t n = in_.below(4); n > 0; --n) {
          const SequenceId id = pick();
          appends.push_back({id, in_.number()});
        }
        // A step of thousands of pages is legal and only slow.
        for (const Append& a : appends) {
          if (a.tokens > 1000 && a.tokens < std::int64_t{1} << 33) return;
        }
        const std::uint64_t version = cache_.impl().version();
        if (cache_.reserve(appends).ok()) {
          for (const Append& a : appends) lengths_[a.sequence] += a.tokens;
        } else {
          require(cache_.impl().version() == version);
        }
        return;
      }
      case 6: read(); return;
      case 7: reorder(); return;
      default: append(); return;
    }
  }

  void append() {
    const SequenceId id = pick();
    const CacheConfig& c = cache_.config();
    int layer = static_cast<int>(in_.below(c.layers + 1));
    if (in_.below(32) == 0) layer = -1;
    const auto known = lengths_.find(id);
    std::int64_t tokens = in_.number();
    if (tokens < 0 || tokens > 400) tokens = 1;
    const auto dtype = static_cast<Dtype>(in_.below(3));
    const auto values = static_cast<std::size_t>(tokens * c.kv_heads * std::max(c.head_dim, c.v_dim()));
    std::vector<std::byte> rows(values * dtype_size(dtype) + 1);
    if (in_.below(4) == 0) {
      in_.fill(rows);
    } else {
      // Below 2 in every dtype.
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::byte>((i * 37 + counter_++) % 0x40);
    }
    const auto view = [&](int dim) { return TensorView::contiguous(rows.data(), dtype, tokens, c.kv_heads, dim); };
    const std::uint64_t version = cache_.impl().version();
    const bool fills = known != lengths_.end() && !cache_.impl().layer_ready(id, layer);
    const Status status = cache_.append(id, layer, view(c.head_dim), view(c.v_dim()));
    if (!status) {
      require(status.code() != Code::internal && !status.message().empty());
      require(cache_.impl().version() == version);
    } else if (!fills) {
      known->second += tokens;
    }
  }

  void reorder() {
    std::vector<SequenceId> ids;
    std::vector<std::int64_t> parents;
    for (std::int64_t n = in_.below(5); n > 0; --n) {
      ids.push_back(pick());
      parents.push_back(in_.below(5) - in_.below(16) / 15);
    }
    const std::uint64_t version = cache_.impl().version();
    if (!cache_.reorder(ids, parents)) {
      require(cache_.impl().version() == version);
      return;
    }
    const auto before = lengths_;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      lengths_[ids[i]] = before.at(ids[static_cast<std::size_t>(parents[i])]);
    }
  }

  void read() {
    const SequenceId id = pick();
    const CacheConfig& c = cache_.config();
    const std::int64_t begin = in_.number();
    const std::int64_t end = begin > 1000 || begin < 0 ? in_.number() : begin + in_.below(200);
    const std::int64_t tokens = begin >= 0 && end > begin && end - begin < 1000 ? end - begin : 0;
    std::vector<float> keys(static_cast<std::size_t>(tokens * c.kv_heads * c.head_dim) + 1),
        values(static_cast<std::size_t>(tokens * c.kv_heads * c.v_dim()) + 1);
    const auto view = [&](std::vector<float>& of, int dim) {
      return MutableTensorView::of(of.data(), tokens, c.kv_heads, dim);
    };
    const int layer = static_cast<int>(in_.below(2));
    if (!cache_.read(id, layer, begin, end, view(keys, c.head_dim), view(values, c.v_dim())).ok()) return;
    for (const auto* all : {&keys, &values}) {
      for (const float x : *all) require(x - x == 0);
    }
    attend(id, layer);
  }

  // A row of a written sequence is finite, whatever was stored.
  void attend(SequenceId id, int layer) {
    const CacheConfig& c = cache_.config();
    const auto known = lengths_.find(id);
    if (known == lengths_.end() || known->second == 0 || !cache_.impl().layer_ready(id, layer)) return;
    const int heads = c.kv_heads * static_cast<int>(1 + in_.below(20));
    const auto planned = plan(cache_, {id}, {.q_heads = heads, .scale = 0x1p-10, .threads = 1});
    if (!planned) return;
    std::vector<float> q(static_cast<std::size_t>(heads * c.q_dim()), 0.125f),
        out(static_cast<std::size_t>(heads * c.v_dim()), NAN);
    require(kvant::run(*planned, layer, TensorView::of(q.data(), 1, heads, c.q_dim()),
                       MutableTensorView::of(out.data(), 1, heads, c.v_dim()))
                .ok());
    for (const float x : out) require(x - x == 0);
  }

  void check() const {
    const CacheImpl& impl = cache_.impl();
    std::map<std::int32_t, int> exact, encoded;
    for (const auto& [id, length] : lengths_) {
      const auto view = impl.view(id);
      require(view.ok() && view->length == length);
      require(static_cast<std::int64_t>(view->pages.size()) == (length + kPageTokens - 1) / kPageTokens);
      for (std::size_t p = 0; p < view->pages.size(); ++p) {
        const core::PageRef ref = view->pages[p];
        if (ref.exact >= 0) ++exact[ref.exact];
        if (ref.encoded >= 0) ++encoded[ref.encoded];
        const auto page = static_cast<std::int64_t>(p);
        require((ref.exact >= 0 || ref.encoded >= 0) || (page < view->first_page && impl.config().window > 0));
        if (impl.reads_exact(*view, page)) require(ref.exact >= 0);
      }
    }
    const core::CacheTable& table = impl.table();
    const auto same = [](const core::PagePool& pool, const std::map<std::int32_t, int>& held) {
      require(pool.used_slots() == static_cast<std::int64_t>(held.size()));
      for (const auto& [slot, count] : held) require(pool.references(slot) == count);
    };
    same(table.pool(core::Pool::exact), exact);
    same(table.pool(core::Pool::encoded), encoded);
    const std::int64_t capacity = table.config().capacity_pages;
    require(capacity == 0 || table.pages_held() <= capacity);
    require(lengths_.size() == table.sequences().size());
  }

  Cache cache_;
  Input& in_;
  std::map<SequenceId, std::int64_t> lengths_;
  std::size_t counter_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  auto cache = Cache::create(config_from(in));
  if (cache) Session(std::move(*cache), in).run();
  return 0;
}
