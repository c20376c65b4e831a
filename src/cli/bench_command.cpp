#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "cli/bench.hpp"
#include "cli/bench_device.hpp"
#include "cli/clock.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "core/backend.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kBenchFooter =
    "Lists make several rows, one for every combination; key and value formats go in pairs. Each row is checked "
    "against\n"
    "float64 attention over the decoded vectors first, and gets no speed when its error is above 2e-4 (f32: 1e-5).\n"
    "step: as decode, but each run first appends --q-len tokens to every sequence, as a layer of a model does.\n"
    "prefill: as decode, with other defaults.\n"
    "append: --keys tokens are appended to an empty cache, --q-len at a time; --q-heads has no meaning there.\n"
    "With --backend cuda --q-len 1 it is one step of one token a sequence, replayed from a CUDA graph (any --keys "
    "above 1).\n"
    "--window, --softcap, --alibi and --mask: not of append. Bytes and values are those that some query sees.\n"
    "--between-mib: without it what a launch reads besides keys and values, its code too, is in the L2 cache from the\n"
    "run before. In a model a layer's weights push it out; 100 is as much as many have.\n"
    "\n"
    "Examples:\n"
    "  kvant bench decode --head-dim 128 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq4,tq8,f16\n"
    "  kvant bench decode --k-format tq6 --v-format tq4 --threads 1,2 --json bench.json\n"
    "  kvant bench prefill --q-len 512 --keys 4096 --head-dim 128,256,512 --k-format f16,tq4\n"
    "  kvant bench append --k-format tq4,tq6/tq4 --isa scalar,avx2 --threads 1\n"
    "  kvant bench decode --backend cuda --batch 16 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq6/tq4,bf16\n"
    "  kvant bench step --backend cuda --batch 16 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq6/tq4,bf16\n"
    "  kvant bench decode --backend cuda --batch 32 --first-keys 131072 --keys 1024 --kv-heads 8 --q-heads 32\n"
    "  kvant bench decode --keys 65536 --window 4096 --softcap 50 --head-dim 256\n"
    "  kvant bench --suite cpu --markdown results.md";

// Zero stands for "the default of the operation".
struct Arguments {
  std::string op = "decode";
  std::string suite;
  std::vector<std::string> k_formats, v_formats;
  std::vector<int> q_heads = {16}, kv_heads = {4}, head_dims = {128}, batches = {1}, threads = {0};
  std::vector<std::int64_t> keys, q_lens;
  std::int64_t first_keys = 0;
  std::vector<std::string> isas = {""};
  std::string backend = "cpu";
  int device = 0;
  int sink_pages = -1, tail_pages = -1;
  std::int64_t between_mib = 0;
  BenchScores scores;
  BenchSettings settings;
  std::string json, csv, markdown;
};

[[noreturn]] void usage(const std::string& message) {
  throw CLI::ValidationError(message);
}

