// Refusals of kvant::Pages on the host, each number at its limit: a number too far would be memory of others. And those
// that come before a device's backend sees anything.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/pages/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"

namespace kvant::test {
namespace {

constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();

TEST(PagesRefusals, Creation) {
  const auto made = [](auto change) {
    PagesConfig c = geometry("tq4", "tq4", 64);
    change(c);
    return Pages::create(c).status();
  };
  EXPECT_TRUE(refuses(made([](auto& c) { c.kv_heads = 0; }), Code::invalid_argument, {"kv_heads = 0"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.head_dim = 577; }), Code::invalid_argument, {"head_dim = 577"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.k = "tq7"; }), Code::invalid_argument, {"k:", "tq7"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.v = "lut4"; }), Code::unsupported, {"v = lut4"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.isa = "mmx"; }), Code::invalid_argument, {"mmx"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.device = "tpu"; }), Code::invalid_argument, {"tpu"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.threads = -1; }), Code::invalid_argument, {"threads = -1"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.k = "f16", c.k_centre = KeyCentre::page; }), Code::invalid_argument,
                      {"k_centre = page with k = f16", "k_centre = none"}));
  EXPECT_TRUE(
      refuses(made([](auto& c) { c.k_centre = static_cast<KeyCentre>(3); }), Code::invalid_argument, {"k_centre = 3"}));
}

TEST(PagesRefusals, PoolsAndWrites) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64)).value();
  EnginePool pool(pages, {.blocks = 2});
  std::vector<float> x(2 * 64, 1.0f);
  const TensorView row = TensorView::of(x.data(), 1, 2, 64);
  std::int64_t slot = 0;
  const auto written = [&](auto change) {
    BlockPool p = pool.view;
    change(p);
    return pages.write(p, row, row, &slot, 1);
  };
  EXPECT_TRUE(refuses(written([](auto&) {}), Code::invalid_argument, {"begin_step", "k_centre = none"}));
  EngineStep step;
  step.add({0}, 1, 1);
  EXPECT_TRUE(refuses(pages.begin_step({.batch = 1}), Code::invalid_argument, {"seq_lens is null"}));
  pages.begin_step(step.tables(1)).value();
  EXPECT_TRUE(refuses(written([](auto& p) { p.data = nullptr; }), Code::invalid_argument, {"pool.data"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.data += 32; }), Code::invalid_argument, {"64 bytes"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.blocks = 0; }), Code::invalid_argument, {"pool.blocks is 0"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.head_stride += 8; }), Code::invalid_argument, {"head_stride", "64"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.head_stride -= 64; }), Code::invalid_argument, {"overlap"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.block_stride = p.head_stride; }), Code::invalid_argument, {"overlap"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.block_stride = std::int64_t{1} << 62, p.blocks = 64; }),
                      Code::invalid_argument, {"63 bits"}));
  for (const std::int64_t bad : {std::int64_t{128}, std::int64_t{-2}, std::numeric_limits<std::int64_t>::max()}) {
    slot = bad;
    EXPECT_TRUE(refuses(written([](auto&) {}), Code::invalid_argument, {"slots[0]", std::to_string(bad)}));
  }
  slot = 5;
  x[70] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(refuses(written([](auto&) {}), Code::non_finite, {"row 0", "slot 5", "kv head 1"}));
  EXPECT_EQ(static_cast<int>(pool.block(0, 0)[0]), 0xFF);
  EXPECT_TRUE(refuses(pages.write(pool.view, row, row, &slot, 2), Code::invalid_argument, {"keys.shape", "2 or more"}));
  EXPECT_TRUE(refuses(pages.write(pool.view, row, row, nullptr, 1), Code::invalid_argument, {"slots is null"}));
  TensorView three = TensorView::of(x.data(), 1, 1, 64);
  EXPECT_TRUE(refuses(pages.write(pool.view, row, three, &slot, 1), Code::invalid_argument, {"values.shape"}));

  const TensorView short_rows = TensorView::of(x.data(), 1, 2, 64);
  const std::int64_t two[] = {0, 1};
  std::vector<float> y(2 * 2 * 64, 1.0f);
  EXPECT_TRUE(refuses(pages.write(pool.view, TensorView::of(y.data(), 2, 2, 64), short_rows, two, 2),
                      Code::invalid_argument, {"values.shape", "2 or more"}));
  pool.view.layer = -1;
  EXPECT_TRUE(refuses(pages.write(pool.view, row, row, &slot, 1), Code::invalid_argument, {"pool.layer is -1"}));
}

