// The engine of support/engine_session.hpp over kvant::Pages, step by step. A model that knows each token's vector says
// what attention must give: it knows, in the plainest code, which key every block is centred on, and with an exact tail
// which blocks have copies, and when these blocks are encoded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bits.hpp"
#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"
#include "support/engine_session.hpp"
#include "support/inputs.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

constexpr int kHeads = 1, kGroup = 2, kDim = 32;
constexpr int kBlocks = EngineSession::kBlocks;
constexpr std::int64_t kContents = EngineSession::kContents;

struct Kind {
  const char *k, *v;
  int tail_pages = 0;
  int tail_sequences = 0;  // six: copies are taken from sequences that wait; eleven: there are some for all blocks
  KeyCentre centre = KeyCentre::automatic;
  int sink_pages = 0;
  int exact_copies = 0;  // fewer than the sequences of one step may have: some go without
  [[nodiscard]] int copies() const {
    if (exact_copies > 0) return exact_copies;
    return tail_sequences * (sink_pages + tail_pages + 2) + std::min(tail_sequences, 16) * tail_pages;
  }
  [[nodiscard]] bool is_centred() const {
    return centre == KeyCentre::automatic && !format_info(parse_format(k).value()).dense;
  }
};

// Which blocks have copies, and when they are encoded from these: the rules of docs/borrowed-pages.md.
class CopyModel {
 public:
  explicit CopyModel(const Kind& kind)
      : tail_pages_(kind.tail_pages), sink_pages_(kind.sink_pages), copies_(static_cast<std::size_t>(kind.copies())) {}

  [[nodiscard]] bool has(std::int32_t block) const { return find(block) != nullptr; }
  void forget(std::int32_t block) {
    if (Copy* c = find(block)) *c = {};
  }
  // Exact for a sequence of so many tokens.
  [[nodiscard]] bool in_tail(std::int64_t length, std::int64_t page) const {
    return tail_pages_ > 0 && length < kPageTokens * (page + 1 + tail_pages_);
  }
  [[nodiscard]] bool is_first(std::int64_t page) const { return page < sink_pages_; }
  // Pages that were exact before the step's tokens stay exact for all of them.
  [[nodiscard]] static std::int64_t read_length(std::int64_t length, std::int64_t queries) {
    return length - (queries - 1);
  }
  // Tokens of a block that its copy alone has.
  [[nodiscard]] std::int64_t unencoded(std::int32_t block) const {
    const Copy* c = find(block);
    return c == nullptr ? 0 : c->unencoded;
  }
  void write(std::int32_t block, std::int64_t tokens) {
    if (Copy* c = find(block)) c->unencoded = tokens;
  }

