#include "snapshot/write.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "core/fmt.hpp"
#include "io/path.hpp"
#include "io/safetensors_header.hpp"
#include "io/text.hpp"
#include "io/write_file.hpp"
#include "kvant/version.hpp"
#include "snapshot/bases.hpp"
#include "snapshot/checksum.hpp"
#include "snapshot/names.hpp"

namespace kvant::snapshot {
namespace {

constexpr std::size_t kDataAlignment = 64;  // blocks begin as they do in memory
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr std::int64_t kStepBytes = std::int64_t{16} << 20;  // between calls of progress, and of write_behind
constexpr unsigned kPermissions = 0600;                      // a cache is as private as its text

Status not_written(const std::string& path, const std::string& what) {
  return {Code::invalid_argument, fmt::format("{}: not written: {}", io::printable(path), what)};
}

/// The file's bytes in order, and the checksum of each part of them.
class Output {
 public:
  explicit Output(io::NewFile file) : file_(std::move(file)) { buffer_.reserve(kBufferBytes); }

  Status write(std::span<const std::byte> bytes) {
    sum_.add(bytes);
    return put(bytes);
  }
  /// Bytes whose checksum is known.
  Status write_part(std::span<const std::byte> bytes, const Checksum& sum) {
    sums_.push_back(sum);
    return put(bytes);
  }
  void end_part() { sums_.push_back(sum_.take()); }
  /// `may_replace`, of the place and the checksum of all checksums, is asked last.
  Status complete(const std::function<Status(const io::RealPlace&, const Checksum&)>& may_replace) {
    sums_.push_back(checksum(std::as_bytes(std::span(sums_))));
    if (Status s = put(std::as_bytes(std::span(sums_))); !s) return s;
    if (Status s = flush(); !s) return s;
    return file_.complete([&] { return may_replace(file_.place(), sums_.back()); });
  }

 private:
  // Small parts are gathered, large ones go out from where they are.
  Status put(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() > kBufferBytes) {
      if (Status s = flush(); !s) return s;
    }
    if (bytes.size() >= kBufferBytes) return out(bytes);
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return {};
  }
  Status flush() {
    Status s = out(buffer_);
    buffer_.clear();
    return s;
  }
  Status out(std::span<const std::byte> bytes) {
    if (Status s = file_.write(bytes); !s) return s;
    since_ += static_cast<std::int64_t>(bytes.size());
    if (since_ >= kStepBytes) file_.write_behind(), since_ = 0;
    return {};
  }

  io::NewFile file_;
  std::vector<std::byte> buffer_;
  std::int64_t since_ = 0;
  Checksummer sum_;
  std::vector<Checksum> sums_;
};

/// Which slots of a pool are written, and where the others are.
struct PoolPlan {
  std::vector<std::int32_t> written;  // numbers in the image
  std::vector<Checksum> sums;         // what these pages have; empty: made while they are written
  std::vector<std::int32_t> places;   // [n][2], with a base only
};

// A tensor of numbers that are in memory, in one piece or in several.
struct Table {
  const char* name;
  const char* dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::span<const std::byte>> parts;
};

template <class T>
Table table(const char* name, const char* dtype, const std::vector<T>& all, std::int64_t columns = 0) {
  const auto n = static_cast<std::int64_t>(all.size());
  Table t{name, dtype, {n}, {std::as_bytes(std::span(all))}};
  if (columns > 0) t.shape = {n / columns, columns};
  return t;
}

/// The numbers of a Content as a file has them.
struct Tables {
  std::vector<std::int64_t> sequences, pages, tokens;

