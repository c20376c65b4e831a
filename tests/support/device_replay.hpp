// A cache on a device against one in host memory: random appends of ragged batches, forks, truncations, removals, and
// steps that are recorded once and replayed. Both must hold the same bytes. The device is a fake in host memory
// (device_cache_test.cpp) or a real one (gpu/cache_gpu_test.cpp).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "codec/store.hpp"
#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_rows.hpp"

namespace kvant::test {

struct DeviceHooks {
  const core::DeviceBackend* backend = core::device_backend();
  Stream stream{};
  /// Copies into a buffer that stays where it is while `bytes` do not outgrow it, and gives its address.
  std::function<const void*(std::size_t buffer, const std::vector<std::byte>& bytes)> upload;
  std::function<void(const std::function<void()>&)> capture;  ///< records what is enqueued; the last recording counts
  std::function<void()> replay;
  /// Calls `decode` with that many bytes of the device's memory, waits, and gives what is in them then.
  std::function<std::vector<std::byte>(std::size_t bytes, const std::function<void(void*)>& decode)> decode_into;
  std::function<void(const CacheImpl&, SequenceId)> check_tables = [](const CacheImpl&, SequenceId) {};
};

class DeviceReplay {
 public:
  DeviceReplay(const CacheConfig& config, Dtype input, DeviceHooks hooks, std::uint64_t seed = 7)
      : input_(input), hooks_(std::move(hooks)), rng_(seed) {
    device_ = CacheImpl::create(config, hooks_.backend).value();
    CacheConfig on_host = config;
    on_host.device = {};
    if (!on_host.exact) on_host.exact = device_->config().exact.value_or(Dtype::bf16);
    on_host.k_centre = device_->config().k_centre;  // which may be chosen; so may the next
    on_host.v_centre = device_->config().v_centre;
    host_ = CacheImpl::create(on_host).value();
  }

  void random_step() {
    const std::int64_t what = rng_.below(100);
    if (ids_.empty() || (what < 6 && room())) {
      add();
    } else if (what < 14 && room()) {
      fork(pick());
    } else if (what < 18) {
      remove(pick());
    } else if (what < 32) {
      const SequenceId id = pick();
      const std::int64_t length = length_of(id);
      const bool far = length > 900 || rng_.below(3) == 0;
      truncate(id, length - (far ? rng_.below(length + 1) : std::min<std::int64_t>(length, rng_.below(70))));
    } else if (what < 40) {
      give_back(pick());
    } else if (what < 45) {
      std::vector<std::int64_t> parents;
      for (std::size_t i = 0; i < ids_.size(); ++i) {
        parents.push_back(rng_.below(static_cast<std::int64_t>(ids_.size())));
      }
      reorder(parents);
    } else if (what < 55) {
      replayed_steps(some_appends(3), 1 + rng_.below(80));
    } else if (what < 65) {
      covered_steps(some_appends(40));
    } else {
      step(some_appends(200));
    }
  }

  void add() {
    const SequenceId id = device_->add_sequence();
    ASSERT_EQ(host_->add_sequence(), id);
    ids_.push_back(id);
  }
  void fork(SequenceId parent) {
    const auto id = device_->fork(parent);
    ASSERT_TRUE(id.ok()) << id.message();
    ASSERT_EQ(host_->fork(parent).value(), *id);
    ids_.push_back(*id);
  }
  void remove(SequenceId id) {
    ASSERT_TRUE(device_->remove(id).ok());
    ASSERT_TRUE(host_->remove(id).ok());
    ids_.erase(std::find(ids_.begin(), ids_.end(), id));
  }
  void truncate(SequenceId id, std::int64_t tokens) {
    const Status expected = host_->truncate(id, tokens);
    const Status status = device_->truncate(id, tokens);
    ASSERT_EQ(status.code(), expected.code()) << status.message();
  }
  void reorder(const std::vector<std::int64_t>& parents) {
    const Status status = device_->reorder(ids_, parents);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host_->reorder(ids_, parents).ok());
  }
  /// Four beams of one prompt over `steps` steps, each becoming another now and then. For a cache without sequences.
  void beams(int steps) {
    for (int i = 0; i < 4; ++i) add();
    step({{ids_[0], 150}});
    std::vector<std::int64_t> parents(4, 0);
    for (int i = 0; i < steps; ++i) {
      reorder(parents);
      if (testing::Test::HasFailure()) return;
      std::vector<Append> one;
      for (const SequenceId id : ids_) one.push_back({id, 1});
      if (i % 5 == 4) {
        replayed_steps(one, 3);
      } else {
        step(one);
      }
      if (i % 10 == 9) check_all();
      if (testing::Test::HasFailure()) return;
      for (std::int64_t& parent : parents) parent = rng_.below(4);
    }
  }
  /// Slots that were reserved ahead.
  void give_back(SequenceId id) { ASSERT_TRUE(device_->truncate(id, length_of(id)).ok()); }