  // encode(block, tokens): from its copy, before the step's tokens are written.
  template <class Encode>
  void begin_step(const EngineStep& step, const Encode& encode) {
    ++now_;
    struct Page {
      std::int32_t block;
      std::int64_t number, length, queries;
      [[nodiscard]] bool begins() const { return number * kPageTokens >= length - queries; }
      [[nodiscard]] bool is_written() const { return (number + 1) * kPageTokens > length - queries; }
    };
    std::vector<Page> pages;
    for (std::size_t i = 0; i < step.blocks.size(); ++i) {
      const std::int64_t length = step.seq_lens[i], queries = step.query_start_loc[i + 1] - step.query_start_loc[i];
      for (std::int64_t page = 0; queries > 0 && page * kPageTokens < length; ++page)
        pages.push_back({step.blocks[i][static_cast<std::size_t>(page)], page, length, queries});
    }
    const auto in_time = [&](const Page& p) {
      const bool keeps = in_tail(p.length - kPageTokens, p.number);
      if (is_first(p.number)) return true;
      if (p.begins()) return p.queries > kPageTokens ? in_tail(p.length, p.number) : keeps;
      return keeps || in_tail(read_length(p.length, p.queries), p.number);
    };
    // How little a page needs its copy.
    const auto need = [&](const Page& p) {
      const bool is_last = (p.number + 1) * kPageTokens >= p.length;
      if (is_last || (p.is_written() && (p.queries <= kPageTokens || !p.begins()))) return 0;
      if (is_first(p.number)) return 1;
      if (!in_tail(read_length(p.length, p.queries), p.number)) return 4;
      return (p.number + 2) * kPageTokens >= p.length ? 2 : 3;
    };
    struct Wanted {
      std::int32_t block;
      int need;
    };
    std::vector<Wanted> wanted;
    for (const Page& p : pages) {
      if (p.begins() && !in_time(p)) forget(p.block);
    }
    for (const Page& p : pages) {
      if (!in_time(p)) continue;
      if (Copy* c = find(p.block)) {
        c->used = std::max(c->used, 5 * now_ - need(p));
      } else if (p.begins()) {
        wanted.push_back({p.block, need(p)});
      }
    }
    for (Copy& c : copies_) {
      const bool is_written =
          std::any_of(pages.begin(), pages.end(), [&](const Page& p) { return p.block == c.block && p.is_written(); });
      if (c.unencoded == 0 || is_written) continue;
      part_encoded += c.unencoded < kPageTokens ? 1 : 0;
      encode(c.block, c.unencoded);
      c.unencoded = 0;
    }
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < copies_.size(); ++i) order.push_back(i);
    const auto age = [&](std::size_t i) {
      return copies_[i].block < 0 ? 1000 : std::min<std::int64_t>(5 * now_ - copies_[i].used, 254);
    };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return age(a) > age(b); });
    std::stable_sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.need < b.need; });
    // The oldest copies go to those that need one most, as long as they are older than what the need keeps.
    std::size_t given = 0;
    while (given < wanted.size() && given < order.size() && age(order[given]) > wanted[given].need) ++given;
    ungiven += static_cast<std::int64_t>(wanted.size() - given);
    order.resize(given);
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < given; ++i) {
      Copy& c = copies_[order[i]];
      if (c.block >= 0) ++taken;
      if (c.block >= 0 && 5 * now_ - c.used < 5) ++taken_in_step;
      c = {wanted[i].block, 5 * now_ - wanted[i].need};
    }
    for (const Page& p : pages) {
      const bool is_read = in_tail(read_length(p.length, p.queries), p.number) || is_first(p.number);
      if (in_time(p) && is_read && !has(p.block)) ++misses;
    }
  }

  std::int64_t misses = 0, taken = 0, taken_in_step = 0, ungiven = 0, part_encoded = 0;

 private:
  struct Copy {
    std::int32_t block = -1;
    std::int64_t used = 0;
    std::int64_t unencoded = 0;
  };
  [[nodiscard]] const Copy* find(std::int32_t block) const {
    const auto at = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.block == block; });
    return at == copies_.end() ? nullptr : &*at;
  }
  Copy* find(std::int32_t block) { return const_cast<Copy*>(static_cast<const CopyModel*>(this)->find(block)); }
  std::int64_t tail_pages_, sink_pages_;
  std::int64_t now_ = 0;
  std::vector<Copy> copies_;
};

using Vector = std::vector<float>;

// A block's keys are centred on: the mean of these contents as given; or, where they have a centre themselves, of
// these as they are stored around it.
struct Centre {
  std::vector<std::int64_t> contents;
  std::shared_ptr<const Centre> of_contents;
  mutable Vector vector{};
};
struct Block {
  std::vector<std::int64_t> contents = std::vector<std::int64_t>(kPageTokens, -1);
  std::vector<std::int64_t> encoded = contents;  // those that its bytes have
  bool is_first_page = false;
  std::shared_ptr<const Centre> centre;
  std::vector<Vector> keys = std::vector<Vector>(kPageTokens);  // decoded; empty: to be found
};

