#include "gpu/gpu_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "core/cache/impl.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/tuning.hpp"
#include "cuda/runtime/limits.hpp"
#include "support/half.hpp"

namespace kvant::test {

// A tuning of this machine's device would change the kernels that tests expect.
[[maybe_unused]] const int untuned = setenv(core::kTuningVariable, "off", 0);

const std::string& why_no_device() {
  static const std::string why = [] {
    const core::DeviceBackend* backend = core::device_backend();
    return backend == nullptr ? std::string("no CUDA backend is compiled in") : backend->unavailable();
  }();
  return why;
}

const std::string& why_no_sm90() {
  static std::map<std::string, std::string> found;  // for each value of the variable, which tests change
  const char* limits = std::getenv(cuda::kLimitsVariable);
  const auto [at, is_new] = found.try_emplace(limits == nullptr ? "" : limits);
  if (is_new) {
    WorldSpec spec;
    spec.k = spec.v = "tq4";  // every build has it
    spec.sequences = {{64, 1}};
    const GpuWorld w(spec);
    AttentionOptions options = w.host.options();
    options.kernel = core::kPrefillSm90;
    const Result<Plan> planned = plan(w.cache, std::span<const SequenceId>(w.ids), options);
    if (!planned) at->second = planned.message();
  }
  return at->second;
}

DeviceRows::DeviceRows(std::span<const float> values, Dtype dtype, std::int64_t tokens, std::int64_t heads,
                       std::int64_t head_dim)
    : buffer(DeviceBuffer::of<std::byte>(pack_as(dtype, values))),
      view(TensorView::contiguous(buffer.data(), dtype, tokens, heads, head_dim)) {}

CacheConfig device_config(const WorldSpec& spec, int device) {
  CacheConfig c;
  c.device = fmt::format("cuda:{}", device);
  c.max_sequences = static_cast<std::int64_t>(spec.sequences.size()) + 4;  // a fork's parent lives for a while
  c.capacity_tokens = 1024;
  for (const Lengths& lengths : spec.sequences) c.capacity_tokens += (lengths.kv_len + 127) / 64 * 64;
  return cache_config(spec, std::move(c));
}

void append_on_device(Cache& cache, SequenceId id, const Qkv& x, std::int64_t begin, std::int64_t end, Dtype dtype,
                      const TestStream& stream, int layer) {
  const CacheConfig& c = cache.config();
  const auto rows = [&](const std::vector<float>& all, int head_dim) {
    const auto width = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(head_dim);
    const auto some =
        std::span(all).subspan(static_cast<std::size_t>(begin) * width, static_cast<std::size_t>(end - begin) * width);
    return DeviceRows(some, dtype, end - begin, c.kv_heads, head_dim);
  };
  const DeviceRows k = rows(x.k, c.head_dim), v = rows(x.v, c.v_dim());
  cache.append(id, layer, k.view, v.view, stream.handle()).value();
  stream.wait();  // the rows go when this returns
}

namespace {

bool is_generic_format(const std::string& name) {
  return name == "f32" || name.starts_with("lut");
}

// Exact pages are f16 or bf16, so inputs must be too if "exact" is to mean it; but for what the generic kernel reads.
WorldSpec for_device(WorldSpec spec) {
  const bool is_generic = is_generic_format(spec.k) || is_generic_format(spec.v) || spec.exact == Dtype::f32;
  if (spec.input_dtype == Dtype::f32 && !is_generic) spec.input_dtype = Dtype::bf16;
  if (!spec.exact) spec.exact = spec.input_dtype;
  return spec;
}

}  // namespace

DeviceBuffer copy_mask(MaskTensor& m) {
  if (m.data == nullptr) return {};
  std::int64_t last = 0;
  for (std::size_t i = 0; i < 4; ++i) last += (m.shape[i] - 1) * m.stride[i];
  DeviceBuffer b = DeviceBuffer::of(std::span<const std::byte>(
      static_cast<const std::byte*>(m.data), static_cast<std::size_t>(last + 1) * dtype_size(m.dtype)));
  m.data = b.data();
  return b;
}

namespace {

// A strided tensor in device memory, and NaN wherever it has no elements.
struct Strided {
  DeviceBuffer buffer;
  std::array<std::int64_t, 3> shape, stride;
  Dtype dtype;
  std::size_t offset;  // elements

