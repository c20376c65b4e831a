/* The C ABI as a C11 program meets it: every function is called, outputs are checked against attention computed here in
 * double precision over the decoded keys and values, and every refusal shows its message. */
#include <kvant/kvant.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

enum { Q_HEADS = 4, KV_HEADS = 2, DIM = 64, FIRST = 200, SECOND = 3, TOKENS = FIRST + SECOND };

static float wave(int i) {
  return sinf(0.37f * (float)i) + 0.5f * cosf(1.93f * (float)i);
}

static float keys[TOKENS * KV_HEADS * DIM], values[TOKENS * KV_HEADS * DIM], query_row[Q_HEADS * DIM];

static kvant_tensor tokens_of(const float* data, int64_t tokens) {
  const kvant_tensor view = {.data = data, .dtype = KVANT_F32, .shape = {tokens, KV_HEADS, DIM}};
  return view;
}

/* out [Q_HEADS, DIM] and lse [Q_HEADS] of one query that sees keys 0 .. length - 1. */
static void reference(const float* q, const float* k, const float* v, int length, double* out, double* lse) {
  static double weight[TOKENS];
  for (int head = 0; head < Q_HEADS; ++head) {
    const int kv = head / (Q_HEADS / KV_HEADS);
    double top = -INFINITY, sum = 0;
    for (int t = 0; t < length; ++t) {
      double score = 0;
      for (int d = 0; d < DIM; ++d) score += (double)q[head * DIM + d] * (double)k[(t * KV_HEADS + kv) * DIM + d];
      weight[t] = score / sqrt(DIM);
      if (weight[t] > top) top = weight[t];
    }
    for (int t = 0; t < length; ++t) sum += weight[t] = exp(weight[t] - top);
    for (int d = 0; d < DIM; ++d) {
      double total = 0;
      for (int t = 0; t < length; ++t) total += weight[t] * (double)v[(t * KV_HEADS + kv) * DIM + d];
      out[head * DIM + d] = total / sum;
    }
    lse[head] = top + log(sum);
  }
}

static double relative_l2(const double* expected, const float* got, int n) {
  double error = 0, norm = 0;
  for (int i = 0; i < n; ++i) {
    error += (expected[i] - (double)got[i]) * (expected[i] - (double)got[i]);
    norm += expected[i] * expected[i];
  }
  return sqrt(error / norm);
}

static void test_library(void) {
  EXPECT(strcmp(kvant_version(), KVANT_VERSION) == 0);
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", KVANT_VERSION_MAJOR, KVANT_VERSION_MINOR, KVANT_VERSION_PATCH);
  EXPECT(strcmp(version, KVANT_VERSION) == 0);
  EXPECT(strcmp(kvant_status_name(KVANT_OK), "ok") == 0);
  EXPECT(strcmp(kvant_status_name(KVANT_OUT_OF_CAPACITY), "out_of_capacity") == 0);
  EXPECT(strcmp(kvant_status_name(77), "unknown") == 0 && strcmp(kvant_status_name(-1), "unknown") == 0);

  size_t size = 0;
  EXPECT(kvant_info(NULL, 0, &size) == KVANT_OK && size > 100);
  char* text = malloc(size);
  if (text == NULL) exit(1);
  EXPECT(kvant_info(text, size, NULL) == KVANT_OK && strlen(text) == size - 1);
  EXPECT(strstr(text, "\"tq6\"") != NULL && strstr(text, "\"scalar\"") != NULL);
  text[0] = '#';
  EXPECT_REFUSED(kvant_info(text, size - 1, NULL), KVANT_INVALID_ARGUMENT, "capacity");
  EXPECT(text[0] == '#'); /* nothing written */
  EXPECT_REFUSED(kvant_info(NULL, 0, NULL), KVANT_INVALID_ARGUMENT, "size");
  free(text);
}

/* A host's executor that does the shares in its own thread, the last one first. */
typedef struct backwards {
  int calls, shares;
} backwards;

static void execute_backwards(void* self, int32_t workers, void (*work)(void* context, int32_t worker), void* context) {
  backwards* host = self;
  ++host->calls;
  host->shares += workers;
  for (int32_t worker = workers - 1; worker >= 0; --worker) work(context, worker);
}