TEST(PagesRefusals, BlocksOutsideThePool) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64)).value();
  EnginePool pool(pages, {.blocks = 3, .garbage = 0});
  std::vector<float> out(2 * 64 * 2 * 64, 7.0f);
  const MutableTensorView rows = MutableTensorView::of(out.data(), 128, 2, 64);
  const auto decoded = [&](std::vector<std::int32_t> ids) {
    return pages.decode(pool.view, ids.data(), std::ssize(ids), rows, rows);
  };
  const auto copied = [&](std::vector<std::int32_t> from, std::vector<std::int32_t> to) {
    return pages.copy(pool.view, from.data(), to.data(), std::ssize(from));
  };
  for (const std::int32_t bad : {-1, 3, kLowest, kHighest}) {
    const std::string is = " is " + std::to_string(bad) + ": the pool has blocks 0 to 2";
    EXPECT_TRUE(refuses(decoded({bad}), Code::invalid_argument, {"ids[0]" + is}));
    EXPECT_TRUE(refuses(decoded({0, bad}), Code::invalid_argument, {"ids[1]" + is}));
    EXPECT_TRUE(refuses(copied({bad}, {0}), Code::invalid_argument, {"from[0]" + is}));
    EXPECT_TRUE(refuses(copied({0, bad}, {1, 2}), Code::invalid_argument, {"from[1]" + is}));
    EXPECT_TRUE(refuses(copied({0}, {bad}), Code::invalid_argument, {"to[0]" + is}));
    EXPECT_TRUE(refuses(copied({0, 1}, {2, bad}), Code::invalid_argument, {"to[1]" + is}));
  }
  EXPECT_TRUE(refuses(copied({0}, {0}), Code::invalid_argument, {"block 0 is in from and in to"}));
  EXPECT_TRUE(refuses(copied({0, 0}, {1, 1}), Code::invalid_argument, {"block 1 twice"}));
  const std::int32_t ids[] = {0, 2};
  const MutableTensorView short_rows = MutableTensorView::of(out.data(), 127, 2, 64);
  for (const bool values : {false, true}) {
    EXPECT_TRUE(
        refuses(pages.decode(pool.view, ids, 2, values ? rows : short_rows, values ? short_rows : MutableTensorView{}),
                Code::invalid_argument, {values ? "values.shape" : "keys.shape", "128 or more"}));
  }
  for (const std::int64_t count : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    const std::string is = "count is " + std::to_string(count);
    EXPECT_TRUE(refuses(pages.decode(pool.view, ids, count, rows, {}), Code::invalid_argument, {is}));
    EXPECT_TRUE(refuses(pages.copy(pool.view, ids, ids, count), Code::invalid_argument, {is}));
  }
  EXPECT_TRUE(refuses(pages.decode(pool.view, nullptr, 1, rows, {}), Code::invalid_argument, {"ids is null"}));
  EXPECT_TRUE(refuses(pages.copy(pool.view, nullptr, ids, 1), Code::invalid_argument, {"from is null"}));
  EXPECT_TRUE(refuses(pages.copy(pool.view, ids, nullptr, 1), Code::invalid_argument, {"to is null"}));
  EXPECT_EQ(out, std::vector<float>(out.size(), 7.0f)) << "nothing was read";
  const std::byte* first = pool.block(0, 0);
  EXPECT_EQ(std::count(first, first + 6 * pages.block_bytes(), std::byte{0}), 6 * pages.block_bytes());

  // The last block is taken.
  std::memset(pool.block(0, 0), 0x11, static_cast<std::size_t>(2 * pages.block_bytes()));
  ASSERT_TRUE(copied({0}, {2}).ok());
  EXPECT_EQ(0, std::memcmp(pool.block(0, 0), pool.block(2, 0), static_cast<std::size_t>(2 * pages.block_bytes())));
  ASSERT_TRUE(copied({2}, {1}).ok());
  ASSERT_TRUE(decoded({1, 2}).ok());
}

