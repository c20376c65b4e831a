// Cache::decode: kernels against the codec's definition, token by token and bit for bit; then ranges, dtypes, strides
// and threads against Cache::read, which is that definition; and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "codec/basis.hpp"
#include "codec/store.hpp"
#include "core/backend.hpp"
#include "support/bases.hpp"
#include "support/cache_session.hpp"
#include "support/draw.hpp"
#include "support/kernels.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

using namespace test;
using testing_support::Draw;

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};

// --- kernels ---------------------------------------------------------------------------------------------------------

// A page of gaussian vectors, encoded by the codec itself.
struct Page {
  Format format;
  int head_dim;
  codec::PageLayout layout;
  std::vector<float> levels, center, matrix;
  std::vector<std::byte> block;

  Page(Format f, int dim, int groups, Draw& draw)
      : format(f), head_dim(dim), layout(codec::page_layout(f, f, dim, groups)), block(layout.block_bytes) {
    if (codec::is_lut(f)) levels = draw.gaussian(1 << codec::format_bits(f));
    std::sort(levels.begin(), levels.end());
    center = draw.gaussian(dim);
    if (f == Format::tq4) matrix = draw.gaussian(dim * dim);
    for (int t = 0; t < kPageTokens; ++t) {
      const std::vector<float> k = draw.gaussian(dim), v = draw.loud(dim);
      codec::store_row_k(layout.k, dim, block.data(), t, k.data(), levels.data());
      codec::store_row_v(layout.v, dim, block.data(), t, v.data(), levels.data());
    }
  }
  [[nodiscard]] core::DecodeJob job(bool values, BasisKind basis) const {
    core::DecodeJob j;
    j.side = values ? &layout.v : &layout.k;
    j.head_dim = j.width = head_dim;
    j.block = block.data();
    j.basis = {.kind = basis, .center = center.data(), .matrix = nullptr, .inverse = matrix.data()};
    j.levels = levels.data();
    return j;
  }
};

// The definition.
std::vector<float> plain(const core::DecodeJob& job, bool values, int token) {
  std::vector<float> x(static_cast<std::size_t>(job.head_dim));
  (values ? codec::load_row_v : codec::load_row_k)(*job.side, job.head_dim, job.block, token, job.levels, x.data());
  for (std::size_t j = 0; job.centre != nullptr && j < x.size(); ++j) x[j] += job.centre[j];
  codec::output_from_basis(job.basis, job.head_dim, x.data(), 1.0f);
  return x;
}

void expect_definition(const core::Kernels& kernels, core::DecodeJob job, bool values, Draw& draw) {
  const auto d = static_cast<std::size_t>(job.width);
  job.first = static_cast<int>(draw.bits() % 64);
  job.count = 1 + static_cast<int>(draw.bits() % static_cast<unsigned>(kPageTokens - job.first));
  if (draw.bits() % 3 == 0) job.first = 0, job.count = kPageTokens;
  job.dtype = kDtypes[draw.bits() % 3];
  job.row_stride = job.width + static_cast<int>(draw.bits() % 3);
  const std::size_t size = dtype_size(job.dtype), first = draw.bits() % 5;  // misaligns rows
  const auto rows = static_cast<std::size_t>(job.count), stride = static_cast<std::size_t>(job.row_stride);
  std::vector<std::byte> got((first + rows * stride + 8) * size, std::byte{0x5a});
  std::vector<std::byte> expected = got;
  job.rows = got.data() + first * size;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::vector<float> x = plain(job, values, job.first + static_cast<int>(i));
    for (std::size_t j = 0; j < d; ++j) store_as(job.dtype, expected.data(), first + i * stride + j, x[j]);
  }
  (values ? kernels.decode_v : kernels.decode_k)(job);
  const auto differs = std::mismatch(got.begin(), got.end(), expected.begin()).first - got.begin();
  ASSERT_EQ(differs, static_cast<std::ptrdiff_t>(got.size()))
      << kernels.name << ' ' << format_info(job.side->format).name << (values ? " values" : " keys") << ", head_dim "
      << job.head_dim << ", width " << job.width << ", groups " << job.side->groups << ", basis "
      << static_cast<int>(job.basis.kind) << ", " << dtype_name(job.dtype) << ", tokens " << job.first << " + "
      << job.count << ", row_stride " << job.row_stride;
}

