"""jacobi-data as a person runs it: outputs, exit codes, one line per fault."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jacobi_llm.data import collection, validate
from jacobi_llm.data.cli import main
from jacobi_llm.data.store import MANIFEST, Manifest, read_trajectories
from jacobi_llm.infer.models import LoadedModel

LoadedFactory = Callable[..., LoadedModel]


@pytest.fixture(autouse=True)
def tiny(tiny_loaded: LoadedFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("llama", torch.float64)
    monkeypatch.setattr(collection, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(validate, "load_model", lambda *_, **__: loaded)


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    flags = ["--input", str(tmp_path / "p.jsonl"), "--split", "all", "--raw", "--dtype", "float64", "--max-tokens", "9"]
    return ["collect", *flags, "--window", "4", "--shard-size", "2", "--output", str(tmp_path / "set")]


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def test_the_road(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "set")
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_trajectories"], report["num_shards"], report["skipped"]) == (3, 2, {})
    assert report["data_sha256"] == Manifest.read(tmp_path / "set").data_sha256
    assert "output: " in (tmp_path / "set" / "config.yaml").read_text()

    assert main(["stats", "--path", folder, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    rows = list(read_trajectories(tmp_path / "set"))
    assert (stats["trajectories"], stats["blocks"]) == (3, sum(len(row.blocks) for row in rows))
    assert stats["completion_tokens"] == sum(len(row.completion_ids) for row in rows)
    assert main(["stats", "--path", folder, "--png", str(tmp_path / "s.png")]) == 0
    assert "iterations  blocks" in capsys.readouterr().out
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")

    assert main(["validate", "--path", folder, "--rerun", "2", "--json"]) == 0
    validated = json.loads(capsys.readouterr().out)
    assert validated["ok"]
    assert validated["rerun"]["num_trajectories"] == 2
    assert validated["rerun"]["num_differing"] == 0

    assert main(argv) == 0  # nothing is left to do
    assert "3 trajectories in 2 of 2 shards" in capsys.readouterr().err


def test_no_progress_bar_but_on_a_terminal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert "\r" not in err
    assert len(err.splitlines()) == 2  # what was read, what was written


def test_a_dry_run_writes_nothing(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--dry-run"]) == 0
    assert "would collect 3 prompts" in capsys.readouterr().out
    assert main([*argv, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_shards"] == 2
    assert not (tmp_path / "set").exists()


def test_a_broken_line_stops_or_is_counted(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n{"prompt": "three"}\n')
    assert main(argv) == 2
    assert any("p.jsonl" in line and "2" in line for line in error_lines(capsys))
    assert not (tmp_path / "set" / MANIFEST).exists()
    assert main([*argv, "--on-bad-input", "skip"]) == 0
    assert Manifest.read(tmp_path / "set").bad_input == {"broken JSON": 1}
    assert "skipped 1: broken JSON" in capsys.readouterr().err


def test_a_refused_run_leaves_the_set_as_it_was(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    capsys.readouterr()
    assert main([*argv, "--window", "5"]) == 2
    [line] = error_lines(capsys)
    assert "window: [4] there, [5] now" in line
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before


@pytest.mark.parametrize("command", ["collect", "stats", "validate"])
@pytest.mark.parametrize("content", [b"", b'{"schema_version": 1, "shards"', b"\xff\xfe", b"[]"])
def test_a_damaged_manifest_is_one_line(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / MANIFEST).write_bytes(content)
    assert main(argv if command == "collect" else [command, "--path", str(tmp_path / "set")]) == 1
    [line] = error_lines(capsys)
    assert "manifest.json: damaged manifest" in line
    assert (tmp_path / "set" / MANIFEST).read_bytes() == content


def test_a_damaged_shard_stops_stats_and_is_listed_by_validate(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    path = tmp_path / "set" / "shard-00001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    capsys.readouterr()
    for command in ("stats", "validate"):
        assert main([command, "--path", str(tmp_path / "set")]) == 1
        [line] = error_lines(capsys)
        assert "shard-00001.parquet: damaged" in line
        assert "only what is missing or damaged is done" in line
    assert main(argv) == 0
    assert path.read_bytes() == content


def test_an_output_that_is_no_folder(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").write_text("a file")
    assert main(argv) == 2
    [line] = error_lines(capsys)
    assert "collect.output" in line


@pytest.mark.parametrize("command", ["stats", "validate"])
def test_no_set_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--path", str(tmp_path)]) == 2
    [line] = error_lines(capsys)
    assert "jacobi-data collect" in line


def test_a_png_without_matplotlib_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert main(["stats", "--path", str(tmp_path), "--png", "x.png"]) == 2
    [line] = error_lines(capsys)
    assert "jacobi-llm[plot]" in line
