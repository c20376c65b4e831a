// Attention over pages in an engine's blocks on a real device, by the float64 reference; tables that change under a
// graph; what does not fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gpu/device_buffer.hpp"
#include "gpu/gpu_formats.hpp"
#include "gpu/gpu_world.hpp"
#include "gpu/pages_twins.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"

namespace kvant::test {
namespace {

// --- attention -------------------------------------------------------------------------------------------------------

// Sequences of a world without exact ends, in both pools.
class Engine {
 public:
  explicit Engine(const WorldSpec& s)
      : world(s),
        twins({.k = s.k, .v = s.v, .head_dim = s.head_dim, .kv_heads = s.kv_heads, .v_head_dim = s.v_head_dim},
              blocks_of(s)) {
    std::int32_t next = 0;
    for (std::size_t i = 0; i < s.sequences.size(); ++i) {
      const Lengths& l = s.sequences[i];
      std::vector<std::int32_t> blocks;
      for (std::int64_t p = 0; p * kPageTokens < l.kv_len; ++p) blocks.push_back((next++ * 7) % prime_);
      columns = std::max(columns, static_cast<std::int64_t>(blocks.size()));
      twins.write(world.qkv[i].k, world.qkv[i].v, slots_of(blocks, 0, l.kv_len));
      step.add(blocks, static_cast<std::int32_t>(l.kv_len), static_cast<std::int32_t>(l.q_len));
    }
  }

  // The largest step: `spare` more sequences and blocks than there are.
  PagesPlanOptions limits(AttentionOptions options, int spare = 0, bool check = false) const {
    options.q_heads = world.q_heads();
    PagesPlanOptions o;
    o.attention = options;
    o.max_batch = static_cast<int>(world.ids.size()) + spare;
    o.max_blocks = columns + spare;
    for (const Lengths& l : world.spec.sequences)
      o.max_query_len = std::max(o.max_query_len, static_cast<int>(l.q_len));
    o.check_ids = check;
    return o;
  }

  // Rounds queries to bf16, in which they are given from then on.
  void take_bf16_queries() {
    q_dtype_ = Dtype::bf16;
    for (auto& sequence : world.qkv) {
      for (float& x : sequence.q) x = base::bf16_to_f32(base::f32_to_bf16(x));
    }
  }

  Attended attend(const PagesPlanOptions& o, const std::vector<float>& sink_logits = {}) {
    PagesPlan plan = twins.device.plan(o).value();
    const DeviceTables tables(o.max_batch, o.max_blocks);
    plan.set_tables(tables.upload(step), twins.stream.handle()).value();
    const std::vector<float> q = world.queries();
    const std::int64_t rows = world.total_queries(), heads = world.q_heads();
    std::vector<std::uint16_t> q_bf16;
    for (const float x : q) q_bf16.push_back(base::f32_to_bf16(x));
    const bool is_f32 = q_dtype_ == Dtype::f32;
    const DeviceBuffer q_there = is_f32 ? DeviceBuffer::of<float>(q) : DeviceBuffer::of<std::uint16_t>(q_bf16),
                       out_there(static_cast<std::size_t>(rows * heads * world.v_dim()) * 4),
                       lse_there(static_cast<std::size_t>(rows * heads) * 4), workspace(plan.workspace_bytes()),
                       sinks = DeviceBuffer::of<float>(sink_logits);
    FreshTensors fresh;
    DeviceBuffer keys, values;
    if (o.attention.fresh_keys) {
      fresh = world.fresh();
      keys = DeviceBuffer::of<std::byte>(fresh.k), values = DeviceBuffer::of<std::byte>(fresh.v);
      fresh.keys.data = keys.data(), fresh.values.data = values.data();
    }
    TensorView q_view = TensorView::of(q_there.as<float>(), rows, heads, world.spec.head_dim);
    q_view.dtype = q_dtype_;
    plan.run(twins.device_pool, q_view, MutableTensorView::of(out_there.as<float>(), rows, heads, world.v_dim()),
             {.stream = twins.stream.handle(),
              .lse = lse_there.as<float>(),
              .sink_logits = sink_logits.empty() ? nullptr : sinks.as<float>(),
              .workspace = workspace.span()},
             fresh.keys, fresh.values)
        .value();
    twins.stream.wait();
    EXPECT_TRUE(out_there.padding_untouched() && lse_there.padding_untouched() && workspace.padding_untouched());
    EXPECT_FALSE(plan.take_errors(twins.stream.handle()).value());
    return {out_there.download_as<float>(), lse_there.download_as<float>(), plan.explain(), 0};
  }

