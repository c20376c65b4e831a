// Numbers at the ends of what floats hold, on every instruction set: NaNs of any payload and infinities make NaN of the
// rows that see them and change no bit of others; the largest numbers, the smallest and negative zeros are numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/bits.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "support/half.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

float from_bits(std::uint32_t bits) {
  return base::bit_cast<float>(bits);
}

// Both infinities, and NaNs with the first, the last and no bit of what a narrower type keeps, quiet or not.
const std::vector<std::uint32_t> kNotFinite32 = {0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, 0x7F807FFF,
                                                 0x7F808000, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0xFFC00000,
                                                 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF};
const std::vector<std::uint32_t> kNotFinite16 = {0x7C00, 0xFC00, 0x7C01, 0xFC01, 0x7DFF,
                                                 0x7E00, 0xFE00, 0x7FFF, 0xFFFF};
const std::vector<std::uint32_t> kNotFiniteB16 = {0x7F80, 0xFF80, 0x7F81, 0xFF81, 0x7FBF,
                                                  0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF};
// The largest, what rounds to an infinity in bf16 or beside it, the least normal number, denormals, zeros.
const std::vector<std::uint32_t> kFinite32 = {0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0xFF7F8000, 0x7F7F7FFF,
                                              0x7F7F0000, 0x7F000000, 0x00800000, 0x80800000, 0x007FFFFF,
                                              0x00008000, 0x00000001, 0x80000001, 0x80000000, 0x00000000};
const std::vector<std::uint32_t> kFinite16 = {0x7BFF, 0xFBFF, 0x0400, 0x03FF, 0x0001, 0x8001, 0x8000, 0x0000};
const std::vector<std::uint32_t> kFiniteB16 = {0x7F7F, 0xFF7F, 0x7F00, 0x0080, 0x007F, 0x0001, 0x8001, 0x8000, 0x0000};

// The bits of a dtype as the float that packs to them.
float value_of(Dtype dtype, std::uint32_t bits) {
  if (dtype == Dtype::f32) return from_bits(bits);
  return dtype == Dtype::f16 ? base::f16_to_f32(static_cast<std::uint16_t>(bits)) : from_bits(bits << 16);
}

// A sequence for each number: kOlder stored tokens and q_len new ones, whose own keys and values a run is given.
constexpr std::int64_t kOlder = 70, kAt = 1;  // the number's token among the new ones
constexpr int kHead = 1, kElement = 7, kHeadDim = 64, kHeads = 2, kGroup = 2;

WorldSpec spec_for(const char* format, Dtype dtype, std::int64_t older, std::int64_t q_len, std::size_t numbers) {
  WorldSpec spec = spec_of(format, format, std::vector<Lengths>(numbers, {older + q_len, q_len}));
  spec.head_dim = kHeadDim, spec.kv_heads = kHeads, spec.group = kGroup;
  spec.input_dtype = dtype;
  spec.tail_pages = 0;
  return spec;
}
std::size_t element_of(std::int64_t token, int heads, int head) {
  return static_cast<std::size_t>((token * heads + head) * kHeadDim + kElement);
}

AttentionOptions with_isa(const std::string& isa) {
  AttentionOptions options;
  options.fresh_keys = true;
  options.isa = isa;
  return options;
}

class Numbers : public testing::TestWithParam<std::int64_t> {};  // the queries: few rows, and many

TEST_P(Numbers, WhatIsNotFiniteMakesNaNOfTheRowsThatSeeItAlone) {
  const std::int64_t q_len = GetParam();
  for (const auto& [dtype, numbers] :
       {std::pair{Dtype::f32, &kNotFinite32}, {Dtype::f16, &kNotFinite16}, {Dtype::bf16, &kNotFiniteB16}}) {
    const World w(spec_for("tq4", dtype, kOlder, q_len, numbers->size()));
    for (const std::string& isa : available_isas()) {
      const AttentionOptions options = w.options(with_isa(isa));
      const Attended expected = w.attend(options);
      for (const bool values : {false, true}) {
        FreshTensors f = w.fresh();
        for (std::size_t i = 0; i < numbers->size(); ++i) {
          const std::size_t at = element_of(static_cast<std::int64_t>(i) * q_len + kAt, kHeads, kHead);
          const std::size_t bytes = dtype_size(dtype);
          std::memcpy((values ? f.v : f.k).data() + at * bytes, &(*numbers)[i], bytes);  // little-endian
        }
        const Attended got = try_attend(w.cache, w.ids, options, w.queries(), {}, 0, f.keys, f.values).value();
        for (std::size_t row = 0; row < got.lse.size(); ++row) {
          const auto query = static_cast<std::int64_t>(row) / (kHeads * kGroup) % q_len;
          const auto head = static_cast<int>(row) % (kHeads * kGroup) / kGroup;
          const std::uint32_t number = (*numbers)[row / static_cast<std::size_t>(q_len * kHeads * kGroup)];
          SCOPED_TRACE(
              fmt::format("{}, {} {} {:#x}, row {}", isa, dtype_name(dtype), values ? "value" : "key", number, row));
          const bool sees = query >= kAt && head == kHead;
          ASSERT_TRUE(sees ? std::isnan(got.lse[row]) : got.lse[row] == expected.lse[row]);
          for (std::size_t d = row * kHeadDim; d < (row + 1) * kHeadDim; ++d)
            ASSERT_TRUE(sees ? std::isnan(got.out[d]) : got.out[d] == expected.out[d]);
        }
      }
    }
  }
}

