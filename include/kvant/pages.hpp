// Encoded pages in memory that an engine owns (a serving engine with a pool of blocks and block tables of its own):
// kvant writes into the engine's blocks, and attends over them. docs/borrowed-pages.md tells how an engine uses this.
//
// The engine's side of the bargain:
//   block      64 tokens of one sequence, in all kv heads. A (block, kv head) is block_bytes() contiguous bytes
//   pool       one layer's blocks: a base pointer and two strides. Layers are pools of their own, or offsets into one
//   slot       the place of a token: block * 64 + position in the block. -1: a token that is not stored
//   tables     the blocks of each sequence in order (int32), lengths (int32), and where queries begin (int32)
// A block is filled from its first position on. The write that stores the first one clears those positions that it does
// not store, so nobody needs to clear blocks; what is behind a sequence's length may be anything that was written
// through kvant before.
//
// Tokens are encoded as they come. Keys have page centres (PagesConfig::k_centre, docs/page-centres.md): a block that a
// write fills as a whole is centred on its own mean, and a block that a part begins on the mean of the block before,
// which the step's tables name. With PagesConfig::tail_pages the newest pages of a sequence have exact copies in memory
// of kvant's own, where attention reads them. The tokens of a block that has a copy go to the copy alone; begin_step
// encodes the block from it, as a whole and around its own mean, once the block is full, or its sequence is not in the
// step. With either an engine tells its batch once a step, before the step's writes (begin_step), and changes the bytes
// of blocks through write, copy and begin_step only.
//
// On a device all tensors and tables are device memory. Calls with a stream enqueue their work and wait for nothing,
// allocate nothing and read nothing back, so write, set_tables and run can be recorded in a CUDA graph, and replays
// follow what is in the tables then. On the host calls are done when they return, and streams are ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvant/attention.hpp"
#include "kvant/export.hpp"
#include "kvant/types.hpp"

namespace kvant {

struct PagesConfig {
  int kv_heads = 0;
  int head_dim = 0;          ///< 1 to 576, on a device to 512; stored padded as CacheConfig::head_dim says
  int v_head_dim = 0;        ///< as CacheConfig::v_head_dim
  int latent = 0, rope = 0;  ///< as those of CacheConfig: blocks of latents and rotary keys
  std::string k{};           ///< key format; any but the lut formats, and on a device but f32. Empty: as CacheConfig::k
  std::string v = "tq4";
  std::string device{};  ///< "" or "cpu": host memory; "cuda" or "cuda:1": that device's
  int threads = 0;       ///< host only: workers that write and decode; 0: the processors that the process may use
  std::string isa{};     ///< host only: as CacheConfig::isa

