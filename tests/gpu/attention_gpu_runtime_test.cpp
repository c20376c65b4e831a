// Attention on a device: placement, determinism, sequences that change, graphs, streams, devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "cuda/runtime/runtime.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

// --- where things lie ------------------------------------------------------------------------------------------------

TEST(GpuPlacement, DtypesStridesAndAlignment) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq6"}) {
    for (const int head_dim : {64, 96, 512}) {
      WorldSpec spec = spec_of(format, {{300, 3}, {40, 3}});
      spec.head_dim = head_dim;
      const GpuWorld w(spec);
      for (const Dtype q : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        for (const Dtype out : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
          for (const Placement& p : {Placement{q, out, 0, 0, 0}, Placement{q, out, 0, 0, 1}, Placement{q, out, 7, 0, 0},
                                     Placement{q, out, 5, 3, 3}}) {
            EXPECT_TRUE(w.matches({}, {}, p))
                << format << ", D " << head_dim << ", q " << dtype_name(q) << ", out " << dtype_name(out)
                << ", padding " << p.token_padding << " " << p.head_padding << ", offset " << p.offset;
          }
        }
      }
    }
  }
}

// The kinds of kernels that serve any device.
AttentionOptions with_kernel(const char* kernel) {
  AttentionOptions o;
  o.kernel = kernel;
  return o;
}
constexpr const char* kKernels[] = {core::kDecodeKernels, core::kPrefillSm80, core::kGenericKernels};
// Mixed pairs have no prefill kernels, and those of kGenericFormats the generic kernel alone.
bool serves(const char* kernel, const Formats& f) {
  if (kernel == core::kGenericKernels) return true;
  for (const Formats& generic : kGenericFormats) {
    if (std::string(generic.k) == f.k && std::string(generic.v) == f.v) return false;
  }
  const auto is_coded = [](const std::string& format) { return format != "bf16" && format != "f16"; };
  return kernel == core::kDecodeKernels || is_coded(f.k) == is_coded(f.v);
}

// Rows of NaN were stored and truncated again: what lies behind the end of a page must never be multiplied.
TEST(GpuPoison, WhatWasTruncatedIsNotRead) {
  SKIP_WITHOUT_DEVICE();
  std::vector<Formats> formats = kFormats;
  formats.insert(formats.end(), std::begin(kGenericFormats), std::end(kGenericFormats));
  for (const Formats& f : formats) {
    for (const std::int64_t length : {1, 70, 190}) {
      for (const int ends : {0, 1}) {
        WorldSpec spec = spec_of(f.k, f.v, {{length, 1}});
        spec.sink_pages = spec.tail_pages = ends;
        GpuWorld w(spec);
        std::vector<const char*> kernels;
        std::vector<Attended> before;
        for (const char* kernel : kKernels) {
          if (!serves(kernel, f)) continue;
          kernels.push_back(kernel);
          before.push_back(w.attend(with_kernel(kernel)));
        }
        Qkv nan = w.host.qkv[0];
        const std::int64_t more = 64 - length % 64;
        nan.v.assign(static_cast<std::size_t>(more) * 2 * 64, NAN);
        nan.k.assign(nan.v.size(), length == 70 ? 1.0f : NAN);  // values alone are enough
        append_on_device(w.cache, w.ids[0], nan, 0, more, Dtype::bf16, w.stream);
        EXPECT_TRUE(w.cache.take_non_finite(w.stream.handle()).value());
        EXPECT_FALSE(w.cache.take_non_finite(w.stream.handle()).value());
        for (std::size_t i = 0; i < before.size(); ++i) {
          const Attended spoiled = w.attend(with_kernel(kernels[i]));
          EXPECT_TRUE(std::isnan(spoiled.out[0])) << name_of(f) << ", " << kernels[i];  // NaN goes in, NaN comes out
        }
        w.cache.truncate(w.ids[0], length).value();
        for (std::size_t i = 0; i < before.size(); ++i) {
          EXPECT_TRUE(same_bits(before[i].out, w.attend(with_kernel(kernels[i])).out))
              << name_of(f) << ", " << length << ", ends " << ends << ", " << kernels[i];
        }
      }
    }
  }
}

