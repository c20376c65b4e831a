// Attention over latents (multi-head latent attention) on a device: heads that share a latent, several queries, exact
// pages, masks, formats. `matches` compares the kernel of latents and the generic kernel with the float64 reference
// over the vectors that the device's cache decodes, and with the CPU backend.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

WorldSpec latent_spec(const char* rope, const char* latent, int heads, std::vector<Lengths> sequences,
                      KeyCentre v_centre = KeyCentre::none) {
  WorldSpec spec = spec_of(rope, latent, std::move(sequences));
  set_width(spec, kLatentWidths.front());
  spec.group = heads;
  spec.page_centres = std::string(rope).starts_with("tq") || std::string(rope) == "fp8";
  spec.adjust = [=](CacheConfig& c) { c.v_centre = v_centre; };
  return spec;
}

// Rows of a sequence: a part of a block's, as many, and more.
class GpuLatent : public testing::TestWithParam<std::tuple<int, std::int64_t>> {};

TEST_P(GpuLatent, Matches) {
  SKIP_WITHOUT_DEVICE();
  const auto& [heads, queries] = GetParam();
  for (const KeyCentre centre : {KeyCentre::none, KeyCentre::page}) {
    for (const auto& [sinks, tails] : {std::pair{1, 1}, {0, 0}, {2, 0}, {0, 3}}) {
      WorldSpec spec =
          latent_spec("tq8", "tq4", heads, {{900, queries}, {70, 1}, {queries, queries}, {333, 2}}, centre);
      spec.sink_pages = sinks;
      spec.tail_pages = tails;
      spec.exact = sinks == 2 ? Dtype::f16 : Dtype::bf16;
      spec.key_offset = spec.value_offset = tails == 3 || sinks == 2 ? 2.0f : 0.0f;
      EXPECT_TRUE(GpuWorld(spec).matches({}, {}, {.q_dtype = tails == 1 ? Dtype::bf16 : Dtype::f32}))
          << sinks << " and " << tails << " exact pages";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, GpuLatent, testing::Combine(testing::Values(1, 16, 20, 128), testing::Values(1, 2, 4)),
                         [](const auto& i) {
                           return fmt::format("heads{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

TEST(GpuLatentShort, EveryFormat) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& pair : {Formats{"tq8", "tq4"},
                              {"tq8", "tq6"},
                              {"tq8", "tq8"},
                              {"tq8", "tq5"},
                              {"tq6", "tq3"},
                              {"tq5", "tq2"},
                              {"tq4", "tq4"},
                              {"tq3", "tq8"},
                              {"tq2", "tq6"},
                              {"fp8", "fp8"},
                              {"tq8", "fp8"},
                              {"bf16", "bf16"},
                              {"f16", "f16"},
                              {"bf16", "f16"}}) {
    EXPECT_TRUE(GpuWorld(latent_spec(pair.k, pair.v, 16, {{300, 2}, {64, 1}})).matches()) << name_of(pair);
  }
}

// Latents that have much in common, around centres and without. One step gives pages their own means, small ones those
// of the pages before.
TEST(GpuLatentShort, Centres) {
  SKIP_WITHOUT_DEVICE();
  for (const char* latent : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"}) {
    for (const bool small_steps : {false, true}) {
      for (const KeyCentre centre : {KeyCentre::page, KeyCentre::none}) {
        WorldSpec spec =
            latent_spec(std::string(latent) == "fp8" ? "fp8" : "tq8", latent, 16, {{400, 2}, {130, 1}}, centre);
        spec.sink_pages = spec.tail_pages = 0;
        spec.value_offset = 3.0f;
        if (small_steps) spec.chunks = {40, 1, 70, 3};
        const GpuWorld w(spec);
        ASSERT_EQ(w.cache.config().v_centre, centre);
        EXPECT_TRUE(w.matches()) << latent;
        AttentionOptions generic;
        generic.kernel = core::kGenericKernels;
        EXPECT_TRUE(w.matches(generic)) << latent << ", generic";
      }
    }
  }
}

// Formats that the generic kernel alone reads.
TEST(GpuLatentShort, OtherFormats) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& pair : {Formats{"f32", "f32"}, {"bf16", "tq4"}, {"lut4", "lut4"}}) {
    const GpuWorld w(latent_spec(pair.k, pair.v, 20, {{200, 2}}));
    EXPECT_TRUE(w.matches()) << name_of(pair);
    EXPECT_NE(w.try_attend().value().explain.find("generic"), std::string::npos);
  }
}

TEST(GpuLatentShort, MasksAndTransforms) {
  SKIP_WITHOUT_DEVICE();
  for (const int heads : {16, 72}) {
    const GpuWorld w(latent_spec("tq8", "tq4", heads, {{700, 3}, {3, 3}, {133, 3}}));
    expect_masks_and_transforms(w);
    AttentionOptions options;
    options.mask = Mask::bidirectional();
    options.scale = -0.05;
    EXPECT_TRUE(w.matches(options));
  }
}

// Blocks that go on from one sequence to the next, rows of work with more pages than lanes hold at a time, and more
// sequences than a window.
TEST(GpuLatentLong, ManyPagesABlock) {
  SKIP_WITHOUT_DEVICE();
  EXPECT_TRUE(GpuWorld(latent_spec("tq8", "tq4", 16, {{30000, 1}})).matches());
  EXPECT_TRUE(GpuWorld(latent_spec("tq8", "tq4", 7, {{1, 1}, {65, 1}, {9000, 2}, {200, 1}, {64, 1}})).matches());
  std::vector<Lengths> many;
  for (int i = 0; i < 70; ++i) many.push_back({1 + i * 37 % 400, 1});
  EXPECT_TRUE(GpuWorld(latent_spec("tq8", "tq6", 8, many)).matches());
}

// Scales far from 1, and pages whose scales differ.
TEST(GpuLatentShort, LoudAndFaintVectors) {
  SKIP_WITHOUT_DEVICE();
  for (const float size : {1e-4f, 1e4f}) {
    WorldSpec spec = latent_spec("tq8", "tq4", 16, {{500, 1}});
    spec.layers = 1;
    GpuWorld w(spec);
    // Half of the tokens again, of another size, behind the others.
    Qkv more = w.host.qkv[0];
    for (std::vector<float>* rows : {&more.k, &more.v}) {
      for (float& x : *rows) x *= size;
    }
    Cache cache = Cache::create(device_config(spec, 0)).value();
    const SequenceId id = cache.add_sequence();
    append_on_device(cache, id, w.host.qkv[0], 0, 500, Dtype::bf16, w.stream, 0);
    append_on_device(cache, id, more, 0, 200, Dtype::bf16, w.stream, 0);
    std::vector<float> out[2];
    for (const char* kernel : {core::kGenericKernels, ""}) {
      const Plan planned = plan(cache, {id}, {.q_heads = 16, .scale = 0.05, .kernel = kernel}).value();
      const DeviceBuffer q = DeviceBuffer::of<float>(w.host.qkv[0].q), to(16 * 512 * sizeof(float)),
                         workspace(planned.workspace_bytes());
      run(planned, 0, TensorView::of(q.as<float>(), 1, 16, 576), MutableTensorView::of(to.as<float>(), 1, 16, 512),
          {.stream = w.stream.handle(), .workspace = workspace.span()})
          .value();
      w.stream.wait();
      out[*kernel == 0 ? 1 : 0] = to.download_as<float>();
    }
    const std::vector<double> expected(out[0].begin(), out[0].end());
    EXPECT_TRUE(close(expected, out[1], tolerance::kCudaPrefill, {1, 16, 512})) << size;
  }
}

// A vector that is not finite makes NaN of the rows that see it, and of no other; so does a query.
TEST(GpuLatentShort, NumbersThatAreNotFinite) {
  SKIP_WITHOUT_DEVICE();
  for (const int tails : {0, 2}) {  // among codes, and in an exact page
    for (const bool in_key : {false, true}) {
      WorldSpec spec = latent_spec("tq8", "tq4", 16, {{200, 4}});
      spec.sink_pages = 0, spec.tail_pages = tails;
      GpuWorld w(spec);
      std::vector<float>& rows = in_key ? w.host.qkv[0].k : w.host.qkv[0].v;
      const std::size_t dim = in_key ? 64 : 512;
      rows[198 * dim + 5] = NAN;                                                // seen by the last two queries
      w.host.qkv[0].q[16 * 576 * 1 + 3 * 576 + (in_key ? 570 : 5)] = INFINITY;  // query 1, head 3
      Cache cache = Cache::create(device_config(spec, 0)).value();
      const SequenceId id = cache.add_sequence();
      append_on_device(cache, id, w.host.qkv[0], 0, 200, Dtype::bf16, w.stream, 0);
      const Plan planned = plan(cache, {id}, {.q_heads = 16, .q_len = 4, .scale = 0.05}).value();
      const DeviceBuffer q = DeviceBuffer::of<float>(w.host.qkv[0].q), to(4 * 16 * 512 * sizeof(float)),
                         workspace(planned.workspace_bytes());
      run(planned, 0, TensorView::of(q.as<float>(), 4, 16, 576), MutableTensorView::of(to.as<float>(), 4, 16, 512),
          {.stream = w.stream.handle(), .workspace = workspace.span()})
          .value();
      w.stream.wait();
      const std::vector<float> out = to.download_as<float>();
      for (std::size_t row = 0; row < 64; ++row) {
        const bool is_nan = row >= 32 || row == 19;
        for (const std::size_t column : {0, 5, 300, 511})
          ASSERT_EQ(std::isnan(out[row * 512 + column]), is_nan) << row << ", " << column << ", tail " << tails;
      }
    }
  }
}

TEST(GpuLatentShort, Explains) {
  SKIP_WITHOUT_DEVICE();
  if (!why_no_sm90().empty()) GTEST_SKIP() << why_no_sm90();
  const GpuWorld w(latent_spec("tq8", "tq4", 16, {{300, 1}}));
  const auto expect = [&](const char* kernel, const std::vector<const char*>& parts) {
    AttentionOptions options;
    options.kernel = kernel;
    const std::string text = w.try_attend(options).value().explain;
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  expect("", {"kernel     decode tq8/tq4, head_dim 512+64, 16 query rows at once", "latent 512, rope 64",
              "u8 levels by s8 query digits", "(1 a multiprocessor) of 8 warps, 2 a page", "exact ones do not"});
  expect("decode_sm90", {"kernel     decode_sm90 tq8/tq4, head_dim 512+64, 64 query rows at once",
                         "keys and latents decoded to f16", "(1 a multiprocessor) of 16 warps"});
}

TEST(GpuLatentShort, Refusals) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(latent_spec("tq8", "tq4", 16, {{300, 1}}));
  const auto refusal = [&](const AttentionOptions& options) {
    const Result<Attended> got = w.try_attend(options);
    EXPECT_EQ(got.code(), Code::unsupported);
    return got.message();
  };
  AttentionOptions options;
  options.products = 8;
  EXPECT_NE(refusal(options).find("products is 8, but the cache stores latents"), std::string::npos);
  options.products = 0;
  options.fresh_keys = true;
  EXPECT_NE(refusal(options).find("fresh_keys needs prefill kernels"), std::string::npos);
  options.fresh_keys = false;
  options.kernel = core::kPrefillKernels;
  EXPECT_NE(refusal(options).find("latents have the kernels decode, decode_sm90 and generic"), std::string::npos);
  const GpuWorld mixed(latent_spec("bf16", "tq4", 16, {{100, 1}}));
  options.kernel = core::kDecodeSm90;
  const Result<Attended> got = mixed.try_attend(options);
  EXPECT_NE(got.message().find("k = bf16 with latents in tq4 has no other kernel"), std::string::npos) << got.message();
}

}  // namespace
}  // namespace kvant::test
