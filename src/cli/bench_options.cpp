// The options of `kvant bench` and of its operations, each with those that have a meaning there. Without an operation
// it is decode, whose options are taken and not shown.
#include <iterator>
#include <memory>

#include "cli/arguments.hpp"
#include "cli/bench_arguments.hpp"
#include "cli/bench_tune.hpp"
#include "cli/command.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kChecked =
    "Lists make several rows, one for every combination; key and value formats go in pairs. Each row is checked\n"
    "against float64 attention over the decoded vectors first, and gets no speed when its error is above 2e-4\n"
    "(f32: 1e-5; products of 8 bits: 2.5e-2). Bytes and values are those that some query sees.\n";

constexpr const char* kBenchFooter =
    "`kvant bench OPERATION --help` shows the options of an operation. Without one it is decode, with its options; "
    "with\n"
    "--suite it is all operations that the suite has.\n"
    "\n"
    "Examples:\n"
    "  kvant bench decode --head-dim 128 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq4,tq8,f16\n"
    "  kvant bench --suite cpu --markdown results.md\n"
    "  kvant bench --suite cpu decode --isa avx2 --json bench.json";

constexpr const char* kDecodeExamples =
    "With --backend cuda --q-len 1 it is one step of one token a sequence, replayed from a CUDA graph (any --keys\n"
    "above 1).\n"
    "--between-mib: without it what a launch reads besides keys and values, its code too, is in the L2 cache from the\n"
    "run before. In a model a layer's weights push it out; 100 is as much as many have.\n"
    "\n"
    "Examples:\n"
    "  kvant bench decode --k-format tq6 --v-format tq4 --threads 1,2 --json bench.json\n"
    "  kvant bench decode --keys 65536 --window 4096 --softcap 50 --head-dim 256\n"
    "  kvant bench decode --backend cuda --batch 16 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq6/tq4,bf16\n"
    "  kvant bench decode --backend cuda --batch 32 --first-keys 131072 --keys 1024 --kv-heads 8 --q-heads 32\n"
    "  kvant bench decode --backend cuda --q-heads 32 --kv-heads 8 --keys 32768 --q-len 1,2,4,8,16,32,64,128,256,512";

constexpr const char* kStepExamples =
    "Each run first appends --q-len tokens to every sequence and then attends them, as a layer of a model does.\n"
    "--between-mib: without it what a launch reads besides keys and values, its code too, is in the L2 cache from the\n"
    "run before. In a model a layer's weights push it out; 100 is as much as many have.\n"
    "\n"
    "Examples:\n"
    "  kvant bench step --keys 32768 --q-heads 32 --kv-heads 8 --k-format tq4,tq6/tq4,f16\n"
    "  kvant bench step --backend cuda --batch 16 --q-heads 32 --kv-heads 8 --keys 32768 --k-format tq6/tq4,bf16";

constexpr const char* kPrefillExamples =
    "The queries are the newest --q-len of the keys' positions. With --backend cuda the table has TFLOP/s, and their\n"
    "share of what a product of bf16 matrices of 8192 x 8192 by cuBLAS has in the same run.\n"
    "\n"
    "Examples:\n"
    "  kvant bench prefill --q-len 512 --keys 4096 --head-dim 128,256,512 --k-format f16,tq4\n"
    "  kvant bench prefill --k-format tq4,tq6/tq4 --products 16,8\n"
    "  kvant bench prefill --backend cuda --q-len 8192 --keys 8192 --fresh-keys --q-heads 32 --kv-heads 8\n"
    "  kvant bench prefill --backend cuda --q-len 2048 --keys 32768 --q-heads 32 --kv-heads 8 --k-format tq4,bf16";

constexpr const char* kAppendFooter =
    "--keys tokens are appended to an empty cache, --q-len at a time. Lists make several rows, one for every\n"
    "combination; key and value formats go in pairs. The error is that of the decoded vectors.\n"
    "\n"
    "Examples:\n"
    "  kvant bench append --k-format tq4,tq6/tq4 --isa scalar,avx2 --threads 1\n"
    "  kvant bench append --backend cuda --batch 16 --keys 2048 --q-len 2048 --k-format tq4";

