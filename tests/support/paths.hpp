// Where test data lies: in the repository always, in a `shared` folder beside it perhaps.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace kvant::test {

inline std::string source_path(const std::string& relative) {
  return std::string(KVANT_SOURCE_DIR) + "/" + relative;
}

/// $KVANT_SHARED/relative, else ../shared/relative beside the repository; nothing where that does not exist.
inline std::optional<std::string> shared_path(const std::string& relative) {
  const char* forced = std::getenv("KVANT_SHARED");
  const std::string root = forced != nullptr ? forced : std::string(KVANT_SOURCE_DIR) + "/../shared";
  const std::string path = root + "/" + relative;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  return path;
}

}  // namespace kvant::test
