// A handler of parser events, with the only legal form as its state machine:
//
//   { "__metadata__": { key: string, ... },
//     tensor name:    { "dtype": string, "shape": [integers], "data_offsets": [begin, end] }, ... }
//
// Whatever does not fit stops the parser at once, so nesting never goes deeper than three and nothing is built from
// input that will be refused.
#include "io/safetensors_header.hpp"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

enum class At { start, root, metadata, tensor, shape, offsets, end };

class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  Header header;
  std::string error;

  bool null() override { return scalar("null"); }
  bool boolean(bool value) override { return scalar(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return scalar(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return scalar(printable(text, 40)); }
  bool binary(binary_t&) override { return fail("binary values are not JSON"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return scalar(fmt::format("{}", value));
      }
      if (tensor().shape.size() == kMaxRank) {
        return fail(fmt::format("{} has more than {} dimensions", where(), kMaxRank));
      }
      tensor().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (at_ == At::offsets) {
      if (offsets_seen_ == 2) return fail(where() + " has more than two entries; allowed: [begin, end]");
      (offsets_seen_ == 0 ? tensor().begin : tensor().end) = value;
      ++offsets_seen_;
      return true;
    }
    return scalar(fmt::format("{}", value));
  }

  bool string(string_t& value) override {
    if (at_ == At::metadata) {
      if (value.find('\0') != std::string::npos) return fail(where() + " holds a NUL character");
      return header.metadata[key_] = std::move(value), true;
    }
    if (at_ == At::tensor && key_ == "dtype") return tensor().dtype = std::move(value), true;
    return scalar(in_quotes(value));
  }

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::start: at_ = At::root; return true;
      case At::root:
        if (key_ == kMetadata) return at_ = At::metadata, true;
        at_ = At::tensor;
        fields_seen_ = 0;
        header.tensors.push_back({.name = key_, .dtype = {}, .shape = {}});
        return true;
      default: return scalar("an object");
    }
  }

  bool key(string_t& name) override {
    if (name.find('\0') != std::string::npos)
      return fail(fmt::format("the name {} holds a NUL character", in_quotes(name)));
    switch (at_) {
      case At::root:
        if (name.empty()) return fail("a tensor has an empty name");
        if (name == kMetadata && std::exchange(metadata_seen_, true)) return fail("__metadata__ occurs twice");
        break;
      case At::metadata:
        if (header.metadata.contains(name)) return fail(fmt::format("metadata {} occurs twice", in_quotes(name)));
        break;
      default: {
        const auto* field = std::find(std::begin(kFields), std::end(kFields), name);
        if (field == std::end(kFields)) {
          return fail(
              fmt::format("{}: unknown field {}; allowed: dtype, shape, data_offsets", tensor_text(), in_quotes(name)));
        }
        const unsigned bit = 1u << (field - std::begin(kFields));
        if (fields_seen_ & bit) return fail(fmt::format("{}: {} occurs twice", tensor_text(), name));
        fields_seen_ |= bit;
      }
    }
    key_ = std::move(name);
    return true;
  }

  bool end_object() override {
    switch (at_) {
      case At::tensor:
        for (std::size_t i = 0; i < std::size(kFields); ++i) {
          if (!(fields_seen_ & (1u << i))) return fail(fmt::format("{}: {} is missing", tensor_text(), kFields[i]));
        }
        [[fallthrough]];
      case At::metadata: at_ = At::root; return true;
      default: at_ = At::end; return true;
    }
  }

  bool start_array(std::size_t) override {
    if (at_ == At::tensor && key_ == "shape") return at_ = At::shape, true;
    if (at_ == At::tensor && key_ == "data_offsets") return at_ = At::offsets, offsets_seen_ = 0, true;
    return scalar("an array");
  }

  bool end_array() override {
    if (at_ == At::offsets && offsets_seen_ != 2) {
      return fail(fmt::format("{} has {} entries; allowed: [begin, end]", where(), offsets_seen_));
    }
    return at_ = At::tensor, true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& why) override {
    // The parser's text ends with what it read last, which may be most of the header: keep the reason, bounded.
    std::string_view text = why.what();
    if (const auto at = text.find("] "); at != std::string_view::npos) text.remove_prefix(at + 2);
    return fail(fmt::format("not valid JSON at byte {} of the header: {}", position, printable(text)));
  }

 private:
  static constexpr const char* kMetadata = "__metadata__";
  static constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};

  HeaderTensor& tensor() { return header.tensors.back(); }
  std::string tensor_text() { return "tensor " + in_quotes(tensor().name); }

  std::string where() {
    switch (at_) {
      case At::start:
      case At::end: return "the header";
      case At::root: return (key_ == kMetadata ? "" : "tensor ") + in_quotes(key_);
      case At::metadata: return "metadata " + in_quotes(key_);
      default: return fmt::format("{}: {}", tensor_text(), key_);
    }
  }

  const char* allowed() {
    switch (at_) {
      case At::metadata: return "strings";
      case At::shape:
      case At::offsets: return "integers from 0 to 2^63 - 1";
      case At::tensor: return key_ == "dtype" ? "a string" : "an array of integers";
      default: return "a JSON object";
    }
  }

  // A value where the state machine has no place for it.
  bool scalar(const std::string& what) {
    return fail(fmt::format("{} is or holds {}; allowed: {}", where(), what, allowed()));
  }

  bool fail(std::string message) {
    error = std::move(message);
    return false;
  }

  At at_ = At::start;
  std::string key_;
  unsigned fields_seen_ = 0;
  int offsets_seen_ = 0;
  bool metadata_seen_ = false;
};

}  // namespace

Result<Header> parse_header(std::string_view json) {
  // The parser skips a byte order mark and takes a NUL for the end of its input: neither is a header.
  if (json.empty() || json.front() != '{') {
    return Status(Code::bad_file,
                  fmt::format("the header starts with {}; allowed: a JSON object", in_quotes(json.substr(0, 1))));
  }
  if (const auto nul = json.find('\0'); nul != std::string_view::npos) {
    return Status(Code::bad_file, fmt::format("the header holds a NUL byte at {}", nul));
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) return Status(Code::bad_file, handler.error);

  std::vector<std::string_view> names;
  for (const HeaderTensor& tensor : handler.header.tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  if (const auto twin = std::adjacent_find(names.begin(), names.end()); twin != names.end()) {
    return Status(Code::bad_file, fmt::format("tensor {} occurs twice", in_quotes(*twin)));
  }
  return std::move(handler.header);
}

}  // namespace kvant::io
