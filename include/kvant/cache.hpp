// The paged cache. Sequences are lists of 64-token pages, exact at both ends and compressed in between; pages are
// shared by reference count (fork) and copied on write. See docs/design.md, "The cache's rules".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvant/codec.hpp"
#include "kvant/export.hpp"
#include "kvant/types.hpp"

namespace kvant {

struct CacheConfig {
  int layers = 1;  ///< layers of one geometry; layers of another geometry are another cache
  int kv_heads = 0;
  /// 1 to 576. Sizes without a rotation are stored padded with zeros (stored_head_dim); tensors and the default scale
  /// have this size. On a device 1 to 512, and padded to the next of 64, 96, 128, 192, 256 and 512.
  int head_dim = 0;
  /// Elements of a value vector, where a key has another number; 0: head_dim. A query has head_dim elements, an output
  /// v_head_dim.
  /// On a device both are the same, or head_dim is 192 and v_head_dim 128.
  int v_head_dim = 0;
  [[nodiscard]] int v_dim() const noexcept { return v_head_dim == 0 ? head_dim : v_head_dim; }  ///< the number itself
  /// A latent cache, of multi-head latent attention: a token has one latent of so many elements and one rotary key of
  /// `rope`, 1 to 576 each, which all query heads share. The latent is the value and a part of the key. Keys in calls
  /// are the rotary keys, and values the latents; kv_heads is 1, head_dim is `rope` and v_head_dim is `latent`, set or
  /// not. A query has latent + rope elements in this order, an output `latent`. Plans need AttentionOptions::scale. A
  /// device has kernels for 512 with 64. 0: another cache.
  int latent = 0;
  int rope = 0;
  /// Elements of a query.
  [[nodiscard]] int q_dim() const noexcept { return latent > 0 ? latent + rope : head_dim; }
  /// Key format; see formats(). Empty: tq6; of the rotary keys of a latent cache tq8.
  std::string k{};
  std::string v = "tq4";  ///< value format; that of latents
  /// First pages kept exact, while a window covers them. -1: automatic, which is 1. 0 where both formats are dense,
  /// whatever is given.
  int sink_pages = -1;
  /// Newest full pages kept exact beside the one being filled, likewise. 0: encode tokens as they come. A run of many
  /// queries reads exactly what its first query would, as far as one page before the tail.
  int tail_pages = -1;
  /// dtype of exact pages. With sink or tail pages every value is rounded to it before it is stored or encoded (else
  /// tokens are encoded as given), so bytes do not depend on when a page leaves the tail. Unset: f32 where a format is
  /// f32; f16 where keys and values of the first write are, or a format is f16 and neither is bf16; else bf16, also for
  /// f32 tensors, and on a device unless a format is f32: two bytes a value, as in the cache that users compare with.
  /// describe() says which, and what exact ends take. Rounding to bf16 costs 0.2 % a vector, tq6 itself 2.5 %.
  std::optional<Dtype> exact{};
  std::int64_t window = 0;        ///< sliding window in tokens, 0: none. Pages no query can see any more are freed
  std::int64_t window_sinks = 0;  ///< first tokens that stay visible beyond the window
  /// With a window: how far a sequence can be truncated back, from the greatest length that it has had; pages stay so
  /// much longer. Below 64, and 0: 64. For drafts of speculative decoding that may be rejected.
  std::int64_t rollback_tokens = 0;
  std::int64_t capacity_tokens = 0;  ///< at most this many tokens in pages (whole pages, shared ones once); 0: no limit
  BasisKind k_basis = BasisKind::automatic;  ///< automatic: hadamard for tq formats, none otherwise
  BasisKind v_basis = BasisKind::automatic;
  /// page: encoded pages of 64 keys keep a mean key, at 0.125 bits a key value or less, and encode what is left, but of
  /// keys that are nearer to zero: tq and fp8 keys. automatic: page for these. config() says which.
  KeyCentre k_centre = KeyCentre::automatic;
  /// page: the same of latents, 7 bytes a token of 512 numbers. automatic: page for tq and fp8 latents, but not beside
  /// a k_centre of none, and not on a device.
  KeyCentre v_centre = KeyCentre::automatic;
  std::shared_ptr<const BasisSet> bases{};  ///< required by BasisKind::calibrated, refused without
  std::vector<float> k_levels{};            ///< lut formats: 2^bits level values, ascending
  std::vector<float> v_levels{};
  int lut_scales = 1;  ///< lut formats: scales a vector (1, or 2: one for each half)
  /// Where pages live: "" or "cpu" for host memory, "cuda" or "cuda:1" for a device's. On a device all memory is taken
  /// by create: capacity_tokens is required, tensors are device memory, and work is enqueued on the stream given.
  std::string device{};
  /// In host memory only: pages are in pinned memory, which devices read and write at the speed of the link, without
  /// the processor (copy_sequences). Needs CUDA. Memory is pinned as it is taken, for all devices, in the context of
  /// the calling thread's current device; it cannot be swapped out, and trim gives back all of a pool or nothing.
  bool pinned = false;
  std::int64_t max_sequences = 256;      ///< device only: sequences alive at once
  std::int64_t max_sequence_tokens = 0;  ///< device only: tokens of the longest sequence; 0: capacity_tokens
  int threads = 0;                       ///< workers that store rows; 0: the processors that the process may use
  /// Kernels that store rows: "scalar", "avx2", "avx512", "amx" or "neon", which all store the same bytes; empty: the
  /// best of this machine.
  std::string isa{};
};

/// A sequence of a cache. Never reused: a removed sequence's id stays invalid.
enum class SequenceId : std::uint64_t {};

struct CacheMemory {
  std::int64_t tokens = 0;          ///< live tokens, summed over sequences (shared ones counted in each)
  std::int64_t encoded_bytes = 0;   ///< codes of encoded pages held (whole pages)
  std::int64_t scale_bytes = 0;     ///< scales of encoded pages, and their centres
  std::int64_t exact_bytes = 0;     ///< exact pages: sinks, tail, and the copy that outlives encoding by a page
  std::int64_t table_bytes = 0;     ///< page tables and bookkeeping
  std::int64_t reserved_bytes = 0;  ///< what the pools took from the system, the above included; see Cache::trim
  [[nodiscard]] std::int64_t total() const { return encoded_bytes + scale_bytes + exact_bytes + table_bytes; }
};

/// The pages that a cache keeps exact, as it decided.
struct ExactEnds {
  int sink_pages = 0;  ///< first ones, while a window covers them
  int tail_pages = 0;  ///< newest full ones, beside the one being filled
  /// The dtype of exact pages. No value: the cache has no exact pages, or its first write will decide.
  std::optional<Dtype> dtype{};
};

struct Append {
  SequenceId sequence;
  std::int64_t tokens;
};

/// Tokens [begin, end) of a sequence.
struct TokenRange {
  SequenceId sequence;
  std::int64_t begin;
  std::int64_t end;
};

class CacheImpl;

/// Threads. Different caches never interfere. On one cache any thread may make any call at any time, of Cache, plan,
/// Plan and run alike. Calls that only read (run, plan, Plan's, read, decode, length, memory, describe) go on at the
/// same time, on a device one after another. All others wait until those in progress have returned, and have the cache
/// for themselves.
///
/// Sequences do not disturb each other, also where they share pages: a step and its plans stay valid whatever is done
/// to other sequences meanwhile (steps, fork, truncate, reorder, remove), and give the bits that they give alone. The
/// calls for one sequence are the caller's to order, and a plan is stale once its sequence changed.
/// Outside of this are moving and destroying a cache, which no other call may go beside, and an Executor, which must
/// not call the cache that the run is over. A forked child can use its parent's caches; one that another thread was
/// changing when the process forked is lost to it.
///
/// A cache on a device does what one in host memory does, to the same bytes, with these differences. Calls that take a
/// stream only enqueue work on it (read and take_non_finite wait for it); all calls on one cache must be ordered by one
/// stream, and tensors must stay as they are until the stream has completed that work. Input that is not finite, or
/// above 65504, is stored so that every row that sees the input becomes NaN, and take_non_finite tells. Changes by
/// fork, truncate and reorder are sent with the next call that has a stream, those by remove with the next step that
/// takes pages.
///
/// Steps can be recorded in a CUDA graph. reserve_ahead takes slots for the tokens of steps to come; then record
/// reserve, write and run: the recorded step counts as taken here, so launch the graph once for it. For each further
/// launch call advance, before or after it, with tokens that were reserved ahead. After truncate, fork or reorder of a
/// sequence, reserve ahead again before the next launch.
class KVANT_API Cache {
 public:
  /// Errors: invalid_argument for unknown formats, head_dim and counts out of range, bases of other shapes.
  static Result<Cache> create(const CacheConfig& config);
  Cache(Cache&&) noexcept;
  Cache& operator=(Cache&&) noexcept;
  ~Cache();

