// Imported cache layouts: the codes that went in are the codes that are stored, and they decode to the layout's own
// formula. Attention over imported caches is in golden_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "codec/pack.hpp"
#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"
#include "support/inputs.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using test::refused;

// A cache of the parents, filled at random; slots from `used` on hold junk codes and NaN norms.
struct Legacy {
  int kv_heads, head_dim;
  std::int64_t capacity;
  LegacyLayout layout;
  std::vector<float> codebook;
  std::vector<std::uint8_t> codes[2];  // [kv_heads][capacity][head_dim], without junk bits
  std::vector<std::uint8_t> packed[2];
  std::vector<float> norms[2];

  Legacy(int heads, int dim, int bits, bool nibbles, int norms_per_position, std::int64_t slots, std::int64_t used)
      : kv_heads(heads), head_dim(dim), capacity(slots) {
    test::Rng rng(static_cast<std::uint64_t>(dim + bits));
    for (int i = 0; i < 1 << bits; ++i) codebook.push_back(static_cast<float>(i - (1 << (bits - 1))) * 0.17f + 0.03f);
    layout = {.nibble_pairs = nibbles,
              .bits = bits,
              .norms_per_position = norms_per_position,
              .scale_factor_d512 = 16,
              .codebook = codebook};
    for (int side = 0; side < 2; ++side) {
      for (std::int64_t i = 0; i < heads * slots * dim; ++i) {
        const auto byte = static_cast<std::uint8_t>(rng.below(256));
        codes[side].push_back(static_cast<std::uint8_t>(byte & ((1 << bits) - 1)));
        if (!nibbles) packed[side].push_back(byte);
      }
      for (std::size_t i = 0; nibbles && i < codes[side].size(); i += 2) {
        packed[side].push_back(static_cast<std::uint8_t>(codes[side][i] | codes[side][i + 1] << 4));
      }
      for (std::int64_t i = 0; i < heads * slots * norms_per_position; ++i) {
        const bool junk = i / norms_per_position % slots >= used;
        norms[side].push_back(junk ? std::numeric_limits<float>::quiet_NaN()
                                   : static_cast<float>(1 + 9 * rng.uniform()));
      }
    }
  }
  [[nodiscard]] LegacyTensors tensors() const {
    return {packed[0].data(), packed[1].data(), norms[0].data(), norms[1].data(), capacity};
  }
  // The layout's formula, in double.
  [[nodiscard]] double value(int side, int head, std::int64_t slot, int i) const {
    const std::int64_t vector = head * capacity + slot;
    const int per = layout.norms_per_position;
    const double level = static_cast<double>(codebook[codes[side][static_cast<std::size_t>(vector * head_dim + i)]]);
    const double norm = static_cast<double>(norms[side][static_cast<std::size_t>(vector * per + i * per / head_dim)]);
    return per == 1 ? level * norm / std::sqrt(static_cast<double>(head_dim)) : level * norm / 16;
  }
};

Cache cache_for(const Legacy& legacy, int layers = 1, bool queries_unrotated = false, bool outputs_unrotated = false) {
  return Cache::create(legacy_config(layers, legacy.kv_heads, legacy.head_dim, legacy.layout, queries_unrotated,
                                     outputs_unrotated)
                           .value())
      .value();
}

struct Decoded {
  std::vector<float> side[2];
};

Decoded read(const Cache& cache, SequenceId id, int layer = 0) {
  const CacheConfig& c = cache.config();
  const std::int64_t n = cache.length(id).value();
  Decoded out;
  for (auto& x : out.side) x.resize(static_cast<std::size_t>(n * c.kv_heads * c.head_dim));
  cache
      .read(id, layer, 0, n, MutableTensorView::of(out.side[0].data(), n, c.kv_heads, c.head_dim),
            MutableTensorView::of(out.side[1].data(), n, c.kv_heads, c.head_dim))
      .value();
  return out;
}

struct Variant {
  int head_dim, bits;
  bool nibbles;
  int norms;
};

class Import : public testing::TestWithParam<Variant> {};

