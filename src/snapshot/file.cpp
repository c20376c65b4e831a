#include "snapshot/file.hpp"

#include <algorithm>
#include <limits>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "io/path.hpp"
#include "io/text.hpp"
#include "snapshot/bases.hpp"
#include "snapshot/names.hpp"

namespace kvant::snapshot {
namespace {

constexpr std::size_t kMostFiles = 4096;  // that one snapshot names: older versions of kvant had no kMostBases

}  // namespace

Result<std::unique_ptr<SnapshotFile>> SnapshotFile::open(const std::string& path) {
  auto file = PageFile::open(path);
  if (!file) return file.status();
  return of(std::move(*file), true);
}

Result<std::unique_ptr<SnapshotFile>> SnapshotFile::parse(std::span<const std::byte> bytes, const std::string& name) {
  auto tensors = io::SafeTensors::parse(bytes, name);
  if (!tensors) return tensors.status();
  auto file = PageFile::of(std::move(*tensors));
  if (!file) return file.status();
  return of(std::move(*file), false);
}

Result<std::unique_ptr<SnapshotFile>> SnapshotFile::of(PageFile file, bool has_folder) {
  std::unique_ptr<SnapshotFile> all(new SnapshotFile);
  all->files_.push_back(std::move(file));
  if (Status s = all->read_metadata(); !s) return s;
  if (Status s = all->open_bases(has_folder); !s) return s;
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    if (Status s = all->read_places(pool); !s) return s;
  }
  if (Status s = all->read_levels(); !s) return s;
  if (Status s = all->read_sequences(); !s) return s;
  if (Status s = all->check_config(); !s) return s;
  return all;
}

Status SnapshotFile::read_metadata() {
  const PageFile& file = files_[0];
  auto stored = read_config(file.metadata());
  if (!stored) return file.bad(stored.message());
  stored_ = std::move(*stored);
  info_.path = file.path();
  info_.file_bytes = file.file_bytes();
  info_.stored_head_dim = stored_.stored_head_dim;
  info_.stored_v_head_dim = stored_.stored_v_head_dim;
  info_.exact = stored_.exact;
  for (const auto& [key, value] : file.metadata()) {
    if (!key.starts_with(kOwn)) {
      info_.metadata[key] = value;
    } else if (key == kName) {
      info_.name = value;
    } else if (key == kModel) {
      info_.model = value;
    } else if (key == kWrittenBy) {
      info_.written_by = value;
    } else if (is_config_key(key)) {
      info_.fields[key.substr(std::string_view(kOwn).size())] = value;
    } else if (key != kVersionKey && !key.starts_with(kBase)) {
      return file.bad(fmt::format("metadata {} is unknown to this kvant", io::in_quotes(key)));
    }
  }
  return {};
}

Status SnapshotFile::open_bases(bool has_folder) {
  const auto& metadata = files_[0].metadata();
  for (std::size_t i = 1;; ++i) {
    const auto found = metadata.find(fmt::format("{}{}", kBase, i));
    if (found == metadata.end()) break;
    const std::optional<BaseName> base = read_base(found->second);
    if (!base || i > kMostFiles) {
      return files_[0].bad(fmt::format("metadata {} is {}: must be a checksum and the name of a file in its folder",
                                       found->first, io::in_quotes(found->second)));
    }
    if (std::find(info_.bases.begin(), info_.bases.end(), base->name) != info_.bases.end()) {
      return files_[0].bad(fmt::format("names the base {} twice", io::in_quotes(base->name)));
    }
    if (!has_folder) return files_[0].bad("needs files beside it, and is not a file itself");
    auto file = open_base(base->name, base->identity);
    if (!file) return file.status();
    files_.push_back(std::move(*file));
    info_.bases.push_back(base->name);
  }
  std::size_t named = 0;
  for (const auto& [key, value] : metadata) named += key.starts_with(kBase) ? 1 : 0;
  if (named != info_.bases.size()) return files_[0].bad("its bases are not numbered from 1 on");
  return {};
}

// Bases are beside the file itself. Where links lead to all of the files, they may also be beside the link that was
// named: the checksum says whether such a file is the one.
Result<PageFile> SnapshotFile::open_base(const std::string& name, const std::string& identity) const {
  const auto real = io::real_path(info_.path);
  if (!real) return real.status();
  const auto between =
      files_.size() > kMostBases ? io::ByteSource::Between::closes : io::ByteSource::Between::stays_open;
  auto base = PageFile::open(io::beside(*real, name), between);
  if (*real != info_.path && (!base || to_text(base->identity()) != identity)) {
    auto other = PageFile::open(io::beside(info_.path, name), between);
    if (other && to_text(other->identity()) == identity) return other;
  }
  if (!base) {
    return {base.code(), fmt::format("{} needs {}, which cannot be used: {}", io::printable(info_.path),
                                     io::in_quotes(name), base.message())};
  }
  if (to_text(base->identity()) == identity) return base;
  return files_[0].bad(
      fmt::format("needs {} as it was when this file was saved (checksum {}), and it is another file now (checksum {})",
                  io::in_quotes(name), identity, to_text(base->identity())));
}

