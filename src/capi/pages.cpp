// kvant.h: pages in an engine's blocks.
#include "kvant/pages.hpp"

#include "capi/handles.hpp"

namespace kvant::capi {

namespace {

kvant_pages_config default_pages_config() {
  kvant_pages_config config{};
  config.struct_size = sizeof config;
  config.k = "tq6";
  config.v = "tq4";
  config.layers = 1;
  config.exact_dtype = -1;
  return config;
}

Result<PagesConfig> to_pages_config(const kvant_pages_config* pointer) {
  kvant_pages_config given = default_pages_config();
  if (Status status = read_struct("config", pointer, given); !status.ok()) return status;
  if (given.v == nullptr) return null_argument("config.v");
  PagesConfig config;
  config.kv_heads = given.kv_heads;
  config.head_dim = given.head_dim;
  config.v_head_dim = to_int(given.v_head_dim);
  config.latent = given.latent;
  config.rope = given.rope;
  if (given.k != nullptr) config.k = given.k;
  config.v = given.v;
  config.threads = given.threads;
  if (given.device != nullptr) config.device = given.device;
  if (given.isa != nullptr) config.isa = given.isa;
  config.tail_pages = given.tail_pages;
  config.tail_sequences = given.tail_sequences;
  config.layers = given.layers;
  config.sink_pages = given.sink_pages;
  config.exact_copies = given.exact_copies;
  config.encode_at_once = given.encode_at_once != 0;
  if (given.exact_dtype != -1) {
    const auto exact = to_dtype("config.exact_dtype", given.exact_dtype);
    if (!exact) return exact.status();
    config.exact = *exact;
  }
  const auto k_centre = to_key_centre("config.k_centre", given.k_centre);
  if (!k_centre) return k_centre.status();
  config.k_centre = *k_centre;
  const auto v_centre = to_key_centre("config.v_centre", given.v_centre);
  if (!v_centre) return v_centre.status();
  config.v_centre = *v_centre;
  return config;
}

Result<BlockPool> to_pool(const kvant_block_pool* pool) {
  if (pool == nullptr) return null_argument("pool");
  return BlockPool{static_cast<std::byte*>(pool->data), pool->blocks, pool->block_stride, pool->head_stride,
                   pool->layer};
}

Result<StepTables> to_tables(const kvant_step_tables* pointer) {
  kvant_step_tables given{};
  if (Status status = read_struct("tables", pointer, given); !status.ok()) return status;
  return StepTables{.block_table = given.block_table,
                    .row_stride = given.row_stride,
                    .columns = given.columns,
                    .seq_lens = given.seq_lens,
                    .query_start_loc = given.query_start_loc,
                    .batch = given.batch,
                    .max_query_len = given.max_query_len};
}

}  // namespace

}  // namespace kvant::capi

using namespace kvant::capi;

extern "C" {

void kvant_pages_config_init(kvant_pages_config* config, size_t struct_size) {
  fill_struct(config, struct_size, default_pages_config());
}

kvant_status kvant_pages_create(const kvant_pages_config* config, kvant_pages** pages) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    *pages = nullptr;
    const auto converted = to_pages_config(config);
    if (!converted) return converted.status();
    auto made = kvant::Pages::create(*converted);
    if (!made) return made.status();
    *pages = new kvant_pages{std::move(*made)};
    return {};
  });
}

void kvant_pages_destroy(kvant_pages* pages) {
  delete pages;
}

kvant_status kvant_pages_block_bytes(const kvant_pages* pages, int64_t* bytes) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    if (bytes == nullptr) return null_argument("bytes");
    *bytes = pages->pages.block_bytes();
    return {};
  });
}

kvant_status kvant_pages_tail_bytes(const kvant_pages* pages, int64_t* bytes) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    if (bytes == nullptr) return null_argument("bytes");
    *bytes = pages->pages.tail_bytes();
    return {};
  });
}
kvant_status kvant_pages_tail_copies(const kvant_pages* pages, int32_t* copies) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    if (copies == nullptr) return null_argument("copies");
    *copies = pages->pages.tail_copies();
    return {};
  });
}

kvant_status kvant_pages_write(const kvant_pages* pages, const kvant_block_pool* pool, const kvant_tensor* keys,
                               const kvant_tensor* values, const int64_t* slots, int64_t count, void* stream) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    const auto blocks = to_pool(pool);
    if (!blocks) return blocks.status();
    const auto k = to_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_view("values", values);
    if (!v) return v.status();
    return pages->pages.write(*blocks, *k, *v, slots, count, {stream});
  });
}