TEST_P(Import, KeepsCodesAndNormsAndTheirMeaning) {
  const Variant v = GetParam();
  const Legacy legacy(2, v.head_dim, v.bits, v.nibbles, v.norms, 100, 90);
  Cache cache = cache_for(legacy);
  const SequenceId id = cache.add_sequence();
  // A ring that has wrapped: logical order starts in the middle; in two imports that meet inside a page.
  std::vector<std::int64_t> slots(90);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>((i + 37) % 90);
  const std::span<const std::int64_t> all = slots;
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), all.first(70)).ok());
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), all.subspan(70)).ok());
  ASSERT_EQ(cache.length(id).value(), 90);

  const auto view = cache.impl().view(id).value();
  const codec::PageLayout& layout = cache.impl().layout(core::Pool::encoded);
  const Decoded decoded = read(cache, id);
  for (std::size_t t = 0; t < slots.size(); ++t) {
    for (int head = 0; head < 2; ++head) {
      const std::byte* block = cache.impl().block(core::Pool::encoded, view.pages[t / 64].encoded, 0, head);
      for (int side = 0; side < 2; ++side) {
        const auto vector = static_cast<std::size_t>(head * 100 + slots[t]);
        const codec::SideLayout& s = side == 0 ? layout.k : layout.v;
        std::uint8_t codes[codec::kMaxHeadDim];
        (side == 0 ? codec::get_k_codes : codec::get_v_codes)(s, v.head_dim, block, static_cast<int>(t % 64), codes);
        ASSERT_TRUE(std::equal(codes, codes + v.head_dim,
                               legacy.codes[side].begin() + static_cast<std::ptrdiff_t>(vector) * v.head_dim));
        for (int n = 0; n < v.norms; ++n) {
          ASSERT_EQ(codec::get_scale(s, block, static_cast<int>(t % 64), n),
                    legacy.norms[side][vector * static_cast<std::size_t>(v.norms) + static_cast<std::size_t>(n)]);
        }
        for (int i = 0; i < v.head_dim; ++i) {
          const double expected = legacy.value(side, head, slots[t], i);
          const std::size_t at = (t * 2 + static_cast<std::size_t>(head)) * static_cast<std::size_t>(v.head_dim);
          // One rounding of the level, one of the product.
          ASSERT_NEAR(decoded.side[side][at + static_cast<std::size_t>(i)], expected, std::abs(expected) * 0x1p-23);
        }
      }
    }
  }
}

// Saved and loaded, or copied to another cache, it has the same codes, norms and tables, and takes more imports.
TEST_P(Import, GoesOnInFilesAndOtherCaches) {
  const Variant v = GetParam();
  const Legacy legacy(2, v.head_dim, v.bits, v.nibbles, v.norms, 200, 200);
  Cache cache = cache_for(legacy, 2);
  const SequenceId id = cache.add_sequence();
  std::vector<std::int64_t> slots(200);
  std::iota(slots.begin(), slots.end(), std::int64_t{0});
  const auto import = [&](Cache& to, SequenceId sequence, std::size_t begin, std::size_t count) {
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(
          import_legacy(to, sequence, layer, legacy.layout, legacy.tensors(), std::span(slots).subspan(begin, count))
              .ok());
    }
  };
  import(cache, id, 0, 150);
  const SequenceId fork = cache.fork(id).value();
  import(cache, fork, 150, 20);
  const std::vector<SequenceId> both{id, fork};
  const test::TemporaryDirectory directory;
  const std::string path = directory / "imported.kvs";
  save(cache, path).value();
  ASSERT_TRUE(Snapshot::open(path).value().verify().ok());
  Loaded loaded = load(path).value();
  EXPECT_TRUE(loaded.cache.config().k_levels == cache.config().k_levels);
  EXPECT_TRUE(loaded.cache.config().v_levels == cache.config().v_levels);
  Cache other = cache_for(legacy, 2);
  const std::vector<SequenceId> copies = copy_sequences(cache, both, other).value();
  for (int more = 0; more < 2; ++more) {
    const auto wanted = test::contents(cache.impl(), both);
    test::expect_same(wanted, test::contents(loaded.cache.impl(), loaded.sequences));
    test::expect_same(wanted, test::contents(other.impl(), copies));
    for (std::size_t i = 0; i < 2; ++i) {
      const std::vector<float> answer = test::answers(cache, both[i], 1, 5);
      EXPECT_TRUE(test::same_bits(answer, test::answers(loaded.cache, loaded.sequences[i], 1, 5)));
      EXPECT_TRUE(test::same_bits(answer, test::answers(other, copies[i], 1, 5)));
    }
    import(cache, id, 170, 30);
    import(loaded.cache, loaded.sequences[0], 170, 30);
    import(other, copies[0], 170, 30);
  }
  Legacy changed = legacy;  // another table of levels is another cache
  for (float& level : changed.codebook) level *= 2;
  changed.layout.codebook = changed.codebook;
  Cache wrong = cache_for(changed, 2);
  EXPECT_TRUE(refused(Snapshot::open(path).value().load_into(wrong).status(), Code::invalid_argument, {"k_levels"}));
  EXPECT_TRUE(refused(copy_sequences(cache, both, wrong).status(), Code::invalid_argument, {"k_levels"}));
}