TEST(GpuPoison, ANonFiniteQuerySpoilsItsOwnRowOnly) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 5}) {
      for (const char* kernel : kKernels) {
        const AttentionOptions options = with_kernel(kernel);
        GpuWorld w(spec_of(format, {{800, q_len}}));
        const Attended expected = w.attend(options);
        const std::size_t row = static_cast<std::size_t>(q_len - 1) * 4 + 2;
        for (const float bad : {NAN, kInf}) {
          const float good = std::exchange(w.host.qkv[0].q[row * 64 + 17], bad);
          const Attended got = w.attend(options);
          w.host.qkv[0].q[row * 64 + 17] = good;
          for (std::size_t i = 0; i < got.out.size(); ++i) {
            const std::string where = fmt::format("{}, {}, q_len {}, query {} at {}", format, kernel, q_len, bad, i);
            if (i / 64 == row) {
              ASSERT_TRUE(std::isnan(got.out[i])) << where;
            } else {
              ASSERT_EQ(got.out[i], expected.out[i]) << where;
            }
          }
        }
      }
    }
  }
}

TEST(GpuDeterminism, TwentyRunsGiveTheSameBits) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : kFormats) {
    const GpuWorld w(spec_of(f.k, f.v, {{5000, 1}, {700, 1}, {130, 1}}));
    for (const char* kernel : kKernels) {
      if (!serves(kernel, f)) continue;
      const Attended first = w.attend(with_kernel(kernel));
      for (int i = 1; i < 20; ++i) {
        const Attended again = w.attend(with_kernel(kernel));
        ASSERT_TRUE(same_bits(first.out, again.out, w.host.out_shape()))
            << name_of(f) << ", " << kernel << ", run " << i;
        ASSERT_TRUE(same_bits(first.lse, again.lse)) << name_of(f) << ", " << kernel << ", run " << i;
      }
    }
  }
}

// --- sequences that change -------------------------------------------------------------------------------------------

TEST(GpuSequences, ForkTruncateAndGoOn) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    GpuWorld w(spec_of(format, {{300, 1}}));
    const Qkv extra = make_qkv({1, 200, 4, 2, 64}, Inputs::gauss, 99);
    const auto both = [&](auto&& act) {
      act(w.host.cache, w.host.ids, false);
      act(w.cache, w.ids, true);
    };
    both([&](Cache& cache, std::vector<SequenceId>& ids, bool on_device) {
      ids.push_back(cache.fork(ids[0]).value());
      const auto append = [&](SequenceId id, std::int64_t begin, std::int64_t end) {
        if (on_device) return append_on_device(cache, id, extra, begin, end, Dtype::bf16, w.stream);
        append_rows(cache, id, extra, begin, end, Dtype::bf16).value();
      };
      append(ids[1], 0, 100);               // the child goes its own way,
      cache.truncate(ids[0], 270).value();  // and so does the parent
      append(ids[0], 100, 130);
      cache.truncate(ids[1], 350).value();
      append(ids[1], 130, 200);
    });
    AttentionOptions o;
    o.q_heads = 4;
    const std::vector<float> q = gaussian_vector(2 * 4 * 64, 12);
    const Attended expected = try_attend(w.host.cache, w.host.ids, o, q).value();
    const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), o).value();
    const DeviceRows q_rows(q, Dtype::f32, 2, 4, 64);
    const DeviceBuffer out(q.size() * 4), workspace(planned.workspace_bytes());
    RunOptions options;
    options.stream = w.stream.handle();
    options.workspace = workspace.span();
    run(planned, 0, q_rows.view, MutableTensorView::of(out.as<float>(), 2, 4, 64), options).value();
    w.stream.wait();
    EXPECT_TRUE(close(std::span<const float>(expected.out), out.download_as<float>(), 2 * tolerance::kCoded)) << format;
  }
}

// --- graphs ----------------------------------------------------------------------------------------------------------

