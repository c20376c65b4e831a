// `kvant bench` as its users meet it: its output, and that its figures belong to the requested case.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/cli.hpp"

namespace kvant::test {
namespace {

using CliBench = CliTest;

const std::set<std::string> kBenchKeys = {"op",
                                          "backend",
                                          "isa",
                                          "k_format",
                                          "v_format",
                                          "q_heads",
                                          "kv_heads",
                                          "head_dim",
                                          "v_head_dim",
                                          "latent",
                                          "batch",
                                          "keys",
                                          "q_len",
                                          "first_keys",
                                          "k_centre",
                                          "threads",
                                          "window",
                                          "softcap",
                                          "alibi",
                                          "mask",
                                          "fresh_keys",
                                          "between_mib",
                                          "kernel",
                                          "products",
                                          "median_ns",
                                          "spread",
                                          "ns_per_value",
                                          "gb_per_s",
                                          "gflops",
                                          "share_of_read_bandwidth",
                                          "share_of_fma_peak",
                                          "share_of_product",
                                          "rel_l2"};

TEST_F(CliBench, WritesExactlyTheDocumentedRows) {
  const std::string csv = folder_ / "rows.csv", markdown = folder_ / "rows.md";
  const Json json =
      json_of({"bench",      "decode", "--k-format", "tq6,tq4", "--v-format", "tq4", "--keys",     "100,256",
               "--head-dim", "64",     "--q-heads",  "4",       "--kv-heads", "2",   "--batch",    "2",
               "--threads",  "1",      "--rounds",   "3",       "--csv",      csv,   "--markdown", markdown});
  EXPECT_EQ(keys_of(json), (std::set<std::string>{"machine", "rows"}));
  EXPECT_GT(json["machine"]["peaks"][0]["fma_gflops"], 0.05);
  EXPECT_GT(json["machine"]["peaks"][0]["read_gb_per_s"], 0.05);
  ASSERT_EQ(json["rows"].size(), 4u);
  for (const Json& row : json["rows"]) {
    ASSERT_EQ(keys_of(row), kBenchKeys);
    EXPECT_EQ(row["op"], "decode");
    EXPECT_EQ(row["backend"], "cpu");
    EXPECT_EQ(row["v_format"], "tq4");
    EXPECT_EQ(row["batch"], 2);
    EXPECT_EQ(row["q_len"], 1);
    EXPECT_EQ(row["threads"], 1);
    EXPECT_LE(row["rel_l2"], 2e-4);
    EXPECT_GE(row["spread"], 0);
    const double ns = row["median_ns"], keys = row["keys"];
    EXPECT_NEAR(row["ns_per_value"].get<double>(), ns / (2 * 2 * keys * 2 * 64), 1e-9 * ns);
    const Json& peak = json["machine"]["peaks"][0];
    EXPECT_NEAR(row["share_of_fma_peak"].get<double>(), 4 * 2 * 4 * 64 * keys / ns / peak["fma_gflops"].get<double>(),
                1e-6);
    EXPECT_NEAR(row["share_of_read_bandwidth"].get<double>(),
                row["gb_per_s"].get<double>() / peak["read_gb_per_s"].get<double>(), 1e-9);
    EXPECT_NEAR(row["gflops"].get<double>(), 4 * 2 * 4 * 64 * keys / ns, 1e-6 * row["gflops"].get<double>());
    EXPECT_TRUE(row["share_of_product"].is_null());  // for devices
    EXPECT_EQ(row["products"], 16);                  // few rows
  }
  const std::string table = file_text(csv);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 5);
  EXPECT_EQ(file_text(markdown).rfind("| op | K/V |", 0), 0u);
}

TEST_F(CliBench, ValuesOfASizeOfTheirOwn) {
  for (const char* op : {"decode", "prefill", "step", "append"}) {
    std::vector<std::string> arguments = {"bench",      op,   "--k-format",   "tq4",  "--keys",     "200",
                                          "--head-dim", "96", "--v-head-dim", "0,40", "--kv-heads", "2",
                                          "--rounds",   "1",  "--threads",    "1"};
    if (op == std::string("prefill")) arguments.insert(arguments.end(), {"--q-len", "40", "--fresh-keys"});
    const Json json = json_of(arguments);  // it judges its outputs
    ASSERT_EQ(json["rows"].size(), 2u) << op;
    double values[2];
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(json["rows"][i]["v_head_dim"], i == 0 ? 96 : 40);
      values[i] = json["rows"][i]["median_ns"].get<double>() / json["rows"][i]["ns_per_value"].get<double>();
    }
    EXPECT_NEAR(values[1] / values[0], (96.0 + 40.0) / (2 * 96.0), 1e-6) << op;
  }
  const Finished f = kvant_cli({"bench", "decode", "--v-head-dim", "577"});
  EXPECT_EQ(f.exit_code, 2);
  EXPECT_NE(f.err.find("--v-head-dim 577: must be 1 to 576, or 0 for --head-dim"), std::string::npos) << f.err;
}

