// Attention on a device: what is refused, and what a plan says of itself.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"

namespace kvant::test {
namespace {

// --- refusals --------------------------------------------------------------------------------------------------------

TEST(GpuRefusals, SayWhatIsWrong) {
  SKIP_WITHOUT_DEVICE();
  const auto refused = [](const Status& s, const std::string& words) {
    EXPECT_FALSE(s.ok());
    EXPECT_NE(s.message().find(words), std::string::npos) << s.message();
  };
  WorldSpec spec = spec_of("tq6", {{100, 1}});
  CacheConfig config = device_config(spec, 99);
  refused(Cache::create(config).status(), "99");
  config = device_config(spec);
  config.layers = 4096;
  config.capacity_tokens = std::int64_t{1} << 30;  // half a petabyte
  EXPECT_EQ(Cache::create(config).status().code(), Code::out_of_memory);

  const GpuWorld w(spec);  // and after that everything still works
  EXPECT_TRUE(w.matches());
  const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
  const DeviceRows q(w.host.queries(), Dtype::f32, 1, 4, 64);
  const DeviceBuffer out(4 * 64 * 4), workspace(planned.workspace_bytes());
  RunOptions options;
  options.stream = w.stream.handle();
  const auto attend = [&](const RunOptions& with, int layer = 0) {
    return run(planned, layer, q.view, MutableTensorView::of(out.as<float>(), 1, 4, 64), with);
  };
  if (planned.workspace_bytes() > 0) {
    refused(attend(options), "workspace is empty");
    options.workspace = workspace.span().first(planned.workspace_bytes() - 1);
    refused(attend(options), "workspace");
  }
  options.workspace = workspace.span();
  refused(attend(options, 1), "layer is 1");
  EXPECT_TRUE(attend(options).ok());
  w.stream.wait();
}

TEST(GpuRefusals, UnsupportedHeadDimsAreSaidToBeSo) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : supported_head_dims()) {
    WorldSpec spec = spec_of("tq6", {{100, 1}});
    spec.head_dim = head_dim;
    const CacheConfig config = device_config(spec);
    const Result<Cache> made = Cache::create(config);
    if (!made) {
      EXPECT_EQ(made.code(), Code::unsupported) << head_dim << ": " << made.message();
      EXPECT_NE(made.message().find(std::to_string(head_dim)), std::string::npos) << made.message();
      continue;
    }
    const GpuWorld w(spec);
    const Result<Attended> got = w.try_attend();
    if (got) {
      EXPECT_TRUE(w.matches()) << head_dim;
    } else {
      EXPECT_EQ(got.code(), Code::unsupported) << head_dim << ": " << got.message();
      EXPECT_NE(got.message().find(std::to_string(head_dim)), std::string::npos) << got.message();
    }
  }
}

// A cache of any pair of formats is made and filled; attention over it says what this build has.
TEST(GpuRefusals, PairsWithoutKernelsAreSaidToBeSo) {
  SKIP_WITHOUT_DEVICE();
  std::vector<Formats> formats = kOtherFormats;
  formats.push_back({"tq2", "tq6"});
  for (const Formats& f : formats) {
    const GpuWorld w(spec_of(f.k, f.v, {{100, 1}}));
    const Result<Attended> got = w.try_attend();
    ASSERT_EQ(got.code(), Code::unsupported) << name_of(f);
    EXPECT_NE(got.message().find(fmt::format("k = {}, v = {}", f.k, f.v)), std::string::npos) << got.message();
    EXPECT_NE(got.message().find("tq6/tq4"), std::string::npos) << got.message();
  }
}

TEST(GpuRefusals, SizesBeyondTheLargest) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : {513, 576}) {
    WorldSpec spec = spec_of("tq6", {{100, 1}});
    spec.head_dim = head_dim;
    const Result<Cache> made = Cache::create(device_config(spec));
    ASSERT_EQ(made.code(), Code::unsupported) << head_dim;
    for (const std::string& words :
         {"head_dim = " + std::to_string(head_dim), std::string("64, 96, 128, 192, 256, 512")}) {
      EXPECT_NE(made.message().find(words), std::string::npos) << made.message();
    }
  }
}

TEST(GpuRefusals, FormatsOfTheGenericKernelHaveNoOther) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"f32", "lut4"}) {
    const GpuWorld w(spec_of(format, {{100, 1}}));
    for (const char* kernel : {"decode", "prefill", "prefill_sm80"}) {
      AttentionOptions o;
      o.kernel = kernel;
      const Result<Attended> got = w.try_attend(o);
      ASSERT_EQ(got.code(), Code::unsupported) << format;
      const std::string words = fmt::format("kernel is \"{}\": with k = {} the generic kernel alone", kernel, format);
      EXPECT_NE(got.message().find(words), std::string::npos) << got.message();
    }
    EXPECT_NE(w.attend().explain.find(fmt::format("k = {} has no other kernel", format)), std::string::npos);
  }
  WorldSpec spec = spec_of("tq4", {{100, 1}});
  spec.head_dim = 72;
  const std::string padded = GpuWorld(spec).attend().explain;
  EXPECT_NE(padded.find("head_dim 72, stored as 96"), std::string::npos) << padded;
}

TEST(GpuExplain, NamesWhatWasChosen) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{5000, 1}}));
  const Plan p = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
  EXPECT_STREQ(p.isa(), "cuda");
  EXPECT_EQ(p.threads(), 0);
  EXPECT_EQ(p.kv_bytes(),
            plan(w.host.cache, std::span<const SequenceId>(w.host.ids), w.host.options()).value().kv_bytes());
  EXPECT_EQ(p.explain().rfind("backend    cuda", 0), 0u) << p.explain();
  for (const char* word : {"tq6", "tq4", "5000"}) EXPECT_NE(p.explain().find(word), std::string::npos) << p.explain();
}

TEST(GpuExplain, ManyRowsGetPrefillKernels) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("bf16", {{2000, 1600}, {1800, 1500}}));
  const auto planned = [&](const char* kernel) {
    AttentionOptions o = w.host.options();
    o.kernel = kernel;
    return plan(w.cache, std::span<const SequenceId>(w.ids), o);
  };
  EXPECT_STREQ(planned("decode").value().kernel(), "decode");
  const Result<Plan> hopper = planned("prefill_sm90");
  if (!hopper) {
    EXPECT_NE(hopper.message().find("9.0"), std::string::npos) << hopper.message();
  }
  const Plan any = planned("prefill_sm80").value(), first = planned("prefill").value();
  for (const Plan& p : {any, first}) EXPECT_STREQ(p.kernel(), "prefill");
  EXPECT_NE(any.explain().find("prefill_sm80 bf16/bf16"), std::string::npos) << any.explain();
  EXPECT_NE(first.explain().find(hopper ? "prefill_sm90 bf16/bf16" : "prefill_sm80 bf16/bf16"), std::string::npos)
      << first.explain();
  const Plan chosen = planned("").value();
  EXPECT_STREQ(chosen.kernel(), "prefill") << chosen.explain();
  EXPECT_NE(chosen.explain().find("tiles of 128 query rows"), std::string::npos) << chosen.explain();
  EXPECT_FALSE(planned("both").ok());
}

}  // namespace
}  // namespace kvant::test
