// Names and links of snapshots, files that build on others, and what a save may replace: whatever the names say, no
// save and no copy takes a file away from a snapshot that needs it.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "snapshot/bases.hpp"
#include "snapshot/file.hpp"
#include "snapshot/names.hpp"
#include "support/forge.hpp"
#include "support/sanitized.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using namespace test;
namespace fs = std::filesystem;

class SnapshotFiles : public testing::Test {
 protected:
  SnapshotFiles() : cache_(make(small())), id_(cache_.add_sequence()) { grow(300); }

  static CacheConfig small() {
    CacheConfig c = small_config(1);
    c.kv_heads = 1;
    return c;
  }
  void grow(std::int64_t tokens) {
    append(cache_, id_, next_, tokens).value();
    next_ += 1000;
  }
  std::string in(const std::string& name) { return directory_ / name.c_str(); }
  Status save_to(const std::string& name, const std::string& base = "") {
    SaveOptions options;
    if (!base.empty()) options.base = base.starts_with('/') ? base : in(base);
    return save(cache_, name.starts_with('/') ? name : in(name), options);
  }
  /// Tokens of the sequence in a file; -1: it cannot be read whole.
  std::int64_t tokens_in(const std::string& name) {
    const auto loaded = load(name.starts_with('/') ? name : in(name));
    return loaded.ok() ? loaded->cache.length(loaded->sequences[0]).value() : -1;
  }
  std::vector<std::string> bases_of(const std::string& name) { return Snapshot::open(in(name)).value().info().bases; }
  std::set<std::string> names() {
    std::set<std::string> all;
    for (const auto& each : fs::directory_iterator(in("."))) all.insert(each.path().filename());
    return all;
  }

  TemporaryDirectory directory_;
  Cache cache_;
  SequenceId id_;
  std::uint64_t next_ = 1;
};

using Names = std::vector<std::string>;

// --- what is not replaced --------------------------------------------------------------------------------------------

TEST_F(SnapshotFiles, ABaseIsNotReplacedByAnyOfItsNames) {
  save_to("1.kvs").value();
  grow(100);
  save_to("2.kvs", "1.kvs").value();
  grow(100);
  fs::create_directory(in("sub"));
  fs::create_directory_symlink(".", in("here"));
  fs::create_symlink("1.kvs", in("link"));
  fs::create_symlink("link", in("link_to_link"));
  fs::create_symlink(in("1.kvs"), in("absolute"));
  fs::create_symlink("../1.kvs", in("sub/back"));
  fs::create_hard_link(in("1.kvs"), in("hard"));
  const std::set<std::string> before = names();
  const auto bytes = file_bytes(in("1.kvs"));
  const Names all{"1.kvs",        "./1.kvs",  "sub/../1.kvs", "here/1.kvs", "link",
                  "link_to_link", "absolute", "sub/back",     "hard",       "here/here/link"};
  for (const std::string& target : all) {
    for (const std::string& base : all) {
      EXPECT_TRUE(refused(save_to(target, base), Code::invalid_argument, {"not written", "choose another name"}))
          << target << " with the base " << base;
    }
    // The base of the base, and the file that a copy is made of needs it.
    EXPECT_TRUE(refused(save_to(target, "2.kvs"), Code::invalid_argument, {"choose another name"})) << target;
    EXPECT_TRUE(refused(Snapshot::open(in("2.kvs")).value().copy(in(target)), Code::invalid_argument,
                        {"2.kvs\" needs the file of that name"}))
        << target;
  }
  EXPECT_TRUE(file_bytes(in("1.kvs")) == bytes);
  EXPECT_EQ(names(), before);
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  save_to("3.kvs", "here/here/link").value();
  EXPECT_EQ(bases_of("3.kvs"), Names{"1.kvs"});
  EXPECT_EQ(tokens_in("3.kvs"), 500);
}

