// Text of a file inside a message: bounded and printable, whatever the file holds.
#pragma once

#include <string>
#include <string_view>

namespace kvant::io {

/// At most `limit` bytes of `text`, everything that is not printable ASCII as \xNN.
std::string printable(std::string_view text, std::size_t limit = 200);

/// The same between double quotes, for names and values.
std::string in_quotes(std::string_view text);

}  // namespace kvant::io
