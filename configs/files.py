"""Files that are complete or absent: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from jacobi_llm.configs.errors import RunError, UsageError

TEMPORARY_SUFFIX = ".tmp"
_DRAWN = "[a-z0-9_]" * 8  # what tempfile puts into a name
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Writes a file so that it is either what it was or complete, also after a kill or a power cut.

    Args:
        path: the file; its folder is made if need be.
        content: text is written as UTF-8, line ends as they are.

    Returns:
        ``path``.

    Raises:
        RunError: when the folder or the file cannot be written; the file is then what it was.
    """
    with atomic_writer(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """:func:`write_atomically` for what is written piece by piece: the file appears when the body has ended well.

    A link stays, and what it points to is written. A pipe or a device is written as it is: to put a file in its place,
    as into that of ``/dev/null``, would take it from all other programs.

    Raises:
        RunError: when the folder or the file cannot be written; the file is then what it was.
    """
    named = path
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as device:
                yield device
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "wb", dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, delete=False
        ) as file:
            try:
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
                # Temporary files are private; the finished one gets the permissions of any new file.
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
    except OSError as error:
        remedy = "; free some space, then run the same command again" if error.errno in _FULL else ""
        raise RunError(f"{named}: cannot be written ({error.strerror or error}){remedy}") from error


def leftovers(path: Path) -> Iterator[Path]:
    """Temporary files and folders beside ``path`` that were to become it, whose writers may be alive."""
    return path.parent.glob(f".{glob.escape(path.name)}.{_DRAWN}{TEMPORARY_SUFFIX}")


def remove_leftovers(path: Path) -> None:
    """Removes temporary files that killed writers of ``path`` have left; call it only when no writer can be alive."""
    for leftover in leftovers(path):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The rename itself is durable only with the folder; not every file system lets a folder be synced.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path, key: str) -> Path:
    """Make an output folder before the work that fills it.

    Args:
        folder: made with its parents when absent.
        key: the setting that names it, for the message.

    Raises:
        UsageError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{key}: {folder} cannot be made ({error.strerror}); choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{key}: {folder} cannot be written; choose another folder")
    return folder


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
