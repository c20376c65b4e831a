// An engine of a few sequences over kvant::Pages, step by step: it allocates blocks, appends prompts in chunks and
// drafts of tokens, rejects some of them, shares prefixes, forks with a copy of the last block, preempts and frees, and
// uses blocks again. A model that knows each token's vector, and nothing of blocks, says what attention must give.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

constexpr int kHeads = 1, kGroup = 2, kDim = 32;
constexpr std::int64_t kContents = 128;  // different tokens
constexpr int kMostQueries = 12;
constexpr std::int64_t kMostTokens = 5 * kPageTokens;

struct Sequence {
  std::vector<std::int64_t> tokens;  // contents
  std::vector<std::int32_t> blocks;
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
};

class Engine {
 public:
  Engine(const std::string& k, const std::string& v, std::uint64_t seed)
      : pages_(make_pages(k, v)), pool_(pages_, {.blocks = 24}), users_(24, 0), rng_(seed) {
    vectors_ = gaussian_vector(static_cast<std::size_t>(kContents * kDim), seed + 1);
    decode_contents();
    PagesPlanOptions o;
    o.attention.q_heads = kHeads * kGroup;
    o.attention.threads = 1;
    o.max_batch = 6;
    o.max_blocks = 6;
    o.max_query_len = kMostQueries;
    plans_.push_back(pages_.plan(o).value());
    o.attention.mask = Mask::sliding(100, 3);
    plans_.push_back(pages_.plan(o).value());
    windows_ = {0, 100};
  }

  void step() {
    if (sequences_.size() < 6 && rng_.below(3) == 0) begin();
    if (!sequences_.empty() && rng_.below(8) == 0) fork();
    if (!sequences_.empty() && rng_.below(12) == 0) truncate();
    if (!sequences_.empty() && (rng_.below(25) == 0 || free_blocks() < 2)) remove(rng_.below(count()));
    append_and_attend();
  }

  int attended = 0;

