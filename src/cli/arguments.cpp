#include "cli/arguments.hpp"

#include <algorithm>
#include <cctype>

#include "cli/formats.hpp"
#include "cli/machine.hpp"
#include "cli/suggest.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

std::string without_spaces(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\t' || c == '\n'; });
  return text;
}

constexpr const char* kFileType = "FILE";

bool is_number(const std::string& word) {
  return !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
}

bool can_be_element(const CLI::Option& list, const std::string& word) {
  const std::string type = list.get_type_name();
  if (type.starts_with("N")) return !word.empty() && word.find_first_not_of("0123456789kKmM,") == std::string::npos;
  const std::vector<std::string> known = choices_of(list);
  for (const std::string& part : CLI::detail::split(word, ',')) {
    const bool is_pair = type.starts_with("FORMAT") && parse_format_pair(part).ok();
    if (!part.empty() && !is_pair && std::find(known.begin(), known.end(), part) == known.end()) return false;
  }
  return true;
}

// A file that commands read, by its name.
bool is_read(const std::string& path) {
  return path.ends_with(".safetensors") || path.ends_with(".kvs");
}

// The option that a word names, as --name, --name=value or -n; null: the word names none.
const CLI::Option* option_of(const CLI::App& command, const std::string& word) {
  if (word.size() < 2 || word[0] != '-') return nullptr;
  return command.get_option_no_throw(word.substr(0, word.find('=')));
}

const CLI::App* subcommand_of(const CLI::App& command, const std::string& word) {
  const auto found = command.get_subcommands([&](const CLI::App* sub) { return sub->check_name(word); });
  return found.empty() ? nullptr : found.front();
}

// The list that starts with `value`, with as many words from `at` as belong to it. `at` moves behind them.
std::string join_list(const CLI::App& command, const CLI::Option& list, std::string value,
                      const std::vector<std::string>& words, std::size_t& at) {
  for (; at < words.size(); ++at) {
    const std::string& next = words[at];
    const bool is_joined = without_spaces(value).ends_with(',') || without_spaces(next).starts_with(',');
    if (option_of(command, next) != nullptr || (!next.empty() && next[0] == '-')) break;
    if (!is_joined && (!can_be_element(list, next) || subcommand_of(command, next) != nullptr)) break;
    value += (is_joined ? "" : ",") + next;
  }
  return without_spaces(value);
}

}  // namespace

std::string HelpFormatter::make_group(std::string group, bool is_positional,
                                      std::vector<const CLI::Option*> opts) const {
  return group == kHidden ? "" : CLI::Formatter::make_group(std::move(group), is_positional, std::move(opts));
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // a flag
  const bool may_be_bare = option->get_items_expected_min() == 0;
  const std::string type = option->get_type_name(), value = default_of(*option);
  if (option->get_positional()) return "";
  return (may_be_bare ? " [" + type + "]" : " " + type) + (value.empty() ? "" : "=" + value);
}

std::string default_of(const CLI::Option& option) {
  if (option.get_items_expected_min() == 0) return "";  // what stands for no value
  std::string value = option.get_default_str();
  if (is_list(option) && value.size() > 1 && value.front() == '[') value = value.substr(1, value.size() - 2);
  return value;
}

std::vector<std::string> choices_of(const CLI::Option& option) {
  std::string type = option.get_type_name();
  if (type.ends_with(",...")) type.resize(type.size() - 4);  // a list
  if (type.find('|') != std::string::npos) return CLI::detail::split(type, '|');
  if (type.starts_with("FORMAT")) return plain_format_names();
  return type.starts_with("ISA") ? isa_names() : std::vector<std::string>();
}

bool is_list(const CLI::Option& option) {
  return option.get_delimiter() == ',';
}

CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& words) {
  const auto check = [words](const std::string& word) {
    if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
    return fmt::format("{}: must be one of {}{}", word, fmt::join(words, ", "), did_you_mean(word, words));
  };
  return option->check(CLI::Validator(check, "", ""))->type_name(fmt::format("{}", fmt::join(words, "|")));
}

CLI::Option* add_file(CLI::App& command, const std::string& name, std::string& path, const std::string& what) {
  return command.add_option(name, path, what)->type_name(kFileType);
}

void name_files(Outputs& outputs, const std::vector<std::string>& captures, const std::string& basis,
                const std::vector<std::pair<const char*, std::string>>& results) {
  const auto named = [](const Status& status) {
    if (!status.ok()) throw CLI::ValidationError(status.message());
  };
  for (const std::string& path : captures) named(outputs.add_input("FILE", path));
  if (!basis.empty()) named(outputs.add_input("--basis", basis));
  for (const auto& [option, path] : results) named(outputs.add(option, path));
}

