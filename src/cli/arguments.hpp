// All commands declare and read their options with these functions. A type name describes an option's values to people
// and to the shell's completion: "both|with|without" are the allowed words, "FORMAT,..." and "ISA,..." are lists of
// names, "N,..." is a list of numbers, "FILE" is a path.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/describe.hpp"
#include "cli/output.hpp"

namespace kvant::cli {

inline constexpr const char* kIsaHelp =
    "scalar, avx2, avx512, amx or neon, of which kvant info lists those that are\n"
    "here; amx multiplies many rows with products of bf16 terms: errors near 4e-6\n"
    "where those of avx512 are near 1e-6 (float formats); default: the best here";

/// The group of options that are taken and not shown. (CLI11's own, "", leaves their names out of error messages.)
inline constexpr const char* kHidden = "hidden";

/// The help as CLI11 makes it, without hidden options, and with its own form of values: --json [FILE], --keys N,...
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_group(std::string group, bool is_positional, std::vector<const CLI::Option*> opts) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
};
/// The default as people type it; "": none.
std::string default_of(const CLI::Option& option);

/// The words that an option may have; empty: anything.
std::vector<std::string> choices_of(const CLI::Option& option);
bool is_list(const CLI::Option& option);

/// An option that takes one of these words. A refusal names them, and the nearest.
CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& words);

template <class T>
CLI::Option* add_list(CLI::App& command, const std::string& name, std::vector<T>& values, const std::string& what,
                      const char* type = "N,...") {
  return command.add_option(name, values, what)->delimiter(',')->allow_extra_args(false)->type_name(type);
}

/// A file to read or to write.
CLI::Option* add_file(CLI::App& command, const std::string& name, std::string& path, const std::string& what);
/// A text to write, which goes to standard output where the option names no file. A word behind the option is the
/// command's if it has the ending of files that are read: `kvant eval --json qkv.safetensors`.
CLI::Option* add_output(CLI::App& command, const std::string& name, std::string& path, const std::string& what);
/// Numbers of tokens: 32k is 32768, 1m is 1048576.
CLI::Option* with_units(CLI::Option* option);
/// Names all files of a command: captures and a basis ("": none) that it reads, and results with their options.
/// Throws wrong usage: a result is a file that is read, or has another result.
void name_files(Outputs& outputs, const std::vector<std::string>& captures, const std::string& basis,
                const std::vector<std::pair<const char*, std::string>>& results);
CLI::Option* add_wide(CLI::App& command, bool& is_wide);

/// The program's arguments with every list as one word: "--formats tq4, tq6/tq4 fp8" becomes
/// "--formats tq4,tq6/tq4,fp8". A list goes on after a comma, and with words that can be elements of it; what else
/// follows is another argument. Throws wrong usage: an option of add_file or add_output with an empty name.
std::vector<std::string> join_lists(const CLI::App& app, const std::vector<std::string>& arguments);

/// Names of the commands that the help shows.
std::vector<std::string> command_names(const CLI::App& app);
/// Describes the command, its options and its subcommands, as far as the help shows them.
CommandDescription describe(const CLI::App& app);
/// "kvant bench decode"
std::string command_path(const CLI::App& command);
/// The command on the command line, among those below this one.
const CLI::App* deepest_command(const CLI::App* app);
/// An error about arguments that no option takes; "": no argument is left over.
std::string leftover_message(const CLI::App& command);

}  // namespace kvant::cli
