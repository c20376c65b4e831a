// Arguments that plan and run refuse, and the messages: the argument, its value, what is allowed, and the way out.
// Every message is printed, so that reading this test's output is reading the messages.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

void expect_refused(const Status& status, Code code, const std::vector<std::string>& words) {
  ASSERT_FALSE(status.ok());
  std::printf("  %s: %s\n", code_name(status.code()), status.message().c_str());
  EXPECT_STREQ(code_name(status.code()), code_name(code));
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos) << "no '" << word << "' in: " << status.message();
  }
}

WorldSpec two_sequences() {
  WorldSpec spec;
  spec.k = "tq6";
  spec.sequences = {{100, 2}, {70, 2}};
  return spec;
}

// --- plan -----------------------------------------------------------------------------------------------------------

struct PlanCase {
  const char* name;
  std::function<void(AttentionOptions&)> change;
  std::vector<std::string> words;
  Code code = Code::invalid_argument;
};

const float kFloats[1024] = {};

void set_mask(AttentionOptions& o, std::array<std::int64_t, 4> shape,
              std::array<std::int64_t, 4> stride = {0, 0, 0, 1}) {
  o.mask.tensor = {kFloats, Dtype::f32, shape, stride};
}

const PlanCase kPlanCases[] = {
    {"no_query_heads", [](auto& o) { o.q_heads = 0; }, {"q_heads", "0"}},
    {"negative_query_heads", [](auto& o) { o.q_heads = -4; }, {"q_heads", "-4"}},
    {"query_heads_not_a_multiple", [](auto& o) { o.q_heads = 3; }, {"q_heads", "3", "kv_heads", "2"}},
    {"no_queries", [](auto& o) { o.q_len = 0; }, {"q_len", "0", "q_lens"}},
    {"negative_queries", [](auto& o) { o.q_len = -1; }, {"q_len", "-1"}},
    {"more_queries_than_tokens", [](auto& o) { o.q_len = 71; }, {"q_len", "71", "70"}},
    {"ragged_negative_queries",
     [](auto& o) {
       o.q_lens = {0, -1};
     },
     {"q_len", "sequence 1", "-1", "0 to"}},
    {"ragged_more_queries_than_tokens",
     [](auto& o) {
       o.q_lens = {100, 71};
     },
     {"q_len", "sequence 1", "71", "70"}},
    {"ragged_too_few_counts", [](auto& o) { o.q_lens = {1}; }, {"q_lens", "1", "2"}},
    {"ragged_too_many_counts",
     [](auto& o) {
       o.q_lens = {1, 1, 1};
     },
     {"q_lens", "3", "2"}},
    {"scale_nan", [](auto& o) { o.scale = NAN; }, {"scale", "nan"}},
    {"scale_infinite", [](auto& o) { o.scale = INFINITY; }, {"scale", "inf"}},
    {"scale_no_float", [](auto& o) { o.scale = 1e39; }, {"scale", "1e+39", "1e-37 to 1e37"}},
    {"scale_negative_no_float", [](auto& o) { o.scale = -1e39; }, {"scale", "-1e+39", "1e-37 to 1e37"}},
    {"scale_zero_as_float", [](auto& o) { o.scale = 1e-46; }, {"scale", "1e-46", "1e-37 to 1e37"}},
    {"softcap_no_float", [](auto& o) { o.softcap = 1e39; }, {"softcap", "1e+39", "1e-37 to 1e37", "0 for none"}},
    {"softcap_zero_as_float", [](auto& o) { o.softcap = 1e-46; }, {"softcap", "1e-46", "1e-37 to 1e37"}},
    {"softcap_negative", [](auto& o) { o.softcap = -30; }, {"softcap", "-30"}},
    {"softcap_nan", [](auto& o) { o.softcap = NAN; }, {"softcap", "nan"}},
    {"alibi_too_few",
     [](auto& o) {
       o.alibi_slopes = {1, 2};
     },
     {"alibi_slopes", "2", "4"}},
    {"alibi_nan",
     [](auto& o) {
       o.alibi_slopes = {1, NAN, 0, 0};
     },
     {"alibi_slopes", "nan"}},
    {"window_negative", [](auto& o) { o.mask.window = -1; }, {"window", "-1"}},
    {"window_sinks_negative", [](auto& o) { o.mask = Mask::sliding(8, -2); }, {"window_sinks", "-2"}},
    {"window_sinks_without_window",
     [](auto& o) {
       o.mask = Mask::bidirectional();
       o.mask.window_sinks = 8;
     },
     {"window_sinks", "8", "without a window"}},
    {"mask_batch",
     [](auto& o) {
       set_mask(o, {3, 1, 1, 1});
     },
     {"mask", "3", "2"}},
    {"mask_heads",
     [](auto& o) {
       set_mask(o, {1, 2, 1, 1});
     },
     {"mask", "2", "4"}},
    {"mask_queries",
     [](auto& o) {
       set_mask(o, {1, 1, 3, 1});
       o.q_len = 5;
     },
     {"mask", "3", "5"}},
    {"mask_keys",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 99});
     },
     {"mask", "99", "100"}},
    {"mask_keys_from_its_first",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 59});
       o.mask.tensor.first_key = 40;
     },
     {"mask", "59", "60", "first_key 40"}},
    {"mask_first_key_negative",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 200});
       o.mask.tensor.first_key = -1;
     },
     {"first_key", "-1", "0 to"}},
    {"mask_first_key_beyond_memory",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 200});
       o.mask.tensor.first_key = std::numeric_limits<std::int64_t>::max();
     },
     {"first_key", "9223372036854775807", "0 to"}},
    {"mask_no_keys_past_the_last",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 0});
       o.mask.tensor.first_key = 100;
     },
     {"mask", "keys", "0", "at least 1"}},
    {"mask_empty",
     [](auto& o) {
       set_mask(o, {1, 1, 1, 0});
     },
     {"mask", "0"}},
    {"mask_negative",
     [](auto& o) {
       set_mask(o, {1, -1, 1, 1});
     },
     {"mask", "-1"}},
    {"mask_strides_overflow",
     [](auto& o) {
       set_mask(o, {1, 4, 1, 100}, {0, std::numeric_limits<std::int64_t>::max() / 2, 0, 1});
     },
     {"mask", "stride"}},
    {"split_not_whole_pages", [](auto& o) { o.split_keys = 65; }, {"split_keys", "65", "64"}},
    {"split_negative", [](auto& o) { o.split_keys = -64; }, {"split_keys", "-64"}},
    {"threads_negative", [](auto& o) { o.threads = -1; }, {"threads", "-1"}},
    {"backend_unknown", [](auto& o) { o.backend = "metal"; }, {"backend", "metal", "cpu"}, Code::unsupported},
    {"isa_unknown", [](auto& o) { o.isa = "sse9"; }, {"isa", "sse9", "scalar"}, Code::unsupported},
};

