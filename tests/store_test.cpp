// Storing tokens: every instruction set against the plain codec, whole blocks bit for bit, over formats, head_dims,
// bases, token ranges, input types and values that sit on thresholds or next to zero.
#include "codec/store.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "codec/basis.hpp"
#include "codec/centre.hpp"
#include "core/backend.hpp"
#include "kvant/types.hpp"
#include "support/draw.hpp"
#include "support/guard.hpp"
#include "support/half.hpp"
#include "support/kernels.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

using core::Kernels;
using core::StoreJob;
using testing_support::Draw;
using testing_support::kernels_here;

std::vector<float> levels_of(Format f, Draw& draw) {
  std::vector<float> levels(std::size_t{1} << codec::format_bits(f));
  for (float& level : levels) level = draw.normal();
  std::sort(levels.begin(), levels.end());
  for (std::size_t i = 1; i < levels.size(); ++i)
    levels[i] = std::max(levels[i], std::nextafter(levels[i - 1], 100.0f));
  return levels;
}

// A page's worth of one kind of vectors.
enum class Kind { gauss, log_normal, cauchy, loud, grid, special, huge, tiny };
constexpr Kind kAllKinds[] = {Kind::gauss, Kind::log_normal, Kind::cauchy, Kind::loud,
                              Kind::grid,  Kind::special,    Kind::huge,   Kind::tiny};
// The kinds for the address sanitizer: values change what is computed, hardly what is read and written.
constexpr Kind kFewKinds[] = {Kind::gauss, Kind::special};

float special_value(Draw& draw) {
  constexpr float kValues[] = {0.0f,      -0.0f,      1.0f,     -1.0f,     0.5f,      65504.0f, -65504.0f, 1e-30f,
                               0x1p-149f, -0x1p-149f, 0x1p-80f, -0x1p-81f, 0x1p-126f, 0x1p31f,  -0x1p32f,  0x1p-40f};
  return kValues[draw.bits() % std::size(kValues)];
}

std::vector<float> draw_rows(Kind kind, int rows, int head_dim, Draw& draw) {
  std::vector<float> all;
  for (int t = 0; t < rows; ++t) {
    std::vector<float> x(static_cast<std::size_t>(head_dim));
    const float size = std::ldexp(1.0f, static_cast<int>(draw.bits() % 24) - 16);
    switch (kind) {
      case Kind::gauss: x = draw.gaussian(head_dim); break;
      case Kind::log_normal: x = draw.log_normal(head_dim); break;
      case Kind::cauchy: x = draw.cauchy(head_dim); break;
      case Kind::loud: x = draw.loud(head_dim); break;
      case Kind::grid:  // multiples of 1/4 up to 64: many products on thresholds and at ties
        for (float& v : x) v = static_cast<float>(static_cast<int>(draw.bits() % 513) - 256) * 0.25f;
        break;
      case Kind::special:
        for (float& v : x) v = draw.bits() % 4 == 0 ? special_value(draw) : draw.normal();
        if (t % 8 == 0) std::fill(x.begin(), x.end(), t % 16 == 0 ? 0.0f : -0.0f);
        if (t % 8 == 1) std::fill(x.begin(), x.end(), 1.0f);
        if (t % 8 == 2) x[draw.bits() % x.size()] = std::numeric_limits<float>::quiet_NaN();
        if (t % 8 == 3) x[draw.bits() % x.size()] = -std::numeric_limits<float>::infinity();
        if (t % 8 == 4) {  // one loud element among values whose products with the step vanish
          for (float& v : x) v = (draw.bits() & 1 ? 1.0f : -1.0f) * 0x1p-148f;
          x[draw.bits() % x.size()] = 60000.0f;
        }
        break;
      case Kind::huge:
        for (float& v : x) v = draw.normal() * std::ldexp(1.0f, 18 + static_cast<int>(draw.bits() % 13));
        break;
      case Kind::tiny:
        for (float& v : x) v = draw.normal() * std::ldexp(1.0f, -20 - 2 * (t % 64));
        break;
    }
    if (kind <= Kind::loud) {
      for (float& v : x) v *= size;
    }
    all.insert(all.end(), x.begin(), x.end());
  }
  return all;
}

std::vector<std::byte> noise(std::size_t n, Draw& draw) {
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(draw.bits() & 0xFF);
  return bytes;
}

struct Case {
  Format format;
  int head_dim;
  bool values;
  int groups = 1;
};

