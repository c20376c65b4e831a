// Captured attention layers: tensors layerN.q, layerN.k, layerN.v and metadata layerN.scale, layerN.sliding_window
// (docs/your-model.md). Other tensors and metadata may be in the file and are left alone.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "core/fmt.hpp"
#include "io/file_dtypes.hpp"
#include "io/layer_names.hpp"
#include "io/text.hpp"
#include "kvant/io.hpp"

namespace kvant::io {
namespace {

// Keys and values beyond this are refused by the cache as well: they do not fit a fp16 scale.
constexpr float kMaxMagnitude = 65536;  // what a cache takes (codec/storable.hpp)

Status bad(const SafeTensors& file, const std::string& what) {
  return {Code::bad_file, fmt::format("{}: {}", printable(file.path()), what)};
}

// The metadata of one layer, beside its tensors. kvant.hf.capture writes the last three; they are not read here.
constexpr std::string_view kLayerKeys[] = {"scale", "sliding_window", "softcap", "sinks", "kv_of"};

/// A default may stand for a number that the file gives for no layer. Where another layer has it, or this layer has one
/// under a name that is not known ("layer3.window"), the file means something that a default would hide.
Status check_default(const SafeTensors& file, int layer, std::string_view what, const char* allowed) {
  const std::string key = fmt::format("{}.{}", layer_name(layer), what);
  for (const auto& [other, value] : file.metadata()) {
    const std::optional<LayerName> name = parse_layer_name(other);
    if (!name) continue;
    if (name->rest == what) {
      return bad(file, fmt::format("no metadata {}, though there is {}; allowed: {}", in_quotes(key), in_quotes(other),
                                   allowed));
    }
    if (name->number == layer && std::ranges::find(kLayerKeys, name->rest) == std::end(kLayerKeys)) {
      return bad(file, fmt::format("no metadata {}, but {}, which is not known; known: {}", in_quotes(key),
                                   in_quotes(other), fmt::join(kLayerKeys, ", ")));
    }
  }
  return {};
}

/// A number of the metadata that was written in full, for example "0.0883" or "512"; `otherwise` where the file may
/// leave it out and does, and then `assumed` gets `what_otherwise`.
template <class Number>
Result<Number> metadata_number(const SafeTensors& file, CapturedLayer& layer, std::string_view what,
                               const char* allowed, Number otherwise, const std::string& what_otherwise) {
  const std::string key = fmt::format("{}.{}", layer.name, what);
  const auto at = file.metadata().find(key);
  if (at == file.metadata().end()) {
    if (Status status = check_default(file, layer.layer, what, allowed); !status) return status;
    layer.assumed += (layer.assumed.empty() ? "" : ", ") + what_otherwise;
    return otherwise;
  }
  Number number{};
  const char* end = at->second.data() + at->second.size();
  const auto [stop, error] = std::from_chars(at->second.data(), end, number);
  if (error != std::errc() || stop != end) {
    return bad(file, fmt::format("metadata {} is {}; allowed: {}", in_quotes(key), in_quotes(at->second), allowed));
  }
  return number;
}

/// Three dimensions, none of them empty or beyond what an int counts, of a dtype that attention takes.
Status check_form(const SafeTensors& file, const TensorInfo& tensor) {
  if (tensor.dtype != "F32" && tensor.dtype != "F16" && tensor.dtype != "BF16") {
    return bad(file, fmt::format("tensor {}: dtype is {}; allowed: F32, F16, BF16", in_quotes(tensor.name),
                                 in_quotes(tensor.dtype)));
  }
  const bool sized = tensor.shape.size() == 3 && std::ranges::all_of(tensor.shape, [](std::int64_t extent) {
                       return extent >= 1 && extent <= std::numeric_limits<int>::max();
                     });
  if (!sized) {
    return bad(file, fmt::format("tensor {}: shape is {}; allowed: [heads, positions, head_dim], none of them 0",
                                 in_quotes(tensor.name), shape_text(tensor.shape)));
  }
  return {};
}

Result<std::vector<float>> finite_values(const SafeTensors& file, const TensorInfo& tensor) {
  Result<std::vector<float>> values = tensor.to_f32();
  if (!values) return values;
  const auto wrong = std::ranges::find_if(*values, [](float x) { return !(std::abs(x) <= kMaxMagnitude); });
  if (wrong != values->end()) {
    const std::int64_t at = wrong - values->begin();
    const std::int64_t rows = tensor.shape[1], columns = tensor.shape[2];
    return bad(file,
               fmt::format("tensor {}: the value at [{}, {}, {}] is {}; allowed: finite, magnitude at most 65536",
                           in_quotes(tensor.name), at / columns / rows, at / columns % rows, at % columns, *wrong));
  }
  return values;
}

Result<CapturedLayer> read_layer(const SafeTensors& file, int number) {
  CapturedLayer layer;
  layer.layer = number;
  layer.name = layer_name(number);
  const TensorInfo* parts[3] = {};
  for (int i = 0; i < 3; ++i) {
    const Result<const TensorInfo*> part = file.require(layer.name + "." + "qkv"[i]);
    if (!part) return part.status();
    parts[i] = *part;
    if (Status status = check_form(file, **part); !status) return status;
  }
  const auto& [q, k, v] = parts;
  if (k->shape[0] != v->shape[0] || k->shape[1] != v->shape[1]) {
    return bad(file, fmt::format("{}: k is {} and v is {}; allowed: the same heads and positions", layer.name,
                                 shape_text(k->shape), shape_text(v->shape)));
  }
  if (q->shape[2] != k->shape[2]) {
    return bad(
        file, fmt::format("{}: head_dim of q is {}, of k {}; allowed: the same", layer.name, q->shape[2], k->shape[2]));
  }
  if (q->dtype != k->dtype || q->dtype != v->dtype) {
    return bad(file, fmt::format("{}: dtypes of q, k, v are {}, {}, {}; allowed: the same", layer.name, q->dtype,
                                 k->dtype, v->dtype));
  }
  layer.q_heads = static_cast<int>(q->shape[0]);
  layer.kv_heads = static_cast<int>(k->shape[0]);
  layer.head_dim = static_cast<int>(q->shape[2]);
  layer.v_head_dim = static_cast<int>(v->shape[2]);
  layer.queries = q->shape[1];
  layer.positions = k->shape[1];
  layer.dtype = q->dtype;
  for (const int head_dim : {layer.head_dim, layer.v_head_dim}) {
    if (stored_head_dim(head_dim) > 0) continue;
    return bad(file, fmt::format("{}: head_dim is {}; allowed: 1 to {}", layer.name, head_dim, kLargestHeadDim));
  }
  if (layer.q_heads % layer.kv_heads != 0) {
    return bad(file, fmt::format("{}: {} query heads over {} kv heads; allowed: a multiple of the kv heads", layer.name,
                                 layer.q_heads, layer.kv_heads));
  }
  if (layer.queries > layer.positions) {
    return bad(file, fmt::format("{}: {} queries over {} positions; allowed: at most one query a position", layer.name,
                                 layer.queries, layer.positions));
  }

  const Result<double> scale =
      metadata_number<double>(file, layer, "scale", "a positive number, as text", 1 / std::sqrt(layer.head_dim),
                              fmt::format("scale 1/sqrt({})", layer.head_dim));
  if (!scale) return scale.status();
  if (!(*scale > 0 && *scale <= std::numeric_limits<float>::max())) {
    return bad(file, fmt::format("metadata \"{}.scale\" is {}; allowed: a positive number", layer.name, *scale));
  }
  layer.scale = *scale;
  const char* window_allowed = "a number of tokens from 0 (no window) to 2^63 - 1, as text";
  const Result<std::int64_t> window =
      metadata_number<std::int64_t>(file, layer, "sliding_window", window_allowed, 0, "no window");
  if (!window) return window.status();
  if (*window < 0) {
    return bad(file,
               fmt::format("metadata \"{}.sliding_window\" is {}; allowed: {}", layer.name, *window, window_allowed));
  }
  layer.window = *window;

  std::vector<float>* values[3] = {&layer.q, &layer.k, &layer.v};
  for (int i = 0; i < 3; ++i) {
    Result<std::vector<float>> read = finite_values(file, *parts[i]);
    if (!read) return read.status();
    *values[i] = std::move(*read);
  }
  return layer;
}

}  // namespace

Result<std::vector<CapturedLayer>> read_captured_layers(const SafeTensors& file) {
  std::set<int> numbers;
  for (const TensorInfo& tensor : file.tensors()) {
    const auto parsed = parse_layer_name(tensor.name);
    if (parsed && (parsed->rest == "q" || parsed->rest == "k" || parsed->rest == "v")) numbers.insert(parsed->number);
  }
  if (numbers.empty()) {
    return bad(file,
               fmt::format("holds no captured layer among its {} tensors; expected: layerN.q, layerN.k and layerN.v",
                           file.tensors().size()));
  }
  std::vector<CapturedLayer> layers;
  for (int number : numbers) {
    Result<CapturedLayer> layer = read_layer(file, number);
    if (!layer) return layer.status();
    layers.push_back(std::move(*layer));
  }
  return layers;
}

}  // namespace kvant::io
