// The files and the terminal of the command line: no result replaces what a command reads, by whatever name; every
// failed write says why; tables are as wide as the terminal.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <regex>
#include <sstream>

#include "support/capture.hpp"
#include "support/cli.hpp"

namespace kvant::test {
namespace {

namespace fs = std::filesystem;

class CliFiles : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    write_capture(capture_, {{3, 2, 1, 32, 5, 130, 0}});
    write_capture(other_, {{4, 2, 1, 32, 5, 130, 0}});
  }

  // "NAME: CONTENT" of all files.
  std::string everything() {
    std::set<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(capture_).parent_path())) {
      if (!entry.is_directory()) files.insert(entry.path().string() + ": " + file_text(entry.path()));
    }
    std::string all;
    for (const std::string& file : files) all += file + "\n";
    return all;
  }

  void expect_refused(const std::vector<std::string>& arguments, const std::string& message) {
    const std::string before = everything();
    const Finished f = kvant_cli(arguments);
    EXPECT_EQ(f.exit_code, 2) << sentence(arguments) << "\n" << f.err;
    EXPECT_NE(f.err.find(message), std::string::npos) << sentence(arguments) << "\n" << f.err;
    EXPECT_TRUE(everything() == before) << sentence(arguments) << ": a file was changed";
  }

  Finished shell(const std::string& command) { return run_program("/bin/sh", {"-c", command}); }

  std::string capture_ = folder_ / "qkv.safetensors", other_ = folder_ / "other.safetensors";
};

TEST_F(CliFiles, NoResultReplacesAnInput) {
  const std::string basis = folder_ / "basis.safetensors";
  ASSERT_EQ(kvant_cli({"calibrate", capture_, "-o", basis}).exit_code, 0);
  fs::create_directory(folder_ / "sub");
  fs::create_symlink(capture_, folder_ / "link");
  fs::create_symlink("link", folder_ / "link_to_link");
  fs::create_hard_link(capture_, folder_ / "hard");
  fs::create_directory_symlink(".", folder_ / "here");
  fs::create_symlink(other_, folder_ / "other_link");
  for (const char* name : {"qkv.safetensors", "./qkv.safetensors", "sub/../qkv.safetensors", "link", "link_to_link",
                           "hard", "here/qkv.safetensors"}) {
    const std::string path = folder_ / name;
    for (const char* option : {"--json", "--csv", "--report"}) {
      expect_refused({"eval", capture_, option + ("=" + path)}, std::string(option) + " " + path + ": FILE");
    }
    expect_refused({"calibrate", capture_, "-o", path}, "is that file, too, and is read");
    expect_refused({"calibrate", capture_, "-o", folder_ / "new", "--csv=" + path}, "is that file, too, and is read");
    expect_refused({"eval", path, "--json=" + capture_}, "is that file, too, and is read");
  }
  expect_refused({"eval", capture_, other_, "--csv", folder_ / "other_link"}, "FILE " + other_ + " is that file, too");
  expect_refused({"eval", capture_, "--basis", basis, "--report", basis}, "--basis is that file, too, and is read");
  expect_refused({"eval", capture_, "--basis", folder_ / "here/basis.safetensors", "--report", basis},
                 "is that file, too, and is read");
  // Results of an earlier run may be replaced.
  const std::string rows = folder_ / "rows.json";
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(kvant_cli({"eval", capture_, "--formats", "tq4", "--json", rows}).exit_code, 0);
  }
}

TEST_F(CliFiles, NoFileHasTwoResults) {
  fs::create_directory_symlink(".", folder_ / "here");
  const std::string rows = folder_ / "rows", same = folder_ / "here/rows";
  expect_refused({"eval", capture_, "--json", rows, "--csv", same}, "--json " + rows + " writes that file, too");
  std::ofstream(rows) << "old";
  fs::create_hard_link(rows, folder_ / "hard");
  expect_refused({"eval", capture_, "--json", rows, "--report", folder_ / "hard"}, "writes that file, too");
  expect_refused({"info", "--json", rows, "--csv", same}, "writes that file, too");
  expect_refused({"bench", "--json", rows, "--markdown", same}, "writes that file, too");
}

TEST_F(CliFiles, StandardOutputIsAFileToo) {
  const std::string before = file_text(capture_), kvant = kProgram, rows = folder_ / "rows";
  const Finished input = shell(kvant + " eval " + capture_ + " >> " + capture_);
  EXPECT_EQ(input.exit_code, 2);
  EXPECT_NE(input.err.find("FILE " + capture_ + ": standard output goes to that file, too"), std::string::npos)
      << input.err;
  EXPECT_TRUE(file_text(capture_) == before);
  const Finished result = shell(kvant + " info --json " + rows + " > " + rows);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("standard output goes to that file; name --json -, or another file"), std::string::npos)
      << result.err;
}

