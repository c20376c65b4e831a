// The command line as its users meet it: the real program, its exit codes (0 done, 1 refused, 2 wrong usage), its
// messages, and the JSON that scripts rely on. No input may end it by a signal.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/device.hpp"
#include "kvant/kvant.hpp"
#include "support/capture.hpp"
#include "support/cli.hpp"

namespace kvant::test {
namespace {

class Cli : public CliTest {
 protected:
  void write_small() { write_capture(capture_, {{1, 4, 2, 64, 6, 300, 0}, {3, 2, 1, 32, 5, 260, 70}}); }

  std::string capture_ = folder_ / "qkv.safetensors";
};

const std::set<std::string> kEvalKeys = {
    "file",           "layer",       "k_format", "v_format",   "exact_ends", "basis",  "k_centre", "spread",
    "bits_per_value", "cache_bytes", "rel_l2",   "cosine_min", "kl_mean",    "kl_max", "top1",     "ns_per_token"};
// --- help ---------------------------------------------------------------------------------------------------------

TEST_F(Cli, HelpOfEveryCommandShowsExamples) {
  for (const std::vector<std::string>& a : std::vector<std::vector<std::string>>{{"--help"},
                                                                                 {"eval", "--help"},
                                                                                 {"bench", "--help"},
                                                                                 {"calibrate", "-h"},
                                                                                 {"info", "--help"},
                                                                                 {"formats", "--help"},
                                                                                 {"snapshot", "--help"},
                                                                                 {"snapshot", "info", "--help"},
                                                                                 {"snapshot", "verify", "--help"},
                                                                                 {"snapshot", "copy", "--help"},
                                                                                 {"completion", "--help"},
                                                                                 {"bench", "decode", "--help"},
                                                                                 {"bench", "step", "-h"},
                                                                                 {"bench", "prefill", "-h"},
                                                                                 {"bench", "append", "-h"}}) {
    const Finished f = kvant_cli(a);
    EXPECT_EQ(f.exit_code, 0) << sentence(a);
    EXPECT_NE(f.out.find("Examples:\n  kvant "), std::string::npos) << sentence(a) << "\n" << f.out;
    EXPECT_EQ(f.err, "");
  }
  for (const char* word : {"--version", "version", "-V"}) {
    EXPECT_EQ(kvant_cli({word}).out, std::string("kvant ") + kVersion + "\n") << word;
  }
  EXPECT_EQ(kvant_cli({"help"}).out, kvant_cli({"--help"}).out);
  EXPECT_EQ(kvant_cli({"help", "snapshot", "info"}).out, kvant_cli({"snapshot", "info", "--help"}).out);
}

// --- wrong usage and refusals -------------------------------------------------------------------------------------

struct Refusal {
  std::vector<std::string> arguments;
  std::string message;  // a part of it
};

void expect_refusals(int exit_code, const std::vector<Refusal>& refusals) {
  for (const Refusal& r : refusals) {
    const Finished f = kvant_cli(r.arguments);
    EXPECT_EQ(f.signal, 0) << sentence(r.arguments);
    EXPECT_EQ(f.exit_code, exit_code) << sentence(r.arguments) << "\n" << f.err;
    EXPECT_EQ(f.err.rfind("kvant: ", 0), 0u) << sentence(r.arguments) << "\n" << f.err;
    EXPECT_NE(f.err.find(r.message), std::string::npos) << sentence(r.arguments) << "\n" << f.err;
  }
}

TEST_F(Cli, WrongUsageIsExitCodeTwo) {
  expect_refusals(
      2,
      {
          {{}, "no command given; the commands are eval, bench, calibrate, snapshot, formats, info, completion"},
          {{"evil"},
           "evil: no such command; the commands are eval, bench, calibrate, snapshot, formats, info, completion; did "
           "you "
           "mean eval?"},
          {{"doctor"}, "doctor is a command of the Python package"},
          {{"--nonsense"}, "--nonsense: not an option that stands before the command; the commands are"},
          {{""}, "no command given"},
          {{"eval"}, "FILE is required"},
          {{"eval", "x", "--formats", "tq7"}, "format 'tq7': must be one of f32, f16, bf16, fp8, tq2"},
          {{"eval", "x", "--formats", "q4_0"}, "(tq6/tq4); for q4_0 write tq4"},
          {{"bench", "--k-format", "fp8_e4m3"}, "; for fp8_e4m3 write fp8"},
          {{"eval", "x", "--formats", "tq4/"}, "format ''"},
          {{"eval", "x", "--formats", "lut4"}, "format lut4: holds imported vectors"},
          {{"eval", "x", "--formats", ""}, "format ''"},
          {{"eval", "x", "--isa", "avx9"}, "--isa avx9: not compiled in; known are"},
          {{"eval", "x", "--threads", "-3"}, "--threads"},
          {{"eval", "x", "--threads", "two"}, "--threads"},
          {{"eval", "x", "--exact-ends", "maybe"}, "--exact-ends"},
          {{"eval", "x", "--json", "-", "--csv", "-"}, "--csv -: standard output is taken by --json -"},
          {{"eval", "x", "--json", "same", "--csv", "same"}, "--csv same: --json writes that file, too"},
          {{"calibrate", "x"}, "-o"},
          {{"calibrate", "x", "-o", "-"}, "a basis is a binary file"},
          {{"snapshot"}, "no operation given; the operations are info, verify, copy"},
          {{"help", "evil"}, "evil: no such command"},
          {{"snapshot", "infos", "x"},
           "infos: kvant snapshot has no such operation; the operations are info, verify, copy"},
          {{"snapshot", "info"}, "FILE is required"},
          {{"snapshot", "copy", "x", "-o", "-"}, "a snapshot is a binary file"},
          {{"bench", "guess"},
           "guess: kvant bench has no such operation; the operations are decode, step, prefill, append"},
          {{"bench", "decode", "--head-dim", "577"}, "--head-dim 577: must be 1 to 576"},
          {{"bench", "decode", "--q-heads", "3", "--kv-heads", "2"}, "--q-heads 3: must be a multiple of --kv-heads 2"},
          {{"bench", "decode", "--kv-heads", "0"}, "--kv-heads"},
          {{"bench", "decode", "--keys", "99999999999999999999"}, "--keys"},
          {{"bench", "prefill", "--q-len", "512", "--keys", "256"}, "--q-len 512: more than --keys 256"},
          {{"bench", "decode", "--k-format", "tq4,tq6,tq8", "--v-format", "tq4,tq6"},
           "--v-format: 2 formats for 3 key formats"},
          {{"bench", "decode", "--k-format", "tq6/tq4", "--v-format", "tq4"}, "names its value format already"},
          {{"bench", "append", "--alibi"},
           "--alibi: kvant bench append has no such option; decode, step, prefill have it"},
          {{"bench", "--alibi", "--window", "9", "append"}, "append: has no scores; leave out window 9, ALiBi"},
          {{"bench", "decode", "--mask", "int8"}, "--mask: int8: must be one of bool, f32, f16, bf16"},
          {{"bench", "decode", "--window", "0"}, "--window"},
          {{"bench", "--first-keys", "9", "append"}, "--first-keys 9: not of append"},
          {{"bench", "--backend", "cuda", "--between-mib", "9", "append"}, "--between-mib 9: of decode and step"},
          {{"bench", "--backend", "cuda", "--kernel", "decode", "append"},
           "--kernel decode: of decode, step and prefill"},
          {{"bench", "--kernel", "both"},
           "--kernel: both: must be one of automatic, decode, decode_sm90, decode_sm80, prefill, prefill_sm90, "
           "prefill_sm80, prefill_fresh, prefill_unpacked, generic"},
          {{"bench", "decode", "--first-keys", "3", "--q-len", "4"}, "--q-len 4: more than --keys 3"},
          {{"bench", "--suite", "gpu"}, "--suite gpu: unknown; the suites are cpu"},
          {{"bench", "--suite", "cpu", "--keys", "64"}, "--suite cpu: has shapes of its own; leave out --keys"},
          {{"bench", "--suite", "cpu", "append"}, "--suite cpu: has no append shapes"},
          {{"bench", "--backend", "tpu"}, "--backend: tpu: must be one of cpu, cuda"},
          {{"bench", "--suite", "cpu", "decode", "--keys", "64"},
           "--suite cpu: has shapes of its own; leave out --keys"},
          {{"bench", "--threads", "1025"}, "--threads"},
          {{"bench", "--threads", "1000", "--keys", "64"}, "--threads 1000: this process may use"},
          {{"bench", "--device", "gpu"}, "--device gpu: must be the number of a device, as 0, or as cuda:0"},
          {{"bench", "--keys", "32g"}, "--keys"},
          {{"bench", "--keys", "k"}, "--keys"},
          {{"bench", "--keys", "8589934592k"}, "--keys"},
          {{"info", "extra"}, "extra"},
      });
}

TEST_F(Cli, RefusalsAreExitCodeOne) {
  write_small();
  const std::string garbage = folder_ / "garbage.safetensors", other = folder_ / "other.safetensors";
  write_capture(other, {{1, 4, 4, 64, 8, 32, 0}, {3, 2, 1, 32, 8, 32, 0}});
  std::ofstream(garbage) << std::string(100, '\xff');
  const std::string basis = folder_ / "basis.safetensors";
  ASSERT_EQ(kvant_cli({"calibrate", other, "-o", basis}).exit_code, 0);
  const std::string one_layer = folder_ / "one.safetensors", one_basis = folder_ / "one_basis.safetensors";
  write_capture(one_layer, {{3, 2, 1, 32, 8, 32, 0}});
  ASSERT_EQ(kvant_cli({"calibrate", one_layer, "-o", one_basis}).exit_code, 0);
  const std::string loud = folder_ / "loud.safetensors";
  write_capture(loud, {{1, 2, 1, 32, 2, 64, 0}}, 1e5f);
  const std::string missing = folder_ / "missing", nowhere = folder_ / "no/report.html", here = folder_ / ".";

  expect_refusals(1, {
                         {{"eval", missing}, missing + ": cannot open"},
                         {{"eval", here}, "is a directory"},
                         {{"eval", garbage}, "garbage.safetensors"},
                         {{"eval", capture_, missing}, missing},
                         {{"eval", capture_, "--layers", "2"}, "--layers 2: not captured; there are layers 1, 3"},
                         {{"eval", capture_, "--report", nowhere}, "cannot write in"},
                         {{"eval", capture_, "--json", here}, "is a directory; name a file"},
                         {{"eval", capture_, "--basis", missing}, missing},
                         {{"eval", capture_, "--basis", capture_}, "qkv.safetensors"},
                         {{"eval", capture_, "--basis", basis},
                          "layer1 was calibrated for kv_heads 4 and head_dim 64, but " + capture_ + " has kv_heads 2"},
                         {{"eval", capture_, "--basis", one_basis}, "has bases for layers 3, none for layer1"},
                         {{"eval", loud, "--formats", "tq4"}, "magnitude at most 65536"},
                         {{"calibrate", missing, "-o", folder_ / "b"}, "missing"},
                         {{"calibrate", capture_, "-o", nowhere}, "cannot write in"},
                         {{"bench", "decode", "--keys", "4000000000", "--batch", "65536"},
                          "are free; use fewer --keys or a smaller --batch"},
                         {{"info", "--json", "/dev/full"}, "/dev/full: cannot write"},
                     });
  EXPECT_EQ(Json::parse(file_text(garbage), nullptr, false).is_discarded(), true);  // inputs stay as they are
}

TEST_F(Cli, BenchRefusesADeviceThatIsNotThere) {
  expect_refusals(2, {
                         {{"bench", "--device", "1"}, "--device 1: needs --backend cuda"},
                         {{"bench", "--device", "cuda:0"}, "--device cuda:0: needs --backend cuda"},
                         {{"bench", "--backend", "cuda", "--device", "cuda:1024"}, "must be the number of a device"},
                         {{"bench", "--between-mib", "9"}, "--between-mib 9: needs --backend cuda"},
                         {{"bench", "--kernel", "prefill"}, "--kernel prefill: needs --backend cuda"},
                         {{"bench", "--between-mib", "0"}, "--between-mib"},
                         {{"bench", "--backend", "cuda", "--isa", "avx2"}, "--isa: CPU kernels"},
                         {{"bench", "--backend", "cuda", "--threads", "2"}, "--threads: of the CPU"},
                         {{"bench", "tune", "--out", "-"}, "--out -: plans read the file by its name; choose another"},
                         {{"bench", "tune", "--head-dim", "128,0"}, "--head-dim"},
                         {{"bench", "tune", "--seconds", "0"}, "--seconds"},
                         {{"bench", "tune", "--device", "-1"}, "--device"},
                         {{"bench", "tune", "--keys", "64"}, "--keys"},
                         {{"bench", "--keys", "64", "tune"}, "--keys: not of tune; leave it out"},
                         {{"bench", "--suite", "cpu", "tune"}, "--suite: not of tune; leave it out"},
                     });
  const core::DeviceBackend* backend = core::device_backend();
  const std::string why = backend == nullptr
                              ? "this build of kvant has no CUDA backend; configure it with -DKVANT_CUDA=ON"
                              : backend->unavailable();
  if (why.empty()) GTEST_SKIP() << "there is a device: kvant_gpu_tests and kvant bench itself use it";
  expect_refusals(1, {{{"bench", "decode", "--backend", "cuda"}, "--backend cuda: " + why},
                      {{"bench", "tune"}, "tune needs CUDA: " + why}});
}

// --- info ---------------------------------------------------------------------------------------------------------

TEST_F(Cli, InfoSaysWhatIsThereAndWhatWasChosen) {
  const Json info = json_of({"info"});
  EXPECT_EQ(info["version"], kVersion);
  EXPECT_EQ(info["default_pair"]["k"], "tq6");
  EXPECT_EQ(info["formats"].size(), formats().size());
  EXPECT_EQ(info["head_dims"].size(), supported_head_dims().size());
  std::set<std::string> available;
  for (const Json& isa : info["isa"]["compiled_in"]) {
    if (isa["available"]) available.insert(isa["name"]);
  }
  EXPECT_TRUE(available.count("scalar"));
  EXPECT_TRUE(available.count(info["isa"]["chosen"]));
  EXPECT_EQ(info["backends"][1]["name"], "cuda");
  EXPECT_EQ(info["backends"][1]["compiled_in"], core::device_backend() != nullptr);
  EXPECT_TRUE(info["backends"][0]["available"]);
  const Finished text = kvant_cli({"info"});
  for (const char* word : {"tq6/tq4", "head_dim", "scalar", "cuda", "threads"})
    EXPECT_NE(text.out.find(word), std::string::npos) << word;
}

// --- eval ---------------------------------------------------------------------------------------------------------

TEST_F(Cli, EvalWritesExactlyTheDocumentedRows) {
  write_small();
  const std::string csv = folder_ / "rows.csv", report = folder_ / "report.html";
  const Json json = json_of({"eval", capture_, "--threads", "1", "--csv", csv, "--report", report});
  ASSERT_EQ(keys_of(json), (std::set<std::string>{"machine", "rows"}));
  const Json& rows = json["rows"];
  ASSERT_EQ(rows.size(), 2u * (1 + 9 * 2));  // two layers; f16 once, nine encoded pairs with and without exact ends
  std::map<std::string, double> error;       // layer 1
  for (const Json& row : rows) {
    ASSERT_EQ(keys_of(row), kEvalKeys);
    EXPECT_EQ(row["file"], capture_);
    EXPECT_TRUE(row["exact_ends"].is_boolean());
    EXPECT_TRUE(row["layer"].is_number_integer());
    EXPECT_TRUE(row["cache_bytes"].is_number_integer());
    EXPECT_GT(row["cache_bytes"], 0);
    EXPECT_GT(row["ns_per_token"], 0);
    EXPECT_GE(row["kl_max"].get<double>(), row["kl_mean"].get<double>());
    EXPECT_GE(row["kl_mean"].get<double>(), 0);
    EXPECT_LE(row["cosine_min"].get<double>(), 1 + 1e-12);
    EXPECT_GE(row["top1"].get<double>(), 0);
    EXPECT_LE(row["top1"].get<double>(), 1);
    if (row["layer"] == 1) {
      error[row["k_format"].get<std::string>() + "/" + row["v_format"].get<std::string>() +
            (row["exact_ends"] ? "" : "-")] = row["rel_l2"];
    }
  }
  EXPECT_LT(error["f16/f16"], 4e-3);    // random values cancel in the output, their rounding does not
  for (const char* ends : {"", "-"}) {  // more bits, less error; keys matter more than values
    const auto of = [&](const char* pair) { return error[pair + std::string(ends)]; };
    EXPECT_LT(of("tq8/tq8"), of("tq6/tq6"));
    EXPECT_LT(of("tq6/tq6"), of("tq5/tq5"));
    EXPECT_LT(of("tq5/tq5"), of("tq4/tq4"));
    EXPECT_LT(of("tq4/tq4"), of("tq3/tq3"));
    EXPECT_LT(of("tq6/tq4"), of("tq4/tq4"));
  }
  EXPECT_LT(error["tq4/tq4"], error["tq4/tq4-"]);

  const std::string table = file_text(csv);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), static_cast<std::ptrdiff_t>(rows.size()) + 1);
  const std::string page = file_text(report);
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(std::string::npos, page.find("http"));  // nothing is loaded from anywhere
  EXPECT_EQ(std::string::npos, page.find("src="));
  for (const char* part : {"<svg", "prefers-color-scheme: dark", "tq6/tq4", "kvant eval", kVersion}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
}

// Keys of 4 bits around the mean of their page, beside keys as they are.
TEST_F(Cli, EvalWithPageCentres) {
  write_small();
  const Json json = json_of({"eval", capture_, "--threads", "1", "--layers", "1", "--formats", "f16,tq4,fp8",
                             "--k-centre", "both", "--exact-ends", "without"});
  std::map<std::string, double> bits;
  for (const Json& row : json["rows"]) {
    bits[row["k_format"].get<std::string>() + " " + row["k_centre"].get<std::string>()] = row["bits_per_value"];
    EXPECT_EQ(row["basis"].get<std::string>().find(" + page") != std::string::npos, row["k_centre"] == "page");
  }
  ASSERT_EQ(bits.size(), 5u);  // f16 has none
  EXPECT_GT(bits["tq4 page"], bits["tq4 none"] + 0.05);
  EXPECT_LT(bits["tq4 page"], bits["tq4 none"] + 0.15);
  EXPECT_GT(bits["fp8 page"], bits["fp8 none"] + 0.05);
  const Finished f = kvant_cli({"eval", capture_, "--k-centre", "pages"});
  EXPECT_EQ(f.exit_code, 2);
  EXPECT_NE(f.err.find("--k-centre"), std::string::npos) << f.err;
}

TEST_F(Cli, EvalSaysWhatItAssumed) {
  const std::vector<float> q(2 * 4 * 64, 0.5f), kv(80 * 64, 0.25f);
  const std::vector<io::TensorToWrite> tensors = {{"layer0.q", "F32", {2, 4, 64}, bytes_of(q)},
                                                  {"layer0.k", "F32", {1, 80, 64}, bytes_of(kv)},
                                                  {"layer0.v", "F32", {1, 80, 64}, bytes_of(kv)}};
  io::write_safetensors(capture_, tensors, {}).value();
  const std::string report = folder_ / "report.html", said = "not in the file, so assumed: scale 1/sqrt(64), no window";
  const Finished f = kvant_cli({"eval", capture_, "--formats", "tq4", "--report", report});
  ASSERT_EQ(f.exit_code, 0) << f.err;
  EXPECT_NE(f.out.find(said), std::string::npos) << f.out;
  EXPECT_NE(file_text(report).find(said), std::string::npos);
  write_small();  // a file that says all
  EXPECT_EQ(kvant_cli({"eval", capture_, "--formats", "tq4"}).out.find("assumed"), std::string::npos);
}

TEST_F(Cli, EvalEndsByNamingTheReport) {
  write_small();
  const std::string report = folder_ / "report.html";
  const Finished f = kvant_cli({"eval", capture_, "--formats", "tq4", "--layers", "3", "--report", report});
  EXPECT_EQ(f.exit_code, 0) << f.err;
  const std::string last = "Wrote " + report + "\n";
  ASSERT_GE(f.out.size(), last.size());
  EXPECT_EQ(f.out.substr(f.out.size() - last.size()), last);
  EXPECT_EQ(f.err, "");  // no progress bar where there is no terminal
}

TEST_F(Cli, EvalDoesNotDependOnThreadsOrIsaBeyondRounding) {
  write_small();
  const auto rows = [&](const char* threads, const char* isa) {
    return json_of({"eval", capture_, "--formats", "tq4,tq6/tq4", "--threads", threads, "--isa", isa})["rows"];
  };
  const Json one = rows("1", "scalar"), three = rows("3", "scalar");
  ASSERT_EQ(one.size(), three.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    for (const char* figure : {"rel_l2", "cosine_min", "kl_mean", "kl_max", "top1", "cache_bytes"}) {
      EXPECT_EQ(one[i][figure], three[i][figure]) << figure;  // the same bits for any number of threads
    }
  }
  const Json info = json_of({"info"});
  const std::string best = info["isa"]["chosen"];
  const Json other = rows("1", best.c_str());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i]["rel_l2"].get<double>(), other[i]["rel_l2"].get<double>(), 1e-4);
    EXPECT_EQ(one[i]["kl_mean"], other[i]["kl_mean"]);  // decoded keys are the same bytes on every ISA
  }
}

