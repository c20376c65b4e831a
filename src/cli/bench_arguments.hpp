// The arguments of `kvant bench`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench.hpp"

namespace kvant::cli {

inline constexpr const char* kAutomatic = "automatic";  // what the plan chooses

// Zero stands for "the default of the operation".
struct BenchArguments {
  std::string op = "decode";
  std::string suite;
  std::vector<std::string> k_formats, v_formats, k_centres = {"automatic"};
  std::vector<int> q_heads = {16}, kv_heads = {4}, head_dims = {128}, v_head_dims = {0}, batches = {1}, threads = {0};
  std::vector<int> latents;  // empty: keys and values of heads
  int rope = 64;
  std::vector<std::int64_t> keys, q_lens;
  std::int64_t first_keys = 0;
  std::vector<std::string> isas = {""};
  std::string backend = "cpu";
  std::string device{};  // as it was given
  int sink_pages = -1, tail_pages = -1;
  std::int64_t between_mib = 0;
  std::vector<std::string> kernels = {kAutomatic}, products = {kAutomatic};
  BenchScores scores;
  BenchSettings settings;
  std::string json, csv, markdown;
  bool is_wide = false;
};

/// `is_op_given`: of a suite, only the shapes of that operation.
Status run_bench_command(const BenchArguments& a, bool is_op_given);

}  // namespace kvant::cli
