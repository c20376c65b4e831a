// Fresh keys: runs that are given the queries' own keys and values, and read only older tokens from the cache.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/sanitized.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

AttentionOptions fresh(AttentionOptions options = {}) {
  options.fresh_keys = true;
  return options;
}

// --- chunks ---------------------------------------------------------------------------------------------------------

class FreshChunks : public testing::TestWithParam<std::tuple<std::string, int, int>> {
 protected:
  [[nodiscard]] WorldSpec spec(std::int64_t older, std::int64_t q_len) const {
    const auto& [format, ends, group] = GetParam();
    WorldSpec s = spec_of(format, format == "tq6" ? "tq4" : format, {{older + q_len, q_len}});
    s.sink_pages = s.tail_pages = ends;
    s.group = group;
    return s;
  }
};

TEST_P(FreshChunks, MatchTheReference) {
  for (const std::int64_t older : {0, 1, 63, 64, 200}) {
    for (const std::int64_t q_len : {1, 7, 65, 130, 300}) {
      if (q_len == 300 && (older % 100 != 0 || on_emulated_unit())) continue;  // half of the time
      SCOPED_TRACE(fmt::format("{} older tokens, {} queries", older, q_len));
      const World w(spec(older, q_len));
      for (const std::string& isa : available_isas()) {
        AttentionOptions options = fresh();
        options.isa = isa;
        EXPECT_TRUE(w.kernel_matches(options)) << isa;
      }
      EXPECT_TRUE(w.kernel_matches(fresh({.mask = Mask::bidirectional()})));
      EXPECT_TRUE(w.kernel_matches(fresh({.mask = Mask::sliding(40, 70)})));
      EXPECT_TRUE(w.kernel_matches(fresh({.mask = Mask::sliding(150)})));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fresh, FreshChunks,
                         testing::Combine(testing::Values("f32", "bf16", "fp8", "tq6", "tq3"), testing::Values(0, 1),
                                          testing::Values(1, 3)),
                         [](const auto& i) {
                           return fmt::format("{}_ends{}_group{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param));
                         });

TEST(Fresh, WithTransformsMasksAndSinkLogits) {
  for (const std::int64_t q_len : {3, 90}) {
    WorldSpec spec = spec_of("tq6", "tq4", {{200, q_len}, {91, q_len}, {q_len, q_len}});
    spec.inputs = Inputs::loud;
    const World w(spec);
    for (const std::int64_t first_key : {0, 70}) {
      const OwnedMask mask = make_mask(Dtype::bf16, {1, w.q_heads(), q_len, 200}, [](auto, auto h, auto q, auto k) {
        return (k + h + q) % 11 == 0 ? -INFINITY : static_cast<float>((k + h) % 5) / 4;
      });
      AttentionOptions options = fresh(with_mask(mask, Mask::sliding(120, 4)));
      options.mask.tensor.first_key = first_key;
      options.scale = 0.2;
      options.softcap = 8;
      options.alibi_slopes = {0.1f, 0.03f, 0.01f, 0.002f};
      EXPECT_TRUE(w.kernel_matches(options, {0.5f, -1.0f, 2.0f, 0.0f}));
    }
    const OwnedMask pages = make_mask(Dtype::boolean, {3, 1, q_len, 200}, [](auto b, auto, auto q, auto k) {
      return shown(Dtype::boolean, (k / 64 + b + q / 40) % 2 == 0);
    });
    EXPECT_TRUE(w.kernel_matches(fresh(with_mask(pages, Mask::causal()))));
    EXPECT_TRUE(w.kernel_matches(fresh(with_mask(pages, Mask::bidirectional()))));
  }
}

TEST(Fresh, RaggedBatchesAndPaddedHeadDims) {
  for (const int head_dim : {40, 72, 128, 250}) {
    for (const char* format : {"f32", "tq4"}) {
      WorldSpec spec = spec_of(format, format, {{1, 1}, {64, 1}, {65, 3}, {300, 7}, {130, 130}, {90, 0}, {129, 70}});
      spec.head_dim = head_dim;
      EXPECT_TRUE(World(spec).kernel_matches(fresh())) << format << " head_dim " << head_dim;
    }
  }
}

TEST(Fresh, CentresBasesAndInputDtypes) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const int tail : {0, 1}) {
      WorldSpec spec = spec_of("tq4", "tq4", {{400, 100}, {150, 2}});
      spec.input_dtype = dtype;
      spec.tail_pages = tail;
      spec.key_offset = 0.5;
      spec.page_centres = true;
      spec.chunks = {50, 100};
      EXPECT_TRUE(World(spec).kernel_matches(fresh())) << dtype_name(dtype) << " tail " << tail;
      spec.page_centres = false;
      spec.key_bases = spec.value_bases = true;
      EXPECT_TRUE(World(spec).kernel_matches(fresh())) << dtype_name(dtype) << " tail " << tail;
    }
  }
}