  /// automatic: page for tq and fp8 keys. With page, begin_step must come before the writes of each step.
  KeyCentre k_centre = KeyCentre::automatic;
  KeyCentre v_centre = KeyCentre::automatic;  ///< as CacheConfig::v_centre; with page, begin_step likewise
  /// Newest whole pages of a sequence that are read exactly, beside the page that is being filled; 0: none. Up to 64.
  /// Where both formats are dense there are none.
  int tail_pages = 0;
  /// With tail_pages: sequences that run at the same time, at most. Each may have sink_pages + tail_pages + 2 exact
  /// copies, and sixteen of them tail_pages more, in a step of more than 64 tokens.
  int tail_sequences = 0;
  /// With tail_pages: layers, each with copies of its own (BlockPool::layer).
  int layers = 1;
  /// With tail_pages: f32 (host only), f16 or bf16. Unset: f32 where a format is f32, else f16 where one is, else bf16.
  std::optional<Dtype> exact{};
  /// With tail_pages: first pages of a sequence that are read exactly; up to 64.
  int sink_pages = 0;
  /// With tail_pages: exact copies of each layer, fewer than all sequences may have; 0: as many. Where there are too
  /// few, pages that are being written have them first, and pages without a copy are read encoded.
  int exact_copies = 0;
  /// With tail_pages: a write leaves the codes of its blocks complete, which takes longer. For an engine that may give
  /// the memory of a freed block to layers which kvant does not write (states of Mamba layers), before a step begins.
  bool encode_at_once = false;
};

/// One layer's blocks. Block b of kv head h begins at data + b * block_stride + h * head_stride.
struct BlockPool {
  std::byte* data = nullptr;      ///< aligned to 64 bytes
  std::int64_t blocks = 0;        ///< up to 2^31 - 1
  std::int64_t block_stride = 0;  ///< bytes, a multiple of 64
  std::int64_t head_stride = 0;   ///< bytes, a multiple of 64; on a device: block_bytes()
  int layer = 0;                  ///< whose exact copies: below PagesConfig::layers
};

struct PagesPlanOptions {
  /// q_lens, mask.tensor and backend stay unset, and q_len as it is. The window is the layer's own: entries of pages
  /// that it hides are not read, so the engine may have freed these blocks.
  AttentionOptions attention{};
  int max_batch = 0;            ///< sequences of a step
  std::int64_t max_blocks = 0;  ///< the most that one sequence has
  int max_query_len = 1;        ///< queries of one sequence in a step
  std::int64_t max_tokens = 0;  ///< queries of a step, padding counted; 0: max_batch * max_query_len
  /// On a device: each run looks at the ids of the pages that it is to read. Where one is outside the pool, the rows of
  /// its sequence become NaN, and take_errors tells. It costs a small launch. On the host a run always looks, and
  /// refuses.
  bool check_ids = false;
};

/// A step's batch. Device memory for pages on a device.
struct StepTables {
  const std::int32_t* block_table = nullptr;      ///< [batch][columns]: ids of a sequence's blocks, in order
  std::int64_t row_stride = 0;                    ///< from row to row of block_table, in elements
  std::int64_t columns = 0;                       ///< entries of a row; those beyond a sequence's length are not read
  const std::int32_t* seq_lens = nullptr;         ///< [batch]: tokens, those of this step included
  const std::int32_t* query_start_loc = nullptr;  ///< [batch + 1]: rows of sequence i are [i] to [i + 1] of q and out
  std::int32_t batch = 0;                         ///< up to max_batch; a sequence may have no query
  std::int32_t max_query_len = 0;                 ///< the most queries of a sequence; 0: not known
};

class PagesImpl;
class PagesPlanImpl;

/// Attention of a batch over an engine's blocks: made once for the shapes that steps may have, given the tables once a
/// step (set_tables), and run once a layer. Plans are independent of each other. One plan takes one call at a time.
class KVANT_API PagesPlan {
 public:
  /// The batch of the runs that follow. On the host it is checked and copied. On a device a launch copies it to the
  /// plan's tables; a sequence that does not fit (more queries than max_query_len, if causal or with fresh keys than
  /// tokens, rows beyond max_tokens, more pages than max_blocks or columns) gets no query, and take_errors tells.
  /// Errors: invalid_argument; the tables that were set before still count.
  Status set_tables(const StepTables& tables, Stream stream = {});
  /// out = softmax(transform(scale * q k^T) + masks) v over one layer's pool. q, out: [tokens, q_heads, head_dim], f32,
  /// f16 or bf16; tokens: up to max_tokens, and all rows of the tables at least. Rows that belong to no sequence are
  /// left as they are. options.lse: [tokens, q_heads]. options.workspace: on a device workspace_bytes() of device
  /// memory, which plans that run one after another can share; on the host empty.
  /// keys, values: of a plan with attention.fresh_keys, and of no other: the tokens' own, [tokens or more, kv_heads,
  /// head_dim] in the order of the rows of q, attended to as given; older tokens are read from blocks. A step's write
  /// may come before such a run or after it. kvant::run says which tensors are taken; on a device both are f16 or both
  /// bf16.
  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const RunOptions& options = {},
             const TensorView& keys = {}, const TensorView& values = {});
  /// Device only; waits for the stream. True if a sequence did not fit the plan, or had a block id outside the pool
  /// (check_ids), since the last call. False on the host, which refuses these.
  Result<bool> take_errors(Stream stream = {});

  [[nodiscard]] std::string explain() const;  ///< kernels, tiles, splits, and why
  [[nodiscard]] std::size_t workspace_bytes() const noexcept;
  [[nodiscard]] const char* isa() const noexcept;     ///< "cuda" on a device
  [[nodiscard]] const char* kernel() const noexcept;  ///< on a device as Plan::kernel(); else empty
  [[nodiscard]] int products() const noexcept;        ///< as Plan::products()
  [[nodiscard]] int threads() const noexcept;         ///< 0 on a device

  explicit PagesPlan(std::unique_ptr<PagesPlanImpl> impl);
  PagesPlan(PagesPlan&&) noexcept;
  PagesPlan& operator=(PagesPlan&&) noexcept;
  ~PagesPlan();

 private:
  std::unique_ptr<PagesPlanImpl> impl_;
};

/// The geometry and formats of an engine's blocks. Holds no blocks: its state is a flag, the step's tables, and with
/// tail_pages the exact copies of the newest blocks. With centres or tail_pages one call at a time, those of its plans
/// included, and layers whose sequences have other tables need Pages of their own.
class KVANT_API Pages {
 public:
  /// Errors: invalid_argument for unknown formats, head_dim and counts out of range; unsupported for lut formats, and
  /// for a device that this build or machine has not.
  static Result<Pages> create(const PagesConfig& config);