TEST_P(Numbers, AQueryThatIsNotFiniteIsNaNAlone) {
  const std::int64_t q_len = GetParam();
  for (const char* format : {"tq4", "f32"}) {
    const World w(spec_for(format, Dtype::f32, kOlder, q_len, kNotFinite32.size()));
    for (const std::string& isa : available_isas()) {
      AttentionOptions options = w.options(with_isa(isa));
      options.fresh_keys = false;
      const Attended expected = w.attend(options);
      std::vector<float> q = w.queries();
      for (std::size_t i = 0; i < kNotFinite32.size(); ++i)
        q[element_of(static_cast<std::int64_t>(i) * q_len + kAt, kHeads * kGroup, 2)] = from_bits(kNotFinite32[i]);
      const Attended got = try_attend(w.cache, w.ids, options, q).value();
      for (std::size_t row = 0; row < got.lse.size(); ++row) {
        const auto query = static_cast<std::int64_t>(row) / (kHeads * kGroup) % q_len;
        const bool poisoned = query == kAt && row % (kHeads * kGroup) == 2;
        ASSERT_TRUE(poisoned ? std::isnan(got.lse[row]) : got.lse[row] == expected.lse[row]) << isa << " row " << row;
        for (std::size_t d = row * kHeadDim; d < (row + 1) * kHeadDim; ++d)
          ASSERT_TRUE(poisoned ? std::isnan(got.out[d]) : got.out[d] == expected.out[d]) << isa << " row " << row;
      }
    }
  }
}

// No call on the host stores such a scale; a device does, and its blocks may be moved to host memory.
TEST_P(Numbers, AScaleThatIsNotFiniteMakesNaNOfTheRowsThatSeeIt) {
  const std::int64_t q_len = GetParam();
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"}) {
    for (const bool values : {false, true}) {
      WorldSpec spec = spec_for(format, Dtype::f32, kOlder, q_len, kNotFinite16.size());
      spec.sink_pages = 0;
      const World w(spec);
      AttentionOptions options;
      std::vector<Attended> expected;
      for (const std::string& isa : available_isas()) {
        options.isa = isa;
        expected.push_back(w.attend(options));
      }
      const CacheImpl& impl = w.cache.impl();
      const codec::PageLayout& layout = impl.layout(core::Pool::encoded);
      const std::size_t scale = (values ? layout.v : layout.k).scale_offset + (kOlder + kAt) % kPageTokens * 2;
      for (std::size_t i = 0; i < kNotFinite16.size(); ++i) {
        const core::PageRef& page = impl.view(w.ids[i]).value().pages[(kOlder + kAt) / kPageTokens];
        auto* block = const_cast<std::byte*>(impl.block(core::Pool::encoded, page.encoded, 0, kHead));
        std::memcpy(block + scale, &kNotFinite16[i], 2);
      }
      for (std::size_t i = 0; i < expected.size(); ++i) {
        options.isa = available_isas()[i];
        const Attended got = w.attend(options);
        for (std::size_t row = 0; row < got.lse.size(); ++row) {
          const auto query = static_cast<std::int64_t>(row) / (kHeads * kGroup) % q_len;
          const bool sees = query >= kAt && static_cast<int>(row) % (kHeads * kGroup) / kGroup == kHead;
          SCOPED_TRACE(fmt::format("{}, {} {} scale, row {}", options.isa, format, values ? "value" : "key", row));
          ASSERT_TRUE(sees ? std::isnan(got.lse[row]) : got.lse[row] == expected[i].lse[row]);
          for (std::size_t d = row * kHeadDim; d < (row + 1) * kHeadDim; ++d)
            ASSERT_TRUE(sees ? std::isnan(got.out[d]) : got.out[d] == expected[i].out[d]);
        }
      }
    }
  }
}

// Each row against the float64 reference alone: beside a row that holds 3e38 no other would count.
void expect_rows(const World& w, const AttentionOptions& options, const std::vector<std::uint32_t>& numbers) {
  const Attended got = w.attend(options);
  const Expected expected = w.expect_decoded(options);
  const std::size_t rows_each = got.lse.size() / numbers.size();
  for (std::size_t row = 0; row < got.lse.size(); ++row) {
    SCOPED_TRACE(fmt::format("{}, number {:#x}, row {} of its sequence", options.isa, numbers[row / rows_each],
                             row % rows_each));
    EXPECT_TRUE(
        lse_close(std::span(expected.lse).subspan(row, 1), std::span(got.lse).subspan(row, 1), tolerance::kLseCoded));
    EXPECT_TRUE(close(std::span(expected.out).subspan(row * kHeadDim, kHeadDim),
                      std::span(got.out).subspan(row * kHeadDim, kHeadDim), tolerance::kCoded));
  }
}

