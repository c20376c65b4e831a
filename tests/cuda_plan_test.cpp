// Plans on a device as far as the host makes them (cuda/plan/plan.hpp): the launches of a run in their order, and what
// each of them is given. Kernels do nothing here, and no device is needed.
#include "cuda/plan/plan.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/mask/classify.hpp"
#include "cuda/prefill_unpacked/left.hpp"
#include "cuda/prefill_unpacked/unpack.hpp"
#include "cuda/schedule/list.hpp"
#include "support/cuda_choices.hpp"

namespace kvant::cuda {
namespace {

using prefill::unpacked::RoundRule;
using prefill::unpacked::RoundTables;
using prefill::unpacked::UnpackTo;

struct Launched {
  std::string name;
  AttendParams params;
  bool overlaps;
  UnpackTo to{};                 // kernels that unpack have this
  prefill::Schedule schedule{};  // prefill kernels have this
  prefill::dense::Maps maps{};   // kernels of dense keys have these
};
// A run: its launches, and what small launches were given.
struct Recorded {
  std::vector<Launched> launches;
  RoundRule rule{};
  RoundTables tables{};
  const std::int32_t* served = nullptr;
  BatchEntry* left = nullptr;
  Status status;

  [[nodiscard]] std::string names() const {
    std::string all;
    for (const Launched& one : launches) all += (all.empty() ? "" : ", ") + one.name;
    return all;
  }
  [[nodiscard]] const Launched& find(const std::string& name) const {
    for (const Launched& one : launches) {
      if (one.name == name) return one;
    }
    throw std::runtime_error("no launch of " + name + " in " + names());
  }
};
Recorded* running = nullptr;

void take_launch(const cudaLaunchConfig_t& config, const FakeKernel& kernel, void** arguments) {
  Launched one{kernel.name, *static_cast<const AttendParams*>(arguments[0]), config.numAttrs > 0};
  if (one.name.starts_with("unpack")) one.to = *static_cast<const UnpackTo*>(arguments[1]);
  if (one.name.starts_with("dense") || one.name.starts_with("prefill"))
    one.schedule = *static_cast<const prefill::Schedule*>(arguments[1]);
  if (one.name.starts_with("dense")) one.maps = *static_cast<const prefill::dense::Maps*>(arguments[2]);
  running->launches.push_back(one);
}

class FakePages final : public PlannedPages {
 public:
  FakePages(const PlannedWork& work, const DeviceLimits& limits) : PlannedPages(0) {
    limits_ = limits, view_ = work.params.cache;
    k_basis_.kind = work.params.k_basis.kind, v_basis_.kind = work.params.v_basis.kind;
  }
};

// A plan of a case, and its runs.
class PlanOfCase {
 public:
  explicit PlanOfCase(const Case& c, const char* device = "9.0", const BatchEntry* entries = nullptr)
      : c_(c), asked_(c), pages_(asked_.work(), device_of(device).limits), plan_(pages_) {
    const PlannedWork work = asked_.work();
    AttentionOptions options;
    options.q_heads = c.q_heads;
    options.q_lens.assign(work.sequences.size(), c.queries);
    options.scale = 1;
    options.kernel = c.kernel;
    const core::DevicePlanConfig config{.options = &options,
                                        .sequences = work.sequences,
                                        .batch = c.sequences,
                                        .k = c.k,
                                        .v = c.v,
                                        .kv_heads = c.kv_heads,
                                        .head_dims = {c.head_dim, work.params.v_head_dim}};
    plan_.prepare(config, {entries}).value();
    workspace_ = std::make_unique_for_overwrite<std::byte[]>(plan_.workspace_bytes() + 256);  // nobody touches it
  }
  [[nodiscard]] const AttentionPlan& plan() const { return plan_; }
  [[nodiscard]] const std::byte* begin() const {
    return workspace_.get() + (256 - reinterpret_cast<std::uintptr_t>(workspace_.get()) % 256) % 256;
  }
  [[nodiscard]] const std::byte* end() const { return begin() + plan_.workspace_bytes(); }

