// Features that make the command line easy to use: lists in every spelling, suggestions, the same rows as JSON and as
// CSV, tables that fit a terminal, and completions and a manual page that know every option of the help.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "support/capture.hpp"
#include "support/cli.hpp"

namespace kvant::test {
namespace {

class CliUsage : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    write_capture(capture_, {{1, 4, 2, 64, 6, 300, 0}, {3, 2, 1, 32, 5, 260, 70}});
  }
  std::string capture_ = folder_ / "qkv.safetensors";
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

// The smallest shape: bench fills so many of its caches that they do not stay in a processor's.
std::vector<std::string> small_bench(const char* op, std::vector<std::string> more) {
  std::vector<std::string> words = {"bench", op,           "--keys", "64",       "--kv-heads",
                                    "1",     "--head-dim", "32",     "--rounds", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// --- lists ----------------------------------------------------------------------------------------------------------

TEST_F(CliUsage, ListsOfFormatsInEverySpelling) {
  const std::vector<std::vector<std::string>> spellings = {{"--formats", "tq4,tq6/tq4,fp8"},
                                                           {"--formats", "tq4, tq6/tq4, fp8"},
                                                           {"--formats", "tq4,", "tq6/tq4,", "fp8"},
                                                           {"--formats", "tq4", ",tq6/tq4", ",", "fp8"},
                                                           {"--formats", "tq4", "tq6/tq4", "fp8"},
                                                           {"--formats=tq4,", "tq6/tq4,fp8"},
                                                           {"--formats", "tq4", "--formats", "tq6/tq4, fp8"}};
  for (const std::vector<std::string>& spelling : spellings) {
    for (const bool is_file_last : {false, true}) {
      std::vector<std::string> arguments = {"eval", "--exact-ends", "with"};
      if (!is_file_last) arguments.push_back(capture_);
      arguments.insert(arguments.end(), spelling.begin(), spelling.end());
      if (is_file_last) arguments.push_back(capture_);
      const Json rows = json_of(arguments)["rows"];
      std::string pairs;
      for (const Json& row : rows) {
        if (row["layer"] == 1)
          pairs += row["k_format"].get<std::string>() + "/" + row["v_format"].get<std::string>() + " ";
      }
      EXPECT_EQ(pairs, "tq4/tq4 tq6/tq4 fp8/fp8 ") << sentence(arguments);
    }
  }
}

TEST_F(CliUsage, ListsOfNumbersAndInstructionSets) {
  const Json rows = json_of({"bench", "append", "--keys", "64,", "80", "--k-format", "tq4", "f16", "--threads", "1, 0",
                             "--isa", "scalar,", "scalar", "--head-dim", "32", "64", "--rounds", "1"})["rows"];
  EXPECT_EQ(rows.size(), 2u * 2 * 2 * 2 * 2);
  EXPECT_EQ(json_of({"eval", "--layers", "1,", "3", capture_, "--formats", "f16"})["rows"].size(), 2u);
  // A name that begins like a list goes on being a file, and an operation an operation.
  EXPECT_EQ(json_of({"eval", "--formats", "f16", capture_, "--layers", "3"})["rows"].size(), 1u);
  const Json step = json_of({"bench", "--k-format", "tq4", "--kv-heads", "1", "--head-dim", "32", "step", "--keys",
                             "64", "--rounds", "1"})["rows"];
  ASSERT_EQ(step.size(), 1u);
  EXPECT_EQ(step[0]["op"], "step");
}

// --- suggestions ----------------------------------------------------------------------------------------------------

TEST_F(CliUsage, NearNamesAreSuggested) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"evla"}, "did you mean eval?"},
      {{"Bench"}, "did you mean bench?"},
      {{"eval", "x", "--formats", "tq44"}, "did you mean tq4?"},
      {{"eval", "x", "--formats", "fp16"}, "did you mean f16?"},
      {{"eval", "x", "--formats", "tq6/TQ4"}, "did you mean tq4?"},
      {{"eval", "x", "--isa", "avx-512"}, "did you mean avx512?"},
      {{"eval", "x", "--formts", "tq4"}, "--formts: kvant eval has no such option; did you mean --formats?"},
      {{"bench", "prefill", "--fresh"}, "--fresh: kvant bench prefill has no such option; did you mean --fresh-keys?"},
      {{"eval", "--report=x", "--exact-end=with"}, "did you mean --exact-ends?"},
      {{"eval", "x", "--exact-ends", "witout"}, "did you mean without?"},
      {{"bench", "decod"}, "did you mean decode?"},
      {{"bench", "--backend", "cdua"}, "--backend: cdua: must be one of cpu, cuda; did you mean cuda?"},
      {{"bench", "decode", "--mask", "boll"}, "did you mean bool?"},
      {{"bench", "--suite", "cpus"}, "did you mean cpu?"},
      {{"calibrate", "x", "--outptu", "y"}, "did you mean --output?"},
  };
  for (const auto& [arguments, message] : wrong) {
    if (message.find("avx512") != std::string::npos && kvant_cli({"info"}).out.find("avx512") == std::string::npos)
      continue;
    const Finished f = kvant_cli(arguments);
    EXPECT_EQ(f.exit_code, 2) << sentence(arguments) << "\n" << f.err;
    EXPECT_NE(f.err.find(message), std::string::npos) << sentence(arguments) << "\n" << f.err;
  }
  // A word that is near no allowed word, or near many, gets no suggestion.
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"eval", "x", "--formats", "tq7"},
                                             {"eval", "x", "--formats", "bfloat"},
                                             {"frobnicate"},
                                             {"info", "--depth"}}) {
    const Finished f = kvant_cli(arguments);
    EXPECT_EQ(f.exit_code, 2);
    EXPECT_EQ(f.err.find("did you mean"), std::string::npos) << f.err;
  }
}

