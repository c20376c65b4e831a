// The kernels of cuda/append/slots.hpp, for one head_dim. Encoding is that of a cache's pages (write_page.cuh).
#pragma once

#include "cuda/append/slots.hpp"
#include "cuda/append/write.cuh"

namespace kvant::cuda {

// Tokens of a launch up to which a warp does an octet at most.
inline constexpr int kFewSlots = 2048;

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions; none: another thread's, or not stored
  // The first octet of those that are cleared; kOctets: none. The write that stores a block's first position clears
  // what it does not store, because kernels load all tokens of a page, and these must decode to finite numbers.
  int clear_octet;
};

// Whether token `at` belongs to the same run of slots as token i, which has `slot`.
__device__ __forceinline__ bool follows(const SlotList& list, std::int32_t i, std::int64_t slot, std::int32_t at) {
  return at >= 0 && at < list.count && list.slots[at] == slot + (at - i);
}

// The run, or with kByOctet its part in an octet, that begins with token i; by a whole warp.
template <bool kByOctet>
__device__ __forceinline__ SlotRun find_run(const WriteParams& params, const SlotList& list, std::int32_t i) {
  constexpr int kUnit = kByOctet ? kOctet : kPageTokens;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t slot = list.slots[i];
  SlotRun run{slot / kPageTokens, static_cast<int>(slot % kPageTokens), 0, kOctets};
  if (slot < 0) return run;
  if (slot >= list.places) {
    *params.non_finite = 1;
    return run;
  }
  const auto same_run = [&](std::int32_t at) { return follows(list, i, slot, at); };
  if (run.first % kUnit != 0 && same_run(i - 1)) return run;
  const int most = min(kUnit - run.first % kUnit, list.count - i);
  for (int from = 0; from < most; from += 32) {
    const unsigned others = __ballot_sync(~0u, from + lane >= most || !same_run(i + from + lane));
    const int more = others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
    run.count += more;
    if (more < 32) break;
  }
  const int end = run.first + run.count;
  const bool is_last = end < kPageTokens && !(kByOctet && same_run(i + run.count));
  if (is_last && same_run(i - run.first)) run.clear_octet = (end - 1) / kOctet;
  return run;
}

// One side of a block from an octet of tokens on becomes zeros; by a team.
template <class Shape>
__device__ __forceinline__ void clear_octets(const codec::SideLayout& side, std::byte* block, int octet) {
  const auto clear = [&](std::size_t offset, int bytes_of_octet) {  // multiples of 16
    auto* at = reinterpret_cast<uint4*>(block + offset + static_cast<std::size_t>(octet * bytes_of_octet));
    const int count = (kOctets - octet) * bytes_of_octet / 16;
    for (int i = thread_of_team<Shape>(); i < count; i += Shape::kTeamThreads) at[i] = uint4{};
  };
  if (side.planes == 0) return clear(side.plane_offset[0], kOctet * Shape::kD * side.element_bytes);
  for (int i = 0; i < side.planes; ++i) clear(side.plane_offset[i], Shape::kD * side.plane_bits[i]);
  for (int g = 0; g < side.groups; ++g)
    clear(side.scale_offset + static_cast<std::size_t>(g) * kPageTokens * 2, kOctet * 2);
}

__device__ __forceinline__ PageJob slot_job(const WriteParams& params, const SlotRun& run, std::int32_t token, int head,
                                            bool is_value) {
  const CacheView& cache = params.cache;
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = cache.encoded + static_cast<std::uint64_t>(run.block) * cache.encoded_slot_bytes +
                     static_cast<std::uint64_t>(head) * cache.encoded_layout.block_bytes,
          .exact = nullptr,
          .head = head,
          .is_value = is_value,
          .first_row = token,
          .begin = run.first,
          .count = run.count};
}

// The bytes behind the parts of a block with a centre, whose size is rounded up; by a warp.
__device__ __forceinline__ void clear_padding(const PageJob& job) {
  const codec::PageLayout& layout = job.params->cache.encoded_layout;
  const std::uint32_t used = layout.code_bytes + layout.scale_bytes, at = used + 16 * (threadIdx.x % 32);
  if (at < layout.block_bytes) *reinterpret_cast<uint4*>(job.encoded + at) = uint4{};
}

