// `kvant bench`: from the arguments to the rows that are measured. bench_options.cpp has the options.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>

#include "cli/arguments.hpp"
#include "cli/bench_arguments.hpp"
#include "cli/bench_device.hpp"
#include "cli/clock.hpp"
#include "cli/output.hpp"
#include "cli/suggest.hpp"
#include "cli/table.hpp"
#include "codec/traits.hpp"
#include "core/backend.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::cli {
namespace {

[[noreturn]] void usage(const std::string& message) {
  throw CLI::ValidationError(message);
}

// The shapes of the suite, or every combination of the lists; formats, ISAs and threads are crossed in by the caller.
std::vector<BenchCase> shapes_of(const BenchArguments& a, bool is_op_given) {
  if (!a.suite.empty()) {
    const Result<std::vector<BenchCase>> suite = suite_shapes(a.suite);
    if (!suite.ok()) usage(suite.message());
    std::vector<BenchCase> shapes;
    for (const BenchCase& c : *suite) {
      if (!is_op_given || a.op == op_name(c.op)) shapes.push_back(c);
    }
    if (shapes.empty()) usage(fmt::format("--suite {}: has no {} shapes", a.suite, a.op));
    return shapes;
  }
  BenchCase base;
  base.op = parse_op(a.op).value();
  const bool is_decode = base.op == BenchOp::decode || base.op == BenchOp::step;
  const std::int64_t default_keys = is_decode ? 16384 : 4096, default_q_len = is_decode ? 1 : 512;
  const std::vector<std::int64_t> keys = a.keys.empty() ? std::vector{default_keys} : a.keys;
  const std::vector<std::int64_t> q_lens = a.q_lens.empty() ? std::vector{default_q_len} : a.q_lens;
  std::vector<BenchCase> shapes = {base};
  const auto cross = [&](const auto& values, auto set) {
    std::vector<BenchCase> crossed;
    for (const BenchCase& c : shapes) {
      for (const auto& value : values) {
        crossed.push_back(c);
        set(crossed.back(), value);
      }
    }
    shapes = std::move(crossed);
  };
  cross(a.head_dims, [](BenchCase& c, int v) { c.head_dim = v; });
  cross(a.v_head_dims, [](BenchCase& c, int v) { c.v_head_dim = v == c.head_dim ? 0 : v; });
  if (!a.latents.empty()) {
    shapes = {base};
    cross(a.latents, [&](BenchCase& c, int v) {
      c.latent = true, c.kv_heads = 1, c.head_dim = a.rope;
      c.v_head_dim = v == c.head_dim ? 0 : v;
    });
  }
  cross(a.q_heads, [](BenchCase& c, int v) { c.q_heads = v; });
  if (a.latents.empty()) cross(a.kv_heads, [](BenchCase& c, int v) { c.kv_heads = v; });
  cross(a.batches, [](BenchCase& c, int v) { c.batch = v; });
  cross(keys, [](BenchCase& c, std::int64_t v) { c.keys = v; });
  cross(q_lens, [](BenchCase& c, std::int64_t v) { c.q_len = v; });
  for (BenchCase& c : shapes) {
    if (c.op == BenchOp::append && a.q_lens.empty()) c.q_len = std::min(c.q_len, c.keys);
    c.first_keys = a.first_keys;
  }
  return shapes;
}

void check_shape(const BenchCase& c) {
  if (stored_head_dim(c.head_dim) == 0) {
    usage(fmt::format("--head-dim {}: must be 1 to {}", c.head_dim, kLargestHeadDim));
  }
  if (c.v_head_dim != 0 && stored_head_dim(c.v_head_dim) == 0) {
    usage(fmt::format("--v-head-dim {}: must be 1 to {}, or 0 for --head-dim", c.v_head_dim, kLargestHeadDim));
  }
  if (c.op != BenchOp::append && c.q_heads % c.kv_heads != 0) {
    usage(fmt::format("--q-heads {}: must be a multiple of --kv-heads {}", c.q_heads, c.kv_heads));
  }
  if (c.first_keys > 0 && c.op == BenchOp::append) {
    usage(fmt::format("--first-keys {}: not of append; appends are alike in all sequences", c.first_keys));
  }
  if (c.op == BenchOp::append && c.scores != BenchScores{}) {
    usage(fmt::format("append: has no scores; leave out {}", c.scores.text()));
  }
  if (c.op == BenchOp::append && c.between_mib > 0) {
    usage(fmt::format("--between-mib {}: of decode and step, not of append", c.between_mib));
  }
  if (c.q_len > std::min(c.keys, c.keys_of(0))) {
    usage(fmt::format("--q-len {}: more than --keys {}; the queries are the newest of the keys' positions", c.q_len,
                      std::min(c.keys, c.keys_of(0))));
  }
}

// The number of a device that is named as "1" or "cuda:1"; "": 0.
int device_number(const std::string& name) {
  if (name.empty()) return 0;
  std::string_view digits = name;
  if (digits.starts_with("cuda:")) digits.remove_prefix(5);
  constexpr int kMostDevices = 1024;
  int number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool is_whole = error == std::errc() && end == digits.data() + digits.size();
  if (!is_whole || number < 0 || number >= kMostDevices) {
    usage(fmt::format("--device {}: must be the number of a device, as 0, or as cuda:0", name));
  }
  return number;
}

// More workers than processors wait for one another: their times say nothing, and take minutes.
void check_threads(const std::vector<int>& threads) {
  const int most = core::hardware_threads();
  for (const int count : threads) {
    if (count <= most) continue;
    usage(fmt::format("--threads {}: this process may use {} processor{}; give at most that many, or 0 for all", count,
                      most, most == 1 ? "" : "s"));
  }
}

std::vector<BenchCase> cases_of(const BenchArguments& a, bool is_op_given, const std::vector<std::string>& isas) {
  std::vector<std::string> k_formats = a.k_formats;
  if (k_formats.empty() && a.v_formats.empty() && !a.suite.empty()) k_formats = {"f16", "tq8", "tq6/tq4", "tq4"};
  if (k_formats.empty() && a.v_formats.empty() && !a.latents.empty()) k_formats = {"tq8/tq4"};
  if (k_formats.empty()) k_formats = {a.v_formats.empty() ? kDefaultPair.name() : format_info(kDefaultPair.k).name};
  const Result<std::vector<FormatPair>> pairs = pair_formats(k_formats, a.v_formats);
  if (!pairs.ok()) usage(pairs.message());
  for (const FormatPair& pair : *pairs) {
    if (takes_centre(pair) || std::find(a.k_centres.begin(), a.k_centres.end(), "page") == a.k_centres.end()) continue;
    usage(fmt::format("--k-centre page: not with keys in {}; choose tq or fp8 keys with --k-format",
                      format_info(pair.k).name));
  }
  if (std::find(a.products.begin(), a.products.end(), "8") != a.products.end()) {
    if (!a.latents.empty()) usage("--products 8: not with --latent; leave it out");
    for (const FormatPair& pair : *pairs) {
      if (codec::is_tq(pair.k) && codec::is_tq(pair.v)) continue;
      usage(fmt::format("--products 8: not with {}; choose tq formats with --k-format and --v-format", pair.name()));
    }
  }
  std::vector<BenchCase> cases;
  for (BenchCase shape : shapes_of(a, is_op_given)) {
    shape.scores = a.scores;
    shape.between_mib = a.between_mib;
    check_shape(shape);
    if (shape.op == BenchOp::append && a.kernels != std::vector<std::string>{kAutomatic})
      usage(fmt::format("--kernel {}: of decode, step and prefill, not of append", fmt::join(a.kernels, ",")));
    const int default_ends = shape.op == BenchOp::append ? 0 : 1;  // append measures encoding
    shape.sink_pages = a.sink_pages >= 0 ? a.sink_pages : default_ends;
    shape.tail_pages = a.tail_pages >= 0 ? a.tail_pages : default_ends;
    for (const std::string& isa : isas) {
      for (const int threads : a.threads) {
        for (const FormatPair& pair : *pairs) {
          for (const std::string& centre : a.k_centres) {
            for (const std::string& kernel : a.kernels) {
              for (const std::string& products : a.products) {
                BenchCase& c = cases.emplace_back(shape);
                c.formats = pair;
                c.k_centre = centre_of(centre, pair);
                c.isa = isa;
                c.threads = threads > 0 ? threads : core::hardware_threads();
                if (kernel != kAutomatic) c.kernel = kernel;
                if (products != kAutomatic) c.products = products == "8" ? 8 : 16;
              }
            }
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace

Status run_bench_command(const BenchArguments& a, bool is_op_given) {
  Outputs outputs;
  name_files(outputs, {}, "", {{"--json", a.json}, {"--csv", a.csv}, {"--markdown", a.markdown}});
  const bool on_device = a.backend == "cuda";
  const int device = device_number(a.device);
  if (on_device) {
    if (!a.latents.empty() && a.op != "decode")
      usage(fmt::format("--latent: {} over latents is measured on the CPU; leave out --backend cuda", a.op));
    if (a.isas != std::vector<std::string>{""}) usage("--isa: CPU kernels; leave it out with --backend cuda");
    if (a.threads != std::vector<int>{0}) usage("--threads: of the CPU; leave it out with --backend cuda");
  } else if (!a.device.empty()) {
    usage(fmt::format("--device {}: needs --backend cuda", a.device));
  } else if (a.between_mib > 0) {
    usage(fmt::format("--between-mib {}: needs --backend cuda", a.between_mib));
  } else if (a.kernels != std::vector<std::string>{kAutomatic}) {
    usage(fmt::format("--kernel {}: needs --backend cuda", fmt::join(a.kernels, ",")));
  }
  check_threads(a.threads);
  std::vector<std::string> isas;
  if (on_device) isas = {"cuda"};
  for (const std::string& name : on_device ? std::vector<std::string>{} : a.isas) {
    const Result<const core::Kernels*> kernels = find_isa(name);
    if (!kernels.ok() && kernels.code() == Code::invalid_argument) usage(kernels.message());
    if (!kernels.ok()) return kernels.status();
    isas.push_back((*kernels)->name);
  }
  std::vector<BenchCase> cases = cases_of(a, is_op_given, isas);
  if (on_device) {
    for (BenchCase& c : cases) {
      c.backend = a.backend;
      c.threads = 0;
    }
    if (Status status = check_device_backend(); !status.ok()) return status;
  }
  if (const Status status = outputs.check(); !status.ok()) return status;

  const std::string started = utc_now();
  const Machine machine = describe_machine();
  Result<BenchResult> result = [&] {
    Progress progress(static_cast<double>(cases.size()));
    const auto advance = [&](double done, const std::string& what) { progress.advance(done, what); };
    return on_device ? run_device_bench(cases, a.settings, device, advance) : run_bench(cases, a.settings, advance);
  }();
  if (!result.ok()) return result.status();

  outputs.print(bench_text(*result, machine, a.is_wide ? Table::kNoLimit : outputs.width()));
  if (const Status status = outputs.write(a.json, bench_json(*result, machine, started)); !status.ok()) return status;
  if (const Status status = outputs.write(a.csv, bench_csv(*result)); !status.ok()) return status;
  if (const Status status = outputs.write(a.markdown, bench_markdown(*result, machine)); !status.ok()) return status;
  for (const BenchRow& row : result->rows) {
    if (!row.refusal.empty()) {
      return {Code::internal,
              fmt::format("{} {}: {}", op_name(row.bench_case.op), row.bench_case.stored_name(), row.refusal)};
    }
  }
  return {};
}

Result<std::vector<BenchCase>> suite_shapes(const std::string& name) {
  const std::vector<std::string> known = {"cpu"};
  if (name != known[0]) {
    return {Code::invalid_argument, fmt::format("--suite {}: unknown; the suites are {}{}", name,
                                                fmt::join(known, ", "), did_you_mean(name, known))};
  }
  std::vector<BenchCase> shapes;
  const auto add = [&](BenchOp op, int head_dim, int kv_heads, std::int64_t keys, std::int64_t q_len) {
    BenchCase c;
    c.op = op;
    c.head_dim = head_dim;
    c.kv_heads = kv_heads;
    c.keys = keys;
    c.q_len = q_len;
    shapes.push_back(c);
  };
  for (const int head_dim : {128, 256, 512}) add(BenchOp::decode, head_dim, 4, 16384, 1);
  for (const int kv_heads : {1, 8}) {
    for (const int head_dim : {256, 512}) add(BenchOp::decode, head_dim, kv_heads, 16384, 1);
  }
  for (const int head_dim : {128, 256, 512}) add(BenchOp::prefill, head_dim, 4, 4096, 512);
  for (const int head_dim : {256, 512}) add(BenchOp::prefill, head_dim, 4, 16384, 512);
  return shapes;
}

}  // namespace kvant::cli
