// Page-centred keys: the layout and its cost, centres on every instruction set against the plain codec, what decides
// the bytes of a page, attention, and keys with a large constant part.
#include "codec/centre.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "support/bases.hpp"
#include "support/cache_session.hpp"
#include "support/draw.hpp"
#include "support/kernels.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

using core::CentreJob;
using core::Kernels;
using core::Pool;
using testing_support::Draw;
using testing_support::kernels_here;

const std::vector<std::string> kCentredFormats = {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"};

Format format_of(const std::string& name) {
  return parse_format(name).value();
}

// --- layout ----------------------------------------------------------------------------------------------------------

TEST(CentreLayout, CostsAtMost0_14BitsAKeyValueAndMovesNothingBeforeIt) {
  for (const std::string& name : kCentredFormats) {
    for (const int d : supported_head_dims()) {
      const Format f = format_of(name);
      const codec::PageLayout plain = codec::page_layout(f, f, d), centred = codec::page_layout(f, f, d, 1, true);
      EXPECT_FALSE(codec::is_centred(plain));
      ASSERT_TRUE(codec::is_centred(centred));
      const double bits = 8.0 * (centred.block_bytes - plain.block_bytes) / (kPageTokens * d);
      EXPECT_LE(bits, 0.14) << name << " " << d;
      EXPECT_EQ(centred.block_bytes % (d % 64 == 0 ? 64 : 32), 0u) << name << " " << d;
      EXPECT_EQ(centred.code_bytes, plain.code_bytes);
      EXPECT_EQ(centred.v.plane_offset[0], plain.v.plane_offset[0]);
      const codec::SideLayout c = codec::centre_layout(centred);
      EXPECT_EQ(c.plane_offset[0], centred.code_bytes);
      EXPECT_LE(c.scale_offset + 2, centred.k.scale_offset);
      EXPECT_EQ(centred.k.scale_offset % 16, 0u);
    }
  }
}

// --- the codec -------------------------------------------------------------------------------------------------------

// The definition in double: sums of floats in order, rounded after each, are within 64 rounding errors of the true
// mean.
TEST(Centre, IsTheMeanOfTheRowsInTheirBasis) {
  Draw draw(1);
  const int d = 128;
  const std::vector<float> rows = draw.gaussian(d * 60);
  std::vector<double> mean(d);
  for (int i = 0; i < d; ++i) {
    for (int t = 0; t < 60; ++t)
      mean[static_cast<std::size_t>(i)] += static_cast<double>(rows[static_cast<std::size_t>(t * d + i)]) / 60;
  }
  std::vector<float> expected(mean.begin(), mean.end());
  rotate(expected).value();
  codec::BasisRef basis;
  basis.kind = BasisKind::hadamard;
  float y[codec::kMaxHeadDim];
  codec::MeanOfRows sum(d, y);
  for (int t = 0; t < 60; ++t) sum.add(rows.data() + t * d);
  sum.finish(basis);
  for (int i = 0; i < d; ++i) EXPECT_NEAR(y[i], expected[static_cast<std::size_t>(i)], 2e-6) << i;

  // Stored and read, it is what the public codec makes of it: at 128 values tq6 has one scale.
  const codec::PageLayout page = codec::page_layout(Format::tq4, Format::tq4, d, 1, true);
  std::vector<std::byte> block(page.block_bytes);
  codec::store_centre(codec::centre_layout(page), d, block.data(), y);
  float c[codec::kMaxHeadDim];
  codec::load_centre(codec::centre_layout(page), d, block.data(), c);
  std::vector<float> decoded(d);
  decode_vector(Format::tq6, encode_vector(Format::tq6, std::vector<float>(y, y + d)).value(), decoded).value();
  EXPECT_TRUE(same_bits(decoded, std::vector<float>(c, c + d)));
}

TEST(Centre, AMeanThatCannotBeOneIsZeros) {
  const int d = 64;
  const codec::PageLayout page = codec::page_layout(Format::tq4, Format::tq4, d, 1, true);
  for (const float bad : {NAN, HUGE_VALF, -0x1p20f, 0x1p31f}) {
    float y[codec::kMaxHeadDim] = {1, 2, bad};
    codec::clean_mean(y, d);
    std::vector<std::byte> block(page.block_bytes, std::byte{0xff});
    codec::store_centre(codec::centre_layout(page), d, block.data(), y);
    codec::load_centre(codec::centre_layout(page), d, block.data(), y);
    for (int i = 0; i < d; ++i) EXPECT_EQ(y[i], 0.0f);
  }
  float largest[codec::kMaxHeadDim] = {1, -1048575.9f};
  codec::clean_mean(largest, d);
  EXPECT_EQ(largest[1], -1048575.9f);
}

// A key that is nearer to zero than to the centre is stored as it would be without one, but for its scales' signs.
TEST(Centre, AKeyMayRefuseIt) {
  Draw draw(7);
  for (const std::string& name : kCentredFormats) {
    for (const int d : {64, 256, 576}) {
      const codec::PageLayout page = codec::page_layout(format_of(name), Format::tq4, d, 1, true);
      float c[codec::kMaxHeadDim], y[codec::kMaxHeadDim], read[codec::kMaxHeadDim], other[codec::kMaxHeadDim];
      for (int i = 0; i < d; ++i) c[i] = draw.normal();
      std::vector<std::byte> block(page.block_bytes);
      codec::store_centre(codec::centre_layout(page), d, block.data(), c);
      codec::load_centre(codec::centre_layout(page), d, block.data(), c);
      for (const float share : {-1.0f, 0.0f, 0.4f, 0.499f, 0.501f, 0.6f, 1.0f, 2.0f}) {
        for (int i = 0; i < d; ++i) y[i] = c[i] * share;
        const bool refuses = share < 0.5f;
        EXPECT_EQ(codec::refuses_centre(y, c, d), refuses) << share;
        codec::store_vector(page, false, block.data(), 9, y, c);
        codec::load_vector(page, false, block.data(), 9, nullptr, read);
        EXPECT_EQ(codec::is_refused(page.k, block.data(), 9), refuses) << share;
        std::vector<std::byte> plain = block;
        for (int i = 0; i < d; ++i) other[i] = refuses ? y[i] : y[i] - c[i];
        codec::store_row_k(page.k, d, plain.data(), 9, other, nullptr);
        codec::load_row_k(page.k, d, plain.data(), 9, nullptr, other);
        for (int i = 0; i < d; ++i) ASSERT_EQ(read[i], refuses ? other[i] : other[i] + c[i]) << name << " " << share;
        for (int g = 0; g < page.k.groups; ++g) {
          const std::size_t at = codec::scale_at(page.k, 9, g);
          const unsigned stored = base::load_u16(block.data() + at), positive = base::load_u16(plain.data() + at);
          EXPECT_EQ(stored, positive | (refuses ? 0x8000u : 0u)) << name << " group " << g;
          base::store_u16(plain.data() + at, static_cast<std::uint16_t>(stored));
        }
        EXPECT_TRUE(block == plain) << name << " " << share;
      }
    }
  }
}

TEST(Centre, ZeroAndNaNCarryTheSign) {
  const int d = 64;
  for (const std::string& name : kCentredFormats) {
    const codec::PageLayout page = codec::page_layout(format_of(name), Format::tq4, d, 1, true);
    std::vector<std::byte> block(page.block_bytes);
    float c[codec::kMaxHeadDim] = {1000.0f}, y[codec::kMaxHeadDim] = {};
    const auto stored = [&] {
      codec::store_vector(page, false, block.data(), 3, y, c);
      return base::load_u16(block.data() + codec::scale_at(page.k, 3, 0));
    };
    EXPECT_EQ(stored(), 0x8000u);
    y[0] = -0x1p33f;
    EXPECT_EQ(stored(), 0xFE00u);
    y[0] = 0x1p33f;
    EXPECT_EQ(stored(), 0x7E00u);
    y[0] = NAN;  // is nearer to nothing
    EXPECT_EQ(stored(), 0x7E00u);
    y[0] = HUGE_VALF;
    EXPECT_EQ(stored(), 0x7E00u);
  }
}

// The centre of the page after this one, where keys have refused: the mean of keys as they are read, in double.
TEST(Centre, OfAPageIsTheMeanOfItsKeysAsTheyAreRead) {
  Draw draw(8);
  const int d = 128;
  for (const std::string& name : kCentredFormats) {
    const codec::PageLayout page = codec::page_layout(format_of(name), Format::tq4, d, 1, true);
    std::vector<std::byte> block(page.block_bytes);
    float c[codec::kMaxHeadDim], y[codec::kMaxHeadDim];
    for (int i = 0; i < d; ++i) c[i] = draw.normal() + 2;
    codec::store_centre(codec::centre_layout(page), d, block.data(), c);
    codec::load_centre(codec::centre_layout(page), d, block.data(), c);
    std::vector<double> mean(d);
    int refused = 0;
    for (int t = 0; t < kPageTokens; ++t) {
      for (int i = 0; i < d; ++i) y[i] = draw.normal() + (t % 3 == 0 ? 0.0f : 2.0f);
      codec::store_vector(page, false, block.data(), t, y, c);
      codec::load_vector(page, false, block.data(), t, nullptr, y);
      refused += codec::is_refused(page.k, block.data(), t) ? 1 : 0;
      for (int i = 0; i < d; ++i) mean[static_cast<std::size_t>(i)] += static_cast<double>(y[i]) / kPageTokens;
    }
    EXPECT_EQ(refused, 22) << name;
    codec::mean_of_page(page, false, block.data(), y);
    for (int i = 0; i < d; ++i) EXPECT_NEAR(y[i], mean[static_cast<std::size_t>(i)], 1e-5) << name << " " << i;
  }
}

// A job in plain code.
void make_plain(const CentreJob& job) {
  const codec::SideLayout side = codec::centre_layout(*job.layout, job.values);
  const int d = side.head_dim;
  std::vector<float> y(codec::kMaxHeadDim);
  if (job.of == CentreJob::Of::page) codec::mean_of_page(*job.layout, job.values, job.from, y.data());
  if (job.of == CentreJob::Of::rows) {
    codec::MeanOfRows mean(d, y.data());
    for (int i = 0; i < job.rows.count; ++i) {
      std::vector<float> x(static_cast<std::size_t>(d));
      for (int j = 0; j < job.rows.width; ++j) {
        const std::size_t at = static_cast<std::size_t>(i * job.rows.row_stride + j);
        const auto narrow = [&] { return static_cast<const std::uint16_t*>(job.rows.rows)[at]; };
        float v = job.rows.dtype == Dtype::f32   ? static_cast<const float*>(job.rows.rows)[at]
                  : job.rows.dtype == Dtype::f16 ? base::f16_to_f32(narrow())
                                                 : base::bf16_to_f32(narrow());
        if (job.rows.rounding == Dtype::bf16) v = base::bf16_to_f32(base::f32_to_bf16(v));
        x[static_cast<std::size_t>(j)] = v;
      }
      mean.add(x.data());
    }
    mean.finish(job.basis);
  }
  if (job.of != CentreJob::Of::stored) codec::store_centre(side, d, job.block, y.data());
  codec::load_centre(side, d, job.of == CentreJob::Of::stored ? job.from : job.block, job.centre);
}

void expect_same_centres(CentreJob job, Draw& draw, const std::string& what) {
  std::vector<std::byte> before(job.layout->block_bytes);
  for (std::byte& b : before) b = static_cast<std::byte>(draw.bits() & 0xFF);
  // A scale that is a number, where a centre is only read.
  const std::uint16_t one = 0x3C00;
  std::memcpy(before.data() + codec::centre_layout(*job.layout, job.values).scale_offset, &one, 2);
  const auto d = static_cast<std::size_t>(codec::side_of(*job.layout, job.values).head_dim);
  std::vector<std::byte> expected = before;
  std::vector<float> centre(codec::kMaxHeadDim);
  job.block = expected.data();
  if (job.of == CentreJob::Of::stored) job.from = before.data();
  job.centre = centre.data();
  make_plain(job);
  for (const Kernels* k : kernels_here()) {
    std::vector<std::byte> block = before;
    std::vector<float> got(codec::kMaxHeadDim);
    job.block = block.data();
    job.centre = got.data();
    k->centre(job);
    ASSERT_TRUE(block == expected) << k->name << " " << what;
    ASSERT_TRUE(same_bits(std::vector<float>(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(d)),
                          std::vector<float>(centre.begin(), centre.begin() + static_cast<std::ptrdiff_t>(d))))
        << k->name << " " << what;
  }
}

// Centres of keys, or of latents beside keys of another size.
void expect_the_codecs_bytes(bool values) {
  Draw draw(2);
  for (const std::string& name : kCentredFormats) {
    for (const int d : supported_head_dims()) {
      const codec::PageLayout page =
          values ? codec::page_layout(Format::tq8, format_of(name), codec::HeadDims{32, d}, 1, true, true)
                 : codec::page_layout(format_of(name), Format::tq4, d, 1, true);
      const codec::SideLayout stored = codec::centre_layout(page, values);
      const std::string what = fmt::format("{} {}", name, d);
      std::vector<float> wide = draw.loud(d * 64);
      for (float& x : wide) x += 3;
      std::vector<std::uint16_t> narrow;
      for (const float x : wide) narrow.push_back(base::f32_to_bf16(x));
      CentreJob job;
      job.values = values;
      job.layout = &page;
      expect_same_centres(job, draw, what + " stored");
      job.of = CentreJob::Of::rows;
      job.basis.kind = name == "fp8" ? BasisKind::none : BasisKind::hadamard;
      job.rows.head_dim = d;
      job.rows.width = d - static_cast<int>(draw.bits() % 7);
      job.rows.row_stride = d;
      for (const int count : {1, 64}) {
        job.rows.count = count;
        job.rows.rows = narrow.data();
        job.rows.dtype = Dtype::bf16;
        job.rows.rounding = Dtype::f32;
        expect_same_centres(job, draw, fmt::format("{} {} rows of bf16", what, count));
        job.rows.rows = wide.data();
        job.rows.dtype = Dtype::f32;
        job.rows.rounding = Dtype::bf16;
        expect_same_centres(job, draw, fmt::format("{} {} rows of f32", what, count));
      }
      wide[70] = HUGE_VALF;
      job.rows.rounding = Dtype::f32;
      job.rows.width = d;
      expect_same_centres(job, draw, what + " not finite");

      // The page before, stored centred as a cache stores it.
      std::vector<std::byte> block(page.block_bytes);
      float y[codec::kMaxHeadDim], c[codec::kMaxHeadDim];
      for (int i = 0; i < d; ++i) y[i] = draw.normal();
      codec::store_centre(stored, d, block.data(), y);
      codec::load_centre(stored, d, block.data(), c);
      for (int t = 0; t < kPageTokens; ++t) {
        const float share = static_cast<float>(draw.bits() % 3) * 0.5f;  // some of these refuse
        for (int i = 0; i < d; ++i) y[i] = c[i] * share + draw.normal() * 0.125f;
        codec::store_vector(page, values, block.data(), t, y, c);
      }
      job = CentreJob{};
      job.values = values;
      job.of = CentreJob::Of::page;
      job.layout = &page;
      job.from = block.data();
      expect_same_centres(job, draw, what + " page before");
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Centre, EveryInstructionSetMakesTheCodecsBytes) {
  expect_the_codecs_bytes(false);
}
TEST(Centre, EveryInstructionSetMakesTheCodecsBytesOfLatents) {
  expect_the_codecs_bytes(true);
}

TEST(Centre, OfACalibratedBasis) {
  Draw draw(3);
  for (const int d : {64, 112, 320}) {
    const codec::PageLayout page = codec::page_layout(Format::tq4, Format::tq4, d, 1, true);
    const std::vector<float> rows = draw.gaussian(d * 64), matrix = draw.gaussian(d * d), center = draw.gaussian(d);
    CentreJob job;
    job.of = CentreJob::Of::rows;
    job.layout = &page;
    job.basis = {BasisKind::calibrated, center.data(), matrix.data(), nullptr};
    job.rows.head_dim = job.rows.width = d;
    job.rows.row_stride = d;
    job.rows.count = 64;
    job.rows.rows = rows.data();
    expect_same_centres(job, draw, fmt::format("calibrated {}", d));
  }
}

// --- what decides the bytes ------------------------------------------------------------------------------------------

CacheConfig centred_config(const std::string& k = "tq4", int sinks = 1, int tails = 1) {
  CacheConfig c = small_config();
  c.k = k;
  c.v = "tq4";
  c.k_centre = KeyCentre::page;
  c.sink_pages = sinks;
  c.tail_pages = tails;
  return c;
}

// Each encoded page's bytes, of all layers and heads, that attention reads.
std::vector<std::vector<std::byte>> encoded_pages(const Cache& cache, SequenceId id) {
  const CacheImpl& impl = cache.impl();
  const auto view = impl.view(id).value();
  std::vector<std::vector<std::byte>> pages;
  for (std::size_t p = 0; p < view.pages.size(); ++p) {
    std::vector<std::byte> bytes;
    if (view.pages[p] != core::PageRef{} && !impl.reads_exact(view, static_cast<std::int64_t>(p))) {
      for (int layer = 0; layer < impl.config().layers; ++layer) {
        for (int head = 0; head < impl.config().kv_heads; ++head) {
          const std::byte* at = impl.block(Pool::encoded, view.pages[p].encoded, layer, head);
          bytes.insert(bytes.end(), at, at + impl.layout(Pool::encoded).block_bytes);
        }
      }
    }
    pages.push_back(bytes);
  }
  return pages;
}

struct Ends {
  int sinks, tails;
};
const std::vector<Ends> kEnds = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {1, 2}};

using Chunks = std::vector<std::int64_t>;

// Tokens 0 to 447, in steps of so many.
std::vector<std::vector<std::byte>> pages_by(CacheConfig config, const Chunks& chunks, int threads) {
  config.threads = threads;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  std::int64_t n = 0;
  for (std::size_t i = 0; n < 448; ++i) {
    const std::int64_t count = std::min(448 - n, chunks[i % chunks.size()]);
    append(cache, id, static_cast<std::uint64_t>(n), count).value();
    n += count;
  }
  return encoded_pages(cache, id);
}

// With a tail the tokens decide. Without one it matters, too, which pages a step covers from first to last.
TEST(CentredBytes, DependOnTokensAndWithoutATailOnPagesThatAStepCovers) {
  const std::vector<Chunks> by_parts = {{1}, {7}, {63, 1}, {40}}, whole = {{448}, {64}, {128}},
                            mixed = {{65}, {5, 200}};
  for (const Ends& ends : kEnds) {
    for (const std::string k : {"tq4", "fp8"}) {
      const CacheConfig config = centred_config(k, ends.sinks, ends.tails);
      const auto expect_equal = [&](const std::vector<Chunks>& chunkings, const auto& expected) {
        for (const Chunks& chunks : chunkings) {
          for (const int threads : {1, 3}) {
            EXPECT_TRUE(pages_by(config, chunks, threads) == expected)
                << k << " sinks " << ends.sinks << " tails " << ends.tails << " chunks of " << chunks[0];
          }
        }
      };
      const auto at_once = pages_by(config, {448}, 1), one_by_one = pages_by(config, {1}, 1);
      expect_equal(whole, at_once);
      expect_equal(by_parts, one_by_one);
      if (ends.tails > 0) expect_equal(mixed, at_once);
      for (std::size_t p = 0; p < at_once.size(); ++p)
        EXPECT_EQ(at_once[p] == one_by_one[p], ends.tails > 0 || p == 0 || at_once[p].empty()) << p;
    }
  }
}

TEST(CentredBytes, DoNotDependOnThreadsInALargeStep) {
  for (const Ends& ends : kEnds) {
    CacheConfig config = centred_config("tq4", ends.sinks, ends.tails);
    config.head_dim = 128;
    config.threads = 1;
    Cache one = make(config);
    config.threads = 4;
    Cache four = make(config);
    const SequenceId a = one.add_sequence(), b = four.add_sequence();
    append(one, a, 0, 1024).value();
    append(four, b, 0, 1024).value();
    EXPECT_TRUE(encoded_pages(one, a) == encoded_pages(four, b)) << ends.sinks << " " << ends.tails;
  }
}

TEST(CentredBytes, AreTheSameAfterTruncationAndInForks) {
  for (const Ends& ends : kEnds) {
    const CacheConfig config = centred_config("tq4", ends.sinks, ends.tails);
    Cache cache = make(config);
    // In steps that cover the same pages as below.
    const auto plain = [&](std::int64_t first, std::int64_t then) {
      const SequenceId id = cache.add_sequence();
      append(cache, id, 0, first).value();
      for (std::int64_t n = first; n < 384; n += then)
        append(cache, id, static_cast<std::uint64_t>(n), std::min(then, 384 - n)).value();
      return encoded_pages(cache, id);
    };

    const SequenceId truncated = cache.add_sequence();
    for (std::int64_t n = 0; n < 384; n += 48) {
      append(cache, truncated, static_cast<std::uint64_t>(n), 48).value();
      append(cache, truncated, 5000, 64).value();
      cache.truncate(truncated, n + 48).value();
    }
    EXPECT_TRUE(encoded_pages(cache, truncated) == plain(48, 48)) << ends.sinks << " " << ends.tails;

    for (const std::int64_t at : {30, 64, 100, 200, 320}) {
      const SequenceId parent = cache.add_sequence();
      append(cache, parent, 0, at).value();
      const SequenceId child = cache.fork(parent).value();
      append(cache, parent, 7000, 150).value();  // writes to the shared page first
      append(cache, child, static_cast<std::uint64_t>(at), 384 - at).value();
      EXPECT_TRUE(encoded_pages(cache, child) == plain(at, 384)) << ends.sinks << " " << ends.tails << " at " << at;
    }
  }
}

// Without a tail a page may need the one before, which a window must not have released.
TEST(CentredBytes, UnderAWindow) {
  for (const std::int64_t window : {1, 64, 100}) {
    for (const std::int64_t chunk : {1, 64, 300}) {
      CacheConfig config = centred_config("tq4", 0, 0);
      Cache all = make(config);
      config.window = window;
      config.window_sinks = 3;
      Cache cache = make(config);
      const SequenceId expected = all.add_sequence(), id = cache.add_sequence();
      for (std::int64_t n = 0; n < 896; n += chunk) {
        append(all, expected, static_cast<std::uint64_t>(n), std::min(chunk, 896 - n)).value();
        append(cache, id, static_cast<std::uint64_t>(n), std::min(chunk, 896 - n)).value();
      }
      const auto pages = encoded_pages(cache, id), wanted = encoded_pages(all, expected);
      ASSERT_TRUE(pages[3].empty());  // the window did release
      for (std::size_t p = 0; p < pages.size(); ++p) {
        if (!pages[p].empty()) {
          EXPECT_TRUE(pages[p] == wanted[p]) << window << " " << chunk << " page " << p;
        }
      }
    }
  }
}

// Truncated beyond its exact copy, a page goes on with the centre it has; what is left of it does not change.
TEST(CentredBytes, APageThatStaysEncodedKeepsItsCentre) {
  Cache cache = make(centred_config("tq6"));
  const SequenceId id = cache.add_sequence();
  append(cache, id, 0, 500).value();
  const Decoded before = read_all(cache, id);
  cache.truncate(id, 100).value();
  ASSERT_EQ(states(cache, id), "Ee");
  append(cache, id, 100, 28).value();
  const Decoded after = read_all(cache, id);
  const std::size_t all = 128 * 2 * 32;
  expect_same({std::vector<float>(before.keys.begin(), before.keys.begin() + all),
               std::vector<float>(before.values.begin(), before.values.begin() + all)},
              after);
}

// The keys of a page, as read, are what the codec makes of them with the page's own mean, that of a first page with its
// first key.
TEST(CentredBytes, AreThePageEncodedAroundItsCentre) {
  for (const bool first_page : {false, true}) {
    const CacheConfig config = centred_config("tq5", first_page ? 0 : 1, 1);
    Cache cache = make(config);
    const SequenceId id = cache.add_sequence();
    append(cache, id, 0, 300).value();
    const int page = first_page ? 0 : 1, d = 32;
    const CacheRows rows = rows_for(cache, static_cast<std::uint64_t>(page * 64), 64);
    const auto row = [&](int t, int head) {
      return std::vector<float>(static_cast<const float*>(rows.keys().data) + (t * 2 + head) * d,
                                static_cast<const float*>(rows.keys().data) + (t * 2 + head + 1) * d);
    };
    Decoded got;
    read(cache, id, page * 64, page * 64 + 64, got).value();
    for (int head = 0; head < 2; ++head) {
      std::vector<float> mean(d);
      for (int t = 0; t < (first_page ? 1 : 64); ++t) {
        for (int i = 0; i < d; ++i) mean[static_cast<std::size_t>(i)] += row(t, head)[static_cast<std::size_t>(i)];
      }
      for (float& x : mean) x *= first_page ? 1.0f : 1.0f / 64;
      rotate(mean).value();
      std::vector<float> c(d), y(d);
      int refused = 0;
      decode_vector(Format::tq6, encode_vector(Format::tq6, mean).value(), c).value();
      for (int t = 0; t < 64; ++t) {
        std::vector<float> x = row(t, head);
        rotate(x).value();
        double from_zero = 0, from_centre = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          from_zero += double{x[i]} * x[i];
          from_centre += (double{x[i]} - c[i]) * (double{x[i]} - c[i]);
        }
        const bool centred = from_zero >= from_centre;
        refused += centred ? 0 : 1;
        for (std::size_t i = 0; centred && i < x.size(); ++i) x[i] -= c[i];
        decode_vector(Format::tq5, encode_vector(Format::tq5, x).value(), y).value();
        for (std::size_t i = 0; centred && i < y.size(); ++i) y[i] += c[i];
        rotate_back(y).value();
        const auto at = got.keys.begin() + (t * 2 + head) * d;
        ASSERT_TRUE(same_bits(y, std::vector<float>(at, at + d))) << "token " << t << " head " << head;
      }
      EXPECT_GT(refused, 0);
      EXPECT_LT(refused, 64);
    }
  }
}

}  // namespace
}  // namespace kvant::test
