// Prefill by products of 8 bits on a device (prefill_int8): against float64 attention over the decoded vectors and over
// those that were given, and beside products of 16 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/digits.hpp"
#include "codec/rotation.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

AttentionOptions in_bytes(AttentionOptions base = {}) {
  base.products = 8;
  base.kernel = core::kPrefillInt8;
  return base;
}

bool has_one_digit(const WorldSpec& s) {
  return s.page_centres && s.k != "tq8";
}
double usual_tolerance(const WorldSpec& s) {
  return has_one_digit(s) ? tolerance::kCudaInt8OneDigit : tolerance::kCudaInt8;
}

/// out and lse, whatever the number of rows. `allowed`: 0 for the usual tolerance.
testing::AssertionResult matches(const GpuWorld& w, const AttentionOptions& base = {},
                                 const std::vector<float>& sink_logits = {}, const Placement& placement = {},
                                 double allowed = 0) {
  const Result<Attended> got = w.try_attend(in_bytes(base), sink_logits, placement);
  if (!got) return testing::AssertionFailure() << code_name(got.code()) << ": " << got.message();
  if (allowed == 0) allowed = usual_tolerance(w.host.spec);
  if (placement.out_dtype == Dtype::bf16) allowed += 0x1p-8;
  const Expected expected = w.expect(base, sink_logits, placement.q_dtype);
  if (auto r = close(expected.out, got->out, allowed, w.host.out_shape()); !r) return r << "\nout\n" << got->explain;
  const double of_lse = has_one_digit(w.host.spec) ? tolerance::kCudaInt8OneDigitLse : tolerance::kCudaInt8Lse;
  if (auto r = lse_close(expected.lse, got->lse, of_lse, {w.host.total_queries(), w.host.q_heads()}); !r)
    return r << "\nlse\n" << got->explain;
  return testing::AssertionSuccess();
}

WorldSpec world_of(const Formats& f, int head_dim, bool centred, int ends, std::vector<Lengths> sequences) {
  WorldSpec s = spec_of(f.k, f.v, std::move(sequences));
  s.head_dim = head_dim;
  s.page_centres = centred;
  s.key_offset = centred ? 2.0f : 0.0f;
  s.sink_pages = s.tail_pages = ends;
  return s;
}

std::vector<Formats> tq_formats() {
  std::vector<Formats> found;
  for (const Formats& f : kFormats) {
    if (f.k[0] == 't' && f.v[0] == 't') found.push_back(f);
  }
  return found;
}

// --- formats and sizes -----------------------------------------------------------------------------------------------

class GpuInt8 : public testing::TestWithParam<std::tuple<Formats, int>> {};

// More pages than sixteen, ragged batches, one query and many, keys that refuse their centre; with and without exact
// pages.
TEST_P(GpuInt8, Matches) {
  SKIP_WITHOUT_DEVICE();
  const auto& [formats, head_dim] = GetParam();
  for (const bool centred : {true, false}) {
    for (const int ends : {1, 0}) {
      const GpuWorld w(world_of(formats, head_dim, centred, ends, {{1500, 1}, {257, 3}, {200, 130}, {65, 5}}));
      SCOPED_TRACE(fmt::format("{}, {} exact ends", centred ? "centred" : "not centred", ends));
      EXPECT_TRUE(matches(w));
      EXPECT_TRUE(matches(w, {}, {}, {.q_dtype = Dtype::bf16, .out_dtype = Dtype::bf16}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuInt8, testing::Combine(testing::ValuesIn(tq_formats()), testing::Values(64, 128)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });
INSTANTIATE_TEST_SUITE_P(Some, GpuInt8,
                         testing::Combine(testing::Values(Formats{"tq6", "tq4"}, Formats{"tq4", "tq4"},
                                                          Formats{"tq6", "tq6"}, Formats{"tq8", "tq8"}),
                                          testing::Values(96, 192, 256)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(std::get<0>(i.param)), std::get<1>(i.param));
                         });

// Products of 8 bits add little to a format's own error, and are near those of 16 bits.
TEST(GpuInt8Errors, BesideTheFormatsAnd16Bits) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : {Formats{"tq6", "tq4"}, Formats{"tq4", "tq4"}, Formats{"tq8", "tq8"}}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const bool centred : {true, false}) {
        WorldSpec s = world_of(f, head_dim, centred, 0, {{1200, 140}});
        s.key_offset = 0;
        const GpuWorld w(s);
        SCOPED_TRACE(fmt::format("{}, D {}, {}", name_of(f), head_dim, centred ? "centred" : "not centred"));
        const Attended eight = w.attend(in_bytes());
        AttentionOptions base;
        base.kernel = core::kPrefillKernels;
        base.products = 16;
        const Attended sixteen = w.attend(base);
        const double own = usual_tolerance(s);
        EXPECT_TRUE(close(std::span<const float>(sixteen.out), eight.out, own, w.host.out_shape()));
        const Expected truth = w.host.expect_true();
        EXPECT_TRUE(close(truth.out, eight.out, std::hypot(w.host.codec_tolerance(), own), w.host.out_shape()));
        // As squares: 8 bits add no more than they are off by themselves.
        const double of_eight = difference(truth.out, eight.out).rel_l2,
                     of_sixteen = difference(truth.out, sixteen.out).rel_l2;
        EXPECT_LE(of_eight, std::hypot(of_sixteen, 1.5 * own));
        // Two digits: what is left is the weights' rounding.
        if (!has_one_digit(s)) {
          EXPECT_TRUE(close(w.expect().out, eight.out, 7e-3, w.host.out_shape()));
        }
      }
    }
  }
}