TEST(PagesRefusals, PlansTablesAndRuns) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64)).value();
  EnginePool pool(pages, {.blocks = 7});
  EngineStep good_step;
  good_step.add({5, 2}, 100, 100);
  good_step.add({0, 6}, 70, 70);
  std::vector<std::int64_t> slots = slots_of({5, 2}, 0, 100);
  for (const std::int64_t slot : slots_of({0, 6}, 0, 70)) slots.push_back(slot);
  const std::vector<float> x = gaussian_vector(170 * 2 * 64, 1);
  const TensorView tokens = TensorView::of(x.data(), 170, 2, 64);
  pages.begin_step(good_step.tables(2)).value();
  pages.write(pool.view, tokens, tokens, slots.data(), 170).value();
  good_step.query_start_loc = {0, 2, 3};
  PagesPlanOptions good;
  good.attention.q_heads = 4;
  good.max_batch = 2;
  good.max_blocks = 2;
  good.max_query_len = 2;
  const auto planned = [&](auto change) {
    PagesPlanOptions o = good;
    change(o);
    return pages.plan(o).status();
  };
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.q_heads = 3; }), Code::invalid_argument, {"q_heads is 3"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_batch = 0; }), Code::invalid_argument, {"max_batch is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_blocks = 0; }), Code::invalid_argument, {"max_blocks is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_query_len = 0; }), Code::invalid_argument, {"max_query_len is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_tokens = -1; }), Code::invalid_argument, {"max_tokens is -1"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.q_lens = {1, 1}; }), Code::invalid_argument, {"q_lens"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.kernel = "decode"; }), Code::invalid_argument, {"kernel"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.backend = "cpu"; }), Code::invalid_argument, {"backend"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.mask.tensor.data = &o; }), Code::unsupported, {"mask.tensor"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.isa = "mmx"; }), Code::invalid_argument, {"mmx"}));

  PagesPlan plan = pages.plan(good).value();
  const std::vector<float> q = gaussian_vector(3 * 4 * 64, 2);
  std::vector<float> out(q.size());
  const TensorView q_view = TensorView::of(q.data(), 3, 4, 64);
  const MutableTensorView out_view = MutableTensorView::of(out.data(), 3, 4, 64);
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out_view), Code::invalid_argument, {"set_tables"}));
  ASSERT_TRUE(plan.set_tables(good_step.tables(2)).ok());
  ASSERT_TRUE(plan.run(pool.view, q_view, out_view).ok());
  const auto told = [&](auto change, std::int64_t columns = 2) {
    EngineStep step = good_step;
    change(step);
    return plan.set_tables(step.tables(columns));
  };
  const auto long_one = [](auto& s) { s.seq_lens[1] = 129; };
  EXPECT_TRUE(refuses(told(long_one, 3), Code::invalid_argument, {"seq_lens[1] is 129", "3 blocks", "max_blocks = 2"}));
  EXPECT_TRUE(
      refuses(told([](auto& s) { s.seq_lens[0] = 1; }), Code::invalid_argument, {"seq_lens[0] is 1", "2 queries"}));
  EXPECT_TRUE(refuses(told([](auto& s) {
                        s.seq_lens[1] = -1;
                        s.query_start_loc[2] = 2;
                      }),
                      Code::invalid_argument, {"seq_lens[1] is -1"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.query_start_loc[1] = 3; }), Code::invalid_argument, {"3 queries"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.query_start_loc[2] = 1; }), Code::invalid_argument, {"must not fall"}));
  EXPECT_TRUE(
      refuses(told([](auto& s) { s.query_start_loc[0] = -1; }), Code::invalid_argument, {"query_start_loc[0]"}));
  EXPECT_TRUE(refuses(told([](auto& s) {
                        s.query_start_loc = {3, 5, 5};
                      }),
                      Code::invalid_argument, {"max_tokens = 4"}));
  for (const std::int32_t bad : {-1, kLowest}) {
    EXPECT_TRUE(refuses(told([&](auto& s) { s.blocks[1][1] = bad; }), Code::invalid_argument,
                        {"block_table[1][1] is " + std::to_string(bad)}));
  }
  EXPECT_TRUE(refuses(told([](auto& s) { s.add({0}, 5, 1); }), Code::invalid_argument, {"batch is 3"}));
  // The tables that were set before still count.
  std::vector<float> again(out.size());
  ASSERT_TRUE(plan.run(pool.view, q_view, MutableTensorView::of(again.data(), 3, 4, 64)).ok());
  EXPECT_TRUE(same_bits(out, again));

  for (const std::int32_t bad : {7, kHighest}) {
    ASSERT_TRUE(told([&](auto& s) { s.blocks[1][1] = bad; }).ok());
    EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out_view), Code::invalid_argument,
                        {"block_table[1][1] is " + std::to_string(bad) + ": the pool has blocks 0 to 6"}));
  }
  ASSERT_TRUE(told([](auto&) {}).ok());
  const TensorView short_q = TensorView::of(q.data(), 2, 4, 64);
  EXPECT_TRUE(refuses(plan.run(pool.view, short_q, MutableTensorView::of(out.data(), 2, 4, 64)), Code::invalid_argument,
                      {"q has 2 rows", "3"}));
  EXPECT_TRUE(refuses(plan.run(pool.view, short_q, out_view), Code::invalid_argument, {"out.shape[0] is 3"}));
  std::vector<float> five(5 * 4 * 64);
  EXPECT_TRUE(
      refuses(plan.run(pool.view, TensorView::of(five.data(), 5, 4, 64), MutableTensorView::of(five.data(), 5, 4, 64)),
              Code::invalid_argument, {"q has 5 rows", "max_tokens = 4"}));
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out_view, {}, q_view, q_view), Code::invalid_argument,
                      {"keys and values", "fresh_keys"}));
  std::vector<std::byte> workspace(64);
  RunOptions with;
  with.workspace = workspace;
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out_view, with), Code::invalid_argument, {"workspace"}));
  PagesPlanOptions wide = good;
  wide.max_blocks = 3;
  wide.attention.fresh_keys = true;
  PagesPlan other = pages.plan(wide).value();
  EngineStep longer = good_step;
  long_one(longer);
  EXPECT_TRUE(refuses(other.set_tables(longer.tables(2)), Code::invalid_argument,
                      {"seq_lens[1] is 129", "block_table has 2 columns"}));
  ASSERT_TRUE(other.set_tables(good_step.tables(2)).ok());
  const TensorView fresh = TensorView::of(x.data(), 3, 2, 64), short_fresh = TensorView::of(x.data(), 2, 2, 64);
  EXPECT_TRUE(refuses(other.run(pool.view, q_view, out_view, {}, short_fresh, fresh), Code::invalid_argument,
                      {"keys.shape", "3 or more"}));
  EXPECT_TRUE(refuses(other.run(pool.view, q_view, out_view, {}, fresh, short_fresh), Code::invalid_argument,
                      {"values.shape", "3 or more"}));
  EXPECT_TRUE(other.run(pool.view, q_view, out_view, {}, fresh, fresh).ok());
  EXPECT_FALSE(plan.take_errors().value());
  EXPECT_FALSE(pages.take_non_finite().value());
}

