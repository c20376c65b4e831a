// Snapshots that are refused: files that were altered anywhere or cut off, files whose numbers are wrong although their
// checksums are right, and files that do not fit the cache or are not the ones that the caller requires. A refusal
// changes nothing.
#include <gtest/gtest.h>

#include <filesystem>

#include "snapshot/names.hpp"
#include "snapshot/save.hpp"
#include "snapshot/write.hpp"
#include "support/bases.hpp"
#include "support/sanitized.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using namespace test;
using snapshot::SnapshotFile;

CacheConfig config() {
  CacheConfig c = small_config(2);
  c.k = "tq4";
  c.v = "tq2";
  c.exact = Dtype::bf16;
  return c;
}

// Two sequences that share pages, with everything that a file can have.
struct Saved {
  TemporaryDirectory directory;
  Cache cache;
  SequenceId first, second;
  std::string path = directory / "cache.kvs";

  explicit Saved(const CacheConfig& c = config()) : cache(make(c)) {
    first = cache.add_sequence();
    append(cache, first, 1, 200).value();
    second = cache.fork(first).value();
    append(cache, second, 1000, 70).value();
    SaveOptions options;
    options.model = "nano";
    options.metadata = {{"user", "ann"}};
    options.tokens = {std::vector<std::int64_t>(200, 7), {}};
    save(cache, path, options).value();
  }
};

Status whole_check(std::span<const std::byte> bytes) {
  const auto file = SnapshotFile::parse(bytes, "altered.kvs");
  if (!file) return file.status();
  return snapshot::verify(**file, {});
}

// --- altered files ---------------------------------------------------------------------------------------------------

TEST(SnapshotRefusal, ABitThatFlipsAnywhere) {
  CacheConfig c = config();
  c.layers = c.kv_heads = 1;
  c.k_basis = BasisKind::calibrated;
  c.bases = random_bases(1, 1, 32, 3, false);
  const Saved saved(c);
  std::vector<std::byte> bytes = file_bytes(saved.path);
  ASSERT_TRUE(whole_check(bytes).ok()) << whole_check(bytes).message();
  const std::size_t step = kAddressSanitizer || kThreadSanitizer ? 13 : 1;
  for (std::size_t i = 0; i < bytes.size(); i += step) {
    bytes[i] ^= std::byte{1} << (i % 8);
    const Status status = whole_check(bytes);
    ASSERT_FALSE(status.ok()) << "byte " << i << " of " << bytes.size();
    ASSERT_TRUE(status.code() == Code::bad_file || status.code() == Code::unsupported) << i << ": " << status.message();
    bytes[i] ^= std::byte{1} << (i % 8);
  }
}

TEST(SnapshotRefusal, AFileThatEndsAnywhere) {
  const Saved saved;
  std::vector<std::byte> bytes = file_bytes(saved.path);
  const std::size_t whole = bytes.size();
  for (std::size_t length = 0; length < whole; length += length < 4096 || whole - length < 4096 ? 1 : 61) {
    const Status status = whole_check(std::span(bytes).first(length));
    ASSERT_EQ(status.code(), Code::bad_file) << length << ": " << status.message();
  }
  bytes.push_back({});
  EXPECT_TRUE(refused(whole_check(bytes), Code::bad_file, {"trailing"}));
}

