// Which devices a build has code for, by the rules of CUDA's binary and PTX compatibility. Needs no CUDA.
#include <gtest/gtest.h>

#include "cuda/runtime/architectures.hpp"

namespace kvant::cuda {
namespace {

TEST(Architectures, MachineCodeRunsOnItsMajorVersionOnly) {
  EXPECT_EQ(code_for("80 90a", 80), CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 86), CodeFor::machine);
  EXPECT_EQ(code_for("89", 86), CodeFor::none) << "older than the code";
  EXPECT_EQ(code_for("80", 90), CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 75), CodeFor::none);
}

TEST(Architectures, ALetterMeansThatVersionExactly) {
  EXPECT_EQ(code_for("80 90a", 90), CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 91), CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 100), CodeFor::none);
}

TEST(Architectures, PtxIsForDevicesThatAreNotOlder) {
  EXPECT_EQ(code_for("80 90a 90-virtual", 100), CodeFor::compiled);
  EXPECT_EQ(code_for("80 90a 90-virtual", 121), CodeFor::compiled);
  EXPECT_EQ(code_for("90-virtual", 89), CodeFor::none);
  EXPECT_EQ(code_for("90-virtual 90a", 90), CodeFor::machine) << "machine code comes first";
  EXPECT_EQ(code_for("120", 120), CodeFor::machine);
  EXPECT_EQ(code_for("", 90), CodeFor::none);
}

}  // namespace
}  // namespace kvant::cuda
