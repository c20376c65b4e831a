// Short work with the kernels of eight warps (src/cuda/decode/eight_warps.cuh), and the same with those of four. The
// test asks explain() which of these a plan has chosen.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/runtime/runtime.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

struct Shape {
  Formats formats;
  int head_dim, group;
};
const std::vector<Shape> kShapes = {{{"tq6", "tq4"}, 128, 1},  {{"tq6", "tq4"}, 128, 4}, {{"tq4", "tq4"}, 128, 3},
                                    {{"tq6", "tq4"}, 256, 8},  {{"tq6", "tq4"}, 256, 9}, {{"tq4", "tq4"}, 256, 5},
                                    {{"tq4", "tq4"}, 256, 16}, {{"tq6", "tq4"}, 512, 1}, {{"tq6", "tq4"}, 512, 8},
                                    {{"tq6", "tq4"}, 512, 9},  {{"tq4", "tq4"}, 512, 4}, {{"tq4", "tq4"}, 512, 5},
                                    {{"tq4", "tq4"}, 512, 8},  {{"tq8", "tq8"}, 512, 8}, {{"tq4", "tq4"}, 512, 16}};

std::string name_of(const Shape& s) {
  return fmt::format("{}_d{}_group{}", test::name_of(s.formats), s.head_dim, s.group);
}

WorldSpec spec_of(const Shape& s, std::vector<Lengths> sequences) {
  WorldSpec spec = test::spec_of(s.formats.k, s.formats.v, std::move(sequences));
  spec.head_dim = s.head_dim;
  spec.group = s.group;
  spec.inputs = Inputs::loud;
  return spec;
}

testing::AssertionResult has_warps(const GpuWorld& w, int warps, const AttentionOptions& options = {}) {
  const std::string text = plan(w.cache, std::span<const SequenceId>(w.ids), w.options(options)).value().explain();
  if (text.find(fmt::format(" of {} warps, ", warps)) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << text;
}

// The largest of these kernels take 182 KB.
#define SKIP_WITHOUT_ROOM()                               \
  if (cuda::find_limits(0).value().shared_bytes < 200000) \
  GTEST_SKIP() << "kernels of eight warps need more shared memory for a block"

class GpuEightWarps : public testing::TestWithParam<int> {
 protected:
  [[nodiscard]] static const Shape& shape() { return kShapes[static_cast<std::size_t>(GetParam())]; }
};

// No exact pages, one, and several in a block's part, of which the last has few keys; two queries, whose rows may be
// two blocks.
TEST_P(GpuEightWarps, Matches) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_ROOM();
  for (const auto& [sinks, tails] : {std::pair{1, 1}, {0, 0}, {2, 0}, {0, 3}}) {
    for (const std::int64_t q_len : {1, 2}) {
      WorldSpec spec = spec_of(shape(), {{1349, q_len}});
      spec.sink_pages = sinks;
      spec.tail_pages = tails;
      spec.exact = sinks == 2 ? Dtype::f16 : Dtype::bf16;
      spec.page_centres = tails == 3;
      spec.key_offset = spec.page_centres ? 2.0f : 0.0f;
      const GpuWorld w(spec);
      if (q_len == 1) {
        EXPECT_TRUE(has_warps(w, 8)) << "one query";
      }
      EXPECT_TRUE(w.matches()) << sinks << " and " << tails << " exact pages, " << q_len << " queries";
    }
  }
}

TEST_P(GpuEightWarps, MasksAndTransforms) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_ROOM();
  const GpuWorld w(spec_of(shape(), {{700, 1}, {1, 1}, {130, 1}}));
  EXPECT_TRUE(has_warps(w, 8));
  expect_masks_and_transforms(w);
}

// More work, or more exact pages, than kernels of eight warps are for.
TEST_P(GpuEightWarps, ManySequencesHaveFourWarps) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of(shape(), std::vector<Lengths>(24, {150, 1})));
  EXPECT_TRUE(has_warps(w, 4));
  EXPECT_TRUE(w.matches());
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuEightWarps, testing::Range(0, static_cast<int>(kShapes.size())),
                         [](const auto& i) { return name_of(kShapes[static_cast<std::size_t>(i.param)]); });

// Several pages for each team, one after the other.
TEST(GpuEightWarpsLong, FivePagesABlock) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_ROOM();
  for (const int head_dim : {256, 512}) {
    WorldSpec spec = spec_of({{"tq4", "tq4"}, head_dim, 8}, {{42000, 1}});
    spec.kv_heads = 1;
    const GpuWorld w(spec);
    EXPECT_TRUE(has_warps(w, 8));
    EXPECT_TRUE(w.matches());
  }
}

TEST(GpuShort, EightWarps) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_ROOM();
  for (const Shape& s : kShapes) {
    const GpuWorld w(spec_of(s, {{200, 1}}));
    EXPECT_TRUE(has_warps(w, 8));
    EXPECT_TRUE(w.matches()) << name_of(s);
  }
}

}  // namespace
}  // namespace kvant::test