  explicit Tables(const Content& content) {
    for (std::size_t i = 0; i < content.image->sequences.size(); ++i) {
      const core::TableImage::Sequence& s = content.image->sequences[i];
      const std::span<const std::int64_t> ids =
          content.tokens.empty() ? std::span<const std::int64_t>() : content.tokens[i];
      sequences.insert(sequences.end(), {s.length, s.first_page, static_cast<std::int64_t>(ids.size())});
      for (const core::TableImage::Page& p : s.pages) pages.insert(pages.end(), {p.exact, p.encoded, p.identity});
      tokens.insert(tokens.end(), ids.begin(), ids.end());
    }
  }
};

Table bases_table(const char* name, const std::vector<CalibratedBasis>& bases, int head_dim) {
  const std::int64_t d = head_dim;
  Table t{name, "F32", {static_cast<std::int64_t>(bases.size()), d + 2 * d * d}, {}};
  for (const CalibratedBasis& b : bases) {
    for (const std::vector<float>* part : {&b.center, &b.matrix, &b.inverse}) {
      t.parts.push_back(std::as_bytes(std::span(*part)));
    }
  }
  return t;
}

class Writer {
 public:
  Writer(const std::string& path, const Content& content, const SnapshotFile* base, const SnapshotProgress& progress)
      : path_(path),
        content_(content),
        given_base_(base),
        base_(base != nullptr && base->files().size() <= kMostBases ? base : nullptr),
        tables_(content),
        progress_(progress, pass_bytes() * (base_ == nullptr ? 1 : 2)) {}

  Status write() {
    auto place = io::RealPlace::of(path_);
    if (!place) return place.status();
    if (Status s = check_base(*place); !s) return s;
    if (Status s = check_kept(*place); !s) return s;
    for (const Pool pool : {Pool::encoded, Pool::exact}) {
      if (Status s = plan(pool); !s) return s;
    }
    std::vector<Table> tables = all_tables();
    std::vector<io::HeaderTensor> header = header_tensors(tables);
    const auto text = io::header_json(header, metadata(), kDataAlignment);
    if (!text) return {text.code(), fmt::format("{}: not written: {}", io::printable(path_), text.message())};

    auto file = io::NewFile::create(path_, std::move(*place), kPermissions);
    if (!file) return file.status();
    Output out(std::move(*file));
    const std::uint64_t length = text->size();
    if (Status s = out.write(std::as_bytes(std::span(&length, 1))); !s) return s;
    if (Status s = out.write(std::as_bytes(std::span(*text))); !s) return s;
    out.end_part();
    for (const Pool pool : {Pool::encoded, Pool::exact}) {
      if (Status s = write_slots(pool, out); !s) return s;
    }
    for (const Table& t : tables) {
      for (const std::span<const std::byte> part : t.parts) {
        if (Status s = out.write(part); !s) return s;
      }
      out.end_part();
    }
    return out.complete([&](const io::RealPlace& at, const Checksum& identity) { return may_replace(at, identity); });
  }

 private:
  [[nodiscard]] std::int32_t slots(Pool pool) const {
    return pool == Pool::exact ? content_.image->exact : content_.image->encoded;
  }
  [[nodiscard]] std::size_t slot_bytes(Pool pool) const {
    return pool == Pool::exact ? content_.exact_bytes : content_.encoded_bytes;
  }
  [[nodiscard]] std::int64_t pass_bytes() const {
    return static_cast<std::int64_t>(to_size(slots(Pool::encoded)) * content_.encoded_bytes +
                                     to_size(slots(Pool::exact)) * content_.exact_bytes);
  }
  PoolPlan& plan_of(Pool pool) { return pool == Pool::exact ? exact_ : encoded_; }

  // The new file names its bases as they are called beside it, whatever links led to them.
  Status check_base(const io::RealPlace& place) {
    if (given_base_ == nullptr) return {};
    const std::string other = difference(content_.stored, given_base_->stored());
    if (!other.empty()) {
      return not_written(path_,
                         fmt::format("base {} is of another configuration ({}); leave it out, or give the cache's own",
                                     io::in_quotes(given_base_->info().path), other));
    }
    for (const PageFile& file : given_base_->files()) {
      const auto real = io::RealPlace::of(file.path());
      if (!real) return {real.code(), "base: " + real.message()};
      if (real->folder_id() != place.folder_id()) {
        const std::string link = real->path() == file.path() ? "" : " is a link to " + io::in_quotes(real->path());
        return not_written(
            path_,
            fmt::format("base {}{} is not in the folder of {}: a snapshot and its bases are moved "
                        "together, so put them side by side",
                        io::in_quotes(file.path()), link.empty() ? "" : link + ", which", io::in_quotes(place.path())));
      }
      names_.push_back(real->name());
    }
    return {};
  }

