// The launches of a write (cuda/append/write.hpp), for one head_dim, or for latents around centres.
#pragma once

#include <bit>

#include "cuda/append/many.cuh"

namespace kvant::cuda {

// The most tokens that the kernels for few take. A cache without a tail and with a tail, tokens of one sequence: then a
// page that leaves the tail gets no rows.
inline constexpr int kStepRows = 4, kTailStepRows = kPageTokens - 1;
// Slots, all tokens; the second: where sequences may fill blocks, of whose keys every warp of a token would find the
// mean, and few tokens to encode are alone: a team does these one after another.
inline constexpr int kFewSlots = kListedRows, kFewLongSlots = 256;
// Blocks of a multiprocessor where counts are on the device: that look for pages to encode, that store rows of exact
// pages, that find centres of blocks, and that do what a part of the write begins, of sequences and of slots.
inline constexpr int kLookingCtas = 1, kCopyingCtas = 16, kCentreCtas = 2, kBeginningCtas = 8, kBegunCtas = 4;

template <int kWidth>
struct WriteLaunch {
  using Bulk = BulkShape<kWidth>;
  using Step = StepShape<kWidth>;
  WriteParams& p;
  const DeviceLimits& limits;
  cudaStream_t stream;
  const codec::PageLayout& layout = p.cache.encoded_layout;
  const bool of_items = p.entries > 0, of_slots = p.list.slots != nullptr;
  const bool has_tail = p.cache.tail_pages > 0, centred = codec::is_centred(layout);
  const WriteSides wanted = p.sides;  // what all launches together write
  const std::int64_t heads = p.cache.kv_heads, busy = limits.multiprocessors;
  const std::int64_t units =
      of_items ? p.items : (std::int64_t{p.list.count} + kPageTokens - 1) / kPageTokens;  // that are known here
  // Bytes from one staged row to the next.
  const int k_pitch = staged_pitch(Bulk::kD, staged_dtype(p, p.k)),
            v_pitch = staged_pitch(Bulk::kD, staged_dtype(p, p.v));

  cudaError_t start(const WriteFunction& function, std::int64_t blocks, int shared_bytes = 0) const {
    Launch how(static_cast<unsigned>(blocks), function.threads, stream, limits.overlaps());
    how.config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    return cudaLaunchKernelEx(&how.config, function.kernel, p);
  }
  [[nodiscard]] std::int64_t blocks_of_sides(std::int64_t each) const {
    return p.sides == WriteSides::both ? 2 * each : each;
  }
  // Sets p.rows. Returns the bytes of shared memory; `before`: bytes in front of the rows.
  int room_for(int teams, int before, int pitch, int most_rows) {
    const int fit = (staging_bytes(limits) - before) / (2 * teams * pitch);
    p.rows = most_rows <= fit ? most_rows : static_cast<int>(std::bit_floor(static_cast<unsigned>(fit)));
    return before + 2 * teams * p.rows * pitch;
  }

  // --- few tokens ----------------------------------------------------------------------------------------------------

  // Blocks of one warp, of any format; so many a side.
  cudaError_t start_few(const WriteFunction& function, WriteSides sides, std::int64_t blocks, int most_rows) {
    p.sides = sides;
    const int tables = base::max(table_bytes<false>(layout.k.format), table_bytes<false>(layout.v.format));
    const int bytes = room_for(1, function.bytes + tables, base::max(k_pitch, v_pitch), most_rows);
    return start(function, blocks_of_sides(blocks), bytes);
  }
  cudaError_t few() {
    if (of_slots) return start_few(few_slots_function<kWidth>(centred), wanted, p.list.count * heads, 1);
    std::int64_t blocks = units * heads;
    p.storing = 0;
    if (has_tail) {
      p.storing = p.tokens * head_groups<Step>(p.cache.kv_heads);
      const std::int64_t looking = base::min(blocks * kOctets, kLookingCtas * busy / 2);
      blocks = p.storing + base::max(looking, (units + 31) / 32);
    }
    return start_few(step_function<kWidth>(), wanted, blocks, has_tail ? kOctet : p.most_tokens);
  }
  // Keys of pages that a part of the write begins, behind all others.
  cudaError_t begun() {
    p.begins = true, p.storing = 0;
    if (of_slots) return start_few(few_slots_function<kWidth>(centred), WriteSides::keys, kBegunCtas * busy / 2 * 2, 1);
    const std::int64_t octets = p.entries * heads * kOctets;  // one page a sequence
    const std::int64_t blocks = base::max(base::min(octets, kBeginningCtas * busy), (units + 31) / 32);
    return start_few(step_function<kWidth>(), WriteSides::keys, blocks + blocks % 2, kOctet);
  }

  // --- many tokens ---------------------------------------------------------------------------------------------------