  testing::AssertionResult matches(const Attended& got, const AttentionOptions& options,
                                   const std::vector<float>& sink_logits, bool prefill) const {
    const Expected expected = world.expect_decoded(options, sink_logits);
    const bool floats = is_float_format(world.spec.k) && is_float_format(world.spec.v);
    const double allowed = prefill ? tolerance::kCudaPrefill : floats ? tolerance::kCudaFloat : 2 * tolerance::kCoded;
    if (auto close_enough = close(expected.out, got.out, allowed, world.out_shape()); !close_enough)
      return close_enough << "\n" << got.explain;
    return lse_close(expected.lse, got.lse, prefill ? tolerance::kCudaPrefillLse : tolerance::kLseOfFewKeys);
  }

  World world;
  Twins twins;
  EngineStep step;
  std::int64_t columns = 1;

 private:
  Dtype q_dtype_ = Dtype::f32;
  static std::int64_t blocks_of(const WorldSpec&) { return prime_; }
  static constexpr std::int32_t prime_ = 127;
};

WorldSpec spec(const Formats& f, int width, int group, std::vector<Lengths> sequences) {
  WorldSpec s;
  s.k = f.k;
  s.v = f.v;
  set_width(s, width);
  s.group = group;
  s.sequences = std::move(sequences);
  s.sink_pages = s.tail_pages = 0;
  return s;
}

class PagesAttention : public testing::TestWithParam<Formats> {};

// Batches with a few queries each, some of none; plans that are larger than their steps.
TEST_P(PagesAttention, OfDecodeKernels) {
  SKIP_WITHOUT_DEVICE();
  for (const int width : kWidths) {
    Engine engine(
        spec(GetParam(), width, width == 64 ? 4 : 2, {{700, 1}, {1, 1}, {65, 4}, {129, 1}, {2048, 1}, {64, 3}}));
    AttentionOptions options;
    options.kernel = "decode";
    for (const int spare : {0, 3, 40}) {
      for (const bool check : {false, true}) {
        EXPECT_TRUE(engine.matches(engine.attend(engine.limits(options, spare, check)), options, {}, false))
            << width << ", spare " << spare;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PagesAttention, testing::ValuesIn(kFormats),
                         [](const auto& i) { return name_of(i.param); });

TEST(PagesGpu, OptionsOfLogitsAndWindows) {
  SKIP_WITHOUT_DEVICE();
  Engine engine(spec({"tq4", "tq4"}, 128, 2, {{700, 2}, {100, 5}, {1500, 1}}));
  AttentionOptions options;
  options.kernel = "decode";
  options.scale = 0.2;
  options.softcap = 20;
  options.alibi_slopes = {0.1f, 0.0f, 0.02f, 0.3f};
  options.mask = Mask::sliding(200, 4);
  const std::vector<float> sinks = {0.5f, -1.0f, 3.0f, 0.0f};
  EXPECT_TRUE(engine.matches(engine.attend(engine.limits(options), sinks), options, sinks, false));
  // Blocks behind the window are gone.
  options = {};
  options.kernel = "decode";
  options.mask = Mask::sliding(130);
  for (std::size_t i = 0; i < engine.step.blocks.size(); ++i) {
    const Lengths& l = engine.world.spec.sequences[i];
    for (std::int64_t p = 0; (p + 1) * kPageTokens <= l.kv_len - l.q_len + 1 - 130; ++p)
      engine.step.blocks[i][static_cast<std::size_t>(p)] = p % 2 == 0 ? -1 : 0x7FFFFFFF;
  }
  for (const bool check : {false, true})
    EXPECT_TRUE(engine.matches(engine.attend(engine.limits(options, 2, check)), options, {}, false)) << check;
}

TEST(PagesGpu, ManyRows) {
  SKIP_WITHOUT_DEVICE();
  Engine engine(spec({"tq4", "tq4"}, 128, 4, {{700, 300}, {64, 1}, {257, 257}, {3000, 130}}));
  for (const char* kernel : {"decode", "prefill"}) {
    AttentionOptions options;
    options.kernel = kernel;
    const PagesPlanOptions limits = engine.limits(options, 2);
    const auto possible = engine.twins.device.plan(limits);
    if (!possible.ok()) {  // another compute capability
      EXPECT_EQ(possible.code(), Code::unsupported) << possible.message();
      continue;
    }
    EXPECT_STREQ(possible->kernel(), kernel);
    EXPECT_TRUE(engine.matches(engine.attend(limits), options, {}, std::string(kernel) == "prefill")) << kernel;
  }
}

// Decode kernels follow unpacked keys, over what rounds have left: they cut work of their own, not that of the step.
TEST(PagesGpu, ManyRowsOfUnequalWidths) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const int width : kUnequalWidths) {
    Engine engine(spec({"tq4", "tq4"}, width, 4, {{700, 300}, {64, 1}, {257, 257}, {3000, 130}, {90, 0}, {200, 9}}));
    for (const bool bf16 : {false, true}) {  // f32 queries are left to decode kernels
      if (bf16) engine.take_bf16_queries();
      for (const char* kernel : {"prefill", "prefill_unpacked"}) {
        if (!bf16 && kernel == std::string("prefill_unpacked")) continue;  // is refused
        for (const Mask& mask : {Mask::causal(), Mask::sliding(150, 3)}) {
          for (const int spare : {0, 40}) {
            AttentionOptions options;
            options.kernel = kernel;
            options.mask = mask;
            const Attended got = engine.attend(engine.limits(options, spare));
            EXPECT_NE(got.explain.find("the sequences that are left"), std::string::npos) << got.explain;
            EXPECT_TRUE(engine.matches(got, options, {}, true)) << kernel << " " << bf16 << " " << spare;
          }
        }
      }
    }
  }
}

TEST(PagesGpu, FreshKeys) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& formats : {Formats{"tq6", "tq4"}, Formats{"bf16", "bf16"}}) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      if (formats.k == std::string("bf16") && dtype == Dtype::f16) continue;
      WorldSpec s = spec(formats, 128, 4, {{700, 300}, {64, 1}, {257, 257}, {3000, 130}, {90, 0}, {200, 9}});
      s.input_dtype = dtype;
      Engine engine(s);
      for (const Mask& mask : {Mask::causal(), Mask::bidirectional(), Mask::sliding(150, 3)}) {
        AttentionOptions options;
        options.fresh_keys = true;
        options.mask = mask;
        EXPECT_TRUE(engine.matches(engine.attend(engine.limits(options, 2)), options, {}, true)) << formats.k;
      }
    }
  }
}

