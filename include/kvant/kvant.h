/* kvant's C ABI: compressed key/value caches, and attention over their packed bytes.
 *
 * Conventions
 *   status     Every function that can fail returns a kvant_status: KVANT_OK (0) or the reason. kvant_last_error() then
 *              has the sentence for people: the argument, its value, what is allowed, and the way out. After a failure
 *              nothing was changed and no output was written, unless a function says otherwise.
 *   handles    kvant_cache, kvant_plan, kvant_bases, kvant_snapshot, kvant_pages and kvant_pages_plan are opaque.
 *              Each is destroyed once, by its own function; NULL is allowed there. A plan keeps what it needs of its
 *              cache or pages, so they may be destroyed in any order.
 *   structs    Structs that may grow begin with struct_size, which the caller sets to sizeof the struct. The four with
 *              defaults (kvant_cache_config, kvant_attention_options, kvant_run_options, kvant_pages_config) have an
 *              _init function, which sets struct_size and the defaults; change what you need after it. Programs built
 *              with an older header go on working with a newer library.
 *   texts      Strings handed in are UTF-8, zero-terminated, and copied. Strings handed out are written to a buffer of
 *              the caller: *size gets the bytes needed, the terminating zero included; call with buffer NULL to ask.
 *   tensors    [tokens, heads, head_dim] with strides in elements, the innermost contiguous. Borrowed for the call.
 *              Values and outputs have v_head_dim in place of head_dim, where a cache or pages set it. With latents
 *              queries have latent + rope.
 *   threads    Any thread may make any call at any time, but for _destroy of an object that another call uses, and
 *              kvant_cache_set_stream. On one cache calls that only read (kvant_run with a workspace of its own, plans,
 *              read, decode, length, memory, describe) go on at the same time, on a device one after another; the
 *              others wait for those in progress. A sequence is never disturbed by what is done to another, also where
 *              they share pages. The calls for one sequence are the caller's to order.
 *   exceptions None leave this interface. The library never prints, aborts or exits. */
#ifndef KVANT_KVANT_H
#define KVANT_KVANT_H

#include <stddef.h>
#include <stdint.h>

#ifndef KVANT_C_API
#if defined(__GNUC__)
#define KVANT_C_API __attribute__((visibility("default")))
#else
#define KVANT_C_API
#endif
#endif

/* The version of this header, as in kvant/version.hpp; kvant_version() is the library's. */
#define KVANT_VERSION_MAJOR 0
#define KVANT_VERSION_MINOR 1
#define KVANT_VERSION_PATCH 0
#define KVANT_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* --- status ------------------------------------------------------------------------------------------------------ */

typedef int32_t kvant_status;
enum {
  KVANT_OK = 0,
  KVANT_INVALID_ARGUMENT = 1, /* a value outside what is allowed */
  KVANT_UNSUPPORTED = 2,      /* a legal request that this build or machine cannot serve; never a slower substitute */
  KVANT_OUT_OF_CAPACITY = 3,  /* the cache's configured capacity is exhausted */
  KVANT_NON_FINITE = 4,       /* NaN, infinity or a magnitude above 65504 in keys or values */
  KVANT_STALE = 5,            /* a plan made for an earlier state of one of its sequences */
  KVANT_BAD_FILE = 6,         /* a file that is not what it claims to be */
  KVANT_IO = 7,               /* the operating system refused */
  KVANT_OUT_OF_MEMORY = 8,    /* an allocation failed */
  KVANT_INTERNAL = 9          /* a defect in kvant */
};

/* The lower-case name, for example "invalid_argument"; "unknown" for other numbers. A constant. */
KVANT_C_API const char* kvant_status_name(kvant_status status);

/* The error of the last call of this thread that failed; "" if none did. Valid until the next failure in this thread.
 * Successful calls leave the text alone, so look at the status first. */
KVANT_C_API const char* kvant_last_error(void);

/* --- about the library ------------------------------------------------------------------------------------------- */

/* "0.1.0". A constant. */
KVANT_C_API const char* kvant_version(void);

/* The parts that were compiled in and the features of this machine, as a JSON object:
 *   {"version", "page_tokens", "head_dims": [...] (stored as they are), "largest_head_dim",
 *    "threads": {"runtime", "hardware"}, "formats": [{"name", "id", "bits", "dense", "summary"}],
 *    "isas": [{"name", "available", "detail"}],  (best first)
 *    "backends": [{"name", "available", "detail"}]}  (those compiled in)
 * The detail of a backend: its devices, or why it is not available.
 * buffer: capacity bytes, or NULL with capacity 0 to ask. size: may be NULL when buffer is not.
 * Errors: KVANT_INVALID_ARGUMENT when capacity is below *size (nothing is written then, except *size). */
KVANT_C_API kvant_status kvant_info(char* buffer, size_t capacity, size_t* size);

/* Facts about this build alone, as JSON. Unlike kvant_info it starts no driver, so that a process may still fork.
 *   {"version", "page_tokens", "head_dims", "largest_head_dim", "formats",  (as in kvant_info)
 *    "device": null, or {"name", "architectures", "head_dims", "widths": [[192, 128], ...],
 *               "pairs": ["tq6/tq4", ...]}}  (what has kernels; widths: head_dim and v_head_dim)
 * Buffer as in kvant_info. */
KVANT_C_API kvant_status kvant_build_info(char* buffer, size_t capacity, size_t* size);

/* --- tensors ----------------------------------------------------------------------------------------------------- */

typedef int32_t kvant_dtype;
enum {
  KVANT_F32 = 0,
  KVANT_F16 = 1,
  KVANT_BF16 = 2,
  KVANT_BOOL = 3 /* one byte, non-zero = true; masks only */
};

/* shape and stride: [tokens, heads, head_dim], strides in elements. stride = {0, 0, 0}, which a struct has that names
 * none, means contiguous, and only that. Else stride[2] = 1, and in an input a stride of 0 repeats what it counts:
 * {0, 0, 1} is one vector for all tokens and heads. (Masks say contiguous by NULL, and repeat by zeros.)
 * batch_stride: 0 (default): the rows of a call's sequences lie one after another, shape[0] counts them all. Else the
 * rows of sequence i begin at element i * batch_stride, and shape[0] is the most rows that any sequence of the call
 * has: a tensor [batch, heads, tokens, head_dim] or [batch, tokens, heads, head_dim] can be given as it is. Strides of
 * zeros mean contiguous [tokens, heads, head_dim] within a sequence then, too. Sequences are counted in the order of
 * the call; a struct does not say for how many of them there is memory, so compare that with the call's number before.
 * On a device batch_stride must lead to the same rows as 0 (one sequence; as many rows each, one after
 * another), or is unsupported. */