TEST_F(SnapshotFiles, AFileThatOthersNeedIsNotReplaced) {
  const TemporaryDirectory elsewhere;
  save_to("1.kvs").value();
  save_to("other.kvs").value();  // the same bytes under a name that nobody needs
  grow(100);
  save_to("2.kvs", "1.kvs").value();
  fs::create_symlink(in("1.kvs"), elsewhere / "link");
  for (const std::string& target : {std::string("1.kvs"), elsewhere / "link"}) {
    EXPECT_TRUE(refused(save_to(target), Code::invalid_argument, {"\"2.kvs\" needs the file", "remove \"2.kvs\""}));
    EXPECT_TRUE(refused(Snapshot::open(in("2.kvs")).value().copy(target.starts_with('/') ? target : in(target)),
                        Code::invalid_argument, {"2.kvs\" needs the file"}));
  }
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  EXPECT_EQ(names(), (std::set<std::string>{"1.kvs", "other.kvs", "2.kvs"}));
  EXPECT_TRUE(save_to("other.kvs").ok());
  // The same snapshot once more takes nothing away.
  const Snapshot first = Snapshot::open(in("1.kvs")).value();
  EXPECT_TRUE(first.copy(in("1.kvs")).ok());
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  // Nor does a copy onto itself of a file with bases, which then needs none.
  EXPECT_TRUE(Snapshot::open(in("2.kvs")).value().copy(in("2.kvs")).ok());
  EXPECT_TRUE(bases_of("2.kvs").empty());
  EXPECT_TRUE(save_to("1.kvs").ok());
  EXPECT_EQ(tokens_in("2.kvs"), 400);
}

// Folders of links to files whose names are others.
TEST_F(SnapshotFiles, AFolderOfLinks) {
  save_to("1.kvs").value();
  grow(100);
  save_to("2.kvs", "1.kvs").value();
  fs::create_directory(in("files"));
  fs::rename(in("1.kvs"), in("files/aaaa"));
  fs::rename(in("2.kvs"), in("files/bbbb"));
  fs::create_symlink("files/aaaa", in("1.kvs"));
  fs::create_symlink("files/bbbb", in("2.kvs"));
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  EXPECT_TRUE(refused(Snapshot::open(in("files/bbbb")).status(), Code::io, {"needs \"1.kvs\""}));
  EXPECT_TRUE(refused(save_to("1.kvs"), Code::invalid_argument, {"\"2.kvs\" needs the file"}));
  // A file of that name beside the real one is another, and is passed over.
  fs::create_symlink("bbbb", in("files/1.kvs"));
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  fs::remove(in("1.kvs"));
  EXPECT_TRUE(refused(Snapshot::open(in("2.kvs")).status(), Code::bad_file, {"\"1.kvs\"", "another file now"}));
}

// A save sees before the rename what another program did while bytes were written.
TEST_F(SnapshotFiles, FilesThatChangeDuringTheSave) {
  save_to("1.kvs").value();
  grow(100);
  const auto during = [&](const std::string& name, const std::function<void()>& change) {
    SaveOptions options;
    options.base = in("1.kvs");
    options.progress = [&](std::int64_t done, std::int64_t total) {
      if (done == total) change();  // all pages are written, and the file has no name yet
      return true;
    };
    return save(cache_, in(name), options);
  };
  const auto meanwhile = "base \"1.kvs\" was replaced or removed meanwhile";
  EXPECT_TRUE(refused(during("2.kvs", [&] { fs::rename(in("1.kvs"), in("away")); }), Code::io, {meanwhile}));
  fs::rename(in("away"), in("1.kvs"));
  EXPECT_TRUE(
      refused(during("2.kvs", [&] { fs::copy_file(in("1.kvs"), in("new")), fs::rename(in("new"), in("1.kvs")); }),
              Code::io, {meanwhile}));
  EXPECT_TRUE(refused(during("2.kvs", [&] { fs::create_hard_link(in("1.kvs"), in("2.kvs")); }), Code::invalid_argument,
                      {"choose another name"}));
  EXPECT_EQ(tokens_in("1.kvs"), 300);
  fs::remove(in("2.kvs"));
  EXPECT_TRUE(during("2.kvs", [] {}).ok());
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  EXPECT_EQ(names(), (std::set<std::string>{"1.kvs", "2.kvs"}));
  // Another program's new snapshot needs the file that this save is about to replace.
  save_to("3.kvs").value();
  SaveOptions options;
  options.progress = [&](std::int64_t, std::int64_t) {
    SaveOptions other;
    other.base = in("3.kvs");
    Cache more = make(small());
    append(more, more.add_sequence(), 1, 300).value();
    EXPECT_TRUE(save(more, in("4.kvs"), other).ok());
    return true;
  };
  grow(100);
  EXPECT_TRUE(refused(save(cache_, in("3.kvs"), options), Code::invalid_argument, {"\"4.kvs\" needs the file"}));
  EXPECT_EQ(tokens_in("4.kvs"), 300);
}

