// A shape is a batch whose sequences have some rows of queries each; a workload is shapes over one cache. Every kind of
// kernels that serves a shape is forced in turn, and its time is divided by the estimate that the plan had.
#include "cli/bench_tune.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "cli/arguments.hpp"
#include "cli/bench_device.hpp"
#include "cli/bench_device_tools.hpp"
#include "cli/output.hpp"
#include "cli/suggest.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "core/plan/plan.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

// At least so many, of a sequence and kv head. Kernels for 32 rows and for 64 have ratios of their own.
constexpr std::int64_t kTunedRows[] = {17, 32, 64, 256, 1024};
constexpr int kTunedBatches[] = {1, 16};
constexpr std::int64_t kTunedKeys = 32768, kFewestTunedKeys = 4096;  // sequences together have these
constexpr int kTurns = 2;
// A kind is left out where its estimate is so many times that of the fastest. Decode kernels are always measured:
// the outputs of others are compared with theirs.
constexpr double kHopeless = 4;

constexpr const char* kTuneFooter =
    "Plans on a device choose among kinds of attention kernels by estimated times. These are an H200's, scaled to the\n"
    "device. This measures the kinds on your device and writes a file of ratios. Plans read it where it is written by\n"
    "default ($XDG_CACHE_HOME/kvant or ~/.cache/kvant), or where KVANT_TUNING names it; KVANT_TUNING=off reads none.\n"
    "explain() says which ratios a plan has used. Outputs are checked first: those of one kind against float64\n"
    "attention over the decoded vectors, and those of the other kinds against these. The table is the report to send\n"
    "in, so that later estimates fit your card.\n"
    "\n"
    "Examples:\n"
    "  kvant bench tune\n"
    "  kvant bench tune --device 1 --k-format tq4 --head-dim 128 --out mine.txt";

// A kind of kernels for a shape.
struct TunedKind {
  int kind;  // index in core::kTunedKinds
  double estimated_ns;
  double ns = 0;
  double error = 0;  // 0: it is the first, and not judged
  double ratio() const { return ns / estimated_ns; }
};
struct TunedShape {
  BenchCase bench_case;
  std::vector<TunedKind> kinds{};
  std::string before{}, after{};  // the kinds that a plan takes: by estimates, and with the file

  [[nodiscard]] int group() const { return bench_case.q_heads / bench_case.kv_heads; }
  [[nodiscard]] std::int64_t rows() const { return bench_case.q_len * group(); }
  [[nodiscard]] std::int64_t heads() const { return std::int64_t{bench_case.batch} * bench_case.kv_heads; }
  [[nodiscard]] const TunedKind* find(const std::string& name) const {
    const auto found = std::find_if(kinds.begin(), kinds.end(),
                                    [&](const TunedKind& one) { return core::kTunedKinds[one.kind] == name; });
    return found == kinds.end() ? nullptr : &*found;
  }
  // How many times as long as the fastest kind another takes; 1: it is the fastest. Kernels of 8-bit products are for
  // plans that want these. None where the kind was not measured.
  [[nodiscard]] std::optional<double> loss(const std::string& name) const {
    const TunedKind* taken = find(name);
    if (taken == nullptr) return std::nullopt;
    double least = taken->ns;
    for (const TunedKind& one : kinds) {
      if (core::kTunedKinds[one.kind] != std::string(core::kUnpackedBytes)) least = std::min(least, one.ns);
    }
    return taken->ns / least;
  }
};
using TunedWorkload = std::vector<TunedShape>;  // which differ in q_len alone

[[noreturn]] void refuse_usage(const std::string& message) {
  throw CLI::ValidationError(message);
}

BenchCase with_kind(BenchCase c, int kind) {
  const bool has_bytes = core::kTunedKinds[kind] == std::string(core::kUnpackedBytes);
  c.kernel = has_bytes ? core::kPrefillUnpacked : core::kTunedKinds[kind];
  c.products = has_bytes ? 8 : 0;
  return c;
}

