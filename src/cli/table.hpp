// A table of ready-made cells, printed as aligned text or markdown.
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

class Table {
 public:
  struct Column {
    std::string title;
    bool is_text = false;  ///< left-aligned
    int rank = 0;          ///< where the table must become narrower, the highest rank leaves first; 0: never
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  /// At most `width` characters a line, if that is possible by leaving out columns of a rank (a last line names them)
  /// and by breaking the text of the last column at spaces.
  [[nodiscard]] std::string text(std::size_t width = kNoLimit) const;
  /// The titles of the columns that `text` leaves out.
  [[nodiscard]] std::vector<std::string> left_out(std::size_t width) const;
  [[nodiscard]] std::string markdown() const;
  static constexpr std::size_t kNoLimit = static_cast<std::size_t>(-1);

 private:
  [[nodiscard]] std::vector<std::size_t> widths() const;
  [[nodiscard]] std::vector<std::size_t> shown(std::size_t limit) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// How wide text for people is where there is no terminal (Outputs::width), unless they ask for wide tables.
inline constexpr std::size_t kTextWidth = 120;
/// Lines of at most `width` characters, broken at spaces, each with an end of line; those after the first begin with
/// `indent` spaces.
std::string wrapped(const std::string& text, std::size_t width, std::size_t indent = 2);

std::string escape_html(const std::string& text);
/// 131072 -> "128 KiB"
std::string bytes_text(double bytes);
/// 1234567 ns -> "1.23 ms"
std::string time_text(double ns);

}  // namespace kvant::cli