TEST_F(CliBench, Latents) {
  for (const char* op : {"decode", "prefill", "step", "append"}) {
    std::vector<std::string> arguments = {"bench",  op,    "--latent", "128,32", "--rope",    "32",
                                          "--keys", "200", "--rounds", "1",      "--threads", "1"};
    if (op == std::string("prefill")) arguments.insert(arguments.end(), {"--q-len", "40", "--fresh-keys"});
    const Json json = json_of(arguments);  // it judges its outputs
    ASSERT_EQ(json["rows"].size(), 2u) << op;
    for (const Json& row : json["rows"]) {
      EXPECT_TRUE(row["latent"].get<bool>());
      EXPECT_EQ(row["head_dim"], 32);
      EXPECT_EQ(row["kv_heads"], 1);
      EXPECT_EQ(row["k_format"], "tq8");
      EXPECT_EQ(row["v_format"], "tq4");
      EXPECT_FALSE(row["median_ns"].is_null()) << op;
    }
    EXPECT_EQ(json["rows"][0]["v_head_dim"], 128);
  }
  const auto refused = [](std::vector<std::string> more, const char* words) {
    more.insert(more.begin(), {"bench", "prefill"});
    const Finished f = kvant_cli(more);
    EXPECT_EQ(f.exit_code, 2);
    EXPECT_NE(f.err.find(words), std::string::npos) << f.err;
  };
  refused({"--latent", "577"}, "--latent");
  refused({"--latent", "512", "--head-dim", "64"}, "--head-dim");
  refused({"--rope", "64"}, "--latent");
  refused({"--latent", "512", "--products", "8"}, "--products 8: not with --latent");
  refused({"--latent", "512", "--backend", "cuda"}, "--latent: prefill over latents is measured on the CPU");
}

TEST_F(CliBench, CentredKeysBesideOthers) {
  const std::vector<std::string> shape = {"--k-format", "tq4",        "--keys",     "300",       "--head-dim",
                                          "64",         "--kv-heads", "2",          "--threads", "1",
                                          "--rounds",   "2",          "--k-centre", "none,page"};
  for (const char* op : {"decode", "prefill", "append"}) {
    std::vector<std::string> arguments = {"bench", op};
    arguments.insert(arguments.end(), shape.begin(), shape.end());
    if (op != std::string("decode")) arguments.insert(arguments.end(), {"--q-len", "40"});
    const Json json = json_of(arguments);
    ASSERT_EQ(json["rows"].size(), 2u) << op;
    EXPECT_EQ(json["rows"][0]["k_centre"], "none");
    EXPECT_EQ(json["rows"][1]["k_centre"], "page");
    const double plain = json["rows"][0]["gb_per_s"].get<double>() * json["rows"][0]["median_ns"].get<double>();
    const double centred = json["rows"][1]["gb_per_s"].get<double>() * json["rows"][1]["median_ns"].get<double>();
    EXPECT_GT(centred, plain + 250) << op;  // at least two pages of two heads have centres of 64 bytes
  }
  const Finished f = kvant_cli({"bench", "decode", "--k-format", "tq4,f16", "--k-centre", "page"});
  EXPECT_EQ(f.exit_code, 2);
  EXPECT_NE(f.err.find("not with keys in f16"), std::string::npos) << f.err;
}

