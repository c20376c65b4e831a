// How time is taken on a device. Kernels are timed between events, as launches of a graph of many runs, so that neither
// the host's calls nor the gaps between launches count (appends of many tokens are not recorded: their calls are
// enqueued between two events). A cache has as many layers as make four times the L2 cache, and runs rotate through
// them: keys and values come from memory. The read bandwidth that rows are held against is measured before and after
// all of them.
#include "cli/bench_device.hpp"

#include <algorithm>
#include <memory>

#include "cli/bench_device_tools.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {

Status check_device_backend(const char* option, const char* instead) {
  return core::check_backend(core::device_backend(), option, instead);
}

Result<BenchResult> run_device_bench(const std::vector<BenchCase>& cases, const BenchSettings& settings, int device,
                                     const std::function<void(double, const std::string&)>& on_progress) {
  if (Status s = check_device_backend(); !s.ok()) return s;
  const Result<std::unique_ptr<bench::DeviceBench>> made = bench::make_device_bench(device);
  if (!made.ok()) return made.status();
  bench::DeviceBench& bench = **made;
  BenchResult result;
  result.device = bench.facts().name;
  const Result<double> before = bench.read_gb_per_s();
  if (!before.ok()) return before.status();
  DeviceTools tools(bench, settings, device);
  for (const BenchCase& c : cases) {
    const std::string name =
        fmt::format("{} {} D {}, {} keys, batch {}", op_name(c.op), c.formats.name(), c.dims(), c.keys, c.batch);
    on_progress(0, name);
    BenchRow row;
    row.bench_case = c;
    const Status s = c.op == BenchOp::append ? measure_append(tools, row) : measure_decode(tools, row);
    if (!s.ok()) return {s.code(), name + ": " + s.message()};
    result.rows.push_back(std::move(row));
    on_progress(1, name);
  }
  const Result<double> after = bench.read_gb_per_s();
  if (!after.ok()) return after.status();
  result.device_read_gb_per_s = std::max(*before, *after);
  if (std::any_of(cases.begin(), cases.end(), [](const BenchCase& c) { return c.op == BenchOp::prefill; })) {
    const Result<double> product = bench.product_tflops();
    if (!product.ok() && product.code() != Code::unsupported) return product.status();
    if (product.ok()) {
      result.device_product_tflops = *product;
    } else {
      result.device_product_missing = product.message();
    }
  }
  for (BenchRow& row : result.rows) {
    row.share_of_read_bandwidth = row.gb_per_s / result.device_read_gb_per_s;
    if (row.bench_case.op == BenchOp::prefill && result.device_product_tflops > 0)
      row.share_of_product = row.gflops / (1000 * result.device_product_tflops);
  }
  return result;
}

}  // namespace kvant::cli
