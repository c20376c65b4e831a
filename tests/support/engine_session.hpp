// A serving engine of a few sequences, without its memory: it allocates blocks, appends prompts in chunks and drafts of
// tokens, rejects some of them, shares prefixes, forks with a copy of the last block, preempts sequences and resumes
// them from blocks that nobody has used since, frees, and uses blocks again. Tokens are numbers ("contents").
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/engine_pool.hpp"
#include "support/inputs.hpp"

namespace kvant::test {

struct EngineSequence {
  std::vector<std::int64_t> tokens;  // contents
  std::vector<std::int64_t> prompt;  // tokens that it is to get, of one that was preempted
  std::vector<std::int32_t> blocks;
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
};

// The calls of a step: copies first, then the tables and the writes.
struct EngineWork {
  std::vector<std::int32_t> copy_from, copy_to;
  EngineStep step;
  std::vector<std::int64_t> slots;
  std::vector<std::int64_t> contents;        // the slots' tokens; -1: padding behind the rows, not stored
  std::vector<const EngineSequence*> batch;  // valid until the next step
};

class EngineSession {
 public:
  static constexpr int kBlocks = 32, kMostSequences = 6, kMostPages = 6;
  static constexpr int kMostQueries = 140, kMostDrafts = 12;
  static constexpr std::int64_t kContents = 128;
  static constexpr std::int64_t kMostTokens = 5 * kPageTokens;

  explicit EngineSession(std::uint64_t seed) : users_(kBlocks, 0), cached_(kBlocks), rng_(seed) {}

  const EngineWork& next() {
    work_ = {};
    if (sequences_.size() < kMostSequences && rng_.below(3) == 0) begin();
    if (!sequences_.empty() && rng_.below(8) == 0) fork();
    if (!sequences_.empty() && rng_.below(20) == 0) preempt();
    if (!waiting_.empty() && sequences_.size() < kMostSequences && rng_.below(6) == 0) resume();
    if (!sequences_.empty() && rng_.below(12) == 0) truncate();
    if (!sequences_.empty() && (rng_.below(25) == 0 || free_blocks() < 2)) remove(rng_.below(count()));
    append();
    return work_;
  }

 private:
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(sequences_.size()); }
  [[nodiscard]] std::int64_t free_blocks() const { return std::count(users_.begin(), users_.end(), 0); }
  EngineSequence& any() { return sequences_[static_cast<std::size_t>(rng_.below(count()))]; }

  std::int32_t take() {
    const auto free = std::find(users_.begin(), users_.end(), 0);
    // From a random place on, so that ids are used again soon and late.
    const auto start = static_cast<std::size_t>(rng_.below(static_cast<std::int64_t>(users_.size())));
    for (std::size_t i = 0; i < users_.size(); ++i) {
      const std::size_t at = (start + i) % users_.size();
      if (users_[at] == 0) return users_[at] = 1, cached_[at].clear(), static_cast<std::int32_t>(at);
    }
    return static_cast<std::int32_t>(free - users_.begin());
  }

  void preempt() {
    const std::int64_t i = rng_.below(count());
    EngineSequence waits = sequences_[static_cast<std::size_t>(i)];
    waits.prompt = waits.tokens;
    if (waiting_.size() < 4) waiting_.push_back(std::move(waits));
    remove(i);
  }

  // With the whole blocks that still hold its tokens, whoever has them.
  void resume() {
    EngineSequence s;
    s.prompt = waiting_.front().prompt;
    waiting_.erase(waiting_.begin());
    for (std::int64_t end = kPageTokens; end < static_cast<std::int64_t>(s.prompt.size()); end += kPageTokens) {
      const std::vector<std::int64_t> prefix(s.prompt.begin(), s.prompt.begin() + end);
      const auto at = std::find(cached_.begin(), cached_.end(), prefix);
      if (at == cached_.end()) break;
      const auto block = static_cast<std::int32_t>(at - cached_.begin());
      ++users_[static_cast<std::size_t>(block)];
      s.blocks.push_back(block);
      s.tokens = prefix;
    }
    sequences_.push_back(std::move(s));
  }

  // A new sequence: empty, or with the whole blocks of another's prefix.
  void begin() {
    EngineSequence s;
    if (!sequences_.empty() && rng_.below(2) == 0) {
      const EngineSequence& other = any();
      const std::int64_t shared = rng_.below(other.length() / kPageTokens + 1);
      s.tokens.assign(other.tokens.begin(), other.tokens.begin() + shared * kPageTokens);
      s.blocks.assign(other.blocks.begin(), other.blocks.begin() + shared);
      for (const std::int32_t b : s.blocks) ++users_[static_cast<std::size_t>(b)];
    }
    sequences_.push_back(std::move(s));
  }