// --- JSON and CSV ---------------------------------------------------------------------------------------------------

TEST_F(CliUsage, JsonAndCsvHaveTheSameRows) {
  const std::vector<std::vector<std::string>> commands = {{"info"},
                                                          {"formats"},
                                                          {"calibrate", capture_, "-o", folder_ / "basis"},
                                                          {"eval", capture_, "--formats", "tq4,f16"},
                                                          small_bench("decode", {}),
                                                          small_bench("step", {}),
                                                          small_bench("prefill", {"--q-len", "8"}),
                                                          small_bench("append", {})};
  for (std::vector<std::string> arguments : commands) {
    const std::string csv = folder_ / "rows.csv";
    arguments.insert(arguments.end(), {"--csv", csv});
    const Json json = json_of(arguments);
    const std::vector<std::string> lines = lines_of(file_text(csv));
    ASSERT_EQ(lines.size(), json["rows"].size() + 1) << sentence(arguments);
    ASSERT_GT(lines.size(), 1u);
    std::vector<std::string> columns;
    std::istringstream header(lines[0]);
    for (std::string column; std::getline(header, column, ',');) columns.push_back(column);
    const std::set<std::string> keys = keys_of(json["rows"][0]);
    EXPECT_EQ(sorted(columns), std::vector<std::string>(keys.begin(), keys.end())) << sentence(arguments);
    if (arguments[0] != "eval" && arguments[0] != "bench") continue;
    const Json& machine = json["machine"];
    EXPECT_EQ(machine["kvant"], kVersion);
    EXPECT_EQ(machine["isa"][0], json_of({"info"})["isa"]["chosen"]);
    EXPECT_GE(machine["threads"][0], 1);
    EXPECT_FALSE(machine["cpu"].get<std::string>().empty());
    EXPECT_FALSE(machine["compiler"].get<std::string>().empty());
    EXPECT_TRUE(
        std::regex_match(machine["started"].get<std::string>(), std::regex(R"(20\d\d-\d\d-\d\d \d\d:\d\d UTC)")));
  }
}

// --- tables ---------------------------------------------------------------------------------------------------------