// One graph of set_tables, write and run, for steps of other batches, lengths and blocks.
TEST(PagesGpu, AGraphFollowsTheTables) {
  SKIP_WITHOUT_DEVICE();
  const Geometry g{"tq6", "tq4", 128, 2};
  constexpr std::int32_t kBatch = 6;
  constexpr int kHeads = 8;
  Twins twins(g, 64);
  PagesPlanOptions o;
  o.attention.q_heads = kHeads;
  o.attention.kernel = "decode";
  o.max_batch = kBatch;
  o.max_blocks = 9;
  o.max_query_len = 3;
  o.max_tokens = 20;
  PagesPlan there = twins.device.plan(o).value();
  o.attention.kernel = "";
  PagesPlan here = twins.host.plan(o).value();
  const DeviceTables tables(kBatch, 9);
  tables.upload({});
  const std::int64_t row = std::int64_t{g.kv_heads} * g.head_dim, q_row = std::int64_t{kHeads} * g.head_dim;
  const DeviceBuffer keys(static_cast<std::size_t>(20 * row) * 4), values(static_cast<std::size_t>(20 * row) * 4),
      slots_there(20 * 8), q(static_cast<std::size_t>(20 * q_row) * 4), out(static_cast<std::size_t>(20 * q_row) * 4),
      workspace(there.workspace_bytes());
  const TestGraph graph(twins.stream, [&] {
    there.set_tables(tables.view(), twins.stream.handle()).value();
    twins.device
        .write(twins.device_pool, TensorView::of(keys.as<float>(), 20, g.kv_heads, g.head_dim),
               TensorView::of(values.as<float>(), 20, g.kv_heads, g.head_dim), slots_there.as<std::int64_t>(), 20,
               twins.stream.handle())
        .value();
    there
        .run(twins.device_pool, TensorView::of(q.as<float>(), 20, kHeads, g.head_dim),
             MutableTensorView::of(out.as<float>(), 20, kHeads, g.head_dim),
             {.stream = twins.stream.handle(), .workspace = workspace.span()})
        .value();
  });
  Rng rng(3);
  std::vector<std::vector<std::int32_t>> blocks;
  std::vector<std::int64_t> lengths;
  std::vector<std::int32_t> free;
  for (std::int32_t b = 0; b < 64; ++b) free.push_back(b);
  for (int n = 0; n < 250; ++n) {
    if (blocks.size() < kBatch && rng.below(4) == 0) blocks.emplace_back(), lengths.push_back(0);
    if (!blocks.empty() && rng.below(40) == 0) {
      const auto gone = static_cast<std::ptrdiff_t>(rng.below(static_cast<std::int64_t>(blocks.size())));
      free.insert(free.begin(), blocks[static_cast<std::size_t>(gone)].begin(),
                  blocks[static_cast<std::size_t>(gone)].end());
      blocks.erase(blocks.begin() + gone);
      lengths.erase(lengths.begin() + gone);
    }
    EngineStep step;
    std::vector<std::int64_t> slots;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::int64_t tokens = std::min(rng.below(4), 9 * kPageTokens - lengths[i]);
      for (std::int64_t t = lengths[i]; t < lengths[i] + tokens; ++t) {
        if (t % kPageTokens == 0) blocks[i].push_back(free.back()), free.pop_back();
      }
      const auto mine = slots_of(blocks[i], lengths[i], lengths[i] + tokens);
      slots.insert(slots.end(), mine.begin(), mine.end());
      lengths[i] += tokens;
      step.add(blocks[i], static_cast<std::int32_t>(lengths[i]), static_cast<std::int32_t>(tokens));
    }
    slots.resize(20, -1);
    const std::vector<float> k = random_rows(20, g, rng.next()), v = random_rows(20, g, rng.next());
    const std::vector<float> queries = gaussian_vector(static_cast<std::size_t>(20 * q_row), rng.next());
    keys.upload(k.data(), k.size() * 4);
    values.upload(v.data(), v.size() * 4);
    q.upload(queries.data(), queries.size() * 4);
    slots_there.upload(slots.data(), slots.size() * 8);
    tables.upload(step);
    const std::vector<float> before(static_cast<std::size_t>(20 * q_row), 0.25f);
    out.upload(before.data(), before.size() * 4);
    graph.launch(twins.stream);
    twins.stream.wait();

    twins.host
        .write(twins.pool.view, TensorView::of(k.data(), 20, g.kv_heads, g.head_dim),
               TensorView::of(v.data(), 20, g.kv_heads, g.head_dim), slots.data(), 20)
        .value();
    here.set_tables(step.tables(9)).value();
    std::vector<float> expected = before;
    here.run(twins.pool.view, TensorView::of(queries.data(), 20, kHeads, g.head_dim),
             MutableTensorView::of(expected.data(), 20, kHeads, g.head_dim))
        .value();
    const std::vector<double> wide(expected.begin(), expected.end());
    ASSERT_TRUE(close(wide, out.download_as<float>(), 4 * tolerance::kCoded, {20, kHeads, g.head_dim})) << "step " << n;
    if (n % 50 == 49) {
      ASSERT_TRUE(twins.same_bytes()) << "step " << n;
    }
  }
  EXPECT_FALSE(there.take_errors(twins.stream.handle()).value());
}

