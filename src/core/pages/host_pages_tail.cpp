// The steps of an engine with blocks in host memory, the exact copies of its newest blocks, and how blocks are encoded
// from these: once and whole, in all layers, before the writes of the step behind the one that fills them. A block that
// loses its copy before that is encoded as far as it was written, and the rest of it is cleared.
#include <algorithm>
#include <cstring>

#include "codec/centre.hpp"
#include "core/fmt.hpp"
#include "core/pages/host_pages.hpp"
#include "core/threads.hpp"

namespace kvant::core {

struct CopyEncode {
  const CacheSpec* spec;
  const Kernels* kernels;
  const HostTail* tail;
  std::span<const base::BlockToEncode> blocks;
  std::span<const BlockPool> pools;
  int workers = 1;
};

void encode_block(const CopyEncode& e, const BlockPool& pool, const base::BlockToEncode& from, int head) {
  if (pool.data == nullptr || from.block >= pool.blocks) return;
  const CacheSpec& spec = *e.spec;
  const int tokens = from.what.tokens();
  std::byte* block = block_of(pool, from.block, head);
  std::memset(block, 0, spec.encoded.block_bytes);
  float centre[codec::kMaxHeadDim];
  for (const bool values : {false, true}) {
    StoreJob job = e.tail->rows_of_copy(from.copy, pool.layer, head, values, tokens);
    job.side = values ? &spec.encoded.v : &spec.encoded.k;
    job.block = block;
    job.basis = (values ? spec.v_bases : spec.k_bases).at(0, 0);
    if (spec.is_centred(values)) {
      CentreJob make{.of = CentreJob::Of::rows,
                     .values = values,
                     .layout = &spec.encoded,
                     .block = block,
                     .basis = job.basis,
                     .rows = job,
                     .centre = centre};
      if (from.what.is_first_page()) make.rows.count = codec::rows_of_centre(0);
      e.kernels->centre(make);
      job.centre = centre;
    }
    (values ? e.kernels->store_v : e.kernels->store_k)(job);
  }
}

// Every `workers`-th (block, pool, kv head).
void encode_copies_share(void* context, int worker) {
  const CopyEncode& e = *static_cast<const CopyEncode*>(context);
  const auto heads = static_cast<std::size_t>(e.spec->config.kv_heads);
  const std::size_t items = e.blocks.size() * e.pools.size() * heads;
  for (auto i = static_cast<std::size_t>(worker); i < items; i += static_cast<std::size_t>(e.workers)) {
    encode_block(e, e.pools[i / heads % e.pools.size()], e.blocks[i / heads / e.pools.size()],
                 static_cast<int>(i % heads));
  }
}

// More is refused without asking the system, some of which would promise any number of bytes.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 39;

Status HostPages::make_tail() {
  if (tail().pages == 0) return {};
  const std::int64_t bytes = tail().bytes(config().kv_heads);
  if (bytes <= kMostBytes) {
    own_tail_ = std::make_unique<HostTail>(tail(), config().kv_heads);
    if (own_tail_->storage.grow(tail().copies).ok()) return {};
  }
  return {Code::out_of_memory,
          fmt::format("{} bytes for the exact tail could not be allocated; lower tail_sequences", bytes)};
}

StoreJob HostTail::rows_of_copy(std::int32_t copy, int layer, int head, bool values, int count) const {
  const codec::SideLayout& side = values ? storage.layout().v : storage.layout().k;
  StoreJob job;
  job.head_dim = job.width = side.head_dim;
  job.count = count;
  job.rows = storage.block(copy, layer, head) + side.plane_offset[0];
  job.row_stride = side.head_dim;
  job.dtype = dtype;
  return job;
}

void HostPages::encode_from_copies(std::span<const base::BlockToEncode> blocks,
                                   std::span<const BlockPool> pools) const {
  if (blocks.empty()) return;
  const auto items = static_cast<std::int64_t>(blocks.size() * pools.size()) * spec().config.kv_heads;
  const std::int64_t values = items / spec().config.kv_heads * kPageTokens * spec().token_values();
  const auto workers = std::min<std::int64_t>(items, workers_for(spec(), values, kEncodedPerWorker));
  CopyEncode encode{.spec = &spec(),
                    .kernels = &kernels_,
                    .tail = own_tail(),
                    .blocks = blocks,
                    .pools = pools,
                    .workers = static_cast<int>(workers)};
  parallel(encode.workers, encode_copies_share, &encode);
}

void HostPages::encode_unencoded(std::span<const std::int32_t> blocks, const BlockPool& pool) const {
  if (!own_tail_) return;
  const auto known = std::find_if(own_tail_->pools.begin(), own_tail_->pools.end(),
                                  [&](const BlockPool& other) { return other.data == pool.data; });
  if (known == own_tail_->pools.end()) return;
  for (const std::int32_t block : blocks) {
    const std::int32_t copy = own_tail_->copies.find(block);
    if (copy < 0 || !own_tail_->copies.unencoded(copy).any()) continue;
    const base::BlockToEncode one{block, copy, own_tail_->copies.unencoded(copy)};
    encode_from_copies({&one, 1}, {&*known, 1});
  }
}

Status HostPages::begin_step(const StepTables& t, Stream) const {
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int64_t q_len = std::int64_t{t.query_start_loc[i + 1]} - t.query_start_loc[i], length = t.seq_lens[i];
    if (q_len < 0)
      return refuse_argument(
          fmt::format("query_start_loc[{}] is {}, less than the one before", i + 1, t.query_start_loc[i + 1]));
    if (q_len == 0) continue;
    if (length < q_len || base::pages_for(length) > t.columns) {
      return refuse_argument(
          fmt::format("seq_lens[{}] is {}: must be {} or more, the sequence's queries, and block_table has {} columns",
                      i, length, q_len, t.columns));
    }
  }
  if (has_steps()) step_->read(t);
  if (own_tail_) own_tail_->copies.begin_step(t);
  if (has_steps()) step_->take();  // memory may have been missing so far
  if (own_tail_) {
    encode_from_copies(own_tail_->copies.to_encode(), own_tail_->pools);
  }
  return {};
}

