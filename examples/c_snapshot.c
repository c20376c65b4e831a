/* Caches in files, in C: save two sequences, ask a file how many it has, load them. Compiled as C11.
 *
 *     example_c_snapshot [FILE]          # default: chats.kvs */
#include <kvant/kvant.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 300, CHATS = 2 };

static float keys[TOKENS * KV_HEADS * HEAD_DIM], values[TOKENS * KV_HEADS * HEAD_DIM];
static float saved[TOKENS * KV_HEADS * HEAD_DIM], loaded[TOKENS * KV_HEADS * HEAD_DIM];

static void check(kvant_status status, const char* what) {
  if (status == KVANT_OK) return;
  fprintf(stderr, "%s failed (%s): %s\n", what, kvant_status_name(status), kvant_last_error());
  exit(1);
}

static void fill(float* x, int seed) {
  for (int i = 0; i < TOKENS * KV_HEADS * HEAD_DIM; ++i) x[i] = sinf(0.37f * (float)(i + seed));
}

static void read_keys(const kvant_cache* cache, kvant_sequence sequence, float* into) {
  const kvant_mutable_tensor k = {.data = into, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, HEAD_DIM}};
  check(kvant_cache_read(cache, sequence, 0, 0, TOKENS, &k, NULL), "reading keys");
}

int main(int argc, char** argv) {
  const char* path = argc > 1 ? argv[1] : "chats.kvs";
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = KV_HEADS;
  config.head_dim = HEAD_DIM;
  kvant_cache* cache = NULL;
  check(kvant_cache_create(&config, &cache), "creating the cache");

  /* Two chats. Each has token ids, so that a program which loads the file knows what was said. */
  kvant_sequence chats[CHATS];
  int64_t ids[CHATS * TOKENS], lengths[CHATS];
  for (int chat = 0; chat < CHATS; ++chat) {
    check(kvant_cache_add_sequence(cache, &chats[chat]), "adding a sequence");
    fill(keys, 1000 * chat);
    fill(values, 1000 * chat + 500);
    const kvant_tensor k = {.data = keys, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, HEAD_DIM}};
    const kvant_tensor v = {.data = values, .dtype = KVANT_F32, .shape = {TOKENS, KV_HEADS, HEAD_DIM}};
    check(kvant_cache_append(cache, chats[chat], 0, &k, &v), "appending");
    lengths[chat] = TOKENS;
    for (int i = 0; i < TOKENS; ++i) ids[chat * TOKENS + i] = 3 * i + chat;
  }

  /* A struct of zeros with struct_size set has the defaults. */
  const kvant_save_options save = {.struct_size = sizeof save,
                                   .name = "two chats",
                                   .model = "example",
                                   .tokens = ids,
                                   .token_counts = lengths,
                                   .token_lists = CHATS};
  check(kvant_save(cache, path, &save), "saving");

  /* In another process the work begins here. Texts go to a buffer of ours: ask for the size first. */
  kvant_snapshot* snapshot = NULL;
  check(kvant_snapshot_open(path, &snapshot), "opening the snapshot");
  size_t size = 0;
  check(kvant_snapshot_info(snapshot, NULL, 0, &size), "asking for the size of the facts");
  char* facts = malloc(size);
  if (facts == NULL) return 1;
  check(kvant_snapshot_info(snapshot, facts, size, NULL), "asking for the facts");
  printf("%s\n", facts);
  free(facts);

  /* A load refuses an array that is too small, and says in `count` how many sequences there are. */
  kvant_cache* again = NULL;
  kvant_sequence found[8];
  int64_t count = 0;
  const kvant_load_options load = {.struct_size = sizeof load, .model = "example"}; /* another model is refused */
  check(kvant_load(snapshot, &load, &again, found, sizeof found / sizeof found[0], &count), "loading");
  kvant_snapshot_destroy(snapshot);

  int same = count == CHATS;
  for (int chat = 0; same && chat < CHATS; ++chat) {
    read_keys(cache, chats[chat], saved);
    read_keys(again, found[chat], loaded);
    same = memcmp(saved, loaded, sizeof saved) == 0;
  }
  printf("%lld sequences %s\n", (long long)count, same ? "as they were saved" : "DIFFER");
  kvant_cache_destroy(again);
  kvant_cache_destroy(cache);
  return same ? 0 : 1;
}
