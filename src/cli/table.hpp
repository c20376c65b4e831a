// A table of ready-made cells, printed as aligned text, markdown, or comma-separated values.
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

class Table {
 public:
  struct Column {
    std::string title;
    bool is_text = false;  ///< left-aligned
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::string markdown() const;
  [[nodiscard]] std::string csv() const;  ///< RFC 4180

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string escape_html(const std::string& text);
/// 131072 -> "128 KiB"
std::string bytes_text(double bytes);
/// 1234567 ns -> "1.23 ms"
std::string time_text(double ns);

}  // namespace kvant::cli
