#include "core/pages/device_pages.hpp"

#include <optional>
#include <utility>

#include "core/device.hpp"
#include "core/fmt.hpp"

namespace kvant::core {

Result<std::shared_ptr<const PagesImpl>> DevicePages::create(PagesSpec spec, int device, const DeviceBackend* backend) {
  if (backend != nullptr && backend->make_pages == nullptr) backend = nullptr;
  const std::string request = fmt::format("device = \"{}\"", spec.config.device);
  const Result<codec::HeadDims> stored = stored_dims_on(backend, spec.cache);
  if (!stored) return stored.status();
  if (Status s = check_backend(backend, request, "device = \"cpu\""); !s) return s;
  spec.stored = *stored;
  return backend->make_pages(spec, device);
}

Result<std::unique_ptr<PagesPlanImpl>> DevicePages::plan(PagesPlanOptions options) const {
  if (Status s = check_device_options(options.attention, "pages on a device are"); !s) return s;
  return make_plan(std::move(options));
}

Status DevicePages::check_pool(const BlockPool& pool) const {
  if (Status s = PagesImpl::check_pool(pool); !s) return s;
  if (spec().config.kv_heads == 1 || pool.head_stride == spec().encoded.block_bytes) return {};
  return {
      Code::unsupported,
      fmt::format("pool.head_stride is {} bytes: on a device the kv heads of a block follow one another, so it must "
                  "be {} (block_bytes)",
                  pool.head_stride, spec().encoded.block_bytes)};
}

Status DevicePagesPlan::run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out,
                            const FreshRows& fresh, const RunOptions& run_options) {
  if (run_options.executor.execute != nullptr) {
    return refuse_argument(
        "executor is set, but these pages are on a device, whose kernels do the work: leave executor empty");
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
  return attend(pool, q, out, fresh, run_options);
}

std::string DevicePagesPlan::explain() const {
  return fmt::format("backend    {} on {}\n", isa(), pages().spec().config.device) +
         explain_pages(": launches are made for these, and follow the tables") + fresh_line(options().attention) +
         explain_work();
}

}  // namespace kvant::core