template <class Shape>
__device__ __forceinline__ void clear_heads(PageJob job, int heads, int octet) {
  if (octet >= kOctets) return;
  for (; heads > 0; --heads) {
    clear_octets<Shape>(job.layout(false), job.encoded, octet);
    job.to_next_head();
  }
  team_barrier<Shape>();  // words that the run shares with what was cleared are read again
}

// --- centres of blocks -----------------------------------------------------------------------------------------------

// A sequence's part of the step.
struct SlotStep {
  std::int32_t row, count;     // its rows
  std::int32_t begin, length;  // positions: of its first row, and behind its last
  const std::int32_t* blocks;
};
__device__ __forceinline__ SlotStep step_of(const SlotTables& t, std::int32_t sequence) {
  const std::int32_t row = t.query_start_loc[sequence], count = t.query_start_loc[sequence + 1] - row;
  const std::int32_t length = t.seq_lens[sequence];
  return {row, count, length - count, length, t.block_table + sequence * t.row_stride};
}

// The sequence that a row belongs to; -1: none.
__device__ __forceinline__ std::int32_t sequence_of(const SlotTables& t, std::int32_t row) {
  std::int32_t low = 0, high = t.batch;  // the last one that begins at the row or before it
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (t.query_start_loc[middle] <= row ? low : high) = middle;
  }
  return t.batch > 0 && t.query_start_loc[low] <= row && row < t.query_start_loc[low + 1] ? low : -1;
}

// Where the centre of a block comes from whose first position this write stores, at row i.
struct BegunBlock {
  bool is_first;        // in its sequence, or in none that is known: its first key is the centre
  std::int64_t before;  // the block whose mean is the centre if a part of the write begins this one; -1: the first key
  bool follows;         // this write stores tokens of the block before, too
};
__device__ __forceinline__ BegunBlock begun_block(const SlotList& list, std::int32_t i, std::int64_t block) {
  BegunBlock begun{true, -1, false};
  const SlotTables& t = list.tables;
  const std::int32_t sequence = sequence_of(t, i);
  if (sequence < 0) return begun;
  const SlotStep step = step_of(t, sequence);
  const std::int32_t position = step.begin + i - step.row, page = position / kPageTokens;
  if (position <= 0 || position % kPageTokens != 0 || page >= t.columns || step.blocks[page] != block) return begun;
  begun.is_first = false;
  const std::int32_t before = step.blocks[page - 1];
  // No launch comes after all blocks but the last.
  if (before < 0 || before >= list.places / kPageTokens || page != (step.length - 1) / kPageTokens) return begun;
  begun.before = before;
  begun.follows = i > step.row;
  return begun;
}

// A block that a sequence's step ends and does not begin, and that has a complete exact copy.
struct EndedBlock {
  std::int64_t block;  // -1: none
  std::int32_t copy, row;
  int begin;  // the first position that the step stores
  bool is_first;
};
__device__ __forceinline__ EndedBlock ended_block(const SlotList& list, std::int32_t sequence) {
  EndedBlock ended{-1, -1, 0, 0, false};
  const SlotStep step = step_of(list.tables, sequence);
  if (step.count <= 0 || step.begin <= 0 || step.row < 0) return ended;
  const std::int32_t page = step.begin / kPageTokens, begin = step.begin % kPageTokens;
  const std::int32_t last_row = step.row + kPageTokens - 1 - begin;
  if (begin == 0 || step.length < (page + 1) * kPageTokens || last_row >= list.count) return ended;
  const std::int64_t slot = list.slots[last_row];
  if (slot < 0 || slot >= list.places || slot % kPageTokens != kPageTokens - 1) return ended;
  if (list.slots[step.row] != slot - (last_row - step.row)) return ended;
  ended.copy = list.copies.find(static_cast<std::int32_t>(slot / kPageTokens));
  if (ended.copy < 0 || __ldcg(list.written + ended.copy) == 0) return ended;
  ended.block = slot / kPageTokens, ended.row = step.row, ended.begin = begin, ended.is_first = page == 0;
  return ended;
}
__device__ __forceinline__ bool is_ended_from_copy(const SlotList& list, std::int32_t last_row, std::int64_t block) {
  if (list.copies.entries == nullptr) return false;
  const std::int32_t copy = list.copies.find(static_cast<std::int32_t>(block));
  if (copy < 0 || __ldcg(list.written + copy) == 0) return false;
  const std::int32_t sequence = sequence_of(list.tables, last_row);
  return sequence >= 0 && ended_block(list, sequence).block == block;
}
__device__ __forceinline__ PageJob ended_job(const WriteParams& params, const EndedBlock& ended, int head) {
  const CacheView& cache = params.cache;
  const SlotRun run{ended.block, ended.begin, kPageTokens - ended.begin, kOctets};
  PageJob job = slot_job(params, run, ended.row, head, false);
  job.exact = cache.exact + static_cast<std::uint64_t>(ended.copy) * cache.exact_slot_bytes +
              static_cast<std::uint64_t>(head) * cache.exact_layout.block_bytes;
  job.is_first_page = ended.is_first;
  return job;
}