TEST(GpuInt8Errors, OfAllInputs) {
  SKIP_WITHOUT_DEVICE();
  for (const Inputs inputs : kAllInputs) {
    for (const bool centred : {true, false}) {
      WorldSpec s = world_of({"tq6", "tq4"}, 128, centred, 1, {{900, 70}, {130, 3}});
      s.inputs = inputs;
      s.key_offset = 0;
      EXPECT_TRUE(matches(GpuWorld(s), {}, {}, {}, centred ? tolerance::kCudaInt8LoudOneDigit : 0))
          << inputs_name(inputs) << (centred ? ", centred" : "");
    }
  }
}

// Keys of a model with a key bias: norms near 900. The query's product with a centre has 11 bits, as in prefill_sm80;
// two digits need no centre.
TEST(GpuInt8Errors, AKeyBias) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : {Formats{"tq6", "tq4"}, Formats{"tq4", "tq4"}}) {
    for (const float offset : {10.0f, 80.0f}) {
      for (const bool centred : {true, false}) {
        for (const int ends : {0, 1}) {
          WorldSpec s = world_of(f, 128, centred, ends, {{2048, 1}, {2048, 140}});
          s.exact = s.input_dtype = Dtype::f16;
          s.key_offset = offset;
          const GpuWorld w(s);
          const Attended got = w.attend(in_bytes());
          EXPECT_TRUE(close(w.expect().out, got.out, 2e-2, w.host.out_shape()))
              << name_of(f) << ", offset " << offset << (centred ? ", centred, " : ", ") << ends << " exact ends";
        }
      }
    }
  }
}