// The shapes of the suite, or every combination of the lists; formats, ISAs and threads are crossed in by the caller.
std::vector<BenchCase> shapes_of(const Arguments& a, bool is_op_given) {
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
  cross(a.q_heads, [](BenchCase& c, int v) { c.q_heads = v; });
  cross(a.kv_heads, [](BenchCase& c, int v) { c.kv_heads = v; });
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
  if (!is_supported_head_dim(c.head_dim)) {
    usage(fmt::format("--head-dim {}: must be one of {}", c.head_dim, fmt::join(supported_head_dims(), ", ")));
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

std::vector<BenchCase> cases_of(const Arguments& a, bool is_op_given, const std::vector<std::string>& isas) {
  std::vector<std::string> k_formats = a.k_formats;
  if (k_formats.empty() && a.v_formats.empty() && !a.suite.empty()) k_formats = {"f16", "tq8", "tq6/tq4", "tq4"};
  if (k_formats.empty()) k_formats = {a.v_formats.empty() ? kDefaultPair.name() : format_info(kDefaultPair.k).name};
  const Result<std::vector<FormatPair>> pairs = pair_formats(k_formats, a.v_formats);
  if (!pairs.ok()) usage(pairs.message());
  std::vector<BenchCase> cases;
  for (BenchCase shape : shapes_of(a, is_op_given)) {
    shape.scores = a.scores;
    shape.between_mib = a.between_mib;
    check_shape(shape);
    const int default_ends = shape.op == BenchOp::append ? 0 : 1;  // append measures encoding
    shape.sink_pages = a.sink_pages >= 0 ? a.sink_pages : default_ends;
    shape.tail_pages = a.tail_pages >= 0 ? a.tail_pages : default_ends;
    for (const std::string& isa : isas) {
      for (const int threads : a.threads) {
        for (const FormatPair& pair : *pairs) {
          cases.push_back(shape);
          cases.back().formats = pair;
          cases.back().isa = isa;
          cases.back().threads = threads > 0 ? threads : core::hardware_threads();
        }
      }
    }
  }
  return cases;
}

Status run_bench_command(const Arguments& a, bool is_op_given) {
  Outputs outputs;
  for (const auto& [option, path] : {std::pair{"--json", a.json}, {"--csv", a.csv}, {"--markdown", a.markdown}}) {
    if (const Status status = outputs.add(option, path); !status.ok()) usage(status.message());
  }
  const bool on_device = a.backend == "cuda";
  if (on_device) {
    if (a.isas != std::vector<std::string>{""}) usage("--isa: CPU kernels; leave it out with --backend cuda");
    if (a.threads != std::vector<int>{0}) usage("--threads: of the CPU; leave it out with --backend cuda");
  } else if (a.device != 0) {
    usage(fmt::format("--device {}: needs --backend cuda", a.device));
  } else if (a.between_mib > 0) {
    usage(fmt::format("--between-mib {}: needs --backend cuda", a.between_mib));
  }
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
      if (c.op == BenchOp::prefill) usage("prefill: --backend cuda has decode, step and append");
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
    return on_device ? run_device_bench(cases, a.settings, a.device, advance) : run_bench(cases, a.settings, advance);
  }();
  if (!result.ok()) return result.status();

  outputs.print(bench_text(*result, machine));
  const std::pair<const std::string&, std::string> results[] = {
      {a.json, a.json.empty() ? "" : bench_json(*result, machine, started)},
      {a.csv, a.csv.empty() ? "" : bench_csv(*result)},
      {a.markdown, a.markdown.empty() ? "" : bench_markdown(*result, machine)},
  };
  for (const auto& [path, content] : results) {
    if (path.empty()) continue;
    if (const Status status = write_result(path, content); !status.ok()) return status;
    if (path != "-") outputs.print(fmt::format("Wrote {}\n", path));
  }
  for (const BenchRow& row : result->rows) {
    if (!row.refusal.empty()) {
      return {Code::internal,
              fmt::format("{} {}: {}", op_name(row.bench_case.op), row.bench_case.formats.name(), row.refusal)};
    }
  }
  return {};
}

}  // namespace

