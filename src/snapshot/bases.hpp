// The files that a snapshot needs beside it: how it names them, and which snapshots need a file.
#pragma once

#include <optional>
#include <string>

#include "io/real_place.hpp"
#include "snapshot/checksum.hpp"

namespace kvant::snapshot {

/// A base as the metadata name it.
struct BaseName {
  std::string identity;  // the checksum of its checksums, in hex
  std::string name;      // in the folder of the file that names it
};

std::string write_base(const Checksum& identity, const std::string& name);
/// Unset: the text names no file of a folder.
std::optional<BaseName> read_base(const std::string& text);

/// The name of a snapshot that needs the file at `path` as it is, in the folder of `path`; empty: there is none. Files
/// that cannot be read, or are no whole snapshots, need nothing.
std::string who_needs(const std::string& path, const Checksum& identity);

}  // namespace kvant::snapshot