INSTANTIATE_TEST_SUITE_P(Layouts, Import,
                         testing::Values(Variant{256, 4, true, 1}, Variant{64, 4, false, 1}, Variant{256, 5, false, 1},
                                         Variant{512, 5, false, 2}, Variant{512, 6, false, 2},
                                         Variant{256, 8, false, 1}, Variant{512, 8, false, 2},
                                         Variant{512, 4, true, 1}),
                         [](const testing::TestParamInfo<Variant>& each) {
                           return std::to_string(each.param.head_dim) + (each.param.nibbles ? "nibbles" : "bytes") +
                                  std::to_string(each.param.bits) + "norms" + std::to_string(each.param.norms);
                         });

TEST(ImportBasis, FollowsWhereRotationsAreDone) {
  const Legacy legacy(1, 128, 4, true, 1, 5, 5);
  Cache cache = cache_for(legacy, 1, true, true);
  EXPECT_EQ(cache.config().k_basis, BasisKind::hadamard);
  EXPECT_EQ(cache.config().v_basis, BasisKind::hadamard);
  const SequenceId id = cache.add_sequence();
  const std::int64_t slots[] = {4, 0};
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), slots).ok());
  Decoded decoded = read(cache, id);
  for (auto& x : decoded.side) {
    for (std::size_t t = 0; t < 2; ++t) rotate(std::span(x).subspan(t * 128, 128)).value();
  }
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < 128; ++i) {
      EXPECT_NEAR(decoded.side[side][static_cast<std::size_t>(i)], legacy.value(side, 0, 4, i), 1e-5);
    }
  }
  EXPECT_EQ(cache_for(legacy).config().k_basis, BasisKind::none);
  EXPECT_EQ(cache_for(legacy, 1, true, false).config().v_basis, BasisKind::none);
}

TEST(ImportStep, LayersFillOneReservation) {
  const Legacy legacy(2, 64, 4, true, 1, 20, 20);
  Cache cache = cache_for(legacy, 2);
  const SequenceId id = cache.add_sequence();
  std::vector<std::int64_t> slots(10);
  std::iota(slots.begin(), slots.end(), 3);
  ASSERT_TRUE(import_legacy(cache, id, 1, legacy.layout, legacy.tensors(), slots).ok());
  EXPECT_TRUE(cache.impl().layer_ready(id, 1));
  EXPECT_FALSE(cache.impl().layer_ready(id, 0));
  EXPECT_TRUE(refused(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), std::span(slots).first(9)),
                      Code::invalid_argument, {"9 tokens for layer 0", "lacks the 10 tokens"}));
  EXPECT_TRUE(refused(import_legacy(cache, id, 1, legacy.layout, legacy.tensors(), slots), Code::invalid_argument,
                      {"layer 0", "not written"}));
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), slots).ok());
  EXPECT_EQ(read(cache, id, 0).side[0], read(cache, id, 1).side[0]);
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), {}).ok());
  EXPECT_EQ(cache.length(id).value(), 10);
}

// An imported cache is an ordinary one: forks, truncation, and appending vectors, which its levels then quantise.
TEST(ImportStep, GoesOnAsAnyCache) {
  const Legacy legacy(2, 64, 8, false, 1, 100, 100);
  Cache cache = cache_for(legacy);
  const SequenceId id = cache.add_sequence();
  std::vector<std::int64_t> slots(100);
  std::iota(slots.begin(), slots.end(), 0);
  ASSERT_TRUE(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), slots).ok());
  const Decoded before = read(cache, id);
  const SequenceId child = cache.fork(id).value();
  const test::CacheRows rows(test::token_range(0, 30), 0, 2, 64);
  ASSERT_TRUE(cache.append(child, 0, rows.keys(), rows.values()).ok());
  const Decoded after = read(cache, child);
  EXPECT_TRUE(std::equal(before.side[0].begin(), before.side[0].end(), after.side[0].begin()));
  double error = 0, norm = 0;
  const auto* keys = static_cast<const float*>(rows.keys().data);
  for (std::size_t i = 0; i < 30 * 2 * 64; ++i) {
    error += std::pow(static_cast<double>(after.side[0][before.side[0].size() + i] - keys[i]), 2);
    norm += std::pow(static_cast<double>(keys[i]), 2);
  }
  EXPECT_LT(error / norm, 1e-3);
  EXPECT_EQ(read(cache, id).side[1], before.side[1]);
  ASSERT_TRUE(cache.truncate(child, 100).ok());
  EXPECT_EQ(read(cache, child).side[1], before.side[1]);
}

