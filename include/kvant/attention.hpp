// Attention over a cache: plan once per step, run once per layer.
//   out = softmax(transform(scale * q k^T) + masks) v
// `plan` does all validation and says what it chose (explain); `run` allocates nothing and throws nothing.
//
// Rows and logits. Query i of a sequence with q_len queries stands at position length - q_len + i: queries are the
// newest tokens, and their own keys and values must be in the cache, or be given to the run (fresh keys). With group =
// q_heads / kv_heads, query head h reads kv head h / group (rounded down), as models with grouped-query attention have
// it. (In a latent cache q . k is that of the query's first elements with the latent, and of its others with the rotary
// key.) A logit is, in this order:
//   1. scale * q . k
//   2. softcap    cap * tanh(logit / cap)
//   3. ALiBi      - slope * |query position - key position|
//   4. masks      additive ones are added; hidden keys are left out
// Logits are float32. A row whose query is not finite, or that sees a key whose score or a sum towards it overflows, or
// a stored value whose scale is not finite, becomes NaN, with lse NaN; others keep their bits. (On a device an overflow
// is not looked for.) A row that sees no key is 0 with lse = -inf.
//
// Threads: kvant/cache.hpp says what may go on at the same time. Runs of one plan need a workspace each.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvant/cache.hpp"
#include "kvant/export.hpp"
#include "kvant/types.hpp"

namespace kvant {

/// An additive (f32, f16, bf16) or boolean (one byte, non-zero = visible) mask over [batch, q_head, query, key].
/// Boolean: non-zero means that the query sees the key (torch's scaled_dot_product_attention; nn.MultiheadAttention and
/// others mean the opposite, so invert theirs). Additive: 0 changes nothing, minus infinity hides, NaN and plus
/// infinity make the row NaN. A dimension of size 1 or of stride 0 broadcasts; strides are in elements. Row i of the
/// query dimension is query i of its sequence, in ragged batches too: a sequence of fewer queries than the mask has
/// rows uses the first ones. Keys are absolute positions from first_key on, so the last dimension covers the longest
/// sequence (of those that have queries) from there; keys before first_key are hidden, also where the key dimension
/// broadcasts. The memory must stay valid, and unchanged, as long as plans made with it are used. For a cache on a
/// device it is device memory, may change between runs, and must cover the lengths at each run.
struct MaskTensor {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride{};
  std::int64_t first_key = 0;  ///< position of the key of column 0
};

/// Who sees whom. Query i of a sequence stands at position length - q_len + i.
struct Mask {
  bool is_causal = true;
  /// Last W keys, the query's own included, as sliding_window of Hugging Face's models counts (FlashAttention's `left`
  /// is W - 1). 0: the cache's window and window_sinks, because such a cache has released the other pages (explain()
  /// says so); without one, all keys. All keys of a cache with a window, as long as none were released: a window of the
  /// length or more. Without is_causal a lower bound only: keys from position - W + 1 on, later ones too.
  std::int64_t window = 0;
  std::int64_t window_sinks = 0;  ///< first tokens that stay visible beyond the window
  MaskTensor tensor{};            ///< on top of the above; no data: none