TEST_F(CliBench, ProductsOf8BitsBesideOthers) {
  const std::string csv = folder_ / "rows.csv", markdown = folder_ / "rows.md";
  const Json json = json_of({"bench",     "prefill", "--k-format", "tq4,tq6/tq4", "--keys",     "512",
                             "--q-len",   "64",      "--head-dim", "64",          "--kv-heads", "2",
                             "--q-heads", "4",       "--rounds",   "1",           "--products", "16,8,automatic",
                             "--csv",     csv,       "--markdown", markdown,      "--threads",  "1"});
  ASSERT_EQ(json["rows"].size(), 6u);
  for (std::size_t i = 0; i < 6; i += 3) {
    const Json &sixteen = json["rows"][i], &eight = json["rows"][i + 1], &chosen = json["rows"][i + 2];
    EXPECT_EQ(sixteen["products"], 16);
    EXPECT_EQ(eight["products"], 8);
    EXPECT_EQ(chosen["products"], chosen["isa"] == "scalar" || chosen["isa"] == "neon" ? 16 : 8);
    EXPECT_LE(sixteen["rel_l2"], 2e-4);
    EXPECT_GT(eight["rel_l2"], 1e-3);  // integers were multiplied
    EXPECT_LE(eight["rel_l2"], 2.5e-2);
  }
  EXPECT_NE(file_text(markdown).find("| 8 bits |"), std::string::npos) << file_text(markdown);
  EXPECT_NE(file_text(csv).find(",products,"), std::string::npos);
  const Finished dense = kvant_cli({"bench", "prefill", "--k-format", "tq4,f16", "--products", "16,8"});
  EXPECT_EQ(dense.exit_code, 2);
  EXPECT_NE(dense.err.find("--products 8: not with f16"), std::string::npos) << dense.err;
  const Finished wrong = kvant_cli({"bench", "prefill", "--products", "7"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.err.find("--products: 7: must be one of automatic, 16, 8"), std::string::npos) << wrong.err;
}

TEST_F(CliBench, PrefillAndAppend) {
  const Json prefill = json_of({"bench",      "prefill", "--k-format", "f32,f16,tq5/tq3",
                                "--keys",     "130",     "--q-len",    "70",
                                "--head-dim", "80",      "--q-heads",  "6",
                                "--kv-heads", "2",       "--isa",      "scalar",
                                "--threads",  "0",       "--rounds",   "1"});
  ASSERT_EQ(prefill["rows"].size(), 3u);
  EXPECT_EQ(prefill["rows"][0]["isa"], "scalar");
  EXPECT_LE(prefill["rows"][0]["rel_l2"], 1e-5);
  EXPECT_EQ(prefill["rows"][2]["v_format"], "tq3");
  for (const Json& row : prefill["rows"]) EXPECT_LE(row["rel_l2"], 2e-4);

  // More pages are exact for many queries than for one, and the error is against these.
  const Json some = json_of(
      {"bench", "decode", "--k-format", "tq3", "--keys", "320", "--q-len", "4", "--head-dim", "64", "--rounds", "1"});
  EXPECT_LE(some["rows"][0]["rel_l2"], 2e-4);

  const Json uneven = json_of({"bench", "decode", "--k-format", "tq4", "--batch", "3", "--keys", "70", "--first-keys",
                               "700", "--head-dim", "64", "--rounds", "1"});
  EXPECT_EQ(uneven["rows"][0]["first_keys"], 700);
  EXPECT_LE(uneven["rows"][0]["rel_l2"], 2e-4);
  EXPECT_NEAR(uneven["rows"][0]["ns_per_value"].get<double>() * 2 * (700 + 2 * 70) * 4 * 64,
              uneven["rows"][0]["median_ns"].get<double>(), 1.0);

  const Json append = json_of(
      {"bench", "append", "--k-format", "f32,fp8,tq2,tq4,tq8", "--keys", "200", "--q-len", "7", "--rounds", "1"});
  ASSERT_EQ(append["rows"].size(), 5u);
  double last = 1;
  for (const Json& row : append["rows"]) {
    EXPECT_TRUE(row["share_of_fma_peak"].is_null());  // no products are counted
    EXPECT_GT(row["ns_per_value"], 0);
    if (row["k_format"] == "tq2" || row["k_format"] == "tq4" || row["k_format"] == "tq8") {
      EXPECT_LT(row["rel_l2"], last);
      last = row["rel_l2"];
    }
  }
  EXPECT_EQ(append["rows"][0]["rel_l2"], 0);
}

TEST_F(CliBench, LengthsHaveUnits) {
  const std::string all =
      std::to_string(json_of({"info"})["threads"]["default"].get<int>());  // as many are not too many
  const Json rows = json_of({"bench", "decode", "--threads", all, "--keys", "1k,", "2K", "100", "--first-keys", "3k",
                             "--window", "1k", "--head-dim", "32", "--k-format", "f16", "--rounds", "1"})["rows"];
  ASSERT_EQ(rows.size(), 3u);
  const int keys[] = {1024, 2048, 100};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(rows[i]["keys"], keys[i]);
    EXPECT_EQ(rows[i]["first_keys"], 3072);
    EXPECT_EQ(rows[i]["window"], 1024);
  }
}

