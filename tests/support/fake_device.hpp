// A device that is not one: FakeStore keeps pages and tables in host memory, and does what kernels do, from its own
// tables and never from the host's. Launches can be recorded and replayed.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/basis.hpp"
#include "support/device_replay.hpp"

namespace kvant::test {

using core::PageRef;
using core::Pool;

// Memory that is pinned, by its address; never any of it twice.
inline std::map<const std::byte*, std::size_t>& pinned_memory() {
  static std::map<const std::byte*, std::size_t> all;
  return all;
}
inline bool is_pinned(const std::byte* memory, std::size_t bytes) {
  const auto after = pinned_memory().upper_bound(memory);
  if (after == pinned_memory().begin()) return false;
  const auto& [begin, length] = *std::prev(after);
  return memory + bytes <= begin + length;
}
inline Status refuses_pins;  // what the next pin answers, if it is an error
inline constexpr core::MemoryPins kFakePins{
    .pin = [](void* memory, std::size_t bytes) -> Status {
      if (!refuses_pins.ok()) return refuses_pins;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 4096, 0u);
      EXPECT_EQ(bytes % 4096, 0u);
      EXPECT_FALSE(is_pinned(static_cast<const std::byte*>(memory), 1));
      pinned_memory()[static_cast<const std::byte*>(memory)] = bytes;
      return {};
    },
    .unpin =
        [](void* memory) noexcept { EXPECT_EQ(pinned_memory().erase(static_cast<const std::byte*>(memory)), 1u); }};

