#include "core/pages/device_pages.hpp"

#include <utility>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/pages/device_blocks.hpp"

namespace kvant::core {
namespace {

class DevicePagesPlan final : public PagesPlanImpl {
 public:
  DevicePagesPlan(std::shared_ptr<const PagesImpl> of, PagesPlanOptions complete, const char* backend)
      : PagesPlanImpl(std::move(of), std::move(complete)), backend_(backend) {}
  Status make(const DeviceBlocks& blocks) {
    auto made = blocks.plan(options());
    if (!made) return made.status();
    plan_ = std::move(*made);
    return {};
  }

  Status set_tables(const StepTables& tables, Stream stream) override { return plan_->set_tables(tables, stream); }
  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& run_options) override {
    if (run_options.executor.execute != nullptr) {
      return refuse_argument(
          "executor is set, but these pages are on a device, whose kernels do the work: leave executor "
          "empty");
    }
    if (run_options.workspace.size() < workspace_bytes()) {
      return refuse_argument(
          fmt::format("workspace has {} bytes: the plan needs {} of device memory (workspace_bytes), which "
                      "plans that run one after another on a stream can share",
                      run_options.workspace.size(), workspace_bytes()));
    }
    if (reinterpret_cast<std::uintptr_t>(run_options.workspace.data()) % 64 != 0)
      return refuse_argument("workspace is not aligned to 64 bytes");
    if (q.shape[0] == 0) return {};
    if (options().attention.fresh_keys) {
      const PagesTail& tail = pages().tail();
      const auto exact = tail.pages > 0 ? std::optional(tail.dtype) : std::nullopt;
      if (Status s = check_device_fresh(fresh, pages().spec().k, exact); !s) return s;
    }
    return plan_->run(pool, q, out, fresh, run_options);
  }
  Result<bool> take_errors(Stream stream) override { return plan_->take_errors(stream); }
  [[nodiscard]] std::string explain() const override {
    const CacheSpec& spec = pages().spec();
    const PagesPlanOptions& o = options();
    return fmt::format("backend    {} on {}\n", backend_, spec.config.device) +
           fmt::format("pages      an engine's blocks of {} tokens, {}/{}, {}, {} kv heads, {} bytes each\n",
                       kPageTokens, format_info(spec.k).name, format_info(spec.v).name, spec.head_dim_words(),
                       spec.config.kv_heads, spec.encoded.block_bytes) +
           fmt::format(
               "limits     {} sequences of {} blocks, {} queries each and {} in all: launches are made for "
               "these, and follow the tables\n",
               o.max_batch, o.max_blocks, o.max_query_len, o.max_tokens) +
           pages().tail().explain(spec.config.kv_heads) + fresh_line(o.attention) + plan_->explain();
  }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return plan_->workspace_bytes(); }
  [[nodiscard]] const char* isa() const noexcept override { return backend_; }
  [[nodiscard]] const char* kernel() const noexcept override { return plan_->kernel(); }
  [[nodiscard]] int products() const noexcept override { return plan_->products(); }
  [[nodiscard]] int threads() const noexcept override { return 0; }
  [[nodiscard]] bool is_on_host() const noexcept override { return false; }

 private:
  const char* backend_;
  std::unique_ptr<DeviceBlockPlan> plan_;
};

class DevicePagesImpl final : public PagesImpl {
 public:
  DevicePagesImpl(const PagesConfig& config, const CacheConfig& cache, Format k, Format v, codec::HeadDims stored,
                  const DeviceBackend& backend)
      : PagesImpl(config, cache, k, v, stored), backend_(backend) {}
  Status make(int number) {
    auto made = backend_.make_blocks({.device = number,
                                      .encoded = spec().encoded,
                                      .kv_heads = spec().config.kv_heads,
                                      .head_dims = spec().head_dims(),
                                      .latent = spec().is_latent(),
                                      .k = spec().k,
                                      .v = spec().v,
                                      .k_basis = spec().config.k_basis,
                                      .v_basis = spec().config.v_basis,
                                      .tail = tail()});
    if (!made) return made.status();
    blocks_ = std::move(*made);
    return {};
  }

  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream) const override {
    return blocks_->write(pool, keys, values, slots, count, stream);
  }
  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) const override {
    return blocks_->decode(pool, ids, count, keys, values, stream);
  }
  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream) const override {
    return blocks_->copy(pool, from, to, count, stream);
  }
  Result<bool> take_non_finite(Stream stream) const override { return blocks_->take_non_finite(stream); }

  Status begin_step(const StepTables& tables, Stream stream) const override {
    return blocks_->begin_step(tables, stream);
  }
  Result<std::int64_t> take_misses(Stream stream) const override { return blocks_->take_misses(stream); }

  Result<std::unique_ptr<PagesPlanImpl>> plan(PagesPlanOptions options) const override {
    if (Status s = check_device_options(options.attention, "pages on a device are"); !s) return s;
    auto made = std::make_unique<DevicePagesPlan>(shared_from_this(), std::move(options), backend_.name);
    if (Status s = made->make(*blocks_); !s) return s;
    return std::unique_ptr<PagesPlanImpl>(std::move(made));
  }

 private:
  const DeviceBackend& backend_;
  std::unique_ptr<DeviceBlocks> blocks_;
};

}  // namespace

Result<std::shared_ptr<const PagesImpl>> make_device_pages(const PagesConfig& config, const CacheConfig& cache,
                                                           Format k, Format v, int device,
                                                           const DeviceBackend* backend) {
  const bool has_blocks = backend != nullptr && backend->make_blocks != nullptr;
  const std::string request = fmt::format("device = \"{}\"", config.device);
  const Result<codec::HeadDims> stored = stored_dims_on(has_blocks ? backend : nullptr, cache);
  if (!stored) return stored.status();
  if (Status s = check_backend(has_blocks ? backend : nullptr, request, "device = \"cpu\""); !s) return s;
  auto made = std::make_shared<DevicePagesImpl>(config, cache, k, v, *stored, *backend);
  if (Status s = made->make(device); !s) return s;
  return std::shared_ptr<const PagesImpl>(std::move(made));
}

}  // namespace kvant::core