class Engine {
 public:
  Engine(const Kind& kind, std::uint64_t seed)
      : kind_(kind),
        pages_(make_pages(kind)),
        pool_(pages_, {.blocks = kBlocks}),
        session_(seed + 2),
        copies_(kind),
        rng_(seed),
        blocks_(kBlocks) {
    vectors_ = gaussian_vector(static_cast<std::size_t>(kContents * kDim), seed + 1);
    // A constant part in most keys, so that centres matter, and the others refuse them.
    for (std::int64_t i = 0; i < kContents * kDim; ++i)
      vectors_[static_cast<std::size_t>(i)] += i / kDim % 4 == 0 || i % 3 != 0 ? 0.0f : 1.5f;
    for (const float x : vectors_) exact_.push_back(base::bf16_to_f32(base::f32_to_bf16(x)));
    given_ = kind.tail_pages > 0 ? exact_ : vectors_;
    decode_contents();
    PagesPlanOptions o;
    o.attention.q_heads = kHeads * kGroup;
    o.attention.threads = 1;
    o.attention.products = 16;
    o.max_batch = EngineSession::kMostSequences;
    o.max_blocks = EngineSession::kMostPages;
    o.max_query_len = EngineSession::kMostQueries;
    plans_.push_back(pages_.plan(o).value());
    o.attention.mask = Mask::sliding(100, 3);
    plans_.push_back(pages_.plan(o).value());
    windows_ = {0, 100};
  }

  void step() { attend(session_.next()); }

  int attended = 0, exact = 0, of_first_page = 0, refused = 0, left_behind = 0;
  [[nodiscard]] const CopyModel& copies() const { return copies_; }

