// Snapshots: a cache that was saved and loaded has the pages, the sharing and the answers of the one that was not, and
// goes on so.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>

#include "snapshot/save.hpp"
#include "support/bases.hpp"
#include "support/draw.hpp"
#include "support/fake_device.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using namespace test;

struct Trial {
  const char* name;
  CacheConfig config;
  Dtype input = Dtype::f32;
};
void PrintTo(const Trial& t, std::ostream* out) {
  *out << t.name;
}

CacheConfig with(CacheConfig c, const std::function<void(CacheConfig&)>& change) {
  change(c);
  return c;
}

std::function<void(CacheConfig&)> latents(int latent, int rope) {
  return [=](CacheConfig& c) {
    c.latent = latent, c.rope = rope;
    c.kv_heads = c.head_dim = c.v_head_dim = 0;
  };
}

std::vector<Trial> trials() {
  std::vector<Trial> all{
      {"defaults", config("tq6", "tq4")},
      {"all_encoded", config("tq4", "tq4", 0, 0)},
      {"sinks_only", config("tq5", "tq3", 2, 0)},
      {"long_tail", config("tq8", "tq2", 0, 3)},
      {"fp8", config("fp8", "fp8")},
      {"f32", config("f32", "f32")},
      {"bf16_and_tq", config("bf16", "tq4")},
      {"no_centre", with(config("tq3", "tq5", 0, 0), [](CacheConfig& c) { c.k_centre = KeyCentre::none; })},
      {"padded", config("tq6", "tq4", 1, 1, 72)},
      {"d576", with(config("tq6", "tq4", 1, 1, 576), [](CacheConfig& c) { c.layers = c.kv_heads = 1; })},
      {"two_head_dims", config("tq6", "tq4", 1, 1, 96, 40)},
      {"latent", with(config("tq8", "tq4"), latents(64, 32))},
      {"latent_uncentred",
       with(config("tq8", "tq4", 1, 0), [](CacheConfig& c) { latents(64, 32)(c), c.v_centre = KeyCentre::none; })},
      {"latent_padded", with(config("tq6", "fp8", 0, 0), latents(40, 72))},
      {"latent_of_one_size", with(config("tq4", "tq6", 0, 1), latents(32, 32))},
      {"wide_values", config("tq4", "tq8", 0, 0, 32, 128)},
      {"groups", with(config("tq6", "tq8", 0, 0, 256), [](CacheConfig& c) { c.kv_heads = 1; })},
      {"exact_f16", config("tq4", "tq4"), Dtype::f16},
      {"exact_f32", with(config("tq4", "tq4"), [](CacheConfig& c) { c.exact = Dtype::f32; })},
      {"window", with(config("tq4", "fp8"),
                      [](CacheConfig& c) {
                        c.window = 100;
                        c.window_sinks = 70;
                        c.rollback_tokens = 150;
                      })},
      {"ring", with(config("tq6", "tq4"), [](CacheConfig& c) { c.window = 64; })},
      {"bounded", with(config("tq6", "tq4"), [](CacheConfig& c) { c.capacity_tokens = 64 * 512; })},
  };
  CacheConfig calibrated = config("tq4", "tq4");
  calibrated.k_basis = calibrated.v_basis = BasisKind::calibrated;
  calibrated.bases = random_bases(2, 2, 32, 5, true);
  all.push_back({"calibrated", calibrated});
  calibrated.v_head_dim = 64;
  calibrated.bases = random_bases(2, 2, 32, 5, true, 64);
  all.push_back({"calibrated_two_head_dims", calibrated});
  calibrated.v_basis = BasisKind::automatic;
  all.push_back({"calibrated_keys", calibrated});
  return all;
}

class SnapshotRoundTrip : public testing::TestWithParam<Trial> {};

