// Snapshots with other metadata than kvant would write, under checksums that are right.
#pragma once

#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/safetensors_header.hpp"
#include "kvant/io.hpp"
#include "snapshot/checksum.hpp"
#include "support/snapshots.hpp"

namespace kvant::test {

/// Writes the file `from` to `to` with changed metadata.
inline void forge_metadata(const std::string& from, const std::string& to,
                           const std::function<void(std::map<std::string, std::string>&)>& change) {
  const io::SafeTensors file = io::SafeTensors::open(from).value();
  std::map<std::string, std::string> metadata = file.metadata();
  change(metadata);
  std::vector<io::HeaderTensor> tensors;
  for (const io::TensorInfo& t : file.tensors())
    tensors.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
  const std::string header = io::header_json(tensors, metadata, 64).value();
  std::vector<std::byte> bytes(8 + header.size());
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  const snapshot::Checksum of_header = snapshot::checksum(bytes);

  std::vector<std::byte> all = file_bytes(from);
  const std::size_t data = all.size() - tensors.back().end;
  bytes.insert(bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(data), all.end());
  std::vector<snapshot::Checksum> sums(static_cast<std::size_t>(tensors.back().shape[0]));
  std::byte* at = bytes.data() + bytes.size() - sums.size() * sizeof(snapshot::Checksum);
  std::memcpy(sums.data(), at, sums.size() * sizeof(snapshot::Checksum));
  sums.front() = of_header;
  sums.back() = snapshot::checksum(std::as_bytes(std::span(sums).first(sums.size() - 1)));
  std::memcpy(at, sums.data(), sums.size() * sizeof(snapshot::Checksum));
  std::ofstream(to, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace kvant::test