TEST_F(CliBench, StepsAppendBeforeTheyAttend) {
  const Json json =
      json_of({"bench",        "step", "--k-format", "tq4,f16", "--isa",    "scalar,", "--keys",     "130",
               "--first-keys", "65",   "--batch",    "2",       "--q-len",  "3",       "--head-dim", "64",
               "--q-heads",    "4",    "--kv-heads", "2",       "--rounds", "4",       "--threads",  "0"});
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const Json& row : json["rows"]) {
    EXPECT_EQ(row["op"], "step");
    EXPECT_EQ(row["q_len"], 3);
    EXPECT_LE(row["rel_l2"], 2e-4);
    EXPECT_NEAR(row["ns_per_value"].get<double>() * 2 * (65 + 130) * 2 * 64, row["median_ns"].get<double>(), 1.0);
  }
}

// Sizes without a rotation are stored padded; what is counted and compared are the tensors' values alone.
TEST_F(CliBench, AnyHeadDim) {
  for (const std::string op : {"prefill", "append", "step"}) {
    const bool appends = op == "append";
    std::vector<std::string> arguments = {"bench",    op,    "--k-format", "tq8,f16", "--head-dim", "9,72",
                                          "--keys",   "140", "--q-len",    "3",       "--kv-heads", "2",
                                          "--rounds", "1",   "--threads",  "1"};
    if (!appends) arguments.insert(arguments.end(), {"--q-heads", "4"});
    const Json json = json_of(arguments);
    ASSERT_EQ(json["rows"].size(), 4u) << op;
    for (const Json& row : json["rows"]) {
      const int head_dim = row["head_dim"];
      EXPECT_TRUE(head_dim == 9 || head_dim == 72) << row;
      // Attention over decoded vectors is close to the reference; decoded vectors are as close as eight bits are.
      EXPECT_LE(row["rel_l2"], appends ? 0.02 : 2e-4) << row;
      EXPECT_NEAR(row["ns_per_value"].get<double>() * 2 * 140 * 2 * head_dim, row["median_ns"].get<double>(), 1.0)
          << row;
    }
  }
}

TEST_F(CliBench, OfWhatChangesScores) {
  const std::vector<std::vector<std::string>> scores = {
      {"--window", "100"},
      {"--softcap", "3", "--mask", "bool"},
      {"--window", "100", "--softcap", "20", "--alibi", "--mask", "bf16"},
      {"--window", "100", "--fresh-keys"}};
  for (const std::vector<std::string>& extra : scores) {
    std::vector<std::string> arguments = {"bench",        "prefill", "--k-format", "tq4,f16", "--keys",     "300",
                                          "--first-keys", "90",      "--batch",    "2",       "--q-len",    "40",
                                          "--head-dim",   "64",      "--rounds",   "1",       "--products", "16"};
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const Json json = json_of(arguments);
    const bool has_window = extra[0] == "--window";
    for (const Json& row : json["rows"]) {
      EXPECT_LE(row["rel_l2"], 2e-4) << extra[0];
      EXPECT_EQ(row["window"], has_window ? 100 : 0);
      EXPECT_EQ(row["alibi"], std::count(extra.begin(), extra.end(), "--alibi") > 0);
      EXPECT_EQ(row["mask"].is_null(), std::count(extra.begin(), extra.end(), "--mask") == 0);
      // The long sequence has the window and the keys before it that the first of 40 queries sees.
      const double keys = has_window ? 90 + 139 : 90 + 300;
      EXPECT_NEAR(row["ns_per_value"].get<double>() * 2 * keys * 4 * 64, row["median_ns"].get<double>(), 1.0);
      // Each query sees all that is before it, 51 to 90 and 261 to 300 keys, or the window.
      const double pairs = 40 * (51 + 90) / 2.0 + (has_window ? 40 * 100.0 : 40 * (261 + 300) / 2.0);
      EXPECT_NEAR(row["share_of_fma_peak"].get<double>() * json["machine"]["peaks"][0]["fma_gflops"].get<double>() *
                      row["median_ns"].get<double>(),
                  4.0 * 16 * 64 * pairs, 1.0);
    }
  }
}

}  // namespace
}  // namespace kvant::test
