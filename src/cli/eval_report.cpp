// The HTML report of `kvant eval`: one page, no external resource, light, dark and on paper. Text of files (paths,
// layer names) is escaped where it enters.
#include "cli/eval.hpp"
#include "cli/eval_cells.hpp"
#include "cli/report_parts.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "kvant/version.hpp"

namespace kvant::cli {
namespace {

std::string facts(const EvalRun& run) {
  std::string html = "<h2>This run</h2>\n<dl>\n";
  const auto fact = [&](const char* name, const std::string& value) {
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, escape_html(value));
  };
  fact("Command", run.command_line);
  fact("Run", fmt::format("{}, {:.1f} s", run.started, run.seconds));
  fact("kvant", fmt::format("{} ({})", kVersion, run.machine.compiler));
  fact("Machine", machine_line(run.machine));
  fact("Kernels", fmt::format("cpu, {}, {} thread{}", run.settings.isa, run.settings.threads,
                              run.settings.threads == 1 ? "" : "s"));
  fact("Basis", run.basis_file.empty() ? "the default of each format" : run.basis_file);
  return html + "</dl>\n";
}

// A heading stays on one printed page with what follows it.
std::string section(const std::string& heading, const std::string& line, const std::string& charts) {
  return "<div class=\"keep\">" + heading + "\n<p class=\"faint\">" + line + "</p>\n" + charts + "</div>\n";
}

}  // namespace

std::string eval_report(const std::vector<EvalRow>& rows, const EvalRun& run) {
  std::string html =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>kvant eval</title>\n<style>";
  html += kReportStyle;
  html +=
      "</style>\n</head>\n<body>\n<h1>What each cache format costs</h1>\n"
      "<p class=\"faint\">Decoding replayed over captured queries, keys and values: each query is attended right after "
      "the keys up to its own position were appended.</p>\n";

  const std::vector<LayerRows> groups = group_by_layer(rows);
  const std::vector<SummaryRow> summary = summarise(rows);
  html += finding_html(summary, groups.size());
  const std::string better = "Lower left is better in every chart. ";
  if (groups.size() > 1) {
    std::vector<EvalRow> means;
    for (const SummaryRow& row : summary) means.push_back(row.mean);
    html +=
        section("<h2>Summary</h2>", better + fmt::format("Mean of {} layers; worst where it says so.", groups.size()),
                charts_html(means));
    html += summary_table_html(summary);
    html += "<h2>Layers</h2>\n" + overview_html(groups);
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    html += section(fmt::format("<h2 id=\"layer-{}\">{}</h2>", i, escape_html(groups[i].title)),
                    (groups.size() > 1 ? "" : better) + escape_html(run.layer_lines[i]), charts_html(groups[i].rows));
    html += layer_table_html(groups[i]);
  }

  html += "<h2>How to read this</h2>\n<ul>\n";
  for (const std::string& line : legend_lines(rows)) html += "<li>" + escape_html(line) + "</li>\n";
  const auto has = [&](const char* part) { return html.find(part) != std::string::npos; };
  if (has("class=\"link\"")) {
    html += "<li>Charts: a thin line connects one format with exact ends and all encoded.</li>\n";
  }
  if (has("class=\"front\"")) {
    html += "<li>Charts: the Pareto line joins the compressed formats that no smaller one beats.</li>\n";
  }
  html += "</ul>\n";
  return html + facts(run) + "</body>\n</html>\n";
}

}  // namespace kvant::cli