TEST(ImportRefusals, Layouts) {
  const Legacy legacy(1, 64, 4, true, 1, 4, 4);
  const auto refuses = [&](auto change, std::initializer_list<const char*> parts) {
    LegacyLayout layout = legacy.layout;
    change(layout);
    return refused(legacy_config(1, 1, 64, layout, false, false).status(), Code::invalid_argument, parts);
  };
  using L = LegacyLayout;
  EXPECT_TRUE(refuses([](L& l) { l.bits = 7; }, {"layout.bits = 7", "4, 5, 6 or 8"}));
  EXPECT_TRUE(refuses([](L& l) { l.bits = -1; }, {"layout.bits = -1"}));
  EXPECT_TRUE(refuses([](L& l) { l.bits = 5; }, {"layout.bits = 5", "nibble_pairs"}));
  EXPECT_TRUE(refuses([](L& l) { l.norms_per_position = 3; }, {"norms_per_position = 3"}));
  EXPECT_TRUE(refuses([](L& l) { l.codebook = l.codebook.first(15); }, {"codebook has 15 values", "4 bits take 16"}));
  EXPECT_TRUE(refuses([](L& l) { l.codebook = {}; }, {"codebook has 0 values"}));
  EXPECT_TRUE(refuses(
      [](L& l) {
        l.norms_per_position = 2;
        l.scale_factor_d512 = 0;
      },
      {"scale_factor_d512 = 0"}));
  std::vector<float> broken = legacy.codebook;
  broken[3] = broken[2];
  EXPECT_TRUE(refuses([&](L& l) { l.codebook = broken; }, {"codebook[3]", "strictly ascending"}));
  EXPECT_TRUE(refused(legacy_config(1, 1, 65, legacy.layout, false, false).status(), Code::invalid_argument,
                      {"head_dim = 65"}));
}

TEST(ImportRefusals, TensorsAndCaches) {
  Legacy legacy(2, 64, 4, true, 1, 4, 3);
  Cache cache = cache_for(legacy);
  const SequenceId id = cache.add_sequence();
  const std::int64_t slots[] = {0, 1, 2};
  const auto refuses = [&](auto change, Code code, std::initializer_list<const char*> parts) {
    LegacyTensors tensors = legacy.tensors();
    change(tensors);
    return refused(import_legacy(cache, id, 0, legacy.layout, tensors, slots), code, parts);
  };
  using T = LegacyTensors;
  EXPECT_TRUE(refuses([](T& t) { t.k_packed = nullptr; }, Code::invalid_argument, {"k_packed is null"}));
  EXPECT_TRUE(refuses([](T& t) { t.v_packed = nullptr; }, Code::invalid_argument, {"v_packed is null"}));
  EXPECT_TRUE(refuses([](T& t) { t.k_norms = nullptr; }, Code::invalid_argument, {"k_norms is null"}));
  EXPECT_TRUE(refuses([](T& t) { t.v_norms = nullptr; }, Code::invalid_argument, {"v_norms is null"}));
  EXPECT_TRUE(refuses([](T& t) { t.capacity = -1; }, Code::invalid_argument, {"capacity = -1"}));
  EXPECT_TRUE(refuses([](T& t) { t.capacity = 2; }, Code::invalid_argument, {"slots[2] = 2", "0 to 1"}));
  const std::int64_t unwritten[] = {0, 3};
  EXPECT_TRUE(refused(import_legacy(cache, id, 0, legacy.layout, legacy.tensors(), unwritten), Code::non_finite,
                      {"k_norms: kv head 0, slot 3 is nan"}));
  legacy.norms[1][4 + 1] = -std::numeric_limits<float>::infinity();
  EXPECT_TRUE(refuses([](T&) {}, Code::non_finite, {"v_norms: kv head 1, slot 1 is -inf"}));
  EXPECT_EQ(cache.length(id).value(), 0);
  legacy.norms[1][4 + 1] = 1;
  EXPECT_TRUE(refused(import_legacy(cache, SequenceId{9}, 0, legacy.layout, legacy.tensors(), slots),
                      Code::invalid_argument, {"sequence = 9"}));
  EXPECT_TRUE(refused(import_legacy(cache, id, 1, legacy.layout, legacy.tensors(), slots), Code::invalid_argument,
                      {"layer = 1"}));

  Cache other = Cache::create({.layers = 1, .kv_heads = 2, .head_dim = 64}).value();
  const SequenceId there = other.add_sequence();
  EXPECT_TRUE(refused(import_legacy(other, there, 0, legacy.layout, legacy.tensors(), slots), Code::invalid_argument,
                      {"k = tq6, v = tq4", "lut4", "legacy_config"}));
  std::vector<float> changed = legacy.codebook;
  changed[0] -= 1;
  legacy.layout.codebook = changed;
  EXPECT_TRUE(refuses([](T&) {}, Code::invalid_argument, {"its codebook as levels"}));
}

}  // namespace
}  // namespace kvant
