"""The HTML report's style sheet: light, dark and print."""

from __future__ import annotations

CSS = """\
:root {
  --paper: #ffffff; --ink: #1b1f24; --faint: #5c6670; --line: #d9dee3; --panel: #f5f7f9;
  --good: #1a7f37; --bad: #c0262d; --open: #8a5a00; --mark: #2f6fb2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e4e8ec; --faint: #9aa5b0; --line: #333a41; --panel: #1d2226;
    --good: #4cc271; --bad: #ff7b72; --open: #e0a840; --mark: #79b4f2;
  }
}
* { box-sizing: border-box; }
html { color-scheme: light dark; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 24px 20px 40px; }
code, pre { font: 0.9em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); padding: 12px; white-space: pre-wrap; }
h1 { font-size: 34px; line-height: 1.15; margin: 0; }
h2 { font-size: 20px; margin: 0 0 8px; }
h3 { font-size: 16px; margin: 20px 0 6px; }
header { border-left: 8px solid; padding: 4px 0 4px 18px; margin-bottom: 20px; }
header p { margin: 0; color: var(--faint); }
header p.reason { color: var(--ink); margin: 8px 0 0; overflow-wrap: anywhere; }
header.holds { border-color: var(--good); } header.holds h1 { color: var(--good); }
header.fails { border-color: var(--bad); } header.fails h1 { color: var(--bad); }
header.unjudged { border-color: var(--open); } header.unjudged h1 { color: var(--open); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0 0; }
dt { color: var(--faint); } dd { margin: 0; }
section { margin: 0 0 32px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; }
.card { background: var(--panel); border: 1px solid var(--line); border-top: 4px solid; padding: 12px 14px; }
.card h2 { font-size: 14px; color: var(--faint); font-weight: 600; margin: 0; }
.card p { margin: 0; color: var(--faint); font-size: 13px; }
.card p.value { font-size: 26px; line-height: 1.3; color: var(--ink); font-variant-numeric: tabular-nums; }
.card p.word { font-weight: 600; margin-top: 4px; }
.card.holds { border-top-color: var(--good); } .card.holds .word { color: var(--good); }
.card.fails { border-top-color: var(--bad); } .card.fails .word { color: var(--bad); }
.card.unjudged { border-top-color: var(--open); } .card.unjudged .word { color: var(--open); }
.alarm, .remark { border-left: 4px solid var(--bad); background: var(--panel); padding: 8px 12px; }
.alarm, .remark { overflow-wrap: anywhere; }
.remark { border-left-color: var(--open); }
figure { margin: 12px 0; }
figcaption { color: var(--faint); font-size: 13px; }
.key { margin-right: 16px; white-space: nowrap; }
.key i { display: inline-block; width: 22px; vertical-align: middle; border-top: 2px solid; margin-right: 3px; }
.key i.loudkey { width: 10px; height: 10px; border: 0; background: var(--bad); }
.key i.noisekey { border-top-style: dashed; border-color: var(--faint); }
.key i.atolkey { border-color: var(--open); }
.plot { width: 100%; height: auto; display: block; }
.plot text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--faint); }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .noise { fill: none; stroke: var(--faint); stroke-width: 1.2; stroke-dasharray: 5 4; }
.plot .atol { stroke: var(--open); stroke-width: 1.6; }
.plot .atolname { fill: var(--open); }
.plot .first { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 2 3; }
.plot .firstname { fill: var(--bad); font-weight: 600; }
.plot .quiet { fill: var(--mark); } .plot .loud { fill: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; font-size: 13px; white-space: nowrap; }
td code { overflow-wrap: break-word; }
td:last-child { min-width: 11em; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.loud td:first-child { box-shadow: inset 3px 0 var(--bad); padding-left: 9px; }
small.from, .from code { color: var(--faint); }
summary { cursor: pointer; color: var(--mark); margin: 10px 0; }
footer { margin-top: 24px; color: var(--faint); font-size: 13px; }
@media print {
  :root {
    --paper: #ffffff; --ink: #000000; --faint: #444444; --line: #bbbbbb; --panel: #ffffff;
    --good: #116329; --bad: #a40e14; --open: #6b4500; --mark: #1d4f86;
  }
  main { max-width: none; padding: 0; }
  header, .card, figure, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  * { print-color-adjust: exact; }
}
"""
