// The exact tail beside an engine's blocks, and centres in them, on a real device, against those in host memory, which
// the model of tests/pages_model_test.cpp has judged: ten thousand steps of an engine by one graph of begin_step,
// set_tables, write and run.
#include <gtest/gtest.h>

#include <limits>

#include "core/fmt.hpp"
#include "gpu/gpu_world.hpp"
#include "gpu/pages_twins.hpp"
#include "support/engine_session.hpp"
#include "support/tolerances.hpp"

namespace kvant::test {
namespace {

struct Kind {
  Geometry geometry;
  const char* kernel;
  std::int64_t slots;  // that a write has: up to 2048 take the kernel for few
  int most = 0;        // tokens of a sequence that steps say they have: above 64, up to 256 slots do
};

class PagesTailEngine : public testing::TestWithParam<Kind> {};

TEST_P(PagesTailEngine, TenThousandSteps) {
  SKIP_WITHOUT_DEVICE();
  const Geometry& g = GetParam().geometry;
  constexpr int kGroup = 2;
  constexpr std::int64_t kRows = EngineSession::kMostSequences * EngineSession::kMostQueries;
  const std::int64_t slot_count = GetParam().slots;
  const int heads = g.kv_heads * kGroup;
  Twins twins(g, EngineSession::kBlocks);
  twins.pool.view.layer = twins.device_pool.layer = g.layers - 1;
  PagesPlanOptions o;
  o.attention.products = 16;
  o.attention.q_heads = heads;
  o.max_batch = EngineSession::kMostSequences;
  o.max_blocks = EngineSession::kMostPages;
  o.max_query_len = EngineSession::kMostQueries;
  PagesPlan here = twins.host.plan(o).value();
  o.attention.kernel = GetParam().kernel;
  o.check_ids = true;
  auto possible = twins.device.plan(o);
  if (!possible.ok()) GTEST_SKIP() << possible.message();
  PagesPlan there = std::move(*possible);
  const DeviceTables tables(o.max_batch, o.max_blocks);
  tables.upload({});
  const std::int64_t row = std::int64_t{g.kv_heads} * g.head_dim, q_row = row * kGroup;
  const auto floats = [](std::int64_t n) { return DeviceBuffer(static_cast<std::size_t>(n) * 4); };
  const DeviceBuffer keys = floats(slot_count * row), values = floats(slot_count * row), q = floats(kRows * q_row),
                     out = floats(kRows * q_row), slots_there(static_cast<std::size_t>(slot_count) * 8),
                     workspace(there.workspace_bytes());
  const Stream stream = twins.stream.handle();
  const TestGraph graph(twins.stream, [&] {
    StepTables of_step = tables.view();
    of_step.max_query_len = GetParam().most;
    twins.device.begin_step(of_step, stream).value();
    there.set_tables(of_step, stream).value();
    twins.device
        .write(twins.device_pool, TensorView::of(keys.as<float>(), slot_count, g.kv_heads, g.head_dim),
               TensorView::of(values.as<float>(), slot_count, g.kv_heads, g.head_dim), slots_there.as<std::int64_t>(),
               slot_count, stream)
        .value();
    there
        .run(twins.device_pool, TensorView::of(q.as<float>(), kRows, heads, g.head_dim),
             MutableTensorView::of(out.as<float>(), kRows, heads, g.head_dim),
             {.stream = stream, .workspace = workspace.span()})
        .value();
  });
  const std::vector<float> k = gaussian_vector(static_cast<std::size_t>(EngineSession::kContents * row), 1),
                           v = gaussian_vector(static_cast<std::size_t>(EngineSession::kContents * row), 2),
                           noise = gaussian_vector(static_cast<std::size_t>(2 * kRows * q_row), 3);
  EngineSession session(7);
  Rng rng(9);
  std::int64_t misses = 0;
  const std::vector<float> empty(static_cast<std::size_t>(row), std::numeric_limits<float>::quiet_NaN());
  const bool is_prefill = std::string(GetParam().kernel) == "prefill";
  for (int n = 0; n < 10000; ++n) {
    const EngineWork& work = session.next();
    const auto copies = static_cast<std::int64_t>(work.copy_from.size());
    if (copies > 0) {
      const DeviceBuffer from = DeviceBuffer::of<std::int32_t>(work.copy_from),
                         to = DeviceBuffer::of<std::int32_t>(work.copy_to);
      twins.host.copy(twins.pool.view, work.copy_from.data(), work.copy_to.data(), copies).value();
      twins.device.copy(twins.device_pool, from.as<std::int32_t>(), to.as<std::int32_t>(), copies, stream).value();
      twins.stream.wait();
    }
    std::vector<float> k_rows, v_rows;
    for (const std::int64_t content : work.contents) {
      const auto of = [&](const std::vector<float>& x) {
        return content < 0 ? empty.data() : x.data() + content * row;
      };
      k_rows.insert(k_rows.end(), of(k), of(k) + row);
      v_rows.insert(v_rows.end(), of(v), of(v) + row);
    }
    std::vector<std::int64_t> slots = work.slots;
    const auto written = static_cast<std::int64_t>(slots.size());
    ASSERT_LE(written, slot_count);
    slots.resize(static_cast<std::size_t>(slot_count), -1);
    EngineStep step = work.step;
    const std::int64_t rows = step.query_start_loc.back();
    const float* queries = noise.data() + rng.below(kRows) * q_row;
    keys.upload(k_rows.data(), k_rows.size() * 4);
    values.upload(v_rows.data(), v_rows.size() * 4);
    q.upload(queries, static_cast<std::size_t>(rows * q_row) * 4);
    slots_there.upload(slots.data(), slots.size() * 8);
    tables.upload(step);
    graph.launch(twins.stream);
    twins.stream.wait();

    const StepTables host_tables = step.tables(EngineSession::kMostPages);
    twins.host.begin_step(host_tables).value();
    here.set_tables(host_tables).value();
    twins.host
        .write(twins.pool.view, TensorView::of(k_rows.data(), written, g.kv_heads, g.head_dim),
               TensorView::of(v_rows.data(), written, g.kv_heads, g.head_dim), slots.data(), written)
        .value();
    std::vector<float> expected(static_cast<std::size_t>(rows * q_row));
    here.run(twins.pool.view, TensorView::of(queries, rows, heads, g.head_dim),
             MutableTensorView::of(expected.data(), rows, heads, g.head_dim))
        .value();
    std::vector<float> got = out.download_as<float>();
    got.resize(expected.size());
    const std::vector<double> wide(expected.begin(), expected.end());
    ASSERT_TRUE(close(wide, got, is_prefill ? tolerance::kCudaPrefill : 4 * tolerance::kCoded,
                      {static_cast<int>(rows), heads, g.head_dim}))
        << "step " << n;
    if (n % 100 == 99) {
      ASSERT_TRUE(twins.same_bytes()) << "step " << n;
      const std::int64_t missed = twins.host.take_misses().value();
      misses += missed;
      ASSERT_EQ(twins.device.take_misses(stream).value(), missed) << "step " << n;
    }
  }
  EXPECT_EQ(misses > 0, g.tail_pages > 0);
  EXPECT_FALSE(there.take_errors(stream).value());
  EXPECT_FALSE(twins.device.take_non_finite(stream).value());
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, PagesTailEngine,
    testing::Values(
        Kind{{"tq4", "tq4", 64, 1, 1, 6, 2, KeyCentre::page}, "decode", 900},
        Kind{{"tq6", "tq4", 128, 2, 1, 11, 1}, "decode", 900},
        Kind{{"tq4", "tq4", 128, 9, 2, 6, 3, KeyCentre::page}, "decode", 2100},
        Kind{{"tq6", "tq4", 64, 2, 3, 6, 1, KeyCentre::page}, "prefill", 900},
        Kind{{"tq4", "tq4", 64, 1, 1, 6, 2, KeyCentre::page, 1}, "decode", 900},
        Kind{{"tq6", "tq4", 128, 2, 1, 8, 1, KeyCentre::page, 1, 7}, "decode", 900},
        Kind{{"tq4", "tq4", 64, 2, 2, 6, 1, KeyCentre::page, 3, 9}, "prefill", 900},
        Kind{{"tq4", "tq4", 128, 5, 1, 8, 1, KeyCentre::page, 1, 9}, "decode", 900, EngineSession::kMostQueries},
        Kind{{"tq6", "tq4", 128, 2, 0, 0, 1, KeyCentre::page}, "decode", 900},
        Kind{{"tq4", "tq4", 64, 2, 0, 0, 1, KeyCentre::page}, "decode", 900, EngineSession::kMostQueries},
        Kind{{"fp8", "fp8", 128, 3, 0, 0, 1, KeyCentre::page}, "decode", 2100}),
    [](const auto& i) {
      const Geometry& g = i.param.geometry;
      return fmt::format("{}_{}_d{}{}_first_{}_tail_{}_of_{}_copies_{}_{}_{}_{}", g.k, g.v, g.head_dim,
                         g.k_centre == KeyCentre::page ? "_centred" : "", g.sink_pages, g.tail_pages, g.tail_sequences,
                         g.exact_copies, i.param.kernel, i.param.slots, i.param.most);
    });

class PagesTailGpu : public testing::TestWithParam<int> {};

// Many sequences at once, some without a query: copies for all of them, some of which begin in one step. And no tail.
TEST_P(PagesTailGpu, ManySequences) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int32_t kBatch = 700;
  const Geometry g{"tq4", "tq4", 64, 1, GetParam(), kBatch, 1, KeyCentre::page};
  Twins twins(g, 3 * kBatch + 5);
  PagesPlanOptions o;
  o.attention.products = 16;
  o.attention.q_heads = 2;
  o.max_batch = kBatch;
  o.max_blocks = 3;
  o.max_query_len = 70;
  o.max_tokens = 70 * kBatch;
  PagesPlan here = twins.host.plan(o).value();
  o.attention.kernel = "decode";
  PagesPlan there = twins.device.plan(o).value();
  const DeviceTables tables(kBatch, 3);
  const DeviceBuffer workspace(there.workspace_bytes());
  Rng rng(5);
  std::vector<std::int32_t> lengths(kBatch, 0);
  for (int n = 0; n < 12; ++n) {
    EngineStep step;
    std::vector<std::int64_t> slots;
    for (std::int32_t i = 0; i < kBatch; ++i) {
      if (lengths[static_cast<std::size_t>(i)] > 120)
        lengths[static_cast<std::size_t>(i)] = 0;  // another one, same ids
      const auto tokens = static_cast<std::int32_t>(n % 3 == 0 ? 1 + rng.below(70) : rng.below(3));
      const std::int32_t before = lengths[static_cast<std::size_t>(i)], after = before + tokens;
      lengths[static_cast<std::size_t>(i)] = after;
      const std::vector<std::int32_t> in_order{3 * i, 3 * i + 1, 3 * i + 2};
      const auto mine = slots_of(in_order, before, after);
      slots.insert(slots.end(), mine.begin(), mine.end());
      step.add(in_order, after, tokens);
    }
    const auto rows = static_cast<std::int64_t>(slots.size());
    if (rows == 0) continue;
    const StepTables there_tables = tables.upload(step), here_tables = step.tables(3);
    twins.host.begin_step(here_tables).value();
    twins.device.begin_step(there_tables, twins.stream.handle()).value();
    here.set_tables(here_tables).value();
    there.set_tables(there_tables, twins.stream.handle()).value();
    const std::vector<float> x = gaussian_vector(static_cast<std::size_t>(rows * 64), rng.next());
    twins.write(x, x, slots, Dtype::bf16);
    const std::vector<float> q = gaussian_vector(static_cast<std::size_t>(rows * 2 * 64), rng.next());
    std::vector<float> expected(q.size());
    here.run(twins.pool.view, TensorView::of(q.data(), rows, 2, 64),
             MutableTensorView::of(expected.data(), rows, 2, 64))
        .value();
    const DeviceBuffer q_there = DeviceBuffer::of<float>(q), out(q.size() * 4);
    there
        .run(twins.device_pool, TensorView::of(q_there.as<float>(), rows, 2, 64),
             MutableTensorView::of(out.as<float>(), rows, 2, 64),
             {.stream = twins.stream.handle(), .workspace = workspace.span()})
        .value();
    twins.stream.wait();
    const std::vector<double> wide(expected.begin(), expected.end());
    ASSERT_TRUE(close(wide, out.download_as<float>(), 4 * tolerance::kCoded, {static_cast<int>(rows), 2, 64}))
        << "step " << n;
    ASSERT_EQ(twins.device.take_misses(twins.stream.handle()).value(), twins.host.take_misses().value());
    ASSERT_TRUE(twins.same_bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(Tails, PagesTailGpu, testing::Values(0, 1));

TEST(PagesTailOnADevice, ExactIsOfSixteenBits) {
  SKIP_WITHOUT_DEVICE();
  PagesConfig c = config({"tq4", "tq4", 64, 1, 1, 1, 1}, "cuda");
  c.exact = Dtype::f32;
  EXPECT_EQ(Pages::create(c).code(), Code::unsupported);
  c.exact = Dtype::f16;
  EXPECT_EQ(Pages::create(c).value().tail_bytes(), 4 * 2 * 64 * 64 * 2);
}

}  // namespace
}  // namespace kvant::test
