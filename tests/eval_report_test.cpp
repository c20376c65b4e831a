// The HTML report of `kvant eval`: what the finding says, what every table and chart has, and that text of files stays
// text. All expected values are worked out by hand from the rows.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "cli/chart_axis.hpp"
#include "cli/eval.hpp"
#include "cli/svg_chart.hpp"

namespace kvant::cli {
namespace {

constexpr FormatPair kF16{Format::f16, Format::f16}, kTq8{Format::tq8, Format::tq8}, kTq5{Format::tq5, Format::tq5},
    kTq4{Format::tq4, Format::tq4};

// bf16 takes 16000 bytes, so that 6700 bytes are 6.70 bits a value.
EvalRow row(int layer, FormatPair formats, bool has_exact_ends, std::int64_t bytes, double rel_l2) {
  EvalRow r;
  r.file = "model.safetensors";
  r.layer_name = "layer" + std::to_string(layer);
  r.layer = layer;
  r.formats = formats;
  r.k_centre = default_centre(formats);
  r.has_exact_ends = has_exact_ends;
  r.basis = "hadamard";
  r.cache_bytes = bytes;
  r.bf16_bytes = 16000;
  r.bits_per_value = static_cast<double>(bytes) / 1000;
  r.page_bits = 5.25;
  r.rel_l2 = rel_l2;
  r.kl_mean = rel_l2 * rel_l2;
  r.kl_max = 1;
  r.top1 = 0.975;
  r.ns_per_token = 1000;
  r.time_to_f16 = 0.5;
  return r;
}

std::string report(const std::vector<EvalRow>& rows, const std::string& line = "8 q heads") {
  EvalRun run;
  run.command_line = "kvant eval model.safetensors";
  run.layer_lines.assign(group_by_layer(rows).size(), line);
  return eval_report(rows, run);
}

// Two layers. tq5 is smaller than the default, but only its mean is under 2 %.
std::vector<EvalRow> two_layers() {
  return {row(3, kF16, true, 16000, 4e-7),          row(3, kTq8, true, 9400, 0.002),
          row(3, kTq5, true, 6600, 0.010),          row(3, kDefaultPair, true, 6700, 0.015),
          row(3, kDefaultPair, false, 5100, 0.080), row(3, kTq4, false, 4100, 0.105),
          row(7, kF16, true, 16000, 5e-7),          row(7, kTq8, true, 9400, 0.001),
          row(7, kTq5, true, 6600, 0.021),          row(7, kDefaultPair, true, 6700, 0.019),
          row(7, kDefaultPair, false, 5100, 0.060), row(7, kTq4, false, 4100, 0.125)};
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

// The texts between `open` and `close`.
std::vector<std::string> parts(const std::string& text, const std::string& open, const std::string& close) {
  std::vector<std::string> found;
  for (std::size_t at = text.find(open); at != std::string::npos; at = text.find(open, at + 1)) {
    found.push_back(text.substr(at, text.find(close, at) - at));
  }
  return found;
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (part)
#define EXPECT_LACKS(text, part) EXPECT_EQ((text).find(part), std::string::npos) << (part)

// --- the finding --------------------------------------------------------------------------------------------------

TEST(EvalReport, FindsTheSmallestCacheThatIsGoodInEveryLayer) {
  const std::string page = report(two_layers());
  EXPECT_HAS(page,
             "The smallest cache under 2 % error in every layer: <strong>tq6/tq4 with exact ends</strong>, 6.70 bits a "
             "value");
  EXPECT_HAS(page, "It takes 41.9 % of a bf16 cache at this length");
  EXPECT_HAS(page, "take 5.25 bits a value");
  EXPECT_HAS(page, "is 1.70 % on average, 1.90 % in the worst layer. It is the library's default.");
}

TEST(EvalReport, OfOneLayerSpeaksOfNoOther) {
  const std::string page = report({row(3, kTq8, true, 9400, 0.002), row(3, kTq4, false, 4100, 0.105)});
  EXPECT_HAS(page, "The smallest cache under 2 % error: <strong>tq8 with exact ends</strong>, 9.40 bits a value");
  EXPECT_HAS(page, "attention output is 0.20 %.");
  EXPECT_LACKS(page, "in every layer");
  EXPECT_LACKS(page, "<h2>Layers</h2>");
}

TEST(EvalReport, PutsTheDefaultBesideASmallerOne) {
  const std::string page = report({row(3, kTq5, false, 5000, 0.012), row(3, kDefaultPair, false, 5100, 0.080),
                                   row(3, kDefaultPair, true, 6700, 0.015)});
  EXPECT_HAS(page, "<strong>tq5 all encoded</strong>, 5.00 bits a value");
  EXPECT_HAS(page,
             "The default, tq6/tq4 with exact ends: 6.70 bits a value, error 1.50 %, the same top key in 97.5 % of the "
             "rows.");
}

TEST(EvalReport, SaysWhenNoFormatIsGoodEnough) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string none = report({row(3, kF16, true, 16000, 4e-7), row(3, kTq4, true, 5700, 0.020),
                                   row(3, kTq4, false, 4100, 0.105), row(3, kTq8, true, 9400, nan)});
  EXPECT_HAS(none, "No compressed format that was measured stays under 2 % error<");
  EXPECT_HAS(none, "The least error has <strong>tq4 with exact ends</strong>: 2.00 %, at 5.70 bits a value.");
  EXPECT_HAS(report({row(3, kF16, true, 16000, 4e-7)}), "No compressed format was measured");
}

// --- tables -------------------------------------------------------------------------------------------------------

TEST(EvalReport, EveryTableHasEveryFormatAndMarksTheDefault) {
  const std::vector<std::string> tables = parts(report(two_layers()), "<table>", "</table>");
  ASSERT_EQ(tables.size(), 4u);  // summary, layers x formats, two layers
  for (const std::string& table : tables) {
    for (const char* name : {">f16", ">tq8", ">tq5", ">tq6/tq4 *", ">tq4"}) EXPECT_HAS(table, name);
    EXPECT_HAS(table, "exact ends");
    EXPECT_HAS(table, "all encoded");
  }
  for (const int figures : {0, 2, 3}) {
    EXPECT_EQ(count(tables[figures], "<tr class=\"default\">"), 2u);
    EXPECT_EQ(count(tables[figures], "<th scope=\"row\">"), 6u);
    const std::size_t columns = count(tables[figures], "<th scope=\"col\"");
    EXPECT_EQ(columns, 13u);
    EXPECT_EQ(count(tables[figures], "<td>"), 6 * (columns - 1));
  }
  EXPECT_HAS(tables[2], "<caption>model.safetensors: layer3</caption>");  // on paper it may stand without its heading
  EXPECT_HAS(tables[0], "<td>0.0170</td><td>0.0190</td>");                // mean and worst error of the default
}

// As the terminal's tables: a mark behind each time whose spread is large, a note only where there is a mark.
TEST(EvalReport, MarksTimesThatSpread) {
  std::vector<EvalRow> rows = two_layers();
  const std::string mark = "!</b></td>", note = "<li>!: the times behind this figure spread by more than 10 %";
  const std::string calm = report(rows);
  EXPECT_LACKS(calm, mark);
  EXPECT_LACKS(calm, note);
  EXPECT_LACKS(calm, "class=\"noise\"");
  rows[3].spread = 0.2;  // the default with exact ends in layer3
  for (EvalRow& r : rows) r.f16_spread = r.layer == 7 ? 0.3 : 0.05;
  const std::string noisy = report(rows);
  EXPECT_HAS(noisy, note);
  const std::vector<std::string> tables = parts(noisy, "<table>", "</table>");
  EXPECT_EQ(count(tables[0], mark), 6u);  // the column "of f16": layer7's f16 is behind each mean
  EXPECT_EQ(count(tables[2], mark), 2u);  // time and ratio of one row
  EXPECT_EQ(count(tables[3], mark), 6u);  // the column "of f16"
  const std::vector<std::string> charts = parts(noisy, "<svg", "</svg>");
  ASSERT_EQ(charts.size(), 9u);  // three each of the summary and two layers; one more mark in the chart's own legend
  for (std::size_t i = 0; i < charts.size(); ++i) {
    const std::size_t marks = count(charts[i], ">!</text>");
    EXPECT_EQ(marks, i == 2 ? 7u : i == 5 ? 2u : i == 8 ? 7u : 0u) << i;
    EXPECT_EQ(count(charts[i], "noisy time"), marks > 0 ? 1u : 0u) << i;
  }
  EXPECT_EQ(count(charts[5], "x the time of f16 !</title>"), 1u);
}

TEST(EvalReport, ExplainsWhatItHasAndNoMore) {
  const std::string all = report(two_layers());
  for (const char* line :
       {"<li>* the library", "<li>exact ends:", "<li>all encoded:", "<li>page:", "thin line", "Pareto line"})
    EXPECT_HAS(all, line);
  const std::string encoded = report({row(3, kF16, true, 16000, 4e-7), row(3, kTq4, false, 4100, 0.1)});
  EXPECT_HAS(encoded, "<li>all encoded:");
  for (const char* line : {"<li>* the library", "<li>exact ends:", "thin line", "Pareto line"})
    EXPECT_LACKS(encoded, line);
  EXPECT_LACKS(encoded, ">exact ends</text>");  // in charts
  EXPECT_HAS(encoded, ">not compressed</text>");
  EXPECT_LACKS(report({row(3, kTq8, true, 9400, 0.002)}), ">not compressed</text>");
}

TEST(EvalReport, ShowsTheWorstLayerOfEachFormat) {
  const std::string page = report(two_layers());
  EXPECT_HAS(page, "The default (tq6/tq4 with exact ends) is worst in <strong>layer7</strong>: 1.90 %.");
  const std::vector<std::string> rows = parts(parts(page, "<h2>Layers</h2>", "</table>")[0], "<tr>", "</tr>");
  ASSERT_EQ(rows.size(), 4u);  // ends, formats, two layers
  const auto cells = [](const std::string& text) {
    std::vector<std::string> found;
    for (const std::string& cell : parts(text, "<td", "</td>")) {
      found.push_back((cell.find("worst") != std::string::npos ? "!" : "") + cell.substr(cell.find('>') + 1));
    }
    return found;
  };
  // f16; with exact ends tq8, tq5, tq6/tq4; all encoded tq6/tq4, tq4
  EXPECT_EQ(cells(rows[2]), (std::vector<std::string>{"&lt;0.01", "!0.20", "1.00", "1.50", "!8.00", "10.5"}));
  EXPECT_EQ(cells(rows[3]), (std::vector<std::string>{"&lt;0.01", "0.10", "!2.10", "!1.90", "6.00", "!12.5"}));
  EXPECT_HAS(rows[2], "<a href=\"#layer-0\">layer3</a>");
  EXPECT_HAS(rows[3], "<a href=\"#layer-1\">layer7</a>");
  EXPECT_HAS(page, "<h2 id=\"layer-1\">model.safetensors: layer7</h2>");
  // 0.1 % and less is the faintest, 30 % and more the darkest; sqrt(0.001 * 0.3) = 1.732 % lies in the middle.
  const std::string heats =
      report({row(1, kTq4, true, 5000, 0.0001), row(2, kTq4, true, 5000, 0.0173205), row(3, kTq4, true, 5000, 7.0)});
  for (const char* heat : {"--heat:0.05", "--heat:0.40", "--heat:0.75"}) EXPECT_HAS(heats, heat);
}

// --- charts -------------------------------------------------------------------------------------------------------

TEST(EvalReport, EveryChartLabelsTheDefaultAndConnectsItsPoints) {
  const std::vector<std::string> charts = parts(report(two_layers()), "<svg", "</svg>");
  ASSERT_EQ(charts.size(), 9u);
  for (const std::string& chart : charts) {
    EXPECT_EQ(count(chart, "<text class=\"label default-label\""), 1u);
    EXPECT_EQ(count(chart, "<circle class=\"default\""), 3u);  // two points and the legend
    EXPECT_EQ(count(chart, "<path class=\"link\""), 1u);       // tq6/tq4 alone was measured twice
  }
  EXPECT_EQ(count(charts[0], "class=\"front\""), 2u);  // legend and line
  EXPECT_EQ(count(charts[2], "class=\"front\""), 0u);  // time is no matter of size alone
}

TEST(EvalReport, TheDefaultIsLabelledWhereThereIsNoRoom) {
  std::vector<EvalRow> rows;
  for (int i = 0; i < 400; ++i) {  // a carpet of points
    rows.push_back(row(3, kTq4, true, 4000 + 300 * (i % 20), 0.01 * std::pow(1.2, i / 20)));
  }
  rows.push_back(row(3, kDefaultPair, true, 6700, 0.04));
  for (const std::string& chart : parts(report(rows), "<svg", "</svg>")) {
    EXPECT_EQ(count(chart, "<text class=\"label default-label\""), 1u);
  }
}

TEST(EvalReport, HollowPointsAreExplainedWhereThereAreAny) {
  const std::vector<std::string> with = parts(report(two_layers()), "<svg", "</svg>");
  EXPECT_HAS(with[0], "hollow = below the scale");
  EXPECT_EQ(count(with[0], "class=\"series2 hollow\""), 1u);
  EXPECT_HAS(with[0], ">f16: 4.5e-7</text>");  // the mean of 4e-7 and 5e-7
  EXPECT_LACKS(with[2], "hollow");             // f16 has a time like the others
  EXPECT_LACKS(parts(report({row(3, kTq4, true, 5700, 0.02)}), "<svg", "</svg>")[0], "hollow");
}

TEST(EvalReport, ParetoFrontHasWhatNothingSmallerBeats) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto at = [](double x, double y) { return ChartPoint{x, y, "", "", false}; };
  const std::vector<ChartPoint> front = pareto_front(
      {at(5, 0.05), at(4, 0.1), at(6, 0.06), at(8, 0.01), at(4, 0.2), at(9, 0.01), at(3, nan), at(2, 0), at(0, 0.1)});
  std::vector<std::pair<double, double>> points;
  for (const ChartPoint& p : front) points.emplace_back(p.x, p.y);
  EXPECT_EQ(points, (std::vector<std::pair<double, double>>{{4, 0.1}, {5, 0.05}, {8, 0.01}}));
}

TEST(EvalReport, AxesEndNearThePointsAndHaveRoundTicks) {
  const auto ticks = [](const LogAxis& axis) {
    std::string text;
    for (const double tick : axis.ticks) text += tick_text(tick) + " ";
    return text;
  };
  const LogAxis bits = log_axis(2.8, 17, 9);
  EXPECT_EQ(bits.low, 2.8);
  EXPECT_EQ(bits.high, 17);
  EXPECT_EQ(ticks(bits), "3 4 5 6 8 10 12 16 ");
  EXPECT_NEAR(bits.place(std::sqrt(2.8 * 17)), 0.5, 1e-12);
  EXPECT_EQ(ticks(log_axis(4e-6, 0.5, 8)), "1e-5 1e-4 0.001 0.01 0.1 ");
  EXPECT_EQ(ticks(log_axis(0.004, 0.4, 8)), "0.005 0.01 0.02 0.03 0.05 0.1 0.2 0.3 ");
  const LogAxis one = log_axis(5, 5, 9);  // a single point lies in the middle of a factor of 2
  EXPECT_NEAR(one.high / one.low, 2, 1e-12);
  EXPECT_NEAR(one.place(5), 0.5, 1e-12);
  EXPECT_LE(log_axis(1e-30, 1e30, 8).ticks.size(), 8u);
  EXPECT_GE(log_axis(1e-30, 1e30, 8).ticks.size(), 4u);
}

TEST(EvalReport, OddNumbersLeaveAWholePage) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const double odd : {inf, nan, 0.0, 1e300, 5e-324, -1.0}) {
    std::vector<EvalRow> rows = two_layers();
    rows[1].rel_l2 = rows[7].rel_l2 = rows[3].kl_mean = rows[4].time_to_f16 = odd;
    const std::string page = report(rows);
    EXPECT_EQ(count(page, "<svg"), 9u);
    for (const std::string& chart : parts(page, "<svg", "</svg>")) {
      for (const std::string& place : parts(chart, " d=\"", "/>")) {
        EXPECT_LACKS(place, "nan");
        EXPECT_LACKS(place, "inf");
      }
    }
  }
}

