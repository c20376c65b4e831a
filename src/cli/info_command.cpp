#include <CLI/CLI.hpp>
#include <memory>

#include "cli/arguments.hpp"
#include "cli/command.hpp"
#include "cli/formats.hpp"
#include "cli/machine.hpp"
#include "cli/output.hpp"
#include "cli/records.hpp"
#include "cli/table.hpp"
#include "core/backend.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kInfoFooter =
    "Examples:\n"
    "  kvant info\n"
    "  kvant info --json - | jq .isa.chosen\n"
    "  kvant info --csv";

constexpr const char* kFormatsFooter =
    "Any two go together as keys/values, as in tq6/tq4. `kvant eval` measures what a format costs on your tensors.\n"
    "\n"
    "Examples:\n"
    "  kvant formats\n"
    "  kvant formats --json | jq -r '.rows[].name'";

struct Backend {
  std::string name;
  bool is_compiled_in;
  std::string unavailable;  // why not on this machine; empty: available
  std::string detail;
  std::vector<core::DeviceClass> classes{};
};

std::vector<Backend> backends() {
  std::vector<Backend> all = {{"cpu", true, "", "every format, every head_dim"}};
  const core::DeviceBackend* device = core::device_backend();
  if (device == nullptr) {
    const std::string why = "not compiled in: this build was configured without nvcc, or with KVANT_CUDA=OFF";
    all.push_back({"cuda", false, why, why});
  } else {
    all.push_back({device->name, true, device->unavailable(), device->detail()});
    if (device->classes != nullptr) all.back().classes = device->classes();
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

const char* state_of(const Backend& b) {
  return !b.is_compiled_in ? "absent" : b.unavailable.empty() ? "available" : "not on this machine";
}

const char* state_of(const core::Kernels* kernels, const core::Kernels* chosen) {
  return kernels == chosen ? "chosen" : kernels->available() ? "available" : "not on this machine";
}

Json format_rows() {
  Json rows = Json::array();
  for (const FormatInfo& f : formats()) {
    rows.push_back({{"name", f.name}, {"bits", f.bits}, {"dense", f.dense}, {"summary", f.summary}});
  }
  return rows;
}

std::string format_table(std::size_t width) {
  Table table({{"format", true}, {"bits"}, {"what it is", true}});
  for (const FormatInfo& f : formats()) table.add({f.name, std::to_string(f.bits), f.summary});
  return table.text(width);
}

// All that the three tables say, as rows of one form.
Json info_rows(const core::Kernels* chosen) {
  Json rows = Json::array();
  const auto add = [&](const char* kind, const std::string& name, const char* state, const std::string& detail) {
    rows.push_back({{"kind", kind}, {"name", name}, {"state", state}, {"detail", detail}});
  };
  for (const FormatInfo& f : formats()) add("format", f.name, "available", f.summary);
  for (const Backend& b : backends()) {
    add("backend", b.name, state_of(b), b.detail);
    for (const core::DeviceClass& one : b.classes) {
      const std::string detail =
          fmt::format("{}; {}; {}; {}", one.cards, one.code, fmt::join(one.kernels, " "), one.state());
      add("devices", one.capability, one.runs ? "compiled in" : "absent", detail);
    }
  }
  for (const core::Kernels* k : core::all_kernels()) add("isa", k->name, state_of(k, chosen), k->detail);
  return rows;
}

Json as_json(const Machine& machine, const core::Kernels* chosen) {
  Json isa_list = Json::array();
  for (const core::Kernels* k : core::all_kernels()) {
    isa_list.push_back({{"name", k->name}, {"available", k->available()}, {"detail", k->detail}});
  }
  Json backend_list = Json::array();
  for (const Backend& b : backends()) {
    Json classes = Json::array();
    for (const core::DeviceClass& one : b.classes) {
      classes.push_back({{"capability", one.capability},
                         {"cards", one.cards},
                         {"kernels", one.kernels},
                         {"code", one.code},
                         {"state", one.state()}});
    }
    backend_list.push_back({{"name", b.name},
                            {"compiled_in", b.is_compiled_in},
                            {"available", b.unavailable.empty()},
                            {"detail", b.detail},
                            {"unavailable", b.unavailable},
                            {"classes", std::move(classes)}});
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
          {"largest_head_dim", kLargestHeadDim},
          {"formats", format_rows()},
          {"isa", {{"chosen", chosen->name}, {"why", why_chosen(chosen)}, {"compiled_in", std::move(isa_list)}}},
          {"backends", std::move(backend_list)},
          {"threads", {{"seam", core::threads_name()}, {"default", core::hardware_threads()}}},
          {"rows", info_rows(chosen)}};
}

std::string as_text(const Machine& machine, const core::Kernels* chosen, std::size_t width) {
  std::string place = machine_line(machine);
  if (machine.memory_bytes > 0)
    place += fmt::format(", {} of memory", bytes_text(static_cast<double>(machine.memory_bytes)));
  std::string text = fmt::format("kvant {}  ({})\n{}\n", kVersion, machine.compiler, wrapped(place, width));

  text += format_table(width);
  text += "\n";
  const auto fact = [&](const std::string& line) { text += wrapped(line, width); };
  fact(fmt::format("default pair      {} (keys/values); pages of {} tokens", kDefaultPair.name(), kPageTokens));
  fact(fmt::format("head_dim          {}; others up to {} are padded to the next",
                   fmt::join(supported_head_dims(), " "), kLargestHeadDim));
  text += "\n";

  Table backend_table({{"backend", true}, {"state", true}, {"detail", true}});
  for (const Backend& b : backends()) {
    const bool says_why = b.is_compiled_in && !b.unavailable.empty();
    backend_table.add({b.name, state_of(b), says_why ? fmt::format("{}; {}", b.detail, b.unavailable) : b.detail});
  }
  text += backend_table.text(width) + "\n";

  for (const Backend& b : backends()) {
    if (b.classes.empty()) continue;
    Table classes({{"capability", true}, {"cards", true}, {"code", true}, {"kernels", true}, {"state", true}});
    for (const core::DeviceClass& one : b.classes)
      classes.add({one.capability, one.cards, one.code, fmt::format("{}", fmt::join(one.kernels, " ")), one.state()});
    text += classes.text(width) + "\n";
  }

  Table isa_table({{"isa", true}, {"state", true}, {"instructions", true}});
  for (const core::Kernels* k : core::all_kernels()) {
    isa_table.add({k->name, state_of(k, chosen), k->detail});
  }
  text += isa_table.text(width) + "\n";
  fact(fmt::format("isa               {}: {}; --isa forces another", chosen->name, why_chosen(chosen)));
  fact(fmt::format("threads           {}, {} by default; --threads forces another number", core::threads_name(),
                   core::hardware_threads()));
  return text;
}

struct ListArguments {
  std::string json, csv;
};

// Prints the text (of at most so many columns), and writes the files that the options name, instead of it or beside it.
template <class Text>
Status write_lists(const ListArguments& a, const Text& text, const Json& json) {
  Outputs outputs;
  name_files(outputs, {}, "", {{"--json", a.json}, {"--csv", a.csv}});
  if (const Status status = outputs.check(); !status.ok()) return status;
  if (a.json != "-" && a.csv != "-") outputs.print(text(outputs.width()));
  if (const Status status = outputs.write(a.json, json_text(json)); !status.ok()) return status;
  return outputs.write(a.csv, csv_text(json["rows"]));
}

Status run_info(const ListArguments& a) {
  const Result<const core::Kernels*> chosen = find_isa("");
  if (!chosen.ok()) return chosen.status();
  const Machine machine = describe_machine();
  return write_lists(
      a, [&](std::size_t width) { return as_text(machine, *chosen, width); }, as_json(machine, *chosen));
}

Status run_formats(const ListArguments& a) {
  const auto text = [](std::size_t width) {
    return fmt::format("{}\nThe default is {} (keys/values).\n", format_table(width), kDefaultPair.name());
  };
  return write_lists(a, text, {{"kvant", kVersion}, {"rows", format_rows()}});
}

Action add_listing(CLI::App& app, const char* name, const char* what, const char* footer,
                   Status (*run)(const ListArguments&)) {
  auto a = std::make_shared<ListArguments>();
  CLI::App* command = app.add_subcommand(name, what);
  command->footer(footer);
  add_output(*command, "--json", a->json, "Write the same as JSON");
  add_output(*command, "--csv", a->csv, "Write the rows as comma-separated values");
  return [a, run] { return run(*a); };
}

}  // namespace

Action add_info_command(CLI::App& app) {
  return add_listing(app, "info",
                     "Formats, instruction sets and backends: what is compiled in, what is chosen, and why",
                     kInfoFooter, run_info);
}

Action add_formats_command(CLI::App& app) {
  return add_listing(app, "formats", "The formats of keys and values", kFormatsFooter, run_formats);
}

}  // namespace kvant::cli
