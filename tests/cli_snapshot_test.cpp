// `kvant snapshot`: the real program over files that the library wrote.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>

#include "support/cache_session.hpp"
#include "support/cli.hpp"
#include "support/snapshots.hpp"

namespace kvant::test {
namespace {

class CliSnapshot : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    Cache cache = make(small_config(2));
    const SequenceId id = cache.add_sequence();
    append(cache, id, 1, 64 * 30).value();
    SaveOptions options;
    options.name = "a chat";
    options.model = "nano";
    options.metadata = {{"user", "ann\n"}};
    save(cache, first_, options).value();
    append(cache, id, 5000, 100).value();
    options.base = first_;
    options.tokens = {std::vector<std::int64_t>(64 * 30 + 100, 3)};
    save(cache, second_, options).value();
  }

  std::string first_ = folder_ / "first.kvs", second_ = folder_ / "second.kvs";
};

TEST_F(CliSnapshot, Info) {
  const Finished f = kvant_cli({"snapshot", "info", second_});
  EXPECT_EQ(f.exit_code, 0) << f.err;
  for (const char* part : {"name: a chat\n", "model: nano\n", "user = ann\\x0a\n", "k = tq6", "needs: first.kvs\n",
                           "2020", "saved", "written by: kvant " KVANT_VERSION "\n"}) {
    EXPECT_NE(f.out.find(part), std::string::npos) << part << " in\n" << f.out;
  }
  const Json json = json_of({"snapshot", "info", second_});
  EXPECT_EQ(json["config"]["layers"], 2);
  EXPECT_EQ(json["config"]["v"], "tq4");
  EXPECT_EQ(json["sequences"][0]["length"], 2020);
  EXPECT_EQ(json["sequences"][0]["token_ids"], 2020);
  EXPECT_EQ(json["bases"][0], "first.kvs");
  EXPECT_EQ(json["metadata"]["user"], "ann\n");
  for (const bool is_first : {true, false}) {  // the option before the file, and behind it
    const auto words = is_first ? std::vector<std::string>{"snapshot", "info", "--json", second_}
                                : std::vector<std::string>{"snapshot", "info", second_, "--json"};
    EXPECT_EQ(Json::parse(kvant_cli(words).out, nullptr, false), json);
  }
}

TEST_F(CliSnapshot, VerifyNamesWhatIsBad) {
  const Finished whole = kvant_cli({"snapshot", "verify", first_, second_});
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_NE(whole.out.find("second.kvs: whole: 1 sequences, 29 encoded"), std::string::npos) << whole.out;
  std::fstream(first_, std::ios::in | std::ios::out | std::ios::binary).seekp(20000).put('\x17');
  const Finished bad = kvant_cli({"snapshot", "verify", second_});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.err.find("first.kvs: row 1 of tensor \"encoded\""), std::string::npos) << bad.err;
}

TEST_F(CliSnapshot, VerifyReadsAllFiles) {
  const std::string third = folder_ / "third.kvs", missing = folder_ / "missing.kvs";
  ASSERT_EQ(kvant_cli({"snapshot", "copy", second_, "-o", third}).exit_code, 0);
  std::fstream(first_, std::ios::in | std::ios::out | std::ios::binary).seekp(20000).put('\x17');
  const Finished f = kvant_cli({"snapshot", "verify", first_, missing, third});
  EXPECT_EQ(f.exit_code, 1);
  EXPECT_NE(f.out.find("first.kvs: NOT whole: "), std::string::npos) << f.out;
  EXPECT_NE(f.out.find("missing.kvs: NOT whole: "), std::string::npos) << f.out;
  EXPECT_NE(f.out.find("third.kvs: whole: 1 sequences, "), std::string::npos) << f.out;
  EXPECT_EQ(f.err, "kvant: 2 of 3 snapshots are not whole: " + first_ + ", " + missing + "\n");
}

TEST_F(CliSnapshot, ACopyNeedsNoOtherFile) {
  const std::string third = folder_ / "third.kvs";
  const Finished f = kvant_cli({"snapshot", "copy", second_, "-o", third});
  EXPECT_EQ(f.exit_code, 0) << f.err;
  std::filesystem::remove(first_);
  EXPECT_EQ(kvant_cli({"snapshot", "verify", third}).exit_code, 0);
  EXPECT_EQ(kvant_cli({"snapshot", "verify", second_}).exit_code, 1);
  EXPECT_EQ(kvant_cli({"snapshot", "copy", third, "-o", third}).exit_code, 2);  // no result replaces what is read
  EXPECT_EQ(kvant_cli({"snapshot", "verify", third}).exit_code, 0);
}

TEST_F(CliSnapshot, ACopyReplacesNoBaseAndGoesThroughLinks) {
  namespace fs = std::filesystem;
  fs::create_symlink("first.kvs", folder_ / "link");
  fs::create_directory(folder_ / "there");
  fs::create_symlink("there/new.kvs", folder_ / "dangling");
  for (const char* name : {"first.kvs", "link", "there/../first.kvs"}) {
    const Finished f = kvant_cli({"snapshot", "copy", second_, "-o", folder_ / name});
    EXPECT_EQ(f.exit_code, 1) << name;
    EXPECT_NE(f.err.find("second.kvs\" needs the file of that name as it is; choose another name"), std::string::npos)
        << f.err;
  }
  EXPECT_EQ(kvant_cli({"snapshot", "verify", second_}).exit_code, 0);
  EXPECT_EQ(kvant_cli({"snapshot", "copy", second_, "-o", folder_ / "dangling"}).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "dangling"));
  EXPECT_EQ(kvant_cli({"snapshot", "verify", folder_ / "there/new.kvs"}).exit_code, 0);
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  const Finished pipe = kvant_cli({"snapshot", "copy", second_, "-o", folder_ / "pipe"});
  EXPECT_EQ(pipe.exit_code, 1);
  EXPECT_NE(pipe.err.find("is not a regular file"), std::string::npos) << pipe.err;
}

}  // namespace
}  // namespace kvant::test
