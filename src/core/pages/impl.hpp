// Pages in an engine's blocks, behind kvant::Pages. pages.cpp checks the arguments; two classes each do the rest:
//
//   HostPages, HostPagesPlan       host_pages.cpp, host_pages_write.cpp, host_pages_plan.cpp: CPU kernels
//   DevicePages, DevicePagesPlan   device_pages.hpp: a backend's classes derive from these
//
// There is no CacheTable here: the engine has the sequences. Kernels, schedules and the lists of work are those of a
// cache, which see the same tables of slots and lengths.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/pages.hpp"
#include "core/cache/spec.hpp"
#include "core/plan/planned.hpp"
#include "kvant/pages.hpp"

namespace kvant {

namespace core {

struct Kernels;
struct DeviceBackend;

inline Status refuse_argument(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

// The exact copies of the first and newest blocks, in numbers.
struct PagesTail {
  std::int32_t pages = 0;  // 0: there are no copies
  std::int32_t sink_pages = 0;
  std::int32_t sequences = 0, copies = 0;
  int layers = 1;
  Dtype dtype = Dtype::bf16;
  bool encode_at_once = false;
  codec::PageLayout layout{};  // the layout of a (copy, kv head)
  [[nodiscard]] base::ExactEnds<std::int32_t> ends() const { return {sink_pages, pages}; }
  // [layers][copies][kv heads]
  [[nodiscard]] std::int64_t copy_bytes(int kv_heads) const { return std::int64_t{layout.block_bytes} * kv_heads; }
  // The largest number where there would be more.
  [[nodiscard]] std::int64_t bytes(int kv_heads) const;
  /// A line of explain.
  [[nodiscard]] std::string explain(int kv_heads) const;
};
// The config is checked.
PagesTail pages_tail(const PagesConfig& config, const CacheSpec& spec);

}  // namespace core

/// The alignment of blocks, in bytes.
inline constexpr std::uint32_t kBlockAlignment = 64;

// Pages as their config says, with all that it leaves open.
struct PagesSpec {
  const PagesConfig& config;
  const CacheConfig& cache;
  Format k, v;
  codec::HeadDims stored;  // the sizes at which vectors are stored
};

class PagesImpl : public std::enable_shared_from_this<PagesImpl> {
 public:
  static Result<std::shared_ptr<const PagesImpl>> create(const PagesConfig& config, const core::DeviceBackend* backend);
  explicit PagesImpl(const PagesSpec& s)
      : config_(s.config),
        spec_(s.cache, s.k, s.v, s.stored, kBlockAlignment),
        tail_(core::pages_tail(config_, spec_)) {}
  PagesImpl(const PagesImpl&) = delete;
  PagesImpl& operator=(const PagesImpl&) = delete;
  virtual ~PagesImpl() = default;

  [[nodiscard]] const PagesConfig& config() const noexcept { return config_; }
  [[nodiscard]] const core::CacheSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const core::PagesTail& tail() const noexcept { return tail_; }

  // Arguments are checked: pools, shapes, pointers. The numbers in slots and ids are not.
  virtual Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values,
                       const std::int64_t* slots, std::int64_t count, Stream stream) const = 0;
  virtual Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count,
                        const MutableTensorView& keys, const MutableTensorView& values, Stream stream) const = 0;
  virtual Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
                      Stream stream) const = 0;
  virtual Result<bool> take_non_finite(Stream stream) const = 0;
  /// Calls of begin_step do something.
  [[nodiscard]] bool has_steps() const noexcept { return tail_.pages > 0 || spec_.has_centres(); }
  // Called for pages with a tail or centres only; the sequences of `tables` are as many as a tail has.
  virtual Status begin_step(const StepTables& tables, Stream stream) const = 0;
  // Called for pages with a tail only.
  virtual Result<std::int64_t> take_misses(Stream stream) const = 0;
  /// `options`: complete.
  virtual Result<std::unique_ptr<PagesPlanImpl>> plan(PagesPlanOptions options) const = 0;

  virtual Status check_pool(const BlockPool& pool) const;

 private:
  const PagesConfig config_;
  const core::CacheSpec spec_;  // one layer's
  const core::PagesTail tail_;
};

class PagesPlanImpl {
 public:
  PagesPlanImpl(std::shared_ptr<const PagesImpl> pages, PagesPlanOptions complete)
      : pages_(std::move(pages)), options_(std::move(complete)) {}
  PagesPlanImpl(const PagesPlanImpl&) = delete;
  PagesPlanImpl& operator=(const PagesPlanImpl&) = delete;
  virtual ~PagesPlanImpl() = default;

  [[nodiscard]] const PagesImpl& pages() const noexcept { return *pages_; }
  [[nodiscard]] const PagesPlanOptions& options() const noexcept { return options_; }

  // Pointers, batch and columns are checked.
  virtual Status set_tables(const StepTables& tables, Stream stream) = 0;
  // Pool and tensors are checked.
  virtual Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out,
                     const core::FreshRows& fresh, const RunOptions& options) = 0;
  virtual Result<bool> take_errors(Stream stream) = 0;
  [[nodiscard]] virtual std::string explain() const = 0;
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;
  [[nodiscard]] virtual const char* isa() const noexcept = 0;
  [[nodiscard]] virtual const char* kernel() const noexcept = 0;
  [[nodiscard]] virtual int products() const noexcept = 0;
  [[nodiscard]] virtual int threads() const noexcept = 0;

 protected:
  /// Lines of explain; `of_limits`: the end of the line on limits.
  [[nodiscard]] std::string explain_pages(const char* of_limits = "") const;

 private:
  const std::shared_ptr<const PagesImpl> pages_;
  const PagesPlanOptions options_;
};

}  // namespace kvant