// Ranges say nothing in the help (the refusal does), or it would drown in them.
template <class T>
CLI::Range range(T low, T high) {
  CLI::Range allowed(low, high);
  allowed.description("");
  return allowed;
}

constexpr std::int64_t kMostTokens = std::int64_t{1} << 32, kMostQueries = 1 << 24;

std::string per_op(BenchOp op, const char* decode, const char* other) {
  return op == BenchOp::decode || op == BenchOp::step ? decode : other;
}

void add_formats(CLI::App& command, BenchArguments& a) {
  add_list(command, "--k-format", a.k_formats,
           "Key formats, or pairs as tq6/tq4 (default; suites: f16,tq8,tq6/tq4,tq4)", "FORMAT,...");
  add_list(command, "--v-format", a.v_formats,
           "Value formats: one for all, or one for each key format; default: as the keys", "FORMAT,...");
  add_list(command, "--k-centre", a.k_centres,
           "What is subtracted from keys: none, or page, a mean key of each page (tq and\n"
           "fp8 keys); automatic: page for these keys",
           "automatic|none|page,...")
      ->check(CLI::IsMember({"automatic", "none", "page"}).description(""))
      ->capture_default_str();
}

// Returned: what a suite has of its own.
std::vector<CLI::Option*> add_shapes(CLI::App& command, BenchArguments& a, BenchOp op) {
  std::vector<CLI::Option*> shapes;
  const bool is_append = op == BenchOp::append;
  if (!is_append) {
    shapes.push_back(
        add_list(command, "--q-heads", a.q_heads, "Query heads")->check(range(1, 4096))->capture_default_str());
  }
  CLI::Option* const of_heads[] = {
      add_list(command, "--kv-heads", a.kv_heads, "Key/value heads")->check(range(1, 4096))->capture_default_str(),
      add_list(command, "--head-dim", a.head_dims, "Values of a vector")->capture_default_str(),
      add_list(command, "--v-head-dim", a.v_head_dims, "Values of a value, if not --head-dim; 0: that")
          ->capture_default_str()};
  shapes.insert(shapes.end(), std::begin(of_heads), std::end(of_heads));
  CLI::Option* const latent =
      add_list(command, "--latent", a.latents,
               "Values of a latent (multi-head latent attention), in place of the three above:\n"
               "all query heads share latents and rotary keys; formats are rotary/latent")
          ->check(range(1, kLargestHeadDim));
  for (CLI::Option* option : of_heads) latent->excludes(option);
  shapes.push_back(latent);
  shapes.push_back(command.add_option("--rope", a.rope, "With --latent: values of a rotary key")
                       ->check(range(1, kLargestHeadDim))
                       ->needs(latent)
                       ->type_name("N")
                       ->capture_default_str());
  shapes.push_back(add_list(command, "--batch", a.batches, "Sequences")->check(range(1, 65536))->capture_default_str());
  shapes.push_back(
      with_units(add_list(command, "--keys", a.keys,
                          fmt::format("Tokens of a sequence; 32k is 32768; default: {}", per_op(op, "16384", "4096"))))
          ->check(range(std::int64_t{1}, kMostTokens)));
  if (!is_append) {
    shapes.push_back(
        with_units(command.add_option("--first-keys", a.first_keys,
                                      "Tokens of the first sequence, a long one beside others; default: as --keys"))
            ->check(range(std::int64_t{1}, kMostTokens))
            ->type_name("N"));
  }
  const char* what = is_append             ? "Tokens of one call; default: 512, or --keys if that is less"
                     : op == BenchOp::step ? "Tokens of a sequence that are appended and attended; default: 1"
                                           : "Queries of a sequence; default: ";
  const bool is_said = is_append || op == BenchOp::step;
  shapes.push_back(with_units(add_list(command, "--q-len", a.q_lens, is_said ? what : what + per_op(op, "1", "512")))
                       ->check(range(std::int64_t{1}, kMostQueries)));
  return shapes;
}