typedef struct kvant_tensor {
  const void* data;
  kvant_dtype dtype;
  int64_t shape[3];
  int64_t stride[3];
  int64_t batch_stride;
} kvant_tensor;

typedef struct kvant_mutable_tensor {
  void* data;
  kvant_dtype dtype;
  int64_t shape[3];
  int64_t stride[3];
  int64_t batch_stride;
} kvant_mutable_tensor;

/* --- bases: the coordinates in which vectors are quantised -------------------------------------------------------- */

typedef int32_t kvant_basis_kind;
enum {
  KVANT_BASIS_AUTOMATIC = 0, /* hadamard for the tq formats, none otherwise */
  KVANT_BASIS_HADAMARD = 1,
  KVANT_BASIS_NONE = 2,
  KVANT_BASIS_CALIBRATED = 3 /* needs kvant_cache_config.bases */
};

/* The centre that is subtracted from keys, or latents, in their basis, before they are encoded; readers get it back. A
 * vector that is nearer to zero than to its page's centre is stored without it. */
typedef int32_t kvant_key_centre;
enum {
  KVANT_CENTRE_AUTOMATIC = 0, /* page for tq and fp8 keys, none otherwise; for latents see v_centre */
  KVANT_CENTRE_NONE = 1,
  KVANT_CENTRE_PAGE = 2 /* a mean of each page, stored with the page: tq and fp8 */
};

typedef struct kvant_bases kvant_bases;

/* Reads a file that `kvant calibrate` wrote. *bases: destroy it when the caches that use it have been created.
 * Errors: KVANT_IO, KVANT_BAD_FILE (what is wrong with it, and where). */
KVANT_C_API kvant_status kvant_bases_load(const char* path, kvant_bases** bases);
KVANT_C_API void kvant_bases_destroy(kvant_bases* bases);

/* --- cache ------------------------------------------------------------------------------------------------------- */

typedef struct kvant_cache kvant_cache;

/* A sequence of a cache. Never reused: the id of a removed sequence stays invalid. */
typedef uint64_t kvant_sequence;

typedef struct kvant_cache_config {
  size_t struct_size;       /* sizeof(kvant_cache_config); set by kvant_cache_config_init */
  int32_t layers;           /* all of one geometry; layers of another geometry are another cache. Default 1 */
  int32_t kv_heads;         /* required */
  int32_t head_dim;         /* required; 1 to 576. Sizes that kvant_info does not list are stored padded with zeros to
                           the next it lists; tensors and the default scale have this size. On a device 1 to 512,
                           padded to the next of 64, 96, 128, 192, 256 and 512 */
  int32_t sink_pages;       /* first 64-token pages kept exact, while a window covers them. -1 (default): 1. 0 where
                               both formats are dense, whatever is given */
  int32_t tail_pages;       /* newest full pages kept exact beside the one being filled; 0: encode tokens as they
                           come. -1 (default): 1 */
  int32_t exact_dtype;      /* kvant_dtype of exact pages. -1 (default): f32 where a format is f32; f16 where the first
                               write is, or a format is f16 and the first write has no bf16; else bf16, also for f32
                               tensors. With sink or tail pages every value is rounded to it before it is stored or
                               encoded; without them tokens are encoded as they are given */
  const char* k;            /* key format, default "tq6"; kvant_info lists them. NULL: "tq6", or "tq8" with latent */
  const char* v;            /* value format, default "tq4" */
  int64_t window;           /* sliding window in tokens, 0 (default): none. Pages out of sight are freed */
  int64_t window_sinks;     /* first tokens that stay visible beyond the window */
  int64_t capacity_tokens;  /* at most this many tokens in pages (whole ones, shared ones once); 0 (default): any */
  kvant_basis_kind k_basis; /* default KVANT_BASIS_AUTOMATIC */
  kvant_basis_kind v_basis;
  const kvant_bases* bases;    /* required by KVANT_BASIS_CALIBRATED, refused without */
  const int32_t* basis_layers; /* [layers]: the file's layer number for each layer of the cache; NULL: all layers of
                                  the file, in ascending order */
  const float* k_levels;       /* lut formats: [k_level_count] level values, ascending; NULL otherwise */
  const float* v_levels;
  int32_t k_level_count; /* 2^bits of the format */
  int32_t v_level_count;
  int32_t lut_scales; /* lut formats: scales a vector, 1 (default) or 2 */
  int32_t threads;    /* workers that encode; 0 (default): the processors that the process may use */
  const char* isa; /* encodes with this instruction set: "scalar", "avx2", "avx512", "amx" or "neon" (all give the same
                      bytes); NULL (default): the best */
  const char* device; /* where pages live: NULL (default) or "cpu": host memory; "cuda", "cuda:1": a device's, taken at
                         creation (capacity_tokens is required then). See "caches on a device" */
  int64_t max_sequences;       /* device only: sequences alive at once; 0 (default): 256 */
  int64_t max_sequence_tokens; /* device only: tokens of the longest sequence; 0 (default): capacity_tokens */
  int64_t rollback_tokens;     /* with a window: pages are released only when no sequence truncated by so many tokens
                                  would see them, from the greatest length it has had. 0 (default): 64. Rejected drafts
                                  of speculative decoding */
  kvant_key_centre k_centre;   /* default KVANT_CENTRE_AUTOMATIC */
  int32_t pinned;              /* in host memory only: pages are in pinned memory, which devices read and write at the
                                  speed of the link (kvant_copy_sequences). Needs CUDA. 0 (default): they are not */
  int64_t v_head_dim;          /* elements of a value and of an output, 1 to 576, where keys and queries have another
                                  number (head_dim); 0 (default): head_dim. On a device: 128 with a head_dim of
                                  192, or head_dim */
  int32_t latent;              /* a latent cache (multi-head latent attention); on a device 512 with 64: a token has one
                                  latent of so many elements and one rotary key of `rope`, 1 to 576 each, which all
                                  query heads share. The latent is the value and a part of the key. Keys in calls are
                                  the rotary keys, of format k; values are the latents, of format v. kv_heads is 1,
                                  head_dim is rope and v_head_dim is latent, set or not. A query has latent + rope
                                  elements in this order, an output latent. Plans need a scale. 0 (default): keys and
                                  values of heads */
  int32_t rope;
  kvant_key_centre v_centre; /* the latents'. KVANT_CENTRE_AUTOMATIC (default): page for tq and fp8 latents, but none
                                  beside a k_centre of none */
} kvant_cache_config;