  Strided(Dtype type, std::int64_t tokens, std::int64_t heads, std::int64_t dim, const Placement& p)
      : shape{tokens, heads, dim},
        stride{heads * (dim + p.head_padding) + p.token_padding, dim + p.head_padding, 1},
        dtype(type),
        offset(static_cast<std::size_t>(p.offset)) {
    buffer = DeviceBuffer((offset + static_cast<std::size_t>(tokens * stride[0])) * dtype_size(type));
  }
  template <class Visit>
  void for_each(Visit&& visit) const {
    std::size_t i = 0;
    for (std::int64_t t = 0; t < shape[0]; ++t) {
      for (std::int64_t h = 0; h < shape[1]; ++h) {
        for (std::int64_t d = 0; d < shape[2]; ++d)
          visit(i++, offset + static_cast<std::size_t>(t * stride[0] + h * stride[1] + d));
      }
    }
  }
  [[nodiscard]] std::byte* data() const { return buffer.data() + offset * dtype_size(dtype); }
  void set(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(buffer.size(), std::byte{0xff});
    for_each([&](std::size_t i, std::size_t at) { store_as(dtype, bytes.data(), at, values[i]); });
    buffer.upload(bytes.data(), bytes.size());
  }
  // The elements; false when anything between them has changed.
  bool get(std::vector<float>& values) const {
    std::vector<std::byte> bytes = buffer.download();
    const std::byte nan[4] = {std::byte{0xff}, std::byte{0xff}, std::byte{0xff}, std::byte{0xff}};
    for_each([&](std::size_t i, std::size_t at) {
      values[i] = load_as(dtype, bytes.data(), at);
      std::memcpy(bytes.data() + at * dtype_size(dtype), nan, dtype_size(dtype));
    });
    return buffer.padding_untouched() &&
           std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xff}; });
  }
};

// The queries' own keys or values, all sequences'.
std::vector<float> own_rows(const World& world, bool values) {
  std::vector<float> all;
  for (std::size_t i = 0; i < world.qkv.size(); ++i) {
    const std::vector<float>& x = values ? world.qkv[i].v : world.qkv[i].k;
    const int dim = values ? world.v_dim() : world.spec.head_dim;
    const auto count = static_cast<std::ptrdiff_t>(world.spec.sequences[i].q_len * world.spec.kv_heads * dim);
    all.insert(all.end(), x.end() - count, x.end());
  }
  return all;
}

// Rounding to an output dtype adds at most so much to a relative L2 error.
double rounding_of(Dtype dtype) {
  return dtype == Dtype::f16 ? 0x1p-11 : dtype == Dtype::bf16 ? 0x1p-8 : 0;
}

}  // namespace

GpuWorld::GpuWorld(WorldSpec spec, int device)
    : host(for_device(std::move(spec))),
      cache(Cache::create(device_config(host.spec, device)).value()),
      decoded_(host.spec.sequences.size()) {
  for (std::size_t i = 0; i < host.qkv.size(); ++i) {
    const auto append = [&](SequenceId id, int layer, const Qkv& rows, std::int64_t begin, std::int64_t end) {
      append_on_device(cache, id, rows, begin, end, host.spec.input_dtype, stream, layer);
    };
    ids.push_back(grow_sequence(cache, host.spec, host.spec.sequences[i], host.qkv[i], append));
  }
}

// Rotary keys and latents with a kernel of their own: kvant_cuda_latent in src/cuda/instances.cmake.
constexpr std::pair<const char*, const char*> kLatentPairs[] = {{"tq8", "tq4"},   {"tq8", "tq6"}, {"tq8", "tq8"},
                                                                {"tq8", "tq5"},   {"tq4", "tq4"}, {"fp8", "fp8"},
                                                                {"bf16", "bf16"}, {"f16", "f16"}};

bool GpuWorld::is_generic_only() const {
  const CacheConfig& c = cache.config();
  const auto is_of_cache = [&](const auto& pair) { return host.spec.k == pair.first && host.spec.v == pair.second; };
  if (host.spec.latent && (!why_no_sm90().empty() || std::ranges::none_of(kLatentPairs, is_of_cache))) return true;
  const bool has_exact = c.sink_pages > 0 || c.tail_pages > 0;
  return is_generic_format(c.k) || is_generic_format(c.v) || (has_exact && c.exact == Dtype::f32);
}

