// Which kernels plans on a device take (cuda/plan/choose.hpp): the function that plans call, on devices of several
// classes, over the kernels that a default build has. No device is needed.
#include "cuda/plan/choose.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cuda/plan/decode_kinds.hpp"
#include "cuda/plan/kernels_of.hpp"
#include "cuda/prefill/units.hpp"
#include "support/cuda_record.hpp"
#include "support/paths.hpp"

namespace kvant::cuda {
namespace {

// --- the record ------------------------------------------------------------------------------------------------------

TEST(CudaChoose, IsAsRecorded) {
  const std::string path = test::source_path("tests/cuda_choices.txt"), now = record::table();
  if (std::getenv("KVANT_WRITE_CHOICES") != nullptr) {
    std::ofstream(path) << now;
    GTEST_SKIP() << "wrote " << path;
  }
  std::ifstream recorded(path);
  std::stringstream table(now);
  std::string old_line, new_line;
  int number = 0, different = 0;
  while (true) {
    const bool has_old = static_cast<bool>(std::getline(recorded, old_line)),
               has_new = static_cast<bool>(std::getline(table, new_line));
    if (!has_old && !has_new) break;
    ++number;
    const std::string what = has_old && has_new ? record::difference(old_line, new_line) : "another number of lines";
    if (!what.empty() && ++different <= 10)
      ADD_FAILURE() << "line " << number << ", " << what << "\nrecorded: " << old_line << "\nnow:      " << new_line;
  }
  EXPECT_EQ(different, 0) << "if the change is meant: KVANT_WRITE_CHOICES=1";
  EXPECT_LE(number, 200) << "more than a person reviews";
}

// The comparison notices another kind, another boundary and an estimate that is more than a tenth off.
TEST(CudaChoose, TheRecordsComparison) {
  const std::string line = "9.0 128 tq4 | dec 1:12, un+pre90 64:200";
  EXPECT_EQ(record::difference(line, line), "");
  EXPECT_EQ(record::difference(line, "9.0 128 tq4 | dec 1:13, un+pre90   64:190"), "");
  EXPECT_EQ(record::difference(line, "9.0 128 tq4 | dec 1:12, un+pre80 64:200"), "other choices");
  EXPECT_EQ(record::difference(line, "9.0 128 tq4 | dec 1:12, un+pre90 32:200"), "other choices");
  EXPECT_EQ(record::difference(line, "9.0 128 tq4 | dec 1:12"), "other choices");
  EXPECT_EQ(record::difference(line, "9.0 128 tq4 | dec 1:12, un+pre90 64:230"), "an estimate is 230, and was 200");
  EXPECT_EQ(record::difference("# a: 1", "# a: 2"), "other choices");
  EXPECT_EQ(record::estimate(8449), "8.4");
  EXPECT_EQ(record::estimate(9951), "10");
  EXPECT_EQ(record::estimate(99400), "99");
  EXPECT_EQ(record::estimate(123456), "120");
  EXPECT_EQ(record::estimate(99500), "100");
  EXPECT_EQ(record::short_name("prefill_fresh, prefill_unpacked, prefill_sm90"), "fr+un+pre90");
  EXPECT_EQ(record::short_name("decode"), "dec");
  EXPECT_EQ(record::short_name("decode_sm90"), "dec90");
}

// --- tunings ---------------------------------------------------------------------------------------------------------

// A device whose times of the case's keys are these thousandths of the estimates.
struct Tuned {
  Tuned(const Case& c, const char* name, std::vector<std::pair<const char*, int>> thousandths)
      : device(device_of(name)) {
    tuning.path = "tuning.txt";
    for (const auto& [kind, ratio] : thousandths)
      tuning.ratios.push_back({{core::tuned_kind(kind), c.head_dim, core::stored(c.k), 8, 64}, ratio});
    device.tuning = &tuning;
  }
  Tuned(const Tuned&) = delete;
  core::Tuning tuning;
  Device device;
};

TEST(CudaChoose, ATuningMultipliesEstimates) {
  const Case usual{.queries = 128};
  for (const Device& device : kDevices) {
    for (const char* kind : core::kTunedKinds) {
      Case c = usual;
      c.kernel = kind;
      if (kind == std::string(core::kUnpackedBytes))
        c.kernel = core::kPrefillUnpacked, c.products = 8, c.head_dim = 256;
      const Result<Chosen> plain = try_choose(c, device);
      if (!plain.ok()) continue;
      const Tuned tuned(c, device.name, {{kind, 1500}});
      EXPECT_NEAR(static_cast<double>(try_choose(c, tuned.device)->ns), 1.5 * static_cast<double>(plain->ns), 1)
          << device.name << " " << kind;
      Case other = c;  // whose times were not measured
      other.head_dim = 512, other.products = 0, other.kernel = core::kDecodeKernels;
      EXPECT_EQ(try_choose(other, tuned.device)->ns, try_choose(other, device)->ns);
    }
  }
}

TEST(CudaChoose, ATuningTakesTheKindThatIsFasterOnTheDevice) {
  const Case prompt{.queries = 512};
  const auto taken = [](const Case& c, const char* device, std::vector<std::pair<const char*, int>> thousandths) {
    const Tuned tuned(c, device, std::move(thousandths));
    return try_choose(c, tuned.device)->kinds;
  };
  ASSERT_EQ(kinds(prompt, "8.6"), "decode_sm80");
  EXPECT_EQ(taken(prompt, "8.6", {{core::kDecodeSm80, 900}}), "decode_sm80");
  EXPECT_EQ(taken(prompt, "8.6", {{core::kDecodeSm80, 20000}}), "prefill_sm80");
  EXPECT_EQ(taken(prompt, "8.6", {{core::kDecodeSm80, 20000}, {core::kPrefillSm80, 20000}}), "decode");
  EXPECT_EQ(taken(prompt, "8.6", {{core::kDecodeKernels, 20}}), "decode");
  ASSERT_EQ(kinds(prompt, "9.0"), "prefill_unpacked, prefill_sm90");
  EXPECT_EQ(taken(prompt, "9.0", {{core::kPrefillUnpacked, 20000}}), "prefill_sm90");
  EXPECT_EQ(taken(prompt, "9.0", {{core::kPrefillSm90, 20000}}), "prefill_unpacked, prefill_sm80");
  const Case draft{.k = Format::tq4, .v = Format::tq4, .queries = 16};
  ASSERT_EQ(kinds(draft, "9.0"), "decode_sm90");
  EXPECT_EQ(taken(draft, "9.0", {{core::kDecodeSm90, 20000}}), kinds(draft, "8.0"));
}

TEST(CudaChoose, PlansNameTheTuningAndTheKindsThatItHas) {
  const Case c{.queries = 128};
  const Asked asked(c);
  Tuned tuned(c, "9.0", {{core::kDecodeKernels, 1043}, {core::kPrefillSm90, 900}});
  EXPECT_EQ(tuned_words(asked.work(), tuned.tuning),
            "tuned by tuning.txt: decode 1.04, prefill_sm90 0.90 times the estimate");
  tuned.tuning.ratios[0].work.head_dim = tuned.tuning.ratios[1].work.head_dim = 256;
  EXPECT_EQ(tuned_words(asked.work(), tuned.tuning), "tuning.txt has no times of tq keys at head_dim 128");
  EXPECT_EQ(tuned_words(asked.work(), {}), "");
  core::Tuning unused;
  unused.ignored = "t is not used: why";
  EXPECT_EQ(tuned_words(asked.work(), unused), unused.ignored);
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

// Kernels for several queries: of half weights on any device, of warpgroups on Hopper.
TEST(CudaChoose, SeveralQueries) {
  Case c{.queries = 8};
  EXPECT_EQ(kinds(c), "decode_sm90");
  EXPECT_EQ(choose_for(c).rows, 32);
  EXPECT_TRUE(has(choose_for(c).why, "for 32 rows, about"));
  c.queries = 16;
  EXPECT_EQ(choose_for(c).rows, 64);
  EXPECT_EQ(kinds(c, "8.9"), "decode_sm80");
  EXPECT_EQ(choose_for(c, "8.9").rows, 32);
  c.k = Format::tq8;  // not compiled
  EXPECT_EQ(kinds(c), "decode");
  EXPECT_EQ(choose_for(c).why, "decode_sm90 and decode_sm80 kernels are not compiled for tq8/tq4 at head_dim 128");
  c.v = Format::tq8;
  EXPECT_EQ(kinds(c), "decode_sm80");
  c = {.head_dim = 256, .q_heads = 16, .kv_heads = 2, .sequences = 16, .queries = 2};
  EXPECT_EQ(kinds(c, "8.0"), "decode_sm80");  // 16 rows
  EXPECT_EQ(choose_for(c, "8.0").rows, 16);
  c.queries = 4;
  EXPECT_EQ(choose_for(c, "8.0").rows, 32);
  c.queries = 1;
  EXPECT_EQ(kinds(c, "8.0"), "decode");
  c.queries = 4, c.kernel = "decode";  // the more exact kernels
  EXPECT_EQ(kinds(c, "8.0"), "decode");
  c = {.queries = 1, .kernel = "decode_sm80"};
  EXPECT_EQ(kinds(c, "12.0"), "decode_sm80");
  c.head_dim = 64;
  EXPECT_TRUE(has(refusal(c), "decode_sm80 kernels are not compiled for tq6/tq4 at head_dim 64")) << refusal(c);
  c = {.queries = 1, .kernel = "decode_sm90"};
  EXPECT_EQ(kinds(c), "decode_sm90");
  EXPECT_EQ(choose_for(c).why, "as asked for");
  EXPECT_TRUE(has(refusal(c, "8.9"), "decode_sm90 kernels need compute capability 9.0 and machine code"));
  c.k = Format::tq8;
  EXPECT_TRUE(has(refusal(c), "decode_sm90 kernels are not compiled for tq8/tq4 at head_dim 128")) << refusal(c);
}

// Kernels for compute capability 9.0 alone need its code: a build without sm_90a has none.
TEST(CudaChoose, KindsWithoutCodeForTheDevice) {
  Case c{.k = Format::tq4, .v = Format::tq4, .queries = 16};
  const auto choose_without = [&] {
    const Asked asked(c);
    const PlannedWork work = asked.work();
    Offers offers = offers_of(work, device_of("9.0"));
    for (DecodeOffer& one : offers.decode) one.has_code = !one.is_for_hopper();
    for (TileOffers& one : offers.tiles) {
      if (one.kernel) one.kernel->has_code = false;
    }
    const Result<Choice> choice = choose(work, offers);
    return choice.ok() ? std::string(choice->kernel(offers)) : choice.message();
  };
  ASSERT_EQ(kinds(c), "decode_sm90");
  EXPECT_NE(choose_without(), "decode_sm90");
  c.kernel = "decode_sm80";
  EXPECT_EQ(choose_without(), "decode_sm80");
  c.kernel = "decode_sm90";
  EXPECT_TRUE(has(choose_without(), "decode_sm90 kernels need compute capability 9.0 and machine code"));
}

// A kind may have units without a kernel: those are not among the head_dims that a refusal names.
TEST(CudaChoose, RefusalsNameTheHeadDimsThatAKindHas) {
  const Case c{.head_dim = 512, .k = Format::tq4, .v = Format::tq4, .queries = 512, .kernel = "prefill_sm90"};
  const std::string refused = refusal(c);
  EXPECT_TRUE(has(refused, "prefill_sm90 kernels are compiled for head_dim 64, 96, 128, 192, 256;")) << refused;
}

// The list of instances gives each kind its place in all tables.
TEST(CudaChoose, EachKindHasANameAndTimes) {
  const auto is_known = [](const char* name, const auto& names) {
    return std::count(std::begin(names), std::end(names), std::string_view(name)) == 1;
  };
  for (const DecodeKindEntry& one : kDecodeKinds)
    EXPECT_TRUE(is_known(one.name, core::kKernelNames) && is_known(one.name, core::kTunedKinds)) << one.name;
  for (const TileKind& one : kTileKinds)
    EXPECT_TRUE(is_known(one.name, core::kKernelNames) && is_known(one.name, core::kTunedKinds)) << one.name;
  // The option "prefill" takes the first tile kind that serves.
  EXPECT_EQ(kTileKinds[0].name, std::string(core::kPrefillSm90));
  for (const prefill::TileUnit& unit : prefill::kTileUnits) {
    for (const prefill::Kernel& kernel : unit.kernels()) EXPECT_EQ(kernel.head_dim, unit.head_dim) << unit.kind;
  }
}

// Kernels of eight warps: short work, and not with many exact pages.
TEST(CudaChoose, ShortWorkTakesEightWarps) {
  const auto teams = [](const Case& c) {
    const Asked asked(c);
    const PlannedWork work = asked.work();
    const Offers offers = offers_of(work, device_of("9.0"));
    const Choice choice = choose(work, offers).value();
    const DecodeOffer& one = offers.decode[static_cast<std::size_t>(choice.decode)];
    EXPECT_EQ(choice.least_exact_cost > 1, one.has_eight_warps());
    return one.has_eight_warps() ? 8 : 4;
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
                                       {128, Format::tq4, 16, 8, 32, "decode_sm90"},
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
  EXPECT_EQ(kinds(rows_case(16, 2, 8192, 512, 256, Format::tq5), "8.0"), "prefill_sm80");
  EXPECT_EQ(kinds(rows_case(1, 8, 1024, 512, 128, Format::tq8), "8.0"), "decode_sm80");
  EXPECT_EQ(kinds(rows_case(1, 2, 8192, 512, 256, Format::tq8), "8.0"), "decode_sm80");
  EXPECT_EQ(kinds(rows_case(1, 1, 8192, 512, 512, Format::bf16), "8.0"), "prefill_sm80");
  EXPECT_EQ(kinds(rows_case(1, 1, 2048, 512, 512, Format::bf16), "8.0"), "decode");
}

// A larger number of queries takes longer, or at most a tenth less: choices have no cliff by their own times.
TEST(CudaChoose, MoreQueriesTakeLonger) {
  for (const Device& device : kDevices) {
    for (const int width : units::attend) {
      for (const NamedPair& pair : kPairs) {
        for (const int sequences : {1, 16, 256}) {
          for (const std::int64_t pages : {64, 512}) {
            Case c = case_of(width, pair);
            c.sequences = sequences, c.length = pages * kPageTokens;
            std::int64_t before = 0;
            for (c.queries = 1; c.queries <= record::kMostQueries; c.queries *= 2) {
              const Result<Chosen> now = try_choose(c, device);
              if (!now.ok()) break;
              EXPECT_LE(10 * before, 11 * now->ns) << device.name << " " << width << " " << pair.name << " "
                                                   << sequences << " x " << c.length << ", " << c.queries << " queries";
              before = now->ns;
            }
          }
        }
      }
    }
  }
}

TEST(CudaChoose, ProductsOf8BitsServeWhereTheyAreFaster) {
  Case c{.head_dim = 256, .k = Format::tq4, .q_heads = 16, .kv_heads = 2, .queries = 2048, .products = 8};
  EXPECT_EQ(kinds(c), "prefill_unpacked, prefill_sm80");
  EXPECT_TRUE(choose_for(c).byte_keys);
  c.k = Format::tq6;
  EXPECT_TRUE(choose_for(c).byte_keys);
  c.products = 16;
  EXPECT_FALSE(choose_for(c).byte_keys);
  c.products = 8, c.queries = 1;
  EXPECT_EQ(kinds(c), "decode");
  c.kernel = "prefill_unpacked", c.queries = 16;  // whatever the time
  EXPECT_TRUE(choose_for(c).byte_keys);
  c.kernel = "prefill_sm80";
  EXPECT_FALSE(choose_for(c).byte_keys);
  EXPECT_TRUE(has(choose_for(c).why, "these kernels multiply in 16 bits"));
  c.kernel = {};
  for (const int queries : {1, 2048}) {
    c.queries = queries;
    EXPECT_TRUE(has(refusal(c, "8.9"), "products is 8: these kernels need compute capability 9.0; leave it 0"));
    c.head_dim = 128;
    EXPECT_TRUE(has(refusal(c), "products is 8: 16 bits are as fast at head_dim 128")) << refusal(c);
    c.head_dim = 256, c.k = Format::tq8;
    EXPECT_TRUE(has(refusal(c), "products is 8: the cache stores tq8/tq4")) << refusal(c);
    c.k = Format::tq6;
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

// Plans find the kernels of every width, pair of formats and kind that a build compiles. A width of two head_dims is as
// any other: its prompts are unpacked, for which each side has its own kernel.
TEST(CudaChoose, PlansFindWhatIsCompiled) {
  const auto has_unit = [](const auto& unit, int width) {
    return std::find(std::begin(unit), std::end(unit), width) != std::end(unit);
  };
  for (const int width : units::attend) {
    for (const FormatPair& pair : instances().pairs) {
      const std::string which = pair_name(pair) + " " + width_name(width);
      Case c = case_of(width, {"", pair.k, pair.v});
      c.queries = 2048;
      const Asked asked(c);
      const Compiled found = compiled_for(asked.work(), device_of("9.0"));
      EXPECT_FALSE(found.offers.decode.empty()) << which;
      ASSERT_EQ(found.dense.empty(), !has_unit(units::prefill_dense, width)) << which;
      ASSERT_EQ(found.offers.dense.has_value(), !found.dense.empty()) << which;
      if (found.dense.empty()) continue;
      EXPECT_EQ(found.dense.size(), 2U) << which;  // both dtypes
      EXPECT_EQ(found.dense[0].head_dim, key_dim(width)) << which;
      EXPECT_TRUE(found.offers.dense->has_code && found.offers.dense->has_maps) << which;
      for (const int side : {key_dim(width), value_dim(width)})
        EXPECT_TRUE(has_unit(units::unpack, side) && has_unit(units::append, side)) << which;
      c.kernel = core::kPrefillUnpacked;
      if (prefill::has_one_type(pair.k, pair.v)) {
        EXPECT_TRUE(kinds(c).starts_with("prefill_unpacked, ")) << kinds(c) << " " << which;
      }
      if (c.v_head_dim == 0) continue;
      c.kernel = {};
      EXPECT_TRUE(kinds(c).starts_with("prefill_unpacked, decode")) << kinds(c) << " " << which;
    }
  }
  for (const int width : units::prefill_dense) EXPECT_TRUE(has_unit(units::attend, width)) << width;
  const auto found = [](int width) { return kernels_of<units::prefill_dense>(width, []<int W>() { return W; }); };
  for (const int width : units::prefill_dense) EXPECT_EQ(found(width), width);
  for (const int width : {1, 80, 513, 128192, 192129}) EXPECT_EQ(found(width), 0) << width;  // no other is the next
}

// Keys and values of different head_dims have decode kernels, and on 9.0 unpacked keys before them.
TEST(CudaChoose, UnequalWidths) {
  Case c{.head_dim = 192, .v_head_dim = 128, .k = Format::tq4, .v = Format::tq4, .q_heads = 16, .kv_heads = 4};
  for (const Device& device : kDevices) {
    EXPECT_EQ(kinds(c, device.name), "decode") << device.name;
    EXPECT_EQ(choose_for(c, device.name).rows, 4) << device.name;
  }
  c.queries = 16;
  for (const char* device : {"8.0", "9.0"}) EXPECT_EQ(kinds(c, device), "decode_sm80") << device;
  c.queries = 2048;
  EXPECT_EQ(kinds(c, "8.0"), "decode_sm80");
  EXPECT_EQ(kinds(c), "prefill_unpacked, decode_sm80");
  EXPECT_TRUE(has(choose_for(c).why, "us, decode kernels ")) << choose_for(c).why;
  c.kernel = "prefill_unpacked";
  EXPECT_EQ(kinds(c), "prefill_unpacked, decode");
  EXPECT_EQ(choose_for(c).why, "as asked for");
  c.kernel = "prefill";
  EXPECT_EQ(kinds(c), "prefill_unpacked, decode");
  EXPECT_TRUE(has(refusal(c, "8.0"), "prefill_unpacked kernels need compute capability 9.0")) << refusal(c, "8.0");
  for (const char* kernel : {"prefill_sm80", "prefill_sm90"}) {
    c.kernel = kernel;
    EXPECT_TRUE(has(refusal(c), "not compiled for tq4/tq4 at head_dim 192/128")) << refusal(c);
  }
  // Decode kernels take what is in no round, and have no fresh keys.
  const char* why = "at head_dim 192/128 decode kernels serve some sequences, or all, and read stored keys alone";
  c.kernel = "prefill_fresh";
  EXPECT_TRUE(has(refusal(c), why)) << refusal(c);
  c.fresh_keys = true;
  for (const char* kernel : {"", "prefill", "prefill_unpacked", "prefill_fresh"}) {
    c.kernel = kernel;
    for (const char* device : {"8.0", "9.0"}) EXPECT_TRUE(has(refusal(c, device), why)) << refusal(c, device);
  }
  c.kernel = {};
  EXPECT_TRUE(has(refusal(c), "fresh_keys needs prefill kernels: ")) << refusal(c);
  EXPECT_TRUE(has(refusal(c), "alone; leave it unset")) << refusal(c);
  c.fresh_keys = false, c.products = 8;
  EXPECT_TRUE(has(refusal(c), "16 bits are as fast at head_dim 192/128")) << refusal(c);
  c.products = 0, c.mask = true;
  EXPECT_EQ(kinds(c), "decode_sm80");
  c.mask = false, c.calibrated = true;
  EXPECT_EQ(kinds(c), "decode_sm80");
  // The workspace has room for so many keys and values of a kv head.
  c = {.head_dim = 192, .v_head_dim = 128, .q_heads = 16, .kv_heads = 4, .queries = 64, .kernel = "prefill_unpacked"};
  c.length = (std::int64_t{256} << 20) / (2 * (192 + 128)) / kPageTokens * kPageTokens;
  EXPECT_EQ(kinds(c), "prefill_unpacked, decode");
  c.length += kPageTokens;
  EXPECT_TRUE(has(refusal(c), "prefill_unpacked needs 256 MiB of workspace")) << refusal(c);
  // A few rows need no rounds, and other pairs have no kernel of 32 rows.
  c = {.head_dim = 192, .v_head_dim = 128, .q_heads = 16, .kv_heads = 4, .queries = 4};
  EXPECT_EQ(kinds(c), "decode");
  c.queries = 2048;
  EXPECT_EQ(kinds(c), "prefill_unpacked, decode");
  c.kernel = "decode_sm80";
  EXPECT_TRUE(has(refusal(c), "decode_sm80 kernels are not compiled for tq6/tq4 at head_dim 192/128")) << refusal(c);
  // Only widths that are compiled.
  c = {.head_dim = 128, .v_head_dim = 192};
  EXPECT_TRUE(has(refusal(c), "head_dim = 128 with v_head_dim = 192 on a device")) << refusal(c);
  EXPECT_TRUE(has(refusal(c), "of one size, or of 192/128;")) << refusal(c);
}

TEST(CudaChoose, WhatKindsDoNotServe) {
  // Masks, bases, padded vectors, formats.
  Case c{.queries = 2048, .mask = true};
  EXPECT_EQ(kinds(c), "prefill_sm90");
  c.kernel = "prefill_unpacked";
  EXPECT_TRUE(has(refusal(c), "prefill_unpacked kernels take no mask tensor")) << refusal(c);
  c = {.queries = 2048, .calibrated = true};
  EXPECT_EQ(kinds(c), "decode_sm90");
  c.k = c.v = Format::tq5;
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
  // prefill_sm80 needs more shared memory than such a card would have.
  c = case_of(512, kPairs[3]);
  c.queries = 2048, c.kernel = "prefill_sm80";
  Device little = device_of("8.6");
  little.limits.shared_bytes = 64 * 1024;
  EXPECT_TRUE(has(try_choose(c, little).message(), "bytes of shared memory a block"))
      << try_choose(c, little).message();
  // More rows than a plan counts.
  c = {.sequences = 1, .length = 1 << 20, .queries = 1 << 19, .kernel = "prefill"};
  EXPECT_TRUE(has(refusal(c), "more than one plan takes"));
}

// Plans of few rows ask nothing of the driver, which would load kernels that they do not take.
// Latents have kernels of 16 rows, and of 64 for 9.0; elsewhere, and for other formats, the generic kernel serves.
TEST(CudaChoose, Latents) {
  const Case latents{.head_dim = 64,
                     .v_head_dim = 512,
                     .latent = true,
                     .k = Format::tq8,
                     .v = Format::tq4,
                     .q_heads = 16,
                     .kv_heads = 1,
                     .sequences = 16};
  const auto try_latents = [](const Case& c, const char* device, bool compiled = true) -> Result<Chosen> {
    const Asked asked(c);
    const PlannedWork work = asked.work();
    EXPECT_EQ(work.width(), 1064512);
    EXPECT_FALSE(considers_prefill(work));
    const bool is_later = std::string(device) == "later";  // with much shared memory, but not of 9.0
    Offers offers{.instances = instances(), .limits = device_of(is_later ? "8.0" : device).limits};
    if (is_later) offers.limits.shared_bytes = 232448;
    offers.has_decode = true;
    for (const bool centred : {false, true}) {
      if (!compiled) break;
      offers.decode.push_back({{.k = c.k,
                                .v = c.v,
                                .column_tiles = 16,
                                .function = nullptr,
                                .shared_bytes = {232000, 232000, 232000},
                                .team = 16,
                                .teams = 1,
                                .kind = DecodeKind::decode_sm90,
                                .unpacks_latents = true,
                                .has_latent_centres = centred},
                               offers.limits.has_sm90()});
    }
    if (compiled) {
      offers.decode.push_back({{.k = c.k,
                                .v = c.v,
                                .column_tiles = 4,
                                .function = nullptr,
                                .shared_bytes = {208000, 208000, 208000},
                                .team = 2,
                                .teams = 4}});
    }
    const Result<Choice> choice = choose(work, offers);
    if (!choice.ok()) return choice.status();
    return Chosen{choice->kernel(offers), choice->why, choice->ns};
  };
  const Chosen usual = try_latents(latents, "9.0").value();
  EXPECT_EQ(usual.kinds, "decode");
  EXPECT_EQ(usual.why, "");
  Case c = latents;
  c.queries = 2;
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "decode");  // two row blocks
  c.queries = 4;
  const Chosen four = try_latents(c, "9.0").value();
  EXPECT_EQ(four.kinds, "decode_sm90");
  c.queries = 5;
  EXPECT_GT(try_latents(c, "9.0")->ns, four.ns);
  EXPECT_EQ(try_latents(c, "later")->kinds, "decode");
  c = latents;
  c.kernel = "decode_sm90";
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "decode_sm90");
  EXPECT_TRUE(has(try_latents(c, "later").message(), "need compute capability 9.0"));
  c.kernel = "decode";
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "decode");
  EXPECT_TRUE(has(try_latents(c, "8.0").message(), "decode kernels need 208000 bytes of shared memory a block"));
  c.kernel = "generic";
  EXPECT_EQ(try_latents(c, "9.0")->why, "as asked for");
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "generic");
  c.kernel = "prefill";
  EXPECT_TRUE(
      has(try_latents(c, "9.0").message(), "latents have the kernels decode, decode_sm90 and generic on a device"));
  c = latents;
  EXPECT_EQ(try_latents(c, "8.0")->kinds, "generic");
  EXPECT_TRUE(has(try_latents(c, "8.0")->why, "decode kernels need 208000 bytes of shared memory a block"));
  EXPECT_EQ(try_latents(c, "9.0", false)->why, "tq8/tq4 at head_dim 512+64 has no other kernel of latents");
  c.k = Format::bf16;
  EXPECT_EQ(try_latents(c, "9.0")->why, "k = bf16 with latents in tq4 has no other kernel");
  c = latents;
  c.v_centre = true;
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "decode_sm90");
  EXPECT_TRUE(has(try_latents(c, "later")->why, "decode kernels do not add centres of latents"));
  c = latents;
  c.calibrated = true;
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "generic");
  c = latents;
  c.exact = Format::f32;
  EXPECT_EQ(try_latents(c, "9.0")->kinds, "generic");
  c = latents;
  c.products = 8;
  EXPECT_TRUE(has(try_latents(c, "9.0").message(), "products is 8, but the cache stores latents"));
  c = latents;
  c.fresh_keys = true;
  EXPECT_TRUE(has(try_latents(c, "9.0").message(), "fresh_keys needs prefill kernels, and latents have none"));
}

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
