#include "cli/table.hpp"

#include <algorithm>

#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::size_t> width;
  for (const Column& column : columns_) width.push_back(column.title.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string out;
  const auto line = [&](auto&& cell) {
    std::string text;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) text += "  ";
      text += columns_[i].is_text ? fmt::format("{:<{}}", cell(i), width[i]) : fmt::format("{:>{}}", cell(i), width[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line([&](std::size_t i) { return columns_[i].title; });
  line([&](std::size_t i) { return std::string(width[i], '-'); });
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
  return out;
}

std::string Table::markdown() const {
  std::string out;
  const auto line = [&](auto&& cell) {
    for (std::size_t i = 0; i < columns_.size(); ++i) out += fmt::format("| {} ", cell(i));
    out += "|\n";
  };
  line([&](std::size_t i) { return columns_[i].title; });
  for (const Column& column : columns_) out += column.is_text ? "|---" : "|---:";
  out += "|\n";
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
  return out;
}

std::string Table::csv() const {
  std::string out;
  const auto line = [&](auto&& cell) {
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) out += ',';
      out += csv_field(cell(i));
    }
    out += '\n';
  };
  line([&](std::size_t i) { return columns_[i].title; });
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
  return out;
}

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2, kUnits[unit]);
}

std::string time_text(double ns) {
  constexpr const char* kUnits[] = {"ns", "us", "ms", "s"};
  int unit = 0;
  while (ns >= 1000 && unit < 3) {
    ns /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", ns, ns >= 100 ? 0 : ns >= 10 ? 1 : 2, kUnits[unit]);
}

}  // namespace kvant::cli
