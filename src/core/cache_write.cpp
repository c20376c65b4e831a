// A step: reserve takes slots for its tokens, write stores them layer by layer.
//
// Rows arrive as f32, f16 or bf16. They become f32, rounded to the dtype of exact pages where there are exact pages; so
// what is stored depends on the values alone, not on how appends were cut or when a page left the tail. Then, for each
// page that a sequence's step touches and each kv head:
//
//   the page has an exact copy   its rows go there; if it leaves the tail in this step, the whole page is encoded from it
//   it has none                  its rows are encoded in place
//
// In a page-centred cache keys that are encoded are centred (codec/centre.hpp). With an exact tail a page is encoded as
// a whole, from its copy or from a step that is longer than the tail, and centred on its own mean. Without a tail a
// page is centred, when its first token comes, on the mean of the page before as that is stored; which tokens came in
// one step makes no difference, but the pages of a sequence and kv head must be stored in order. A page that is encoded
// in part and has a centre keeps the centre: one that goes on being filled, and one that was truncated so far back that
// its exact copy was gone.
#include <algorithm>
#include <atomic>
#include <new>

#include "codec/centre.hpp"
#include "core/cache_impl.hpp"
#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

// Below this many values a second thread costs more than it saves: encoding takes about 1.5 ns a value, waking a thread
// some ten microseconds.
constexpr std::int64_t kValuesPerWorker = 32768;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Rows that kernels convert while they store them.
struct Tile {
  const void* rows;
  std::int64_t stride;  // elements
  int width;            // of a row
  Dtype dtype;
  Dtype rounding;  // f32: none
};

// One page of one sequence in a step.
struct PageWork {
  core::PageRef ref;
  std::int64_t row;               // of its sequence's
  std::int64_t k_begin, v_begin;  // elements of the sequence's first row in keys and values
  int first, count;               // tokens of the page that get rows
  bool turns;                     // the whole page is encoded from its exact copy
  std::int64_t number;            // of the page in its sequence
  core::PageRef before;           // the page before, if there is one
};

struct StoreRun {
  const CacheImpl* cache;
  const core::Kernels* kernels;
  std::span<const PageWork> work;
  std::span<const std::size_t> chains;  // one begins at work[chains[i]]: pages that must be stored in order
  int layer;
  int workers;
  const TensorView* keys;
  const TensorView* values;
  Dtype rounding;
  std::atomic<bool>* refused;  // some could not be
};

// One side of a kv head's rows of a page.
struct Piece {
  const PageWork* page;
  int head;
  bool values;
};

// A worker's pieces: of every `workers`-th head of every chain, each page's keys and values.
class Pieces {
 public:
  Pieces(const StoreRun& run, int worker) : run_(run), at_(index(worker)) {}
  Piece next() {
    const auto heads = static_cast<std::size_t>(run_.cache->config().kv_heads);
    const std::size_t chain = at_ / heads;
    if (chain + 1 >= run_.chains.size()) return {};
    const Piece piece{&run_.work[run_.chains[chain] + page_], static_cast<int>(at_ % heads), values_};
    values_ = !values_;
    if (!values_ && run_.chains[chain] + ++page_ == run_.chains[chain + 1]) {
      page_ = 0;
      at_ += index(run_.workers);
    }
    return piece;
  }

 private:
  const StoreRun& run_;
  std::size_t at_, page_ = 0;
  bool values_ = false;
};

const TensorView& tensor_of(const StoreRun& run, const Piece& piece) {
  return piece.values ? *run.values : *run.keys;
}

const std::byte* row_of(const StoreRun& run, const Piece& piece, int i) {
  const PageWork& page = *piece.page;
  return core::row_of(tensor_of(run, piece), piece.values ? page.v_begin : page.k_begin, page.row + i, piece.head);
}

// Rows of a page from `first` on that kernels encode at once.
int rows_at_once(const PageWork& page, int first) {
  return std::min(8 - (page.first + first) % 8, page.count - first);
}

core::NextRows rows_from(const StoreRun& run, const Piece& piece, int first) {
  const TensorView& t = tensor_of(run, piece);
  return {row_of(run, piece, first), t.stride[0], rows_at_once(*piece.page, first), t.dtype};
}

