// The tables of `kvant eval`, shared by its text and HTML output.
#pragma once

#include <string>
#include <vector>

#include "cli/eval.hpp"
#include "cli/table.hpp"

namespace kvant::cli {

Table layer_table(const std::vector<EvalRow>& rows);
Table summary_table(const std::vector<SummaryRow>& rows);
/// Explains what the tables show, without the columns that all of them leave out.
std::vector<std::string> legend_lines(const std::vector<EvalRow>& rows, const std::vector<std::string>& left_out = {});
/// The spread behind a row's time relative to f16's: the larger of the two.
double ratio_spread(const EvalRow& row);
std::string ends_text(const EvalRow& row);
std::string small_number(double value);

}  // namespace kvant::cli
