// The work of a plan over pages in a device's memory: its backend plans and runs, from checked options and the
// sequences' places in the device's tables.
#include <optional>

#include "core/fmt.hpp"
#include "core/plan/plan.hpp"
#include "core/store/device_store.hpp"
#include "core/tensor_rows.hpp"

namespace kvant::core {
namespace {

class DeviceWork final : public PlanWork {
 public:
  DeviceWork(const PlanImpl& plan, DeviceCache& pages, const char* backend, std::unique_ptr<DevicePlan> made)
      : plan_(plan), pages_(pages), backend_(backend), device_(std::move(made)) {}

  [[nodiscard]] const char* isa() const noexcept override { return backend_; }
  [[nodiscard]] const char* kernel() const noexcept override { return device_->kernel(); }
  [[nodiscard]] int products() const noexcept override { return device_->products(); }
  [[nodiscard]] int threads() const noexcept override { return 0; }
  [[nodiscard]] int splits() const noexcept override { return device_->splits(); }
  [[nodiscard]] std::int64_t estimated_ns() const noexcept override { return device_->estimated_ns(); }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return device_->workspace_bytes(); }

  [[nodiscard]] std::string explain_place() const override {
    return fmt::format("backend    {} on {}\n", backend_, plan_.cache->config().device);
  }
  [[nodiscard]] std::string explain_mask() const override {
    return ", read anew in each run: pages that it hides from all are skipped, where it hides and adds nothing it "
           "costs nothing";
  }
  [[nodiscard]] std::string explain_work() const override {
    std::string s = fmt::format("pages      {} keys encoded ({}/{}), {} exact, at the planned lengths\n",
                                plan_.keys_read[kEncoded], format_info(plan_.cache->k_format()).name,
                                format_info(plan_.cache->v_format()).name, plan_.keys_read[kExact]);
    s += device_->explain();
    if (s.back() != '\n') s += '\n';
    return s;
  }

  // Kernels read lengths and pages from the device's tables, so a plan outlives steps, but not its sequences.
  Status check_sequences() const override {
    for (std::size_t i = 0; i < plan_.ids.size(); ++i) {
      if (plan_.sequences[i].q_len == 0) continue;
      const Result<SequenceView> view = plan_.cache->view(plan_.ids[i]);
      if (!view.ok() || view->length < plan_.options.q_lens[i]) {
        return {Code::stale,
                fmt::format("sequence {} was removed, or truncated below the plan's q_len, since the plan was "
                            "made: plan again",
                            number(plan_.ids[i]))};
      }
    }
    return {};
  }
  Status check_rows(const char* name, const TensorView& rows) const override {
    const std::vector<int>& q_lens = plan_.options.q_lens;
    return check_packed(name, rows, static_cast<std::int64_t>(q_lens.size()),
                        [&](std::int64_t i) { return q_lens[static_cast<std::size_t>(i)]; });
  }
  Status check_options(const RunOptions& options) const override {
    if (options.executor.execute != nullptr) {
      return {Code::invalid_argument,
              "executor is set, but this cache lives on a device, whose kernels do the work: leave executor empty"};
    }
    if (workspace_bytes() > 0 && options.workspace.data() == nullptr) {
      return {
          Code::invalid_argument,
          fmt::format("workspace is empty: on a device the plan has none of its own; give {} bytes of device memory "
                      "(RunOptions::workspace), which all plans that run one after another on a stream can share",
                      workspace_bytes())};
    }
    return {};
  }
  Status check_fresh(const FreshRows& fresh) const override {
    const CacheImpl& cache = *plan_.cache;
    const auto exact = cache.table().config().ends.any() ? cache.exact_dtype() : std::nullopt;
    if (Status s = check_device_fresh(fresh, cache.k_format(), exact); !s.ok()) return s;
    if (Status s = check_rows("keys", fresh.keys); !s.ok()) return s;
    return check_rows("values", fresh.values);
  }
  Status run(int layer, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& options) const override {
    if (Status s = pages_.flush(options.stream); !s.ok()) return s;
    return device_->run(layer, q, out, fresh, options);
  }

 private:
  const PlanImpl& plan_;
  DeviceCache& pages_;
  const char* backend_;
  std::unique_ptr<DevicePlan> device_;
};

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

}  // namespace

Status check_device_options(const AttentionOptions& o, const char* pages_are) {
  if (o.threads != 0)
    return invalid(fmt::format("threads is {}: {} attended to there; leave it 0", o.threads, pages_are));
  if (!o.isa.empty())
    return invalid(fmt::format("isa is \"{}\": {} attended to there; leave it empty", o.isa, pages_are));
  if (o.split_keys != 0) {
    return invalid(
        fmt::format("split_keys is {}: on a device splits follow the lengths at each run; leave it 0", o.split_keys));
  }
  return {};
}

Status DeviceStore::check_plan(const AttentionOptions& o) const {
  if (o.backend == "cpu") {
    return invalid(
        fmt::format("backend is \"cpu\", but this cache lives on device \"{}\", where the CPU does not reach its "
                    "pages: leave backend empty, or create the cache with CacheConfig::device = \"cpu\"",
                    spec_.config.device));
  }
  return check_device_options(o, "a cache on a device is");
}

Result<std::unique_ptr<PlanWork>> DeviceStore::plan(const PlanImpl& plan) {
  std::vector<DeviceSequence> sequences;
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    const PlannedSequence& s = plan.sequences[i];
    if (s.q_len == 0) continue;
    const Result<std::int32_t> index = device_index(plan.ids[i]);
    if (!index.ok()) return index.status();
    sequences.push_back({*index, static_cast<std::int32_t>(s.q_len), static_cast<std::int32_t>(i), s.length});
  }
  const DevicePlanConfig config{.pages = pages_.get(),
                                .options = &plan.options,
                                .sequences = sequences,
                                .batch = static_cast<std::int32_t>(plan.ids.size()),
                                .k = spec_.k,
                                .v = spec_.v,
                                .kv_heads = spec_.config.kv_heads,
                                .head_dims = spec_.head_dims(),
                                .latent = spec_.is_latent()};
  Result<std::unique_ptr<DevicePlan>> made = backend_.make_plan(config);
  if (!made.ok()) return made.status();
  return std::unique_ptr<PlanWork>(std::make_unique<DeviceWork>(plan, *pages_, backend_.name, std::move(*made)));
}

}  // namespace kvant::core
