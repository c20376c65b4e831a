// The sentence on top of the report: what the rows say about the smallest cache that is good enough.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "cli/report_parts.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

double share_of_bf16(const EvalRow& row) {
  return static_cast<double>(row.cache_bytes) / static_cast<double>(row.bf16_bytes);
}

std::string error_text(const SummaryRow& row, std::size_t layers) {
  const std::string mean = percent_text(row.mean.rel_l2);
  return layers == 1 ? mean : fmt::format("{} on average, {} in the worst layer", mean, percent_text(row.rel_l2_worst));
}

const SummaryRow* smallest_good(const std::vector<SummaryRow>& rows) {
  const SummaryRow* best = nullptr;
  const auto cost = [](const SummaryRow& row) { return std::tuple(row.mean.bits_per_value, row.rel_l2_worst); };
  for (const SummaryRow& row : rows) {
    if (row.mean.formats.is_dense() || !(row.rel_l2_worst < kGoodError)) continue;
    if (best == nullptr || cost(row) < cost(*best)) best = &row;
  }
  return best;
}

const SummaryRow* least_error(const std::vector<SummaryRow>& rows) {
  const SummaryRow* best = nullptr;
  for (const SummaryRow& row : rows) {
    if (row.mean.formats.is_dense() || std::isnan(row.rel_l2_worst)) continue;
    if (best == nullptr || row.rel_l2_worst < best->rel_l2_worst) best = &row;
  }
  return best;
}

// With exact ends where both were measured.
const SummaryRow* the_default(const std::vector<SummaryRow>& rows) {
  const SummaryRow* found = nullptr;
  for (const SummaryRow& row : rows) {
    if (row.mean.is_default() && (found == nullptr || row.mean.has_exact_ends)) found = &row;
  }
  return found;
}

std::string size_text(const EvalRow& row) {
  return fmt::format(
      "It takes {:.1f} % of a bf16 cache at this length; its pages alone, which is the limit for long "
      "sequences, take {:.2f} bits a value.",
      100 * share_of_bf16(row), row.page_bits);
}

}  // namespace

std::string percent_text(double share) {
  const double percent = 100 * share;
  if (percent > 0 && percent < 0.01) return "under 0.01 %";
  return fmt::format("{:.{}f} %", percent, percent < 10 ? 2 : 1);
}

std::string variant_text(const EvalRow& row) {
  if (row.formats.is_dense()) return row.name();
  return row.name() + (row.has_exact_ends ? " with exact ends" : " all encoded");
}

std::string finding_html(const std::vector<SummaryRow>& rows, std::size_t layers) {
  const std::string under = fmt::format("under {:g} % error{}", 100 * kGoodError, layers > 1 ? " in every layer" : "");
  const SummaryRow* best = smallest_good(rows);
  const SummaryRow* nearest = least_error(rows);
  const SummaryRow* usual = the_default(rows);
  std::string headline, details;
  if (best != nullptr) {
    headline = fmt::format("The smallest cache {}: <strong>{}</strong>, {:.2f} bits a value", under,
                           variant_text(best->mean), best->mean.bits_per_value);
    details = fmt::format("{} The relative L2 error of its attention output is {}.", size_text(best->mean),
                          error_text(*best, layers));
  } else if (nearest != nullptr) {
    headline = fmt::format("No compressed format that was measured stays {}", under);
    details = fmt::format("The least error has <strong>{}</strong>: {}, at {:.2f} bits a value.",
                          variant_text(nearest->mean), error_text(*nearest, layers), nearest->mean.bits_per_value);
  } else {
    headline = "No compressed format was measured";
    details = "Name some to compare, for example --formats tq6/tq4,tq4.";
  }
  if (usual != nullptr && best != nullptr && usual != best) {
    details += fmt::format(" The default, {}: {:.2f} bits a value, error {}, the same top key in {:.1f} % of the rows.",
                           variant_text(usual->mean), usual->mean.bits_per_value, error_text(*usual, layers),
                           100 * usual->mean.top1);
  } else if (usual != nullptr && usual == best) {
    details += " It is the library's default.";
  }
  return fmt::format("<div class=\"finding\"><p class=\"headline\">{}</p>\n<p>{}</p></div>\n", headline, details);
}

}  // namespace kvant::cli
