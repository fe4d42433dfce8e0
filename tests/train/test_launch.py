"""The trainer as people start it: the DeepSpeed launcher with one and two ranks, and plain Python; killed for real.

Each launch costs seconds of imports, hence few of them; more in the slow part.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.train.runs import LAUNCHER_VARIABLES, furthest, records, settings_for, train

ROOT = Path(__file__).parents[2]
SCRIPT = "train/cllm.py"
STEPS = 20
PORT = 29700 + os.getpid() % 200


def command_of(launcher: int | None, config: Path) -> list[str]:
    """``launcher`` is the number of ranks, or None for plain Python."""
    arguments = [SCRIPT, "--config", str(config)]
    if launcher is None:
        return [sys.executable, *arguments]
    deepspeed = shutil.which("deepspeed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert deepspeed is not None
    return [deepspeed, "--master_port", str(PORT), "--num_accelerators", str(launcher), *arguments]


def write_recipe(folder: Path, settings: dict[str, Any]) -> Path:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def start(launcher: int | None, config: Path) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        command_of(launcher, config),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks, in order."""
    tree = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in tree if any(part.startswith("--local_rank=") for part in child.cmdline())]
    return sorted(ranks, key=lambda child: next(p for p in child.cmdline() if p.startswith("--local_rank=")))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "final" / "model.safetensors"))


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank without ZeRO, 20 updates of micro-batches of 2."""
    output = tmp_path_factory.mktemp("reference") / "run"
    settings = settings_for(tiny_checkpoint, data, output, train__max_steps=STEPS, train__micro_batch_size=2)
    assert train(settings) == 0
    return output


def recipe_for(reference: Path, tiny_checkpoint: Path, data: Path, output: Path, **changes: Any) -> Path:
    settings = settings_for(tiny_checkpoint, data, output, train__max_steps=STEPS, train__micro_batch_size=2, **changes)
    return write_recipe(output.parent, settings)


def test_two_ranks_with_zero2_agree_with_one(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    config = recipe_for(
        reference, tiny_checkpoint, data, tmp_path / "run", train__deepspeed="zero2", train__eval_every_steps=10
    )
    code, _, err = finish(start(2, config))
    assert code == 0, err
    assert "Traceback" not in err
    assert "Warning" not in err.partition("step 1/")[2]
    ours = records(tmp_path / "run")
    assert len(ours) == STEPS
    assert furthest(ours, records(reference)) < 1e-5
    assert furthest(ours, records(reference), "grad_norm") < 1e-4
    assert [record["num_tokens"] for record in ours] == [record["num_tokens"] for record in records(reference)]
    assert [record["step"] for record in records(tmp_path / "run", "eval")] == [0, 10, 20]
    weights, expected = weights_of(tmp_path / "run"), weights_of(reference)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-5) for name in expected)
    # One line per step, from one rank.
    assert err.count(f"step 7/{STEPS} loss") == 1


def test_two_ranks_with_zero3_are_stopped_at_one_and_go_on(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """SIGTERM reaches rank 1 only: both save and leave at the same step; then the same command goes on."""
    run = tmp_path / "run"
    config = recipe_for(reference, tiny_checkpoint, data, run, train__deepspeed="zero3", train__eval_every_steps=5)
    process = start(2, config)
    wait_for(lambda: num_logged(run) >= 3, process)
    workers_of(process)[1].send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    assert "SIGTERM: saved at step " in err
    assert not (run / "final").exists()
    stopped_at = len(records(run))
    assert 2 <= stopped_at < STEPS
    code, _, err = finish(start(2, config))
    assert code == 0, err
    assert f"at step {stopped_at} of {STEPS}" in err
    assert [record["step"] for record in records(run)] == list(range(1, STEPS + 1))
    assert furthest(records(run), records(reference)) < 1e-5
    assert [record["step"] for record in records(run, "eval")] == [0, 5, 10, 15, 20]
    weights, expected = weights_of(run), weights_of(reference)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-5) for name in expected)


def test_plain_python_killed_in_mid_run_repeats_the_unbroken_run_bit_for_bit(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """Field cases K05 and T11 with a real SIGKILL."""
    run = tmp_path / "run"
    config = recipe_for(reference, tiny_checkpoint, data, run, train__save_every_steps=2, train__eval_every_steps=1)
    process = start(None, config)
    wait_for(lambda: len(list((run / "checkpoints").glob("*/complete.json"))) >= 1, process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    code, out, err = finish(start(None, config))
    assert code == 0, err
    assert out == ""
    assert "resumed " in err
    assert records(run) == records(reference)
    expected = weights_of(reference)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(run).items())


def test_deepspeed_with_one_process_and_json(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    config = recipe_for(reference, tiny_checkpoint, data, tmp_path / "run", train__deepspeed="zero2")
    code, _, err = finish(start(1, config))
    assert code == 0, err
    assert furthest(records(tmp_path / "run"), records(reference)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_one_rank_that_cannot_save_ends_all(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path, stage: str
) -> None:
    """The folder of checkpoints is a file: rank 0 tells, nobody hangs."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").touch()
    config = recipe_for(reference, tiny_checkpoint, data, run, train__deepspeed=stage, train__save_every_steps=2)
    code, _, err = finish(start(2, config))
    assert code == 1
    assert err.count("checkpoint not written") == 1
    assert "Traceback" not in err.partition("step 1/")[2]


@pytest.mark.slow
def test_two_ranks_tell_a_bad_request_once(reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    for change, code, text in (
        ({"train__deepspeed": "zero9"}, 2, "neither shipped"),
        ({"train__micro_batch_size": 8}, 2, "choose a multiple of 16"),
        ({"train__model": "no/such model"}, 2, "no such folder"),
    ):
        settings = settings_for(tiny_checkpoint, data, tmp_path / "run")
        changed = {**settings, **{key.replace("__", "."): value for key, value in change.items()}}
        returned, _, err = finish(start(2, write_recipe(tmp_path, changed)))
        assert returned == code, err
        assert err.count(text) == 1
        assert "Traceback" not in err


@pytest.mark.slow
def test_killed_at_many_moments_of_many_saves(
    reference: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """Field case T10: SIGKILL at moments spread over a run that saves all the time; it always ends as unbroken."""
    run = tmp_path / "run"
    config = recipe_for(reference, tiny_checkpoint, data, run, train__save_every_steps=1, train__keep_checkpoints=1)
    for delay_s in (0.0, 0.005, 0.011, 0.017, 0.023, 0.031, 0.043, 0.059):
        process = start(None, config)
        before = num_logged(run)
        deadline = time.monotonic() + 120
        while process.poll() is None and num_logged(run) <= before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay_s)
        process.kill()
        finish(process)
    code, _, err = finish(start(None, config))
    assert code == 0, err
    assert records(run) == records(reference)


def test_a_compilation_that_was_killed_holds_nobody_up() -> None:
    """torch's mark of a running compilation outlives a killed process; without care the next run waits for ever."""
    code = (
        "import os, pathlib\n"
        "from jacobi_llm.train.deepspeed_engine import init_distributed\n"
        "init_distributed()\n"
        "print(os.environ['TORCH_EXTENSIONS_DIR'])\n"
    )

    def run() -> str:
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250, check=True
        )
        return done.stdout.strip()

    built = [path.parent for path in Path(run()).glob("*/*.so")]
    for folder in built:
        (folder / "lock").touch()
    run()
    assert not any((folder / "lock").exists() for folder in built)