// The first checks of begin_step and set_tables, which are the same.
TEST(PagesRefusals, TablesOfAStep) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64)).value();
  PagesPlanOptions o;
  o.attention.q_heads = o.max_blocks = 2;
  o.max_batch = 3;
  PagesPlan plan = pages.plan(o).value();
  EngineStep step;
  for (std::int32_t i = 0; i < 3; ++i) step.add({i, 3 + i}, 65, 1);
  const auto told = [&](auto change, const std::vector<std::string>& words) {
    StepTables t = step.tables(2);
    change(t);
    EXPECT_TRUE(refuses(plan.set_tables(t), Code::invalid_argument, words));
    EXPECT_TRUE(refuses(pages.begin_step(t), Code::invalid_argument, words));
  };
  told([](auto& t) { t.batch = -1; }, {"batch is -1"});
  told([](auto& t) { t.seq_lens = nullptr; }, {"seq_lens is null"});
  told([](auto& t) { t.query_start_loc = nullptr; }, {"query_start_loc is null"});
  told([](auto& t) { t.block_table = nullptr; }, {"block_table is null"});
  told([](auto& t) { t.columns = -1; }, {"block_table has -1 columns: must be 0 to"});
  told([](auto& t) { t.columns = std::int64_t{1} << 31; }, {"block_table has 2147483648 columns: must be 0 to"});
  told([](auto& t) { t.row_stride = 1; }, {"1 elements apart and have 2 columns"});
  told([](auto& t) { t.row_stride = std::int64_t{1} << 60; }, {"beyond any memory"});
  told([](auto& t) { t.columns = 1; }, {"seq_lens[0] is 65"});
  told([](auto& t) { t.columns = 0; }, {"seq_lens[0] is 65"});
  step.seq_lens[2] = 129;
  told([](auto&) {}, {"seq_lens[2] is 129"});
  step.seq_lens[2] = 0;
  told([](auto&) {}, {"seq_lens[2] is 0"});
}

