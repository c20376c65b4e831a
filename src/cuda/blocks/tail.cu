#include "cuda/blocks/tail.hpp"

#include <algorithm>

#include "base/pages.hpp"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
static_assert(base::kAgeOfUnused < kThreads);

// Sums of the block's threads: of those before this one, and of all.
struct Sum {
  int before, all;
};
__device__ Sum sum_in_order(int x, int* room) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int sum = x;
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    const int other = __shfl_up_sync(~0u, sum, h);
    if (lane >= h) sum += other;
  }
  __syncthreads();  // the room may still be read
  if (lane == 31) room[warp] = sum;
  __syncthreads();
  Sum of{sum - x, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int other = room[w];
    if (w < warp) of.before += other;
    of.all += other;
  }
  return of;
}

// A sequence of the batch that has rows in the step; without rows: one that has none, or does not fit the tables.
struct StepSequence {
  std::int32_t length = 0, q_len = 0, row = 0;
  const std::int32_t* blocks = nullptr;
  base::CopiedPages pages{};
  __device__ std::int32_t begin() const { return length - q_len; }
};
__device__ StepSequence sequence_of(const BeginStep& step, std::int32_t i) {
  const StepTables& t = step.tables;
  if (i >= t.batch) return {};
  const std::int32_t row = t.query_start_loc[i], length = t.seq_lens[i], q_len = t.query_start_loc[i + 1] - row;
  if (q_len <= 0 || length < q_len || base::pages_for(length) > t.columns) return {};
  return {length, q_len, row, t.block_table + i * t.row_stride, base::copied_pages(length, q_len, step.tail.ends)};
}

// A page of the batch that may have a copy.
struct Page {
  enum Kind { none, kept, begins } kind = none;
  std::int32_t block = -1, number = 0;
  std::uint32_t need = 0;  // base::CopyNeed
  bool is_read = false;    // exactly, if it has a copy
  // Its rows in the step, and the position of the first one; behind the step its sequence has so many tokens.
  std::int32_t row = 0, rows = 0, position = 0, length = 0;
};
// Pages of a sequence that may have copies in a step: a long one keeps the tail that it began with.
__device__ std::int32_t pages_of_sequence(const base::ExactEnds<std::int32_t>& ends) {
  return base::copies_of_sequence(ends) + ends.tail_pages;
}
// Number `at` of the batch's: a fixed number for each sequence.
__device__ Page page_of(const BeginStep& step, std::int32_t at) {
  const std::int32_t each = pages_of_sequence(step.tail.ends);
  const StepSequence s = sequence_of(step, at / each);
  if (s.q_len == 0) return {};
  const base::CopiedPages& pages = s.pages;
  const std::int32_t old = max(pages.begun - pages.begin, 0), place = at % each;
  const std::int32_t behind = place - pages.sinks;  // the first pages
  const std::int32_t p = behind < 0 ? place : behind < old ? pages.begin + behind : pages.fresh + behind - old;
  if (p >= pages.end) return {};
  const std::int32_t block = s.blocks[p];
  if (block < 0) return {};  // a window hides the page
  const std::int32_t from = max(p * kPageTokens, s.begin()), to = min((p + 1) * kPageTokens, s.length);
  return {p >= pages.begun ? Page::begins : Page::kept,
          block,
          p,
          static_cast<std::uint32_t>(pages.need(p)),
          pages.is_read(p),
          s.row + from - s.begin(),
          max(to - from, 0),
          from - p * kPageTokens,
          s.length};
}

__device__ void append(const TailState& tail, base::BlockToEncode* list, std::int32_t& count,
                       const base::BlockToEncode& what) {
  const int place = atomicAdd(&count, 1);
  if (place < tail.count) list[place] = what;
}

// The place of a block's entry, which is made if there is none. Many threads at once.
__device__ std::uint32_t insert(const base::CopyTable& table, std::int32_t block) {
  std::uint32_t at = table.first(block);
  for (;; at = (at + 1) & table.mask) {
    const std::int32_t before = atomicCAS(&table.entries[at].block, -1, block);
    if (before < 0 || before == block) return at;
  }
}

