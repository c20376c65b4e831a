// kvant::merge_on_device against kvant::merge: the same rule, in f32.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gpu/gpu_world.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/tolerances.hpp"

#include "kvant/attention.hpp"

namespace kvant::test {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct Parts {
  std::int64_t rows;
  int dim;
  std::vector<std::vector<float>> out, lse;

  Parts(std::size_t count, std::int64_t of_rows, int head_dim) : rows(of_rows), dim(head_dim) {
    for (std::size_t i = 0; i < count; ++i) {
      out.push_back(gaussian_vector(static_cast<std::size_t>(rows * dim), 7 + 2 * i));
      lse.push_back(gaussian_vector(static_cast<std::size_t>(rows), 8 + 2 * i, 3));
    }
  }
  [[nodiscard]] std::vector<Partial> views() const {
    std::vector<Partial> v;
    for (std::size_t i = 0; i < out.size(); ++i) v.push_back({out[i].data(), lse[i].data()});
    return v;
  }
};

// `behind`: elements behind each row of the partials; the lse of a row is the first of them, where there are such.
void compare(const Parts& parts, std::int64_t behind) {
  const auto size = static_cast<std::size_t>(parts.rows * parts.dim), rows = static_cast<std::size_t>(parts.rows);
  std::vector<float> expected(size), expected_lse(rows);
  merge(parts.views(), parts.rows, parts.dim, expected.data(), expected_lse.data()).value();

  const std::int64_t stride = parts.dim + behind;
  std::vector<DeviceBuffer> buffers;
  std::vector<Partial> partials;
  for (std::size_t i = 0; i < parts.out.size(); ++i) {
    std::vector<float> packed(rows * static_cast<std::size_t>(stride), NAN);
    for (std::int64_t r = 0; r < parts.rows; ++r) {
      for (int d = 0; d < parts.dim; ++d)
        packed[static_cast<std::size_t>(r * stride + d)] = parts.out[i][static_cast<std::size_t>(r * parts.dim + d)];
      if (behind > 0)
        packed[static_cast<std::size_t>(r * stride + parts.dim)] = parts.lse[i][static_cast<std::size_t>(r)];
    }
    buffers.push_back(DeviceBuffer::of(std::span<const float>(packed)));
    const float* out = buffers.back().as<float>();
    const float* lse = out + parts.dim;
    if (behind == 0) {
      buffers.push_back(DeviceBuffer::of(std::span<const float>(parts.lse[i])));
      lse = buffers.back().as<float>();
    }
    partials.push_back({out, lse});
  }
  const DeviceBuffer out(size * 4), lse(rows * 4);
  const TestStream stream;
  PartialStrides strides;
  if (behind > 0) strides = {.out = stride, .lse = stride};
  for (int turn = 0; turn < 2; ++turn) {  // with and without lse
    merge_on_device(partials, parts.rows, parts.dim, out.as<float>(), turn == 0 ? lse.as<float>() : nullptr,
                    stream.handle(), strides)
        .value();
    stream.wait();
    EXPECT_TRUE(
        close(std::span<const float>(expected), out.download_as<float>(), tolerance::kFloat, {parts.rows, parts.dim}));
    if (turn > 0) continue;
    const std::vector<double> expected_lses(expected_lse.begin(), expected_lse.end());
    EXPECT_TRUE(lse_close(expected_lses, lse.download_as<float>(), tolerance::kLseFloat));
  }
}

TEST(GpuShort, Merge) {
  SKIP_WITHOUT_DEVICE();
  compare(Parts(2, 33, 128), 1);
  compare(Parts(3, 5, 80), 0);
}

TEST(GpuMerge, ManyPartsAndSizes) {
  SKIP_WITHOUT_DEVICE();
  for (const int dim : {1, 64, 192, 576}) {
    for (const std::size_t count : {1u, 2u, 64u}) {
      for (const std::int64_t behind : {0, 1, 7}) compare(Parts(count, 513, dim), behind);
    }
  }
}

TEST(GpuMerge, PartsWithoutKeysAddNothingWhateverTheyHold) {
  SKIP_WITHOUT_DEVICE();
  Parts parts(3, 4, 64);
  parts.lse[1] = {kMinusInf, kMinusInf, 1.0f, kMinusInf};
  parts.lse[0][1] = parts.lse[2][1] = kMinusInf;  // row 1 has no key anywhere
  for (int d = 0; d < 64; ++d) parts.out[1][static_cast<std::size_t>(d)] = NAN;
  compare(parts, 1);
}

TEST(GpuMerge, HostMemoryIsRefused) {
  SKIP_WITHOUT_DEVICE();
  std::vector<float> out(64), lse(1);
  const Partial one[] = {{out.data(), lse.data()}};
  const Status status = merge_on_device(one, 1, 64, out.data(), lse.data(), {});
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("not in device memory"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace kvant::test
