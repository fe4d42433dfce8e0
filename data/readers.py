"""Records of files, one at a time, whatever the size of the file.

Lines of JSON Lines and rows of CSV are read one by one here, because a bad one must be named by its number and may cost
no other; the libraries' own readers stop at the first. A record is a decoded JSON value, or a :class:`BadRecordError`
that says what the line is instead.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, cast

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.prompt import BadRecordError, decode_line, numbered_lines

_LOGGER = logging.getLogger(__name__)
STDIN = "-"
MAX_JSON_DEPTH = 500
_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
# An array begins within so many bytes, unless a person has played with the space bar.
_BOM_AND_SPACE = 4096
_PACKED = (".gz", ".zst")
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Attributes:
        place: file and line or row number from 1, as a message names it.
        number: the line or row number from 1, in its file.
        value: a decoded JSON value, or why there is none.
    """

    place: str
    number: int
    value: object


def find_files(source: str) -> list[tuple[str, Path]]:
    """Files of a path, a folder (all of a known kind in it and below) or a glob, sorted.

    Returns:
        Each with its name: its path below the folder, or below the part of the glob that is written out. Names, and
        what is made of them, do not depend on where the folder is.

    Raises:
        UsageError: there is none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        root, files = path, [one for one in path.rglob("*") if one.is_file() and _is_data(one.relative_to(path))]
        if not files:
            raise UsageError(f"input {source}: a folder without data files; known kinds: {', '.join(KINDS)}")
    else:
        root = Path(*takewhile(lambda part: not any(char in part for char in "*?["), path.parts))
        files = [Path(one) for one in glob.glob(str(path), recursive=True) if Path(one).is_file()]
        if not files:
            raise UsageError(f"input {source}: no file matches")
    return sorted((one.relative_to(root).as_posix(), one) for one in files)


def read_records(path: Path | str) -> Iterator[Record]:
    """Records of one file; ``-`` is standard input, as JSON Lines.

    Raises:
        UsageError: the file cannot be read, is of an unknown kind, or is cut or damaged where no line can be told.
    """
    name = "<stdin>" if str(path) == STDIN else str(path)
    reader = _read_json_lines if str(path) == STDIN else KINDS.get(_kind_of(Path(path)))
    if reader is None:
        raise UsageError(
            f"{name}: unknown kind of file; known are {', '.join(KINDS)}, JSON and text also as .gz or .zst"
        )
    number = 0
    try:
        for number, value in reader(path):
            yield Record(f"{name}:{number}", number, value)
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, TypeError, KeyError, ArithmeticError, NotImplementedError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        after = f" after record {number}" if number else ""
        raise UsageError(
            f"{name}: cannot be read{after} ({reason}); is it damaged, cut, or of another kind?"
        ) from error


def _kind_of(path: Path) -> str:
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in _PACKED:
        suffixes = suffixes[:-1]
    return suffixes[-1].lower() if suffixes else ""


def _is_data(path: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.parts)
    # What datasets writes beside its data is no data, and what it caches there would be the same rows again.
    is_about = path.name in ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
    is_cache = path.suffix == ".arrow" and path.name.startswith("cache-")
    return _kind_of(path) in KINDS and not is_hidden and not is_about and not is_cache


@contextmanager
def _opened(path: Path | str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed by what it holds, not by its name."""
    if str(path) == STDIN:
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as file:
        magic = file.peek(4)[:4]
        if magic.startswith(_GZIP_MAGIC):
            with gzip.open(file, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
        elif magic == _ZSTD_MAGIC:
            import pyarrow as pa

            with pa.CompressedInputStream(file, "zstd") as packed:
                yield cast(BinaryIO, io.BufferedReader(packed))
        else:
            if Path(path).suffix.lower() in _PACKED and magic:
                _LOGGER.warning("%s: is not compressed, whatever its name says; read as it is", path)
            yield file


def _read_json_lines(path: Path | str) -> Iterator[tuple[int, object]]:
    with _opened(path) as stream:
        for number, line in numbered_lines(stream):
            try:
                yield number, decode_line(line)
            except BadRecordError as error:
                yield number, error


def _read_json(path: Path | str) -> Iterator[tuple[int, object]]:
    """A JSON array of records, or JSON Lines under the same name."""
    with _opened(path) as stream:
        head = stream.read(_BOM_AND_SPACE)
    has_bom = head.startswith(_BOM)
    start = head.removeprefix(_BOM).lstrip()
    if start.partition(b"\n")[0].strip() == b"{":
        raise ValueError("one object over several lines, where an array of records or an object a line belongs")
    if not start.startswith(b"["):
        yield from _read_json_lines(path)
        return
    with _opened(path) as stream:
        if has_bom:
            stream.read(len(_BOM))
        number = 0
        try:
            for number, value in enumerate(_array_items(stream), start=1):
                yield number, value
        except ValueError as error:
            # Where the next record begins cannot be told any more.
            reason = " ".join(str(error).split())
            detail = f"broken JSON in this array, nothing after it can be read: {reason}"
            yield number + 1, BadRecordError("broken JSON", detail)


def _array_items(stream: BinaryIO) -> Iterator[object]:
    """The items of a JSON array, one at a time; ``ijson.items`` takes the square of the depth in memory.

    Raises:
        ValueError: broken JSON, or nested too deep.
    """
    import ijson
    from ijson.common import ObjectBuilder

    builder: Any = None
    depth = -1  # of the array itself, whose begin is the first event
    try:
        for event, value in ijson.basic_parse(stream):
            if depth < 0:
                depth = 0
                continue
            depth += (event in ("start_map", "start_array")) - (event in ("end_map", "end_array"))
            if depth < 0:
                return
            if depth > MAX_JSON_DEPTH:
                raise ValueError("nested too deep")
            builder = ObjectBuilder() if builder is None else builder
            builder.event(event, float(value) if isinstance(value, Decimal) else value)
            if depth == 0:
                yield builder.value
                builder = None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _read_csv(path: Path | str) -> Iterator[tuple[int, object]]:
    delimiter = "\t" if _kind_of(Path(path)) == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text:
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        columns = next(rows, None)
        if columns is None:
            return
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            raise ValueError(f"column {twice[0]!r} is there twice")
        while True:
            first = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                lost = f"; lines {first} to {rows.line_num} are lost" if rows.line_num > first else ""
                detail = f"broken CSV: {error}{lost}: is a quote not closed, or not doubled?"
                yield rows.line_num, BadRecordError("broken CSV", detail)
                continue
            if row is None:
                return
            if any("\0" in field for field in row):
                yield (
                    rows.line_num,
                    BadRecordError("NUL bytes", "NUL bytes in the row: the file is damaged or not text"),
                )
            elif row and len(row) != len(columns):
                detail = f"{len(row)} fields, the header has {len(columns)}"
                yield rows.line_num, BadRecordError("wrong number of fields", detail)
            elif row:
                yield rows.line_num, {key: value or None for key, value in zip(columns, row, strict=True)}


def _read_text(path: Path | str) -> Iterator[tuple[int, object]]:
    with _opened(path) as stream:
        for number, line in numbered_lines(stream):
            try:
                yield number, {"text": line.decode("utf-8")}
            except UnicodeDecodeError:
                yield number, BadRecordError("not UTF-8")


def _read_parquet(path: Path | str) -> Iterator[tuple[int, object]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from _numbered_rows(file.iter_batches(_BATCH_ROWS))


def _read_arrow(path: Path | str) -> Iterator[tuple[int, object]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from _numbered_rows(iter(pa.ipc.open_stream(source)))
            return
        yield from _numbered_rows(file.get_batch(index) for index in range(file.num_record_batches))


def _numbered_rows(batches: Any) -> Iterator[tuple[int, object]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


KINDS: dict[str, Callable[[Path | str], Iterator[tuple[int, object]]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def read_hub(name: str) -> Iterator[Record]:
    """Rows of a data set of the hub, streamed through ``datasets``.

    Args:
        name: ``OWNER/NAME``, ``OWNER/NAME:CONFIG`` or ``OWNER/NAME:CONFIG:SPLIT``; the split is train otherwise. A
            folder that ``datasets`` can load will do too.

    Raises:
        UsageError: it cannot be found or read; its own code is never run.
    """
    import datasets

    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    if not repository:
        raise UsageError("input hub: without a name; write hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or ...:CONFIG:SPLIT")
    number = 0
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield Record(f"{name}:{number}", number, dict(row))
    except Exception as error:  # whatever datasets, its file systems and the network raise
        reason = json.dumps(str(error).splitlines()[0] if str(error) else type(error).__name__, ensure_ascii=False)
        after = f" after row {number}" if number else ""
        raise UsageError(f"input hub:{name}: datasets cannot read it{after}: {reason}") from error
