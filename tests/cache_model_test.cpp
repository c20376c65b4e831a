// The cache against a model that keeps every token: random appends, forks, truncations, removals, windows, refusals.
//
// The model works token by token and knows nothing of slots: a copy of a page is a number, shared when forks hold the
// same number. It predicts lengths, which copies exist, which one is read, how many distinct ones there are (so that
// nothing leaks), what is refused, and every value: an exact token is bit-equal to what was given, an encoded one to
// that vector encoded by itself through the public codec, and a page-centred key to its difference from the centre of
// its page.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_rows.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

using test::CacheRows;
using test::Rng;

constexpr std::int64_t kPage = kPageTokens;

struct Trial {
  const char* name;
  CacheConfig config;
  Dtype input = Dtype::f32;
  int steps = 800;
};

void PrintTo(const Trial& s, std::ostream* out) {
  *out << s.name;
}

// --- the model -------------------------------------------------------------------------------------------------------

// A page's keys are centred on: the mean of these tokens as given; or, where they have a centre themselves, of
// these as they are stored around it.
struct Centre {
  std::vector<std::uint64_t> tokens;
  std::shared_ptr<const Centre> of_tokens;
};

struct ModelPage {
  std::uint64_t identity = 0;
  std::uint64_t exact = 0;  // 0: no such copy
  std::uint64_t encoded = 0;
  bool released = false;
  std::shared_ptr<const Centre> centre{};  // the encoded copy's
};

struct ModelSequence {
  std::vector<std::uint64_t> tokens;
  std::vector<ModelPage> pages;
  std::int64_t longest = 0;  // that it has been
  [[nodiscard]] std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
};

struct Model {
  CacheConfig config;
  std::map<SequenceId, ModelSequence> sequences;
  std::uint64_t next = 1;

  std::int64_t rollback() const { return std::max(kPage, config.rollback_tokens); }
  bool should_be_exact(std::int64_t n, std::int64_t p) const {
    return p < config.sink_pages || (config.tail_pages > 0 && n < kPage * (p + 1 + config.tail_pages));
  }
  bool reads_exact(const ModelSequence& s, std::int64_t p) const {
    return s.pages[static_cast<std::size_t>(p)].exact != 0 && should_be_exact(s.length(), p);
  }
  int holders(std::uint64_t ModelPage::*copy, std::uint64_t number) const {
    int n = 0;
    for (const auto& [id, s] : sequences) {
      for (const ModelPage& page : s.pages) n += page.*copy == number ? 1 : 0;
    }
    return n;
  }
  std::int64_t distinct(std::uint64_t ModelPage::*copy) const {
    std::set<std::uint64_t> all;
    for (const auto& [id, s] : sequences) {
      for (const ModelPage& page : s.pages) {
        if (page.*copy != 0) all.insert(page.*copy);
      }
    }
    return static_cast<std::int64_t>(all.size());
  }
  void release_by_window(ModelSequence& s) {
    if (config.window == 0) return;
    for (std::int64_t p = 0; p < static_cast<std::int64_t>(s.pages.size()); ++p) {
      const bool pinned = p * kPage < config.window_sinks;
      const bool old = p * kPage + kPage - 1 < s.length() - config.window + 1 - rollback();
      if (old && !pinned) s.pages[static_cast<std::size_t>(p)] = {.released = true};
    }
  }
  void push(ModelSequence& s, std::uint64_t token) {
    const std::int64_t p = s.length() / kPage;
    if (s.length() % kPage == 0) {
      ModelPage page{.identity = next++};
      if (p < config.sink_pages || config.tail_pages > 0) page.exact = next++;
      s.pages.push_back(page);
    }
    ModelPage& page = s.pages.back();
    for (auto copy : {&ModelPage::identity, &ModelPage::exact, &ModelPage::encoded}) {
      if (page.*copy != 0 && holders(copy, page.*copy) > 1) page.*copy = next++;
    }
    s.tokens.push_back(token);
    s.longest = std::max(s.longest, s.length());
    if (page.exact == 0 && page.encoded == 0) page.encoded = next++;
    for (std::int64_t q = 0; q <= p; ++q) {
      ModelPage& each = s.pages[static_cast<std::size_t>(q)];
      if (each.released || each.exact == 0 || q < config.sink_pages) continue;
      if (!should_be_exact(s.length(), q) && each.encoded == 0) {
        each.encoded = next++;
        each.centre = own_centre(s, q);
      }
      if (!should_be_exact(s.length() - kPage, q)) each.exact = 0;
    }
  }
  // That of a page that is encoded as a whole; of the first page, always.
  static std::shared_ptr<const Centre> own_centre(const ModelSequence& s, std::int64_t p) {
    const auto first = s.tokens.begin() + p * kPage;
    return std::make_shared<const Centre>(Centre{{first, first + (p == 0 ? 1 : kPage)}, {}});
  }
  // After all tokens of a step: centres of pages that began in it and are encoded as tokens come.
  static void end_step(ModelSequence& s, std::int64_t begin) {
    for (std::int64_t p = (begin + kPage - 1) / kPage; p < static_cast<std::int64_t>(s.pages.size()); ++p) {
      ModelPage& page = s.pages[static_cast<std::size_t>(p)];
      if (page.encoded == 0 || page.centre != nullptr) continue;
      if (p == 0 || s.length() >= (p + 1) * kPage) {
        page.centre = own_centre(s, p);
        continue;
      }
      const ModelPage& before = s.pages[static_cast<std::size_t>(p - 1)];
      const auto first = s.tokens.begin() + (p - 1) * kPage;
      page.centre =
          std::make_shared<const Centre>(Centre{{first, first + kPage}, before.exact != 0 ? nullptr : before.centre});
    }
  }
  bool may_truncate(const ModelSequence& s, std::int64_t n) const {
    for (std::int64_t t = std::max<std::int64_t>(0, n - config.window); config.window > 0 && t < n; ++t) {
      if (n < s.length() && s.pages[static_cast<std::size_t>(t / kPage)].released) return false;
    }
    return true;
  }
  void truncate(ModelSequence& s, std::int64_t n) {
    if (n == s.length()) return;
    s.tokens.resize(static_cast<std::size_t>(n));
    s.pages.resize(static_cast<std::size_t>((n + kPage - 1) / kPage));
    for (std::int64_t p = 0; p < static_cast<std::int64_t>(s.pages.size()); ++p) {
      ModelPage& page = s.pages[static_cast<std::size_t>(p)];
      if (page.exact != 0 && should_be_exact(n, p)) page.encoded = 0, page.centre = nullptr;
    }
  }
};

