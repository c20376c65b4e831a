// An instruction set as the core sees it: one table of functions per ISA, filled by src/cpu. The core never includes
// src/cpu; it only calls through these tables, which src/cpu/registry.cpp lists best first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/basis_ref.hpp"
#include "codec/layout.hpp"

namespace kvant::core {

using BasisView = codec::BasisRef;

// A kv head's rows that are stored after those of a job.
struct NextRows {
  const void* rows = nullptr;
  std::int64_t row_stride = 0;  // elements
  int count = 0;
  Dtype dtype = Dtype::f32;
};

// Stores `count` tokens of one kv head into a page block, from token `first` on: basis, quantise, pack. `rows` are in
// the original coordinates, row i at element i * row_stride; they become f32 and are rounded to `rounding` first. Dense
// formats round to nearest even. Vectors are padded here: a row has `width` values, and zeros are stored behind these.
struct StoreJob {
  const codec::SideLayout* side = nullptr;
  int head_dim = 0;  // the block's
  int width = 0;     // values of a row, at most head_dim; nothing behind them is read
  std::byte* block = nullptr;
  int first = 0;
  int count = 0;
  const void* rows = nullptr;
  std::int64_t row_stride = 0;
  BasisView basis;
  const float* levels = nullptr;  // lut formats
  const float* centre = nullptr;  // [head_dim], in their basis, for rows that do not refuse it; null: none
  Dtype dtype = Dtype::f32;       // the rows' dtype: f32, f16, bf16
  Dtype rounding = Dtype::f32;    // f32: none
  bool looks = false;             // refuses rows that cannot be stored (codec/storable.hpp)
  NextRows next;                  // asked for meanwhile; no more than a hint
};

// The centre of a page of keys, or of latents (codec/centre.hpp): makes and stores it, or finds the one that is stored;
// and decodes it.
struct CentreJob {
  enum class Of {
    stored,  // that of the block `from`, which is only read
    rows,  // the mean of rows.count rows; of `rows` only rows, row_stride, width, dtype and rounding are read otherwise
    page,  // the mean of the keys, or latents, of the block `from`: that of the page before
  };
  Of of = Of::stored;
  bool values = false;  // the latents' centre
  const codec::PageLayout* layout = nullptr;
  std::byte* block = nullptr;  // gets the centre, unless one is stored
  BasisView basis;
  StoreJob rows;
  const std::byte* from = nullptr;  // has the same layout
  float* centre = nullptr;          // out [codec::kMaxHeadDim], of which head_dim are the decoded centre
};

// Decodes `count` tokens of one side of a page block, from token `first` on: unpacked, back from the basis, rounded to
// nearest even. Row i goes to element i * row_stride of `rows`, in the original coordinates, cut to `width` values.
struct DecodeJob {
  const codec::SideLayout* side = nullptr;
  int head_dim = 0;  // the block's
  int width = 0;     // values of a row, at most head_dim; nothing behind them is written
  const std::byte* block = nullptr;
  int first = 0;
  int count = 0;
  BasisView basis;
  const float* levels = nullptr;  // lut formats
  const float* centre = nullptr;  // [head_dim], added in their basis to vectors that have it; null: none
  void* rows = nullptr;
  std::int64_t row_stride = 0;  // elements
  Dtype dtype = Dtype::f32;     // the rows' dtype: f32, f16, bf16
};

struct AttendItem;  // core/plan/attend.hpp
struct PrepareItem;
struct MergeItem;

struct Kernels {
  const char* name;                  // "scalar", "avx2"
  const char* detail;                // the instructions used
  bool (*available)();               // the processor and the system have it; asking changes nothing in the process
  bool (*store_k)(const StoreJob&);  // false: the job looks and refused a row; some of its tokens are not stored
  bool (*store_v)(const StoreJob&);
  void (*centre)(const CentreJob&);
  void (*decode_k)(const DecodeJob&);  // the bits of codec/store.hpp and codec/basis.hpp, on every ISA
  void (*decode_v)(const DecodeJob&);
  void (*prepare)(const PrepareItem&);
  void (*attend)(const AttendItem&);
  void (*merge)(const MergeItem&);
  const char* (*product_name)(Format f);  // how that format is multiplied on the vector path, for explain
  const char* tile_products;              // and all formats on the path for many rows
  bool has_matrix;                        // the latter by tiles of bf16 (cpu/attend/matrix.hpp)
  bool multiplies_bytes;  // products of bytes are faster there than those of floats (cpu/attend/levels.hpp)
  // What the path for many rows must ask of the system, once for the process: null on success, else why it is refused.
  // A null pointer: there is nothing to ask.
  const char* (*permit)() = nullptr;
};

std::span<const Kernels* const> all_kernels();  // defined in src/cpu/registry.cpp, best first

}  // namespace kvant::core