 private:
  static Pages make_pages(const Kind& kind) {
    PagesConfig c;
    c.kv_heads = kHeads;
    c.head_dim = kDim;
    c.k = kind.k;
    c.v = kind.v;
    c.threads = 1;
    c.tail_pages = kind.tail_pages;
    c.tail_sequences = kind.tail_sequences;
    c.k_centre = kind.centre;
    c.sink_pages = kind.sink_pages;
    c.exact_copies = kind.exact_copies;
    return Pages::create(c).value();
  }
  // The vector that each content decodes to without centres: a token is encoded by itself.
  void decode_contents() {
    const Pages plain = make_pages({.k = kind_.k, .v = kind_.v, .centre = KeyCentre::none});
    EnginePool scratch(plain, {.blocks = kContents / kPageTokens});
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < kContents; ++i) slots.push_back(i);
    for (std::int32_t i = 0; i < kContents / kPageTokens; ++i) ids.push_back(i);
    const TensorView rows = TensorView::of(given_.data(), kContents, kHeads, kDim);
    plain.write(scratch.view, rows, rows, slots.data(), kContents).value();
    keys_.resize(vectors_.size());
    values_.resize(vectors_.size());
    plain
        .decode(scratch.view, ids.data(), static_cast<std::int64_t>(ids.size()),
                MutableTensorView::of(keys_.data(), kContents, kHeads, kDim),
                MutableTensorView::of(values_.data(), kContents, kHeads, kDim))
        .value();
  }

  Block& block_of(const EngineSequence& s, std::int64_t page) {
    return blocks_[static_cast<std::size_t>(s.blocks[static_cast<std::size_t>(page)])];
  }
  Vector in_basis(std::int64_t content) {
    const auto first = given_.begin() + content * kDim;
    Vector x(first, first + kDim);
    if (is_rotated()) rotate(x).value();
    return x;
  }
  [[nodiscard]] bool is_rotated() const { return std::string(kind_.k) != "fp8"; }
  // Less the centre, through the codec; and whether the centre was subtracted.
  std::pair<Vector, bool> stored(std::int64_t content, const Vector& centre) {
    Vector x = in_basis(content);
    double from_zero = 0, from_centre = 0;
    for (std::size_t i = 0; i < kDim; ++i) {
      from_zero += double{x[i]} * x[i];
      from_centre += (double{x[i]} - centre[i]) * (double{x[i]} - centre[i]);
    }
    const bool centred = from_zero >= from_centre;
    for (std::size_t i = 0; centred && i < kDim; ++i) x[i] -= centre[i];
    const Format format = parse_format(kind_.k).value();
    decode_vector(format, encode_vector(format, x).value(), x).value();
    return {x, centred};
  }
  const Vector& vector_of(const Centre& centre) {
    if (!centre.vector.empty()) return centre.vector;
    const bool has_centre = centre.of_contents != nullptr;
    Vector sum(kDim);
    int centred = 0;
    for (const std::int64_t content : centre.contents) {
      Vector x(given_.begin() + content * kDim, given_.begin() + (content + 1) * kDim);
      if (has_centre) {
        const auto [decoded, with_centre] = stored(content, vector_of(*centre.of_contents));
        x = decoded;
        centred += with_centre ? 1 : 0;
      }
      for (std::size_t i = 0; i < kDim; ++i) sum[i] += x[i];
    }
    for (float& x : sum) x /= static_cast<float>(centre.contents.size());
    if (!has_centre && is_rotated()) rotate(sum).value();
    const float share = static_cast<float>(centred) / kPageTokens;
    for (std::size_t i = 0; has_centre && i < kDim; ++i) sum[i] += vector_of(*centre.of_contents)[i] * share;
    centre.vector.resize(kDim);
    decode_vector(Format::tq6, encode_vector(Format::tq6, sum).value(), centre.vector).value();
    return centre.vector;
  }
  const float* key_of(const EngineSequence& s, std::int64_t t) {
    const std::int64_t content = s.tokens[static_cast<std::size_t>(t)];
    Block& block = block_of(s, t / kPageTokens);
    const auto position = static_cast<std::size_t>(t % kPageTokens);
    EXPECT_EQ(block.encoded[position], content);
    if (!kind_.is_centred()) return keys_.data() + content * kDim;
    Vector& key = block.keys[position];
    if (key.empty()) {
      const Vector& centre = vector_of(*block.centre);
      auto [x, centred] = stored(content, centre);
      refused += centred ? 0 : 1;
      for (std::size_t i = 0; centred && i < kDim; ++i) x[i] += centre[i];
      if (is_rotated()) rotate_back(x).value();
      key = std::move(x);
    }
    return key.data();
  }

  // The mean of a block's first keys, of the first page its first key.
  static std::shared_ptr<const Centre> own_centre(const Block& block, std::int64_t tokens) {
    const auto first = block.contents.begin();
    return std::make_shared<const Centre>(Centre{{first, first + (block.is_first_page ? 1 : tokens)}, nullptr});
  }
  void encode(std::int32_t number, std::int64_t tokens) {
    Block& block = blocks_[static_cast<std::size_t>(number)];
    block.centre = own_centre(block, tokens);
    block.encoded = block.contents;
    std::fill(block.encoded.begin() + tokens, block.encoded.end(), -1);
    for (Vector& key : block.keys) key.clear();
  }

  // The step's tokens in blocks, and what their keys are centred on.
  void store(const EngineSequence& s, std::int64_t queries) {
    for (std::int64_t begin = s.length() - queries; begin < s.length();) {
      const std::int64_t page = begin / kPageTokens, end = std::min(s.length(), (page + 1) * kPageTokens);
      const std::int32_t number = s.blocks[static_cast<std::size_t>(page)];
      Block& block = blocks_[static_cast<std::size_t>(number)];
      const bool has_copy = copies_.has(number);
      for (std::int64_t t = begin; t < end; ++t) {
        const auto position = static_cast<std::size_t>(t % kPageTokens);
        block.contents[position] = s.tokens[static_cast<std::size_t>(t)];
        if (has_copy) continue;
        block.encoded[position] = block.contents[position];
        block.keys[position].clear();
      }
      block.is_first_page = page == 0;
      if (has_copy && !copies_.is_first(page) && !copies_.in_tail(s.length(), page)) {
        encode(number, kPageTokens);
        copies_.write(number, 0);
        ++left_behind;
      } else if (has_copy) {
        copies_.write(number, end - page * kPageTokens);
      } else if (begin % kPageTokens == 0) {
        block.centre = own_centre(block, end - begin == kPageTokens ? kPageTokens : 1);
        if (end - begin < kPageTokens && page > 0) {
          const Block& before = block_of(s, page - 1);
          block.centre = copies_.has(s.blocks[static_cast<std::size_t>(page - 1)])
                             ? std::make_shared<const Centre>(Centre{before.contents, nullptr})
                             : std::make_shared<const Centre>(Centre{before.encoded, before.centre});
        }
      }
      begin = end;
    }
  }
  void attend(const EngineWork& work) {
    EngineStep step = work.step;
    const auto count = static_cast<std::int64_t>(work.copy_from.size());
    pages_.copy(pool_.view, work.copy_from.data(), work.copy_to.data(), count).value();
    for (std::size_t i = 0; i < work.copy_from.size(); ++i) {
      const std::int32_t from = work.copy_from[i];
      if (const std::int64_t tokens = copies_.unencoded(from); tokens > 0) encode(from, tokens);
      blocks_[static_cast<std::size_t>(work.copy_to[i])] = blocks_[static_cast<std::size_t>(from)];
    }
    for (const std::int32_t block : work.copy_to) copies_.forget(block);
    pages_.begin_step(step.tables(EngineSession::kMostPages)).value();
    copies_.begin_step(step, [&](std::int32_t block, std::int64_t tokens) { encode(block, tokens); });
    ASSERT_EQ(pages_.take_misses().value(), std::exchange(copies_.misses, 0));
    std::vector<float> rows;
    for (const std::int64_t content : work.contents) {
      for (int j = 0; j < kDim; ++j)
        rows.push_back(content < 0 ? NAN : vectors_[static_cast<std::size_t>(content * kDim + j)]);
    }
    const auto written = static_cast<std::int64_t>(work.slots.size());
    const TensorView given = TensorView::of(rows.data(), written, kHeads, kDim);
    pages_.write(pool_.view, given, given, work.slots.data(), written).value();
    for (std::size_t i = 0; i < work.batch.size(); ++i)
      store(*work.batch[i], step.query_start_loc[i + 1] - step.query_start_loc[i]);

    const std::int64_t queries = step.query_start_loc.back();
    const auto which = static_cast<std::size_t>(rng_.below(2));
    plans_[which].set_tables(step.tables(EngineSession::kMostPages)).value();
    const std::vector<float> q = gaussian_vector(static_cast<std::size_t>((queries + 1) * kGroup * kDim), rng_.next());
    std::vector<float> out(q.size(), 7.0f);
    plans_[which]
        .run(pool_.view, TensorView::of(q.data(), queries + 1, kGroup, kDim),
             MutableTensorView::of(out.data(), queries + 1, kGroup, kDim))
        .value();
    for (std::size_t i = 0; i < work.batch.size(); ++i) {
      const EngineSequence& s = *work.batch[i];
      const std::int64_t begin = step.query_start_loc[i], end = step.query_start_loc[i + 1];
      if (begin == end) continue;
      const std::int64_t row = begin + rng_.below(end - begin);
      check(s, end - begin, s.length() - (end - row), windows_[which], q, out, row);
    }
    EXPECT_EQ(out.back(), 7.0f);
  }

  void check(const EngineSequence& s, std::int64_t queries, std::int64_t position, std::int64_t window,
             const std::vector<float>& q, const std::vector<float>& out, std::int64_t row) {
    for (int head = 0; head < kGroup; ++head) {
      const float* query = q.data() + (row * kGroup + head) * kDim;
      const float* got = out.data() + (row * kGroup + head) * kDim;
      std::vector<double> expected(kDim, 0.0);
      double sum = 0;
      for (std::int64_t t = 0; t <= position; ++t) {
        if (window > 0 && t <= position - window && t >= 3) continue;
        const std::int64_t content = s.tokens[static_cast<std::size_t>(t)] * kDim, page = t / kPageTokens;
        const bool in_tail = copies_.in_tail(CopyModel::read_length(s.length(), queries), page);
        const bool is_exact =
            (in_tail || copies_.is_first(page)) && copies_.has(s.blocks[static_cast<std::size_t>(page)]);
        exact += is_exact ? 1 : 0;
        of_first_page += is_exact && !in_tail ? 1 : 0;
        const float* key = is_exact ? exact_.data() + content : key_of(s, t);
        const std::vector<float>& values = is_exact ? exact_ : values_;
        double score = 0;
        for (int j = 0; j < kDim; ++j) score += double{query[j]} * key[j];
        const double weight = std::exp(score / std::sqrt(double{kDim}));
        sum += weight;
        for (int j = 0; j < kDim; ++j)
          expected[static_cast<std::size_t>(j)] += weight * values[static_cast<std::size_t>(content + j)];
      }
      double error = 0, norm = 0;
      for (int j = 0; j < kDim; ++j) {
        const double e = expected[static_cast<std::size_t>(j)] / sum;
        error += (e - got[j]) * (e - got[j]);
        norm += e * e;
      }
      ASSERT_LE(std::sqrt(error), 2e-4 * std::sqrt(norm) + 1e-6) << "length " << s.length() << " position " << position;
      ++attended;
    }
  }

  Kind kind_;
  Pages pages_;
  EnginePool pool_;
  EngineSession session_;
  CopyModel copies_;
  Rng rng_;
  std::vector<Block> blocks_;
  std::vector<float> vectors_, keys_, values_, exact_;  // what contents decode to
  std::vector<float> given_;                            // what is encoded: with a tail, what copies hold
  std::vector<PagesPlan> plans_;
  std::vector<std::int64_t> windows_;
};