// How the keys of a run in a block are to be centred.
struct SlotCentre {
  bool is_left;         // to another launch, or other warps
  int rows;             // as CentreJob has it
  std::int32_t row;     // the block's first position has it, where rows are to be added up
  std::int64_t before;  // as BegunBlock has it
};
// Row i has the first position of the run.
__device__ __forceinline__ SlotCentre centre_of_run(const SlotList& list, std::int32_t i, const SlotRun& run) {
  const std::int64_t slot = run.block * kPageTokens + run.first;
  const std::int32_t first_row = i - run.first, last_row = first_row + kPageTokens - 1;
  const bool begins = follows(list, i, slot, first_row), ends = follows(list, i, slot, last_row);
  const bool later = list.launch == SlotLaunch::begun;
  if (!begins) return {later || (ends && is_ended_from_copy(list, last_row, run.block)), 0, 0, -1};
  const BegunBlock begun = begun_block(list, first_row, run.block);
  if (ends || begun.before < 0) return {later, begun.is_first || !ends ? 1 : kPageTokens, first_row, -1};
  const bool is_later = list.begun_later && (begun.follows || list.all_begun_later);
  return {is_later != later, kPageTokens, first_row, begun.before};
}
// `job`: a part of the block.
__device__ __forceinline__ CentreJob centre_job(PageJob job, const SlotCentre& centre) {
  job.first_row = centre.row, job.begin = 0;
  return {job, false, centre.rows, job.encoded};
}

// The centre of a block's keys of one head, for the run that begins at a token; by one warp. False: the run is left to
// others. (Functions of their own: inlined, they take registers from the encoding.)
template <class Shape>
__device__ __noinline__ bool find_run_centre(const WriteParams& params, const SlotList& list, std::int32_t token,
                                             const SlotRun& run, const PageJob& job) {
  const SlotCentre of_run = centre_of_run(list, token, run);
  if (of_run.is_left) return false;
  const CentreJob centre = centre_job(job, of_run);
  if (centre.rows > 0 && run.first == 0) clear_padding(job);
  const std::byte* before = nullptr;
  if (of_run.before >= 0) before = slot_job(params, {of_run.before, 0, 0, kOctets}, 0, job.head, false).encoded;
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape>([&](int) { return centre; }, 1, run.first < kOctet, centre_floats<Shape>(),
                      centre_codes<Shape>(0), before);
  return true;
}
template <class Shape>
__device__ __noinline__ void find_ended_centre(const PageJob& job, bool stores) {
  __syncwarp();
  find_centres<Shape>([&](int) { return own_centre(job, true, true); }, 1, stores, centre_floats<Shape>(),
                      centre_codes<Shape>(0));
}

// One token's row of a few heads, into the exact copy of its block.
template <class Shape>
__device__ __forceinline__ void store_copied_row(const WriteParams& params, const SlotList& list, int number,
                                                 bool is_value) {
  const int groups = head_groups<Shape>(params.cache.kv_heads);
  const std::int32_t token = number / groups;
  const std::int64_t slot = list.slots[token];
  if (slot < 0 || slot >= list.places) return;
  store_exact_row<Shape>(params, token, number % groups * kStoredHeads<Shape>, is_value, [&] {
    const ExactPlace place{list.copies.find(static_cast<std::int32_t>(slot / kPageTokens)),
                           static_cast<int>(slot % kPageTokens)};
    if (place.slot >= 0 && place.token == 0) list.written[place.slot] = 1;
    return place;
  });
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    copied_rows_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  store_copied_row<Shape>(params, list, static_cast<int>(blockIdx.x / 2), blockIdx.x % 2 != 0);
}

