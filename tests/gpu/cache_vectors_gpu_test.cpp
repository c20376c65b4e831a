// Single vectors in a cache on a real device against those in host memory: the same bytes, whatever their values,
// dtypes, strides and alignment; what is not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codec/store.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "gpu/cache_configs.hpp"
#include "gpu/gpu_formats.hpp"
#include "gpu/gpu_world.hpp"
#include "support/draw.hpp"

namespace kvant::test {
namespace {

// Rows as they are, appended in one step to a cache on each side; compares all bytes, which must be full pages' or
// fields'.
struct Both {
  TestStream stream;
  std::unique_ptr<CacheImpl> host, device;
  SequenceId id{};

  explicit Both(const CacheConfig& c) {
    device = CacheImpl::create(c).value();
    CacheConfig on_host = c;
    on_host.device = {};
    if (!on_host.exact) on_host.exact = device->config().exact.value_or(Dtype::bf16);
    on_host.k_centre = device->config().k_centre;  // which may be chosen; so may the next
    on_host.v_centre = device->config().v_centre;
    host = CacheImpl::create(on_host).value();
    id = device->add_sequence();
    EXPECT_EQ(host->add_sequence(), id);
  }
  std::vector<std::byte> block(core::Pool pool, std::int32_t slot, int head) {
    std::vector<std::byte> bytes(host->layout(pool).block_bytes);
    device->store().load(pool, slot, 0, head, bytes.data(), stream.handle()).value();
    return bytes;
  }
  // Both caches' slots are numbered alike after the same steps, and nothing but these rows was ever stored.
  void compare(const std::string& what) {
    const auto view = device->view(id).value();
    const auto expected = host->view(id).value();
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      const bool exact = host->reads_exact(expected, static_cast<std::int64_t>(p));
      const core::Pool pool = exact ? core::Pool::exact : core::Pool::encoded;
      for (int head = 0; head < host->config().kv_heads; ++head) {
        const auto mine = block(pool, exact ? view.pages[p].exact : view.pages[p].encoded, head);
        const std::byte* other =
            host->block(pool, exact ? expected.pages[p].exact : expected.pages[p].encoded, 0, head);
        const auto differs = std::mismatch(mine.begin(), mine.end(), other).first - mine.begin();
        ASSERT_EQ(differs, static_cast<std::ptrdiff_t>(mine.size())) << what << ", page " << p << ", head " << head;
      }
    }
  }
};

// Rows that searches, roundings and packings may meet: zeros, one value, equal ones, heavy tails, outliers, subnormals,
// the largest numbers, ties of all kinds (small integers).
std::vector<float> odd_rows(int rows, int head_dim) {
  testing_support::Draw draw(5);
  std::vector<float> all;
  for (int row = 0; row < rows; ++row) {
    std::vector<float> x(static_cast<std::size_t>(head_dim), 0.0f);
    const auto at = static_cast<std::size_t>(row * 37 % head_dim);
    switch (row % 11) {
      case 0: break;
      case 1: x[at] = -3.5f; break;
      case 2: std::fill(x.begin(), x.end(), row % 2 == 0 ? 1.0f : -0.75f); break;
      case 3: x = draw.cauchy(head_dim); break;
      case 4: x = draw.loud(head_dim); break;
      case 5:
        for (float& f : x) f = static_cast<float>(static_cast<int>(draw.bits() % 17) - 8);
        break;
      case 6:
        for (float& f : x) f = draw.normal() * 0x1p-140f;
        break;
      case 7:
        for (float& f : x) f = draw.normal() * 0x1p-41f;
        break;
      case 8:
        for (float& f : x) f = draw.normal() * 20000.0f;
        break;
      case 9:
        x = draw.gaussian(head_dim);
        for (std::size_t i = 0; i < x.size(); i += 2) x[i] *= 0x1p-100f;
        break;
      default: x = draw.log_normal(head_dim);
    }
    for (float& f : x) f = std::clamp(f, -65504.0f, 65504.0f);
    all.insert(all.end(), x.begin(), x.end());
  }
  return all;
}

TEST(CacheGpuVectors, OddOnesHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16"}) {
    for (const int d : kHeadDims) {
      for (const BasisKind basis : {BasisKind::automatic, BasisKind::hadamard, BasisKind::none}) {
        if (basis == BasisKind::hadamard && format[1] != 'p') continue;  // only fp8 has another default
        CacheConfig c = in_place(format, d);
        c.k_basis = c.v_basis = basis;
        Both both(c);
        const std::vector<float> x = odd_rows(192 * 2, d);
        const DeviceRows rows(x, Dtype::f32, 192, 2, d);
        const TensorView on_host = TensorView::of(x.data(), 192, 2, d);
        const Status expected = both.host->append(both.id, 0, on_host, on_host);
        ASSERT_TRUE(expected.ok()) << expected.message();
        const Status status = both.device->append(both.id, 0, rows.view, rows.view, both.stream.handle());
        ASSERT_TRUE(status.ok()) << status.message();
        both.compare(fmt::format("{}, head_dim {}, basis {}", format, d, static_cast<int>(basis)));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The same rows in pages with a centre, which leave the tail one by one, and in long steps.
TEST(CacheGpuVectors, OddOnesAroundACentreHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"}) {
    for (const int d : kHeadDims) {
      for (const std::int64_t step : {704, 64, 37}) {
        CacheConfig c = config(format, format, d, 0, 1);
        c.layers = 1;
        c.k_centre = KeyCentre::page;
        Both both(c);
        const std::int64_t rows = 704;
        const std::vector<float> x = odd_rows(static_cast<int>(rows) * c.kv_heads, d);
        for (std::int64_t begin = 0; begin < rows; begin += step) {
          const std::int64_t count = std::min(step, rows - begin), width = std::int64_t{c.kv_heads} * d;
          const auto part =
              std::span(x).subspan(static_cast<std::size_t>(begin * width), static_cast<std::size_t>(count * width));
          const DeviceRows on_device(part, Dtype::f32, count, c.kv_heads, d);
          const TensorView on_host = TensorView::of(part.data(), count, c.kv_heads, d);
          both.host->append(both.id, 0, on_host, on_host).value();
          both.device->append(both.id, 0, on_device.view, on_device.view, both.stream.handle()).value();
          both.stream.wait();  // the rows go
        }
        both.compare(fmt::format("{}, head_dim {}, steps of {}", format, d, step));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A block has several heads of a page, from any head on: there are many pages and heads.
TEST(CacheGpuVectors, ManyHeadsAroundACentreHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  constexpr Formats kOf[] = {{"tq4", "tq4"}, {"tq6", "tq4"}, {"fp8", "fp8"}};
  constexpr std::int64_t kTokens = 120 * kPageTokens + 30;
  for (const Formats& pair : kOf) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
      const int d = dtype == Dtype::f16 ? 64 : 128;
      CacheConfig c = config(pair.k, pair.v, d, 1, 1);
      c.layers = 1;
      c.kv_heads = 13;
      c.capacity_tokens = 2 * kTokens / kPageTokens * kPageTokens;
      c.exact = dtype == Dtype::f16 ? dtype : Dtype::bf16;
      c.k_centre = KeyCentre::page;
      Both both(c);
      testing_support::Draw draw(23);
      const std::vector<float> x = draw.gaussian(static_cast<int>(kTokens) * c.kv_heads * d);
      const std::vector<std::byte> packed = pack_as(dtype, x);
      const DeviceRows rows(x, dtype, kTokens, c.kv_heads, d);
      const Stream stream = both.stream.handle();
      // The second step ends the last page of the first, whose rows are then those of two steps.
      for (const auto& [begin, count] : {std::pair(std::int64_t{0}, kTokens - 70), {kTokens - 70, std::int64_t{70}}}) {
        const TensorView all = TensorView::contiguous(packed.data(), dtype, kTokens, c.kv_heads, d);
        const auto part = [&, begin = begin, count = count](TensorView view) {
          view.data = static_cast<const std::byte*>(view.data) +
                      static_cast<std::size_t>(begin * view.stride[0]) * dtype_size(dtype);
          view.shape[0] = count;
          return view;
        };
        both.host->append(both.id, 0, part(all), part(all)).value();
        both.device->append(both.id, 0, part(rows.view), part(rows.view), stream).value();
      }
      both.compare(fmt::format("{}/{}, {}", pair.k, pair.v, dtype_name(dtype)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CacheGpuVectors, StridesAndAlignmentDoNotMatter) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kTokens = 150;
  for (const int tails : {0, 1}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const int d : {64, 96, 512}) {
        CacheConfig c = config("tq4", "tq6", d, 0, tails);
        c.layers = 1;
        Both both(c);
        testing_support::Draw draw(11);
        // Keys by token with gaps, values by head: [heads][tokens][D]; both begin at an odd element.
        const std::int64_t gap = 2 * d + 3;
        const auto elements = static_cast<std::size_t>(1 + kTokens * gap);
        const std::vector<std::byte> bytes = pack_as(dtype, draw.gaussian(static_cast<int>(elements)));
        const auto view = [&](const std::byte* data, bool by_head) {
          TensorView t{data + dtype_size(dtype), dtype, {kTokens, 2, d}, {gap, d + 1, 1}};
          if (by_head) t.stride = {d, kTokens * d, 1};
          return t;
        };
        ASSERT_TRUE(both.host->append(both.id, 0, view(bytes.data(), false), view(bytes.data(), true)).ok());
        const DeviceBuffer buffer = DeviceBuffer::of(std::span<const std::byte>(bytes));
        ASSERT_TRUE(
            both.device->append(both.id, 0, view(buffer.data(), false), view(buffer.data(), true), both.stream.handle())
                .ok());
        both.compare(fmt::format("head_dim {}, {}, tails {}", d, dtype_name(dtype), tails));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// bf16 rounds 65504 to 65536, and f16 has no more than 65504.
TEST(CacheGpuVectors, TheLargestValuesHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  constexpr float kLargest[] = {65504.0f, 65505.0f, -65519.0f, 65520.0f, -65535.0f, 65536.0f, -65536.0f};
  for (const char* format : {"tq4", "tq8", "fp8", "f16", "bf16", "f32", "lut8"}) {
    for (const std::optional<Dtype> exact : {std::optional<Dtype>(), {Dtype::f16}, {Dtype::bf16}, {Dtype::f32}}) {
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        const int tails = exact ? 1 : 0;
        CacheConfig c = config(format, format, 128, 0, tails);
        c.layers = 1;
        c.exact = exact;
        Both both(c);
        constexpr std::int64_t kTokens = 150;
        testing_support::Draw draw(17);
        std::vector<float> x = draw.gaussian(static_cast<int>(kTokens * 2 * 128));
        for (std::size_t i = 0; i < x.size(); i += 301) x[i] = kLargest[i / 301 % std::size(kLargest)];
        const std::vector<std::byte> packed = pack_as(dtype, x);
        const DeviceRows rows(x, dtype, kTokens, 2, 128);
        const TensorView on_host = TensorView::contiguous(packed.data(), dtype, kTokens, 2, 128);
        const Stream stream = both.stream.handle();
        both.host->append(both.id, 0, on_host, on_host).value();
        both.device->append(both.id, 0, rows.view, rows.view, stream).value();
        EXPECT_FALSE(both.device->take_non_finite(stream).value());
        const std::string what =
            fmt::format("{}, exact {}, from {}", format, exact ? dtype_name(*exact) : "-", dtype_name(dtype));
        both.compare(what);
        if (HasFatalFailure()) return;
        // The next larger ones are refused there, and reported here.
        const float beyond = dtype == Dtype::f32 ? 65536.0078125f : 66048.0f;
        const std::vector<float> one(2 * 128, beyond);
        const DeviceRows too_large(one, dtype, 1, 2, 128);
        both.device->append(both.id, 0, too_large.view, too_large.view, stream).value();
        EXPECT_TRUE(both.device->take_non_finite(stream).value()) << what;
      }
    }
  }
}

TEST(CacheGpuVectors, AStrideOfZeroRepeats) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq4", "bf16", "f32"}) {
    for (const int tails : {0, 1}) {
      CacheConfig c = config(format, format, 128, 0, tails);
      c.layers = 1;
      Both both(c);
      testing_support::Draw draw(19);
      const std::vector<float> x = draw.gaussian(128);
      const DeviceRows row(x, Dtype::f32, 1, 1, 128);
      TensorView view = row.view;
      view.shape = {100, 2, 128};
      view.stride = {0, 0, 1};
      TensorView on_host = view;
      on_host.data = x.data();
      both.host->append(both.id, 0, on_host, on_host).value();
      both.device->append(both.id, 0, view, view, both.stream.handle()).value();
      both.compare(fmt::format("{}, tails {}", format, tails));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CacheGpuVectors, WhatIsNotFiniteHasNanScalesAndIsTold) {
  SKIP_WITHOUT_DEVICE();
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -70000.0f};
  for (const char* format : {"tq2", "tq4", "tq6", "tq8", "fp8"}) {
    for (const int tails : {0, 1}) {
      for (const float bad : kBad) {
        CacheConfig c = in_place(format, 256);
        c.tail_pages = tails;
        Both both(c);
        const std::int64_t tokens = 200;  // the first page leaves a tail of one page
        testing_support::Draw draw(3);
        std::vector<float> x = draw.gaussian(static_cast<int>(tokens * 2 * 256));
        x[static_cast<std::size_t>((17 * 2 + 1) * 256 + 99)] = bad;  // token 17, head 1
        const DeviceRows rows(x, Dtype::f32, tokens, 2, 256);
        const Stream stream = both.stream.handle();
        ASSERT_TRUE(both.device->append(both.id, 0, rows.view, rows.view, stream).ok());
        EXPECT_TRUE(both.device->take_non_finite(stream).value());
        EXPECT_FALSE(both.device->take_non_finite(stream).value());
        const auto view = both.device->view(both.id).value();
        for (const int head : {0, 1}) {
          const auto block = both.block(core::Pool::encoded, view.pages[0].encoded, head);
          const codec::PageLayout& layout = both.host->layout(core::Pool::encoded);
          for (int token = 0; token < 64; ++token) {
            for (const codec::SideLayout* side : {&layout.k, &layout.v}) {
              for (int g = 0; g < side->groups; ++g) {
                const float scale = codec::get_scale(*side, block.data(), token, g);
                EXPECT_EQ(std::isnan(scale), token == 17 && head == 1)
                    << format << ", tails " << tails << ", token " << token << ", head " << head << ", " << bad;
              }
            }
          }
        }
      }
    }
  }
}

// Householder's reflection: not diagonal, and its own inverse.
TEST(CacheGpuVectors, ACalibratedBasisIsFollowedClosely) {
  SKIP_WITHOUT_DEVICE();
  for (const int d : kHeadDims) {
    CacheConfig c = config("tq8", "tq8", d, 0, 1);
    c.layers = 1;
    c.k_basis = c.v_basis = BasisKind::calibrated;
    testing_support::Draw draw(9);
    auto set = std::make_shared<BasisSet>();
    set->layers = 1;
    set->kv_heads = 2;
    set->head_dim = d;
    for (int i = 0; i < 4; ++i) {
      const std::vector<float> v = draw.gaussian(d);
      double norm = 0;
      for (const float f : v) norm += static_cast<double>(f) * static_cast<double>(f);
      CalibratedBasis b;
      b.center = draw.gaussian(d);
      for (int row = 0; row < d; ++row) {
        for (int column = 0; column < d; ++column) {
          const double product = static_cast<double>(v[static_cast<std::size_t>(row)]) *
                                 static_cast<double>(v[static_cast<std::size_t>(column)]);
          b.matrix.push_back(static_cast<float>((row == column ? 1.0 : 0.0) - 2.0 * product / norm));
        }
      }
      b.inverse = b.matrix;
      (i < 2 ? set->keys : set->values).push_back(b);
    }
    c.bases = set;
    Both both(c);
    constexpr std::int64_t kTokens = 300;
    const std::vector<float> x = draw.gaussian(static_cast<int>(kTokens * 2 * d));
    const TensorView on_host = TensorView::of(x.data(), kTokens, 2, d);
    const DeviceRows rows(x, Dtype::f32, kTokens, 2, d);
    const Stream stream = both.stream.handle();
    ASSERT_TRUE(both.host->append(both.id, 0, on_host, on_host).ok());
    ASSERT_TRUE(both.device->append(both.id, 0, rows.view, rows.view, stream).ok());
    std::vector<float> mine[2], other[2];
    const auto view = [&](std::vector<float>& out) {
      out.resize(x.size());
      return MutableTensorView::of(out.data(), kTokens, 2, d);
    };
    ASSERT_TRUE(both.device->read(both.id, 0, 0, kTokens, view(mine[0]), view(mine[1]), stream).ok());
    ASSERT_TRUE(both.host->read(both.id, 0, 0, kTokens, view(other[0]), view(other[1])).ok());
    // Sums in another order may move a coordinate to the next level, which is about 5/128 away.
    for (int side = 0; side < 2; ++side) {
      double error = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        error = std::max(error, std::fabs(static_cast<double>(mine[side][i]) - static_cast<double>(other[side][i])));
      }
      EXPECT_LT(error, 0.1) << "head_dim " << d << ", side " << side;
    }
  }
}

}  // namespace
}  // namespace kvant::test
