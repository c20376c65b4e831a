// Attention on a device at the ends of the floats.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

// Terms so low that scores are lost in them: the keys that a row sees all weigh the same.
TEST(GpuNumbers, LowScoresCount) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq6", "bf16", "f32"}) {
    WorldSpec spec = spec_of(format, {{300, 3}, {100, 1}});
    const GpuWorld w(spec);
    for (const float term : {-2e30f, -1e37f, std::numeric_limits<float>::lowest()}) {
      const OwnedMask mask = make_mask(Dtype::f32, {1, 1, 1, 300}, [&](auto, auto, auto, auto) { return term; });
      const AttentionOptions options = with_mask(mask);
      SCOPED_TRACE(fmt::format("{}, {}", format, term));
      if (term > -1e38f) {
        EXPECT_TRUE(w.matches(options));
        continue;
      }
      for (const char* kernel : {"", "prefill", "generic"}) {  // lse is of the lowest score there
        AttentionOptions o = options;
        o.kernel = kernel;
        const Result<Attended> got = w.try_attend(o);
        if (!got && format == std::string("f32") && kernel == std::string("prefill")) continue;
        ASSERT_TRUE(got.ok()) << got.message();
        EXPECT_TRUE(close(w.expect(options).out, got->out, tolerance::kCudaPrefill, w.host.out_shape()))
            << got->explain;
      }
    }
    // Keys with such a term beside one without: they weigh nothing.
    const OwnedMask mask = make_mask(Dtype::f32, {1, 1, 1, 300}, [](auto, auto, auto, auto key) {
      return key % 70 == 5 ? 0.0f : std::numeric_limits<float>::lowest();
    });
    EXPECT_TRUE(w.matches(with_mask(mask))) << format;
  }
}

}  // namespace
}  // namespace kvant::test
