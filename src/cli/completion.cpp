// The completions of bash, zsh and fish: `kvant completion SHELL`.
#include <functional>

#include "cli/describe.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

using Visit = std::function<void(const CommandDescription&)>;

void for_each(const CommandDescription& command, const Visit& visit) {
  visit(command);
  for (const CommandDescription& sub : command.commands) for_each(sub, visit);
}

std::string name_of(const CommandDescription& command) {
  return command.path.substr(command.path.rfind(' ') + 1);
}

// In single quotes of a shell.
std::string in_quotes(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::vector<std::string> words_of(const CommandDescription& command) {
  std::vector<std::string> words = command.words;
  for (const CommandDescription& sub : command.commands) words.push_back(name_of(sub));
  for (const OptionDescription& option : command.options) {
    words.insert(words.end(), option.names.begin(), option.names.end());
  }
  return words;
}

}  // namespace

std::string bash_completion(const CommandDescription& root) {
  std::string paths, values, words;
  for_each(root, [&](const CommandDescription& c) {
    if (&c != &root) paths += fmt::format("      '{}') path='{}' ;;\n", c.path, c.path);
    for (const OptionDescription& o : c.options) {
      if (o.type.empty()) continue;
      std::string pattern;
      for (const std::string& name : o.names) pattern += (pattern.empty() ? "'" : " | '") + c.path + " " + name + "'";
      const char* how = o.is_file ? "files" : o.is_list ? "list" : "words";
      values += fmt::format("    {}) _kvant_{} '{}'; return ;;\n", pattern, how, fmt::join(o.choices, " "));
    }
    // Where a command reads files, a word that does not begin as an option is one.
    const std::string names = fmt::format("_kvant_words '{}'", fmt::join(words_of(c), " "));
    words += c.takes_files
                 ? fmt::format("    '{}') if [[ $cur == -* ]]; then {}; else _kvant_files; fi ;;\n", c.path, names)
                 : fmt::format("    '{}') {} ;;\n", c.path, names);
  });
  return fmt::format(
      R"sh(# bash completion of kvant, made by `kvant completion bash`
_kvant_words() {{ COMPREPLY=($(compgen -W "$1" -- "$cur")); }}
_kvant_files() {{
  compopt -o filenames 2>/dev/null
  local IFS=$'\n'
  COMPREPLY=($(compgen -f -- "$cur"))
}}
# The last element of a list with commas.
_kvant_list() {{
  local begin=
  [[ $cur == *,* ]] && begin="${{cur%,*}},"
  COMPREPLY=($(compgen -P "$begin" -W "$1" -- "${{cur##*,}}"))
}}
_kvant() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} path=kvant i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${{COMP_WORDS[i]}}" in
{}    esac
  done
  case "$path $previous" in
{}  esac
  case "$path" in
{}  esac
}}
complete -F _kvant kvant
)sh",
      paths, values, words);
}

std::string zsh_completion(const CommandDescription& root) {
  std::string functions;
  const auto function_of = [](const CommandDescription& c) {
    std::string name = "_" + c.path;
    for (char& ch : name) ch = ch == ' ' ? '_' : ch;
    return name;
  };
  // In the words of _arguments a colon and brackets have a meaning.
  const auto escaped = [](const std::string& text) {
    std::string out;
    for (const char c : text)
      out += c == ':' || c == '[' || c == ']' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out;
  };
  for_each(root, [&](const CommandDescription& c) {
    std::string arguments;
    for (const OptionDescription& o : c.options) {
      for (const std::string& name : o.names) {
        std::string spec = fmt::format("{}[{}]", name, escaped(o.what));
        const std::string words = fmt::format("{}", fmt::join(o.choices, " "));
        const std::string action = o.is_file       ? "_files"
                                   : words.empty() ? " "
                                   : o.is_list
                                       ? fmt::format("_values -s , {} {}", o.type.substr(0, o.type.find(',')), words)
                                       : "(" + words + ")";
        if (!o.type.empty()) spec += fmt::format("{}{}:{}", o.may_be_bare ? "::" : ":", escaped(o.type), action);
        arguments += " \\\n    " + in_quotes(spec);
      }
    }
    std::string cases;
    if (!c.commands.empty()) {
      std::string names;
      for (const CommandDescription& sub : c.commands) {
        if (!names.empty()) names += ' ';
        names += name_of(sub);
      }
      arguments += " \\\n    " + in_quotes("1:command:(" + names + ")") + " \\\n    '*::argument:->argument'";
      for (const CommandDescription& sub : c.commands) {
        cases += fmt::format("      {}) {} ;;\n", name_of(sub), function_of(sub));
      }
      cases = "  if [[ $state == argument ]]; then\n    case $line[1] in\n" + cases + "    esac\n  fi\n";
    }
    if (c.takes_files) arguments += " \\\n    '*:file:_files'";
    if (!c.words.empty()) arguments += " \\\n    " + in_quotes(fmt::format("1:word:({})", fmt::join(c.words, " ")));
    functions += fmt::format("{}() {{\n  local line state\n  _arguments{}{}\n{}}}\n", function_of(c),
                             c.commands.empty() ? "" : " -C", arguments, cases);
  });
  return "#compdef kvant\n# zsh completion of kvant, made by `kvant completion zsh`\n" + functions + "_kvant \"$@\"\n";
}

std::string fish_completion(const CommandDescription& root) {
  std::string out = "# fish completion of kvant, made by `kvant completion fish`\ncomplete -c kvant -f\n";
  for_each(root, [&](const CommandDescription& c) {
    std::string names, condition = "__fish_use_subcommand";
    for (const CommandDescription& sub : c.commands) names.append(1, ' ').append(name_of(sub));
    if (&c != &root) {
      condition = "__fish_seen_subcommand_from " + name_of(c);
      if (!names.empty()) condition += "; and not __fish_seen_subcommand_from" + names;
    }
    for (const CommandDescription& sub : c.commands) {
      out +=
          fmt::format("complete -c kvant -n {} -a {} -d {}\n", in_quotes(condition), name_of(sub), in_quotes(sub.what));
    }
    if (c.takes_files) out += fmt::format("complete -c kvant -n {} -F\n", in_quotes(condition));
    if (!c.words.empty())
      out += fmt::format("complete -c kvant -n {} -a {}\n", in_quotes(condition),
                         in_quotes(fmt::format("{}", fmt::join(c.words, " "))));
    for (const OptionDescription& o : c.options) {
      out += fmt::format("complete -c kvant -n {}", in_quotes(condition));
      for (const std::string& name : o.names) {
        out += name[1] == '-' ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (o.is_file) out += o.may_be_bare ? " -F" : " -r -F";
      if (!o.is_file && !o.type.empty()) out += " -x";  // a value, which is no file
      if (!o.choices.empty()) {
        const std::string words = fmt::format("{}", fmt::join(o.choices, " "));
        out += " -a " + in_quotes(o.is_list ? "(__fish_append , " + words + ")" : words);
      }
      out += " -d " + in_quotes(o.what) + "\n";
    }
  });
  return out;
}

}  // namespace kvant::cli