// --- links -----------------------------------------------------------------------------------------------------------

TEST_F(SnapshotFiles, ALinkIsWrittenThrough) {
  const TemporaryDirectory elsewhere;
  save_to(elsewhere / "chat.kvs").value();
  fs::create_symlink(elsewhere / "chat.kvs", in("link"));
  fs::create_symlink("link", in("link_to_link"));
  fs::create_symlink(elsewhere / "new.kvs", in("dangling"));
  fs::create_symlink(elsewhere / "none/new.kvs", in("nowhere"));
  fs::create_symlink("loop2", in("loop1"));
  fs::create_symlink("loop1", in("loop2"));
  fs::create_symlink(elsewhere / ".", in("folder"));
  const std::set<std::string> before = names();
  grow(100);
  std::set<std::string> beside;
  SaveOptions options;
  options.progress = [&](std::int64_t, std::int64_t) {
    for (const auto& each : fs::directory_iterator(elsewhere / ".")) beside.insert(each.path().filename());
    return true;
  };
  save(cache_, in("link_to_link"), options).value();
  EXPECT_TRUE(beside.size() == 2 && beside.rbegin()->starts_with("chat.kvs.tmp-")) << *beside.rbegin();
  EXPECT_TRUE(fs::is_symlink(in("link")) && fs::is_symlink(in("link_to_link")));
  EXPECT_EQ(tokens_in(elsewhere / "chat.kvs"), 400);
  save_to("dangling").value();
  EXPECT_TRUE(fs::is_symlink(in("dangling")));
  EXPECT_EQ(tokens_in(elsewhere / "new.kvs"), 400);
  EXPECT_TRUE(refused(save_to("nowhere"), Code::io, {"create a file beside it", "No such file"}));
  EXPECT_TRUE(refused(save_to("loop1"), Code::io, {"loop1", "Too many levels of symbolic links"}));
  EXPECT_TRUE(refused(Snapshot::open(in("loop1")).status(), Code::io, {"Too many levels of symbolic links"}));
  EXPECT_TRUE(refused(save_to("folder"), Code::io, {"is a directory"}));
  EXPECT_EQ(names(), before);
  EXPECT_EQ(elsewhere.files(), 2u);
}

TEST_F(SnapshotFiles, ABaseIsNamedAsItIsCalledBesideTheNewFile) {
  const TemporaryDirectory elsewhere;
  save_to("1.kvs").value();
  fs::create_symlink("1.kvs", in("latest"));
  grow(100);
  save_to("2.kvs", "latest").value();
  fs::remove(in("latest"));
  fs::create_symlink("2.kvs", in("latest"));
  EXPECT_EQ(tokens_in("2.kvs"), 400);
  EXPECT_EQ(bases_of("2.kvs"), Names{"1.kvs"});
  // The new file is beside its base, although the link to it is not.
  grow(100);
  fs::create_symlink(in("3.kvs"), elsewhere / "3.kvs");
  fs::create_symlink(in("latest"), elsewhere / "base");
  save_to(elsewhere / "3.kvs", elsewhere / "base").value();
  EXPECT_EQ(bases_of("3.kvs"), (Names{"1.kvs", "2.kvs"}));
  EXPECT_EQ(tokens_in("3.kvs"), 500);
  EXPECT_EQ(tokens_in(elsewhere / "3.kvs"), 500);
  // And the other way round.
  EXPECT_TRUE(refused(save_to(elsewhere / "4.kvs", elsewhere / "base"), Code::invalid_argument,
                      {"/base\" is a link to \"", "/2.kvs\", which is not in the folder", "side by side"}));
  EXPECT_TRUE(refused(save_to(elsewhere / "4.kvs", "1.kvs"), Code::invalid_argument, {"side by side"}));
  EXPECT_EQ(elsewhere.files(), 2u);
}

