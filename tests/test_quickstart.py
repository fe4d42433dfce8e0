"""The one command, on the real model, with next to nothing: scripts/quickstart --smoke."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(900)
def test_smoke_walks_the_whole_road_and_keeps_what_is_done(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=ignored)
    first = _quickstart(tree)
    assert "Jacobi 8" in first.stdout, first.stdout + first.stderr
    rows = json.loads((tree / "runs/smoke/evaluation/evaluation.json").read_text())["rows"]
    assert [(row["model"], row["window"]) for row in rows] == [("base", 1), ("base", 8), ("trained", 1), ("trained", 8)]
    assert all(row["tokens_per_forward"] == 1.0 for row in rows if row["window"] == 1)
    assert all(row["tokens_per_forward"] >= 1.0 for row in rows)
    for name in ("evaluation/evaluation.png", "evaluation/answer.html", "train/final/model.safetensors"):
        assert (tree / "runs/smoke" / name).stat().st_size > 0
    shards = {path: path.stat().st_mtime_ns for path in (tree / "runs/smoke/trajectories").glob("*.parquet")}
    again = _quickstart(tree)
    assert "nothing to do" in again.stderr
    assert shards == {path: path.stat().st_mtime_ns for path in shards}


def test_a_wrong_argument_is_one_line() -> None:
    run = subprocess.run([str(ROOT / "scripts/quickstart"), "--somke"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == "error: --somke: scripts/quickstart takes --smoke or nothing\n"


def _quickstart(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JACOBI_LLM_PYTHON": sys.executable}
    run = subprocess.run(
        [str(tree / "scripts/quickstart"), "--smoke"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run
