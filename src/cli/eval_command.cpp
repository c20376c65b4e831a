#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>

#include "cli/arguments.hpp"
#include "cli/clock.hpp"
#include "cli/command.hpp"
#include "cli/eval.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"
#include "codec/traits.hpp"
#include "core/backend.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::cli {
namespace {

// Formats by themselves, tq with most bits first (keys of two bits are of no use), then pairs with more bits for keys.
const std::vector<std::string> kDefaultFormats = [] {
  std::vector<FormatInfo> tq;
  std::copy_if(formats().begin(), formats().end(), std::back_inserter(tq),
               [](const FormatInfo& f) { return codec::is_tq(f.format) && f.bits > 2; });
  std::stable_sort(tq.begin(), tq.end(), [](const FormatInfo& a, const FormatInfo& b) { return a.bits > b.bits; });
  std::vector<std::string> names = {"f16", "fp8"};
  for (const FormatInfo& f : tq) names.emplace_back(f.name);
  for (const char* pair : {"tq8/tq4", "tq6/tq4", "tq4/tq2"}) names.emplace_back(pair);
  return names;
}();

constexpr const char* kEvalFooter =
    "A capture holds, for every layer N, layerN.q [q_heads, queries, head_dim] (the last positions) and layerN.k and\n"
    "layerN.v [kv_heads, positions, head_dim], after RoPE and norms. Its metadata may give layerN.scale (otherwise\n"
    "1/sqrt(head_dim)) and layerN.sliding_window (otherwise none), for all layers or for none. Attention is causal.\n"
    "docs/your-model.md shows how to write one.\n"
    "\n"
    "Examples:\n"
    "  kvant eval qkv.safetensors                                   all formats, every layer\n"
    "  kvant eval qkv.safetensors --formats tq4,tq6/tq4,fp8 --report report.html\n"
    "  kvant eval a.safetensors b.safetensors --json - | jq '.rows[].rel_l2'\n"
    "  kvant eval qkv.safetensors --basis basis.safetensors --layers 4 --exact-ends without";

struct EvalArguments {
  std::vector<std::string> files;
  std::vector<std::string> formats = kDefaultFormats;
  std::vector<int> layers;
  std::string ends = "both", k_centre = "automatic";
  std::string basis, json, csv, report, isa;
  int threads = 0;
  bool is_wide = false;
};

std::string command_line(const EvalArguments& a) {
  std::string line = "kvant eval";
  for (const std::string& file : a.files) line += " " + file;
  if (a.formats != kDefaultFormats) line += " --formats " + fmt::format("{}", fmt::join(a.formats, ","));
  if (!a.layers.empty()) line += " --layers " + fmt::format("{}", fmt::join(a.layers, ","));
  if (a.ends != "both") line += " --exact-ends " + a.ends;
  if (!a.basis.empty()) line += " --basis " + a.basis;
  if (a.k_centre != "automatic") line += " --k-centre " + a.k_centre;
  if (a.threads != 0) line += fmt::format(" --threads {}", a.threads);
  if (!a.isa.empty()) line += " --isa " + a.isa;
  for (const auto& [option, path] : {std::pair{"--json", a.json}, {"--csv", a.csv}, {"--report", a.report}}) {
    if (!path.empty()) line += fmt::format(" {} {}", option, path);
  }
  return line;
}

std::vector<Variant> variants_of(const std::vector<FormatPair>& pairs, const std::string& ends,
                                 const std::string& k_centre) {
  std::vector<Variant> variants;
  for (const FormatPair& pair : pairs) {
    if (pair.is_dense()) {
      variants.push_back({pair, true});
      continue;
    }
    for (const bool has_ends : {true, false}) {
      if (ends == (has_ends ? "without" : "with")) continue;
      if (k_centre == "both" && takes_centre(pair)) {
        for (const KeyCentre centre : {KeyCentre::none, KeyCentre::page}) variants.push_back({pair, has_ends, centre});
      } else {
        variants.push_back({pair, has_ends, takes_centre(pair) ? centre_of(k_centre, pair) : KeyCentre::none});
      }
    }
  }
  return variants;
}

Result<std::vector<EvalLayer>> read_layers(const EvalArguments& a) {
  std::vector<EvalLayer> layers;
  std::vector<int> seen;
  for (const std::string& path : a.files) {
    const Result<io::SafeTensors> file = io::SafeTensors::open(path);
    if (!file.ok()) return file.status();
    Result<std::vector<io::CapturedLayer>> captured = io::read_captured_layers(*file);
    if (!captured.ok()) return captured.status();
    const auto use = file->metadata().find("use");
    if (use != file->metadata().end() && use->second.rfind("calibration", 0) == 0) {
      fmt::print(
          stderr,
          "kvant: note: {} is for calibration: its queries need not be the last positions, which a replay assumes\n",
          path);
    }
    for (io::CapturedLayer& layer : *captured) {
      seen.push_back(layer.layer);
      if (!a.layers.empty() && std::find(a.layers.begin(), a.layers.end(), layer.layer) == a.layers.end()) continue;
      if (layer.queries < 1 || layer.queries > layer.positions) {
        return {Code::bad_file,
                fmt::format("{}: {}: {} queries for {} positions; the queries are the last positions, so there "
                            "are at least one and at most as many",
                            path, layer.name, layer.queries, layer.positions)};
      }
      layers.push_back({path, std::move(layer), nullptr});
    }
  }
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  for (const int wanted : a.layers) {
    if (std::find(seen.begin(), seen.end(), wanted) == seen.end()) {
      return {Code::invalid_argument,
              fmt::format("--layers {}: not captured; there are layers {}", wanted, fmt::join(seen, ", "))};
    }
  }
  return layers;
}

std::string of_values(int head_dim, int v_head_dim) {
  return v_head_dim == head_dim ? "" : fmt::format(" (values {})", v_head_dim);
}

// Gives every layer its basis, by number. A basis of other shapes, or none for a layer, is refused.
Status attach_bases(const std::string& path, std::vector<EvalLayer>& layers) {
  const Result<io::Calibration> calibration = io::load_bases(path);
  if (!calibration.ok()) return calibration.status();
  for (EvalLayer& layer : layers) {
    const io::CapturedLayer& c = layer.captured;
    const auto found = calibration->layers.find(c.layer);
    if (found == calibration->layers.end()) {
      std::vector<int> known;
      for (const auto& [number, bases] : calibration->layers) known.push_back(number);
      return {Code::invalid_argument,
              fmt::format(
                  "--basis {}: has bases for layers {}, none for {} of {}; calibrate that layer, too, or choose with "
                  "--layers",
                  path, fmt::join(known, ", "), c.name, layer.file)};
    }
    const BasisSet& bases = found->second;
    if (bases.kv_heads != c.kv_heads || bases.head_dim != c.head_dim ||
        (!bases.values.empty() && bases.v_head_dim != c.v_head_dim)) {
      return {Code::invalid_argument,
              fmt::format("--basis {}: {} was calibrated for kv_heads {} and head_dim {}{}, but {} has kv_heads {} and "
                          "head_dim {}{}; "
                          "calibrate on captures of the same model",
                          path, c.name, bases.kv_heads, bases.head_dim, of_values(bases.head_dim, bases.v_head_dim),
                          layer.file, c.kv_heads, c.head_dim, of_values(c.head_dim, c.v_head_dim))};
    }
    layer.bases = std::make_shared<BasisSet>(bases);
  }
  return {};
}

std::string geometry(const io::CapturedLayer& c) {
  return fmt::format("{} q heads, {} kv heads, head_dim {}{}, {} positions, {} queries, {}, {}{}", c.q_heads,
                     c.kv_heads, c.head_dim, of_values(c.head_dim, c.v_head_dim), c.positions, c.queries,
                     c.window > 0 ? fmt::format("window {}", c.window) : "full attention", c.dtype,
                     c.assumed.empty() ? "" : fmt::format("; not in the file, so assumed: {}", c.assumed));
}

Status run_eval(const EvalArguments& a) {
  const Result<std::vector<FormatPair>> pairs = parse_format_pairs(a.formats);
  if (!pairs.ok()) throw CLI::ValidationError("--formats", pairs.message());
  Outputs outputs;
  name_files(outputs, a.files, a.basis, {{"--json", a.json}, {"--csv", a.csv}, {"--report", a.report}});
  const Result<const core::Kernels*> kernels = find_isa(a.isa);
  if (!kernels.ok() && kernels.code() == Code::invalid_argument) throw CLI::ValidationError(kernels.message());
  if (!kernels.ok()) return kernels.status();
  if (const Status status = outputs.check(); !status.ok()) return status;

  Result<std::vector<EvalLayer>> layers = read_layers(a);
  if (!layers.ok()) return layers.status();
  if (layers->empty())
    return {Code::bad_file, fmt::format("{}: no captured layer to evaluate", fmt::join(a.files, ", "))};
  if (!a.basis.empty()) {
    if (const Status status = attach_bases(a.basis, *layers); !status.ok()) return status;
  }

  EvalRun run;
  run.command_line = command_line(a);
  run.started = utc_now();
  run.machine = describe_machine();
  run.settings = {a.threads > 0 ? a.threads : core::hardware_threads(), (*kernels)->name};
  run.basis_file = a.basis;
  const std::vector<Variant> variants = variants_of(*pairs, a.ends, a.k_centre);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<EvalRow> rows;
  {
    Progress progress(static_cast<double>(layers->size() * variants.size()));
    for (const EvalLayer& layer : *layers) {
      run.layer_lines.push_back(geometry(layer.captured));
      Result<std::vector<EvalRow>> own =
          evaluate_layer(layer, variants, run.settings, [&](const std::string& what) { progress.advance(1, what); });
      if (!own.ok()) return own.status();
      std::move(own->begin(), own->end(), std::back_inserter(rows));
    }
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  outputs.print(eval_tables(rows, run, a.is_wide ? Table::kNoLimit : outputs.width()));
  if (const Status status = outputs.write(a.json, eval_json(rows, run)); !status.ok()) return status;
  if (const Status status = outputs.write(a.csv, eval_csv(rows)); !status.ok()) return status;
  return outputs.write(a.report, a.report.empty() ? "" : eval_report(rows, run));
}

}  // namespace

Action add_eval_command(CLI::App& app) {
  auto a = std::make_shared<EvalArguments>();
  CLI::App* command =
      app.add_subcommand("eval", "Replay decoding over captured tensors: memory, error and time of each cache format");
  command->footer(kEvalFooter);
  command->add_option("FILE", a->files, "Captures (safetensors)")->required()->type_name("");
  add_list(*command, "--formats", a->formats, "Cache formats, as tq4 (keys and values) or tq6/tq4 (keys/values)",
           "FORMAT,...")
      ->capture_default_str();
  one_of(command->add_option("--exact-ends", a->ends,
                             "Encoded formats with exact ends (the first page and the newest tokens are\n"
                             "kept as given), without (all encoded), or both"),
         {"both", "with", "without"})
      ->capture_default_str();
  add_list(*command, "--layers", a->layers, "Only these layer numbers");
  add_file(*command, "--basis", a->basis,
           "Calibrated bases (kvant calibrate) for tq formats; dense formats and fp8 have none");
  one_of(command->add_option("--k-centre", a->k_centre,
                             "tq and fp8 keys around a mean key of their page (page), as they are\n"
                             "(none), or both; automatic: page"),
         {"automatic", "both", "none", "page"})
      ->capture_default_str();
  command->add_option("--threads", a->threads, "Worker threads; 0: the processors that the process may use")
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  command->add_option("--isa", a->isa, kIsaHelp)->type_name("ISA");
  add_output(*command, "--json", a->json, "Write the rows as JSON");
  add_output(*command, "--csv", a->csv, "Write the rows as comma-separated values");
  add_file(*command, "--report", a->report, "Write a self-contained HTML page with charts; -: standard output");
  add_wide(*command, a->is_wide);
  return [a] { return run_eval(*a); };
}

}  // namespace kvant::cli
