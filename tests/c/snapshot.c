/* Snapshots as a C11 program meets them: every function is called, what was loaded is what was saved, and every refusal
 * shows its message. */
#include <kvant/kvant.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

enum { HEADS = 2, DIM = 64, TOKENS = 300 };

static float rows[TOKENS * HEADS * DIM], before[TOKENS * HEADS * DIM], after[TOKENS * HEADS * DIM];

static int32_t count_calls(void* context, int64_t done, int64_t total) {
  ++*(int*)context;
  return done > total; /* go on */
}
static int32_t stop(void* context, int64_t done, int64_t total) {
  return context == NULL && done <= total;
}

static void read_keys(const kvant_cache* cache, kvant_sequence sequence, float* into) {
  const kvant_mutable_tensor keys = {.data = into, .dtype = KVANT_F32, .shape = {TOKENS, HEADS, DIM}};
  EXPECT(kvant_cache_read(cache, sequence, 0, 0, TOKENS, &keys, NULL) == KVANT_OK);
}

static void test_save(kvant_cache* cache, const kvant_sequence* sequences, const char* path) {
  const char* metadata[] = {"user", "ann", "language", "en"};
  static int64_t ids[TOKENS];
  for (int i = 0; i < TOKENS; ++i) ids[i] = 3 * i;
  const int64_t counts[] = {TOKENS, 0};
  int calls = 0;
  const kvant_save_options options = {.struct_size = sizeof options,
                                      .sequences = sequences,
                                      .sequence_count = 2,
                                      .name = "chat",
                                      .model = "nano",
                                      .metadata = metadata,
                                      .metadata_count = 2,
                                      .tokens = ids,
                                      .token_counts = counts,
                                      .token_lists = 2,
                                      .progress = count_calls,
                                      .progress_context = &calls};
  EXPECT(kvant_save(cache, path, &options) == KVANT_OK && calls > 0);
  kvant_save_options wrong = options;
  wrong.progress = stop;
  wrong.progress_context = NULL;
  EXPECT_REFUSED(kvant_save(cache, path, &wrong), KVANT_IO, "stopped by its caller");
  wrong = options;
  wrong.metadata = NULL;
  EXPECT_REFUSED(kvant_save(cache, path, &wrong), KVANT_INVALID_ARGUMENT, "options.metadata is NULL");
  wrong = options;
  wrong.token_lists = 1;
  EXPECT_REFUSED(kvant_save(cache, path, &wrong), KVANT_INVALID_ARGUMENT, "1 lists for 2 sequences");
  wrong = options;
  wrong.sequence_count = -1;
  EXPECT_REFUSED(kvant_save(cache, path, &wrong), KVANT_INVALID_ARGUMENT, "-1");
  wrong = options;
  wrong.struct_size = 0;
  EXPECT_REFUSED(kvant_save(cache, path, &wrong), KVANT_INVALID_ARGUMENT, "struct_size");
  EXPECT_REFUSED(kvant_save(NULL, path, NULL), KVANT_INVALID_ARGUMENT, "cache is NULL");
  EXPECT_REFUSED(kvant_save(cache, NULL, NULL), KVANT_INVALID_ARGUMENT, "path is NULL");
}

static void test_info(const kvant_snapshot* snapshot) {
  size_t size = 0;
  EXPECT(kvant_snapshot_info(snapshot, NULL, 0, &size) == KVANT_OK);
  char* text = malloc(size);
  if (text == NULL) exit(1);
  EXPECT(kvant_snapshot_info(snapshot, text, size, NULL) == KVANT_OK);
  EXPECT(strstr(text, "\"model\":\"nano\"") != NULL && strstr(text, "\"user\":\"ann\"") != NULL);
  EXPECT(strstr(text, "{\"length\":300,\"token_ids\":300},{\"length\":300,\"token_ids\":0}") != NULL);
  EXPECT(strstr(text, "\"k\":\"tq6\"") != NULL && strstr(text, "\"kv_heads\":2") != NULL);
  free(text);
  static int64_t ids[TOKENS];
  int64_t count = 0;
  EXPECT(kvant_snapshot_tokens(snapshot, 0, NULL, 0, &count) == KVANT_OK && count == TOKENS);
  EXPECT(kvant_snapshot_tokens(snapshot, 0, ids, TOKENS, &count) == KVANT_OK && ids[299] == 897);
  EXPECT(kvant_snapshot_tokens(snapshot, 1, ids, TOKENS, &count) == KVANT_OK && count == 0);
  EXPECT_REFUSED(kvant_snapshot_tokens(snapshot, 0, ids, 5, &count), KVANT_INVALID_ARGUMENT, "capacity is 5");
  EXPECT_REFUSED(kvant_snapshot_tokens(snapshot, 2, ids, 5, &count), KVANT_INVALID_ARGUMENT, "place is 2");
  EXPECT_REFUSED(kvant_snapshot_info(NULL, NULL, 0, &size), KVANT_INVALID_ARGUMENT, "snapshot is NULL");
}

