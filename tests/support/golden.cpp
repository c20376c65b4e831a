#include "support/golden.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvant/io.hpp"
#include "support/half.hpp"

namespace kvant::test {
namespace {

/// A tensor's bytes as values of its own type.
template <class T>
std::vector<T> load(const io::SafeTensors& file, const std::string& name) {
  const std::vector<std::byte> bytes = file.require(name).value()->read().value();
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

std::string meta(const io::SafeTensors& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) {
    throw Error(Status(Code::bad_file, file.path() + " has no metadata '" + key + "'"));
  }
  return found->second;
}

int meta_int(const io::SafeTensors& file, const std::string& key) {
  return std::stoi(meta(file, key));
}

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

TurboQuantCase::TurboQuantCase(const std::string& path) {
  const io::SafeTensors file = io::SafeTensors::open(path).value();
  q_heads = meta_int(file, "n_heads");
  kv_heads = meta_int(file, "n_kv_heads");
  head_dim = meta_int(file, "head_dim");
  kv_seq_len = meta_int(file, "kv_seq_len");
  capacity = meta_int(file, "kv_capacity");
  ring_start = meta_int(file, "ring_start");
  if (meta_int(file, "mask_type") == 2) window = meta_int(file, "sliding_window");
  scale = std::stod(meta(file, "scale"));
  bits = meta_int(file, "codebook_bits");
  norms_per_position = meta_int(file, "norms_per_position");
  if (norms_per_position == 2) scale_factor_d512 = std::stof(meta(file, "scale_factor_d512"));
  nibble_pairs = meta(file, "family") == "tq4";
  queries_unrotated = meta(file, "fuse_fwht_pre") == "1";
  q = load<float>(file, "q");
  codebook = load<float>(file, "codebook");
  k_packed = load<std::uint8_t>(file, "k_packed");
  v_packed = load<std::uint8_t>(file, "v_packed");
  k_norms = load<float>(file, "k_norms");
  v_norms = load<float>(file, "v_norms");
  if (queries_unrotated) signs = load<std::uint8_t>(file, "signs");
  out_ref = load<double>(file, "out_ref");
}

bool TurboQuantCase::is_visible(std::int64_t slot, bool with_window) const {
  if (slot >= kv_seq_len || logical(slot) >= kv_seq_len) return false;
  return !with_window || window == 0 || logical(slot) >= kv_seq_len - window;
}

std::vector<std::int64_t> TurboQuantCase::visible_slots(bool with_window) const {
  std::vector<std::int64_t> slots;
  for (std::int64_t s = 0; s < capacity; ++s) {
    if (is_visible(s, with_window)) slots.push_back(s);
  }
  std::sort(slots.begin(), slots.end(), [this](auto a, auto b) { return logical(a) < logical(b); });
  return slots;
}

LegacyLayout TurboQuantCase::layout() const {
  LegacyLayout layout;
  layout.nibble_pairs = nibble_pairs;
  layout.bits = bits;
  layout.norms_per_position = norms_per_position;
  layout.scale_factor_d512 = scale_factor_d512;
  layout.codebook = codebook;
  return layout;
}

LegacyTensors TurboQuantCase::tensors() const {
  return {k_packed.data(), v_packed.data(), k_norms.data(), v_norms.data(), capacity};
}

std::vector<double> TurboQuantCase::rotated_queries() const {
  std::vector<double> y = widen(q);
  if (!queries_unrotated) return y;
  const std::size_t n = at(head_dim);
  for (std::size_t begin = 0; begin < y.size(); begin += n) {
    for (std::size_t i = 0; i < n; ++i) {
      if ((signs[i / 8] >> (i % 8) & 1) != 0) y[begin + i] = -y[begin + i];
    }
    for (std::size_t half = 1; half < n; half *= 2) {
      for (std::size_t i = 0; i < n; ++i) {
        if ((i & half) != 0) continue;
        const double a = y[begin + i];
        const double b = y[begin + i + half];
        y[begin + i] = a + b;
        y[begin + i + half] = a - b;
      }
    }
    for (std::size_t i = 0; i < n; ++i) y[begin + i] /= std::sqrt(static_cast<double>(n));
  }
  return y;
}

std::vector<double> TurboQuantCase::dequantise(const std::vector<std::uint8_t>& packed, const std::vector<float>& norms,
                                               const std::vector<std::int64_t>& slots) const {
  std::vector<double> rows;
  for (const std::int64_t slot : slots) {
    for (int head = 0; head < kv_heads; ++head) {
      const std::int64_t position = head * capacity + slot;
      for (int i = 0; i < head_dim; ++i) {
        int index;
        if (nibble_pairs) {
          index = packed[at(position * head_dim / 2 + i / 2)] >> (i % 2 * 4) & 15;
        } else {
          index = packed[at(position * head_dim + i)] & ((1 << bits) - 1);
        }
        const int part = i / (head_dim / norms_per_position);
        const double norm = norms[at(position * norms_per_position + part)];
        const double divisor = norms_per_position == 2 ? scale_factor_d512 : std::sqrt(static_cast<double>(head_dim));
        rows.push_back(codebook[at(index)] * norm / divisor);
      }
    }
  }
  return rows;
}

Bf16Case::Bf16Case(const std::string& path) {
  const io::SafeTensors file = io::SafeTensors::open(path).value();
  batch = meta_int(file, "batch");
  q_heads = meta_int(file, "n_heads");
  kv_heads = meta_int(file, "n_kv_heads");
  q_len = meta_int(file, "q_len");
  kv_len = meta_int(file, "kv_len");
  kv_rows = meta_int(file, "kv_rows");
  scale = std::stod(meta(file, "scale"));
  mask_name = meta(file, "mask");
  k_ = load<std::uint16_t>(file, "k");
  v_ = load<std::uint16_t>(file, "v");
  if (const io::TensorInfo* mask = file.find("mask")) {
    mask_ = load<std::uint16_t>(file, "mask");
    mask_shape_ = mask->shape;
  }

  // [batch, heads, q_len, D] -> [batch, q_len, heads, D], queries and expected outputs alike.
  const std::vector<std::byte> q = load<std::byte>(file, "q");
  const std::vector<double> out = load<double>(file, "out_ref");
  q_dtype_ = file.require("q").value()->dtype == "BF16" ? Dtype::bf16 : Dtype::f32;
  const std::size_t q_row = kHeadDim * dtype_size(q_dtype_);
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < q_len; ++i) {
      for (int h = 0; h < q_heads; ++h) {
        const std::int64_t row = (b * q_heads + h) * q_len + i;
        const std::byte* q_begin = q.data() + at(row) * q_row;
        q_.insert(q_.end(), q_begin, q_begin + q_row);
        const double* out_begin = out.data() + row * kHeadDim;
        out_ref.insert(out_ref.end(), out_begin, out_begin + kHeadDim);
      }
    }
  }
}