// The heads that models of a head_dim have.
std::vector<TunedWorkload> workloads_of(const std::vector<FormatPair>& pairs, const std::vector<int>& head_dims,
                                        std::int64_t free_bytes) {
  std::vector<TunedWorkload> all;
  for (const FormatPair& pair : pairs) {
    for (const int head_dim : head_dims) {
      BenchCase c;
      c.formats = pair;
      c.head_dim = head_dim;
      c.kv_heads = head_dim <= 192 ? 8 : head_dim <= 256 ? 2 : 1;
      c.q_heads = c.kv_heads == 8 ? 32 : 8 * c.kv_heads;
      c.backend = c.isa = "cuda";
      c.threads = 0;
      c.k_centre = centre_of("automatic", pair);
      for (const int batch : kTunedBatches) {
        c.batch = batch;
        c.keys = kTunedKeys / batch;
        while (c.batch * c.keys > kFewestTunedKeys && 3 * layer_bytes(c) > 0.5 * static_cast<double>(free_bytes))
          c.keys /= 2;
        TunedWorkload& workload = all.emplace_back();
        for (const std::int64_t rows : kTunedRows) {
          const std::int64_t group = c.q_heads / c.kv_heads;
          c.q_len = (rows + group - 1) / group;
          if (c.q_len <= c.keys) workload.push_back({c});
        }
      }
    }
  }
  return all;
}

// Makes plans for the lengths of a workload, over a cache that holds nothing.
class Planner {
 public:
  static Result<Planner> create(const DeviceTools& tools, const BenchCase& c) {
    Result<Cache> cache = tools.make_cache(c, 1);
    if (!cache.ok()) return cache.status();
    Planner planner(std::move(*cache));
    std::vector<Append> appends;
    for (int i = 0; i < c.batch; ++i) {
      planner.sequences_.push_back(planner.cache_.add_sequence());
      appends.push_back({planner.sequences_.back(), c.keys});
    }
    if (Status s = planner.cache_.reserve(appends, tools.bench.stream()); !s.ok()) return s;
    return planner;
  }
  Result<Plan> plan(const BenchCase& c) const {
    return kvant::plan(cache_, std::span<const SequenceId>(sequences_), attention_options(c, nullptr));
  }

 private:
  explicit Planner(Cache cache) : cache_(std::move(cache)) {}
  Cache cache_;
  std::vector<SequenceId> sequences_;
};

// The kinds that plans take now.
Status find_taken(const DeviceTools& tools, TunedWorkload& workload, std::string TunedShape::*taken) {
  const Result<Planner> planner = Planner::create(tools, workload.front().bench_case);
  if (!planner.ok()) return planner.status();
  for (TunedShape& shape : workload) {
    const Result<Plan> plan = planner->plan(shape.bench_case);
    if (!plan.ok()) return plan.status();
    shape.*taken = planned_kernel(*plan);
  }
  return {};
}

// The kinds that serve, with their estimates.
Status find_kinds(const DeviceTools& tools, TunedWorkload& workload) {
  const Result<Planner> planner = Planner::create(tools, workload.front().bench_case);
  if (!planner.ok()) return planner.status();
  for (TunedShape& shape : workload) {
    double least = 0;
    for (int kind = 0; kind < static_cast<int>(std::size(core::kTunedKinds)); ++kind) {
      const Result<Plan> plan = planner->plan(with_kind(shape.bench_case, kind));
      if (!plan.ok() && plan.code() == Code::unsupported) continue;
      if (!plan.ok()) return plan.status();
      if (with_kind(shape.bench_case, kind).products == 8 && plan->products() != 8) continue;
      const auto ns = static_cast<double>(plan->impl().work->estimated_ns());
      if (ns <= 0) return {Code::internal, fmt::format("a plan of {} has no estimate", core::kTunedKinds[kind])};
      shape.kinds.push_back({kind, ns});
      least = least == 0 ? ns : std::min(least, ns);
    }
    std::erase_if(shape.kinds, [&](const TunedKind& one) {
      return core::kTunedKinds[one.kind] != std::string(core::kDecodeKernels) && one.estimated_ns > kHopeless * least;
    });
  }
  return {};
}

