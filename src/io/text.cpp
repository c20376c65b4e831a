#include "io/text.hpp"
#include "core/fmt.hpp"

namespace kvant::io {

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", byte);
    }
  }
  if (text.size() > limit) out += fmt::format("... ({} bytes)", text.size());
  return out;
}

std::string in_quotes(std::string_view text) {
  return '"' + printable(text, 80) + '"';
}

}  // namespace kvant::io
