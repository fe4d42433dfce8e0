"""Sets that were merged, split or imported train like those that were collected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jacobi_llm.data.cli import main
from jacobi_llm.data.store import Manifest, read_trajectories
from tests.train.runs import make_trajectories, records, settings_for, train, write_set


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows of the same prompts, as two rounds give them."""
    root = tmp_path_factory.mktemp("made")
    write_set(root / "w8", make_trajectories(10, window=8), seed=0)
    write_set(root / "w16", make_trajectories(10, window=16), seed=1)
    assert main(["merge", str(root / "w8"), str(root / "w16"), "--output", str(root / "both")]) == 0
    return root / "both"


@pytest.mark.parametrize("objective", ["jacobi-forcing", "cllm-global"])
def test_a_merged_set_of_two_windows_trains(
    objective: str, merged: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert Manifest.read(merged).windows == [8, 16]
    changes = {"train__max_steps": 4, "objective__name": objective, "eval__window": "auto"}
    assert train(settings_for(tiny_checkpoint, merged, tmp_path / "run", **changes)) == 0
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    about = json.loads((tmp_path / "run" / "final" / "jacobi_config.json").read_text())
    assert about["window"] == 16
    assert about["data_sha256"] == Manifest.read(merged).data_sha256


def test_one_side_of_a_split_and_an_imported_set_train(merged: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert main(["split", str(merged), "--output", str(tmp_path / "s"), "--heldout-share", "0.3"]) == 0
    exported = str(tmp_path / "train.json")
    assert main(["export", str(tmp_path / "s" / "train"), "--to", "consistency-llm", "--output", exported]) == 0
    assert main(["import", exported, "--output", str(tmp_path / "again")]) == 0
    losses = []
    for data in (tmp_path / "s" / "train", tmp_path / "again"):
        run = tmp_path / f"run of {data.name}"
        assert train(settings_for(tiny_checkpoint, data, run, train__max_steps=2)) == 0
        losses.append([record["loss"] for record in records(run)])
    assert losses[0] == losses[1]
    assert 0 < len(list(read_trajectories(tmp_path / "again"))) < 20
