// The JSON header of a safetensors file, read without building a document.
#pragma once

#include <cstdint>
#include <map>
#include <span>
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

/// The JSON text of a header for tensors that lie in this order, without gaps: `begin` and `end` are filled in. Spaces
/// behind it bring the data to a multiple of `alignment` bytes. Errors: text that is not UTF-8, and too much of it;
/// messages do not name the file.
Result<std::string> header_json(std::span<HeaderTensor> tensors, const std::map<std::string, std::string>& metadata,
                                std::size_t alignment);
/// The length of the header, which stands before it.
inline constexpr std::size_t kHeaderLengthBytes = 8;

}  // namespace kvant::io