  // A kernel of one format; `jobs` a side.
  cudaError_t start_many(WriteSides sides, Format format, const WriteFunction& function, std::int64_t jobs,
                         int most_rows) {
    p.sides = sides;
    const int pitch = base::max(has_keys(sides) ? k_pitch : 0, has_values(sides) ? v_pitch : 0);
    std::int64_t blocks = of_items ? jobs : of_slots ? base::min(jobs, kDenseCtas * busy) : kDenseCtas * busy;
    int bytes = 0;
    if (!codec::is_dense(format)) {
      bytes = room_for(kTeams<Bulk>, function.bytes + table_bytes<true>(format), pitch, most_rows);
      // Tables are filled once for all that a block does.
      const int resident = base::clamp(limits.multiprocessor_shared_bytes / (bytes + 1024), 1, kWriteCtas);
      blocks = base::min((jobs + kTeams<Bulk> - 1) / kTeams<Bulk>,
                         base::max(resident * busy / blocks_of_sides(1), std::int64_t{1}));
    }
    p.key_blocks = 0;
    if (sides == WriteSides::both && centred) {
      // Teams with few jobs get equally many.
      const int share = jobs < 4 * kTeams<Bulk> * blocks ? 50 : kKeyShare;
      p.key_blocks = static_cast<std::uint32_t>(2 * blocks * share / 100);
    }
    return start(function, blocks_of_sides(blocks), bytes);
  }
  // Centres, and all that is encoded of many tokens or from copies, by one launch for both sides if one does both. How
  // many blocks there are to encode from copies is known on the device: launches have room for what makes it busy.
  cudaError_t many() {
    cudaError_t error = cudaSuccess;
    if (centred && has_keys(wanted)) {
      const std::int64_t pages = units * ((heads + kCentresOfWarp - 1) / kCentresOfWarp);
      error = start(centres_function<kWidth>(), of_items ? pages : base::max(pages, kCentreCtas * busy));
    }
    const std::int64_t jobs = of_items || of_slots ? units * heads : kTeams<Bulk> * kDenseCtas * busy;
    const int most_rows = of_items && !has_tail ? base::min(p.most_tokens, kPageTokens) : kPageTokens;
    const WriteFunction of_keys = many_function<kWidth>(layout.k.format, centred);
    // A kernel of centred keys stores values, too: they have no centre.
    const bool of_both =
        wanted == WriteSides::both && many_function<kWidth>(layout.v.format, centred).kernel == of_keys.kernel;
    if (error == cudaSuccess && has_keys(wanted))
      error = start_many(of_both ? wanted : WriteSides::keys, layout.k.format, of_keys, jobs, most_rows);
    if (error != cudaSuccess || of_both || !has_values(wanted)) return error;
    return start_many(WriteSides::values, layout.v.format, many_function<kWidth>(layout.v.format, false), jobs,
                      most_rows);
  }
  cudaError_t exact_rows() {
    p.sides = wanted;
    return start(exact_rows_function<kWidth>(), blocks_of_sides(base::max(kCopyingCtas * busy / 2, (units + 31) / 32)));
  }
};

// Prepares what launches stage rows with, for pages with such a layout.
template <int kWidth>
cudaError_t prepare_write(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  const bool centred = codec::is_centred(layout);
  for (const WriteFunction& function :
       {step_function<kWidth>(), few_slots_function<kWidth>(centred), many_function<kWidth>(layout.k.format, centred),
        many_function<kWidth>(layout.v.format, false)}) {
    const cudaError_t error = prepare_shared(reinterpret_cast<const void*>(function.kernel), staging_bytes(limits));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <int kWidth>
cudaError_t launch_copies(WriteParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  p.list.slots = nullptr, p.list.count = 0;
  p.k.set({}), p.v.set({});
  p.k.dtype = p.v.dtype = p.rounding;
  p.head_dim = BulkShape<kWidth>::kD,
  p.v_head_dim = p.cache.encoded_layout.v.head_dim;  // copies have the zeros that vectors are padded with
  return WriteLaunch<kWidth>{p, limits, stream}.many();
}

template <int kWidth>
cudaError_t launch_write(WriteParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  WriteLaunch<kWidth> launch{p, limits, stream};
  if (!launch.of_items && !launch.of_slots) return launch_copies<kWidth>(p, limits, stream);
  const StepTables& tables = p.list.tables;
  const bool begins = launch.centred && has_keys(launch.wanted);
  bool many = false, has_exact_rows = false;
  if (launch.of_items) {
    many = p.most_tokens > (launch.has_tail ? kTailStepRows : kStepRows);
    has_exact_rows = p.cache.exact_ends().any();
    p.begins_later = begins && many && !launch.has_tail;
  } else {
    if (launch.centred && tables.batch * launch.heads >= 0x7FFFFFFF / kPageTokens / 2) return cudaErrorInvalidValue;
    has_exact_rows = p.list.lists.rows != nullptr;
    const bool fills =
        tables.max_query_len > kPageTokens && (has_exact_rows || p.list.count / (2 * kPageTokens) >= tables.batch);
    many = p.list.count > (fills ? kFewLongSlots : kFewSlots);
    p.begins_later = begins && tables.batch > 0 && (many || (p.list.count > 1 && tables.max_query_len != 1));
  }
  p.begins = false;
  cudaError_t error = cudaSuccess;
  if (many && has_exact_rows) error = launch.exact_rows();
  if (error == cudaSuccess) error = many ? launch.many() : launch.few();
  if (error == cudaSuccess && p.begins_later) error = launch.begun();
  p.sides = launch.wanted;
  if (error != cudaSuccess || many || p.list.encode.blocks == nullptr) return error;
  p.begins = p.begins_later = false;
  return launch_copies<kWidth>(p, limits, stream);
}

}  // namespace kvant::cuda
