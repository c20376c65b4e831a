// How rows are stored in host memory.
//
// Rows arrive as f32, f16 or bf16. They become f32, rounded to the dtype of exact pages where there are exact pages; so
// what is stored depends on the values alone, not on how appends were cut or when a page left the tail. Then, for each
// page that a sequence's step touches and each kv head:
//
//   the page has an exact copy   its rows go there; if it leaves the tail in this step, the whole page is encoded from
//                                this copy
//   it has none                  its rows are encoded in place
//
// In a page-centred cache keys that are encoded are centred unless they refuse (codec/centre.hpp), and latents are
// by the same rules. The first page of a sequence has its first key as the centre. Other pages that are encoded as a
// whole, from the exact copy or from a step that covers them, have their own mean, and are stored side by side. A
// page that a step begins and does not fill, and that has no exact copy, has the mean of the page before as that is
// stored, so it is stored after that page. A page that is encoded in part and has a centre keeps the centre: one
// that goes on being filled, and one that was truncated so far back that its exact copy was gone.
#include <algorithm>
#include <atomic>

#include "codec/centre.hpp"
#include "core/fmt.hpp"
#include "core/store/host_store.hpp"
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
  int width;            // values of a row
  Dtype dtype;
  Dtype rounding;  // f32: none
};

// One page of one sequence in a step.
struct PageWrite {
  core::PageRef ref;
  std::int64_t row;               // its number among its sequence's rows
  std::int64_t k_begin, v_begin;  // elements of the sequence's first row in keys and values
  int first, count;               // tokens of the page that get rows
  bool turns;                     // the whole page is encoded from its exact copy
  std::int64_t number;            // the page's in its sequence
  core::PageRef before;           // the page before, if there is one
};

// A part begins the page, no exact copy will be encoded as a whole, and the page before is held.
bool takes_centre_of_before(const PageWrite& page) {
  const bool begins = page.ref.exact < 0 && page.first == 0 && page.count < kPageTokens;
  return begins && (page.before.encoded >= 0 || page.before.exact >= 0);
}

struct StoreRun {
  const core::CacheSpec* spec;
  const core::Kernels* kernels;
  const core::Storage* encoded;
  const core::Storage* exact;  // null: no page has an exact copy
  std::span<const PageWrite> work;
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
  const PageWrite* page;
  int head;
  bool values;
};

// A worker's pieces: of every `workers`-th head of every chain, each page's keys and values.
class Pieces {
 public:
  Pieces(const StoreRun& run, int worker) : run_(run), at_(index(worker)) {}
  Piece next() {
    const auto heads = static_cast<std::size_t>(run_.spec->config.kv_heads);
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
  const PageWrite& page = *piece.page;
  return core::row_of(tensor_of(run, piece), piece.values ? page.v_begin : page.k_begin, page.row + i, piece.head);
}

// Rows of a page from `first` on that kernels encode at once.
int rows_at_once(const PageWrite& page, int first) {
  return std::min(8 - (page.first + first) % 8, page.count - first);
}

core::NextRows rows_from(const StoreRun& run, const Piece& piece, int first) {
  const TensorView& t = tensor_of(run, piece);
  return {row_of(run, piece, first), t.stride[0], rows_at_once(*piece.page, first), t.dtype};
}

// False: some row cannot be stored.
bool store_piece(const StoreRun& run, const Piece& piece, const Piece& next) {
  const PageWrite& page = *piece.page;
  const core::CacheSpec& spec = *run.spec;
  const codec::HeadDims stored = spec.stored_dims();
  const int head_dim = piece.values ? stored.v : stored.k, width = core::row_width(spec.config, piece.values).values;
  const auto put = piece.values ? run.kernels->store_v : run.kernels->store_k;
  const auto storage = [&](core::Pool pool) { return pool == core::Pool::exact ? run.exact : run.encoded; };
  const auto block = [&](core::Pool pool, std::int32_t slot) {
    return storage(pool)->block(slot, run.layer, piece.head);  // pages of this step belong to it alone
  };
  const auto side = [&](core::Pool pool) {
    const codec::PageLayout& layout = storage(pool)->layout();
    return piece.values ? &layout.v : &layout.k;
  };
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
    to.basis = (piece.values ? spec.v_bases : spec.k_bases).at(run.layer, piece.head);
    to.levels = piece.values ? spec.v_levels() : spec.k_levels();
    if (spec.is_centred(piece.values)) to.centre = centre;
    return to;
  };
  const TensorView& tensor = tensor_of(run, piece);
  const auto rows_from_tensor = [&](int i) {
    return Tile{row_of(run, piece, i), tensor.stride[0], width, tensor.dtype, run.rounding};
  };
  const auto rows_of_copy = [&](std::int32_t slot) {
    const std::byte* copy = block(core::Pool::exact, slot) + side(core::Pool::exact)->plane_offset[0];
    return Tile{copy, head_dim, head_dim, run.rounding, Dtype::f32};
  };