// --- what the codec gives for one vector -----------------------------------------------------------------------------

using Vector = std::vector<float>;

// Nearer to zero than to the centre.
bool refuses(const Vector& x, const Vector& centre) {
  double from_zero = 0, from_centre = 0;
  for (std::size_t i = 0; i < centre.size(); ++i) {
    from_zero += double{x[i]} * x[i];
    from_centre += (double{x[i]} - centre[i]) * (double{x[i]} - centre[i]);
  }
  return from_zero < from_centre;
}

Vector through_codec(Format format, Vector x, const Vector& centre = {}) {
  if (format_info(format).dense) {
    const Dtype as = format == Format::f32 ? Dtype::f32 : format == Format::f16 ? Dtype::f16 : Dtype::bf16;
    for (float& f : x) f = test::rounded(f, as);
    return x;
  }
  const bool rotated = format != Format::fp8;
  if (rotated) rotate(x).value();
  const std::size_t centred = refuses(x, centre) ? 0 : centre.size();
  for (std::size_t i = 0; i < centred; ++i) x[i] -= centre[i];
  decode_vector(format, encode_vector(format, x).value(), x).value();
  for (std::size_t i = 0; i < centred; ++i) x[i] += centre[i];
  if (rotated) rotate_back(x).value();
  return x;
}

class Replay {
 public:
  explicit Replay(const Trial& setup)
      : setup_(setup), cache_(Cache::create(setup.config).value()), model_{cache_.config(), {}, 1}, rng_(2024) {}

  void step() {
    const std::int64_t what = rng_.below(100);
    if (model_.sequences.empty() || (what < 4 && model_.sequences.size() < 6)) {
      model_.sequences[cache_.add_sequence()] = {};
    } else if (what < 12 && model_.sequences.size() < 6) {
      const SequenceId parent = pick();
      const SequenceId child = cache_.fork(parent).value();
      model_.sequences[child] = model_.sequences[parent];
    } else if (what < 15) {
      const SequenceId id = pick();
      ASSERT_TRUE(cache_.remove(id).ok());
      model_.sequences.erase(id);
      EXPECT_EQ(cache_.length(id).code(), Code::invalid_argument);
    } else if (what < 30) {
      truncate(pick());
    } else if (what < 34) {
      refused_append(pick());
    } else if (what < 40) {
      reorder();
    } else {
      batch_step();
    }
  }

