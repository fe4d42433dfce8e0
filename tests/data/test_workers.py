"""Worker processes and Ray: the same set as one process alone, and none of them outlives the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jacobi_llm.data.store import Manifest
from tests.data.trajectories import contents, make_prompts
from tests.tiny_models import save_tiny_checkpoint

NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(folder / "model", dtype=torch.float64)
    lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(NUM_PROMPTS)]
    (folder / "p.jsonl").write_text("\n".join(lines))
    flags = ["--model", str(folder / "model"), "--input", str(folder / "p.jsonl"), "--split", "all", "--raw"]
    return [
        *flags,
        "--dtype",
        "float64",
        "--window",
        "8,12",
        "--max-tokens",
        "40",
        "--shard-size",
        "2",
        "--init",
        "ngram",
    ]


def start(flags: list[str], output: Path, *more: str) -> subprocess.Popen[str]:
    program = str(Path(sys.executable).parent / "jacobi-data")
    command = [program, "collect", *flags, "--output", str(output), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("alone") / "set"
    process = start(flags, folder)
    assert process.wait(120) == 0, process.communicate()[1]
    return contents(folder)


def test_two_workers_make_the_same_set(flags: list[str], alone: dict[str, bytes], tmp_path: Path) -> None:
    process = start(flags, tmp_path / "set", "--num-workers", "2", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["num_trajectories"] == 2 * NUM_PROMPTS
    assert contents(tmp_path / "set") == alone


@pytest.mark.slow
def test_ray_makes_the_same_set(flags: list[str], alone: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    process = start(flags, tmp_path / "set", "--executor", "ray", "--num-workers", "2")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert contents(tmp_path / "set") == alone


@pytest.mark.slow
def test_sigterm_ends_a_ray_job_with_130_and_the_same_command_goes_on(
    flags: list[str], alone: dict[str, bytes], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    process = start(flags, tmp_path / "set", "--executor", "ray", "--num-workers", "1")
    deadline = time.monotonic() + 120
    while not list((tmp_path / "set").glob("shard-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    manifest = Manifest.read(tmp_path / "set")
    assert manifest.shards
    assert not manifest.is_complete
    assert start(flags, tmp_path / "set").wait(120) == 0
    assert contents(tmp_path / "set") == alone


def test_a_killed_worker_costs_nothing(flags: list[str], alone: dict[str, bytes], tmp_path: Path) -> None:
    process = start(flags, tmp_path / "set", "--num-workers", "2")
    [victim, *_] = wait_for_children(process.pid)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert "killed by signal 9" in err
    assert process.returncode == 0, err
    assert contents(tmp_path / "set") == alone


def test_workers_end_with_a_killed_command(flags: list[str], tmp_path: Path) -> None:
    process = start(flags, tmp_path / "set", "--num-workers", "2")
    children = wait_for_children(process.pid)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(is_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(child) for child in children)


def test_sigterm_ends_workers_with_130_and_the_same_command_goes_on(
    flags: list[str], alone: dict[str, bytes], tmp_path: Path
) -> None:
    process = start(flags, tmp_path / "set", "--num-workers", "2")
    wait_for_children(process.pid)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    if (tmp_path / "set").exists():
        assert not Manifest.read(tmp_path / "set").is_complete
    assert start(flags, tmp_path / "set").wait(120) == 0
    assert contents(tmp_path / "set") == alone


def test_a_fault_that_all_workers_meet_is_told_once(flags: list[str], tmp_path: Path) -> None:
    process = start([*flags, "--model", str(tmp_path / "nowhere")], tmp_path / "set", "--num-workers", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("error:") == 1


def wait_for_children(pid: int) -> list[int]:
    """The two workers of a command, as soon as both are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(workers) == 2:
            return workers
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