class FakeStore final : public core::DeviceCache {
 public:
  struct State {
    std::int64_t length = 0, step_begin = 0;
  };
  explicit FakeStore(const core::DeviceCacheConfig& c)
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
  Status edit(Pool pool, std::int32_t slot, int layer, int head,
              const std::function<void(std::byte*)>& change) override {
    change(block(pool, slot, layer, head));
    return {};
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
    if (!refuses_advance.ok()) return refuses_advance;
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
    if (!refuses_write.ok()) return refuses_write;
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
  Status download_slots(Pool pool, std::span<const std::int32_t> slots, const core::TakeSlots& take, Stream) override {
    return in_batches(pool, slots, [&](std::size_t first, std::span<std::byte> bytes) -> Status {
      for (std::size_t i = 0; i * slot_bytes(layout(pool)) < bytes.size(); ++i) {
        const std::span<std::byte> there = slot(pool, slots[first + i]);
        std::copy(there.begin(), there.end(), bytes.begin() + static_cast<std::ptrdiff_t>(i * there.size()));
      }
      return take(first, bytes);
    });
  }
  Status upload_slots(Pool pool, std::span<const std::int32_t> slots, const core::FillSlots& fill, Stream) override {
    return in_batches(pool, slots, [&](std::size_t first, std::span<std::byte> bytes) -> Status {
      if (first >= uploads_before_refusal && !refuses_upload.ok()) return refuses_upload;
      if (Status s = fill(first, bytes); !s) return s;
      for (std::size_t i = 0; i * slot_bytes(layout(pool)) < bytes.size(); ++i) {
        const std::span<std::byte> there = slot(pool, slots[first + i]);
        const std::span<std::byte> here = bytes.subspan(i * there.size(), there.size());
        std::copy(here.begin(), here.end(), there.begin());
      }
      return {};
    });
  }
  Status send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                    const core::SlotsDone& done, Stream) override {
    if (during_transfer) during_transfer();
    for (std::size_t n = 0; n < slots.size(); ++n) {
      const std::span<std::byte> there = slot(pool, slots[n]);
      EXPECT_TRUE(is_pinned(to[n], there.size()));
      std::copy(there.begin(), there.end(), to[n]);
      if (Status s = done(n, 1); !s) return s;
    }
    return {};
  }
  Status receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                       const core::SlotsDone& done, Stream) override {
    if (during_transfer) during_transfer();
    for (std::size_t n = 0; n < slots.size(); ++n) {
      if (n >= uploads_before_refusal && !refuses_upload.ok()) return refuses_upload;
      const std::span<std::byte> there = slot(pool, slots[n]);
      EXPECT_TRUE(is_pinned(from[n], there.size()));
      std::copy(from[n], from[n] + there.size(), there.begin());
      if (Status s = done(n, 1); !s) return s;
    }
    return {};
  }
  Result<bool> take_non_finite(Stream) override { return std::exchange(non_finite, false); }

  PageRef& page_at(std::int32_t index, std::int64_t page) {
    return pages.at(static_cast<std::size_t>(index) * static_cast<std::size_t>(config.max_pages) +
                    static_cast<std::size_t>(page));
  }
  State& state_at(std::int32_t index) { return states.at(static_cast<std::size_t>(index)); }

  static inline FakeStore* newest = nullptr;
  core::DeviceCacheConfig config;
  std::vector<PageRef> pages;
  std::vector<State> states;
  bool capturing = false;
  bool non_finite = false;
  Status refuses_advance, refuses_write, refuses_upload;  // what these calls answer, if it is an error
  std::size_t uploads_before_refusal = 0;                 // slots of a list
  std::function<void()> during_transfer;                  // is called while slots travel
  std::vector<std::function<void()>> recording;
  int flushes = 0;

 private:
  [[nodiscard]] std::size_t slot_bytes(const codec::PageLayout& l) const {
    return static_cast<std::size_t>(config.layers) * static_cast<std::size_t>(config.kv_heads) * l.block_bytes;
  }
  [[nodiscard]] const codec::PageLayout& layout(Pool pool) const {
    return pool == Pool::exact ? config.exact : config.encoded;
  }
  std::span<std::byte> slot(Pool pool, std::int32_t slot) {
    return {block(pool, slot, 0, 0), slot_bytes(layout(pool))};
  }
  // Through a buffer of three slots.
  template <class Work>
  Status in_batches(Pool pool, std::span<const std::int32_t> slots, const Work& work) {
    if (during_transfer) during_transfer();
    std::vector<std::byte> buffer(3 * slot_bytes(layout(pool)));
    for (std::size_t first = 0; first < slots.size(); first += 3) {
      const std::size_t count = std::min<std::size_t>(3, slots.size() - first);
      if (Status s = work(first, std::span(buffer).first(count * slot_bytes(layout(pool)))); !s) return s;
    }
    return {};
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
            const std::vector<float> x = given(tensor, row + t - s.step_begin, head, value);
            store(ref.exact >= 0 ? Pool::exact : Pool::encoded, ref, layer, head, value, t, x);
          }
          for (std::int64_t t = p * kPageTokens; turns && t < (p + 1) * kPageTokens; ++t) {
            std::vector<float> x(static_cast<std::size_t>(dim_of(value)));
            const codec::SideLayout& side = value ? config.exact.v : config.exact.k;
            codec::detail::load_dense(side, dim_of(value), block(Pool::exact, ref.exact, layer, head),
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
      std::vector<float> x(static_cast<std::size_t>(dim_of(value)));
      for (int head = 0; head < config.kv_heads; ++head) {
        (value ? codec::load_row_v : codec::load_row_k)(side, dim_of(value),
                                                        block(pool, exact ? ref.exact : ref.encoded, layer, head),
                                                        static_cast<int>(t % kPageTokens), nullptr, x.data());
        const BasisKind basis = exact ? BasisKind::none : value ? config.v_basis : config.k_basis;
        codec::output_from_basis({.kind = basis}, dim_of(value), x.data(), 1.0f);
        const std::int64_t at = range * out.batch_stride + (row + t - r.begin) * out.stride[0] + head * out.stride[1];
        for (std::size_t j = 0; j < x.size(); ++j)
          store_as(out.dtype, out.data, static_cast<std::size_t>(at) + j, x[j]);
      }
    }
  }
  [[nodiscard]] int dim_of(bool value) const { return value ? config.head_dims.v : config.head_dims.k; }
  [[nodiscard]] std::vector<float> given(const TensorView& tensor, std::int64_t row, int head, bool value) const {
    std::vector<float> x(static_cast<std::size_t>(dim_of(value)));
    const auto* from = static_cast<const float*>(tensor.data) + row * tensor.stride[0] + head * tensor.stride[1];
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = config.ends.any() ? rounded(from[i], config.exact_dtype) : from[i];
    }
    return x;
  }
  void store(Pool pool, PageRef ref, int layer, int head, bool value, std::int64_t t, std::vector<float> x) {
    const std::int32_t slot = pool == Pool::exact ? ref.exact : ref.encoded;
    if (slot < 0) return;  // a table that the device did not receive: the comparison finds it
    const codec::SideLayout& side = value ? layout(pool).v : layout(pool).k;
    const BasisKind basis = value ? config.v_basis : config.k_basis;
    if (pool == Pool::encoded) codec::to_basis({.kind = basis}, dim_of(value), x.data(), x.data());
    (value ? codec::store_row_v : codec::store_row_k)(side, dim_of(value), block(pool, slot, layer, head),
                                                      static_cast<int>(t % kPageTokens), x.data(), nullptr);
  }

  std::vector<std::byte> encoded_, exact_;
  std::vector<std::function<void()>> recorded_;
};

inline constexpr core::DeviceBackend kFake{
    .name = "fake",
    .detail = [] { return std::string("fake"); },
    .unavailable = [] { return std::string(); },
    .make_cache = [](const core::DeviceCacheConfig& c) -> Result<std::unique_ptr<core::DeviceCache>> {
      return std::unique_ptr<core::DeviceCache>(std::make_unique<FakeStore>(c));
    },
    .make_plan = nullptr,
    .pins = &kFakePins};

inline DeviceHooks fake_hooks() {
  DeviceHooks h;
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
  // The device's tables lead a kernel to the same places as the host's tables.
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

}  // namespace kvant::test
