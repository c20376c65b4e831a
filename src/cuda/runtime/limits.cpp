#include "cuda/runtime/limits.hpp"

#include <charconv>
#include <string>

#include "core/fmt.hpp"

namespace kvant::cuda {
namespace {

constexpr int kKiB = 1024, kMiB = 1024 * 1024;

// capability, multiprocessors, shared memory of a block and of a multiprocessor, threads, L2, clock, bandwidth, tensor.
// Products with f32 sums take a GeForce twice as long as the same chip on a card for workstations.
constexpr Card kCards[] = {
    {"a100", {80, 108, 163 * kKiB, 164 * kKiB, 2048, 40 * kMiB, 1410, 2039, 2048}},
    {"rtx3090", {86, 82, 99 * kKiB, 100 * kKiB, 1536, 6 * kMiB, 1695, 936, 512}},
    {"rtx4090", {89, 128, 99 * kKiB, 100 * kKiB, 1536, 72 * kMiB, 2520, 1008, 512}},
    {"l40s", {89, 142, 99 * kKiB, 100 * kKiB, 1536, 96 * kMiB, 2520, 864, 1024}},
    {"h100", {90, 132, 227 * kKiB, 228 * kKiB, 2048, 50 * kMiB, 1980, 3352, 2048}},
    {"h200", kH200},
    {"b200", {100, 148, 227 * kKiB, 228 * kKiB, 2048, 126 * kMiB, 1965, 7672, 2048}},
    {"rtx5090", {120, 170, 99 * kKiB, 100 * kKiB, 1536, 96 * kMiB, 2407, 1792, 512}},
    {"rtxpro6000", {120, 188, 99 * kKiB, 100 * kKiB, 1536, 128 * kMiB, 2617, 1792, 1024}},
};

struct Key {
  const char* name;
  int DeviceLimits::*limit;
  const char* unit;  // behind the number, in texts
};
constexpr const char* kCapability = "capability";
constexpr Key kKeys[] = {
    {"multiprocessors", &DeviceLimits::multiprocessors, " multiprocessors"},
    {"shared", &DeviceLimits::shared_bytes, " bytes of shared memory a block"},
    {"multiprocessor_shared", &DeviceLimits::multiprocessor_shared_bytes, " bytes a multiprocessor"},
    {"threads", &DeviceLimits::multiprocessor_threads, " threads a multiprocessor"},
    {"l2", &DeviceLimits::l2_bytes, " bytes of L2 cache"},
    {"clock", &DeviceLimits::clock, " MHz"},
    {"bandwidth", &DeviceLimits::bandwidth, " GB/s"},
    {"tensor", &DeviceLimits::tensor, " 16-bit operations a clock and multiprocessor"},
};

template <class... Args>
Status refused(fmt::format_string<Args...> text, Args&&... args) {
  return {Code::invalid_argument,
          fmt::format("{}: {}", kLimitsVariable, fmt::format(text, std::forward<Args>(args)...))};
}

Status refuse_word(std::string_view word) {
  std::string keys = kCapability, names;
  for (const Key& key : kKeys) keys += fmt::format(", {}", key.name);
  for (const Card& card : kCards) names += fmt::format("{}{}", names.empty() ? "" : ", ", card.name);
  return refused("\"{}\" is neither the name of a card nor key=number; cards are {}; keys are {}", word, names, keys);
}

// The whole of `text` as a number above zero; else 0.
int number_of(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0 ? number : 0;
}

// "8.6" as 86; else 0.
int capability_of(std::string_view text) {
  const std::size_t dot = text.find('.');
  if (dot == std::string_view::npos || text.size() != dot + 2 || text[dot + 1] < '0' || text[dot + 1] > '9') return 0;
  const int major = number_of(text.substr(0, dot));
  return major >= 8 && major <= 99 ? 10 * major + (text[dot + 1] - '0') : 0;
}

// A capability is lower if the device can do all that plans ask of it, whichever of the numbers is larger: a 9.0 can
// stand for a 12.0, which has no products of warpgroups.
Status set_capability(int capability, DeviceLimits& limits) {
  DeviceLimits now = limits;
  now.capability = capability;
  if ((now.overlaps() && !limits.overlaps()) || (now.has_sm90() && !limits.has_sm90())) {
    return refused("a device of compute capability {} cannot stand for one of {}, which can do more; leave it out",
                   capability_text(limits.capability), capability_text(capability));
  }
  limits = now;
  return {};
}

Status set_card(const Card& card, DeviceLimits& limits) {
  if (Status s = set_capability(card.limits.capability, limits); !s.ok()) return s;
  for (const Key& key : kKeys) {
    int& now = limits.*key.limit;
    const int of_card = card.limits.*key.limit;
    now = now == 0 ? of_card : std::min(now, of_card);
  }
  return {};
}

Status set_key(std::string_view word, std::string_view name, std::string_view text, DeviceLimits& limits) {
  if (name == kCapability) {
    const int capability = capability_of(text);
    if (capability == 0) return refused("\"{}\" has no compute capability from 8.0 on: write capability=8.6", word);
    return set_capability(capability, limits);
  }
  for (const Key& key : kKeys) {
    if (name != key.name) continue;
    int& now = limits.*key.limit;
    const int number = number_of(text);
    if (number == 0) return refused("\"{}\" has no whole number above zero", word);
    if (now != 0 && number > now)
      return refused("{} is {}, and the device has {}: limits can only be lowered", name, number, now);
    now = number;
    return {};
  }
  return refuse_word(word);
}

}  // namespace

std::span<const Card> cards() {
  return kCards;
}

Result<DeviceLimits> lowered(const DeviceLimits& device, std::string_view text) {
  DeviceLimits limits = device;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const auto card = std::find_if(std::begin(kCards), std::end(kCards), [&](const Card& c) { return c.name == word; });
    const std::size_t equals = word.find('=');
    Status s;
    if (card != std::end(kCards)) {
      s = set_card(*card, limits);
    } else if (equals != std::string_view::npos) {
      s = set_key(word, word.substr(0, equals), word.substr(equals + 1), limits);
    } else {
      s = refuse_word(word);
    }
    if (!s.ok()) return s;
    limits.is_lowered = true;
  }
  return limits;
}

int usual_tensor(int capability, std::string_view name) {
  const int major = capability / 10;
  if (capability == 80 || major == 9 || major == 10) return 2048;
  return name.find("GeForce") == std::string_view::npos ? 1024 : 512;
}

std::string capability_text(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

std::string limits_text(const DeviceLimits& limits) {
  std::string text = "compute capability " + capability_text(limits.capability);
  for (const Key& key : kKeys) {
    if (limits.*key.limit != 0) text += fmt::format(", {}{}", limits.*key.limit, key.unit);
  }
  return text;
}

std::string lowered_text(const DeviceLimits& limits) {
  return limits.is_lowered ? fmt::format("{} lowers this device to {}", kLimitsVariable, limits_text(limits)) : "";
}

}  // namespace kvant::cuda
