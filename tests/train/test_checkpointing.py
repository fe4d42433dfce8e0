"""Checkpoints are complete or absent, and a run goes on only from one of its own kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.train import checkpointing
from jacobi_llm.train.checkpointing import MARK, Checkpoint, RankError, find
from jacobi_llm.train.data_order import Ranks

ALONE = Ranks(0, 1)
SETTINGS = {"train.lr": 0.1, "objective.name": "ar"}


class FakeEngine:
    """Writes two files, as DeepSpeed does; ``fails`` makes the second one fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_checkpoint(self, folder: str, *, tag: str, **_: Any) -> None:
        target = Path(folder) / tag
        target.mkdir(parents=True)
        (target / "model.pt").write_bytes(b"model " + tag.encode() * 50)
        if self.error:
            raise self.error
        (target / "optimizer.pt").write_bytes(b"optimizer " + tag.encode() * 50)


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)


def save(folder: Path, step: int, *, keep: int = 9, engine: Any = None, world_size: int = 1) -> None:
    state = Checkpoint(step, 10 * step, world_size, SETTINGS)
    checkpointing.save(engine or FakeEngine(), folder, state, ALONE, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_is_found_with_what_it_was_saved_with(tmp_path: Path) -> None:
    assert find(tmp_path, "auto", SETTINGS, ALONE) is None
    for step in (5, 10):
        save(tmp_path, step)
    found = find(tmp_path, "auto", SETTINGS, ALONE)
    assert found is not None
    assert (found.step, found.num_tokens_trained, found.settings) == (10, 100, SETTINGS)
    assert found.path == tmp_path / "checkpoints" / "step-000010"
    assert sorted(found.files) == ["model.pt", "optimizer.pt"]


def without_mark(path: Path) -> None:
    (path / MARK).unlink()


def one_byte_short(path: Path) -> None:
    content = (path / "model.pt").read_bytes()
    (path / "model.pt").write_bytes(content[:-1])


def one_bit_flipped(path: Path) -> None:
    content = bytearray((path / "model.pt").read_bytes())
    content[7] ^= 1
    (path / "model.pt").write_bytes(content)


def missing_file(path: Path) -> None:
    (path / "optimizer.pt").unlink()


def empty_mark(path: Path) -> None:
    (path / MARK).write_text("")


def foreign_mark(path: Path) -> None:
    (path / MARK).write_text('{"step": 3}')


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (without_mark, "incomplete, no complete.json (the save did not finish)"),
    (one_byte_short, "model.pt has "),
    (one_bit_flipped, "model.pt was changed (sha256 differs)"),
    (missing_file, "optimizer.pt is missing"),
    (empty_mark, "complete.json is damaged"),
    (foreign_mark, "complete.json is damaged"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_field_case_t10_an_incomplete_checkpoint_is_passed_over_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], reason: str
) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    newest = tmp_path / "checkpoints" / "step-000010"
    damage(newest)
    found = find(tmp_path, "auto", SETTINGS, ALONE)
    assert found is not None
    assert found.step == 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {newest}: {reason}")
    # Asked for by name, it is refused.
    with pytest.raises(UsageError, match=r"train\.resume: "):
        find(tmp_path, str(newest), SETTINGS, ALONE)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(tmp_path: Path, error: Exception) -> None:
    save(tmp_path, 5)
    with pytest.raises(RankError, match=r"step-000010: checkpoint not written \(.*\); earlier ones are kept"):
        save(tmp_path, 10, engine=FakeEngine(error))
    found = find(tmp_path, "auto", SETTINGS, ALONE, verbose=False)
    assert found is not None
    assert found.step == 5
    # The next save of that step starts clean.
    save(tmp_path, 10)
    found = find(tmp_path, "auto", SETTINGS, ALONE)
    assert found is not None
    assert found.step == 10


def test_another_rank_that_ends_is_not_reported_as_a_failed_save(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        save(tmp_path, 5, engine=FakeEngine(RuntimeError("Connection closed by peer [127.0.0.1]:1")))
    assert not isinstance(caught.value, RankError)


def test_old_ones_go_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    without_mark(tmp_path / "checkpoints" / "step-000003")
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_one_from_the_future_stays_until_it_is_reached(tmp_path: Path) -> None:
    """A run resumed from an earlier checkpoint must not lose it to the later ones."""
    for step in (2, 4, 6):
        save(tmp_path, step)
    one_bit_flipped(tmp_path / "checkpoints" / "step-000006")
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-000005", "step-000006"]
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-000006"]
    assert find(tmp_path, "auto", SETTINGS, ALONE) is not None


def test_steps_beyond_six_digits_sort_by_number(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000, keep=1)
    assert names(tmp_path) == ["step-1000000"]


def test_field_case_k05_never_does_not_overwrite(tmp_path: Path) -> None:
    assert find(tmp_path, "never", SETTINGS, ALONE) is None
    save(tmp_path, 5)
    with pytest.raises(UsageError, match=r"never, but .* holds checkpoints; choose another train\.output"):
        find(tmp_path, "never", SETTINGS, ALONE)


def test_a_named_checkpoint_is_taken_from_anywhere(tmp_path: Path) -> None:
    save(tmp_path / "a", 5)
    shutil.move(tmp_path / "a" / "checkpoints" / "step-000005", tmp_path / "kept")
    found = find(tmp_path / "b", str(tmp_path / "kept"), SETTINGS, ALONE)
    assert found is not None
    assert found.step == 5
    with pytest.raises(UsageError, match=r"train.resume: .*nowhere: no such checkpoint folder"):
        find(tmp_path / "b", str(tmp_path / "nowhere"), SETTINGS, ALONE)


def test_other_settings_and_another_world_size_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 5, world_size=2)
    changed = {**SETTINGS, "train.lr": 0.2}
    with pytest.raises(UsageError, match=r"train.lr: 0.1 there, 0.2 now; ranks: 2 there, 1 now") as caught:
        find(tmp_path, "auto", changed, ALONE)
    assert len(caught.value.faults) == 1
    assert "objective.name" not in str(caught.value)


def test_the_mark_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    save(tmp_path, 5)
    mark = json.loads((tmp_path / "checkpoints" / "step-000005" / MARK).read_text())
    assert list(mark) == ["step", "num_tokens_trained", "world_size", "settings", "files"]
    assert mark["files"]["model.pt"]["bytes"] == 556