// A decoding step of a model with two layers and three sequences, recorded once and launched 200 times: lengths grow on
// the device, and every step is what the CPU computes.
void decode_by_graph(const std::string& k, const std::string& v, int head_dim, int steps, int check_every,
                     const char* kernel = core::kDecodeKernels) {
  constexpr int kLayers = 2, kKvHeads = 2, kGroup = 4, kSequences = 3;
  const std::int64_t starts[kSequences] = {1, 60, 500};
  WorldSpec spec = spec_of(k, v, {});
  spec.head_dim = head_dim;
  spec.exact = Dtype::bf16;
  CacheConfig config = device_config(spec);
  config.layers = kLayers;
  config.capacity_tokens = 8192;
  Cache cache = Cache::create(config).value();
  config.device = "";
  config.capacity_tokens = 0;
  Cache host = Cache::create(config).value();
  const TestStream stream;
  std::vector<SequenceId> ids, host_ids;
  for (const std::int64_t start : starts) {
    ids.push_back(cache.add_sequence());
    host_ids.push_back(host.add_sequence());
    for (int layer = 0; layer < kLayers; ++layer) {
      const Qkv x =
          make_qkv({1, start, 8, kKvHeads, head_dim}, Inputs::gauss, static_cast<std::uint64_t>(start + layer));
      append_on_device(cache, ids.back(), x, 0, start, Dtype::bf16, stream, layer);
      append_rows(host, host_ids.back(), x, 0, start, Dtype::bf16, layer).value();
    }
  }
  std::vector<Append> ahead, one, host_one;
  for (int i = 0; i < kSequences; ++i) {
    ahead.push_back({ids[static_cast<std::size_t>(i)], steps + 1});
    one.push_back({ids[static_cast<std::size_t>(i)], 1});
    host_one.push_back({host_ids[static_cast<std::size_t>(i)], 1});
  }
  cache.reserve_ahead(ahead, stream.handle()).value();

  AttentionOptions options;
  options.q_heads = kKvHeads * kGroup;
  const AttentionOptions on_any = options;
  options.kernel = kernel;
  const double allowed = 2 * (options.kernel == core::kDecodeKernels ? tolerance::kCoded : tolerance::kCudaPrefill);
  const Plan planned = plan(cache, std::span<const SequenceId>(ids), options).value();
  const std::size_t row_bytes = static_cast<std::size_t>(kSequences * kKvHeads * head_dim) * 2;
  const DeviceBuffer keys(row_bytes), values(row_bytes), q(row_bytes * kGroup), workspace(planned.workspace_bytes());
  std::vector<DeviceBuffer> out;
  for (int layer = 0; layer < kLayers; ++layer) out.emplace_back(row_bytes * kGroup * 2);
  const auto view = [&](const DeviceBuffer& b, int heads) {
    return TensorView::contiguous(b.data(), Dtype::bf16, kSequences, heads, head_dim);
  };
  const TestGraph graph(stream, [&] {
    cache.reserve(one, stream.handle()).value();
    RunOptions run_options;
    run_options.stream = stream.handle();
    run_options.workspace = workspace.span();
    for (int layer = 0; layer < kLayers; ++layer) {
      cache.write(ids, layer, view(keys, kKvHeads), view(values, kKvHeads), stream.handle()).value();
      run(planned, layer, view(q, kKvHeads * kGroup),
          MutableTensorView::of(out[static_cast<std::size_t>(layer)].as<float>(), kSequences, kKvHeads * kGroup,
                                head_dim),
          run_options)
          .value();
    }
  });

  for (int step = 0; step < steps; ++step) {
    const Qkv x = make_qkv({kSequences, kSequences, kKvHeads * kGroup, kKvHeads, head_dim}, Inputs::gauss,
                           10000 + static_cast<std::uint64_t>(step));
    const std::vector<std::byte> k_rows = pack_as(Dtype::bf16, x.k), v_rows = pack_as(Dtype::bf16, x.v);
    const std::vector<std::byte> q_rows = pack_as(Dtype::bf16, x.q);
    keys.upload(k_rows.data(), k_rows.size());
    values.upload(v_rows.data(), v_rows.size());
    q.upload(q_rows.data(), q_rows.size());
    if (step > 0) cache.advance(one).value();  // the recorded step itself was the first
    graph.launch(stream);

    host.reserve(host_one).value();
    for (int layer = 0; layer < kLayers; ++layer) {
      host.write(host_ids, layer, TensorView::contiguous(k_rows.data(), Dtype::bf16, kSequences, kKvHeads, head_dim),
                 TensorView::contiguous(v_rows.data(), Dtype::bf16, kSequences, kKvHeads, head_dim))
          .value();
    }
    // Always where a page is filled and where one leaves the tail.
    const std::int64_t length = starts[1] + step + 1;
    if (step % check_every != 0 && length % 64 > 1 && step + 1 != steps) continue;
    stream.wait();
    const Plan on_host = plan(host, std::span<const SequenceId>(host_ids), on_any).value();
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> expected(x.q.size());
      run(on_host, layer, TensorView::contiguous(q_rows.data(), Dtype::bf16, kSequences, kKvHeads * kGroup, head_dim),
          MutableTensorView::of(expected.data(), kSequences, kKvHeads * kGroup, head_dim))
          .value();
      ASSERT_TRUE(
          close(std::span<const float>(expected), out[static_cast<std::size_t>(layer)].download_as<float>(), allowed))
          << k << "/" << v << ", step " << step << ", layer " << layer;
    }
  }
  stream.wait();
  EXPECT_TRUE(workspace.padding_untouched());
  for (std::size_t i = 0; i < kSequences; ++i) {
    ASSERT_EQ(cache.length(ids[i]).value(), starts[i] + steps);
    const std::int64_t n = starts[i] + steps;
    std::vector<float> got(static_cast<std::size_t>(n * kKvHeads * head_dim)), expected(got.size());
    for (const bool is_value : {false, true}) {
      const auto read = [&](const Cache& c, SequenceId id, std::vector<float>& into, Stream s) {
        const MutableTensorView data = MutableTensorView::of(into.data(), n, kKvHeads, head_dim);
        MutableTensorView none = data;
        none.data = nullptr;
        c.read(id, 1, 0, n, is_value ? none : data, is_value ? data : none, s).value();
      };
      read(cache, ids[i], got, stream.handle());
      read(host, host_ids[i], expected, {});
      EXPECT_TRUE(same_bits(expected, got)) << k << "/" << v << ", sequence " << i << (is_value ? " values" : " keys");
    }
  }
}