TensorView Bf16Case::queries() const {
  return TensorView::contiguous(q_.data(), q_dtype_, batch * q_len, q_heads, kHeadDim);
}

TensorView Bf16Case::rows_of(const std::vector<std::uint16_t>& rows, int b) const {
  const std::uint16_t* begin = rows.data() + b * kv_heads * kv_rows * kHeadDim;
  return {begin, Dtype::bf16, {kv_len, kv_heads, kHeadDim}, {kHeadDim, kv_rows * kHeadDim, 1}};
}

TensorView Bf16Case::keys(int b) const {
  return rows_of(k_, b);
}
TensorView Bf16Case::values(int b) const {
  return rows_of(v_, b);
}

std::vector<double> Bf16Case::rows64_of(const std::vector<std::uint16_t>& rows, int b) const {
  std::vector<double> wide;
  for (std::int64_t t = 0; t < kv_len; ++t) {
    for (int h = 0; h < kv_heads; ++h) {
      const std::int64_t begin = ((b * kv_heads + h) * kv_rows + t) * kHeadDim;
      for (int d = 0; d < kHeadDim; ++d) wide.push_back(from_bf16(rows[at(begin + d)]));
    }
  }
  return wide;
}

std::vector<double> Bf16Case::keys64(int b) const {
  return rows64_of(k_, b);
}
std::vector<double> Bf16Case::values64(int b) const {
  return rows64_of(v_, b);
}

std::vector<double> Bf16Case::queries64(int b) const {
  const std::int64_t n = static_cast<std::int64_t>(q_len) * q_heads * kHeadDim;
  std::vector<double> wide;
  for (std::int64_t i = b * n; i < (b + 1) * n; ++i) wide.push_back(load_as(q_dtype_, q_.data(), at(i)));
  return wide;
}

Mask Bf16Case::tensor_mask() const {
  Mask mask = Mask::bidirectional();
  if (mask_.empty()) return mask;
  // The file pads queries to a multiple of 8 and keys to kv_rows; the view leaves the padding out.
  const std::int64_t rows = mask_shape_[2];
  const std::int64_t columns = mask_shape_[3];
  mask.tensor = {mask_.data(),
                 Dtype::f16,
                 {mask_shape_[0], mask_shape_[1], q_len, kv_len},
                 {mask_shape_[1] * rows * columns, rows * columns, columns, 1}};
  return mask;
}

std::optional<Mask> Bf16Case::position_mask() const {
  if (mask_name == "none") return Mask::bidirectional();
  if (mask_name == "causal_end") return Mask::causal();
  if (mask_name.starts_with("window_end:")) return Mask::sliding(std::stoi(mask_name.substr(11)));
  return std::nullopt;
}

}  // namespace kvant::test
