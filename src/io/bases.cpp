// Basis files: safetensors with metadata kvant.kind = "basis", kvant.version, kvant.source, and for every layer N
//
//   layerN.k.center [kv_heads, D]   layerN.k.matrix [kv_heads, D, D]   layerN.k.inverse [kv_heads, D, D]    all F32
//   layerN.v.center ...             the same for values; may be absent: values then use the default basis
//
// A file is trusted with nothing: a basis that is not finite, not invertible or wildly scaled would turn every later
// output into noise, so loading checks the numbers as well as the form.
#include <algorithm>
#include <cmath>
#include <new>
#include <set>

#include "core/fmt.hpp"
#include "io/file_dtypes.hpp"
#include "io/layer_names.hpp"
#include "io/text.hpp"
#include "kvant/io.hpp"

namespace kvant::io {
namespace {

constexpr const char* kKindKey = "kvant.kind";
constexpr const char* kVersionKey = "kvant.version";
constexpr const char* kSourceKey = "kvant.source";
constexpr const char* kKind = "basis";
constexpr const char* kVersion = "1";
constexpr const char* kParts[] = {"center", "matrix", "inverse"};

// Calibration keeps the mean square of its keys, with row norms of 0.1 to 10: these leave room for other tools.
constexpr double kMaxRowNorm = 1e3;
// float32 rounding gives about 1e-5 at D = 576; a wrong inverse is off by about 1.
constexpr double kMaxInverseError = 1e-3;
constexpr float kMaxCenter = 65536;  // as large as keys may be (codec/storable.hpp)

Status bad(const SafeTensors& file, const std::string& what) {
  return {Code::bad_file, fmt::format("{}: {}", printable(file.path()), what)};
}

std::vector<float>& part_of(CalibratedBasis& basis, int part) {
  return part == 0 ? basis.center : part == 1 ? basis.matrix : basis.inverse;
}
const std::vector<float>& part_of(const CalibratedBasis& basis, int part) {
  return part == 0 ? basis.center : part == 1 ? basis.matrix : basis.inverse;
}

/// The geometry of one layer, from its k.center; the other tensors are compared with it.
Status read_geometry(const SafeTensors& file, const std::string& layer, BasisSet& set) {
  const Result<const TensorInfo*> center = file.require(layer + ".k.center");
  if (!center) return center.status();
  const std::vector<std::int64_t>& shape = (*center)->shape;
  if (shape.size() != 2 || shape[0] < 1 || shape[0] > 65536 || shape[1] < 1 || shape[1] > 65536 ||
      !is_supported_head_dim(static_cast<int>(shape[1]))) {
    return bad(file, fmt::format("tensor \"{}.k.center\": shape is {}; allowed: [kv_heads, a supported head_dim]",
                                 layer, shape_text(shape)));
  }
  set.layers = 1;
  set.kv_heads = static_cast<int>(shape[0]);
  set.head_dim = set.v_head_dim = static_cast<int>(shape[1]);
  // Values may have a size of their own, which their centre has. Other shapes are refused with those of their tensors.
  const TensorInfo* of_values = file.find(layer + ".v.center");
  if (of_values != nullptr && of_values->shape.size() == 2 && of_values->shape[1] <= kLargestHeadDim &&
      is_supported_head_dim(static_cast<int>(of_values->shape[1])))
    set.v_head_dim = static_cast<int>(of_values->shape[1]);
  return {};
}

/// One of the three tensors of a side, cut into its heads.
Status read_part(const SafeTensors& file, const std::string& name, int part, int head_dim,
                 std::vector<CalibratedBasis>& bases) {
  const Result<const TensorInfo*> tensor = file.require(name);
  if (!tensor) return tensor.status();
  std::vector<std::int64_t> wanted = {static_cast<std::int64_t>(bases.size()), head_dim};
  if (part > 0) wanted.push_back(head_dim);
  if ((*tensor)->dtype != "F32" || (*tensor)->shape != wanted) {
    return bad(file, fmt::format("tensor {}: {} of {}; allowed: F32 of {}", in_quotes(name),
                                 in_quotes((*tensor)->dtype), shape_text((*tensor)->shape), shape_text(wanted)));
  }
  const Result<std::vector<float>> values = (*tensor)->to_f32();
  if (!values) return values.status();
  const auto wrong = std::ranges::find_if(*values, [](float x) { return !std::isfinite(x); });
  if (wrong != values->end()) {
    return bad(file, fmt::format("tensor {}: element {} is {}; allowed: finite values", in_quotes(name),
                                 wrong - values->begin(), *wrong));
  }
  const std::size_t each = values->size() / bases.size();
  for (std::size_t head = 0; head < bases.size(); ++head) {
    const auto begin = values->begin() + static_cast<std::ptrdiff_t>(head * each);
    part_of(bases[head], part).assign(begin, begin + static_cast<std::ptrdiff_t>(each));
  }
  return {};
}

double largest_row_norm(const std::vector<float>& matrix, int n) {
  double largest = 0;
  for (int i = 0; i < n; ++i) {
    double squares = 0;
    for (int j = 0; j < n; ++j) squares += double{matrix[i * n + j]} * matrix[i * n + j];
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

/// The largest element of |matrix * inverse - identity|. Rows of `inverse` are added up, so that the compiler can
/// vectorise.
double inverse_error(const std::vector<float>& matrix, const std::vector<float>& inverse, int n) {
  std::vector<double> row(n);
  double largest = 0;
  for (int i = 0; i < n; ++i) {
    std::fill(row.begin(), row.end(), 0.0);
    row[i] = -1;
    for (int k = 0; k < n; ++k) {
      const double factor = matrix[i * n + k];
      for (int j = 0; j < n; ++j) row[j] += factor * inverse[k * n + j];
    }
    for (const double x : row) largest = std::max(largest, std::abs(x));
  }
  return largest;
}

/// The numbers of one head: what makes them a basis.
Status check_basis(const SafeTensors& file, const std::string& side, std::size_t head, const CalibratedBasis& basis,
                   int head_dim) {
  const auto largest = std::ranges::max(basis.center, {}, [](float x) { return std::abs(x); });
  if (std::abs(largest) > kMaxCenter) {
    return bad(file, fmt::format("{}.center of kv head {} holds {}; allowed: magnitude at most {}", side, head, largest,
                                 kMaxCenter));
  }
  for (const auto& [name, part] : {std::pair{"matrix", &basis.matrix}, std::pair{"inverse", &basis.inverse}}) {
    const double norm = largest_row_norm(*part, head_dim);
    if (norm > kMaxRowNorm) {
      return bad(file, fmt::format("{}.{} of kv head {} has a row of norm {:.4g}; allowed: at most {}", side, name,
                                   head, norm, kMaxRowNorm));
    }
  }
  const double error = inverse_error(basis.matrix, basis.inverse, head_dim);
  if (!(error <= kMaxInverseError)) {
    return bad(file,
               fmt::format("{}.inverse of kv head {} is not the inverse of {}.matrix: their product is off by {:.3g}; "
                           "allowed: {}",
                           side, head, side, error, kMaxInverseError));
  }
  return {};
}

Result<std::vector<CalibratedBasis>> read_side(const SafeTensors& file, const std::string& side, int kv_heads,
                                               int head_dim) {
  std::vector<CalibratedBasis> bases(static_cast<std::size_t>(kv_heads));
  for (int part = 0; part < 3; ++part) {
    if (Status status = read_part(file, side + "." + kParts[part], part, head_dim, bases); !status) return status;
  }
  for (std::size_t head = 0; head < bases.size(); ++head) {
    if (Status status = check_basis(file, side, head, bases[head], head_dim); !status) return status;
  }
  return bases;
}

Status check_metadata(const SafeTensors& file) {
  for (const auto& [key, wanted] : {std::pair{kKindKey, kKind}, std::pair{kVersionKey, kVersion}}) {
    const auto at = file.metadata().find(key);
    if (at == file.metadata().end()) {
      return bad(file,
                 fmt::format("no metadata \"{}\"; allowed: \"{}\" (is this a basis file? kvant calibrate writes one)",
                             key, wanted));
    }
    if (at->second != wanted) {
      return bad(file, fmt::format("metadata \"{}\" is {}; allowed: \"{}\"", key, in_quotes(at->second), wanted));
    }
  }
  return {};
}

/// Layer numbers of the file; every tensor must belong to one of them.
Result<std::map<int, bool>> layers_with_values(const SafeTensors& file) {
  std::map<int, bool> layers;
  for (const TensorInfo& tensor : file.tensors()) {
    const auto parsed = parse_layer_name(tensor.name);
    const auto is_part = [&](std::string_view side) {
      return parsed && std::ranges::any_of(
                           kParts, [&](const char* part) { return parsed->rest == fmt::format("{}.{}", side, part); });
    };
    if (!is_part("k") && !is_part("v")) {
      return bad(
          file,
          fmt::format("tensor {} is not part of a basis; allowed: layerN.k or .v, then .center, .matrix or .inverse",
                      in_quotes(tensor.name)));
    }
    layers[parsed->number] |= is_part("v");
  }
  if (layers.empty()) return bad(file, "holds no basis; expected: layerN.k.center, layerN.k.matrix, layerN.k.inverse");
  return layers;
}

}  // namespace

Result<Calibration> read_bases(const SafeTensors& file) {
  try {
    if (Status status = check_metadata(file); !status) return status;
    const Result<std::map<int, bool>> layers = layers_with_values(file);
    if (!layers) return layers.status();
    Calibration out;
    for (const auto& [number, has_values] : *layers) {
      const std::string name = layer_name(number);
      BasisSet set;
      if (Status status = read_geometry(file, name, set); !status) return status;
      Result<std::vector<CalibratedBasis>> keys = read_side(file, name + ".k", set.kv_heads, set.head_dim);
      if (!keys) return keys.status();
      set.keys = std::move(*keys);
      if (has_values) {
        Result<std::vector<CalibratedBasis>> values = read_side(file, name + ".v", set.kv_heads, set.v_head_dim);
        if (!values) return values.status();
        set.values = std::move(*values);
      }
      out.layers.emplace(number, std::move(set));
    }
    return out;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, fmt::format("{}: not enough memory to read it", printable(file.path())));
  }
}

Result<Calibration> load_bases(const std::string& path) {
  const Result<SafeTensors> file = SafeTensors::open(path);
  if (!file) return file.status();
  return read_bases(*file);
}

Status save_bases(const std::string& path, const Calibration& calibration, const std::string& source) {
  struct Side {
    const char* name;
    const std::vector<CalibratedBasis>* bases;
  };
  std::vector<TensorToWrite> tensors;
  std::vector<std::vector<float>> joined;  // the data that `tensors` points to
  joined.reserve(calibration.layers.size() * 6);
  for (const auto& [number, set] : calibration.layers) {
    for (const Side side : {Side{"k", &set.keys}, Side{"v", &set.values}}) {
      if (side.bases->empty() && side.bases == &set.values) continue;
      const std::string prefix = fmt::format("{}.{}", layer_name(number), side.name);
      if (set.layers != 1 || set.kv_heads < 1 || side.bases->size() != static_cast<std::size_t>(set.kv_heads)) {
        return {Code::invalid_argument,
                fmt::format("{}: not written: {} holds {} bases for {} layers of {} kv heads; allowed: one "
                            "layer, one basis a head",
                            printable(path), prefix, side.bases->size(), set.layers, set.kv_heads)};
      }
      for (int part = 0; part < 3; ++part) {
        std::vector<float>& all = joined.emplace_back();
        for (const CalibratedBasis& basis : *side.bases) {
          const std::vector<float>& values = part_of(basis, part);
          all.insert(all.end(), values.begin(), values.end());
        }
        const bool of_values = side.bases == &set.values;
        const int head_dim = of_values && set.v_head_dim > 0 ? set.v_head_dim : set.head_dim;
        std::vector<std::int64_t> shape = {set.kv_heads, head_dim};
        if (part > 0) shape.push_back(head_dim);
        tensors.push_back(
            {fmt::format("{}.{}", prefix, kParts[part]), "F32", std::move(shape), std::as_bytes(std::span(all))});
      }
    }
  }
  return write_safetensors(path, tensors, {{kKindKey, kKind}, {kVersionKey, kVersion}, {kSourceKey, source}});
}

}  // namespace kvant::io