kvant_status kvant_pages_decode(const kvant_pages* pages, const kvant_block_pool* pool, const int32_t* ids,
                                int64_t count, const kvant_mutable_tensor* keys, const kvant_mutable_tensor* values,
                                void* stream) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    const auto blocks = to_pool(pool);
    if (!blocks) return blocks.status();
    const auto k = to_optional_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_optional_view("values", values);
    if (!v) return v.status();
    return pages->pages.decode(*blocks, ids, count, *k, *v, {stream});
  });
}

kvant_status kvant_pages_copy(const kvant_pages* pages, const kvant_block_pool* pool, const int32_t* from,
                              const int32_t* to, int64_t count, void* stream) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    const auto blocks = to_pool(pool);
    if (!blocks) return blocks.status();
    return pages->pages.copy(*blocks, from, to, count, {stream});
  });
}

kvant_status kvant_pages_take_non_finite(const kvant_pages* pages, void* stream, int32_t* found) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    if (found == nullptr) return null_argument("found");
    const auto any = pages->pages.take_non_finite({stream});
    if (!any) return any.status();
    *found = *any ? 1 : 0;
    return {};
  });
}

kvant_status kvant_pages_begin_step(const kvant_pages* pages, const kvant_step_tables* tables, void* stream) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    const auto given = to_tables(tables);
    if (!given) return given.status();
    return pages->pages.begin_step(*given, {stream});
  });
}

kvant_status kvant_pages_take_misses(const kvant_pages* pages, void* stream, int64_t* misses) {
  return guarded([&]() -> kvant::Status {
    if (pages == nullptr) return null_argument("pages");
    if (misses == nullptr) return null_argument("misses");
    const auto found = pages->pages.take_misses({stream});
    if (!found) return found.status();
    *misses = *found;
    return {};
  });
}

kvant_status kvant_pages_plan_create(const kvant_pages* pages, const kvant_attention_options* attention,
                                     const kvant_page_limits* limits, kvant_pages_plan** plan) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    *plan = nullptr;
    if (pages == nullptr) return null_argument("pages");
    if (attention != nullptr && attention->q_lens != nullptr) {
      return {kvant::Code::invalid_argument,
              "attention.q_lens is given: queries are counted by query_start_loc; leave it NULL"};
    }
    const auto options = to_options(attention, 0);
    if (!options) return options.status();
    kvant_page_limits given{};
    if (kvant::Status status = read_struct("limits", limits, given); !status.ok()) return status;
    auto planned = pages->pages.plan({.attention = *options,
                                      .max_batch = given.max_batch,
                                      .max_blocks = given.max_blocks,
                                      .max_query_len = given.max_query_len == 0 ? 1 : given.max_query_len,
                                      .max_tokens = given.max_tokens,
                                      .check_ids = given.check_ids != 0});
    if (!planned) return planned.status();
    *plan = new kvant_pages_plan{std::move(*planned)};
    return {};
  });
}

void kvant_pages_plan_destroy(kvant_pages_plan* plan) {
  delete plan;
}

kvant_status kvant_pages_plan_explain(const kvant_pages_plan* plan, char* buffer, size_t capacity, size_t* size) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    return copy_text(plan->plan.explain(), buffer, capacity, size);
  });
}

kvant_status kvant_pages_plan_describe(const kvant_pages_plan* plan, kvant_pages_plan_facts* facts) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    const kvant::PagesPlan& p = plan->plan;
    const kvant_pages_plan_facts now{sizeof now, p.workspace_bytes(), p.isa(), p.kernel(), p.threads(), p.products()};
    return write_struct("facts", facts, now);
  });
}

kvant_status kvant_pages_plan_set_tables(kvant_pages_plan* plan, const kvant_step_tables* tables, void* stream) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    const auto given = to_tables(tables);
    if (!given) return given.status();
    return plan->plan.set_tables(*given, {stream});
  });
}

kvant_status kvant_pages_plan_run(kvant_pages_plan* plan, const kvant_block_pool* pool, const kvant_tensor* q,
                                  const kvant_mutable_tensor* out, const kvant_run_options* options,
                                  const kvant_tensor* keys, const kvant_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    const auto run_options = to_run_options(options);
    if (!run_options) return run_options.status();
    const auto blocks = to_pool(pool);
    if (!blocks) return blocks.status();
    const auto q_view = to_view("q", q);
    if (!q_view) return q_view.status();
    const auto out_view = to_view("out", out);
    if (!out_view) return out_view.status();
    const auto k = to_optional_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_optional_view("values", values);
    if (!v) return v.status();
    return plan->plan.run(*blocks, *q_view, *out_view, *run_options, *k, *v);
  });
}

kvant_status kvant_pages_plan_take_errors(kvant_pages_plan* plan, void* stream, int32_t* found) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    if (found == nullptr) return null_argument("found");
    const auto any = plan->plan.take_errors({stream});
    if (!any) return any.status();
    *found = *any ? 1 : 0;
    return {};
  });
}

}  // extern "C"
