// An engine's blocks in host memory.
#pragma once

#include <atomic>
#include <span>

#include "core/backend.hpp"
#include "core/host_work.hpp"
#include "core/pages_impl.hpp"

namespace kvant::core {

class HostPages final : public PagesImpl {
 public:
  static Result<std::shared_ptr<const PagesImpl>> create(const PagesConfig& config, const CacheConfig& cache, Format k,
                                                         Format v);
  HostPages(const PagesConfig& config, const CacheConfig& cache, Format k, Format v, const Kernels& kernels)
      : PagesImpl(config, cache, k, v, stored_head_dim(config.head_dim)), kernels_(kernels) {}

  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream) const override;
  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) const override;
  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream) const override;
  Result<bool> take_non_finite(Stream) const override { return false; }
  Result<std::unique_ptr<PagesPlanImpl>> plan(PagesPlanOptions options) const override;

 private:
  const Kernels& kernels_;
};

class HostPagesPlan final : public PagesPlanImpl {
 public:
  static Result<std::unique_ptr<PagesPlanImpl>> create(std::shared_ptr<const PagesImpl> pages,
                                                       PagesPlanOptions options);
  HostPagesPlan(std::shared_ptr<const PagesImpl> of, PagesPlanOptions complete)
      : PagesPlanImpl(std::move(of), std::move(complete)), lists_(pages().spec(), options().attention) {}

  Status set_tables(const StepTables& tables, Stream stream) override;
  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& options) override;
  Result<bool> take_errors(Stream) override { return false; }
  [[nodiscard]] std::string explain() const override;
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return 0; }
  [[nodiscard]] const char* isa() const noexcept override { return lists_.kernels->name; }
  [[nodiscard]] const char* kernel() const noexcept override { return ""; }
  [[nodiscard]] int threads() const noexcept override { return lists_.workers; }
  [[nodiscard]] bool is_on_host() const noexcept override { return true; }

 private:
  Status refuse_block(std::int64_t blocks) const;

  HostWork lists_;
  bool is_set_ = false;
  std::int64_t queries_ = 0;  // of the batch
  std::int64_t rows_ = 0;     // of q that the batch reaches
  std::int32_t largest_block_ = -1;
  std::int64_t keys_ = 0;  // that a kv head reads
};

// Workers for so many values, of which each should have `least`.
int workers_for(const CacheSpec& spec, std::int64_t values, std::int64_t least);

inline std::byte* block_of(const BlockPool& pool, std::int64_t block, std::int64_t head) {
  return pool.data + block * pool.block_stride + head * pool.head_stride;
}

}  // namespace kvant::core
