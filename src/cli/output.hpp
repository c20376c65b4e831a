// Where results go. A path of "-" is standard output; then the text for people moves to standard error, so that a
// pipe gets nothing but the result.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/result.hpp"

namespace kvant::cli {

/// The files of a command. Every file that it reads is named first, so that no result can replace one.
class Outputs {
 public:
  /// Names a file that the command reads. Errors: standard output goes to that file.
  Status add_input(const char* option, const std::string& path);
  /// Names a result file ("" is ignored). Errors: the file is read, or has another result, also under another name or
  /// by a link; two results on standard output.
  Status add(const char* option, const std::string& path);
  /// Refuses, before minutes of work, paths that cannot be written.
  [[nodiscard]] Status check() const;
  /// Writes a result ("" is ignored) and says so.
  [[nodiscard]] Status write(const std::string& path, std::string_view content) const;
  /// Text for people.
  void print(std::string_view text) const;
  /// How many columns a line of that text may have: those of the terminal where it goes, or of COLUMNS; else 120.
  [[nodiscard]] std::size_t width() const;

 private:
  struct File {
    const char* option;
    std::string path;
    bool is_input;
  };
  [[nodiscard]] Status compare(const File& file) const;
  [[nodiscard]] int stream() const;

  std::vector<File> files_;
  const char* owner_of_stdout_ = nullptr;
};

/// Writes beside the file and renames, so that a failed write leaves the old file alone.
Status write_result(const std::string& path, std::string_view content);

/// All text for standard output goes through this. A failure is kept for `finish_standard_output`.
void print_standard_output(std::string_view text);
/// Errors: some text could not be written, with the reason of the first failure.
Status finish_standard_output();

/// A bar on standard error while something takes long; silent unless that is a terminal.
class Progress {
 public:
  explicit Progress(double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void advance(double amount, const std::string& what);
  void clear();

 private:
  bool is_shown_;
  double total_;
  double done_ = 0;
  double last_shown_ = -1;
  std::string last_what_;
};

}  // namespace kvant::cli