  void step(const std::vector<Append>& appends) {
    Status status = device_->reserve(appends, hooks_.stream);
    if (status.code() == Code::out_of_capacity) {
      for (const SequenceId id : ids_) give_back(id);
      status = device_->reserve(appends, hooks_.stream);
    }
    const Status expected = host_->reserve(appends);
    ASSERT_EQ(status.code(), expected.code()) << status.message() << expected.message();
    if (!status) {
      ++refusals;
      return;
    }
    const auto rows = make_rows(appends);
    write(*device_, appends, upload(rows));
    write(*host_, appends, rows);
  }

  /// Steps that find all their slots.
  void covered_steps(const std::vector<Append>& appends) {
    std::vector<Append> ahead = appends;
    for (Append& a : ahead) a.tokens *= 3;
    const Status status = device_->reserve_ahead(ahead, hooks_.stream);
    if (status.code() == Code::out_of_capacity) return;
    ASSERT_TRUE(status.ok()) << status.message();
    for (int i = 0; i < 3; ++i) step(appends);
  }

  /// One step, recorded, and launched `times` times with other rows. False: no capacity, nothing was done.
  bool replayed_steps(const std::vector<Append>& appends, std::int64_t times) {
    std::vector<Append> ahead = appends;
    for (Append& a : ahead) a.tokens *= times;
    const Status status = device_->reserve_ahead(ahead, hooks_.stream);
    if (status.code() == Code::out_of_capacity) return false;
    EXPECT_TRUE(status.ok()) << status.message();
    for (std::int64_t i = 0; i < times; ++i) {
      const auto rows = make_rows(appends);
      const auto uploaded = upload(rows);
      if (i == 0) {
        hooks_.capture([&] {
          const Status reserved = device_->reserve(appends, hooks_.stream);
          ASSERT_TRUE(reserved.ok()) << reserved.message();
          write(*device_, appends, uploaded);
        });
      } else {
        const Status advanced = device_->advance(appends);
        EXPECT_TRUE(advanced.ok()) << advanced.message();
      }
      hooks_.replay();
      const Status expected = host_->reserve(appends);
      EXPECT_TRUE(expected.ok()) << expected.message();
      write(*host_, appends, rows);
      ++replays;
    }
    return true;
  }

