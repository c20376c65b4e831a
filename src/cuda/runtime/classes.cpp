#include "cuda/runtime/classes.hpp"

#include "cuda/runtime/architectures.hpp"
#include "cuda/runtime/limits.hpp"

namespace kvant::cuda {
namespace {

struct Entry {
  int capability;  // the oldest
  const char* name;
  const char* cards;
  const char* tested;  // where the GPU tests passed; empty: on none of these cards
};
// "Tested" is what was run, and nothing else: a card that nobody has run stays without.
constexpr Entry kEntries[] = {
    {80, "8.0", "A100, A30", ""},
    {86, "8.6", "GeForce RTX 30, A10, A40, RTX A6000", ""},
    {89, "8.9", "GeForce RTX 40, L4, L40S", ""},
    {90, "9.0", "H100, H200", "H100, H200"},
    {100, "10.x", "B200, B300", ""},
    {120, "12.x", "GeForce RTX 50, RTX PRO 6000, DGX Spark", ""},
};

std::vector<std::string> kernels_of(int capability) {
  struct Kind {
    const char* name;
    bool is_for_hopper;
  };
#define KVANT_KIND(name, is_for_hopper) {#name, is_for_hopper},
  static constexpr Kind kKinds[] = {{core::kDecodeKernels, false},
                                    KVANT_EACH_DECODE_KIND(KVANT_KIND)
                                        KVANT_EACH_TILE_KIND(KVANT_KIND){core::kPrefillFresh, true},
                                    {core::kPrefillUnpacked, true},
                                    {core::kGenericKernels, false}};
#undef KVANT_KIND
  std::vector<std::string> names;
  for (const Kind& one : kKinds) {
    if (!one.is_for_hopper || has_sm90(capability)) names.emplace_back(one.name);
  }
  return names;
}

const char* code_text(CodeFor code) {
  switch (code) {
    case CodeFor::machine: return "machine code";
    case CodeFor::compiled: return "compiled by the driver";
    default: return "none";
  }
}

}  // namespace

std::vector<core::DeviceClass> device_classes(std::string_view architectures) {
  std::vector<core::DeviceClass> classes;
  for (const Entry& one : kEntries) {
    const CodeFor code = code_for(architectures, one.capability).kind;
    classes.push_back({.capability = one.name,
                       .cards = one.cards,
                       .kernels = kernels_of(one.capability),
                       .code = code_text(code),
                       .tested = one.tested,
                       .runs = code != CodeFor::none});
  }
  return classes;
}

}  // namespace kvant::cuda
