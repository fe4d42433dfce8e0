"""Collection: complete or absent, resumable after any kill, and clear about what it leaves out."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import EngineConfig, OnBadInput, TargetSource
from jacobi_llm.data import cli, collector
from jacobi_llm.data.collector import given_completion_ids
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.store import MANIFEST, Manifest, read_trajectories, write_shard
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prompt import Message, Prompt
from tests.data.trajectories import contents, make_collector, make_prompts, write_set

LoadedFactory = Callable[..., LoadedModel]
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def loaded(tiny_loaded: LoadedFactory) -> LoadedModel:
    return tiny_loaded("llama", torch.float64)


@pytest.fixture(scope="module")
def unbroken(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a set of three shards that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_set(make_collector(loaded, make_prompts(NUM_PROMPTS)), folder)
    return contents(folder)


def test_every_prompt_once_and_in_order(loaded: LoadedModel, tmp_path: Path) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    manifest = write_set(make_collector(loaded, prompts), tmp_path)
    assert manifest.is_complete
    rows = list(read_trajectories(tmp_path))
    assert [row.source_index for row in rows] == [prompt.source_index for prompt in prompts]
    for row in rows:
        row.check()


def test_equal_prompts_are_legal(loaded: LoadedModel, tmp_path: Path) -> None:
    prompt = make_prompts(1)[0]
    twins = [replace(prompt, source_index=index) for index in (0, 1, 5)]
    write_set(make_collector(loaded, twins), tmp_path)
    assert [row.source_index for row in read_trajectories(tmp_path)] == [0, 1, 5]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_run_stopped_between_shards_goes_on(
    loaded: LoadedModel,
    unbroken: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_before: int,
) -> None:
    def stop_after(folder: Path, number: int, rows: Sequence[Trajectory]) -> tuple[str, str]:
        if number == num_before:
            write_shard(folder, number, rows)  # dies after the shard, before the manifest
            raise KeyboardInterrupt
        return write_shard(folder, number, rows)

    with monkeypatch.context() as patched:
        patched.setattr(collector, "write_shard", stop_after)
        with pytest.raises(KeyboardInterrupt):
            write_set(make_collector(loaded, make_prompts(NUM_PROMPTS)), tmp_path)
    assert (tmp_path / MANIFEST).exists() == (num_before > 0)
    write_set(make_collector(loaded, make_prompts(NUM_PROMPTS)), tmp_path)
    assert contents(tmp_path) == unbroken


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "empty"])
def test_a_damaged_shard_alone_is_collected_again(
    loaded: LoadedModel,
    unbroken: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    for name, content in unbroken.items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "shard-00001.parquet"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    written: list[int] = []

    def watched(folder: Path, number: int, rows: Sequence[Trajectory]) -> tuple[str, str]:
        written.append(number)
        return write_shard(folder, number, rows)

    monkeypatch.setattr(collector, "write_shard", watched)
    write_set(make_collector(loaded, make_prompts(NUM_PROMPTS)), tmp_path)
    assert written == [1]
    assert contents(tmp_path) == unbroken
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "shard-00001.parquet" in line
    assert "again" in line


def test_other_settings_are_refused_by_name(loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in unbroken.items():
        (tmp_path / name).write_bytes(content)
    other = make_collector(loaded, make_prompts(NUM_PROMPTS + 1), window=4, seed=3)
    with pytest.raises(UsageError) as caught:
        other.open_manifest(tmp_path)
    assert "window: 8 there, 4 now" in str(caught.value)
    assert "seed: 0 there, 3 now" in str(caught.value)
    assert "prompts_sha256" in str(caught.value)
    assert contents(tmp_path) == unbroken


def test_another_model_of_the_same_name_is_refused(
    loaded: LoadedModel, tiny_loaded: LoadedFactory, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / MANIFEST).write_bytes(unbroken[MANIFEST])
    with pytest.raises(UsageError, match="model_sha256"):
        make_collector(tiny_loaded("llama", torch.float64, seed=1), make_prompts(NUM_PROMPTS)).open_manifest(tmp_path)


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_completion_ends_where_the_context_ends(loaded: LoadedModel) -> None:
    prompt = make_prompts(1)[0]
    long = replace(prompt, text="x" * (loaded.max_context - 5))
    fills = replace(prompt, id="full", text="x" * loaded.max_context, source_index=1)
    got = make_collector(loaded, [long, fills]).collect([long, fills])
    assert [len(row.completion_ids) for row in got.trajectories] == [5]
    got.trajectories[0].check()
    assert got.skipped == {"prompt fills the model's context": [1]}


def test_a_given_completion_is_cut_to_budget_and_context(loaded: LoadedModel) -> None:
    prompt = replace(make_prompts(1)[0], completion="y" * 50)
    near_end = replace(prompt, text="x" * (loaded.max_context - 7), source_index=1)
    one_left = replace(prompt, text="x" * (loaded.max_context - 1), source_index=2)
    nothing = replace(prompt, completion=None, source_index=3)
    prompts = [prompt, near_end, one_left, nothing]
    got = make_collector(loaded, prompts, target_source=TargetSource.GIVEN).collect(prompts)
    assert [len(row.completion_ids) for row in got.trajectories] == [20, 7, 1]
    assert [row.finish_reason for row in got.trajectories] == ["length"] * 3
    assert got.skipped == {"no completion given": [3]}
    for row in got.trajectories:
        row.check()


@pytest.mark.parametrize("max_tokens", [1, 7, 8, 9])
def test_blocks_cover_completions_of_any_length(loaded: LoadedModel, max_tokens: int) -> None:
    prompts = make_prompts(2)
    for row in make_collector(loaded, prompts, max_tokens=max_tokens).collect(prompts).trajectories:
        row.check()
        assert len(row.completion_ids) == max_tokens
        assert [len(row.target_of(block)) for block in row.blocks][-1] == (max_tokens - 1) % 8 + 1


def test_given_text_ends_at_the_eos_it_spells_out(loaded: LoadedModel) -> None:
    prompt = replace(make_prompts(1)[0], completion="ab<|im_end|>cd")
    ids = given_completion_ids(prompt, loaded, 99)
    assert len(ids) == 3
    assert ids[-1] == loaded.tokenizer.eos_token_id
    assert given_completion_ids(replace(prompt, completion="ab"), loaded, 99) == ids
    assert given_completion_ids(replace(prompt, completion="ab"), loaded, 2) == ids[:2]
    assert given_completion_ids(replace(prompt, completion=""), loaded, 9) == []


def test_long_prompts_are_counted_not_collected(loaded: LoadedModel) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    got = make_collector(loaded, prompts, max_prompt_tokens=12).collect(prompts)
    [(reason, indices)] = got.skipped.items()
    assert "max_prompt_tokens" in reason
    assert indices
    assert len(indices) + len(got.trajectories) == NUM_PROMPTS


def test_a_prompt_that_cannot_be_rendered_stops_or_is_counted(loaded: LoadedModel) -> None:
    good = make_prompts(1)[0]
    bad = Prompt("bad", "test", 9, (Message("user", "raw format takes no messages"),), None)
    with pytest.raises(UsageError, match="bad"):
        make_collector(loaded, [good, bad]).collect([good, bad])
    got = make_collector(loaded, [good, bad], on_bad_input=OnBadInput.SKIP).collect([good, bad])
    assert got.skipped == {"prompt cannot be rendered": [9]}
    assert len(got.trajectories) == 1


def test_waves_fit_the_pages_and_change_nothing(loaded: LoadedModel) -> None:
    prompts = make_prompts(6)
    roomy = make_collector(loaded, prompts)
    tight = make_collector(loaded, prompts, EngineConfig(kv_memory_mib=1, page_size=16))
    tight.engine.pool._free = tight.engine.pool._free[:8]
    tight.engine.pool.num_pages = 8
    waves = list(tight._waves(tight._jobs_of(prompts, {})))
    assert len(waves) > 1
    assert tight.collect(prompts).trajectories == roomy.collect(prompts).trajectories
    assert tight.engine.scheduler.num_preemptions == 0
    assert tight.engine.pool.num_free == 8


def test_a_prompt_that_never_fits_is_a_clear_error_and_leaks_nothing(loaded: LoadedModel) -> None:
    prompts = make_prompts(2)
    tight = make_collector(loaded, prompts, EngineConfig(kv_memory_mib=1))
    tight.engine.pool._free = tight.engine.pool._free[:1]
    tight.engine.pool.num_pages = 1
    with pytest.raises(UsageError, match=r"engine\.kv_memory_mib"):
        tight.collect(prompts)
    assert tight.engine.pool.num_free == 1


# Not finite ---------------------------------------------------------------------------------------------------------


def poisoned(tiny_loaded: LoadedFactory, rows: slice) -> LoadedModel:
    loaded = tiny_loaded("llama", torch.float64)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[rows] = float("nan")  # type: ignore[index]
    return loaded


@pytest.mark.parametrize("source", list(TargetSource))
def test_a_model_of_nan_ends_with_one_line(
    tiny_loaded: LoadedFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: TargetSource,
) -> None:
    monkeypatch.setattr(collector, "load_model", lambda *_, **__: poisoned(tiny_loaded, slice(None)))
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{c}", "completion": "abcdef"}}\n' for c in "abc"))
    argv = ["collect", "--input", str(tmp_path / "p.jsonl"), "--split", "all", "--raw", "--dtype", "float64"]
    argv += ["--max-tokens", "20", "--target-source", source.value, "--output", str(tmp_path / "set")]
    assert cli.main(argv) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "no trajectory" in errors[0]
    assert "logits are not finite" in errors[0]


@pytest.mark.parametrize("wave_size", [1, 3])
def test_one_completion_that_meets_nan_costs_no_other(tiny_loaded: LoadedFactory, wave_size: int) -> None:
    # The byte '!' poisons whatever reads it.
    loaded = tiny_loaded("llama", torch.float64)
    token = loaded.tokenizer("!", add_special_tokens=False)["input_ids"][0]
    prompts = make_prompts(3)
    plain = make_collector(loaded, prompts).collect(prompts).trajectories
    assert all(token not in row.completion_ids for row in plain), "choose another byte"
    broken = poisoned(tiny_loaded, slice(token, token + 1))
    mixed = [prompts[0], replace(prompts[1], text="a!" + "b" * 60), prompts[2]]
    got = make_collector(broken, mixed, wave_size=wave_size).collect(mixed)
    assert got.skipped == {"logits are not finite": [prompts[1].source_index]}
    assert got.trajectories == [plain[0], plain[2]]


# Kills of the whole command -----------------------------------------------------------------------------------------


def collect_in_child(
    argv: Sequence[str], loaded: LoadedModel, *, interrupted_at: int | None = None
) -> multiprocessing.process.BaseProcess:
    """Run ``jacobi-data collect`` in a forked process, which has the model already.

    With ``interrupted_at`` the process gets SIGINT when it is about to write the shard of that number.
    """

    def interrupted(folder: Path, number: int, rows: Sequence[Trajectory]) -> tuple[str, str]:
        if number == interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)
        return write_shard(folder, number, rows)

    def main() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # A suite started in the background inherits an ignored SIGINT, and Python leaves it so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        collector.load_model = lambda *_, **__: loaded  # type: ignore[assignment]
        collector.write_shard = interrupted
        sys.exit(cli.main(argv))

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    return child


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(12)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    flags = ["--input", str(tmp_path / "p.jsonl"), "--split", "all", "--raw", "--dtype", "float64", "--window", "8"]
    return ["collect", *flags, "--max-tokens", "40", "--shard-size", "2"]


def test_kills_at_random_moments_lose_and_double_nothing(loaded: LoadedModel, argv: list[str], tmp_path: Path) -> None:
    reference = collect_in_child([*argv, "--output", str(tmp_path / "unbroken")], loaded)
    started = time.monotonic()
    reference.join(60)
    seconds = time.monotonic() - started
    assert reference.exitcode == 0
    draw = random.Random(0)
    num_killed = 0
    for _ in range(30):
        child = collect_in_child([*argv, "--output", str(tmp_path / "broken")], loaded)
        child.join(draw.uniform(0.05, 0.4) * seconds)
        if child.exitcode is None:
            child.kill()
            num_killed += 1
        child.join(60)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        if (tmp_path / "broken" / MANIFEST).exists():
            list(read_trajectories(tmp_path / "broken"))  # what is there is whole at any time
    else:
        final = collect_in_child([*argv, "--output", str(tmp_path / "broken")], loaded)
        final.join(60)
        assert final.exitcode == 0
    assert num_killed > 0
    assert contents(tmp_path / "broken") == contents(tmp_path / "unbroken")


def test_an_interrupt_ends_with_130_and_whole_files(loaded: LoadedModel, argv: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    child = collect_in_child([*argv, "--output", str(folder)], loaded, interrupted_at=2)
    child.join(60)
    assert child.exitcode == 130
    manifest = Manifest.read(folder)
    assert sorted(manifest.shards) == [0, 1]
    assert len(list(read_trajectories(folder))) == manifest.num_rows
    assert not list(folder.glob("*.tmp"))
