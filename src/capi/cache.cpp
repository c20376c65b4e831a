// kvant.h: the cache.
#include "kvant/cache.hpp"

#include <optional>

#include "capi/handles.hpp"
#include "core/cache/impl.hpp"

namespace kvant::capi {

namespace {

kvant_cache_config default_config() {
  kvant_cache_config config{};
  config.struct_size = sizeof config;
  config.layers = 1;
  config.sink_pages = -1;
  config.tail_pages = -1;
  config.exact_dtype = -1;
  config.k = "tq6";
  config.v = "tq4";
  config.lut_scales = 1;
  return config;
}

Result<BasisKind> to_basis_kind(const char* name, std::int32_t kind) {
  if (kind >= KVANT_BASIS_AUTOMATIC && kind <= KVANT_BASIS_CALIBRATED) return static_cast<BasisKind>(kind);
  return {Code::invalid_argument, std::string(name) + " is " + std::to_string(kind) +
                                      "; allowed: 0 (automatic), 1 (hadamard), 2 (none), 3 (calibrated)"};
}

Result<std::vector<float>> to_levels(const char* name, const float* levels, std::int32_t count) {
  if (count == 0) return std::vector<float>{};
  if (count < 0 || count > 256 || levels == nullptr) {
    return {Code::invalid_argument, std::string(name) + "_levels has " + std::to_string(count) + " values" +
                                        (levels == nullptr ? " and is NULL" : "") +
                                        "; allowed: 2^bits level values of a lut format, or none"};
  }
  return std::vector<float>(levels, levels + count);
}

Result<std::shared_ptr<const BasisSet>> to_bases(const kvant_cache_config& given) {
  if (given.bases == nullptr) return std::shared_ptr<const BasisSet>{};
  std::vector<int> numbers;
  if (given.basis_layers != nullptr && given.layers > 0) {
    numbers.assign(given.basis_layers, given.basis_layers + given.layers);
  }
  auto set = io::select_bases(given.bases->calibration, numbers);
  if (!set) return set.status();
  return std::make_shared<const BasisSet>(std::move(*set));
}

Result<CacheConfig> to_config(const kvant_cache_config* pointer) {
  kvant_cache_config given = default_config();
  if (Status status = read_struct("config", pointer, given); !status.ok()) return status;
  if (given.v == nullptr) return null_argument("config.v");

  CacheConfig config;
  config.layers = given.layers;
  config.kv_heads = given.kv_heads;
  config.head_dim = given.head_dim;
  config.v_head_dim = to_int(given.v_head_dim);
  config.latent = given.latent;
  config.rope = given.rope;
  if (given.k != nullptr) config.k = given.k;
  config.v = given.v;
  config.sink_pages = given.sink_pages;
  config.tail_pages = given.tail_pages;
  if (given.exact_dtype != -1) {
    const auto exact = to_dtype("config.exact", given.exact_dtype);
    if (!exact) return exact.status();
    config.exact = *exact;
  }
  config.window = given.window;
  config.window_sinks = given.window_sinks;
  config.capacity_tokens = given.capacity_tokens;
  const auto k_basis = to_basis_kind("config.k_basis", given.k_basis);
  if (!k_basis) return k_basis.status();
  const auto v_basis = to_basis_kind("config.v_basis", given.v_basis);
  if (!v_basis) return v_basis.status();
  config.k_basis = *k_basis;
  config.v_basis = *v_basis;
  const auto k_centre = to_key_centre("config.k_centre", given.k_centre);
  if (!k_centre) return k_centre.status();
  config.k_centre = *k_centre;
  const auto v_centre = to_key_centre("config.v_centre", given.v_centre);
  if (!v_centre) return v_centre.status();
  config.v_centre = *v_centre;
  auto bases = to_bases(given);
  if (!bases) return bases.status();
  config.bases = std::move(*bases);
  auto k_levels = to_levels("config.k", given.k_levels, given.k_level_count);
  if (!k_levels) return k_levels.status();
  auto v_levels = to_levels("config.v", given.v_levels, given.v_level_count);
  if (!v_levels) return v_levels.status();
  config.k_levels = std::move(*k_levels);
  config.v_levels = std::move(*v_levels);
  config.lut_scales = given.lut_scales;
  config.threads = given.threads;
  if (given.isa != nullptr) config.isa = given.isa;
  if (given.device != nullptr) config.device = given.device;
  if (given.max_sequences != 0) config.max_sequences = given.max_sequences;
  config.max_sequence_tokens = given.max_sequence_tokens;
  config.rollback_tokens = given.rollback_tokens;
  config.pinned = given.pinned != 0;
  return config;
}

}  // namespace

}  // namespace kvant::capi

