#include "capi/handles.hpp"

#include <algorithm>
#include <limits>

namespace kvant::capi {

namespace {

// Strides of zeros stand for contiguous, so that a C caller can leave them out.
template <class View, class Tensor>
Result<View> convert(const char* name, const Tensor* tensor) {
  if (tensor == nullptr) return null_argument(name);
  const Result<Dtype> dtype = to_dtype(name, tensor->dtype);
  if (!dtype) return dtype.status();
  const auto& shape = tensor->shape;
  const auto& stride = tensor->stride;
  if (stride[0] != 0 || stride[1] != 0 || stride[2] != 0) {
    return View{
        tensor->data, *dtype, {shape[0], shape[1], shape[2]}, {stride[0], stride[1], stride[2]}, tensor->batch_stride};
  }
  std::int64_t token = 0;
  if (__builtin_mul_overflow(shape[1], shape[2], &token)) {
    return {Code::invalid_argument, std::string(name) + ": heads * head_dim overflows; check the shape"};
  }
  return View{tensor->data, *dtype, {shape[0], shape[1], shape[2]}, {token, shape[2], 1}, tensor->batch_stride};
}

}  // namespace

Result<KeyCentre> to_key_centre(const char* name, std::int32_t centre) {
  if (centre >= KVANT_CENTRE_AUTOMATIC && centre <= KVANT_CENTRE_PAGE) return static_cast<KeyCentre>(centre);
  return {Code::invalid_argument,
          std::string(name) + " is " + std::to_string(centre) + "; allowed: 0 (automatic), 1 (none), 2 (page)"};
}

int to_int(std::int64_t number) {
  return static_cast<int>(
      std::clamp<std::int64_t>(number, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
}

Result<Dtype> to_dtype(const char* name, std::int32_t dtype) {
  if (dtype >= KVANT_F32 && dtype <= KVANT_BOOL) return static_cast<Dtype>(dtype);
  return {Code::invalid_argument, std::string(name) + ".dtype is " + std::to_string(dtype) +
                                      "; allowed: 0 (f32), 1 (f16), 2 (bf16), and 3 (bool) for masks"};
}

Result<TensorView> to_view(const char* name, const kvant_tensor* tensor) {
  return convert<TensorView>(name, tensor);
}

Result<MutableTensorView> to_view(const char* name, const kvant_mutable_tensor* tensor) {
  auto view = convert<MutableTensorView>(name, tensor);
  if (view) view->batch_stride = tensor->batch_stride;
  return view;
}

Result<std::vector<SequenceId>> to_sequences(const kvant_sequence* sequences, std::int64_t count) {
  if (count < 0) return {Code::invalid_argument, "count is " + std::to_string(count) + "; it must be 0 or more"};
  if (count > 0 && sequences == nullptr) return null_argument("sequences");
  std::vector<SequenceId> ids;
  ids.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(SequenceId{sequences[i]});
  return ids;
}

Result<std::vector<Append>> to_appends(const kvant_sequence* sequences, const std::int64_t* tokens,
                                       std::int64_t count) {
  const auto ids = to_sequences(sequences, count);
  if (!ids) return ids.status();
  if (count > 0 && tokens == nullptr) return null_argument("tokens");
  std::vector<Append> appends;
  appends.reserve(ids->size());
  for (std::size_t i = 0; i < ids->size(); ++i) appends.push_back({(*ids)[i], tokens[i]});
  return appends;
}

Result<MutableTensorView> to_optional_view(const char* name, const kvant_mutable_tensor* tensor) {
  if (tensor == nullptr) return MutableTensorView{};
  return to_view(name, tensor);
}

Result<TensorView> to_optional_view(const char* name, const kvant_tensor* tensor) {
  if (tensor == nullptr) return TensorView{};
  return to_view(name, tensor);
}

}  // namespace kvant::capi
