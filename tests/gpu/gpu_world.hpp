// A World (support/world.hpp) and its twin on a device: the same rows appended to both. Judged by the float64 reference
// over the vectors that the device's cache decodes, and by the CPU backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu/device_buffer.hpp"
#include "support/world.hpp"

namespace kvant::test {

/// Empty when a device can be used; else why the GPU tests are skipped.
const std::string& why_no_device();
#define SKIP_WITHOUT_DEVICE() \
  if (const std::string& why = why_no_device(); !why.empty()) GTEST_SKIP() << why

/// Empty where the device has kernels of compute capability 9.0, within the limits that KVANT_CUDA_LIMITS now sets;
/// else why it has none.
const std::string& why_no_sm90();
#define SKIP_WITHOUT_SM90() \
  if (const std::string& why = why_no_sm90(); !why.empty()) GTEST_SKIP() << why

/// How q and out lie in device memory.
struct Placement {
  Dtype q_dtype = Dtype::f32, out_dtype = Dtype::f32;
  std::int64_t token_padding = 0, head_padding = 0;  ///< elements between tokens, and between heads; NaN
  std::int64_t offset = 0;                           ///< elements: misaligns both
};

class GpuWorld {
 public:
  explicit GpuWorld(WorldSpec spec, int device = 0);  ///< throws kvant::Error

  World host;
  TestStream stream;
  Cache cache;
  std::vector<SequenceId> ids;

  /// The cache has what only the generic kernel reads: f32 and imported formats, and exact pages of f32.
  [[nodiscard]] bool is_generic_only() const;
  /// Decode kernels, unless `base` says otherwise or there are none: plans would take prefill kernels, which are less
  /// exact, for many rows. Fresh keys have no other.
  [[nodiscard]] AttentionOptions options(AttentionOptions base = {}) const {
    if (base.kernel.empty() && !base.fresh_keys) base.kernel = is_generic_only() ? "generic" : "decode";
    return host.options(std::move(base));
  }

  /// One run over the device's cache. Masks, sink logits and all tensors are copied there (fresh keys in the world's
  /// input dtype, with NaN around them); the workspace is exactly as
  /// large as the plan asks for and full of NaN. Fails when anything around out, lse or the workspace was written to.
  Result<Attended> try_attend(const AttentionOptions& base = {}, const std::vector<float>& sink_logits = {},
                              const Placement& placement = {}) const;
  [[nodiscard]] Attended attend(const AttentionOptions& base = {}, const std::vector<float>& sink_logits = {}) const {
    return try_attend(base, sink_logits).value();
  }
  /// Float64 attention over what the device's cache holds.
  [[nodiscard]] Expected expect(const AttentionOptions& base = {}, const std::vector<float>& sink_logits = {},
                                Dtype q_dtype = Dtype::f32) const;
  [[nodiscard]] double tolerance(const AttentionOptions& base = {}) const;

  /// Runs, and compares out and lse with the reference and with the CPU backend.
  [[nodiscard]] testing::AssertionResult matches(const AttentionOptions& base = {},
                                                 const std::vector<float>& sink_logits = {},
                                                 const Placement& placement = {},
                                                 double lse_tolerance = tolerance::kCudaLse) const;

 private:
  [[nodiscard]] bool serves(const std::string& kind) const;
  [[nodiscard]] bool fresh_serves(const AttentionOptions& base, const Placement& placement) const;
  [[nodiscard]] bool unpacked_serves(const AttentionOptions& base, const Placement& placement) const;
  struct Decoded {
    std::vector<float> keys, values;
  };
  mutable std::vector<Decoded> decoded_;  // by sequence, read once
};

/// A mask tensor's memory on the device, wherever its strides lead.
DeviceBuffer copy_mask(MaskTensor& m);

/// Rows as device memory, [tokens, heads, head_dim].
struct DeviceRows {
  DeviceBuffer buffer;
  TensorView view;
  DeviceRows(std::span<const float> values, Dtype dtype, std::int64_t tokens, std::int64_t heads,
             std::int64_t head_dim);
};

/// A device cache with a World's geometry.
CacheConfig device_config(const WorldSpec& spec, int device = 0);

/// Rows [begin, end) of x to one layer of a sequence on a device.
void append_on_device(Cache& cache, SequenceId id, const Qkv& x, std::int64_t begin, std::int64_t end, Dtype dtype,
                      const TestStream& stream, int layer = 0);

}  // namespace kvant::test