  void check_all() {
    for (const auto& [id, s] : model_.sequences) check(id, s);
    const core::CacheTable& table = cache_.impl().table();
    EXPECT_EQ(table.pages_held(), model_.distinct(&ModelPage::identity));
    EXPECT_EQ(table.pool(core::Pool::exact).used_slots(), model_.distinct(&ModelPage::exact));
    EXPECT_EQ(table.pool(core::Pool::encoded).used_slots(), model_.distinct(&ModelPage::encoded));
  }

  void check_values(SequenceId id) {
    const ModelSequence& s = model_.sequences[id];
    const CacheConfig& c = cache_.config();
    std::int64_t begin = 0;
    while (begin < s.length()) {
      if (s.pages[static_cast<std::size_t>(begin / kPage)].released) {
        EXPECT_EQ(read(id, 0, begin, begin + 1).code(), Code::invalid_argument);
        begin += kPage;
        continue;
      }
      const std::int64_t end = std::min(s.length(), begin + kPage);
      for (int layer = 0; layer < c.layers; ++layer) {
        ASSERT_TRUE(read(id, layer, begin, end).ok());
        for (std::int64_t t = begin; t < end; ++t) {
          const bool exact = model_.reads_exact(s, t / kPage);
          for (int i = 0; i < c.kv_heads * 2; ++i) {
            const int head = i / 2;
            const bool value = i % 2 != 0;
            const std::vector<float>& expected = expect(s, t, layer, head, value, exact);
            const std::vector<float>& all = value ? values_ : keys_;
            const std::size_t at = static_cast<std::size_t>(((t - begin) * c.kv_heads + head) * c.head_dim);
            for (std::size_t j = 0; j < expected.size(); ++j) {
              ASSERT_EQ(std::bit_cast<std::uint32_t>(all[at + j]), std::bit_cast<std::uint32_t>(expected[j]))
                  << "token " << t << " of " << s.length() << ", layer " << layer << ", head " << head << ", channel "
                  << j << (value ? ", value" : ", key") << (exact ? ", exact: " : ", encoded: ") << all[at + j]
                  << " for " << expected[j];
            }
          }
        }
      }
      begin = end;
    }
  }

  SequenceId pick() {
    auto it = model_.sequences.begin();
    std::advance(it, rng_.below(static_cast<std::int64_t>(model_.sequences.size())));
    return it->first;
  }

  void remove_all() {
    while (!model_.sequences.empty()) {
      ASSERT_TRUE(cache_.remove(model_.sequences.begin()->first).ok());
      model_.sequences.erase(model_.sequences.begin());
    }
    check_all();
    EXPECT_EQ(cache_.memory().encoded_bytes + cache_.memory().scale_bytes + cache_.memory().exact_bytes, 0);
  }

  int refusals = 0, truncations = 0, window_refusals = 0;

 private:
  std::int64_t some_tokens() {
    const std::int64_t kind = rng_.below(20);
    return kind == 0 ? 0 : kind < 12 ? 1 + rng_.below(4) : kind < 18 ? 1 + rng_.below(70) : 1 + rng_.below(300);
  }

  void truncate(SequenceId id) {
    ModelSequence& s = model_.sequences[id];
    // Long sequences are cut back hard now and then: length adds time to the test, not cases.
    const bool anywhere = s.length() > 1200 || rng_.below(3) == 0;
    const std::int64_t back =
        anywhere ? rng_.below(s.length() + 1) : std::min<std::int64_t>(s.length(), rng_.below(model_.rollback() + 6));
    const std::int64_t n = s.length() - back;
    const Status status = cache_.truncate(id, n);
    if (n >= s.longest - model_.rollback()) {
      ASSERT_TRUE(status.ok()) << status.message();
    }
    if (!model_.may_truncate(s, n)) {
      EXPECT_EQ(status.code(), Code::invalid_argument) << n;
      EXPECT_NE(status.message().find("released already"), std::string::npos) << status.message();
      ++window_refusals;
      return;
    }
    ASSERT_TRUE(status.ok()) << status.message();
    model_.truncate(s, n);
    ++truncations;
  }

