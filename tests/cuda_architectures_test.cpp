// Which devices a build has code for, by the rules of CUDA's binary and PTX compatibility. Needs no CUDA.
#include <gtest/gtest.h>

#include "cuda/runtime/architectures.hpp"

namespace kvant::cuda {
namespace {

TEST(Architectures, MachineCodeRunsOnItsMajorVersionOnly) {
  EXPECT_EQ(code_for("80 90a", 8, 0), CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 8, 6), CodeFor::machine);
  EXPECT_EQ(code_for("89", 8, 6), CodeFor::none) << "older than the code";
  EXPECT_EQ(code_for("80", 9, 0), CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 7, 5), CodeFor::none);
}

TEST(Architectures, ALetterMeansThatVersionExactly) {
  EXPECT_EQ(code_for("80 90a", 9, 0), CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 9, 1), CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 10, 0), CodeFor::none);
}

TEST(Architectures, PtxIsForDevicesThatAreNotOlder) {
  EXPECT_EQ(code_for("80 90a 90-virtual", 10, 0), CodeFor::compiled);
  EXPECT_EQ(code_for("80 90a 90-virtual", 12, 1), CodeFor::compiled);
  EXPECT_EQ(code_for("90-virtual", 8, 9), CodeFor::none);
  EXPECT_EQ(code_for("90-virtual 90a", 9, 0), CodeFor::machine) << "machine code comes first";
  EXPECT_EQ(code_for("120", 12, 0), CodeFor::machine);
  EXPECT_EQ(code_for("", 9, 0), CodeFor::none);
}

}  // namespace
}  // namespace kvant::cuda
