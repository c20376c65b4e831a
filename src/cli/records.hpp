// Results for programs: rows of named values, which are written as JSON and as CSV with the same names.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/machine.hpp"

namespace kvant::cli {

using Json = nlohmann::ordered_json;

std::string json_text(const Json& value);
/// RFC 4180. The columns are the keys of the first row, which all rows have; null is an empty field.
std::string csv_text(const Json& rows);

/// The machine and the settings that the figures were measured with: part of every JSON that holds figures.
struct RunFacts {
  std::vector<std::string> isas;
  std::vector<int> threads;
  std::string started;
};
Json machine_json(const Machine& machine, const RunFacts& facts);

}  // namespace kvant::cli