Result<std::vector<BenchCase>> suite_shapes(const std::string& name) {
  if (name != "cpu") return {Code::invalid_argument, fmt::format("--suite {}: unknown; the suites are cpu", name)};
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

Action add_bench_command(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time decode, step, prefill or append over shapes: speed beside error, and shares of the machine's own peaks");
  command->footer(kBenchFooter);
  // Ranges say nothing in the help (the refusal does), or it would drown in them.
  const auto range = [](auto low, auto high) { return CLI::Range(low, high).description(""); };
  const auto list = [&](const char* name, auto& values, const char* what, const char* type = "N,...") {
    return command->add_option(name, values, what)->delimiter(',')->type_name(type);
  };
  CLI::Option* op =
      command->add_option("OP", a->op, "decode, step, prefill or append; with --suite, only those shapes of it")
          ->check(CLI::IsMember(op_names()).description(""))
          ->type_name("")
          ->capture_default_str();
  list("--k-format", a->k_formats, "Key formats, or pairs as tq6/tq4 (default; suites: f16,tq8,tq6/tq4,tq4)", "LIST");
  list("--v-format", a->v_formats, "Value formats: one for all, or one for each key format; default: as the keys",
       "LIST");
  const std::int64_t most_tokens = std::int64_t{1} << 32, most_queries = 1 << 24;
  const std::vector<CLI::Option*> shapes = {
      list("--q-heads", a->q_heads, "Query heads")->check(range(1, 4096))->capture_default_str(),
      list("--kv-heads", a->kv_heads, "Key/value heads")->check(range(1, 4096))->capture_default_str(),
      list("--head-dim", a->head_dims, "Values of a vector")->capture_default_str(),
      list("--batch", a->batches, "Sequences")->check(range(1, 65536))->capture_default_str(),
      list("--keys", a->keys, "Tokens of a sequence; default: 16384 for decode and step, else 4096")
          ->check(range(std::int64_t{1}, most_tokens)),
      command
          ->add_option("--first-keys", a->first_keys,
                       "Tokens of the first sequence, a long one beside others; default: as --keys")
          ->check(range(std::int64_t{1}, most_tokens))
          ->type_name("N"),
      list("--q-len", a->q_lens, "Queries of a sequence; default: 1 for decode and step, else 512")
          ->check(range(std::int64_t{1}, most_queries)),
  };
  command->add_option("--suite", a->suite, "Shapes by name, instead of the options above: cpu")->type_name("NAME");
  list("--threads", a->threads, "Worker threads; 0: the processors that the process may use")
      ->check(range(0, 1024))
      ->capture_default_str();
  list("--isa", a->isas, "Instruction sets (kvant info lists them); default: the best of this machine", "LIST");
  command->add_option("--backend", a->backend, "cpu, or cuda (kvant info says whether it is there)")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->type_name("")
      ->capture_default_str();
  command->add_option("--device", a->device, "With --backend cuda: the device's number")
      ->check(range(0, 1023))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--sink-pages", a->sink_pages, "Exact first pages; default: 1, for append 0")
      ->check(range(0, 1 << 16))
      ->type_name("N");
  command->add_option("--tail-pages", a->tail_pages, "Exact newest pages; default: 1, for append 0")
      ->check(range(0, 1 << 16))
      ->type_name("N");
  command
      ->add_option(
          "--between-mib", a->between_mib,
          "With --backend cuda, decode and step: read so much other memory between two runs, as a model's weights "
          "are; the time of that alone is taken off")
      ->check(range(1, 2048))
      ->type_name("N");
  command->add_option("--window", a->scores.window, "Each query sees this many of the newest keys; default: all")
      ->check(range(std::int64_t{1}, most_tokens))
      ->type_name("N");
  command->add_option("--softcap", a->scores.softcap, "Scores become CAP * tanh(score / CAP)")
      ->check(range(1e-3, 1e6))
      ->type_name("CAP");
  command->add_flag("--alibi", a->scores.alibi, "Linear biases, slopes 2^(-8 (head + 1) / q_heads)");
  command
      ->add_option_function<std::string>(
          "--mask", [a](const std::string& name) { a->scores.mask = parse_dtype(name).value(); },
          "A mask tensor over all queries and keys that hides nothing: bool, f32, f16, bf16")
      ->check(CLI::IsMember({"bool", "f32", "f16", "bf16"}).description(""))
      ->type_name("TYPE");
  command->add_option("--rounds", a->settings.rounds, "Samples of each row; default: by --seconds")
      ->check(range(1, 100000))
      ->type_name("N");
  command->add_option("--seconds", a->settings.seconds, "Time to spend on each row, at least 7 samples")
      ->check(range(0.0, 3600.0))
      ->type_name("S")
      ->capture_default_str();
  command->add_option("--json", a->json, "Write the rows as JSON; -: standard output")->type_name("FILE");
  command->add_option("--csv", a->csv, "Write the rows as comma-separated values; no file or -: standard output")
      ->expected(0, 1)
      ->default_str("-")
      ->type_name("FILE");
  command->add_option("--markdown", a->markdown, "Write the table as markdown; no file or -: standard output")
      ->expected(0, 1)
      ->default_str("-")
      ->type_name("FILE");
  return [a, op, shapes] {
    for (const CLI::Option* shape : shapes) {
      if (!a->suite.empty() && shape->count() > 0) {
        usage(fmt::format("--suite {}: has shapes of its own; leave out {}", a->suite, shape->get_name()));
      }
    }
    return run_bench_command(*a, op->count() > 0);
  };
}

}  // namespace kvant::cli