TEST_F(CliUsage, TextFitsATerminalUnlessWideIsAsked) {
  const std::vector<std::vector<std::string>> commands = {
      {"--help"},
      {"info"},
      {"formats"},
      {"eval", "--help"},
      {"bench", "--help"},
      {"bench", "decode", "--help"},
      {"bench", "step", "--help"},
      {"bench", "prefill", "--help"},
      {"bench", "append", "--help"},
      {"bench", "tune", "--help"},
      {"eval", capture_, "--formats", "tq6/tq4,f16"},
      small_bench("decode", {"--first-keys", "70", "--batch", "2", "--alibi"})};
  for (const std::vector<std::string>& arguments : commands) {
    const Finished f = kvant_cli(arguments);
    ASSERT_EQ(f.exit_code, 0) << f.err;
    for (const std::string& line : lines_of(f.out)) {
      const bool is_path = line.find(capture_) != std::string::npos;  // a temporary folder's name is as long as it is
      EXPECT_TRUE(is_path || line.size() <= 120) << sentence(arguments) << "\n" << line;
    }
  }
  const std::vector<std::string> bench = small_bench("decode", {});
  std::vector<std::string> wide = bench;
  wide.emplace_back("--wide");
  const std::string narrow_text = kvant_cli(bench).out, wide_text = kvant_cli(wide).out;
  EXPECT_EQ(lines_of(narrow_text)[0].find("ns/value"), std::string::npos);
  EXPECT_NE(narrow_text.find("(left out to fit 120 columns: ns/value"), std::string::npos) << narrow_text;
  EXPECT_NE(lines_of(wide_text)[0].find("ns/value"), std::string::npos);
  EXPECT_EQ(wide_text.find("left out"), std::string::npos);
}

// --- noise ----------------------------------------------------------------------------------------------------------

TEST_F(CliUsage, AMarkSaysWhichTimesSpread) {
  const std::string csv = folder_ / "rows.csv";
  const auto check = [&](const std::vector<std::string>& arguments, const std::regex& mark) {
    const Finished f = kvant_cli(arguments);
    ASSERT_EQ(f.exit_code, 0) << f.err;
    const std::vector<std::string> rows = lines_of(file_text(csv)), text = lines_of(f.out);
    const auto spread_at = [&](const std::string& row) {
      std::vector<std::string> columns, cells;
      std::istringstream header(rows[0]), line(row);
      for (std::string cell; std::getline(header, cell, ',');) columns.push_back(cell);
      for (std::string cell; std::getline(line, cell, ',');) cells.push_back(cell);
      const auto at = std::find(columns.begin(), columns.end(), "spread") - columns.begin();
      return std::stod(cells[static_cast<std::size_t>(at)]);
    };
    bool is_any = false;
    for (std::size_t i = 1; i < rows.size(); ++i) {
      const bool is_noisy = spread_at(rows[i]) > 0.10;
      is_any = is_any || is_noisy;
      const auto first =
          std::find_if(text.begin(), text.end(), [](const std::string& l) { return l.rfind("---", 0) == 0; });
      const std::string& line = *(first + static_cast<std::ptrdiff_t>(i));
      EXPECT_EQ(std::regex_search(line, mark), is_noisy) << line << "\n" << rows[i];
    }
    EXPECT_EQ(f.out.find("!: the times behind this figure spread by more than 10 %") != std::string::npos, is_any)
        << f.out;
  };
  // Few short rounds: some of these spread and some do not, and the output must report either.
  for (int i = 0; i < 3; ++i) {
    check({"bench", "append", "--keys", "64,2000", "--k-format", "tq4", "--rounds", "5", "--csv", csv},
          std::regex("\\d (ns|us|ms|s) !"));
    check({"eval", capture_, "--layers", "3", "--formats", "tq4,fp8,f16", "--csv", csv},
          std::regex("\\d (ns|us|ms|s) !"));
  }
}

// --- completions and the manual page --------------------------------------------------------------------------------

// "kvant bench decode" and its options, as the help shows them, for every command that the help shows.
std::map<std::string, std::set<std::string>> options_of_the_help() {
  std::map<std::string, std::set<std::string>> found;
  std::vector<std::vector<std::string>> commands = {{}};
  while (!commands.empty()) {
    std::vector<std::string> command = commands.back();
    commands.pop_back();
    std::string path = "kvant";
    for (const std::string& word : command) path += " " + word;
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--help");
    std::string section;
    for (const std::string& line : lines_of(kvant_cli(arguments).out)) {
      std::smatch match;
      if (std::regex_match(line, match, std::regex("(\\w+):"))) section = match[1];
      if (line.empty()) section.clear();
      if ((section == "Subcommands" || section == "Operations") &&
          std::regex_search(line, match, std::regex("^  ([a-z]+)  "))) {
        command.push_back(match[1]);
        commands.push_back(command);
        command.pop_back();
      }
      if (section == "Options" && std::regex_search(line, match, std::regex("^  (?:-\\w,)?(--[a-z0-9-]+)"))) {
        found[path].insert(match[1]);
      }
    }
  }
  return found;
}

