// `kvant snapshot info|verify|copy`: caches in files.
#include <CLI/CLI.hpp>
#include <memory>

#include "capi/snapshot_json.hpp"
#include "cli/arguments.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/records.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "io/text.hpp"
#include "kvant/snapshot.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  kvant snapshot info chat.kvs\n"
    "  kvant snapshot verify chat.kvs\n"
    "  kvant snapshot copy chat.20.kvs -o chat.kvs";
constexpr const char* kInfoExamples =
    "Examples:\n"
    "  kvant snapshot info chat.kvs\n"
    "  kvant snapshot info chat.kvs --json - | jq .config";
constexpr const char* kVerifyExamples =
    "Examples:\n"
    "  kvant snapshot verify chat.kvs\n"
    "  kvant snapshot verify *.kvs && echo all are whole";
constexpr const char* kCopyExamples =
    "The copy needs no other file, also where the snapshot builds on earlier ones.\n"
    "\n"
    "Examples:\n"
    "  kvant snapshot copy chat.20.kvs -o chat.kvs";

struct SnapshotArguments {
  std::string file, output, json;
  std::vector<std::string> files;
};

/// A bar of a call's own; what the call says of itself goes to it.
SnapshotProgress shown(std::shared_ptr<Progress>& bar, const std::string& what) {
  return [&bar, what, before = std::int64_t{0}](std::int64_t done, std::int64_t total) mutable {
    if (bar == nullptr) bar = std::make_shared<Progress>(static_cast<double>(total));
    bar->advance(static_cast<double>(done - before), what);
    before = done;
    return true;
  };
}

std::string info_text(const SnapshotInfo& info, std::size_t width) {
  std::string text;
  const auto line = [&](const char* what, const std::string& fact) {
    if (!fact.empty()) text += wrapped(fmt::format("{}: {}", what, fact), width);
  };
  line("written by", "kvant " + io::printable(info.written_by));
  line("name", io::printable(info.name));
  line("model", io::printable(info.model));
  for (const auto& [key, value] : info.metadata) line("metadata", io::printable(key) + " = " + io::printable(value));
  std::string config;
  for (const auto& [name, value] : info.fields) {
    config += fmt::format("{}{} = {}", config.empty() ? "" : ", ", name, io::printable(value));
  }
  line("configuration", config);
  line("pages",
       fmt::format("{} encoded and {} exact, {} in all; this file has {}", info.encoded_pages, info.exact_pages,
                   bytes_text(static_cast<double>(info.page_bytes)), bytes_text(static_cast<double>(info.file_bytes))));
  for (const std::string& base : info.bases) line("needs", io::printable(base));
  Table table({{"sequence"}, {"tokens"}, {"token ids"}});
  for (std::size_t i = 0; i < info.sequences.size(); ++i) {
    const SnapshotSequence& s = info.sequences[i];
    table.add({std::to_string(i), std::to_string(s.length), s.tokens.empty() ? "none" : "saved"});
  }
  return text + "\n" + table.text(width);
}

Status run_info(const SnapshotArguments& a) {
  Outputs outputs;
  name_files(outputs, {a.file}, "", {{"--json", a.json}});
  if (const Status status = outputs.check(); !status.ok()) return status;
  const auto snapshot = Snapshot::open(a.file);
  if (!snapshot) return snapshot.status();
  outputs.print(info_text(snapshot->info(), outputs.width()));
  if (a.json.empty()) return {};
  return outputs.write(a.json, json_text(Json::parse(capi::describe_snapshot(snapshot->info()))));
}

/// Says what a whole file has. Errors: what is wrong with it.
Result<std::string> verify(const std::string& path) {
  const auto snapshot = Snapshot::open(path);
  if (!snapshot) return snapshot.status();
  std::shared_ptr<Progress> bar;
  if (const Status status = snapshot->verify(shown(bar, path)); !status.ok()) return status;
  const SnapshotInfo& info = snapshot->info();
  return fmt::format("{} sequences, {} encoded and {} exact pages, every checksum as saved", info.sequences.size(),
                     info.encoded_pages, info.exact_pages);
}

// All files are read, also behind one that is damaged.
Status run_verify(const SnapshotArguments& a) {
  const Outputs outputs;
  std::vector<std::string> damaged;
  Status first;
  for (const std::string& path : a.files) {
    const Result<std::string> facts = verify(path);
    outputs.print(fmt::format("{}: {}: {}\n", io::printable(path), facts.ok() ? "whole" : "NOT whole",
                              facts.ok() ? *facts : facts.message()));
    if (facts.ok()) continue;
    if (damaged.empty()) first = facts.status();
    damaged.push_back(io::printable(path));
  }
  if (damaged.empty() || a.files.size() == 1) return first;
  return {first.code(), fmt::format("{} of {} snapshots are not whole: {}", damaged.size(), a.files.size(),
                                    fmt::join(damaged, ", "))};
}

Status run_copy(const SnapshotArguments& a) {
  if (a.output == "-") throw CLI::ValidationError("-o", "-: a snapshot is a binary file, not text; name a file");
  Outputs outputs;
  name_files(outputs, {a.file}, "", {{"-o", a.output}});
  if (const Status status = outputs.check(); !status.ok()) return status;
  const auto snapshot = Snapshot::open(a.file);
  if (!snapshot) return snapshot.status();
  std::shared_ptr<Progress> bar;
  const Status status = snapshot->copy(a.output, shown(bar, a.output));
  bar.reset();
  if (!status.ok()) return status;
  outputs.print(fmt::format("Wrote {}\n", io::printable(a.output)));
  return {};
}

}  // namespace

Action add_snapshot_command(CLI::App& app) {
  auto a = std::make_shared<SnapshotArguments>();
  CLI::App* command = app.add_subcommand("snapshot", "Show, check and copy caches that were saved in files");
  command->footer(kExamples);
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, const char* examples) {
    CLI::App* sub = command->add_subcommand(name, what)->group("Operations");
    sub->footer(examples);
    return sub;
  };
  const auto file_of = [&](CLI::App* sub) {
    sub->add_option("FILE", a->file, "A snapshot")->required()->type_name("");
  };
  CLI::App* info = add("info", "Say what a snapshot has", kInfoExamples);
  file_of(info);
  add_output(*info, "--json", a->json, "Write the facts as JSON");
  CLI::App* verify = add("verify", "Read all of some snapshots and compare every checksum", kVerifyExamples);
  verify->add_option("FILE", a->files, "Snapshots")->required()->type_name("");
  CLI::App* copy = add("copy", "Write a snapshot to another file, which needs no other", kCopyExamples);
  file_of(copy);
  add_file(*copy, "-o,--output", a->output, "The file to write")->required();
  return [a, command] {
    const std::string op = command->get_subcommands().front()->get_name();
    return op == "info" ? run_info(*a) : op == "verify" ? run_verify(*a) : run_copy(*a);
  };
}

}  // namespace kvant::cli