TEST(Fresh, SplitsAndThreadsChangeNoBits) {
  const World w(spec_of("tq6", "tq4", {{900, 5}, {333, 150}}));
  const Attended one = w.attend(fresh({.threads = 1}));
  for (const int threads : {1, 2, 3}) {
    const Attended other = w.attend(fresh({.threads = threads}));
    EXPECT_TRUE(same_bits(one.out, other.out));
    EXPECT_TRUE(same_bits(one.lse, other.lse));
  }
  EXPECT_TRUE(w.kernel_matches(fresh({.split_keys = 64})));
  EXPECT_TRUE(w.kernel_matches(fresh({.split_keys = 128})));
}

TEST(Fresh, OverAnExactCacheIsTheRunWithout) {
  const World w(spec_of("f32", "f32", {{200, 40}, {500, 3}, {129, 129}}));
  const Attended cached = w.attend(), given = w.attend(fresh());
  EXPECT_TRUE(close(widen(cached.out), given.out, tolerance::kMatrixFloat, w.out_shape()));
  EXPECT_TRUE(lse_close(widen(cached.lse), given.lse, tolerance::kLseCoded, {w.total_queries(), w.q_heads()}));
}

TEST(Fresh, IsCloserToExactAttention) {
  WorldSpec spec = spec_of("tq3", "tq3", {{320, 300}});
  spec.tail_pages = spec.sink_pages = 0;
  const World w(spec);
  const Expected exact = w.expect_true();
  const auto error = [&](const Attended& a) {
    double sum = 0;
    for (std::size_t i = 0; i < a.out.size(); ++i) sum += (a.out[i] - exact.out[i]) * (a.out[i] - exact.out[i]);
    return std::sqrt(sum);
  };
  EXPECT_LT(error(w.attend(fresh())), 0.7 * error(w.attend()));
}

// --- the order of write and run -------------------------------------------------------------------------------------

struct Step {
  int kv_heads = 2, head_dim = 64, q_heads = 4;
  Cache cache;
  SequenceId id;
  Qkv x;
  std::int64_t older, q_len;

  Step(std::int64_t older_tokens, std::int64_t queries, int ends, const std::string& format)
      : cache(Cache::create(config(ends, format)).value()),
        id(cache.add_sequence()),
        x(make_qkv({queries, older_tokens + queries, q_heads, kv_heads, head_dim}, Inputs::gauss, 7)),
        older(older_tokens),
        q_len(queries) {
    if (older > 0) append_rows(cache, id, x, 0, older).value();
    const Append step{id, q_len};
    cache.reserve({&step, 1}).value();
  }
  static CacheConfig config(int ends, const std::string& format) {
    CacheConfig c;
    c.kv_heads = 2;
    c.head_dim = 64;
    c.k = c.v = format;
    c.sink_pages = c.tail_pages = ends;
    return c;
  }
  [[nodiscard]] TensorView own(const std::vector<float>& of) const {
    return TensorView::of(of.data() + older * kv_heads * head_dim, q_len, kv_heads, head_dim);
  }
  void write() { cache.write({&id, 1}, 0, own(x.k), own(x.v)).value(); }
  [[nodiscard]] Result<Attended> attend() const {
    AttentionOptions options = fresh();
    options.q_heads = q_heads;
    options.q_len = static_cast<int>(q_len);
    return try_attend(cache, {id}, options, x.q, {}, 0, own(x.k), own(x.v));
  }
};