TEST_P(SnapshotRoundTrip, GoesOnBitForBit) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Cache cache = Cache::create(GetParam().config).value();
    Histories<Cache> history(seed, GetParam().input);
    history.twins.push_back({&cache, {}});
    for (int i = 0; i < random_steps(60); ++i) history.random_step();
    SaveOptions options;
    options.sequences = history.twins[0].ids;
    ASSERT_TRUE(save(cache, path, options).ok()) << save(cache, path, options).message();

    Loaded loaded = load(path).value();
    expect_same(contents(cache.impl(), history.twins[0].ids),
                contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
    history.twins.push_back({&loaded.cache, loaded.sequences});
    EXPECT_EQ(cache.memory().tokens, loaded.cache.memory().tokens);
    EXPECT_EQ(cache.memory().encoded_bytes, loaded.cache.memory().encoded_bytes);
    EXPECT_EQ(cache.memory().exact_bytes, loaded.cache.memory().exact_bytes);
    if (HasFailure()) return;
    for (int step = 0; step < random_steps(64); ++step) {
      history.random_step();
      for (std::size_t i = 0; i < history.sequences(); ++i) {
        const auto seed_of = static_cast<std::uint64_t>(step) * 8 + i;
        const int q_len = step % 4 == 0 ? 3 : 1;
        ASSERT_TRUE(same_bits(answers(cache, history.twins[0].ids[i], q_len, seed_of),
                              answers(loaded.cache, history.twins[1].ids[i], q_len, seed_of)))
            << "step " << step << ", sequence " << i;
      }
    }
    history.expect_same_contents();
  }
}

INSTANTIATE_TEST_SUITE_P(, SnapshotRoundTrip, testing::ValuesIn(trials()),
                         [](const testing::TestParamInfo<Trial>& each) { return std::string(each.param.name); });

// --- what a file has -------------------------------------------------------------------------------------------------

// Files of one size are those of versions that knew one: they do not name the values'.
// A file says that values are latents, and goes to a cache that has them.
TEST(Snapshot, SaysThatValuesAreLatents) {
  const TemporaryDirectory directory;
  const std::string path = directory / "latent.kvs";
  for (const int latent : {64, 32}) {
    CacheConfig own = with(config("tq8", "tq4", 1, 1), latents(latent, 32)),
                two = config("tq8", "tq4", 1, 1, 32, latent);
    two.kv_heads = 1;
    Cache cache = Cache::create(own).value();
    cache.add_sequence();
    save(cache, path).value();
    const SnapshotInfo info = Snapshot::open(path).value().info();
    EXPECT_EQ(info.fields.at("latent"), std::to_string(latent));
    EXPECT_EQ(info.fields.at("rope"), "32");
    EXPECT_EQ(info.config.latent, latent);
    EXPECT_EQ(load(path).value().cache.config().latent, latent);
    EXPECT_EQ(info.fields.at("v_centre"), "page");
    own.v_centre = KeyCentre::none;
    Cache uncentred = Cache::create(own).value();
    EXPECT_TRUE(refused(Snapshot::open(path).value().load_into(uncentred).status(), Code::invalid_argument,
                        {"v_centre = page and none"}));
    Cache heads = Cache::create(two).value();
    EXPECT_TRUE(refused(Snapshot::open(path).value().load_into(heads).status(), Code::invalid_argument,
                        {latent == 64 ? "latent = 64 and 0" : "latent = 32 and 0"}));
    EXPECT_TRUE(refused(copy_sequences(cache, {}, heads).status(), Code::invalid_argument, {"latent = "}));
    save(heads, path).value();
    EXPECT_FALSE(Snapshot::open(path).value().info().fields.contains("latent"));
    EXPECT_FALSE(Snapshot::open(path).value().info().fields.contains("v_centre"));
  }
}

TEST(Snapshot, NamesTheSizeOfValuesWhereItIsAnother) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  for (const int v_head_dim : {0, 32, 72}) {
    Cache cache = make(config("tq6", "tq4", 1, 1, 32, v_head_dim));
    const SequenceId id = cache.add_sequence();
    append(cache, id, 1, 100).value();
    SaveOptions options;
    options.sequences = {id};
    save(cache, path, options).value();
    const Snapshot snapshot = Snapshot::open(path).value();
    const SnapshotInfo& info = snapshot.info();
    EXPECT_EQ(info.fields.contains("v_head_dim"), v_head_dim == 72);
    EXPECT_EQ(info.fields.contains("stored_v_head_dim"), v_head_dim == 72);
    EXPECT_EQ(info.config.v_head_dim, v_head_dim == 72 ? 72 : 32);
    EXPECT_EQ(info.stored_v_head_dim, v_head_dim == 72 ? 80 : 32);
    Cache other = make(config("tq6", "tq4", 1, 1, 32, v_head_dim == 72 ? 0 : 72));
    const Status refusal = snapshot.load_into(other).status();
    EXPECT_TRUE(refused(refusal, Code::invalid_argument,
                        {v_head_dim == 72 ? "v_head_dim = 72 and 32" : "v_head_dim = 32 and 72"}));
  }
}

