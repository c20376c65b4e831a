// The seam to a device backend for pages in blocks that an engine owns: see core/pages/impl.hpp. Arguments were checked
// as far as the host can. All pointers in arguments are device memory, and calls with a stream only enqueue work on it,
// but for the two that say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "codec/layout.hpp"
#include "core/pages/impl.hpp"
#include "core/plan/planned.hpp"

namespace kvant::core {

struct DeviceBlocksConfig {
  int device = 0;
  codec::PageLayout encoded;
  int kv_heads = 1;
  codec::HeadDims head_dims;  // the tensors'
  bool latent = false;        // values are latents, which are a part of the keys
  Format k = Format::tq6, v = Format::tq4;
  BasisKind k_basis = BasisKind::none, v_basis = BasisKind::none;
  PagesTail tail;
};

class DeviceBlockPlan {
 public:
  virtual ~DeviceBlockPlan() = default;
  virtual Status set_tables(const StepTables& tables, Stream stream) = 0;
  virtual Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
                     const RunOptions& options) const = 0;
  virtual Result<bool> take_errors(Stream stream) = 0;  // waits
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;
  [[nodiscard]] virtual const char* kernel() const noexcept = 0;
  [[nodiscard]] virtual int products() const noexcept = 0;
  [[nodiscard]] virtual std::string explain() const = 0;
};

class DeviceBlocks {
 public:
  virtual ~DeviceBlocks() = default;
  virtual Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values,
                       const std::int64_t* slots, std::int64_t count, Stream stream) const = 0;
  virtual Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count,
                        const MutableTensorView& keys, const MutableTensorView& values, Stream stream) const = 0;
  virtual Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
                      Stream stream) const = 0;
  virtual Result<bool> take_non_finite(Stream stream) const = 0;  // waits
  // Called for blocks with a tail or centres only.
  virtual Status begin_step(const StepTables& tables, Stream stream) const = 0;
  virtual Result<std::int64_t> take_misses(Stream stream) const = 0;  // waits; for blocks with a tail only
  // `options`: complete. They, and this, outlive the plan.
  [[nodiscard]] virtual Result<std::unique_ptr<DeviceBlockPlan>> plan(const PagesPlanOptions& options) const = 0;
};

}  // namespace kvant::core
