#include "cli/app.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <new>

#include "cli/command.hpp"
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

int parse_and_run(int argc, char** argv) {
  CLI::App app(kDescription);
  app.name("kvant");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("kvant ") + kVersion, "Print the version and exit");
  app.get_formatter()->column_width(34);
  app.require_subcommand(1);

  const struct {
    const char* name;
    Action action;
  } commands[] = {
      {"eval", add_eval_command(app)},
      {"bench", add_bench_command(app)},
      {"calibrate", add_calibrate_command(app)},
      {"info", add_info_command(app)},
  };

  const std::string first = argc > 1 ? argv[1] : "";
  const bool is_option = first == "-h" || first == "--help" || first == "--version";
  if (!is_option &&
      std::none_of(std::begin(commands), std::end(commands), [&](const auto& c) { return first == c.name; })) {
    std::string problem = "no command given";
    if (argc > 1) problem = first + ": no such command";
    if (first[0] == '-') problem = first + ": not an option that stands before the command";
    return report(kUsage,
                  problem + "; the commands are eval, bench, calibrate and info.\nRun `kvant --help` for examples.");
  }

  try {
    app.parse(argc, argv);
    for (const auto& command : commands) {
      if (!app.got_subcommand(command.name)) continue;
      const Status status = command.action();
      if (!status.ok()) return report(kRefused, status.message());
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help and --version arrive as exceptions
      app.exit(error);
      return std::fflush(stdout) == 0 ? kDone : report(kRefused, "standard output: cannot write");
    }
    std::string path = "kvant";
    for (const auto* sub : app.get_subcommands()) path += " " + sub->get_name();
    return report(kUsage, std::string(error.what()) + "\nRun `" + path + " --help` for what is allowed.");
  }
  if (std::fflush(stdout) != 0) return report(kRefused, "standard output: cannot write");
  return kDone;
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