  void check(SequenceId id) {
    ASSERT_EQ(device_->length(id).value(), host_->length(id).value());
    ASSERT_TRUE(device_->flush(hooks_.stream).ok());
    hooks_.check_tables(*device_, id);
    const auto view = device_->view(id).value();
    const auto expected = host_->view(id).value();
    ASSERT_EQ(view.pages.size(), expected.pages.size());
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      SCOPED_TRACE(testing::Message() << "page " << p << " of " << view.length << " tokens, k "
                                      << format_info(host_->k_format()).name << ", v "
                                      << format_info(host_->v_format()).name << ", head_dim "
                                      << host_->config().head_dim << ", input " << dtype_name(input_));
      const core::PageRef mine = view.pages[p], other = expected.pages[p];
      ASSERT_EQ(mine == core::PageRef{}, other == core::PageRef{});
      if (mine == core::PageRef{}) continue;
      const auto page = static_cast<std::int64_t>(p);
      const bool exact = host_->reads_exact(expected, page);
      ASSERT_EQ(device_->reads_exact(view, page), exact);
      check_page(page, exact, exact ? mine.exact : mine.encoded, exact ? other.exact : other.encoded,
                 std::min<std::int64_t>(kPageTokens, view.length - page * kPageTokens));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  void check_all() {
    for (const SequenceId id : ids_) check(id);
  }
  /// Parts of all sequences in one call, into a dtype and strides of this turn: the host's values, rounded.
  void check_decoded() {
    constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
    const CacheConfig& c = host_->config();
    std::vector<TokenRange> ranges;
    std::int64_t rows = 0, most = 0;
    for (const SequenceId id : ids_) {
      const auto view = host_->view(id).value();
      const std::int64_t first = view.first_page * kPageTokens, readable = view.length - first;
      const std::int64_t begin = rng_.below(2) == 0 ? first : first + rng_.below(readable + 1);
      ranges.push_back({id, begin, rng_.below(2) == 0 ? view.length : begin + rng_.below(view.length - begin + 1)});
      rows += ranges.back().end - begin;
      most = std::max(most, ranges.back().end - begin);
    }
    const Dtype dtype = kDtypes[rng_.below(3)];
    const bool batch = rng_.below(2) == 0;
    const int layer = static_cast<int>(rng_.below(c.layers));
    for (const bool values : {false, true}) {
      const int dim = values ? c.v_dim() : c.head_dim;
      MutableTensorView out{nullptr, dtype, {batch ? most : rows, c.kv_heads, dim}, {}};
      out.stride = {c.kv_heads * (dim + 1), dim + 1, 1};
      if (batch) out.stride = {dim, most * dim, 1};
      if (batch) out.batch_stride = c.kv_heads * most * dim;
      const std::int64_t elements =
          batch ? static_cast<std::int64_t>(ranges.size()) * out.batch_stride : rows * out.stride[0];
      const std::vector<std::byte> got =
          hooks_.decode_into(static_cast<std::size_t>(elements) * dtype_size(dtype), [&](void* memory) {
            MutableTensorView to = out;
            to.data = memory;
            const Status status = values ? device_->decode(ranges, layer, {}, to, hooks_.stream)
                                         : device_->decode(ranges, layer, to, {}, hooks_.stream);
            ASSERT_TRUE(status.ok()) << status.message();
          });
      if (testing::Test::HasFatalFailure()) return;
      std::int64_t before = 0;
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        const TokenRange& r = ranges[i];
        std::vector<float> x(static_cast<std::size_t>((r.end - r.begin) * c.kv_heads * dim));
        const auto all = MutableTensorView::of(x.data(), r.end - r.begin, c.kv_heads, dim);
        const MutableTensorView none{};
        ASSERT_TRUE(host_->read(r.sequence, layer, r.begin, r.end, values ? none : all, values ? all : none).ok());
        const std::int64_t first = batch ? static_cast<std::int64_t>(i) * out.batch_stride : before * out.stride[0];
        std::size_t at = 0;
        for (std::int64_t t = 0; t < r.end - r.begin; ++t) {
          for (int head = 0; head < c.kv_heads; ++head) {
            for (int j = 0; j < dim; ++j, ++at) {
              const auto element = static_cast<std::size_t>(first + t * out.stride[0] + head * out.stride[1] + j);
              ASSERT_EQ(load_as(dtype, got.data(), element), rounded(x[at], dtype))
                  << (values ? "value" : "key") << " of token " << r.begin + t << ", head " << head << ", channel " << j
                  << ", layer " << layer << ", " << dtype_name(dtype) << ", k " << format_info(host_->k_format()).name
                  << ", v " << format_info(host_->v_format()).name;
            }
          }
        }
        before += r.end - r.begin;
      }
    }
  }
  void remove_all() {
    while (!ids_.empty()) remove(ids_.back());
    const core::CacheTable& table = device_->table();
    EXPECT_EQ(table.pool(core::Pool::exact).used_slots(), 0);
    EXPECT_EQ(table.pool(core::Pool::encoded).used_slots(), 0);
    EXPECT_EQ(table.pages_held(), 0);
  }

  CacheImpl& device() { return *device_; }
  CacheImpl& host() { return *host_; }
  const std::vector<SequenceId>& ids() const { return ids_; }
  SequenceId pick() { return ids_[static_cast<std::size_t>(rng_.below(static_cast<std::int64_t>(ids_.size())))]; }

  int refusals = 0;
  std::int64_t replays = 0;

 private:
  [[nodiscard]] bool room() const { return static_cast<std::int64_t>(ids_.size()) < device_->config().max_sequences; }
  std::int64_t length_of(SequenceId id) { return host_->length(id).value(); }

  std::vector<Append> some_appends(std::int64_t most) {
    std::vector<Append> appends;
    for (const SequenceId id : ids_) {
      if (rng_.below(2) == 0 && !appends.empty()) continue;
      const bool few = rng_.below(2) == 0;
      appends.push_back({id, 1 + rng_.below(few ? std::min<std::int64_t>(most, 3) : most)});
    }
    return appends;
  }