TEST(Snapshot, SaysWhatItHas) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  Cache cache = make(config("tq6", "tq4"));
  const SequenceId id = cache.add_sequence();
  append(cache, id, 1, 200, Dtype::f32).value();
  const SequenceId other = cache.fork(id).value();
  append(cache, other, 1000, 30).value();
  SaveOptions options;
  options.name = "chat";
  options.model = "nano";
  options.metadata = {{"user", "ann"}, {"\xc3\xa4", "\xe2\x82\xac \" \\"}};
  options.tokens = {std::vector<std::int64_t>(200, 7), {}};
  save(cache, path, options).value();

  const Snapshot snapshot = Snapshot::open(path).value();
  const SnapshotInfo& info = snapshot.info();
  EXPECT_EQ(info.name, "chat");
  EXPECT_EQ(info.model, "nano");
  EXPECT_EQ(info.metadata, options.metadata);
  EXPECT_EQ(info.written_by, KVANT_VERSION);
  EXPECT_EQ(info.config.k, "tq6");
  EXPECT_EQ(info.config.layers, 2);
  EXPECT_EQ(info.exact, Dtype::bf16);
  ASSERT_EQ(info.sequences.size(), 2u);
  EXPECT_EQ(info.sequences[0].length, 200);
  EXPECT_EQ(info.sequences[0].tokens, options.tokens[0]);
  EXPECT_EQ(info.sequences[1].length, 230);
  EXPECT_TRUE(info.sequences[1].tokens.empty());
  EXPECT_EQ(info.file_bytes, static_cast<std::int64_t>(std::filesystem::file_size(path)));
  EXPECT_TRUE(snapshot.verify().ok());

  struct stat s {};
  ASSERT_EQ(::stat(path.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 0777, 0600u);
  EXPECT_EQ(directory.files(), 1u);
}

TEST(Snapshot, SharedPagesAreInTheFileOnce) {
  const TemporaryDirectory directory;
  Cache cache = make(config("tq6", "tq4", 0, 0));
  const SequenceId id = cache.add_sequence();
  append(cache, id, 1, 64 * 20).value();
  save(cache, directory / "one.kvs").value();
  for (int i = 0; i < 9; ++i)
    append(cache, cache.fork(id).value(), 5000 + 100 * static_cast<std::uint64_t>(i), 5).value();
  save(cache, directory / "ten.kvs").value();
  const Loaded loaded = load(directory / "ten.kvs").value();
  EXPECT_EQ(loaded.sequences.size(), 10u);
  EXPECT_EQ(loaded.cache.memory().encoded_bytes, cache.memory().encoded_bytes);
  EXPECT_EQ(Snapshot::open(directory / "one.kvs").value().info().encoded_pages, 20);
  EXPECT_EQ(Snapshot::open(directory / "ten.kvs").value().info().encoded_pages, 20 + 9);
}

TEST(Snapshot, EqualCachesGiveEqualFiles) {
  const TemporaryDirectory directory;
  // Tokens that a page had before a truncation, or as another sequence's page, are not in the file.
  for (const int ends : {0, 1}) {
    Cache first = make(config("tq3", "tq6", ends, ends)), second = make(config("tq3", "tq6", ends, ends));
    const SequenceId a = first.add_sequence(), gone = second.add_sequence();
    append(first, a, 1, 77).value();
    append(second, gone, 900, 130).value();
    second.remove(gone).value();
    const SequenceId b = second.add_sequence();
    append(second, b, 1, 77).value();
    append(second, b, 500, 40).value();
    second.truncate(b, 77).value();
    save(first, directory / "first.kvs").value();
    save(second, directory / "second.kvs").value();
    const auto bytes = [&](const char* name) {
      return io::SafeTensors::open(directory / name).value().require("checksums").value()->read().value();
    };
    EXPECT_TRUE(bytes("first.kvs") == bytes("second.kvs")) << ends;
  }
}

