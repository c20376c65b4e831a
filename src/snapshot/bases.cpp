#include "snapshot/bases.hpp"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "core/fmt.hpp"
#include "io/byte_source.hpp"
#include "io/path.hpp"
#include "io/safetensors_header.hpp"
#include "kvant/io.hpp"
#include "snapshot/names.hpp"

namespace kvant::snapshot {
namespace {

constexpr std::size_t kIdentityDigits = 32;

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

bool is_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

std::optional<std::string> from_hex(const std::string& text) {
  if (text.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    unsigned value = 0;
    for (const char digit : {text[i], text[i + 1]}) {
      const auto at = std::string_view("0123456789abcdef").find(digit);
      if (at == std::string_view::npos) return std::nullopt;
      value = value * 16 + static_cast<unsigned>(at);
    }
    bytes += static_cast<char>(value);
  }
  return bytes;
}

/// Whether a file's header, as it is in the file, has this text. Most files do not, and are not parsed.
bool header_has(const io::ByteSource& source, const std::string& text) {
  std::uint64_t length = 0;
  if (source.size() < sizeof length || !source.read(0, std::as_writable_bytes(std::span(&length, 1)))) return false;
  if (length > io::kMaxHeaderBytes || length > source.size() - sizeof length) return false;
  std::string header(static_cast<std::size_t>(length), '\0');
  return source.read(sizeof length, std::as_writable_bytes(std::span(header))) &&
         header.find(text) != std::string::npos;
}

}  // namespace

std::string write_base(const Checksum& identity, const std::string& name) {
  return to_text(identity) + ' ' + (is_utf8(name) ? name : '/' + to_hex(name));
}

std::optional<BaseName> read_base(const std::string& text) {
  if (text.size() < kIdentityDigits + 2 || text[kIdentityDigits] != ' ') return std::nullopt;
  BaseName base{text.substr(0, kIdentityDigits), text.substr(kIdentityDigits + 1)};
  if (!from_hex(base.identity)) return std::nullopt;
  if (base.name.starts_with('/')) {
    auto bytes = from_hex(base.name.substr(1));
    if (!bytes) return std::nullopt;
    base.name = std::move(*bytes);
  }
  if (!is_file_name(base.name)) return std::nullopt;
  return base;
}

std::string who_needs(const std::string& path, const Checksum& identity) {
  namespace fs = std::filesystem;
  const std::string name = io::file_name(path), wanted = to_text(identity);
  std::error_code error;
  for (fs::directory_iterator each(io::beside(path, "."), error), end; !error && each != end; each.increment(error)) {
    std::error_code ignored;
    if (!each->is_regular_file(ignored) || each->path().filename() == name) continue;
    const auto source = io::ByteSource::open(each->path().string());
    if (!source || !header_has(**source, wanted)) continue;
    const auto file = io::SafeTensors::read(*source, each->path().string());
    if (!file || !file->metadata().contains(kVersionKey)) continue;
    for (const auto& [key, value] : file->metadata()) {
      if (!key.starts_with(kBase)) continue;
      const std::optional<BaseName> base = read_base(value);
      if (base && base->identity == wanted && base->name == name) return each->path().filename().string();
    }
  }
  return {};
}

}  // namespace kvant::snapshot