double GpuWorld::tolerance(const AttentionOptions& base) const {
  if (options(base).kernel == core::kGenericKernels) return tolerance::kCudaGeneric;
  if (host.spec.latent) return is_generic_only() ? tolerance::kCudaGeneric : tolerance::kCudaPrefill;
  return is_float_format(host.spec.k) && is_float_format(host.spec.v) ? tolerance::kCudaFloat : tolerance::kCoded;
}

Result<Attended> GpuWorld::try_attend(const AttentionOptions& base, const std::vector<float>& sink_logits,
                                      const Placement& placement) const {
  AttentionOptions o = options(base);
  const DeviceBuffer mask = copy_mask(o.mask.tensor);
  const Result<Plan> planned = plan(cache, std::span<const SequenceId>(ids), o);
  if (!planned) return planned.status();
  const std::int64_t rows = planned->total_queries();
  const int dim = host.spec.head_dim, v_dim = host.v_dim();
  const Strided q(placement.q_dtype, rows, o.q_heads, host.q_dim(), placement);
  const Strided out(placement.out_dtype, rows, o.q_heads, v_dim, placement);
  q.set(host.queries());
  Placement of_fresh = placement;  // at multiples of 16 bytes
  of_fresh.token_padding = placement.token_padding / 8 * 8;
  of_fresh.head_padding = placement.head_padding / 8 * 8;
  of_fresh.offset = placement.offset / 8 * 8;
  const std::int64_t own = o.fresh_keys ? rows : 0;
  const Strided keys(host.spec.input_dtype, own, host.spec.kv_heads, dim, of_fresh);
  const Strided values(host.spec.input_dtype, own, host.spec.kv_heads, v_dim, of_fresh);
  TensorView fresh_keys, fresh_values;
  if (o.fresh_keys) {
    keys.set(own_rows(host, false));
    values.set(own_rows(host, true));
    fresh_keys = {keys.data(), keys.dtype, keys.shape, keys.stride};
    fresh_values = {values.data(), values.dtype, values.shape, values.stride};
  }
  const DeviceBuffer lse(static_cast<std::size_t>(rows * o.q_heads) * sizeof(float));
  const DeviceBuffer workspace(planned->workspace_bytes());
  const DeviceBuffer sinks = DeviceBuffer::of<float>(sink_logits);
  RunOptions run_options;
  run_options.stream = stream.handle();
  run_options.lse = lse.as<float>();
  run_options.sink_logits = sink_logits.empty() ? nullptr : sinks.as<float>();
  run_options.workspace = workspace.span();
  const Status status = run(*planned, host.spec.layer, {q.data(), q.dtype, q.shape, q.stride},
                            {out.data(), out.dtype, out.shape, out.stride}, run_options, fresh_keys, fresh_values);
  if (!status) return status;
  stream.wait();
  Attended a;
  a.out.resize(static_cast<std::size_t>(rows * o.q_heads * v_dim));
  if (!out.get(a.out)) return {Code::internal, "something outside the elements of out was written to"};
  if (!lse.padding_untouched() || !workspace.padding_untouched())
    return {Code::internal, "something around lse or the workspace was written to"};
  a.lse = lse.download_as<float>();
  a.explain = planned->explain();
  a.splits = planned->splits();
  return a;
}

Expected GpuWorld::expect(const AttentionOptions& base, const std::vector<float>& sink_logits, Dtype q_dtype) const {
  Expected all;
  const WorldSpec& spec = host.spec;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Lengths& lengths = spec.sequences[i];
    Decoded& d = decoded_[i];
    if (d.keys.empty())
      decode_sequence(cache, ids[i], spec.layer, lengths, host.qkv[i], d.keys, d.values, stream.handle());
    std::vector<float> q = host.qkv[i].q;
    for (float& x : q) x = rounded(x, q_dtype);
    std::vector<float> k = d.keys, v = d.values;
    if (base.fresh_keys) {
      const auto take = [&](const std::vector<float>& given, std::vector<float>& stored, int head_dim) {
        const auto own = static_cast<std::ptrdiff_t>(lengths.q_len * spec.kv_heads * head_dim);
        std::copy(given.end() - own, given.end(), stored.end() - own);
      };
      take(host.qkv[i].k, k, spec.head_dim);
      take(host.qkv[i].v, v, host.v_dim());
    }
    const std::vector<double> q64 = widen(q), v64 = widen(v);
    const std::vector<double> k64 = spec.latent ? joined(v, host.v_dim(), k, spec.head_dim) : widen(k);
    reference::Problem p;
    p.q_len = lengths.q_len;
    p.kv_len = lengths.kv_len;
    p.q_heads = host.q_heads();
    p.kv_heads = spec.kv_heads;
    p.head_dim = host.q_dim();
    p.v_head_dim = host.v_dim();
    p.q = q64;
    p.k = k64;
    p.v = v64;
    p.sink_logits = sink_logits;
    p.batch = static_cast<std::int64_t>(i);
    const reference::Output r = reference::attention(p, base);
    all.out.insert(all.out.end(), r.out.begin(), r.out.end());
    all.lse.insert(all.lse.end(), r.lse.begin(), r.lse.end());
  }
  return all;
}