  static Mask causal() { return {}; }
  static Mask bidirectional() {
    Mask m;
    m.is_causal = false;
    return m;
  }
  static Mask sliding(std::int64_t window, std::int64_t sinks = 0) {
    Mask m;
    m.window = window;
    m.window_sinks = sinks;
    return m;
  }
  /// Bidirectional, but for keys that lie behind the window: what a mask tensor says of the others counts. For a tensor
  /// over a cache whose window has released pages.
  static Mask bounded_below(std::int64_t window, std::int64_t sinks = 0) {
    Mask m = sliding(window, sinks);
    m.is_causal = false;
    return m;
  }
};

struct AttentionOptions {
  int q_heads = 0;                    ///< a multiple of the cache's kv_heads
  int q_len = 1;                      ///< queries a sequence (the newest positions)
  std::vector<int> q_lens{};          ///< ragged: one count a sequence, overrides q_len; 0: no query in this run
  double scale = 0;                   ///< magnitude 1e-37 to 1e37; 0: 1 / sqrt(head_dim)
  double softcap = 0;                 ///< t = cap * tanh(s / cap), before ALiBi and masks; 1e-37 to 1e37; 0: none
  std::vector<float> alibi_slopes{};  ///< [q_heads]: logit -= slope * |query position - key position|
  Mask mask{};
  /// Fresh keys: each run is given keys and values of the sequences' last q_len tokens, attends to these tokens as they
  /// are given, and reads only older tokens from the cache. Engines compute a prompt like this: exactly, and without
  /// reading back what was just encoded. Tokens are reserved before the plan is made, as always; a layer may be run
  /// before its write or after it, with the same result. (Before the write, a run is refused if it would read an older
  /// page that this write has yet to encode.) On a device such plans take prefill kernels.
  bool fresh_keys = false;
  int threads = 0;              ///< 0: the processors that the process may use (affinity, CPU quota)
  std::int64_t split_keys = 0;  ///< keys a split covers, a multiple of 64; 0: planned from the lengths
  std::string backend{};        ///< "cpu", "cuda": where the cache is; empty: the same
  /// One of isas(): "scalar", "avx2", "avx512", "amx" or "neon"; empty: the best that this machine has. "amx"
  /// multiplies more than 16 rows with products of bf16 terms: 4e-6 off exact attention over the stored vectors, where
  /// others are 1e-6 off (float formats). Few rows of tq formats: all are 6e-5 off, with loud channels up to 1.2e-4.
  std::string isa{};
  /// Caches on a device: "decode" (keys split over blocks), "decode_sm90" (compute capability 9.0) or "decode_sm80"
  /// (the same for several queries; weights are rounded to f16), or "prefill" (many rows over all keys; weights are
  /// rounded to f16 or bf16); empty: what takes the least time, and explain() says which and why. Prefill kernels are
  /// of two kinds, "prefill_sm90" (compute capability 9.0) and "prefill_sm80"; "prefill" takes the first of these that
  /// serves. Two others (compute capability 9.0) serve before them: "prefill_unpacked" unpacks the pages of sequences
  /// with many queries once to the workspace, which is up to 256 MiB then, and "prefill_fresh", with fresh_keys, serves
  /// sequences that have no older tokens. Named, either refuses a run whose tensors it cannot take.
  /// "generic" takes any pair of formats, decodes its vectors and multiplies in float32: slower than others, and the
  /// only one for f32 and imported formats, and for exact = f32, which have it by themselves.
  std::string kernel{};
  /// Bits of the numbers that are multiplied where many rows share a page of tq formats: 16 (on the CPU float32, or
  /// AMX's bf16 terms), or 8, which is faster and rounds weights to 8 bits (16 where few keys have most of the weight)
  /// and queries to 8 or 15 (docs/design.md, "Products of 8 bits"). 0: 8 on the CPU for pairs to whose own loss that
  /// adds at most a fifth (products() and explain() say which), else 16. On the CPU other pages,
  /// few rows and fresh keys are multiplied as ever.
  /// On a device prefill_unpacked multiplies queries and all keys of its sequences as 8-bit integers, where `kernel`
  /// names it or that is estimated to be faster. 8 is refused where keys or values are no tq format, and on a device
  /// with tq8 keys, at other head_dims than 256, and below compute capability 9.0.
  int products = 0;
};

class PlanImpl;

/// Immutable. Valid until the length or pages of a sequence that it has queries of change: until the next reserve or
/// append of a new step, truncate, reorder or remove of that sequence (then `run` says stale). Writes of the step that
/// was reserved before, fork, trim, and whatever is done to other sequences keep it valid. It refers to its cache,
/// which must outlive its last run. Over a cache on a
/// device it stays valid while its sequences live and are at least q_len long: kernels read lengths and pages from the
/// device's tables, so that a plan, and a CUDA graph of its runs, follows sequences that grow. Splits were planned for
/// the lengths at planning; plan again now and then, or after lengths have changed much.
class KVANT_API Plan {
 public:
  [[nodiscard]] std::string explain() const;  ///< kernels, tiles, splits, bytes, and why
  [[nodiscard]] std::size_t workspace_bytes() const;
  [[nodiscard]] std::int64_t total_queries() const;  ///< rows of q and out
  [[nodiscard]] std::int64_t kv_bytes() const;       ///< cache bytes one run reads in one layer
  [[nodiscard]] const char* isa() const;             ///< "cuda" on a device
  /// On a device "decode", "decode_sm90", "decode_sm80", "prefill" or "generic"; else empty.
  [[nodiscard]] const char* kernel() const;
  [[nodiscard]] int products() const;  ///< what AttentionOptions::products became; few rows, or no codes: 16
  [[nodiscard]] int threads() const;   ///< 0 on a device
  [[nodiscard]] int splits() const;    ///< the most splits any row has
  [[nodiscard]] const PlanImpl& impl() const { return *impl_; }
  explicit Plan(std::shared_ptr<const PlanImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const PlanImpl> impl_;
};

/// A host's own threads in place of kvant's: `run` calls execute(self, workers, work, context) at most once (never for
/// a plan of one thread). It must call work(context, i) once for every i in 0 .. workers - 1, on any threads and in any
/// order, and return when all are done. Results do not depend on who ran what. `work` does not throw.
struct Executor {
  void (*execute)(void* self, int workers, void (*work)(void* context, int worker), void* context) = nullptr;
  void* self = nullptr;
};

struct RunOptions {
  Stream stream{};  ///< caches on a device: where the launches go; tensors and lse are then device memory
  /// [total_queries, q_heads]: natural log of the softmax denominator, sink logits included; -inf: no key (with sink
  /// logits: the sink logit).
  float* lse = nullptr;
  /// [q_heads]: join the denominator only (gpt-oss), unscaled and uncapped. Where partial results are merged, in one
  /// partial only: each partial that has them counts them.
  const float* sink_logits = nullptr;
  /// None: OpenMP or std::thread, as built. For hosts that are threaded already. Caches in host memory only.
  Executor executor{};
  /// >= workspace_bytes(), 64-byte aligned; empty: the plan's own (one run at a time). Caches on a device need one in
  /// device memory (cudaMalloc's alignment will do); runs on one stream can share it, and it need not be cleared.
  std::span<std::byte> workspace{};
};

/// Errors: invalid_argument, unsupported, and what the message says. No silent substitutes.
KVANT_API Result<Plan> plan(const Cache& cache, std::span<const SequenceId> sequences, const AttentionOptions& options);
inline Result<Plan> plan(const Cache& cache, std::initializer_list<SequenceId> sequences,
                         const AttentionOptions& options) {
  return plan(cache, std::span<const SequenceId>(sequences.begin(), sequences.size()), options);
}

/// q: [total_queries, q_heads, head_dim], out: same shape, f32, f16 or bf16 each. Sequences' rows one after another;
/// sequences without a query have none. Where no sequence has a query a run does nothing, and data may be null. Vectors
/// of `out` must not overlap: strides below head_dim, 0 included, are refused.
///
/// keys, values: of a plan with fresh_keys, and of no other plan. [total_queries, kv_heads, head_dim], the keys and
/// values of the queries' own tokens, in the order of the rows of q (with batch_stride as q may have it); f32, f16 or
/// bf16 each on the host. On a device they are f16 or bf16, both of one dtype, with rows and strides of 16-byte
/// multiples; where the cache has exact pages, of the dtype of these. A token whose key or value is not finite makes
/// NaN of the rows that see it. (On a device such a value makes NaN of further rows of its sequence.)
KVANT_API Status run(const Plan& plan, int layer, const TensorView& q, const MutableTensorView& out,
                     const RunOptions& options = {}, const TensorView& keys = {}, const TensorView& values = {});

/// A normalised partial result over some keys: out [rows, head_dim] f32, lse [rows].
struct Partial {
  const float* out = nullptr;
  const float* lse = nullptr;
};
/// Merges partial results over disjoint key sets, in the order given (log-sum-exp rule; Dao et al., FlashDecoding).
/// out: [rows, head_dim] and lse: [rows] (may be null) may alias the first partial. A row that saw no key anywhere is
/// 0 with lse = -inf. lse may include sink logits in one of the partials, not in more: they would count twice.
KVANT_API Status merge(std::span<const Partial> partials, std::int64_t rows, int head_dim, float* out, float* lse);

/// Where rows of partial results in device memory lie, in elements. 0: behind each other.
struct PartialStrides {
  std::int64_t out = 0;  ///< from one row of a partial's out to the next: at least head_dim
  std::int64_t lse = 0;  ///< from one row of a partial's lse to the next: at least 1
};
/// The same for partial results in the memory of one CUDA device, up to 64 of them, in f32 arithmetic. out [rows,
/// head_dim] and lse [rows] (may be null) lie behind each other and must not overlap the partials. One launch on
/// `stream`: nothing is allocated or waited for, and it can be recorded in a CUDA graph.
/// Errors: invalid_argument, unsupported (no CUDA backend).
KVANT_API Status merge_on_device(std::span<const Partial> partials, std::int64_t rows, int head_dim, float* out,
                                 float* lse, Stream stream, const PartialStrides& strides = {});

/// The instruction sets compiled in, best first (amx, avx512, avx2, scalar; on 64-bit ARM neon, scalar), and whether
/// this machine has them. Asking changes nothing.
struct IsaInfo {
  const char* name;
  bool available;
  const char* detail;
};
KVANT_API std::vector<IsaInfo> isas();

}  // namespace kvant