TEST(GpuGraph, LengthsGrow) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair{"tq6", "tq4"}, {"tq4", "tq4"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq8", "tq4"}})
    decode_by_graph(k, v, 64, 200, 10);
  decode_by_graph("tq6", "tq4", 256, 200, 10);
  // Kernels of eight warps, chosen while lengths are short.
  decode_by_graph("tq6", "tq4", 128, 200, 10);
  decode_by_graph("tq4", "tq4", 512, 200, 10);
  for (const char* format : {"tq4", "bf16"}) decode_by_graph(format, format, 64, 200, 10, core::kPrefillSm80);
  // One sequence outgrows the workspace, and is left to other kernels.
  if (!why_no_sm90().empty()) return;
  for (const char* format : {"tq4", "bf16"}) decode_by_graph(format, format, 64, 200, 10, core::kPrefillUnpacked);
}

// A recorded run goes on when one of its sequences is cut to nothing: that one's rows are zeros.
TEST(GpuGraph, ASequenceLosesItsKeys) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4"}) {
    GpuWorld w(spec_of(format, {{700, 1}, {300, 1}}));
    const Plan both = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
    AttentionOptions of_one = w.options();
    of_one.q_lens.resize(1);
    const Plan second = plan(w.cache, std::span<const SequenceId>(w.ids).subspan(1), of_one).value();
    const std::size_t row = w.host.queries().size() / 2;
    const DeviceRows q(w.host.queries(), Dtype::f32, 2, 4, 64);
    const DeviceBuffer out(2 * row * 4), lse(2 * 4 * 4), workspace(both.workspace_bytes());
    const DeviceBuffer other(row * 4), other_workspace(second.workspace_bytes());
    const TestStream stream;
    RunOptions options;
    options.stream = stream.handle();
    options.workspace = workspace.span();
    options.lse = lse.as<float>();
    const TestGraph graph(
        stream, [&] { run(both, 0, q.view, MutableTensorView::of(out.as<float>(), 2, 4, 64), options).value(); });
    graph.launch(stream);
    stream.wait();
    const std::vector<float> before = out.download_as<float>();
    w.cache.truncate(w.ids[0], 0).value();
    options.workspace = other_workspace.span();
    options.lse = nullptr;  // this run is what tells the device
    TensorView one = q.view;
    one.shape[0] = 1;
    run(second, 0, one, MutableTensorView::of(other.as<float>(), 1, 4, 64), options).value();
    graph.launch(stream);
    stream.wait();
    const std::vector<float> after = out.download_as<float>(), after_lse = lse.download_as<float>();
    for (std::size_t i = 0; i < row; ++i) ASSERT_EQ(after[i], 0.0f) << format << ", element " << i;
    for (std::size_t h = 0; h < 4; ++h) ASSERT_EQ(after_lse[h], -INFINITY) << format << ", head " << h;
    EXPECT_TRUE(close(std::span<const float>(before).subspan(row), std::span<const float>(after).subspan(row),
                      tolerance::kCoded))
        << format;
    EXPECT_TRUE(workspace.padding_untouched());
  }
}

TEST(GpuShort, Graph) {
  SKIP_WITHOUT_DEVICE();
  decode_by_graph("tq6", "tq4", 64, 10, 3);
}