/* Caches on a device
 *   stream     Calls enqueue their work on the stream of kvant_cache_set_stream, in that order, and do not wait for it;
 *              kvant_run takes its own stream in its options. All work on one cache must be ordered: one stream, or
 *              events between them.
 *   tensors    keys, values, q, out, masks, lse, sink_logits and workspaces are device memory, and must stay as they
 *              are until the stream has completed the work. kvant_cache_read waits, and writes to host memory.
 *   non-finite keys and values are stored so that every row that sees them becomes NaN; kvant_cache_take_non_finite
 *              tells.
 *   plans      stay valid while their sequences live: kernels read the lengths on the device. They need a workspace.
 *   graphs     kvant_cache_reserve_ahead takes slots for steps to come; then record reserve, write and run, launch the
 *              graph once for that step, and for each further launch call kvant_cache_advance. */

/* Fills in the defaults. struct_size: sizeof(kvant_cache_config). */
KVANT_C_API void kvant_cache_config_init(kvant_cache_config* config, size_t struct_size);

/* Errors: KVANT_INVALID_ARGUMENT for unknown formats, head_dim and counts out of range, bases of other shapes;
 * KVANT_OUT_OF_MEMORY. *cache is NULL then. */
KVANT_C_API kvant_status kvant_cache_create(const kvant_cache_config* config, kvant_cache** cache);
KVANT_C_API void kvant_cache_destroy(kvant_cache* cache);

/* An empty sequence. */
KVANT_C_API kvant_status kvant_cache_add_sequence(kvant_cache* cache, kvant_sequence* sequence);
/* A new sequence with the same tokens; pages are shared until one side writes to them.
 * Errors: KVANT_INVALID_ARGUMENT when parent is not a live sequence. */
KVANT_C_API kvant_status kvant_cache_fork(kvant_cache* cache, kvant_sequence parent, kvant_sequence* child);
/* Frees what no other sequence shares. Errors: KVANT_INVALID_ARGUMENT when it is not a live sequence. */
KVANT_C_API kvant_status kvant_cache_remove(kvant_cache* cache, kvant_sequence sequence);
/* Forgets all tokens from position `tokens` on. Going back up to 64 tokens and on again gives the same bytes as if they
 * had never been appended. Errors: KVANT_INVALID_ARGUMENT when tokens is outside 0 .. length, or released
 * by the window. */
KVANT_C_API kvant_status kvant_cache_truncate(kvant_cache* cache, kvant_sequence sequence, int64_t tokens);
/* Beams in one call: sequences[i] becomes what sequences[parents[i]] was, for all i at once; the ids stay. A parent
 * that is named several times is shared: when one side writes to a page, its filled rows are copied (on a device, the
 * whole page). A parent that is not named is forgotten. sequences, parents: [count], no sequence twice, parents in 0 ..
 * count - 1. All or nothing.
 * Errors: KVANT_INVALID_ARGUMENT; a newest step that is not written in every layer. */
KVANT_C_API kvant_status kvant_cache_reorder(kvant_cache* cache, const kvant_sequence* sequences,
                                             const int64_t* parents, int64_t count);
/* *tokens: tokens appended and not truncated, those that the window released included. */
KVANT_C_API kvant_status kvant_cache_length(const kvant_cache* cache, kvant_sequence sequence, int64_t* tokens);

/* One step, part one: takes room for tokens[i] new tokens of sequences[i] in every layer, all or nothing.
 * sequences, tokens: [count], no sequence twice.
 * Errors: KVANT_OUT_OF_CAPACITY, KVANT_INVALID_ARGUMENT, KVANT_OUT_OF_MEMORY. */
KVANT_C_API kvant_status kvant_cache_reserve(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* tokens,
                                             int64_t count);
/* One step, part two, once per layer: keys and values of the tokens just reserved, the sequences' rows one after
 * another. sequences: [count], those of the reserve, in its order. keys, values: [sum of reserved tokens, kv_heads,
 * head_dim], f32, f16 or bf16. Values must be finite and at most 65504 in magnitude (up to 65536 passes: bf16 makes
 * that of 65504); tq vectors with values below some 1e-5 lose bits, below some 1e-7 they are stored as zeros
 * (docs/formats.md).
 * Errors: KVANT_NON_FINITE, KVANT_INVALID_ARGUMENT for shapes or a layer that was written already. */
KVANT_C_API kvant_status kvant_cache_write(kvant_cache* cache, const kvant_sequence* sequences, int64_t count,
                                           int32_t layer, const kvant_tensor* keys, const kvant_tensor* values);
/* reserve and write of one layer for one sequence: the first layer of a step reserves, the others fill in.
 * keys, values: [tokens, kv_heads, head_dim]. */
KVANT_C_API kvant_status kvant_cache_append(kvant_cache* cache, kvant_sequence sequence, int32_t layer,
                                            const kvant_tensor* keys, const kvant_tensor* values);

/* The CUDA stream (cudaStream_t; NULL: the default stream) of the calls above and of kvant_cache_read, until it is set
 * again. Errors: KVANT_INVALID_ARGUMENT for a cache in host memory and a stream that is not NULL. */
KVANT_C_API kvant_status kvant_cache_set_stream(kvant_cache* cache, void* stream);
/* Device only. Takes slots so that steps of tokens[i] tokens of sequences[i] in all, of any lengths each, take none:
 * they can be replayed from a CUDA graph. Nothing advances. sequences, tokens: [count].
 * Errors: as kvant_cache_reserve. */
KVANT_C_API kvant_status kvant_cache_reserve_ahead(kvant_cache* cache, const kvant_sequence* sequences,
                                                   const int64_t* tokens, int64_t count);
/* Device only. Tells of a step that a graph's launch took (the reserve and the writes of all layers): lengths here
 * follow those on the device. Enqueues nothing.
 * Errors: KVANT_INVALID_ARGUMENT for tokens that were not reserved ahead. */
KVANT_C_API kvant_status kvant_cache_advance(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* tokens,
                                             int64_t count);
/* Waits for the stream. *found: 1 if keys or values that are not finite were stored since the last call, else 0. Caches
 * in host memory refuse them instead: 0. */
KVANT_C_API kvant_status kvant_cache_take_non_finite(kvant_cache* cache, int32_t* found);

/* Decodes stored tokens [begin, end) of one layer in the original coordinates: exactly what attention computes with.
 * keys, values: f32 [end - begin, kv_heads, head_dim]; either may be NULL.
 * Errors: KVANT_INVALID_ARGUMENT for a range outside the sequence, or released by the window. */
