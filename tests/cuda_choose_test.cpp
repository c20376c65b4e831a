// Which kernels plans on a device take (cuda/plan/choose.hpp): the function that plans call, on devices of several
// classes, over the kernels that a default build has. No device is needed.
#include "cuda/plan/choose.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cuda/prefill_dense/shape.hpp"
#include "cuda/prefill_sm80/shape.hpp"
#include "cuda/prefill_sm90/shape.hpp"
#include "cuda/runtime/built.hpp"
#include "support/paths.hpp"

namespace kvant::cuda {
namespace {

// --- what builds and devices offer -----------------------------------------------------------------------------------

struct Device {
  const char* name;
  DeviceLimits limits;
};
const DeviceLimits& limits_of(const std::string& card) {
  return std::find_if(cards().begin(), cards().end(), [&](const Card& one) { return one.name == card; })->limits;
}
const Device kDevices[] = {{"8.0", limits_of("a100")},
                           {"8.6", limits_of("rtx3090")},
                           {"8.9", limits_of("rtx4090")},
                           {"9.0", limits_of("h200")},
                           {"12.0", limits_of("rtx5090")}};
const Device& device_of(const std::string& name) {
  return *std::find_if(std::begin(kDevices), std::end(kDevices), [&](const Device& one) { return one.name == name; });
}

struct TableEntry {
  Format k, v;
  int head_dim;
  DecodeOffer offer;
};
// The functions that the tables of src/cuda/instances.cmake call.
template <Format K, Format V, int D, int kTiles>
TableEntry attend_entry() {
  return {K, V, D, {.column_tiles = kTiles, .teams = 4, .shared_bytes = 0}};
}
template <Format K, Format V, int D, int kTiles>
TableEntry eight_warps_entry() {
  return {K, V, D, {.column_tiles = kTiles, .teams = 8, .shared_bytes = 0, .has_eight_warps = true}};
}
template <Format K, Format V, int D, int kTiles>
TableEntry group_entry() {
  return {K, V, D, {.column_tiles = kTiles, .teams = 1, .shared_bytes = 0, .by_group = true}};
}
const std::vector<TableEntry> kTable = {
#include "cuda/decode_tables.inc"
};

template <int D>
void offer_tiles(const Work& work, const Device& device, Offers& offers) {
  if (D != work.stored_head_dim()) return;
  if constexpr (D <= prefill::kMostHeadDim) {
    if (prefill::has_kernel(work.k, work.v, D))
      offers.sm90 = TileOffer{prefill::kRows, prefill::Shape<D>::kBytes, 1, device.limits.has_sm90()};
  }
  if (prefill::has_one_type(work.k, work.v)) {
    using S = prefill::sm80::Shape<D>;
    const int more = codec::is_centred(work.params.cache.encoded_layout) ? S::kMoreIfCentred : 0;
    const int bytes = S::bytes(work.k, work.v) + more;
    const int room = blocks_within(device.limits, S::kThreads, bytes);
    offers.sm80 = TileOffer{S::kRows, bytes, std::min(S::kBlocks, room), true};
  }
  using S = prefill::dense::ShapeFor<D>;
  offers.dense = DenseOffer{S::kRows, S::kKeys, S::kBytes, S::kBlocks, device.limits.has_sm90(), true};
}

Offers offers_of(const Work& work, const Device& device) {
  Offers offers{.instances = instances(), .limits = device.limits};
  for (const TableEntry& one : kTable) {
    if (one.head_dim != work.stored_head_dim()) continue;
    offers.has_decode = true;
    if (one.k != work.k || one.v != work.v) continue;
    offers.decode.push_back(one.offer);
    offers.decode.back().has_code = !one.offer.by_group || device.limits.has_sm90();
  }
#define KVANT_ENTRY(d) \
  if (d <= prefill::kMostHeadDim) offers.sm90_head_dims.push_back(d);
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
#define KVANT_ENTRY(d) offer_tiles<d>(work, device, offers);
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  return offers;
}

// --- work ------------------------------------------------------------------------------------------------------------

// A batch of alike sequences over a cache with one exact page at either end.
struct Case {
  int head_dim = 128, stored_head_dim = 0;  // 0: the same
  Format k = Format::tq6, v = Format::tq4;
  int q_heads = 32, kv_heads = 8;
  int sequences = 1;
  std::int64_t length = 32768;
  int queries = 1;
  std::int32_t window = 0;
  bool mask = false, fresh_keys = false, any_length = false, calibrated = false;
  Format exact = Format::bf16;
  std::string kernel{};
};

class Asked {
 public:
  explicit Asked(const Case& c) : c_(c) {
    const int stored = c.stored_head_dim > 0 ? c.stored_head_dim : c.head_dim;
    p_.cache.encoded_layout = codec::page_layout(c.k, c.v, stored, 1, codec::is_tq(c.k));
    p_.cache.exact_layout = codec::page_layout(c.exact, c.exact, stored);
    p_.cache.sink_pages = p_.cache.tail_pages = codec::is_dense(c.k) ? 0 : 1;
    p_.cache.kv_heads = c.kv_heads;
    p_.cache.max_pages = static_cast<std::int32_t>(2 * c.length / kPageTokens + 2);
    p_.batch = c.sequences;
    p_.q_heads = c.q_heads, p_.group = c.q_heads / c.kv_heads, p_.head_dim = c.head_dim;
    p_.causal = true;
    p_.window = c.window;
    if (c.mask) p_.mask.data = this;
    const auto basis = [&](Format f) {
      return c.calibrated ? BasisKind::calibrated : codec::is_tq(f) ? BasisKind::hadamard : BasisKind::none;
    };
    p_.k_basis.kind = basis(c.k), p_.v_basis.kind = basis(c.v);
    for (int i = 0; i < c.sequences; ++i) sequences_.push_back({i, c.queries, i, c.length});
  }
  Asked(const Asked&) = delete;
  [[nodiscard]] Work work() const { return {p_, sequences_, c_.k, c_.v, c_.kernel, c_.fresh_keys, c_.any_length}; }