class PagesModel : public testing::TestWithParam<Kind> {};

TEST_P(PagesModel, TenThousandSteps) {
  Engine engine(GetParam(), 11);
  const int steps = random_steps(kThreadSanitizer ? 1000 : 10000);
  for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) {
    SCOPED_TRACE(fmt::format("step {}", i));
    engine.step();
  }
  EXPECT_GT(engine.attended, steps);
  EXPECT_EQ(engine.refused > steps / 10, GetParam().is_centred()) << engine.refused;
  if (GetParam().tail_pages == 0) return;
  EXPECT_GT(engine.exact, (GetParam().exact_copies > 0 ? 10 : 50) * steps);
  EXPECT_EQ(engine.of_first_page > steps, GetParam().sink_pages > 0) << engine.of_first_page;
  EXPECT_EQ(engine.copies().taken > 0, GetParam().copies() < kBlocks);
  EXPECT_GT(engine.copies().part_encoded, 0);
  EXPECT_TRUE(engine.left_behind > 0 || GetParam().tail_pages > 1);
  EXPECT_EQ(engine.copies().ungiven > 0, GetParam().exact_copies > 0) << engine.copies().ungiven;
  EXPECT_TRUE(engine.copies().taken_in_step > 0 || GetParam().exact_copies == 0);
}

INSTANTIATE_TEST_SUITE_P(Pairs, PagesModel,
                         testing::Values(Kind{"tq4", "tq4"}, Kind{"tq6", "tq3"}, Kind{"fp8", "fp8"},
                                         Kind{"tq3", "tq4", 1, 6, KeyCentre::none}, Kind{"f16", "bf16"},
                                         Kind{"tq4", "tq4", 1, 11}, Kind{"tq6", "fp8", 1, 6}, Kind{"tq2", "tq2", 2, 6},
                                         Kind{"tq4", "bf16", 3, 8}, Kind{"tq4", "tq4", 1, 6, {}, 1},
                                         Kind{"tq3", "tq3", 1, 8, {}, 1, 7}, Kind{"tq6", "tq4", 2, 6, {}, 3, 9}),
                         [](const auto& i) {
                           const Kind& kind = i.param;
                           return fmt::format("{}_{}_first_{}_tail_{}_of_{}_copies_{}", kind.k, kind.v, kind.sink_pages,
                                              kind.tail_pages, kind.tail_sequences, kind.copies());
                         });

}  // namespace
}  // namespace kvant::test