std::string name_of(const Kernels& k, const Case& c) {
  return std::string(k.name) + " " + format_info(c.format).name + " D=" + std::to_string(c.head_dim) +
         (c.values ? " values" : " keys");
}

// Values up to 65536 can be stored, and f16 has 65504 for those beyond it.
float within_f16(float x) {
  return std::abs(x) > 65504.0f && std::abs(x) <= 65536.0f ? std::copysign(65504.0f, x) : x;
}

// Rows as the codec takes them: converted, rounded, in their basis, token by token.
void store_plain(const StoreJob& job, bool values) {
  for (int i = 0; i < job.count; ++i) {
    std::vector<float> x(static_cast<std::size_t>(job.head_dim)), y(x.size());
    for (std::size_t j = 0; j < static_cast<std::size_t>(job.width); ++j) {
      const std::size_t at = static_cast<std::size_t>(i * job.row_stride) + j;
      switch (job.dtype) {
        case Dtype::f32: x[j] = static_cast<const float*>(job.rows)[at]; break;
        case Dtype::f16: x[j] = base::f16_to_f32(static_cast<const std::uint16_t*>(job.rows)[at]); break;
        default: x[j] = base::bf16_to_f32(static_cast<const std::uint16_t*>(job.rows)[at]);
      }
      if (job.rounding == Dtype::f16) x[j] = base::f16_to_f32(base::f32_to_f16(within_f16(x[j])));
      if (job.rounding == Dtype::bf16) x[j] = base::bf16_to_f32(base::f32_to_bf16(x[j]));
    }
    codec::to_basis(job.basis, job.head_dim, x.data(), y.data());
    const bool refused = job.centre != nullptr && codec::refuses_centre(y.data(), job.centre, job.head_dim);
    for (std::size_t j = 0; job.centre != nullptr && !refused && j < y.size(); ++j) y[j] -= job.centre[j];
    for (float& v : y) v = job.side->format == Format::f16 ? within_f16(v) : v;
    (values ? codec::store_row_v : codec::store_row_k)(*job.side, job.head_dim, job.block, job.first + i, y.data(),
                                                       job.levels);
    if (refused) codec::mark_refused(*job.side, job.block, job.first + i);
  }
}

// Stores with every ISA and with the codec into equal noise; true if all bytes agree.
void expect_same(const Case& c, StoreJob job, Draw& draw, const char* what) {
  const codec::PageLayout page = codec::page_layout(c.format, c.format, c.head_dim, c.groups);
  job.side = c.values ? &page.v : &page.k;
  job.head_dim = c.head_dim;
  if (job.width == 0) job.width = c.head_dim;
  const std::vector<std::byte> before = noise(page.block_bytes, draw);
  std::vector<std::byte> expected = before;
  job.block = expected.data();
  store_plain(job, c.values);
  for (const Kernels* k : kernels_here()) {
    std::vector<std::byte> block = before;
    job.block = block.data();
    (c.values ? k->store_v : k->store_k)(job);
    const auto differs = std::mismatch(block.begin(), block.end(), expected.begin());
    ASSERT_TRUE(differs.first == block.end())
        << name_of(*k, c) << ", " << what << ", tokens " << job.first << " + " << job.count << ": byte "
        << differs.first - block.begin() << " of " << block.size();
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const FormatInfo& f : formats()) {
    for (const int head_dim : supported_head_dims()) {
      for (const bool values : {false, true}) {
        cases.push_back({f.format, head_dim, values});
        if (codec::is_lut(f.format)) cases.push_back({f.format, head_dim, values, 2});
      }
    }
  }
  return cases;
}