// --- on a device, before a backend sees anything ---------------------------------------------------------------------

// Only remembers; what a real one computes is in tests/gpu.
struct Seen {
  int writes = 0, tables = 0, runs = 0, steps = 0;
  int device = -1;
  PagesPlanOptions options;
} seen;

class FakePlan final : public core::DevicePagesPlan {
 public:
  using DevicePagesPlan::DevicePagesPlan;
  Status set_tables(const StepTables&, Stream) override { return ++seen.tables, Status(); }
  Result<bool> take_errors(Stream) override { return true; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return 640; }
  [[nodiscard]] const char* kernel() const noexcept override { return "decode"; }
  [[nodiscard]] int products() const noexcept override { return 16; }

 private:
  Status attend(const BlockPool&, const TensorView&, const MutableTensorView&, const core::FreshRows&,
                const RunOptions&) override {
    return ++seen.runs, Status();
  }
  [[nodiscard]] std::string explain_work() const override { return "kernel     remembers\n"; }
};

class FakePages final : public core::DevicePages {
 public:
  using DevicePages::DevicePages;
  [[nodiscard]] const char* backend() const noexcept override { return "fake"; }
  Status write(const BlockPool&, const TensorView&, const TensorView&, const std::int64_t*, std::int64_t,
               Stream) const override {
    return ++seen.writes, Status();
  }
  Status decode(const BlockPool&, const std::int32_t*, std::int64_t, const MutableTensorView&, const MutableTensorView&,
                Stream) const override {
    return {};
  }
  Status copy(const BlockPool&, const std::int32_t*, const std::int32_t*, std::int64_t, Stream) const override {
    return {};
  }
  Result<bool> take_non_finite(Stream) const override { return true; }
  Status begin_step(const StepTables&, Stream) const override { return ++seen.steps, Status(); }
  Result<std::int64_t> take_misses(Stream) const override { return 3; }

