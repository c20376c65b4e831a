// Logit transforms, sinks, lse, ragged batches, splits, threads and workspaces, against the float64 reference.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "support/guard.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

class Transforms : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] World world() const {
    const auto& [format, q_len] = GetParam();
    WorldSpec spec = spec_of(format, format == "tq6" ? "tq4" : format, {{200, q_len}, {90, q_len}});
    spec.inputs = Inputs::loud;
    return World(spec);
  }
};

TEST_P(Transforms, Scale) {
  const World w = world();
  for (const double scale : {0.0, 0.01, 0.125, 0.3, -0.1}) {
    AttentionOptions options;
    options.scale = scale;
    EXPECT_TRUE(w.kernel_matches(options)) << "scale " << scale;
  }
}

TEST_P(Transforms, Softcap) {
  const World w = world();
  for (const double cap : {0.5, 5.0, 30.0, 1000.0}) {
    AttentionOptions options;
    options.softcap = cap;
    EXPECT_TRUE(w.kernel_matches(options)) << "softcap " << cap;
  }
}

TEST_P(Transforms, Alibi) {
  const World w = world();
  AttentionOptions options;
  options.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(w.kernel_matches(options));
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(w.kernel_matches(options));
  options.mask = Mask::sliding(70, 2);
  EXPECT_TRUE(w.kernel_matches(options));
}

TEST_P(Transforms, SinkLogits) {
  const World w = world();
  EXPECT_TRUE(w.kernel_matches({}, {0.0f, -3.0f, 2.5f, 20.0f}));
  EXPECT_TRUE(w.kernel_matches({}, {-INFINITY, -100.0f, 90.0f, 0.0f}));
}

TEST_P(Transforms, AllTogether) {
  const World w = world();
  const OwnedMask mask = make_mask(Dtype::bf16, {1, w.q_heads(), 1, 200}, [](auto, auto h, auto, auto k) {
    return (k + h) % 11 == 0 ? -INFINITY : static_cast<float>((k + h) % 5) / 4;
  });
  AttentionOptions options = with_mask(mask, Mask::sliding(120, 4));
  options.scale = 0.2;
  options.softcap = 8;
  options.alibi_slopes = {0.1f, 0.03f, 0.01f, 0.002f};
  EXPECT_TRUE(w.kernel_matches(options, {0.5f, -1.0f, 2.0f, 0.0f}));
}

