// Which devices a build has code for, by the rules of CUDA's binary and PTX compatibility. Needs no CUDA.
#include <gtest/gtest.h>

#include "cuda/runtime/architectures.hpp"

namespace kvant::cuda {
namespace {

TEST(Architectures, MachineCodeRunsOnItsMajorVersionOnly) {
  EXPECT_EQ(code_for("80 90a", 80).kind, CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 86).kind, CodeFor::machine);
  EXPECT_EQ(code_for("89", 86).kind, CodeFor::none) << "older than the code";
  EXPECT_EQ(code_for("80", 90).kind, CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 75).kind, CodeFor::none);
}

TEST(Architectures, ALetterMeansThatVersionExactly) {
  EXPECT_EQ(code_for("80 90a", 90).kind, CodeFor::machine);
  EXPECT_EQ(code_for("80 90a", 91).kind, CodeFor::none);
  EXPECT_EQ(code_for("80 90a", 100).kind, CodeFor::none);
}

TEST(Architectures, PtxIsForDevicesThatAreNotOlder) {
  EXPECT_EQ(code_for("80 90a 90-virtual", 100).kind, CodeFor::compiled);
  EXPECT_EQ(code_for("80 90a 90-virtual", 121).kind, CodeFor::compiled);
  EXPECT_EQ(code_for("90-virtual", 89).kind, CodeFor::none);
  EXPECT_EQ(code_for("90-virtual 90a", 90).kind, CodeFor::machine) << "machine code comes first";
  EXPECT_EQ(code_for("120", 120).kind, CodeFor::machine);
  EXPECT_EQ(code_for("", 90).kind, CodeFor::none);
}

TEST(Architectures, TheNewestCodeRuns) {
  EXPECT_EQ(code_for("80-virtual", 120).architecture, 80);
  EXPECT_EQ(code_for("80-virtual 90-virtual", 120).architecture, 90);
  EXPECT_EQ(code_for("90-virtual 80-virtual", 120).architecture, 90);
  EXPECT_EQ(code_for("80 86 90a 90-virtual", 89).architecture, 86);
  EXPECT_EQ(code_for("80-virtual 90a", 90).architecture, 90);
  EXPECT_EQ(code_for("80", 120).architecture, 0);
}

}  // namespace
}  // namespace kvant::cuda