 private:
  Result<std::unique_ptr<PagesPlanImpl>> make_plan(PagesPlanOptions options) const override {
    seen.options = options;
    return std::unique_ptr<PagesPlanImpl>(std::make_unique<FakePlan>(shared_from_this(), std::move(options)));
  }
};

constexpr core::DeviceBackend kFakeBackend{
    .name = "cuda",
    .detail = [] { return std::string(); },
    .unavailable = [] { return std::string(); },
    .make_cache = nullptr,
    .make_plan = nullptr,
    .make_pages = [](const PagesSpec& s, int device) -> Result<std::shared_ptr<const PagesImpl>> {
      seen.device = device;
      return std::shared_ptr<const PagesImpl>(std::make_shared<FakePages>(s));
    }};

TEST(PagesOnADevice, ArgumentsAreCheckedBeforeTheBackendSeesThem) {
  PagesConfig c = geometry("tq4", "tq6", 64);
  c.device = "cuda:3";
  EXPECT_TRUE(refuses(PagesImpl::create(c, nullptr).status(), Code::unsupported, {"no CUDA backend"}));
  core::DeviceBackend absent = kFakeBackend;
  absent.unavailable = [] { return std::string("there is none"); };
  EXPECT_TRUE(refuses(PagesImpl::create(c, &absent).status(), Code::unsupported, {"there is none"}));
  absent = kFakeBackend;
  absent.make_pages = nullptr;
  EXPECT_TRUE(refuses(PagesImpl::create(c, &absent).status(), Code::unsupported, {"cuda:3"}));

  const auto impl = PagesImpl::create(c, &kFakeBackend).value();
  EXPECT_EQ(seen.device, 3);
  EXPECT_EQ(impl->spec().config.v_basis, BasisKind::hadamard);
  EXPECT_TRUE(impl->take_non_finite({}).value());
  const auto planned = [&](auto change) {
    PagesPlanOptions o;
    o.attention.q_heads = 4;
    o.max_batch = o.max_blocks = o.max_tokens = 2;
    change(o);
    return impl->plan(o);
  };
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.threads = 2; }).status(), Code::invalid_argument, {"threads"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.isa = "avx2"; }).status(), Code::invalid_argument, {"isa"}));
  EXPECT_TRUE(
      refuses(planned([](auto& o) { o.attention.split_keys = 64; }).status(), Code::invalid_argument, {"split_keys"}));
  PagesPlan plan(planned([](auto& o) { o.check_ids = true; }).value());
  EXPECT_TRUE(seen.options.check_ids);
  EXPECT_EQ(plan.workspace_bytes(), 640u);
  EXPECT_TRUE(plan.take_errors().value());
  EXPECT_EQ(plan.explain().find("backend    fake on cuda:3\npages      "), 0u);
  EXPECT_NE(plan.explain().find("launches are made for these"), std::string::npos);
  EXPECT_EQ(plan.isa(), std::string("fake"));

  EnginePool pool(Pages::create(geometry("tq4", "tq6", 64)).value(), {.blocks = 1});
  std::vector<float> q(2 * 4 * 64);
  alignas(64) std::byte workspace[704];
  const TensorView q_view = TensorView::of(q.data(), 2, 4, 64);
  const MutableTensorView out = MutableTensorView::of(q.data(), 2, 4, 64);
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out), Code::invalid_argument, {"workspace has 0 bytes", "640"}));
  RunOptions with;
  with.workspace = workspace;
  with.executor.execute = [](void*, int, void (*)(void*, int), void*) {};
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out, with), Code::invalid_argument, {"executor"}));
  with.executor = {};
  with.workspace = std::span(workspace).subspan(32, 640);
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out, with), Code::invalid_argument, {"workspace is not aligned"}));
  with.workspace = std::span(workspace).first(639);
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out, with), Code::invalid_argument, {"workspace has 639 bytes"}));
  with.workspace = std::span(workspace).first(640);
  EXPECT_TRUE(refuses(plan.run({}, q_view, out, with), Code::invalid_argument, {"pool.data is null"}));
  BlockPool apart = pool.view;
  apart.head_stride += 64, apart.block_stride += 2 * 64;
  EXPECT_TRUE(refuses(plan.run(apart, q_view, out, with), Code::unsupported, {"head_stride", "follow one another"}));
  EXPECT_EQ(seen.runs, 0);
  EXPECT_TRUE(
      plan.run(pool.view, TensorView::of(q.data(), 0, 4, 64), MutableTensorView::of(q.data(), 0, 4, 64), with).ok());
  EXPECT_EQ(seen.runs, 0);  // there is nothing to do
  EXPECT_TRUE(plan.run(pool.view, q_view, out, with).ok());
  EXPECT_EQ(seen.runs, 1);
  EXPECT_TRUE(
      plan.run(pool.view, TensorView::of(q.data(), 1, 4, 64), MutableTensorView::of(q.data(), 1, 4, 64), with).ok());
  EXPECT_EQ(seen.runs, 2);
  EXPECT_TRUE(refuses(plan.set_tables({.batch = 3}), Code::invalid_argument, {"batch is 3"}));
  EXPECT_TRUE(refuses(plan.set_tables({.batch = 1}), Code::invalid_argument, {"seq_lens is null"}));
  EXPECT_EQ(seen.tables, 0);
  EXPECT_TRUE(plan.set_tables({}).ok());
  EXPECT_EQ(seen.tables, 1);
}