  void reorder() {
    std::vector<SequenceId> ids;
    for (const auto& [id, s] : model_.sequences) {
      if (rng_.below(3) > 0) ids.push_back(id);
    }
    std::vector<std::int64_t> parents;
    for (std::size_t i = 0; i < ids.size(); ++i) parents.push_back(rng_.below(static_cast<std::int64_t>(ids.size())));
    ASSERT_TRUE(cache_.reorder(ids, parents).ok());
    const Model before = model_;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      model_.sequences[ids[i]] = before.sequences.at(ids[static_cast<std::size_t>(parents[i])]);
    }
  }

  // A NaN anywhere: nothing changes, not even through append's own reserve.
  void refused_append(SequenceId id) {
    const CacheConfig& c = cache_.config();
    const std::vector<std::uint64_t> tokens = test::token_range(1, 1 + rng_.below(100));
    CacheRows rows(tokens, 0, c.kv_heads, c.head_dim, setup_.input);
    const auto values = static_cast<std::int64_t>(tokens.size()) * c.kv_heads * c.head_dim;
    rows.set(rng_.below(2) == 0, static_cast<std::size_t>(rng_.below(values)), std::numeric_limits<float>::quiet_NaN());
    const std::uint64_t version = cache_.impl().version();
    EXPECT_EQ(cache_.append(id, 0, rows.keys(), rows.values()).code(), Code::non_finite);
    EXPECT_EQ(cache_.impl().version(), version);
    ++refusals;
  }

  void batch_step() {
    std::vector<SequenceId> ids;
    for (const auto& [id, s] : model_.sequences) {
      if (ids.empty() || rng_.below(2) == 0) ids.push_back(id);
    }
    std::vector<Append> appends;
    std::vector<std::uint64_t> all;
    Model after = model_;
    for (const SequenceId id : ids) {
      if (const std::int64_t n = some_tokens(); n > 0) {
        after.release_by_window(after.sequences[id]);
        appends.push_back({id, n});
      } else {
        appends.push_back({id, 0});
      }
    }
    for (const Append& a : appends) {
      const std::vector<std::uint64_t> tokens = test::token_range(next_token_, a.tokens);
      next_token_ += static_cast<std::uint64_t>(a.tokens);
      all.insert(all.end(), tokens.begin(), tokens.end());
      ModelSequence& s = after.sequences[a.sequence];
      const std::int64_t begin = s.length();
      for (const std::uint64_t token : tokens) after.push(s, token);
      Model::end_step(s, begin);
    }
    const std::int64_t capacity = cache_.config().capacity_tokens / kPage;
    const Status status = cache_.reserve(appends);
    if (capacity > 0 && after.distinct(&ModelPage::identity) > capacity) {
      EXPECT_EQ(status.code(), Code::out_of_capacity) << status.message();
      ++refusals;
      return;
    }
    ASSERT_TRUE(status.ok()) << status.message();
    const CacheConfig& c = cache_.config();
    const bool abandoned = rng_.below(8) == 0;
    for (int layer = c.layers - 1; layer >= (abandoned ? 1 : 0); --layer) {
      const CacheRows rows(all, layer, c.kv_heads, c.head_dim, setup_.input);
      ASSERT_TRUE(cache_.write(ids, layer, rows.keys(), rows.values()).ok());
    }
    if (!abandoned) {
      model_ = std::move(after);
      return;
    }
    // The step is dropped: all is as before, except that pages that were about to change were separated from their
    // forks, and that the window moved.
    for (const Append& a : appends) {
      if (a.tokens == 0) continue;
      const ModelSequence& old = model_.sequences[a.sequence];
      ASSERT_TRUE(cache_.truncate(a.sequence, old.length()).ok());
      ModelSequence& dropped = after.sequences[a.sequence];
      std::vector<ModelPage> pages = old.pages;
      for (std::size_t p = 0; p < pages.size(); ++p) {
        if (dropped.pages[p].released) pages[p] = {.released = true};
      }
      if (old.length() % kPage != 0) {
        ModelPage& last = pages.back();
        last.identity = dropped.pages[pages.size() - 1].identity;
        if (last.exact != 0) last.exact = after.next++;
        if (last.encoded != 0) last.encoded = after.next++;
      }
      dropped = {old.tokens, pages, dropped.longest};
    }
    model_ = std::move(after);
  }

  Status read(SequenceId id, int layer, std::int64_t begin, std::int64_t end) {
    const CacheConfig& c = cache_.config();
    const auto n = static_cast<std::size_t>((end - begin) * c.kv_heads * c.head_dim);
    keys_.assign(n, 0);
    values_.assign(n, 0);
    return cache_.read(id, layer, begin, end, MutableTensorView::of(keys_.data(), end - begin, c.kv_heads, c.head_dim),
                       MutableTensorView::of(values_.data(), end - begin, c.kv_heads, c.head_dim));
  }

  // A token as exact pages hold it.
  Vector given(std::uint64_t token, int layer, int head, bool value) {
    const CacheConfig& c = cache_.config();
    Vector x = test::cache_vector(token, layer, head, value, c.head_dim, setup_.input);
    if (c.sink_pages > 0 || c.tail_pages > 0) {
      const Dtype of_first_write = setup_.input == Dtype::f32 ? Dtype::bf16 : setup_.input;  // where no format is dense
      for (float& f : x) f = test::rounded(f, c.exact.value_or(of_first_write));
    }
    return x;
  }

  const Vector& expect(const ModelSequence& s, std::int64_t t, int layer, int head, bool value, bool exact) {
    const std::uint64_t token = s.tokens[static_cast<std::size_t>(t)];
    const bool centred = !value && !exact && cache_.config().k_centre == KeyCentre::page;
    const std::shared_ptr<const Centre> of = centred ? s.pages[static_cast<std::size_t>(t / kPage)].centre : nullptr;
    Vector& x = expected_[{token, layer, head, value, exact, of}];
    if (x.empty()) {
      const Vector centre = centred ? centre_of(of, layer, head) : Vector{};
      x = given(token, layer, head, value);
      if (!exact) x = through_codec(value ? cache_.v_format() : cache_.k_format(), x, centre);
    }
    return x;
  }

  // The vector that a page's keys are encoded around.
  const Vector& centre_of(const std::shared_ptr<const Centre>& of, int layer, int head) {
    Vector& centre = centres_[{of, layer, head}];
    if (!centre.empty()) return centre;
    const bool rotated = cache_.k_format() != Format::fp8, stored = of->of_tokens != nullptr;
    const auto d = static_cast<std::size_t>(cache_.config().head_dim);
    const Vector before = stored ? centre_of(of->of_tokens, layer, head) : Vector(d);
    Vector mean(d);
    int centred = 0;
    for (const std::uint64_t token : of->tokens) {
      Vector x = given(token, layer, head, false);
      if (stored) {
        if (rotated) rotate(x).value();
        const bool with_centre = !refuses(x, before);
        centred += with_centre ? 1 : 0;
        for (std::size_t j = 0; with_centre && j < d; ++j) x[j] -= before[j];
        decode_vector(cache_.k_format(), encode_vector(cache_.k_format(), x).value(), x).value();
      }
      for (std::size_t j = 0; j < d; ++j) mean[j] += x[j];
    }
    const float factor = 1.0f / static_cast<float>(of->tokens.size()), share = static_cast<float>(centred) / kPage;
    for (float& x : mean) x *= factor;
    if (!stored && rotated) rotate(mean).value();
    for (std::size_t j = 0; stored && j < d; ++j) mean[j] = before[j] * share + mean[j];
    Vector decoded(d);
    decode_vector(Format::tq6, encode_vector(Format::tq6, mean).value(), decoded).value();
    return centres_[{of, layer, head}] = decoded;
  }

  void check(SequenceId id, const ModelSequence& s) {
    const auto view = cache_.impl().view(id);
    ASSERT_TRUE(view.ok());
    ASSERT_EQ(view->length, s.length());
    ASSERT_EQ(view->pages.size(), s.pages.size());
    for (std::size_t p = 0; p < s.pages.size(); ++p) {
      SCOPED_TRACE(testing::Message() << "page " << p << " of length " << s.length());
      const core::PageRef ref = view->pages[p];
      ASSERT_EQ(ref.exact >= 0, s.pages[p].exact != 0);
      ASSERT_EQ(ref.encoded >= 0, s.pages[p].encoded != 0);
      if (s.pages[p].released) continue;
      const auto page = static_cast<std::int64_t>(p);
      ASSERT_EQ(cache_.impl().reads_exact(*view, page), model_.reads_exact(s, page));
      const core::CacheTable& table = cache_.impl().table();
      if (ref.exact >= 0) {
        ASSERT_EQ(table.pool(core::Pool::exact).references(ref.exact),
                  model_.holders(&ModelPage::exact, s.pages[p].exact));
      }
      if (ref.encoded >= 0) {
        ASSERT_EQ(table.pool(core::Pool::encoded).references(ref.encoded),
                  model_.holders(&ModelPage::encoded, s.pages[p].encoded));
      }
    }
  }

  Trial setup_;
  Cache cache_;
  Model model_;
  Rng rng_;
  std::uint64_t next_token_ = 1;
  std::vector<float> keys_, values_;
  std::map<std::tuple<std::uint64_t, int, int, bool, bool, std::shared_ptr<const Centre>>, Vector> expected_;
  std::map<std::tuple<std::shared_ptr<const Centre>, int, int>, Vector> centres_;
};

