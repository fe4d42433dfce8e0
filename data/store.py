"""Trajectory sets on disk: Parquet shards and a manifest, both complete or absent.

A shard is written to a temporary name and renamed; the manifest is rewritten (by rename too) only after that. A run
that dies between the two finds a shard that the manifest does not know, and writes it again: no row is lost or doubled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.data.record import ARROW_SCHEMA, SCHEMA_VERSION, Trajectory

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One finished shard.

    Attributes:
        file: name in the folder.
        num_rows: trajectories in it.
        sha256: of the file.
        skipped: reason -> source indices of prompts that gave no trajectory.
        num_unconverged: blocks whose iteration hit its bound.
    """

    file: str
    num_rows: int
    sha256: str
    skipped: dict[str, list[int]] = field(default_factory=dict)
    num_unconverged: int = 0


@dataclass
class Manifest:
    """What a trajectory set says of itself.

    Attributes:
        settings: everything the content depends on (model, tokenizer and template hashes, decode settings, seed).
        versions: package versions of the run that started the set.
        num_shards: shards of the finished set.
        shards: finished shards by number.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    num_shards: int
    shards: dict[int, Shard] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def is_complete(self) -> bool:
        return len(self.shards) == self.num_shards

    @property
    def data_sha256(self) -> str:
        """Hash of the set: of its shards' hashes in order."""
        text = "".join(self.shards[number].sha256 for number in sorted(self.shards))
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        payload = {**asdict(self), "shards": {str(n): asdict(self.shards[n]) for n in sorted(self.shards)}}
        write_atomically(folder / MANIFEST, json.dumps(payload, indent=1, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest.

        Raises:
            UsageError: there is none in ``folder``.
            RunError: it cannot be parsed, or is of another schema version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError(f"{folder}: no {MANIFEST} here; collect trajectories first (jacobi-data collect)")
        try:
            payload = json.loads(path.read_bytes())
            if payload["schema_version"] != SCHEMA_VERSION:
                raise RunError(
                    f"{path}: schema version {payload['schema_version']}, this release reads {SCHEMA_VERSION}"
                )
            shards = {int(number): Shard(**shard) for number, shard in payload.pop("shards").items()}
            return cls(**payload, shards=shards)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: damaged manifest ({error}); restore it or collect again") from error


def shard_name(number: int) -> str:
    """File name of shard ``number``."""
    return f"shard-{number:05d}.parquet"


def write_shard(folder: Path, number: int, rows: Sequence[Trajectory]) -> tuple[str, str]:
    """Write one shard atomically; returns its file name and sha256."""
    table = pa.Table.from_pylist([row.to_row() for row in rows], schema=ARROW_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    name = shard_name(number)
    write_atomically(folder / name, content)
    return name, hashlib.sha256(content).hexdigest()


def read_shard(folder: Path, shard: Shard) -> list[Trajectory]:
    """Read one shard after checking its hash.

    Raises:
        RunError: the file is missing, was changed or cut, or holds another number of rows.
    """
    path = folder / shard.file
    remedy = "run the same jacobi-data collect again: only this shard is redone"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != shard.sha256:
        raise RunError(f"{path}: damaged, sha256 {digest[:12]}… is not the manifest's {shard.sha256[:12]}…; {remedy}")
    rows = [Trajectory.from_row(row) for row in pq.read_table(pa.BufferReader(content)).to_pylist()]
    if len(rows) != shard.num_rows:
        raise RunError(f"{path}: {len(rows)} rows, the manifest says {shard.num_rows}; {remedy}")
    return rows


def read_trajectories(folder: Path) -> Iterator[Trajectory]:
    """All trajectories of a set, in shard order; every shard's hash is checked before its rows are given out."""
    manifest = Manifest.read(folder)
    for number in sorted(manifest.shards):
        yield from read_shard(folder, manifest.shards[number])


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` is either what it was or complete, also after a power cut.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror}); what was finished before is kept") from error