  [[nodiscard]] const CacheConfig& config() const noexcept;
  [[nodiscard]] Format k_format() const noexcept;
  [[nodiscard]] Format v_format() const noexcept;

  SequenceId add_sequence();
  /// A new sequence with the same tokens; pages are shared until one side writes to them. The filled rows of a page
  /// that is written to are copied (on a device, the whole page).
  Result<SequenceId> fork(SequenceId parent);
  Status remove(SequenceId sequence);
  /// Forgets all tokens from position `tokens` on. Truncating up to 64 tokens and going on gives the same bytes as
  /// if they had never been appended. Further back (CacheConfig::rollback_tokens), a page that was encoded stays
  /// encoded, with the same codes, where the rule of exact ends would have it exact; such a page keeps its centre, too,
  /// and tokens that are appended to it are centred on it (KeyCentre::page). Errors: invalid_argument for
  /// tokens outside 0 to the length, or released by the window.
  Status truncate(SequenceId sequence, std::int64_t tokens);
  /// Beams in one call: sequences[i] becomes what sequences[parents[i]] was, for all i at once; ids stay. A parent
  /// named several times is shared as fork does; what no entry names is forgotten, and so are slots reserved ahead, but
  /// for those of a sequence that is its own parent. Where all are, nothing changes. All or nothing. Errors:
  /// invalid_argument for spans of different sizes, a sequence given twice, parents outside 0 to count - 1, and a
  /// sequence whose newest step is not written in every layer.
  Status reorder(std::span<const SequenceId> sequences, std::span<const std::int64_t> parents);
  Result<std::int64_t> length(SequenceId sequence) const;