// The kinds take turns, so that a device that becomes slower with time does so for all.
Status measure_workload(DeviceTools& tools, TunedWorkload& workload, const std::function<void()>& on_measured) {
  for (TunedShape& shape : workload) {
    FirstOutputs first;
    // Decode kernels of a workload are the same for any rows.
    first.are_right = &shape != &workload.front() && shape.find(core::kDecodeKernels) != nullptr;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (TunedKind& one : shape.kinds) {
        BenchRow row;
        row.bench_case = with_kind(shape.bench_case, one.kind);
        const BenchCase& c = row.bench_case;
        const auto named = [&](const std::string& message) {
          return fmt::format("{} at head_dim {}, {} x {} keys, {} rows, {}: {}", c.stored_name(), c.head_dim, c.batch,
                             c.keys, shape.rows(), core::kTunedKinds[one.kind], message);
        };
        if (Status s = measure_decode(tools, row, &first); !s.ok()) return {s.code(), named(s.message())};
        if (!row.refusal.empty()) return {Code::internal, named(row.refusal)};
        one.ns += row.median_ns / kTurns;
        if (turn == 0) one.error = row.rel_l2;
        on_measured();
      }
    }
  }
  return {};
}

// The file's ratios. Where several pairs of formats are of one class, their mean counts.
std::vector<core::TunedRatio> ratios_of(const std::vector<TunedWorkload>& workloads) {
  std::map<core::TunedWork, std::pair<double, int>> logarithms;
  for (const TunedWorkload& workload : workloads) {
    for (const TunedShape& shape : workload) {
      for (const TunedKind& one : shape.kinds) {
        const BenchCase& c = shape.bench_case;
        auto& [sum, count] = logarithms[{one.kind, stored_head_dim_on(core::device_backend(), c.head_dim),
                                         core::stored(c.formats.k), shape.heads(), shape.rows()}];
        sum += std::log(one.ratio());
        ++count;
      }
    }
  }
  std::vector<core::TunedRatio> ratios;
  for (const auto& [work, sums] : logarithms) {
    const double thousandths = 1000 * std::exp(sums.first / sums.second);
    ratios.push_back(
        {work, static_cast<int>(std::lround(std::clamp<double>(thousandths, core::kLeastRatio, core::kMostRatio)))});
  }
  return ratios;
}

// --- the report ------------------------------------------------------------------------------------------------------

// How much longer plans' kernels take than the fastest: "3.1 % (at most 25.0 %)".
std::string losses_text(const std::vector<TunedWorkload>& workloads, std::string TunedShape::*taken) {
  double sum = 0, most = 1;
  int count = 0, unknown = 0;
  for (const TunedWorkload& workload : workloads) {
    for (const TunedShape& shape : workload) {
      const std::optional<double> loss = shape.loss(shape.*taken);
      if (loss) sum += *loss, most = std::max(most, *loss), ++count;
      unknown += !loss;
    }
  }
  std::string text =
      count == 0 ? "unknown" : fmt::format("{:.1f} % (at most {:.1f} %)", 100 * (sum / count - 1), 100 * (most - 1));
  if (unknown > 0) text += fmt::format(", and {} times a kind that was not measured", unknown);
  return text;
}

