"""Merged sets: every row once, in order, with hashes that hold; what cannot be merged is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_llm.data import validate
from jacobi_llm.data.cli import main
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.store import MANIFEST, Manifest, read_trajectories
from jacobi_llm.infer.models import LoadedModel
from tests.data.random_sets import keys, rows_of_sets, write_rows
from tests.data.trajectories import make_collector, make_prompts, write_set

LoadedFactory = Callable[..., LoadedModel]


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


@settings(max_examples=20)
@given(rows_of_sets(), st.integers(0, 8), st.integers(1, 4))
def test_a_set_that_is_cut_and_merged_is_the_same(rows: list[Trajectory], cut: int, shard_size: int) -> None:
    with TemporaryDirectory() as name:
        root = Path(name)
        first = write_rows(root / "a", rows[:cut])
        second = write_rows(root / "b", rows[cut:], seed=1)
        flags = ["--output", str(root / "c"), "--shard-size", str(shard_size)]
        assert main(["merge", str(root / "a"), str(root / "b"), *flags]) == 0
        merged = Manifest.read(root / "c")
        assert list(read_trajectories(root / "c")) == rows
        assert all(shard.num_rows <= shard_size for shard in merged.shards.values())
        assert "seed" not in merged.settings
        assert merged.num_skipped == {"too long": 2}
        assert merged.num_unconverged == 2
        parents = [(parent["name"], parent["data_sha256"], parent["num_rows_taken"]) for parent in merged.parents]
        assert parents == [("a", first.data_sha256, len(rows[:cut])), ("b", second.data_sha256, len(rows[cut:]))]
        report, _ = validate.check_set(root / "c", merged)
        assert not [fault for fault in report.faults if "time order" not in fault and "states" not in fault]


@settings(max_examples=20)
@given(rows_of_sets(min_size=2), st.data())
def test_a_row_that_comes_twice_is_named_or_dropped(rows: list[Trajectory], data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique_by=lambda row: keys([row])[0]))
    with TemporaryDirectory() as name:
        root = Path(name)
        write_rows(root / "a", rows)
        write_rows(root / "b", again)
        command = ["merge", str(root / "a"), str(root / "b"), "--output", str(root / "c")]
        assert main(command) == 1
        assert [path.name for path in root.iterdir()] in (["a", "b"], ["b", "a"])
        assert main([*command, "--on-duplicate", "first"]) == 0
        assert list(read_trajectories(root / "c")) == rows
        assert [parent["num_rows_taken"] for parent in Manifest.read(root / "c").parents] == [len(rows), 0]


def test_what_cannot_be_merged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a", [])
    write_rows(tmp_path / "b", [], tokenizer_sha256="other")
    assert main(["merge", str(tmp_path / "a"), "--output", str(tmp_path / "c")]) == 2
    assert "two folders or more" in error_lines(capsys)[0]
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 2
    [line] = error_lines(capsys)
    assert "tokenizer_sha256 is other" in line
    assert "only sets of one tokenizer" in line
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "a"), "--output", str(tmp_path / "a")]) == 2
    assert "holds something already" in error_lines(capsys)[0]
    manifest = Manifest.read(tmp_path / "a")
    manifest.num_shards += 1
    manifest.write(tmp_path / "a")
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "a"), "--output", str(tmp_path / "c")]) == 2
    assert "1 of 2 shards" in error_lines(capsys)[0]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("damage", ["missing", "hash", "manifest"])
def test_a_damaged_set_is_not_merged(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a", [])
    write_rows(tmp_path / "b", [])
    shard = tmp_path / "b" / "shard-00000.parquet"
    if damage == "missing":
        shard.unlink()
    elif damage == "hash":
        shard.write_bytes(shard.read_bytes() + b"x")
    else:
        (tmp_path / "b" / MANIFEST).write_text('{"settings": ')
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 1
    assert str(tmp_path / "b") in error_lines(capsys)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_windows_of_one_model_are_merged_and_validated(
    tiny_loaded: LoadedFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = tiny_loaded("llama", torch.float64)
    write_set(make_collector(loaded, window=4), make_prompts(3), tmp_path / "w4")
    write_set(make_collector(loaded, window=8, max_tokens=24), make_prompts(3), tmp_path / "w8")
    command = ["merge", str(tmp_path / "w4"), str(tmp_path / "w8"), "--output", str(tmp_path / "both"), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_trajectories"], report["windows"]) == (6, [4, 8])
    assert Manifest.read(tmp_path / "both").settings["max_tokens"] == 24
    assert main(["validate", str(tmp_path / "both")]) == 0
    capsys.readouterr()
    assert main(["stats", str(tmp_path / "both"), "--json"]) == 0
    by_window = json.loads(capsys.readouterr().out)["by_window"]
    assert {window: figures["trajectories"] for window, figures in by_window.items()} == {"4": 3, "8": 3}