// Attention reads the batch before the previous launch has ended. Where that launch is set_tables, each run must see
// the batch that was set last: outputs have the bits of runs for which the host waits.
TEST(PagesGpu, RunsDirectlyBehindSetTables) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int32_t kSteps = 8, kColumns = 9, kBlocks = 64, kHeads = 8, kTokens = 160;
  for (const int head_dim : {128, 256}) {
    const Geometry g{"tq4", "tq4", head_dim, 2};
    Twins twins(g, kBlocks);
    std::vector<std::int32_t> all;
    for (std::int32_t b = 0; b < kBlocks; ++b) all.push_back(b);
    const std::int64_t tokens = kBlocks * kPageTokens;
    twins.write(random_rows(tokens, g, 1), random_values(tokens, g, 2), slots_of(all, 0, tokens));
    for (const auto& [batch, check] : {std::pair(1, false), {20, false}, {20, true}, {70, false}}) {
      PagesPlanOptions o;
      o.attention.q_heads = kHeads;
      o.attention.kernel = "decode";
      o.max_batch = batch;
      o.max_blocks = kColumns;
      o.max_query_len = 3;
      o.max_tokens = kTokens;
      o.check_ids = check;
      PagesPlan plan = twins.device.plan(o).value();
      const std::int64_t q_row = std::int64_t{kHeads} * head_dim;
      const std::size_t elements = static_cast<std::size_t>(kTokens * q_row);
      const DeviceBuffer q = DeviceBuffer::of<float>(gaussian_vector(elements, 3));
      const DeviceBuffer workspace(plan.workspace_bytes());
      std::vector<DeviceBuffer> outs;
      std::vector<DeviceTables> tables;
      std::vector<StepTables> views;
      Rng rng(7);
      for (int s = 0; s < kSteps; ++s) {
        EngineStep step;
        const auto sequences = static_cast<int>(1 + rng.below(batch));
        for (int i = 0; i < sequences; ++i) {
          std::vector<std::int32_t> blocks;
          const std::int64_t length = 3 + rng.below(kColumns * kPageTokens - 2);
          for (std::int64_t p = 0; p * kPageTokens < length; ++p)
            blocks.push_back(static_cast<std::int32_t>(rng.below(kBlocks)));
          step.add(blocks, static_cast<std::int32_t>(length), static_cast<std::int32_t>(rng.below(3)));
        }
        tables.emplace_back(batch, kColumns);
        views.push_back(tables.back().upload(step));
        outs.emplace_back(elements * 4);
      }
      const auto clear = [&] {
        const std::vector<float> before(elements, 0.25f);
        for (const DeviceBuffer& out : outs) out.upload(before.data(), before.size() * 4);
      };
      const auto run = [&](std::size_t s) {
        plan.run(twins.device_pool, TensorView::of(q.as<float>(), kTokens, kHeads, head_dim),
                 MutableTensorView::of(outs[s].as<float>(), kTokens, kHeads, head_dim),
                 {.stream = twins.stream.handle(), .workspace = workspace.span()})
            .value();
      };
      clear();
      std::vector<std::vector<float>> expected;
      for (std::size_t s = 0; s < kSteps; ++s) {
        plan.set_tables(views[s], twins.stream.handle()).value();
        twins.stream.wait();
        run(s);
        twins.stream.wait();
        expected.push_back(outs[s].download_as<float>());
      }
      const TestGraph graph(twins.stream, [&] {
        for (std::size_t s = 0; s < kSteps; ++s) {
          plan.set_tables(views[s], twins.stream.handle()).value();
          run(s);
          if (s % 2 == 0) run(s);  // the next layer
        }
      });
      for (int n = 0; n < 50; ++n) {
        clear();
        for (int replay = 0; replay < 5; ++replay) graph.launch(twins.stream);
        twins.stream.wait();
        for (std::size_t s = 0; s < kSteps; ++s)
          ASSERT_EQ(expected[s], outs[s].download_as<float>()) << "replays " << n << ", step " << s;
      }
      EXPECT_FALSE(plan.take_errors(twins.stream.handle()).value());
    }
  }
}