std::string tune_text(const std::vector<TunedWorkload>& workloads, const std::string& device, std::size_t width) {
  Table table({{"K/V", true},
               {"D"},
               {"batch"},
               {"keys", false, 3},
               {"rows"},
               {"kernel", true},
               {"error", false, 2},
               {"median"},
               {"estimate"},
               {"ratio"},
               {"plans take", true}});
  for (const TunedWorkload& workload : workloads) {
    for (const TunedShape& shape : workload) {
      const BenchCase& c = shape.bench_case;
      for (const TunedKind& one : shape.kinds) {
        const std::string name = core::kTunedKinds[one.kind];
        std::string taken;
        if (name == shape.before) taken = name == shape.after ? "before and after" : "before";
        if (name == shape.after && taken.empty()) taken = "after";
        const double loss = shape.loss(name).value_or(1);
        if (!taken.empty() && loss > 1) taken += fmt::format(", {:.0f} % slower than the fastest", 100 * (loss - 1));
        table.add({c.stored_name(), std::to_string(c.head_dim), std::to_string(c.batch), std::to_string(c.keys),
                   std::to_string(shape.rows()), name, one.error > 0 ? fmt::format("{:.1e}", one.error) : "-",
                   time_text(one.ns), time_text(one.estimated_ns), fmt::format("{:.2f}", one.ratio()), taken});
      }
    }
  }
  return fmt::format(
      "kvant {} on {}\n\n{}\n{}{}", kVersion, device, table.text(width),
      wrapped("Kernels of plans take longer than the fastest by " + losses_text(workloads, &TunedShape::before) +
                  " without the file, and by " + losses_text(workloads, &TunedShape::after) + " with it.",
              std::min(width, kTextWidth)),
      wrapped("batch: sequences. rows: queries of a sequence and kv head. keys: of a sequence. error: "
              "relative L2, of the first kind against float64 attention, of others against that kind.",
              std::min(width, kTextWidth)));
}

// --- the command -----------------------------------------------------------------------------------------------------

// The pairs and head_dims that have kernels, of those that the arguments name.
Result<std::vector<FormatPair>> tuned_pairs(const TuneArguments& a, const core::DeviceBuild& build) {
  const bool is_default = a.k_formats.empty() && a.v_formats.empty();
  const Result<std::vector<FormatPair>> pairs =
      pair_formats(is_default ? std::vector<std::string>{"tq6/tq4", "fp8", "bf16"} : a.k_formats, a.v_formats);
  if (!pairs.ok()) refuse_usage(pairs.message());
  std::vector<FormatPair> found;
  for (const FormatPair& pair : *pairs) {
    const std::string name = fmt::format("{}/{}", format_info(pair.k).name, format_info(pair.v).name);
    const bool is_compiled = std::any_of(build.pairs.begin(), build.pairs.end(),
                                         [&](const std::string& one) { return one == name || one == pair.name(); });
    if (is_compiled) found.push_back(pair);
    if (!is_compiled && !is_default) {
      return Status{Code::unsupported, fmt::format("--k-format {}: this build has kernels for {}", pair.name(),
                                                   fmt::join(build.pairs, ", "))};
    }
  }
  if (!found.empty()) return found;
  return Status{Code::unsupported, fmt::format("--k-format: this build has kernels for {}; name some of these",
                                               fmt::join(build.pairs, ", "))};
}

// The file to write. Its folder is made where it is the default.
Result<std::string> tuning_path(const TuneArguments& a, const bench::DeviceBench::Facts& facts) {
  if (!a.out.empty()) return a.out;
  if (facts.is_lowered) {
    return Status{Code::invalid_argument,
                  "--out: not given, and KVANT_CUDA_LIMITS lowers the device, whose own file this is not; name a file"};
  }
  const std::string path = core::default_tuning_path(facts.tuned);
  if (path.empty())
    return Status{Code::invalid_argument, "--out: not given, and neither XDG_CACHE_HOME nor HOME names a folder"};
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error) return Status{Code::io, fmt::format("{}: its folder cannot be made: {}", path, error.message())};
  return path;
}