// A launch finds its first work before the one before it, which changes lengths here, has ended. A run right after such
// a change gives the bits of one that comes later.
TEST(GpuShort, LengthsChangeRightBefore) {
  SKIP_WITHOUT_DEVICE();
  constexpr int kSteps = 70, kHeads = 2;
  for (const auto& [format, head_dim] : {std::pair{"tq4", 128}, {"tq6", 256}, {"bf16", 64}}) {
    for (const std::int64_t length : {100, 3000}) {
      WorldSpec spec = spec_of(format, {});
      spec.head_dim = head_dim;
      CacheConfig config = device_config(spec);
      config.capacity_tokens = 8192;
      Cache cache = Cache::create(config).value();
      const TestStream stream;
      const SequenceId id = cache.add_sequence();
      const Qkv x = make_qkv({1, length, 4, kHeads, head_dim}, Inputs::gauss, 7);
      append_on_device(cache, id, x, 0, length, Dtype::bf16, stream);
      AttentionOptions options;
      options.q_heads = 4;
      const Plan planned = plan(cache, std::span<const SequenceId>(&id, 1), options).value();
      const DeviceRows q(x.q, Dtype::f32, 1, 4, head_dim);
      const DeviceBuffer workspace(planned.workspace_bytes());
      const DeviceBuffer outs[2] = {DeviceBuffer(x.q.size() * 4), DeviceBuffer(x.q.size() * 4)};
      RunOptions run_options;
      run_options.stream = stream.handle();
      run_options.workspace = workspace.span();
      std::vector<float> before;
      for (int step = 1; step <= kSteps; ++step) {
        cache.truncate(id, length - step).value();  // told to the device by the next run
        for (const DeviceBuffer& out : outs) {
          run(planned, 0, q.view, MutableTensorView::of(out.as<float>(), 1, 4, head_dim), run_options).value();
        }
        stream.wait();
        const std::vector<float> right_after = outs[0].download_as<float>(), later = outs[1].download_as<float>();
        ASSERT_TRUE(same_bits(later, right_after)) << format << ", " << length << " tokens, step " << step;
        ASSERT_FALSE(same_bits(before, later)) << format << ", " << length << " tokens, step " << step;
        before = later;
      }
    }
  }
}

// --- streams and devices ---------------------------------------------------------------------------------------------

TEST(GpuStreams, TwoRunSideBySide) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq6"}) {
    const GpuWorld w(spec_of(format, {{3000, 1}, {700, 1}}));
    const Attended expected = w.attend();
    const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
    const DeviceRows q(w.host.queries(), Dtype::f32, 2, 4, 64);
    const TestStream streams[2];
    const DeviceBuffer workspaces[2] = {DeviceBuffer(planned.workspace_bytes()),
                                        DeviceBuffer(planned.workspace_bytes())};
    std::vector<DeviceBuffer> out;
    for (int i = 0; i < 40; ++i) {
      const auto side = static_cast<std::size_t>(i % 2);
      out.emplace_back(expected.out.size() * 4);
      RunOptions options;
      options.stream = streams[side].handle();
      options.workspace = workspaces[side].span();
      run(planned, 0, q.view, MutableTensorView::of(out.back().as<float>(), 2, 4, 64), options).value();
    }
    for (const TestStream& s : streams) s.wait();
    for (const DeviceBuffer& o : out) ASSERT_TRUE(same_bits(expected.out, o.download_as<float>())) << format;
  }
}

TEST(GpuDevices, TheSecondOneComputesTheSame) {
  SKIP_WITHOUT_DEVICE();
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one device only";
  const WorldSpec spec = spec_of("tq6", {{700, 1}, {130, 1}});
  const GpuWorld first(spec);
  // Everything of the second world, streams and tensors, belongs to the second device; the library must find that out
  // for itself when another one is current.
  CUDA_CHECK(cudaSetDevice(1));
  const GpuWorld second(spec, 1);
  EXPECT_TRUE(second.matches());
  const std::vector<float> out = second.attend().out;
  int current = 0;
  CUDA_CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 1);
  CUDA_CHECK(cudaSetDevice(0));
  EXPECT_TRUE(same_bits(first.attend().out, out));
}

TEST(GpuDevices, TheCurrentDeviceStaysCurrent) {
  SKIP_WITHOUT_DEVICE();
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one device only";
  const Cache cache = Cache::create(device_config(spec_of("tq6", {{200, 1}}), 1)).value();
  EXPECT_NE(cache.describe().find("cuda:1"), std::string::npos) << cache.describe();
  int current = -1;
  CUDA_CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

}  // namespace
}  // namespace kvant::test