void TableRows::read(const StepTables& t) {
  next_.starts.assign(1, t.batch > 0 ? t.query_start_loc[0] : 0);
  next_.lengths.clear();
  next_.blocks.clear();
  next_.first.clear();
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int32_t end = t.query_start_loc[i + 1];
    const bool has_rows = end > t.query_start_loc[i];
    next_.starts.push_back(end);
    next_.lengths.push_back(t.seq_lens[i]);
    next_.first.push_back(next_.blocks.size());
    const std::int32_t* blocks = t.block_table + i * t.row_stride;
    if (has_rows) next_.blocks.insert(next_.blocks.end(), blocks, blocks + base::pages_for(t.seq_lens[i]));
  }
}

TableRows::Place TableRows::place(std::int64_t row, std::int64_t slot) const {
  const auto& [starts, lengths, blocks, first] = now_;
  if (row < starts.front() || row >= starts.back()) return {};
  const auto after = std::upper_bound(starts.begin(), starts.end(), row);
  const auto i = static_cast<std::size_t>(after - starts.begin() - 1);
  const std::int64_t position = lengths[i] - (*after - row), page = position / kPageTokens;
  const std::int32_t* block = blocks.data() + first[i] + page;
  if (*block != slot / kPageTokens || position % kPageTokens != slot % kPageTokens) return place_in_any_row(slot);
  return {page, page > 0 ? block[-1] : -1, lengths[i]};
}

// Rows in another order than the tables': the slot's block is among those that the step's queries belong to.
TableRows::Place TableRows::place_in_any_row(std::int64_t slot) const {
  const auto& [starts, lengths, blocks_of_all, first] = now_;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int32_t queries = starts[i + 1] - starts[i];
    if (queries == 0) continue;
    const std::int32_t* blocks = blocks_of_all.data() + first[i];
    for (std::int64_t page = (lengths[i] - queries) / kPageTokens; page * kPageTokens < lengths[i]; ++page) {
      if (blocks[page] != slot / kPageTokens) continue;
      const std::int64_t position = page * kPageTokens + slot % kPageTokens;
      if (position < lengths[i] - queries || position >= lengths[i]) continue;
      return {page, page > 0 ? blocks[page - 1] : -1, lengths[i]};
    }
  }
  return {};
}

}  // namespace kvant::core
