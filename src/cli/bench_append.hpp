// `kvant bench append`: tokens appended to an empty cache, in calls of a given size.
#pragma once

#include <memory>
#include <vector>

#include "cli/bench.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {

class AppendRun {
 public:
  static Result<AppendRun> create(const BenchCase& c);
  /// Relative L2 of the decoded vectors against those appended.
  Result<double> check();
  /// Nanoseconds for appending all tokens to all sequences.
  Result<double> time_once();

 private:
  AppendRun(const BenchCase& c, Cache cache);
  Status refill();
  Status append_all();

  BenchCase case_;
  Cache cache_;
  std::vector<SequenceId> sequences_;
  std::vector<float> keys_, values_;
};

/// Bytes that appending writes, when nothing is kept exact.
double append_bytes(const BenchCase& c);
/// The largest error that right encoding may have on these vectors.
double append_tolerance(const FormatPair& formats);

}  // namespace kvant::cli
