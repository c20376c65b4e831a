// Where test data lies: in the repository always, in a `shared` folder beside it perhaps.
#pragma once

#include <optional>
#include <string>

namespace kvant::test {

std::string source_path(const std::string& relative);

/// $KVANT_SHARED/relative, else ../shared/relative beside the repository; nothing where that does not exist.
std::optional<std::string> shared_path(const std::string& relative);

}  // namespace kvant::test
