// Element types of a safetensors file. One list: the reader, the writer and their messages use it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kvant/result.hpp"

namespace kvant::io {

struct FileDtype {
  std::string_view name;
  std::uint64_t bytes;
};

inline constexpr std::array<FileDtype, 15> kFileDtypes = {{
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U64", 8},
    {"U32", 4},
    {"U16", 2},
    {"U8", 1},
    {"BOOL", 1},
}};

/// Bytes of one element, or an error that lists the known names.
Result<std::uint64_t> file_dtype_bytes(std::string_view name);

/// Bytes of a tensor, or nothing where a dimension is negative or the product overflows.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, std::uint64_t element_bytes) noexcept;

std::string shape_text(std::span<const std::int64_t> shape);  ///< "[2, 1024, 256]"

}  // namespace kvant::io
