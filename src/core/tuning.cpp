#include "core/tuning.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <system_error>

#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::core {
namespace {

constexpr std::string_view kFirstLine = "kvant tuning 1";
constexpr std::size_t kMostName = 255;
constexpr const char* kWayOut = "write it anew with `kvant bench tune`";

constexpr bool is_printable(char c) {
  return c >= ' ' && c <= '~';
}
// Text of a file inside a message: bounded and printable.
std::string quoted(std::string_view text) {
  std::string s(text.substr(0, 60));
  for (char& c : s) c = is_printable(c) ? c : '?';
  return fmt::format("\"{}\"{}", s, text.size() > 60 ? ".." : "");
}

template <class Int>
bool read_number(std::string_view text, std::int64_t least, std::int64_t most, Int& number) {
  std::int64_t read = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), read);
  if (error != std::errc() || end != text.data() + text.size() || read < least || read > most) return false;
  number = static_cast<Int>(read);
  return true;
}

// "9.0" as 90.
bool read_capability(std::string_view text, int& capability) {
  int major = 0, minor = 0;
  const std::size_t dot = text.find('.');
  if (dot == std::string_view::npos) return false;
  if (!read_number(text.substr(0, dot), 1, 99, major) || !read_number(text.substr(dot + 1), 0, 9, minor)) return false;
  capability = 10 * major + minor;
  return true;
}
std::string card_words(const TunedCard& card) {
  return fmt::format("{}, compute capability {}.{}, {} multiprocessors", card.name, card.capability / 10,
                     card.capability % 10, card.multiprocessors);
}

class Lines {
 public:
  explicit Lines(std::string_view text) : left_(text) {}
  [[nodiscard]] bool is_done() const { return left_.empty(); }
  std::string_view next() {
    ++number_;
    const std::size_t end = left_.find('\n');
    line_ = left_.substr(0, end);
    left_.remove_prefix(end == std::string_view::npos ? left_.size() : end + 1);
    return line_;
  }
  // The rest of the next line, which must begin with `key` and a space. False: it does not.
  bool take(std::string_view key, std::string_view& value) {
    next();
    const bool is_it = line_.size() > key.size() + 1 && line_.substr(0, key.size()) == key && line_[key.size()] == ' ';
    if (is_it) value = line_.substr(key.size() + 1);
    return is_it;
  }
  [[nodiscard]] Status refused(std::string_view wanted) const {
    return {Code::invalid_argument, fmt::format("line {} is {}, and should be {}", number_, quoted(line_), wanted)};
  }

 private:
  std::string_view left_, line_;
  int number_ = 0;
};

// "decode 128 tq 8 20 1043"
bool read_ratio(std::string_view line, TunedRatio& ratio) {
  std::string_view words[6];
  for (std::string_view& word : words) {
    const std::size_t space = line.find(' ');
    const bool is_last = &word == &words[5];
    if ((space == std::string_view::npos) != is_last) return false;
    word = line.substr(0, space);
    line.remove_prefix(is_last ? line.size() : space + 1);
  }
  TunedWork& work = ratio.work;
  work.kind = tuned_kind(words[0]);
  const auto* stored = std::find(std::begin(kStoredNames), std::end(kStoredNames), words[2]);
  if (work.kind < 0 || stored == std::end(kStoredNames)) return false;
  work.stored = static_cast<Stored>(stored - std::begin(kStoredNames));
  constexpr std::int64_t kMostCount = std::int64_t{1} << 32;
  return read_number(words[1], 1, kLargestHeadDim, work.head_dim) && read_number(words[3], 1, kMostCount, work.heads) &&
         read_number(words[4], 1, kMostCount, work.rows) &&
         read_number(words[5], kLeastRatio, kMostRatio, ratio.thousandths);
}

// Between the numbers on either side of `at`, whose logarithms count; beyond the ends that of the end.
double between(double at, double low, double high, double of_low, double of_high) {
  if (at <= low || high <= low) return of_low;
  if (at >= high) return of_high;
  return of_low + (of_high - of_low) * std::log(at / low) / std::log(high / low);
}