// Rows that see one key: their lse is its score, which is an integer times known factors. So products, columns and the
// integers of queries are those of codec/digits.hpp.
TEST(GpuInt8Scores, AreThoseOfTheIntegers) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kKeys = 320;
  for (const Formats& f : tq_formats()) {
    for (const int head_dim : {64, 128, 256}) {
      for (const bool centred : {false, true}) {
        WorldSpec s = world_of(f, head_dim, centred, 0, {{kKeys, kKeys}});
        s.kv_heads = s.group = 1;
        s.key_offset = 0;
        const GpuWorld w(s);
        // Query i sees key (7 i) % 320: every column of every page once.
        const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, kKeys, kKeys},
                                         [](auto, auto, auto q, auto k) { return k == 7 * q % kKeys ? 1.0f : 0.0f; });
        const Attended got = w.attend(in_bytes(with_mask(mask, Mask::bidirectional())));
        std::vector<float> keys, values;
        decode_sequence(w.cache, w.ids[0], 0, s.sequences[0], w.host.qkv[0], keys, values, w.stream.handle());
        const Format k = parse_format(f.k).value();
        const int group_dim = head_dim / codec::tq_scale_groups(k, head_dim);
        const int most = codec::most_digit(k, group_dim, codec::takes_two_digits(k, centred));
        double worst = 0, largest = 0;
        for (std::int64_t i = 0; i < kKeys; ++i) {
          const auto d = static_cast<std::size_t>(head_dim);
          const float* const q_at = w.host.qkv[0].q.data() + static_cast<std::size_t>(i) * d;
          const float* const k_at = keys.data() + static_cast<std::size_t>(7 * i % kKeys) * d;
          std::vector<float> q(q_at, q_at + d), key(k_at, k_at + d);
          codec::rotate(q.data(), head_dim);
          codec::rotate(key.data(), head_dim);
          double score = 0;
          for (std::size_t from = 0; from < d; from += static_cast<std::size_t>(group_dim)) {
            const std::size_t end = from + static_cast<std::size_t>(group_dim);
            float top = 0;
            for (std::size_t j = from; j < end; ++j) top = std::max(top, std::fabs(q[j]));
            const codec::DigitStep step = codec::digit_step(top, most);
            for (std::size_t j = from; j < end; ++j)
              score += static_cast<double>(codec::digit_of(q[j], step.inverse)) * step.step * key[j];
          }
          score /= std::sqrt(static_cast<double>(head_dim));
          worst = std::max(worst, std::fabs(score - got.lse[static_cast<std::size_t>(i)]));
          largest = std::max(largest, std::fabs(score));
        }
        // Centred: a query's product with the centre, of a length of an eighth to one of a key's, has 11 bits.
        EXPECT_LE(worst, centred ? 2e-3 : 1e-5)
            << name_of(f) << ", D " << head_dim << (centred ? ", centred" : "") << ", scores up to " << largest;
      }
    }
  }
}

// --- values ----------------------------------------------------------------------------------------------------------

// Scales of values from 0 over those that halves have as subnormal numbers to large ones, beside each other in a page.
TEST(GpuInt8Values, ScalesOfAllSizes) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kKeys = 200, kRows = 40;
  for (const int head_dim : {64, 256}) {
    for (const char* v : {"tq4", "tq6", "tq8"}) {
      for (const int kind : {0, 1, 2}) {
        WorldSpec s = world_of({"tq6", v}, head_dim, false, 0, {{kKeys, kRows}});
        s.kv_heads = 1;
        s.group = 2;
        WorldSpec empty = s;
        empty.sequences = {{1, 1}};
        GpuWorld w(empty);
        Qkv x = make_qkv({.q_len = kRows, .kv_len = kKeys, .q_heads = 2, .kv_heads = 1, .head_dim = head_dim},
                         Inputs::gauss, 5);
        for (std::size_t i = 0; i < x.v.size(); ++i) {
          const std::size_t token = i / static_cast<std::size_t>(head_dim);
          const float sizes[3][4] = {{0.0f, 1.0f, 1e-3f, 30.0f}, {1e-6f, 3e-6f, 1e-5f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
          x.v[i] *= sizes[kind][token % 4];
        }
        const SequenceId id = w.cache.add_sequence();
        append_on_device(w.cache, id, x, 0, kKeys, Dtype::bf16, w.stream);
        AttentionOptions o = in_bytes();
        o.q_heads = 2;
        o.q_lens = {kRows};
        const Plan planned = plan(w.cache, {id}, o).value();
        const DeviceRows q(x.q, Dtype::f32, kRows, 2, head_dim);
        const DeviceBuffer out(x.q.size() * 4), workspace(planned.workspace_bytes());
        RunOptions options;
        options.stream = w.stream.handle();
        options.workspace = workspace.span();
        run(planned, 0, q.view, MutableTensorView::of(out.as<float>(), kRows, 2, head_dim), options).value();
        w.stream.wait();
        std::vector<float> keys(x.k.size()), values(x.v.size());
        w.cache
            .read(id, 0, 0, kKeys, MutableTensorView::of(keys.data(), kKeys, 1, head_dim),
                  MutableTensorView::of(values.data(), kKeys, 1, head_dim), w.stream.handle())
            .value();
        const std::vector<double> q64 = widen(x.q), k64 = widen(keys), v64 = widen(values);
        const reference::Problem p{kRows, kKeys, 2, 1, head_dim, q64, k64, v64, {}, 0};
        const Expected expected{reference::attention(p, o).out, {}};
        EXPECT_TRUE(close(expected.out, out.download_as<float>(), tolerance::kCudaInt8, {kRows, 2, head_dim}))
            << v << ", D " << head_dim << ", kind " << kind;
      }
    }
  }
}

TEST(GpuInt8Values, WhatWasTruncatedIsNotRead) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : {Formats{"tq6", "tq4"}, Formats{"tq4", "tq4"}, Formats{"tq8", "tq8"}}) {
    for (const bool centred : {false, true}) {
      GpuWorld w(world_of(f, 64, centred, 0, {{190, 3}}));
      const Attended before = w.attend(in_bytes());
      Qkv nan = w.host.qkv[0];
      nan.v.assign(2 * 2 * 64, NAN);
      nan.k.assign(nan.v.size(), 1.0f);  // values alone are enough
      append_on_device(w.cache, w.ids[0], nan, 0, 2, Dtype::bf16, w.stream);
      const Attended spoiled = w.attend(in_bytes());
      EXPECT_TRUE(std::isnan(spoiled.out.back())) << name_of(f);
      w.cache.truncate(w.ids[0], 190).value();
      EXPECT_TRUE(same_bits(before.out, w.attend(in_bytes()).out)) << name_of(f);
      (void)w.cache.take_non_finite(w.stream.handle()).value();
    }
  }
}

