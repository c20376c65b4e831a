#include <CLI/CLI.hpp>
#include <cmath>
#include <map>
#include <memory>

#include "cli/arguments.hpp"
#include "cli/clock.hpp"
#include "cli/command.hpp"
#include "cli/machine.hpp"
#include "cli/output.hpp"
#include "cli/records.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "kvant/io.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kCalibrateFooter =
    "For every layer and kv head: the mean key (subtracting it is free, softmax does not see a constant) and the "
    "basis\n"
    "that balances queries against keys, so that rounding errors fall where queries do not look. Use other text than "
    "you\n"
    "evaluate on.\n"
    "\n"
    "Examples:\n"
    "  kvant calibrate calibration.safetensors -o basis.safetensors\n"
    "  kvant eval qkv.safetensors --basis basis.safetensors";

struct CalibrateArguments {
  std::vector<std::string> files;
  std::string output, json, csv;
};

// The expected gains are ratios of mean squared errors; half a bit is a factor of two.
std::string gain_text(double ratio) {
  return ratio > 0 ? fmt::format("{:.2f} x ({:+.1f} bit)", ratio, -0.5 * std::log2(ratio)) : std::string("-");
}

Json calibrate_rows(const io::Calibration& calibration, const std::map<std::string, int>& head_dims) {
  Json rows = Json::array();
  for (const io::CalibrationReport& r : calibration.report) {
    rows.push_back({{"layer", r.layer},
                    {"kv_head", r.kv_head},
                    {"head_dim", head_dims.at(r.layer)},
                    {"queries", r.queries},
                    {"keys", r.keys},
                    {"expected_key_gain", r.expected_key_gain},
                    {"expected_value_gain", r.expected_value_gain}});
  }
  return rows;
}

// The second moment of n vectors has at most rank n: with fewer than head_dim of them, some directions were never seen
// and get nothing but the ridge. All kv heads of a layer have the same number.
void warn_of_few_samples(const io::Calibration& calibration, const std::map<std::string, int>& head_dims) {
  for (const io::CalibrationReport& r : calibration.report) {
    const int head_dim = head_dims.at(r.layer);
    for (const auto& [what, count] : {std::pair{"queries", r.queries}, {"keys", r.keys}}) {
      if (r.kv_head != 0 || count >= head_dim) continue;
      fmt::print(
          stderr,
          "kvant: warning: {}: {} {} a kv head; a stable basis of head_dim {} needs at least {}, and a few times "
          "as many are better; capture more positions, or give several captures\n",
          r.layer, count, what, head_dim, head_dim);
    }
  }
}

Status run_calibrate(const CalibrateArguments& a) {
  if (a.output == "-") throw CLI::ValidationError("-o", "-: a basis is a binary file, not text; name a file");
  Outputs outputs;
  name_files(outputs, a.files, "", {{"-o", a.output}, {"--json", a.json}, {"--csv", a.csv}});
  if (const Status status = outputs.check(); !status.ok()) return status;

  const std::string started = utc_now();
  std::vector<io::CapturedLayer> layers;
  for (const std::string& path : a.files) {
    const Result<io::SafeTensors> file = io::SafeTensors::open(path);
    if (!file.ok()) return file.status();
    Result<std::vector<io::CapturedLayer>> captured = io::read_captured_layers(*file);
    if (!captured.ok()) return captured.status();
    std::move(captured->begin(), captured->end(), std::back_inserter(layers));
  }
  const Result<io::Calibration> calibration = io::calibrate(layers);
  if (!calibration.ok()) return calibration.status();
  std::map<std::string, int> head_dims;
  for (const io::CapturedLayer& layer : layers) head_dims[layer.name] = layer.head_dim;
  warn_of_few_samples(*calibration, head_dims);
  const Status saved = io::save_bases(a.output, *calibration, fmt::format("{}", fmt::join(a.files, ", ")));
  if (!saved.ok()) return saved;

  Table table({{"layer", true}, {"kv head"}, {"queries"}, {"keys"}, {"key error"}, {"value error"}});
  for (const io::CalibrationReport& r : calibration->report) {
    table.add({r.layer, std::to_string(r.kv_head), std::to_string(r.queries), std::to_string(r.keys),
               gain_text(r.expected_key_gain), gain_text(r.expected_value_gain)});
  }
  outputs.print(table.text(outputs.width()));
  outputs.print(
      wrapped("key error: expected mean squared error of the scores with the basis over that without; value error: of "
              "the values.",
              outputs.width()));
  outputs.print(fmt::format("Wrote {}\n", a.output));
  const Json rows = calibrate_rows(*calibration, head_dims);
  const Json json = {{"machine", machine_json(describe_machine(), {{}, {}, started})}, {"rows", rows}};
  if (const Status status = outputs.write(a.json, json_text(json)); !status.ok()) return status;
  return outputs.write(a.csv, csv_text(rows));
}

}  // namespace

Action add_calibrate_command(CLI::App& app) {
  auto a = std::make_shared<CalibrateArguments>();
  CLI::App* command =
      app.add_subcommand("calibrate", "Estimate a basis for each layer and kv head from captured queries and keys");
  command->footer(kCalibrateFooter);
  command->add_option("FILE", a->files, "Captures (safetensors)")->required()->type_name("");
  add_file(*command, "-o,--output", a->output, "The basis file to write (safetensors)")->required();
  add_output(*command, "--json", a->json, "Write the rows as JSON");
  add_output(*command, "--csv", a->csv, "Write the rows as comma-separated values");
  return [a] { return run_calibrate(*a); };
}

}  // namespace kvant::cli