// --- the page -----------------------------------------------------------------------------------------------------

// Tags that are open at the end, or a closing tag that does not fit.
std::string unbalanced(const std::string& page) {
  std::vector<std::string> open;
  const std::string body = std::regex_replace(page, std::regex("<style>[^<]*</style>"), "");
  const std::regex tag("<(/?)([a-z0-9]+)[^<>]*?(/?)>");
  for (auto at = std::sregex_iterator(body.begin(), body.end(), tag); at != std::sregex_iterator(); ++at) {
    const std::string name = (*at)[2];
    if (name == "meta" || (*at)[3].length() > 0) continue;
    if ((*at)[1].length() == 0) {
      open.push_back(name);
      continue;
    }
    if (open.empty() || open.back() != name)
      return "</" + name + "> closes " + (open.empty() ? "nothing" : open.back());
    open.pop_back();
  }
  return open.empty() ? "" : open.back() + " stays open";
}

TEST(EvalReport, TextOfFilesStaysText) {
  std::vector<EvalRow> rows = two_layers();
  const std::string hostile = "<script>alert(\"x\")</script>&amp;\"><img onerror=y>";
  for (EvalRow& r : rows) {
    r.file = hostile;
    r.layer_name += hostile;
    r.basis = hostile;
  }
  rows.back().file = rows.back().file + "2";  // several files: the overview names them, too
  EvalRun run;
  run.command_line = run.basis_file = run.machine.compiler = run.settings.isa = run.started = hostile;
  run.layer_lines.assign(group_by_layer(rows).size(), hostile);
  const std::string page = eval_report(rows, run);
  EXPECT_LACKS(page, "<script");
  EXPECT_LACKS(page, "<img");
  EXPECT_LACKS(page, "\"><img");
  EXPECT_HAS(page, "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;amp;&quot;&gt;&lt;img onerror=y&gt;");
  EXPECT_EQ(unbalanced(page), "");
}

