// The tables of `kvant eval`, shared by its text and HTML output.
#pragma once

#include <string>
#include <vector>

#include "cli/eval.hpp"
#include "cli/table.hpp"

namespace kvant::cli {

Table layer_table(const std::vector<EvalRow>& rows);
Table summary_table(const std::vector<SummaryRow>& rows);
std::vector<std::string> legend_lines(const std::vector<EvalRow>& rows);
std::string ends_text(const EvalRow& row);
std::string small_number(double value);

}  // namespace kvant::cli
