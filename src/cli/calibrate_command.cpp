#include <CLI/CLI.hpp>
#include <memory>

#include "cli/command.hpp"
#include "cli/output.hpp"
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
  std::string output;
};

// The expected gains are ratios of mean squared errors; half a bit is a factor of two.
std::string gain_text(double ratio) {
  return ratio > 0 ? fmt::format("{:.2f} x ({:+.1f} bit)", ratio, -0.5 * std::log2(ratio)) : std::string("-");
}

Status run_calibrate(const CalibrateArguments& a) {
  Outputs outputs;
  if (const Status status = outputs.add("-o", a.output); !status.ok()) return status;
  if (a.output == "-") throw CLI::ValidationError("-o", "-: a basis is a binary file, not text; name a file");
  if (const Status status = outputs.check(); !status.ok()) return status;

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
  const Status saved = io::save_bases(a.output, *calibration, fmt::format("{}", fmt::join(a.files, ", ")));
  if (!saved.ok()) return saved;

  Table table({{"layer", true}, {"kv head"}, {"queries"}, {"keys"}, {"key error"}, {"value error"}});
  for (const io::CalibrationReport& r : calibration->report) {
    table.add({r.layer, std::to_string(r.kv_head), std::to_string(r.queries), std::to_string(r.keys),
               gain_text(r.expected_key_gain), gain_text(r.expected_value_gain)});
  }
  outputs.print(table.text());
  outputs.print(
      "key error: expected mean squared error of the scores with the basis over that without; value error: of the "
      "values.\n");
  outputs.print(fmt::format("Wrote {}\n", a.output));
  return {};
}

}  // namespace

Action add_calibrate_command(CLI::App& app) {
  auto a = std::make_shared<CalibrateArguments>();
  CLI::App* command =
      app.add_subcommand("calibrate", "Estimate a basis for each layer and kv head from captured queries and keys");
  command->footer(kCalibrateFooter);
  command->add_option("FILE", a->files, "Captures (safetensors)")->required()->type_name("");
  command->add_option("-o,--output", a->output, "The basis file to write (safetensors)")->required()->type_name("FILE");
  return [a] { return run_calibrate(*a); };
}

}  // namespace kvant::cli