// The token that a warp of a launch for begun blocks encodes an octet from; -1: there is none. The last page of a
// sequence alone can be begun and not filled.
__device__ __forceinline__ std::int32_t begun_token(const SlotList& list, std::int32_t sequence, int octet) {
  const SlotStep step = step_of(list.tables, sequence);
  const std::int32_t position = (step.length - 1) / kPageTokens * kPageTokens + octet * kOctet;
  if (step.count <= 0 || step.begin < 0 || position < step.begin || position >= step.length) return -1;
  const std::int32_t token = step.row + position - step.begin;
  if (token < 0 || token >= list.count || list.slots[token] % kPageTokens != octet * kOctet) return -1;
  return token;
}

// Blocks behind those that encode runs store rows in exact copies; those behind look for ended blocks, 32 sequences at
// once, and share these by heads and octets. kCentred: keys are around centres.
template <class Shape, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    few_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const int heads = params.cache.kv_heads;
  const bool begun = kCentred && list.launch == SlotLaunch::begun;
  const int number = static_cast<int>(begun ? blockIdx.x : blockIdx.x / 2), runs = list.count * heads;
  const bool is_value = !begun && blockIdx.x % 2 != 0;
  bool looks = kCentred && list.launch == SlotLaunch::ended;
  std::int32_t token = number / heads;
  int head = number % heads;
  if (begun) {
    token = begun_token(list, number / (heads * kOctets), number % kOctets);
    head = number / kOctets % heads;
    if (token < 0) return;
  } else if (!looks && token >= list.count) {
    const int copied = list.copies.entries == nullptr ? 0 : list.count * head_groups<Shape>(heads);
    if (!kCentred || number < runs + copied) return store_copied_row<Shape>(params, list, number - runs, is_value);
    looks = true;
  }
  if constexpr (!kCentred) {
    const SlotRun run = find_run<true>(params, list, token);
    if (run.count == 0) return;
    const PageJob job = slot_job(params, run, token, head, is_value);
    clear_heads<Shape>(job, 1, run.clear_octet);
    encode_any<Shape, false>(job, false, run.first, run.first + run.count);
  } else {
    // The place of a warp that looks, among those that do.
    const int place = list.looking - 1 - static_cast<int>(gridDim.x - 1 - blockIdx.x), each = heads * kOctets;
    const int groups = (list.tables.batch + 31) / 32, group = looks ? place % groups : 0;
    const int step = looks ? (list.looking - group + groups - 1) / groups : 1;
    unsigned ended = 0;
    if (looks) {
      const std::int32_t mine = 32 * group + static_cast<std::int32_t>(threadIdx.x);
      ended = __ballot_sync(~0u, mine < list.tables.batch && ended_block(list, mine).block >= 0);
    }
    const int jobs = looks ? __popc(ended) * each : 1;
    for (int i = looks ? place / groups : 0; i < jobs; i += step) {
      PageJob job;
      int first, last;
      if (looks) {
        const std::int32_t sequence = 32 * group + static_cast<std::int32_t>(__fns(ended, 0, i / each + 1));
        job = ended_job(params, ended_block(list, sequence), i % each / kOctets);
        first = i % kOctets * kOctet, last = first + kOctet;
        find_ended_centre<Shape>(job, first == 0);
      } else {
        const SlotRun run = find_run<true>(params, list, token);
        if (run.count == 0) return;
        job = slot_job(params, run, token, head, is_value);
        first = run.first, last = run.first + run.count;
        if (!is_value && !find_run_centre<Shape>(params, list, token, run, job)) return;
        clear_heads<Shape>(job, 1, run.clear_octet);
      }
      encode_any<Shape, true>(job, looks, first, last);
    }
  }
}