CLI::Option* add_output(CLI::App& command, const std::string& name, std::string& path, const std::string& what) {
  return add_file(command, name, path, what + "; no file or -: standard output")->expected(0, 1)->default_str("-");
}

CLI::Option* with_units(CLI::Option* option) {
  const auto scale = [](std::string& word) {
    const char unit = word.empty() ? '\0' : static_cast<char>(std::tolower(static_cast<unsigned char>(word.back())));
    const std::string digits = word.substr(0, word.empty() ? 0 : word.size() - 1);
    constexpr std::size_t kMostDigits = 10;  // their product with 2^20 is far from the largest number
    if ((unit != 'k' && unit != 'm') || !is_number(digits) || digits.size() > kMostDigits) return std::string();
    word = std::to_string(std::stoll(digits) << (unit == 'k' ? 10 : 20));
    return std::string();
  };
  return option->transform(CLI::Validator(scale, "", ""));
}

CLI::Option* add_wide(CLI::App& command, bool& is_wide) {
  return command.add_flag("--wide", is_wide, "Show all columns, however wide the tables become");
}

std::vector<std::string> join_lists(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  const CLI::App* command = &app;
  for (std::size_t at = 0; at < arguments.size();) {
    const std::string& word = arguments[at++];
    const CLI::Option* option = option_of(*command, word);
    if (option == nullptr) {
      if (const CLI::App* sub = subcommand_of(*command, word)) command = sub;
      out.push_back(word);
      continue;
    }
    const auto equals = word.find('=');
    const bool is_empty =
        equals == std::string::npos ? at < arguments.size() && arguments[at].empty() : equals + 1 == word.size();
    if (is_empty && option->get_type_name() == kFileType) {  // CLI11 would take the next word, or standard output
      throw CLI::ValidationError(word.substr(0, equals),
                                 "the file name is empty; name a file, or leave the option out");
    }
    if (is_list(*option) && equals != std::string::npos) {
      const std::string list = join_list(*command, *option, word.substr(equals + 1), arguments, at);
      out.push_back(word.substr(0, equals + 1) + list);
      continue;
    }
    const bool is_output = option->get_type_name() == kFileType && option->get_expected_min() == 0;
    if (is_output && equals == std::string::npos && at < arguments.size() && is_read(arguments[at])) {
      out.push_back(word + "=-");
      continue;
    }
    out.push_back(word);
    if (equals != std::string::npos || option->get_expected_min() == 0 || at == arguments.size()) continue;
    const std::string& value = arguments[at++];
    out.push_back(is_list(*option) ? join_list(*command, *option, value, arguments, at) : value);
  }
  return out;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App* s) { return !s->get_group().empty(); })) {
    names.push_back(sub->get_name());
  }
  return names;
}

std::string command_path(const CLI::App& command) {
  return command.get_parent() == nullptr ? command.get_name()
                                         : command_path(*command.get_parent()) + " " + command.get_name();
}

const CLI::App* deepest_command(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().back();
  return app;
}

std::string leftover_message(const CLI::App& command) {
  const std::vector<std::string> words = command.remaining();
  if (words.empty()) return "";
  // An option that is not known comes first: words beside it are mostly its value.
  const auto dashed = std::find_if(words.begin(), words.end(), [](const std::string& w) { return w[0] == '-'; });
  const std::string word = dashed != words.end() ? *dashed : words.front();
  const std::string path = command_path(command);
  if (dashed == words.end()) {
    const std::vector<std::string> subs = command_names(command);
    if (subs.empty()) return fmt::format("{}: not expected; {} takes no more words", word, path);
    return fmt::format("{}: {} has no such operation; the operations are {}{}", word, path, fmt::join(subs, ", "),
                       did_you_mean(word, subs));
  }
  const std::string name = word.substr(0, word.find('='));
  std::vector<std::string> known, siblings;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& own : option->get_lnames()) known.push_back("--" + own);
  }
  if (command.get_parent() != nullptr) {
    for (const CLI::App* sibling : command.get_parent()->get_subcommands([](const CLI::App*) { return true; })) {
      if (option_of(*sibling, name) != nullptr) siblings.push_back(sibling->get_name());
    }
  }
  std::string hint = did_you_mean(name, known);
  const auto longer =
      std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.starts_with(name + '-'); });
  if (hint.empty() && longer != known.end()) hint = fmt::format("; did you mean {}?", *longer);
  const std::string others =
      hint.empty() && !siblings.empty() ? fmt::format("; {} have it", fmt::join(siblings, ", ")) : hint;
  return fmt::format("{}: {} has no such option{}", name, path, others);
}

}  // namespace kvant::cli
