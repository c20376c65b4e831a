#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "cli/formats.hpp"
#include "cli/machine.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"
#include "core/backend.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter =
    "Examples:\n"
    "  kvant info\n"
    "  kvant info --json - | jq .isa.chosen";

struct Backend {
  const char* name;
  bool is_compiled_in;
  const char* detail;
};
constexpr Backend kBackends[] = {
    {"cpu", true, "every format, every head_dim of the list"},
    {"cuda", false, "not compiled in: this version has no CUDA backend"},
};

std::string why_chosen(const core::Kernels* chosen) {
  std::string better;
  for (const core::Kernels* kernels : core::all_kernels()) {
    if (kernels == chosen) break;
    better += (better.empty() ? "" : ", ") + std::string(kernels->name);
  }
  return better.empty() ? "the best that is compiled in, and this machine has it"
                        : fmt::format("the best that this machine has (it lacks {})", better);
}

Json as_json(const Machine& machine, const core::Kernels* chosen) {
  Json formats_list = Json::array();
  for (const FormatInfo& f : formats()) {
    formats_list.push_back({{"name", f.name}, {"bits", f.bits}, {"dense", f.dense}, {"summary", f.summary}});
  }
  Json isa_list = Json::array();
  for (const core::Kernels* k : core::all_kernels()) {
    isa_list.push_back({{"name", k->name}, {"available", k->available()}, {"detail", k->detail}});
  }
  Json backends = Json::array();
  for (const Backend& b : kBackends) {
    backends.push_back({{"name", b.name}, {"compiled_in", b.is_compiled_in}, {"detail", b.detail}});
  }
  return {{"version", kVersion},
          {"compiler", machine.compiler},
          {"machine",
           {{"cpu", machine.cpu},
            {"cores", machine.cores},
            {"system", machine.system},
            {"l3_bytes", machine.l3_bytes},
            {"memory_bytes", machine.memory_bytes}}},
          {"default_pair", {{"k", format_info(kDefaultPair.k).name}, {"v", format_info(kDefaultPair.v).name}}},
          {"page_tokens", kPageTokens},
          {"head_dims", std::vector<int>(supported_head_dims().begin(), supported_head_dims().end())},
          {"formats", std::move(formats_list)},
          {"isa", {{"chosen", chosen->name}, {"why", why_chosen(chosen)}, {"compiled_in", std::move(isa_list)}}},
          {"backends", std::move(backends)},
          {"threads", {{"seam", core::threads_name()}, {"default", core::hardware_threads()}}}};
}

std::string as_text(const Machine& machine, const core::Kernels* chosen) {
  std::string text = fmt::format("kvant {}  ({})\n{}", kVersion, machine.compiler, machine_line(machine));
  if (machine.memory_bytes > 0)
    text += fmt::format(", {} of memory", bytes_text(static_cast<double>(machine.memory_bytes)));
  text += "\n\n";

  Table format_table({{"format", true}, {"bits"}, {"what it is", true}});
  for (const FormatInfo& f : formats()) format_table.add({f.name, std::to_string(f.bits), f.summary});
  text += format_table.text();
  text += fmt::format("\ndefault pair      {} (keys/values); pages of {} tokens\n", kDefaultPair.name(), kPageTokens);
  text += fmt::format("head_dim          {}\n\n", fmt::join(supported_head_dims(), " "));

  Table backend_table({{"backend", true}, {"state", true}, {"detail", true}});
  for (const Backend& b : kBackends) backend_table.add({b.name, b.is_compiled_in ? "compiled in" : "absent", b.detail});
  text += backend_table.text() + "\n";

  Table isa_table({{"isa", true}, {"state", true}, {"instructions", true}});
  for (const core::Kernels* k : core::all_kernels()) {
    isa_table.add({k->name, k == chosen ? "chosen" : k->available() ? "available" : "not on this machine", k->detail});
  }
  text += isa_table.text();
  text += fmt::format("\nisa               {}: {}; --isa forces another\n", chosen->name, why_chosen(chosen));
  text += fmt::format("threads           {}, {} by default; --threads forces another number\n", core::threads_name(),
                      core::hardware_threads());
  return text;
}

Status run_info(const std::string& json) {
  Outputs outputs;
  if (Status status = outputs.add("--json", json); !status.ok()) return status;
  if (Status status = outputs.check(); !status.ok()) return status;
  const Machine machine = describe_machine();
  const Result<const core::Kernels*> chosen = find_isa("");
  if (!chosen.ok()) return chosen.status();
  if (json != "-") outputs.print(as_text(machine, *chosen));
  return json.empty()
             ? Status()
             : write_result(json, as_json(machine, *chosen).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace

Action add_info_command(CLI::App& app) {
  auto json = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "info", "Formats, instruction sets and backends: what is compiled in, what is chosen, and why");
  command->footer(kFooter);
  command->add_option("--json", *json, "Write the same as JSON; -: standard output")->type_name("FILE");
  return [json] { return run_info(*json); };
}

}  // namespace kvant::cli
