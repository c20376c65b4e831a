#include <algorithm>
#include <numeric>

#include "core/fmt.hpp"
#include "io/text.hpp"
#include "snapshot/cache_slots.hpp"
#include "snapshot/names.hpp"
#include "snapshot/save.hpp"
#include "snapshot/write.hpp"

namespace kvant::snapshot {
namespace {

Status not_loaded(const SnapshotFile& file, const std::string& what) {
  return {Code::invalid_argument, fmt::format("{}: not loaded: {}", io::printable(file.info().path), what)};
}

Result<std::vector<std::int64_t>> chosen_places(const SnapshotFile& file, const LoadOptions& options) {
  const auto count = static_cast<std::int64_t>(file.image().sequences.size());
  if (!options.sequences) {
    std::vector<std::int64_t> all(to_size(count));
    std::iota(all.begin(), all.end(), std::int64_t{0});
    return all;
  }
  for (std::size_t i = 0; i < options.sequences->size(); ++i) {
    const std::int64_t place = (*options.sequences)[i];
    if (place < 0 || place >= count) {
      return not_loaded(file, fmt::format("sequences[{}] = {}: the file has {} sequences, from 0 on", i, place, count));
    }
  }
  return *options.sequences;
}

Status check_required(const SnapshotFile& file, const LoadOptions& options, std::span<const std::int64_t> places) {
  const SnapshotInfo& info = file.info();
  if (options.model && *options.model != info.model) {
    return not_loaded(file, fmt::format("it is of the model {}, and {} is required", io::in_quotes(info.model),
                                        io::in_quotes(*options.model)));
  }
  for (const auto& [key, value] : options.metadata) {
    if (key.starts_with(kOwn)) {
      return not_loaded(file, fmt::format("metadata {}: keys that begin with \"{}\" are kvant's own, and cannot be "
                                          "required; the file's facts have them",
                                          io::in_quotes(key), kOwn));
    }
    const auto found = info.metadata.find(key);
    if (found != info.metadata.end() && found->second == value) continue;
    return not_loaded(file, fmt::format("its metadata {} is {}, and {} is required", io::in_quotes(key),
                                        found == info.metadata.end() ? "missing" : io::in_quotes(found->second),
                                        io::in_quotes(value)));
  }
  if (!options.tokens) return {};
  if (options.tokens->size() != places.size()) {
    return not_loaded(file, fmt::format("tokens has {} lists, and {} sequences are to be loaded",
                                        options.tokens->size(), places.size()));
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::vector<std::int64_t>& theirs = info.sequences[to_size(places[i])].tokens;
    const std::vector<std::int64_t>& ours = (*options.tokens)[i];
    if (theirs == ours) continue;
    const auto differ = std::mismatch(theirs.begin(), theirs.end(), ours.begin(), ours.end()).first - theirs.begin();
    return not_loaded(file,
                      fmt::format("the {} token ids of its sequence {} are not the {} that are required: they differ "
                                  "from position {} on",
                                  theirs.size(), places[i], ours.size(), differ));
  }
  return {};
}

/// Refuses a cache whose pages are of another kind.
Status check_cache(const CacheImpl& cache, const SnapshotFile& file) {
  StoredConfig theirs = file.stored();
  if (theirs.config.k_basis == BasisKind::calibrated || theirs.config.v_basis == BasisKind::calibrated) {
    auto bases = file.read_bases();
    if (!bases) return bases.status();
    theirs.config.bases = std::move(*bases);
  }
  const StoredConfig ours = stored_config(cache);
  const std::string other = difference(theirs, ours);
  if (!other.empty()) {
    const bool stored = other.starts_with("stored_");
    return not_loaded(file, fmt::format("the file and the cache differ in {}{}", other,
                                        stored ? " (a device pads vectors of this head_dim, and host memory does not)"
                                               : "; create the cache with the file's configuration"));
  }
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    const std::size_t bytes = file.slot_bytes(pool);
    if (bytes == 0) continue;
    const codec::PageLayout layout =
        pool == Pool::encoded ? cache.spec().encoded : cache.spec().exact_layout(*file.stored().exact);
    const std::size_t wanted = static_cast<std::size_t>(cache.spec().slot_blocks()) * layout.block_bytes;
    if (bytes == wanted) continue;
    return {Code::bad_file,
            fmt::format("{}: its {} pages have {} bytes, and those of its configuration have {}",
                        io::printable(file.info().path), pool == Pool::exact ? "exact" : "encoded", bytes, wanted)};
  }
  return {};
}

}  // namespace

Result<CacheConfig> config_for(const SnapshotFile& file, const LoadOptions& options) {
  auto bases = file.read_bases();
  if (!bases) return bases.status();
  CacheConfig config = file.stored().config;
  config.bases = std::move(*bases);
  config.device = options.device;
  config.threads = options.threads;
  config.isa = options.isa;
  if (options.capacity_tokens) config.capacity_tokens = *options.capacity_tokens;
  if (options.max_sequences) config.max_sequences = *options.max_sequences;
  if (options.max_sequence_tokens) config.max_sequence_tokens = *options.max_sequence_tokens;
  if (!config.exact) config.exact = file.stored().exact;
  return config;
}

Result<std::vector<SequenceId>> load_into(CacheImpl& cache, const SnapshotFile& file, const LoadOptions& options) {
  const auto places = chosen_places(file, options);
  if (!places) return places.status();
  if (Status s = check_required(file, options, *places); !s) return s;
  if (Status s = check_cache(cache, file); !s) return s;
  const core::ImageBuilder part = core::subset(file.image(), *places);
  const auto fill_all = [&](const core::CacheTable::Restored& restored) -> Status {
    std::int64_t total = 0;
    for (const Pool pool : {Pool::encoded, Pool::exact}) {
      total += static_cast<std::int64_t>(part.sources(pool).size() * file.slot_bytes(pool));
    }
    Progress progress(options.progress, total);
    for (const Pool pool : {Pool::encoded, Pool::exact}) {
      const std::size_t bytes = file.slot_bytes(pool);
      const auto fill = [&](std::size_t first, std::span<std::byte> out) -> Status {
        for (std::size_t n = first; !out.empty(); ++n, out = out.subspan(bytes)) {
          if (Status s = file.read_slot(pool, part.sources(pool)[n].number, out.first(bytes)); !s) return s;
          if (Status s = progress.add(static_cast<std::int64_t>(bytes)); !s) return s;
        }
        return {};
      };
      if (Status s = cache.store().fill_slots(pool, restored.slots(pool), fill, options.stream); !s) return s;
    }
    return {};
  };
  return restore(cache, part.image(), file.stored().exact, options.stream, fill_all);
}

}  // namespace kvant::snapshot