// --- rows ------------------------------------------------------------------------------------------------------------

TEST(GpuInt8Rows, ANonFiniteQuerySpoilsItsOwnRowOnly) {
  SKIP_WITHOUT_DEVICE();
  for (const bool centred : {false, true}) {
    for (const int ends : {0, 1}) {
      GpuWorld w(world_of({"tq6", "tq4"}, 64, centred, ends, {{800, 5}}));
      const Attended expected = w.attend(in_bytes());
      constexpr std::size_t kRow = 4 * 4 + 2;
      for (const float bad : {NAN, kInf, -kInf}) {
        const float good = std::exchange(w.host.qkv[0].q[kRow * 64 + 17], bad);
        const Attended got = w.attend(in_bytes());
        w.host.qkv[0].q[kRow * 64 + 17] = good;
        EXPECT_TRUE(std::isnan(got.lse[kRow]));
        for (std::size_t i = 0; i < got.out.size(); ++i) {
          if (i / 64 == kRow) {
            ASSERT_TRUE(std::isnan(got.out[i])) << i;
          } else {
            ASSERT_EQ(got.out[i], expected.out[i]) << i;
          }
        }
      }
    }
  }
}

TEST(GpuInt8Rows, OfZeros) {
  SKIP_WITHOUT_DEVICE();
  for (const bool centred : {false, true}) {
    GpuWorld w(world_of({"tq6", "tq4"}, 128, centred, 1, {{400, 3}}));
    std::fill_n(w.host.qkv[0].q.begin(), 4 * 128, 0.0f);
    EXPECT_TRUE(matches(w));
  }
}

TEST(GpuInt8Rows, SameBitsTwice) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : tq_formats()) {
    for (const bool centred : {false, true}) {
      const GpuWorld w(world_of(f, 128, centred, 1, {{5000, 200}, {700, 1}, {130, 40}}));
      const Attended first = w.attend(in_bytes());
      for (int i = 0; i < 5; ++i) {
        const Attended again = w.attend(in_bytes());
        ASSERT_TRUE(same_bits(first.out, again.out)) << name_of(f);
        ASSERT_TRUE(same_bits(first.lse, again.lse)) << name_of(f);
      }
    }
  }
}

TEST(GpuInt8Rows, FreshKeys) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : {64, 128, 256}) {
    for (const bool centred : {false, true}) {
      const GpuWorld w(world_of({"tq6", "tq4"}, head_dim, centred, 1, {{700, 150}, {130, 130}, {90, 1}}));
      AttentionOptions o;
      o.fresh_keys = true;
      EXPECT_TRUE(matches(w, o)) << head_dim;
      o.products = 8;  // and the plan's own choice
      const Result<Attended> got = w.try_attend(o);
      ASSERT_TRUE(got) << got.message();
      EXPECT_TRUE(close(w.expect(o).out, got->out, usual_tolerance(w.host.spec), w.host.out_shape())) << got->explain;
      EXPECT_NE(got->explain.find("prefill_int8"), std::string::npos) << got->explain;
    }
  }
}

