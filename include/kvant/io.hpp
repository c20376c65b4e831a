// Files: safetensors in and out, calibrated bases.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/codec.hpp"
#include "kvant/export.hpp"
#include "kvant/types.hpp"

namespace kvant::io {

class ByteSource;

/// One tensor of a safetensors file. Its elements stay in the file until a call reads them; the file stays open while
/// there is a TensorInfo of it. A file that another process shortens or rewrites in the meantime gives an error (io).
struct KVANT_API TensorInfo {
  std::string name;
  std::string dtype;  ///< as in the file: "F64", "F32", "F16", "BF16", "U8", "I64", "BOOL", ...
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;  ///< the size of all elements in the file
  [[nodiscard]] std::int64_t elements() const;
  /// Elements widened to f32 (F64, F32, F16, BF16, integers). Errors: dtype that has no such meaning; io.
  [[nodiscard]] Result<std::vector<float>> to_f32() const;
  [[nodiscard]] Result<std::vector<double>> to_f64() const;
  /// The elements as they are in the file. Errors: io.
  [[nodiscard]] Result<std::vector<std::byte>> read() const;
  /// As many of these bytes as `out` has, from byte `at` on. Errors: invalid_argument beyond the end; io.
  [[nodiscard]] Status read(std::uint64_t at, std::span<std::byte> out) const;
  /// Where the elements begin in the file.
  [[nodiscard]] std::uint64_t file_offset() const noexcept { return begin_; }

 private:
  friend class SafeTensors;
  std::shared_ptr<const ByteSource> source_;
  std::uint64_t begin_ = 0;
};

/// A fully validated safetensors file: header length, JSON depth, dtype sizes, shape products, offsets, overlaps and
/// gaps are checked before anything is handed out. Never trusts a number of the file. The file is read, never mapped.
class KVANT_API SafeTensors {
 public:
  /// Errors: io (cannot open), bad_file (what is wrong, and where).
  static Result<SafeTensors> open(const std::string& path);
  /// The same over bytes in memory, which must outlive the object.
  static Result<SafeTensors> parse(std::span<const std::byte> bytes, const std::string& name);
  /// The same over a source that is open; messages have the name.
  static Result<SafeTensors> read(std::shared_ptr<const ByteSource> source, const std::string& name);
  SafeTensors(SafeTensors&&) noexcept;
  SafeTensors& operator=(SafeTensors&&) noexcept;
  ~SafeTensors();

  [[nodiscard]] const std::vector<TensorInfo>& tensors() const;  ///< by offset
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;  ///< null: none
  /// The tensor, or an error that names the file and lists near names.
  [[nodiscard]] Result<const TensorInfo*> require(std::string_view name) const;
  [[nodiscard]] const std::string& path() const;
  /// The file's bytes before its data: the length of the header, and the header.
  [[nodiscard]] Result<std::vector<std::byte>> header() const;

 private:
  struct Impl;
  explicit SafeTensors(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};
/// Writes to a temporary file beside `path` and renames it: a failed write loses nothing.
KVANT_API Status write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                                   const std::map<std::string, std::string>& metadata);

/// One attention layer captured from a model: q [q_heads, queries, D] are the last positions; k, v [kv_heads,
/// positions, D]; metadata layerN.scale and layerN.sliding_window (docs/your-model.md).
struct CapturedLayer {
  std::string name;  ///< "layer4"
  int layer = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0;  ///< v_head_dim 0: head_dim; read ones say it
  std::int64_t queries = 0, positions = 0;
  double scale = 0;
  std::int64_t window = 0;  ///< 0: none
  std::string dtype;        ///< the file's, "BF16"
  std::vector<float> q, k, v;
  std::string assumed;  ///< what the file does not say and was taken instead, for people: "scale 1/sqrt(64), no window"
};
/// A scale or window that the file gives for no layer is 1/sqrt(D) or none, and `assumed` says so. Errors: bad_file,
/// naming the tensor and what does not fit; a number that only other layers have, or one under a name that is not
/// known.
KVANT_API Result<std::vector<CapturedLayer>> read_captured_layers(const SafeTensors& file);

/// Reports, for people, the input that calibration used and the gain that calibration expects.
struct CalibrationReport {
  std::string layer;
  int kv_head = 0;
  std::int64_t queries = 0, keys = 0;
  double expected_key_gain = 1;    ///< mean squared score error with the basis over that without it (estimate)
  double expected_value_gain = 1;  ///< the same for the value error
};
struct Calibration {
  std::map<int, BasisSet> layers;  ///< by layer number of the capture: each a BasisSet of one layer
  std::vector<CalibrationReport> report;
};
/// Centres and query/key balanced bases: A = H S M^(1/2) with M = Sk^(-1/2) (Sk^(1/2) Sq Sk^(1/2))^(1/2) Sk^(-1/2); for
/// values the same with Sq = I. Several captures of one layer are taken together. Errors: invalid_argument.
KVANT_API Result<Calibration> calibrate(std::span<const CapturedLayer> layers);
KVANT_API Status save_bases(const std::string& path, const Calibration& calibration, const std::string& source);
/// Errors: io, bad_file (form, NaN, a matrix and inverse that do not belong together, rows of norm above 1000).
KVANT_API Result<Calibration> load_bases(const std::string& path);
/// The same from a file that is open already.
KVANT_API Result<Calibration> read_bases(const SafeTensors& file);
/// The bases of a cache whose layer i is layer `numbers[i]` of the model; no numbers: all layers, in ascending order.
/// Errors: invalid_argument for layers that the calibration lacks, or whose geometry differs.
KVANT_API Result<BasisSet> select_bases(const Calibration& calibration, std::span<const int> numbers);

}  // namespace kvant::io
