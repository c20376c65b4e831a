#include "cli/formats.hpp"

#include <algorithm>

#include "cli/suggest.hpp"
#include "codec/centre.hpp"
#include "codec/traits.hpp"
#include "core/fmt.hpp"
#include "core/format_hint.hpp"

namespace kvant::cli {

std::string FormatPair::name() const {
  return k == v ? format_info(k).name : fmt::format("{}/{}", format_info(k).name, format_info(v).name);
}

bool FormatPair::is_dense() const {
  return format_info(k).dense && format_info(v).dense;
}

bool takes_centre(const FormatPair& formats) {
  return codec::takes_centre(formats.k);
}

const char* centre_name(KeyCentre centre) {
  return centre == KeyCentre::page ? "page" : "none";
}

KeyCentre default_centre(const FormatPair& formats) {
  return codec::takes_centre(formats.k) ? KeyCentre::page : KeyCentre::none;
}

KeyCentre centre_of(const std::string& name, const FormatPair& formats) {
  return name == "automatic" ? default_centre(formats) : name == "page" ? KeyCentre::page : KeyCentre::none;
}

std::string name_with_centre(const FormatPair& formats, KeyCentre centre) {
  if (centre == default_centre(formats)) return formats.name();
  return formats.name() + (centre == KeyCentre::page ? ", page-centred" : ", not centred");
}

double FormatPair::bits() const {
  return (format_info(k).bits + format_info(v).bits) / 2.0;
}

std::vector<std::string> plain_format_names() {
  std::vector<std::string> names;
  for (const FormatInfo& f : formats()) {
    if (!codec::is_lut(f.format)) names.emplace_back(f.name);
  }
  return names;
}

Result<Format> parse_plain_format(const std::string& name) {
  const Result<Format> format = parse_format(name);
  if (!format.ok()) {
    const std::vector<std::string> known = plain_format_names();
    const std::string near = did_you_mean(name, known);
    return {Code::invalid_argument,
            fmt::format("format '{}': must be one of {}, or two of them as keys/values (tq6/tq4){}", name,
                        fmt::join(known, ", "), near.empty() ? core::format_hint(name) : near)};
  }
  if (codec::is_lut(*format)) {
    return {Code::unsupported, fmt::format("format {}: holds imported vectors with their own level table, which a "
                                           "command line cannot give; use a tq format",
                                           name)};
  }
  return *format;
}

Result<FormatPair> parse_format_pair(const std::string& text) {
  const auto slash = text.find('/');
  const Result<Format> k = parse_plain_format(text.substr(0, slash));
  if (!k.ok()) return k.status();
  if (slash == std::string::npos) return FormatPair{*k, *k};
  const Result<Format> v = parse_plain_format(text.substr(slash + 1));
  if (!v.ok()) return v.status();
  return FormatPair{*k, *v};
}

Result<std::vector<FormatPair>> parse_format_pairs(const std::vector<std::string>& texts) {
  std::vector<FormatPair> pairs;
  for (const std::string& text : texts) {
    const Result<FormatPair> pair = parse_format_pair(text);
    if (!pair.ok()) return pair.status();
    if (std::find(pairs.begin(), pairs.end(), *pair) == pairs.end()) pairs.push_back(*pair);
  }
  return pairs;
}

Result<std::vector<FormatPair>> pair_formats(const std::vector<std::string>& k, const std::vector<std::string>& v) {
  if (v.empty()) return parse_format_pairs(k);
  if (v.size() != 1 && v.size() != k.size()) {
    return {Code::invalid_argument,
            fmt::format("--v-format: {} formats for {} key formats; give one for all, or one for each", v.size(),
                        k.size())};
  }
  std::vector<FormatPair> pairs;
  for (std::size_t i = 0; i < k.size(); ++i) {
    if (k[i].find('/') != std::string::npos) {
      return {Code::invalid_argument,
              fmt::format("--k-format: {} names its value format already; leave out --v-format", k[i])};
    }
    const Result<Format> key = parse_plain_format(k[i]);
    if (!key.ok()) return key.status();
    const Result<Format> value = parse_plain_format(v.size() == 1 ? v[0] : v[i]);
    if (!value.ok()) return value.status();
    const FormatPair pair{*key, *value};
    if (std::find(pairs.begin(), pairs.end(), pair) == pairs.end()) pairs.push_back(pair);
  }
  return pairs;
}

}  // namespace kvant::cli
