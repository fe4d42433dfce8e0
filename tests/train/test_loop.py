"""Whole trainings of a tiny model in this process: stages, accumulation, resume, errors, a golden loss curve."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_llm.configs.errors import JacobiError, RunError, UsageError
from jacobi_llm.train import loop
from jacobi_llm.train.loop import Trainer
from jacobi_llm.train.objectives import LossSums
from tests.tiny_models import save_tiny_checkpoint
from tests.train.runs import (
    UNBROKEN_STEPS,
    furthest,
    make_trajectories,
    make_trajectory,
    records,
    settings_for,
    train,
    write_set,
)

GOLDEN = Path(__file__).parent / "golden_loss.json"


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, nothing is saved."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the next run before update ``step`` (counted from 0)."""
    update = Trainer.update

    def killed(self: Trainer, number: int) -> loop.StepReport:
        if number == step:
            raise Killed
        return update(self, number)

    monkeypatch.setattr(Trainer, "update", killed)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(str(folder / "final" / "model.safetensors"))


def one_line(error: JacobiError) -> str:
    assert len(error.faults) == 1
    assert "\n" not in error.faults[0]
    return error.faults[0]


def test_golden_loss_curve(tiny_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Ten updates of each objective. After a wanted change of the numbers, delete the file and run this test twice."""
    curves = {}
    for name in ("jacobi-forcing", "cllm-global", "ar"):
        assert train(settings_for(tiny_checkpoint, data, tmp_path / name, objective__name=name)) == 0
        curves[name] = [record["loss"] for record in records(tmp_path / name)]
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
        pytest.fail(f"{GOLDEN} was written; check and commit it")
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == curves.keys()
    for name, losses in curves.items():
        assert losses == pytest.approx(golden[name], rel=1e-5), name
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("stage", "checkpointing"),
    [("zero1", False), ("zero2", True), ("zero3", True), ("zero2-offload", False), ("zero3-offload", False)],
)
def test_field_case_t04_stages_agree(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, unbroken: Path, stage: str, checkpointing: bool
) -> None:
    """One backward per micro-batch: every stage gives the losses, norms and weights of stage 0, with accumulation."""
    settings = settings_for(
        tiny_checkpoint, data, tmp_path / "run", train__max_steps=UNBROKEN_STEPS, train__deepspeed=stage
    )
    settings |= {"train.micro_batch_size": 2, "train.gradient_checkpointing": checkpointing}
    assert train({**settings, "train.eval_every_steps": 6}) == 0
    ours, reference = records(tmp_path / "run"), records(unbroken)
    assert len(ours) == UNBROKEN_STEPS
    assert furthest(ours, reference) < 1e-5
    assert furthest(ours, reference, "grad_norm") < 1e-4
    weights, expected = weights_of(tmp_path / "run"), weights_of(unbroken)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_bfloat16_stages_agree_and_follow_float32(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, unbroken: Path, stage: str
) -> None:
    """DeepSpeed's optimizer without ZeRO once counted a step of zeros, which made the first updates too small."""
    settings = {"train.max_steps": UNBROKEN_STEPS, "train.dtype": "bfloat16", "train.deepspeed": stage}
    assert train({**settings_for(tiny_checkpoint, data, tmp_path / "run"), **settings}) == 0
    ours = records(tmp_path / "run")
    assert furthest(ours, records(unbroken)) < 0.005
    assert weights_of(tmp_path / "run")["model.norm.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_lora_stages_agree(tiny_checkpoint: Path, data: Path, tmp_path: Path, stage: str) -> None:
    settings = {"train.tune": "lora", "lora.rank": 4, "train.lr": 0.01, "train.gradient_checkpointing": True}
    for name in ("zero0", stage):
        chosen = {**settings_for(tiny_checkpoint, data, tmp_path / name), **settings, "train.deepspeed": name}
        assert train(chosen) == 0
    assert furthest(records(tmp_path / stage), records(tmp_path / "zero0")) < 1e-5
    assert records(tmp_path / "zero0")[-1]["loss"] < records(tmp_path / "zero0")[0]["loss"]


def test_field_case_t06_every_split_of_a_batch_gives_the_same_gradient(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different length in 8 x 1, 4 x 2, 2 x 4 and 1 x 8: token-weighted, not a mean of means."""
    gradients: list[dict[str, torch.Tensor]] = []
    real_step = loop.optimizer_step

    def keep_gradients(engine: Any) -> float:
        gradients.append({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
        return real_step(engine)

    monkeypatch.setattr(loop, "optimizer_step", keep_gradients)
    for size in (8, 4, 2, 1):
        settings = settings_for(tiny_checkpoint, data, tmp_path / str(size), train__max_steps=1)
        assert train({**settings, "train.micro_batch_size": size}) == 0
    whole = gradients[0]
    assert len(whole) == 21
    for split in gradients[1:]:
        for name, gradient in split.items():
            assert torch.allclose(gradient, whole[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(
    ("stage", "settings", "kills"),
    [
        ("zero0", {}, (2, 5, 6, 9)),
        ("zero0", {"train.dtype": "bfloat16"}, (5, 6)),
        ("zero1", {"train.dtype": "bfloat16"}, (5, 6)),
        ("zero0", {"train.tune": "lora", "lora.dropout": 0.2}, (5, 9)),
        ("zero3", {"train.tune": "lora", "lora.dropout": 0.2}, (5,)),
        ("zero3", {}, (5,)),
    ],
)
def test_field_case_t11_resume_is_exact_in_mid_epoch_and_twice(
    tiny_checkpoint: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    settings: dict[str, Any],
    kills: tuple[int, ...],
) -> None:
    """26 samples in batches of 8, saved every 3 updates: every logged number is that of an unbroken run."""
    common = {"train.max_steps": 10, "train.save_every_steps": 3, "train.eval_every_steps": 5, "train.deepspeed": stage}
    common |= settings
    assert train({**settings_for(tiny_checkpoint, data, tmp_path / "whole"), **common}) == 0
    broken = {**settings_for(tiny_checkpoint, data, tmp_path / "broken"), **common}
    for step in kills:
        with monkeypatch.context() as patched:
            kill_at(patched, step)
            with pytest.raises(Killed):
                train(broken)
    assert train(broken) == 0
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert records(tmp_path / "broken", "eval") == records(tmp_path / "whole", "eval")
    ours, expected = weights_of(tmp_path / "broken"), weights_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_field_case_k05_a_finished_run_says_so_and_trains_nothing(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__max_steps=2)
    assert train(settings, is_json=True) == 0
    first = json.loads(capsys.readouterr().out)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "final").iterdir()}
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(settings, is_json=True) == 0
    captured = capsys.readouterr()
    assert "this run is finished (2 updates); nothing to do" in captured.err
    assert json.loads(captured.out) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "final").iterdir()} == before
    with pytest.raises(UsageError, match=r"never, but .* holds checkpoints"):
        train({**settings, "train.resume": "never"})


def test_field_case_k05_a_trained_model_without_checkpoints_is_not_overwritten(
    tiny_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a trained model and no checkpoint"):
        train(settings_for(tiny_checkpoint, data, tmp_path / "run"))


def test_killed_between_the_last_save_and_the_export(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__max_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "export_final", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train(settings)
    kill_at(monkeypatch, 0)  # no update may run again
    assert train(settings) == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert len(records(tmp_path / "run", "eval")) == 1


CHANGES: dict[str, Any] = {
    "train.lr": 2e-3,
    "train.lr_schedule": "constant",
    "train.global_batch_size": 4,
    "train.seed": 1,
    "train.dtype": "bfloat16",
    "train.tune": "lora",
    "train.max_length": 64,
    "objective.name": "cllm-global",
    "objective.ar_weight": 2.0,
}


def test_other_settings_are_refused_by_name_and_free_ones_are_not(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__save_every_steps=2)
    with monkeypatch.context() as patched:
        kill_at(patched, 3)
        with pytest.raises(Killed):
            train(settings)
    resolved = (tmp_path / "run" / "config.yaml").read_text()
    kill_at(monkeypatch, 2)
    for key, value in CHANGES.items():
        with pytest.raises(UsageError, match="saved by a run that differs") as caught:
            train({**settings, key: value})
        assert f"{key}: " in one_line(caught.value)
    other_data = write_set(tmp_path / "other", make_trajectories(30))
    for change, name in (
        ({"train.data": str(other_data)}, "train.data (sha256)"),
        ({"train.deepspeed": "zero1"}, "ZeRO stage: 0 there, 1 now"),
        ({"train.max_steps": 12}, "updates: 10 there, 12 now"),
    ):
        with pytest.raises(UsageError) as caught:
            train({**settings, **change})
        assert name in one_line(caught.value)
    # What was refused has not touched the run.
    assert (tmp_path / "run" / "config.yaml").read_text() == resolved
    free = {"train.micro_batch_size": 2, "train.gradient_checkpointing": True, "train.save_every_steps": 5}
    with pytest.raises(Killed):
        train({**settings, **free})


def test_a_constant_rate_may_be_prolonged(tiny_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    constant = {"train.lr_schedule": "constant", "train.warmup_ratio": 0.0}
    long = {**settings_for(tiny_checkpoint, data, tmp_path / "long"), **constant}
    assert train(long) == 0
    short = {**long, "train.output": str(tmp_path / "short"), "train.max_steps": 4}
    assert train(short) == 0
    assert train({**short, "train.max_steps": 10}) == 0
    assert records(tmp_path / "short") == records(tmp_path / "long")
    ours, expected = weights_of(tmp_path / "short"), weights_of(tmp_path / "long")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_resume_from_a_named_checkpoint(tiny_checkpoint: Path, data: Path, tmp_path: Path, unbroken: Path) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__max_steps=UNBROKEN_STEPS)
    assert train({**settings, "train.save_every_steps": 4, "train.keep_checkpoints": 3}) == 0
    named = tmp_path / "run" / "checkpoints" / "step-000008"
    again = {**settings, "train.output": str(tmp_path / "again"), "train.resume": str(named)}
    assert train(again) == 0
    assert records(tmp_path / "again") == records(unbroken)[8:]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(
    tiny_checkpoint: Path,
    data: Path,
    tmp_path: Path,
    unbroken: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__max_steps=UNBROKEN_STEPS)
    update = Trainer.update

    def interrupted(self: Trainer, step: int) -> loop.StepReport:
        if step == 6:
            signal.raise_signal(number)
            if number == signal.SIGINT:
                # What a launcher adds to Ctrl-C.
                signal.raise_signal(signal.SIGTERM)
        return update(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", interrupted)
        assert train(settings) == code
    assert f"{number.name}: saved at step 7; run the same command to go on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(settings) == 0
    assert records(tmp_path / "run") == records(unbroken)


@pytest.mark.parametrize(("stage", "bad"), [("zero0", float("nan")), ("zero2", float("inf")), ("zero3", float("nan"))])
def test_a_loss_that_is_not_finite_stops_before_the_update(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, bad: float
) -> None:
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__deepspeed=stage, train__save_every_steps=2)
    real, calls, stepped = loop.loss_sums, [0], [0]
    real_step = loop.optimizer_step

    def planted(*arguments: Any) -> LossSums:
        sums = real(*arguments)
        calls[0] += 1
        return LossSums(sums.ar * bad, sums.consistency) if calls[0] == 6 else sums

    def counted(engine: Any) -> float:
        stepped[0] += 1
        return real_step(engine)

    monkeypatch.setattr(loop, "loss_sums", planted)
    monkeypatch.setattr(loop, "optimizer_step", counted)
    with pytest.raises(RunError, match="the loss of step 3 is not finite") as caught:
        train(settings)
    one_line(caught.value)
    assert stepped == [2]
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-000002"]


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_a_gradient_that_is_not_finite_is_never_saved(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * float("nan")

    real, calls = loop.loss_sums, [0]

    def planted(*arguments: Any) -> LossSums:
        sums = real(*arguments)
        calls[0] += 1
        return LossSums(Poison.apply(sums.ar), sums.consistency) if calls[0] == 6 else sums

    monkeypatch.setattr(loop, "loss_sums", planted)
    settings = settings_for(tiny_checkpoint, data, tmp_path / "run", train__save_every_steps=1)
    with pytest.raises(RunError, match="the gradient of step 3 is not finite"):
        train({**settings, "train.deepspeed": stage})
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))[-1] == "step-000002"


def test_what_does_not_fit_is_skipped_and_counted(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_trajectories(8)
    rows[3].prompt_ids.extend([9] * 120)
    rows.append(make_trajectory(99, length=300))
    data = write_set(tmp_path / "set" / "data", rows)
    assert train(settings_for(tiny_checkpoint, data, tmp_path / "run", train__max_steps=3)) == 0
    assert "warning: 2 of 9 trajectories skipped: " in capsys.readouterr().err
    assert len(records(tmp_path / "run")) == 3


def test_field_case_t01_losses_apart_and_repetition_are_logged(unbroken: Path) -> None:
    record = json.loads((unbroken / "metrics.jsonl").read_text().splitlines()[0])
    assert record["loss"] == pytest.approx(record["ar_loss"] + record["consistency_loss"])
    assert {"lr", "grad_norm", "rows_per_s", "memory_mib", "eta_s", "num_tokens"} <= record.keys()
    evaluation = records(unbroken, "eval")[-1]
    assert evaluation["tokens_per_forward"] >= 1.0
    assert 0.0 <= evaluation["repetition"] <= 1.0
    assert evaluation["window"] == 4


def damaged_shard(data: Path) -> None:
    shard = data / "shard-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def test_bad_input_is_one_line(tiny_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    good = settings_for(tiny_checkpoint, data, tmp_path / "run")
    (tmp_path / "broken.json").write_text('{"zero_optimization": ')
    (tmp_path / "owned.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    (tmp_path / "typo.json").write_text('{"zero_optimisation": {"stage": 1}}')
    (tmp_path / "stage.json").write_text('{"zero_optimization": {"stage": 7}}')
    (tmp_path / "list.json").write_text("[1]")
    sliding = save_tiny_checkpoint(tmp_path / "sliding", "mistral")
    for change, text in (
        ({"train.data": str(tmp_path / "nowhere")}, "no manifest.json here"),
        ({"train.model": "no/such model"}, "model 'no/such model': no such folder"),
        ({"train.model": str(sliding)}, "uses sliding-window attention"),
        ({"train.deepspeed": "zero9"}, "neither shipped (zero0, zero1"),
        ({"train.deepspeed": str(tmp_path / "broken.json")}, "not readable as JSON"),
        ({"train.deepspeed": str(tmp_path / "owned.json")}, "bf16 come from the train section"),
        ({"train.deepspeed": str(tmp_path / "typo.json")}, "zero_optimisation (did you mean zero_optimization?)"),
        ({"train.deepspeed": str(tmp_path / "stage.json")}, "DeepSpeedZeroConfig: stage: Input should be 0, 1, 2, 3"),
        ({"train.deepspeed": str(tmp_path / "list.json")}, "a JSON object is expected"),
        ({"train.dtype": "float64"}, "float64 is for tests"),
        ({"train.micro_batch_size": 3}, "8 is not a multiple of micro_batch_size x ranks = 3 x 1"),
        ({"train.max_length": 8}, "no trajectory that can be trained on"),
    ):
        with pytest.raises(UsageError) as caught:
            train({**good, **change})
        assert text in one_line(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_shard_is_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    data = write_set(tmp_path / "set" / "data", make_trajectories(6))
    damaged_shard(data)
    with pytest.raises(RunError, match=r"shard-00001\.parquet: damaged") as caught:
        train(settings_for(tiny_checkpoint, data, tmp_path / "run"))
    one_line(caught.value)


def test_trajectories_of_another_tokenizer_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    data = write_set(tmp_path / "set" / "data", make_trajectories(6), tokenizer_sha256="0" * 64)
    with pytest.raises(UsageError, match=r"collected with another tokenizer \(sha256 000000000000…"):
        train(settings_for(tiny_checkpoint, data, tmp_path / "run"))