// --- what does not fit -----------------------------------------------------------------------------------------------

TEST(PagesGpu, WhatDoesNotFitIsTold) {
  SKIP_WITHOUT_DEVICE();
  Engine engine(spec({"tq4", "tq4"}, 64, 2, {{130, 1}, {100, 2}, {64, 1}}));
  AttentionOptions options;
  options.kernel = "decode";
  const Attended good = engine.attend(engine.limits(options));
  PagesPlan plan = engine.twins.device.plan(engine.limits(options, 0, true)).value();
  const Stream stream = engine.twins.stream.handle();
  const DeviceTables tables(3, engine.columns);
  const std::vector<float> q = engine.world.queries();
  const DeviceBuffer q_there = DeviceBuffer::of<float>(q), out(q.size() * 4), workspace(plan.workspace_bytes());
  const auto run = [&](const EngineStep& step) {
    const std::vector<float> seven(q.size(), 7.0f);
    out.upload(seven.data(), seven.size() * 4);
    plan.set_tables(tables.upload(step), stream).value();
    for (int layer = 0; layer < 2; ++layer) {
      plan.run(engine.twins.device_pool, TensorView::of(q_there.as<float>(), 4, 4, 64),
               MutableTensorView::of(out.as<float>(), 4, 4, 64), {.stream = stream, .workspace = workspace.span()})
          .value();
    }
    engine.twins.stream.wait();
    return out.download_as<float>();
  };
  // Rows 1 and 2 are those of sequence 1.
  const auto judge = [&](const std::vector<float>& got, float marked) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::size_t in_row = i / 256;
      if (in_row != 1 && in_row != 2) {
        if (std::abs(got[i] - good.out[i]) > 1e-3f) return testing::AssertionFailure() << "element " << i;
      } else if (std::isnan(marked) ? !std::isnan(got[i]) : got[i] != marked) {
        return testing::AssertionFailure() << "element " << i << " is " << got[i];
      }
    }
    return testing::AssertionSuccess();
  };
  const auto told = [&] { return plan.take_errors(stream).value(); };
  for (const std::int32_t bad : {-1, 127, 0x7FFFFFFF, std::numeric_limits<std::int32_t>::min()}) {
    EngineStep step = engine.step;
    step.blocks[1][1] = bad;
    EXPECT_TRUE(judge(run(step), std::numeric_limits<float>::quiet_NaN())) << bad;
    EXPECT_TRUE(told()) << bad;
    EXPECT_FALSE(told());
  }
  for (const std::int32_t length : {0, 1, -5, 1000, 0x7FFFFFFF}) {
    EngineStep step = engine.step;
    step.seq_lens[1] = length;
    EXPECT_TRUE(judge(run(step), 7.0f)) << length;
    EXPECT_TRUE(told()) << length;
  }
  EXPECT_FALSE((run(engine.step), told()));
}

