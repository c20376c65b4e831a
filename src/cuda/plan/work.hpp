// The work that a plan is made for, as data: sequences, pages, heads, and the options that choose kernels. Host only;
// no device is needed.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/tuning.hpp"
#include "cuda/plan/times.hpp"
#include "cuda/schedule/schedule.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {

struct PlannedWork {
  // Pages, heads, bases and the rule of which keys queries see. Nothing that a run gives is read.
  const AttendParams& params;
  std::span<const core::DeviceSequence> sequences;  // at least one
  Format k, v;
  const std::string& kernel;  // AttentionOptions::kernel
  bool fresh_keys;
  int products;     // AttentionOptions::products
  bool any_length;  // sequences may have any length at a run, so that some may have no older tokens then

  [[nodiscard]] int head_dim() const { return params.head_dim; }                              // the tensors'
  [[nodiscard]] int stored_head_dim() const { return params.cache.encoded_layout.head_dim; }  // a key's
  [[nodiscard]] bool is_latent() const { return params.latent; }
  [[nodiscard]] int width() const {
    const codec::PageLayout& layout = params.cache.encoded_layout;
    return is_latent() ? latent_width_of({layout.k.head_dim, layout.v.head_dim}) : width_of(layout);
  }
  // "192", "192/128" of keys and values, or "512+64" of latents and rotary keys
  [[nodiscard]] std::string head_dim_words() const {
    const std::string keys = std::to_string(params.head_dim);
    if (is_latent()) return std::to_string(params.v_head_dim) + "+" + keys;
    return params.v_head_dim == params.head_dim ? keys : keys + "/" + std::to_string(params.v_head_dim);
  }
  [[nodiscard]] int kv_heads() const { return params.cache.kv_heads; }
  [[nodiscard]] double page_bytes() const { return params.cache.encoded_layout.block_bytes; }
  [[nodiscard]] std::int64_t pairs() const {  // a sequence and a kv head each
    return static_cast<std::int64_t>(sequences.size()) * kv_heads();
  }
  [[nodiscard]] std::int64_t rows_of(const core::DeviceSequence& s) const {
    return std::int64_t{s.q_len} * params.group;
  }
  [[nodiscard]] std::int64_t most_rows() const {
    std::int64_t most = 0;
    for (const core::DeviceSequence& s : sequences) most = std::max(most, rows_of(s));
    return most;
  }
};

// The work as tunings name it, for a kind of core::kTunedKinds.
inline core::TunedWork tuned_work(const PlannedWork& work, const char* kind) {
  return {core::tuned_kind(kind), work.stored_head_dim(), core::stored(work.k), work.pairs(), work.most_rows()};
}

// The row blocks of decode kernels, each of which reads all pages that some query of its sequence sees.
inline std::vector<times::Rows> row_blocks_of(const PlannedWork& work, std::int64_t rows) {
  std::vector<times::Rows> blocks;
  for (const core::DeviceSequence& s : work.sequences) {
    blocks.push_back({work.kv_heads() * ((work.rows_of(s) + rows - 1) / rows),
                      visible_pages(work.params, static_cast<int>(s.length), s.q_len).count()});
  }
  return blocks;
}

// The tiles of prefill kernels that a sequence has for some kv heads. A tile reads the pages that its own queries see.
inline void add_tiles(const PlannedWork& work, const core::DeviceSequence& s, std::int64_t rows, int kv_heads,
                      std::vector<times::Rows>& tiles) {
  // Neighbouring tiles of a long sequence count as alike.
  constexpr std::int64_t kMostParts = 64;
  if (kv_heads == 0) return;
  const base::Visibility rule = visibility(work.params);
  const std::int64_t group = work.params.group, count = (work.rows_of(s) + rows - 1) / rows;
  for (std::int64_t at = 0, part = 0; at < count; ++part) {
    const std::int64_t end = count <= kMostParts ? at + 1 : count * (part + 1) / kMostParts;
    // The queries of the last tile of the part.
    const std::int64_t first = (end - 1) * rows / group, last = std::min<std::int64_t>(end * rows / group, s.q_len);
    const std::int64_t before = s.length - s.q_len;
    const auto pages =
        base::visible_pages<std::int64_t>(rule, s.length, before + first, before + std::max(first, last - 1));
    tiles.push_back({kv_heads * (end - at), pages.count()});
    at = end;
  }
}
inline std::vector<times::Rows> tiles_of(const PlannedWork& work, std::int64_t rows) {
  std::vector<times::Rows> tiles;
  for (const core::DeviceSequence& s : work.sequences) add_tiles(work, s, rows, work.kv_heads(), tiles);
  return tiles;
}

// The number of (sequence, kv head) pairs whose keys and values blocks read at the same time: as many as fit their
// share of the L2 cache, out of `pairs`. bytes: of one pair.
inline std::int64_t heads_in_cache(double bytes, std::int64_t pairs, const DeviceLimits& limits) {
  constexpr std::int64_t kMostShare = std::int64_t{24} << 20;
  const std::int64_t share = limits.l2_bytes > 0 ? std::min<std::int64_t>(limits.l2_bytes / 2, kMostShare) : kMostShare;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(static_cast<double>(share) / bytes), 1, pairs);
}

}  // namespace kvant::cuda