void PrintTo(const PlanCase& c, std::ostream* out) {
  *out << c.name;
}

class PlanRefuses : public testing::TestWithParam<PlanCase> {};

TEST_P(PlanRefuses, WithAMessage) {
  const World world(two_sequences());
  AttentionOptions options;
  options.q_heads = 4;
  options.q_len = 2;
  ASSERT_TRUE(plan(world.cache, std::span<const SequenceId>(world.ids), options).ok());
  GetParam().change(options);
  const Result<Plan> refused = plan(world.cache, std::span<const SequenceId>(world.ids), options);
  // A backend or isa that nobody knows is as well an invalid argument; which of the two is not the point.
  const bool either = GetParam().code == Code::unsupported && refused.code() == Code::invalid_argument;
  expect_refused(refused.status(), either ? refused.code() : GetParam().code, GetParam().words);
}

INSTANTIATE_TEST_SUITE_P(Options, PlanRefuses, testing::ValuesIn(kPlanCases),
                         [](const auto& i) { return std::string(i.param.name); });

TEST(PlanRefusesSequences, EmptyBatch) {
  const World world(two_sequences());
  expect_refused(plan(world.cache, std::span<const SequenceId>(), world.options()).status(), Code::invalid_argument,
                 {"sequences"});
}

TEST(PlanRefusesSequences, NoTokens) {
  World world(two_sequences());
  const SequenceId empty = world.cache.add_sequence();
  AttentionOptions options;
  options.q_heads = 4;
  expect_refused(plan(world.cache, {empty}, options).status(), Code::invalid_argument, {"q_len", "1", "0"});
}

TEST(PlanRefusesSequences, UnknownOrRemoved) {
  World world(two_sequences());
  AttentionOptions options;
  options.q_heads = 4;
  expect_refused(plan(world.cache, {SequenceId{987654}}, options).status(), Code::invalid_argument,
                 {"sequence", "987654"});
  world.cache.remove(world.ids[0]).value();
  expect_refused(plan(world.cache, {world.ids[0]}, options).status(), Code::invalid_argument, {"sequence"});
}

