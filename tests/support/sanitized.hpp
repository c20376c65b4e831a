// The sanitizer that the tests are built with, and whether they run on the emulated matrix unit: both make tests slow.
#pragma once

#include <cstdlib>
#include <string_view>

namespace kvant::test {

#if defined(__has_feature)
#define KVANT_HAS_FEATURE(x) __has_feature(x)
#else
#define KVANT_HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || KVANT_HAS_FEATURE(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__) || KVANT_HAS_FEATURE(address_sanitizer)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#undef KVANT_HAS_FEATURE

// KVANT_TEST_ISA=emulated: all that another instruction set would show has been seen with it, so that some tests make
// fewer rounds of the same kind.
inline bool on_emulated_unit() {
  const char* name = std::getenv("KVANT_TEST_ISA");
  return name != nullptr && std::string_view(name) == "emulated";
}

// The steps of a long random walk: a step takes ten times as long under the address sanitizer, and there the fuzzers
// walk on.
inline int random_steps(int n) {
  return kAddressSanitizer ? n / 2 : on_emulated_unit() ? n / 4 : n;
}

}  // namespace kvant::test
