// Circumstances that must not change the result: where pages lie, how tokens were appended, the order of a batch, the
// number of splits, the instruction set. "Same bits" where the arithmetic is the same, a tolerance where it may differ.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

struct Case {
  const char* k;
  const char* v;
  int ends;  ///< sink and tail pages
  bool page_centres = false;
};

std::string name_of(const Case& c) {
  return fmt::format("{}_{}_{}{}", c.k, c.v, c.ends != 0 ? "ends" : "noends", c.page_centres ? "_centred" : "");
}
void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c);
}

class Invariance : public testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences) const {
    WorldSpec s;
    s.k = GetParam().k;
    s.v = GetParam().v;
    s.sink_pages = s.tail_pages = GetParam().ends;
    s.page_centres = GetParam().page_centres;
    s.sequences = std::move(sequences);
    return s;
  }
  [[nodiscard]] static double two_ways(const World& w) { return tolerance::kTwoWays * w.tolerance(); }
};

AttentionOptions one_sequence(const World& w, int q_len) {
  AttentionOptions options;
  options.q_heads = w.q_heads();
  options.q_len = q_len;
  return options;
}

TEST_P(Invariance, PagesInAnyOrderOfAFragmentedPool) {
  WorldSpec s = spec({{500, 3}});
  s.chunks = {50};
  const World w(s);
  Cache cache = Cache::create(w.cache.config()).value();
  // Holes of different sizes, then two sequences that grow by turns: the pages of ours are neither adjacent nor in
  // order.
  std::vector<SequenceId> fillers;
  for (int i = 0; i < 6; ++i) {
    fillers.push_back(cache.add_sequence());
    append_rows(cache, fillers.back(), w.qkv[0], 0, 70 * (i + 1)).value();
  }
  for (const std::size_t i : {4u, 0u, 2u}) cache.remove(fillers[i]).value();
  const SequenceId ours = cache.add_sequence();
  const SequenceId other = cache.add_sequence();
  for (std::int64_t at = 0; at < 500; at += 50) {
    append_rows(cache, ours, w.qkv[0], at, at + 50).value();
    append_rows(cache, other, w.qkv[0], at, at + 50).value();
    if (at == 200) cache.remove(fillers[3]).value();
  }
  const Attended got = try_attend(cache, {ours}, one_sequence(w, 3), w.queries()).value();
  EXPECT_TRUE(same_bits(w.attend().out, got.out, w.out_shape()));
  EXPECT_TRUE(same_bits(w.attend().lse, got.lse));
}

TEST_P(Invariance, AppendChunking) {
  WorldSpec s = spec({{300, 3}});
  std::vector<std::vector<std::int64_t>> chunkings = {{1}, {7}, {64}, {65}, {63, 1}, {128, 2, 1}, {5, 200}};
  if (GetParam().page_centres && GetParam().ends == 0) {  // no append covers a page (centre_test)
    s.chunks = {40};
    chunkings = {{1}, {7}, {63, 1}, {20, 43}};
  }
  const Attended whole = World(s).attend();
  for (const auto& chunks : chunkings) {
    s.chunks = chunks;
    const World w(s);
    EXPECT_TRUE(same_bits(whole.out, w.attend().out, w.out_shape())) << "chunks of " << chunks[0];
  }
}

TEST_P(Invariance, TruncateAndGoOn) {
  WorldSpec s = spec({{300, 3}});
  s.chunks = {60};
  const World w(s);
  Cache cache = Cache::create(w.cache.config()).value();
  const SequenceId id = cache.add_sequence();
  const Qkv noise = make_qkv({1, 300, 1, w.spec.kv_heads, w.spec.head_dim}, Inputs::loud, 99);
  for (std::int64_t at = 0; at < 300; at += 60) {
    append_rows(cache, id, noise, 0, at == 0 ? 1 : 64).value();
    cache.truncate(id, at).value();
    append_rows(cache, id, w.qkv[0], at, at + 60).value();
  }
  const Attended got = try_attend(cache, {id}, one_sequence(w, 3), w.queries()).value();
  EXPECT_TRUE(same_bits(w.attend().out, got.out, w.out_shape()));
}

