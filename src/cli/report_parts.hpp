// The parts of the HTML report of `kvant eval`, each a piece of HTML that depends on the rows alone.
#pragma once

#include <string>
#include <vector>

#include "cli/eval.hpp"

namespace kvant::cli {

/// The error that the finding asks for, and that the chart of errors has a line at.
inline constexpr double kGoodError = 0.02;

/// "1.57 %"; "under 0.01 %" for what is less, but not 0.
std::string percent_text(double share);
/// "tq6/tq4 with exact ends", "tq6/tq4 all encoded", "f16".
std::string variant_text(const EvalRow& row);

/// Names the smallest compressed format under kGoodError in every layer (or says that none is), and the default.
std::string finding_html(const std::vector<SummaryRow>& rows, std::size_t layers);

/// Three charts over bits per value: error of the output, of the weights, time.
std::string charts_html(const std::vector<EvalRow>& rows);

/// Every figure of one layer, a row for each format.
std::string layer_table_html(const LayerRows& layer);
/// The same over all layers.
std::string summary_table_html(const std::vector<SummaryRow>& rows);

/// The error of each layer with each format, darker where larger, the worst layer of each format marked. Layers link to
/// the sections `#layer-0`, `#layer-1`, ...
std::string overview_html(const std::vector<LayerRows>& layers);

extern const char* const kReportStyle;

}  // namespace kvant::cli