  std::vector<CacheRows> make_rows(const std::vector<Append>& appends) {
    std::int64_t tokens = 0;
    for (const Append& a : appends) tokens += a.tokens;
    const auto numbers = token_range(next_token_, tokens);
    next_token_ += static_cast<std::uint64_t>(tokens);
    const CacheConfig& c = host_->config();
    std::vector<CacheRows> layers;
    for (int layer = 0; layer < c.layers; ++layer)
      layers.emplace_back(numbers, layer, c.kv_heads, c.head_dim, input_, c.v_dim());
    return layers;
  }

  struct Tensors {
    TensorView k, v;
    [[nodiscard]] TensorView keys() const { return k; }
    [[nodiscard]] TensorView values() const { return v; }
  };
  std::vector<Tensors> upload(const std::vector<CacheRows>& layers) {
    std::vector<Tensors> all;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      const auto put = [&](TensorView t, std::size_t buffer) {
        const auto bytes = static_cast<std::size_t>(t.shape[0] * t.stride[0]) * dtype_size(t.dtype);
        const auto* from = static_cast<const std::byte*>(t.data);
        t.data = hooks_.upload(buffer, std::vector<std::byte>(from, from + bytes));
        return t;
      };
      all.push_back({put(layers[layer].keys(), 2 * layer), put(layers[layer].values(), 2 * layer + 1)});
    }
    return all;
  }
  template <class Layers>
  void write(CacheImpl& cache, const std::vector<Append>& appends, const Layers& layers) {
    std::vector<SequenceId> ids;
    for (const Append& a : appends) ids.push_back(a.sequence);
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      const Status status =
          cache.write(ids, static_cast<int>(layer), layers[layer].keys(), layers[layer].values(), hooks_.stream);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }

  // Full pages byte for byte; the tokens of a page that is not full yet by their fields.
  void check_page(std::int64_t page, bool exact, std::int32_t mine, std::int32_t other, std::int64_t tokens) {
    const CacheConfig& c = host_->config();
    const core::Pool pool = exact ? core::Pool::exact : core::Pool::encoded;
    const codec::PageLayout& layout = host_->layout(pool);
    std::vector<std::byte> block(layout.block_bytes);
    for (int layer = 0; layer < c.layers; ++layer) {
      for (int head = 0; head < c.kv_heads; ++head) {
        const auto loaded = device_->store().load(pool, mine, layer, head, block.data(), hooks_.stream);
        ASSERT_TRUE(loaded.ok()) << loaded.message();
        ASSERT_EQ(*loaded, block.data());
        const std::byte* expected = host_->block(pool, other, layer, head);
        if (tokens == kPageTokens) {
          const std::size_t bytes = layout.code_bytes + layout.scale_bytes;
          ASSERT_EQ(std::memcmp(block.data(), expected, bytes), 0)
              << (exact ? "exact" : "encoded") << " page " << page << ", layer " << layer << ", head " << head
              << ", first difference at byte "
              << std::mismatch(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(bytes), expected).first -
                     block.begin();
        }
        for (int token = 0; token < tokens; ++token) {
          ASSERT_EQ(fields(layout, block.data(), token), fields(layout, expected, token))
              << (exact ? "exact" : "encoded") << " page " << page << ", layer " << layer << ", head " << head
              << ", token " << token;
        }
      }
    }
  }

  // All that a page stores of one token.
  static std::vector<std::uint32_t> fields(const codec::PageLayout& layout, const std::byte* block, int token) {
    std::vector<std::uint32_t> all;
    for (const bool values : {false, true}) {
      const codec::SideLayout& side = values ? layout.v : layout.k;
      const int d = side.head_dim;
      if (side.planes == 0) {
        std::vector<float> row(static_cast<std::size_t>(d));
        codec::detail::load_dense(side, d, block, token, row.data());
        for (const float x : row) all.push_back(base::bit_cast<std::uint32_t>(x));
        continue;
      }
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(d));
      (values ? codec::get_v_codes : codec::get_k_codes)(side, d, block, token, codes.data());
      all.insert(all.end(), codes.begin(), codes.end());
      for (int g = 0; g < side.groups; ++g)
        all.push_back(base::bit_cast<std::uint32_t>(codec::get_scale(side, block, token, g)));
    }
    return all;
  }

  Dtype input_;
  DeviceHooks hooks_;
  Rng rng_;
  std::unique_ptr<CacheImpl> host_, device_;
  std::vector<SequenceId> ids_;
  std::uint64_t next_token_ = 1;
};

}  // namespace kvant::test
