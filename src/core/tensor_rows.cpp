#include "core/tensor_rows.hpp"

#include <algorithm>
#include <limits>

#include "core/fmt.hpp"

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

Status refuse_apart(const char* name, std::int64_t batch_stride, std::int64_t sequence, std::int64_t packed) {
  return {
      Code::unsupported,
      fmt::format("{}.batch_stride = {}: on a device the rows of a call's sequences must lie one after another, those "
                  "of sequence {} of the call from element {} on; copy them to such a tensor, with batch_stride = 0",
                  name, batch_stride, sequence, packed)};
}

}  // namespace kvant::core