// Kernels that must serve.
bool GpuWorld::serves(const std::string& kind) const {
  const WorldSpec& s = host.spec;
  const bool is_dense = s.k == "bf16" || s.k == "f16", same = s.k == s.v;
  if (is_generic_only()) return false;
  if (s.latent) return kind == core::kDecodeSm90;
  if (host.v_dim() != s.head_dim)  // nothing else reads pages of two head_dims
    return kind == core::kDecodeSm80 && s.k == s.v && (s.k == "tq4" || s.k == "tq8");
  if ((kind == core::kDecodeSm90 || kind == core::kPrefillSm90) && !why_no_sm90().empty()) return false;
  const bool is_default = (s.k == "tq4" || s.k == "tq6") && s.v == "tq4";
  if (kind == core::kDecodeSm90) return s.head_dim == 128 && is_default;
  if (kind == core::kDecodeSm80) {
    return (s.head_dim == 128 || s.head_dim == 256) && (is_default || (s.k == "tq8" && s.v == "tq8"));
  }
  if (s.key_bases || s.value_bases) return false;
  const bool padded = cache.impl().stored_dims().k != s.head_dim;
  if (kind == core::kPrefillSm90)
    return !padded && s.head_dim <= (is_dense ? 256 : 128) && (same || (s.v == "tq4" && !is_dense));
  const auto rotated = [](const std::string& format) { return format.rfind("tq", 0) == 0; };
  return same || (rotated(s.k) && rotated(s.v));
}

bool GpuWorld::unpacked_serves(const AttentionOptions& base, const Placement& placement) const {
  const auto whole = [](std::int64_t elements) { return elements % 8 == 0; };
  const WorldSpec& s = host.spec;
  const auto rotated = [](const std::string& format) { return format.rfind("tq", 0) == 0; };
  const bool before_decode = host.v_dim() != s.head_dim && !s.latent && !base.fresh_keys && !is_generic_only() &&
                             !s.key_bases && !s.value_bases && (s.k == s.v || (rotated(s.k) && rotated(s.v)));
  return why_no_sm90().empty() && base.mask.tensor.data == nullptr && placement.q_dtype != Dtype::f32 &&
         whole(host.spec.head_dim) && cache.impl().stored_dims().k <= 256 && whole(placement.offset) &&
         whole(placement.token_padding) && whole(placement.head_padding) &&
         (serves(core::kPrefillSm90) || serves(core::kPrefillSm80) || before_decode);
}
bool GpuWorld::fresh_serves(const AttentionOptions& base, const Placement& placement) const {
  return base.fresh_keys && placement.q_dtype == host.spec.input_dtype && unpacked_serves(base, placement);
}

