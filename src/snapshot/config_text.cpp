#include "snapshot/config_text.hpp"

#include <charconv>
#include <limits>

#include "core/fmt.hpp"
#include "io/text.hpp"
#include "snapshot/names.hpp"

namespace kvant::snapshot {
namespace {

// Whether caches whose fields differ can have each other's sequences. Files have `of_values` only where values are not
// of the keys' size, and `of_latents` only where values are latents, so that other files are those of versions which
// knew one size, and no latents.
enum class Field { bytes, of_values, of_latents, place };

// All fields, in one place: visit(name, field of the struct, kind) for each.
template <class Stored, class Visit>
void visit_fields(Stored& s, Visit&& visit) {
  auto& c = s.config;
  visit("layers", c.layers, Field::bytes);
  visit("kv_heads", c.kv_heads, Field::bytes);
  visit("head_dim", c.head_dim, Field::bytes);
  visit("stored_head_dim", s.stored_head_dim, Field::bytes);
  visit("v_head_dim", c.v_head_dim, Field::of_values);
  visit("stored_v_head_dim", s.stored_v_head_dim, Field::of_values);
  visit("latent", c.latent, Field::of_latents);
  visit("rope", c.rope, Field::of_latents);
  visit("v_centre", c.v_centre, Field::of_latents);
  visit("k", c.k, Field::bytes);
  visit("v", c.v, Field::bytes);
  visit("k_basis", c.k_basis, Field::bytes);
  visit("v_basis", c.v_basis, Field::bytes);
  visit("k_centre", c.k_centre, Field::bytes);
  visit("lut_scales", c.lut_scales, Field::bytes);
  visit("sink_pages", c.sink_pages, Field::bytes);
  visit("tail_pages", c.tail_pages, Field::bytes);
  visit("window", c.window, Field::bytes);
  visit("window_sinks", c.window_sinks, Field::bytes);
  visit("rollback_tokens", c.rollback_tokens, Field::bytes);
  visit("exact", c.exact, Field::place);
  visit("exact_pages", s.exact, Field::place);
  visit("capacity_tokens", c.capacity_tokens, Field::place);
  visit("max_sequences", c.max_sequences, Field::place);
  visit("max_sequence_tokens", c.max_sequence_tokens, Field::place);
}

constexpr BasisKind kBasisKinds[] = {BasisKind::hadamard, BasisKind::none, BasisKind::calibrated};

std::string text_of(std::int64_t number) {
  return fmt::format("{}", number);
}
std::string text_of(int number) {
  return fmt::format("{}", number);
}
std::string text_of(const std::string& text) {
  return text;
}
std::string text_of(BasisKind kind) {
  return core::basis_name(kind);
}
std::string text_of(KeyCentre centre) {
  return centre == KeyCentre::page ? "page" : "none";
}
std::string text_of(const std::optional<Dtype>& dtype) {
  return dtype ? dtype_name(*dtype) : "unset";
}

bool parse(const std::string& text, std::int64_t& into) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), into);
  return error == std::errc() && end == text.data() + text.size();
}
bool parse(const std::string& text, int& into) {
  std::int64_t wide = 0;
  if (!parse(text, wide) || wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max()) {
    return false;
  }
  into = static_cast<int>(wide);
  return true;
}
bool parse(const std::string& text, std::string& into) {
  into = text;  // names of formats, which a cache judges
  return true;
}
bool parse(const std::string& text, BasisKind& into) {
  for (const BasisKind kind : kBasisKinds) {
    if (text == core::basis_name(kind)) return into = kind, true;
  }
  return false;
}
bool parse(const std::string& text, KeyCentre& into) {
  into = text == "page" ? KeyCentre::page : KeyCentre::none;
  return text == "page" || text == "none";
}
bool parse(const std::string& text, std::optional<Dtype>& into) {
  if (text == "unset") return into.reset(), true;
  const auto dtype = parse_dtype(text);
  if (!dtype || *dtype > Dtype::bf16) return false;
  into = *dtype;
  return true;
}

bool same(const CalibratedBasis& a, const CalibratedBasis& b) {
  return a.center == b.center && a.matrix == b.matrix && a.inverse == b.inverse;
}
bool same(const std::vector<CalibratedBasis>& a, const std::vector<CalibratedBasis>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return same(x, y); });
}

}  // namespace

