// kvant.h: caches in files.
#include "kvant/snapshot.hpp"

#include <charconv>
#include <nlohmann/json.hpp>

#include "capi/handles.hpp"
#include "capi/snapshot_json.hpp"

namespace kvant::capi {
namespace {

SnapshotProgress to_progress(kvant_progress progress, void* context) {
  if (progress == nullptr) return {};
  return [=](std::int64_t done, std::int64_t total) { return progress(context, done, total) == 0; };
}

std::string to_string(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

/// A list of C; `name` says which. Errors: a count below zero, NULL with a count.
template <class T>
Result<std::span<const T>> to_span(const char* name, const T* list, std::int64_t count) {
  if (count < 0) return {Code::invalid_argument, std::string(name) + " counts " + std::to_string(count) + " items"};
  if (count > 0 && list == nullptr) return null_argument(name);
  return std::span<const T>(list, static_cast<std::size_t>(count));
}

Result<std::map<std::string, std::string>> to_metadata(const char* const* metadata, std::int64_t count) {
  const auto pairs = to_span("options.metadata", metadata, count < 0 || count > INT32_MAX ? -1 : 2 * count);
  if (!pairs) return pairs.status();
  std::map<std::string, std::string> all;
  for (std::size_t i = 0; i < pairs->size(); i += 2) {
    const char *key = (*pairs)[i], *value = (*pairs)[i + 1];
    if (key == nullptr || value == nullptr) return null_argument("a key or a value of options.metadata");
    if (!all.emplace(key, value).second) {
      return {Code::invalid_argument, "options.metadata has the key \"" + std::string(key) + "\" twice"};
    }
  }
  return all;
}

Result<std::vector<std::vector<std::int64_t>>> to_tokens(const std::int64_t* tokens, const std::int64_t* counts,
                                                         std::int64_t lists) {
  const auto each = to_span("options.token_counts", counts, lists);
  if (!each) return each.status();
  std::vector<std::vector<std::int64_t>> all;
  for (const std::int64_t count : *each) {
    const auto ids = to_span("options.tokens", tokens, count);
    if (!ids) return ids.status();
    all.emplace_back(ids->begin(), ids->end());
    if (count > 0) tokens += count;
  }
  return all;
}

/// options: NULL has the defaults.
template <class Options>
Result<Options> read_options(const Options* options) {
  Options given{};
  if (options == nullptr) return given;
  if (Status status = read_struct("options", options, given); !status.ok()) return status;
  return given;
}

Result<SaveOptions> to_save_options(const kvant_save_options* options, Stream stream) {
  const auto given = read_options(options);
  if (!given) return given.status();
  SaveOptions to;
  if (given->sequences != nullptr || given->sequence_count != 0) {
    auto ids = to_sequences(given->sequences, given->sequence_count);
    if (!ids) return ids.status();
    to.sequences = std::move(*ids);
  }
  auto metadata = to_metadata(given->metadata, given->metadata_count);
  if (!metadata) return metadata.status();
  auto tokens = to_tokens(given->tokens, given->token_counts, given->token_lists);
  if (!tokens) return tokens.status();
  to.name = to_string(given->name);
  to.model = to_string(given->model);
  to.metadata = std::move(*metadata);
  to.tokens = std::move(*tokens);
  to.base = to_string(given->base);
  to.progress = to_progress(given->progress, given->progress_context);
  to.stream = stream;
  return to;
}

Result<LoadOptions> to_load_options(const kvant_load_options* options) {
  const auto given = read_options(options);
  if (!given) return given.status();
  LoadOptions to;
  if (given->sequences != nullptr || given->sequence_count != 0) {
    const auto places = to_span("options.sequences", given->sequences, given->sequence_count);
    if (!places) return places.status();
    to.sequences.emplace(places->begin(), places->end());
  }
  auto metadata = to_metadata(given->metadata, given->metadata_count);
  if (!metadata) return metadata.status();
  to.metadata = std::move(*metadata);
  if (given->token_lists != 0) {
    auto tokens = to_tokens(given->tokens, given->token_counts, given->token_lists);
    if (!tokens) return tokens.status();
    to.tokens = std::move(*tokens);
  }
  if (given->model != nullptr) to.model = given->model;
  to.device = to_string(given->device);
  to.isa = to_string(given->isa);
  to.threads = given->threads;
  if (given->capacity_tokens != 0) to.capacity_tokens = given->capacity_tokens == -1 ? 0 : given->capacity_tokens;
  if (given->max_sequences != 0) to.max_sequences = given->max_sequences;
  if (given->max_sequence_tokens != 0) to.max_sequence_tokens = given->max_sequence_tokens;
  to.progress = to_progress(given->progress, given->progress_context);
  return to;
}

// A field as JSON: numbers are numbers.
nlohmann::ordered_json field_json(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  return text;
}

/// Room for the ids of the sequences that a load gives; `sequences`, `capacity` and `count` are the caller's.
Status check_room(const Snapshot& snapshot, const LoadOptions& options, const kvant_sequence* sequences,
                  std::int64_t capacity, std::int64_t* count) {
  const std::size_t loaded = options.sequences ? options.sequences->size() : snapshot.info().sequences.size();
  if (count != nullptr) *count = static_cast<std::int64_t>(loaded);
  if (capacity < 0 || static_cast<std::uint64_t>(capacity) < loaded) {
    return {Code::invalid_argument, "capacity is " + std::to_string(capacity) + " ids, but " + std::to_string(loaded) +
                                        " sequences are loaded; give an array of that many, or choose sequences with "
                                        "options.sequences"};
  }
  return sequences == nullptr && loaded > 0 ? null_argument("sequences") : Status();
}

Status give_ids(std::span<const SequenceId> ids, kvant_sequence* sequences) {
  for (std::size_t i = 0; i < ids.size(); ++i) sequences[i] = static_cast<kvant_sequence>(ids[i]);
  return {};
}

}  // namespace

std::string describe_snapshot(const SnapshotInfo& info) {
  nlohmann::ordered_json json;
  json["path"] = info.path;
  json["written_by"] = info.written_by;
  json["name"] = info.name;
  json["model"] = info.model;
  json["metadata"] = info.metadata;
  json["config"] = nlohmann::ordered_json::object();
  for (const auto& [name, text] : info.fields) json["config"][name] = field_json(text);
  json["sequences"] = nlohmann::ordered_json::array();
  for (const SnapshotSequence& s : info.sequences) {
    json["sequences"].push_back({{"length", s.length}, {"token_ids", s.tokens.size()}});
  }
  json["encoded_pages"] = info.encoded_pages;
  json["exact_pages"] = info.exact_pages;
  json["page_bytes"] = info.page_bytes;
  json["file_bytes"] = info.file_bytes;
  json["bases"] = info.bases;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);  // a path may be any bytes
}

}  // namespace kvant::capi