TEST(Snapshot, SomeSequences) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  Cache cache = make(config("tq6", "tq4"));
  std::vector<SequenceId> ids;
  for (int i = 0; i < 4; ++i) {
    ids.push_back(cache.add_sequence());
    append(cache, ids.back(), 1000 * static_cast<std::uint64_t>(i + 1), 100 * (i + 1)).value();
  }
  SaveOptions options;
  options.sequences = std::vector<SequenceId>{ids[3], ids[1], ids[0]};
  save(cache, path, options).value();
  LoadOptions some;
  some.sequences = std::vector<std::int64_t>{2, 0};
  Loaded loaded = load(path, some).value();
  ASSERT_EQ(loaded.sequences.size(), 2u);
  const std::vector<SequenceId> wanted{ids[0], ids[3]};
  expect_same(contents(cache.impl(), wanted), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));

  // Into a cache that has sequences of its own, as often as one likes.
  const Snapshot snapshot = Snapshot::open(path).value();
  const auto more = snapshot.load_into(loaded.cache).value();
  ASSERT_EQ(more.size(), 3u);
  expect_same(contents(cache.impl(), *options.sequences), contents(loaded.cache.impl(), more, Remains::as_it_is));
  expect_same(contents(cache.impl(), wanted), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
}

// Slots below, at and above the size of the writer's buffer, which a slot fills, or passes by.
TEST(Snapshot, SlotsOfAnySize) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  for (const int layers : {3, 7, 8, 9, 17}) {
    CacheConfig c = small_config(layers);
    c.kv_heads = 1;
    c.head_dim = 256;
    c.k = c.v = "f32";
    c.sink_pages = c.tail_pages = 0;
    Cache cache = make(c);
    const SequenceId id = cache.add_sequence();
    append(cache, id, 1, 64 * 3 + 20).value();
    save(cache, path).value();
    const Snapshot snapshot = Snapshot::open(path).value();
    EXPECT_TRUE(snapshot.verify().ok()) << layers << ": " << snapshot.verify().message();
    Loaded loaded = snapshot.load().value();
    expect_same(contents(cache.impl(), {&id, 1}), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
  }
}

TEST(Snapshot, ACopyIsTheSameFile) {
  const TemporaryDirectory directory;
  Cache cache = make(trials().back().config);
  append(cache, cache.add_sequence(), 1, 300).value();
  SaveOptions options;
  options.metadata = {{"a", "b"}};
  save(cache, directory / "from.kvs", options).value();
  ASSERT_TRUE(Snapshot::open(directory / "from.kvs").value().copy(directory / "to.kvs").ok());
  EXPECT_TRUE(file_bytes(directory / "from.kvs") == file_bytes(directory / "to.kvs"));
}

TEST(Snapshot, AnEmptyCacheIsOne) {
  const TemporaryDirectory directory;
  const std::string path = directory / "empty.kvs";
  Cache cache = make(config("tq6", "tq4"));
  save(cache, path).value();
  EXPECT_EQ(load(path).value().sequences.size(), 0u);
  cache.add_sequence();
  save(cache, path).value();
  Loaded loaded = load(path).value();
  ASSERT_EQ(loaded.sequences.size(), 1u);
  // Its first write still chooses the dtype of exact pages.
  append(loaded.cache, loaded.sequences[0], 1, 10, Dtype::f16).value();
  EXPECT_EQ(loaded.cache.impl().exact_dtype(), Dtype::f16);
}

// --- files that build on others --------------------------------------------------------------------------------------

