#include "snapshot/save.hpp"

#include <algorithm>

#include "core/fmt.hpp"
#include "io/text.hpp"
#include "snapshot/cache_slots.hpp"
#include "snapshot/write.hpp"

namespace kvant::snapshot {
namespace {

std::vector<SequenceId> chosen_ids(const CacheImpl& cache, const SaveOptions& options) {
  if (options.sequences) return *options.sequences;
  std::vector<SequenceId> all;
  for (const auto& [id, sequence] : cache.table().sequences()) {
    if (!sequence.arriving) all.push_back(SequenceId{id});
  }
  std::sort(all.begin(), all.end());
  return all;
}

Status check_tokens(const std::vector<std::vector<std::int64_t>>& tokens, const core::TableImage& image) {
  if (tokens.empty()) return {};
  if (tokens.size() != image.sequences.size()) {
    return {Code::invalid_argument, fmt::format("tokens has {} lists for {} sequences: give one each, or none",
                                                tokens.size(), image.sequences.size())};
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int64_t length = image.sequences[i].length;
    if (tokens[i].empty() || static_cast<std::int64_t>(tokens[i].size()) == length) continue;
    return {Code::invalid_argument,
            fmt::format("tokens[{}] has {} ids: the sequence has {} tokens; give one id each, or "
                        "an empty list",
                        i, tokens[i].size(), length)};
  }
  return {};
}

}  // namespace

Status save(const CacheImpl& cache, const std::string& path, const SaveOptions& options) {
  std::unique_ptr<SnapshotFile> base;
  if (!options.base.empty()) {
    auto opened = SnapshotFile::open(options.base);
    if (!opened) return {opened.code(), "base: " + opened.message()};
    base = std::move(*opened);
  }
  const auto image = cache.table().image(chosen_ids(cache, options));
  if (!image) return image.status();
  if (Status s = check_tokens(options.tokens, image->image()); !s) return s;
  const Content content{.stored = stored_config(cache),
                        .name = options.name,
                        .model = options.model,
                        .metadata = options.metadata,
                        .image = &image->image(),
                        .tokens = {options.tokens.begin(), options.tokens.end()},
                        .encoded_bytes = cache.store().slot_bytes(Pool::encoded),
                        .exact_bytes = cache.store().slot_bytes(Pool::exact),
                        .slots = CacheSlots(cache, *image, options.stream)};
  return write(path, content, base.get(), options.progress);
}

Status copy(const SnapshotFile& file, const std::string& path, const SnapshotProgress& progress) {
  const SnapshotInfo& info = file.info();
  auto bases = file.read_bases();
  if (!bases) return bases.status();
  Content content{
      .stored = file.stored(),
      .name = info.name,
      .model = info.model,
      .metadata = info.metadata,
      .image = &file.image(),
      .tokens = {},
      .encoded_bytes = file.slot_bytes(Pool::encoded),
      .exact_bytes = file.slot_bytes(Pool::exact),
      .slots = [&](Pool pool, std::span<const std::int32_t> numbers, const core::TakeSlots& take) -> Status {
        std::vector<std::byte> copy(file.slot_bytes(pool));
        for (std::size_t n = 0; n < numbers.size(); ++n) {
          if (Status s = file.read_slot(pool, numbers[n], copy); !s) return s;
          if (Status s = take(n, copy); !s) return s;
        }
        return {};
      },
      .source = &file};
  content.stored.config.bases = std::move(*bases);
  for (const SnapshotSequence& s : info.sequences) content.tokens.emplace_back(s.tokens);
  return write(path, content, nullptr, progress);
}

Status verify(const SnapshotFile& file, const SnapshotProgress& progress) {
  std::int64_t total = 0;
  for (const PageFile& each : file.files()) total += each.checked_bytes();
  Progress told(progress, total);
  for (const PageFile& each : file.files()) {
    if (Status s = each.verify([&](std::int64_t bytes) { return told.add(bytes); }); !s) return s;
  }
  return {};
}

}  // namespace kvant::snapshot
