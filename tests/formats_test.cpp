// The list codec/formats.def against docs/formats.md, whose facts are written out once more here.
#include <gtest/gtest.h>

#include <string>

#include "codec/layout.hpp"
#include "codec/tq.hpp"

namespace kvant {
namespace {

struct Expected {
  const char* name;
  int number;
  char family;  // d, 8, t, l
  int low, high, scale_bytes;
  int groups_256;
  bool is_uniform;
  float offset;
  int max_level;
};
constexpr Expected kExpected[] = {
    {"f32", 0, 'd', 32, 0, 0, 1, false, 0, 0},      {"f16", 1, 'd', 16, 0, 0, 1, false, 0, 0},
    {"bf16", 2, 'd', 16, 0, 0, 1, false, 0, 0},     {"fp8", 3, '8', 8, 0, 2, 1, false, 0, 0},
    {"tq2", 4, 't', 2, 0, 2, 1, false, 63.5f, 127}, {"tq3", 5, 't', 2, 1, 2, 1, false, 63.5f, 127},
    {"tq4", 6, 't', 4, 0, 2, 1, false, 63.5f, 127}, {"tq5", 7, 't', 4, 1, 2, 1, false, 63.5f, 127},
    {"tq6", 8, 't', 4, 2, 2, 2, true, 31.5f, 63},   {"tq8", 9, 't', 8, 0, 2, 2, true, 127.5f, 255},
    {"lut4", 10, 'l', 4, 0, 4, 1, false, 0, 0},     {"lut5", 11, 'l', 4, 1, 4, 1, false, 0, 0},
    {"lut6", 12, 'l', 4, 2, 4, 1, false, 0, 0},     {"lut8", 13, 'l', 8, 0, 4, 1, false, 0, 0},
};

TEST(FormatList, SaysOfEachFormatWhatTheDocumentSays) {
  ASSERT_EQ(std::size(kExpected), formats().size());
  for (const Expected& want : kExpected) {
    const Format f = parse_format(want.name).value();
    SCOPED_TRACE(want.name);
    EXPECT_EQ(static_cast<int>(f), want.number);
    EXPECT_EQ(codec::is_dense(f), want.family == 'd');
    EXPECT_EQ(codec::is_fp8(f), want.family == '8');
    EXPECT_EQ(codec::is_tq(f), want.family == 't');
    EXPECT_EQ(codec::is_lut(f), want.family == 'l');
    EXPECT_EQ(format_info(f).dense, want.family == 'd');
    EXPECT_EQ(codec::plane_bits(f, 0), want.low);
    EXPECT_EQ(codec::plane_bits(f, 1), want.high);
    EXPECT_EQ(codec::plane_count(f), want.high == 0 ? 1 : 2);
    EXPECT_EQ(codec::format_bits(f), want.low + want.high);
    EXPECT_EQ(format_info(f).bits, want.low + want.high);
    EXPECT_EQ(codec::scale_bytes(f), want.scale_bytes);
    EXPECT_EQ(codec::tq_scale_groups(f, 256), want.groups_256);
    EXPECT_EQ(codec::tq_scale_groups(f, 576), 1);
    EXPECT_EQ(codec::is_uniform(f), want.is_uniform);
    if (want.family != 't') continue;
    EXPECT_EQ(codec::level_offset(f), want.offset);
    EXPECT_EQ(codec::max_level(f), want.max_level);
  }
}

// Products subtract the origin and look levels up; both are right only if the levels of all codes lie between 0 and the
// largest, and are centred on the offset.
TEST(FormatList, LevelsOfTheTablesLieWhereTheListSays) {
  for (const FormatInfo& info : formats()) {
    if (!codec::is_tq(info.format)) continue;
    SCOPED_TRACE(info.name);
    const codec::TqSpec spec = codec::tq_spec(info.format);
    ASSERT_EQ(spec.bits, info.bits);
    int sum = 0;
    for (int code = 0; code < 1 << info.bits; ++code) {
      const int level = codec::tq_level(spec, code);
      EXPECT_GE(level, 0);
      EXPECT_LE(level, codec::max_level(info.format));
      sum += level;
    }
    EXPECT_EQ(static_cast<float>(sum), static_cast<float>(1 << info.bits) * codec::level_offset(info.format));
  }
}

// A number that is no format has no family.
TEST(FormatList, OtherNumbersHaveNoFamily) {
  for (int number = kFormatCount; number < 256; ++number) {
    EXPECT_FALSE(codec::is_dense(static_cast<Format>(number))) << number;
    EXPECT_FALSE(codec::is_fp8(static_cast<Format>(number))) << number;
    EXPECT_FALSE(codec::is_tq(static_cast<Format>(number))) << number;
    EXPECT_FALSE(codec::is_lut(static_cast<Format>(number))) << number;
  }
}

}  // namespace
}  // namespace kvant
