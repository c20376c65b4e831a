// A step: reserve takes slots for its tokens, write stores them layer by layer. append does both for one sequence.
#include <algorithm>
#include <new>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"

namespace kvant {
namespace {

constexpr const char* kNotFollowed = "the device's tables could not be followed on the host; nothing was changed";

}  // namespace

Status CacheImpl::check_layer(int layer) const {
  if (layer >= 0 && layer < config().layers) return {};
  return {Code::invalid_argument, fmt::format("layer = {}: this cache has layers 0 to {}", layer, config().layers - 1)};
}

Status CacheImpl::check_tensor(bool values, const TensorView& t, std::span<const Rows> rows) const {
  const char* name = values ? "values" : "keys";
  const core::RowWidth width = core::row_width(config(), values);
  const bool apart = t.batch_stride != 0;
  std::int64_t tokens = 0;
  for (const Rows& r : rows) tokens = apart ? std::max(tokens, r.tokens) : tokens + r.tokens;
  if (t.dtype > Dtype::bf16) {
    return {Code::invalid_argument, fmt::format("{}.dtype = {}: must be f32, f16 or bf16", name, dtype_name(t.dtype))};
  }
  if (t.shape[0] != tokens || t.shape[1] != config().kv_heads || t.shape[2] != width.values) {
    return {Code::invalid_argument,
            fmt::format("{}.shape = [{}, {}, {}]: must be [{}, {}, {}], {}, kv_heads, {}", name, t.shape[0], t.shape[1],
                        t.shape[2], tokens, config().kv_heads, width.values,
                        apart ? "the most tokens of a sequence in this step (with batch_stride)" : "the step's tokens",
                        width.name)};
  }
  if (t.stride[2] != 1) {
    return {Code::invalid_argument,
            fmt::format("{}.stride[2] = {}: the values of a vector must lie side by side (stride 1); copy the tensor",
                        name, t.stride[2])};
  }
  if (t.data == nullptr && tokens > 0) {
    return {Code::invalid_argument, fmt::format("{}.data is null, and {} tokens are to be read from it", name, tokens)};
  }
  const auto sequences = static_cast<std::int64_t>(rows.size());
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  return store_->check_rows(name, t, rows);
}

Status CacheImpl::check_inputs(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const {
  if (Status s = check_tensor(false, keys, rows); !s) return s;
  if (Status s = check_tensor(true, values, rows); !s) return s;
  return store_->check_dtypes(keys.dtype, values.dtype);
}

// --- the step --------------------------------------------------------------------------------------------------------

Status CacheImpl::reserve(std::span<const Append> appends, Stream stream) try {
  const auto demand = table_.check(appends);
  if (!demand) return demand.status();
  return store_->reserve(appends, *demand, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the step's page tables could not be allocated; append fewer tokens"};
}

Status CacheImpl::reserve_ahead(std::span<const Append> appends, Stream stream) try {
  return store_->reserve_ahead(appends, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNotFollowed};
}

Status CacheImpl::advance(std::span<const Append> appends) try {
  return store_->advance(appends);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNotFollowed};
}

Status CacheImpl::write(std::span<const SequenceId> sequences, int layer, const TensorView& keys,
                        const TensorView& values, Stream stream) try {
  if (Status s = check_layer(layer); !s) return s;
  std::vector<Rows> rows;
  if (Status s = core::check_distinct(sequences); !s) return s;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto found = table_.find(sequences[i], fmt::format("sequences[{}]", i).c_str());
    if (!found) return found.status();
    Sequence& s = **found;
    if (s.step_tokens() > 0 && table_.layer_ready(s, layer)) {
      return {
          Code::invalid_argument,
          fmt::format("sequences[{}] = {}: layer {} is written already, up to token {}; reserve the next tokens first",
                      i, number(sequences[i]), layer, s.length - 1)};
    }
    rows.push_back({sequences[i], &s, s.step_begin, s.step_tokens()});
  }
  if (Status s = check_inputs(rows, keys, values); !s) return s;
  return store_->write(rows, layer, keys, values, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of a write could not be allocated; nothing was changed"};
}

Result<bool> CacheImpl::needs_reserve(const Rows& rows, int layer) const {
  const Sequence& s = *rows.sequence;
  if (table_.layer_ready(s, layer)) return true;
  if (rows.tokens == s.step_tokens()) return false;
  return {
      Code::invalid_argument,
      fmt::format("{} tokens for layer {} of sequence {}: it lacks the {} tokens from {} on that are reserved; append "
                  "exactly these, or truncate to {} to drop them",
                  rows.tokens, layer, number(rows.id), s.step_tokens(), s.step_begin, s.step_begin)};
}

Status CacheImpl::append(SequenceId id, int layer, const TensorView& keys, const TensorView& values,
                         Stream stream) try {
  if (Status s = check_layer(layer); !s) return s;
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  Sequence& s = **found;
  const std::int64_t tokens = keys.shape[0];
  if (tokens < 0) return {Code::invalid_argument, fmt::format("keys.shape[0] = {}: must be 0 or more", tokens)};
  Rows rows{id, &s, s.length, tokens};
  const auto reserves = needs_reserve(rows, layer);
  if (!reserves) return reserves.status();
  if (!*reserves) rows.first_token = s.step_begin;
  if (Status status = check_inputs({&rows, 1}, keys, values); !status) return status;
  if (tokens == 0) return {};
  if (*reserves) {
    // All values are validated before anything is reserved, so that a refusal leaves no trace.
    if (Status status = store_->check_values({&rows, 1}, keys, values); !status) return status;
    const Append step{id, tokens};
    if (Status status = reserve({&step, 1}, stream); !status) return status;
  }
  Status status;
  try {
    status = store_->write({&rows, 1}, layer, keys, values, stream);
  } catch (const std::bad_alloc&) {
    status = {Code::out_of_memory, "working memory of an append could not be allocated; nothing was changed"};
  }
  if (!status && *reserves) static_cast<void>(truncate(id, s.step_begin));  // drops the step; cannot fail
  return status;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of an append could not be allocated; nothing was changed"};
}

Result<bool> CacheImpl::take_non_finite(Stream stream) {
  return store_->take_non_finite(stream);
}

}  // namespace kvant