/* The same bits as `expected`, which the plan gave with kvant's own threads. */
static void test_executor(const kvant_plan* plan, const kvant_tensor* q, const float* expected, int32_t threads) {
  static float output[2 * Q_HEADS * DIM];
  const kvant_mutable_tensor out = {.data = output, .dtype = KVANT_F32, .shape = {2, Q_HEADS, DIM}};
  backwards host = {0, 0};
  kvant_run_options run;
  kvant_run_options_init(&run, sizeof run);
  EXPECT(run.executor.execute == NULL);
  run.executor.execute = execute_backwards;
  run.executor.self = &host;
  EXPECT(kvant_run(plan, 0, q, &out, &run, NULL, NULL) == KVANT_OK);
  EXPECT(memcmp(output, expected, sizeof output) == 0);
  EXPECT(host.calls == 1 && host.shares == threads);
}

static void test_attention(void) {
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = KV_HEADS;
  config.head_dim = DIM;
  config.sink_pages = 0;
  config.tail_pages = 0;
  kvant_cache* cache = NULL;
  kvant_sequence sequence = 0, child = 0;
  EXPECT(kvant_cache_create(&config, &cache) == KVANT_OK && cache != NULL);
  EXPECT(kvant_cache_add_sequence(cache, &sequence) == KVANT_OK);

  /* The first tokens in one call; three more in two parts, as a model with many layers does it. */
  kvant_tensor k = tokens_of(keys, FIRST), v = tokens_of(values, FIRST);
  EXPECT(kvant_cache_append(cache, sequence, 0, &k, &v) == KVANT_OK);
  const int64_t more = SECOND;
  EXPECT(kvant_cache_reserve(cache, &sequence, &more, 1) == KVANT_OK);
  k = tokens_of(keys + FIRST * KV_HEADS * DIM, SECOND);
  v = tokens_of(values + FIRST * KV_HEADS * DIM, SECOND);
  EXPECT(kvant_cache_write(cache, &sequence, 1, 0, &k, &v) == KVANT_OK);
  int64_t length = 0;
  EXPECT(kvant_cache_length(cache, sequence, &length) == KVANT_OK && length == TOKENS);

  static float k_read[TOKENS * KV_HEADS * DIM], v_read[TOKENS * KV_HEADS * DIM];
  const kvant_mutable_tensor k_out = {.data = k_read, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, DIM}};
  const kvant_mutable_tensor v_out = {.data = v_read, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, DIM}};
  EXPECT(kvant_cache_read(cache, sequence, 0, 0, TOKENS, &k_out, &v_out) == KVANT_OK);

  /* The same tokens in two ranges, a batch of two by stride; heads before tokens in the second tensor. */
  enum { MOST = FIRST }; /* the larger of the two ranges */
  static float k_batch[2 * MOST * KV_HEADS * DIM], v_batch[2 * MOST * KV_HEADS * DIM];
  const kvant_sequence twice[2] = {sequence, sequence};
  const int64_t begin[2] = {0, FIRST}, end[2] = {FIRST, TOKENS};
  kvant_mutable_tensor k_ranges = {.data = k_batch, .dtype = KVANT_F32, .shape = {MOST, KV_HEADS, DIM}};
  kvant_mutable_tensor v_ranges = {
      .data = v_batch, .dtype = KVANT_F32, .shape = {MOST, KV_HEADS, DIM}, .stride = {DIM, MOST * DIM, 1}};
  k_ranges.batch_stride = v_ranges.batch_stride = MOST * KV_HEADS * DIM;
  EXPECT(kvant_cache_decode(cache, twice, begin, end, 2, 0, &k_ranges, &v_ranges) == KVANT_OK);
  int decoded_wrong = 0;
  for (int t = 0; t < TOKENS; ++t) {
    const int range = t < FIRST ? 0 : 1, row = t - (int)begin[range];
    for (int i = 0; i < KV_HEADS * DIM; ++i) {
      const int head = i / DIM, at = range * MOST * KV_HEADS * DIM;
      decoded_wrong += k_batch[at + row * KV_HEADS * DIM + i] != k_read[t * KV_HEADS * DIM + i];
      decoded_wrong += v_batch[at + (head * MOST + row) * DIM + i % DIM] != v_read[t * KV_HEADS * DIM + i];
    }
  }
  EXPECT(decoded_wrong == 0);
  EXPECT(kvant_cache_decode(cache, twice, begin, end, 2, 0, NULL, &v_ranges) == KVANT_OK);
  EXPECT(kvant_cache_decode(cache, twice, begin, NULL, 2, 0, &k_ranges, NULL) == KVANT_INVALID_ARGUMENT);
  EXPECT(strstr(kvant_last_error(), "end is NULL") != NULL);
  EXPECT(kvant_cache_decode(cache, twice, end, begin, 2, 0, &k_ranges, NULL) == KVANT_INVALID_ARGUMENT);
  EXPECT(strstr(kvant_last_error(), "ranges[0]") != NULL);

  static double exact[TOKENS * KV_HEADS * DIM];
  for (int i = 0; i < TOKENS * KV_HEADS * DIM; ++i) exact[i] = (double)keys[i];
  const double codec_error = relative_l2(exact, k_read, TOKENS * KV_HEADS * DIM);
  EXPECT(codec_error > 0.005 && codec_error < 0.04); /* tq6: compressed, and not by much */

  /* Two queries at the two newest positions. */
  static float query[2 * Q_HEADS * DIM], output[2 * Q_HEADS * DIM], lse[2 * Q_HEADS];
  for (int i = 0; i < 2 * Q_HEADS * DIM; ++i) query[i] = wave(11 * i + 5);
  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = Q_HEADS;
  options.q_len = 2;
  options.threads = 3;     /* more than one, also on a machine that has one */
  options.split_keys = 64; /* so that there is work for three */
  kvant_plan* plan = NULL;
  EXPECT(kvant_plan_create(cache, &sequence, 1, &options, &plan) == KVANT_OK && plan != NULL);
  kvant_plan_facts facts = {.struct_size = sizeof facts};
  EXPECT(kvant_plan_describe(plan, &facts) == KVANT_OK);
  EXPECT(facts.total_queries == 2 && facts.kv_bytes > 0 && facts.threads >= 1 && facts.splits >= 1 &&
         facts.isa != NULL);
  size_t size = 0;
  EXPECT(kvant_plan_explain(plan, NULL, 0, &size) == KVANT_OK && size > 1);

  kvant_tensor q = {.data = query, .dtype = KVANT_F32, .shape = {2, Q_HEADS, DIM}};
  const kvant_mutable_tensor out = {.data = output, .dtype = KVANT_F32, .shape = {2, Q_HEADS, DIM}};
  kvant_run_options run;
  kvant_run_options_init(&run, sizeof run);
  run.lse = lse;
  run.workspace_size = (facts.workspace_bytes + 63) / 64 * 64;
  run.workspace = run.workspace_size == 0 ? NULL : aligned_alloc(64, run.workspace_size);
  EXPECT(kvant_run(plan, 0, &q, &out, &run, NULL, NULL) == KVANT_OK);
  for (int i = 0; i < 2; ++i) {
    double expected[Q_HEADS * DIM], expected_lse[Q_HEADS];
    reference(query + i * Q_HEADS * DIM, k_read, v_read, TOKENS - 1 + i, expected, expected_lse);
    EXPECT(relative_l2(expected, output + i * Q_HEADS * DIM, Q_HEADS * DIM) <= 2e-4); /* the kernel's own error */
    for (int head = 0; head < Q_HEADS; ++head)
      EXPECT(fabs(expected_lse[head] - (double)lse[i * Q_HEADS + head]) < 1e-3);
  }
  /* Without options, and with the plan's own workspace: the same bits. */
  static float again[2 * Q_HEADS * DIM];
  kvant_mutable_tensor out_again = out;
  out_again.data = again;
  EXPECT(kvant_run(plan, 0, &q, &out_again, NULL, NULL, NULL) == KVANT_OK);
  EXPECT(memcmp(output, again, sizeof output) == 0);
  test_executor(plan, &q, output, facts.threads);

  kvant_memory memory = {.struct_size = sizeof memory};
  EXPECT(kvant_cache_memory(cache, &memory) == KVANT_OK && memory.tokens == TOKENS);
  EXPECT(memory.encoded_bytes + memory.scale_bytes + memory.exact_bytes + memory.table_bytes == memory.total_bytes);
  kvant_exact_ends ends = {.struct_size = sizeof ends};
  EXPECT(kvant_cache_exact_ends(cache, &ends) == KVANT_OK && ends.sink_pages >= 0 && ends.tail_pages >= 0);
  EXPECT_REFUSED(kvant_cache_exact_ends(NULL, &ends), KVANT_INVALID_ARGUMENT, "cache is NULL");
  EXPECT_REFUSED(kvant_cache_exact_ends(cache, NULL), KVANT_INVALID_ARGUMENT, "ends");
  EXPECT(kvant_cache_describe(cache, NULL, 0, &size) == KVANT_OK && size > 1);

  /* Wrong calls on a live plan and cache. */
  EXPECT_REFUSED(kvant_run(plan, 1, &q, &out, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "layer");
  q.dtype = 9;
  EXPECT_REFUSED(kvant_run(plan, 0, &q, &out, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "q.dtype is 9");
  q.dtype = KVANT_F32;
  q.shape[0] = 3;
  EXPECT_REFUSED(kvant_run(plan, 0, &q, &out, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "q");
  q.shape[0] = 2;
  EXPECT_REFUSED(kvant_run(plan, 0, NULL, &out, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "q is NULL");
  EXPECT_REFUSED(kvant_cache_fork(cache, 12345, &child), KVANT_INVALID_ARGUMENT, "12345");
  float nan_keys[KV_HEADS * DIM];
  memcpy(nan_keys, keys, sizeof nan_keys);
  nan_keys[7] = NAN;
  k = tokens_of(nan_keys, 1);
  v = tokens_of(values, 1);
  EXPECT_REFUSED(kvant_cache_append(cache, sequence, 0, &k, &v), KVANT_NON_FINITE, "");
  EXPECT(kvant_cache_length(cache, sequence, &length) == KVANT_OK && length == TOKENS); /* nothing changed */

  /* A fork goes its own way; the plan of the parent notices when the parent does. */
  EXPECT(kvant_cache_fork(cache, sequence, &child) == KVANT_OK && child != sequence);
  EXPECT(kvant_cache_truncate(cache, sequence, TOKENS - 1) == KVANT_OK);
  EXPECT(kvant_cache_length(cache, sequence, &length) == KVANT_OK && length == TOKENS - 1);
  EXPECT(kvant_cache_length(cache, child, &length) == KVANT_OK && length == TOKENS);
  EXPECT_REFUSED(kvant_run(plan, 0, &q, &out, NULL, NULL, NULL), KVANT_STALE, "");
  EXPECT(kvant_cache_remove(cache, child) == KVANT_OK);
  EXPECT_REFUSED(kvant_cache_remove(cache, child), KVANT_INVALID_ARGUMENT, "sequence");
  int64_t given = -1;
  EXPECT(kvant_cache_trim(cache, &given) == KVANT_OK && given >= 0);
  EXPECT(kvant_cache_trim(cache, NULL) == KVANT_OK);
  EXPECT_REFUSED(kvant_cache_trim(NULL, &given), KVANT_INVALID_ARGUMENT, "cache is NULL");

  /* Any order of destruction. */
  free(run.workspace);
  kvant_cache_destroy(cache);
  EXPECT(kvant_plan_describe(plan, &facts) == KVANT_OK);
  kvant_plan_destroy(plan);
}

/* An f32 cache with one empty sequence. */
static kvant_cache* new_cache(kvant_sequence* sequence) {
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = KV_HEADS;
  config.head_dim = DIM;
  config.k = config.v = "f32";
  kvant_cache* cache = NULL;
  EXPECT(kvant_cache_create(&config, &cache) == KVANT_OK);
  EXPECT(kvant_cache_add_sequence(cache, sequence) == KVANT_OK);
  return cache;
}

/* Masks of one element in a buffer of its own, so that a sanitizer sees a read past them: a shape and strides of zero
 * are what an expanded tensor has, and one element then stands for all. Without strides a mask is contiguous. */
static void test_masks(void) {
  kvant_sequence sequence = 0;
  kvant_cache* cache = new_cache(&sequence);
  const kvant_tensor k = tokens_of(keys, FIRST), v = tokens_of(values, FIRST);
  EXPECT(kvant_cache_append(cache, sequence, 0, &k, &v) == KVANT_OK);
  double expected[Q_HEADS * DIM], expected_lse[Q_HEADS];
  reference(query_row, keys, values, FIRST, expected, expected_lse);

  const int64_t expanded[4] = {0, 0, 0, 0};
  float* added = malloc(sizeof *added);
  unsigned char* visible = malloc(1);
  float* row = malloc(FIRST * sizeof *row);
  if (added == NULL || visible == NULL || row == NULL) exit(1);
  *added = 1.5f;
  *visible = 1;
  for (int t = 0; t < FIRST; ++t) row[t] = 1.5f;
  const kvant_mask_tensor masks[3] = {
      {.data = added, .dtype = KVANT_F32, .shape = {1, Q_HEADS, 1, FIRST}, .stride = expanded},
      {.data = visible, .dtype = KVANT_BOOL, .shape = {1, Q_HEADS, 1, FIRST}, .stride = expanded},
      {.data = row, .dtype = KVANT_F32, .shape = {1, 1, 1, FIRST}},
  };
  const double lse_moves_by[3] = {1.5, 0, 1.5}; /* a number added to all logits moves nothing else */
  for (int i = 0; i < 3; ++i) {
    kvant_attention_options options;
    kvant_attention_options_init(&options, sizeof options);
    options.q_heads = Q_HEADS;
    options.mask = masks[i];
    kvant_plan* plan = NULL;
    EXPECT(kvant_plan_create(cache, &sequence, 1, &options, &plan) == KVANT_OK);
    float output[Q_HEADS * DIM], lse[Q_HEADS];
    const kvant_tensor q = {.data = query_row, .dtype = KVANT_F32, .shape = {1, Q_HEADS, DIM}};
    const kvant_mutable_tensor out = {.data = output, .dtype = KVANT_F32, .shape = {1, Q_HEADS, DIM}};
    kvant_run_options run;
    kvant_run_options_init(&run, sizeof run);
    run.lse = lse;
    EXPECT(kvant_run(plan, 0, &q, &out, &run, NULL, NULL) == KVANT_OK);
    EXPECT(relative_l2(expected, output, Q_HEADS * DIM) <= 1e-5);
    for (int head = 0; head < Q_HEADS; ++head)
      EXPECT(fabs(expected_lse[head] + lse_moves_by[i] - (double)lse[head]) < 1e-4);
    kvant_plan_destroy(plan);
  }
  free(row);
  free(visible);
  free(added);
  kvant_cache_destroy(cache);
}

/* Strides of zeros are those of a struct that names none: contiguous. A stride of 0 repeats, with stride[2] = 1. */
static void test_strides(void) {
  kvant_sequence sequence = 0;
  kvant_cache* cache = new_cache(&sequence);
  float* vector = malloc(DIM * sizeof *vector); /* a buffer of its own: a sanitizer sees a read past it */
  if (vector == NULL) exit(1);
  memcpy(vector, keys, DIM * sizeof *vector);
  const kvant_tensor k = {.data = vector, .dtype = KVANT_F32, .shape = {3, KV_HEADS, DIM}, .stride = {0, 0, 1}};
  const kvant_tensor v = tokens_of(values, 3);
  EXPECT(kvant_cache_append(cache, sequence, 0, &k, &v) == KVANT_OK);
  static float stored[2][3 * KV_HEADS * DIM];
  const kvant_mutable_tensor k_out = {.data = stored[0], .dtype = KVANT_F32, .shape = {3, KV_HEADS, DIM}};
  const kvant_mutable_tensor v_out = {.data = stored[1], .dtype = KVANT_F32, .shape = {3, KV_HEADS, DIM}};
  EXPECT(kvant_cache_read(cache, sequence, 0, 0, 3, &k_out, &v_out) == KVANT_OK);
  for (int row = 0; row < 3 * KV_HEADS; ++row) EXPECT(memcmp(stored[0] + row * DIM, vector, DIM * sizeof *vector) == 0);
  EXPECT(memcmp(stored[1], values, sizeof stored[1]) == 0);
  kvant_tensor expanded = k;
  expanded.stride[0] = DIM, expanded.stride[2] = 0;
  EXPECT_REFUSED(kvant_cache_append(cache, sequence, 0, &expanded, &v), KVANT_INVALID_ARGUMENT, "stride[2] = 0");
  free(vector);
  kvant_cache_destroy(cache);
}

static void test_merge(void) {
  const float a[2] = {1, 2}, b[2] = {5, -2}, lse_a = 0, lse_b = logf(3);
  const kvant_partial partials[2] = {{a, &lse_a}, {b, &lse_b}};
  float out[2], lse;
  EXPECT(kvant_merge(partials, 2, 1, 2, out, &lse) == KVANT_OK); /* weights 1/4 and 3/4 */
  EXPECT(fabsf(out[0] - 4) < 1e-6f && fabsf(out[1] + 1) < 1e-6f && fabsf(lse - logf(4)) < 1e-6f);
  EXPECT_REFUSED(kvant_merge(NULL, 2, 1, 2, out, &lse), KVANT_INVALID_ARGUMENT, "partials is NULL");
  EXPECT_REFUSED(kvant_merge(partials, -1, 1, 2, out, &lse), KVANT_INVALID_ARGUMENT, "count is -1");
}

static void test_refusals(void) {
  kvant_cache_config config;
  kvant_cache* cache = (kvant_cache*)&config;
  kvant_bases* bases = NULL;
  kvant_plan* plan = NULL;
  memset(&config, 0, sizeof config);
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "struct_size is 0");
  EXPECT(cache == NULL);
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = KV_HEADS;
  config.head_dim = 577;
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "577");
  config.head_dim = DIM;
  config.k = "tq7";
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "tq7");
  config.k = NULL; /* the default */
  config.v = NULL;
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "config.v is NULL");
  config.k = "tq6";
  config.v = "tq4";
  config.k_basis = 17;
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "k_basis is 17");
  config.k_basis = KVANT_BASIS_CALIBRATED;
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "bases");
  config.k_basis = KVANT_BASIS_AUTOMATIC;
  EXPECT_REFUSED(kvant_cache_create(&config, NULL), KVANT_INVALID_ARGUMENT, "cache is NULL");
  EXPECT_REFUSED(kvant_cache_create(NULL, &cache), KVANT_INVALID_ARGUMENT, "config is NULL");

  EXPECT_REFUSED(kvant_bases_load("/no/such/file", &bases), KVANT_IO, "/no/such/file");
  EXPECT_REFUSED(kvant_bases_load(NULL, &bases), KVANT_INVALID_ARGUMENT, "path is NULL");
  EXPECT_REFUSED(kvant_plan_create(NULL, NULL, 0, NULL, &plan), KVANT_INVALID_ARGUMENT, "cache is NULL");

  config.device = "gpu";
  EXPECT_REFUSED(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT, "device");
  config.device = NULL;

  config.capacity_tokens = 64;
  EXPECT(kvant_cache_create(&config, &cache) == KVANT_OK);
  kvant_sequence sequence = 0;
  EXPECT(kvant_cache_add_sequence(cache, &sequence) == KVANT_OK);
  const int64_t many = 65;
  EXPECT_REFUSED(kvant_cache_reserve(cache, &sequence, &many, 1), KVANT_OUT_OF_CAPACITY, "64");
  EXPECT_REFUSED(kvant_cache_reserve(cache, NULL, &many, 1), KVANT_INVALID_ARGUMENT, "sequences is NULL");
  EXPECT_REFUSED(kvant_cache_reserve(cache, &sequence, &many, -2), KVANT_INVALID_ARGUMENT, "count is -2");

  /* Functions for caches on a device alone. */
  int32_t found = 7;
  EXPECT(kvant_cache_set_stream(cache, NULL) == KVANT_OK);
  EXPECT_REFUSED(kvant_cache_set_stream(cache, &found), KVANT_INVALID_ARGUMENT, "stream");
  EXPECT_REFUSED(kvant_cache_set_stream(NULL, NULL), KVANT_INVALID_ARGUMENT, "cache is NULL");
  EXPECT_REFUSED(kvant_cache_reserve_ahead(cache, &sequence, &many, 1), KVANT_INVALID_ARGUMENT, "reserve_ahead");
  EXPECT_REFUSED(kvant_cache_reserve_ahead(cache, &sequence, NULL, 1), KVANT_INVALID_ARGUMENT, "tokens is NULL");
  EXPECT_REFUSED(kvant_cache_advance(cache, &sequence, &many, 1), KVANT_INVALID_ARGUMENT, "advance");
  EXPECT_REFUSED(kvant_cache_advance(NULL, &sequence, &many, 1), KVANT_INVALID_ARGUMENT, "cache is NULL");
  EXPECT(kvant_cache_take_non_finite(cache, &found) == KVANT_OK && found == 0);
  EXPECT_REFUSED(kvant_cache_take_non_finite(cache, NULL), KVANT_INVALID_ARGUMENT, "found is NULL");
  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = 3;
  EXPECT_REFUSED(kvant_plan_create(cache, &sequence, 1, &options, &plan), KVANT_INVALID_ARGUMENT, "q_heads");
  kvant_cache_destroy(cache);

  kvant_cache_destroy(NULL);
  kvant_plan_destroy(NULL);
  kvant_bases_destroy(NULL);
}

int main(void) {
  for (int i = 0; i < TOKENS * KV_HEADS * DIM; ++i) {
    keys[i] = wave(i);
    values[i] = wave(7 * i + 3);
  }
  for (int i = 0; i < Q_HEADS * DIM; ++i) query_row[i] = wave(11 * i + 5);
  EXPECT(strcmp(kvant_last_error(), "") == 0); /* nothing has failed yet */
  test_library();
  test_attention();
  test_masks();
  test_strides();
  test_merge();
  test_refusals();
  printf("%d failures\n", failures);
  return failures != 0;
}
