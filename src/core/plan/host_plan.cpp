#include "core/plan/host_plan.hpp"

#include <algorithm>

#include "core/fmt.hpp"

namespace kvant::core {

HostPlan::HostPlan(const PlanImpl& of, const HostStore& where)
    : plan_(of), store_(where), lists_(of.cache->spec(), of.options) {}

void HostPlan::add_sequences() {
  const CacheImpl& cache = *plan_.cache;
  for (std::size_t i = 0; i < plan_.sequences.size(); ++i) {
    const PlannedSequence& planned = plan_.sequences[i];
    PageUse* use = lists_.add(planned);
    if (planned.q_len == 0) continue;
    const SequenceView view = *cache.view(plan_.ids[i]);
    for (std::int64_t page = 0; page < pages_for(planned.cached); ++page) {
      const PageRef ref = view.pages[static_cast<std::size_t>(page)];
      const bool exact = ref != PageRef{} && cache.reads_exact(view, page, planned.q_len);
      use[page] = {exact ? ref.exact : ref.encoded, exact ? kExact : kEncoded};
    }
  }
}

Result<std::unique_ptr<HostPlan>> HostPlan::create(const PlanImpl& plan, const HostStore& store) {
  std::unique_ptr<HostPlan> work(new HostPlan(plan, store));
  if (Status s = work->lists_.choose_kernels(); !s.ok()) return s;
  work->add_sequences();
  const bool many_rows = std::any_of(plan.sequences.begin(), plan.sequences.end(), [&](const PlannedSequence& s) {
    return s.q_len > 0 && work->lists_.takes_tiles(s.q_len * plan.group);
  });
  if (Status s = work->lists_.permit_kernels(many_rows); !s.ok()) return s;
  classify_mask(plan, work->mask_);
  work->lists_.build();
  return work;
}

Status HostPlan::check_sequences() const {
  // Slots that a plan keeps are those of its own sequences, and nobody else's change writes to them or frees them:
  // shared pages are copied before they are written to, and counted.
  for (std::size_t i = 0; i < plan_.ids.size(); ++i) {
    const PlannedSequence& planned = plan_.sequences[i];
    if (planned.q_len == 0) continue;
    const Result<SequenceView> now = plan_.cache->view(plan_.ids[i]);
    if (now.ok() && now->version == planned.version) continue;
    return {Code::stale,
            now.ok()
                ? fmt::format("the plan was made for an earlier state of sequence {}, which was {} tokens long "
                              "(tokens were reserved or truncated since, or it was reordered): plan again after "
                              "each step",
                              number(plan_.ids[i]), planned.length)
                : fmt::format("sequence {} was removed since the plan was made: plan again", number(plan_.ids[i]))};
  }
  return {};
}

Status HostPlan::check_rows(const char*, const TensorView&) const {
  return {};
}

Status HostPlan::check_fresh(const FreshRows&) const {
  return {};
}

Status HostPlan::check_options(const RunOptions&) const {
  return {};
}

Status HostPlan::run(int layer, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
                     const RunOptions& options) const {
  const CacheImpl& cache = *plan_.cache;
  RunPages where{};
  where.layer = layer;
  where.fresh = fresh;
  where.layout[kEncoded] = cache.layout(Pool::encoded);
  where.layout[kExact] = cache.layout(Pool::exact);
  where.blocks[kEncoded] = store_.blocks(Pool::encoded, layer);
  where.blocks[kExact] = store_.blocks(Pool::exact, layer);
  return lists_.run(where, mask_.data, q, out, options);
}

Status HostStore::check_plan(const AttentionOptions& o) const {
  if (o.backend == "cuda" && device_backend() == nullptr) {
    return {Code::unsupported,
            "backend is \"cuda\": the CUDA backend is not compiled in (configure with -DKVANT_CUDA=ON), and this cache "
            "lives in host memory; leave backend empty"};
  }
  if (o.backend == "cuda") {
    return {Code::invalid_argument,
            "backend is \"cuda\", but this cache lives in host memory, where kernels do not reach its pages: create it "
            "with CacheConfig::device = \"cuda\", or leave backend empty"};
  }
  if (!o.kernel.empty()) {
    return {
        Code::invalid_argument,
        fmt::format("kernel is \"{}\": only caches on a device have two kinds of kernels; leave it empty", o.kernel)};
  }
  return choose_kernels(o).status();
}

Result<std::unique_ptr<PlanWork>> HostStore::plan(const PlanImpl& plan) {
  auto work = HostPlan::create(plan, *this);
  if (!work) return work.status();
  return std::unique_ptr<PlanWork>(std::move(*work));
}

// --- explain ---------------------------------------------------------------------------------------------------------

std::string HostPlan::explain_mask() const {
  return fmt::format(": {} tiles masked (skipped), {} mixed, {} zero (not added)", mask_.tiles[kTileMasked],
                     mask_.tiles[kTileMixed], mask_.tiles[kTileZero]);
}

std::string HostPlan::explain_work() const {
  const CacheImpl& cache = *plan_.cache;
  return lists_.explain_backend() +
         fmt::format("pages      {} keys encoded, {} exact ({})\n", plan_.keys_read[kEncoded], plan_.keys_read[kExact],
                     cache.exact_dtype() ? dtype_name(*cache.exact_dtype()) : "dtype of the first write") +
         lists_.explain_items();
}

}  // namespace kvant::core
