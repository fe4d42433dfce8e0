"""Collection: complete or absent, resumable after any kill, shared by any number of workers."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs.checkpoint import CheckpointMode, JacobiCheckpointConfig, save_checkpoint_config
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import FillPolicy, ObjectiveName
from jacobi_llm.data import cli, collection
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.store import MANIFEST, Manifest, claimed_shard, read_trajectories, write_shard
from jacobi_llm.infer.models import LoadedModel
from tests.data.trajectories import Unwatched, collection_of, contents, make_collector, make_prompts, write_set

LoadedFactory = Callable[..., LoadedModel]
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def loaded(tiny_loaded: LoadedFactory) -> LoadedModel:
    return tiny_loaded("llama", torch.float64)


@pytest.fixture(scope="module")
def unbroken(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a set of three shards that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), folder)
    return contents(folder)


def test_every_prompt_once_and_in_order(loaded: LoadedModel, tmp_path: Path) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    manifest = write_set(make_collector(loaded), prompts, tmp_path)
    assert manifest.is_complete
    rows = list(read_trajectories(tmp_path))
    assert [row.source_index for row in rows] == [prompt.source_index for prompt in prompts]
    for row in rows:
        row.check()


def test_equal_prompts_are_legal(loaded: LoadedModel, tmp_path: Path) -> None:
    prompt = make_prompts(1)[0]
    twins = [replace(prompt, source_index=index) for index in (0, 1, 5)]
    write_set(make_collector(loaded), twins, tmp_path)
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
        patched.setattr(collection, "write_shard", stop_after)
        with pytest.raises(KeyboardInterrupt):
            write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), tmp_path)
    assert sorted(Manifest.read(tmp_path).shards) == list(range(num_before))
    write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), tmp_path)
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

    monkeypatch.setattr(collection, "write_shard", watched)
    write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), tmp_path)
    assert written == [1]
    assert contents(tmp_path) == unbroken
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "shard-00001.parquet" in line
    assert "again" in line


def test_other_settings_are_refused_by_name(loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in unbroken.items():
        (tmp_path / name).write_bytes(content)
    other = make_collector(loaded, window=4, seed=3)
    with pytest.raises(UsageError) as caught:
        write_set(other, make_prompts(NUM_PROMPTS + 1), tmp_path)
    assert "window: [8] there, [4] now" in str(caught.value)
    assert "seed: 0 there, 3 now" in str(caught.value)
    assert "prompts_sha256" in str(caught.value)
    assert contents(tmp_path) == unbroken


def test_another_model_of_the_same_name_is_refused(
    loaded: LoadedModel, tiny_loaded: LoadedFactory, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / MANIFEST).write_bytes(unbroken[MANIFEST])
    with pytest.raises(UsageError, match="model_sha256"):
        write_set(make_collector(tiny_loaded("llama", torch.float64, seed=1)), make_prompts(NUM_PROMPTS), tmp_path)


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
        collection.load_model = lambda *_, **__: loaded  # type: ignore[assignment]
        collection.write_shard = interrupted
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
    assert sorted(manifest.shards) == [0, 1, 2]  # the one in hand is finished
    assert len(list(read_trajectories(folder))) == manifest.num_rows
    assert not list(folder.glob("*.tmp"))


def test_a_trained_model_names_the_set_of_the_round_before(loaded: LoadedModel, tmp_path: Path) -> None:
    prompts = make_prompts(2)
    first = write_set(make_collector(loaded), prompts, tmp_path / "first")
    assert first.previous == {}
    checkpoint = JacobiCheckpointConfig(
        mode=CheckpointMode.MERGED,
        window=8,
        fill=FillPolicy.NGRAM,
        acceptance_by_depth=[],
        objective=ObjectiveName.JACOBI_FORCING,
        data_sha256=first.data_sha256,
        base_model="tiny",
        tokens_trained=1,
    )
    save_checkpoint_config(checkpoint, tmp_path / "model")
    trained = replace(loaded, path=str(tmp_path / "model"))
    write_set(make_collector(trained, window=16), prompts, tmp_path / "second")
    assert Manifest.read(tmp_path / "second").previous == {
        "data_sha256": first.data_sha256,
        "window": 8,
        "objective": "jacobi-forcing",
        "base_model": "tiny",
    }


# Several workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_in_any_order_give_the_same_set(
    loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path, world_size: int
) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    collector = make_collector(loaded)
    workers = [collection_of(collector, prompts, tmp_path, Ranks(rank, world_size)) for rank in range(world_size)]
    watchers = [Unwatched() for _ in workers]
    manifests = [worker.open() for worker in workers]
    # Each in turn collects one shard of its order; what another has is passed over.
    for turn in range(3):
        for worker, watcher, manifest in zip(workers, watchers, manifests, strict=True):
            worker.collect_shard(worker.ranks.order(manifest.num_shards)[turn], watcher)
    assert sorted(number for watcher in watchers for number in watcher.finished_numbers) == [0, 1, 2]
    assert workers[0].work(Unwatched()).is_complete
    assert contents(tmp_path) == unbroken


def test_a_shard_that_another_holds_is_left_to_it(
    loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    watcher = Unwatched()
    collection_of(make_collector(loaded), prompts, tmp_path).open()
    with claimed_shard(tmp_path, 1) as is_ours:
        assert is_ours
        manifest = collection_of(make_collector(loaded), prompts, tmp_path).work(watcher)
        assert watcher.finished_numbers == [0, 2]
        assert not manifest.is_complete
    assert [row.source_index for row in read_trajectories(tmp_path)] == [0, 3, 6, 18, 21]
    assert write_set(make_collector(loaded), prompts, tmp_path).is_complete
    assert contents(tmp_path) == unbroken


def test_processes_that_start_together_share_the_work(loaded: LoadedModel, argv: list[str], tmp_path: Path) -> None:
    reference = collect_in_child([*argv, "--output", str(tmp_path / "alone")], loaded)
    reference.join(60)
    children = [collect_in_child([*argv, "--output", str(tmp_path / "shared")], loaded) for _ in range(3)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


def test_a_full_disk_is_one_line_and_loses_nothing(
    loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_syncs = 0

    def full(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        if num_syncs == 9:  # the file of the second shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    prompts = make_prompts(NUM_PROMPTS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            RunError, match=r"shard-0000\d\.(parquet|json): cannot be written \(No space left.*\); free"
        ):
            write_set(make_collector(loaded), prompts, tmp_path)
    assert Manifest.read(tmp_path).shards
    write_set(make_collector(loaded), prompts, tmp_path)
    assert contents(tmp_path) == unbroken


def test_too_little_room_is_foreseen(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RunError, match="missing shards will take about"):
        write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), tmp_path)


def test_a_folder_of_shards_without_a_manifest_is_refused(
    loaded: LoadedModel, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "shard-00000.parquet").write_bytes(unbroken["shard-00000.parquet"])
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        write_set(make_collector(loaded), make_prompts(NUM_PROMPTS), tmp_path)