void add_scores(CLI::App& command, BenchArguments& a) {
  with_units(
      command.add_option("--window", a.scores.window, "Each query sees this many of the newest keys; default: all"))
      ->check(range(std::int64_t{1}, kMostTokens))
      ->type_name("N");
  command.add_option("--softcap", a.scores.softcap, "Scores become CAP * tanh(score / CAP)")
      ->check(range(1e-3, 1e6))
      ->type_name("CAP");
  command.add_flag("--alibi", a.scores.alibi, "Linear biases, slopes 2^(-8 (head + 1) / q_heads)");
  one_of(command.add_option_function<std::string>(
             "--mask", [&a](const std::string& name) { a.scores.mask = parse_dtype(name).value(); },
             "A mask tensor of this type over all queries and keys, which hides nothing"),
         {"bool", "f32", "f16", "bf16"});
  command.add_flag("--fresh-keys", a.scores.fresh_keys,
                   "Runs are given keys and values of the queries' own tokens, and attend to\n"
                   "these as they are");
}

void add_device(CLI::App& command, BenchArguments& a, BenchOp op) {
  one_of(command.add_option("--backend", a.backend, "kvant info says whether cuda is there"), {"cpu", "cuda"})
      ->capture_default_str();
  command.add_option("--device", a.device, "With --backend cuda: the device, as 1 or cuda:1; default: 0")
      ->type_name("N");
  if (op == BenchOp::append) return;
  command
      .add_option("--between-mib", a.between_mib,
                  "With --backend cuda: read so much other memory between two runs, as a\n"
                  "model's weights are; the time of that alone is taken off")
      ->check(range(1, 2048))
      ->type_name("N");
  std::vector<std::string> kernels(std::begin(core::kKernelNames), std::end(core::kKernelNames));
  kernels.insert(kernels.begin(), kAutomatic);
  const auto half = kernels.begin() + 4;
  one_of(add_list(command, "--kernel", a.kernels,
                  fmt::format("With --backend cuda: kernels that the plan is to take; automatic: those\n"
                              "that take the least time. One of {},\n{}",
                              fmt::join(kernels.begin(), half, ", "), fmt::join(half, kernels.end(), ", "))),
         kernels)
      ->type_name("KERNEL,...")
      ->capture_default_str();
}

void add_products(CLI::App& command, BenchArguments& a) {
  one_of(add_list(command, "--products", a.products,
                  "Bits of the numbers that are multiplied where many queries share a page of tq\n"
                  "formats: 16, or 8; automatic: what the plan chooses"),
         {kAutomatic, "16", "8"})
      ->type_name("automatic|16|8,...")
      ->capture_default_str();
}

void add_run(CLI::App& command, BenchArguments& a) {
  add_list(command, "--threads", a.threads, "Worker threads; 0: the processors that the process may use")
      ->check(range(0, 1024))
      ->capture_default_str();
  add_list(command, "--isa", a.isas, kIsaHelp, "ISA,...");
  command.add_option("--rounds", a.settings.rounds, "Samples of each row; default: by --seconds")
      ->check(range(1, 100000))
      ->type_name("N");
  command.add_option("--seconds", a.settings.seconds, "Time to spend on each row, at least 7 samples")
      ->check(range(0.0, 3600.0))
      ->type_name("S")
      ->capture_default_str();
  add_output(command, "--json", a.json, "Write the rows as JSON");
  add_output(command, "--csv", a.csv, "Write the rows as comma-separated values");
  add_output(command, "--markdown", a.markdown, "Write the table as markdown");
  add_wide(command, a.is_wide);
}