using namespace kvant::capi;

extern "C" {

void kvant_cache_config_init(kvant_cache_config* config, size_t struct_size) {
  fill_struct(config, struct_size, default_config());
}

kvant_status kvant_cache_create(const kvant_cache_config* config, kvant_cache** cache) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    *cache = nullptr;
    const auto converted = to_config(config);
    if (!converted) return converted.status();
    auto created = kvant::Cache::create(*converted);
    if (!created) return created.status();
    *cache = new kvant_cache{std::make_shared<kvant::Cache>(std::move(*created))};
    return {};
  });
}

void kvant_cache_destroy(kvant_cache* cache) {
  delete cache;
}

kvant_status kvant_cache_add_sequence(kvant_cache* cache, kvant_sequence* sequence) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (sequence == nullptr) return null_argument("sequence");
    *sequence = static_cast<kvant_sequence>(cache->cache->add_sequence());
    return {};
  });
}

kvant_status kvant_cache_fork(kvant_cache* cache, kvant_sequence parent, kvant_sequence* child) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (child == nullptr) return null_argument("child");
    const auto forked = cache->cache->fork(kvant::SequenceId{parent});
    if (!forked) return forked.status();
    *child = static_cast<kvant_sequence>(*forked);
    return {};
  });
}

kvant_status kvant_cache_remove(kvant_cache* cache, kvant_sequence sequence) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    return cache->cache->remove(kvant::SequenceId{sequence});
  });
}

kvant_status kvant_cache_truncate(kvant_cache* cache, kvant_sequence sequence, int64_t tokens) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    return cache->cache->truncate(kvant::SequenceId{sequence}, tokens);
  });
}

kvant_status kvant_cache_reorder(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* parents,
                                 int64_t count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto ids = to_sequences(sequences, count);
    if (!ids) return ids.status();
    if (count > 0 && parents == nullptr) return null_argument("parents");
    return cache->cache->reorder(*ids, {parents, ids->size()});
  });
}

kvant_status kvant_cache_length(const kvant_cache* cache, kvant_sequence sequence, int64_t* tokens) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (tokens == nullptr) return null_argument("tokens");
    const auto length = cache->cache->length(kvant::SequenceId{sequence});
    if (!length) return length.status();
    *tokens = *length;
    return {};
  });
}

kvant_status kvant_cache_reserve(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* tokens,
                                 int64_t count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto appends = to_appends(sequences, tokens, count);
    if (!appends) return appends.status();
    return cache->cache->reserve(*appends, cache->stream);
  });
}

kvant_status kvant_cache_write(kvant_cache* cache, const kvant_sequence* sequences, int64_t count, int32_t layer,
                               const kvant_tensor* keys, const kvant_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto ids = to_sequences(sequences, count);
    if (!ids) return ids.status();
    const auto k = to_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_view("values", values);
    if (!v) return v.status();
    return cache->cache->write(*ids, layer, *k, *v, cache->stream);
  });
}

kvant_status kvant_cache_append(kvant_cache* cache, kvant_sequence sequence, int32_t layer, const kvant_tensor* keys,
                                const kvant_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto k = to_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_view("values", values);
    if (!v) return v.status();
    return cache->cache->append(kvant::SequenceId{sequence}, layer, *k, *v, cache->stream);
  });
}