KVANT_C_API kvant_status kvant_cache_read(const kvant_cache* cache, kvant_sequence sequence, int32_t layer,
                                          int64_t begin, int64_t end, const kvant_mutable_tensor* keys,
                                          const kvant_mutable_tensor* values);

/* Decodes tokens [begin[i], end[i]) of sequences[i] in one layer, as kvant_cache_read does, into tensors of f32, f16 or
 * bf16 where the cache lives: host memory, or device memory (enqueued on the stream, not waited for). keys, values: the
 * sequences' rows one after another, [sum of end - begin, kv_heads, head_dim], or by batch_stride; either may be NULL.
 * Values beyond the dtype become its infinity. Errors: as kvant_cache_read. */
KVANT_C_API kvant_status kvant_cache_decode(const kvant_cache* cache, const kvant_sequence* sequences,
                                            const int64_t* begin, const int64_t* end, int64_t count, int32_t layer,
                                            const kvant_mutable_tensor* keys, const kvant_mutable_tensor* values);

/* Bytes, except tokens. */
typedef struct kvant_memory {
  size_t struct_size;     /* sizeof(kvant_memory), set by the caller */
  int64_t tokens;         /* live tokens, summed over sequences (shared ones counted in each) */
  int64_t encoded_bytes;  /* codes of encoded pages held (whole pages) */
  int64_t scale_bytes;    /* scales of encoded pages, and their keys' centres */
  int64_t exact_bytes;    /* exact pages: sinks, tail, and the copy that outlives encoding by a page */
  int64_t table_bytes;    /* page tables and bookkeeping */
  int64_t total_bytes;    /* the four above */
  int64_t reserved_bytes; /* what the pools took from the system; see kvant_cache_trim */
} kvant_memory;
KVANT_C_API kvant_status kvant_cache_memory(const kvant_cache* cache, kvant_memory* memory);

/* The pages that a cache keeps exact, as it decided; 0 and 0: none. */
typedef struct kvant_exact_ends {
  size_t struct_size; /* sizeof(kvant_exact_ends), set by the caller */
  int32_t sink_pages; /* first ones, while a window covers them */
  int32_t tail_pages; /* newest full ones, beside the one being filled */
  kvant_dtype dtype;  /* -1: there are none, or the first write will decide */
} kvant_exact_ends;
KVANT_C_API kvant_status kvant_cache_exact_ends(const kvant_cache* cache, kvant_exact_ends* ends);

/* Gives memory that no page uses back to the system, after sequences were removed or truncated; otherwise it is kept
 * for the next ones. *bytes (may be NULL): all of a pool where none of its pages is in use (reserved_bytes shrinks),
 * else what is behind free pages, whose addresses stay reserved. 0 for a cache on a device. Plans stay valid. */
KVANT_C_API kvant_status kvant_cache_trim(kvant_cache* cache, int64_t* bytes);

/* Geometry, formats, page bytes, exact ends, basis, capacity, and what the cache holds beside a bf16 one; one line a
 * fact, for people. Buffer as in kvant_info. */
KVANT_C_API kvant_status kvant_cache_describe(const kvant_cache* cache, char* buffer, size_t capacity, size_t* size);

/* --- snapshots: caches in files (docs/snapshots.md) -------------------------------------------------------------- */

/* Called now and then by calls that take long, with bytes of pages that are done and all of them. 0: go on; else the
 * call stops (KVANT_IO) and has changed nothing. Must not call the cache. */
typedef int32_t (*kvant_progress)(void* context, int64_t done, int64_t total);

/* A struct of zeros with struct_size set has the defaults. */
typedef struct kvant_save_options {
  size_t struct_size;              /* sizeof(kvant_save_options), set by the caller */
  const kvant_sequence* sequences; /* [sequence_count]; NULL (default): all, in ascending order of ids */
  int64_t sequence_count;
  const char* name;            /* for people; NULL: none */
  const char* model;           /* the model that the cache belongs to, which a load can require; NULL: none */
  const char* const* metadata; /* [metadata_count][2]: keys, which do not begin with "kvant.", and values */
  int64_t metadata_count;
  const int64_t* tokens;       /* token ids of the sequences that have them, one sequence after another */
  const int64_t* token_counts; /* [token_lists]: 0 or the length of each sequence */
  int64_t token_lists;         /* 0 (default): no token ids; else as many as sequences */
  const char* base;            /* an earlier snapshot in the same folder, whose pages are not written again */
  kvant_progress progress;     /* NULL: none */
  void* progress_context;
} kvant_save_options;

/* Writes sequences of a cache to a file that only its owner may read: beside `path`, synced and renamed, so that an
 * older file of that name stays as it is if anything fails. Loaded sequences go on bit for bit as these do. options:
 * NULL for the defaults. From a device: on the stream of kvant_cache_set_stream, and it waits.
 * Errors: KVANT_INVALID_ARGUMENT (also a step that is not written in every layer), KVANT_IO, KVANT_BAD_FILE (base). */
KVANT_C_API kvant_status kvant_save(const kvant_cache* cache, const char* path, const kvant_save_options* options);

typedef struct kvant_snapshot kvant_snapshot;

/* Reads the header and the tables of a snapshot and of its bases; nothing in them is trusted. The file stays open until
 * kvant_snapshot_destroy. Errors: KVANT_IO, KVANT_BAD_FILE, KVANT_UNSUPPORTED (another version of the layout). */
KVANT_C_API kvant_status kvant_snapshot_open(const char* path, kvant_snapshot** snapshot);
KVANT_C_API void kvant_snapshot_destroy(kvant_snapshot* snapshot);

/* The facts of a snapshot as a JSON object:
 *   {"path", "written_by", "name", "model", "metadata": {...}, "config": {...},  (names of fields and their values)
 *    "sequences": [{"length", "token_ids"}],  (tokens, and how many of them have ids: all or 0)
 *    "encoded_pages", "exact_pages", "page_bytes", "file_bytes", "bases": [...]}
 * Buffer as in kvant_info. */
KVANT_C_API kvant_status kvant_snapshot_info(const kvant_snapshot* snapshot, char* buffer, size_t capacity,
                                             size_t* size);
/* The token ids of the sequence at a place of the file, [*count]. tokens: [capacity], or NULL to ask.
 * Errors: KVANT_INVALID_ARGUMENT for a place that does not exist, and a capacity below *count. */
KVANT_C_API kvant_status kvant_snapshot_tokens(const kvant_snapshot* snapshot, int64_t place, int64_t* tokens,
                                               int64_t capacity, int64_t* count);