  // The new file replaces none of the files that it needs, and a copy none of those that its source needs. Files are
  // compared as the system knows them: names, links and the case of letters say nothing.
  Status check_kept(const io::RealPlace& place) const {
    const std::optional<io::FileId> target = place.file();
    if (given_base_ != nullptr) {
      for (std::size_t i = 0; i < given_base_->files().size(); ++i) {
        if (names_[i] != place.name() && (!target || target != given_base_->files()[i].id())) continue;
        return not_written(path_, fmt::format("it is the file {}, whose pages the new file would need; choose another "
                                              "name",
                                              io::in_quotes(names_[i])));
      }
    }
    if (content_.source == nullptr || !target) return {};
    for (const PageFile& file : content_.source->files().subspan(1)) {
      if (target == file.id()) return needed_by(content_.source->info().path);
    }
    return {};
  }

  [[nodiscard]] Status needed_by(const std::string& who) const {
    return not_written(path_, fmt::format("{} needs the file of that name as it is; choose another name, or remove {} "
                                          "first",
                                          io::in_quotes(who), io::in_quotes(who)));
  }

  // Asked when all is written, right before the rename: other programs had time to replace files.
  Status may_replace(const io::RealPlace& place, const Checksum& identity) const {
    if (Status s = check_kept(place); !s) return s;
    for (const std::int32_t i : needed_) {
      if (place.file(names_[to_size(i)]) == base_->files()[to_size(i)].id()) continue;
      return {Code::io, fmt::format("{}: not written: its base {} was replaced or removed meanwhile",
                                    io::printable(path_), io::in_quotes(names_[to_size(i)]))};
    }
    if (!place.file()) return {};
    const auto older = PageFile::open(place.path());
    if (!older || older->identity() == identity) return {};  // no snapshot, or the very same one
    for (const std::string& name : {place.path(), path_}) {
      if (const std::string who = who_needs(name, older->identity()); !who.empty()) return needed_by(who);
      if (place.path() == path_) break;
    }
    return {};
  }

  // Without a base every slot is written. With one, its checksum says whether a file of the base has it.
  Status plan(Pool pool) {
    PoolPlan& plan = plan_of(pool);
    std::vector<std::int32_t> all(to_size(slots(pool)));
    std::iota(all.begin(), all.end(), 0);
    if (base_ == nullptr) {
      plan.written = all;
      return {};
    }
    std::unordered_map<Checksum, Place, ChecksumHash> known;
    for (std::size_t f = 0; f < base_->files().size(); ++f) {
      const PageFile& file = base_->files()[f];
      if (file.row_bytes(pool) != slot_bytes(pool)) continue;
      for (std::int64_t row = 0; row < file.rows(pool); ++row) {
        known.try_emplace(file.row_checksum(pool, row),
                          Place{static_cast<std::int32_t>(f), static_cast<std::int32_t>(row)});
      }
    }
    return content_.slots(pool, all, [&](std::size_t n, std::span<const std::byte> bytes) -> Status {
      const Checksum sum = checksum(bytes);
      if (Status s = progress_.add(static_cast<std::int64_t>(bytes.size())); !s) return s;
      const auto found = known.find(sum);
      if (found == known.end()) {
        plan.places.insert(plan.places.end(), {0, static_cast<std::int32_t>(plan.written.size())});
        plan.written.push_back(static_cast<std::int32_t>(n));
        plan.sums.push_back(sum);
        return {};
      }
      plan.places.insert(plan.places.end(), {number_of(found->second.file), found->second.row});
      // It is done with: the other pass leaves it out.
      return progress_.add(static_cast<std::int64_t>(bytes.size()));
    });
  }

  // Files are numbered from 1 in the order in which they are needed: those that nothing needs are not named.
  std::int32_t number_of(std::int32_t file) {
    const auto known = std::find(needed_.begin(), needed_.end(), file);
    const auto number = static_cast<std::int32_t>(known - needed_.begin()) + 1;
    if (known == needed_.end()) needed_.push_back(file);
    return number;
  }

  [[nodiscard]] std::map<std::string, std::string> metadata() const {
    std::map<std::string, std::string> all = content_.metadata;
    write_config(content_.stored, all);
    all.emplace(kVersionKey, kVersion);
    all.emplace(kWrittenBy, KVANT_VERSION);
    all[kName] = content_.name;
    all[kModel] = content_.model;
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      const PageFile& file = base_->files()[to_size(needed_[i])];
      all[fmt::format("{}{}", kBase, i + 1)] = write_base(file.identity(), names_[to_size(needed_[i])]);
    }
    return all;
  }