TEST_F(CliUsage, CompletionsAndTheManualPageKnowEveryOption) {
  const auto options = options_of_the_help();
  ASSERT_EQ(options.size(), 16u);  // kvant, seven commands and eight operations
  ASSERT_TRUE(options.at("kvant bench step").count("--between-mib"));
  ASSERT_FALSE(options.at("kvant bench append").count("--between-mib"));

  const std::string zsh = kvant_cli({"completion", "zsh"}).out, fish = kvant_cli({"completion", "fish"}).out;
  std::string page = kvant_cli({"man"}).out;
  const std::string bash = folder_ / "kvant.bash";
  ASSERT_EQ(kvant_cli({"completion", "bash", "-o", bash}).exit_code, 0);
  page = std::regex_replace(page, std::regex("\\\\-"), "-");
  for (const auto& [path, names] : options) {
    const auto at_page = path == "kvant" ? page.find(".SH OPTIONS") : page.find(".SS " + path);
    ASSERT_NE(at_page, std::string::npos) << path;
    const std::string section = page.substr(at_page, page.find("\n.S", at_page + 1) - at_page);
    const std::string function = "\n_" + std::regex_replace(path, std::regex(" "), "_") + "() {";
    const auto at_zsh = zsh.find(function);
    ASSERT_NE(at_zsh, std::string::npos) << function;
    const std::string body = zsh.substr(at_zsh, zsh.find("\n}\n", at_zsh) - at_zsh);
    // Bash itself is asked: what follows the command and a hyphen.
    const Finished asked = run_program("/bin/bash", {"-c", "source " + bash + "; COMP_WORDS=(" + path +
                                                               " -); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _kvant; " +
                                                               "printf '%s\\n' \"${COMPREPLY[@]}\""});
    EXPECT_EQ(asked.err, "");
    const std::vector<std::string> replies = lines_of(asked.out);
    for (const std::string& name : names) {
      EXPECT_NE(section.find(name), std::string::npos) << "the manual page lacks " << path << " " << name;
      EXPECT_NE(body.find("'" + name + "["), std::string::npos) << "zsh lacks " << path << " " << name;
      EXPECT_EQ(std::count(replies.begin(), replies.end(), name), 1) << "bash lacks " << path << " " << name;
      EXPECT_NE(fish.find(" -l " + name.substr(2) + " "), std::string::npos) << "fish lacks " << name;
    }
  }
  const auto replies_to = [&](const std::string& words) {
    return run_program("/bin/bash", {"-c", "source " + bash + "; COMP_WORDS=(" + words +
                                               "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); " +
                                               "_kvant; printf '%s ' \"${COMPREPLY[@]}\""})
        .out;
  };
  EXPECT_EQ(replies_to("kvant bench de"), "decode ");
  EXPECT_EQ(replies_to("kvant eval --exact-ends wi"), "with without ");
  EXPECT_EQ(replies_to("kvant eval --formats tq4,fp"), "tq4,fp8 ");
  EXPECT_EQ(replies_to("kvant compl"), "completion ");
  EXPECT_EQ(replies_to("kvant completion z"), "zsh ");
  EXPECT_NE(zsh.find("'1:word:(bash zsh fish)'"), std::string::npos);
  EXPECT_NE(fish.find("-a 'bash zsh fish'"), std::string::npos);
  EXPECT_NE(page.find(".SS kvant completion bash|zsh|fish\n"), std::string::npos);
}

// --- calibrate ------------------------------------------------------------------------------------------------------

TEST_F(CliUsage, CalibrateWarnsOfFewQueries) {
  write_capture(capture_, {{1, 4, 2, 64, 31, 300, 0}, {3, 2, 1, 32, 40, 260, 0}, {4, 4, 2, 64, 40, 63, 0}});
  const Finished f = kvant_cli({"calibrate", capture_, "-o", folder_ / "basis"});
  EXPECT_EQ(f.exit_code, 0);
  // Two query heads with 31 queries see one kv head of layer 1.
  EXPECT_NE(f.err.find("kvant: warning: layer1: 62 queries a kv head; a stable basis of head_dim 64 needs at least 64"),
            std::string::npos)
      << f.err;
  EXPECT_EQ(f.err.find("layer3"), std::string::npos) << f.err;
  EXPECT_NE(f.err.find("kvant: warning: layer4: 63 keys a kv head"), std::string::npos) << f.err;
  EXPECT_EQ(lines_of(f.err).size(), 2u) << f.err;
}

}  // namespace
}  // namespace kvant::test
