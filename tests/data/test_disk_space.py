"""A disk that is too full is told before the work; one that may become too full is warned about."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import Augmentation
from jacobi_llm.data.disk_space import check_disk_space, most_row_bytes
from jacobi_llm.data.store import Manifest, Shard, shard_name
from tests.data.trajectories import make_collector, make_config, make_prompts
from tests.tiny_models import tiny_loaded

MIB = 1 << 20


def room(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def begun(folder: Path, num_bytes: int) -> Manifest:
    """One of five shards is there."""
    (folder / shard_name(0)).write_bytes(b"x" * num_bytes)
    return Manifest({}, {}, 5, {0: Shard(shard_name(0), 3, "")})


def test_missing_shards_are_taken_to_be_as_large_as_those_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = begun(tmp_path, MIB)
    room(monkeypatch, 4 * MIB)
    check_disk_space(tmp_path, make_config(), 15, manifest)
    room(monkeypatch, 4 * MIB - 1)
    with pytest.raises(RunError, match=r"the 4 missing shards will take about 4 MiB, 4 MiB are free"):
        check_disk_space(tmp_path, make_config(), 15, manifest)
    assert capsys.readouterr().err == ""


def test_before_the_first_shard_the_likely_size_decides_and_the_largest_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(window=16, max_tokens=256)
    most_bytes = 1000 * most_row_bytes(config)
    fresh = Manifest({}, {}, 20)
    room(monkeypatch, most_bytes)
    check_disk_space(tmp_path, config, 1000, fresh)
    assert capsys.readouterr().err == ""
    room(monkeypatch, most_bytes // 2)
    check_disk_space(tmp_path, config, 1000, fresh)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}: the set may take up to {most_bytes / MIB:,.0f} MiB")
    room(monkeypatch, most_bytes // 50)
    with pytest.raises(RunError, match="20 missing shards"):
        check_disk_space(tmp_path, config, 1000, fresh)


def test_a_finished_set_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = begun(tmp_path, MIB)
    manifest.num_shards = 1
    room(monkeypatch, 0)
    check_disk_space(tmp_path, make_config(), 3, manifest)


@pytest.mark.parametrize("augment", list(Augmentation))
def test_no_row_has_more_tokens_than_foreseen(augment: Augmentation) -> None:
    loaded = tiny_loaded("llama", torch.float64)
    collector = make_collector(loaded, window=[4, 9], augment=augment, max_prompt_tokens=32, jitter_starts=True)
    prompts = make_prompts(6)
    num_tokens = sum(
        len(row.prompt_ids)
        + len(row.completion_ids)
        + sum(len(state) for block in row.blocks for state in block.noisy_states)
        for row in collector.collect(prompts).trajectories
    )
    assert 0 < 4 * num_tokens <= len(prompts) * most_row_bytes(collector.config)