/* A struct of zeros with struct_size set has the defaults. */
typedef struct kvant_load_options {
  size_t struct_size;       /* sizeof(kvant_load_options), set by the caller */
  const int64_t* sequences; /* [sequence_count]: places in the file; NULL (default): all */
  int64_t sequence_count;
  const char* model;           /* the load is refused where the file has another; NULL: any */
  const char* const* metadata; /* [metadata_count][2]: keys and values, refused where the file has others */
  int64_t metadata_count;
  const int64_t* tokens;       /* as in kvant_save_options: refused unless the sequences have exactly these */
  const int64_t* token_counts; /* [token_lists] */
  int64_t token_lists;         /* 0 (default): any token ids; else as many as sequences that are loaded */
  const char* device;          /* kvant_load: of the new cache; NULL (default): host memory */
  const char* isa;             /* kvant_load: as in kvant_cache_config */
  int64_t capacity_tokens;     /* kvant_load: of the new cache; 0 (default): as it was; -1: no limit */
  int64_t max_sequences;       /* 0 (default): as it was; so are the next */
  int64_t max_sequence_tokens;
  int32_t threads;         /* kvant_load: as in kvant_cache_config */
  kvant_progress progress; /* NULL: none */
  void* progress_context;
} kvant_load_options;

/* A new cache of the snapshot's configuration with its sequences. options: NULL for the defaults. sequences:
 * [capacity]; its first elements get the ids of the sequences that are loaded, in the order of options.sequences, else
 * of the file. *count: the number of these sequences, also where capacity is below it; count may be NULL.
 * *cache is NULL after an error.
 * Errors: those of kvant_cache_create and kvant_load_into. */
KVANT_C_API kvant_status kvant_load(const kvant_snapshot* snapshot, const kvant_load_options* options,
                                    kvant_cache** cache, kvant_sequence* sequences, int64_t capacity, int64_t* count);
/* Adds the sequences to a cache, whose configuration must be the snapshot's in all that bytes and visibility depend on.
 * Each page is compared with its checksum. sequences, capacity, count: as in kvant_load.
 * Errors: KVANT_INVALID_ARGUMENT (also a capacity below the number of sequences: nothing is loaded then),
 * KVANT_OUT_OF_CAPACITY, KVANT_IO, KVANT_BAD_FILE (names the first page that differs). */
KVANT_C_API kvant_status kvant_load_into(kvant_cache* cache, const kvant_snapshot* snapshot,
                                         const kvant_load_options* options, kvant_sequence* sequences, int64_t capacity,
                                         int64_t* count);

/* Copies sequences to another cache, in the host's memory or on a device, wherever the first is. The copies go on bit
 * for bit, pages that the sequences share are shared, and the sequences stay. The configuration of `to` must be that of
 * `from` in all that bytes and visibility depend on; after an error it has the sequences that it had. On the streams of
 * kvant_cache_set_stream. copies: [count], gets their ids, one for each of `sequences`. progress: NULL, or as in
 * kvant_save_options; it must call neither cache.
 * Errors: KVANT_INVALID_ARGUMENT (also `from` and `to` that are one cache), KVANT_OUT_OF_CAPACITY, KVANT_IO. */
KVANT_C_API kvant_status kvant_copy_sequences(const kvant_cache* from, const kvant_sequence* sequences, int64_t count,
                                              kvant_cache* to, kvant_sequence* copies, kvant_progress progress,
                                              void* progress_context);

/* Reads all of a snapshot and of its bases, and compares every checksum. Errors: KVANT_BAD_FILE, KVANT_IO. */
KVANT_C_API kvant_status kvant_snapshot_verify(const kvant_snapshot* snapshot, kvant_progress progress,
                                               void* progress_context);
/* Writes a snapshot to another file, which needs no base. Errors: as kvant_save and kvant_snapshot_verify. */
KVANT_C_API kvant_status kvant_snapshot_copy(const kvant_snapshot* snapshot, const char* path, kvant_progress progress,
                                             void* progress_context);

/* --- attention --------------------------------------------------------------------------------------------------- */

/* A logit is scale * q . k; then softcap; then ALiBi; then masks. Query head h reads kv head h / (q_heads / kv_heads).
 * Query i of a sequence stands at position length - q_len + i. Logits are float32: a row whose query is not
 * finite, or that sees a key whose scaled score overflows, becomes NaN, with lse NaN (on a device an overflow is not
 * looked for). */

/* An additive (f32, f16, bf16) or boolean mask over [batch, q_head, query, key]. Boolean: non-zero means that the query
 * sees the key. Additive: 0 changes nothing, minus infinity hides. stride: four of them, in elements, read during the
 * call alone; NULL (default): contiguous. A dimension of size 1 or of stride 0 broadcasts; where all strides are 0, one
 * element stands for all. Row i of the query dimension is query i of its sequence, in ragged batches too. Keys
 * are absolute positions from first_key on, so the last dimension covers the longest sequence from there; keys before
 * first_key are hidden by the mask. The memory must stay valid, and unchanged, as long as plans made with it are
 * used. */
typedef struct kvant_mask_tensor {
  const void* data; /* NULL: no mask */
  kvant_dtype dtype;
  int64_t shape[4];
  const int64_t* stride;
  int64_t first_key; /* position of the key of column 0, default 0 */
} kvant_mask_tensor;