TEST(SnapshotBase, AGrowingChatCostsWhatItAdds) {
  const TemporaryDirectory directory;
  const auto name = [&](int turn) { return directory / ("turn" + std::to_string(turn) + ".kvs").c_str(); };
  for (const int ends : {0, 1}) {
    Cache cache = make(config("tq6", "tq4", ends, ends, 64));
    const SequenceId id = cache.add_sequence();
    append(cache, id, 1, 64 * 60 + 11).value();
    save(cache, name(0)).value();
    const std::int64_t whole = Snapshot::open(name(0)).value().info().file_bytes;
    for (int turn = 1; turn <= 20; ++turn) {
      append(cache, id, 10000 * static_cast<std::uint64_t>(turn), 100).value();
      SaveOptions options;
      options.base = name(turn - 1);
      std::int64_t done = 0, all = 0;
      options.progress = [&](std::int64_t d, std::int64_t t) { return done = d, all = t, true; };
      const Status saved = save(cache, name(turn), options);
      ASSERT_TRUE(saved.ok()) << saved.message();
      EXPECT_TRUE(done == all && all > 0) << done << " of " << all;
      const Snapshot snapshot = Snapshot::open(name(turn)).value();
      EXPECT_LT(snapshot.info().file_bytes, whole / 3) << "turn " << turn;
      EXPECT_TRUE(snapshot.verify().ok());
      Loaded loaded = snapshot.load().value();
      expect_same(contents(cache.impl(), {&id, 1}), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
      EXPECT_TRUE(same_bits(answers(cache, id, 1, 3), answers(loaded.cache, loaded.sequences[0], 1, 3)));
    }
    // One file of all of them needs none of them.
    const Snapshot last = Snapshot::open(name(20)).value();
    EXPECT_GT(last.info().bases.size(), 1u);
    last.copy(directory / "whole.kvs").value();
    for (int turn = 0; turn <= 20; ++turn) std::filesystem::remove(name(turn));
    Loaded loaded = load(directory / "whole.kvs").value();
    expect_same(contents(cache.impl(), {&id, 1}), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
  }
}

TEST(SnapshotBase, IsRefusedWhereItWouldNotHold) {
  const TemporaryDirectory directory, elsewhere;
  Cache cache = make(config("tq6", "tq4", 0, 0)), other = make(config("tq4", "tq4", 0, 0));
  const SequenceId id = cache.add_sequence();
  append(cache, id, 1, 300).value();
  append(other, other.add_sequence(), 1, 300).value();
  const std::string base = directory / "base.kvs", path = directory / "next.kvs";
  save(cache, base).value();
  SaveOptions options;
  options.base = base;
  EXPECT_TRUE(refused(save(cache, base, options), Code::invalid_argument, {"choose another name"}));
  EXPECT_TRUE(refused(save(cache, elsewhere / "next.kvs", options), Code::invalid_argument, {"side by side"}));
  EXPECT_TRUE(refused(save(other, path, options), Code::invalid_argument, {"k = tq4 and tq6"}));
  options.base = directory / "none.kvs";
  EXPECT_TRUE(refused(save(cache, path, options), Code::io, {"base: ", "none.kvs"}));
  EXPECT_EQ(directory.files(), 1u);

  options.base = base;
  append(cache, id, 1000, 100).value();
  save(cache, path, options).value();
  std::filesystem::rename(base, directory / "away.kvs");
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::io, {"next.kvs", "needs \"base.kvs\""}));
  save(cache, base).value();  // a file of that name, and another one
  EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::bad_file, {"needs \"base.kvs\"", "another file now"}));
  std::filesystem::rename(directory / "away.kvs", base);
  EXPECT_TRUE(load(path).ok());
}

// --- a released file -------------------------------------------------------------------------------------------------

// Exact floats, the same with every compiler and C library.
void append_exact(Cache& cache, SequenceId id, std::uint64_t seed, std::int64_t tokens) {
  testing_support::Draw draw(seed);
  const int values = static_cast<int>(tokens) * cache.config().kv_heads * cache.config().head_dim;
  const std::vector<float> keys = draw.exact(values), rows = draw.exact(values);
  const auto view = [&](const std::vector<float>& x) {
    return TensorView::of(x.data(), tokens, cache.config().kv_heads, cache.config().head_dim);
  };
  cache.append(id, 0, view(keys), view(rows)).value();
}

// tests/frozen/snapshot_1.safetensors was written by 0.1.0. Later versions read it, and write the same tensors of the
// same cache. A new layout gets a new file beside it.
TEST(Snapshot, AFileOfTheFirstVersion) {
  CacheConfig c = small_config(1);
  c.kv_heads = 1;
  c.k = "tq4";
  c.v = "tq2";
  c.exact = Dtype::bf16;
  Cache cache = make(c);
  const SequenceId id = cache.add_sequence();
  append_exact(cache, id, 1, 130);
  const SequenceId other = cache.fork(id).value();
  append_exact(cache, other, 2, 70);
  SaveOptions options;
  options.name = "frozen";
  options.model = "none";
  options.metadata = {{"text", "\xc3\xa4"}};
  options.tokens = {std::vector<std::int64_t>(130, 9), {}};
  const TemporaryDirectory directory;
  save(cache, directory / "now.kvs", options).value();

  const std::string frozen = source_path("tests/frozen/snapshot_1.safetensors");
  const auto then = io::SafeTensors::open(frozen).value(), now = io::SafeTensors::open(directory / "now.kvs").value();
  ASSERT_EQ(then.tensors().size(), now.tensors().size());
  for (const io::TensorInfo& tensor : then.tensors()) {
    if (tensor.name == "checksums") continue;  // the header's has the version of kvant in it
    EXPECT_TRUE(tensor.read().value() == now.require(tensor.name).value()->read().value()) << tensor.name;
  }
  const Snapshot snapshot = Snapshot::open(frozen).value();
  EXPECT_TRUE(snapshot.verify().ok());
  EXPECT_EQ(snapshot.info().written_by, "0.1.0");
  EXPECT_EQ(snapshot.info().metadata, options.metadata);
  EXPECT_EQ(snapshot.info().sequences[0].tokens, options.tokens[0]);
  Loaded loaded = snapshot.load().value();
  const std::vector<SequenceId> both{id, other};
  expect_same(contents(cache.impl(), both), contents(loaded.cache.impl(), loaded.sequences, Remains::as_it_is));
  EXPECT_TRUE(same_bits(answers(cache, other, 1, 3), answers(loaded.cache, loaded.sequences[1], 1, 3)));
}

