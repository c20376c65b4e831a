// The JSON header of a safetensors file, read without building a document.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/result.hpp"

namespace kvant::io {

/// More than any real header (a model of 100,000 tensors has 12 MB); a limit of the format itself.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
/// More dimensions than any real tensor; keeps a header from turning into a far larger list of ones.
inline constexpr std::size_t kMaxRank = 32;

struct HeaderTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< into the data, which starts after the header
  std::uint64_t end = 0;
};

struct Header {
  std::vector<HeaderTensor> tensors;  ///< in the order of the file
  std::map<std::string, std::string> metadata;
};

/// The form only: fields, their types, duplicates, depth. Whether shapes, dtypes and offsets agree with each other and
/// with the file is the caller's to check. Messages do not name the file.
Result<Header> parse_header(std::string_view json);

}  // namespace kvant::io
