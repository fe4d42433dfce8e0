"""One trajectory on the screen: what a person reads, with colours and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.cli import main
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.show import Mark, marks_of, printable
from tests.data.random_sets import write_rows

GOLDEN = Path(__file__).parent / "golden_show.txt"
ROW = Trajectory(
    id="p\x1b[31m1",
    source_index=7,
    source="test",
    prompt_ids=[42, 75, 33],  # Hi?
    completion_ids=[67, 223, 68, 201, 130, 105, 62, 0],  # "a b", a line break, "é" of two tokens, a backslash, the end
    finish_reason="stop",
    window=6,
    target_source=TargetSource.GIVEN,
    blocks=[
        Block(
            0,
            [[90, 91, 68, 90, 130, 91], [67, 91, 68, 201, 130, 91], [67, 223, 92, 201, 130, 105]],
            None,
            [[67, 90, 90, 90, 130, 105]],
        ),
        Block(6, [[91, 91]], [62, 92]),
    ],
)


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    write_rows(tmp_path / "set", [ROW], model=str(tiny_checkpoint))
    return tmp_path / "set"


def test_what_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out == GOLDEN.read_text(encoding="utf-8")


def test_colours_are_for_terminals_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["show", str(folder)]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[32m" in coloured
    assert "\x1b[31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["show", str(folder)]) == 0
    assert "\x1b[32m" not in capsys.readouterr().out


def test_one_block_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder), "--id", ROW.id, "--block", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    [block] = shown["blocks"]
    assert (block["number"], block["start"], block["iterations"], block["fixed_point"]) == (1, 6, 1, [62, 92])
    assert [state["marks"] for state in block["states"]] == [["wrong"] * 2, ["final"] * 2]
    assert [state["ids"] for state in block["states"]] == [[91, 91], [62, 92]]


def test_what_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        (["--row", "1"], "show.row 1: no such trajectory"),
        (["--id", "x"], "show.id 'x'"),
        (["--block", "2"], "blocks 0 to 1"),
        (["--id", "x", "--row", "0"], "give id or row"),
        (["--tokenizer", "no/such/thing/"], "no/such/thing"),
    ):
        assert main(["show", str(folder), *flags]) == 2
        captured = capsys.readouterr()
        assert text in captured.err
        assert captured.out == ""


def test_without_its_tokenizer_ids_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "set", [ROW], model=str(tmp_path / "gone"))
    assert main(["show", str(tmp_path / "set")]) == 0
    captured = capsys.readouterr()
    assert "-<90> -<91> ~<68> -<90> ~<130> -<91>" in captured.out
    assert "give show.tokenizer" in captured.err


def test_marks() -> None:
    assert marks_of([1, 9, 3, 9], [1, 2, 3, 4]) == [Mark.FINAL, Mark.WRONG, Mark.EARLY, Mark.WRONG]
    assert marks_of([1, 2], [1, 2]) == [Mark.FINAL, Mark.FINAL]


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_printed(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
