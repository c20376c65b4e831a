// The commands as CLI11 has them, as plain data for the manual page and the shells' completions.
#pragma once

#include <string>
#include <vector>

namespace kvant::cli {

struct OptionDescription {
  std::vector<std::string> names;    ///< "-o", "--output"
  std::string type;                  ///< "FILE", "N,..."; "": a flag
  std::string what;                  ///< one line
  std::vector<std::string> choices;  ///< words it may have
  bool is_list = false, is_file = false, may_be_bare = false;
};

struct CommandDescription {
  std::string path;  ///< "kvant bench decode"
  std::string what, footer;
  bool takes_files = false;
  std::vector<std::string> words;  ///< that stand without an option, as the shell of `kvant completion`
  std::vector<OptionDescription> options;
  std::vector<CommandDescription> commands;
};

std::string bash_completion(const CommandDescription& root);
std::string zsh_completion(const CommandDescription& root);
std::string fish_completion(const CommandDescription& root);
std::string manual_page(const CommandDescription& root);

}  // namespace kvant::cli