  [[nodiscard]] const PagesConfig& config() const noexcept;
  /// Bytes of a (block, kv head): a multiple of 64.
  [[nodiscard]] std::int64_t block_bytes() const noexcept;
  [[nodiscard]] static constexpr int block_tokens() noexcept { return kPageTokens; }
  /// Bytes of the exact copies of all layers, taken by create.
  [[nodiscard]] std::int64_t tail_bytes() const noexcept;
  /// Exact copies of each layer, of a block each: tail_sequences * (sink_pages + tail_pages + 2), and tail_pages more
  /// for sixteen of the sequences, or PagesConfig::exact_copies.
  [[nodiscard]] int tail_copies() const noexcept;

  /// With centres or tail_pages, once a step and before its writes and set_tables: the whole batch. Writes find the
  /// block before a block that begins in these tables: row i of their slots is row i of query_start_loc. On the host
  /// tables are copied; on a device they must stay as they are until the step's writes are done.
  /// With tail_pages a batch has up to tail_sequences. A block whose first position is written in this step (positions
  /// from length - queries on) gets an exact copy if it is a first page or in the tail; the copy that was needed
  /// longest ago makes room. Among those of one step pages that are being written have copies first, then first pages,
  /// the newest full pages, and others. From then on, what is written to the block is written to its copy alone. A
  /// block that is to be read exactly and has no copy (a prefix that was cached long ago, or copies are too few) is
  /// read encoded, and take_misses counts it. Blocks that were in the tail when a step began are read exactly by all
  /// its queries. Blocks with tokens that only their copies have, and that the step's rows do not go on, are encoded by
  /// this call, in the pools that the layers were last written to, which must stay. Others are after writes of the
  /// step: blocks that a step of more than 64 tokens fills and leaves outside the tail (with
  /// PagesConfig::encode_at_once all). Errors: on the host invalid_argument for tables that do not fit. On a device
  /// such sequences are passed over, and the plan's take_errors tells. Without centres and tail_pages nothing happens.
  Status begin_step(const StepTables& tables, Stream stream = {}) const;
  /// Waits for the stream. Since the last call: pages that a step was to read exactly, and that had no copy.
  Result<std::int64_t> take_misses(Stream stream = {}) const;

  /// Stores tokens in their slots, encoded, or in the exact copies of their blocks. slots: [count], device memory for
  /// pages on a device. keys, values: [count or more, kv_heads, head_dim], f32, f16 or bf16; row i goes to slot i, and
  /// those of slots below 0 are not read. The tokens of one block must follow one another in slots, in ascending order,
  /// as those of a sequence do; on the host any order will do, and of a slot that is given twice the last row counts.
  /// Bytes are the same on every instruction set and device. With centres, row i is row i of the tables of begin_step;
  /// a block that begins in a row for which these name no block before is centred on its first key. Errors:
  /// invalid_argument for centred pages before any begin_step. On the host non_finite for values that are not finite or
  /// above 65504, and invalid_argument for slots outside the pool (nothing was changed). On a device such values become
  /// NaN for the rows that see them, tokens of such slots are not stored, and take_non_finite tells of either.
  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream = {}) const;
  /// Decodes whole blocks to f32, f16 or bf16 tensors [count * 64, kv_heads, head_dim], in the original coordinates:
  /// what attention computes with, but for exact copies, which are not looked at. ids: [count], device memory for pages
  /// on a device, where ids outside the pool leave their rows as they are. Either tensor may have null data. Tokens
  /// that only a copy has are encoded first.
  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream = {}) const;
  /// Copies blocks, all kv heads: from[i] to to[i] for i below count; no block of `to` may be in `from` or twice in
  /// `to`. Device memory for pages on a device, where pairs outside the pool are left out. Blocks of `to` have no exact
  /// copy then, until they begin anew: plans whose tables have them need set_tables again (on the host run refuses).
  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream = {}) const;
  /// Device only; waits for the stream: true if a write since the last call met values that are not finite, or a slot
  /// outside the pool. False on the host, which refuses these.
  Result<bool> take_non_finite(Stream stream = {}) const;

  /// Errors: invalid_argument, unsupported. On a device it allocates tables of max_batch * max_blocks entries.
  [[nodiscard]] Result<PagesPlan> plan(const PagesPlanOptions& options) const;

 private:
  explicit Pages(std::shared_ptr<const PagesImpl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const PagesImpl> impl_;
};

}  // namespace kvant