TEST(SnapshotRefusal, TheFirstBadPageIsNamedAndNothingChanges) {
  const Saved saved;
  const io::SafeTensors opened = io::SafeTensors::open(saved.path).value();
  const io::TensorInfo* encoded = opened.require("encoded").value();
  const std::uint64_t at = encoded->file_offset() + encoded->bytes / static_cast<std::uint64_t>(encoded->shape[0]) + 5;
  {
    std::fstream file(saved.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put('\x5a');
  }
  // The tables can be read.
  const Snapshot snapshot = Snapshot::open(saved.path).value();
  EXPECT_TRUE(
      refused(snapshot.verify(), Code::bad_file, {"cache.kvs", "row 1 of tensor \"encoded\"", "not as it was saved"}));
  EXPECT_TRUE(refused(snapshot.load().status(), Code::bad_file, {"row 1 of tensor \"encoded\""}));
  EXPECT_TRUE(refused(snapshot.copy(saved.directory / "copy.kvs"), Code::bad_file, {"row 1 of tensor \"encoded\""}));
  EXPECT_FALSE(std::filesystem::exists(saved.directory / "copy.kvs"));

  CacheConfig automatic = config();
  automatic.exact.reset();
  Cache into = make(automatic);
  const SequenceId own = into.add_sequence();
  EXPECT_TRUE(refused(snapshot.load_into(into).status(), Code::bad_file, {"row 1 of tensor \"encoded\""}));
  EXPECT_EQ(into.impl().table().sequences().size(), 1u);
  EXPECT_EQ(into.impl().table().pages_held(), 0);
  EXPECT_EQ(into.impl().exact_dtype(), std::nullopt);
  EXPECT_EQ(into.memory().total() - into.memory().table_bytes, 0);
  append(into, own, 1, 100, Dtype::f16).value();
  EXPECT_EQ(into.impl().exact_dtype(), Dtype::f16);
}

TEST(SnapshotRefusal, ALoadThatItsCallerStops) {
  const Saved saved;
  Cache into = make(config());
  LoadOptions options;
  std::int64_t seen = 0, all = 0;
  options.progress = [&](std::int64_t done, std::int64_t total) { return seen = done, all = total, false; };
  const Snapshot snapshot = Snapshot::open(saved.path).value();
  EXPECT_TRUE(refused(snapshot.load_into(into, options).status(), Code::io, {"stopped by its caller"}));
  EXPECT_EQ(into.impl().table().pages_held(), 0);
  EXPECT_EQ(seen, all);
  EXPECT_EQ(all, snapshot.info().page_bytes);
  SaveOptions save_options;
  save_options.progress = options.progress;
  EXPECT_TRUE(refused(save(saved.cache, saved.directory / "b.kvs", save_options), Code::io, {"stopped by its caller"}));
  EXPECT_EQ(saved.directory.files(), 1u);
}

// --- numbers that are wrong under checksums that are right -----------------------------------------------------------

struct Forged {
  const char* name;
  const char* message;
  std::function<void(core::TableImage&)> change;
};
void PrintTo(const Forged& f, std::ostream* out) {
  *out << f.name;
}

class SnapshotTables : public testing::TestWithParam<Forged> {};

Status write_forged(const std::string& path, const SnapshotFile& file, const core::TableImage& image,
                    const std::function<void(snapshot::Content&)>& change = {}) {
  snapshot::Content content{
      .stored = file.stored(),
      .name = {},
      .model = {},
      .metadata = {},
      .image = &image,
      .tokens = {},
      .encoded_bytes = file.slot_bytes(core::Pool::encoded),
      .exact_bytes = file.slot_bytes(core::Pool::exact),
      .slots = [&](core::Pool pool, std::span<const std::int32_t> numbers, const core::TakeSlots& take) -> Status {
        const std::vector<std::byte> zeros(file.slot_bytes(pool));
        for (std::size_t n = 0; n < numbers.size(); ++n) {
          if (Status s = take(n, zeros); !s) return s;
        }
        return {};
      }};
  if (change) change(content);
  return snapshot::write(path, content, nullptr, {});
}

TEST_P(SnapshotTables, AreJudgedByTheRulesOfACache) {
  const Saved saved;
  const auto file = SnapshotFile::open(saved.path).value();
  core::TableImage image = file->image();
  const std::string path = saved.directory / "forged.kvs";
  write_forged(path, *file, image).value();
  ASSERT_TRUE(Snapshot::open(path).ok()) << Snapshot::open(path).message();
  GetParam().change(image);
  write_forged(path, *file, image).value();
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::bad_file, {"forged.kvs", GetParam().message}));
}

