/* The C interface from end to end: fill a cache, attend, look at what was planned. Compiled as C11. */
#include <kvant/kvant.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 1, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 300 };

/* Every call returns a status; the sentence for people is kvant_last_error(). */
static void check(kvant_status status, const char* what) {
  if (status == KVANT_OK) return;
  fprintf(stderr, "%s failed (%s): %s\n", what, kvant_status_name(status), kvant_last_error());
  exit(1);
}

static float wave(int i) {
  return sinf(0.37f * (float)i) + 0.5f * cosf(1.93f * (float)i);
}

int main(void) {
  /* Configurations are initialised to the defaults, then changed: so they can grow without breaking programs. */
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.layers = LAYERS;
  config.kv_heads = KV_HEADS;
  config.head_dim = HEAD_DIM;
  config.k = "tq6";
  config.v = "tq4";

  kvant_cache* cache = NULL;
  kvant_sequence sequence = 0;
  check(kvant_cache_create(&config, &cache), "creating the cache");
  check(kvant_cache_add_sequence(cache, &sequence), "adding a sequence");

  /* Keys and values are [tokens, kv_heads, head_dim]; strides left at zero mean contiguous. */
  static float keys[TOKENS * KV_HEADS * HEAD_DIM], values[TOKENS * KV_HEADS * HEAD_DIM];
  for (int i = 0; i < TOKENS * KV_HEADS * HEAD_DIM; ++i) {
    keys[i] = wave(i);
    values[i] = wave(7 * i + 3);
  }
  const kvant_tensor k = {.data = keys, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, HEAD_DIM}};
  const kvant_tensor v = {.data = values, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, HEAD_DIM}};
  check(kvant_cache_append(cache, sequence, 0, &k, &v), "appending");

  /* One query at the newest position. */
  static float query[Q_HEADS * HEAD_DIM], output[Q_HEADS * HEAD_DIM], lse[Q_HEADS];
  for (int i = 0; i < Q_HEADS * HEAD_DIM; ++i) query[i] = wave(11 * i);
  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = Q_HEADS;
  kvant_plan* plan = NULL;
  check(kvant_plan_create(cache, &sequence, 1, &options, &plan), "planning");

  const kvant_tensor q = {.data = query, .dtype = KVANT_F32, .shape = {1, Q_HEADS, HEAD_DIM}};
  const kvant_mutable_tensor out = {.data = output, .dtype = KVANT_F32, .shape = {1, Q_HEADS, HEAD_DIM}};
  kvant_run_options run;
  kvant_run_options_init(&run, sizeof run);
  run.lse = lse;
  check(kvant_run(plan, 0, &q, &out, &run, NULL, NULL), "attending");

  /* Texts go to a buffer of ours: ask for the size first. */
  size_t size = 0;
  check(kvant_plan_explain(plan, NULL, 0, &size), "asking for the size of the explanation");
  char* text = malloc(size);
  if (text == NULL) return 1;
  check(kvant_plan_explain(plan, text, size, NULL), "explaining");
  kvant_memory memory = {.struct_size = sizeof memory};
  check(kvant_cache_memory(cache, &memory), "measuring");
  printf("kvant %s\n%s\n%lld tokens in %lld bytes; lse of head 0: %.4f\n", kvant_version(), text,
         (long long)memory.tokens, (long long)memory.total_bytes, (double)lse[0]);

  free(text);
  kvant_plan_destroy(plan);
  kvant_cache_destroy(cache);
  return 0;
}