// For so many rows, among ratios that differ in nothing else.
double over_rows(std::span<const TunedRatio> ratios, std::int64_t rows) {
  const auto above = std::find_if(ratios.begin(), ratios.end(), [&](const auto& r) { return r.work.rows >= rows; });
  const TunedRatio& high = above == ratios.end() ? ratios.back() : *above;
  const TunedRatio& low = above == ratios.begin() ? high : *std::prev(above);
  return between(static_cast<double>(rows), static_cast<double>(low.work.rows), static_cast<double>(high.work.rows),
                 low.thousandths, high.thousandths);
}

Result<std::string> read_text(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);  // not of folders and pipes
  if (error) return Status{Code::io, error.message()};
  if (bytes > kMostTuningBytes)
    return Status{Code::io, fmt::format("it has {} bytes, and {} are the most", bytes, kMostTuningBytes)};
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes))) return Status{Code::io, "it cannot be read"};
  return text;
}

Result<Tuning> read_tuning(const std::string& path, const TunedCard& card) {
  const Result<std::string> text = read_text(path);
  if (!text.ok()) return text.status();
  Result<Tuning> tuning = parse_tuning(*text);
  if (!tuning.ok()) return tuning.status();
  // Ratios are those of estimates, which another version may have changed.
  if (tuning->version != kVersion) {
    return Status{Code::invalid_argument, fmt::format("kvant {} wrote it, and this is {}", tuning->version, kVersion)};
  }
  if (tuning->card != card) {
    return Status{Code::invalid_argument, fmt::format("it was measured on {}, and this device is {}",
                                                      card_words(tuning->card), card_words(card))};
  }
  tuning->path = path;
  return tuning;
}

}  // namespace

int tuned_kind(std::string_view name) {
  const auto* found = std::find(std::begin(kTunedKinds), std::end(kTunedKinds), name);
  return found == std::end(kTunedKinds) ? -1 : static_cast<int>(found - std::begin(kTunedKinds));
}

std::optional<double> Tuning::ratio(const TunedWork& work) const {
  // Ratios of the kind, head_dim and class lie side by side, ascending by heads.
  const auto is_alike = [&](const TunedRatio& r) {
    return r.work.kind == work.kind && r.work.head_dim == work.head_dim && r.work.stored == work.stored;
  };
  const auto first = std::find_if(ratios.begin(), ratios.end(), is_alike);
  const auto last = std::find_if_not(first, ratios.end(), is_alike);
  if (first == last) return std::nullopt;
  const auto of_heads = [&](std::int64_t heads) {
    const auto begin = std::find_if(first, last, [&](const TunedRatio& r) { return r.work.heads == heads; });
    const auto end = std::find_if(begin, last, [&](const TunedRatio& r) { return r.work.heads != heads; });
    return over_rows({begin, end}, work.rows);
  };
  const auto above = std::find_if(first, last, [&](const TunedRatio& r) { return r.work.heads >= work.heads; });
  const std::int64_t high = above == last ? std::prev(last)->work.heads : above->work.heads;
  const std::int64_t low = above == first ? high : std::prev(above)->work.heads;
  return between(static_cast<double>(work.heads), static_cast<double>(low), static_cast<double>(high), of_heads(low),
                 of_heads(high)) /
         1000;
}

std::string Tuning::words() const {
  if (!ignored.empty()) return ignored;
  return path.empty() ? "" : fmt::format("tuned by {}", path);
}

std::string tuning_text(const TunedCard& card, const std::vector<TunedRatio>& ratios) {
  std::string text =
      fmt::format("{}\nversion {}\ndevice {}\ncapability {}.{}\nmultiprocessors {}\nratios {}\n", kFirstLine, kVersion,
                  card.name, card.capability / 10, card.capability % 10, card.multiprocessors, ratios.size());
  for (const TunedRatio& r : ratios) {
    text +=
        fmt::format("{} {} {} {} {} {}\n", kTunedKinds[r.work.kind], r.work.head_dim,
                    kStoredNames[static_cast<std::size_t>(r.work.stored)], r.work.heads, r.work.rows, r.thousandths);
  }
  return text;
}