// The first sequence: 200 tokens, page 0 a sink, page 1 encoded with an exact copy, pages 2 and 3 exact.
std::vector<Forged> forgeries() {
  using Image = core::TableImage;
  return {
      {"length", "\"pages\" ends before the 5 pages of sequence 1", [](Image& i) { i.sequences[0].length = 500; }},
      {"negative_length", "has -1 tokens", [](Image& i) { i.sequences[0].length = -1; }},
      {"huge_length", "tokens", [](Image& i) { i.sequences[0].length = std::int64_t{1} << 62; }},
      {"first_page", "said to be released", [](Image& i) { i.sequences[0].first_page = 1; }},
      {"negative_first_page", "said to be released", [](Image& i) { i.sequences[0].first_page = -4; }},
      {"no_copies", "neither an exact nor an encoded copy",
       [](Image& i) {
         i.sequences[0].pages[1] = {-1, -1, 1};
       }},
      {"no_identity", "no identity", [](Image& i) { i.sequences[0].pages[1].identity = -1; }},
      {"no_sink", "sink page",
       [](Image& i) {
         i.sequences[0].pages[0] = {-1, 0, 0};
       }},
      {"no_encoded_copy", "no encoded copy", [](Image& i) { i.sequences[0].pages[1].encoded = -1; }},
      {"encoded_tail", "an encoded copy", [](Image& i) { i.sequences[0].pages[3].encoded = 1; }},
      {"slot_beyond", "out of order", [](Image& i) { i.sequences[1].pages[4].exact = 1 << 30; }},
      {"slot_below", "has the number -2", [](Image& i) { i.sequences[1].pages[4].exact = -2; }},
      {"slot_of_another_page", "is of page", [](Image& i) { i.sequences[0].pages[3].exact = 0; }},
      {"unused_slots", "of which its sequences use", [](Image& i) { i.encoded += 1; }},
      {"too_few_slots", "out of order", [](Image& i) { i.exact -= 1; }},
      {"too_many_pages", "1 pages and 0 token ids are more",
       [](Image& i) { i.sequences.back().pages.push_back(i.sequences.back().pages.back()); }},
  };
}

INSTANTIATE_TEST_SUITE_P(, SnapshotTables, testing::ValuesIn(forgeries()),
                         [](const testing::TestParamInfo<Forged>& each) { return std::string(each.param.name); });

TEST(SnapshotRefusal, FewerTokenIdsThanTokens) {
  const Saved saved;
  const auto file = SnapshotFile::open(saved.path).value();
  const std::string path = saved.directory / "forged.kvs";
  const std::vector<std::int64_t> ids{7, 8, 9};
  write_forged(path, *file, file->image(), [&](snapshot::Content& c) {
    c.tokens.resize(c.image->sequences.size());
    c.tokens[0] = ids;
  }).value();
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::bad_file, {"sequence 0 has 200 tokens and 3 token ids"}));
}

TEST(SnapshotRefusal, AConfigurationThatNoCacheHas) {
  const Saved saved;
  const auto file = SnapshotFile::open(saved.path).value();
  const std::string path = saved.directory / "forged.kvs";
  const auto opened = [&](const std::function<void(snapshot::Content&)>& change) {
    write_forged(path, *file, file->image(), change).value();
    return Snapshot::open(path).status();
  };
  using Content = snapshot::Content;
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.config.k = "tq7"; }), Code::bad_file, {"tq7"}));
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.config.head_dim = 1 << 30; }), Code::bad_file, {"head_dim"}));
  for (const int size : {-1, 0})
    EXPECT_TRUE(
        refused(opened([&](Content& c) { c.stored.config.v_head_dim = size; }), Code::bad_file, {"v_head_dim"}));
  const auto latents = [&](int latent, int rope, int kv_heads) {
    return opened([&](Content& c) {
      c.stored.config.latent = latent, c.stored.config.rope = rope, c.stored.config.kv_heads = kv_heads;
    });
  };
  EXPECT_TRUE(refused(latents(32, 33, 1), Code::bad_file, {"latent is 32 and rope 33", "rope is head_dim"}));
  EXPECT_TRUE(refused(latents(33, 32, 1), Code::bad_file, {"latent is 33 and rope 32", "latent is v_head_dim"}));
  EXPECT_TRUE(refused(latents(32, 32, 2), Code::bad_file, {"latent is 32 and rope 32", "kv_heads is 1"}));
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.config.v_head_dim = 577; }), Code::bad_file, {"v_head_dim"}));
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.config.window_sinks = std::int64_t{1} << 62; }), Code::bad_file,
                      {"window_sinks"}));
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.exact.reset(); }), Code::bad_file, {"of which dtype"}));
  EXPECT_TRUE(refused(opened([](Content& c) { c.stored.config.k_levels = {1, 2}; }), Code::bad_file, {"k_levels"}));
  // Pages of another size than the configuration's are found when they are to be stored.
  write_forged(path, *file, file->image(), [](Content& c) { c.stored.config.k = "tq8"; }).value();
  EXPECT_TRUE(refused(load(path).status(), Code::bad_file, {"pages have", "those of its configuration have"}));
  write_forged(path, *file, file->image(), [](Content& c) { c.stored.config.v_head_dim = 64; }).value();
  EXPECT_TRUE(refused(load(path).status(), Code::invalid_argument, {"stored_v_head_dim = 32 and 64"}));
}