testing::AssertionResult GpuWorld::matches(const AttentionOptions& base, const std::vector<float>& sink_logits,
                                           const Placement& placement, double lse_tolerance) const {
  const Result<Attended> got = try_attend(base, sink_logits, placement);
  // Fresh keys are refused where no prefill kernel serves.
  if (!got && base.fresh_keys && got.code() == Code::unsupported && !serves(core::kPrefillSm90) &&
      !serves(core::kPrefillSm80))
    return testing::AssertionSuccess() << got.message();
  if (!got) return testing::AssertionFailure() << code_name(got.code()) << ": " << got.message();
  const Expected expected = expect(base, sink_logits, placement.q_dtype);
  const bool is_prefill = base.fresh_keys || base.kernel.rfind(core::kPrefillKernels, 0) == 0;
  const bool in_bytes = base.products == 8;
  const double of_kernel = in_bytes ? tolerance::kByteProducts : is_prefill ? tolerance::kCudaPrefill : tolerance(base);
  if (host.spec.page_centres) lse_tolerance = std::max(lse_tolerance, tolerance::kCudaCentredLse);
  const double of_prefill_lse = std::max(lse_tolerance, tolerance::kCudaPrefillLse);
  if (host.spec.latent && tolerance(base) > tolerance::kCudaGeneric)
    lse_tolerance = std::hypot(1.0, host.spec.key_offset) * of_prefill_lse;
  if (is_prefill) lse_tolerance = in_bytes ? tolerance::kCudaByteLse : of_prefill_lse;
  const double allowed = of_kernel + rounding_of(placement.out_dtype);
  if (auto r = close(expected.out, got->out, allowed, host.out_shape()); !r) {
    return r << "\nout, against float64 attention over the decoded vectors\n" << got->explain;
  }
  if (auto r = lse_close(expected.lse, got->lse, lse_tolerance, {host.total_queries(), host.q_heads()}); !r) {
    return r << "\nlse, against float64 attention over the decoded vectors\n" << got->explain;
  }
  // The other kinds of kernels.
  const std::pair<const char*, bool> kinds[] = {{core::kDecodeSm90, !base.fresh_keys && serves(core::kDecodeSm90)},
                                                {core::kDecodeSm80, !base.fresh_keys && serves(core::kDecodeSm80)},
                                                {core::kPrefillSm90, serves(core::kPrefillSm90)},
                                                {core::kPrefillSm80, serves(core::kPrefillSm80)},
                                                {core::kPrefillFresh, fresh_serves(base, placement)},
                                                {core::kPrefillUnpacked, unpacked_serves(base, placement)},
                                                {core::kGenericKernels, !base.fresh_keys}};
  for (const auto& [kind, must_serve] : kinds) {
    if (!base.kernel.empty()) break;
    AttentionOptions other = base;
    other.kernel = kind;
    const Result<Attended> tiled = try_attend(other, sink_logits, placement);
    if (!tiled && (must_serve || tiled.code() != Code::unsupported))
      return testing::AssertionFailure() << kind << ": " << code_name(tiled.code()) << ": " << tiled.message();
    if (!tiled) continue;
    const bool is_generic = kind == core::kGenericKernels;
    const double of_tiles =
        (is_generic ? tolerance::kCudaGeneric : tolerance::kCudaPrefill) + rounding_of(placement.out_dtype);
    // Queries are rounded to 16 bits, which moves the score of an exact key by the more the longer that key is.
    const double length = std::hypot(1.0, host.spec.key_offset);
    const double of_lse = is_generic        ? tolerance::kCudaGenericLse
                          : base.fresh_keys ? of_prefill_lse
                                            : length * tolerance::kCudaPrefillLse;
    if (auto r = close(expected.out, tiled->out, of_tiles, host.out_shape()); !r)
      return r << "\nout of " << kind << ", against float64 attention over the decoded vectors\n" << tiled->explain;
    if (auto r = lse_close(expected.lse, tiled->lse, of_lse, {host.total_queries(), host.q_heads()}); !r)
      return r << "\nlse of " << kind << ", against float64 attention over the decoded vectors\n" << tiled->explain;
  }
  AttentionOptions on_cpu = base;
  on_cpu.kernel.clear();
  std::vector<float> q = host.queries();
  for (float& x : q) x = rounded(x, placement.q_dtype);
  const FreshTensors own = base.fresh_keys ? host.fresh() : FreshTensors{};
  const Result<Attended> cpu = test::try_attend(host.cache, host.ids, host.options(on_cpu), q, sink_logits,
                                                host.spec.layer, own.keys, own.values);
  if (!cpu) return testing::AssertionFailure() << "the CPU backend: " << cpu.message();
  // A product with a calibrated basis is summed in another order, so that a coordinate may go to the level beside.
  // Nor do both have the same where sizes are padded further on a device.
  const bool same_size = cache.impl().stored_dims().k == stored_head_dim(host.spec.head_dim);
  const bool same_bytes = !host.spec.key_bases && !host.spec.value_bases && same_size;
  const double of_cpu = allowed + (in_bytes ? tolerance::kByteProducts : 0) +
                        (same_bytes  ? tolerance::kCoded
                         : same_size ? host.codec_tolerance()
                                     : 2 * host.codec_tolerance());
  if (auto r = close(std::span<const float>(cpu->out), got->out, of_cpu, host.out_shape()); !r) {
    return r << "\nout, against the CPU backend\n" << got->explain;
  }
  return testing::AssertionSuccess();
}

}  // namespace kvant::test
