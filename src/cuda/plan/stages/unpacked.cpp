#include "core/fmt.hpp"
#include "cuda/plan/kernels_of.hpp"
#include "cuda/plan/stages/dense.hpp"
#include "cuda/plan/stages/stage.hpp"
#include "cuda/prefill_unpacked/unpack.hpp"

namespace kvant::cuda {
namespace {

using prefill::dense::DenseKernel;
using prefill::dense::Side;
using prefill::unpacked::RoundRule;
using prefill::unpacked::RoundTables;
using prefill::unpacked::UnpackKernel;

// prefill_unpacked: rounds, each of which unpacks pages into the workspace and attends to them.
class Unpacked final : public Stage {
 public:
  // Blocks that unpack: both sides, or one alone where head_dims differ.
  struct Unpack {
    UnpackKernel kernel;
    unsigned blocks;
    bool keys, values;
  };
  Unpacked(const Planning& planning, std::vector<Unpack> unpack)
      : kernels_(kernels_of_plan(planning)),
        unpack_(std::move(unpack)),
        encode_(planning.compiled.encode),
        rule_(*planning.choice.rounds),
        is_named_(planning.is_named(core::kPrefillUnpacked)),
        why_(planning.choice.why),
        k_(planning.work.k),
        v_(planning.work.v),
        head_dim_(planning.work.head_dim_words()),
        multiprocessors_(planning.limits.multiprocessors) {
    const auto rounds = static_cast<std::size_t>(rule_.rounds), batch = static_cast<std::size_t>(planning.params.batch);
    const AttendParams& p = planning.params;
    const auto bytes_of = [&](int head_dim) {
      return aligned(static_cast<std::size_t>(rule_.rows) * static_cast<std::size_t>(2 * head_dim));
    };
    key_bytes_ = bytes_of(p.head_dim), value_bytes_ = bytes_of(p.v_head_dim);
    if (has_byte_keys()) {
      // A tile may reach behind the last page, by one less than it has.
      const std::size_t rows = key_rows() + static_cast<std::size_t>(kernels_[0].key_rows);
      factors_at_ = aligned(rows * static_cast<std::size_t>(kernels_[0].head_dim));
      key_bytes_ = factors_at_ + aligned(rows * sizeof(float));
      for (const core::DeviceSequence& s : planning.work.sequences) most_queries_ += s.q_len;
      const auto query_rows =
          static_cast<std::size_t>(most_queries_) * static_cast<std::size_t>(planning.params.q_heads);
      query_bytes_ = aligned(query_rows * static_cast<std::size_t>(kernels_[0].head_dim));
      all_query_bytes_ = query_bytes_ + aligned(query_rows * sizeof(float));
    }
    parts_at_ = aligned(rounds * sizeof(prefill::Round));
    served_at_ = parts_at_ + aligned((rounds + batch) * sizeof(prefill::Part));
    keys_at_ = served_at_ + aligned(batch * sizeof(std::int32_t));
  }