TEST(Fresh, BeforeOrAfterTheWriteIsTheSame) {
  for (const char* format : {"f32", "tq6"}) {
    for (const int ends : {0, 1}) {
      for (const std::int64_t older : {0, 30, 64, 200, 255}) {
        for (const std::int64_t q_len : {1, 40, 200}) {
          SCOPED_TRACE(fmt::format("{} ends {} older {} queries {}", format, ends, older, q_len));
          Step step(older, q_len, ends, format);
          const Result<Attended> before = step.attend();
          step.write();
          const Result<Attended> after = step.attend();
          ASSERT_TRUE(after.ok()) << after.message();
          if (!before.ok()) {  // an older page is encoded by the write, and read encoded
            EXPECT_EQ(before.code(), Code::invalid_argument);
            EXPECT_NE(before.message().find("write"), std::string::npos) << before.message();
            EXPECT_TRUE(ends == 1 && std::string(format) != "f32" && older > 0 && older + q_len >= 256);
            continue;
          }
          EXPECT_TRUE(same_bits(before->out, after->out));
          EXPECT_TRUE(same_bits(before->lse, after->lse));
        }
      }
    }
  }
}

TEST(Fresh, OlderTokensMustBeWritten) {
  Step step(10, 20, 1, "tq4");
  AttentionOptions options = fresh();
  options.q_heads = 4;
  options.q_len = 5;  // the step has 15 tokens more
  const std::vector<float> q(5 * 4 * 64);
  const Result<Attended> got =
      try_attend(step.cache, {step.id}, options, q, {}, 0, TensorView::of(step.x.k.data(), 5, 2, 64),
                 TensorView::of(step.x.v.data(), 5, 2, 64));
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.message().find("not written"), std::string::npos) << got.message();
}

// --- tensors --------------------------------------------------------------------------------------------------------

// The tensors of a world with NaN wherever no row is: [batch, kv_heads, room, head_dim].
TEST(Fresh, NothingBesideTheRowsIsRead) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    WorldSpec spec = spec_of("tq4", "tq4", {{200, 3}, {70, 70}, {90, 0}, {300, 65}});
    spec.input_dtype = dtype;
    spec.head_dim = 72;
    const World w(spec);
    const Attended packed = w.attend(fresh());
    const std::int64_t room = 73, wide = 80, most = 70;
    const auto spread = [&](bool values) {
      std::vector<float> x(static_cast<std::size_t>(4 * 2 * room * wide), NAN);
      for (std::size_t i = 0; i < 4; ++i) {
        const std::vector<float>& from = values ? w.qkv[i].v : w.qkv[i].k;
        const std::int64_t q_len = spec.sequences[i].q_len, first = spec.sequences[i].kv_len - q_len;
        for (std::int64_t t = 0; t < q_len; ++t) {
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t d = 0; d < 72; ++d) {
              const std::int64_t to = ((static_cast<std::int64_t>(i) * 2 + h) * room + t) * wide + d;
              x[static_cast<std::size_t>(to)] = from[static_cast<std::size_t>(((first + t) * 2 + h) * 72 + d)];
            }
          }
        }
      }
      return pack_as(dtype, x);
    };
    const std::vector<std::byte> k = spread(false), v = spread(true);
    const auto view = [&](const std::vector<std::byte>& bytes) {
      return TensorView{bytes.data(), dtype, {most, 2, 72}, {wide, room * wide, 1}, 2 * room * wide};
    };
    const Result<Attended> apart = try_attend(w.cache, w.ids, w.options(fresh()), w.queries(), {}, 0, view(k), view(v));
    ASSERT_TRUE(apart.ok()) << apart.message();
    EXPECT_TRUE(same_bits(packed.out, apart->out));
    EXPECT_TRUE(same_bits(packed.lse, apart->lse));
  }
}

TEST(Fresh, AWorkspaceThatHoldsNaNChangesNothing) {
  const World w(spec_of("tq6", "tq4", {{200, 3}, {70, 70}}));
  const Attended expected = w.attend(fresh());
  const Plan planned = plan(w.cache, w.ids, w.options(fresh())).value();
  const FreshTensors f = w.fresh();
  const std::size_t bytes = planned.workspace_bytes();
  auto* at = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  const std::vector<float> q = w.queries();
  std::vector<float> out(q.size());
  for (int i = 0; i < 2; ++i) {
    std::fill_n(at, bytes, std::byte{0xFF});
    ASSERT_TRUE(run(planned, 0, TensorView::of(q.data(), 73, 4, 64), MutableTensorView::of(out.data(), 73, 4, 64),
                    {.workspace = {at, bytes}}, f.keys, f.values)
                    .ok());
    EXPECT_TRUE(same_bits(expected.out, out));
  }
  std::free(at);
}