__device__ TailCopy copy_at(const TailState& tail, std::int32_t i) {
  return {__ldcg(&tail.copies[i].block), __ldcg(&tail.copies[i].used)};
}
__device__ int age_of(const TailCopy& copy, StepNumber now) {
  return static_cast<int>(base::copy_age(copy.block, copy.used, now));
}
// The entry of a block that wants a copy, below 0: the first of the batch's `pages` pages that wants one.
__device__ std::int32_t mark_of(std::int32_t pages, std::int32_t at) {
  return -2 - (pages - at);
}

// Blocks in the middle of a long step are encoded from its rows. A copy that one of them has is of an earlier life.
__device__ __forceinline__ void forget_middles(const BeginStep& step, std::int32_t thread, bool has_copies) {
  for (std::int32_t i = thread / 32; has_copies && i < step.tables.batch; i += kWarps) {
    const StepSequence s = sequence_of(step, i);
    for (std::int32_t p = max(s.pages.begun, s.pages.sinks) + thread % 32; p < s.pages.fresh; p += 32) {
      if (s.blocks[p] >= 0) step.tail.forget(s.blocks[p]);
    }
  }
}

// Copies that the step needs are used now; blocks without one are marked. Whether this thread marked any.
__device__ __forceinline__ bool mark_wanted(const BeginStep& step, std::int32_t thread, std::int32_t pages,
                                            StepNumber now) {
  const TailState& tail = step.tail;
  bool any = false;
  for (std::int32_t at = thread; at < pages; at += kThreads) {
    const Page page = page_of(step, at);
    if (page.kind == Page::none) continue;
    std::int32_t copy = tail.table.find(page.block);
    if (copy >= 0 && page.kind != Page::begins && __ldcg(tail.written + copy) == 0) {
      tail.forget(page.block);
      copy = -1;
    }
    if (copy >= 0) {
      atomicMax(&tail.copies[copy].used, now - page.need);
      if (page.rows > 0) tail.touched[copy] = now;
    } else if (page.kind == Page::begins) {
      atomicMin(&tail.table.entries[insert(tail.table, page.block)].copy, mark_of(pages, at));
      any = true;
    }
  }
  return any;
}

// Blocks with tokens that only their copies have, and that the step does not write to.
__device__ __forceinline__ void list_full(const TailState& tail, std::int32_t thread, StepNumber now,
                                          StepLists::Counts& counts) {
  for (std::int32_t i = thread; i < tail.count; i += kThreads) {
    const base::Unencoded what{__ldcg(reinterpret_cast<const std::uint32_t*>(tail.unencoded) + i)};
    if (!what.any() || __ldcg(tail.touched + i) == now) continue;
    append(tail, tail.lists.full, counts.full, {copy_at(tail, i).block, i, what});
    tail.unencoded[i] = {};
  }
}

// Lists the marked blocks by need, then in the order of the batch. Returns how many of them, the first ones, get a
// copy. of_age: how many copies there are of each age.
__device__ __forceinline__ int list_wanted(const BeginStep& step, std::int32_t thread, std::int32_t pages,
                                           StepNumber now, const int* of_age, int* sums) {
  const TailState& tail = step.tail;
  int wanted = 0, enough = 0, room = tail.count;
  for (std::uint32_t need = 0; need < base::kCopyNeeds && wanted == enough; ++need) {
    room -= of_age[need];  // older copies than this need's alone are given
    for (std::int32_t first = 0; first < pages; first += kThreads) {
      const std::int32_t at = first + thread;
      const Page page = at < pages ? page_of(step, at) : Page{};
      const bool wants =
          page.kind == Page::begins && page.need == need && tail.table.find(page.block) == mark_of(pages, at);
      const Sum sum = sum_in_order(wants ? 1 : 0, sums);
      if (wants && wanted + sum.before < tail.count) tail.wanted[wanted + sum.before] = {page.block, now - need};
      wanted += sum.all;
    }
    enough = max(enough, min(wanted, room));
  }
  return enough;
}

