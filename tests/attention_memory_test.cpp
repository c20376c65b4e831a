// What attention reads and writes: strides, alignment, dtypes, guard pages behind every buffer, NaN around every
// tensor.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "support/guard.hpp"
#include "support/half.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

// Tails are where overruns live.
struct Point {
  const char* format;
  int head_dim;
};

WorldSpec spec_of(const Point& point, std::vector<Lengths> sequences) {
  const std::string k = point.format, v = k == "tq6" ? "tq4" : k;
  WorldSpec spec;
  spec.head_dim = point.head_dim;
  spec.k = k;
  spec.v = v;
  spec.sequences = std::move(sequences);
  return spec;
}

Plan plan_of(const World& world, AttentionOptions options = {}) {
  return plan(world.cache, std::span<const SequenceId>(world.ids), world.options(std::move(options))).value();
}

std::size_t index_of(const std::array<std::int64_t, 3>& stride, std::int64_t row, std::int64_t head, std::int64_t d) {
  return static_cast<std::size_t>(row * stride[0] + head * stride[1] + d * stride[2]);
}

class MemoryOf : public testing::TestWithParam<Point> {
 protected:
  [[nodiscard]] World world(std::int64_t q_len = 5) const {
    return World(spec_of(GetParam(), {{200, q_len}, {70, q_len}}));
  }
  const std::int64_t dim_ = GetParam().head_dim;
};

TEST_P(MemoryOf, StridedQueriesAndOutputs) {
  const World w = world();
  const Plan planned = plan_of(w);
  const std::vector<float> q = w.queries();
  const std::int64_t rows = w.total_queries();
  const std::int64_t heads = w.q_heads();
  const Attended expected = w.attend();
  const std::array<std::int64_t, 3> layouts[] = {
      {heads * (dim_ + 3) + 11, dim_ + 3, 1},  // padding after each head and each token
      {dim_, rows * dim_ + 7, 1},              // heads outermost
  };
  for (const auto& stride : layouts) {
    const std::size_t n = index_of(stride, rows - 1, heads - 1, dim_ - 1) + 1;
    std::vector<float> strided_q(n, NAN), out(n, -77.0f);
    std::vector<bool> written(n, false);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dim_; ++d) {
          strided_q[index_of(stride, r, h, d)] = q[static_cast<std::size_t>((r * heads + h) * dim_ + d)];
        }
      }
    }
    run(planned, 0, {strided_q.data(), Dtype::f32, {rows, heads, dim_}, stride},
        {out.data(), Dtype::f32, {rows, heads, dim_}, stride})
        .value();
    std::vector<float> got;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dim_; ++d) {
          got.push_back(out[index_of(stride, r, h, d)]);
          written[index_of(stride, r, h, d)] = true;
        }
      }
    }
    EXPECT_TRUE(same_bits(expected.out, got, w.out_shape())) << "stride " << stride[0] << " " << stride[1];
    for (std::size_t i = 0; i < n; ++i) {
      if (written[i]) continue;
      ASSERT_EQ(out[i], -77.0f) << "padding overwritten at " << i;
    }
  }
}

TEST_P(MemoryOf, HalfQueriesAndOutputs) {
  for (const Dtype q_dtype : {Dtype::f16, Dtype::bf16}) {
    const World w = world();
    const Plan planned = plan_of(w);
    std::vector<float> q = w.queries();
    const std::vector<std::byte> packed = pack_as(q_dtype, q);
    for (float& x : q) x = rounded(x, q_dtype);
    const auto as_f32 = try_attend(w.cache, w.ids, w.options(), q).value();
    const std::int64_t rows = w.total_queries();
    for (const Dtype out_dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      std::vector<std::byte> out(q.size() * dtype_size(out_dtype), std::byte{0xff});
      run(planned, 0, TensorView::contiguous(packed.data(), q_dtype, rows, w.q_heads(), dim_),
          MutableTensorView::contiguous(out.data(), out_dtype, rows, w.q_heads(), dim_))
          .value();
      // Widening q is exact and rounding the result is to nearest even, so not a bit is open.
      std::vector<float> got(q.size()), expected(q.size());
      for (std::size_t i = 0; i < q.size(); ++i) {
        got[i] = load_as(out_dtype, out.data(), i);
        expected[i] = rounded(as_f32.out[i], out_dtype);
      }
      EXPECT_TRUE(same_bits(expected, got, w.out_shape())) << dtype_name(q_dtype) << " to " << dtype_name(out_dtype);
    }
  }
}

