"""Split sets: every row on one side, rows of one key on the same one."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_llm.configs.schema import SplitConfig
from jacobi_llm.data.cli import main
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.split import hash_share, key_function
from jacobi_llm.data.store import Manifest, read_trajectories
from tests.data.random_sets import keys, rows_of_sets, write_rows
from tests.data.test_stats import TRAJECTORY


def row(index: int, window: int = 4, prompt: int = 1) -> Trajectory:
    changes = {"id": f"p{index}", "source_index": index, "window": window, "prompt_ids": [prompt]}
    return Trajectory(**{**TRAJECTORY.to_row(), **changes, "completion_ids": [5], "blocks": [Block(0, [], None)]})


@settings(max_examples=20)
@given(rows_of_sets(min_size=2), st.integers(0, 9), st.sampled_from([0.1, 0.5]), st.sampled_from(["row", "prompt"]))
def test_all_rows_in_one_and_none_in_both(rows: list[Trajectory], seed: int, share: float, by: str) -> None:
    with TemporaryDirectory() as name:
        root = Path(name)
        parent = write_rows(root / "a", rows)
        flags = ["--heldout-share", str(share), "--by", by, "--seed", str(seed), "--output", str(root / "b")]
        key_of = key_function(SplitConfig.model_validate({"by": by}))
        held_out = [one for one in rows if hash_share(seed, key_of(one)) < share]
        kept = [one for one in rows if one not in held_out]
        code = main(["split", str(root / "a"), *flags])
        assert code == (0 if held_out and kept else 1)
        if code:
            assert not (root / "b").exists()
            return
        assert list(read_trajectories(root / "b" / "train")) == kept
        assert list(read_trajectories(root / "b" / "heldout")) == held_out
        for side, own in (("train", kept), ("heldout", held_out)):
            [record] = Manifest.read(root / "b" / side).parents
            assert (record["data_sha256"], record["num_rows_taken"], record["side"]) == (
                parent.data_sha256,
                len(own),
                side,
            )
        assert not set(keys(kept)) & set(keys(held_out))


def test_windows_of_a_row_stay_together_and_shares_are_met(tmp_path: Path) -> None:
    rows = [row(index, window) for index in range(400) for window in (4, 8)]
    write_rows(tmp_path / "a", rows, shard_size=500)
    assert main(["split", str(tmp_path / "a"), "--output", str(tmp_path / "b"), "--heldout-share", "0.25"]) == 0
    sides = [{one.source_index for one in read_trajectories(tmp_path / "b" / side)} for side in ("train", "heldout")]
    assert not sides[0] & sides[1]
    assert sum(map(len, sides)) == 400
    assert 0.19 < len(sides[1]) / 400 < 0.31


def test_groups_of_a_prompt_file_stay_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = tmp_path / "p.jsonl"
    lines = [{"id": f"p{index}", "prompt": "x", "group": f"g{index % 7}"} for index in range(70)]
    groups.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_rows(tmp_path / "a", [row(index) for index in range(80)])
    flags = ["--groups", str(groups), "--heldout-share", "0.4", "--output", str(tmp_path / "b"), "--json"]
    assert main(["split", str(tmp_path / "a"), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["train"]["num_trajectories"] + report["heldout"]["num_trajectories"] == 80
    sides = [[one.source_index for one in read_trajectories(tmp_path / "b" / side)] for side in report]
    grouped = [{index % 7 for index in side if index < 70} for side in sides]
    assert not grouped[0] & grouped[1]


def test_equal_prompts_stay_together(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", [row(index, prompt=index % 9) for index in range(60)])
    flags = ["--by", "prompt", "--heldout-share", "0.4", "--output", str(tmp_path / "b")]
    assert main(["split", str(tmp_path / "a"), *flags]) == 0
    prompts = [{one.prompt_ids[0] for one in read_trajectories(tmp_path / "b" / side)} for side in ("train", "heldout")]
    assert not prompts[0] & prompts[1]


def test_a_group_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a", [row(0)])
    assert (
        main(["split", str(tmp_path / "a"), "--groups", str(tmp_path / "none"), "--output", str(tmp_path / "b")]) == 2
    )
    assert str(tmp_path / "none") in capsys.readouterr().err
