#include "cli/records.hpp"

#include <algorithm>
#include <cmath>

#include "core/threads.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

std::string csv_field(const Json& value) {
  if (value.is_null() || (value.is_number_float() && !std::isfinite(value.get<double>()))) return "";
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

template <class T>
std::vector<T> each_once(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace

std::string json_text(const Json& value) {
  return value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string csv_text(const Json& rows) {
  if (rows.empty()) return "";
  std::string out;
  const char* separator = "";
  for (const auto& [key, value] : rows.front().items()) {
    out.append(separator).append(csv_field(key));
    separator = ",";
  }
  out += '\n';
  for (const Json& row : rows) {
    separator = "";
    for (const auto& [key, first] : rows.front().items()) {
      out.append(separator).append(csv_field(row.at(key)));
      separator = ",";
    }
    out += '\n';
  }
  return out;
}

Json machine_json(const Machine& machine, const RunFacts& facts) {
  return {{"cpu", machine.cpu},
          {"cores", machine.cores},
          {"system", machine.system},
          {"l3_bytes", machine.l3_bytes},
          {"memory_bytes", machine.memory_bytes},
          {"kvant", kVersion},
          {"compiler", machine.compiler},
          {"isa", each_once(facts.isas)},
          {"threads", each_once(facts.threads)},
          {"threading", core::threads_name()},
          {"started", facts.started}};
}

}  // namespace kvant::cli
