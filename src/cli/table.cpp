#include "cli/table.hpp"

#include <algorithm>

#include "core/fmt.hpp"

namespace kvant::cli {
void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text(std::size_t limit) const {
  std::vector<std::size_t> width, shown;
  for (const Column& column : columns_) {
    width.push_back(column.title.size());
    shown.push_back(shown.size());
  }
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::vector<std::string> left_out;
  const auto is_too_wide = [&] {
    std::size_t sum = 2 * (shown.size() - 1);
    for (const std::size_t i : shown) sum += width[i];
    return sum > limit;
  };
  while (!shown.empty() && is_too_wide()) {
    const auto rank_less = [&](std::size_t a, std::size_t b) { return columns_[a].rank < columns_[b].rank; };
    const auto least = std::max_element(shown.begin(), shown.end(), rank_less);
    if (columns_[*least].rank == 0) break;
    left_out.push_back(columns_[*least].title);
    shown.erase(least);
  }

  std::string out;
  const auto line = [&](auto&& cell) {
    std::string text;
    for (const std::size_t i : shown) {
      if (i != shown.front()) text += "  ";
      text += columns_[i].is_text ? fmt::format("{:<{}}", cell(i), width[i]) : fmt::format("{:>{}}", cell(i), width[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line([&](std::size_t i) { return columns_[i].title; });
  line([&](std::size_t i) { return std::string(width[i], '-'); });
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
  if (!left_out.empty()) {
    out += wrapped(fmt::format("(left out to fit {} columns: {}; --wide shows all)", limit, fmt::join(left_out, ", ")),
                   limit);
  }
  return out;
}

std::string wrapped(const std::string& text, std::size_t width) {
  std::string out, line;
  std::size_t at = 0;
  while (at <= text.size()) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!line.empty() && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line = "  " + word;  // what goes on is indented
    } else {
      line += (at == 0 ? "" : " ") + word;
    }
    at = end + 1;
  }
  return out + line + "\n";
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