  /// One step, part one: advances the lengths and takes pages, for all layers, all or nothing. Errors: out_of_capacity.
  Status reserve(std::span<const Append> appends, Stream stream = {});
  Status reserve(SequenceId sequence, std::int64_t tokens, Stream stream = {}) {  ///< the same for one sequence
    const Append one{sequence, tokens};
    return reserve(std::span<const Append>(&one, 1), stream);
  }
  /// Device only. Takes slots so that steps of these tokens in all, of any lengths each, take none: they can be
  /// replayed from a graph. Nothing advances. Slots not used come back with truncate (to the length it has, for
  /// instance) and remove; the child of a fork gets none.
  Status reserve_ahead(std::span<const Append> appends, Stream stream = {});
  /// Device only. The step that a graph's launch took, reserve and the writes of all layers: lengths here follow those
  /// on the device. Errors: invalid_argument for tokens that were not reserved ahead (nothing changed).
  Status advance(std::span<const Append> appends);
  /// One step, part two, once per layer: keys and values of the tokens just reserved, the sequences' rows one after
  /// another or by batch_stride. keys, values: [sum of reserved tokens, kv_heads, head_dim] in f32, f16 or bf16, with
  /// batch_stride [most reserved tokens of a sequence, kv_heads, head_dim].
  /// Values must be finite and at most 65504 in magnitude (up to 65536 passes: bf16 makes that of 65504). A tq vector's
  /// scale is fp16, so a vector whose values are below some 1e-5 is stored with fewer bits, and below some 1e-7 as
  /// zeros (docs/formats.md, "The lower end"). Errors: non_finite (nothing changed; also for values that were changed
  /// while the call read them), invalid_argument for shapes or a layer already written.
  Status write(std::span<const SequenceId> sequences, int layer, const TensorView& keys, const TensorView& values,
               Stream stream = {});
  Status write(SequenceId sequence, int layer, const TensorView& keys, const TensorView& values, Stream stream = {}) {
    return write(std::span<const SequenceId>(&sequence, 1), layer, keys, values, stream);
  }
  /// reserve and write of one layer for one sequence: the first layer of a step reserves, the others fill in.
  Status append(SequenceId sequence, int layer, const TensorView& keys, const TensorView& values, Stream stream = {});