  [[nodiscard]] std::size_t workspace_bytes() const noexcept override {
    return keys_at_ + key_bytes_ + value_bytes_ + all_query_bytes_;
  }
  [[nodiscard]] std::string explain() const override {
    const DenseKernel& one = kernels_[0];
    const bool is_dense = codec::is_dense(k_);
    const std::string products =
        has_byte_keys()
            ? "8 bits: forced; queries as one digit (7 bits and sign), keys as levels, exact and fresh ones as bytes; "
              "weights and values f16"
            : fmt::format("{}, f32 sums; weights{} are rounded to the same type", is_dense ? "16-bit floats" : "f16",
                          is_dense ? "" : ", and what codes stand for,");
    return fmt::format(
        "kernel     {} {}/{}, head_dim {}, tiles of {} query rows by {} keys: {}\n"
        "products   {}\n"
        "rounds     {}, each of up to {} tokens of a kv head, {} MiB of the workspace: pages are unpacked once, in "
        "their original coordinates\n"
        "blocks     {} of {}\n"
        "serves     sequences that have at least {} rows of queries, if these are bf16 or f16 and lie at multiples of "
        "16 bytes, as long as rounds have room\n",
        core::kPrefillUnpacked, format_info(k_).name, format_info(v_).name, head_dim_, one.rows, one.keys, why_,
        products, rule_.rounds, rule_.rows, (key_bytes_ + value_bytes_) >> 20, multiprocessors_, describe_block(one),
        rule_.least_rows);
  }
  Status run(StageRun& run) const override {
    AttendParams& p = run.params;
    const char* missing = has_byte_keys()           ? nullptr
                          : p.q.dtype == Dtype::f32 ? "q.dtype is neither bf16 nor f16"
                          : !lies_at_16_bytes(p.q)  ? "q does not lie at multiples of 16 bytes"
                                                    : nullptr;
    if (missing != nullptr) return leave_to_others(core::kPrefillUnpacked, is_named_, missing);
    // Rounded to bf16, what codes stand for would lose more than tq8 does.
    const bool is_bf16 = p.q.dtype == Dtype::bf16 && p.cache.encoded_layout.k.format == Format::bf16;
    const DenseKernel& kernel = *kernel_of_dtype(kernels_, is_bf16 ? Dtype::bf16 : Dtype::f16);
    std::byte* const keys = run.workspace + keys_at_;
    std::byte* const values_at = keys + key_bytes_;
    std::byte* const queries_at = values_at + value_bytes_;
    float* const factors = has_byte_keys() ? reinterpret_cast<float*>(keys + factors_at_) : nullptr;
    const prefill::ByteQueries queries{queries_at, reinterpret_cast<float*>(queries_at + query_bytes_)};
    RoundRule rule = rule_;
    rule.share = run.left;
    const RoundTables tables{reinterpret_cast<prefill::Round*>(run.workspace),
                             reinterpret_cast<prefill::Part*>(run.workspace + parts_at_),
                             reinterpret_cast<std::int32_t*>(run.workspace + served_at_)};
    KVANT_CUDA_TRY(make_rounds(p, rule, tables, run.limits.overlaps(), run.native_stream()));
    const core::FreshRows& fresh = run.fresh;
    prefill::unpacked::UnpackTo to{.round = tables.rounds,
                                   .parts = tables.parts,
                                   .keys = keys,
                                   .values = values_at,
                                   .factors = factors,
                                   .queries = queries,
                                   .most_queries = most_queries_,
                                   .is_f16 = !is_bf16,
                                   .fresh_is_f16 = fresh.keys.data != nullptr && fresh.keys.dtype == Dtype::f16,
                                   .tile_keys = rule.tile_keys};
    const Side values{to.values, rule.rows, 2 * p.v_head_dim, 2 * p.v_head_dim};
    const Side key_side = has_byte_keys()
                              ? Side{keys, static_cast<std::int64_t>(key_rows()), kernel.head_dim, kernel.head_dim}
                              : Side{keys, rule.rows, 2 * p.head_dim, 2 * p.head_dim};
    for (int round = 0; round < rule.rounds; ++round, ++to.round, to.queries = {}) {
      for (const Unpack& one : unpack_) {
        prefill::unpacked::UnpackTo sides = to;
        if (!one.keys) sides.keys = nullptr;
        if (!one.values) sides.values = nullptr;
        void* arguments[] = {&p, &sides};
        Launch unpack(one.blocks, one.kernel.threads, run.native_stream(), run.limits.overlaps());
        unpack.config.dynamicSmemBytes = static_cast<std::size_t>(one.kernel.shared_bytes);
        KVANT_CUDA_TRY(cudaLaunchKernelExC(&unpack.config, one.kernel.function, arguments));
      }
      prefill::Schedule schedule{};
      schedule.round = to.round, schedule.parts = to.parts;
      if (Status s = launch_dense(kernel, encode_, run, schedule, run.limits.multiprocessors, key_side, values, 1,
                                  factors, queries);
          !s.ok())
        return s;
    }
    run.left.served = tables.served;
    return {};
  }

 private:
  static std::span<const DenseKernel> kernels_of_plan(const Planning& planning) {
    if (planning.choice.byte_keys) return {planning.compiled.byte_keys, 1};
    return planning.compiled.dense;
  }
  [[nodiscard]] bool has_byte_keys() const { return kernels_[0].key_rows > 0; }
  // The rows of keys that are bytes (prefill/byte_keys.hpp), for all pages of a round.
  [[nodiscard]] std::size_t key_rows() const {
    return static_cast<std::size_t>(rule_.rows / kPageTokens * prefill::kByteKeyRows);
  }

  const std::span<const DenseKernel> kernels_;  // for both dtypes, or for keys that are bytes
  const std::vector<Unpack> unpack_;
  const prefill::dense::Encode encode_;
  const RoundRule rule_;
  const bool is_named_;  // by the options
  const std::string why_;
  const Format k_, v_;
  const std::string head_dim_;
  const int multiprocessors_;
  // In the workspace, behind the rounds.
  std::size_t parts_at_, served_at_, keys_at_, key_bytes_, value_bytes_, factors_at_ = 0;
  int most_queries_ = 0;  // that become bytes
  std::size_t query_bytes_ = 0, all_query_bytes_ = 0;
};

}  // namespace

Result<StagePtr> make_unpacked(const Planning& planning) {
  const bool byte_keys = planning.choice.byte_keys;
  if (Status s = byte_keys ? prepare_dense({planning.compiled.byte_keys, 1}) : prepare_dense(planning.compiled.dense);
      !s.ok())
    return s;
  std::vector<Unpacked::Unpack> all;
  const auto add = [&](int head_dim, bool keys, bool values) -> Status {
    const UnpackKernel unpack =
        kernels_of<units::unpack>(head_dim, [&]<int D>() { return prefill::unpacked::kernel<D>(byte_keys); });
    KVANT_CUDA_TRY(prepare_shared(unpack.function, unpack.shared_bytes));
    int blocks = 0;
    KVANT_CUDA_TRY(find_resident(unpack.function, unpack.threads, unpack.shared_bytes, planning.limits, blocks));
    all.push_back({unpack, static_cast<unsigned>(blocks * planning.limits.multiprocessors), keys, values});
    return {};
  };
  const codec::PageLayout& layout = planning.params.cache.encoded_layout;
  if (layout.k.head_dim == layout.v.head_dim) {
    if (Status s = add(layout.k.head_dim, true, true); !s.ok()) return s;
  } else {
    if (Status s = add(layout.k.head_dim, true, false); !s.ok()) return s;
    if (Status s = add(layout.v.head_dim, false, true); !s.ok()) return s;
  }
  return StagePtr(std::make_unique<Unpacked>(planning, std::move(all)));
}

}  // namespace kvant::cuda
