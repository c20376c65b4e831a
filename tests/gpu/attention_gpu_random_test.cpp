// Random combinations of everything attention and the cache can do, on a device: against the float64 reference over
// what its cache decodes, against the CPU backend, and against a second run.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/random_world.hpp"

namespace kvant::test {
namespace {

// `kernel`: for all cases; empty: decode kernels, and the others beside them.
void check_cases(const RandomChoices& all, int part, std::uint64_t most, const char* kernel,
                 const std::function<void(Rng&, RandomCase&)>& change) {
  const std::vector<Dtype> dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16};
  const auto [first, count] = random_seeds(part, most);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, all);
    c.options.kernel = kernel;
    change(rng, c);
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

class GpuRandom : public testing::TestWithParam<int> {};

TEST_P(GpuRandom, Matches) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = kHeadDims;
  all.page_centres = true;
  for (const Formats& f : kFormats) all.formats.emplace_back(f.k, f.v);
  check_cases(all, GetParam(), 40, "", [](Rng&, RandomCase&) {});
}

// Keys and values of different head_dims.
TEST_P(GpuRandom, UnequalWidthsMatch) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = {192};
  all.page_centres = true;
  for (const Formats& f : kFormats) all.formats.emplace_back(f.k, f.v);
  const auto set = [](Rng& rng, RandomCase& c) {
    set_width(c.spec, kUnequalWidths[static_cast<std::size_t>(rng.below(static_cast<int>(kUnequalWidths.size())))]);
  };
  check_cases(all, GetParam(), 40, "", set);
  all.formats = {{"f32", "tq4"}, {"tq6", "f32"}, {"lut4", "lut4"}, {"lut6", "bf16"}, {"tq2", "tq6"}, {"tq5", "bf16"}};
  check_cases(all, GetParam(), 20, "generic", set);
}

// Sizes that are stored padded.
TEST_P(GpuRandom, PaddedMatches) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = {33, 48, 63, 72, 80, 90, 112, 127, 160, 224, 255, 320, 511};
  all.page_centres = true;
  for (const Formats& f : kFormats) all.formats.emplace_back(f.k, f.v);
  check_cases(all, GetParam(), 20, "", [](Rng&, RandomCase& c) { c.spec.key_bases = c.spec.value_bases = false; });
}

// The generic kernel over formats that have no other, and any other formats.
TEST_P(GpuRandom, GenericMatches) {
  SKIP_WITHOUT_DEVICE();
  RandomChoices all;
  all.head_dims = {64, 96, 128, 192, 256, 512, 72, 127, 200};
  all.page_centres = true;
  all.formats = {{"f32", "f32"},   {"f32", "tq4"},  {"tq6", "f32"}, {"lut4", "lut4"}, {"lut5", "lut8"},
                 {"lut6", "bf16"}, {"f16", "lut5"}, {"tq2", "tq6"}, {"bf16", "tq4"},  {"tq6", "tq4"},
                 {"tq8", "tq8"},   {"fp8", "fp8"},  {"f16", "f16"}, {"tq5", "bf16"}};
  check_cases(all, GetParam(), 40, "generic", [](Rng& rng, RandomCase& c) {
    if (rng.below(3) == 0) c.spec.exact = Dtype::f32;
    const bool is_whole = std::ranges::count(kHeadDims, c.spec.head_dim) > 0;
    if (!is_whole) c.spec.key_bases = c.spec.value_bases = false;
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuRandom, testing::Range(0, 4));

}  // namespace
}  // namespace kvant::test