// --- masks and logits ------------------------------------------------------------------------------------------------

class GpuInt8Features : public testing::TestWithParam<std::tuple<Formats, int, bool>> {
 protected:
  [[nodiscard]] static GpuWorld world(std::vector<Lengths> sequences) {
    const auto& [formats, head_dim, centred] = GetParam();
    return GpuWorld(world_of(formats, head_dim, centred, 1, std::move(sequences)));
  }
};

TEST_P(GpuInt8Features, Windows) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world({{700, 140}, {330, 5}, {64, 64}});
  EXPECT_TRUE(matches(w, {.mask = Mask::bidirectional()}));
  for (const std::int64_t window : {1, 2, 63, 64, 65, 100, 300, 100000}) {
    for (const std::int64_t sinks : {0, 4, 70}) {
      EXPECT_TRUE(matches(w, {.mask = Mask::sliding(window, sinks)})) << window << " " << sinks;
      EXPECT_TRUE(matches(w, {.mask = Mask::bounded_below(window, sinks)})) << window << " " << sinks;
    }
  }
}

TEST_P(GpuInt8Features, Transforms) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world({{700, 140}, {330, 3}});
  const std::vector<float> sinks = {0.0f, -3.0f, 2.5f, 20.0f};
  AttentionOptions o;
  for (const double scale : {0.0, 0.01, 0.125, -0.1}) {
    o.scale = scale;
    EXPECT_TRUE(matches(w, o)) << scale;
  }
  o = {};
  for (const double cap : {0.5, 5.0, 30.0}) {
    o.softcap = cap;
    EXPECT_TRUE(matches(w, o, sinks)) << cap;
  }
  EXPECT_TRUE(matches(w, {}, sinks));
  EXPECT_TRUE(matches(w, {}, {-kInf, -100.0f, 90.0f, 0.0f}));
  o.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(matches(w, o, sinks));
  o.softcap = 0;
  EXPECT_TRUE(matches(w, o));
  o.mask = Mask::sliding(70, 2);
  EXPECT_TRUE(matches(w, o));
}

TEST_P(GpuInt8Features, MaskTensors) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world({{1200, 4}, {700, 4}});
  for (const Dtype dtype : {Dtype::boolean, Dtype::bf16, Dtype::f32}) {
    // Pages hidden from all, shown to all, and in part.
    const OwnedMask pages = make_mask(dtype, {2, 4, 4, 1200}, [&](auto b, auto h, auto q, auto k) {
      const std::int64_t kind = (k / 64 + h + 2 * b) % 4;
      return shown(dtype, kind == 0 || (kind == 1 && k % 3 != 0) || (kind == 2 && q % 2 == 1));
    });
    EXPECT_TRUE(matches(w, with_mask(pages)));
    EXPECT_TRUE(matches(w, with_mask(pages, Mask::sliding(500, 70))));
    // Rows that see nothing.
    const OwnedMask none = make_mask(dtype, {2, 1, 4, 1200}, [&](auto b, auto, auto q, auto k) {
      return shown(dtype, q == 1 ? k >= 700 && b == 0 : q == 2 ? k == 64 : q == 3 ? k / 64 % 3 == 1 : false);
    });
    EXPECT_TRUE(matches(w, with_mask(none), {}, {}, tolerance::kCudaInt8LoudOneDigit));
    const Attended got = w.attend(in_bytes(with_mask(none)));
    const std::size_t of_first = 4 * static_cast<std::size_t>(w.host.spec.head_dim);
    for (std::size_t i = 0; i < of_first; ++i) ASSERT_EQ(got.out[i], 0.0f) << i;
    EXPECT_EQ(got.lse[0], -kInf);
    EXPECT_TRUE(matches(w, with_mask(none), {0.5f, -kInf, 1.0f, -2.0f}, {}, tolerance::kCudaInt8LoudOneDigit));
  }
  // Biases.
  const OwnedMask biases = make_mask(Dtype::f32, {2, 4, 4, 1200}, [](auto b, auto h, auto q, auto k) {
    const std::int64_t n = b * 7 + h * 5 + q * 3 + k;
    return n % 13 == 0 ? -kInf : static_cast<float>(n % 17 - 8) / 4;
  });
  EXPECT_TRUE(matches(w, with_mask(biases)));
  // Terms so low that scores are lost in them, and large ones.
  for (const float term : {-2e30f, -1e37f, 1e5f, -1e5f}) {
    const OwnedMask low = make_mask(Dtype::f32, {1, 1, 1, 1200}, [&](auto, auto, auto, auto) { return term; });
    EXPECT_TRUE(matches(w, with_mask(low))) << term;
    const OwnedMask some =
        make_mask(Dtype::f32, {1, 1, 1, 1200}, [&](auto, auto, auto, auto k) { return k % 70 == 5 ? 0.0f : term; });
    EXPECT_TRUE(matches(w, with_mask(some), {}, {}, tolerance::kCudaInt8LoudOneDigit)) << term;
  }
}