using namespace kvant::capi;

extern "C" {

kvant_status kvant_save(const kvant_cache* cache, const char* path, const kvant_save_options* options) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (path == nullptr) return null_argument("path");
    const auto to = to_save_options(options, cache->stream);
    if (!to) return to.status();
    return kvant::save(*cache->cache, path, *to);
  });
}

kvant_status kvant_snapshot_open(const char* path, kvant_snapshot** snapshot) {
  return guarded([&]() -> kvant::Status {
    if (snapshot == nullptr) return null_argument("snapshot");
    *snapshot = nullptr;
    if (path == nullptr) return null_argument("path");
    auto opened = kvant::Snapshot::open(path);
    if (!opened) return opened.status();
    *snapshot = new kvant_snapshot{std::move(*opened)};
    return {};
  });
}

void kvant_snapshot_destroy(kvant_snapshot* snapshot) {
  delete snapshot;
}

kvant_status kvant_snapshot_info(const kvant_snapshot* snapshot, char* buffer, size_t capacity, size_t* size) {
  return guarded([&]() -> kvant::Status {
    if (snapshot == nullptr) return null_argument("snapshot");
    return copy_text(describe_snapshot(snapshot->snapshot.info()), buffer, capacity, size);
  });
}

kvant_status kvant_snapshot_tokens(const kvant_snapshot* snapshot, int64_t place, int64_t* tokens, int64_t capacity,
                                   int64_t* count) {
  return guarded([&]() -> kvant::Status {
    if (snapshot == nullptr) return null_argument("snapshot");
    if (count == nullptr) return null_argument("count");
    const auto& sequences = snapshot->snapshot.info().sequences;
    if (place < 0 || static_cast<std::size_t>(place) >= sequences.size()) {
      return {kvant::Code::invalid_argument, "place is " + std::to_string(place) + "; the file has " +
                                                 std::to_string(sequences.size()) + " sequences, from 0 on"};
    }
    const std::vector<std::int64_t>& ids = sequences[static_cast<std::size_t>(place)].tokens;
    *count = static_cast<std::int64_t>(ids.size());
    if (tokens == nullptr) return {};
    if (capacity < *count) {
      return {kvant::Code::invalid_argument, "capacity is " + std::to_string(capacity) + ", the sequence has " +
                                                 std::to_string(*count) + " token ids; call with tokens NULL to ask"};
    }
    std::copy(ids.begin(), ids.end(), tokens);
    return {};
  });
}