TEST(DecodeKernels, GiveTheCodecsBitsOnEveryInstructionSet) {
  Draw draw(1);
  for (const FormatInfo& info : formats()) {
    for (const int head_dim : supported_head_dims()) {
      for (const int groups : {1, 2}) {
        if (groups > 1 && (!codec::is_lut(info.format) || head_dim % 32 != 0)) continue;
        const Page page(info.format, head_dim, groups, draw);
        for (const core::Kernels* kernels : testing_support::kernels_here()) {
          for (const BasisKind basis : {BasisKind::none, BasisKind::hadamard, BasisKind::calibrated}) {
            // The cost of this definition grows with the square of head_dim, and not with the format.
            if (basis == BasisKind::calibrated && info.format != Format::tq4) continue;
            for (const bool values : {false, true}) {
              expect_definition(*kernels, page.job(values, basis), values, draw);
              core::DecodeJob centred = page.job(values, basis);
              const std::vector<float> centre = draw.gaussian(head_dim);
              centred.centre = centre.data();
              if (!values && codec::takes_centre(info.format)) expect_definition(*kernels, centred, values, draw);
              core::DecodeJob cut = page.job(values, basis);
              cut.width = 1 + static_cast<int>(draw.bits() % static_cast<unsigned>(head_dim));
              expect_definition(*kernels, cut, values, draw);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(DecodeKernels, RoundToNearestEvenAndOverflowToInfinity) {
  // As f32 rows, so that what is to be rounded can be chosen.
  std::vector<float> x(32, 1.0f);
  const float chosen[] = {65519.9f,    65520.0f,     -65520.0f,       3.4e38f,
                          -3.4e38f,    1 + 0x1p-11f, 1 + 0x3p-11f,    1 + 0x1p-8f,
                          -0.0f,       1 + 0x3p-8f,  0x1p-24f * 1.5f, 0x1p-25f,
                          0x1.8p-25f,  0x1p-133f,    65504.0f,        std::numeric_limits<float>::infinity(),
                          0x1.fep127f, 0x1.ffp127f};
  std::copy(std::begin(chosen), std::end(chosen), x.begin());
  const codec::PageLayout layout = codec::page_layout(Format::f32, Format::f32, 32);
  std::vector<std::byte> block(layout.block_bytes);
  codec::store_row_k(layout.k, 32, block.data(), 5, x.data(), nullptr);
  for (const core::Kernels* kernels : testing_support::kernels_here()) {
    for (const Dtype dtype : kDtypes) {
      std::vector<std::byte> got(32 * dtype_size(dtype));
      core::DecodeJob job;
      job.side = &layout.k;
      job.head_dim = job.width = 32;
      job.block = block.data();
      job.first = 5;
      job.count = 1;
      job.rows = got.data();
      job.row_stride = 32;
      job.dtype = dtype;
      kernels->decode_k(job);
      EXPECT_EQ(got, pack_as(dtype, x)) << kernels->name << ' ' << dtype_name(dtype);
    }
  }
}

// --- caches ----------------------------------------------------------------------------------------------------------

// An output tensor and all bytes around its elements.
struct Output {
  std::vector<std::byte> bytes;
  MutableTensorView view;
  static constexpr std::size_t kFirst = 3;  // element: misaligns rows

  Output(Dtype dtype, std::int64_t elements)
      : bytes((kFirst + static_cast<std::size_t>(elements)) * dtype_size(dtype)) {
    std::fill(bytes.begin(), bytes.end(), std::byte{0x5a});
    view.data = bytes.data() + kFirst * dtype_size(dtype);
    view.dtype = dtype;
  }
  void set(std::int64_t row_element, const float* x, int head_dim) {
    for (int j = 0; j < head_dim; ++j) store_as(view.dtype, view.data, static_cast<std::size_t>(row_element + j), x[j]);
  }
};

enum class Placing { one_after_another, padded, heads_first, batch_of_heads, batch_of_tokens };
constexpr Placing kPlacings[] = {Placing::one_after_another, Placing::padded, Placing::heads_first,
                                 Placing::batch_of_heads, Placing::batch_of_tokens};

Output make_output(Placing placing, Dtype dtype, const std::vector<TokenRange>& ranges, const CacheConfig& c) {
  std::int64_t rows = 0, most = 0;
  for (const TokenRange& r : ranges) rows += r.end - r.begin, most = std::max(most, r.end - r.begin);
  const std::int64_t heads = c.kv_heads, d = c.head_dim, batch = static_cast<std::int64_t>(ranges.size());
  Output out(dtype, batch * most * (heads + 1) * (d + 5));
  MutableTensorView& v = out.view;
  v.shape = {rows, heads, d};
  switch (placing) {
    case Placing::one_after_another: v.stride = {heads * d, d, 1}; break;
    case Placing::padded: v.stride = {heads * (d + 3) + 2, d + 3, 1}; break;
    case Placing::heads_first: v.stride = {d, rows * d, 1}; break;
    case Placing::batch_of_heads:
      v.shape[0] = most;
      v.stride = {d, most * d, 1};
      v.batch_stride = heads * most * d;
      break;
    case Placing::batch_of_tokens:
      v.shape[0] = most;
      v.stride = {heads * d, d, 1};
      v.batch_stride = most * heads * d + 7;
      break;
  }
  return out;
}

// Puts the result of read where decode should put its own.
void put_expected(const Cache& cache, const std::vector<TokenRange>& ranges, int layer, bool values, Output& out) {
  const CacheConfig& c = cache.config();
  std::int64_t before = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const TokenRange& r = ranges[i];
    Decoded d;
    read(cache, r.sequence, r.begin, r.end, d, layer).value();
    const float* x = (values ? d.values : d.keys).data();
    const MutableTensorView& v = out.view;
    for (std::int64_t t = 0; t < r.end - r.begin; ++t) {
      for (int head = 0; head < c.kv_heads; ++head, x += c.head_dim) {
        const std::int64_t row = v.batch_stride != 0 ? static_cast<std::int64_t>(i) * v.batch_stride + t * v.stride[0]
                                                     : (before + t) * v.stride[0];
        out.set(row + head * v.stride[1], x, c.head_dim);
      }
    }
    before += r.end - r.begin;
  }
}

void expect_as_read(const Cache& cache, const std::vector<TokenRange>& ranges, int layer = 0) {
  for (const Placing placing : kPlacings) {
    for (const Dtype dtype : kDtypes) {
      SCOPED_TRACE(testing::Message() << "placing " << static_cast<int>(placing) << ", " << dtype_name(dtype));
      Output keys = make_output(placing, dtype, ranges, cache.config());
      Output values = make_output(placing, dtype, ranges, cache.config());
      const std::vector<std::byte> untouched = keys.bytes;
      const Status status = cache.decode(ranges, layer, keys.view, values.view);
      ASSERT_TRUE(status.ok()) << status.message();
      Output expected = make_output(placing, dtype, ranges, cache.config());
      put_expected(cache, ranges, layer, false, expected);
      ASSERT_EQ(keys.bytes, expected.bytes);
      expected.bytes = untouched;
      put_expected(cache, ranges, layer, true, expected);
      ASSERT_EQ(values.bytes, expected.bytes);
      // Either side alone.
      values.bytes = untouched;
      ASSERT_TRUE(cache.decode(ranges, layer, MutableTensorView{}, values.view).ok());
      ASSERT_EQ(values.bytes, expected.bytes);
    }
  }
}

struct Pair {
  const char* k;
  const char* v;
};

TEST(Decode, GivesWhatReadGives) {
  constexpr Pair kPairs[] = {{"tq6", "tq4"}, {"tq2", "tq3"}, {"tq8", "fp8"}, {"f16", "bf16"}, {"tq5", "f32"}};
  int turn = 0;
  for (const Pair& pair : kPairs) {
    for (const int d : {80, 128}) {
      SCOPED_TRACE(testing::Message() << pair.k << '/' << pair.v << ", head_dim " << d);
      CacheConfig c = small_config(2);
      c.head_dim = d;
      c.k = pair.k;
      c.v = pair.v;
      c.sink_pages = turn % 3;
      c.tail_pages = (turn + 1) % 2;
      if (turn % 2 == 1 && codec::takes_centre(parse_format(c.k).value())) c.k_centre = KeyCentre::page;
      ++turn;
      Cache cache = make(c);
      const SequenceId a = cache.add_sequence(), b = cache.add_sequence(), empty = cache.add_sequence();
      ASSERT_TRUE(append(cache, a, 0, 300, Dtype::bf16).ok());
      ASSERT_TRUE(append(cache, b, 1000, 70, Dtype::bf16).ok());
      const SequenceId fork = cache.fork(a).value();
      ASSERT_TRUE(append(cache, fork, 2000, 9, Dtype::bf16).ok());
      expect_as_read(cache, {{a, 0, 300}, {b, 0, 70}, {fork, 250, 309}}, 1);
      expect_as_read(cache, {{b, 3, 64}, {empty, 0, 0}, {a, 61, 67}, {a, 128, 128}, {a, 61, 67}});
      expect_as_read(cache, {{fork, 299, 301}});
    }
  }
}

TEST(Decode, FollowsCalibratedBasesAndImportedLevels) {
  CacheConfig c = small_config();
  c.k = "tq6";
  c.v = "lut4";
  for (int i = 0; i < 16; ++i) c.v_levels.push_back(static_cast<float>(i * i) * 0.05f - 3.0f);
  c.k_basis = BasisKind::calibrated;
  c.bases = random_bases(1, 2, 32, 3, false);
  Cache cache = make(c);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 400).ok());
  expect_as_read(cache, {{id, 10, 400}});
}

TEST(Decode, GivesTheSameBytesForAnyNumberOfThreads) {
  std::vector<std::byte> first;
  for (const int threads : {1, 2, 3, 7}) {
    CacheConfig c = small_config();
    c.head_dim = 128;
    c.kv_heads = 3;
    c.threads = threads;
    Cache cache = make(c);
    const SequenceId a = cache.add_sequence(), b = cache.add_sequence();
    const std::int64_t tokens = kThreadSanitizer || kAddressSanitizer ? 700 : 3000;
    ASSERT_TRUE(append(cache, a, 0, tokens).ok());
    ASSERT_TRUE(append(cache, b, 5000, 333).ok());
    const std::vector<TokenRange> ranges{{a, 5, tokens}, {b, 0, 333}};
    Output keys = make_output(Placing::one_after_another, Dtype::bf16, ranges, c);
    Output values = make_output(Placing::batch_of_heads, Dtype::f32, ranges, c);
    ASSERT_TRUE(cache.decode(ranges, 0, keys.view, values.view).ok());
    keys.bytes.insert(keys.bytes.end(), values.bytes.begin(), values.bytes.end());
    if (threads == 1) first = keys.bytes;
    ASSERT_EQ(keys.bytes, first) << threads << " threads";
  }
}

TEST(Decode, OfALayerThatWaitsForItsWriteIsAsItWasBeforeTheStep) {
  Cache cache = make(small_config(2));
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 127).ok());
  const Decoded before = read_all(cache, id, 1);
  // The step encodes the second page.
  ASSERT_TRUE(reserve(cache, id, 70).ok());
  const CacheRows rows = rows_for(cache, 127, 70);
  ASSERT_TRUE(cache.write({&id, 1}, 0, rows.keys(), rows.values()).ok());
  expect_as_read(cache, {{id, 0, 197}}, 0);
  std::vector<float> keys(127 * 64);
  const TokenRange all{id, 0, 127}, more{id, 0, 128};
  ASSERT_TRUE(cache.decode({&all, 1}, 1, MutableTensorView::of(keys.data(), 127, 2, 32), {}).ok());
  EXPECT_TRUE(same_bits(keys, before.keys));
  std::vector<float> none(128 * 64, 7.0f);
  EXPECT_TRUE(refused(cache.decode({&more, 1}, 1, MutableTensorView::of(none.data(), 128, 2, 32), {}),
                      Code::invalid_argument, {"ranges[0]", "[0, 128)", "layer 1", "written up to token 127"}));
  EXPECT_EQ(none, std::vector<float>(128 * 64, 7.0f));
}

TEST(Decode, RefusesAndThenHasWrittenNothing) {
  CacheConfig c = small_config();
  c.window = 100;
  c.window_sinks = 4;
  Cache cache = make(c);
  const SequenceId a = cache.add_sequence(), b = cache.add_sequence();
  ASSERT_TRUE(append(cache, a, 0, 1000).ok());
  ASSERT_TRUE(append(cache, a, 1000, 1).ok());
  ASSERT_TRUE(append(cache, b, 0, 10).ok());
  const std::vector<float> untouched(20 * 64 + 8, 7.0f);
  std::vector<float> out = untouched;
  const auto view = [&](std::int64_t rows) { return MutableTensorView::of(out.data(), rows, 2, 32); };
  const auto expect_refused = [&](const std::vector<TokenRange>& ranges, const MutableTensorView& keys,
                                  std::initializer_list<const char*> parts, int layer = 0) {
    for (const bool as_values : {false, true}) {
      const Status s = cache.decode(ranges, layer, as_values ? view(20) : keys, as_values ? keys : view(20));
      EXPECT_TRUE(refused(s, Code::invalid_argument, parts));
      EXPECT_EQ(out, untouched);
    }
  };
  const std::vector<TokenRange> good{{b, 0, 10}, {a, 991, 1001}};
  ASSERT_TRUE(cache.decode(good, 0, view(20), {}).ok());
  out = untouched;
  expect_refused(good, view(20), {"layer = 1", "0 to 0"}, 1);
  expect_refused({{b, 0, 10}, {SequenceId{9}, 0, 10}}, view(20), {"ranges[1].sequence = 9"});
  expect_refused({{b, 0, 10}, {b, 1, 11}}, view(20), {"ranges[1]", "[1, 11)", "has tokens [0, 10)"});
  expect_refused({{b, -1, 9}, {b, 0, 10}}, view(20), {"ranges[0]", "[-1, 9)"});
  expect_refused({{b, 5, 4}}, view(20), {"ranges[0]", "[5, 4)"});
  expect_refused({{b, 0, 10}, {a, 64, 74}}, view(20), {"ranges[1]", "released by the window of 100"});

  MutableTensorView wrong = view(19);
  expect_refused(good, wrong, {".shape = [19, 2, 32]", "[20, 2, 32]", "sum of end - begin"});
  wrong = view(20);
  wrong.batch_stride = 640;
  expect_refused(good, wrong, {".shape = [20, 2, 32]", "[10, 2, 32]", "most rows of any range"});
  wrong = view(20);
  wrong.shape[1] = 1;
  expect_refused(good, wrong, {".shape = [20, 1, 32]"});
  wrong = view(20);
  wrong.stride[2] = 2;
  expect_refused(good, wrong, {".stride[2] = 2"});
  wrong = view(20);
  wrong.dtype = Dtype::boolean;
  expect_refused(good, wrong, {".dtype = bool", "f32, f16 or bf16"});
  for (const std::int64_t far :
       {std::numeric_limits<std::int64_t>::max() / 2, std::numeric_limits<std::int64_t>::min()}) {
    wrong = view(20);
    wrong.stride[0] = far;
    expect_refused(good, wrong, {".stride", "2^63 bytes"});
    wrong = view(10);
    wrong.batch_stride = far;
    expect_refused(good, wrong, {"batch_stride", "2^63 bytes"});
  }
  // Nothing to do.
  EXPECT_TRUE(cache.decode({}, 0, view(0), view(0)).ok());
  EXPECT_TRUE(cache.decode(good, 0, {}, {}).ok());
  EXPECT_EQ(out, untouched);
}

}  // namespace
}  // namespace kvant