TEST_P(Invariance, ForkThenAttend) {
  World w(spec({{230, 3}}));
  const Attended before = w.attend();
  const SequenceId child = w.cache.fork(w.ids[0]).value();
  const auto attend = [&](SequenceId id) { return try_attend(w.cache, {id}, one_sequence(w, 3), w.queries()).value(); };
  EXPECT_TRUE(same_bits(before.out, attend(child).out));
  // Each side goes on alone; neither sees the other's tokens.
  const Qkv more = make_qkv({1, 100, 1, w.spec.kv_heads, w.spec.head_dim}, Inputs::gauss, 5);
  append_rows(w.cache, child, more, 0, 100).value();
  EXPECT_TRUE(same_bits(before.out, attend(w.ids[0]).out));
  const Attended child_alone = attend(child);
  append_rows(w.cache, w.ids[0], more, 50, 100).value();
  EXPECT_TRUE(same_bits(child_alone.out, attend(child).out));
  w.cache.remove(w.ids[0]).value();
  EXPECT_TRUE(same_bits(child_alone.out, attend(child).out));

  Cache fresh = Cache::create(w.cache.config()).value();
  const SequenceId id = fresh.add_sequence();
  append_rows(fresh, id, w.qkv[0], 0, 230).value();
  append_rows(fresh, id, more, 0, 100).value();
  EXPECT_TRUE(same_bits(try_attend(fresh, {id}, one_sequence(w, 3), w.queries()).value().out, child_alone.out));
}

TEST_P(Invariance, BatchOrder) {
  const World w(spec({{300, 2}, {65, 1}, {128, 5}, {7, 7}}));
  AttentionOptions options = w.options();
  options.split_keys = 128;
  const Attended forward = w.attend(options);
  const std::vector<std::size_t> order = {2, 0, 3, 1};
  std::vector<SequenceId> ids;
  std::vector<float> q;
  AttentionOptions shuffled = options;
  shuffled.q_lens.clear();
  for (const std::size_t i : order) {
    ids.push_back(w.ids[i]);
    q.insert(q.end(), w.qkv[i].q.begin(), w.qkv[i].q.end());
    shuffled.q_lens.push_back(options.q_lens[i]);
  }
  const Attended got = try_attend(w.cache, ids, shuffled, q).value();
  std::vector<std::size_t> begin(4);
  for (std::size_t i = 1; i < 4; ++i) begin[i] = begin[i - 1] + w.qkv[i - 1].q.size();
  std::vector<float> expected;
  for (const std::size_t i : order) {
    expected.insert(expected.end(), forward.out.begin() + static_cast<std::ptrdiff_t>(begin[i]),
                    forward.out.begin() + static_cast<std::ptrdiff_t>(begin[i] + w.qkv[i].q.size()));
  }
  EXPECT_TRUE(same_bits(expected, got.out));
}

TEST_P(Invariance, SplitSize) {
  const World w(spec({{700, 3}}));
  AttentionOptions options;
  options.split_keys = 65536;
  const Attended whole = w.attend(options);
  for (const std::int64_t split : {64, 192, 320}) {
    options.split_keys = split;
    const Attended got = w.attend(options);
    EXPECT_TRUE(close(whole.out, got.out, two_ways(w), w.out_shape())) << split;
  }
}

TEST_P(Invariance, GroupedHeadsEqualRepeatedHeads) {
  const World grouped(spec({{200, 3}}));
  WorldSpec s = grouped.spec;
  s.kv_heads = grouped.q_heads();
  s.group = 1;
  Qkv repeated = grouped.qkv[0];
  repeated.k.clear();
  repeated.v.clear();
  for (std::size_t row = 0; row < 200 * 2; ++row) {
    for (int copy = 0; copy < grouped.spec.group; ++copy) {
      const auto from = static_cast<std::ptrdiff_t>(row * 64);
      repeated.k.insert(repeated.k.end(), grouped.qkv[0].k.begin() + from, grouped.qkv[0].k.begin() + from + 64);
      repeated.v.insert(repeated.v.end(), grouped.qkv[0].v.begin() + from, grouped.qkv[0].v.begin() + from + 64);
    }
  }
  CacheConfig config = grouped.cache.config();
  config.kv_heads = s.kv_heads;
  Cache cache = Cache::create(config).value();
  const SequenceId id = cache.add_sequence();
  append_rows(cache, id, repeated, 0, 200).value();
  const Attended got = try_attend(cache, {id}, one_sequence(grouped, 3), grouped.queries()).value();
  EXPECT_TRUE(close(grouped.attend().out, got.out, two_ways(grouped), grouped.out_shape()));
}

TEST_P(Invariance, AConstantAddedToAllLogits) {
  const World w(spec({{200, 3}}));
  const Attended plain = w.attend();
  for (const float constant : {3.0f, -100.0f}) {
    const OwnedMask mask = make_mask(Dtype::f32, {1, 1, 1, 1}, [&](auto...) { return constant; });
    const Attended got = w.attend(with_mask(mask, Mask::causal()));
    EXPECT_TRUE(close(plain.out, got.out, two_ways(w), w.out_shape())) << constant;
    std::vector<double> lse(plain.lse.begin(), plain.lse.end());
    for (double& x : lse) x += constant;
    EXPECT_TRUE(lse_close(lse, got.lse, w.lse_tolerance())) << constant;
  }
}

