#include "cli/table.hpp"

#include <algorithm>
#include <numeric>

#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr std::size_t kGap = 2;         // spaces between columns
constexpr std::size_t kLeastText = 24;  // a column of text is not broken into less

}  // namespace

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> width;
  for (const Column& column : columns_) width.push_back(column.title.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  return width;
}

std::vector<std::size_t> Table::shown(std::size_t limit) const {
  const std::vector<std::size_t> width = widths();
  std::vector<std::size_t> shown(columns_.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  const auto is_too_wide = [&] {
    std::size_t sum = kGap * (shown.size() - 1);
    for (const std::size_t i : shown) sum += width[i];
    return sum > limit;
  };
  while (!shown.empty() && is_too_wide()) {
    const auto rank_less = [&](std::size_t a, std::size_t b) { return columns_[a].rank < columns_[b].rank; };
    const auto least = std::max_element(shown.begin(), shown.end(), rank_less);
    if (columns_[*least].rank == 0) break;
    shown.erase(least);
  }
  return shown;
}

std::vector<std::string> Table::left_out(std::size_t width) const {
  const std::vector<std::size_t> is_shown = shown(width);
  std::vector<std::string> titles;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    if (!std::binary_search(is_shown.begin(), is_shown.end(), i)) titles.push_back(columns_[i].title);
  }
  return titles;
}

std::string Table::text(std::size_t limit) const {
  std::vector<std::size_t> width = widths();
  const std::vector<std::size_t> columns = shown(limit);
  // The last column gets what the others leave, so that its text is broken and not the terminal's lines.
  const std::size_t last = columns.back();
  std::size_t before = 0;
  for (const std::size_t i : columns) before += i == last ? 0 : width[i] + kGap;
  if (columns_[last].is_text && before + kLeastText <= limit) width[last] = std::min(width[last], limit - before);

  std::string out;
  const auto line = [&](auto&& cell) {
    std::string text;
    for (const std::size_t i : columns) {
      if (i == last && columns_[i].is_text) {
        for (const char c : wrapped(cell(i), width[i], 0)) {
          text += c;
          if (c == '\n') text += std::string(before, ' ');
        }
      } else {
        text +=
            columns_[i].is_text ? fmt::format("{:<{}}", cell(i), width[i]) : fmt::format("{:>{}}", cell(i), width[i]);
        if (i != last) text += std::string(kGap, ' ');
      }
    }
    text.erase(text.find_last_not_of(" \n") + 1);
    out += text + "\n";
  };
  line([&](std::size_t i) { return columns_[i].title; });
  line([&](std::size_t i) { return std::string(width[i], '-'); });
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
  if (columns.size() < columns_.size()) {
    out += wrapped(
        fmt::format("(left out to fit {} columns: {}; --wide shows all)", limit, fmt::join(left_out(limit), ", ")),
        limit);
  }
  return out;
}

std::string wrapped(const std::string& text, std::size_t width, std::size_t indent) {
  std::string out, line;
  std::size_t at = 0;
  while (at <= text.size()) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!line.empty() && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line = std::string(indent, ' ') + word;  // what goes on is indented
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