// False: some row cannot be stored.
bool store_piece(const StoreRun& run, const Piece& piece, const Piece& next) {
  const PageWork& page = *piece.page;
  const CacheImpl& cache = *run.cache;
  const int head_dim = cache.stored_dim(), width = cache.config().head_dim;
  const auto put = piece.values ? run.kernels->store_v : run.kernels->store_k;
  const auto block = [&](core::Pool pool, std::int32_t slot) {
    // Pages of this step belong to it alone.
    return const_cast<std::byte*>(cache.block(pool, slot, run.layer, piece.head));
  };
  const auto side = [&](core::Pool pool) { return piece.values ? &cache.layout(pool).v : &cache.layout(pool).k; };
  const auto job = [&](core::Pool pool, std::int32_t slot, int first, int count, const Tile& rows) {
    return core::StoreJob{.side = side(pool),
                          .head_dim = head_dim,
                          .width = rows.width,
                          .block = block(pool, slot),
                          .first = first,
                          .count = count,
                          .rows = rows.rows,
                          .row_stride = rows.stride,
                          .basis = {},
                          .levels = nullptr,
                          .centre = nullptr,
                          .dtype = rows.dtype,
                          .rounding = rows.rounding,
                          .looks = false,
                          .next = {}};
  };
  float centre[codec::kMaxHeadDim];
  const auto encoded = [&](int first, int count, const Tile& rows) {
    core::StoreJob to = job(core::Pool::encoded, page.ref.encoded, first, count, rows);
    to.basis = piece.values ? cache.v_basis(run.layer, piece.head) : cache.k_basis(run.layer, piece.head);
    to.levels = piece.values ? cache.v_levels() : cache.k_levels();
    if (!piece.values && cache.is_centred()) to.centre = centre;
    return to;
  };
  const TensorView& tensor = tensor_of(run, piece);
  const auto rows_from_tensor = [&](int i) {
    return Tile{row_of(run, piece, i), tensor.stride[0], width, tensor.dtype, run.rounding};
  };
  const auto rows_of_copy = [&](std::int32_t slot, int first) {
    const std::size_t row_bytes = static_cast<std::size_t>(head_dim) * dtype_size(run.rounding);
    const std::byte* copy = block(core::Pool::exact, slot) + side(core::Pool::exact)->plane_offset[0];
    return Tile{copy + index(first) * row_bytes, head_dim, head_dim, run.rounding, Dtype::f32};
  };

  // Called before rows are encoded; with a page whose exact copy is encoded, after all of its rows are in the copy.
  const auto find_centre = [&] {
    if (piece.values || !cache.is_centred()) return;
    core::CentreJob make{.of = core::CentreJob::Of::stored,
                         .layout = &cache.layout(core::Pool::encoded),
                         .block = block(core::Pool::encoded, page.ref.encoded),
                         .basis = cache.k_basis(run.layer, piece.head),
                         .rows = {},
                         .before = nullptr,
                         .first = 0,
                         .centre = centre};
    const auto of_rows = [&](std::int64_t number, auto rows) {
      make.of = core::CentreJob::Of::rows;
      make.first = codec::first_of_mean(number);
      make.rows = job(core::Pool::encoded, page.ref.encoded, 0, kPageTokens - make.first, rows(make.first));
    };
    if (page.turns) {
      of_rows(page.number, [&](int first) { return rows_of_copy(page.ref.exact, first); });
    } else if (page.first == 0 && cache.config().tail_pages > 0) {
      of_rows(page.number, rows_from_tensor);
    } else if (page.first == 0 && page.number == 0) {
      make.of = core::CentreJob::Of::nothing;
    } else if (page.first == 0 && page.before.exact >= 0) {
      of_rows(page.number - 1, [&](int first) { return rows_of_copy(page.before.exact, first); });
    } else if (page.first == 0) {
      make.of = core::CentreJob::Of::page;
      make.before = block(core::Pool::encoded, page.before.encoded);
      make.first = codec::first_of_mean(page.number - 1);
    }
    run.kernels->centre(make);
  };
  if (page.ref.exact < 0) find_centre();
  for (int i = 0, count = 0; i < page.count; i += count) {
    count = rows_at_once(page, i);
    const Tile rows = rows_from_tensor(i);
    core::StoreJob to = page.ref.exact < 0 ? encoded(page.first + i, count, rows)
                                           : job(core::Pool::exact, page.ref.exact, page.first + i, count, rows);
    to.looks = true;
    if (i + count < page.count) {
      to.next = rows_from(run, piece, i + count);
    } else if (next.page != nullptr) {
      to.next = rows_from(run, next, 0);
    }
    if (!put(to)) return false;
  }
  if (page.ref.exact >= 0 && page.turns) {
    find_centre();
    put(encoded(0, kPageTokens, rows_of_copy(page.ref.exact, 0)));
  }
  return true;
}

void store_share(void* context, int worker) {
  const StoreRun& run = *static_cast<const StoreRun*>(context);
  Pieces pieces(run, worker);
  for (Piece next = pieces.next(); next.page != nullptr;) {
    const Piece here = next;
    next = pieces.next();
    if (!store_piece(run, here, next)) run.refused->store(true, std::memory_order_relaxed);
  }
}

}  // namespace

// --- the step --------------------------------------------------------------------------------------------------------

