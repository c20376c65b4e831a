// `kvant completion SHELL`, and `kvant man`, which the help does not show: the build writes the page.
#include <memory>

#include "cli/arguments.hpp"
#include "cli/command.hpp"
#include "cli/describe.hpp"
#include "cli/output.hpp"

namespace kvant::cli {
namespace {

struct Arguments {
  std::string shell, output = "-";
};

Status write(const std::string& path, const std::string& content) {
  Outputs outputs;
  name_files(outputs, {}, "", {{"-o", path}});
  if (const Status status = outputs.check(); !status.ok()) return status;
  return write_result(path, content);
}

CLI::App* add_writer(CLI::App& app, const char* name, const char* what, Arguments& a) {
  CLI::App* command = app.add_subcommand(name, what);
  add_file(*command, "-o,--output", a.output, "The file to write; -: standard output");
  return command;
}

}  // namespace

Action add_completion_command(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  CLI::App* command = add_writer(app, "completion", "Print what completes kvant's commands and options in a shell", *a);
  command->footer(
      "Examples:\n"
      "  kvant completion bash > ~/.local/share/bash-completion/completions/kvant\n"
      "  kvant completion zsh -o ~/.zfunc/_kvant\n"
      "  kvant completion fish -o ~/.config/fish/completions/kvant.fish");
  one_of(command->add_option("SHELL", a->shell, "bash, zsh or fish")->required(), {"bash", "zsh", "fish"});
  return [a, &app] {
    const auto make = a->shell == "bash" ? bash_completion : a->shell == "zsh" ? zsh_completion : fish_completion;
    return write(a->output, make(describe(app)));
  };
}

Action add_man_command(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  add_writer(app, "man", "Print the manual page", *a)->group("");
  return [a, &app] { return write(a->output, manual_page(describe(app))); };
}

}  // namespace kvant::cli
