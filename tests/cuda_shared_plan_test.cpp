// Where the pieces of a decode block's shared memory lie (cuda/decode/shared_plan.hpp), which needs no device.
#include "cuda/decode/shared_plan.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvant::cuda {
namespace {

struct Piece {
  std::string name;
  int begin, end;
};

void expect_apart(const std::vector<Piece>& pieces, int bytes) {
  for (const Piece& a : pieces) {
    EXPECT_GE(a.begin, 0) << a.name;
    EXPECT_LE(a.end, bytes) << a.name;
    for (const Piece& b : pieces) {
      if (&a != &b && a.begin < a.end && b.begin < b.end) {
        EXPECT_TRUE(a.end <= b.begin || b.end <= a.begin) << a.name << " and " << b.name;
      }
    }
  }
}

// Sizes that are no multiples of anything, but for what alignment asks of them.
constexpr SharedSizes sizes(bool eight_warps) {
  return {.eight_warps = eight_warps,
          .info = 1004,
          .encoded_queries = 1024,
          .exact_queries = 2048,
          .teams = eight_warps ? 8 : 4,
          .barriers = 2,
          .keys = 4496,
          .values = 4608,
          .weights = 768,
          .scratch = 80,
          .centres = 1792,
          .sums = 8192,
          .exact_teams = eight_warps ? 2 : 1,
          .exact_half = 8704,
          .exact_weights = 1536,
          .exact_scratch = 80};
}

class SharedPlanTest : public testing::TestWithParam<bool> {};

TEST_P(SharedPlanTest, PiecesOfEncodedPagesAreApart) {
  const SharedSizes s = sizes(GetParam());
  const SharedPlan p = shared_plan(s);
  std::vector<Piece> pieces = {{"queries", p.queries, p.queries + s.encoded_queries},
                               {"info", p.info, p.info + s.info},
                               {"barriers", p.barriers, p.barriers + 8 * s.teams * s.barriers}};
  for (int team = 0; team < s.teams; ++team) {
    const int begin = p.teams + team * p.team.bytes;
    EXPECT_EQ(begin % 128, 0);
    pieces.push_back({"keys", begin + p.team.keys, begin + p.team.keys + s.keys});
    pieces.push_back({"values", begin + p.team.values, begin + p.team.values + s.values});
    pieces.push_back({"weights", begin + p.team.weights, begin + p.team.weights + s.weights});
    pieces.push_back({"scratch", begin + p.team.scratch, begin + p.team.scratch + s.scratch});
    pieces.push_back({"centres", begin + p.team.centres, begin + p.team.centres + s.centres});
    EXPECT_EQ((begin + p.team.centres) % 16, 0);
  }
  EXPECT_EQ(p.barriers % 16, 0);
  expect_apart(pieces, p.bytes[0]);
}

TEST_P(SharedPlanTest, PiecesOfExactPagesAreApart) {
  const SharedSizes s = sizes(GetParam());
  const SharedPlan p = shared_plan(s);
  for (int i = 0; i < 3; ++i) {
    const int stages = 1 << i;
    std::vector<Piece> pieces = {{"queries", p.queries, p.queries + s.exact_queries},
                                 {"info", p.info, p.info + s.info},
                                 {"barriers", p.barriers, p.barriers + 8 * s.teams * s.barriers}};
    const auto add_rest = [&](int begin) {
      pieces.push_back({"weights", begin, begin + s.exact_weights});
      pieces.push_back({"scratch", begin + p.exact_scratch, begin + p.exact_scratch + s.exact_scratch});
    };
    const auto add_halves = [&](int begin, int count) {
      for (int half = 0; half < count; ++half) {
        pieces.push_back({"half", begin + half * p.exact_half, begin + (half + 1) * p.exact_half});
      }
    };
    if (s.eight_warps) {
      add_halves(p.exact, 4);
      for (int team = 0; team < 2; ++team) add_rest(p.exact + p.exact_rests + team * p.exact_rest);
    } else {
      for (int team = 0; team < s.exact_teams; ++team) {
        const int begin = p.exact + team * (stages * p.exact_half + p.exact_rest);
        add_halves(begin, stages);
        add_rest(begin + stages * p.exact_half);
      }
    }
    expect_apart(pieces, p.bytes[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SharedPlanTest, testing::Bool(),
                         [](const auto& i) { return i.param ? "Wide" : "FourWarps"; });

TEST(SharedPlan, SumsOfTeamsHaveRoom) {
  SharedSizes s = sizes(false);
  s.sums = 1 << 20;
  EXPECT_EQ(shared_plan(s).bytes[0], shared_plan(s).teams + s.sums);
}

TEST(SharedPlan, WithoutExactPagesStagesCostNothing) {
  SharedSizes s = sizes(false);
  s.exact_queries = 0;
  const SharedPlan p = shared_plan(s);
  EXPECT_EQ(p.bytes[0], p.bytes[2]);
  EXPECT_EQ(p.info, s.encoded_queries);  // no room for queries of exact pages
}

}  // namespace
}  // namespace kvant::cuda
