#include "core/tensor_rows.hpp"

#include <algorithm>
#include <limits>

#include "core/fmt.hpp"
#include "core/plan/planned.hpp"

namespace kvant::core {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// The distance of the last of `count` from the first, kMost if that does not fit.
std::int64_t reach(std::int64_t count, std::int64_t stride) {
  std::int64_t away = 0;
  if (__builtin_mul_overflow(std::max<std::int64_t>(0, count - 1), stride, &away) || away == -kMost - 1) return kMost;
  return away < 0 ? -away : away;
}

}  // namespace

Status check_offsets(const char* name, Dtype dtype, const std::array<std::int64_t, 3>& shape,
                     const std::array<std::int64_t, 3>& stride, std::int64_t batch_stride, std::int64_t sequences) {
  std::int64_t farthest = shape[2];
  bool fits = !__builtin_add_overflow(farthest, reach(shape[0], stride[0]), &farthest);
  fits = fits && !__builtin_add_overflow(farthest, reach(shape[1], stride[1]), &farthest);
  fits = fits && !__builtin_add_overflow(farthest, reach(sequences, batch_stride), &farthest);
  if (fits && farthest <= kMost / static_cast<std::int64_t>(dtype_size(dtype))) return {};
  return {
      Code::invalid_argument,
      fmt::format("{}.stride = [{}, {}, {}] and {}.batch_stride = {} for {} sequences of shape [{}, {}, {}]: offsets "
                  "in bytes must fit 63 bits (below 2^63 bytes); check the strides, which count elements",
                  name, stride[0], stride[1], stride[2], name, batch_stride, sequences, shape[0], shape[1], shape[2])};
}

Status check_apart(const char* name, const MutableTensorView& t, std::int64_t sequences) {
  const auto overlap = [&](const char* stride, std::int64_t elements, const char* of, std::int64_t count) -> Status {
    return {Code::invalid_argument,
            fmt::format("{}.{} = {} for {} {}: vectors of {} elements would overlap, and an output's must not; give a "
                        "tensor of its own memory, not an expanded one",
                        name, stride, elements, count, of, t.shape[2])};
  };
  const auto is_short = [&](std::int64_t stride) { return stride < t.shape[2] && stride > -t.shape[2]; };
  if (t.shape[0] == 0) return {};
  if (t.shape[1] > 1 && is_short(t.stride[1])) return overlap("stride[1]", t.stride[1], "heads", t.shape[1]);
  if (t.shape[0] > 1 && is_short(t.stride[0])) return overlap("stride[0]", t.stride[0], "tokens", t.shape[0]);
  if (t.batch_stride != 0 && sequences > 1 && is_short(t.batch_stride))
    return overlap("batch_stride", t.batch_stride, "sequences", sequences);
  return {};
}

std::string fresh_line(const AttentionOptions& options) {
  if (!options.fresh_keys) return {};
  return "fresh      keys and values of the queries' own tokens, as each run gives them; pages have the older ones\n";
}

Status check_device_fresh(const FreshRows& fresh, Format k, std::optional<Dtype> exact) {
  if (k == Format::f16) exact = Dtype::f16;
  if (k == Format::bf16) exact = Dtype::bf16;
  const auto check = [&](const char* name, const TensorView& t) -> Status {
    const Dtype wanted = exact.value_or(fresh.keys.dtype);
    if (t.dtype != wanted || t.dtype == Dtype::f32) {
      return {Code::unsupported,
              fmt::format("{}.dtype is {}: fresh keys and values on a device must {}; convert the tensor{}", name,
                          dtype_name(t.dtype),
                          exact ? fmt::format("be {}, as the cache's exact pages are", dtype_name(*exact))
                                : "both be f16, or both bf16",
                          exact ? ", or create the cache with another dtype of exact pages (CacheConfig::exact)" : "")};
    }
    constexpr std::int64_t kTogether = 8, kFar = std::int64_t{1} << 29;  // elements: of 16 bytes; of a gigabyte
    if (t.data != nullptr && reinterpret_cast<std::uintptr_t>(t.data) % (kTogether * 2) != 0)
      return {Code::unsupported, fmt::format("{}.data is not aligned to 16 bytes: copy the tensor", name)};
    for (const std::size_t i : {0, 1}) {
      if (t.shape[i] > 1 && t.stride[i] % kTogether != 0) {
        return {Code::unsupported,
                fmt::format("{}.stride[{}] is {}: on a device fresh keys and values need strides of 16-byte multiples, "
                            "{} elements; copy the tensor",
                            name, i, t.stride[i], kTogether)};
      }
    }
    if (t.shape[0] > 1 && (t.stride[0] > kFar || t.stride[0] < -kFar)) {
      return {Code::unsupported,
              fmt::format("{}.stride[0] is {}: on a device tokens are at most {} elements apart; copy "
                          "the tensor",
                          name, t.stride[0], kFar)};
    }
    return {};
  };
  if (Status s = check("keys", fresh.keys); !s) return s;
  return check("values", fresh.values);
}

Status refuse_apart(const char* name, std::int64_t batch_stride, std::int64_t sequence, std::int64_t packed) {
  return {
      Code::unsupported,
      fmt::format("{}.batch_stride = {}: on a device the rows of a call's sequences must lie one after another, those "
                  "of sequence {} of the call from element {} on; copy them to such a tensor, with batch_stride = 0",
                  name, batch_stride, sequence, packed)};
}

}  // namespace kvant::core