TEST(Fresh, WhatIsNotFiniteReachesTheRowsThatSeeIt) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const std::int64_t q_len : {5, 90}) {
    const World w(spec_of("tq4", "tq4", {{150, q_len}}));
    const Attended expected = w.attend(fresh());
    for (const bool values : {false, true}) {
      for (const float bad : {static_cast<float>(NAN), kInfinity}) {
        FreshTensors f = w.fresh();
        auto* x = reinterpret_cast<float*>(values ? f.v.data() : f.k.data());
        x[(3 * 2 + 1) * 64 + 7] = bad;  // the fourth token's, kv head 1
        const Attended got =
            try_attend(w.cache, w.ids, w.options(fresh()), w.queries(), {}, 0, f.keys, f.values).value();
        for (std::int64_t row = 0; row < q_len * 4; ++row) {
          const bool sees = row / 4 >= 3 && row % 4 >= 2;
          for (std::int64_t d = 0; d < 64; ++d) {
            const auto at = static_cast<std::size_t>(row * 64 + d);
            if (sees) {
              ASSERT_TRUE(std::isnan(got.out[at])) << row;
            } else {
              ASSERT_EQ(got.out[at], expected.out[at]) << row;
            }
          }
        }
      }
    }
  }
}

TEST(Fresh, Refusals) {
  const World w(spec_of("tq4", "tq4", {{100, 4}}));
  const FreshTensors f = w.fresh();
  const std::vector<float> q = w.queries();
  const auto refusal = [&](const AttentionOptions& options, const TensorView& keys, const TensorView& values) {
    const Result<Attended> got = try_attend(w.cache, w.ids, w.options(options), q, {}, 0, keys, values);
    return got.ok() ? std::string() : got.message();
  };
  EXPECT_EQ(refusal(fresh(), f.keys, f.values), "");
  EXPECT_NE(refusal({}, f.keys, f.values).find("fresh_keys"), std::string::npos);
  EXPECT_NE(refusal({}, {}, f.values).find("fresh_keys"), std::string::npos);
  EXPECT_NE(refusal(fresh(), {}, {}).find("keys.data is null"), std::string::npos);
  EXPECT_NE(refusal(fresh(), f.keys, {}).find("values.data is null"), std::string::npos);
  TensorView other = f.keys;
  other.shape[0] = 3;
  EXPECT_NE(refusal(fresh(), other, f.values).find("[total_queries, kv_heads, head_dim] = [4, 2, 64]"),
            std::string::npos);
  other = f.keys;
  other.stride[2] = 2;
  EXPECT_NE(refusal(fresh(), other, f.values).find("stride[2]"), std::string::npos);
  other = f.keys;
  other.dtype = Dtype::boolean;
  EXPECT_NE(refusal(fresh(), f.keys, other).find("values.dtype"), std::string::npos);
}

TEST(Fresh, ThePlanSaysSo) {
  const World w(spec_of("tq4", "tq4", {{200, 100}}));
  const Plan with = plan(w.cache, w.ids, w.options(fresh())).value(),
             without = plan(w.cache, w.ids, w.options()).value();
  EXPECT_NE(with.explain().find("fresh      keys and values"), std::string::npos) << with.explain();
  EXPECT_EQ(without.explain().find("fresh"), std::string::npos);
  EXPECT_LT(with.kv_bytes(), without.kv_bytes());
}

TEST(Fresh, WithAWindowThatReleasedPages) {
  for (const int q_len : {4, 150}) {
    WorldSpec spec = spec_of("tq4", "tq4", {{700, q_len}});
    spec.window = 100;
    spec.window_sinks = 10;
    spec.chunks = {37};
    for (const int window : {100, 60})
      EXPECT_TRUE(World(spec).kernel_matches(fresh({.mask = Mask::sliding(window, 10)})));
  }
}

}  // namespace
}  // namespace kvant::test
