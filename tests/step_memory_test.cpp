// A step of an engine for which memory is missing changes nothing. This program's allocations fail on demand.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "core/pages/host_pages.hpp"
#include "core/pages/tail_copies.hpp"
#include "support/engine_pool.hpp"

namespace {
thread_local long allocations_left = -1;  // below 0: any number
}  // namespace

// Not inlined: compilers tell free() of what `new` returned.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (allocations_left == 0) return nullptr;
  if (allocations_left > 0) --allocations_left;
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kvant::core {
namespace {

// Calls `what` with none, one, two, ... allocations until it has enough. Returns how often it had not.
template <class What, class Check>
int with_too_few_allocations(const What& what, const Check& check) {
  for (int allowed = 0;; ++allowed) {
    bool enough = true;
    allocations_left = allowed;
    try {
      what();
    } catch (const std::bad_alloc&) {
      enough = false;
    }
    allocations_left = -1;
    if (enough) return allowed;
    check();
  }
}

test::EngineStep long_step() {
  test::EngineStep step;
  for (std::int32_t i = 0; i < 20; ++i)
    step.add({100 + 3 * i, 101 + 3 * i, 102 + 3 * i}, 3 * kPageTokens, 3 * kPageTokens);
  return step;
}

TEST(StepMemory, TablesOfRowsAreThoseOfTheStepBefore) {
  TableRows rows;
  test::EngineStep small;
  small.add({7, 9}, kPageTokens + 5, 2);
  rows.read(small.tables(2));
  rows.take();
  const auto check = [&] {
    const TableRows::Place place = rows.place(0, 9 * kPageTokens + 3);
    EXPECT_EQ(place.page, 1);
    EXPECT_EQ(place.before, 7);
    EXPECT_EQ(place.length, kPageTokens + 5);
    EXPECT_EQ(rows.place(2, 9 * kPageTokens + 5).page, -1);
  };
  check();
  test::EngineStep large = long_step();
  const StepTables tables = large.tables(3);
  EXPECT_GT(with_too_few_allocations([&] { rows.read(tables); }, check), 3);
  check();
  rows.take();
  EXPECT_EQ(rows.place(0, 100 * kPageTokens).page, 0);
}

TEST(StepMemory, CopiesAreThoseOfTheStepBefore) {
  TailCopies copies({0, 1}, 30, false);
  test::EngineStep small;
  small.add({5}, 1, 1);
  copies.begin_step(small.tables(1));
  const std::int32_t copy = copies.find(5);
  ASSERT_GE(copy, 0);
  copies.note_written(copy, 0, 1);
  const std::uint64_t changes = copies.changes();
  test::EngineStep large = long_step();
  const StepTables tables = large.tables(3);
  const auto check = [&] {
    EXPECT_EQ(copies.find(5), copy);
    EXPECT_TRUE(copies.unencoded(copy).any());
    EXPECT_EQ(copies.changes(), changes);
    EXPECT_EQ(copies.find(102), -1);
  };
  EXPECT_GT(with_too_few_allocations([&] { copies.begin_step(tables); }, check), 0);
  EXPECT_GE(copies.find(102), 0);
  EXPECT_EQ(copies.to_encode().size(), 1u);
  EXPECT_FALSE(copies.unencoded(copy).any());
}

}  // namespace
}  // namespace kvant::core
