#include "bench/peaks.hpp"

namespace kvant::bench {

extern const PeakLoops kScalarLoops;
#if defined(__x86_64__)
extern const PeakLoops kAvx512Loops;
extern const PeakLoops kAvx2Loops;
#elif defined(__aarch64__)
extern const PeakLoops kNeonLoops;
#endif

const PeakLoops* find_peak_loops(std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "amx") isa = "avx512";  // which has all of amx but its tiles of bf16
  static constexpr const PeakLoops* kAll[] = {&kAvx512Loops, &kAvx2Loops, &kScalarLoops};
#elif defined(__aarch64__)
  static constexpr const PeakLoops* kAll[] = {&kNeonLoops, &kScalarLoops};
#else
  static constexpr const PeakLoops* kAll[] = {&kScalarLoops};
#endif
  for (const PeakLoops* loops : kAll) {
    if (isa == loops->isa) return loops;
  }
  return nullptr;
}

}  // namespace kvant::bench
