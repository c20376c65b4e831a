// Bytes of a page past the sequence's length may hold anything, NaN included: fresh memory, a longer sequence that was
// removed, a truncated tail. None of it may reach a result, not even as 0 * NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "core/cache/impl.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

constexpr int kDim = 96;
constexpr int kHeads = 2;

CacheConfig config_of(const std::string& format, int ends) {
  CacheConfig c;
  c.kv_heads = kHeads;
  c.head_dim = kDim;
  c.k = c.v = format;
  c.sink_pages = c.tail_pages = ends;
  return c;
}

/// Fills every byte of a sequence's pages, both copies.
void poison(const Cache& cache, SequenceId id, unsigned char byte) {
  const CacheImpl& impl = cache.impl();
  const CacheImpl::SequenceView view = impl.view(id).value();
  const auto fill = [&](CacheImpl::Pool pool, std::int32_t slot) {
    if (slot < 0) return;
    for (int head = 0; head < kHeads; ++head) {
      auto* block = const_cast<std::byte*>(impl.block(pool, slot, 0, head));
      if (block != nullptr) std::memset(block, byte, impl.layout(pool).block_bytes);
    }
  };
  for (const core::PageRef& page : view.pages) {
    fill(CacheImpl::Pool::encoded, page.encoded);
    fill(CacheImpl::Pool::exact, page.exact);
  }
}

class PageTail : public testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  /// Three sequences over pages whose every byte was `byte` before their tokens were written.
  struct Filled {
    explicit Filled(unsigned char byte)
        : cache(Cache::create(config_of(std::get<0>(GetParam()), std::get<1>(GetParam()))).value()) {
      const SequenceId old = cache.add_sequence();
      append_rows(cache, old, qkv, 0, 448).value();
      poison(cache, old, byte);
      cache.remove(old).value();
      for (const std::int64_t length : {43, 65, 203}) {
        ids.push_back(cache.add_sequence());
        append_rows(cache, ids.back(), qkv, 0, length).value();
      }
    }
    [[nodiscard]] Attended attend(int q_len, const std::string& isa) const {
      AttentionOptions options;
      options.q_heads = 2 * kHeads;
      options.q_len = q_len;
      options.isa = isa;
      const auto one = static_cast<std::ptrdiff_t>(q_len * 2 * kHeads * kDim);
      std::vector<float> q;
      for (std::size_t i = 0; i < ids.size(); ++i) q.insert(q.end(), qkv.q.begin(), qkv.q.begin() + one);
      return try_attend(cache, ids, options, q).value();
    }
    Qkv qkv = make_qkv({40, 448, 2 * kHeads, kHeads, kDim}, Inputs::gauss, 7);
    Cache cache;
    std::vector<SequenceId> ids;
  };
};

TEST_P(PageTail, HoldsAnything) {
  const Filled clean(0);
  // 0xff: NaN in every dtype and scale. 0x7f: the largest f32 and bf16 magnitudes. 0x7b: the largest f16 ones.
  for (const unsigned char byte : {0xff, 0x7f, 0x7b}) {
    const Filled filled(byte);
    for (const std::string& isa : available_isas()) {
      for (const int q_len : {1, 3, 40}) {
        const Attended expected = clean.attend(q_len, isa);
        for (const float x : expected.out) ASSERT_TRUE(std::isfinite(x));
        EXPECT_TRUE(same_bits(expected.out, filled.attend(q_len, isa).out))
            << isa << ", q_len " << q_len << ", byte " << int{byte};
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PageTail,
                         testing::Combine(testing::Values("f32", "f16", "bf16", "fp8", "tq2", "tq3", "tq4", "tq5",
                                                          "tq6", "tq8"),
                                          testing::Values(0, 1)),
                         [](const auto& i) {
                           return std::string(std::get<0>(i.param)) + (std::get<1>(i.param) != 0 ? "_ends" : "_noends");
                         });

}  // namespace
}  // namespace kvant::test
