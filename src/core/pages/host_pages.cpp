// An engine's blocks in host memory: what they are, decoding and copying them. Writing: host_pages_write.cpp;
// attention: host_pages_plan.cpp.
#include "core/pages/host_pages.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "core/fmt.hpp"
#include "core/plan/plan.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// Below this many values a second thread costs more than it saves, as in HostStore::decode.
constexpr std::int64_t kDecodedPerBlockWorker = 65536;

struct BlockDecode {
  const CacheSpec* spec;
  const Kernels* kernels;
  const BlockPool* pool;
  std::span<const std::int32_t> ids;
  int workers;
  const MutableTensorView* keys;
  const MutableTensorView* values;
};

// A worker's run of (block, kv head).
void decode_blocks_share(void* context, int worker) {
  const BlockDecode& run = *static_cast<const BlockDecode*>(context);
  const CacheSpec& spec = *run.spec;
  const std::int64_t heads = spec.config.kv_heads, items = static_cast<std::int64_t>(run.ids.size()) * heads;
  for (std::int64_t i = items * worker / run.workers; i < items * (worker + 1) / run.workers; ++i) {
    const std::int64_t at = i / heads, head = i % heads;
    for (const bool values : {false, true}) {
      const MutableTensorView& out = values ? *run.values : *run.keys;
      if (out.data == nullptr) continue;
      const std::int64_t element = at * kPageTokens * out.stride[0] + head * out.stride[1];
      const std::byte* block = block_of(*run.pool, run.ids[static_cast<std::size_t>(at)], head);
      float centre[codec::kMaxHeadDim];
      const bool centred = spec.is_centred(values);
      if (centred) {
        run.kernels->centre(
            {.values = values, .layout = &spec.encoded, .basis = {}, .rows = {}, .from = block, .centre = centre});
      }
      (values ? run.kernels->decode_v : run.kernels->decode_k)(
          {.side = values ? &spec.encoded.v : &spec.encoded.k,
           .head_dim = (values ? spec.encoded.v : spec.encoded.k).head_dim,
           .width = row_width(spec.config, values).values,
           .block = block,
           .count = kPageTokens,
           .basis = (values ? spec.v_bases : spec.k_bases).at(0, 0),
           .centre = centred ? centre : nullptr,
           .rows = static_cast<std::byte*>(out.data) + element * static_cast<std::int64_t>(dtype_size(out.dtype)),
           .row_stride = out.stride[0],
           .dtype = out.dtype});
    }
  }
}

Status check_block_ids(const char* name, std::span<const std::int32_t> ids, const BlockPool& pool) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < pool.blocks) continue;
    return {Code::invalid_argument,
            fmt::format("{}[{}] is {}: the pool has blocks 0 to {}", name, i, ids[i], pool.blocks - 1)};
  }
  return {};
}

}  // namespace

int workers_for(const CacheSpec& spec, std::int64_t values, std::int64_t least) {
  if (values < 2 * least) return 1;
  const int most = spec.config.threads > 0 ? spec.config.threads : hardware_threads();
  return static_cast<int>(std::clamp<std::int64_t>(values / least, 1, most));
}

Result<std::shared_ptr<const PagesImpl>> HostPages::create(const PagesSpec& spec) {
  AttentionOptions named;
  named.isa = spec.config.isa;
  const Result<const Kernels*> kernels = choose_kernels(named);
  if (!kernels.ok()) return kernels.status();
  auto pages = std::make_shared<HostPages>(spec, **kernels);
  if (Status s = pages->make_tail(); !s) return s;
  return std::shared_ptr<const PagesImpl>(std::move(pages));
}

Status HostPages::decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count,
                         const MutableTensorView& keys, const MutableTensorView& values, Stream) const {
  const std::span<const std::int32_t> blocks(ids, static_cast<std::size_t>(count));
  if (Status s = check_block_ids("ids", blocks, pool); !s) return s;
  encode_unencoded(blocks, pool);
  const codec::HeadDims dims = spec().head_dims();
  const int row_values = (keys.data != nullptr ? dims.k : 0) + (values.data != nullptr ? dims.v : 0);
  const std::int64_t block_values = std::int64_t{kPageTokens} * spec().config.kv_heads * row_values;
  BlockDecode run{.spec = &spec(),
                  .kernels = &kernels_,
                  .pool = &pool,
                  .ids = blocks,
                  .workers = workers_for(spec(), count * block_values, kDecodedPerBlockWorker),
                  .keys = &keys,
                  .values = &values};
  parallel(run.workers, decode_blocks_share, &run);
  return {};
}

Status HostPages::copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
                       Stream) const {
  const std::span<const std::int32_t> sources(from, static_cast<std::size_t>(count));
  const std::span<const std::int32_t> targets(to, static_cast<std::size_t>(count));
  if (Status s = check_block_ids("from", sources, pool); !s) return s;
  if (Status s = check_block_ids("to", targets, pool); !s) return s;
  std::vector<std::int32_t> written(targets.begin(), targets.end()), read(sources.begin(), sources.end());
  std::sort(written.begin(), written.end());
  std::sort(read.begin(), read.end());
  if (const auto twice = std::adjacent_find(written.begin(), written.end()); twice != written.end())
    return {Code::invalid_argument, fmt::format("to has block {} twice: copy to each block once", *twice)};
  for (const std::int32_t block : written) {
    if (!std::binary_search(read.begin(), read.end(), block)) continue;
    return {Code::invalid_argument,
            fmt::format("block {} is in from and in to: copies of one call have no order; make two calls", block)};
  }
  encode_unencoded(sources, pool);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (own_tail_) own_tail_->copies.forget(targets[i]);
    for (std::int64_t head = 0; head < spec().config.kv_heads; ++head) {
      std::memcpy(block_of(pool, targets[i], head), block_of(pool, sources[i], head), spec().encoded.block_bytes);
    }
  }
  return {};
}

Result<std::unique_ptr<PagesPlanImpl>> HostPages::plan(PagesPlanOptions options) const {
  return HostPagesPlan::create(shared_from_this(), std::move(options));
}

}  // namespace kvant::core
