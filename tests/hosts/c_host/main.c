/* A C host. Prints a line for each instruction set and format: hashes of the stored vectors' bits and of attention's.
 * All builds must print the same lines, whatever flags they were compiled with. Checks what such flags break: NaN and
 * infinity. */
#include <kvant/kvant.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if KVANT_VERSION_MAJOR != 0 || !defined(KVANT_VERSION_MINOR) || !defined(KVANT_VERSION_PATCH)
#error "kvant.h has no version, or another one"
#endif

enum { TOKENS = 200, DIM = 64, QUERIES = 24 };

static float keys[TOKENS * DIM], values[TOKENS * DIM], read_back[TOKENS * DIM];
static float query[QUERIES * DIM], output[QUERIES * DIM], lse[QUERIES], mask[QUERIES * TOKENS];

static void fail(const char* what) {
  printf("%s: %s\n", what, kvant_last_error());
  exit(1);
}
static void check(kvant_status status, const char* what) {
  if (status != KVANT_OK) fail(what);
}
static uint64_t hash(uint64_t h, const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof bits);
    h = (h ^ bits) * UINT64_C(1099511628211);
  }
  return h;
}
static kvant_tensor tensor(const float* data, int64_t tokens) {
  kvant_tensor t = {.data = data, .dtype = KVANT_F32, .shape = {tokens, 1, DIM}};
  return t;
}
static kvant_mutable_tensor mutable_tensor(float* data, int64_t tokens) {
  kvant_mutable_tensor t = {.data = data, .dtype = KVANT_F32, .shape = {tokens, 1, DIM}};
  return t;
}
static kvant_cache* new_cache(const char* isa, const char* format, kvant_sequence* sequence) {
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = 1;
  config.head_dim = DIM;
  config.k = config.v = format;
  config.sink_pages = config.tail_pages = 0;
  config.isa = isa;
  kvant_cache* cache = NULL;
  const kvant_status status = kvant_cache_create(&config, &cache);
  if (status == KVANT_UNSUPPORTED || (isa != NULL && status == KVANT_INVALID_ARGUMENT)) return NULL;
  check(status, "creating a cache");
  check(kvant_cache_add_sequence(cache, sequence), "adding a sequence");
  return cache;
}

/* Attention with a window, softcap, and a mask that hides all keys of the first query. */
static void line_of(const char* isa, const char* format) {
  kvant_sequence sequence;
  kvant_cache* cache = new_cache(isa, format, &sequence);
  if (cache == NULL) return;
  const kvant_tensor k = tensor(keys, TOKENS), v = tensor(values, TOKENS), q = tensor(query, QUERIES);
  const kvant_mutable_tensor back = mutable_tensor(read_back, TOKENS), out = mutable_tensor(output, QUERIES);
  check(kvant_cache_append(cache, sequence, 0, &k, &v), "appending");
  check(kvant_cache_read(cache, sequence, 0, 0, TOKENS, &back, NULL), "reading");
  const uint64_t stored = hash(UINT64_C(1469598103934665603), read_back, TOKENS * DIM);

  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = 1;
  options.q_len = QUERIES;
  options.softcap = 20;
  options.window = 150;
  options.isa = isa;
  options.mask.data = mask;
  options.mask.dtype = KVANT_F32;
  options.mask.shape[0] = options.mask.shape[1] = 1;
  options.mask.shape[2] = QUERIES;
  options.mask.shape[3] = TOKENS;
  kvant_plan* plan = NULL;
  check(kvant_plan_create(cache, &sequence, 1, &options, &plan), "planning");
  kvant_run_options run;
  kvant_run_options_init(&run, sizeof run);
  run.lse = lse;
  check(kvant_run(plan, 0, &q, &out, &run, NULL, NULL), "attending");
  for (int i = 0; i < DIM; ++i)
    if (output[i] != 0) fail("a query that sees no key has an output");
  uint32_t bits;
  memcpy(&bits, &lse[0], sizeof bits);
  if (bits != 0xff800000u) fail("a query that sees no key has an lse that is not -inf");
  printf("%s %s stored %016llx attended %016llx\n", isa, format, (unsigned long long)stored,
         (unsigned long long)hash(hash(UINT64_C(1469598103934665603), output, QUERIES * DIM), lse, QUERIES));
  kvant_plan_destroy(plan);
  kvant_cache_destroy(cache);
}

static void refusals(void) {
  kvant_sequence sequence;
  kvant_cache* cache = new_cache(NULL, "tq4", &sequence);
  const kvant_tensor k = tensor(keys, TOKENS), v = tensor(values, TOKENS);
  const float bad[] = {NAN, INFINITY, -INFINITY, 65600.0f};
  for (int i = 0; i < 4; ++i) {
    const float before = keys[5 * DIM + 3];
    keys[5 * DIM + 3] = bad[i];
    if (kvant_cache_append(cache, sequence, 0, &k, &v) != KVANT_NON_FINITE) fail("a key that is not finite was taken");
    keys[5 * DIM + 3] = before;
  }
  check(kvant_cache_append(cache, sequence, 0, &k, &v), "appending");
  const double no_scales[] = {(double)NAN, (double)INFINITY};
  for (int i = 0; i < 4; ++i) {
    kvant_attention_options options;
    kvant_attention_options_init(&options, sizeof options);
    options.q_heads = 1;
    *(i < 2 ? &options.scale : &options.softcap) = no_scales[i % 2];
    kvant_plan* plan = NULL;
    if (kvant_plan_create(cache, &sequence, 1, &options, &plan) != KVANT_INVALID_ARGUMENT)
      fail("a scale or softcap that is not finite was taken");
  }
  kvant_cache_destroy(cache);
}

int main(void) {
  uint64_t state = UINT64_C(88172645463325252);
  for (int i = 0; i < 2 * TOKENS * DIM + QUERIES * DIM; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const float x = (float)((int64_t)(state >> 40) - (1 << 23)) / (float)(1 << 21);
    *(i < TOKENS * DIM       ? &keys[i]
      : i < 2 * TOKENS * DIM ? &values[i - TOKENS * DIM]
                             : &query[i - 2 * TOKENS * DIM]) = x;
  }
  for (int i = 0; i < TOKENS; ++i) mask[i] = -INFINITY;

  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", KVANT_VERSION_MAJOR, KVANT_VERSION_MINOR, KVANT_VERSION_PATCH);
  if (strcmp(version, KVANT_VERSION) != 0 || strcmp(version, kvant_version()) != 0) fail("header and library differ");
  refusals();
  const char* const isas[] = {"scalar", "avx2", "avx512", "amx", "neon"};
  const char* const formats[] = {"f16", "bf16", "fp8", "tq2", "tq3", "tq4", "tq5", "tq6", "tq8"};
  for (int i = 0; i < 5; ++i)
    for (int f = 0; f < 9; ++f) line_of(isas[i], formats[f]);
  return 0;
}
