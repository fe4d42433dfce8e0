"""Trajectory sets on disk: Parquet shards and a manifest, all of them complete or absent.

``manifest.json`` comes first, with everything that the content depends on. A shard is written to a temporary name and
renamed; after that a record of it, ``shard-00012.json``, is written in the same way. A run that dies between the two
leaves a shard without a record, which is written again: no row is lost or doubled. When the last record is there, all
of them move into the manifest.

Several processes, also of several machines that share the folder, can write one set: each holds a lock on the shard
that it is working on (``.claims``), which the system takes back when the process ends, however it ends.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import remove_leftovers, write_atomically
from jacobi_llm.configs.loader import RESOLVED_NAME
from jacobi_llm.data.record import ARROW_SCHEMA, SCHEMA_VERSION, Trajectory

MANIFEST = "manifest.json"
LOCK = ".lock"
CLAIMS = ".claims"
LOCK_TIMEOUT_S = 60.0
COLLECT_AGAIN = "run the same jacobi-data collect again: only what is missing or damaged is done"


@dataclass(frozen=True)
class Shard:
    """One finished shard.

    Attributes:
        file: name in the folder.
        num_rows: trajectories in it.
        sha256: of the file.
        skipped: reason -> source indices of prompts that gave no trajectory.
        num_unconverged: blocks whose iteration hit its bound.
        num_completion_tokens, num_block_passes: completion tokens, and passes that their blocks take at batch 1.
    """

    file: str
    num_rows: int
    sha256: str
    skipped: dict[str, list[int]] = field(default_factory=dict)
    num_unconverged: int = 0
    num_completion_tokens: int = 0
    num_block_passes: int = 0


@dataclass
class Manifest:
    """What a trajectory set says of itself.

    Attributes:
        settings: everything the content depends on (model, tokenizer and template hashes, decode settings, seed).
        versions: package versions of the run that started the set.
        num_shards: shards of the finished set.
        shards: finished shards by number.
        bad_input: reason -> input lines that were no prompts (collect.on_bad_input=skip).
        cleaning: what was done to the prompts before, with counts; empty when nothing was.
        parents: sets that this one was made of, each with its data_sha256 and settings; empty when it was collected.
        previous: the set that the model was trained on (data_sha256, window, objective, base_model), as its checkpoint
            says; empty for a model that was not trained here.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    num_shards: int
    shards: dict[int, Shard] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    bad_input: dict[str, int] = field(default_factory=dict)
    cleaning: dict[str, Any] = field(default_factory=dict)
    parents: list[dict[str, Any]] = field(default_factory=list)
    previous: dict[str, Any] = field(default_factory=dict)

    @property
    def windows(self) -> list[int]:
        """Block sizes n (tokens) in the set."""
        return [int(window) for window in self.settings.get("window", ())]

    @property
    def is_complete(self) -> bool:
        return len(self.shards) == self.num_shards

    @property
    def data_sha256(self) -> str:
        """Hash of the set: of its shards' hashes in order."""
        text = "".join(self.shards[number].sha256 for number in sorted(self.shards))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def remedy(self) -> str:
        """What makes a damaged or unfinished set whole."""
        if not self.parents:
            return COLLECT_AGAIN
        names = ", ".join(str(parent.get("name")) for parent in self.parents)
        return f"make the set again from {names}, in another folder"

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards.values())

    @property
    def num_unconverged(self) -> int:
        return sum(shard.num_unconverged for shard in self.shards.values())

    @property
    def tokens_per_forward(self) -> float | None:
        """TPF of the block procedure over the finished shards; None where nothing has been counted."""
        num_passes = sum(shard.num_block_passes for shard in self.shards.values())
        return sum(shard.num_completion_tokens for shard in self.shards.values()) / num_passes if num_passes else None

    @property
    def num_skipped(self) -> dict[str, int]:
        """Prompts without a trajectory, by reason."""
        counts: Counter[str] = Counter()
        for shard in self.shards.values():
            counts.update({reason: len(indices) for reason, indices in shard.skipped.items()})
        return dict(sorted(counts.items()))

    def write(self, folder: Path) -> None:
        """Write the manifest atomically.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        write_atomically(folder / MANIFEST, json.dumps(self.to_payload(), indent=1, ensure_ascii=False) + "\n")

    def to_payload(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "shards": {str(n): asdict(self.shards[n]) for n in sorted(self.shards)}}

    @classmethod
    def of_payload(cls, payload: dict[str, Any]) -> Manifest:
        """Inverse of :meth:`to_payload`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is none.
        """
        shards = {int(number): _parse_shard(int(number), one) for number, one in payload["shards"].items()}
        manifest = cls(**{**payload, "shards": shards})
        if not isinstance(manifest.num_shards, int) or not set(shards) <= set(range(manifest.num_shards)):
            raise ValueError("shards beyond num_shards")
        _check_types(manifest)
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest, with the records of shards that are not in it yet.

        Raises:
            UsageError: there is none in ``folder``.
            RunError: it, or a record, cannot be read or parsed, or it is of another schema version.
        """
        manifest = cls.read_alone(folder)
        for number in range(0 if manifest.is_complete else manifest.num_shards):
            path = folder / record_name(number)
            if number in manifest.shards or not path.is_file():
                continue
            try:
                manifest.shards[number] = read_record(folder, number)
            except RunError:
                if path.exists():
                    raise
        if not manifest.is_complete:
            # Whoever closed the set meanwhile has moved the records into the manifest.
            now = cls.read_alone(folder)
            manifest = now if now.is_complete else manifest
        return manifest

    @classmethod
    def read_alone(cls, folder: Path) -> Manifest:
        """As :meth:`read`, without the records: what it costs does not grow with a set that is being collected."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError(f"{folder}: no {MANIFEST} here; collect trajectories first (jacobi-data collect)")
        try:
            payload = json.loads(path.read_bytes())
            if not isinstance(payload, dict):
                raise ValueError(f"a JSON {type(payload).__name__}, not an object")
            version = payload["schema_version"]
            manifest = cls.of_payload(payload)
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else error
            raise RunError(
                f"{path}: damaged manifest ({reason}); restore it, or remove it to collect the set anew"
            ) from error
        if version != SCHEMA_VERSION:
            raise RunError(
                f"{path}: schema version {version}, this release reads {SCHEMA_VERSION}; collect the set anew"
            )
        return manifest


def shard_name(number: int) -> str:
    """File name of shard ``number``."""
    return f"shard-{number:05d}.parquet"


def record_name(number: int) -> str:
    """File name of the record of shard ``number``."""
    return f"shard-{number:05d}.json"


def write_record(folder: Path, number: int, shard: Shard) -> None:
    """Make a shard that has been written part of the set.

    Raises:
        RunError: the folder cannot be written, or the disk is full.
    """
    write_atomically(folder / record_name(number), json.dumps(asdict(shard), ensure_ascii=False) + "\n")


def read_record(folder: Path, number: int) -> Shard:
    """Read the record of one shard.

    Raises:
        RunError: it is missing or damaged.
    """
    path = folder / record_name(number)
    try:
        return _parse_shard(number, json.loads(path.read_bytes()))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: damaged record ({error}); remove it to collect the shard anew") from error


def write_shard(folder: Path, number: int, rows: Sequence[Trajectory]) -> tuple[str, str]:
    """Write one shard atomically; returns its file name and sha256.

    Raises:
        RunError: the folder cannot be written, or the disk is full.
    """
    table = pa.Table.from_pylist([row.to_row() for row in rows], schema=ARROW_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    name = shard_name(number)
    write_atomically(folder / name, content)
    return name, hashlib.sha256(content).hexdigest()


def read_shard(folder: Path, shard: Shard, remedy: str = COLLECT_AGAIN) -> list[Trajectory]:
    """Read one shard after checking its hash; ``remedy`` is what a message advises.

    Raises:
        RunError: the file is missing, was changed or cut, has another schema, or holds another number of rows.
    """
    path = folder / shard.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != shard.sha256:
        raise RunError(f"{path}: damaged, sha256 {digest[:12]}… is not the manifest's {shard.sha256[:12]}…; {remedy}")
    try:
        table = pq.read_table(pa.BufferReader(content))
        if not table.schema.equals(ARROW_SCHEMA):
            raise RunError(f"{path}: its columns are not those of a trajectory shard; {remedy}")
        rows = [Trajectory.from_row(row) for row in table.to_pylist()]
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"{path}: not a trajectory shard ({reason}); {remedy}") from error
    if len(rows) != shard.num_rows:
        raise RunError(f"{path}: {len(rows)} rows, the manifest says {shard.num_rows}; {remedy}")
    return rows


def read_trajectories(folder: Path) -> Iterator[Trajectory]:
    """All trajectories of a set, in shard order; every shard's hash is checked before its rows are given out."""
    manifest = Manifest.read(folder)
    for number in sorted(manifest.shards):
        yield from read_shard(folder, manifest.shards[number], manifest.remedy)


