// An engine's blocks in a device's memory: a backend's classes derive from these, which check what a device asks for
// besides. All pointers in arguments are device memory then, and calls with a stream only enqueue work on it, but for
// those that take numbers.
#pragma once

#include <memory>
#include <string>

#include "core/pages/impl.hpp"

namespace kvant::core {

class DevicePages : public PagesImpl {
 public:
  // `spec.stored` is found here. `backend`: null where none was compiled in.
  static Result<std::shared_ptr<const PagesImpl>> create(PagesSpec spec, int device, const DeviceBackend* backend);
  using PagesImpl::PagesImpl;

  [[nodiscard]] virtual const char* backend() const noexcept = 0;
  Result<std::unique_ptr<PagesPlanImpl>> plan(PagesPlanOptions options) const final;
  Status check_pool(const BlockPool& pool) const final;

 private:
  virtual Result<std::unique_ptr<PagesPlanImpl>> make_plan(PagesPlanOptions options) const = 0;
};

class DevicePagesPlan : public PagesPlanImpl {
 public:
  using PagesPlanImpl::PagesPlanImpl;
  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& options) final;
  [[nodiscard]] std::string explain() const final;
  [[nodiscard]] const char* isa() const noexcept final { return static_cast<const DevicePages&>(pages()).backend(); }
  [[nodiscard]] int threads() const noexcept final { return 0; }

 private:
  // The workspace is checked, too.
  virtual Status attend(const BlockPool& pool, const TensorView& q, const MutableTensorView& out,
                        const FreshRows& fresh, const RunOptions& options) = 0;
  [[nodiscard]] virtual std::string explain_work() const = 0;
};

}  // namespace kvant::core