// Gives listed blocks copies: those above the age `youngest`, and of that age the first `left`.
__device__ __forceinline__ void give_copies(const TailState& tail, std::int32_t thread, StepNumber now,
                                            const int& youngest, const int& left, int* sums) {
  int of_youngest = 0, given = 0;
  for (std::int32_t first = 0; first < tail.count; first += kThreads) {
    const std::int32_t i = first + thread;
    const int a = i < tail.count ? age_of(copy_at(tail, i), now) : -1;
    const Sum same = sum_in_order(a == youngest ? 1 : 0, sums);
    const bool gives = a > youngest || (a == youngest && of_youngest + same.before < left);
    const Sum sum = sum_in_order(gives ? 1 : 0, sums);
    if (gives) {
      const TailCopy* new_owner = tail.wanted + given + sum.before;
      tail.copies[i] = {__ldcg(&new_owner->block), __ldcg(&new_owner->used)};
      tail.written[i] = 0;
      tail.unencoded[i] = {};  // its old block may begin anew in this step
      tail.touched[i] = now;
    }
    of_youngest += same.all;
    given += sum.all;
  }
}

// The table of blocks that have a copy, made anew.
__device__ __forceinline__ void fill_table(const TailState& tail, std::int32_t thread) {
  for (auto i = static_cast<std::uint32_t>(thread); i <= tail.table.mask; i += kThreads)
    tail.table.entries[i] = {-1, -1};
  __syncthreads();
  for (std::int32_t i = thread; i < tail.count; i += kThreads) {
    const std::int32_t block = copy_at(tail, i).block;
    if (block >= 0) tail.table.entries[insert(tail.table, block)].copy = i;
  }
}

// The step's rows that go to copies.
__device__ __forceinline__ void list_rows(const BeginStep& step, std::int32_t thread, std::int32_t pages,
                                          StepLists::Counts& counts) {
  const TailState& tail = step.tail;
  for (std::int32_t at = thread; at < pages; at += kThreads) {
    const Page page = page_of(step, at);
    if (page.kind == Page::none) continue;
    const std::int32_t copy = tail.table.find(page.block);
    if (copy < 0 && page.is_read) atomicAdd(tail.misses, 1ull);
    if (copy < 0 || page.rows == 0) continue;
    base::Unencoded what = base::unencoded_tokens(page.number, page.length);
    if (tail.encode_at_once || base::is_left_behind(page.number, page.length, tail.ends)) {
      append(tail, tail.lists.left, counts.left, {page.block, copy, what});
      what = {};
    }
    CopiedRow to{copy, page.block, page.position, what};
    const int place = atomicAdd(&counts.copied, 1);
    if (place < tail.count) tail.lists.copied[place] = {page.row, page.rows, to};
    for (std::int32_t row = page.row; row < min(page.row + page.rows, kListedRows); ++row, ++to.position) {
      if (row >= 0) tail.lists.rows[row] = to;
    }
  }
}

// Sequences whose last page begins in the step, and has no copy.
__device__ __forceinline__ void list_begun(const BeginStep& step, std::int32_t thread, StepLists::Counts& counts) {
  const TailState& tail = step.tail;
  for (std::int32_t i = thread; i < step.tables.batch; i += kThreads) {
    const StepSequence s = sequence_of(step, i);
    const std::int32_t p = (s.length - 1) / kPageTokens;  // the last page
    if (p <= 0 || p * kPageTokens < s.begin() || s.blocks[p] < 0 || tail.has_copy(s.blocks[p])) continue;
    const int place = atomicAdd(&counts.begun, 1);
    if (place < kListedRows) tail.lists.begun[place] = i;
  }
}

