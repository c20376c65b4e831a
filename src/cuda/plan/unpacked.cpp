// How the rounds of prefill over unpacked keys (prefill_unpacked) are launched. Lengths are found at each run, so the
// plan's other prefill kernels follow in the stream, for the sequences that are in no round then.
#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/dense.hpp"
#include "cuda/plan/kernels_of.hpp"

namespace kvant::cuda {
namespace {

using prefill::fresh::FreshKernel;
using prefill::unpacked::RoundRule;
using prefill::unpacked::RoundTables;

}  // namespace

Status DecodePlan::prepare_unpacked(const Compiled& compiled, const RoundRule& rule, bool is_wanted) {
  Unpacked& u = unpacked_;
  u.kernels = compiled.dense;
  u.encode = compiled.encode;
  u.unpack = kernels_of(params_.cache.encoded_layout.head_dim, []<int D>() { return prefill::unpacked::kernel<D>(); });
  u.rule = rule;
  u.is_wanted = is_wanted;
  if (Status status = prepare_dense(u.kernels); !status.ok()) return status;
  KVANT_CUDA_TRY(prepare_shared(u.unpack.function, u.unpack.shared_bytes));
  int blocks = 0;
  KVANT_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, u.unpack.function, u.unpack.threads,
                                                               static_cast<std::size_t>(u.unpack.shared_bytes)));
  u.blocks = static_cast<unsigned>(blocks * store_.limits().multiprocessors);
  const auto rounds = static_cast<std::size_t>(u.rule.rounds), batch = static_cast<std::size_t>(params_.batch);
  u.side_bytes = aligned(static_cast<std::size_t>(u.rule.rows) * static_cast<std::size_t>(2 * params_.head_dim));
  u.parts_at = aligned(rounds * sizeof(prefill::Round));
  u.served_at = u.parts_at + aligned((rounds + batch) * sizeof(prefill::Part));
  u.keys_at = u.served_at + aligned(batch * sizeof(std::int32_t));
  u.bytes = u.keys_at + 2 * u.side_bytes;
  u.is_chosen = true;
  return {};
}

std::string DecodePlan::explain_unpacked() const {
  const Unpacked& u = unpacked_;
  const FreshKernel& one = u.kernels[0];
  return fmt::format(
      "kernel     {} {}/{}, head_dim {}, tiles of {} query rows by {} keys: {}\n"
      "products   {}, f32 sums; weights{} are rounded to the same type\n"
      "rounds     {}, each of up to {} tokens of a kv head, {} MiB of the workspace: pages are unpacked once, in their "
      "original coordinates\n"
      "blocks     {} of {}\n"
      "serves     sequences that have at least {} rows of queries, if these are bf16 or f16 and lie at multiples of 16 "
      "bytes, as long as rounds have room\n"
      "then       others, by {}\n",
      core::kPrefillUnpacked, format_info(prefill_.k).name, format_info(prefill_.v).name, params_.head_dim, one.rows,
      one.keys, why_, codec::is_dense(prefill_.k) ? "16-bit floats" : "f16",
      codec::is_dense(prefill_.k) ? "" : ", and what codes stand for,", u.rule.rounds, u.rule.rows,
      2 * u.side_bytes >> 20, store_.limits().multiprocessors, describe_block(one), u.rule.least_rows, prefill_name_);
}

// launched: sequences are served whose rows of served_at say so.
Status DecodePlan::run_unpacked(const AttendParams& p, const core::FreshRows& fresh, std::byte* workspace,
                                prefill::Serves serves, Stream stream, bool& launched) const {
  const Unpacked& u = unpacked_;
  const char* missing = p.q.dtype == Dtype::f32  ? "q.dtype is neither bf16 nor f16"
                        : !lies_at_16_bytes(p.q) ? "q does not lie at multiples of 16 bytes"
                                                 : nullptr;
  if (missing != nullptr) return refuse_tensors(core::kPrefillUnpacked, u.is_wanted, missing);
  // Rounded to bf16, what codes stand for would lose more than tq8 does.
  const bool is_bf16 = p.q.dtype == Dtype::bf16 && p.cache.encoded_layout.k.format == Format::bf16;
  const FreshKernel& kernel = *dense_kernel(u.kernels, is_bf16 ? Dtype::bf16 : Dtype::f16);
  RoundRule rule = u.rule;
  rule.serves = serves;
  const RoundTables tables{reinterpret_cast<prefill::Round*>(workspace),
                           reinterpret_cast<prefill::Part*>(workspace + u.parts_at),
                           reinterpret_cast<std::int32_t*>(workspace + u.served_at)};
  const DeviceLimits& limits = store_.limits();
  KVANT_CUDA_TRY(make_rounds(p, rule, tables, limits.overlaps, native(stream)));
  prefill::unpacked::UnpackTo to{.round = tables.rounds,
                                 .parts = tables.parts,
                                 .keys = workspace + u.keys_at,
                                 .values = workspace + u.keys_at + u.side_bytes,
                                 .is_f16 = !is_bf16,
                                 .fresh_is_f16 = fresh.keys.data != nullptr && fresh.keys.dtype == Dtype::f16,
                                 .tile_keys = rule.tile_keys};
  const auto side = [&](const std::byte* rows) {
    return prefill::fresh::Side{rows, rule.rows, 2 * p.head_dim, 2 * p.head_dim};
  };
  for (int round = 0; round < rule.rounds; ++round, ++to.round) {
    void* arguments[] = {const_cast<AttendParams*>(&p), &to};
    Launch unpack(u.blocks, u.unpack.threads, native(stream), limits.overlaps);
    unpack.config.dynamicSmemBytes = static_cast<std::size_t>(u.unpack.shared_bytes);
    KVANT_CUDA_TRY(cudaLaunchKernelExC(&unpack.config, u.unpack.function, arguments));
    prefill::Schedule schedule{};
    schedule.round = to.round, schedule.parts = to.parts;
    if (Status status = launch_dense(kernel, u.encode, p, schedule, limits.multiprocessors, side(to.keys),
                                     side(to.values), 1, limits, stream);
        !status.ok())
      return status;
  }
  launched = true;
  return {};
}

}  // namespace kvant::cuda