Status CacheImpl::reserve(std::span<const Append> appends, Stream stream) try {
  auto demand = table_.check(appends);
  if (!demand) return demand.status();
  if (device_) return reserve_on_device(appends, *demand, stream);
  if (Status s = encoded_.grow(demand->encoded_slots); !s) return s;
  demand->encoded_slots = encoded_.slots();
  if (exact_) {
    if (Status s = exact_->grow(demand->exact_slots); !s) return s;
    demand->exact_slots = exact_->slots();
  }
  for (const core::SlotCopy& copy : table_.commit(appends, *demand)) {
    storage(copy.pool).copy(copy.from, copy.to, copy.tokens);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the step's page tables could not be allocated; append fewer tokens"};
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
  return store(rows, layer, keys, values, stream);
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
    // All values are looked at before anything is reserved, so that a refusal leaves no trace.
    if (!device_) {
      if (Status status = check_finite({&rows, 1}, keys, values); !status) return status;
    }
    const Append step{id, tokens};
    if (Status status = reserve({&step, 1}, stream); !status) return status;
  }
  Status status;
  try {
    status = store({&rows, 1}, layer, keys, values, stream);
  } catch (const std::bad_alloc&) {
    status = {Code::out_of_memory, "working memory of an append could not be allocated; nothing was changed"};
  }
  if (!status && *reserves) static_cast<void>(truncate(id, s.step_begin));  // drops the step; cannot fail
  return status;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of an append could not be allocated; nothing was changed"};
}

// For so many values, of which each thread should have `least`.
int CacheImpl::workers_for(std::int64_t values, std::int64_t least) const {
  if (values < 2 * least) return 1;
  const int most = config_.threads > 0 ? config_.threads : core::hardware_threads();
  return static_cast<int>(std::clamp<std::int64_t>(values / least, 1, most));
}

Status CacheImpl::store(std::span<const Rows> rows, int layer, const TensorView& keys, const TensorView& values,
                        Stream stream) {
  if (device_) return store_on_device(rows, layer, keys, values, stream);  // kernels mark what is not finite
  const bool chooses = table_.config().ends.any() && !exact_dtype_;
  if (chooses) {
    const auto chosen = choose_exact(keys.dtype, values.dtype);
    if (!chosen) return chosen.status();
    if (Status s = make_exact(*chosen); !s) return s;
  }

  // Without a tail, a page's centre is found in the page before.
  const bool in_order = is_centred() && config_.tail_pages == 0;
  std::vector<PageWork> work;
  std::vector<std::size_t> chains;
  std::int64_t before = 0, tokens = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Rows& r = rows[i];
    if (r.tokens == 0) continue;
    const Sequence& s = *r.sequence;
    const std::int64_t k_begin = core::first_element(keys, static_cast<std::int64_t>(i), before);
    const std::int64_t v_begin = core::first_element(values, static_cast<std::int64_t>(i), before);
    const core::CacheTable::Range pages = table_.step_pages(s);
    for (std::int64_t p = pages.begin; p < pages.end; ++p) {
      const std::int64_t begin = std::max(s.step_begin, p * kPageTokens);
      const std::int64_t end = std::min(s.length, (p + 1) * kPageTokens);
      const PageWork page{.ref = s.pages[index(p)],
                          .row = begin - s.step_begin,
                          .k_begin = k_begin,
                          .v_begin = v_begin,
                          .first = static_cast<int>(begin - p * kPageTokens),
                          .count = static_cast<int>(std::max<std::int64_t>(0, end - begin)),
                          .turns = table_.turns(s, p),
                          .number = p,
                          .before = p > 0 ? s.pages[index(p - 1)] : core::PageRef{}};
      if (page.count == 0 && !page.turns) continue;
      if (!in_order || page.row == 0) chains.push_back(work.size());
      tokens += page.turns ? kPageTokens : page.count;
      work.push_back(page);
    }
    before += r.tokens;
  }

  const std::int64_t items = static_cast<std::int64_t>(chains.size()) * config_.kv_heads;
  chains.push_back(work.size());
  const int workers = workers_for(2 * tokens * config_.kv_heads * config_.head_dim, kValuesPerWorker);
  std::atomic<bool> refused{false};
  StoreRun run{.cache = this,
               .kernels = kernels_,
               .work = work,
               .chains = chains,
               .layer = layer,
               .workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, workers)),
               .keys = &keys,
               .values = &values,
               .rounding = exact_dtype_.value_or(Dtype::f32),
               .refused = &refused};
  core::parallel(run.workers, store_share, &run);
  if (refused) {
    // What was stored is beyond what any reader sees, and the next write of this layer stores all of it anew.
    if (chooses) exact_.reset(), exact_dtype_.reset();
    if (Status s = check_finite(rows, keys, values); !s) return s;  // says which is the first
    return {Code::non_finite,
            "keys or values changed while they were stored: one was not finite, or above 65504, and is no more; leave "
            "them alone until the call returns, and write them again. Nothing was changed"};
  }
  if (Status s = check_scales(rows, layer); !s) return s;
  for (const Rows& r : rows) {
    if (r.tokens > 0) mark_written(*r.sequence, layer);
  }
  return {};
}

}  // namespace kvant