@contextmanager
def locked_for_writing(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Make ``folder`` if need be, and keep other processes from opening or closing the set in it meanwhile.

    Raises:
        UsageError: the folder cannot be made or written.
        RunError: another process holds the set for longer than ``timeout_s``.
    """
    lock = FileLock(folder / LOCK, timeout=timeout_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(f"{folder}: another process is writing here; wait for it, or choose another folder") from None
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); choose another folder") from error
    try:
        for name in (MANIFEST, RESOLVED_NAME):
            remove_leftovers(folder / name)
        yield
    finally:
        lock.release()


@contextmanager
def claimed_shard(folder: Path, number: int) -> Iterator[bool]:
    """Hold shard ``number`` while it is collected; the value says whether it is this process's to collect.

    It is not when another process holds it, or when its record is there. What a killed process left of it is removed.
    """
    lock = FileLock(folder / CLAIMS / shard_name(number), timeout=0)
    try:
        (folder / CLAIMS).mkdir(exist_ok=True)
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        if _is_finished(folder, number):  # whoever closed the set removed the claims meanwhile
            yield False
            return
        raise RunError(f"{folder / CLAIMS}: cannot be written ({error.strerror or error})") from error
    try:
        if _is_finished(folder, number):
            yield False
            return
        for name in (shard_name(number), record_name(number)):
            remove_leftovers(folder / name)
        yield True
    finally:
        lock.release()


def close_set(folder: Path) -> Manifest:
    """Move the records into the manifest if all shards are there; returns the manifest, complete or not.

    Raises:
        RunError: as :meth:`Manifest.read` and :func:`locked_for_writing`.
    """
    with locked_for_writing(folder):
        manifest = Manifest.read(folder)
        if manifest.is_complete:
            records = sorted(folder.glob("shard-*.json"))
            if records:
                manifest.write(folder)
            for record in records:
                record.unlink(missing_ok=True)
            shutil.rmtree(folder / CLAIMS, ignore_errors=True)
    return manifest


def _is_finished(folder: Path, number: int) -> bool:
    # In this order: a record is removed only when the manifest has it.
    return (folder / record_name(number)).is_file() or number in Manifest.read_alone(folder).shards


def _check_types(manifest: Manifest) -> None:
    """What a manifest of unknown origin must be for its readers to rely on it."""
    for key in ("settings", "versions", "bad_input", "cleaning", "previous"):
        if not isinstance(getattr(manifest, key), dict):
            raise TypeError(f"{key} is no object")
    if not isinstance(manifest.parents, list) or not all(isinstance(one, dict) for one in manifest.parents):
        raise TypeError("parents is no list of objects")
    if not all(_is_count(count) for count in manifest.bad_input.values()):
        raise TypeError("bad_input holds something that is no count")
    windows = manifest.settings.get("window", [])
    if not isinstance(windows, list) or not all(_is_count(window) for window in windows):
        raise TypeError("settings.window is no list of numbers")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_shard(number: int, record: dict[str, Any]) -> Shard:
    shard = Shard(**record)
    # The name decides what is read and replaced: it must not lead out of the folder.
    counts = (shard.num_rows, shard.num_unconverged, shard.num_completion_tokens, shard.num_block_passes)
    is_sound = shard.file == shard_name(number) and isinstance(shard.sha256, str) and all(map(_is_count, counts))
    if not is_sound or not isinstance(shard.skipped, dict):
        raise ValueError(f"shard {number} is not described rightly")
    if not all(isinstance(one, list) and all(map(_is_count, one)) for one in shard.skipped.values()):
        raise ValueError(f"the skipped prompts of shard {number} are not described rightly")
    return shard