TEST(PagesGpu, ValuesThatAreNotFiniteAndSlotsOutside) {
  SKIP_WITHOUT_DEVICE();
  for (const Geometry& g : {Geometry{"tq4", "tq4", 64, 1}, {"f16", "f16", 64, 1}}) {
    Twins twins(g, 3);
    const std::vector<float> x = random_rows(100, g, 1);
    twins.write(x, x, slots_of({1, 2}, 0, 100));
    const auto write = [&](const std::vector<float>& row, std::int64_t slot) {
      const DeviceBuffer there = DeviceBuffer::of<float>(row);
      const DeviceBuffer slots = DeviceBuffer::of<std::int64_t>(std::vector<std::int64_t>{slot});
      const TensorView view = TensorView::of(there.as<float>(), 1, 1, 64);
      twins.device.write(twins.device_pool, view, view, slots.as<std::int64_t>(), 1, twins.stream.handle()).value();
      return twins.device.take_non_finite(twins.stream.handle()).value();
    };
    std::vector<float> row(64, 1.0f);
    for (const std::int64_t outside : {std::int64_t{192}, std::int64_t{1} << 40}) EXPECT_TRUE(write(row, outside));
    EXPECT_FALSE(write(row, -1));
    EXPECT_TRUE(twins.same_bytes());
    row[7] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(write(row, 2 * 64 + 36));  // token 100
    // Rows that see it are NaN, others are not.
    PagesPlanOptions o;
    o.attention.q_heads = 1;
    o.attention.kernel = "decode";
    o.max_batch = 2;
    o.max_blocks = 2;
    PagesPlan plan = twins.device.plan(o).value();
    EngineStep step;
    step.add({1, 2}, 100, 1);
    step.add({1, 2}, 101, 1);
    const DeviceTables tables(2, 2);
    plan.set_tables(tables.upload(step), twins.stream.handle()).value();
    const DeviceBuffer q = DeviceBuffer::of<float>(std::vector<float>(128, 0.1f)), out(128 * 4),
                       workspace(plan.workspace_bytes());
    plan.run(twins.device_pool, TensorView::of(q.as<float>(), 2, 1, 64),
             MutableTensorView::of(out.as<float>(), 2, 1, 64),
             {.stream = twins.stream.handle(), .workspace = workspace.span()})
        .value();
    const std::vector<float> got = out.download_as<float>();
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_TRUE(std::isfinite(got[i])) << g.k;
      EXPECT_TRUE(std::isnan(got[64 + i])) << g.k;
    }
  }
}