TEST(SnapshotRefusal, OtherVersionsAndOtherFiles) {
  const Saved saved;
  const auto file = SnapshotFile::open(saved.path).value();
  const std::string path = saved.directory / "other.kvs";
  io::write_safetensors(path, {}, {{"a", "b"}}).value();
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::bad_file, {"is no snapshot"}));
  io::write_safetensors(path, {}, {{snapshot::kVersionKey, "2"}, {snapshot::kWrittenBy, "9.1.0"}}).value();
  EXPECT_TRUE(
      refused(Snapshot::open(path).status(), Code::unsupported, {"layout \"2\"", "kvant 9.1.0", "reads layout 1"}));
  io::write_safetensors(path, {}, {{snapshot::kVersionKey, "1"}}).value();
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::bad_file, {"last tensor"}));
  EXPECT_TRUE(refused(Snapshot::open(saved.directory / "none").status(), Code::io, {"cannot open"}));
  EXPECT_TRUE(refused(SnapshotFile::parse({}, "empty").status(), Code::bad_file, {"0 bytes"}));
}

// --- files that do not fit -------------------------------------------------------------------------------------------

TEST(SnapshotRefusal, WhatTheCallerRequires) {
  const Saved saved;
  const Snapshot snapshot = Snapshot::open(saved.path).value();
  LoadOptions options;
  options.model = "nano";
  options.metadata = {{"user", "ann"}};
  options.sequences = std::vector<std::int64_t>{0};
  options.tokens = std::vector<std::vector<std::int64_t>>{std::vector<std::int64_t>(200, 7)};
  EXPECT_TRUE(snapshot.load(options).ok()) << snapshot.load(options).message();
  (*options.tokens)[0][150] = 8;
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"differ from position 150 on"}));
  options.tokens->push_back({});
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"tokens has 2 lists"}));
  options.tokens.reset();
  options.sequences = std::vector<std::int64_t>{2};
  EXPECT_TRUE(
      refused(snapshot.load(options).status(), Code::invalid_argument, {"sequences[0] = 2", "has 2 sequences"}));
  options.sequences.reset();
  options.metadata["user"] = "bob";
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"\"user\" is \"ann\"", "\"bob\""}));
  options.metadata = {{"seed", "1"}};
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"\"seed\" is missing"}));
  options.metadata = {{"kvant.k", "tq4"}};
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"\"kvant.k\"", "kvant's own"}));
  options.metadata.clear();
  options.model = "mini";
  EXPECT_TRUE(refused(snapshot.load(options).status(), Code::invalid_argument, {"\"nano\"", "\"mini\""}));
  EXPECT_TRUE(refused(load(saved.path, {.device = "cuda"}).status(), Code::invalid_argument, {"capacity_tokens = 0"}));
}

TEST(SnapshotRefusal, ACacheOfAnotherKind) {
  const Saved saved;
  const Snapshot snapshot = Snapshot::open(saved.path).value();
  const auto into = [&](const std::function<void(CacheConfig&)>& change) {
    CacheConfig c = config();
    change(c);
    Cache cache = make(c);
    const Status status = snapshot.load_into(cache).status();
    EXPECT_TRUE(status.ok() || cache.impl().table().sequences().empty());
    return status;
  };
  EXPECT_TRUE(into([](CacheConfig&) {}).ok());
  EXPECT_TRUE(into([](CacheConfig& c) { c.capacity_tokens = 64 * 7; }).ok());
  const Code code = Code::invalid_argument;
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.layers = 3; }), code, {"differ in layers = 2 and 3"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.k = "tq3"; }), code, {"k = tq4 and tq3"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.tail_pages = 2; }), code, {"tail_pages = 1 and 2"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.window = 64; }), code, {"window = 0 and 64"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.k_centre = KeyCentre::none; }), code, {"k_centre = page and none"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.exact = Dtype::f16; }), code, {"exact pages in bf16 and f16"}));
  EXPECT_TRUE(refused(into([](CacheConfig& c) { c.capacity_tokens = 64 * 5; }), Code::out_of_capacity,
                      {"the snapshot needs 6 more pages", "5 of the cache's 5 are free"}));
  CacheConfig calibrated = config();
  calibrated.k_basis = BasisKind::calibrated;
  calibrated.bases = random_bases(2, 2, 32, 3, false);
  const Saved other(calibrated);
  calibrated.bases = random_bases(2, 2, 32, 4, false);
  Cache cache = make(calibrated);
  EXPECT_TRUE(
      refused(Snapshot::open(other.path).value().load_into(cache).status(), code, {"the keys' calibrated bases"}));
}

