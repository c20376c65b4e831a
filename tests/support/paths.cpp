// The only unit that knows the folder of the sources: ccache compiles the others once for all clones on a machine.
#include "support/paths.hpp"

#include <cstdlib>
#include <filesystem>

namespace kvant::test {

std::string source_path(const std::string& relative) {
  return std::string(KVANT_SOURCE_DIR) + "/" + relative;
}

std::optional<std::string> shared_path(const std::string& relative) {
  const char* forced = std::getenv("KVANT_SHARED");
  const std::string root = forced != nullptr ? forced : std::string(KVANT_SOURCE_DIR) + "/../shared";
  const std::string path = root + "/" + relative;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  return path;
}

}  // namespace kvant::test