Status run_tune(const TuneArguments& a) {
  if (a.out == "-" || a.out == "off")
    refuse_usage(fmt::format("--out {}: plans read the file by its name; choose another", a.out));
  ::setenv(core::kTuningVariable, "off", 1);  // the estimates themselves are compared
  if (Status s = check_device_backend("tune needs CUDA", ""); !s.ok()) return s;
  const core::DeviceBuild build = core::device_backend()->build();
  const Result<std::vector<FormatPair>> pairs = tuned_pairs(a, build);
  if (!pairs.ok()) return pairs.status();
  const Result<std::unique_ptr<bench::DeviceBench>> made = bench::make_device_bench(a.device);
  if (!made.ok()) return made.status();
  bench::DeviceBench& device = **made;
  const Result<std::string> path = tuning_path(a, device.facts());
  if (!path.ok()) return path.status();
  Outputs outputs;
  name_files(outputs, {}, "", {{"--out", *path}});
  if (const Status status = outputs.check(); !status.ok()) return status;

  std::vector<TunedWorkload> workloads =
      workloads_of(*pairs, a.head_dims.empty() ? build.head_dims : a.head_dims, device.facts().free_bytes);
  BenchSettings settings;
  DeviceTools tools(device, settings, a.device);
  std::size_t count = 0;
  for (TunedWorkload& workload : workloads) {
    if (Status s = find_kinds(tools, workload); !s.ok()) return s;
    if (Status s = find_taken(tools, workload, &TunedShape::before); !s.ok()) return s;
    for (const TunedShape& shape : workload) count += kTurns * shape.kinds.size();
  }
  if (count == 0) return {Code::unsupported, "no kind of kernels serves these formats and head_dims on this device"};
  settings.seconds = a.seconds / static_cast<double>(2 * count);  // as much again is for caches, plans and checks
  {
    Progress progress(static_cast<double>(count));
    for (TunedWorkload& workload : workloads) {
      const BenchCase& c = workload.front().bench_case;
      const std::string name = fmt::format("{} D {}, batch {}", c.stored_name(), c.head_dim, c.batch);
      if (Status s = measure_workload(tools, workload, [&] { progress.advance(1, name); }); !s.ok()) return s;
    }
  }
  tools.drop_shared();
  if (Status s = outputs.write(*path, core::tuning_text(device.facts().tuned, ratios_of(workloads))); !s.ok()) return s;
  ::setenv(core::kTuningVariable, path->c_str(), 1);
  for (TunedWorkload& workload : workloads) {
    if (Status s = find_taken(tools, workload, &TunedShape::after); !s.ok()) return s;
  }
  outputs.print(tune_text(workloads, device.facts().name, a.is_wide ? Table::kNoLimit : outputs.width()));
  return {};
}

}  // namespace

Action add_tune_operation(CLI::App& bench) {
  auto a = std::make_shared<TuneArguments>();
  CLI::App* command = bench.add_subcommand("tune", "Measure the kinds of kernels of a device, for plans to choose by")
                          ->group("Operations");
  command->footer(kTuneFooter);
  add_list(*command, "--k-format", a->k_formats, "Key formats, or pairs; default: tq6/tq4,fp8,bf16", "FORMAT,...");
  add_list(*command, "--v-format", a->v_formats,
           "Value formats: one for all, or one for each key format; default: as the keys", "FORMAT,...");
  CLI::Range head_dims(1, kLargestHeadDim);
  head_dims.description("");
  add_list(*command, "--head-dim", a->head_dims, "Values of a vector; default: every size that has kernels")
      ->check(head_dims);
  CLI::Range devices(0, 1023), seconds(1.0, 3600.0);
  devices.description("");
  seconds.description("");
  command->add_option("--device", a->device, "The device's number")
      ->check(devices)
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--seconds", a->seconds, "About so long it takes, and longer where 7 samples of each row do")
      ->check(seconds)
      ->type_name("S")
      ->capture_default_str();
  add_file(*command, "--out", a->out, "The file to write; default: where plans look for it");
  add_wide(*command, a->is_wide);
  return [a] { return run_tune(*a); };
}

}  // namespace kvant::cli