  [[nodiscard]] Recorded run(Dtype q_dtype) {
    alignas(16) static std::byte tensor[16];
    const std::int64_t rows = std::int64_t{c_.sequences} * c_.queries, heads = c_.q_heads, dim = c_.head_dim;
    const std::int64_t v_dim = c_.v_head_dim > 0 ? c_.v_head_dim : dim;
    const TensorView q{tensor, q_dtype, {rows, heads, dim}, {heads * dim, dim, 1}, 0};
    const MutableTensorView out{tensor, q_dtype, {rows, heads, v_dim}, {heads * v_dim, v_dim, 1}, 0};
    Recorded seen;
    running = &seen;
    fake_launches = take_launch;
    seen.status = plan_.run(0, q, out, {}, {.workspace = {const_cast<std::byte*>(begin()), plan_.workspace_bytes()}});
    running = nullptr;
    return seen;
  }

 private:
  const Case c_;
  const Asked asked_;
  const FakePages pages_;
  AttentionPlan plan_;
  std::unique_ptr<std::byte[]> workspace_;
};

const std::byte* bytes(const void* at) {
  return static_cast<const std::byte*>(at);
}
Case prompt(int width, Format k, Format v) {
  Case c = case_of(width, {"", k, v});
  c.sequences = 2, c.length = 8192, c.queries = 2048;
  return c;
}

}  // namespace

// --- small launches --------------------------------------------------------------------------------------------------

cudaError_t prefill::unpacked::make_rounds(const AttendParams& params, const RoundRule& rule, const RoundTables& tables,
                                           bool overlaps, cudaStream_t) {
  running->rule = rule, running->tables = tables;
  running->launches.push_back({"rounds", params, overlaps});
  return cudaSuccess;
}
cudaError_t leave_entries(const AttendParams& params, const std::int32_t* served, BatchEntry* left, bool overlaps,
                          cudaStream_t) {
  running->served = served, running->left = left;
  running->launches.push_back({"left", params, overlaps});
  return cudaSuccess;
}
cudaError_t list_items(const AttendParams&, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t classify_pages(const MaskPages&, bool, cudaStream_t) {
  return cudaSuccess;
}

namespace {

// --- tests -----------------------------------------------------------------------------------------------------------

// Every pair and width of a build that has kernels for it: each side is unpacked by the kernel of its head_dim, and
// what is in no round is left to decode kernels.
TEST(CudaPlan, PromptsOfUnequalWidths) {
  int widths = 0;
  for (const int width : units::prefill_dense) {
    if (key_dim(width) == value_dim(width)) continue;
    ++widths;
    for (const FormatPair& pair : instances().pairs) {
      SCOPED_TRACE(pair_name(pair) + " " + width_name(width));
      Case c = prompt(width, pair.k, pair.v);
      c.kernel = core::kPrefillUnpacked;
      PlanOfCase planned(c);
      EXPECT_STREQ(planned.plan().kernel(), core::kPrefillKernels);
      const Recorded seen = planned.run(Dtype::bf16);
      ASSERT_TRUE(seen.status.ok()) << seen.status.message();
      const std::string unpack_keys = fmt::format("unpack {}", key_dim(width)),
                        unpack_values = fmt::format("unpack {}", value_dim(width)),
                        dense = fmt::format("dense {} {}", pair.k == Format::bf16 ? "bf16" : "f16", width);
      std::string names = "rounds";
      ASSERT_GE(seen.rule.rounds, 1);
      for (int i = 0; i < seen.rule.rounds; ++i) names += ", " + unpack_keys + ", " + unpack_values + ", " + dense;
      names += fmt::format(", left, decode {}, merge {}", width, value_dim(width));
      EXPECT_EQ(seen.names(), names);
      EXPECT_NE(planned.plan().explain().find(
                    fmt::format("prefill_unpacked {}, head_dim {}", pair_name(pair), width_name(width))),
                std::string::npos)
          << planned.plan().explain();
    }
  }
  EXPECT_GE(widths, 1);
}

// The parts of the workspace of such a run do not overlap, and the maps have the rows of both sides.
TEST(CudaPlan, WorkspaceOfUnequalWidths) {
  PlanOfCase planned(prompt(192128, Format::tq4, Format::tq4));
  const Recorded seen = planned.run(Dtype::f16);
  ASSERT_TRUE(seen.status.ok()) << seen.status.message();
  const UnpackTo keys = seen.find("unpack 192").to, values = seen.find("unpack 128").to;
  EXPECT_TRUE(keys.keys != nullptr && keys.values == nullptr);
  EXPECT_TRUE(values.keys == nullptr && values.values != nullptr);
  EXPECT_TRUE(keys.is_f16 && values.is_f16);
  const std::int64_t rows = seen.rule.rows;
  const std::size_t batch = 2, rounds = static_cast<std::size_t>(seen.rule.rounds);
  EXPECT_GE(bytes(seen.tables.rounds), planned.begin());
  EXPECT_GE(bytes(seen.tables.parts), bytes(seen.tables.rounds + rounds));
  EXPECT_GE(bytes(seen.tables.served), bytes(seen.tables.parts + batch + rounds));
  EXPECT_GE(bytes(keys.keys), bytes(seen.tables.served + batch));
  EXPECT_GE(bytes(values.values), bytes(keys.keys) + rows * 2 * 192);
  const Launched& attend = seen.find("decode_sm80 192128");
  EXPECT_GE(bytes(attend.params.segments), bytes(values.values) + rows * 2 * 128);
  EXPECT_LT(bytes(attend.params.segments), bytes(keys.keys) + rows * 2 * (192 + 128) + 1024);  // and nothing is idle
  EXPECT_GT(bytes(attend.params.partial_ml), bytes(attend.params.segments));
  EXPECT_GT(bytes(attend.params.partial_o), bytes(attend.params.partial_ml));
  const std::int64_t partials = attend.params.blocks + std::int64_t{2} * 8 * attend.params.row_blocks * core::kDomains;
  EXPECT_GE(bytes(seen.left), bytes(attend.params.partial_o + partials * attend.params.rows * 128));
  EXPECT_LE(bytes(seen.left + batch), planned.end());

  const prefill::dense::Maps& maps = seen.find("dense f16 192128").maps;
  EXPECT_EQ(maps.keys.data, keys.keys);
  EXPECT_EQ(maps.values.data, values.values);
  EXPECT_EQ(maps.keys.size[0], 192U);
  EXPECT_EQ(maps.values.size[0], 128U);
  EXPECT_EQ(maps.keys.stride[0], 384U);
  EXPECT_EQ(maps.values.stride[0], 256U);
  for (const CUtensorMap& map : {maps.keys, maps.values}) EXPECT_EQ(map.size[1], static_cast<cuuint64_t>(rows));
  EXPECT_EQ(seen.find("dense f16 192128").schedule.round, seen.tables.rounds);
}

// Decode kernels behind rounds get entries that a launch of the run has made. The kernel begins when that launch has
// ended, and cuts the work anew.
TEST(CudaPlan, DecodeKernelsTakeWhatRoundsLeave) {
  const BatchEntry made[2]{};
  for (const BatchEntry* entries : {static_cast<const BatchEntry*>(nullptr), made}) {
    PlanOfCase planned(prompt(192128, Format::tq4, Format::tq4), "9.0", entries);
    const Recorded seen = planned.run(Dtype::bf16);
    EXPECT_EQ(seen.served, seen.tables.served);
    EXPECT_NE(seen.find("left").params.entries, seen.left);
    EXPECT_EQ(seen.find("left").params.known_entries, entries == nullptr ? 2 : 0);
    for (const char* name : {"decode_sm80 192128", "merge 128"}) {
      const AttendParams& p = seen.find(name).params;
      EXPECT_EQ(p.entries, seen.left) << name;
      EXPECT_EQ(p.known_entries, kLeft) << name;
      EXPECT_EQ(p.items, nullptr) << name;
      EXPECT_TRUE(bytes(p.segments) >= planned.begin() && bytes(p.segments) < planned.end()) << name;
    }
    EXPECT_FALSE(seen.find("decode_sm80 192128").overlaps);
    EXPECT_TRUE(seen.find("merge 128").overlaps);
    EXPECT_NE(planned.plan().explain().find("the sequences that are left"), std::string::npos);

    // Queries that kernels of dense keys do not take: nothing is in a round.
    const Recorded f32 = planned.run(Dtype::f32);
    EXPECT_TRUE(f32.status.ok()) << f32.status.message();
    EXPECT_EQ(f32.names(), "decode_sm80 192128, merge 128");
    const Launched& attend = f32.launches[0];
    EXPECT_EQ(attend.params.known_entries, entries == nullptr ? 2 : 0);
    EXPECT_EQ(attend.params.items == nullptr, entries == nullptr);
    EXPECT_TRUE(attend.overlaps);
  }
  Case named = prompt(192128, Format::tq4, Format::tq4);
  named.kernel = core::kPrefillUnpacked;
  const Recorded refused = PlanOfCase(named).run(Dtype::f32);
  EXPECT_EQ(refused.status.code(), Code::unsupported);
  EXPECT_TRUE(has(refused.status.message(), "q.dtype is neither bf16 nor f16")) << refused.status.message();
}

TEST(CudaPlan, OtherDevicesAndFewQueries) {
  Case c = prompt(192128, Format::tq8, Format::tq8);
  EXPECT_EQ(PlanOfCase(c, "8.0").run(Dtype::bf16).names(), "decode_sm80 192128, merge 128");
  c.k = Format::tq6, c.v = Format::tq4;
  EXPECT_EQ(PlanOfCase(c, "8.0").run(Dtype::bf16).names(), "decode 192128, merge 128");
  c.queries = 1;
  EXPECT_EQ(PlanOfCase(c).run(Dtype::bf16).names(), "decode 192128, merge 128");
}

// One size: a launch unpacks both sides, and kernels of tiles take what is left.
TEST(CudaPlan, PromptsOfOneWidth) {
  Case c = prompt(128, Format::tq6, Format::tq4);
  c.kernel = core::kPrefillUnpacked;
  PlanOfCase planned(c);
  const Recorded seen = planned.run(Dtype::bf16);
  EXPECT_EQ(seen.rule.rounds, 1);
  EXPECT_EQ(seen.names(), "rounds, unpack 128, dense f16 128, prefill_sm90 128");
  const UnpackTo& to = seen.find("unpack 128").to;
  ASSERT_TRUE(to.keys != nullptr && to.values != nullptr);
  EXPECT_GE(to.values - to.keys, std::int64_t{seen.rule.rows} * 2 * 128);
  EXPECT_LE(bytes(to.values) + std::int64_t{seen.rule.rows} * 2 * 128, planned.end());
  EXPECT_EQ(seen.find("prefill_sm90 128").schedule.share.served, seen.tables.served);
  EXPECT_EQ(seen.left, nullptr);
}

// Blocks of a warpgroup need all of a multiprocessor, and wait for the previous launch (kGroupBlocks).
TEST(CudaPlan, LaunchesOfWarpgroupsDoNotOverlap) {
  Case c = prompt(128, Format::tq4, Format::tq4);
  c.queries = 16;
  for (const auto& [kernel, overlaps] : {std::pair("decode", true), {"decode_sm80", true}, {"decode_sm90", false}}) {
    c.kernel = kernel;
    PlanOfCase planned(c);
    const Recorded seen = planned.run(Dtype::bf16);
    EXPECT_EQ(seen.find(fmt::format("{} 128", kernel)).overlaps, overlaps) << kernel;
    EXPECT_EQ(has(planned.plan().explain(), "weights rounded to f16"), kernel != std::string("decode")) << kernel;
  }
}

}  // namespace
}  // namespace kvant::cuda