// --- devices ---------------------------------------------------------------------------------------------------------

// Pages of a device come and go through its own calls: here those of a fake one.
TEST(SnapshotDevice, FromADeviceToTheHostAndBack) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    CacheConfig c = config("tq4", "fp8", seed % 2 == 0 ? 1 : 0, seed % 2 == 0 ? 1 : 0);
    c.k_centre = KeyCentre::none;  // the fake device's kernels make no centres
    c.exact = Dtype::f32;
    if (seed == 3) c.window = 100;
    c.device = "cuda";
    c.capacity_tokens = 64 * 256;
    c.max_sequences = 8;
    const auto device = CacheImpl::create(c, &kFake).value();
    Histories<CacheImpl> history(seed);
    history.twins.push_back({device.get(), {}});
    for (int i = 0; i < random_steps(60); ++i) history.random_step();
    // Slots that are reserved ahead have no bytes yet.
    if (history.sequences() > 0) {
      const Append ahead{history.twins[0].ids[0], 130};
      ASSERT_TRUE(device->reserve_ahead({&ahead, 1}).ok());
    }
    SaveOptions options;
    options.sequences = history.twins[0].ids;
    const Status saved = snapshot::save(*device, path, options);
    ASSERT_TRUE(saved.ok()) << saved.message();

    const auto file = snapshot::SnapshotFile::open(path).value();
    const auto host = CacheImpl::create(snapshot::config_for(*file, {}).value()).value();
    const auto ids = snapshot::load_into(*host, *file, {});
    ASSERT_TRUE(ids.ok()) << ids.message();
    history.twins.push_back({host.get(), *ids});
    CacheConfig again = c;
    const auto back = CacheImpl::create(again, &kFake).value();  // FakeStore::newest
    const auto restored = snapshot::load_into(*back, *file, {});
    ASSERT_TRUE(restored.ok()) << restored.message();
    history.twins.push_back({back.get(), *restored});
    history.expect_same_contents();
    for (const SequenceId id : *restored) fake_hooks().check_tables(*back, id);
    for (int i = 0; i < random_steps(64) && !HasFailure(); ++i) history.random_step();
    history.expect_same_contents();
  }
}

TEST(SnapshotDevice, AFailedUploadLeavesNoSequence) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  CacheConfig c = config("tq4", "fp8");
  c.k_centre = KeyCentre::none;
  c.exact = Dtype::f32;
  Cache host = make(c);
  append(host, host.add_sequence(), 1, 300).value();
  save(host, path).value();
  c.device = "cuda";
  c.capacity_tokens = 64 * 8;
  c.max_sequences = 2;
  const auto device = CacheImpl::create(c, &kFake).value();
  const auto file = snapshot::SnapshotFile::open(path).value();
  FakeStore::newest->refuses_upload = {Code::io, "the bus is gone"};
  EXPECT_TRUE(refused(snapshot::load_into(*device, *file, {}).status(), Code::io, {"the bus is gone"}));
  EXPECT_TRUE(device->table().sequences().empty());
  EXPECT_EQ(device->table().pages_held(), 0);
  FakeStore::newest->refuses_upload = {};
  EXPECT_TRUE(snapshot::load_into(*device, *file, {}).ok());
  EXPECT_TRUE(refused(snapshot::load_into(*device, *file, {}).status(), Code::out_of_capacity,
                      {"the snapshot needs 5 more pages", "3 of the cache's 8 are free"}));
  EXPECT_EQ(device->table().sequences().size(), 1u);
}

}  // namespace
}  // namespace kvant