TEST_P(Invariance, SpeculativeQueriesEqualSingleSteps) {
  // Tokens 195 to 199 lie in one page, so no page leaves the exact tail between the steps.
  const World w(spec({{200, 5}}));
  const Attended at_once = w.attend();
  const std::size_t row = static_cast<std::size_t>(w.q_heads()) * 64;
  Cache cache = Cache::create(w.cache.config()).value();
  const SequenceId id = cache.add_sequence();
  append_rows(cache, id, w.qkv[0], 0, 195).value();
  for (std::size_t i = 0; i < 5; ++i) {
    const auto n = static_cast<std::int64_t>(i);
    append_rows(cache, id, w.qkv[0], 195 + n, 196 + n).value();
    const std::vector<float> q(w.qkv[0].q.begin() + static_cast<std::ptrdiff_t>(i * row),
                               w.qkv[0].q.begin() + static_cast<std::ptrdiff_t>((i + 1) * row));
    const Attended step = try_attend(cache, {id}, one_sequence(w, 1), q).value();
    const std::span<const float> expected = std::span<const float>(at_once.out).subspan(i * row, row);
    EXPECT_TRUE(close(std::vector<double>(expected.begin(), expected.end()), step.out, two_ways(w))) << "step " << i;
  }
}

TEST_P(Invariance, TwentyRunsSameBits) {
  const World w(spec({{500, 4}, {90, 4}}));
  AttentionOptions options;
  options.threads = 2;
  options.split_keys = 64;
  const Attended first = w.attend(options);
  for (int i = 1; i < 20; ++i) {
    const Attended again = w.attend(options);
    ASSERT_TRUE(same_bits(first.out, again.out, w.out_shape())) << "run " << i;
    ASSERT_TRUE(same_bits(first.lse, again.lse)) << "run " << i;
  }
}

TEST_P(Invariance, InstructionSetsAgree) {
  const std::vector<std::string> isas = available_isas();
  const World w(spec({{300, 1}, {300, 70}, {65, 5}}));
  AttentionOptions options;
  options.isa = isas.back();
  const Attended expected = w.attend(options);
  for (const std::string& isa : isas) {
    options.isa = isa;
    const Attended got = w.attend(options);
    EXPECT_TRUE(close(expected.out, got.out, two_ways(w), w.out_shape())) << isa << " against " << isas.back();
    EXPECT_TRUE(lse_close(std::vector<double>(expected.lse.begin(), expected.lse.end()), got.lse,
                          tolerance::kTwoWays * w.lse_tolerance()));
  }
}

TEST_P(Invariance, HalvesMergedEqualTheWhole) {
  const World w(spec({{330, 4}}));
  const Attended whole = w.attend();
  for (const std::int64_t cut : {0, 1, 64, 200, 330}) {
    const OwnedMask low = make_mask(Dtype::boolean, {1, 1, 1, 330}, [&](auto, auto, auto, auto k) { return k < cut; });
    const OwnedMask high =
        make_mask(Dtype::boolean, {1, 1, 1, 330}, [&](auto, auto, auto, auto k) { return k >= cut; });
    const Attended a = w.attend(with_mask(low, Mask::causal()));
    const Attended b = w.attend(with_mask(high, Mask::causal()));
    std::vector<float> out(a.out.size()), lse(a.lse.size());
    const Partial parts[] = {{a.out.data(), a.lse.data()}, {b.out.data(), b.lse.data()}};
    merge(parts, 4 * w.q_heads(), 64, out.data(), lse.data()).value();
    EXPECT_TRUE(close(whole.out, out, two_ways(w), w.out_shape())) << "cut at " << cut;
    EXPECT_TRUE(lse_close(std::vector<double>(whole.lse.begin(), whole.lse.end()), lse,
                          tolerance::kTwoWays * w.lse_tolerance()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Invariance,
                         testing::Values(Case{"f32", "f32", 1}, Case{"bf16", "bf16", 0}, Case{"fp8", "fp8", 1},
                                         Case{"tq4", "tq4", 0}, Case{"tq4", "tq4", 1}, Case{"tq6", "tq4", 1},
                                         Case{"tq5", "tq3", 1}, Case{"tq8", "tq2", 0}, Case{"bf16", "tq4", 1},
                                         Case{"tq4", "tq4", 0, true}, Case{"tq6", "tq4", 1, true},
                                         Case{"fp8", "tq4", 1, true}),
                         [](const auto& i) { return name_of(i.param); });

}  // namespace
}  // namespace kvant::test