// The same in all commands: without a file, or before a file that is read, a result is standard output.
TEST_F(CliFiles, ResultsWithoutAFileAreStandardOutput) {
  const std::string before = file_text(capture_);
  const std::vector<std::vector<std::string>> commands = {
      {"eval", capture_, "--formats", "f16", "--json"},
      {"eval", "--json", capture_, "--formats", "f16"},
      {"eval", "--formats", "f16", "--json", capture_, other_},
      {"calibrate", capture_, "-o", folder_ / "b", "--json"},
      {"bench", "append", "--keys", "64", "--rounds", "1", "--json"},
      {"bench", "--json", "append", "--keys", "64", "--rounds", "1"},
      {"info", "--json"},
      {"formats", "--json"}};
  for (const std::vector<std::string>& command : commands) {
    const Finished f = kvant_cli(command);
    EXPECT_EQ(f.exit_code, 0) << sentence(command) << f.err;
    const Json json = Json::parse(f.out, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << sentence(command) << f.out.substr(0, 300);
    EXPECT_GT(json["rows"].size(), 0u) << sentence(command);
  }
  EXPECT_TRUE(file_text(capture_) == before);
  const Finished csv = kvant_cli({"eval", "--formats", "f16", "--csv", capture_});
  EXPECT_TRUE(csv.exit_code == 0 && csv.out.starts_with("file,")) << csv.out.substr(0, 100) << csv.err;
}

TEST_F(CliFiles, EmptyNamesAreRefused) {
  const std::vector<std::vector<std::string>> commands = {{"eval", capture_, "--report"},
                                                          {"eval", capture_, "--json"},
                                                          {"eval", capture_, "--csv"},
                                                          {"eval", capture_, "--basis"},
                                                          {"calibrate", capture_, "-o"},
                                                          {"calibrate", capture_, "-o", folder_ / "b", "--json"},
                                                          {"bench", "--markdown"},
                                                          {"info", "--json"},
                                                          {"formats", "--csv"},
                                                          {"completion", "bash", "-o"},
                                                          {"man", "--output"}};
  for (std::vector<std::string> command : commands) {
    const std::string message = "the file name is empty; name a file, or leave the option out";
    if (command.back().starts_with("--")) {
      std::vector<std::string> joined = command;
      joined.back() += "=";
      expect_refused(joined, message);
    }
    command.emplace_back();
    expect_refused(command, message);
  }
}

TEST_F(CliFiles, AFailedWriteSaysWhy) {
  const std::string kvant = kProgram, eval = kvant + " eval --formats tq4 " + capture_, rows = folder_ / "rows";
  const std::string full = ": cannot write: No space left on device";
  for (const std::string command : {" info", " formats", " --help", " eval --help", " --version", " man",
                                    " completion zsh", " info --json -", " info --csv"}) {
    const Finished f = shell(kvant + command + " > /dev/full");
    EXPECT_EQ(f.exit_code, 1) << command;
    EXPECT_EQ(f.err, "kvant: standard output" + full + "\n") << command;
  }
  for (const std::string option : {" --json", " --csv", " --report"}) {
    const Finished f = shell(eval + option + " /dev/full");
    EXPECT_EQ(f.exit_code, 1) << option;
    EXPECT_EQ(f.err, "kvant: /dev/full" + full + "\n") << option;
  }
  EXPECT_EQ(shell(eval + " > /dev/full").err, "kvant: standard output" + full + "\n");

  const auto refusal = [&](const std::string& command) {
    const Finished f = shell("trap '' XFSZ; " + command);
    EXPECT_EQ(f.exit_code, 1) << command;
    return f.err;
  };
  std::ofstream(rows) << "old";
  const std::string large = "kvant: " + rows + ": not written: cannot write: File too large\n";
  EXPECT_EQ(refusal("(ulimit -f 0; exec " + eval + " --report " + rows + ") 2>&1 >/dev/null | cat >&2; exit 1"), large);
  EXPECT_EQ(file_text(rows), "old");
  const std::string there = folder_ / "folder";
  fs::create_directory(there);
  for (const char* option : {" --json ", " --csv ", " --report "}) {
    EXPECT_EQ(refusal(eval + option + there),
              "kvant:" + std::string(option) + there + ": is a directory; name a file\n");
    const std::string absent = folder_ / "absent/x";
    EXPECT_EQ(refusal(eval + option + absent), "kvant:" + std::string(option) + absent + ": cannot write in " +
                                                   (folder_ / "absent") + ": No such file or directory\n");
    const std::string below = rows + "/x";
    EXPECT_EQ(refusal(eval + option + below),
              "kvant:" + std::string(option) + below + ": cannot write in " + rows + ": Not a directory\n");
  }
  if (!fs::exists("/sys/kernel")) GTEST_SKIP() << "no folder where nobody may write";
  const std::string denied = refusal(kvant + " calibrate " + capture_ + " -o /sys/kernel/kvant-basis");
  EXPECT_TRUE(std::regex_search(denied, std::regex("(Permission denied|Read-only file system|not permitted)\n$")))
      << denied;
}

// The output of the program on a terminal of so many columns.
std::string on_terminal(unsigned short columns, const std::vector<std::string>& arguments) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_TRUE(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0);
  const winsize size{24, columns, 0, 0};
  EXPECT_EQ(::ioctl(terminal, TIOCSWINSZ, &size), 0);
  const std::string name = ::ptsname(terminal);
  const pid_t child = ::fork();
  if (child == 0) {
    const int end = ::open(name.c_str(), O_RDWR | O_NOCTTY);
    ::dup2(end, STDOUT_FILENO);
    ::unsetenv("COLUMNS");
    std::vector<std::string> words = {kProgram};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    ::execv(kProgram.c_str(), pointers.data());
    ::_exit(127);
  }
  std::string out;
  char buffer[4096];
  const int keep = ::open(name.c_str(), O_RDWR | O_NOCTTY);  // what was written stays until it is read
  int status = 0;
  const int flags = ::fcntl(terminal, F_GETFL);
  ::fcntl(terminal, F_SETFL, flags | O_NONBLOCK);
  for (bool is_done = false; !is_done;) {
    is_done = ::waitpid(child, &status, WNOHANG) == child;
    for (ssize_t n = 0; (n = ::read(terminal, buffer, sizeof buffer)) > 0;)
      out.append(buffer, static_cast<std::size_t>(n));
    if (!is_done) ::usleep(2000);
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << out;
  ::close(keep);
  ::close(terminal);
  return std::regex_replace(out, std::regex("\r\n"), "\n");
}

std::size_t widest(const std::string& text) {
  std::size_t most = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) most = std::max(most, line.size());
  return most;
}