// The centres of a run's keys for heads [first, first + count) behind that of `job`, by one warp. (A function of its
// own: inlined, it takes registers from the encoding.)
template <class Shape>
__device__ __noinline__ void find_centres_of_heads(const PageJob& job, int first, int count, const SlotCentre& centre,
                                                   float* means) {
  const auto job_of = [&](int i) {
    PageJob of_head = job;
    for (int h = 0; h < first + i; ++h) of_head.to_next_head();
    return centre_job(of_head, centre);
  };
  find_centres<Shape>(job_of, count, true, means, centre_codes<Shape>(first));
  for (int i = 0; centre.rows > 0 && i < count; ++i) clear_padding(job_of(i).page);
}

// A run of some heads, by a team. Around centres (`centred`): as many heads at once as the team finds centres.
template <class Shape, Format kFormat, bool kCentred>
__device__ __forceinline__ void encode_run(PageJob job, int heads, const SlotRun& run, bool centred,
                                           const SlotCentre& centre) {
  using T = Tables<kFormat, true>;
  const WriteParams& params = *job.params;
#pragma unroll 1
  for (int now = heads; heads > 0; heads -= now) {
    if constexpr (kCentred) {
      if (centred) {
        const int begin = thread_of_team<Shape>(32) * params.centres_of_warp;
        now = min(heads, params.centres_of_warp * (Shape::kTeamThreads / 32));
        team_barrier<Shape>();  // nobody reads rows and codes of the heads before
        const int mine = min(params.centres_of_warp, now - begin);
        if (mine > 0) {
          std::byte* rows =
              rows_of_team<Shape, T, true>(params, staged_pitch(Shape::kD, staged_dtype(params, params.k)));
          find_centres_of_heads<Shape>(job, begin, mine, centre, reinterpret_cast<float*>(rows) + begin * Shape::kD);
        }
        team_barrier<Shape>();
      }
    }
    encode_heads<Shape, kFormat, false, kCentred>(job, now, false, run.first, run.first + run.count);
    for (int h = 0; h < now; ++h) job.to_next_head();
  }
}

// The kernel of one format, or of any dense one. kCentred: keys are around centres.
template <class Shape, Format kFormat, bool kCentred = false>
__global__ void __launch_bounds__(Shape::kBlockThreads, codec::is_dense(kFormat) ? kDenseCtas : kWriteCtas)
    many_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  const int kv_heads = params.cache.kv_heads, chunks = (list.count + kPageTokens - 1) / kPageTokens;
  const std::int64_t jobs = std::int64_t{chunks} * kv_heads;
  const SideOfBlock side = side_of_block<kCentred>(params);
  const std::int64_t teams = side.blocks * kTeams<Shape>, place = side.block * kTeams<Shape> + team_of_block<Shape>();
  const auto last = static_cast<std::int32_t>(jobs * (place + 1) / teams);
  if constexpr (!codec::is_dense(kFormat)) {
    extern __shared__ __align__(16) std::byte shared[];
    Tables<kFormat, true>::template fill<Shape::kBlockThreads>(shared + (kCentred ? kCentreBytes<Shape> : 0));
    __syncthreads();
  }
  ptx::wait_prerequisites();
  for (auto i = static_cast<std::int32_t>(jobs * place / teams); i < last;) {
    const std::int32_t chunk = i / kv_heads, head = i % kv_heads;
    const int heads = min(kv_heads - head, last - i);
    i += heads;
    const std::int32_t end = min((chunk + 1) * kPageTokens, list.count);
    for (std::int32_t token = chunk * kPageTokens; token < end;) {
      const SlotRun run = find_run<false>(params, list, token);
      if (run.count > 0) {
        const PageJob job = slot_job(params, run, token, head, side.is_value);
        const bool centred = kCentred && !side.is_value;
        const SlotCentre centre = centred ? centre_of_run(list, token, run) : SlotCentre{};
        if (!centre.is_left) clear_heads<Shape>(job, heads, run.clear_octet);
        if constexpr (codec::is_dense(kFormat)) {
          encode_dense<Shape>(job, heads, false, run.first, run.first + run.count);
        } else if (!centre.is_left) {
          encode_run<Shape, kFormat, kCentred>(job, heads, run, centred, centre);
        }
      }
      token += max(run.count, 1);
    }
  }
}

using SlotFunction = void (*)(WriteParams, SlotList);

