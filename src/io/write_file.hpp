// Writes a file so that the file appears under its name only when all of it is on disk.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "kvant/result.hpp"

namespace kvant::io {

/// Writes the pieces to a temporary file beside `path`, syncs and renames. Whatever fails, an older file of that name
/// stays as it is. Errors: io, with the path, the step that failed and the system's reason.
Status write_file(const std::string& path, std::span<const std::span<const std::byte>> pieces);

}  // namespace kvant::io
