// A cache's configuration as metadata of a file: a key and a text for each field.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "core/cache/impl.hpp"
#include "kvant/cache.hpp"

namespace kvant::snapshot {

/// A configuration as Cache::config gives it, without its bases and levels, and what it does not say.
struct StoredConfig {
  CacheConfig config;
  // config.v_head_dim is the number itself, never 0.
  int stored_head_dim = 0, stored_v_head_dim = 0;
  std::optional<Dtype> exact{};  // the dtype of exact pages, once it is chosen
};

StoredConfig stored_config(const CacheImpl& cache);

void write_config(const StoredConfig& stored, std::map<std::string, std::string>& metadata);
/// Errors: a key that is missing, and a text that is none of the field's; not whether a cache takes the values.
Result<StoredConfig> read_config(const std::map<std::string, std::string>& metadata);
/// Whether a key of kvant's own is one that this version knows.
bool is_config_key(const std::string& key);

/// The first field in which caches differ whose pages and rules are the same otherwise: "window = 0 and 128". Empty: no
/// difference. Where pages are, and how many, may differ. Bases are compared where both have them.
std::string difference(const StoredConfig& a, const StoredConfig& b);

}  // namespace kvant::snapshot
