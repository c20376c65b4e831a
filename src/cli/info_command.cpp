#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "cli/formats.hpp"
#include "cli/machine.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"
#include "core/backend.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kInfoFooter =
    "Examples:\n"
    "  kvant info\n"
    "  kvant info --json - | jq .isa.chosen";

struct Backend {
  std::string name;
  bool is_compiled_in;
  std::string unavailable;  // why not on this machine; empty: available
  std::string detail;
};

std::vector<Backend> backends() {
  std::vector<Backend> all = {{"cpu", true, "", "every format, every head_dim of the list"}};
  const core::DeviceBackend* device = core::device_backend();
  if (device == nullptr) {
    const std::string why = "not compiled in: this build was configured without nvcc, or with KVANT_CUDA=OFF";
    all.push_back({"cuda", false, why, why});
  } else {
    all.push_back({device->name, true, device->unavailable(), device->detail()});
  }
  return all;
}

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
  Json backend_list = Json::array();
  for (const Backend& b : backends()) {
    backend_list.push_back({{"name", b.name},
                            {"compiled_in", b.is_compiled_in},
                            {"available", b.unavailable.empty()},
                            {"detail", b.detail},
                            {"unavailable", b.unavailable}});
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
          {"backends", std::move(backend_list)},
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
  for (const Backend& b : backends()) {
    const char* state = !b.is_compiled_in ? "absent" : b.unavailable.empty() ? "available" : "not on this machine";
    const bool says_why = b.is_compiled_in && !b.unavailable.empty();
    backend_table.add({b.name, state, says_why ? fmt::format("{}; {}", b.detail, b.unavailable) : b.detail});
  }
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
  command->footer(kInfoFooter);
  command->add_option("--json", *json, "Write the same as JSON; -: standard output")->type_name("FILE");
  return [json] { return run_info(*json); };
}

}  // namespace kvant::cli
