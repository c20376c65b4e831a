#include "cli/report_parts.hpp"

namespace kvant::cli {

// Tables and charts are whole on paper: landscape, smaller letters, nothing that scrolls.
const char* const kReportStyle = R"css(
:root { color-scheme: light dark; --back: #ffffff; --panel: #f6f7f9; --text: #1c2128; --faint: #5d6675; --line: #dde1e7;
        --s0: #1769c2; --s1: #c4561a; --s2: #2f8a4c; --mark: #fff3c9; --ring: #b58900; --hot: 214 84 20; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171c; --panel: #1d2229; --text: #e4e8ee; --faint: #97a1b0; --line: #343b46;
          --s0: #6cb1ff; --s1: #ff9d62; --s2: #6fd08c; --mark: #3a3313; --ring: #e6c04a; --hot: 240 120 50; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1360px; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 38px 0 4px; overflow-wrap: anywhere; }
p, dl, ul { max-width: 900px; } .faint { color: var(--faint); margin: 0 0 14px; } a { color: var(--s0); }
.finding { background: var(--panel); border-left: 4px solid var(--s0); border-radius: 6px; padding: 12px 18px;
           margin: 18px 0; }
.finding p { margin: 0; max-width: none; } .finding .headline { font-size: 19px; margin: 0 0 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px;
          margin: 12px 0; }
.charts svg { width: 100%; max-width: 640px; height: auto; background: var(--panel); border-radius: 8px; }
svg text { fill: var(--text); font-size: 12px; } svg .title { font-size: 15px; font-weight: 600; }
svg .tick { fill: var(--faint); } svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--faint); fill: none; }
svg .label { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; stroke-linejoin: round; }
svg .default-label { font-weight: 700; } svg .noise { font-weight: 700; }
td .noise { display: inline-block; width: 0.4em; }
svg .series0 { fill: var(--s0); stroke: var(--s0); } svg .series1 { fill: var(--s1); stroke: var(--s1); }
svg .series2 { fill: var(--s2); stroke: var(--s2); } svg .hollow { fill: var(--panel); stroke-width: 1.6; }
svg circle.hollow:not([class*="series"]) { stroke: var(--faint); }
svg .default { fill: none; stroke: var(--ring); stroke-width: 2; }
svg .link { stroke: var(--faint); stroke-width: 0.8; opacity: 0.7; }
svg .front { stroke: var(--faint); stroke-width: 1.8; stroke-dasharray: 6 4; fill: none; }
svg .guide { stroke: var(--s2); stroke-width: 1; stroke-dasharray: 2 3; }
.hint { display: none; color: var(--faint); font-size: 13px; margin: 0 0 4px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; width: fit-content; max-width: 100%;
          background: linear-gradient(var(--back), var(--back)) right / 16px 100% no-repeat local,
                      linear-gradient(to left, rgb(128 128 128 / 0.5), transparent) right / 14px 100% no-repeat
                      scroll; }
table { border-collapse: separate; border-spacing: 0; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 11px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
caption { display: none; } thead th { color: var(--faint); font-weight: 600; }
tr > :first-child { position: sticky; left: 0; text-align: left; background: var(--back);
                    border-right: 1px solid var(--line); }
tbody th { font-weight: 500; } .ends { color: var(--faint); font-weight: 400; }
tr.default > * { background: var(--mark); font-weight: 650; }
thead th.default { background: var(--mark); color: var(--text); }
td.heat { background: rgb(var(--hot) / var(--heat)); }
td.worst { outline: 2px solid var(--text); outline-offset: -2px; font-weight: 700; }
[colspan] { text-align: center; border-left: 1px solid var(--line); }
dt { color: var(--faint); float: left; clear: left; width: 90px; }
dd { margin: 0 0 3px 100px; overflow-wrap: anywhere; }
/* Where the page is narrower than its widest tables: closer columns and wrapped headings, and a word on the rest. */
@media (max-width: 1480px) {
  .hint { display: block; } th, td { padding: 4px 7px; } thead th { white-space: normal; vertical-align: bottom; }
}
@media (max-width: 560px) {
  body { padding: 16px 10px 40px; } th, td { padding: 4px 7px; } .ends { display: block; }
  tr > :first-child { max-width: 150px; overflow: hidden; text-overflow: ellipsis; }
}
@page { size: landscape; margin: 11mm; }
@media print {
  :root { color-scheme: light; --back: #ffffff; --panel: #ffffff; --text: #000000; --faint: #4a5260; --line: #c9ced6;
          --s0: #1769c2; --s1: #c4561a; --s2: #2f8a4c; --mark: #fff3c9; --ring: #b58900; --hot: 214 84 20; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 12px; }
  .hint { display: none; } .scroll { overflow: visible; max-width: none; background: none; }
  table { font-size: 10px; line-height: 1.25; } th, td { padding: 2px 6px; } h2 { margin-top: 22px; }
  tr > :first-child { position: static; max-width: none; }
  caption { display: table-caption; padding: 3px 6px; text-align: left; font-weight: 600; }
  .ends { display: inline; } thead { display: table-header-group; }
  h1, h2, h2 + p { break-after: avoid; } .keep, svg, tr, dl, .finding { break-inside: avoid; }
  .charts { grid-template-columns: repeat(3, 1fr); gap: 8px; } .charts svg { border: 1px solid var(--line); }
}
)css";

}  // namespace kvant::cli
