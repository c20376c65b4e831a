// Random combinations of everything attention and the cache can do, on a device: against the float64 reference over
// what its cache decodes, against the CPU backend, and against a second run.
#include <gtest/gtest.h>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/random_world.hpp"

namespace kvant::test {
namespace {

class GpuRandom : public testing::TestWithParam<int> {};

TEST_P(GpuRandom, Matches) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = {64, 96, 128, 192, 256, 512};
  all.page_centres = true;
  for (const Formats& f : kFormats) all.formats.emplace_back(f.k, f.v);
  const std::vector<Dtype> dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16};
  const auto [first, count] = random_seeds(GetParam(), 40);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, all);
    c.spec.page_centres = c.spec.page_centres && c.spec.tail_pages > 0;  // a device centres what leaves a tail
    Placement p;
    p.q_dtype = dtypes[static_cast<std::size_t>(rng.below(3))];
    p.out_dtype = dtypes[static_cast<std::size_t>(rng.below(3))];
    if (rng.below(3) == 0) p.token_padding = rng.below(20);
    if (rng.below(3) == 0) p.head_padding = rng.below(20);
    if (rng.below(3) == 0) p.offset = rng.below(8);
    SCOPED_TRACE(fmt::format("seed {}, q {}, out {}, padding {} and {}, offset {}\n{}", seed, dtype_name(p.q_dtype),
                             dtype_name(p.out_dtype), p.token_padding, p.head_padding, p.offset, c.description));
    const GpuWorld w(c.spec);
    EXPECT_TRUE(w.matches(c.options, c.sink_logits, p, tolerance::kLseOfFewKeys));
    const Attended once = w.attend(c.options, c.sink_logits), again = w.attend(c.options, c.sink_logits);
    EXPECT_TRUE(same_bits(once.out, again.out, w.host.out_shape()));
    EXPECT_TRUE(same_bits(once.lse, again.lse));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuRandom, testing::Range(0, 4));

}  // namespace
}  // namespace kvant::test
