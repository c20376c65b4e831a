// Refusals of plan(): each message names the argument, its value, what is allowed, and the way out.
#include <algorithm>
#include <iterator>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/plan/logits.hpp"
#include "core/plan/plan.hpp"

namespace kvant {
namespace {

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

Status check_numbers(const AttentionOptions& o) {
  if (Status s = core::check_logits(o); !s.ok()) return s;
  if (o.threads < 0 || o.threads > 4096)
    return invalid(fmt::format("threads is {}: must be 1 to 4096, or 0 for all cores", o.threads));
  if (o.split_keys < 0 || o.split_keys % kPageTokens != 0) {
    return invalid(fmt::format("split_keys is {}: must be a multiple of the page size {}, or 0 to let the plan choose",
                               o.split_keys, kPageTokens));
  }
  if (o.products != 0 && o.products != 8 && o.products != 16)
    return invalid(fmt::format("products is {}: must be 8 or 16 bits, or 0 to let the plan choose", o.products));
  return {};
}

Status check_mask_rule(const Mask& m) {
  if (m.window < 0) return invalid(fmt::format("mask.window is {}: must be >= 1, or 0 for no window", m.window));
  if (m.window_sinks < 0) return invalid(fmt::format("mask.window_sinks is {}: must be >= 0", m.window_sinks));
  if (m.window_sinks > 0 && m.window == 0) {
    return invalid(
        fmt::format("mask.window_sinks is {} without a window: without a window all first tokens are visible anyway; "
                    "set mask.window, or window_sinks to 0",
                    m.window_sinks));
  }
  return {};
}

Status check_names(const AttentionOptions& o) {
  if (!o.backend.empty() && o.backend != "cpu" && o.backend != "cuda") {
    return invalid(
        fmt::format("backend is \"{}\": must be \"cpu\" or \"cuda\", or empty for where the cache is", o.backend));
  }
  const auto is_kernel = [&](const char* name) { return o.kernel == name; };
  if (!o.kernel.empty() && std::none_of(std::begin(core::kKernelNames), std::end(core::kKernelNames), is_kernel)) {
    return invalid(fmt::format("kernel is \"{}\": must be one of {}, or empty to let the plan choose", o.kernel,
                               fmt::join(core::kKernelNames, ", ")));
  }
  return {};
}

}  // namespace

Status check_options(const CacheConfig& config, std::size_t sequences, AttentionOptions& o) {
  if (sequences == 0) return invalid("sequences is empty: plan for at least one sequence");
  if (o.q_heads <= 0 || o.q_heads % config.kv_heads != 0) {
    return invalid(fmt::format("q_heads is {}: must be a positive multiple of the cache's kv_heads, {}", o.q_heads,
                               config.kv_heads));
  }
  if (o.q_heads > 65536) return invalid(fmt::format("q_heads is {}: at most 65536", o.q_heads));
  if (!o.q_lens.empty() && o.q_lens.size() != sequences) {
    return invalid(
        fmt::format("q_lens has {} values for {} sequences: give one count a sequence, or leave it empty and set q_len",
                    o.q_lens.size(), sequences));
  }
  constexpr int kMostQueries = 1 << 24;
  if (o.q_lens.empty()) {
    if (o.q_len < 1 || o.q_len > kMostQueries) {
      return invalid(fmt::format(
          "q_len is {}: must be 1 to {}; for sequences without a query in this run give q_lens, with a 0 for "
          "each of them",
          o.q_len, kMostQueries));
    }
    o.q_lens.assign(sequences, o.q_len);
  }
  for (std::size_t i = 0; i < o.q_lens.size(); ++i) {
    if (o.q_lens[i] < 0 || o.q_lens[i] > kMostQueries) {
      return invalid(
          fmt::format("q_len of sequence {} of the batch is {}: must be 0 to {}", i, o.q_lens[i], kMostQueries));
    }
  }
  if (Status s = check_numbers(o); !s.ok()) return s;
  if (o.scale == 0 && config.latent > 0) {
    return invalid(
        "scale is 0: queries of a latent cache are those of heads times a matrix, so their size does not tell it; give "
        "the model's scale, which is 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim) unless its rotary embedding has a "
        "factor");
  }
  if (o.scale == 0) o.scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  // A cache with a window drops what lies behind it: what is left of that depends on chance, so nobody attends to it
  // unasked.
  if (o.mask.window == 0 && config.window > 0) {
    o.mask.window = config.window;
    if (o.mask.window_sinks == 0) o.mask.window_sinks = config.window_sinks;
  }
  if (Status s = check_mask_rule(o.mask); !s.ok()) return s;
  return check_names(o);
}

Result<const core::Kernels*> choose_kernels(const AttentionOptions& o) {
  std::string names;
  for (const core::Kernels* k : core::all_kernels()) {
    if (o.isa.empty() && k->available()) return k;
    if (o.isa == k->name) {
      if (k->available()) return k;
      return {Code::unsupported,
              fmt::format("isa is \"{}\": this machine lacks it ({}); leave it empty to let the plan choose", o.isa,
                          k->detail)};
    }
    names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", k->name);
  }
  return {Code::invalid_argument,
          fmt::format("isa is \"{}\": this build has {}; leave it empty to let the plan choose", o.isa, names)};
}

std::vector<IsaInfo> isas() {
  std::vector<IsaInfo> all;
  for (const core::Kernels* k : core::all_kernels()) all.push_back({k->name, k->available(), k->detail});
  return all;
}

}  // namespace kvant