INSTANTIATE_TEST_SUITE_P(Some, GpuInt8Features,
                         testing::Values(std::tuple{Formats{"tq6", "tq4"}, 128, true},
                                         std::tuple{Formats{"tq4", "tq4"}, 64, false},
                                         std::tuple{Formats{"tq6", "tq6"}, 256, true},
                                         std::tuple{Formats{"tq3", "tq3"}, 96, true},
                                         std::tuple{Formats{"tq8", "tq8"}, 256, false}),
                         [](const auto& i) {
                           return fmt::format("{}_d{}{}", name_of(std::get<0>(i.param)), std::get<1>(i.param),
                                              std::get<2>(i.param) ? "_centred" : "");
                         });

// --- plans -----------------------------------------------------------------------------------------------------------

TEST(GpuInt8Plans, SayWhichProducts) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(world_of({"tq6", "tq4"}, 128, true, 1, {{4096, 512}}));
  AttentionOptions o = w.host.options();
  o.products = 8;
  const Plan many = plan(w.cache, std::span<const SequenceId>(w.ids), o).value();
  EXPECT_STREQ(many.kernel(), "prefill");
  EXPECT_NE(many.explain().find("prefill_int8"), std::string::npos) << many.explain();
  EXPECT_NE(many.explain().find("products   8 bits: forced; queries as one digit"), std::string::npos)
      << many.explain();
  for (const int products : {0, 16}) {
    o.products = products;
    const Plan usual = plan(w.cache, std::span<const SequenceId>(w.ids), o).value();
    EXPECT_EQ(usual.explain().find("prefill_int8"), std::string::npos) << usual.explain();
  }
  o.products = 8;
  o.q_lens = {1};
  const Plan few = plan(w.cache, std::span<const SequenceId>(w.ids), o).value();
  EXPECT_STREQ(few.kernel(), "decode");
  const GpuWorld dense(spec_of("bf16", {{300, 100}}));
  o = dense.host.options();
  o.products = 8;
  const Result<Plan> refused = plan(dense.cache, std::span<const SequenceId>(dense.ids), o);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.message().find("products is 8, but the cache stores bf16/bf16"), std::string::npos)
      << refused.message();
  WorldSpec large = spec_of("tq4", {{3000, 512}});
  large.head_dim = 512;
  const GpuWorld w512(large);
  o = w512.host.options();
  o.products = 8;
  const Result<Plan> missing = plan(w512.cache, std::span<const SequenceId>(w512.ids), o);
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.message().find("products is 8: prefill_int8 kernels do not serve"), std::string::npos)
      << missing.message();
}

// For compute-sanitizer.
TEST(GpuShort, Int8) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [formats, head_dim] :
       {std::tuple{Formats{"tq6", "tq4"}, 128}, {Formats{"tq4", "tq4"}, 64}, {Formats{"tq8", "tq8"}, 256}}) {
    for (const bool centred : {true, false})
      EXPECT_TRUE(matches(GpuWorld(world_of(formats, head_dim, centred, 1, {{330, 3}, {200, 70}}))));
  }
  const GpuWorld w(world_of({"tq6", "tq6"}, 96, true, 1, {{330, 5}, {66, 66}}));
  AttentionOptions o;
  o.mask = Mask::sliding(65, 3);
  o.softcap = 5;
  EXPECT_TRUE(matches(w, o, {0.0f, -3.0f, 2.5f, 20.0f}));
}

}  // namespace
}  // namespace kvant::test
