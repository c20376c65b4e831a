#include "core/plan/attend.hpp"

#include <algorithm>

namespace kvant::core {
namespace {

// Hands out 64-byte aligned pieces of a buffer that is laid out once and used by offsets.
class Offsets {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t here = at_;
    at_ += (bytes + 63) / 64 * 64;
    return here;
  }
  [[nodiscard]] std::size_t total() const { return at_; }

 private:
  std::size_t at_ = 0;
};

}  // namespace

PreparedLayout prepared_layout(int rows, int padded_dim, bool centred) {
  const auto r = static_cast<std::size_t>(rows), d = static_cast<std::size_t>(padded_dim);
  constexpr std::size_t kGroups = codec::kMaxScaleGroups;
  Offsets at;
  PreparedLayout p{};
  p.raw = at.take(4 * r * d);
  p.basis = at.take(4 * r * d);
  p.centred = at.take(centred ? 4 * r * d : 0);
  p.ints = at.take(2 * r * d);
  p.scales = at.take(4 * r * kGroups);
  p.offsets = at.take(4 * r * kGroups);
  p.centers = at.take(4 * r);
  p.poisoned = at.take(4 * r);
  p.bytes = at.total();
  return p;
}

PartialLayout partial_layout(int rows, int v_head_dim) {
  const auto r = static_cast<std::size_t>(rows), d = static_cast<std::size_t>(v_head_dim);
  Offsets at;
  PartialLayout p{};
  p.used = at.take(4 * kDomains);
  p.m = at.take(4 * kDomains * r);
  p.l = at.take(4 * kDomains * r);
  p.poisoned = at.take(4 * r);
  p.o = at.take(4 * kDomains * r * d);
  p.bytes = at.total();
  return p;
}

ScratchLayout scratch_layout(int rows, const ItemShape& shape, RowPath path) {
  const std::size_t r = (static_cast<std::size_t>(rows) + 15) / 16 * 16;
  const auto d = static_cast<std::size_t>(shape.dims.k), dp = static_cast<std::size_t>(shape.padded_dim);
  const auto dv = static_cast<std::size_t>(shape.dims.v);
  const std::size_t latent = shape.latent ? (dv + 31) / 32 * 32 : 0;  // whole steps of the matrix path
  const std::size_t widest = std::max(dp, std::max(dv, latent));
  Offsets at;
  ScratchLayout s{};
  s.state = at.take(partial_layout(rows, shape.dims.v).bytes);
  const std::size_t tokens = static_cast<std::size_t>(kPageTokens) * (path == RowPath::matrix ? kMatrixPages : 1);
  s.scores = at.take(4 * r * tokens);
  s.rescale = at.take(4 * r);
  // Imported tables decode into it on the vector path too.
  s.tile = at.take(4 * kPageTokens * (widest + (path == RowPath::tiles && shape.latent ? dp : 0) + kTilePadding));
  if (path == RowPath::tiles) {
    s.panel_raw = at.take(4 * r * (latent + d));
    s.panel_basis = at.take(4 * r * (latent + dp));
    s.transpose = at.take(4 * kPageTokens * kTransposedRows);
  }
  if (path == RowPath::matrix) {
    s.panel_raw = at.take(kMatrixKeyBytes * r * dp);
    s.panel_basis = at.take(kMatrixKeyBytes * r * dp);
    s.latent_raw = at.take(kMatrixKeyBytes * r * latent);
    s.latent_basis = at.take(kMatrixKeyBytes * r * latent);
    s.latent_queries = at.take(shape.latents_centred ? 4 * r * latent : 0);
    s.panel_centre = at.take(shape.centred ? 4 * r * dp : 0);
    s.page = at.take(kMatrixKeyBytes * tokens * widest);
    s.weights = at.take(4 * r * tokens);
    for (std::size_t& output : s.output) output = at.take(4 * r * dv);
  }
  s.centers = at.take(4 * r);
  if (path != RowPath::vector && shape.byte_products) {
    s.digits = at.take(2 * r * dp);
    s.half_steps = at.take(4 * r * codec::kMaxScaleGroups);
    s.corrections = at.take(4 * r * codec::kMaxScaleGroups);
    s.weight_words = at.take(2 * r * kPageTokens);
    s.weight_rows = at.take(32 * r);
  }
  s.bytes = at.total();
  return s;
}

ItemLayout item_layout(int rows, const ItemShape& shape, RowPath path) {
  return {
      .rows = rows,
      .path = path,
      .prepared = path == RowPath::vector ? prepared_layout(rows, shape.padded_dim, shape.centred) : PreparedLayout{},
      .partial = partial_layout(rows, shape.dims.v),
      .scratch = scratch_layout(rows, shape, path)};
}

}  // namespace kvant::core