TEST_P(MemoryOf, AlignedToTheElementOnly) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16}) {
    const World w = world();
    const Plan planned = plan_of(w);
    const std::vector<float> q = w.queries();
    const std::int64_t rows = w.total_queries();
    const std::size_t size = dtype_size(dtype);
    const std::vector<std::byte> packed = pack_as(dtype, q);
    std::vector<std::byte> reference;
    for (std::size_t shift = 0; shift < 64; shift += shift < 8 ? size : 12) {
      alignas(64) static std::byte q_room[1 << 16];
      alignas(64) static std::byte out_room[1 << 16];
      ASSERT_LT(packed.size() + 64, sizeof q_room);
      std::memcpy(q_room + shift, packed.data(), packed.size());
      run(planned, 0, TensorView::contiguous(q_room + shift, dtype, rows, w.q_heads(), dim_),
          MutableTensorView::contiguous(out_room + shift, dtype, rows, w.q_heads(), dim_))
          .value();
      const std::vector<std::byte> out(out_room + shift, out_room + shift + packed.size());
      if (shift == 0) reference = out;
      EXPECT_TRUE(out == reference) << dtype_name(dtype) << " shifted by " << shift << " bytes";
    }
  }
}

/// A read-only copy that ends at an inaccessible page.
template <class T>
std::unique_ptr<GuardBuffer> guarded(const std::vector<T>& values) {
  auto buffer = std::make_unique<GuardBuffer>(values.size() * sizeof(T));
  std::memcpy(buffer->data(), values.data(), buffer->size());
  buffer->make_read_only();
  return buffer;
}

TEST_P(MemoryOf, GuardPagesBehindEveryBuffer) {
  for (const std::int64_t kv_len : {1, 63, 64, 65, 200}) {
    const std::int64_t q_len = std::min<std::int64_t>(kv_len, 5);
    const WorldSpec spec = spec_of(GetParam(), {{kv_len, q_len}});
    const World plain(spec);
    CacheConfig config = plain.cache.config();
    Cache cache = Cache::create(config).value();
    const SequenceId id = cache.add_sequence();
    const auto k = guarded(plain.qkv[0].k);
    const auto v = guarded(plain.qkv[0].v);
    cache
        .append(id, 0, TensorView::contiguous(k->data(), Dtype::f32, kv_len, spec.kv_heads, dim_),
                TensorView::contiguous(v->data(), Dtype::f32, kv_len, spec.kv_heads, dim_))
        .value();

    const OwnedMask mask =
        make_mask(Dtype::f16, {1, plain.q_heads(), q_len, kv_len},
                  [](auto, auto h, auto q, auto key) { return static_cast<float>((h + q + key) % 7) / 4; });
    const auto mask_bytes = guarded(mask.bytes);
    AttentionOptions options = with_mask(mask, Mask::causal());
    options.alibi_slopes = {0.1f, 0.2f, 0.0f, 0.05f};
    const std::vector<float> sinks = {0.5f, 0.0f, -1.0f, 2.0f};
    const Attended expected = plain.attend(options, sinks);

    options = plain.options(options);
    options.mask.tensor.data = mask_bytes->data();
    const Plan planned = plan(cache, {id}, options).value();
    const auto q = guarded(plain.queries());
    const auto sink_buffer = guarded(sinks);
    const GuardBuffer out(q->size());
    const GuardBuffer lse(static_cast<std::size_t>(q_len * plain.q_heads()) * sizeof(float));
    const std::size_t bytes = planned.workspace_bytes();
    const GuardBuffer workspace(bytes, (64 - bytes % 64) % 64);
    RunOptions run_options;
    run_options.lse = reinterpret_cast<float*>(lse.data());
    run_options.sink_logits = reinterpret_cast<const float*>(sink_buffer->data());
    run_options.workspace = {workspace.data(), bytes};
    run(planned, 0, TensorView::contiguous(q->data(), Dtype::f32, q_len, plain.q_heads(), dim_),
        MutableTensorView::contiguous(out.data(), Dtype::f32, q_len, plain.q_heads(), dim_), run_options)
        .value();
    const std::span<const float> got(reinterpret_cast<const float*>(out.data()), expected.out.size());
    const std::span<const float> got_lse(reinterpret_cast<const float*>(lse.data()), expected.lse.size());
    EXPECT_TRUE(same_bits(expected.out, got)) << kv_len;
    EXPECT_TRUE(same_bits(expected.lse, got_lse)) << kv_len;
    EXPECT_TRUE(out.padding_untouched() && lse.padding_untouched() && workspace.padding_untouched()) << kv_len;
  }
}

