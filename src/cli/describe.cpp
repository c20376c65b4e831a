#include <algorithm>

#include "cli/arguments.hpp"

namespace kvant::cli {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

OptionDescription describe_option(const CLI::Option& option) {
  OptionDescription d;
  for (const std::string& name : option.get_snames()) d.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) d.names.push_back("--" + name);
  if (option.get_items_expected_max() > 0) d.type = option.get_type_name();
  d.what = one_line(option.get_description());
  d.choices = choices_of(option);
  d.is_list = is_list(option);
  d.is_file = d.type == "FILE";
  d.may_be_bare = option.get_items_expected_min() == 0;
  if (const std::string value = default_of(option); !value.empty()) d.what += " [" + value + "]";
  return d;
}

}  // namespace

CommandDescription describe(const CLI::App& app) {
  CommandDescription d{command_path(app), one_line(app.get_description()), app.get_footer(), false, {}, {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_positional()) {
      d.words = choices_of(*option);
      d.takes_files = d.words.empty();
    }
    if (!option->get_positional() && option->get_group() != kHidden) d.options.push_back(describe_option(*option));
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App* s) { return !s->get_group().empty(); })) {
    d.commands.push_back(describe(*sub));
  }
  return d;
}

}  // namespace kvant::cli