  /// Decodes stored tokens [begin, end) of one layer to f32 in the original coordinates, [end - begin, kv_heads,
  /// head_dim] in host memory: exactly what attention of the newest q_len queries computes with, which may read more
  /// pages exactly than that of one query (CacheConfig::tail_pages). Either output may have null data. Errors: released
  /// tokens, q_len below 1. From a device it copies whole pages, one by one: for tests and for looking inside.
  Status read(SequenceId sequence, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
              const MutableTensorView& values, Stream stream = {}, std::int64_t q_len = 1) const;
  /// The same for ranges of several sequences, into tensors in f32, f16 or bf16 where the cache lives: host memory, or
  /// device memory (enqueued on the stream, and not waited for; a recorded decode follows the device's own lengths).
  /// keys, values: the ranges' rows one after another, [sum of end - begin, kv_heads, head_dim], or, with a
  /// batch_stride, those of range i from element i * batch_stride on, and shape[0] the most rows of any; either may
  /// have null data. Values are rounded to nearest, ties to even; beyond the dtype's range they become infinite. A
  /// sequence may be named more than once. Errors: as read.
  Status decode(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream = {}) const;
  /// Waits for the stream: true if a device stored input that is not finite since the last call. Host caches refuse it
  /// when it is written, and answer false.
  Result<bool> take_non_finite(Stream stream = {});

  /// Gives memory that no page uses back to the system, after sequences were removed or truncated; otherwise it is kept
  /// for the next ones. Answers how many bytes that is: all of a pool (reserved_bytes shrinks) where none of its pages
  /// is in use, else what is behind free pages, whose addresses stay reserved. A cache on a device keeps what create
  /// took: 0. Plans stay valid.
  std::int64_t trim() noexcept;
  [[nodiscard]] CacheMemory memory() const noexcept;
  [[nodiscard]] ExactEnds exact_ends() const noexcept;
  /// One line a fact: geometry, formats, page bytes, exact ends, basis, capacity, and what it holds beside a bf16
  /// cache.
  [[nodiscard]] std::string describe() const;

  [[nodiscard]] CacheImpl& impl() noexcept { return *impl_; }
  [[nodiscard]] const CacheImpl& impl() const noexcept { return *impl_; }

 private:
  explicit Cache(std::unique_ptr<CacheImpl> impl);
  std::unique_ptr<CacheImpl> impl_;
};

/// The parents' cache layouts (mlx-native 0.3 to 0.8, hanzo-quant 0.6), imported without loss: same codes, their
/// levels as a custom table. docs/formats.md, "fp8 and lut".
struct LegacyLayout {
  bool nibble_pairs = false;        ///< [kv_heads, capacity, D/2], low nibble = even coordinate; else a byte an index
  int bits = 4;                     ///< codebook bits; higher bits of a byte index are ignored
  int norms_per_position = 1;       ///< 1, or 2 (coordinates below D/2, and the rest)
  float scale_factor_d512 = 1;      ///< divisor of the two-norm layout; the one-norm layout divides by sqrt(D)
  std::span<const float> codebook;  ///< [2^bits]
};

struct LegacyTensors {
  const std::uint8_t* k_packed = nullptr;
  const std::uint8_t* v_packed = nullptr;
  const float* k_norms = nullptr;  ///< [kv_heads, capacity] or [kv_heads, capacity, 2]
  const float* v_norms = nullptr;
  std::int64_t capacity = 0;  ///< slots per head
};

/// The config of a cache that takes such vectors: lut formats with the codebook folded into levels, no exact ends.
/// `keys_rotated_for_queries`: keys were rotated by the signed Hadamard matrix and queries come unrotated.
KVANT_API Result<CacheConfig> legacy_config(int layers, int kv_heads, int head_dim, const LegacyLayout& layout,
                                            bool queries_unrotated, bool outputs_unrotated);
/// Appends the given physical slots, in that (logical) order, to `sequence` in `layer`; reserve rules as in append. The
/// tensors are in host memory, also for a cache on a device: then the call waits for all of the device's work.
KVANT_API Status import_legacy(Cache& cache, SequenceId sequence, int layer, const LegacyLayout& layout,
                               const LegacyTensors& tensors, std::span<const std::int64_t> slots);

}  // namespace kvant