  // Called before rows are encoded; with a page whose exact copy is encoded, after all of its rows are in the copy.
  const auto find_centre = [&] {
    if (!spec.is_centred(piece.values)) return;
    core::CentreJob make{.of = core::CentreJob::Of::stored,
                         .values = piece.values,
                         .layout = &run.encoded->layout(),
                         .block = block(core::Pool::encoded, page.ref.encoded),
                         .basis = (piece.values ? spec.v_bases : spec.k_bases).at(run.layer, piece.head),
                         .rows = {},
                         .from = block(core::Pool::encoded, page.ref.encoded),
                         .centre = centre};
    const auto mean_of = [&](int count, const Tile& rows) {
      make.of = core::CentreJob::Of::rows;
      make.rows = job(core::Pool::encoded, page.ref.encoded, 0, count, rows);
    };
    if (page.turns) {
      mean_of(codec::rows_of_centre(page.number), rows_of_copy(page.ref.exact));
    } else if (page.first == 0 && !takes_centre_of_before(page)) {
      mean_of(page.count == kPageTokens ? codec::rows_of_centre(page.number) : 1, rows_from_tensor(0));
    } else if (page.first == 0 && page.before.exact >= 0) {
      mean_of(kPageTokens, rows_of_copy(page.before.exact));
    } else if (page.first == 0) {
      make.of = core::CentreJob::Of::page;
      make.from = block(core::Pool::encoded, page.before.encoded);
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
    put(encoded(0, kPageTokens, rows_of_copy(page.ref.exact)));
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

Status core::HostStore::write(std::span<const StepRows> rows, int layer, const TensorView& keys,
                              const TensorView& values, Stream) {
  const bool chooses = table_.config().ends.any() && !exact_dtype();
  if (chooses) {
    const auto chosen = choose_exact(keys.dtype, values.dtype);
    if (!chosen) return chosen.status();
    if (Status s = make_exact(*chosen); !s) return s;
  }

  std::vector<PageWrite> work;
  std::vector<std::size_t> chains;
  std::int64_t before = 0, tokens = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const StepRows& r = rows[i];
    if (r.tokens == 0) continue;
    const core::CacheTable::Sequence& s = *r.sequence;
    const std::int64_t k_begin = core::first_element(keys, static_cast<std::int64_t>(i), before);
    const std::int64_t v_begin = core::first_element(values, static_cast<std::int64_t>(i), before);
    const core::CacheTable::Range pages = table_.step_pages(s);
    for (std::int64_t p = pages.begin; p < pages.end; ++p) {
      const std::int64_t begin = std::max(s.step_begin, p * kPageTokens);
      const std::int64_t end = std::min(s.length, (p + 1) * kPageTokens);
      const PageWrite page{.ref = s.pages[index(p)],
                           .row = begin - s.step_begin,
                           .k_begin = k_begin,
                           .v_begin = v_begin,
                           .first = static_cast<int>(begin - p * kPageTokens),
                           .count = static_cast<int>(std::max<std::int64_t>(0, end - begin)),
                           .turns = table_.turns(s, p),
                           .number = p,
                           .before = p > 0 ? s.pages[index(p - 1)] : core::PageRef{}};
      if (page.count == 0 && !page.turns) continue;
      const bool follows = spec_.has_centres() && takes_centre_of_before(page) && page.row > 0;
      if (!follows) chains.push_back(work.size());
      tokens += page.turns ? kPageTokens : page.count;
      work.push_back(page);
    }
    before += r.tokens;
  }

  const std::int64_t items = static_cast<std::int64_t>(chains.size()) * spec_.config.kv_heads;
  chains.push_back(work.size());
  const int workers = workers_for(tokens * spec_.token_values(), kValuesPerWorker);
  std::atomic<bool> refused{false};
  StoreRun run{.spec = &spec_,
               .kernels = &kernels_,
               .encoded = &encoded_,
               .exact = exact_.get(),
               .work = work,
               .chains = chains,
               .layer = layer,
               .workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, workers)),
               .keys = &keys,
               .values = &values,
               .rounding = exact_dtype().value_or(Dtype::f32),
               .refused = &refused};
  core::parallel(run.workers, store_share, &run);
  if (refused) {
    // The stored rows are beyond those that any reader sees, and the next write of this layer stores all of it anew.
    if (chooses) exact_.reset(), unset_exact();
    if (Status s = check_values(rows, keys, values); !s) return s;  // says which is the first
    return {Code::non_finite,
            "keys or values changed while they were stored: one was not finite, or above 65504, and is no more; leave "
            "them alone until the call returns, and write them again. Nothing was changed"};
  }
  if (Status s = check_scales(rows, layer); !s) return s;
  for (const StepRows& r : rows) {
    if (r.tokens > 0) table_.mark_written(*r.sequence, layer);
  }
  return {};
}

}  // namespace kvant