TEST_F(Cli, EvalWithoutExactEndsStillHasTheOwnTokenExact) {
  // A single token sees itself alone; every query is a position; a window of one: nothing is ever read from codes.
  write_capture(capture_, {{0, 2, 1, 32, 1, 1, 0}, {1, 2, 2, 64, 9, 9, 1}});
  const Json json = json_of({"eval", capture_, "--formats", "tq2", "--exact-ends", "without"});
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const Json& row : json["rows"]) {
    EXPECT_FALSE(row["exact_ends"]);
    EXPECT_LT(row["rel_l2"], 1e-6);
    EXPECT_EQ(row["kl_max"], 0);
    EXPECT_EQ(row["top1"], 1);
  }
  // With queries at every position the first has no key before it, and the others do see codes.
  write_capture(capture_, {{0, 2, 1, 32, 70, 70, 0}});
  const Json all = json_of({"eval", capture_, "--formats", "tq2,tq8", "--exact-ends", "without"});
  EXPECT_GT(all["rows"][0]["rel_l2"], 0.05);
  EXPECT_LT(all["rows"][1]["rel_l2"], 0.02);
}

// A size without a rotation: the reference and every cache know the true size's scale, and padding is no error.
TEST_F(Cli, EvalOfAnyHeadDim) {
  write_capture(capture_, {{0, 2, 1, 72, 20, 300, 0}, {1, 4, 2, 9, 20, 300, 100}});
  const Json rows = json_of({"eval", capture_, "--formats", "f16,tq8,tq4"})["rows"];
  ASSERT_EQ(rows.size(), 2u * (1 + 2 * 2));
  for (const Json& row : rows) {
    const std::string format = row["k_format"];
    EXPECT_LT(row["rel_l2"], format == "f16" ? 4e-3 : format == "tq8" ? 0.03 : 0.4) << row;
    if (format == "tq4" && !row["exact_ends"]) {
      EXPECT_GT(row["rel_l2"], 0.05) << row;
    }
  }
}

