#include "cli/app.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <sstream>

#include "cli/arguments.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/suggest.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

constexpr int kDone = 0, kRefused = 1, kUsage = 2;

constexpr const char* kDescription =
    "kvant: attention over key/value caches stored at 2 to 8 bits a value.\n"
    "Start with `kvant eval`: it replays decoding over captured queries, keys and values and shows what each\n"
    "cache format costs in memory, error and time.";

constexpr const char* kFooter =
    "Examples:\n"
    "  kvant eval qkv.safetensors --report report.html\n"
    "  kvant bench decode --head-dim 128 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq4,tq8,f16\n"
    "  kvant info\n"
    "`kvant COMMAND --help` explains the options of a command and shows more examples.\n"
    "Exit codes: 0 done, 1 refused while running (the reason is on standard error), 2 wrong usage.";

int report(int exit_code, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "kvant: %s\n", message.c_str());
  return exit_code;
}

int finish() {
  const Status status = finish_standard_output();
  return status.ok() ? kDone : report(kRefused, status.message());
}

int refuse_first_word(const CLI::App& app, const std::string& word) {
  const std::vector<std::string> names = command_names(app);
  std::string problem = word + ": no such command";
  if (word.empty()) problem = "no command given";
  if (!word.empty() && word[0] == '-') problem = word + ": not an option that stands before the command";
  const char* elsewhere = word == "doctor" ? "; doctor is a command of the Python package" : "";
  return report(kUsage, fmt::format("{}; the commands are {}{}{}\nRun `kvant --help` for examples.", problem,
                                    fmt::join(names, ", "), did_you_mean(word, names), elsewhere));
}

// The words of the command line; "help", "help COMMAND" and "version" as the options of that name.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  const std::string first = words.empty() ? "" : words.front();
  if (first == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  } else if (first == "version" || first == "-V") {
    words.front() = "--version";
  }
  return words;
}

// An error of the parser, in our words where it says too little.
std::string message_of(const CLI::ParseError& error, const CLI::App& command) {
  // A word that nobody took is often the reason why a required option is missing.
  if (const std::string leftover = leftover_message(command); !leftover.empty()) return leftover;
  const std::vector<std::string> operations = command_names(command);
  if (error.get_name() == "RequiredError" && !operations.empty()) {
    return fmt::format("no operation given; the operations are {}", fmt::join(operations, ", "));
  }
  return error.what();
}

int parse_and_run(int argc, char** argv) {
  CLI::App app(kDescription);
  app.name("kvant");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("kvant ") + kVersion, "Print the version and exit");
  app.formatter(std::make_shared<HelpFormatter>());
  app.get_formatter()->column_width(34);
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.require_subcommand(1);

  const std::pair<const char*, Action> commands[] = {
      {"eval", add_eval_command(app)},
      {"bench", add_bench_command(app)},
      {"calibrate", add_calibrate_command(app)},
      {"snapshot", add_snapshot_command(app)},
      {"formats", add_formats_command(app)},
      {"info", add_info_command(app)},
      {"completion", add_completion_command(app)},
      {"man", add_man_command(app)},
  };

  std::vector<std::string> words = words_of(argc, argv);
  const std::string first = words.empty() ? "" : words.front();
  const bool is_option = first == "-h" || first == "--help" || first == "--version";
  if (!is_option &&
      std::none_of(std::begin(commands), std::end(commands), [&](const auto& c) { return first == c.first; })) {
    return refuse_first_word(app, first);
  }

  try {
    words = join_lists(app, words);
    std::reverse(words.begin(), words.end());  // CLI11 takes them from the end
    app.parse(std::move(words));
    for (const auto& [name, action] : commands) {
      if (!app.got_subcommand(name)) continue;
      const Status status = action();
      if (!status.ok()) return report(kRefused, status.message());
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help and --version arrive as exceptions
      std::ostringstream text;
      app.exit(error, text, text);
      print_standard_output(text.str());
      return finish();
    }
    const CLI::App* command = deepest_command(&app);
    return report(kUsage, fmt::format("{}\nRun `{} --help` for what is allowed.", message_of(error, *command),
                                      command_path(*command)));
  }
  return finish();
}

int run_app(int argc, char** argv) noexcept {
  try {
    return parse_and_run(argc, argv);
  } catch (const std::bad_alloc&) {
    return report(kRefused, "not enough memory for this; use fewer keys, layers, formats or a smaller batch");
  } catch (const std::exception& error) {
    return report(kRefused, std::string("a defect in kvant, please report it: ") + error.what());
  } catch (...) {
    return report(kRefused, "a defect in kvant, please report it");
  }
}

}  // namespace
}  // namespace kvant::cli

int kvant_cli_main(int argc, char** argv) noexcept {
  return kvant::cli::run_app(argc, argv);
}
