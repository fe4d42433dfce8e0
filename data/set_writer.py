"""Trajectory sets that are made of what is there already: merged, split, imported. Complete or absent, as a whole.

A set is written into a folder with a temporary name beside its place, and renamed when its manifest is there; what a
killed command has left is removed by the next one for the same place. Rows are held for one shard at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import TEMPORARY_SUFFIX, leftovers
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.stats import profile_block
from jacobi_llm.data.store import Manifest, Shard, write_shard


def read_complete(path: str) -> tuple[Path, Manifest]:
    """A finished set's folder and manifest.

    Raises:
        UsageError: there is no set, or its collection is not done.
        RunError: a damaged manifest.
    """
    folder = Path(path).expanduser()
    manifest = Manifest.read(folder)
    if not manifest.is_complete:
        raise UsageError(
            f"{folder}: {len(manifest.shards)} of {manifest.num_shards} shards; run the same jacobi-data collect again "
            "to complete the set first"
        )
    return folder, manifest


@contextmanager
def fresh_folder(output: str, key: str) -> Iterator[Path]:
    """A folder to fill; it becomes ``output`` when the body ends without an exception, and is removed otherwise.

    Args:
        output: must not exist, or be an empty folder.
        key: the setting that names it, for the message.

    Raises:
        UsageError: there is something at ``output``, or nothing can be made there.
        RunError: another process is writing there, or the finished folder cannot be put in its place.
    """
    folder = Path(output).expanduser().absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{key}: {output} holds something already; choose another folder, or remove it")
    with only_writer(folder, output, key):
        # Only a writer that was killed leaves such a folder, and it can be as large as a set.
        for leftover in leftovers(folder):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=TEMPORARY_SUFFIX))
        except OSError as error:
            raise UsageError(f"{key}: {output} cannot be made ({error.strerror or error}); choose another") from error
        try:
            yield staging
            staging.chmod(folder.parent.stat().st_mode & 0o777)  # temporary folders are private
            staging.replace(folder)
        except OSError as error:
            raise RunError(f"{output}: cannot be written ({error.strerror or error})") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def only_writer(place: Path, output: str, key: str) -> Iterator[None]:
    """Keep other processes from writing the file or folder ``place``, named by ``output`` and ``key``, meanwhile.

    Raises:
        UsageError: nothing can be made there.
        RunError: another process is writing there.
    """
    path = place.parent / f".{place.name}.lock"
    lock = FileLock(path, timeout=0)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(f"{output}: another process is writing there; wait for it, or choose another output") from None
    except OSError as error:
        raise UsageError(f"{key}: {output} cannot be made ({error.strerror or error}); choose another") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


class SetWriter:
    """Writes rows into the shards of a new set, in the order that they come.

    Attributes:
        folder: of the set; it must be empty.
        manifest: with the shards that are written; on disk after :meth:`finish`.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_size: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shard_size = shard_size
        self._rows: list[Trajectory] = []
        self._skipped: dict[str, list[int]] = {}
        self._num_unconverged = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: Trajectory) -> None:
        """Write a row; it is on disk when its shard is full."""
        self._rows.append(row)
        if len(self._rows) == self._shard_size:
            self.end_shard()

    def note(self, skipped: Mapping[str, Sequence[int]], num_unconverged: int) -> None:
        """Account for prompts without a row, and for blocks that did not converge, in the shard in hand."""
        for reason, indices in skipped.items():
            self._skipped.setdefault(reason, []).extend(indices)
        self._num_unconverged += num_unconverged

    def end_shard(self) -> None:
        """Write what is in hand as a shard, even if it has no row."""
        number = len(self.manifest.shards)
        name, digest = write_shard(self.folder, number, self._rows)
        self.manifest.shards[number] = Shard(
            name,
            len(self._rows),
            digest,
            self._skipped,
            self._num_unconverged,
            sum(len(row.completion_ids) for row in self._rows),
            num_block_passes(self._rows),
        )
        self.manifest.num_shards = number + 1
        self._rows, self._skipped, self._num_unconverged = [], {}, 0

    def finish(self) -> Manifest:
        """Write the last shard and the manifest.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        if self._rows or self._skipped or self._num_unconverged:
            self.end_shard()
        self.manifest.write(self.folder)
        return self.manifest


def num_block_passes(rows: Iterable[Trajectory]) -> int:
    """Passes that the blocks of ``rows`` take at batch 1."""
    return sum(
        profile_block(block.states, row.fixed_point_of(block)).num_passes for row in rows for block in row.blocks
    )


def parent_record(folder: Path, manifest: Manifest, num_rows: int) -> dict[str, Any]:
    """What a set that is made of others keeps of one of them.

    Args:
        folder: of the parent; only its name is kept, since sets are moved and published.
        manifest: of the parent.
        num_rows: that were taken from it.
    """
    return {
        "name": folder.absolute().name,
        "data_sha256": manifest.data_sha256,
        "num_rows": manifest.num_rows,
        "num_rows_taken": num_rows,
        "settings": manifest.settings,
        "versions": manifest.versions,
        "skipped": manifest.num_skipped,
        "bad_input": manifest.bad_input,
        "cleaning": manifest.cleaning,
        "parents": manifest.parents,
        "previous": manifest.previous,
    }
