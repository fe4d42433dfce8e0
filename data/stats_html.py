"""The report of jacobi-data stats as one HTML file: no script, no link, nothing that a browser would have to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jacobi_llm.data.stats import SetProfile
from jacobi_llm.data.store import Manifest

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 220, 56, 40, 10  # of a plot (pixels)
_MOST_BARS = 60
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 } td, th { border: 1px solid #ccc; padding: .2rem .6rem }
td { overflow-wrap: anywhere } th { text-align: left; font-weight: 600 } svg { max-width: 100%; height: auto }
rect { fill: #2a6f97 } text { font: 11px system-ui, sans-serif; fill: #444 } line { stroke: #999 }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd } td, th { border-color: #444 } text { fill: #bbb } rect { fill: #61a5c2 }
}
"""
_WORDS = """
Iterations: passes until the fixed point first appears. Tokens per forward: completion tokens over the passes of the
block procedure, prompt reading left aside. Fast-forwarded: tokens fixed beyond the one that every iteration fixes.
Stationary: tokens that are right while one before them is still wrong.
"""


def html_report(title: str, manifest: Manifest, report: Mapping[str, Any], profile: SetProfile) -> str:
    """The whole page.

    Args:
        title: heading.
        manifest: of the set.
        report: of :func:`jacobi_llm.data.stats.make_report`.
        profile: of the set, for the plots.
    """
    figures = {name: value for name, value in report.items() if not name.endswith("_histogram") and name != "by_window"}
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(figures),
        f"<p>{escape(_WORDS.strip())}</p>",
        *_windows(report.get("by_window", {})),
        bar_chart("Iterations per block", "iterations until the fixed point", "blocks", profile.iterations),
        bar_chart("Tokens fixed per iteration", "tokens fixed by one iteration", "iterations", profile.tokens_fixed),
        bar_chart("Completion lengths", "tokens", "completions", profile.lengths),
        *_section("Skipped prompts", manifest.num_skipped | manifest.bad_input),
        *_section("Cleaning", manifest.cleaning),
        *_section("Settings", manifest.settings),
        *_section("Versions", manifest.versions),
        *_section("The model was trained on", manifest.previous),
    ]
    for number, parent in enumerate(manifest.parents):
        parts += _section(f"Made of: {parent.get('name', number)}", parent)
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n'
        "</body></html>\n"
    )


def bar_chart(title: str, x_label: str, y_label: str, histogram: Mapping[int, int]) -> str:
    """A histogram as inline SVG; many values are gathered in bars of equal width."""
    if not histogram:
        return f"<h2>{escape(title)}</h2><p>none</p>"
    bars = _gathered(histogram)
    most = max(count for _, count in bars)
    plot_width, plot_height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM - _TOP
    step = plot_width / len(bars)
    drawn = []
    for index, (name, count) in enumerate(bars):
        height = plot_height * count / most
        x = _LEFT + index * step
        drawn.append(
            f'<rect x="{x + step * 0.08:.1f}" y="{_TOP + plot_height - height:.1f}" width="{step * 0.84:.1f}" '
            f'height="{height:.1f}"><title>{escape(name)}: {count}</title></rect>'
        )
        if index % -(-len(bars) // 16) == 0:
            drawn.append(_text(x + step / 2, _TOP + plot_height + 14, name, "middle"))
    base = _TOP + plot_height
    return (
        f'<h2>{escape(title)}</h2>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{"".join(drawn)}'
        f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH}" y2="{base}"/>'
        f"{_text(_LEFT - 6, _TOP + 10, str(most), 'end')}{_text(_LEFT - 6, base, '0', 'end')}"
        f"{_text(_LEFT - 6, _TOP + plot_height / 2, y_label, 'end')}"
        f"{_text(_LEFT + plot_width / 2, _HEIGHT - 6, x_label, 'middle')}</svg>"
    )


def _gathered(histogram: Mapping[int, int]) -> list[tuple[str, int]]:
    low, high = min(histogram), max(histogram)
    width = -(-(high - low + 1) // _MOST_BARS)
    bars = []
    for start in range(low, high + 1, width):
        name = str(start) if width == 1 else f"{start}-{start + width - 1}"
        bars.append((name, sum(histogram.get(value, 0) for value in range(start, start + width))))
    return bars


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _section(title: str, values: Mapping[str, Any]) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", _table(values)] if values else []


def _windows(by_window: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A column for each window, where the set has several."""
    if not by_window:
        return []
    names = list(next(iter(by_window.values())))
    head = _row("th", ["window", *by_window])
    rows = [_row("td", [_label(name), *(figures[name] for figures in by_window.values())]) for name in names]
    return ["<h2>By window</h2>", f"<table>{head}{''.join(rows)}</table>"]


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(_label(name))}</th><td>{escape(_shown(value))}</td></tr>" for name, value in values.items()
    )
    return f"<table>{rows}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(_shown(cell))}</{tag}>" for cell in cells) + "</tr>"


def _label(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) or "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