TEST(PagesGpu, Refusals) {
  SKIP_WITHOUT_DEVICE();
  EXPECT_EQ(Pages::create(config({"f32", "tq4", 64, 1}, "cuda")).code(), Code::unsupported);
  EXPECT_EQ(Pages::create(config({"tq4", "tq4", 520, 1}, "cuda")).code(), Code::unsupported);
  Twins twins({"tq4", "tq4", 64, 2}, 2);
  BlockPool apart = twins.device_pool;
  apart.head_stride += 64;
  apart.block_stride += 192;
  const DeviceBuffer x(4096);
  const TensorView row = TensorView::of(x.as<float>(), 1, 2, 64);
  const Status refused = twins.device.write(apart, row, row, x.as<std::int64_t>(), 1);
  EXPECT_EQ(refused.code(), Code::unsupported);
  EXPECT_NE(refused.message().find("head_stride"), std::string::npos) << refused.message();
  PagesPlanOptions o;
  o.attention.q_heads = 4;
  o.max_batch = 1;
  o.max_blocks = 1;
  PagesPlan plan = twins.device.plan(o).value();
  EXPECT_EQ(plan.run(twins.device_pool, TensorView::of(x.as<float>(), 1, 4, 64),
                     MutableTensorView::of(x.as<float>(), 1, 4, 64))
                .code(),
            Code::invalid_argument);  // no workspace
  o.attention.threads = 2;
  EXPECT_EQ(twins.device.plan(o).code(), Code::invalid_argument);
}

}  // namespace
}  // namespace kvant::test