void add_ends(CLI::App& command, BenchArguments& a, BenchOp op) {
  const char* kDefault = op == BenchOp::append ? "0" : "1";
  command.add_option("--sink-pages", a.sink_pages, fmt::format("Exact first pages; default: {}", kDefault))
      ->check(range(0, 1 << 16))
      ->type_name("N");
  command.add_option("--tail-pages", a.tail_pages, fmt::format("Exact newest pages; default: {}", kDefault))
      ->check(range(0, 1 << 16))
      ->type_name("N");
}

CLI::Option* add_suite(CLI::App& command, BenchArguments& a) {
  return command.add_option("--suite", a.suite, "Shapes by name, instead of options of shapes: cpu")->type_name("NAME");
}

// Each group of options stands in the order in which the help shows it.
std::vector<CLI::Option*> add_options(CLI::App& command, BenchArguments& a, BenchOp op) {
  add_formats(command, a);
  std::vector<CLI::Option*> shapes = add_shapes(command, a, op);
  if (op == BenchOp::decode || op == BenchOp::prefill) add_suite(command, a);
  if (op != BenchOp::append) add_scores(command, a);
  add_ends(command, a, op);
  add_device(command, a, op);
  if (op == BenchOp::prefill) add_products(command, a);
  add_run(command, a);
  return shapes;
}

// The options of the command without an operation: those of decode. Options that a suite does not use are hidden.
std::vector<CLI::Option*> add_options_without_op(CLI::App& command, BenchArguments& a) {
  std::vector<CLI::Option*> shapes = add_options(command, a, BenchOp::decode);
  for (CLI::Option* shape : shapes) shape->group(kHidden);
  for (const char* name : {"--window", "--softcap", "--alibi", "--mask", "--fresh-keys", "--backend", "--device",
                           "--between-mib", "--kernel"}) {
    command.get_option(name)->group(kHidden);
  }
  return shapes;
}

struct Operation {
  BenchOp op;
  const char* what;
  std::string footer;
};

}  // namespace

Action add_bench_command(CLI::App& app) {
  auto a = std::make_shared<BenchArguments>();
  CLI::App* command =
      app.add_subcommand("bench", "Time decode, step, prefill or append: speed, error, shares of the machine's peaks");
  command->footer(kBenchFooter);
  command->require_subcommand(0, 1);
  std::vector<CLI::Option*> shapes = add_options_without_op(*command, *a);
  const Operation operations[] = {
      {BenchOp::decode, "Attention of the newest tokens over all keys", std::string(kChecked) + kDecodeExamples},
      {BenchOp::step, "What a layer does for the next token: append it, then attend to all",
       std::string(kChecked) + kStepExamples},
      {BenchOp::prefill, "Attention of many new tokens at once", std::string(kChecked) + kPrefillExamples},
      {BenchOp::append, "Encoding and storing of new keys and values", kAppendFooter},
  };
  for (const Operation& o : operations) {
    CLI::App* sub = command->add_subcommand(op_name(o.op), o.what)->group("Operations");
    sub->footer(o.footer);
    const std::vector<CLI::Option*> own = add_options(*sub, *a, o.op);
    shapes.insert(shapes.end(), own.begin(), own.end());
  }
  const Action tune = add_tune_operation(*command);
  return [a, command, shapes, tune] {
    const std::vector<CLI::App*> given = command->get_subcommands();
    if (!given.empty() && given.front()->get_name() == "tune") {
      for (const CLI::Option* option : command->get_options()) {
        if (option->count() > 0)
          throw CLI::ValidationError(fmt::format("{}: not of tune; leave it out", option->get_name()));
      }
      return tune();
    }
    for (const CLI::Option* shape : shapes) {
      if (!a->suite.empty() && shape->count() > 0) {
        throw CLI::ValidationError(
            fmt::format("--suite {}: has shapes of its own; leave out {}", a->suite, shape->get_name()));
      }
    }
    if (!given.empty()) a->op = given.front()->get_name();
    return run_bench_command(*a, !given.empty());
  };
}

}  // namespace kvant::cli