TEST(EvalReport, IsOneWholePageForScreensAndPaper) {
  const std::string page = report(two_layers());
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(unbalanced(page), "");
  for (const char* outside : {"http", "src=", "url(", "@import", "<link", "<script"}) EXPECT_LACKS(page, outside);
  const std::string print = page.substr(page.find("@media print"));
  EXPECT_HAS(page, "@media (prefers-color-scheme: dark)");
  EXPECT_HAS(page, "@page { size: landscape");
  EXPECT_HAS(print, ".scroll { overflow: visible; max-width: none;");  // no column is cut
  EXPECT_HAS(print, ".keep, svg, tr, dl, .finding { break-inside: avoid; }");
  // A heading and its charts are one block that a page break does not part.
  const std::vector<std::string> kept = parts(page, "<div class=\"keep\">", "</div>");
  ASSERT_EQ(kept.size(), 3u);
  for (const std::string& block : kept) {
    EXPECT_EQ(count(block, "<h2"), 1u);
    EXPECT_EQ(count(block, "<svg"), 3u);
  }
  // A part that scrolls sideways says so, can be reached by keyboard, and keeps its first column.
  EXPECT_EQ(count(page, "<div class=\"scroll\" role=\"region\" tabindex=\"0\""), 4u);
  EXPECT_EQ(count(page, "columns: scroll it sideways for those"), 4u);
  EXPECT_HAS(page, "tr > :first-child { position: sticky; left: 0;");
}

}  // namespace
}  // namespace kvant::cli