 private:
  static Pages make_pages(const std::string& k, const std::string& v) {
    PagesConfig c;
    c.kv_heads = kHeads;
    c.head_dim = kDim;
    c.k = k;
    c.v = v;
    c.threads = 1;
    return Pages::create(c).value();
  }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(sequences_.size()); }
  [[nodiscard]] std::int64_t free_blocks() const { return std::count(users_.begin(), users_.end(), 0); }
  Sequence& any() { return sequences_[static_cast<std::size_t>(rng_.below(count()))]; }

  // The vector that each content decodes to: a token is encoded by itself.
  void decode_contents() {
    EnginePool scratch(pages_, {.blocks = kContents / kPageTokens});
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < kContents; ++i) slots.push_back(i);
    for (std::int32_t i = 0; i < kContents / kPageTokens; ++i) ids.push_back(i);
    const TensorView rows = TensorView::of(vectors_.data(), kContents, kHeads, kDim);
    pages_.write(scratch.view, rows, rows, slots.data(), kContents).value();
    keys_.resize(vectors_.size());
    values_.resize(vectors_.size());
    pages_
        .decode(scratch.view, ids.data(), static_cast<std::int64_t>(ids.size()),
                MutableTensorView::of(keys_.data(), kContents, kHeads, kDim),
                MutableTensorView::of(values_.data(), kContents, kHeads, kDim))
        .value();
  }

  std::int32_t take() {
    const auto free = std::find(users_.begin(), users_.end(), 0);
    // From a random place on, so that ids are used again soon and late.
    const auto start = static_cast<std::size_t>(rng_.below(static_cast<std::int64_t>(users_.size())));
    for (std::size_t i = 0; i < users_.size(); ++i) {
      const std::size_t at = (start + i) % users_.size();
      if (users_[at] == 0) return users_[at] = 1, static_cast<std::int32_t>(at);
    }
    return static_cast<std::int32_t>(free - users_.begin());
  }

  // A new sequence: empty, or with the whole blocks of another's prefix.
  void begin() {
    Sequence s;
    if (!sequences_.empty() && rng_.below(2) == 0) {
      const Sequence& other = any();
      const std::int64_t shared = rng_.below(other.length() / kPageTokens + 1);
      s.tokens.assign(other.tokens.begin(), other.tokens.begin() + shared * kPageTokens);
      s.blocks.assign(other.blocks.begin(), other.blocks.begin() + shared);
      for (const std::int32_t b : s.blocks) ++users_[static_cast<std::size_t>(b)];
    }
    sequences_.push_back(std::move(s));
  }

  // The last block is copied if it is not full.
  void fork() {
    if (sequences_.size() >= 6 || free_blocks() < 2) return;
    Sequence child = any();
    for (const std::int32_t b : child.blocks) ++users_[static_cast<std::size_t>(b)];
    if (child.length() % kPageTokens != 0) {
      const std::int32_t from = child.blocks.back(), to = take();
      pages_.copy(pool_.view, &from, &to, 1).value();
      --users_[static_cast<std::size_t>(from)];
      child.blocks.back() = to;
    }
    sequences_.push_back(std::move(child));
  }

  // Rejected tokens of a draft: within the last block, which nobody shares.
  void truncate() {
    Sequence& s = any();
    const std::int64_t within = s.length() % kPageTokens;
    if (within == 0) return;
    s.tokens.resize(static_cast<std::size_t>(s.length() - rng_.below(within)));
  }

  void remove(std::int64_t i) {
    for (const std::int32_t b : sequences_[static_cast<std::size_t>(i)].blocks) --users_[static_cast<std::size_t>(b)];
    sequences_.erase(sequences_.begin() + i);
  }

  void append_and_attend() {
    std::vector<std::int64_t> slots;
    std::vector<float> rows;
    EngineStep step;
    step.unused = static_cast<std::int32_t>(rng_.next());
    std::vector<const Sequence*> batch;
    const auto pad = [&] {
      slots.push_back(-1);
      rows.insert(rows.end(), kDim, NAN);
    };
    for (Sequence& s : sequences_) {
      std::int64_t tokens = rng_.below(4) == 0 ? 1 + rng_.below(kMostQueries) : rng_.below(4) == 0 ? 0 : 1;
      const std::int64_t blocks = (s.length() + tokens + kPageTokens - 1) / kPageTokens;
      if (s.length() + tokens > kMostTokens || blocks - static_cast<std::int64_t>(s.blocks.size()) > free_blocks())
        tokens = 0;
      if (rng_.below(6) == 0) pad();
      for (std::int64_t i = 0; i < tokens; ++i) {
        if (s.length() == static_cast<std::int64_t>(s.blocks.size()) * kPageTokens) s.blocks.push_back(take());
        const std::int64_t content = rng_.below(kContents);
        const std::vector<std::int64_t> slot = slots_of(s.blocks, s.length(), s.length() + 1);
        s.tokens.push_back(content);
        slots.push_back(slot[0]);
        rows.insert(rows.end(), vectors_.begin() + content * kDim, vectors_.begin() + (content + 1) * kDim);
      }
      step.add(s.blocks, static_cast<std::int32_t>(s.length()), static_cast<std::int32_t>(tokens));
      batch.push_back(&s);
    }
    const auto written = static_cast<std::int64_t>(slots.size());
    const TensorView given = TensorView::of(rows.data(), written, kHeads, kDim);
    pages_.write(pool_.view, given, given, slots.data(), written).value();

    const std::int64_t queries = step.query_start_loc.back();
    const auto which = static_cast<std::size_t>(rng_.below(2));
    plans_[which].set_tables(step.tables(6)).value();
    const std::vector<float> q = gaussian_vector(static_cast<std::size_t>((queries + 1) * kGroup * kDim), rng_.next());
    std::vector<float> out(q.size(), 7.0f);
    plans_[which]
        .run(pool_.view, TensorView::of(q.data(), queries + 1, kGroup, kDim),
             MutableTensorView::of(out.data(), queries + 1, kGroup, kDim))
        .value();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::int64_t begin = step.query_start_loc[i], end = step.query_start_loc[i + 1];
      if (begin == end) continue;
      const std::int64_t row = begin + rng_.below(end - begin);
      check(*batch[i], batch[i]->length() - (end - row), windows_[which], q, out, row);
    }
    EXPECT_EQ(out.back(), 7.0f);
  }

  void check(const Sequence& s, std::int64_t position, std::int64_t window, const std::vector<float>& q,
             const std::vector<float>& out, std::int64_t row) {
    for (int head = 0; head < kGroup; ++head) {
      const float* query = q.data() + (row * kGroup + head) * kDim;
      const float* got = out.data() + (row * kGroup + head) * kDim;
      std::vector<double> expected(kDim, 0.0);
      double sum = 0;
      for (std::int64_t t = 0; t <= position; ++t) {
        if (window > 0 && t <= position - window && t >= 3) continue;
        const std::int64_t content = s.tokens[static_cast<std::size_t>(t)] * kDim;
        double score = 0;
        for (int j = 0; j < kDim; ++j) score += double{query[j]} * keys_[static_cast<std::size_t>(content + j)];
        const double weight = std::exp(score / std::sqrt(double{kDim}));
        sum += weight;
        for (int j = 0; j < kDim; ++j)
          expected[static_cast<std::size_t>(j)] += weight * values_[static_cast<std::size_t>(content + j)];
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

  Pages pages_;
  EnginePool pool_;
  std::vector<int> users_;  // of each block
  Rng rng_;
  std::vector<float> vectors_, keys_, values_;  // of contents
  std::vector<PagesPlan> plans_;
  std::vector<std::int64_t> windows_;
  std::vector<Sequence> sequences_;
};

class PagesModel : public testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(PagesModel, TenThousandSteps) {
  Engine engine(GetParam().first, GetParam().second, 11);
  const int steps = random_steps(kThreadSanitizer ? 1000 : 10000);
  for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) {
    SCOPED_TRACE(fmt::format("step {}", i));
    engine.step();
  }
  EXPECT_GT(engine.attended, steps);
}

INSTANTIATE_TEST_SUITE_P(Pairs, PagesModel,
                         testing::Values(std::pair("tq4", "tq4"), std::pair("tq6", "tq3"), std::pair("fp8", "fp8"),
                                         std::pair("f16", "bf16")),
                         [](const auto& i) { return fmt::format("{}_{}", i.param.first, i.param.second); });

}  // namespace
}  // namespace kvant::test