class CacheModel : public testing::TestWithParam<Trial> {};

TEST_P(CacheModel, RandomStepsMatch) {
  const Trial trial = GetParam();
  Replay replay(trial);
  for (int i = 0; i < test::random_steps(trial.steps); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    replay.step();
    if (testing::Test::HasFatalFailure()) return;
    replay.check_all();
    if (testing::Test::HasFailure()) return;
    if (i % 10 == 0) replay.check_values(replay.pick());
    if (testing::Test::HasFailure()) return;
  }
  replay.remove_all();
  EXPECT_GT(replay.refusals, 0);
  EXPECT_GT(replay.truncations, 0);
  if (trial.config.window > 0) {
    EXPECT_GT(replay.window_refusals, 0);
  }
}

CacheConfig config(std::string k, std::string v, int sinks, int tails) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 2;
  c.head_dim = 32;
  c.k = std::move(k);
  c.v = std::move(v);
  c.sink_pages = sinks;
  c.tail_pages = tails;
  return c;
}

std::vector<Trial> setups() {
  std::vector<Trial> all;
  all.push_back({"defaults", config("tq6", "tq4", 1, 1)});
  all.push_back({"no_exact_ends", config("tq4", "tq3", 0, 0)});
  all.push_back({"sinks_only_bf16", config("tq5", "tq2", 2, 0), Dtype::bf16});
  all.push_back({"tails_only", config("tq3", "tq8", 0, 2)});
  all.push_back({"dense", config("f32", "f16", 1, 1)});
  all.push_back({"dense_and_coded", config("bf16", "fp8", 1, 1), Dtype::f16});
  Trial rounding{"exact_rounds", config("tq8", "tq4", 1, 1)};
  rounding.config.exact = Dtype::bf16;
  all.push_back(rounding);
  Trial window{"window", config("tq4", "tq4", 1, 1)};
  window.config.window = 100;
  window.config.window_sinks = 4;
  window.config.layers = 1;
  all.push_back(window);
  Trial small_window{"small_window_long_tail", config("tq6", "tq2", 0, 3)};
  small_window.config.window = 1;
  small_window.config.layers = 1;
  all.push_back(small_window);
  Trial rollback{"window_rollback", config("tq6", "tq4", 1, 1)};
  rollback.config.window = 70;
  rollback.config.window_sinks = 70;
  rollback.config.rollback_tokens = 200;
  rollback.config.layers = 1;
  all.push_back(rollback);
  Trial full{"capacity", config("tq6", "tq4", 1, 1)};
  full.config.capacity_tokens = 20 * 64 + 63;
  all.push_back(full);
  Trial tight{"capacity_window_in_place", config("tq4", "tq4", 0, 0)};
  tight.config.capacity_tokens = 14 * 64;
  tight.config.window = 64;
  tight.config.window_sinks = 65;
  all.push_back(tight);
  for (const bool has_tail : {true, false}) {
    Trial centred{has_tail ? "centred" : "centred_in_place", config("tq4", "tq4", has_tail ? 1 : 0, has_tail ? 1 : 0)};
    centred.config.k_centre = KeyCentre::page;
    all.push_back(centred);
    centred.name = has_tail ? "centred_tails_only" : "centred_in_place_behind_sinks";
    centred.config.sink_pages = has_tail ? 0 : 2;
    centred.config.k = "fp8";
    centred.input = Dtype::bf16;
    all.push_back(centred);
    centred.name = has_tail ? "centred_window" : "centred_in_place_window";
    centred.config.k = "tq5";
    centred.config.sink_pages = 0;
    centred.config.window = has_tail ? 100 : 64;
    centred.config.window_sinks = 65;
    centred.config.layers = 1;
    all.push_back(centred);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, CacheModel, testing::ValuesIn(setups()),
                         [](const testing::TestParamInfo<Trial>& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace kvant
