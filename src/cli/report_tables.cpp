// Tables of the report. Their first column stays in sight when they are scrolled sideways, and so says both the format
// and what is exact.
#include <algorithm>
#include <cmath>

#include "cli/eval_cells.hpp"
#include "cli/report_parts.hpp"
#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "io/path.hpp"

namespace kvant::cli {
namespace {

struct Column {
  const char* title;
  const char* meaning;  // shown on hover
  std::string (*cell)(const SummaryRow&);
  bool is_in_layers = true, is_in_summary = true;
  double (*spread)(const EvalRow&) = nullptr;  // for times: the spread that the mark of noise stands for
};

std::string bf16_text(const SummaryRow& row) {
  return fmt::format("{:.1f} %",
                     100.0 * static_cast<double>(row.mean.cache_bytes) / static_cast<double>(row.mean.bf16_bytes));
}

const std::vector<Column> kColumns = {
    {"bits/value", "all that the cache holds, over the values stored",
     [](const SummaryRow& r) { return fmt::format("{:.2f}", r.mean.bits_per_value); }},
    {"in pages", "bits a value in encoded pages: the limit for long sequences",
     [](const SummaryRow& r) { return fmt::format("{:.2f}", r.mean.page_bits); }},
    {"cache", "all that the cache holds",
     [](const SummaryRow& r) { return bytes_text(static_cast<double>(r.mean.cache_bytes)); }},
    {"of bf16", "of a bf16 cache of the same tokens", bf16_text},
    {"rel. L2", "error of the attention output", [](const SummaryRow& r) { return small_number(r.mean.rel_l2); }},
    {"worst layer", "the largest relative L2 error of a layer",
     [](const SummaryRow& r) { return small_number(r.rel_l2_worst); }, false, true},
    {"worst cos", "the least cosine of an output row and the exact one",
     [](const SummaryRow& r) { return fmt::format("{:.5f}", r.mean.cosine_min); }},
    {"KL mean", "of the attention weights, nats", [](const SummaryRow& r) { return small_number(r.mean.kl_mean); }},
    {"KL max", "of the attention weights, nats", [](const SummaryRow& r) { return small_number(r.mean.kl_max); }},
    {"top-1", "rows whose largest weight is on the same key",
     [](const SummaryRow& r) { return fmt::format("{:.1f} %", 100 * r.mean.top1); }},
    {"time/token", "median of attending one query at the last position",
     [](const SummaryRow& r) { return time_text(r.mean.ns_per_token); }, true, false,
     [](const EvalRow& r) { return r.spread; }},
    {"of f16", "time of an f16 cache", [](const SummaryRow& r) { return fmt::format("{:.2f} x", r.mean.time_to_f16); },
     true, true, ratio_spread},
    {"basis", "coordinates in which vectors are quantised",
     [](const SummaryRow& r) { return escape_html(r.mean.basis); }},
};

// A table in a box that scrolls sideways, with a hint that narrow windows show and a caption that paper shows, where a
// table may stand on another page than its heading.
std::string scrolled(const std::string& table, const std::string& name, std::size_t columns) {
  return fmt::format(
      "<p class=\"hint\">The table has {} columns: scroll it sideways for those that the window cuts off.</p>\n"
      "<div class=\"scroll\" role=\"region\" tabindex=\"0\" "
      "aria-label=\"{}\"><table>\n<caption>{}</caption>{}</table></div>\n",
      columns, escape_html(name), escape_html(name), table);
}

std::string figures(const std::vector<SummaryRow>& rows, bool is_summary, const std::string& name) {
  std::string html = "<thead><tr><th scope=\"col\">keys/values</th>";
  std::size_t columns = 1;
  const auto has = [&](const Column& c) { return is_summary ? c.is_in_summary : c.is_in_layers; };
  const auto is_noisy = [](const Column& c, const EvalRow& row) {
    return c.spread != nullptr && c.spread(row) > kHighSpread;
  };
  for (const Column& column : kColumns) {
    if (!has(column)) continue;
    html += fmt::format("<th scope=\"col\" title=\"{}\">{}</th>", column.meaning, column.title);
    ++columns;
  }
  html += "</tr></thead>\n<tbody>\n";
  for (const SummaryRow& row : rows) {
    const bool is_default = row.mean.is_default();
    html += fmt::format("<tr{}><th scope=\"row\">{}{} <span class=\"ends\">{}</span></th>",
                        is_default ? " class=\"default\"" : "", row.mean.name(), is_default ? " *" : "",
                        ends_text(row.mean));
    for (const Column& column : kColumns) {
      if (!has(column)) continue;
      const bool is_any_noisy =
          std::ranges::any_of(rows, [&](const SummaryRow& r) { return is_noisy(column, r.mean); });
      html += "<td>" + column.cell(row);
      if (is_any_noisy) html += is_noisy(column, row.mean) ? " <b class=\"noise\">!</b>" : " <b class=\"noise\"></b>";
      html += "</td>";
    }
    html += "</tr>\n";
  }
  return scrolled(html + "</tbody>", name, columns);
}

// --- layers x formats ---------------------------------------------------------------------------------------------

const EvalRow* row_of(const LayerRows& layer, const EvalRow& variant) {
  const auto at = std::ranges::find_if(layer.rows, [&](const EvalRow& row) {
    return row.formats == variant.formats && row.has_exact_ends == variant.has_exact_ends &&
           row.k_centre == variant.k_centre;
  });
  return at == layer.rows.end() ? nullptr : &*at;
}

// The layer with the largest error of a variant; an error that is not a number is the largest.
std::size_t worst_layer(const std::vector<LayerRows>& layers, const EvalRow& variant) {
  std::size_t worst = 0;
  double most = -1;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const EvalRow* row = row_of(layers[i], variant);
    if (row == nullptr) continue;
    const double error = std::isnan(row->rel_l2) ? INFINITY : row->rel_l2;
    if (error > most) most = error, worst = i;
  }
  return worst;
}

// 0.05 at 0.1 % and below, 0.75 at 30 % and above, by the logarithm between.
double heat(double error) {
  if (std::isnan(error)) return 0.75;
  return 0.05 + 0.7 * std::clamp(std::log(std::max(error, 1e-9) / 1e-3) / std::log(0.3 / 1e-3), 0.0, 1.0);
}

std::string percent_cell(double error) {
  const double percent = 100 * error;
  if (!std::isfinite(percent)) return fmt::format("{}", percent);
  if (percent > 0 && percent < 0.01) return "&lt;0.01";
  return fmt::format("{:.{}f}", percent, percent < 10 ? 2 : percent < 100 ? 1 : 0);
}

std::string short_name(const LayerRows& layer, bool has_one_file) {
  const EvalRow& row = layer.rows.front();
  if (has_one_file) return row.layer_name;
  return io::file_name(row.file) + ": " + row.layer_name;
}

}  // namespace