TEST(PlanRefusesSequences, TokensThatTheCacheReleased) {
  WorldSpec spec = two_sequences();
  spec.sequences = {{500, 1}};
  spec.window = 64;
  spec.chunks = {50};  // pages are released as later appends leave them behind
  const World world(spec);
  AttentionOptions options = world.options();
  EXPECT_TRUE(plan(world.cache, {world.ids[0]}, options).ok());  // the cache's window
  options.mask = Mask::sliding(400);
  expect_refused(plan(world.cache, {world.ids[0]}, options).status(), Code::invalid_argument, {"window", "64"});
  options.mask = Mask::sliding(64, 4);
  expect_refused(plan(world.cache, {world.ids[0]}, options).status(), Code::invalid_argument, {"window_sinks", "4"});
  options.mask = Mask::sliding(64);
  EXPECT_TRUE(plan(world.cache, {world.ids[0]}, options).ok());
  // Without causality, too, the window must be the cache's at most.
  options.mask = Mask::bounded_below(400);
  expect_refused(plan(world.cache, {world.ids[0]}, options).status(), Code::invalid_argument,
                 {"window", "64", "Mask::bounded_below"});
  options.mask = Mask::bounded_below(64);
  EXPECT_TRUE(plan(world.cache, {world.ids[0]}, options).ok());
}

// --- run ------------------------------------------------------------------------------------------------------------

class RunRefuses : public testing::Test {
 protected:
  World world{two_sequences()};
  AttentionOptions options = world.options();
  Plan planned = make_plan();
  std::vector<float> q = world.queries();
  std::vector<float> out = std::vector<float>(q.size(), -7.0f);
  TensorView q_view = TensorView::of(q.data(), 4, 4, 64);
  MutableTensorView out_view = MutableTensorView::of(out.data(), 4, 4, 64);
  int layer = 0;
  RunOptions run_options;

  Plan make_plan() {
    options.split_keys = 64;
    return plan(world.cache, std::span<const SequenceId>(world.ids), options).value();
  }
  void refused(const std::vector<std::string>& words, Code code = Code::invalid_argument) {
    expect_refused(run(planned, layer, q_view, out_view, run_options), code, words);
    for (const float x : out) ASSERT_EQ(x, -7.0f) << "a refused run wrote to out";
  }
};

TEST_F(RunRefuses, LayerOutOfRange) {
  layer = -1;
  refused({"layer", "-1"});
  layer = 1;
  refused({"layer", "1"});
}

TEST_F(RunRefuses, NullData) {
  q_view.data = nullptr;
  refused({"q", "null"});
  q_view.data = q.data();
  out_view.data = nullptr;
  refused({"out", "null"});
}

TEST_F(RunRefuses, ShapesOfAnotherPlan) {
  q_view.shape = {3, 4, 64};
  refused({"q", "3", "4"});
  q_view.shape = {4, 2, 64};
  refused({"q", "2", "4"});
  q_view.shape = {4, 4, 63};
  refused({"q", "63", "64"});
  q_view.shape = {4, 4, 64};
  out_view.shape = {5, 4, 64};
  refused({"out", "5", "4"});
}

TEST_F(RunRefuses, StridesThatDoNotFit) {
  q_view.stride[2] = 2;
  refused({"q", "stride", "2"});
  q_view.stride[2] = 1;
  out_view.stride[2] = 4;
  refused({"out", "stride", "4"});
}

// As torch's expand makes them: harmless to read, but rows that a run writes to would be one.
TEST_F(RunRefuses, OutputsThatOverlap) {
  const auto strides = out_view.stride;
  for (const std::int64_t stride : {0, 63, -1}) {
    out_view.stride = {strides[0], stride, 1};
    refused({"out", fmt::format("stride[1] = {}", stride), "overlap"});
    out_view.stride = {stride, strides[1], 1};
    refused({"out", fmt::format("stride[0] = {}", stride), "overlap"});
  }
  out_view.stride = {0, 0, 1};
  refused({"out", "stride[1] = 0", "overlap"});
  out_view.stride = strides;
  q_view.stride = {0, 0, 1};
  EXPECT_TRUE(run(planned, layer, q_view, out_view, run_options).ok());
}

TEST_F(RunRefuses, BooleanTensors) {
  q_view.dtype = Dtype::boolean;
  refused({"q", "bool"});
  q_view.dtype = Dtype::f32;
  out_view.dtype = Dtype::boolean;
  refused({"out", "bool"});
}

TEST_F(RunRefuses, WorkspaceTooSmallOrMisaligned) {
  ASSERT_GT(planned.workspace_bytes(), 64u);
  std::vector<std::byte> room(planned.workspace_bytes() + 256);
  std::byte* aligned = room.data() + (64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64) % 64;
  run_options.workspace = {aligned, planned.workspace_bytes() - 1};
  refused({"workspace", std::to_string(planned.workspace_bytes())});
  run_options.workspace = {aligned + 4, planned.workspace_bytes() + 64};
  refused({"workspace", "64"});
}

TEST_F(RunRefuses, StaleAfterAppend) {
  append_rows(world.cache, world.ids[1], world.qkv[0], 0, 1).value();
  refused({fmt::format("sequence {}", static_cast<std::uint64_t>(world.ids[1])), "plan again"}, Code::stale);
}

