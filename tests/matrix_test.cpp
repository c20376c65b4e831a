// Many rows on a matrix unit (cpu/attend/matrix.hpp), emulated: this program knows the instruction sets `emulated` and
// `scalar` alone, so that all machines test what runs on few.
#include <gtest/gtest.h>

#include <array>
#include <atomic>

#include "core/backend.hpp"
#include "core/fmt.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::cpu {
extern const core::Kernels kEmulatedKernels;
extern const core::Kernels kScalarKernels;
extern const char* emulated_refusal;
extern std::atomic<int> emulated_requests;
}  // namespace kvant::cpu

namespace kvant::core {

std::span<const Kernels* const> all_kernels() {  // in place of src/cpu/registry.cpp's
  static constexpr std::array kAll = {&cpu::kEmulatedKernels, &cpu::kScalarKernels};
  return kAll;
}

}  // namespace kvant::core

namespace kvant::test {
namespace {

struct Formats {
  const char* k;
  const char* v;
};
const Formats kFormats[] = {{"f32", "f32"}, {"f16", "f16"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq2", "tq2"},
                            {"tq3", "tq3"}, {"tq5", "tq5"}, {"tq6", "tq4"},   {"tq8", "tq8"}, {"tq4", "tq6"}};

AttentionOptions emulated(std::int64_t split_keys = 0) {
  AttentionOptions options;
  options.isa = "emulated";
  options.split_keys = split_keys;
  return options;
}

class MatrixShapes : public testing::TestWithParam<int> {};

// Rows and keys around 16, 32 and 64 and around four pages, which are multiplied at once. Head_dims that no step of 32
// divides, and such that are stored padded (33 as 64, 100 as 112, 500 as 512).
TEST_P(MatrixShapes, MatchTheReference) {
  const Lengths kLengths[] = {{17, 17},  {33, 9},   {64, 24},  {65, 33},   {100, 20}, {129, 65},
                              {200, 31}, {256, 17}, {257, 18}, {320, 130}, {576, 20}};
  int at = GetParam();
  for (const Lengths& lengths : kLengths) {
    const auto& [k, v] = kFormats[static_cast<std::size_t>(at++) % std::size(kFormats)];
    WorldSpec spec;
    spec.head_dim = GetParam();
    spec.kv_heads = 1 + at % 2;
    spec.group = 1 + at % 3;
    spec.k = k, spec.v = v;
    spec.sequences = {lengths};
    spec.sink_pages = spec.tail_pages = at / 2 % 2;
    SCOPED_TRACE(fmt::format("{}/{}, {} keys, {} queries, group {}", k, v, lengths.kv_len, lengths.q_len, spec.group));
    EXPECT_TRUE(World(spec).kernel_matches(emulated(at % 4 == 0 ? 2 * kPageTokens : 0)));
  }
}
INSTANTIATE_TEST_SUITE_P(HeadDims, MatrixShapes,
                         testing::Values(32, 33, 64, 80, 100, 112, 128, 224, 256, 500, 512, 576));

TEST(Matrix, PlansSayWhatTheyUse) {
  WorldSpec spec;
  spec.sequences = {{100, 40}};
  const std::string by_matrix = World(spec).attend(emulated()).explain;
  EXPECT_NE(by_matrix.find("bf16"), std::string::npos) << by_matrix;
  AttentionOptions options;
  options.isa = "scalar";
  const std::string by_tiles = World(spec).attend(options).explain;
  EXPECT_NE(by_tiles.find("f32 products"), std::string::npos) << by_tiles;
}

// The system's permission is for good and changes the whole process, so that nothing takes it but a plan that will use
// the unit.
TEST(Matrix, OnlyAPlanOfManyRowsAsksForTheUnit) {
  Cache cache = Cache::create({.kv_heads = 1, .head_dim = 64, .isa = "emulated"}).value();
  const SequenceId id = cache.add_sequence();
  const std::vector<float> rows(100 * 64, 0.5f);
  const auto view = TensorView::of(rows.data(), 100, 1, 64);
  cpu::emulated_requests = 0;
  cache.append(id, 0, view, view).value();
  for (const IsaInfo& isa : isas()) EXPECT_TRUE(isa.available) << isa.name;
  for (const char* isa : {"", "emulated"}) {
    EXPECT_STREQ(plan(cache, {id}, {.q_heads = 4, .q_len = 4, .isa = isa}).value().isa(), "emulated");  // 16 rows
    EXPECT_EQ(plan(cache, {id}, {.q_heads = 4, .q_len = 101, .isa = isa}).code(), Code::invalid_argument);
  }
  EXPECT_EQ(cpu::emulated_requests.load(), 0);
  EXPECT_STREQ(plan(cache, {id}, {.q_heads = 4, .q_len = 5, .isa = "scalar"}).value().isa(), "scalar");
  EXPECT_EQ(cpu::emulated_requests.load(), 0);
  EXPECT_STREQ(plan(cache, {id}, {.q_heads = 4, .q_len = 5}).value().isa(), "emulated");  // 20 rows
  EXPECT_EQ(cpu::emulated_requests.load(), 1);
}

TEST(Matrix, ARefusedUnitIsReplacedWithAWordOrRefusedWithTheReason) {
  Cache cache = Cache::create({.kv_heads = 1, .head_dim = 64}).value();
  const SequenceId id = cache.add_sequence();
  const std::vector<float> rows(100 * 64, 0.5f);
  const auto view = TensorView::of(rows.data(), 100, 1, 64);
  cache.append(id, 0, view, view).value();
  cpu::emulated_refusal = "the system says no";
  const Plan chosen = plan(cache, {id}, {.q_heads = 4, .q_len = 5}).value();
  const Result<Plan> forced = plan(cache, {id}, {.q_heads = 4, .q_len = 5, .isa = "emulated"});
  const Result<Plan> decode = plan(cache, {id}, {.q_heads = 4, .isa = "emulated"});
  cpu::emulated_refusal = nullptr;

  EXPECT_STREQ(chosen.isa(), "scalar");
  EXPECT_NE(chosen.explain().find("emulated: the system says no"), std::string::npos) << chosen.explain();
  EXPECT_EQ(forced.code(), Code::unsupported);
  EXPECT_NE(forced.message().find("the system says no"), std::string::npos) << forced.message();
  EXPECT_EQ(forced.message().find("lacks"), std::string::npos) << forced.message();
  EXPECT_TRUE(decode.ok()) << decode.message();

  // Its results are those of the instruction set that it says.
  std::vector<float> out(5 * 4 * 64);
  run(chosen, 0, TensorView::of(rows.data(), 5, 4, 64), MutableTensorView::of(out.data(), 5, 4, 64)).value();
  for (const float x : out) ASSERT_NEAR(x, 0.5f, 0.01f);  // a mean of equal values
}

// Maxima that move from page to page, so that weights and sums of pages before have to follow.
TEST(Matrix, FollowsMovingMaxima) {
  for (const char* format : {"f32", "tq8", "tq4"}) {
    WorldSpec spec;
    spec.head_dim = 128;
    spec.k = spec.v = format;
    spec.sequences = {{600, 33}};
    spec.sink_pages = spec.tail_pages = 0;
    spec.inputs = Inputs::near_tied;
    SCOPED_TRACE(format);
    AttentionOptions options = emulated();
    options.alibi_slopes.assign(4, 0.3F);  // later keys weigh more
    const World world(spec);
    EXPECT_TRUE(world.kernel_matches(options));
  }
}

// Keys of trained models may have a large part in common (a bias), which no softmax sees, but every product of a query
// and a key.
class MatrixOffset : public testing::TestWithParam<const char*> {};

TEST_P(MatrixOffset, KeysWithACommonOffsetAreAsExactAsF32) {
  for (const float offset : {0.0f, 1.0f, 10.0f, 100.0f, 1000.0f}) {
    WorldSpec spec;
    spec.head_dim = 128;
    spec.k = spec.v = GetParam();
    spec.sequences = {{600, 33}};
    spec.sink_pages = spec.tail_pages = 0;
    spec.key_offset = offset;
    const World world(spec);
    const Expected expected = world.expect_decoded();
    AttentionOptions scalar;
    scalar.isa = "scalar";
    const Attended by_tiles = world.attend(emulated());
    const double of_tiles = difference(expected.out, by_tiles.out).rel_l2;
    const double of_floats = difference(expected.out, world.attend(scalar).out).rel_l2;
    EXPECT_LE(of_tiles, tolerance::kTwoWays * of_floats + tolerance::kMatrixWeights) << "offset " << offset;
    EXPECT_TRUE(lse_close(expected.lse, by_tiles.lse, tolerance::kLseFloat)) << "offset " << offset;
  }
}
INSTANTIATE_TEST_SUITE_P(Formats, MatrixOffset, testing::Values("f32", "f16", "bf16", "fp8"));

class MatrixRandom : public testing::TestWithParam<int> {};

TEST_P(MatrixRandom, MatchesTheReference) {
  RandomChoices choices;
  choices.head_dims = {64, 80, 128, 256};
  for (const Formats& f : kFormats) choices.formats.emplace_back(f.k, f.v);
  choices.most_queries = 90;
  choices.page_centres = true;
  const auto [first, count] = random_seeds(GetParam(), kAddressSanitizer ? 2 : 10);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, choices);
    c.options.isa = "emulated";
    c.options.threads = static_cast<int>(1 + rng.below(3));
    c.options.split_keys = rng.below(3) == 0 ? kPageTokens * (1 + rng.below(6)) : 0;
    SCOPED_TRACE(fmt::format("seed {}, {} threads, splits of {}\n{}", seed, c.options.threads, c.options.split_keys,
                             c.description));
    EXPECT_TRUE(World(c.spec).kernel_matches(c.options, c.sink_logits, tolerance::kLseOfFewKeys));
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, MatrixRandom, testing::Range(0, 6));

}  // namespace
}  // namespace kvant::test