std::string layer_table_html(const LayerRows& layer) {
  std::vector<SummaryRow> alone;
  for (const EvalRow& row : layer.rows) alone.push_back({row, row.rel_l2});
  return figures(alone, false, layer.title);
}

std::string summary_table_html(const std::vector<SummaryRow>& rows) {
  return figures(rows, true, "All layers");
}

std::string overview_html(const std::vector<LayerRows>& layers) {
  std::vector<EvalRow> variants = layers.front().rows;
  std::ranges::stable_sort(variants, {}, [](const EvalRow& r) {
    return r.formats.is_dense() ? 0 : r.has_exact_ends ? 1 : 2;
  });
  const bool has_one_file = std::ranges::all_of(
      layers, [&](const LayerRows& l) { return l.rows.front().file == layers.front().rows.front().file; });

  std::string groups = "<tr><th></th>", names = "<tr><th scope=\"col\">layer</th>";
  std::vector<std::size_t> worst;
  const EvalRow* spoken = nullptr;  // the sentence's subject: the default, or else the first compressed one
  for (std::size_t i = 0; i < variants.size();) {
    std::size_t end = i;
    while (end < variants.size() && ends_text(variants[end]) == ends_text(variants[i])) ++end;
    groups += fmt::format("<th scope=\"colgroup\" colspan=\"{}\">{}</th>", end - i, ends_text(variants[i]));
    for (; i < end; ++i) {
      const EvalRow& v = variants[i];
      const bool is_default = v.is_default();
      names += fmt::format("<th scope=\"col\"{}>{}{}</th>", is_default ? " class=\"default\"" : "", v.name(),
                           is_default ? " *" : "");
      worst.push_back(worst_layer(layers, v));
      if (v.formats.is_dense()) continue;
      if (spoken == nullptr || (is_default && !spoken->is_default())) spoken = &v;
    }
  }
  std::string html = "<thead>" + groups + "</tr>\n" + names + "</tr></thead>\n<tbody>\n";
  for (std::size_t l = 0; l < layers.size(); ++l) {
    html += fmt::format("<tr><th scope=\"row\"><a href=\"#layer-{}\">{}</a></th>", l,
                        escape_html(short_name(layers[l], has_one_file)));
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const EvalRow* row = row_of(layers[l], variants[i]);
      if (row == nullptr) {
        html += "<td></td>";
        continue;
      }
      std::string classes = worst[i] == l && !variants[i].formats.is_dense() ? "heat worst" : "heat";
      if (variants[i].is_default()) classes += " default";
      html += fmt::format("<td class=\"{}\" style=\"--heat:{:.2f}\">{}</td>", classes, heat(row->rel_l2),
                          percent_cell(row->rel_l2));
    }
    html += "</tr>\n";
  }
  std::string sentence =
      "Relative L2 error of the attention output in %, in a stronger colour where larger; the worst layer of each "
      "compressed "
      "format is framed.";
  if (spoken != nullptr) {
    const LayerRows& layer = layers[worst_layer(layers, *spoken)];
    sentence += fmt::format(" {} ({}) is worst in <strong>{}</strong>: {}.",
                            spoken->is_default() ? "The default" : "The first compressed format", variant_text(*spoken),
                            escape_html(short_name(layer, has_one_file)), percent_text(row_of(layer, *spoken)->rel_l2));
  }
  return "<p class=\"faint\">" + sentence + "</p>\n" +
         scrolled(html + "</tbody>", "Error of each layer with each format", variants.size() + 1);
}

}  // namespace kvant::cli