// A plan is not stale because of other sequences, also of those that share pages.
TEST_F(RunRefuses, NothingAfterChangesOfOtherSequences) {
  const SequenceId child = world.cache.fork(world.ids[0]).value();
  const SequenceId other = world.cache.add_sequence();
  append_rows(world.cache, child, world.qkv[0], 0, 1).value();
  append_rows(world.cache, other, world.qkv[0], 0, 1).value();
  EXPECT_TRUE(run(planned, layer, q_view, out_view, run_options).ok());
  world.cache.truncate(child, 9).value();
  const SequenceId both[] = {child, other};
  const std::int64_t parents[] = {1, 0};
  world.cache.reorder(both, parents).value();
  EXPECT_TRUE(run(planned, layer, q_view, out_view, run_options).ok());
  world.cache.remove(child).value();
  world.cache.trim();
  const Status s = run(planned, layer, q_view, out_view, run_options);
  EXPECT_TRUE(s.ok()) << s.message();
}

TEST_F(RunRefuses, StaleAfterTruncate) {
  world.cache.truncate(world.ids[0], 99).value();
  refused({"plan"}, Code::stale);
}

TEST_F(RunRefuses, StaleAfterRemove) {
  world.cache.remove(world.ids[0]).value();
  refused({fmt::format("sequence {} was removed", static_cast<std::uint64_t>(world.ids[0])), "plan again"},
          Code::stale);
}

TEST(RunRefusesLayers, ReservedButNotWritten) {
  CacheConfig config;
  config.layers = 2;
  config.kv_heads = 2;
  config.head_dim = 64;
  Cache cache = Cache::create(config).value();
  const SequenceId id = cache.add_sequence();
  const Qkv x = make_qkv({1, 10, 4, 2, 64}, Inputs::gauss, 1);
  append_rows(cache, id, x, 0, 10, Dtype::f32, 0).value();
  AttentionOptions options;
  options.q_heads = 4;
  const Plan planned = plan(cache, {id}, options).value();
  std::vector<float> out(256);
  EXPECT_TRUE(run(planned, 0, TensorView::of(x.q.data(), 1, 4, 64), MutableTensorView::of(out.data(), 1, 4, 64)).ok());
  expect_refused(run(planned, 1, TensorView::of(x.q.data(), 1, 4, 64), MutableTensorView::of(out.data(), 1, 4, 64)),
                 Code::invalid_argument, {"layer", "1", "writ"});
}

TEST(MergeRefuses, BadArguments) {
  std::vector<float> out(32), lse(1);
  const Partial good = {out.data(), lse.data()};
  expect_refused(merge({}, 1, 32, out.data(), lse.data()), Code::invalid_argument, {"partials"});
  const Partial no_lse[] = {{out.data(), nullptr}};
  expect_refused(merge(no_lse, 1, 32, out.data(), lse.data()), Code::invalid_argument, {"lse", "null"});
  const Partial no_out[] = {{nullptr, lse.data()}};
  expect_refused(merge(no_out, 1, 32, out.data(), lse.data()), Code::invalid_argument, {"out", "null"});
  const Partial parts[] = {good};
  expect_refused(merge(parts, -1, 32, out.data(), lse.data()), Code::invalid_argument, {"rows", "-1"});
  expect_refused(merge(parts, 1, 0, out.data(), lse.data()), Code::invalid_argument, {"head_dim", "0"});
  expect_refused(merge(parts, 1, 32, nullptr, lse.data()), Code::invalid_argument, {"out", "null"});
}

TEST(MergeRefuses, WhatADeviceDoesNotTake) {
  std::vector<float> out(32), lse(1);
  const std::vector<Partial> parts(65, Partial{out.data(), lse.data()});
  const std::span<const Partial> all(parts);
  expect_refused(merge_on_device({}, 1, 32, out.data(), lse.data(), {}), Code::invalid_argument, {"partials"});
  expect_refused(merge_on_device(all, 1, 32, out.data(), lse.data(), {}), Code::invalid_argument, {"65", "64"});
  expect_refused(merge_on_device(all.first(1), 1, 32, nullptr, lse.data(), {}), Code::invalid_argument, {"out"});
  expect_refused(merge_on_device(all.first(1), 1, 32, out.data(), lse.data(), {}, {.out = 31}), Code::invalid_argument,
                 {"strides", "31", "32"});
  expect_refused(merge_on_device(all.first(1), 1, 32, out.data(), lse.data(), {}, {.lse = -1}), Code::invalid_argument,
                 {"strides", "-1"});
  expect_refused(merge_on_device(all.first(1), std::int64_t{1} << 40, 32, out.data(), lse.data(), {}),
                 Code::invalid_argument, {"rows"});
}

}  // namespace
}  // namespace kvant::test