  // The last block is copied if it is not full.
  void fork() {
    if (sequences_.size() >= kMostSequences || free_blocks() < 2) return;
    EngineSequence child = any();
    for (const std::int32_t b : child.blocks) ++users_[static_cast<std::size_t>(b)];
    if (child.length() % kPageTokens != 0) {
      const std::int32_t from = child.blocks.back(), to = take();
      work_.copy_from.push_back(from);
      work_.copy_to.push_back(to);
      --users_[static_cast<std::size_t>(from)];
      child.blocks.back() = to;
    }
    sequences_.push_back(std::move(child));
  }

  // Rejected tokens of a draft, in blocks that nobody shares. A block without a token is freed.
  void truncate() {
    EngineSequence& s = any();
    const std::int64_t rejected = std::min(rng_.below(kMostDrafts + 1), s.length());
    const std::int64_t first = (s.length() - rejected) / kPageTokens;
    for (auto i = static_cast<std::size_t>(first); i < s.blocks.size(); ++i) {
      if (users_[static_cast<std::size_t>(s.blocks[i])] > 1) return;
    }
    for (auto i = static_cast<std::size_t>(first); i < s.blocks.size(); ++i)
      cached_[static_cast<std::size_t>(s.blocks[i])].clear();
    s.tokens.resize(static_cast<std::size_t>(s.length() - rejected));
    while (static_cast<std::int64_t>(s.blocks.size()) * kPageTokens >= s.length() + kPageTokens) {
      --users_[static_cast<std::size_t>(s.blocks.back())];
      s.blocks.pop_back();
    }
  }

  void remove(std::int64_t i) {
    for (const std::int32_t b : sequences_[static_cast<std::size_t>(i)].blocks) --users_[static_cast<std::size_t>(b)];
    sequences_.erase(sequences_.begin() + i);
  }

  void append() {
    work_.step.unused = static_cast<std::int32_t>(rng_.next());
    int padding = 0;
    for (EngineSequence& s : sequences_) {
      std::int64_t tokens = rng_.below(4) == 0 ? 1 + rng_.below(kMostDrafts) : rng_.below(4) == 0 ? 0 : 1;
      const std::int64_t known = static_cast<std::int64_t>(s.prompt.size()) - s.length();
      if (tokens > 0 && rng_.below(known > 0 ? 2 : 20) == 0) tokens = 1 + rng_.below(kMostQueries);
      if (known > 0) tokens = std::min(tokens, known);
      const std::int64_t blocks = (s.length() + tokens + kPageTokens - 1) / kPageTokens;
      if (s.length() + tokens > kMostTokens || blocks - static_cast<std::int64_t>(s.blocks.size()) > free_blocks())
        tokens = 0;
      if (rng_.below(6) == 0) ++padding;
      for (std::int64_t i = 0; i < tokens; ++i) {
        if (s.length() == static_cast<std::int64_t>(s.blocks.size()) * kPageTokens) s.blocks.push_back(take());
        const auto at = static_cast<std::size_t>(s.length());
        const std::int64_t content = at < s.prompt.size() ? s.prompt[at] : rng_.below(kContents);
        store(slots_of(s.blocks, s.length(), s.length() + 1)[0], content);
        s.tokens.push_back(content);
      }
      if (tokens > 0) note_whole_blocks(s);
      work_.step.add(s.blocks, static_cast<std::int32_t>(s.length()), static_cast<std::int32_t>(tokens));
      work_.batch.push_back(&s);
    }
    for (int i = 0; i < padding; ++i) store(-1, -1);
  }

  void store(std::int64_t slot, std::int64_t content) {
    work_.slots.push_back(slot);
    work_.contents.push_back(content);
  }

  // A whole block can be found again by the tokens up to its end.
  void note_whole_blocks(const EngineSequence& s) {
    for (std::int64_t i = 0; (i + 1) * kPageTokens <= s.length(); ++i) {
      std::vector<std::int64_t>& of = cached_[static_cast<std::size_t>(s.blocks[static_cast<std::size_t>(i)])];
      if (of.empty()) of.assign(s.tokens.begin(), s.tokens.begin() + (i + 1) * kPageTokens);
    }
  }

  std::vector<int> users_;                         // how many use each block
  std::vector<std::vector<std::int64_t>> cached_;  // each block's tokens up to its end, if it is whole
  Rng rng_;
  std::vector<EngineSequence> sequences_, waiting_;
  EngineWork work_;
};

}  // namespace kvant::test