// With a base each page is read twice: first for its checksum. Both must be of the same bytes.
TEST(SnapshotRefusal, APageThatChangesDuringASave) {
  const Saved saved;
  const auto file = SnapshotFile::open(saved.path).value();
  for (const bool changes : {false, true}) {
    int calls = 0;
    snapshot::Content content{
        .stored = file->stored(),
        .name = {},
        .model = {},
        .metadata = {},
        .image = &file->image(),
        .tokens = {},
        .encoded_bytes = file->slot_bytes(core::Pool::encoded),
        .exact_bytes = file->slot_bytes(core::Pool::exact),
        .slots = [&](core::Pool pool, std::span<const std::int32_t> numbers, const core::TakeSlots& take) -> Status {
          for (std::size_t n = 0; n < numbers.size(); ++n) {
            std::vector<std::byte> bytes(file->slot_bytes(pool), static_cast<std::byte>(numbers[n] + 77));
            if (changes && ++calls > file->info().encoded_pages + file->info().exact_pages + 1) bytes[5] = {};
            if (Status s = take(n, bytes); !s) return s;
          }
          return {};
        }};
    const Status status = snapshot::write(saved.directory / "next.kvs", content, file.get(), {});
    if (changes) {
      EXPECT_TRUE(refused(status, Code::internal, {"a page changed while it was saved"}));
    } else {
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(Snapshot::open(saved.directory / "next.kvs").value().verify().ok());
      std::filesystem::remove(saved.directory / "next.kvs");
    }
    EXPECT_EQ(saved.directory.files(), 1u);
  }
}

TEST(SnapshotRefusal, WhatCannotBeSaved) {
  const Saved saved;
  Cache cache = make(config());
  const SequenceId id = cache.add_sequence();
  append(cache, id, 1, 10).value();
  reserve(cache, id, 5).value();
  const std::string path = saved.directory / "b.kvs";
  EXPECT_TRUE(refused(save(cache, path), Code::invalid_argument, {"layer 0 of its newest step", "not written yet"}));
  cache.truncate(id, 10).value();
  const auto with = [&](const std::function<void(SaveOptions&)>& change) {
    SaveOptions options;
    change(options);
    return save(cache, path, options);
  };
  const Code code = Code::invalid_argument;
  using Ids = std::vector<SequenceId>;
  EXPECT_TRUE(refused(with([&](SaveOptions& o) { o.sequences = Ids{id, id}; }), code, {"appears twice"}));
  EXPECT_TRUE(refused(with([&](SaveOptions& o) { o.sequences = Ids{SequenceId{77}}; }), code, {"sequences[0] = 77"}));
  EXPECT_TRUE(refused(with([](SaveOptions& o) { o.tokens = {{1, 2}}; }), code, {"tokens[0] has 2 ids", "10 tokens"}));
  EXPECT_TRUE(refused(with([](SaveOptions& o) { o.tokens = {{}, {}}; }), code, {"2 lists for 1 sequences"}));
  EXPECT_TRUE(refused(with([](SaveOptions& o) { o.metadata["kvant.k"] = ""; }), code, {"kvant's own"}));
  EXPECT_TRUE(refused(with([](SaveOptions& o) { o.metadata["a"] = "\xff"; }), code, {"UTF-8"}));
  EXPECT_TRUE(refused(with([](SaveOptions& o) { o.metadata["a"] = std::string(1, '\0'); }), code, {"holds a NUL"}));
  EXPECT_TRUE(refused(save(cache, ""), code, {"the path is empty"}));
  EXPECT_TRUE(refused(save(cache, saved.directory / "no/folder.kvs"), Code::io, {"create a file beside it"}));
  EXPECT_EQ(saved.directory.files(), 1u);
}

}  // namespace
}  // namespace kvant