// Element 7 of queries is small, so that no score leaves the floats: 3.4e38 times 2^-20 is a score of 4e31, which takes
// all of the weight, or none.
TEST_P(Numbers, FiniteOnesAreNumbers) {
  const std::int64_t q_len = GetParam();
  for (const auto& [dtype, numbers] :
       {std::pair{Dtype::f32, &kFinite32}, {Dtype::f16, &kFinite16}, {Dtype::bf16, &kFiniteB16}}) {
    for (const bool values : {false, true}) {
      World w(spec_for("f32", dtype, kOlder, q_len, numbers->size()));
      for (std::size_t i = 0; i < numbers->size(); ++i) {
        Qkv& x = w.qkv[i];
        for (std::int64_t row = 0; row < q_len * kHeads * kGroup; ++row)
          x.q[element_of(row, 1, 0)] = row % 3 == 0 ? -0x1p-20f : 0x1p-20f;
        (values ? x.v : x.k)[element_of(kOlder + kAt, kHeads, kHead)] = value_of(dtype, (*numbers)[i]);
      }
      for (const std::string& isa : available_isas()) expect_rows(w, with_isa(isa), *numbers);
    }
  }
}

// The largest floats in queries, over keys that are small there; all keys are the queries' own.
TEST_P(Numbers, FiniteQueriesAreNumbers) {
  const std::int64_t q_len = GetParam();
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    World w(spec_for("f32", dtype, 0, q_len, kFinite32.size()));
    for (std::size_t i = 0; i < kFinite32.size(); ++i) {
      Qkv& x = w.qkv[i];
      for (std::int64_t t = 0; t < q_len * kHeads; ++t)
        x.k[element_of(t, 1, 0)] = static_cast<float>(1 + t % 5) * (t % 2 == 0 ? -0x1p-20f : 0x1p-20f);
      x.q[element_of(kAt, kHeads * kGroup, 2)] = from_bits(kFinite32[i]);
    }
    for (const std::string& isa : available_isas()) expect_rows(w, with_isa(isa), kFinite32);
  }
}

// The same over encoded keys, in whose basis a query of 2^126 and small numbers is large everywhere.
TEST_P(Numbers, FiniteQueriesOfEncodedKeysAreNumbers) {
  const std::int64_t q_len = GetParam();
  const std::vector<std::uint32_t> numbers = {0x7E800000, 0xFE800000, 0x7E400000, 0x7E000000, 0x7D000000};
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8"}) {
    WorldSpec spec = spec_for(format, Dtype::f32, kOlder, q_len, numbers.size());
    spec.sink_pages = 0;
    World w(spec);
    SCOPED_TRACE(format);
    for (const std::string& isa : available_isas()) {
      // A matrix unit adds up products with levels, and scales make them small afterwards.
      const float factor = isa == "amx" || isa == "emulated" ? 0x1p-10f : 1.0f;
      for (std::size_t i = 0; i < numbers.size(); ++i)
        w.qkv[i].q[element_of(kAt, kHeads * kGroup, 2)] = from_bits(numbers[i]) * factor;
      AttentionOptions options;
      options.isa = isa;
      expect_rows(w, options, numbers);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Queries, Numbers, testing::Values(3, 12));  // 6 and 24 rows of a kv head

// NaN of any payload and plus infinity in an additive mask make NaN of the row; minus infinity hides.
TEST(Numbers, AMaskThatIsNotANumberMakesNaNOfItsRow) {
  for (const auto& [dtype, numbers] :
       {std::pair{Dtype::f32, &kNotFinite32}, {Dtype::f16, &kNotFinite16}, {Dtype::bf16, &kNotFiniteB16}}) {
    const auto rows = static_cast<std::int64_t>(numbers->size());
    for (const std::int64_t kv_len : {std::int64_t{40}, std::int64_t{130}}) {
      const World w(spec_of("tq4", "tq4", {{kv_len, rows}}));
      OwnedMask mask = make_mask(dtype, {1, 1, rows, kv_len}, [](auto...) { return 0.0f; });
      const std::size_t bytes = dtype_size(dtype);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto at = static_cast<std::size_t>(i * kv_len + 33 + i % 3);
        std::memcpy(mask.bytes.data() + at * bytes, &(*numbers)[static_cast<std::size_t>(i)], bytes);
      }
      for (const std::string& isa : available_isas()) {
        AttentionOptions options = with_mask(mask);
        options.isa = isa;
        const Attended got = w.attend(options);
        for (std::size_t row = 0; row < got.lse.size(); ++row) {
          const float number = value_of(dtype, (*numbers)[row / 4]);
          EXPECT_EQ(std::isnan(got.lse[row]), number != -INFINITY) << isa << " " << dtype_name(dtype) << " row " << row;
          EXPECT_EQ(std::isnan(got.out[row * kHeadDim]), number != -INFINITY) << isa << " row " << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::test
