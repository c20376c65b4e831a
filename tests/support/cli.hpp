// The command line's program, for the tests that run it.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/process.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::test {

using Json = nlohmann::json;

#ifdef KVANT_CLI
inline const std::string kProgram = KVANT_CLI;
#else
inline const std::string kProgram;  // the command line is not part of this build
#endif
inline Finished kvant_cli(const std::vector<std::string>& arguments) {
  return run_program(kProgram, arguments);
}

inline std::string sentence(const std::vector<std::string>& arguments) {
  std::string text = "kvant";
  for (const std::string& a : arguments) text += " " + a;
  return text;
}

class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kProgram.empty()) GTEST_SKIP() << "the command line is not part of this build";
  }

  Json json_of(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--json", "-"});
    const Finished f = kvant_cli(arguments);
    EXPECT_EQ(f.exit_code, 0) << sentence(arguments) << "\n" << f.err;
    Json json = Json::parse(f.out, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << "standard output is not JSON alone:\n" << f.out.substr(0, 400);
    return json;
  }

  TemporaryDirectory folder_;
};

inline std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

}  // namespace kvant::test