kvant_status kvant_load(const kvant_snapshot* snapshot, const kvant_load_options* options, kvant_cache** cache,
                        kvant_sequence* sequences, int64_t capacity, int64_t* count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    *cache = nullptr;
    if (snapshot == nullptr) return null_argument("snapshot");
    const auto to = to_load_options(options);
    if (!to) return to.status();
    if (kvant::Status room = check_room(snapshot->snapshot, *to, sequences, capacity, count); !room.ok()) return room;
    auto loaded = snapshot->snapshot.load(*to);
    if (!loaded) return loaded.status();
    auto made = std::make_unique<kvant_cache>(kvant_cache{std::make_shared<kvant::Cache>(std::move(loaded->cache))});
    *cache = made.release();
    return give_ids(loaded->sequences, sequences);
  });
}

kvant_status kvant_load_into(kvant_cache* cache, const kvant_snapshot* snapshot, const kvant_load_options* options,
                             kvant_sequence* sequences, int64_t capacity, int64_t* count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (snapshot == nullptr) return null_argument("snapshot");
    auto to = to_load_options(options);
    if (!to) return to.status();
    to->stream = cache->stream;
    if (kvant::Status room = check_room(snapshot->snapshot, *to, sequences, capacity, count); !room.ok()) return room;
    const auto ids = snapshot->snapshot.load_into(*cache->cache, *to);
    if (!ids) return ids.status();
    return give_ids(*ids, sequences);
  });
}

kvant_status kvant_copy_sequences(const kvant_cache* from, const kvant_sequence* sequences, int64_t count,
                                  kvant_cache* to, kvant_sequence* copies, kvant_progress progress,
                                  void* progress_context) {
  return guarded([&]() -> kvant::Status {
    if (from == nullptr) return null_argument("from");
    if (to == nullptr) return null_argument("to");
    const auto ids = to_sequences(sequences, count);
    if (!ids) return ids.status();
    if (copies == nullptr && !ids->empty()) return null_argument("copies");
    const kvant::CopyOptions options{
        .progress = to_progress(progress, progress_context), .from_stream = from->stream, .to_stream = to->stream};
    const auto made = kvant::copy_sequences(*from->cache, *ids, *to->cache, options);
    if (!made) return made.status();
    return give_ids(*made, copies);
  });
}

kvant_status kvant_snapshot_verify(const kvant_snapshot* snapshot, kvant_progress progress, void* progress_context) {
  return guarded([&]() -> kvant::Status {
    if (snapshot == nullptr) return null_argument("snapshot");
    return snapshot->snapshot.verify(to_progress(progress, progress_context));
  });
}

kvant_status kvant_snapshot_copy(const kvant_snapshot* snapshot, const char* path, kvant_progress progress,
                                 void* progress_context) {
  return guarded([&]() -> kvant::Status {
    if (snapshot == nullptr) return null_argument("snapshot");
    if (path == nullptr) return null_argument("path");
    return snapshot->snapshot.copy(path, to_progress(progress, progress_context));
  });
}

}  // extern "C"
