// Where the pieces of a block's shared memory begin, in bytes. Encoded and exact pages are never there at once, so they
// have the same memory.
//
//   four warps   queries | info | barriers | teams, or exact pages
//   eight warps  info | barriers | queries of encoded pages | teams
//                                | queries of exact pages    | exact pages
//
// A team has keys (codes, then the scales of both sides), values, weights and scratch. Exact pages pass half a side at
// a time through 1, 2 or 4 stages (AttendParams::exact_stages) of each team, followed by its weights and scratch; in
// kernels of eight warps all four halves of a page stand side by side, once for the block, followed by those of two
// teams.
#pragma once

namespace kvant::cuda {

struct SharedSizes {
  bool eight_warps;
  int info;
  int encoded_queries, exact_queries;  // exact_queries: 0 where no page is exact
  int teams, barriers;                 // barriers: of a team
  int keys, values, weights;           // places of a team's
  int weights_alignment = 1;
  int scratch;
  int centres;  // a team's: codes of the centres that come next, where these pass through shared memory
  int sums;     // all teams' when they are added, in the memory of their pages
  int exact_teams, exact_half, exact_weights, exact_scratch;
};

struct SharedPlan {
  struct Team {
    int keys, values, weights, scratch, centres, bytes;  // from the team's begin
  };
  int queries, info, barriers;
  int teams, exact;  // the first team's memory, and that of exact pages
  Team team;
  int exact_half, exact_rest, exact_scratch;  // a stage; what follows the stages; scratch in that, behind the weights
  int exact_rests;                            // eight warps: from `exact` on
  int bytes[3];                               // everything, with 1, 2 and 4 stages
};

// Pieces one after another, each at a multiple of `alignment`.
struct SharedCursor {
  int at = 0;
  constexpr int take(int bytes, int alignment = 1) {
    const int begin = (at + alignment - 1) / alignment * alignment;
    at = begin + bytes;
    return begin;
  }
};

constexpr SharedPlan shared_plan(const SharedSizes& s) {
  constexpr int kLine = 128;  // where pages begin
  const auto most = [](int a, int b) { return a > b ? a : b; };
  SharedPlan plan{};
  const int line = most(kLine, s.weights_alignment);
  SharedCursor team;
  plan.team.keys = team.take(s.keys);
  plan.team.values = team.take(s.values);
  plan.team.weights = team.take(s.weights, s.weights_alignment);
  plan.team.scratch = team.take(s.scratch);
  plan.team.centres = team.take(s.centres, 16);
  plan.team.bytes = team.take(0, line);
  const int encoded = most(s.teams * plan.team.bytes, s.sums);

  SharedCursor rest;
  (void)rest.take(s.exact_weights);
  plan.exact_scratch = rest.take(s.exact_scratch);
  plan.exact_half = s.exact_half;
  plan.exact_rest = rest.take(0, kLine);
  plan.exact_rests = 4 * s.exact_half;

  const int queries = most(s.encoded_queries, s.exact_queries);
  SharedCursor block;
  if (!s.eight_warps) plan.queries = block.take(queries);
  plan.info = block.take(s.info);
  plan.barriers = block.take(8 * s.teams * s.barriers, 16);
  const int end = block.take(0, line);
  if (s.eight_warps) plan.queries = end;
  plan.exact = s.eight_warps ? end + queries : end;
  plan.teams = s.eight_warps ? end + s.encoded_queries : end;
  for (int i = 0; i < 3; ++i) {
    const int exact = s.eight_warps         ? plan.exact_rests + 2 * plan.exact_rest
                      : s.exact_queries > 0 ? s.exact_teams * ((1 << i) * plan.exact_half + plan.exact_rest)
                                            : 0;
    plan.bytes[i] = most(plan.teams + encoded, plan.exact + exact);
  }
  return plan;
}

}  // namespace kvant::cuda