TEST(Store, EveryFormatHeadDimAndKindOfValues) {
  Draw draw(1);
  const auto kinds = test::kAddressSanitizer ? std::span<const Kind>(kFewKinds) : std::span<const Kind>(kAllKinds);
  for (const Case& c : all_cases()) {
    const std::vector<float> levels = codec::is_lut(c.format) ? levels_of(c.format, draw) : std::vector<float>{};
    for (const Kind kind : kinds) {
      const std::vector<float> rows = draw_rows(kind, 20, c.head_dim, draw);
      for (const BasisKind basis : {BasisKind::none, BasisKind::hadamard}) {
        // A NaN that went through sums has any sign; coded formats write one NaN for all of them.
        if (kind == Kind::special && basis == BasisKind::hadamard && codec::is_dense(c.format)) continue;
        StoreJob job;
        job.first = static_cast<int>(draw.bits() % 44);
        job.count = 20;
        job.rows = rows.data();
        job.row_stride = c.head_dim;
        job.basis.kind = basis;
        job.levels = levels.data();
        expect_same(c, job, draw, basis == BasisKind::none ? "unrotated" : "rotated");
        if (c.values || !codec::takes_centre(c.format)) continue;
        // That of a row, so that some rows are nearer to it and some to zero.
        std::vector<float> centre(rows.begin() + 5 * c.head_dim, rows.begin() + 6 * c.head_dim);
        codec::to_basis(job.basis, c.head_dim, centre.data(), centre.data());
        codec::clean_mean(centre.data(), c.head_dim);
        job.centre = centre.data();
        expect_same(c, job, draw, "centred");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Store, EveryRangeOfTokens) {
  Draw draw(2);
  for (const FormatInfo& f : formats()) {
    for (const int head_dim : {80, 256}) {
      const std::vector<float> levels = codec::is_lut(f.format) ? levels_of(f.format, draw) : std::vector<float>{};
      const int stride = head_dim + 24;
      const std::vector<float> rows = draw.gaussian(stride * 64);
      for (const bool values : {false, true}) {
        for (int first = 0; first < 64; ++first) {
          for (const int count : {0, 1, 2, 3, 5, 8, 9, 17, 64}) {
            if (first + count > 64) continue;
            if (first > 18 && first < 54 && count > 3) continue;
            StoreJob job;
            job.first = first;
            job.count = count;
            job.rows = rows.data();
            job.row_stride = stride;
            job.basis.kind = BasisKind::hadamard;
            job.levels = levels.data();
            expect_same({f.format, head_dim, values}, job, draw, "ranges");
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Store, CalibratedBases) {
  Draw draw(3);
  for (const Case& c : all_cases()) {
    if (c.groups == 2 || c.head_dim > 320 || codec::is_dense(c.format)) continue;
    const std::vector<float> levels = codec::is_lut(c.format) ? levels_of(c.format, draw) : std::vector<float>{};
    const std::vector<float> rows = draw.loud(c.head_dim * 11);
    const std::vector<float> matrix = draw.gaussian(c.head_dim * c.head_dim), center = draw.gaussian(c.head_dim);
    StoreJob job;
    job.first = 13;
    job.count = 11;
    job.rows = rows.data();
    job.row_stride = c.head_dim;
    job.basis = {BasisKind::calibrated, center.data(), matrix.data(), nullptr};
    job.levels = levels.data();
    expect_same(c, job, draw, "calibrated");
    if (HasFatalFailure()) return;
  }
}

TEST(Store, InputTypesAndRounding) {
  Draw draw(4);
  for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::tq4, Format::tq6, Format::fp8}) {
    for (const int head_dim : {32, 112, 128}) {
      for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        for (const Dtype rounding : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
          for (const Kind kind : {Kind::gauss, Kind::special, Kind::tiny}) {
            const std::vector<float> wide = draw_rows(kind, 16, head_dim, draw);
            std::vector<std::uint16_t> narrow(wide.size());
            for (std::size_t i = 0; i < wide.size(); ++i) {
              narrow[i] = dtype == Dtype::f16 ? base::f32_to_f16(wide[i]) : base::f32_to_bf16(wide[i]);
            }
            StoreJob job;
            job.first = 5;
            job.count = 16;
            job.rows = dtype == Dtype::f32 ? static_cast<const void*>(wide.data()) : narrow.data();
            job.row_stride = head_dim;
            job.dtype = dtype;
            job.rounding = rounding;
            job.basis.kind = codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none;
            expect_same({format, head_dim, false}, job, draw, dtype_name(dtype));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Rows of fewer values than the block's vectors: zeros are stored behind them, and nothing behind a row is read. The
// last row ends at an inaccessible page, and NaN fills the space between rows.
TEST(Store, RowsAreStoredPadded) {
  Draw draw(7);
  constexpr int kTokens = 11;
  for (const Case& c : all_cases()) {
    const std::vector<float> levels = codec::is_lut(c.format) ? levels_of(c.format, draw) : std::vector<float>{};
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      const int width = 1 + static_cast<int>(draw.bits() % static_cast<unsigned>(c.head_dim));
      const int stride = width + static_cast<int>(draw.bits() % 3);
      const auto size = static_cast<std::int64_t>(dtype_size(dtype));
      const test::GuardBuffer rows(static_cast<std::size_t>(((kTokens - 1) * stride + width) * size));
      std::memset(rows.data(), 0xff, rows.size());
      for (int t = 0; t < kTokens; ++t) {
        for (int j = 0; j < width; ++j) {
          test::store_as(dtype, rows.data(), static_cast<std::size_t>(t * stride + j), draw.normal());
        }
      }
      rows.make_read_only();
      StoreJob job;
      job.first = static_cast<int>(draw.bits() % 53);
      job.count = kTokens;
      job.rows = rows.data();
      job.row_stride = stride;
      job.width = width;
      job.dtype = dtype;
      job.rounding = draw.bits() % 2 == 0 ? Dtype::bf16 : Dtype::f32;
      job.looks = true;
      job.basis.kind = codec::is_tq(c.format) ? BasisKind::hadamard : BasisKind::none;
      job.levels = levels.data();
      expect_same(c, job, draw, ("width " + std::to_string(width)).c_str());
      if (HasFatalFailure()) return;
    }
  }
}

// A job that looks refuses a value beyond 65536 in any place of any row, one that does not stores it; what comes next
// is a hint.
TEST(Store, RowsThatCannotBeStored) {
  Draw draw(6);
  const int head_dim = 112, count = 11;
  for (const Format format : {Format::f32, Format::f16, Format::tq2, Format::tq4, Format::tq8, Format::fp8}) {
    const codec::PageLayout page = codec::page_layout(format, format, head_dim, 1);
    std::vector<std::byte> block(page.block_bytes);
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const Dtype rounding : {Dtype::f32, Dtype::bf16}) {
        for (const BasisKind basis : {BasisKind::none, BasisKind::hadamard}) {
          for (const float bad : {65504.0f, -65536.0f, 65600.0f, -70000.0f, HUGE_VALF, NAN}) {
            std::vector<float> wide = draw.gaussian(head_dim * count);
            wide[draw.bits() % wide.size()] = bad;
            std::vector<std::uint16_t> narrow(wide.size());
            for (std::size_t i = 0; i < wide.size(); ++i) {
              narrow[i] = dtype == Dtype::f16 ? base::f32_to_f16(wide[i]) : base::f32_to_bf16(wide[i]);
            }
            StoreJob job;
            job.side = &page.k;
            job.head_dim = job.width = head_dim;
            job.block = block.data();
            job.first = 7;
            job.count = count;
            job.rows = dtype == Dtype::f32 ? static_cast<const void*>(wide.data()) : narrow.data();
            job.row_stride = head_dim;
            job.dtype = dtype;
            job.rounding = rounding;
            job.basis.kind = basis;
            job.next = {job.rows, job.row_stride, count, dtype};
            // bf16 makes 65536 of 65504, which passes, and of 65600; for f16 it is infinite.
            const bool storable = std::abs(bad) <= (dtype == Dtype::f32   ? 65536.0f
                                                    : dtype == Dtype::f16 ? 65504.0f
                                                                          : 65600.0f);
            for (const Kernels* k : kernels_here()) {
              job.looks = true;
              ASSERT_EQ(k->store_k(job), storable)
                  << name_of(*k, {format, head_dim, false}) << ' ' << dtype_name(dtype) << ' ' << bad;
              job.looks = false;
              ASSERT_TRUE(k->store_k(job));
            }
          }
        }
      }
    }
  }
}

// Long runs of ordinary vectors: scores that are nearly tied, scales at rounding boundaries.
TEST(Store, ThousandsOfVectors) {
  Draw draw(5);
  for (const FormatInfo& f : formats()) {
    if (codec::is_dense(f.format)) continue;
    const std::vector<float> levels = codec::is_lut(f.format) ? levels_of(f.format, draw) : std::vector<float>{};
    for (const int head_dim : {64, 128, 512}) {
      const int pages = codec::is_lut(f.format) ? 4 : 4096 / head_dim;
      for (int page = 0; page < pages; ++page) {
        const std::vector<float> rows = draw_rows(page % 2 == 0 ? Kind::gauss : Kind::loud, 64, head_dim, draw);
        StoreJob job;
        job.count = 64;
        job.rows = rows.data();
        job.row_stride = head_dim;
        job.basis.kind = BasisKind::hadamard;
        job.levels = levels.data();
        expect_same({f.format, head_dim, page % 2 == 1}, job, draw, "many");
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace kvant
