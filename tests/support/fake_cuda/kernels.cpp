// The units of src/cuda/instances.cmake without their kernels: the widths, formats and sizes that compiled units tell
// plans. There is a unit for each width that the list gives it, and for no other, as nvcc compiles them.
#include <map>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "cuda/decode/kernels.hpp"
#include "cuda/decode/shape.hpp"
#include "cuda/decode_latent/columns.hpp"
#include "cuda/decode_latent/shape.hpp"
#include "cuda/prefill/units.hpp"
#include "cuda/prefill_dense/kernels.hpp"
#include "cuda/prefill_sm80/shape.hpp"
#include "cuda/prefill_sm90/shape.hpp"
#include "cuda/prefill_unpacked/unpack.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {
namespace {

// The kernel of this name, which some entries of a table may share.
const FakeKernel* fake_kernel(const std::string& kind, int width, int blocks = 1) {
  static std::map<std::string, FakeKernel> all;
  const std::string name = fmt::format("{} {}", kind, width);
  return &all.try_emplace(name, FakeKernel{blocks, name}).first->second;
}

struct TableEntry {
  int width;
  AttendKernel kernel;
};
template <class S>
TableEntry entry_of() {
  const int width = width_of(codec::HeadDims{S::kHeadDim, S::kValueDim});
  return {width, kernel_of<S>(fake_kernel(kDecodeKinds[static_cast<int>(S::kKind)].name, width))};
}
// The functions that the tables of decode kernels call.
template <Format K, Format V, int kWidth, int kTiles>
TableEntry attend_entry() {
  return entry_of<Shape<K, V, kWidth, kTiles, kWarps>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry eight_warps_entry() {
  return entry_of<Shape<K, V, kWidth, kTiles, kEightWarps>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry one_stage_entry() {
  return entry_of<OneStage<K, V, kWidth, kTiles>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry half_weights_entry() {
  return entry_of<HalfWeights<K, V, kWidth, kTiles>>();
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry group_entry() {
  return entry_of<Group<K, V, kWidth, kTiles>>();
}
template <Format K, Format V, int kWidth, bool kCentred>
TableEntry latent_entry() {
  return {kWidth, latent::kernel_of<latent::Shape<kWidth, K, V, kCentred>>(fake_kernel(core::kDecodeSm90, kWidth))};
}
template <Format K, Format V, int kWidth, int kTiles>
TableEntry latent_columns_entry() {
  return {kWidth, latent::kernel_of<latent::ColumnShape<kWidth, K, V>>(fake_kernel(core::kDecodeKernels, kWidth))};
}

std::vector<AttendKernel> kernels_of_width(int width) {
  static const TableEntry kTable[] = {
#include "cuda/decode_tables.inc"
  };
  std::vector<AttendKernel> found;
  for (const TableEntry& one : kTable) {
    if (one.width == width) found.push_back(one.kernel);
  }
  return found;
}

}  // namespace

#define KVANT_DEFINE(width)                                                    \
  template <>                                                                  \
  DecodeKernels decode_kernels<width>() {                                      \
    static const std::vector<AttendKernel> kKernels = kernels_of_width(width); \
    const MergeKernel merge{fake_kernel("merge", value_dim(width)), 0, 1};     \
    return {width, kKernels, kKernels[0], {merge, merge}};                     \
  }
KVANT_CUDA_EACH_DECODE_WIDTH(KVANT_DEFINE)
#undef KVANT_DEFINE

Status failed(const char* call, cudaError_t) {
  return {Code::internal, call};
}

namespace prefill {

// As the unit.cuh of each kind has it.
namespace prefill_sm90 {
template <Format K, Format V, int D>
void add(std::vector<Kernel>& all) {
  using S = Shape<D>;
  if constexpr (has_kernel(K, V, D))
    all.push_back({K, V, D, fake_kernel(core::kPrefillSm90, D), S::kBytes, S::kThreads, kRows});
}
}  // namespace prefill_sm90
namespace prefill_sm80 {
template <class S>
void add_of_shape(Format k, Format v, std::vector<Kernel>& all) {
  const FakeKernel* kernel =
      fake_kernel(S::kSmall ? "small prefill_sm80" : core::kPrefillSm80, S::kHeadDim, S::kBlocks);
  all.push_back({k, v, S::kHeadDim, kernel, S::bytes(k, v), S::kThreads, S::kRows,
                 codec::takes_centre(k) ? S::kMoreIfCentred : 0});
}
template <Format K, Format V, int D>
void add(std::vector<Kernel>& all) {
  if (!has_one_type(K, V)) return;
  add_of_shape<sm80::Shape<D>>(K, V, all);
  if constexpr (sm80::has_small(D)) add_of_shape<sm80::Shape<D, true>>(K, V, all);
}
}  // namespace prefill_sm80

#define KVANT_ADD(k, v) add<Format::k, Format::v, kHeadDim>(all);
#define KVANT_DEFINE(kind, head_dim)                 \
  std::span<const Kernel> kind##_d##head_dim() {     \
    static const std::vector<Kernel> kKernels = [] { \
      using kind::add;                               \
      constexpr int kHeadDim = head_dim;             \
      std::vector<Kernel> all;                       \
      KVANT_CUDA_EACH_PAIR(KVANT_ADD)                \
      return all;                                    \
    }();                                             \
    return kKernels;                                 \
  }
KVANT_CUDA_EACH_TILE_UNIT(KVANT_DEFINE)
#undef KVANT_DEFINE
#undef KVANT_ADD

namespace dense {

template <class S>
DenseKernel kernel_of(int width, Dtype dtype) {
  const char* kind = S::kByteKeys ? "dense bytes" : dtype == Dtype::bf16 ? "dense bf16" : "dense f16";
  DenseKernel kernel{S::D,          dtype,     fake_kernel(kind, width), S::kBytes, S::kThreads, S::kRows, S::kKeys,
                     S::kBoxTokens, S::kBlocks};
  if constexpr (S::kByteKeys) kernel.key_rows = S::kKeyRows;
  return kernel;
}
template <int kWidth>
const DenseKernel* byte_keys_of_unit() {
  if constexpr (has_byte_keys(kWidth)) {
    static const DenseKernel kKernel = kernel_of<ByteKeysShapeFor<kWidth>>(kWidth, Dtype::f16);
    return &kKernel;
  }
  return nullptr;
}
#define KVANT_DEFINE(width)                                                                \
  template <>                                                                              \
  std::span<const DenseKernel> kernels<width>() {                                          \
    static const DenseKernel kKernels[] = {kernel_of<ShapeFor<width>>(width, Dtype::bf16), \
                                           kernel_of<ShapeFor<width>>(width, Dtype::f16)}; \
    return kKernels;                                                                       \
  }                                                                                        \
  template <>                                                                              \
  const DenseKernel* byte_keys_kernel<width>() {                                           \
    return byte_keys_of_unit<width>();                                                     \
  }
KVANT_CUDA_EACH_OF_PREFILL_DENSE(KVANT_DEFINE)
#undef KVANT_DEFINE

}  // namespace dense

namespace unpacked {

#define KVANT_DEFINE(head_dim)                                                               \
  template <>                                                                                \
  UnpackKernel kernel<head_dim>(bool byte_keys) {                                            \
    return {head_dim, fake_kernel(byte_keys ? "unpack bytes" : "unpack", head_dim), 128, 0}; \
  }
KVANT_CUDA_EACH_OF_UNPACK(KVANT_DEFINE)
#undef KVANT_DEFINE

}  // namespace unpacked
}  // namespace prefill
}  // namespace kvant::cuda
