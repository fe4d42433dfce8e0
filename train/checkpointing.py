"""Training checkpoints: complete or absent.

DeepSpeed writes its files into ``checkpoints/step-N``; the mark ``complete.json`` is written last and by rename. It
holds the size and sha256 of every file, and what a run must have in common with this one to go on from here. Resuming
takes the newest folder whose mark is there and true, and says what it passed over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jacobi_llm.configs.errors import JacobiError, RunError, UsageError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.train.data_order import Ranks

FOLDER = "checkpoints"
MARK = "complete.json"
# What gloo says in the ranks that wait for one that has ended.
PEER_ENDED = "closed by peer"


class RankError(RunError):
    """A failure that may have befallen this rank alone, which must therefore tell."""


@dataclass(frozen=True)
class Checkpoint:
    """What a mark says.

    Attributes:
        step: updates done.
        num_tokens_trained: completion tokens trained on so far.
        world_size: ranks that saved it.
        settings: what the weights depend on, by name; a run goes on only with the same.
        files: name -> bytes and sha256.
        path: the folder.
    """

    step: int
    num_tokens_trained: int
    world_size: int
    settings: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: Path = Path()


def save(engine: Any, run_folder: Path, state: Checkpoint, ranks: Ranks, keep: int) -> None:
    """Write the checkpoint ``state`` and drop the oldest beyond ``keep``; called by every rank.

    Weights that are not trained are left out: they are read from the model again.

    Raises:
        RankError: the disk is full or the folder cannot be written.
    """
    folder = run_folder / FOLDER
    target = _path_of(folder, state.step)
    try:
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _remove(target)
        dist.barrier()
        engine.save_checkpoint(str(folder), tag=target.name, save_latest=False, exclude_frozen_parameters=True)
        if ranks.rank == 0:
            _write_mark(target, state)
            _prune(folder, state.step, keep)
    except (OSError, RuntimeError, RunError) as error:
        if PEER_ENDED in str(error):
            raise
        raise RankError(f"{target}: checkpoint not written ({error}); earlier ones are kept") from error
    dist.barrier()


def find(
    run_folder: Path, mode: str, settings: dict[str, Any], ranks: Ranks, *, verbose: bool = True
) -> Checkpoint | None:
    """The checkpoint that ``train.resume`` asks for, or None to start anew. Every rank calls this, rank 0 looks.

    Args:
        run_folder: the run's output folder.
        mode: auto, never, or a checkpoint folder.
        settings: of this run, as in :class:`Checkpoint`.
        ranks: this process among all.
        verbose: name on standard error what is passed over.

    Raises:
        UsageError: the named checkpoint is incomplete, the one found was saved with other settings or by another
            number of ranks, or ``never`` meets existing ones.
    """
    outcome: list[Checkpoint | JacobiError | None] = [None]
    if ranks.rank == 0:
        try:
            outcome = [_find(run_folder, mode, verbose)]
            if isinstance(outcome[0], Checkpoint):
                _check_same(outcome[0], settings, ranks)
        except JacobiError as error:
            outcome = [error]
    if ranks.world_size > 1:
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], JacobiError):
        raise outcome[0]
    return outcome[0]


def load(engine: Any, checkpoint: Checkpoint) -> None:
    """Put weights and optimizer back as they were.

    Raises:
        RunError: DeepSpeed cannot read its own files.
    """
    path = checkpoint.path
    try:
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name, load_module_strict=False)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise RunError(f"{path}: DeepSpeed could not load this checkpoint ({error})") from error
    if loaded is None:
        raise RunError(f"{path}: DeepSpeed could not load this checkpoint")


def _find(run_folder: Path, mode: str, verbose: bool) -> Checkpoint | None:
    found = _all(run_folder / FOLDER)
    if mode == "never":
        if found:
            raise UsageError(
                f"train.resume: never, but {run_folder} holds checkpoints; choose another train.output or delete them"
            )
        return None
    if mode != "auto":
        checkpoint = _read(Path(mode))
        if isinstance(checkpoint, str):
            raise UsageError(f"train.resume: {mode}: {checkpoint}")
        return checkpoint
    for path in reversed(found):
        checkpoint = _read(path)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        if verbose:
            print(f"warning: {path}: {checkpoint}; passed over", file=sys.stderr, flush=True)
    return None


def _check_same(checkpoint: Checkpoint, settings: dict[str, Any], ranks: Ranks) -> None:
    faults = [
        f"{name}: {checkpoint.settings.get(name)} there, {settings.get(name)} now"
        for name in settings | checkpoint.settings
        if checkpoint.settings.get(name) != settings.get(name)
    ]
    if checkpoint.world_size != ranks.world_size:
        faults.append(f"ranks: {checkpoint.world_size} there, {ranks.world_size} now")
    if faults:
        raise UsageError(
            f"{checkpoint.path}: saved by a run that differs ({'; '.join(faults)}); go on with the same settings, or "
            "choose another train.output"
        )


def _read(path: Path) -> Checkpoint | str:
    """Read the mark and compare every file with it; a string says why the folder must not be loaded."""
    if not path.is_dir():
        return "no such checkpoint folder"
    try:
        checkpoint = Checkpoint(**json.loads((path / MARK).read_bytes()), path=path)
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in checkpoint.files.items()}
    except FileNotFoundError:
        return f"incomplete, no {MARK} (the save did not finish)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MARK} is damaged"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if _sha256(file) != digest:
            return f"{name} was changed (sha256 differs)"
    return checkpoint


def _write_mark(target: Path, state: Checkpoint) -> None:
    files = sorted(path for path in target.rglob("*") if path.is_file())
    content = asdict(state)
    del content["path"]
    content["files"] = {
        str(path.relative_to(target)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    write_atomically(target / MARK, json.dumps(content, indent=1) + "\n")


def _prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to ``step``, leave the newest ``keep`` complete ones."""
    past = [path for path in _all(folder) if _order(path) <= _order(_path_of(folder, step))]
    kept = [path for path in past if (path / MARK).is_file()][-keep:]
    for path in past:
        if path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    # The mark goes first, so that a folder half removed is not taken for a damaged one.
    (path / MARK).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def _all(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), key=_order)


def _path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
