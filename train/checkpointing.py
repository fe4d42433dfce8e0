"""Training checkpoints: complete or absent.

DeepSpeed writes its files into ``checkpoints/step-N``; the completeness mark, with every file's size and sha256, is
written last and by rename. Resuming takes the newest folder whose mark is there and true, and says what it passed over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.train.data_order import Ranks

MARK = "complete.json"


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: updates done.
        path: the checkpoint.
        client_state: what :func:`save` was given.
    """

    step: int
    path: Path
    client_state: dict[str, Any]


def save(engine: Any, run_folder: Path, step: int, client_state: dict[str, Any], ranks: Ranks, keep: int) -> None:
    """Write the checkpoint of ``step`` updates and drop the oldest beyond ``keep``; called by every rank.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    folder = run_folder / "checkpoints"
    tag = f"step-{step:06d}"
    if ranks.rank == 0:
        _make_room(folder / tag)
    dist.barrier()
    state = {**client_state, "step": step, "world_size": ranks.world_size, "torch_rng": torch.get_rng_state()}
    try:
        engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    except (OSError, RuntimeError) as error:
        raise RunError(f"{folder / tag}: checkpoint not written ({error}); earlier ones are kept") from error
    dist.barrier()
    if ranks.rank == 0:
        files = sorted(path for path in (folder / tag).rglob("*") if path.is_file() and path.name != MARK)
        mark = {
            str(path.relative_to(folder / tag)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        }
        write_atomically(folder / tag / MARK, json.dumps(mark, indent=1).encode())
        for old in _checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def resume(engine: Any, run_folder: Path, mode: str, ranks: Ranks) -> Resumed | None:
    """Load the checkpoint that ``train.resume`` asks for.

    Args:
        engine: DeepSpeed engine.
        run_folder: the run's output folder.
        mode: auto, never, or a checkpoint folder.
        ranks: this process among all.

    Raises:
        UsageError: the named checkpoint is incomplete or of another world size, or ``never`` meets existing ones.
    """
    path = find(run_folder, mode, verbose=ranks.rank == 0)
    if path is None:
        return None
    loaded, client_state = engine.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise RunError(f"{path}: DeepSpeed could not load this checkpoint")
    if client_state["world_size"] != ranks.world_size:
        raise UsageError(
            f"{path}: saved by {client_state['world_size']} ranks, this run has {ranks.world_size}; "
            "start it with as many, or choose another train.output"
        )
    torch.set_rng_state(client_state["torch_rng"])
    return Resumed(int(client_state["step"]), path, client_state)


def find(run_folder: Path, mode: str, *, verbose: bool = True) -> Path | None:
    """The checkpoint to resume from, or None to start anew."""
    found = _all_checkpoints(run_folder / "checkpoints")
    if mode == "never":
        if found:
            raise UsageError(
                f"train.resume: never, but {run_folder} holds checkpoints; choose another train.output or delete them"
            )
        return None
    if mode != "auto":
        path = Path(mode)
        fault = _fault(path)
        if fault:
            raise UsageError(f"train.resume: {path}: {fault}")
        return path
    for path in reversed(found):
        fault = _fault(path)
        if fault is None:
            return path
        if verbose:
            print(f"warning: {path}: {fault}; trying the one before", file=sys.stderr)
    return None


def _fault(path: Path) -> str | None:
    """Why a checkpoint folder must not be loaded; None when every file is what the mark says."""
    if not path.is_dir():
        return "no such checkpoint folder"
    try:
        mark = json.loads((path / MARK).read_bytes())
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in mark.items()}
    except FileNotFoundError:
        return "incomplete (the save did not finish)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its completeness mark is damaged"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if _sha256(file) != digest:
            return f"{name} was changed (sha256 differs)"
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in _all_checkpoints(folder) if (path / MARK).is_file()]


def _all_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _make_room(target: Path) -> None:
    """Remove what an earlier, killed save left under the same name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