Result<Tuning> parse_tuning(std::string_view text) {
  Tuning tuning;
  Lines lines(text);
  std::string_view value;
  if (lines.next() != kFirstLine) return lines.refused(quoted(kFirstLine));
  const auto take_name = [&](std::string_view key, std::string& name) {
    if (!lines.take(key, value) || value.size() > kMostName) return false;
    name = value;
    return std::all_of(value.begin(), value.end(), is_printable);
  };
  if (!take_name("version", tuning.version)) return lines.refused("\"version NUMBER\"");
  if (!take_name("device", tuning.card.name)) return lines.refused("\"device NAME\"");
  if (!lines.take("capability", value) || !read_capability(value, tuning.card.capability))
    return lines.refused("\"capability 9.0\" or another");
  if (!lines.take("multiprocessors", value) || !read_number(value, 1, 1 << 20, tuning.card.multiprocessors))
    return lines.refused("\"multiprocessors NUMBER\"");
  std::size_t count = 0;
  if (!lines.take("ratios", value) || !read_number(value, 1, kMostRatios, count))
    return lines.refused(fmt::format("\"ratios NUMBER\", up to {}", kMostRatios));
  for (std::size_t i = 0; i < count; ++i) {
    TunedRatio ratio;
    if (!read_ratio(lines.next(), ratio)) {
      return lines.refused(
          fmt::format("\"KIND HEAD_DIM CLASS HEADS ROWS RATIO\": kinds are {}; classes are {}; ratios are {} to {}",
                      fmt::join(kTunedKinds, ", "), fmt::join(kStoredNames, ", "), kLeastRatio, kMostRatio));
    }
    if (i > 0 && !(tuning.ratios.back().work < ratio.work)) return lines.refused("behind the line before it in order");
    tuning.ratios.push_back(ratio);
  }
  if (!lines.is_done()) {
    lines.next();
    return lines.refused(fmt::format("absent: there are {} ratios", count));
  }
  return tuning;
}

std::string default_tuning_path(const TunedCard& card) {
  const auto folder = [](const char* variable) {
    const char* value = std::getenv(variable);
    return std::string(value != nullptr && value[0] == '/' ? value : "");
  };
  std::string path = folder("XDG_CACHE_HOME");
  if (path.empty()) {
    path = folder("HOME");
    if (path.empty()) return {};
    path += "/.cache";
  }
  path += "/kvant/tuning-";
  for (const char c : card.name) {
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool is_digit = c >= '0' && c <= '9';
    path += is_letter ? static_cast<char>(c | 0x20) : is_digit ? c : '-';
  }
  return path + ".txt";
}

Result<Tuning> find_tuning(const TunedCard& card, bool lowered) {
  if (const char* given = std::getenv(kTuningVariable); given != nullptr) {
    const std::string path = given;
    if (path.empty() || path == "off") return Tuning{};
    Result<Tuning> tuning = read_tuning(path, card);
    if (tuning.ok()) return tuning;
    return Status{Code::invalid_argument, fmt::format("{}: {}: {}; {}, or set the variable to off", kTuningVariable,
                                                      path, tuning.message(), kWayOut)};
  }
  const std::string path = default_tuning_path(card);
  std::error_code error;
  if (path.empty() || std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found)
    return Tuning{};
  Tuning unused;
  if (lowered) {
    unused.ignored = fmt::format("{} is not used: limits of the device are lowered", path);
    return unused;
  }
  Result<Tuning> tuning = read_tuning(path, card);
  if (tuning.ok()) return tuning;
  unused.ignored = fmt::format("{} is not used: {}; {}", path, tuning.message(), kWayOut);
  return unused;
}

}  // namespace kvant::core