  [[nodiscard]] std::vector<Table> all_tables() const {
    const CacheConfig& c = content_.stored.config;
    std::vector<Table> all{table(kEncodedPlaces, "I32", encoded_.places, 2),
                           table(kExactPlaces, "I32", exact_.places, 2),
                           table(kSequences, "I64", tables_.sequences, 3),
                           table(kPages, "I64", tables_.pages, 3),
                           table(kTokens, "I64", tables_.tokens),
                           table(kKLevels, "F32", c.k_levels),
                           table(kVLevels, "F32", c.v_levels)};
    if (c.k_basis == BasisKind::calibrated) all.push_back(bases_table(kKBases, c.bases->keys, c.head_dim));
    if (c.v_basis == BasisKind::calibrated) all.push_back(bases_table(kVBases, c.bases->values, c.v_head_dim));
    std::erase_if(all, [](const Table& t) { return t.shape[0] == 0; });
    return all;
  }

  std::vector<io::HeaderTensor> header_tensors(const std::vector<Table>& tables) {
    std::vector<io::HeaderTensor> all;
    std::int64_t parts = 0;
    const std::int64_t layers = content_.stored.config.layers, heads = content_.stored.config.kv_heads;
    for (const Pool pool : {Pool::encoded, Pool::exact}) {
      const auto rows = static_cast<std::int64_t>(plan_of(pool).written.size());
      if (rows == 0) continue;
      const std::int64_t block = static_cast<std::int64_t>(slot_bytes(pool)) / (layers * heads);
      all.push_back({.name = pages_tensor(pool), .dtype = "U8", .shape = {rows, layers, heads, block}});
      parts += rows;
    }
    for (const Table& t : tables) all.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
    parts += static_cast<std::int64_t>(tables.size());
    all.push_back({.name = kChecksums, .dtype = "U64", .shape = {parts + 2, 2}});  // and the header, and themselves
    return all;
  }

  Status write_slots(Pool pool, Output& out) {
    const PoolPlan& plan = plan_of(pool);
    return content_.slots(pool, plan.written, [&](std::size_t i, std::span<const std::byte> bytes) -> Status {
      const Checksum sum = checksum(bytes);
      if (!plan.sums.empty() && sum != plan.sums[i]) {
        return {Code::internal,
                fmt::format("{}: not written: a page changed while it was saved", io::printable(path_))};
      }
      if (Status s = out.write_part(bytes, sum); !s) return s;
      return progress_.add(static_cast<std::int64_t>(bytes.size()));
    });
  }

  const std::string& path_;
  const Content& content_;
  const SnapshotFile* given_base_;
  const SnapshotFile* base_;        // null: every page is written
  std::vector<std::string> names_;  // the files of given_base_, in the folder of the new file
  const Tables tables_;
  PoolPlan encoded_, exact_;
  std::vector<std::int32_t> needed_;  // files of the base
  Progress progress_;
};

}  // namespace

Status Progress::add(std::int64_t bytes) {
  done_ += bytes;
  if (!progress_ || (done_ - told_ < kStepBytes && done_ != total_)) return {};
  told_ = done_;
  if (progress_(done_, total_)) return {};
  return {Code::io, fmt::format("stopped by its caller after {} of {} bytes; nothing was changed", done_, total_)};
}

Status write(const std::string& path, const Content& content, const SnapshotFile* base,
             const SnapshotProgress& progress) {
  if (path.empty() || path.find('\0') != std::string::npos)
    return not_written(path, "the path is empty or holds a NUL");
  for (const auto& [key, value] : content.metadata) {
    if (key.starts_with(kOwn)) {
      return not_written(
          path, fmt::format("metadata {}: keys that begin with \"{}\" are kvant's own", io::in_quotes(key), kOwn));
    }
    if (key.find('\0') != std::string::npos || value.find('\0') != std::string::npos) {
      return not_written(path, fmt::format("metadata {} holds a NUL", io::in_quotes(key)));
    }
  }
  for (const std::string* text : {&content.name, &content.model}) {
    if (text->find('\0') != std::string::npos) return not_written(path, "the name or the model holds a NUL");
  }
  return Writer(path, content, base, progress).write();
}

}  // namespace kvant::snapshot
