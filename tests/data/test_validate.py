"""Every kind of planted fault is found, and none where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import Recipe, TargetSource
from jacobi_llm.data import validate
from jacobi_llm.data.cli import main
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.store import Manifest, read_shard
from jacobi_llm.infer.models import LoadedModel
from tests.data.trajectories import contents, make_collector, make_prompts, replace_shard, write_set

LoadedFactory = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def loaded(tiny_loaded: LoadedFactory) -> LoadedModel:
    return tiny_loaded("llama", torch.float64)


@pytest.fixture(scope="module", params=list(TargetSource))
def good(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("good")
    prompts = make_prompts(5, with_completions=True)
    write_set(make_collector(loaded, target_source=request.param), prompts, folder)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def faults_of(folder: Path, rerun: int = 0) -> list[str]:
    before = contents(folder)
    recipe = Recipe.model_validate({"stats": {"path": str(folder), "rerun": rerun}, "engine": {"kv_memory_mib": 8}})
    try:
        assert validate.run(recipe, Options()) == 0
        faults = []
    except RunError as error:
        faults = error.faults
    assert contents(folder) == before
    return faults


def change_row(folder: Path, change: Callable[[Trajectory], Trajectory]) -> None:
    rows = read_shard(folder, Manifest.read(folder).shards[0])
    replace_shard(folder, 0, [change(rows[0]), *rows[1:]])


def change_block(folder: Path, change: Callable[[Block], Block]) -> None:
    change_row(folder, lambda row: replace(row, blocks=[change(row.blocks[0]), *row.blocks[1:]]))


@pytest.fixture
def with_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "load_model", lambda *_, **__: loaded)


@pytest.mark.usefixtures("with_model")
def test_a_good_set_has_no_fault(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults_of(good, rerun=99) == []
    out = capsys.readouterr().out
    assert "rerun: 5 trajectories" in out
    assert "0 blocks differ" in out
    assert out.endswith("ok\n")


def swap_states(block: Block) -> Block:
    states = list(block.states)
    states[3], states[4] = states[4], states[3]
    return replace(block, states=states)


def test_swapped_states_are_out_of_time_order(copy: Path) -> None:
    change_block(copy, swap_states)
    [fault] = faults_of(copy)
    assert "block 0" in fault
    assert "not in time order" in fault


def test_swapped_states_show_in_bfloat16_too(copy: Path) -> None:
    manifest = Manifest.read(copy)
    if manifest.settings["target_source"] == "given":
        pytest.skip("with given completions in bfloat16, only the rerun can tell")
    manifest.settings["dtype"] = "bfloat16"
    manifest.write(copy)
    change_block(copy, swap_states)
    [fault] = faults_of(copy)
    assert "not in time order" in fault


@pytest.mark.usefixtures("with_model")
def test_a_wrong_fixed_point_shows_in_the_rerun(copy: Path) -> None:
    def change(block: Block) -> Block:
        end = block.fixed_point or list(range(3, 11))
        return replace(block, fixed_point=[*end[:7], 12])

    change_block(copy, change)
    is_given = Manifest.read(copy).settings["target_source"] == "given"
    assert bool(faults_of(copy)) == (not is_given)  # nothing but the model can tell where y* was given
    if is_given:
        [fault] = faults_of(copy, rerun=5)
        assert "rerun: trajectory p0, block at 0" in fault


@pytest.mark.usefixtures("with_model")
def test_a_changed_state_shows_in_the_rerun(copy: Path) -> None:
    def change(block: Block) -> Block:
        states = [list(state) for state in block.states]
        states[1][-1] = 100 if states[1][-1] != 100 else 101
        return replace(block, states=states)

    change_block(copy, change)
    assert faults_of(copy) == []
    [fault] = faults_of(copy, rerun=5)
    assert "state 1 differs at token 7" in fault


def test_tokens_after_eos(copy: Path) -> None:
    manifest = Manifest.read(copy)
    [row] = read_shard(copy, manifest.shards[0])[:1]
    manifest.settings["eos_token_ids"] = [row.completion_ids[4]]
    manifest.write(copy)
    assert any("trajectory p0: tokens after the end-of-sequence token at" in fault for fault in faults_of(copy))


def test_a_finish_reason_that_the_tokens_deny(copy: Path) -> None:
    change_row(copy, lambda row: replace(row, finish_reason="stop" if row.finish_reason == "length" else "length"))
    [fault] = faults_of(copy)
    assert "finish reason" in fault


def test_a_prompt_twice_and_a_prompt_lost(copy: Path) -> None:
    rows = read_shard(copy, Manifest.read(copy).shards[0])
    replace_shard(copy, 0, [*rows[:2], rows[0]])
    faults = faults_of(copy)
    assert any("source index 0, window 8: 2 times" in fault for fault in faults)
    assert any("3 trajectories of 2 prompts" in fault for fault in faults)
    replace_shard(copy, 0, rows[:2])
    [fault] = faults_of(copy)
    assert "2 prompts + 0 skipped ones, collect.shard_size is 3" in fault
    replace_shard(copy, 0, rows, skipped={"reason": [rows[0].source_index]})
    assert any("is skipped, and in the set once more" in fault for fault in faults_of(copy))


def test_all_faults_are_listed_at_once(copy: Path) -> None:
    change_block(copy, swap_states)
    change_row(copy, lambda row: replace(row, window=7))
    path = copy / "shard-00001.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    faults = faults_of(copy)
    assert any("shard-00001.parquet: damaged" in fault for fault in faults)
    assert any("trajectory p0" in fault for fault in faults)


def test_a_missing_shard_and_an_incomplete_set(copy: Path) -> None:
    (copy / "shard-00001.parquet").unlink()
    [fault] = faults_of(copy)
    assert "cannot be read" in fault
    manifest = Manifest.read(copy)
    del manifest.shards[1]
    manifest.write(copy)
    [fault] = faults_of(copy)
    assert "1 of 2 shards" in fault


def test_a_rerun_with_other_weights_is_refused(
    copy: Path, tiny_loaded: LoadedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_loaded("llama", torch.float64, seed=1)
    monkeypatch.setattr(validate, "load_model", lambda *_, **__: other)
    [fault] = faults_of(copy, rerun=1)
    assert "weights" in fault


def test_a_rerun_without_the_model_keeps_the_other_faults(copy: Path) -> None:
    manifest = Manifest.read(copy)
    manifest.settings["model"] = str(copy / "nowhere")
    manifest.write(copy)
    change_block(copy, swap_states)
    faults = faults_of(copy, rerun=1)
    assert len(faults) == 2
    assert faults[1].startswith("rerun: model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_near_tie_is_counted_not_a_fault(
    copy: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.read(copy)
    manifest.settings["dtype"] = dtype
    manifest.write(copy)

    def change(block: Block) -> Block:
        states = [list(state) for state in block.states]
        states[1][-1] = 100 if states[1][-1] != 100 else 101
        return replace(block, states=states)

    change_block(copy, change)
    monkeypatch.setattr(validate, "load_model", lambda *_, **__: loaded)
    gap: dict[str, Any] = {"float32": 1e-6, "bfloat16": 0.5}
    monkeypatch.setattr("jacobi_llm.data.sequential.choice_gap", lambda *_: gap[dtype])
    assert faults_of(copy, rerun=5) == []
    assert "1 blocks differ, 1 of them by rounding" in capsys.readouterr().out


def made_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    code = main(["validate", str(folder)])
    faults = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == (1 if faults else 0)
    return faults


@pytest.fixture
def made(good: Path, tmp_path: Path) -> dict[str, Path]:
    """A collected set split, merged again, and exported and imported."""
    split, merged, exported = tmp_path / "split", tmp_path / "merged", tmp_path / "x.json"
    assert main(["split", str(good), "--output", str(split), "--heldout-share", "0.5", "--seed", "1"]) == 0
    assert main(["merge", str(split / "train"), str(split / "heldout"), "--output", str(merged)]) == 0
    assert main(["export", str(merged), "--to", "consistency-llm", "--output", str(exported)]) == 0
    assert main(["import", str(exported), "--output", str(tmp_path / "imported")]) == 0
    return {"train": split / "train", "heldout": split / "heldout", "merged": merged, "imported": tmp_path / "imported"}


def test_made_sets_have_no_fault(made: dict[str, Path], good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in made.values():
        assert made_faults(folder, capsys) == []
    assert Manifest.read(made["merged"]).num_rows == Manifest.read(good).num_rows


def test_faults_of_made_sets_are_found(made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_shard(made["merged"], Manifest.read(made["merged"]).shards[0])
    replace_shard(made["merged"], 0, rows[:-1])
    [line] = made_faults(made["merged"], capsys)
    assert f"{len(rows) - 1} trajectories, but {len(rows)} were taken from train, heldout" in line

    replace_shard(made["imported"], 0, rows, num_completion_tokens=1, num_block_passes=1)
    assert "completion tokens, the manifest says 1" in made_faults(made["imported"], capsys)[0]

    ours, others = (read_shard(made[side], Manifest.read(made[side]).shards[0]) for side in ("train", "heldout"))
    replace_shard(made["train"], 0, [others[0], *ours[1:]])
    assert f"trajectory {others[0].id}: belongs to the set heldout" in made_faults(made["train"], capsys)[0]


def test_a_damaged_set_that_was_made_of_others_is_made_again_not_collected(
    made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = made["imported"] / "shard-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    [line] = made_faults(made["imported"], capsys)
    assert "make the set again from" in line
    assert "collect" not in line


def test_what_is_made_of_others_is_not_run_again(made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(made["merged"]), "--rerun", "1"]) == 1
    assert "rerun those" in capsys.readouterr().err