TEST_P(MemoryOf, StridedKeysAndValuesAmongNaN) {
  const World w = world();
  const std::int64_t kv_len = 200;
  const std::int64_t heads = w.spec.kv_heads;
  Cache cache = Cache::create(w.cache.config()).value();
  const SequenceId id = cache.add_sequence();
  const std::array<std::int64_t, 3> stride = {dim_ + 5, kv_len * (dim_ + 5) + 9, 1};
  std::vector<float> k(index_of(stride, kv_len - 1, heads - 1, dim_ - 1) + 1, NAN);
  std::vector<float> v = k;
  for (std::int64_t t = 0; t < kv_len; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t d = 0; d < dim_; ++d) {
        const auto from = static_cast<std::size_t>((t * heads + h) * dim_ + d);
        k[index_of(stride, t, h, d)] = w.qkv[0].k[from];
        v[index_of(stride, t, h, d)] = w.qkv[0].v[from];
      }
    }
  }
  cache
      .append(id, 0, {k.data(), Dtype::f32, {kv_len, heads, dim_}, stride},
              {v.data(), Dtype::f32, {kv_len, heads, dim_}, stride})
      .value();
  AttentionOptions options;
  options.q_heads = w.q_heads();
  options.q_len = 5;
  const Attended got = try_attend(cache, {id}, options, w.qkv[0].q).value();
  const Attended expected = try_attend(w.cache, {w.ids[0]}, options, w.qkv[0].q).value();
  EXPECT_TRUE(same_bits(expected.out, got.out));
}

TEST_P(MemoryOf, StalePageContentsDoNotMatter) {
  // Pages that once held the largest values are used again, and a long tail is truncated: what lies past the length
  // must not reach the result, not even as 0 times infinity.
  const World w = world();
  for (const float stale : {65504.0f, -65504.0f}) {
    WorldSpec spec = w.spec;
    Cache cache = Cache::create(w.cache.config()).value();
    Qkv loud = w.qkv[0];
    std::fill(loud.k.begin(), loud.k.end(), stale);
    std::fill(loud.v.begin(), loud.v.end(), stale);
    for (int i = 0; i < 3; ++i) {
      const SequenceId old = cache.add_sequence();
      append_rows(cache, old, loud, 0, 200).value();
      cache.remove(old).value();
    }
    std::vector<SequenceId> ids;
    for (std::size_t i = 0; i < 2; ++i) {
      const std::int64_t kv_len = spec.sequences[i].kv_len;
      ids.push_back(cache.add_sequence());
      append_rows(cache, ids[i], w.qkv[i], 0, kv_len).value();
      append_rows(cache, ids[i], loud, 0, 30).value();
      cache.truncate(ids[i], kv_len).value();
    }
    const Attended got = try_attend(cache, ids, w.options(), w.queries()).value();
    EXPECT_TRUE(same_bits(w.attend().out, got.out, w.out_shape())) << stale;
  }
}

// 80 is stored as it is and no multiple of a vector register; 77 and 5 are stored as 80 and 32.
INSTANTIATE_TEST_SUITE_P(Memory, MemoryOf, testing::ValuesIn([] {
                           std::vector<Point> points;
                           for (const char* format : {"f32", "bf16", "fp8", "tq3", "tq6"}) {
                             for (const int head_dim : {80, 77, 5}) points.push_back({format, head_dim});
                           }
                           return points;
                         }()),
                         [](const auto& i) {
                           return std::string(i.param.format) + "_" + std::to_string(i.param.head_dim);
                         });

}  // namespace
}  // namespace kvant::test