TEST_F(CliFiles, TablesAreAsWideAsTheTerminal) {
  const std::string name = folder_ / "b";
  const std::vector<std::vector<std::string>> commands = {
      {"eval", capture_, other_, "--formats", "tq6/tq4,f16", "--threads", "1"},
      {"bench", "decode", "--keys", "64", "--kv-heads", "1", "--head-dim", "32", "--rounds", "1"},
      {"calibrate", capture_, "-o", name},
      {"info"},
      {"formats"}};
  for (const std::vector<std::string>& command : commands) {
    for (const unsigned short columns : {80, 100, 200}) {
      if (columns == 100 && command[0] != "eval") continue;
      const std::string text = on_terminal(columns, command);
      EXPECT_LE(widest(text), columns) << sentence(command) << "\n" << text;
      EXPECT_EQ(text.find("left out to fit") != std::string::npos,
                text.find("(left out to fit " + std::to_string(columns) + " columns: ") != std::string::npos)
          << text;
    }
  }
  const std::vector<std::string>& eval = commands[0];
  EXPECT_EQ(on_terminal(200, eval).find("left out"), std::string::npos);
  const std::string narrow = on_terminal(80, eval), wide = on_terminal(200, eval);
  for (const char* column : {"bits/value", "rel. L2", "KL mean", "top-1", "of f16"}) {
    EXPECT_NE(narrow.find(column), std::string::npos) << narrow;
  }
  // The legend explains the columns that are left, and no others.
  EXPECT_EQ(narrow.find("time/token: "), std::string::npos) << narrow;
  EXPECT_NE(wide.find("time/token: "), std::string::npos) << wide;
  EXPECT_EQ(narrow.find("; in pages: "), std::string::npos) << narrow;
  EXPECT_NE(wide.find("; in pages: "), std::string::npos) << wide;

  EXPECT_GT(widest(on_terminal(40, {"eval", capture_, "--formats", "tq4", "--wide"})), 120u);
  const auto with_columns = [&](const std::string& columns) {
    return widest(shell("COLUMNS=" + columns + " " + kProgram + " eval --formats tq4 " + capture_).out);
  };
  EXPECT_LE(with_columns("60"), 60u);
  EXPECT_GT(with_columns("300"), 120u);
  for (const char* nonsense : {"0", "-5", "many", "", "1e9", "7"}) EXPECT_LE(with_columns(nonsense), 120u) << nonsense;
}

}  // namespace
}  // namespace kvant::test
