// The work of a plan over a cache's pages in host memory.
#pragma once

#include "core/plan/host_work.hpp"
#include "core/plan/plan.hpp"
#include "core/store/host_store.hpp"

namespace kvant::core {

class HostPlan final : public PlanWork {
 public:
  static Result<std::unique_ptr<HostPlan>> create(const PlanImpl& plan, const HostStore& store);

  [[nodiscard]] const char* isa() const noexcept override { return lists_.kernels->name; }
  [[nodiscard]] const char* kernel() const noexcept override { return ""; }
  [[nodiscard]] int products() const noexcept override { return lists_.product_bits(); }
  [[nodiscard]] int threads() const noexcept override { return lists_.workers; }
  [[nodiscard]] int splits() const noexcept override { return lists_.most_splits; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return lists_.bytes; }
  [[nodiscard]] std::string explain_place() const override { return {}; }
  [[nodiscard]] std::string explain_mask() const override;
  [[nodiscard]] std::string explain_work() const override;
  Status check_sequences() const override;
  Status check_rows(const char* name, const TensorView& rows) const override;
  Status check_fresh(const FreshRows& fresh) const override;
  Status check_options(const RunOptions& options) const override;
  Status run(int layer, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& options) const override;

 private:
  HostPlan(const PlanImpl& of, const HostStore& where);
  void add_sequences();

  const PlanImpl& plan_;
  const HostStore& store_;
  ClassifiedMask mask_;
  HostWork lists_;
};

}  // namespace kvant::core