Status SnapshotFile::read_places(Pool pool) {
  const PageFile& file = files_[0];
  std::vector<Place>& places = pool == Pool::exact ? exact_ : encoded_;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (file.find(places_tensor(pool)) == nullptr) {
    if (!info_.bases.empty() && file.find(pages_tensor(pool)) != nullptr) {
      return file.bad(fmt::format("tensor {} is missing, and the file has bases", io::in_quotes(places_tensor(pool))));
    }
    if (file.rows(pool) > kMost) return file.bad("more than 2^31 pages");
    for (std::int32_t row = 0; row < file.rows(pool); ++row) places.push_back({0, row});
  } else {
    const auto read = file.read<std::int32_t>(places_tensor(pool), "I32", 2);
    if (!read) return read.status();
    for (std::size_t i = 0; i + 1 < read->size(); i += 2) places.push_back({(*read)[i], (*read)[i + 1]});
    if (places.size() > to_size(kMost)) return file.bad("more than 2^31 pages");
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Place place = places[i];
    const bool known = place.file >= 0 && to_size(place.file) < files_.size();
    if (known && place.row >= 0 && place.row < files_[to_size(place.file)].rows(pool)) continue;
    return file.bad(fmt::format("tensor {}: slot {} is row {} of file {}, which does not exist",
                                io::in_quotes(places_tensor(pool)), i, place.row, place.file));
  }
  return check_rows(pool);
}

// All rows that are used have one size, and this file's are those of its layers and kv heads.
Status SnapshotFile::check_rows(Pool pool) const {
  const PageFile& file = files_[0];
  if (const io::TensorInfo* tensor = file.find(pages_tensor(pool))) {
    if (tensor->shape[1] != stored_.config.layers || tensor->shape[2] != stored_.config.kv_heads) {
      return file.bad(fmt::format("tensor {} has {} layers and {} kv heads, and the cache {} and {}",
                                  io::in_quotes(tensor->name), tensor->shape[1], tensor->shape[2],
                                  stored_.config.layers, stored_.config.kv_heads));
    }
  }
  for (const Place& place : places(pool)) {
    if (files_[to_size(place.file)].row_bytes(pool) == slot_bytes(pool)) continue;
    return file.bad(fmt::format("its pages have {} bytes, and those of {} have {}", slot_bytes(pool),
                                io::printable(files_[to_size(place.file)].path()),
                                files_[to_size(place.file)].row_bytes(pool)));
  }
  return {};
}

Status SnapshotFile::read_levels() {
  auto k = files_[0].read<float>(kKLevels, "F32", 0);
  if (!k) return k.status();
  auto v = files_[0].read<float>(kVLevels, "F32", 0);
  if (!v) return v.status();
  stored_.config.k_levels = std::move(*k);
  stored_.config.v_levels = std::move(*v);
  info_.config = stored_.config;
  return {};
}