TEST_F(SnapshotFiles, WhatIsNoRegularFileIsRefused) {
  fs::create_directory(in("folder"));
  ASSERT_EQ(::mkfifo(in("pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", in("link"));
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  in("socket").copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  save_to("1.kvs").value();
  grow(100);
  // A device of its own: a save that replaced one of the machine's would harm everybody.
  const bool has_device = ::mknod(in("device").c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0;  // as root only
  for (const std::string name : {"folder", "folder/", ".", "pipe", "link", "socket", "device"}) {
    if (name == "device" && !has_device) continue;
    const std::string path = in(name);
    const char* what = name[0] == 'f' || name == "." ? "is a directory" : "is not a regular file";
    EXPECT_TRUE(refused(save_to(name), Code::io, {"not written", what})) << name;
    EXPECT_TRUE(refused(save_to("2.kvs", name), Code::io, {"base: ", what})) << name;
    EXPECT_TRUE(refused(Snapshot::open(path).status(), Code::io, {what})) << name;
    EXPECT_TRUE(refused(Snapshot::open(in("1.kvs")).value().copy(path), Code::io, {what})) << name;
  }
  EXPECT_TRUE(refused(save_to("1.kvs/"), Code::io, {"Not a directory"}));
  EXPECT_TRUE(refused(save_to("new/"), Code::io, {"the name of a file is missing"}));
  ::close(socket);
  fs::remove(in("device"));
  EXPECT_EQ(names(), (std::set<std::string>{"folder", "pipe", "link", "socket", "1.kvs"}));
}

// --- names -----------------------------------------------------------------------------------------------------------

TEST_F(SnapshotFiles, NamesOfAnyLengthThatTheSystemTakes) {
  std::string unfinished;
  SaveOptions options;
  options.progress = [&](std::int64_t, std::int64_t) {
    for (const std::string& name : names()) {
      if (name.find(".tmp-") != std::string::npos) unfinished = name;
    }
    return true;
  };
  for (const std::size_t size :
       {std::size_t{200}, std::size_t{235}, std::size_t{240}, std::size_t{254}, std::size_t{255}}) {
    const std::string name(size, 'n');
    unfinished.clear();
    EXPECT_TRUE(save(cache_, in(name), options).ok()) << size;
    EXPECT_FALSE(unfinished.empty()) << size;
    EXPECT_EQ(tokens_in(name), 300);
    fs::remove(in(name));
  }
  // A character of several bytes is not cut.
  for (int before = 0; before < 3; ++before) {
    std::string name(static_cast<std::size_t>(before), 'a');
    while (name.size() + 3 <= 255) name += "\xe2\x82\xac";
    EXPECT_TRUE(save(cache_, in(name), options).ok()) << before;
    EXPECT_LE(unfinished.size(), 255u);
    const std::string kept = unfinished.substr(0, unfinished.find(".tmp-"));
    EXPECT_EQ((kept.size() - static_cast<std::size_t>(before)) % 3, 0u) << before;
    EXPECT_TRUE(name.starts_with(kept) && kept.size() > 200);
    fs::remove(in(name));
  }
  EXPECT_TRUE(refused(save_to(std::string(256, 'n')), Code::io, {"File name too long"}));
  EXPECT_TRUE(names().empty());
}

TEST_F(SnapshotFiles, NamesOfAnyBytes) {
  const std::string first = "a\xff\xfe.kvs", second = "b \n\"\\\x80.kvs", third = "\xe2\x82\xac.kvs";
  save_to(first).value();
  grow(100);
  save_to(second, first).value();
  EXPECT_EQ(bases_of(second), Names{first});
  grow(100);
  save_to(third, second).value();
  EXPECT_EQ(bases_of(third), (Names{first, second}));  // in the order of the pages
  EXPECT_EQ(tokens_in(third), 500);
  grow(100);
  save_to("4.kvs", third).value();
  EXPECT_EQ(bases_of("4.kvs"), (Names{first, second, third}));
  const auto metadata = io::SafeTensors::open(in("4.kvs")).value().metadata();
  EXPECT_EQ(metadata.at("kvant.base.1").substr(33), "/61fffe2e6b7673");
  EXPECT_EQ(metadata.at("kvant.base.3").substr(33), third);  // as older versions read it
  EXPECT_TRUE(refused(save_to(first), Code::invalid_argument, {"needs the file"}));
}

TEST(SnapshotBaseNames, Texts) {
  using snapshot::read_base;
  const std::string sum(32, 'a');
  for (const std::string name : {"x", "a b", "\xff", "\xed\xa0\x80", "..x", ".hidden", "\xc3\xa4"}) {
    const auto read = read_base(snapshot::write_base({0xaaaaaaaaaaaaaaaa, 0xaaaaaaaaaaaaaaaa}, name));
    ASSERT_TRUE(read.has_value()) << name;
    EXPECT_EQ(read->name, name);
    EXPECT_EQ(read->identity, sum);
  }
  for (const std::string text :
       {"", "x", " ", ".", "..", "a/b", "/", "/6", "/6g", "/FF", "/2f", "/2e2e", "/00", "/2e"}) {
    EXPECT_FALSE(read_base(sum + ' ' + text).has_value() && text != " " && text != "x") << text;
  }
  EXPECT_FALSE(read_base(sum).has_value());
  EXPECT_FALSE(read_base(sum + "xname").has_value());
  EXPECT_FALSE(read_base(std::string(31, 'a') + "  name").has_value());
  EXPECT_FALSE(read_base(std::string(32, 'g') + " name").has_value());
}

// --- chains ----------------------------------------------------------------------------------------------------------

int open_files() {
  return static_cast<int>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
}

TEST_F(SnapshotFiles, AChainOfSavesHasABound) {
  const int saves = kAddressSanitizer || kThreadSanitizer ? 70 : 140;
  const int before = open_files();
  std::size_t most = 0, wholes = 0;
  int most_open = 0;
  for (int i = 0; i < saves; ++i) {
    const std::string name = std::to_string(i) + ".kvs";
    save_to(name, i == 0 ? "" : std::to_string(i - 1) + ".kvs").value();
    const Snapshot snapshot = Snapshot::open(in(name)).value();
    most_open = std::max(most_open, open_files() - before);
    const std::size_t bases = snapshot.info().bases.size();
    most = std::max(most, bases);
    wholes += bases == 0 ? 1 : 0;
    if (bases == 0) cache_.truncate(id_, 300).value();
    grow(64);  // a page of its own for every file
  }
  EXPECT_EQ(most, snapshot::kMostBases);
  // Every 34th: of the first two files after a whole one, only one has pages that the later ones need.
  EXPECT_EQ(wholes, static_cast<std::size_t>((saves + 33) / 34));
  EXPECT_LE(most_open, static_cast<int>(snapshot::kMostBases) + 1);
  EXPECT_EQ(open_files(), before);
  EXPECT_GT(tokens_in(std::to_string(saves - 1) + ".kvs"), 300);
  EXPECT_EQ(open_files(), before);
}

// Older versions of kvant wrote chains of any length.
TEST_F(SnapshotFiles, MoreBasesThanAreWrittenNow) {
  save_to("1.kvs").value();
  grow(200);
  save_to("2.kvs", "1.kvs").value();
  const std::string base = io::SafeTensors::open(in("2.kvs")).value().metadata().at("kvant.base.1").substr(0, 33);
  const auto forged = [&](int count) {
    forge_metadata(in("2.kvs"), in("forged.kvs"), [&](auto& metadata) {
      for (int i = 2; i <= count; ++i) {
        const std::string name = "copy" + std::to_string(i);
        if (!fs::exists(in(name))) fs::create_hard_link(in("1.kvs"), in(name));
        metadata["kvant.base." + std::to_string(i)] = base + name;
      }
    });
  };
  forged(100);
  const int before = open_files();
  {
    const Snapshot snapshot = Snapshot::open(in("forged.kvs")).value();
    EXPECT_EQ(snapshot.info().bases.size(), 100u);
    EXPECT_LE(open_files() - before, 33);
    EXPECT_TRUE(snapshot.verify().ok()) << snapshot.verify().message();
    // One that is closed between reads is the same file when it is opened again, or is refused.
    fs::remove(in("copy70"));
    EXPECT_TRUE(refused(snapshot.verify(), Code::io, {"copy70", "cannot open again"}));
    fs::copy_file(in("1.kvs"), in("copy70"));
    fs::last_write_time(in("copy70"), fs::last_write_time(in("1.kvs")));  // the same but for its number
    EXPECT_TRUE(refused(snapshot.verify(), Code::io, {"copy70", "another program changed the file"}));
  }
  EXPECT_EQ(open_files(), before);
  // A save that would add a file to these is whole.
  SaveOptions options;
  options.base = in("forged.kvs");
  std::int64_t done = 0, all = -1;
  options.progress = [&](std::int64_t d, std::int64_t t) { return done = d, all = t, true; };
  save(cache_, in("3.kvs"), options).value();
  EXPECT_EQ(done, all);
  EXPECT_TRUE(bases_of("3.kvs").empty());
  EXPECT_EQ(tokens_in("3.kvs"), 500);
  EXPECT_TRUE(refused(save_to("copy7", "forged.kvs"), Code::invalid_argument, {"choose another name"}));
  // A file that is named more often than any chain was long.
  forge_metadata(in("2.kvs"), in("long.kvs"), [&](auto& metadata) {
    for (int i = 2; i <= 5000; ++i) metadata["kvant.base." + std::to_string(i)] = base + "copy" + std::to_string(i);
  });
  EXPECT_FALSE(Snapshot::open(in("long.kvs")).ok());
  EXPECT_EQ(open_files(), before);
}

TEST_F(SnapshotFiles, ForgedBases) {
  save_to("1.kvs").value();
  grow(200);
  save_to("2.kvs", "1.kvs").value();
  const auto opened = [&](const std::string& name, const std::string& base1, const std::string& base2 = "") {
    forge_metadata(in("2.kvs"), in(name), [&](auto& metadata) {
      const std::string sum = metadata["kvant.base.1"].substr(0, 33);
      metadata["kvant.base.1"] = (base1.size() > 32 ? "" : sum) + base1;
      if (!base2.empty()) metadata["kvant.base.2"] = sum + base2;
    });
    return Snapshot::open(in(name)).status();
  };
  EXPECT_TRUE(opened("good.kvs", "1.kvs").ok());
  EXPECT_TRUE(refused(opened("twice.kvs", "1.kvs", "1.kvs"), Code::bad_file, {"the base \"1.kvs\" twice"}));
  EXPECT_TRUE(refused(opened("self.kvs", "self.kvs"), Code::bad_file, {"another file now"}));
  EXPECT_TRUE(refused(opened("cycle1.kvs", "2.kvs"), Code::bad_file, {"another file now"}));
  for (const char* name : {"", ".", "..", "../1.kvs", "/1.kvs", "/", "/2e2e", "/612f62"}) {
    EXPECT_TRUE(refused(opened("bad.kvs", name), Code::bad_file, {"must be a checksum and the name of a file"}))
        << name;
  }
  EXPECT_TRUE(refused(opened("none.kvs", "none"), Code::io, {"needs \"none\"", "cannot be used"}));
  ASSERT_EQ(::mkfifo(in("pipe").c_str(), 0600), 0);
  EXPECT_TRUE(refused(opened("pipe.kvs", "pipe"), Code::io, {"needs \"pipe\"", "not a regular file"}));
  // A cycle of two files: each is refused, and reading one does not read on.
  EXPECT_FALSE(opened("a.kvs", "b.kvs").ok());
  EXPECT_TRUE(refused(opened("b.kvs", "a.kvs"), Code::bad_file, {"another file now"}));
  EXPECT_TRUE(refused(Snapshot::open(in("a.kvs")).status(), Code::bad_file, {"another file now"}));
  forge_metadata(in("2.kvs"), in("gap.kvs"), [](auto& m) { m["kvant.base.3"] = m["kvant.base.1"]; });
  EXPECT_TRUE(refused(Snapshot::open(in("gap.kvs")).status(), Code::bad_file, {"not numbered from 1 on"}));
}

}  // namespace
}  // namespace kvant