typedef struct kvant_attention_options {
  size_t struct_size;        /* sizeof(kvant_attention_options); set by kvant_attention_options_init */
  int32_t q_heads;           /* required; a multiple of the cache's kv_heads */
  int32_t q_len;             /* queries a sequence, the newest positions. Default 1 */
  const int32_t* q_lens;     /* ragged: [number of sequences], overrides q_len; NULL otherwise. 0: a sequence without a
                                query in this run */
  double scale;              /* magnitude 1e-37 to 1e37; 0 (default): 1 / sqrt(head_dim) */
  double softcap;            /* t = cap * tanh(s / cap); 1e-37 to 1e37; 0 (default): none */
  const float* alibi_slopes; /* [q_heads]: logit -= slope * |query position - key position|; NULL: none */
  int32_t is_causal;         /* default 1 */
  int32_t threads;           /* 0 (default): the processors that the process may use (affinity, CPU quota) */
  int64_t window;            /* last W keys, the query's own included, as sliding_window of Hugging Face's models counts
                                (FlashAttention's left is W - 1). 0 (default): the cache's window and window_sinks;
                                without one, all keys. All keys of a cache with a window, as long as none were
                                released: a window of the length or more. Without is_causal a lower bound only: keys
                                from position - W + 1 on, later ones too; for a mask tensor over a cache whose window
                                released pages */
  int64_t window_sinks;      /* first tokens that stay visible beyond the window */
  int64_t split_keys;        /* keys a split covers, a multiple of 64; 0 (default): planned from the lengths */
  kvant_mask_tensor mask;    /* on top of the above */
  const char* backend;       /* "cpu", "cuda": where the cache is; NULL (default): the same */
  const char* isa;    /* "scalar", "avx2", "avx512", "amx" or "neon"; NULL (default): the best that this machine has.
                      "amx" multiplies more than 16 rows with products of bf16 terms: 4e-6 off exact attention over
                      the stored vectors, where others are 1e-6 off (float formats; tq: kvant/attention.hpp) */
  const char* kernel; /* caches on a device: "decode", "decode_sm90" or "decode_sm80" (several queries), "prefill"
                      ("prefill_sm90", "prefill_sm80" or "prefill_unpacked" for one kind of these; "prefill_fresh" with
                      fresh_keys), or "generic": any pair of formats in float32, the only one for f32 and imported
                      formats; NULL (default): by the formats and the number of rows */
  int32_t fresh_keys; /* 1: each run is given keys and values of the sequences' last q_len tokens, attends to these as
                      they are given, and reads only older tokens from the cache; tokens are reserved before, and a
                      layer is run before its write or after it. On a device such plans take prefill kernels. Default
                      0 */
  int32_t products;   /* bits of the numbers that are multiplied where many rows share a page of tq formats: 8 or 16; 0
                      (default): what adds little to the formats' own loss (kvant/attention.hpp) */
} kvant_attention_options;

/* Fills in the defaults. struct_size: sizeof(kvant_attention_options). */
KVANT_C_API void kvant_attention_options_init(kvant_attention_options* options, size_t struct_size);

typedef struct kvant_plan kvant_plan;

/* Plans attention of the newest queries of sequences[0 .. count) over the cache as it is now; does all validation.
 * Make one per step, after the reserve; run it once per layer, after the layer's write.
 * Errors: KVANT_INVALID_ARGUMENT, KVANT_UNSUPPORTED. *plan is NULL then. */
KVANT_C_API kvant_status kvant_plan_create(const kvant_cache* cache, const kvant_sequence* sequences, int64_t count,
                                           const kvant_attention_options* options, kvant_plan** plan);
KVANT_C_API void kvant_plan_destroy(kvant_plan* plan);

/* Kernels, tiles, splits, bytes, and why; for people. Buffer as in kvant_info. */
KVANT_C_API kvant_status kvant_plan_explain(const kvant_plan* plan, char* buffer, size_t capacity, size_t* size);

typedef struct kvant_plan_facts {
  size_t struct_size;     /* sizeof(kvant_plan_facts), set by the caller */
  size_t workspace_bytes; /* what kvant_run_options.workspace must hold */
  int64_t total_queries;  /* rows of q and out */
  int64_t kv_bytes;       /* cache bytes that one run reads in one layer */
  int32_t threads;
  int32_t splits;     /* the most splits any row has */
  const char* isa;    /* a constant; "cuda" on a device, with threads 0 */
  const char* kernel; /* a constant: "decode", "decode_sm90", "decode_sm80", "prefill", "generic"; on the CPU "" */
  int32_t products;   /* what kvant_attention_options.products became: 16 or 8; few rows, or no codes: 16 */
} kvant_plan_facts;
KVANT_C_API kvant_status kvant_plan_describe(const kvant_plan* plan, kvant_plan_facts* facts);

/* A host's own threads in place of kvant's. kvant_run calls execute(self, workers, work, context) at most once; it must
 * call work(context, i) once for every i in 0 .. workers - 1, on any threads and in any order, and return when all are
 * done. Results do not depend on who ran what. */
typedef struct kvant_executor {
  void (*execute)(void* self, int32_t workers, void (*work)(void* context, int32_t worker), void* context);
  void* self;
} kvant_executor;

typedef struct kvant_run_options {
  size_t struct_size;       /* sizeof(kvant_run_options); set by kvant_run_options_init */
  float* lse;               /* [total_queries, q_heads], gets the natural log of each softmax denominator, -inf where a
                               row saw no key; sink logits included; NULL (default): not wanted */
  const float* sink_logits; /* [q_heads]: join the denominator only; NULL (default): none. Where partial results are
                               merged, in one partial only */
  void* workspace;          /* 64-byte aligned; NULL (default): the plan's own, for one run at a time. Caches on a
                               device need one, in device memory */
  size_t workspace_size;    /* bytes */
  void* stream;             /* caches on a device: the cudaStream_t to enqueue on; NULL (default): the default stream */
  kvant_executor executor;  /* execute NULL (default): kvant's own threads. Caches in host memory only */
} kvant_run_options;

/* Fills in the defaults. struct_size: sizeof(kvant_run_options). */
KVANT_C_API void kvant_run_options_init(kvant_run_options* options, size_t struct_size);

/* out = softmax(transform(scale * q k^T) + masks) v in one layer. q, out: [total_queries, q_heads, head_dim], f32, f16
 * or bf16 each; the sequences' rows one after another, of sequences without a query none. A row that sees no key is 0.
 * Vectors of out must not overlap: strides below head_dim, 0 included, are refused. options: may be NULL.
 * keys, values: of a plan with fresh_keys the queries' own, [total_queries, kv_heads, head_dim] in the order of the
 * rows of q; of other plans NULL. f32, f16 or bf16 each in host memory; on a device f16 or bf16, both of one dtype
 * (where the cache has exact pages, of theirs), with rows and strides of 16-byte multiples. A row that sees a token
 * with a number that is not finite becomes NaN.
 * Allocates nothing. The same call gives the same bits, for any number of threads.
 * Errors: KVANT_STALE when the length or pages of a sequence that has queries in the plan changed since it was made: by
 * a reserve or append of a new step, truncate, reorder or remove of that sequence (on a device: when it was removed, or
 * truncated below its queries); KVANT_INVALID_ARGUMENT. */
KVANT_C_API kvant_status kvant_run(const kvant_plan* plan, int32_t layer, const kvant_tensor* q,
                                   const kvant_mutable_tensor* out, const kvant_run_options* options,
                                   const kvant_tensor* keys, const kvant_tensor* values);

/* A normalised partial result over some keys: out [rows, head_dim], lse [rows]. */
typedef struct kvant_partial {
  const float* out;
  const float* lse;
} kvant_partial;