// As core::TailCopies::begin_step, whose steps these are.
__global__ void __launch_bounds__(kThreads, 1) begin_step_kernel(const __grid_constant__ BeginStep step) {
  __shared__ int sums[kWarps];
  __shared__ int of_age[base::kAgeOfUnused + 1];
  __shared__ int youngest, left;
  __shared__ StepLists::Counts counts;
  const TailState& tail = step.tail;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const StepNumber now = __ldcg(tail.step) + base::kNumbersOfStep;
  const bool has_copies = tail.count > 0;
  const std::int32_t pages = has_copies ? step.tables.batch * pages_of_sequence(tail.ends) : 0;

  if (thread == 0) counts = {};
  for (std::int32_t i = thread; has_copies && i < kListedRows; i += kThreads) tail.lists.rows[i].copy = -1;
  forget_middles(step, thread, has_copies);
  __syncthreads();
  const bool any = __syncthreads_or(mark_wanted(step, thread, pages, now) ? 1 : 0) != 0;
  if (thread == 0) *tail.step = now;
  list_full(tail, thread, now, counts);
  if (any) {
    if (thread <= static_cast<std::int32_t>(base::kAgeOfUnused)) of_age[thread] = 0;
    __syncthreads();
    for (std::int32_t i = thread; i < tail.count; i += kThreads) atomicAdd(&of_age[age_of(copy_at(tail, i), now)], 1);
    __syncthreads();
    const int enough = list_wanted(step, thread, pages, now, of_age, sums);

    // Room for them: copies of the highest ages, of the youngest of these ages the first ones.
    if (thread == 0) youngest = static_cast<int>(base::kAgeOfUnused) + 1, left = 0;  // nobody gives
    const int my_age = static_cast<int>(base::kAgeOfUnused) - thread, mine = my_age >= 0 ? of_age[my_age] : 0;
    const int older = sum_in_order(mine, sums).before;
    if (older < enough && enough <= older + mine) youngest = my_age, left = enough - older;
    __syncthreads();
    give_copies(tail, thread, now, youngest, left, sums);
    __syncthreads();
    fill_table(tail, thread);
  }
  __syncthreads();
  list_rows(step, thread, pages, counts);
  list_begun(step, thread, counts);
  __syncthreads();
  if (thread == 0) {
    counts.copied = min(counts.copied, tail.count);
    counts.left = min(counts.left, tail.count);
    counts.asked = 0;
    *tail.lists.counts = counts;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    list_unencoded_kernel(const __grid_constant__ TailState tail, const std::int32_t* blocks, std::int64_t count) {
  __shared__ std::int32_t found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const std::int32_t block = blocks[i], copy = block < 0 ? -1 : tail.table.find(block);
    if (copy < 0) continue;
    const base::Unencoded what{__ldcg(reinterpret_cast<const std::uint32_t*>(tail.unencoded) + copy)};
    if (!what.any()) continue;
    const int place = atomicAdd(&found, 1);
    if (place < tail.count) tail.lists.asked[place] = {block, copy, what};
  }
  __syncthreads();
  if (threadIdx.x == 0) tail.lists.counts->asked = min(found, tail.count);
}

__global__ void __launch_bounds__(kThreads) clear_tail_kernel(const __grid_constant__ TailState tail) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x,
                     step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = first; i < tail.count; i += step) tail.copies[i] = {-1, 0};
  for (std::int64_t i = first; i <= tail.table.mask; i += step) tail.table.entries[i] = {-1, -1};
}

}  // namespace

cudaError_t begin_step(const BeginStep& step, cudaStream_t stream) {
  begin_step_kernel<<<1, kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}
cudaError_t list_unencoded(const TailState& tail, const std::int32_t* blocks, std::int64_t count, cudaStream_t stream) {
  list_unencoded_kernel<<<1, kThreads, 0, stream>>>(tail, blocks, count);
  return cudaGetLastError();
}
cudaError_t clear_tail(const TailState& tail, cudaStream_t stream) {
  clear_tail_kernel<<<64, kThreads, 0, stream>>>(tail);
  return cudaGetLastError();
}

}  // namespace kvant::cuda
