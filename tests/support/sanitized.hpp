// The sanitizer that the tests are built with.
#pragma once

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

// The steps of a long random walk: a step takes ten times as long under the address sanitizer, and there the fuzzers
// walk on.
constexpr int random_steps(int n) {
  return kAddressSanitizer ? n / 2 : n;
}

}  // namespace kvant::test