 private:
  const Case c_;
  AttendParams p_{};
  std::vector<core::DeviceSequence> sequences_;
};

struct Chosen {
  std::string kinds;  // "prefill_fresh, prefill_unpacked, prefill_sm90", in the order of launches
  std::string why;
  std::int64_t ns = 0;
  int rows = 0;  // of a decode kernel
};
Result<Chosen> try_choose(const Case& c, const Device& device) {
  const Asked asked(c);
  const Work work = asked.work();
  Offers offers = offers_of(work, device);
  if (!considers_prefill(work)) offers.sm90.reset(), offers.sm80.reset(), offers.dense.reset();  // as plans do
  const Result<Choice> choice = choose(work, offers);
  if (!choice.ok()) return choice.status();
  Chosen chosen{"", choice->why, choice->ns, 0};
  if (choice->first) chosen.kinds += "prefill_fresh, ";
  if (choice->rounds) chosen.kinds += "prefill_unpacked, ";
  chosen.kinds += choice->tiles != Tiles::none ? name_of(choice->tiles) : choice->kernel(offers);
  if (choice->decode >= 0) chosen.rows = offers.decode[static_cast<std::size_t>(choice->decode)].rows();
  return chosen;
}
Chosen choose_for(const Case& c, const char* device = "9.0") {
  return try_choose(c, device_of(device)).value();
}
std::string kinds(const Case& c, const char* device = "9.0") {
  return choose_for(c, device).kinds;
}
std::string refusal(const Case& c, const char* device = "9.0") {
  const Result<Chosen> chosen = try_choose(c, device_of(device));
  return chosen.ok() ? "takes " + chosen->kinds : chosen.message();
}
bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// --- the record ------------------------------------------------------------------------------------------------------

struct NamedPair {
  const char* name;
  Format k, v;
};
constexpr NamedPair kPairs[] = {{"bf16", Format::bf16, Format::bf16}, {"fp8", Format::fp8, Format::fp8},
                                {"tq4", Format::tq4, Format::tq4},    {"tq6/tq4", Format::tq6, Format::tq4},
                                {"tq8", Format::tq8, Format::tq8},    {"tq5/tq4", Format::tq5, Format::tq4}};
constexpr int kMostQueries = 4096;

// The kinds for 1, 2, 4 .. 4096 queries, with the number from which each is taken: "decode 1, prefill_sm80 64".
std::string over_queries(Case c, const Device& device) {
  std::string line, before;
  for (c.queries = 1; c.queries <= kMostQueries && c.queries <= c.length; c.queries *= 2) {
    const Result<Chosen> chosen = try_choose(c, device);
    std::string now = chosen.ok() ? chosen->kinds : "refused";
    std::replace(now.begin(), now.end(), ',', '+');
    if (now == before) continue;
    line += fmt::format("{}{} {}", line.empty() ? "" : ", ", now, c.queries);
    before = now;
  }
  return line;
}

// Rows of 32/8 heads up to head_dim 192, 16/2 at 256, 8/1 at 512.
Case case_of(int head_dim, const NamedPair& pair) {
  const int kv_heads = head_dim <= 192 ? 8 : head_dim == 256 ? 2 : 1;
  return {.head_dim = head_dim,
          .k = pair.k,
          .v = pair.v,
          .q_heads = kv_heads == 8 ? 32 : 8 * kv_heads,
          .kv_heads = kv_heads};
}

std::string record() {
  std::string text =
      "# Kernels that plans take, by the number of queries of a sequence from which they take them. A + B: A first, "
      "then\n"
      "# B for the rest. Written by KVANT_WRITE_CHOICES=1 cuda_choose_test; a change of this file is a change of what\n"
      "# users run, and its commit says why.\n"
      "# device, head_dim, keys/values, feature, sequences x keys: kinds\n";
  const auto line = [&](const Device& device, const NamedPair& pair, const char* feature, const Case& c) {
    text += fmt::format("{} {} {} {} {}x{}: {}\n", device.name, c.head_dim, pair.name, feature, c.sequences, c.length,
                        over_queries(c, device));
  };
  for (const Device& device : kDevices) {
    const bool is_of_three = device.name != std::string("8.6") && device.name != std::string("12.0");
    for (const int head_dim : instances().head_dims) {
      for (const NamedPair& pair : kPairs) {
        Case c = case_of(head_dim, pair);
        if (!is_of_three && head_dim != 128 && head_dim != 512) continue;
        for (c.length = 64; c.length <= 131072; c.length = c.length == 64     ? 2048
                                                           : c.length == 2048 ? 32768
                                                                              : 4 * c.length) {
          for (const int sequences : {1, 16, 256}) {
            c.sequences = sequences;
            line(device, pair, "plain", c);
          }
        }
        // Other requests, at the length where most of them are made.
        if (!is_of_three || head_dim % 128 != 0) continue;
        c = case_of(head_dim, pair);
        c.window = 1024, line(device, pair, "window", c);
        c.window = 0, c.mask = true, line(device, pair, "mask", c);
        c.mask = false, c.fresh_keys = true, line(device, pair, "fresh", c);
        c.any_length = true, line(device, pair, "engine", c);
        c.any_length = false, c.calibrated = true, c.fresh_keys = false, line(device, pair, "calibrated", c);
      }
    }
  }
  return text;
}

TEST(CudaChoose, IsAsRecorded) {
  const std::string path = test::source_path("tests/cuda_choices.txt"), now = record();
  if (std::getenv("KVANT_WRITE_CHOICES") != nullptr) {
    std::ofstream(path) << now;
    GTEST_SKIP() << "wrote " << path;
  }
  std::ifstream file(path);
  std::stringstream written;
  written << file.rdbuf();
  std::stringstream a(written.str()), b(now);
  std::string old_line, new_line;
  int number = 0, different = 0;
  while (true) {
    const bool has_old = static_cast<bool>(std::getline(a, old_line)),
               has_new = static_cast<bool>(std::getline(b, new_line));
    if (!has_old && !has_new) break;
    ++number;
    if (has_old && has_new && old_line == new_line) continue;
    if (++different <= 10)
      ADD_FAILURE() << "line " << number << "\nrecorded: " << old_line << "\nnow:      " << new_line;
  }
  EXPECT_EQ(different, 0) << "if the change is meant: KVANT_WRITE_CHOICES=1";
}

// --- rules -----------------------------------------------------------------------------------------------------------

// Rows of a sequence and kv head for a group of one, so that they are what the measured tables count.
Case rows_case(std::int64_t sequences, int heads, int rows, std::int64_t pages, int head_dim, Format k) {
  return {.head_dim = head_dim,
          .k = k,
          .v = k,
          .q_heads = heads,
          .kv_heads = heads,
          .sequences = static_cast<int>(sequences),
          .length = std::max<std::int64_t>(pages * kPageTokens, rows),
          .queries = rows};
}

// Few rows stay with decode kernels, and these are as few as take all rows.
TEST(CudaChoose, FewRowsTakeDecodeKernels) {
  Case c;
  EXPECT_EQ(kinds(c), "decode");
  EXPECT_EQ(choose_for(c).rows, 4);
  c.queries = 2;
  EXPECT_EQ(choose_for(c).rows, 8);
  c.queries = 3;
  EXPECT_EQ(choose_for(c).rows, 16);
  c.queries = 4;
  EXPECT_EQ(choose_for(c).rows, 16);
  EXPECT_TRUE(choose_for(c).why.empty());
  c = {.head_dim = 64};  // kernels of 4 and 16 rows
  c.queries = 2;
  EXPECT_EQ(choose_for(c).rows, 16);
  c = {.k = Format::tq2, .v = Format::tq2};
  EXPECT_EQ(choose_for(c).rows, 16);
  for (const Device& device : kDevices) EXPECT_EQ(kinds({}, device.name), "decode") << device.name;
}

TEST(CudaChoose, SeveralQueriesTakeWarpgroupsOnHopper) {
  Case c{.queries = 8};
  EXPECT_EQ(kinds(c), "decode_sm90");
  EXPECT_EQ(choose_for(c).rows, 32);
  EXPECT_TRUE(has(choose_for(c).why, "for 32 rows, about"));
  c.queries = 16;
  EXPECT_EQ(choose_for(c).rows, 64);
  EXPECT_EQ(kinds(c, "8.9"), "decode");
  c.k = Format::tq8;  // not compiled
  EXPECT_EQ(kinds(c), "decode");
  c = {.queries = 1, .kernel = "decode_sm90"};
  EXPECT_EQ(kinds(c), "decode_sm90");
  EXPECT_EQ(choose_for(c).why, "as asked for");
  EXPECT_TRUE(has(refusal(c, "8.9"), "decode_sm90 kernels need compute capability 9.0 and machine code"));
  c.k = Format::tq8;
  EXPECT_TRUE(has(refusal(c), "decode_sm90 kernels are not compiled for tq8/tq4 at head_dim 128")) << refusal(c);
}

// Kernels of eight warps: short work, and not with many exact pages.
TEST(CudaChoose, ShortWorkTakesEightWarps) {
  const auto teams = [](const Case& c) {
    const Asked asked(c);
    const Work work = asked.work();
    const Offers offers = offers_of(work, device_of("9.0"));
    const Choice choice = choose(work, offers).value();
    const DecodeOffer& one = offers.decode[static_cast<std::size_t>(choice.decode)];
    EXPECT_EQ(choice.least_exact_cost > 1, one.has_eight_warps);
    return one.has_eight_warps ? 8 : 4;
  };
  Case c{.length = 2048};
  EXPECT_EQ(teams(c), 8);
  c.length = 20 * 132 / 8 * kPageTokens;  // 20 pages a multiprocessor; two of 330 are exact
  EXPECT_EQ(teams(c), 8);
  c.length += 4 * kPageTokens;
  EXPECT_EQ(teams(c), 4);
  c = {.sequences = 2, .length = 2048};  // 2 x 8 x 2 exact pages: within a quarter of 132
  EXPECT_EQ(teams(c), 8);
  c.sequences = 3;
  EXPECT_EQ(teams(c), 4);
  c = {.length = 2048, .kernel = "decode_sm90"};
  EXPECT_EQ(teams(c), 4);
}

// Work of which each kind was measured on an H200 (docs/lab/cuda-prefill.md): the fastest, or one within 4 % of it.
TEST(CudaChoose, WhatWasMeasuredToBeFastest) {
  struct Row {
    int head_dim;
    Format k;
    std::int64_t sequences;
    int heads, rows;
    const char* kind;
  };
  for (const Row& r : std::vector<Row>{{128, Format::tq4, 1, 8, 16, "decode"},
                                       {128, Format::tq4, 1, 8, 32, "decode_sm90"},
                                       {128, Format::tq4, 16, 8, 64, "decode_sm90"},
                                       {128, Format::bf16, 16, 8, 16, "decode"},
                                       {128, Format::bf16, 16, 8, 32, "prefill_sm90"},
                                       {64, Format::bf16, 1, 8, 256, "decode"},
                                       {128, Format::tq4, 1, 8, 2048, "prefill_unpacked, prefill_sm90"},
                                       {64, Format::tq4, 1, 8, 4096, "prefill_unpacked, prefill_sm90"},
                                       {192, Format::tq4, 1, 4, 4096, "prefill_unpacked, prefill_sm80"},
                                       {256, Format::tq4, 1, 2, 8192, "prefill_unpacked, prefill_sm80"},
                                       {512, Format::tq4, 1, 1, 16384, "prefill_unpacked, prefill_sm80"}}) {
    SCOPED_TRACE(fmt::format("{}, {} rows", r.head_dim, r.rows));
    EXPECT_EQ(kinds(rows_case(r.sequences, r.heads, r.rows, 512, r.head_dim, r.k)), r.kind);
  }
  // Without Hopper's kernels.
  EXPECT_EQ(kinds(rows_case(16, 2, 8192, 512, 256, Format::tq4), "8.0"), "prefill_sm80");
  EXPECT_EQ(kinds(rows_case(1, 1, 8192, 512, 512, Format::bf16), "8.0"), "prefill_sm80");
  EXPECT_EQ(kinds(rows_case(1, 1, 2048, 512, 512, Format::bf16), "8.0"), "decode");
}

// A larger number of queries takes longer, or at most a tenth less: choices have no cliff by their own times.
TEST(CudaChoose, MoreQueriesTakeLonger) {
  for (const Device& device : kDevices) {
    for (const int head_dim : instances().head_dims) {
      for (const NamedPair& pair : kPairs) {
        for (const int sequences : {1, 16, 256}) {
          for (const std::int64_t pages : {64, 512}) {
            Case c = case_of(head_dim, pair);
            c.sequences = sequences, c.length = pages * kPageTokens;
            std::int64_t before = 0;
            for (c.queries = 1; c.queries <= kMostQueries; c.queries *= 2) {
              const Result<Chosen> now = try_choose(c, device);
              if (!now.ok()) break;
              EXPECT_LE(10 * before, 11 * now->ns) << device.name << " " << head_dim << " " << pair.name << " "
                                                   << sequences << " x " << c.length << ", " << c.queries << " queries";
              before = now->ns;
            }
          }
        }
      }
    }
  }
}

TEST(CudaChoose, OptionsNameAKind) {
  const auto named = [](const char* kernel, int queries = 1, bool fresh = false) {
    return Case{.queries = queries, .fresh_keys = fresh, .kernel = kernel};
  };
  EXPECT_EQ(kinds(named("decode", 4096)), "decode");
  EXPECT_EQ(choose_for(named("decode", 4096)).why, "decode kernels, as asked for");
  EXPECT_EQ(kinds(named("prefill")), "prefill_sm90");
  EXPECT_EQ(kinds(named("prefill_sm90")), "prefill_sm90");
  EXPECT_EQ(kinds(named("prefill_sm80")), "prefill_sm80");
  EXPECT_EQ(kinds(named("prefill_unpacked")), "prefill_unpacked, prefill_sm90");
  EXPECT_EQ(kinds(named("generic", 4096)), "generic");
  EXPECT_EQ(choose_for(named("generic")).why, "as asked for");
  EXPECT_EQ(kinds(named("prefill_fresh", 1, true)), "prefill_fresh, prefill_sm90");
  EXPECT_TRUE(has(refusal(named("prefill_fresh")), "which plans with fresh_keys have"));
  EXPECT_TRUE(has(refusal(named("decode", 1, true)), "only prefill kernels serve"));
  EXPECT_TRUE(
      has(refusal(named("generic", 1, true)), "fresh_keys needs prefill kernels, and the generic kernel serves"));
  for (const char* kernel : {"prefill_sm90", "prefill_unpacked"})
    EXPECT_TRUE(has(refusal(named(kernel), "8.9"), "need compute capability 9.0")) << refusal(named(kernel), "8.9");
  EXPECT_EQ(kinds(named("prefill"), "8.9"), "prefill_sm80");
}

TEST(CudaChoose, FreshKeys) {
  Case c{.length = 4096, .queries = 4096, .fresh_keys = true};
  EXPECT_EQ(kinds(c), "prefill_fresh, prefill_unpacked, prefill_sm90");
  EXPECT_EQ(kinds(c, "8.9"), "prefill_sm80");
  EXPECT_TRUE(has(choose_for(c, "8.9").why, "prefill_fresh kernels need compute capability 9.0"));
  c.length = 8192;  // all sequences have older tokens
  EXPECT_EQ(kinds(c).find("prefill_fresh"), std::string::npos);
  c.any_length = true;
  EXPECT_EQ(kinds(c).rfind("prefill_fresh, ", 0), 0u);
  // Fewer rows than a second launch is worth: 63 queries of 4 heads.
  c = {.length = 63, .queries = 63, .fresh_keys = true};
  EXPECT_EQ(kinds(c).find("prefill_fresh"), std::string::npos);
  c.length = c.queries = 64;
  EXPECT_EQ(kinds(c).rfind("prefill_fresh, ", 0), 0u);
  c.queries = c.length = 1;  // decode kernels do not read fresh keys
  EXPECT_EQ(kinds(c), "prefill_sm90");
}

TEST(CudaChoose, WhatKindsDoNotServe) {
  // Masks, bases, padded vectors, formats.
  Case c{.queries = 2048, .mask = true};
  EXPECT_EQ(kinds(c), "prefill_sm90");
  c.kernel = "prefill_unpacked";
  EXPECT_TRUE(has(refusal(c), "prefill_unpacked kernels take no mask tensor")) << refusal(c);
  c = {.queries = 2048, .calibrated = true};
  EXPECT_EQ(kinds(c), "decode_sm90");
  c.k = c.v = Format::tq8;
  EXPECT_EQ(kinds(c), "decode");
  EXPECT_TRUE(has(choose_for(c).why, "bases other than the formats' own"));
  c = {.head_dim = 72, .stored_head_dim = 96, .queries = 2048};
  EXPECT_EQ(kinds(c), "prefill_unpacked, prefill_sm80");
  c.kernel = "prefill_sm90";
  EXPECT_TRUE(has(refusal(c), "do not serve padded vectors"));
  c = {.k = Format::f32, .v = Format::f32, .queries = 2048};
  EXPECT_EQ(kinds(c), "generic");
  EXPECT_EQ(choose_for(c).why, "k = f32 has no other kernel");
  c.kernel = "decode";
  EXPECT_TRUE(has(refusal(c), "with k = f32 the generic kernel alone serves"));
  c = {.queries = 2048, .exact = Format::f32};
  EXPECT_EQ(choose_for(c).why, "exact = f32 has no other kernel");
  c = {.k = Format::bf16, .v = Format::tq4, .queries = 1};  // a pair that default builds leave out
  EXPECT_TRUE(has(refusal(c), "k = bf16, v = tq4 on a device")) << refusal(c);
  c.kernel = "generic";
  EXPECT_EQ(kinds(c), "generic");
  c = {.head_dim = 576};
  EXPECT_TRUE(has(refusal(c), "head_dim = 576 on a device")) << refusal(c);
  // prefill_sm80 needs more shared memory at 512 than these cards have.
  c = case_of(512, kPairs[3]);
  c.queries = 2048, c.kernel = "prefill_sm80";
  EXPECT_TRUE(has(refusal(c, "8.6"), "bytes of shared memory a block")) << refusal(c, "8.6");
  // More rows than a plan counts.
  c = {.sequences = 1, .length = 1 << 20, .queries = 1 << 19, .kernel = "prefill"};
  EXPECT_TRUE(has(refusal(c), "more than one plan takes"));
}

// Plans of few rows ask nothing of the driver, which would load kernels that they do not take.
TEST(CudaChoose, FewRowsDoNotLookAtPrefill) {
  const auto looks = [](const Case& c) { return considers_prefill(Asked(c).work()); };
  EXPECT_FALSE(looks({}));
  EXPECT_FALSE(looks({.queries = 4}));
  EXPECT_TRUE(looks({.queries = 5}));
  EXPECT_TRUE(looks({.fresh_keys = true}));
  EXPECT_TRUE(looks({.kernel = "prefill"}));
  EXPECT_FALSE(looks({.queries = 4096, .kernel = "generic"}));
  EXPECT_FALSE(looks({.k = Format::f32, .v = Format::f32, .queries = 4096}));
}

}  // namespace
}  // namespace kvant::cuda