/* Merges partial results over disjoint sets of keys in the order given, by the log-sum-exp rule. out: [rows, head_dim]
 * and lse: [rows] (may be NULL) may alias the first partial. A row that saw no key anywhere is 0 with lse = -inf. Sink
 * logits may be in one of the partials only.
 * Errors: KVANT_INVALID_ARGUMENT. */
KVANT_C_API kvant_status kvant_merge(const kvant_partial* partials, int64_t count, int64_t rows, int32_t head_dim,
                                     float* out, float* lse);

/* The same for partial results in the memory of one CUDA device, 1 to 64 of them, in f32 arithmetic. out_stride and
 * lse_stride: elements from one row of each partial's out and lse to the next; 0: behind each other. out and lse must
 * not overlap the partials, and their rows lie behind each other. One launch on stream (cudaStream_t; NULL: the default
 * stream), which a CUDA graph can record.
 * Errors: KVANT_INVALID_ARGUMENT, KVANT_UNSUPPORTED (no CUDA backend). */
KVANT_C_API kvant_status kvant_merge_on_device(const kvant_partial* partials, int64_t count, int64_t rows,
                                               int32_t head_dim, int64_t out_stride, int64_t lse_stride, float* out,
                                               float* lse, void* stream);

/* --- pages in an engine's blocks ---------------------------------------------------------------------------------- */

/* Encoded pages in memory that an engine owns: kvant writes into its blocks, and attends over them. kvant/pages.hpp and
 * docs/borrowed-pages.md say what an engine must keep to. On a device all pointers below are device memory, but for
 * structs and options; calls with a stream (cudaStream_t; NULL: the default stream) only enqueue work on it. For blocks
 * in host memory stream is ignored. */
typedef struct kvant_pages kvant_pages;

typedef struct kvant_pages_config {
  size_t struct_size; /* sizeof(kvant_pages_config); set by kvant_pages_config_init */
  int32_t kv_heads;   /* required */
  int32_t head_dim;   /* required; 1 to 576, on a device 1 to 512; stored padded as in kvant_cache_config */
  const char* k;      /* format; default "tq6", NULL as there. Any but the lut formats, and on a device but f32 */
  const char* v;      /* default "tq4" */
  const char* device; /* "cpu" or NULL (default): host memory; "cuda", "cuda:1": that device's */
  const char* isa;    /* host: as in kvant_cache_config; NULL (default): the best */
  int32_t threads;    /* host: workers that write and decode; 0 (default): all that the process may use */
  int32_t tail_pages; /* newest whole pages of a sequence that are read exactly, beside the one that is being filled; 0
                         (default): none. The fields below, up to exact_dtype, are of exact copies, and count with
                         tail_pages only */
  int32_t tail_sequences; /* required: sequences that run at the same time, at most */
  int32_t layers;         /* each has copies of its own (kvant_block_pool.layer); default 1 */
  int32_t exact_dtype;    /* kvant_dtype; -1 (default): f32 where a format is f32, else f16 where one is, else bf16 */
  kvant_key_centre k_centre; /* default KVANT_CENTRE_AUTOMATIC. With page, kvant_pages_begin_step must come before the
                                writes of each step */
  int32_t sink_pages;        /* with tail_pages: first pages of a sequence that are read exactly; 0 (default): none */
  int32_t exact_copies;   /* with tail_pages: exact copies of each layer, where there are to be fewer than all sequences
                           may have; 0 (default): as many */
  int32_t encode_at_once; /* with tail_pages: not 0: a write leaves the codes of its blocks complete, which is slower.
                             For an engine that may give the memory of a freed block to layers which kvant does not
                             write, before a step begins; 0 (default): the next step's begin completes them */
  int64_t v_head_dim;     /* as in kvant_cache_config */
  int32_t latent;         /* likewise: blocks of latents and rotary keys */
  int32_t rope;
  kvant_key_centre v_centre; /* likewise */
} kvant_pages_config;
KVANT_C_API void kvant_pages_config_init(kvant_pages_config* config, size_t struct_size);

/* *pages is NULL on errors: KVANT_INVALID_ARGUMENT, KVANT_UNSUPPORTED. */
KVANT_C_API kvant_status kvant_pages_create(const kvant_pages_config* config, kvant_pages** pages);
KVANT_C_API void kvant_pages_destroy(kvant_pages* pages);
/* Bytes of a (block, kv head): a multiple of 64. */
KVANT_C_API kvant_status kvant_pages_block_bytes(const kvant_pages* pages, int64_t* bytes);

/* Bytes of the exact copies, which kvant_pages_create takes. */
KVANT_C_API kvant_status kvant_pages_tail_bytes(const kvant_pages* pages, int64_t* bytes);
/* Exact copies of each layer, of a block each: tail_sequences * (sink_pages + tail_pages + 2), and tail_pages more for
 * sixteen of the sequences, or exact_copies. */
KVANT_C_API kvant_status kvant_pages_tail_copies(const kvant_pages* pages, int32_t* copies);

/* One layer's blocks of 64 tokens. That of block b and kv head h begins at data + b * block_stride + h * head_stride;
 * data and strides are multiples of 64 bytes. On a device head_stride is the bytes of kvant_pages_block_bytes. */
typedef struct kvant_block_pool {
  void* data;
  int64_t blocks;
  int64_t block_stride;
  int64_t head_stride;
  int32_t layer; /* whose exact copies; 0 without a tail */
} kvant_block_pool;

/* Stores tokens in their slots, encoded, or in the exact copies of their blocks. slots: [count], slot = block * 64 +
 * position; below 0 (host: -1): a token that is not stored, and not read. keys, values: [count or more, kv_heads,
 * head_dim]. Tokens of one block must follow one another in slots, in ascending order; in host memory any order will
 * do, and of a slot that is given twice the last row counts. The write that stores a block's first position clears
 * those that it does not store. With centres row i of slots is row i of the step's tables. Errors:
 * KVANT_INVALID_ARGUMENT for centred pages before any kvant_pages_begin_step; in host memory KVANT_NON_FINITE, and
 * KVANT_INVALID_ARGUMENT for slots outside the pool; nothing was changed then. On a device such values become NaN, such
 * tokens are not stored, and kvant_pages_take_non_finite tells. With a tail the pool must stay until the layer is
 * written to another one: kvant_pages_begin_step encodes blocks there. */
KVANT_C_API kvant_status kvant_pages_write(const kvant_pages* pages, const kvant_block_pool* pool,
                                           const kvant_tensor* keys, const kvant_tensor* values, const int64_t* slots,
                                           int64_t count, void* stream);