TEST(PagesOnADevice, FreshRowsHaveTheDtypeOfExactCopiesAndOneHeadMayLieAnywhere) {
  PagesConfig c = geometry("tq4", "tq6", 64, 1);
  c.device = "cuda:0";
  alignas(64) std::byte workspace[640];
  alignas(64) std::byte block[8192];
  const BlockPool pool{.data = block, .blocks = 1, .block_stride = 0, .head_stride = 4096};
  std::vector<std::uint16_t> rows(64);
  std::vector<float> q(64);
  RunOptions with;
  with.workspace = workspace;
  seen.runs = 0;
  for (const bool has_tail : {false, true}) {
    c.tail_pages = c.tail_sequences = has_tail ? 1 : 0;
    PagesPlanOptions o;
    o.attention.q_heads = 1;
    o.attention.fresh_keys = true;
    o.max_batch = o.max_blocks = o.max_tokens = 1;
    PagesPlan plan(PagesImpl::create(c, &kFakeBackend).value()->plan(o).value());
    const auto run = [&](Dtype dtype) {
      const auto fresh = TensorView::contiguous(rows.data(), dtype, 1, 1, 64);
      return plan.run(pool, TensorView::of(q.data(), 1, 1, 64), MutableTensorView::of(q.data(), 1, 1, 64), with, fresh,
                      fresh);
    };
    EXPECT_TRUE(run(Dtype::bf16).ok());
    if (has_tail) {
      EXPECT_TRUE(refuses(run(Dtype::f16), Code::unsupported, {"keys.dtype is f16", "must be bf16"}));
    } else {
      EXPECT_TRUE(run(Dtype::f16).ok());
      const auto f32 = TensorView::of(q.data(), 1, 1, 64);
      EXPECT_TRUE(refuses(plan.run(pool, f32, MutableTensorView::of(q.data(), 1, 1, 64), with, f32, f32),
                          Code::unsupported, {"keys.dtype is f32"}));
    }
  }
  EXPECT_EQ(seen.runs, 3);
}

}  // namespace
}  // namespace kvant::test