kvant_status kvant_cache_set_stream(kvant_cache* cache, void* stream) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (stream != nullptr && !cache->cache->impl().takes_streams()) {
      return {
          kvant::Code::invalid_argument,
          "stream is not NULL: this cache is in host memory, whose calls are done when they return; leave it NULL, or "
          "create the cache with config.device = \"cuda\""};
    }
    cache->stream = {stream};
    return {};
  });
}

kvant_status kvant_cache_reserve_ahead(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* tokens,
                                       int64_t count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto appends = to_appends(sequences, tokens, count);
    if (!appends) return appends.status();
    return cache->cache->reserve_ahead(*appends, cache->stream);
  });
}

kvant_status kvant_cache_advance(kvant_cache* cache, const kvant_sequence* sequences, const int64_t* tokens,
                                 int64_t count) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto appends = to_appends(sequences, tokens, count);
    if (!appends) return appends.status();
    return cache->cache->advance(*appends);
  });
}

kvant_status kvant_cache_take_non_finite(kvant_cache* cache, int32_t* found) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    if (found == nullptr) return null_argument("found");
    const auto taken = cache->cache->take_non_finite(cache->stream);
    if (!taken) return taken.status();
    *found = *taken ? 1 : 0;
    return {};
  });
}

kvant_status kvant_cache_read(const kvant_cache* cache, kvant_sequence sequence, int32_t layer, int64_t begin,
                              int64_t end, const kvant_mutable_tensor* keys, const kvant_mutable_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto k = to_optional_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_optional_view("values", values);
    if (!v) return v.status();
    return cache->cache->read(kvant::SequenceId{sequence}, layer, begin, end, *k, *v, cache->stream);
  });
}

kvant_status kvant_cache_decode(const kvant_cache* cache, const kvant_sequence* sequences, const int64_t* begin,
                                const int64_t* end, int64_t count, int32_t layer, const kvant_mutable_tensor* keys,
                                const kvant_mutable_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const auto ids = to_sequences(sequences, count);
    if (!ids) return ids.status();
    if (count > 0 && begin == nullptr) return null_argument("begin");
    if (count > 0 && end == nullptr) return null_argument("end");
    std::vector<kvant::TokenRange> ranges;
    ranges.reserve(ids->size());
    for (std::size_t i = 0; i < ids->size(); ++i) ranges.push_back({(*ids)[i], begin[i], end[i]});
    const auto k = to_optional_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_optional_view("values", values);
    if (!v) return v.status();
    return cache->cache->decode(ranges, layer, *k, *v, cache->stream);
  });
}

kvant_status kvant_cache_memory(const kvant_cache* cache, kvant_memory* memory) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const kvant::CacheMemory now = cache->cache->memory();
    const kvant_memory bytes{sizeof bytes,    now.tokens,      now.encoded_bytes, now.scale_bytes,
                             now.exact_bytes, now.table_bytes, now.total(),       now.reserved_bytes};
    return write_struct("memory", memory, bytes);
  });
}

kvant_status kvant_cache_exact_ends(const kvant_cache* cache, kvant_exact_ends* ends) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const kvant::ExactEnds now = cache->cache->exact_ends();
    const kvant_exact_ends numbers{sizeof numbers, now.sink_pages, now.tail_pages,
                                   now.dtype ? static_cast<kvant_dtype>(*now.dtype) : -1};
    return write_struct("ends", ends, numbers);
  });
}

kvant_status kvant_cache_trim(kvant_cache* cache, int64_t* bytes) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    const std::int64_t given = cache->cache->trim();
    if (bytes != nullptr) *bytes = given;
    return {};
  });
}

kvant_status kvant_cache_describe(const kvant_cache* cache, char* buffer, size_t capacity, size_t* size) {
  return guarded([&]() -> kvant::Status {
    if (cache == nullptr) return null_argument("cache");
    return copy_text(cache->cache->describe(), buffer, capacity, size);
  });
}

}  // extern "C"
