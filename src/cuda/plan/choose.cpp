#include "cuda/plan/choose.hpp"

#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/decode_kinds.hpp"
#include "cuda/plan/rounds.hpp"
#include "cuda/prefill/byte_keys.hpp"
#include "cuda/prefill/choice.hpp"

namespace kvant::cuda {
namespace {

// Work of no more encoded pages than this for each multiprocessor is short: for kernels of eight warps.
constexpr std::int64_t kShortPages = 20;
// A sequence without older tokens has at least so many rows; with fewer, a second launch costs what the kernel of fresh
// keys gains.
constexpr std::int64_t kLeastFreshRows = 256;

Status refuse_kernel(const PlannedWork& work, const std::string& reason) {
  return {Code::unsupported, fmt::format("kernel is \"{}\": {}; leave kernel empty", work.kernel, reason)};
}

// The part of a cache that only the generic kernel reads; empty: there is none.
std::string generic_only(const PlannedWork& work) {
  if (work.is_latent()) {
    if (codec::is_dense(work.k) != codec::is_dense(work.v))
      return fmt::format("k = {} with latents in {}", format_info(work.k).name, format_info(work.v).name);
    const AttendParams& p = work.params;
    if (p.k_basis.kind == BasisKind::calibrated || p.v_basis.kind == BasisKind::calibrated)
      return "a latent cache with calibrated bases";
  }
  for (const auto& [side, format] : {std::pair("k", work.k), std::pair("v", work.v)}) {
    if (format == Format::f32 || codec::is_lut(format)) return fmt::format("{} = {}", side, format_info(format).name);
  }
  const CacheView& cache = work.params.cache;
  const bool has_exact = cache.sink_pages > 0 || cache.tail_pages > 0;
  return has_exact && cache.exact_layout.k.format == Format::f32 ? "exact = f32" : "";
}

// The time that kernels of a kind (core::kTunedKinds) take on this device, from their estimate. Every estimate that a
// plan compares comes from here.
std::int64_t tuned_ns(const PlannedWork& work, const Offers& offers, const char* kind, std::int64_t ns) {
  if (offers.tuning == nullptr) return ns;
  const double ratio = offers.tuning->ratio(tuned_work(work, kind)).value_or(1);
  return static_cast<std::int64_t>(static_cast<double>(ns) * ratio);
}

// --- decode kernels --------------------------------------------------------------------------------------------------

// The kernel for several queries (DecodeOffer::rounds_weights) that takes the least time for all rows, if the options
// name its kind or there are enough rows.
struct Several {
  int kernel = -1;  // a place in Offers::decode; -1: none
  std::int64_t ns = 0;
  std::string missing;  // why there is none; empty: there are few rows
};
std::string missing_of_several(const DecodeOffer& one, const DeviceLimits& limits) {
  const int bytes = one.least_shared_bytes();
  if (one.is_for_hopper() && (!limits.has_sm90() || !one.has_code || bytes > limits.shared_bytes))
    return fmt::format("{} kernels need compute capability 9.0 and machine code for it (sm_90a)", one.name());
  if (bytes <= limits.shared_bytes) return {};
  return fmt::format("{} kernels need {} bytes of shared memory a block, the device has {}", one.name(), bytes,
                     limits.shared_bytes);
}
Several find_several(const PlannedWork& work, const Offers& offers) {
  Several found;
  std::string names;
  bool is_named = false;
  for (const DecodeKindEntry& one : std::span(kDecodeKinds).subspan(1)) {
    names += (names.empty() ? "" : " and ") + std::string(one.name);
    is_named = is_named || work.kernel == one.name;
  }
  if (!offers.has_decode || (!work.kernel.empty() && !is_named)) return found;
  if (!is_named && work.most_rows() < times::kLeastSeveralRows) return found;
  for (std::size_t i = 0; i < offers.decode.size(); ++i) {
    const DecodeOffer& one = offers.decode[i];
    if (!one.rounds_weights() || (is_named && work.kernel != one.name())) continue;
    if (const std::string missing = missing_of_several(one, offers.limits); !missing.empty()) {
      found.missing = missing;
      continue;
    }
    const int head_dim = work.stored_head_dim(), rows = one.rows();
    const times::BlockTimes of_kind = kTimesOfDecodeKinds[static_cast<std::size_t>(one.kind)](
        offers.limits, head_dim, work.k, rows, work.most_rows());
    const times::BlockTimes block =
        times::on(offers.limits, of_kind, times::several_demand(head_dim, rows, work.page_bytes()));
    const std::int64_t ns = tuned_ns(work, offers, one.name(),
                                     times::decode_ns(row_blocks_of(work, rows), block, offers.limits.multiprocessors));
    if (found.kernel < 0 || ns < found.ns) found.kernel = static_cast<int>(i), found.ns = ns;
  }
  if (found.kernel < 0 && found.missing.empty()) {
    found.missing = fmt::format("{} kernels are not compiled for {}", is_named ? work.kernel : names, pair_at(work));
  }
  if (found.kernel >= 0) found.missing.clear();
  return found;
}

// Short work gets a kernel of eight warps, where there is one: then blocks have a page or two for each of their teams,
// and how long they take is what the launch takes. Not where many of them would have an exact page.
void take_eight_warps(const PlannedWork& work, const Offers& offers, Choice& choice) {
  const DecodeOffer& four = offers.decode[static_cast<std::size_t>(choice.decode)];
  if (four.rounds_weights()) return;
  const auto eight = std::find_if(offers.decode.begin(), offers.decode.end(), [&](const DecodeOffer& one) {
    return one.has_eight_warps() && one.column_tiles == four.column_tiles &&
           one.least_shared_bytes() <= offers.limits.shared_bytes;
  });
  if (eight == offers.decode.end()) return;
  std::int64_t encoded = 0, exact = 0;  // pages, for each row of work that reads them
  for (const core::DeviceSequence& s : work.sequences) {
    const VisiblePages pages = visible_pages(work.params, static_cast<int>(s.length), s.q_len);
    const std::int64_t rows = work.kv_heads() * ((work.rows_of(s) + four.rows() - 1) / four.rows());
    encoded += rows * page_runs(pages, false).total();
    exact += rows * page_runs(pages, true).total();
  }
  const std::int64_t blocks = offers.limits.multiprocessors;
  if (4 * exact > blocks || encoded > kShortPages * blocks) return;
  choice.decode = static_cast<int>(eight - offers.decode.begin());
  // A block with an exact page has nothing else to do, or it is what the launch waits for: the page counts as more than
  // one block's share. (One that had an encoded page besides took 3 us longer.)
  const std::int64_t row_blocks = (work.most_rows() + four.rows() - 1) / four.rows();
  const std::int64_t others = encoded + work.pairs() * row_blocks * core::kDomains * eight->teams;
  choice.least_exact_cost = static_cast<int>(std::max<std::int64_t>(eight->teams, others / (blocks - exact) + 1)) + 1;
}

// The kernels of latents need compute capability 9.0; elsewhere the generic kernel serves.
Status choose_latent(const PlannedWork& work, const Offers& offers, Choice& choice) {
  if (!offers.has_decode) {
    return {Code::unsupported,
            fmt::format("latents and rotary keys of {} have no kernels in this build", work.head_dim_words())};
  }
  if (work.products == 8) {
    return {Code::unsupported,
            "products is 8, but the cache stores latents, which are not multiplied in 8 bits; leave it 0"};
  }
  if (work.fresh_keys) {
    return {Code::unsupported,
            "fresh_keys needs prefill kernels, and latents have none on a device: leave fresh_keys unset, and all "
            "tokens are read from the cache"};
  }
  const std::string& asked = work.kernel;
  const bool is_named = asked == core::kDecodeKernels || asked == core::kDecodeSm90;
  if (!asked.empty() && !is_named && asked != core::kGenericKernels) {
    return refuse_kernel(work, fmt::format("latents have the kernels {}, {} and {} on a device", core::kDecodeKernels,
                                           core::kDecodeSm90, core::kGenericKernels));
  }
  // The kernel that takes the least time, among those that the options name and the device runs.
  std::string missing = generic_only(work);
  if (!missing.empty()) {
    missing += " has no other kernel";
  } else {
    missing = fmt::format("{} has no other kernel of latents", pair_at(work));
    for (std::size_t i = 0; i < offers.decode.size(); ++i) {
      const DecodeOffer& one = offers.decode[i];
      if (is_named && asked != core::kDecodeKernels && asked != one.name()) continue;
      std::string why = missing_of_several(one, offers.limits);
      if (one.has_latent_centres != codec::has_latent_centre(work.params.cache.encoded_layout)) {
        if (one.has_latent_centres) continue;
        why = fmt::format("{} kernels do not add centres of latents (v_centre)", one.name());
      }
      if (!why.empty()) {
        if (choice.decode < 0) missing = why;
        continue;
      }
      const times::LatentTimes times = times::latent_times(one.rows());
      const std::int64_t ns =
          times::decode_ns(row_blocks_of(work, one.rows()), times.block, offers.limits.multiprocessors);
      if (choice.decode >= 0 && ns >= choice.ns) continue;
      choice.decode = static_cast<int>(i), choice.ns = ns, choice.least_exact_cost = times.exact_cost;
      missing.clear();
    }
  }
  if (!missing.empty() && is_named) return refuse_kernel(work, missing);
  if (asked != core::kGenericKernels && missing.empty()) return {};
  choice.decode = -1, choice.is_generic = true;
  choice.why = missing.empty() ? "as asked for" : missing;
  choice.ns = times::decode_ns(row_blocks_of(work, times::kGenericLatentRows), times::kGenericLatents,
                               offers.limits.multiprocessors);
  choice.least_exact_cost = 1;
  return {};
}

Status choose_decode(const PlannedWork& work, const Offers& offers, const Several& several, Choice& choice) {
  if (!offers.has_decode) {
    const codec::HeadDims dims{work.params.head_dim, work.params.v_head_dim};
    return {Code::unsupported, refuse_head_dim(offers.instances, dims)};
  }
  if (choice.is_generic) return {};
  const std::int64_t most_rows = work.most_rows();
  int best = -1, least_bytes = 0;  // the least that a kernel needs that does not fit
  // The fewest rows that take all of them at once, else the most; of two with as many the one with more stages.
  const auto is_better = [&](const DecodeOffer& a, const DecodeOffer& b) {
    const bool a_is_enough = a.rows() >= most_rows, b_is_enough = b.rows() >= most_rows;
    if (a_is_enough != b_is_enough) return a_is_enough;
    if (a.rows() == b.rows()) return !a.one_stage && b.one_stage;
    return a_is_enough ? a.rows() < b.rows() : a.rows() > b.rows();
  };
  for (std::size_t i = 0; i < offers.decode.size(); ++i) {
    const DecodeOffer& one = offers.decode[i];
    if (one.has_eight_warps() || one.rounds_weights()) continue;
    if (const int bytes = one.least_shared_bytes(); bytes > offers.limits.shared_bytes) {
      least_bytes = least_bytes == 0 ? bytes : std::min(least_bytes, bytes);
    } else if (best < 0 || is_better(one, offers.decode[static_cast<std::size_t>(best)])) {
      best = static_cast<int>(i);
    }
  }
  if (best < 0 && least_bytes == 0) return {Code::unsupported, refuse_pair(offers.instances, {work.k, work.v})};
  if (best < 0) {
    return {Code::unsupported,
            fmt::format("decode kernels need {} bytes of shared memory a block for {}, the device has {}; use the "
                        "slower kernel = \"generic\", or device = \"cpu\"",
                        least_bytes, pair_at(work), offers.limits.shared_bytes)};
  }
  choice.decode = best;
  if (several.kernel >= 0) {
    choice.decode = several.kernel;
    choice.why = !work.kernel.empty()
                     ? std::string("as asked for")
                     : fmt::format("for {} rows, about {:.0f} us", most_rows, static_cast<double>(several.ns) / 1000);
  } else if (!work.kernel.empty() && work.kernel != core::kDecodeKernels && !choice.rounds) {
    return refuse_kernel(work, several.missing);
  } else if (choice.why.empty() && most_rows >= times::kLeastPrefillRows) {
    choice.why = several.missing;
  }
  take_eight_warps(work, offers, choice);
  return {};
}

// --- prefill kernels -------------------------------------------------------------------------------------------------

std::string missing_of_dense(const char* kind, const PlannedWork& work, const Offers& offers) {
  if (work.params.mask.data != nullptr) return fmt::format("{} kernels take no mask tensor", kind);
  if (!offers.dense || work.head_dim() % 8 != 0)
    return fmt::format("{} kernels are not compiled for head_dim {}", kind, work.head_dim_words());
  const std::string missing =
      missing_of_hopper(kind, offers.dense->shared_bytes, offers.dense->has_code, offers.limits);
  if (!missing.empty()) return missing;
  return offers.dense->has_maps ? std::string() : fmt::format("{} kernels need a driver for CUDA 12 or newer", kind);
}

// Why a plan that asks for products of 8 bits is refused, whatever its queries; empty: it is not.
std::string missing_of_byte_keys(const PlannedWork& work, const DeviceLimits& limits) {
  if (work.products != 8) return {};
  if (!codec::is_tq(work.k) || !codec::is_tq(work.v) || codec::format_bits(work.k) > 6)
    return fmt::format("the cache stores {}: keys must be tq2 to tq6, and values tq formats", pair_at(work));
  if (!prefill::has_byte_keys(work.width()))
    return fmt::format("16 bits are as fast at head_dim {}, so that there are no kernels of 8", work.head_dim_words());
  if (!limits.has_sm90()) return "these kernels need compute capability 9.0";
  return {};
}

constexpr const char* kUnusualBases = "bases other than the formats' own are for decode kernels only";
bool has_usual_bases(const PlannedWork& work) {
  const auto is_usual = [](const DeviceBasis& basis, Format format) {
    return basis.kind == (codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none);
  };
  return is_usual(work.params.k_basis, work.k) && is_usual(work.params.v_basis, work.v);
}

// Takes prefill kernels if the options name them or they take less time; else why says why decode kernels serve.
Status choose_tiles(const PlannedWork& work, const Offers& offers, std::int64_t decode_ns, Choice& choice) {
  const AttendParams& p = work.params;
  const int multiprocessors = offers.limits.multiprocessors, stored = work.stored_head_dim();
  const std::int64_t most_rows = work.most_rows();

  constexpr std::size_t kKinds = std::size(kTileKinds);
  prefill::Candidate candidates[kKinds + 1];  // the last one: unpacked keys
  OtherTiles others[kKinds];
  prefill::Candidate& unpacked = candidates[kKinds] = {core::kPrefillUnpacked, {}, decode_ns};
  const bool is_usual = has_usual_bases(work);
  double page_bytes = 0;
  for (const times::Rows& one : row_blocks_of(work, most_rows))
    page_bytes += static_cast<double>(one.count * one.pages) * work.page_bytes();
  const std::int64_t read_ns = times::read_ns(offers.limits, page_bytes);
  std::size_t beside = 0;  // the kernels that serve beside unpacked keys: the fastest that can, else the last
  for (std::size_t i = 0; i < kKinds; ++i) {
    const TileKind& kind = kTileKinds[i];
    const std::optional<TileOffer>& offer = offers.tiles[i].kernel;
    candidates[i] = {kind.name, is_usual ? kind.missing(work, offers, offers.tiles[i]) : kUnusualBases, decode_ns};
    const int rows = offer ? offer->rows : prefill::kUsualRows, blocks = offer ? std::max(offer->blocks, 1) : 1;
    others[i] = {kind.times(offers.limits, stored, work.k, rows, blocks), rows, blocks};
    if (most_rows >= times::kLeastPrefillRows) {  // else decode kernels have one row block a sequence and kv head
      candidates[i].ns = tuned_ns(
          work, offers, kind.name,
          std::max(times::prefill_ns(tiles_of(work, rows), others[i].times, multiprocessors, blocks), read_ns));
    }
    const bool serves = candidates[i].missing.empty(), served = candidates[beside].missing.empty();
    if (!served || (serves && candidates[i].ns < candidates[beside].ns)) beside = i;
  }
  RoundsChoice rounds, of_bytes;
  unpacked.missing = candidates[beside].missing;
  if (unpacked.missing.empty()) unpacked.missing = missing_of_dense(core::kPrefillUnpacked, work, offers);
  if (unpacked.missing.empty()) {
    const bool is_wanted = work.kernel == core::kPrefillUnpacked;
    rounds = choose_rounds(work, *offers.dense, others[beside], is_wanted, multiprocessors);
    unpacked.missing = rounds.missing;
    rounds.ns = tuned_ns(work, offers, core::kPrefillUnpacked, rounds.ns);
    if (rounds.missing.empty()) unpacked.ns = rounds.ns;
    if (offers.byte_keys && offers.byte_keys->has_code) {
      of_bytes = choose_rounds(work, *offers.byte_keys, others[beside], is_wanted, multiprocessors);
      of_bytes.ns = tuned_ns(work, offers, core::kUnpackedBytes, of_bytes.ns);
      const bool takes = of_bytes.missing.empty() && (is_wanted || !rounds.missing.empty() || of_bytes.ns < rounds.ns);
      if (takes) unpacked = {core::kPrefillUnpacked, {}, of_bytes.ns}, rounds = of_bytes, choice.byte_keys = true;
    }
  }

  const Result<prefill::Choice> taken = prefill::choose(work.kernel, candidates, decode_ns, most_rows, work.fresh_keys);
  if (!taken.ok()) return taken.status();
  choice.why = taken->why;
  if (taken->candidate < 0) return {};
  const prefill::Candidate& candidate = candidates[taken->candidate];
  choice.ns = candidate.ns;
  if (&candidate == &unpacked) choice.rounds = rounds.rule;
  choice.byte_keys = choice.byte_keys && choice.rounds;
  if (work.products == 8 && !choice.byte_keys) choice.why += "; these kernels multiply in 16 bits";
  choice.tiles = &candidate == &unpacked ? static_cast<int>(beside) : taken->candidate;

  const std::int64_t rows = offers.tiles[static_cast<std::size_t>(choice.tiles)].kernel->rows;
  const std::int64_t row_blocks = (most_rows + rows - 1) / rows;
  if (work.pairs() * row_blocks > (1 << 30) || most_rows > kMostRows) {
    return {
        Code::invalid_argument,
        fmt::format("{} sequences of {} kv heads with up to {} rows each are more than one plan takes: plan smaller "
                    "batches",
                    p.batch, work.kv_heads(), most_rows)};
  }
  std::int64_t longest = 1;
  for (const core::DeviceSequence& s : work.sequences) longest = std::max(longest, s.length);
  const double bytes = static_cast<double>(longest) * p.cache.encoded_layout.block_bytes / kPageTokens;
  choice.schedule.heads_at_once = static_cast<int>(heads_in_cache(bytes, work.pairs(), offers.limits));
  choice.schedule.row_blocks = static_cast<int>(row_blocks);
  choice.schedule.tiles = static_cast<int>(work.pairs() * row_blocks);
  return {};
}

// Unpacked keys where keys and values have different head_dims: decode kernels take what is in no round.
Status choose_rounds_before_decode(const PlannedWork& work, const Offers& offers, std::int64_t decode_ns,
                                   Choice& choice) {
  // These would read stored keys in the place of fresh ones, if the keys are stored by then.
  const std::string not_served =
      work.fresh_keys || work.kernel == core::kPrefillFresh
          ? fmt::format("at head_dim {} decode kernels serve some sequences, or all, and read stored keys alone",
                        work.head_dim_words())
          : fmt::format("such kernels are not compiled for {}", pair_at(work));
  if (work.kernel == core::kPrefillFresh) return refuse_kernel(work, not_served);
  prefill::Candidate candidates[] = {{core::kPrefillUnpacked, {}, decode_ns},
                                     {work.kernel.c_str(), not_served, decode_ns}};
  prefill::Candidate& unpacked = candidates[0];
  unpacked.missing = work.fresh_keys || !prefill::has_one_type(work.k, work.v) ? not_served
                     : !has_usual_bases(work)                                  ? kUnusualBases
                                              : missing_of_dense(core::kPrefillUnpacked, work, offers);
  RoundsChoice rounds;
  if (unpacked.missing.empty()) {
    const times::BlockTimes block = times::decode_times(work.stored_head_dim(), work.k, work.most_rows());
    const OtherTiles rest{{block.page, block.rows, block.page, block.rows}, 16, 1};
    rounds =
        choose_rounds(work, *offers.dense, rest, work.kernel == core::kPrefillUnpacked, offers.limits.multiprocessors);
    unpacked.missing = rounds.missing;
    unpacked.ns = tuned_ns(work, offers, core::kPrefillUnpacked, rounds.ns);
  }
  const bool has_others = !work.kernel.empty() && work.kernel != core::kPrefillKernels && work.kernel != unpacked.name;
  const std::span<const prefill::Candidate> named(candidates, has_others ? 2 : 1);
  const Result<prefill::Choice> taken =
      prefill::choose(work.kernel, named, decode_ns, work.most_rows(), work.fresh_keys);
  if (!taken.ok()) return taken.status();
  choice.why = taken->why;
  if (taken->candidate != 0) return {};
  choice.rounds = rounds.rule;
  choice.ns = unpacked.ns;
  return {};
}

// Kernels for sequences that have no tokens but their queries' own, before those that choose_tiles took.
Status choose_fresh(const PlannedWork& work, const Offers& offers, Choice& choice) {
  const bool is_wanted = work.kernel == core::kPrefillFresh;
  if (!work.fresh_keys) {
    if (!is_wanted) return {};
    return {Code::unsupported,
            fmt::format("kernel is \"{}\", which plans with fresh_keys have; leave kernel empty", work.kernel)};
  }
  if (!is_wanted && !work.kernel.empty() && work.kernel != core::kPrefillKernels) return {};
  const std::string missing = missing_of_dense(core::kPrefillFresh, work, offers);
  if (!missing.empty()) {
    if (is_wanted) return refuse_kernel(work, missing);
    choice.why += "; " + missing;
    return {};
  }
  std::int64_t longest = 0;  // rows
  for (const core::DeviceSequence& s : work.sequences) {
    if (work.any_length || s.length == s.q_len) longest = std::max(longest, work.rows_of(s));
  }
  if (!is_wanted && longest < kLeastFreshRows) return {};
  const std::int64_t pairs = work.pairs(),
                     bytes = std::max<std::int64_t>(longest / work.params.group, 1) * 4 * work.head_dim();
  const std::int64_t row_blocks = (work.most_rows() + offers.dense->rows - 1) / offers.dense->rows;
  // As many in each group of heads, so that all of them take as many rounds.
  const std::int64_t most = heads_in_cache(static_cast<double>(bytes), pairs, offers.limits),
                     groups = (pairs + most - 1) / most;
  choice.first = prefill::Schedule{.row_blocks = static_cast<int>(row_blocks),
                                   .heads_at_once = static_cast<int>((pairs + groups - 1) / groups),
                                   .tiles = static_cast<int>(pairs * row_blocks),  // no more than those of choice.tiles
                                   .share = {prefill::Serves::without_older}};
  return {};
}

}  // namespace

std::string missing_of_hopper(const char* kind, int shared_bytes, bool has_code, const DeviceLimits& limits) {
  const std::string needs = fmt::format("{} kernels need compute capability 9.0", kind);
  if (!limits.has_sm90() || shared_bytes > limits.shared_bytes) return needs;
  return has_code ? std::string() : needs + " and machine code for it (sm_90a)";
}

bool considers_prefill(const PlannedWork& work) {
  if (work.is_latent() || work.kernel == core::kGenericKernels || !generic_only(work).empty()) return false;
  return work.fresh_keys || work.most_rows() >= times::kLeastPrefillRows ||
         (!work.kernel.empty() && !work.kernel.starts_with(core::kDecodeKernels));
}

std::string tuned_words(const PlannedWork& work, const core::Tuning& tuning) {
  if (tuning.path.empty()) return tuning.words();
  std::string kinds;
  for (const char* kind : core::kTunedKinds) {
    if (kind == std::string_view(core::kUnpackedBytes) && work.products != 8) continue;
    if (const std::optional<double> ratio = tuning.ratio(tuned_work(work, kind)))
      kinds += fmt::format("{}{} {:.2f}", kinds.empty() ? "" : ", ", kind, *ratio);
  }
  if (!kinds.empty()) return fmt::format("{}: {} times the estimate", tuning.words(), kinds);
  return fmt::format("{} has no times of {} keys at head_dim {}", tuning.path,
                     core::kStoredNames[static_cast<std::size_t>(core::stored(work.k))], work.stored_head_dim());
}

Result<Choice> choose(const PlannedWork& work, const Offers& offers) {
  Choice choice;
  if (work.is_latent()) {
    if (Status s = choose_latent(work, offers, choice); !s.ok()) return s;
    return choice;
  }
  if (const std::string missing = missing_of_byte_keys(work, offers.limits); !missing.empty())
    return Status{Code::unsupported, fmt::format("products is 8: {}; leave it 0", missing)};
  Several several = find_several(work, offers);
  const times::BlockTimes block =
      times::on(offers.limits, times::decode_times(work.stored_head_dim(), work.k, work.most_rows()),
                times::decode_demand(work.stored_head_dim(), work.k, work.page_bytes()));
  std::int64_t decode_ns = tuned_ns(work, offers, core::kDecodeKernels,
                                    times::decode_ns(row_blocks_of(work, 16), block, offers.limits.multiprocessors));
  // An option that names such kernels asks for them, whatever the time.
  const bool gains = 100 * several.ns < (100 - times::kLeastGain) * decode_ns;
  if (several.kernel >= 0 && !gains && work.kernel.empty()) several = {};
  if (several.kernel >= 0) decode_ns = several.ns;
  choice.ns = decode_ns;

  const std::string only = generic_only(work);
  choice.is_generic = work.kernel == core::kGenericKernels || !only.empty();
  if (choice.is_generic) {
    if (!work.kernel.empty() && work.kernel != core::kGenericKernels)
      return refuse_kernel(work, fmt::format("with {} the generic kernel alone serves", only));
    choice.why = only.empty() ? "as asked for" : only + " has no other kernel";
    if (work.fresh_keys) {
      return Status{
          Code::unsupported,
          fmt::format("fresh_keys needs prefill kernels, and the generic kernel serves ({}): leave fresh_keys "
                      "unset, and all tokens are read from the cache",
                      choice.why)};
    }
  } else if (work.width() != work.stored_head_dim()) {
    if (considers_prefill(work)) {
      if (Status s = choose_rounds_before_decode(work, offers, decode_ns, choice); !s.ok()) return s;
    }
  } else if (considers_prefill(work) || !work.kernel.empty()) {
    if (Status s = choose_tiles(work, offers, decode_ns, choice); !s.ok()) return s;
  }
  if (choice.tiles >= 0) {
    if (Status s = choose_fresh(work, offers, choice); !s.ok()) return s;
    return choice;
  }
  const std::string of_rounds = choice.rounds ? choice.why : "";
  if (Status s = choose_decode(work, offers, several, choice); !s.ok()) return s;
  if (choice.rounds) choice.why = of_rounds;
  return choice;
}

}  // namespace kvant::cuda
