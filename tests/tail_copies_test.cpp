// Which blocks have an exact copy: the bookkeeping by itself, for steps that no engine should make.
#include "core/pages/tail_copies.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "support/engine_pool.hpp"

namespace kvant::core {
namespace {

constexpr base::ExactEnds<std::int32_t> kOneOfTheTail{0, 1};

// A step of sequences of one block each, of so many tokens, the last one new.
void begin_step(TailCopies& copies, const std::vector<std::int32_t>& blocks, std::int32_t length = 1) {
  test::EngineStep step;
  for (const std::int32_t block : blocks) step.add({block}, length, 1);
  copies.begin_step(step.tables(1));
}

// Two sequences that begin in one block (beams): it takes one copy, which is the one that is written and read.
TEST(TailCopies, ABlockThatAStepHasTwiceHasOneCopy) {
  TailCopies copies(kOneOfTheTail, 2, false);
  begin_step(copies, {5, 5, 6});
  ASSERT_GE(copies.find(5), 0);
  ASSERT_GE(copies.find(6), 0) << "the second copy went to block 5 again";
  copies.note_written(copies.find(5), 0, 1);
  copies.note_written(copies.find(6), 0, 1);
  begin_step(copies, {5, 5, 6}, 2);
  EXPECT_TRUE(copies.unencoded(copies.find(5)).any());
  EXPECT_TRUE(copies.unencoded(copies.find(6)).any());
  EXPECT_EQ(copies.take_misses(), 0);
  // Without its copy it has none, whatever other blocks get.
  copies.forget(5);
  begin_step(copies, {7});
  EXPECT_EQ(copies.find(5), -1);
  EXPECT_GE(copies.find(7), 0);
}

// A block that comes again behind others, which lie in its place of the table.
TEST(TailCopies, ABlockThatComesAgainBehindOthersHasOneCopy) {
  TailCopies copies(kOneOfTheTail, 4, false);
  begin_step(copies, {5, 6, 7, 5, 8, 6});
  std::vector<std::int32_t> found;
  for (const std::int32_t block : {5, 6, 7, 8}) found.push_back(copies.find(block));
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_GE(found[i], 0) << i;
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(found[i], found[j]);
  }
}

// More blocks begin than there are copies, and than the table of blocks has places: the first ones have copies.
TEST(TailCopies, BlocksForWhichThereIsNoCopyGoWithout) {
  for (const std::int32_t count : {1, 2, 3, 8}) {
    TailCopies copies(kOneOfTheTail, count, false);
    std::vector<std::int32_t> blocks;
    for (std::int32_t block = 0; block < 100; ++block) blocks.push_back(block);
    for (const int step : {0, 1}) {
      begin_step(copies, blocks);
      for (std::int32_t block = 0; block < 100; ++block)
        EXPECT_EQ(copies.find(block) >= 0, block < count) << block << " of " << count << ", step " << step;
    }
  }
}

// A block that two sequences of a step have is kept for the one that needs it most, whichever comes last.
TEST(TailCopies, TheGreatestNeedOfABlockCounts) {
  TailCopies copies(kOneOfTheTail, 1, false);
  begin_step(copies, {5});
  copies.note_written(copies.find(5), 0, 1);
  test::EngineStep step;
  step.add({5}, 2, 1);      // is written
  step.add({5, 6}, 65, 1);  // is the newest full one, and block 6 begins
  copies.begin_step(step.tables(2));
  EXPECT_GE(copies.find(5), 0);
  EXPECT_EQ(copies.find(6), -1);
}

// A device's numbers of steps have 32 bits, and those of a host do not begin anew: copies that each step needs stay.
TEST(TailCopies, CopiesStayWhenThereWereAsManyStepsAs32BitsCount) {
  constexpr std::uint64_t kSteps = (std::uint64_t{1} << 32) / base::kNumbersOfStep;
  TailCopies copies(kOneOfTheTail, 2, false, kSteps - 20);
  begin_step(copies, {5});
  copies.note_written(copies.find(5), 0, 1);
  for (std::int32_t n = 1; n <= 100; ++n) begin_step(copies, {5}, 2);
  const std::int32_t copy = copies.find(5);
  ASSERT_GE(copy, 0);
  for (std::int32_t block = 100; block < 110; ++block) {
    test::EngineStep step;
    step.add({5}, 2, 1);
    step.add({block}, 1, 1);
    copies.begin_step(step.tables(1));
    ASSERT_EQ(copies.find(5), copy) << block;
    copies.note_written(copies.find(block), 0, 1);
  }
}

}  // namespace
}  // namespace kvant::core
