// The record of choices, tests/cuda_choices.txt: a table of the boundaries between kinds of kernels, for people who
// review a change of times or limits.
#pragma once

#include <cmath>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "support/cuda_choices.hpp"

namespace kvant::cuda::record {

inline constexpr int kMostQueries = 4096;

inline constexpr const char* kHead =
    "# The kernels that plans take, by estimated times: the boundaries between kinds of kernels.\n"
    "#\n"
    "# A line is a device class, head_dim (192/128: of keys and values) and formats; a column is sequences x keys, or "
    "a\n"
    "# kind of request. A column has `kind queries:us`: from so many queries a sequence on plans take this kind, "
    "which\n"
    "# then takes about so many microseconds. The table has the numbers of queries 1, 2, 4 .. 4096, as long as they "
    "are\n"
    "# no more than the keys.\n"
    "#\n"
    "#   dec, dec80, dec90   decode, decode_sm80, decode_sm90\n"
    "#   pre80, pre90        prefill_sm80, prefill_sm90\n"
    "#   un+pre90, un+dec    prefill_unpacked, then prefill_sm90 or decode for what is in no round\n"
    "#   fr+un+pre90         before these prefill_fresh\n"
    "#\n"
    "# Written by KVANT_WRITE_CHOICES=1 build/release/bin/cuda_choose_test. A change of this file is a change of what\n"
    "# users run: its commit says why. Estimates alone need not be written again before they are a tenth off.\n";

struct Column {
  std::string name;
  Case change;  // sequences, length and the kind of request
};
struct Section {
  std::vector<const char*> devices;
  std::vector<int> widths;
  std::vector<const char*> pairs;
  std::vector<Column> columns;
};

inline Column shape(int sequences, std::int64_t length) {
  return {fmt::format("{}x{}", sequences, length), {.sequences = sequences, .length = length}};
}

inline std::vector<Section> sections() {
  std::vector<int> all, unequal;
  for (const int width : units::attend) (key_dim(width) == value_dim(width) ? all : unequal).push_back(width);
  const std::vector<Column> usual{shape(1, 2048), shape(16, 2048), shape(1, 32768), shape(16, 32768)};
  return {
      {{"8.0", "8.9", "9.0"}, all, {"bf16", "fp8", "tq4", "tq6/tq4", "tq8", "tq5/tq4"}, usual},
      {{"8.6", "12.0"}, {128, 512}, {"bf16", "tq4", "tq8"}, usual},
      {{"8.0", "9.0"}, all, {"bf16", "tq4"}, {shape(256, 64), shape(256, 2048), shape(1, 131072), shape(256, 131072)}},
      {{"8.0", "8.9", "9.0"},
       {128, 256, 512},
       {"bf16", "tq4", "tq8"},
       {{"window", {.window = 1024}},
        {"mask", {.mask = true}},
        {"calibrated", {.calibrated = true}},
        {"fresh", {.fresh_keys = true}},
        {"engine", {.fresh_keys = true, .any_length = true}}}},
      {{"8.0", "9.0"}, unequal, {"bf16", "tq4"}, usual},
  };
}

inline std::string short_name(std::string kinds) {
  for (const auto& [name, its_short] :
       {std::pair("prefill_unpacked, ", "un+"), std::pair("prefill_fresh, ", "fr+"), std::pair("decode_sm", "dec"),
        std::pair("decode", "dec"), std::pair("prefill_sm", "pre")}) {
    if (const std::size_t at = kinds.find(name); at != std::string::npos)
      kinds.replace(at, std::string(name).size(), its_short);
  }
  return kinds;
}

// Microseconds, two digits.
inline std::string estimate(std::int64_t ns) {
  const double us = static_cast<double>(ns) / 1000;
  if (us < 9.95) return fmt::format("{:.1f}", us);
  double unit = 1;
  while (us / unit >= 99.5) unit *= 10;
  return fmt::format("{:.0f}", std::round(us / unit) * unit);
}

// "dec 1:8.4, pre90 64:33".
inline std::string boundaries(Case c, const Device& device) {
  std::string cell, before;
  for (c.queries = 1; c.queries <= kMostQueries && c.queries <= c.length; c.queries *= 2) {
    const Result<Chosen> chosen = try_choose(c, device);
    const std::string now = chosen.ok() ? short_name(chosen->kinds) : "refused";
    if (now == before) continue;
    cell +=
        fmt::format("{}{} {}:{}", cell.empty() ? "" : ", ", now, c.queries, chosen.ok() ? estimate(chosen->ns) : "0");
    before = now;
  }
  return cell;
}

// A width that no cell changes, so that a changed cell changes nothing beside it.
inline std::string line_of(const std::string& title, const std::vector<std::string>& cells) {
  std::string line = fmt::format("{:<16}", title);
  for (const std::string& cell : cells) line += fmt::format(" | {:<24}", cell);
  return line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
}

inline std::string table() {
  std::string text = kHead;
  for (const Section& section : sections()) {
    std::vector<std::string> cells;
    for (const Column& column : section.columns) cells.push_back(column.name);
    text += "\n" + line_of("# device", cells);
    for (const char* device : section.devices) {
      for (const int width : section.widths) {
        for (const char* name : section.pairs) {
          const NamedPair& pair = *std::find_if(std::begin(kPairs), std::end(kPairs),
                                                [&](const NamedPair& one) { return one.name == std::string(name); });
          cells.clear();
          for (const Column& column : section.columns) {
            const Case usual = case_of(width, pair);
            Case c = column.change;
            c.head_dim = usual.head_dim, c.v_head_dim = usual.v_head_dim, c.k = usual.k, c.v = usual.v;
            c.q_heads = usual.q_heads, c.kv_heads = usual.kv_heads;
            cells.push_back(boundaries(c, device_of(device)));
          }
          text += line_of(fmt::format("{} {} {}", device, width_name(width), name), cells);
        }
      }
    }
  }
  return text;
}

// A line without its estimates, and these.
struct Parts {
  std::string choices;
  std::vector<double> estimates;
};
inline Parts parts_of(const std::string& line) {
  Parts parts;
  for (const char* at = line.c_str(); *at != 0;) {
    if (*at != ':' || line[0] == '#') {
      if (*at != ' ') parts.choices += *at;
      ++at;
      continue;
    }
    char* end = nullptr;
    parts.estimates.push_back(std::strtod(at + 1, &end));
    parts.choices += ' ';
    at = end;
  }
  return parts;
}

// How a line of the record differs from the same line now; empty: it does not.
inline std::string difference(const std::string& recorded, const std::string& now) {
  const Parts a = parts_of(recorded), b = parts_of(now);
  if (a.choices != b.choices || a.estimates.size() != b.estimates.size()) return "other choices";
  for (std::size_t i = 0; i < a.estimates.size(); ++i) {
    if (std::abs(a.estimates[i] - b.estimates[i]) > 0.1 * std::max(a.estimates[i], b.estimates[i]))
      return fmt::format("an estimate is {}, and was {}", b.estimates[i], a.estimates[i]);
  }
  return {};
}

}  // namespace kvant::cuda::record