/* Decodes whole blocks to tensors [count * 64, kv_heads, head_dim] in f32, f16 or bf16; either may be NULL. */
KVANT_C_API kvant_status kvant_pages_decode(const kvant_pages* pages, const kvant_block_pool* pool, const int32_t* ids,
                                            int64_t count, const kvant_mutable_tensor* keys,
                                            const kvant_mutable_tensor* values, void* stream);
/* Copies block from[i] to block to[i], all kv heads. No block of `to` may be in `from`, or twice in `to`. Blocks of
 * `to` have no exact copy then, until they begin anew: plans whose tables have them need set_tables again. */
KVANT_C_API kvant_status kvant_pages_copy(const kvant_pages* pages, const kvant_block_pool* pool, const int32_t* from,
                                          const int32_t* to, int64_t count, void* stream);
/* Waits for the stream. *found: 1 if a write since the last call met values that are not finite, or a slot outside the
 * pool. 0 in host memory, where these are refused. */
KVANT_C_API kvant_status kvant_pages_take_non_finite(const kvant_pages* pages, void* stream, int32_t* found);

/* A step's batch. */
typedef struct kvant_step_tables {
  size_t struct_size;             /* sizeof(kvant_step_tables), set by the caller */
  const int32_t* block_table;     /* [batch][columns]: the blocks of each sequence, in order */
  int64_t row_stride;             /* from row to row of block_table, in elements */
  int64_t columns;                /* those beyond a sequence's length are not read */
  const int32_t* seq_lens;        /* [batch]: tokens, those of this step included */
  const int32_t* query_start_loc; /* [batch + 1]: sequence i has rows [i] to [i + 1] of q and out */
  int32_t batch;
  int32_t max_query_len; /* the most queries of a sequence; 0: not known. On a device up to 64 saves launches */
} kvant_step_tables;

/* With centres or a tail, once a step and before its writes and set_tables: the whole batch, with a tail up to
 * tail_sequences. Writes find the block before a block that begins in these tables. Blocks that begin in this step and
 * are in the tail get exact copies, to which kvant_pages_write writes alone, and from which plans read. A block with
 * such tokens, and that the step does not write to, is encoded: it is full, or its sequence is not in the step. Without
 * centres and a tail nothing happens. Tables in device memory must stay as they are until the step's writes are done.
 * Errors:
 * KVANT_INVALID_ARGUMENT; on a device sequences whose tables do not fit are passed over. */
KVANT_C_API kvant_status kvant_pages_begin_step(const kvant_pages* pages, const kvant_step_tables* tables,
                                                void* stream);
/* Waits for the stream. *misses: pages, since the last call, that a step was to read exactly, and that had no copy.
 * They are read encoded. */
KVANT_C_API kvant_status kvant_pages_take_misses(const kvant_pages* pages, void* stream, int64_t* misses);

/* The largest step that a plan is for. */
typedef struct kvant_page_limits {
  size_t struct_size;    /* sizeof(kvant_page_limits), set by the caller */
  int32_t max_batch;     /* required: sequences */
  int32_t max_query_len; /* queries of one sequence; 0: 1 */
  int64_t max_blocks;    /* required: of one sequence */
  int64_t max_tokens;    /* rows of q; 0: max_batch * max_query_len */
  int32_t check_ids;     /* device: look at the ids of visible pages in each run; see kvant_pages_plan_take_errors */
} kvant_page_limits;

typedef struct kvant_pages_plan kvant_pages_plan;

/* A plan for all steps within the limits; it keeps what it needs of pages. attention: q_lens, mask and backend stay
 * unset. Errors: KVANT_INVALID_ARGUMENT, KVANT_UNSUPPORTED. *plan is NULL then. */
KVANT_C_API kvant_status kvant_pages_plan_create(const kvant_pages* pages, const kvant_attention_options* attention,
                                                 const kvant_page_limits* limits, kvant_pages_plan** plan);
KVANT_C_API void kvant_pages_plan_destroy(kvant_pages_plan* plan);
/* Kernels, splits, and why; for people. Buffer as in kvant_info. */
KVANT_C_API kvant_status kvant_pages_plan_explain(const kvant_pages_plan* plan, char* buffer, size_t capacity,
                                                  size_t* size);

typedef struct kvant_pages_plan_facts {
  size_t struct_size;     /* sizeof(kvant_pages_plan_facts), set by the caller */
  size_t workspace_bytes; /* what kvant_run_options.workspace must hold; 0 in host memory, where it stays NULL */
  const char* isa;        /* a constant; "cuda" on a device, with threads 0 */
  const char* kernel;     /* a constant: "decode", "decode_sm90", "decode_sm80", "prefill", "generic"; on the CPU "" */
  int32_t threads;
  int32_t products; /* as in kvant_plan_facts */
} kvant_pages_plan_facts;
KVANT_C_API kvant_status kvant_pages_plan_describe(const kvant_pages_plan* plan, kvant_pages_plan_facts* facts);

/* Tells the plan the batch of the runs that follow; once a step, for all layers. In host memory tables are checked, and
 * copied. On a device a launch copies them; a sequence that does not fit the limits gets no query, and
 * kvant_pages_plan_take_errors tells.
 * Errors: KVANT_INVALID_ARGUMENT; the tables that were set before still count. */
KVANT_C_API kvant_status kvant_pages_plan_set_tables(kvant_pages_plan* plan, const kvant_step_tables* tables,
                                                     void* stream);
/* Attention over one layer's pool. q, out: [tokens, q_heads, head_dim]; rows of no sequence are left as they are.
 * options: lse [tokens, q_heads], sink_logits, workspace and stream, as in kvant_run. keys, values: as in kvant_run,
 * [tokens or more, kv_heads, head_dim]; NULL without fresh_keys. Errors: KVANT_INVALID_ARGUMENT, KVANT_UNSUPPORTED. */
KVANT_C_API kvant_status kvant_pages_plan_run(kvant_pages_plan* plan, const kvant_block_pool* pool,
                                              const kvant_tensor* q, const kvant_mutable_tensor* out,
                                              const kvant_run_options* options, const kvant_tensor* keys,
                                              const kvant_tensor* values);
/* Waits for the stream. *found: 1 if since the last call a sequence did not fit the limits, or (check_ids) had a block
 * outside the pool, whose rows are NaN then. 0 in host memory, where these are refused. */
KVANT_C_API kvant_status kvant_pages_plan_take_errors(kvant_pages_plan* plan, void* stream, int32_t* found);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVANT_KVANT_H */