static void test_load(const kvant_snapshot* snapshot) {
  kvant_cache* cache = NULL;
  kvant_sequence ids[2] = {0, 0};
  int64_t count = 0;
  EXPECT(kvant_load(snapshot, NULL, &cache, ids, 2, &count) == KVANT_OK && ids[0] != ids[1] && count == 2);
  read_keys(cache, ids[0], after);
  EXPECT(memcmp(before, after, sizeof before) == 0);

  const int64_t place = 1;
  const char* metadata[] = {"user", "ann"};
  kvant_load_options options = {.struct_size = sizeof options,
                                .sequences = &place,
                                .sequence_count = 1,
                                .model = "nano",
                                .metadata = metadata,
                                .metadata_count = 1};
  kvant_sequence more = 0;
  EXPECT(kvant_load_into(cache, snapshot, &options, &more, 1, &count) == KVANT_OK && more > ids[1] && count == 1);
  memset(after, 0, sizeof after);
  read_keys(cache, more, after);
  EXPECT(memcmp(before, after, sizeof before) == 0);
  EXPECT_REFUSED(kvant_load_into(cache, snapshot, &options, NULL, 1, NULL), KVANT_INVALID_ARGUMENT,
                 "sequences is NULL");
  options.model = "mini";
  EXPECT_REFUSED(kvant_load_into(cache, snapshot, &options, &more, 1, NULL), KVANT_INVALID_ARGUMENT,
                 "\"mini\" is required");
  options.model = NULL;
  options.progress = stop;
  EXPECT_REFUSED(kvant_load_into(cache, snapshot, &options, &more, 1, NULL), KVANT_IO, "stopped by its caller");
  kvant_cache* other = cache;
  options.progress = NULL;
  kvant_cache* target = NULL;
  kvant_sequence copies[2] = {0, 0};
  EXPECT(kvant_load(snapshot, NULL, &target, copies, 2, NULL) == KVANT_OK);
  EXPECT(kvant_copy_sequences(cache, ids, 2, target, copies, NULL, NULL) == KVANT_OK && copies[0] != copies[1]);
  memset(after, 0, sizeof after);
  read_keys(target, copies[0], after);
  EXPECT(memcmp(before, after, sizeof before) == 0);
  EXPECT_REFUSED(kvant_copy_sequences(cache, ids, 2, cache, copies, NULL, NULL), KVANT_INVALID_ARGUMENT, "one cache");
  EXPECT_REFUSED(kvant_copy_sequences(cache, ids, 2, target, copies, stop, NULL), KVANT_IO, "stopped by its caller");
  EXPECT_REFUSED(kvant_copy_sequences(cache, ids, 2, target, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "copies");
  EXPECT_REFUSED(kvant_copy_sequences(NULL, ids, 2, target, copies, NULL, NULL), KVANT_INVALID_ARGUMENT, "from");
  EXPECT_REFUSED(kvant_copy_sequences(cache, ids, 2, NULL, copies, NULL, NULL), KVANT_INVALID_ARGUMENT, "to is NULL");
  kvant_cache_destroy(target);
  options.capacity_tokens = 64;
  EXPECT_REFUSED(kvant_load(snapshot, &options, &other, &more, 1, NULL), KVANT_OUT_OF_CAPACITY,
                 "the snapshot needs 5 more");
  EXPECT(other == NULL);
  options.capacity_tokens = -1;
  EXPECT(kvant_load(snapshot, &options, &other, &more, 1, NULL) == KVANT_OK);
  kvant_cache_destroy(other);
  EXPECT_REFUSED(kvant_load(NULL, NULL, &other, ids, 2, NULL), KVANT_INVALID_ARGUMENT, "snapshot is NULL");
  EXPECT_REFUSED(kvant_load(snapshot, NULL, NULL, ids, 2, NULL), KVANT_INVALID_ARGUMENT, "cache is NULL");
  kvant_cache_destroy(cache);
}

/* An array that is too small is refused before anything is loaded, and the number of sequences is said. */
static void test_room(const kvant_snapshot* snapshot) {
  kvant_cache* cache = NULL;
  kvant_sequence ids[3] = {7, 7, 7};
  int64_t count = 0;
  EXPECT_REFUSED(kvant_load(snapshot, NULL, &cache, ids, 1, &count), KVANT_INVALID_ARGUMENT,
                 "capacity is 1 ids, but 2 sequences are loaded");
  EXPECT(count == 2 && cache == NULL && ids[0] == 7);
  EXPECT_REFUSED(kvant_load(snapshot, NULL, &cache, ids, -1, NULL), KVANT_INVALID_ARGUMENT, "capacity is -1");
  EXPECT_REFUSED(kvant_load(snapshot, NULL, &cache, NULL, 2, &count), KVANT_INVALID_ARGUMENT, "sequences is NULL");
  EXPECT(kvant_load(snapshot, NULL, &cache, ids, 3, &count) == KVANT_OK && count == 2 && ids[2] == 7);
  kvant_memory before_memory = {.struct_size = sizeof before_memory}, memory = before_memory;
  EXPECT(kvant_cache_memory(cache, &before_memory) == KVANT_OK);
  EXPECT_REFUSED(kvant_load_into(cache, snapshot, NULL, ids, 1, &count), KVANT_INVALID_ARGUMENT,
                 "capacity is 1 ids, but 2 sequences are loaded");
  EXPECT(count == 2 && kvant_cache_memory(cache, &memory) == KVANT_OK && memory.tokens == before_memory.tokens);
  const int64_t places[] = {1, 0, 1};
  kvant_load_options options = {.struct_size = sizeof options, .sequences = places, .sequence_count = 0};
  count = 5;
  EXPECT(kvant_load_into(cache, snapshot, &options, NULL, 0, &count) == KVANT_OK && count == 0);
  kvant_cache_destroy(cache);
}

int main(void) {
  for (int i = 0; i < TOKENS * HEADS * DIM; ++i) rows[i] = (float)(i * 2654435761u % 2001u) / 1000.0f - 1.0f;
  char path[256], copy[256];
  const char* folder = getenv("TMPDIR");
  snprintf(path, sizeof path, "%s/kvant-c-snapshot.kvs", folder != NULL ? folder : "/tmp");
  snprintf(copy, sizeof copy, "%s/kvant-c-copy.kvs", folder != NULL ? folder : "/tmp");

  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = HEADS;
  config.head_dim = DIM;
  kvant_cache* cache = NULL;
  kvant_sequence sequences[2] = {0, 0};
  const kvant_tensor view = {.data = rows, .dtype = KVANT_F32, .shape = {TOKENS, HEADS, DIM}};
  EXPECT(kvant_cache_create(&config, &cache) == KVANT_OK);
  EXPECT(kvant_cache_add_sequence(cache, &sequences[0]) == KVANT_OK);
  EXPECT(kvant_cache_append(cache, sequences[0], 0, &view, &view) == KVANT_OK);
  EXPECT(kvant_cache_fork(cache, sequences[0], &sequences[1]) == KVANT_OK);
  read_keys(cache, sequences[0], before);
  test_save(cache, sequences, path);
  kvant_cache_destroy(cache);

  kvant_snapshot* snapshot = NULL;
  EXPECT(kvant_snapshot_open(path, &snapshot) == KVANT_OK);
  test_info(snapshot);
  test_load(snapshot);
  test_room(snapshot);
  int calls = 0;
  EXPECT(kvant_snapshot_verify(snapshot, count_calls, &calls) == KVANT_OK && calls > 0);
  EXPECT(kvant_snapshot_copy(snapshot, copy, NULL, NULL) == KVANT_OK);
  EXPECT_REFUSED(kvant_snapshot_verify(NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "snapshot is NULL");
  EXPECT_REFUSED(kvant_snapshot_copy(snapshot, NULL, NULL, NULL), KVANT_INVALID_ARGUMENT, "path is NULL");
  kvant_snapshot_destroy(snapshot);
  kvant_snapshot_destroy(NULL);
  EXPECT(kvant_snapshot_open(copy, &snapshot) == KVANT_OK);
  kvant_snapshot_destroy(snapshot);
  remove(path);
  remove(copy);
  EXPECT_REFUSED(kvant_snapshot_open(path, &snapshot), KVANT_IO, "cannot open");
  EXPECT(snapshot == NULL);
  EXPECT_REFUSED(kvant_snapshot_open(NULL, &snapshot), KVANT_INVALID_ARGUMENT, "path is NULL");
  printf("%d failures\n", failures);
  return failures != 0;
}