StoredConfig stored_config(const CacheImpl& cache) {
  StoredConfig stored{.config = cache.config(),
                      .stored_head_dim = cache.stored_dims().k,
                      .stored_v_head_dim = cache.stored_dims().v,
                      .exact = cache.exact_dtype()};
  stored.config.v_head_dim = stored.config.v_dim();
  if (!cache.table().config().ends.any()) stored.exact.reset();
  return stored;
}

void write_config(const StoredConfig& stored, std::map<std::string, std::string>& metadata) {
  const bool one_size = stored.config.head_dim == stored.config.v_head_dim, latent = stored.config.latent > 0;
  visit_fields(stored, [&](const char* name, const auto& field, Field kind) {
    if ((kind == Field::of_values && one_size) || (kind == Field::of_latents && !latent)) return;
    metadata[std::string(kOwn) + name] = text_of(field);
  });
}

Result<StoredConfig> read_config(const std::map<std::string, std::string>& metadata) {
  StoredConfig stored;
  Status status;
  bool two_sizes = false, latent = false;
  visit_fields(stored, [&](const char* name, const auto&, Field kind) {
    if (!metadata.contains(std::string(kOwn) + name)) return;
    two_sizes |= kind == Field::of_values;
    latent |= kind == Field::of_latents;
  });
  visit_fields(stored, [&](const char* name, auto& field, Field kind) {
    if (!status || (kind == Field::of_values && !two_sizes) || (kind == Field::of_latents && !latent)) return;
    const auto found = metadata.find(std::string(kOwn) + name);
    if (found == metadata.end()) {
      status = {Code::bad_file, fmt::format("metadata {}{} is missing", kOwn, name)};
    } else if (!parse(found->second, field)) {
      status = {Code::bad_file, fmt::format("metadata {}{} is {}, which is none of its values", kOwn, name,
                                            io::in_quotes(found->second))};
    }
  });
  if (!status) return status;
  CacheConfig& c = stored.config;
  if (!two_sizes) {
    c.v_head_dim = c.head_dim;
    stored.stored_v_head_dim = stored.stored_head_dim;
  } else if (c.v_head_dim < 1) {
    return {Code::bad_file,
            fmt::format("metadata {}v_head_dim is {}: a value has at least one number", kOwn, c.v_head_dim)};
  }
  if (latent && (c.latent < 1 || c.latent != c.v_head_dim || c.rope != c.head_dim || c.kv_heads != 1)) {
    return {Code::bad_file,
            fmt::format("metadata {}latent is {} and rope {}, with head_dim {}, v_head_dim {} and kv_heads {}: rope is "
                        "head_dim, latent is v_head_dim, and kv_heads is 1",
                        kOwn, c.latent, c.rope, c.head_dim, c.v_head_dim, c.kv_heads)};
  }
  return stored;
}

bool is_config_key(const std::string& key) {
  StoredConfig any;
  bool found = false;
  visit_fields(any, [&](const char* name, const auto&, Field) { found = found || key == std::string(kOwn) + name; });
  return found;
}

std::string difference(const StoredConfig& a, const StoredConfig& b) {
  std::map<std::string, std::string> theirs;
  visit_fields(b, [&](const char* name, const auto& field, Field) { theirs[name] = text_of(field); });
  std::string first;
  visit_fields(a, [&](const char* name, const auto& field, Field kind) {
    const std::string& other = theirs[name];
    if (kind != Field::place && first.empty() && text_of(field) != other) {
      first = fmt::format("{} = {} and {}", name, io::printable(text_of(field), 80), io::printable(other, 80));
    }
  });
  if (!first.empty()) return first;
  if (a.exact && b.exact && *a.exact != *b.exact) {
    return fmt::format("exact pages in {} and {}", dtype_name(*a.exact), dtype_name(*b.exact));
  }
  if (a.config.k_levels != b.config.k_levels) return "k_levels";
  if (a.config.v_levels != b.config.v_levels) return "v_levels";
  const BasisSet *x = a.config.bases.get(), *y = b.config.bases.get();
  if (x != nullptr && y != nullptr) {
    if (a.config.k_basis == BasisKind::calibrated && !same(x->keys, y->keys)) return "the keys' calibrated bases";
    if (a.config.v_basis == BasisKind::calibrated && !same(x->values, y->values)) return "the values' calibrated bases";
  }
  return {};
}

}  // namespace kvant::snapshot
