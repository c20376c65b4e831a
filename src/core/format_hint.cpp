#include "core/format_hint.hpp"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/fmt.hpp"
#include "kvant/types.hpp"

namespace kvant::core {
namespace {

struct Name {
  std::string_view other, own;
};
// Names of torch, vLLM and numpy.
constexpr std::array<Name, 21> kNames{{
    {"float", "f32"},      {"float32", "f32"},  {"fp32", "f32"},          {"single", "f32"},      {"half", "f16"},
    {"float16", "f16"},    {"fp16", "f16"},     {"bfloat16", "bf16"},     {"bfloat", "bf16"},     {"fp8_e4m3", "fp8"},
    {"fp8_e4m3fn", "fp8"}, {"float8", "fp8"},   {"float8_e4m3fn", "fp8"}, {"float8_e4m3", "fp8"}, {"e4m3", "fp8"},
    {"fp8e4m3", "fp8"},    {"fp8_e5m2", "fp8"}, {"float8_e5m2", "fp8"},   {"e5m2", "fp8"},        {"f8", "fp8"},
    {"fp8_inc", "fp8"},
}};

bool is_format(std::string_view name) {
  return std::any_of(formats().begin(), formats().end(), [&](const FormatInfo& f) { return name == f.name; });
}

// The tq format for names of so many bits: "q4_0", "iq4_nl", "int4", "nf4", "4bit", "kvant_tq4"; "": the name has none.
std::string of_bits(std::string_view name) {
  std::size_t begin = 0;
  while (begin < name.size() && std::isdigit(static_cast<unsigned char>(name[begin])) == 0) ++begin;
  constexpr std::array<std::string_view, 13> kFamilies{"",  "q",  "iq", "int", "uint",  "i",       "u",
                                                       "w", "nf", "fp", "tq",  "turbo", "kvant_tq"};
  if (std::find(kFamilies.begin(), kFamilies.end(), name.substr(0, begin)) == kFamilies.end()) return "";
  if (begin >= name.size() ||
      (begin + 1 < name.size() && std::isdigit(static_cast<unsigned char>(name[begin + 1])) != 0))
    return "";
  for (int bits = name[begin] - '0'; bits <= 8; ++bits) {
    if (const std::string own = fmt::format("tq{}", bits); is_format(own)) return own;
  }
  return "";
}

}  // namespace

std::string format_hint(std::string_view name) {
  if (const auto slash = name.find('/'); slash != std::string_view::npos) {
    const std::string_view k = name.substr(0, slash), v = name.substr(slash + 1);
    if (!is_format(k) || !is_format(v)) return "; keys and values are given separately: k = tq6, v = tq4";
    return fmt::format("; keys and values are given separately: k = {}, v = {}", k, v);
  }
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::string own;
  if (is_format(lower)) own = lower;
  for (const Name& known : kNames) {
    if (lower == known.other) own = known.own;
  }
  if (own.empty()) own = of_bits(lower);
  return own.empty() ? "" : fmt::format("; for {} write {}", name, own);
}

}  // namespace kvant::core
