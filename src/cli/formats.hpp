// Format pairs as the command line spells them: "tq6/tq4" (keys/values), or "tq4" for both.
#pragma once

#include <string>
#include <vector>

#include "kvant/codec.hpp"
#include "kvant/types.hpp"

namespace kvant::cli {

struct FormatPair {
  Format k = Format::tq6;
  Format v = Format::tq4;
  [[nodiscard]] std::string name() const;  ///< "tq6/tq4", or "tq4" when both are the same
  [[nodiscard]] bool is_dense() const;     ///< both sides: nothing is encoded, so there are no exact ends
  [[nodiscard]] double bits() const;       ///< mean bits a value, scales not counted
  bool operator==(const FormatPair&) const = default;
};

inline constexpr FormatPair kDefaultPair{};

/// Whether pages of these keys can be centred; what a cache has by default; and the words of --k-centre.
bool takes_centre(const FormatPair& formats);
KeyCentre default_centre(const FormatPair& formats);
const char* centre_name(KeyCentre centre);
KeyCentre centre_of(const std::string& name, const FormatPair& formats);
/// "tq6/tq4", and what differs from the default: "fp8, page-centred", "tq4, not centred".
std::string name_with_centre(const FormatPair& formats, KeyCentre centre);

/// Names of the formats that a command line can fill.
std::vector<std::string> plain_format_names();
/// Formats the command line can fill from plain vectors; imported (lut) ones are refused with the reason.
Result<Format> parse_plain_format(const std::string& name);
/// "tq4" or "tq6/tq4".
Result<FormatPair> parse_format_pair(const std::string& text);
Result<std::vector<FormatPair>> parse_format_pairs(const std::vector<std::string>& texts);
/// Keys and values given apart: lists of the same length go in pairs, a single value format goes with every key
/// format, and no value format means "as the keys" (then pairs are allowed among the key formats).
Result<std::vector<FormatPair>> pair_formats(const std::vector<std::string>& k, const std::vector<std::string>& v);

}  // namespace kvant::cli
