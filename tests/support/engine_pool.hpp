// A pool of blocks as an engine has it: any strides, full of what others left there.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kvant/pages.hpp"

namespace kvant::test {

inline PagesConfig geometry(const std::string& k, const std::string& v, int head_dim, int kv_heads = 2) {
  PagesConfig c;
  c.kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.k = k;
  c.v = v;
  return c;
}

inline testing::AssertionResult refuses(const Status& s, Code code, const std::vector<std::string>& words) {
  if (s.ok()) return testing::AssertionFailure() << "was accepted";
  if (s.code() != code) return testing::AssertionFailure() << "another code, with: " << s.message();
  for (const std::string& w : words) {
    if (s.message().find(w) == std::string::npos)
      return testing::AssertionFailure() << "no \"" << w << "\" in: " << s.message();
  }
  return testing::AssertionSuccess();
}

struct PoolShape {
  std::int64_t blocks = 1;
  std::int64_t between_heads = 0, between_blocks = 0;  // bytes of others, multiples of 64
  bool heads_first = false;                            // [kv_heads][blocks] instead of [blocks][kv_heads]
  int garbage = 0xFF;                                  // NaN scales, NaN floats, NaN fp8
};

class EnginePool {
 public:
  EnginePool(const Pages& pages, const PoolShape& shape)
      : kv_heads_(pages.config().kv_heads), bytes_(pages.block_bytes()) {
    const std::int64_t each = bytes_ + shape.between_heads;
    const std::int64_t inner = (shape.heads_first ? shape.blocks : kv_heads_) * each + shape.between_blocks;
    size_ = static_cast<std::size_t>((shape.heads_first ? kv_heads_ : shape.blocks) * inner);
    memory_.reset(static_cast<std::byte*>(::operator new[](size_, std::align_val_t{64})));
    std::memset(memory_.get(), shape.garbage, size_);
    view = {memory_.get(), shape.blocks, shape.heads_first ? each : inner, shape.heads_first ? inner : each};
  }

  BlockPool view;

  [[nodiscard]] std::byte* block(std::int64_t block, std::int64_t head) const {
    return view.data + block * view.block_stride + head * view.head_stride;
  }
  /// Bytes that belong to no block are as they were.
  [[nodiscard]] bool is_intact(int garbage = 0xFF) const {
    std::vector<bool> owned(size_);
    for (std::int64_t b = 0; b < view.blocks; ++b) {
      for (std::int64_t h = 0; h < kv_heads_; ++h) {
        const auto at = static_cast<std::size_t>(block(b, h) - view.data);
        for (std::int64_t i = 0; i < bytes_; ++i) owned[at + static_cast<std::size_t>(i)] = true;
      }
    }
    for (std::size_t i = 0; i < size_; ++i) {
      if (!owned[i] && memory_[i] != static_cast<std::byte>(garbage)) return false;
    }
    return true;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::int64_t kv_heads_, bytes_;
  std::size_t size_ = 0;
  std::unique_ptr<std::byte[], Free> memory_;
};

/// The tables of a step, in vectors.
struct EngineStep {
  std::vector<std::vector<std::int32_t>> blocks;  // each sequence's; padded to a table with `unused`
  std::vector<std::int32_t> seq_lens, query_start_loc{0};
  std::int32_t unused = -7;

  void add(std::vector<std::int32_t> of, std::int32_t length, std::int32_t queries) {
    blocks.push_back(std::move(of));
    seq_lens.push_back(length);
    query_start_loc.push_back(query_start_loc.back() + queries);
  }
  /// Valid until this changes.
  StepTables tables(std::int64_t columns) {
    table.assign(blocks.size() * static_cast<std::size_t>(columns), unused);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      for (std::size_t p = 0; p < blocks[i].size(); ++p)
        table[i * static_cast<std::size_t>(columns) + p] = blocks[i][p];
    }
    return {.block_table = table.data(),
            .row_stride = columns,
            .columns = columns,
            .seq_lens = seq_lens.data(),
            .query_start_loc = query_start_loc.data(),
            .batch = static_cast<std::int32_t>(blocks.size())};
  }
  std::vector<std::int32_t> table;
};

/// Slots of tokens [begin, end) of a sequence that has these blocks.
inline std::vector<std::int64_t> slots_of(const std::vector<std::int32_t>& blocks, std::int64_t begin,
                                          std::int64_t end) {
  std::vector<std::int64_t> slots;
  for (std::int64_t t = begin; t < end; ++t)
    slots.push_back(std::int64_t{blocks[static_cast<std::size_t>(t / kPageTokens)]} * kPageTokens + t % kPageTokens);
  return slots;
}

}  // namespace kvant::test