INSTANTIATE_TEST_SUITE_P(Features, Transforms,
                         testing::Combine(testing::Values("f32", "f16", "tq6", "fp8"), testing::Values(1, 5, 66)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

// --- inputs ---------------------------------------------------------------------------------------------------------

class InputKinds : public testing::TestWithParam<std::tuple<std::string, Inputs, bool>> {};

TEST_P(InputKinds, KernelMatchesReference) {
  const auto& [format, inputs, exact_ends] = GetParam();
  WorldSpec spec = spec_of(format, format, {{260, 4}});
  spec.head_dim = 128;
  spec.inputs = inputs;
  spec.sink_pages = spec.tail_pages = exact_ends ? 1 : 0;
  EXPECT_TRUE(World(spec).kernel_matches({}));
}

INSTANTIATE_TEST_SUITE_P(Features, InputKinds,
                         testing::Combine(testing::Values("f32", "bf16", "fp8", "tq2", "tq3", "tq4", "tq5", "tq6",
                                                          "tq8"),
                                          testing::ValuesIn(kAllInputs), testing::Bool()),
                         [](const auto& i) {
                           return fmt::format("{}_{}_{}", std::get<0>(i.param), inputs_name(std::get<1>(i.param)),
                                              std::get<2>(i.param) ? "ends" : "noends");
                         });

// --- batches --------------------------------------------------------------------------------------------------------

TEST(RaggedBatch, LengthsAndQueriesDiffer) {
  for (const char* format : {"f32", "tq4", "tq8"}) {
    const World world(spec_of(format, format, {{1, 1}, {64, 1}, {65, 3}, {300, 7}, {130, 130}, {2, 2}, {129, 1}}));
    EXPECT_TRUE(world.kernel_matches({})) << format;
  }
}

TEST(RaggedBatch, TheSameSequenceTwice) {
  const World world(spec_of("tq4", "tq4", {{100, 2}}));
  AttentionOptions options;
  options.q_heads = world.q_heads();
  options.q_len = 2;
  std::vector<float> q = world.queries();
  q.insert(q.end(), world.qkv[0].q.begin(), world.qkv[0].q.end());
  const Attended twice = try_attend(world.cache, {world.ids[0], world.ids[0]}, options, q).value();
  const Attended once = world.attend();
  const std::span<const float> all(twice.out);
  EXPECT_TRUE(close(once.out, all.first(once.out.size()), tolerance::kTwoWays * world.tolerance()));
  EXPECT_TRUE(same_bits(all.first(once.out.size()), all.last(once.out.size())));
}

TEST(Layers, EachHasItsOwnVectors) {
  CacheConfig config;
  config.layers = 3;
  config.kv_heads = 1;
  config.head_dim = 64;
  Cache cache = Cache::create(config).value();
  const SequenceId id = cache.add_sequence();
  AttentionOptions options;
  options.q_heads = 2;
  std::vector<Qkv> x;
  for (int layer = 0; layer < 3; ++layer) {
    x.push_back(make_qkv({1, 150, 2, 1, 64}, Inputs::gauss, 50 + static_cast<std::uint64_t>(layer)));
    append_rows(cache, id, x.back(), 0, 150, Dtype::f32, layer).value();
  }
  const Plan planned = plan(cache, {id}, options).value();
  for (int layer : {2, 0, 1}) {
    std::vector<float> k(150 * 64), v(150 * 64), out(128);
    cache
        .read(id, layer, 0, 150, MutableTensorView::of(k.data(), 150, 1, 64),
              MutableTensorView::of(v.data(), 150, 1, 64))
        .value();
    const Qkv& in = x[static_cast<std::size_t>(layer)];
    run(planned, layer, TensorView::of(in.q.data(), 1, 2, 64), MutableTensorView::of(out.data(), 1, 2, 64)).value();
    const std::vector<double> q64 = widen(in.q), k64 = widen(k), v64 = widen(v);
    const reference::Problem p{1, 150, 2, 1, 64, q64, k64, v64, {}, 0};
    EXPECT_TRUE(close(reference::attention(p, options).out, out, tolerance::kCoded)) << "layer " << layer;
  }
}

// One page is the sink and one the tail. The newest page, and those that were exact for the first of the queries, are
// read exactly for all queries, up to a page before the tail; the others as codes, which at two bits are far from the
// vectors.
TEST(ExactEnds, OfManyQueriesAreThoseOfTheFirst) {
  struct Case {
    std::int64_t tokens, q_len, first_exact;  // page; page 0 is the sink
  };
  const Case cases[] = {{320, 1, 4},  {320, 2, 3},  {321, 1, 4}, {321, 2, 4},   {321, 3, 3},
                        {320, 64, 3}, {383, 64, 4}, {383, 3, 4}, {320, 200, 3}, {300, 40, 3}};
  for (const Case& c : cases) {
    CacheConfig config;
    config.kv_heads = 2;
    config.head_dim = 64;
    config.k = config.v = "tq2";
    config.exact = Dtype::f32;
    Cache cache = Cache::create(config).value();
    const SequenceId id = cache.add_sequence();
    const Qkv x = make_qkv({c.q_len, c.tokens, 4, 2, 64}, Inputs::gauss, 60);
    for (std::int64_t begin = 0; begin < c.tokens; begin += 50) {
      append_rows(cache, id, x, begin, std::min(begin + 50, c.tokens), Dtype::f32).value();
    }
    std::vector<float> k(x.k.size()), v(x.v.size());
    cache
        .read(id, 0, 0, c.tokens, MutableTensorView::of(k.data(), c.tokens, 2, 64),
              MutableTensorView::of(v.data(), c.tokens, 2, 64))
        .value();
    const std::ptrdiff_t exact = c.first_exact * kPageTokens * 2 * 64;
    std::copy(x.k.begin() + exact, x.k.end(), k.begin() + exact);
    std::copy(x.v.begin() + exact, x.v.end(), v.begin() + exact);
    AttentionOptions options;
    options.products = 16;
    options.q_heads = 4;
    options.q_len = static_cast<int>(c.q_len);
    const Attended got = try_attend(cache, {id}, options, x.q).value();
    std::vector<float> seen(x.k.size());
    cache.read(id, 0, 0, c.tokens, MutableTensorView::of(seen.data(), c.tokens, 2, 64), {}, {}, c.q_len).value();
    EXPECT_EQ(seen, k) << c.tokens << " tokens, " << c.q_len << " queries";
    const std::vector<double> q64 = widen(x.q), k64 = widen(k), v64 = widen(v);
    const reference::Problem p{c.q_len, c.tokens, 4, 2, 64, q64, k64, v64, {}, 0};
    EXPECT_TRUE(close(reference::attention(p, options).out, got.out, tolerance::kCoded))
        << c.tokens << " tokens, " << c.q_len << " queries";
  }
}

TEST(NonFiniteQuery, SpoilsItsOwnRowOnly) {
  for (const char* format : {"f32", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 5, 70}) {
      const World world(spec_of(format, format, {{200, q_len}}));
      const Attended expected = world.attend();
      for (const float bad : {NAN, INFINITY}) {
        std::vector<float> q = world.queries();
        const std::size_t row = static_cast<std::size_t>(q_len - 1) * 4 + 2;
        q[row * 64 + 17] = bad;
        const Attended got = try_attend(world.cache, world.ids, world.options(), q).value();
        for (std::size_t i = 0; i < got.out.size(); ++i) {
          if (i / 64 == row) {
            ASSERT_TRUE(std::isnan(got.out[i])) << format << ", q_len " << q_len << ", query " << bad << " at " << i;
          } else {
            ASSERT_EQ(got.out[i], expected.out[i]) << format << ", q_len " << q_len << ", query " << bad << " at " << i;
          }
        }
        EXPECT_TRUE(std::isnan(got.lse[row]));
      }
    }
  }
}

// --- how it is computed ---------------------------------------------------------------------------------------------

TEST(Splits, AnyForcedSizeMatches) {
  for (const char* format : {"f32", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 66}) {
      const World world(spec_of(format, format, {{700, q_len}, {65, 1}}));
      for (const std::int64_t split : {64, 128, 192, 640, 704, 65536}) {
        AttentionOptions options;
        options.split_keys = split;
        EXPECT_TRUE(world.kernel_matches(options, {0.5f, 1.0f, -1.0f, 0.0f})) << format << ", split_keys " << split;
      }
      AttentionOptions options;
      options.split_keys = 64;
      EXPECT_EQ(world.attend(options).splits, 11) << format;
      options.split_keys = 65536;
      EXPECT_EQ(world.attend(options).splits, 1) << format;
    }
  }
}

