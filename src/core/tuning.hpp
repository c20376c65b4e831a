// The times that `kvant bench tune` measured on a device, beside the estimates of the same work (cuda/plan/times.hpp):
// plans on that device multiply an estimate by the ratio of the two. No device is needed.
//
// A tuning file is text, lines between line feeds, one space between words:
//
//   kvant tuning 1
//   version 0.1.0
//   device NVIDIA H100 80GB HBM3
//   capability 9.0
//   multiprocessors 132
//   ratios 2
//   decode 128 tq 8 20 1043
//   decode 128 tq 8 64 1010
//
// A ratio is a kind of kernels, head_dim, stored class, heads (sequences times kv heads), rows of each of these, and
// thousandths of the estimate. Ratios ascend, so no work is there twice.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "codec/traits.hpp"
#include "core/device.hpp"
#include "kvant/result.hpp"

namespace kvant::core {

// Formats whose codes are unpacked by the same steps take about the same time.
enum class Stored { dense, fp8, tq };
inline constexpr const char* kStoredNames[] = {"dense", "fp8", "tq"};
constexpr Stored stored(Format k) {
  return codec::is_dense(k) ? Stored::dense : k == Format::fp8 ? Stored::fp8 : Stored::tq;
}

// Kinds of kernels among which plans choose by estimates. Those with byte keys are the option `products` = 8.
inline constexpr const char* kUnpackedBytes = "prefill_unpacked_bytes";
#define KVANT_NAME(name, is_for_hopper) #name,
inline constexpr const char* kTunedKinds[] = {
    kDecodeKernels, KVANT_EACH_DECODE_KIND(KVANT_NAME) KVANT_EACH_TILE_KIND(KVANT_NAME) kPrefillUnpacked,
    kUnpackedBytes};
#undef KVANT_NAME

struct TunedCard {
  std::string name;  // as the driver has it
  int capability = 0, multiprocessors = 0;
  friend bool operator==(const TunedCard&, const TunedCard&) = default;
};

// The work that a ratio was measured for, and that one is wanted for.
struct TunedWork {
  int kind = 0;  // index in kTunedKinds
  int head_dim = 0;
  Stored stored = Stored::tq;
  std::int64_t heads = 1, rows = 1;
  friend bool operator==(const TunedWork&, const TunedWork&) = default;
  friend bool operator<(const TunedWork& a, const TunedWork& b) {
    const auto all = [](const TunedWork& w) { return std::tie(w.kind, w.head_dim, w.stored, w.heads, w.rows); };
    return all(a) < all(b);
  }
};
struct TunedRatio {
  TunedWork work;
  int thousandths = 1000;
  friend bool operator==(const TunedRatio&, const TunedRatio&) = default;
};

struct Tuning {
  std::string version;  // the writing kvant's
  TunedCard card;
  std::vector<TunedRatio> ratios;  // ascending; empty: estimates are as they are
  std::string path;                // empty: no file is used
  std::string ignored;             // why the default file is not used; empty: it is, or is not there

  // By which the estimate of work is multiplied: between measured heads and rows by their logarithms, beyond them the
  // nearest. None where the kind was not measured for the head_dim and stored class.
  [[nodiscard]] std::optional<double> ratio(const TunedWork& work) const;
  // "tuned by /home/me/.cache/kvant/tuning-nvidia-h100.txt", or why not; empty: there is no file
  [[nodiscard]] std::string words() const;
};

inline constexpr const char* kTuningVariable = "KVANT_TUNING";
inline constexpr int kLeastRatio = 10, kMostRatio = 100000;  // thousandths
inline constexpr std::size_t kMostRatios = 8192;
inline constexpr std::int64_t kMostTuningBytes = 1 << 20;

// The index of a name in kTunedKinds; -1: none.
int tuned_kind(std::string_view name);

// The file's text. The ratios must ascend.
std::string tuning_text(const TunedCard& card, const std::vector<TunedRatio>& ratios);
// The same back. Errors: the line, and what is wrong with it. The text may be anything.
Result<Tuning> parse_tuning(std::string_view text);

// The file that plans read where the variable is not set: in $XDG_CACHE_HOME/kvant or ~/.cache/kvant. Empty: the
// environment names neither folder.
std::string default_tuning_path(const TunedCard& card);
// The tuning for a device: KVANT_TUNING's file, which must be for this device, or the default one if there is such a
// file for it. An empty variable and "off" are none. lowered: the limits of the device are (KVANT_CUDA_LIMITS), for
// which the default file is not.
Result<Tuning> find_tuning(const TunedCard& card, bool lowered);

}  // namespace kvant::core