template <int kD>
SlotFunction many_slots_of(Format format, bool centred) {
  using Shape = BulkShape<kD>;
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                                                                            \
  case Format::name: {                                                                                        \
    return centred ? &many_slots_kernel<Shape, Format::name, true> : &many_slots_kernel<Shape, Format::name>; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return &many_slots_kernel<DenseShape<kD>, Format::f16>;  // all dense ones
  }
}
template <int kD>
SlotFunction few_slots_of(bool centred) {
  return centred ? &few_slots_kernel<StepShape<kD>, true> : &few_slots_kernel<StepShape<kD>, false>;
}

template <int kD>
cudaError_t prepare_slots(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  const bool centred = codec::is_centred(layout);
  for (const SlotFunction f : {many_slots_of<kD>(layout.k.format, centred), many_slots_of<kD>(layout.v.format, false),
                               few_slots_of<kD>(centred)}) {
    const cudaError_t error = prepare_shared(reinterpret_cast<const void*>(f), limits.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_slots(WriteParams& p, SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const auto& layout = p.cache.encoded_layout;
  const bool centred = codec::is_centred(layout), has_copies = list.copies.entries != nullptr;
  const std::int64_t heads = p.cache.kv_heads,
                     rows = has_copies ? std::int64_t{list.count} * head_groups<Step>(heads) : 0;
  const std::int64_t octets = centred ? list.tables.batch * heads * kOctets : 0;  // one begun block a sequence
  list.looking = 0;
  if (centred && has_copies) {
    const std::int64_t looking = base::max(base::min(octets, std::int64_t{kLookingCtas} * limits.multiprocessors),
                                           std::int64_t{list.tables.batch + 31} / 32);
    list.looking = static_cast<std::int32_t>((looking + 1) / 2 * 2);
  }
  const auto launch_few = [&](SlotLaunch what, std::int64_t pairs_of_blocks) {
    list.launch = what;
    launch.size_step(pairs_of_blocks, centred ? kCentreBytes<Step> : 0, kOctet);
    return cudaLaunchKernelEx(&launch.how.config, few_slots_of<kD>(centred), p, list);
  };
  list.begun_later = octets > 0 && list.count > 1 && !list.one_each;
  list.all_begun_later = list.count > kFewSlots;
  if (list.count <= kFewSlots) {
    const cudaError_t error = launch_few(SlotLaunch::runs, list.count * heads + rows + list.looking / 2);
    if (error != cudaSuccess || !list.begun_later) return error;
    return launch_few(SlotLaunch::begun, octets / 2);
  }
  if (rows > 0) {
    Launch copied(static_cast<unsigned>(2 * rows), Step::kBlockThreads, stream, limits.overlaps());
    const cudaError_t error = cudaLaunchKernelEx(&copied.config, &copied_rows_kernel<Step>, p, list);
    if (error != cudaSuccess) return error;
  }
  list.begun_later = octets > 0;
  list.launch = SlotLaunch::runs;
  const std::int64_t jobs = std::int64_t{(list.count + kPageTokens - 1) / kPageTokens} * heads;
  const std::int64_t dense_blocks = base::min(jobs, std::int64_t{kDenseCtas} * limits.multiprocessors);
  const bool same_kernel = many_slots_of<kD>(layout.k.format, centred) == many_slots_of<kD>(layout.v.format, centred);
  cudaError_t error = launch_sides(p, same_kernel, [&](WriteSides sides, Format format) {
    const bool of_centred = centred && sides != WriteSides::values;
    launch.size_bulk(sides, format, jobs, dense_blocks, of_centred ? kCentreBytes<BulkShape<kD>> : 0, kPageTokens);
    return cudaLaunchKernelEx(&launch.how.config, many_slots_of<kD>(format, of_centred), p, list);
  });
  if (error == cudaSuccess && list.looking > 0) error = launch_few(SlotLaunch::ended, list.looking / 2);
  if (error == cudaSuccess && list.begun_later) error = launch_few(SlotLaunch::begun, octets / 2);
  return error;
}

template <int kD>
SlotKernel slot_entry() {
  return {kD, &prepare_slots<kD>, &launch_slots<kD>};
}

}  // namespace kvant::cuda