TEST(Threads, SameBitsWhateverTheirNumber) {
  for (const char* format : {"f32", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 5, 100}) {
      const World world(spec_of(format, format, {{700, q_len}, {130, q_len}}));
      AttentionOptions options;
      options.split_keys = 128;
      options.threads = 1;
      const Attended one = world.attend(options);
      for (const int threads : {2, 3, 7}) {
        options.threads = threads;
        const Attended many = world.attend(options);
        EXPECT_TRUE(same_bits(one.out, many.out, world.out_shape())) << format << ", threads " << threads;
        EXPECT_TRUE(same_bits(one.lse, many.lse)) << format << ", threads " << threads;
      }
    }
  }
}

TEST(Workspace, GivenOrOwnMakesNoDifference) {
  const World world(spec_of("tq6", "tq4", {{700, 3}}));
  AttentionOptions options = world.options();
  options.split_keys = 64;
  const Plan planned = plan(world.cache, std::span<const SequenceId>(world.ids), options).value();
  const std::vector<float> q = world.queries();
  const TensorView q_view = TensorView::of(q.data(), 3, 4, 64);
  std::vector<float> own(q.size()), given(q.size());
  run(planned, 0, q_view, MutableTensorView::of(own.data(), 3, 4, 64)).value();

  // Exactly as large as promised, full of NaN, an inaccessible page after the last 64-byte line.
  const std::size_t bytes = planned.workspace_bytes();
  ASSERT_GT(bytes, 0u);
  const GuardBuffer workspace(bytes, (64 - bytes % 64) % 64);
  RunOptions run_options;
  run_options.workspace = {workspace.data(), bytes};
  for (int repeat = 0; repeat < 2; ++repeat) {
    run(planned, 0, q_view, MutableTensorView::of(given.data(), 3, 4, 64), run_options).value();
    EXPECT_TRUE(same_bits(own, given));
  }
  EXPECT_TRUE(workspace.padding_untouched());
}

TEST(Workspace, OnePlanRunsConcurrentlyWithTwo) {
  const World world(spec_of("tq6", "tq4", {{700, 3}}));
  AttentionOptions options = world.options();
  options.split_keys = 64;
  options.threads = 1;
  const Plan planned = plan(world.cache, std::span<const SequenceId>(world.ids), options).value();
  const std::vector<float> q = world.queries();
  const Attended expected = world.attend(options);
  std::vector<std::vector<float>> out(2, std::vector<float>(q.size()));
  std::vector<std::thread> threads;
  for (std::vector<float>& mine : out) {
    threads.emplace_back([&] {
      const std::size_t bytes = planned.workspace_bytes();
      const GuardBuffer workspace(bytes, (64 - bytes % 64) % 64);
      RunOptions run_options;
      run_options.workspace = {workspace.data(), bytes};
      for (int i = 0; i < 20; ++i) {
        run(planned, 0, TensorView::of(q.data(), 3, 4, 64), MutableTensorView::of(mine.data(), 3, 4, 64), run_options)
            .value();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::vector<float>& mine : out) EXPECT_TRUE(same_bits(expected.out, mine));
}

TEST(Explain, NamesWhatWasChosen) {
  const World world(spec_of("tq6", "tq4", {{700, 3}}));
  for (const std::string& isa : available_isas()) {
    AttentionOptions options;
    options.isa = isa;
    options.threads = 1;
    options.split_keys = 128;
    const Plan p = plan(world.cache, std::span<const SequenceId>(world.ids), world.options(options)).value();
    EXPECT_EQ(p.isa(), isa);
    EXPECT_EQ(p.threads(), 1);
    EXPECT_EQ(p.total_queries(), 3);
    EXPECT_GT(p.kv_bytes(), 700 * 2 * 64 * 10 / 8);
    for (const std::string& word : {isa, std::string("tq6"), std::string("tq4"), std::string("128")}) {
      EXPECT_NE(p.explain().find(word), std::string::npos) << word << " in:\n" << p.explain();
    }
  }
}

}  // namespace
}  // namespace kvant::test
