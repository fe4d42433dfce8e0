"""The coloured view of an answer."""

from __future__ import annotations

import re

import pytest

from jacobi_llm.infer.view import render_ansi, render_html

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_ansi_colours_by_pass_and_counts() -> None:
    shown = render_ansi(["Hi", " the", "re", "."], [1, 2, 1], colour=True)
    body, legend = shown.split("\n")
    assert ESCAPE.sub("", body) == "Hi there."
    assert re.findall(r"48;5;(\d+)m", body)[0] != re.findall(r"48;5;(\d+)m", body)[1]
    assert body.count("\x1b[0m") == 3
    assert legend == "3 passes, 4 tokens, TPF 1.33 (one colour per pass)"


def test_a_background_never_runs_over_a_line_break() -> None:
    for line in render_ansi(["a\n", "\nb"], [2], colour=True).split("\n"):
        assert not ESCAPE.search(line) or line.endswith("\x1b[0m")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in render_ansi(["a", "b"], [1, 1])
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in render_ansi(["a", "b"], [1, 1])
    monkeypatch.setenv("NO_COLOR", "1")
    shown = render_ansi(["a", "b", "c"], [1, 2])
    assert "\x1b" not in shown
    assert shown.startswith("a|bc\n2 passes, 3 tokens, TPF 1.50")


def test_text_cannot_steer_the_terminal_or_the_page() -> None:
    hostile = "\x1b[2J\x07\x9b<script>&"
    shown = render_ansi([hostile], [1], colour=False)
    assert not any(char in shown for char in "\x1b\x07\x9b")
    page = render_html([hostile], [1], title="<b>")
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;" in page
    assert "<title>&lt;b&gt;</title>" in page


def test_html_is_self_contained_and_names_the_passes() -> None:
    page = render_html(["你", "好", "!"], [1, 2])
    assert 'title="pass 1: 1 token">你</span>' in page
    assert 'title="pass 2: 2 tokens">好!</span>' in page
    assert "2 passes, 3 tokens, TPF 1.50" in page
    assert not re.search(r"(src|href)=|https?://", page)


def test_lengths_must_add_up() -> None:
    for render in (render_ansi, render_html):
        with pytest.raises(ValueError, match="2 tokens, but 3 texts"):
            render(["a", "b", "c"], [1, 1])


def test_nothing_decoded_is_no_division_by_zero() -> None:
    assert "0 passes, 0 tokens, TPF -" in render_ansi([], [], colour=False)
