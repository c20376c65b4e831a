// An engine's blocks in host memory.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "core/pages/impl.hpp"
#include "core/pages/tail_copies.hpp"
#include "core/plan/host_work.hpp"
#include "core/store/storage.hpp"

namespace kvant::core {

// As in HostStore: values that a worker encodes at least.
constexpr std::int64_t kEncodedPerWorker = 32768;

// The exact copies, a slot each, and whose they are. Kernels load tokens that were never written: memory is zeros at
// first.
struct HostTail {
  HostTail(const PagesTail& tail, int kv_heads)
      : storage(tail.layout, tail.layers, kv_heads),
        copies(tail.ends(), tail.copies, tail.encode_at_once),
        dtype(tail.dtype),
        pools(static_cast<std::size_t>(tail.layers)) {}
  // The first rows of one side of a copy, for kernels that read rows.
  [[nodiscard]] StoreJob rows_of_copy(std::int32_t copy, int layer, int head, bool values, int count) const;

  Storage storage;
  TailCopies copies;
  Dtype dtype;
  std::vector<BlockPool> pools;  // each layer has one: that of its last write; without data before
};

// The tables of a step, of which writes of centred pages ask where a row belongs.
class TableRows {
 public:
  void read(const StepTables& tables);              // may throw std::bad_alloc, and then has changed nothing
  void take() noexcept { std::swap(now_, next_); }  // from now on those that were read last
  // The page that a row goes to, and the block before (below 0: none). Page -1: the tables have the row's slot neither
  // for the row nor for another one.
  struct Place {
    std::int64_t page = -1;
    std::int32_t before = -1;
    std::int32_t length = 0;  // the sequence has it behind the step
  };
  [[nodiscard]] Place place(std::int64_t row, std::int64_t slot) const;
  [[nodiscard]] bool is_known() const noexcept { return !now_.starts.empty(); }

 private:
  [[nodiscard]] Place place_in_any_row(std::int64_t slot) const;

  struct Lists {
    std::vector<std::int32_t> starts, lengths, blocks;
    std::vector<std::size_t> first;  // places in `blocks`, one for each sequence
  };
  Lists now_, next_;  // the other one has the memory for the next step
};

class HostPages final : public PagesImpl {
 public:
  static Result<std::shared_ptr<const PagesImpl>> create(const PagesSpec& spec);
  HostPages(const PagesSpec& spec, const Kernels& kernels) : PagesImpl(spec), kernels_(kernels) {}
  Status make_tail();
  [[nodiscard]] HostTail* own_tail() const noexcept { return own_tail_.get(); }  // null: there is none

  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream) const override;
  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) const override;
  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream) const override;
  Result<bool> take_non_finite(Stream) const override { return false; }
  Status begin_step(const StepTables& tables, Stream stream) const override;
  Result<std::int64_t> take_misses(Stream) const override { return own_tail_->copies.take_misses(); }
  Result<std::unique_ptr<PagesPlanImpl>> plan(PagesPlanOptions options) const override;

 private:
  // Encodes blocks from their exact copies, in the pools of these layers; those without data are passed over.
  void encode_from_copies(std::span<const base::BlockToEncode> blocks, std::span<const BlockPool> pools) const;
  // The same with those of `blocks` whose codes lack tokens that their copies have, if `pool` is a layer's.
  void encode_unencoded(std::span<const std::int32_t> blocks, const BlockPool& pool) const;

  const Kernels& kernels_;
  std::unique_ptr<HostTail> own_tail_;
  std::unique_ptr<TableRows> step_ = std::make_unique<TableRows>();
};

class HostPagesPlan final : public PagesPlanImpl {
 public:
  static Result<std::unique_ptr<PagesPlanImpl>> create(std::shared_ptr<const PagesImpl> pages,
                                                       PagesPlanOptions options);
  HostPagesPlan(std::shared_ptr<const PagesImpl> of, PagesPlanOptions complete)
      : PagesPlanImpl(std::move(of), std::move(complete)), lists_(pages().spec(), options().attention) {}

  Status set_tables(const StepTables& tables, Stream stream) override;
  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
             const RunOptions& options) override;
  Result<bool> take_errors(Stream) override { return false; }
  [[nodiscard]] std::string explain() const override;
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return 0; }
  [[nodiscard]] const char* isa() const noexcept override { return lists_.kernels->name; }
  [[nodiscard]] const char* kernel() const noexcept override { return ""; }
  [[nodiscard]] int products() const noexcept override {
    return lists_.takes_tiles(std::int64_t{options().max_query_len} * lists_.group) ? lists_.products.bits : 16;
  }
  [[nodiscard]] int threads() const noexcept override { return lists_.workers; }

 private:
  [[nodiscard]] const HostTail* tail() const { return static_cast<const HostPages&>(pages()).own_tail(); }

  HostWork lists_;
  bool is_set_ = false;
  std::int64_t queries_ = 0;  // all of the batch
  std::int64_t rows_ = 0;     // rows of q that the batch reaches
  // That is visible, and where the table has it.
  struct {
    std::int32_t block = -1, sequence = 0;
    std::int64_t page = 0;
  } largest_;
  std::int64_t keys_[kDomains] = {};  // that a kv head reads
  std::uint64_t tail_changes_ = 0;    // that the lists know of
};

// Workers for so many values, of which each should have `least`.
int workers_for(const CacheSpec& spec, std::int64_t values, std::int64_t least);

inline std::byte* block_of(const BlockPool& pool, std::int64_t block, std::int64_t head) {
  return pool.data + block * pool.block_stride + head * pool.head_stride;
}

}  // namespace kvant::core