// The tables' form, and that they are as long as each says of the other. Whether a cache can have such pages is asked
// of a cache.
Status SnapshotFile::read_sequences() {
  const PageFile& file = files_[0];
  const auto list = file.read<std::int64_t>(kSequences, "I64", 3);
  if (!list) return list.status();
  const auto pages = file.read<std::int64_t>(kPages, "I64", 3);
  if (!pages) return pages.status();
  const auto tokens = file.read<std::int64_t>(kTokens, "I64", 0);
  if (!tokens) return tokens.status();

  std::int32_t identities = 0;
  std::size_t page = 0, token = 0;
  for (std::size_t i = 0; i + 2 < list->size(); i += 3) {
    const std::int64_t length = (*list)[i], first_page = (*list)[i + 1], ids = (*list)[i + 2];
    if (length < 0 || length > core::kMaxSequenceTokens || (ids != 0 && ids != length)) {
      return file.bad(
          fmt::format("tensor \"sequences\": sequence {} has {} tokens and {} token ids", i / 3, length, ids));
    }
    const std::size_t count = to_size(core::pages_for(length));
    if (count > pages->size() / 3 - page || to_size(ids) > tokens->size() - token) {
      return file.bad(fmt::format("tensor {} ends before the {} {} of sequence {}",
                                  count > pages->size() / 3 - page ? "\"pages\"" : "\"tokens\"",
                                  count > pages->size() / 3 - page ? static_cast<std::int64_t>(count) : ids,
                                  count > pages->size() / 3 - page ? "pages" : "token ids", i / 3));
    }
    core::TableImage::Sequence& s = image_.sequences.emplace_back();
    s.length = length;
    s.first_page = first_page;
    s.pages.reserve(count);
    for (const std::size_t end = page + count; page < end; ++page) {
      std::int32_t number[3];
      for (std::size_t j = 0; j < 3; ++j) {
        const std::int64_t n = (*pages)[page * 3 + j];
        if (n < -1 || n >= std::numeric_limits<std::int32_t>::max()) {
          return file.bad(fmt::format("tensor \"pages\": row {} has the number {}", page, n));
        }
        number[j] = static_cast<std::int32_t>(n);
      }
      s.pages.push_back({number[0], number[1], number[2]});
      identities = std::max(identities, number[2] + 1);
    }
    const auto first = tokens->begin() + static_cast<std::ptrdiff_t>(token);
    info_.sequences.push_back({length, {first, first + static_cast<std::ptrdiff_t>(ids)}});
    token += to_size(ids);
  }
  if (page != pages->size() / 3 || token != tokens->size()) {
    return file.bad(fmt::format("{} pages and {} token ids are more than the sequences have", pages->size() / 3 - page,
                                tokens->size() - token));
  }
  image_.encoded = static_cast<std::int32_t>(encoded_.size());
  image_.exact = static_cast<std::int32_t>(exact_.size());
  image_.identities = identities;
  info_.encoded_pages = image_.encoded;
  info_.exact_pages = image_.exact;
  info_.page_bytes = image_.encoded * static_cast<std::int64_t>(slot_bytes(Pool::encoded)) +
                     image_.exact * static_cast<std::int64_t>(slot_bytes(Pool::exact));
  return {};
}

// An empty cache of this configuration judges it, and then the tables.
Status SnapshotFile::check_config() const {
  const PageFile& file = files_[0];
  CacheConfig config = stored_.config;
  for (BasisKind* basis : {&config.k_basis, &config.v_basis}) {
    if (*basis == BasisKind::calibrated) *basis = BasisKind::automatic;  // these are read by load
  }
  const auto cache = CacheImpl::create(config);
  if (!cache) return file.bad(cache.message());
  if (image_.exact > 0 && !stored_.exact) return file.bad("has exact pages, and does not say of which dtype");
  if (Status s = (*cache)->table().check_image(image_); !s) return file.bad(s.message());
  return {};
}

std::size_t SnapshotFile::slot_bytes(Pool pool) const noexcept {
  const std::vector<Place>& all = places(pool);
  return all.empty() ? 0 : files_[to_size(all[0].file)].row_bytes(pool);
}

Status SnapshotFile::read_slot(Pool pool, std::int32_t number, std::span<std::byte> out) const {
  const Place place = places(pool)[to_size(number)];
  return files_[to_size(place.file)].read_row(pool, place.row, out);
}

Result<std::shared_ptr<const BasisSet>> SnapshotFile::read_bases() const {
  const CacheConfig& c = stored_.config;
  auto set = std::make_shared<BasisSet>();
  set->layers = c.layers;
  set->kv_heads = c.kv_heads;
  set->head_dim = c.head_dim;
  set->v_head_dim = c.v_head_dim;
  const std::size_t heads = to_size(c.layers) * to_size(c.kv_heads);
  bool any = false;
  for (const bool values : {false, true}) {
    if ((values ? c.v_basis : c.k_basis) != BasisKind::calibrated) continue;
    any = true;
    const std::size_t d = to_size(values ? c.v_head_dim : c.head_dim), each = d + 2 * d * d;
    const auto all = files_[0].read<float>(values ? kVBases : kKBases, "F32", static_cast<std::int64_t>(each));
    if (!all) return all.status();
    if (all->size() / each != heads) {
      return files_[0].bad(
          fmt::format("{} bases for {} layers of {} kv heads", all->size() / each, c.layers, c.kv_heads));
    }
    for (std::size_t i = 0; i < heads; ++i) {
      const float* from = all->data() + i * each;
      (values ? set->values : set->keys)
          .push_back({{from, from + d}, {from + d, from + d + d * d}, {from + d + d * d, from + each}});
    }
  }
  if (!any) return std::shared_ptr<const BasisSet>{};
  return std::shared_ptr<const BasisSet>(std::move(set));
}

}  // namespace kvant::snapshot