TEST_F(Cli, EvalOfAWindowHoldsOnlyTheWindow) {
  write_capture(capture_, {{0, 2, 1, 64, 4, 1000, 100}, {1, 2, 1, 64, 4, 1000, 0}});
  const Json rows = json_of({"eval", capture_, "--formats", "f16"})["rows"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_LT(rows[0]["cache_bytes"].get<double>(), 0.3 * rows[1]["cache_bytes"].get<double>());
  for (const Json& row : rows) EXPECT_LT(row["rel_l2"], 4e-3);  // against a reference that knows the window, too
}

TEST_F(Cli, CalibrateThenEvalWithTheBasis) {
  const std::string basis = folder_ / "basis.safetensors";
  write_capture(capture_, {{1, 4, 2, 64, 96, 300, 0}});
  const Finished made = kvant_cli({"calibrate", capture_, "-o", basis});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_NE(made.out.find("layer1"), std::string::npos);
  EXPECT_NE(made.out.find("Wrote " + basis), std::string::npos);
  const Finished f = kvant_cli({"eval", capture_, "--formats", "tq3/fp8,f16", "--basis", basis});
  ASSERT_EQ(f.exit_code, 0) << f.err;
  EXPECT_NE(f.out.find("calibrated/none"), std::string::npos)
      << f.out;  // fp8 and f16 have no basis, and the table says so
  const Json with =
      json_of({"eval", capture_, "--formats", "tq3,f16", "--basis", basis, "--exact-ends", "without"})["rows"];
  const Json without = json_of({"eval", capture_, "--formats", "tq3,f16", "--exact-ends", "without"})["rows"];
  EXPECT_LT(with[0]["rel_l2"], without[0]["rel_l2"]);  // estimated on these very vectors, with a loud channel
  EXPECT_EQ(with[1]["rel_l2"], without[1]["rel_l2"]);
}

// --- hostile input ------------------------------------------------------------------------------------------------

TEST_F(Cli, DamagedCapturesNeverCrash) {
  write_capture(capture_, {{0, 2, 1, 32, 2, 66, 0}});
  const std::string good = file_text(capture_), bad = folder_ / "bad.safetensors";
  std::uint32_t state = 1;
  const auto random = [&](std::size_t below) {
    state = state * 1664525u + 1013904223u;
    return static_cast<std::size_t>(state >> 8) % below;
  };
  int refused = 0;
  for (int i = 0; i < 120; ++i) {
    std::string bytes = good;
    const std::size_t header = std::min<std::size_t>(bytes.size(), 600);
    for (std::size_t n = 1 + random(3); n > 0; --n)
      bytes[random(i % 4 == 3 ? bytes.size() : header)] = static_cast<char>(random(256));
    if (i % 5 == 0) bytes.resize(random(bytes.size()));
    std::ofstream(bad, std::ios::binary) << bytes;
    const std::vector<std::string> arguments =
        i % 2 == 0 ? std::vector<std::string>{"eval", bad, "--formats", "tq4", "--threads", "1"}
                   : std::vector<std::string>{"calibrate", bad, "-o", folder_ / "basis"};
    const Finished f = kvant_cli(arguments);
    ASSERT_EQ(f.signal, 0) << "round " << i << "\n" << f.err;
    ASSERT_TRUE(f.exit_code == 0 || f.exit_code == 1) << "round " << i << ": " << f.exit_code << "\n" << f.err;
    ASSERT_EQ(f.err.find("a defect in kvant"), std::string::npos) << f.err;
    if (f.exit_code == 0) continue;
    ASSERT_EQ(f.err.rfind("kvant: ", 0), 0u) << f.err;  // our words, not those of a sanitizer
    ++refused;
  }
  EXPECT_GT(refused, 30);  // or this test has lost its teeth
}

TEST_F(Cli, OddNumbersInACapture) {
  const auto write_with = [&](float q, float k, float v) {
    std::vector<float> qs(2 * 2 * 32, 0.5f), ks(66 * 32, 0.25f), vs(66 * 32, 1.0f);
    qs[5] = q;
    ks[7] = k;
    vs[9] = v;
    const std::vector<io::TensorToWrite> tensors = {{"layer0.q", "F32", {2, 2, 32}, bytes_of(qs)},
                                                    {"layer0.k", "F32", {1, 66, 32}, bytes_of(ks)},
                                                    {"layer0.v", "F32", {1, 66, 32}, bytes_of(vs)}};
    io::write_safetensors(capture_, tensors, {{"layer0.scale", "0.2"}, {"layer0.sliding_window", "0"}}).value();
  };
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [q, k, v] : std::vector<std::array<float, 3>>{
           {nan, 0, 0}, {0, nan, 0}, {0, 0, inf}, {inf, 1, 1}, {3e38f, 1, 1}, {1, 7e4f, 1}, {0, 0, 0}}) {
    write_with(q, k, v);
    const Finished f =
        kvant_cli({"eval", capture_, "--formats", "tq4,fp8,f16", "--json", "-", "--report", folder_ / "r.html"});
    EXPECT_EQ(f.signal, 0) << f.err;
    EXPECT_TRUE(f.exit_code == 0 || f.exit_code == 1) << f.exit_code;
    EXPECT_EQ(f.err.find("a defect in kvant"), std::string::npos) << f.err;
    if (f.exit_code == 1) {
      EXPECT_EQ(f.err.rfind("kvant: ", 0), 0u) << f.err;
    }
  }
}

}  // namespace
}  // namespace kvant::test
