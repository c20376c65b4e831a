// Names of files in paths, as text.
#pragma once

#include <string>

namespace kvant::io {

/// The name behind the last slash.
inline std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

/// The path of `name` in the folder of `path`; "." is the folder itself.
inline std::string beside(const std::string& path, const std::string& name) {
  return path.substr(0, path.rfind('/') + 1) + name;
}

}  // namespace kvant::io
