// The manual page: `kvant man`.
#include "cli/describe.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

// Text in roff: backslashes, hyphens that are typed, and lines that would begin as a request.
std::string roff(const std::string& text) {
  std::string out;
  bool is_line_begin = true;
  for (const char c : text) {
    if (is_line_begin && (c == '.' || c == '\'')) out += "\\&";
    out += c == '\\' ? std::string("\\e") : c == '-' ? std::string("\\-") : std::string(1, c);
    is_line_begin = c == '\n';
  }
  return out;
}

std::string option_text(const OptionDescription& o) {
  std::string names;
  for (const std::string& name : o.names) names += (names.empty() ? "\\fB" : ", \\fB") + roff(name) + "\\fR";
  if (!o.type.empty())
    names += (o.may_be_bare ? " [\\fI" : " \\fI") + roff(o.type) + (o.may_be_bare ? "\\fR]" : "\\fR");
  return ".TP\n" + names + "\n" + roff(o.what) + "\n";
}

// Footers are laid out by hand, their examples above all.
std::string as_it_is(const std::string& text) {
  return text.empty() ? "" : ".PP\n.nf\n" + roff(text) + "\n.fi\n";
}

// The words behind a command that are no options.
std::string operands(const CommandDescription& c, const std::string& before, const std::string& behind) {
  const std::string words = fmt::format("{}", fmt::join(c.words, "|"));
  if (c.takes_files) return " " + before + "FILE" + behind + "...";
  return words.empty() ? "" : " " + before + roff(words) + behind;
}

std::string command_text(const CommandDescription& c) {
  std::string text = ".SS " + roff(c.path) + operands(c, "", "") + "\n" + roff(c.what) + ".\n";
  for (const OptionDescription& o : c.options) text += option_text(o);
  text += as_it_is(c.footer);
  for (const CommandDescription& sub : c.commands) text += command_text(sub);
  return text;
}

}  // namespace

std::string manual_page(const CommandDescription& root) {
  std::string text =
      fmt::format(".\\\" made by `kvant man`\n.TH KVANT 1 \"\" \"kvant {}\" \"User Commands\"\n", kVersion);
  text += ".SH NAME\nkvant \\- attention over compressed key/value caches: what each format costs\n";
  text += ".SH SYNOPSIS\n";
  for (const CommandDescription& c : root.commands) {
    text += fmt::format("\\fB{}\\fR [\\fIOPTIONS\\fR]{}{}\n.br\n", roff(c.path),
                        c.commands.empty() ? "" : " [\\fIOPERATION\\fR]", operands(c, "\\fI", "\\fR"));
  }
  text += ".SH DESCRIPTION\n" + roff(root.what) + "\n";
  text += ".SH OPTIONS\n";
  for (const OptionDescription& o : root.options) text += option_text(o);
  text += ".SH COMMANDS\n";
  for (const CommandDescription& c : root.commands) text += command_text(c);
  text += ".SH EXIT STATUS\n0: done. 1: refused while running, with the reason on standard error. 2: wrong usage.\n";
  return text;
}

}  // namespace kvant::cli
