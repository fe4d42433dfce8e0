"""jacobi-data import: a trajectory set of the JSON of Consistency_LLM, ours or the original collector's.

The file is read record by record and a shard is in memory at a time. A file that ``jacobi-data export`` wrote gives
the set that it was made of, shard by shard. In another one the records of a completion must stand together, and the
tokenizer that made the ids must be named; what is repaired is told in data/consistency_llm.py.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Dtype, ImportConfig, OnBadInput, Recipe
from jacobi_llm.data.collection import package_versions
from jacobi_llm.data.collector import tokenizer_sha256
from jacobi_llm.data.consistency_llm import (
    MANIFEST_KEY,
    OURS,
    FaultyRecordError,
    Record,
    Vocabulary,
    drop_zeros,
    number_of,
    row_of_original,
    row_of_ours,
)
from jacobi_llm.data.record import SCHEMA_VERSION
from jacobi_llm.data.set_writer import SetWriter, fresh_folder
from jacobi_llm.data.store import Manifest


@dataclass
class Faults:
    """What cannot be imported.

    Attributes:
        path: of the file, for messages.
        is_fatal: whether the first one ends the import.
        counts: by reason.
    """

    path: Path
    is_fatal: bool
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, index: int, fault: FaultyRecordError, *, place: str | None = None, count: int = 1) -> None:
        """Raise or count.

        Args:
            index: of the record.
            fault: what is wrong.
            place: where, if not in that record.
            count: how many trajectories or records have the fault.

        Raises:
            RunError: it is fatal.
        """
        where = f"{self.path}: {place or f'record {index}'}"
        if self.is_fatal:
            raise RunError(f"{where}: {fault}; --on-bad-input skip leaves such records out")
        self.counts[fault.reason] += count
        print(f"{where}: {fault}; skipped", file=sys.stderr)


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data import``.

    Raises:
        UsageError: no such file, no tokenizer, or an output that holds something.
        RunError: a faulty record (on_bad_input=fail), or nothing that could be imported.
    """
    config = recipe.imports
    path = Path(config.path).expanduser()
    faults = Faults(path, config.on_bad_input is OnBadInput.FAIL)
    repairs: Counter[str] = Counter()
    records = read_records(path, faults)
    first = next(records, None)
    if first is None:
        raise RunError(f"{path}: no record in it ({dict(faults.counts) or 'an empty list'})")
    with fresh_folder(config.output, "imports.output") as folder:
        before = _manifest_of(first, path)
        if before is not None:
            manifest = _import_ours(_chained(first, records), before, config, folder, faults)
        else:
            manifest = _import_original(_chained(first, records), config, folder, faults, repairs)
        if not manifest.num_rows:
            raise RunError(f"{path}: no record could be imported ({dict(faults.counts)})")
    report = {
        "output": config.output,
        "num_trajectories": manifest.num_rows,
        "num_shards": len(manifest.shards),
        "repairs": drop_zeros(repairs.items()),
        "bad_input": dict(sorted(faults.counts.items())),
        "data_sha256": manifest.data_sha256,
    }
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    for name, count in drop_zeros(repairs.items()).items():
        print(f"repaired {count}: {name}", file=sys.stderr)
    print(f"{config.output}: {manifest.num_rows} trajectories in {len(manifest.shards)} shards", file=sys.stderr)
    return 0


def read_records(path: Path, faults: Faults) -> Iterator[tuple[int, Record]]:
    """Records with their index; the file is never in memory as a whole.

    Raises:
        UsageError: there is no such file, or it is no JSON list.
        RunError: broken JSON or a record that is no object (when faults are fatal; otherwise they are counted).
    """
    import ijson

    index = 0
    try:
        with path.open("rb") as file:
            mark = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
            file.seek(mark)
            start = file.read(64).lstrip()[:1]
            if start != b"[":
                found = f"begins with {start.decode('latin-1')!r}" if start else "is empty"
                raise UsageError(f"imports.path: {path} is no JSON list of records, it {found}")
            file.seek(mark)
            for record in ijson.items(file, "item", use_float=True):
                if isinstance(record, dict):
                    yield index, record
                else:
                    faults.note(index, FaultyRecordError("no JSON object"))
                index += 1
    except OSError as error:
        raise UsageError(f"imports.path: {path} cannot be read ({error.strerror or error})") from error
    except (ijson.JSONError, UnicodeDecodeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        faults.note(index, FaultyRecordError("broken JSON", reason))


def _chained(first: tuple[int, Record] | None, rest: Iterator[tuple[int, Record]]) -> Iterator[tuple[int, Record]]:
    if first is not None:
        yield first
        yield from rest


# A file of ours ----------------------------------------------------------------------------------------------------


def _manifest_of(first: tuple[int, Record] | None, path: Path) -> Manifest | None:
    """The manifest that the first record of our files carries."""
    if first is None or MANIFEST_KEY not in first[1]:
        return None
    stated = first[1][MANIFEST_KEY]
    try:
        manifest = Manifest.of_payload(stated)
        if not manifest.is_complete:
            raise ValueError("it does not name all shards")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: record 0: {MANIFEST_KEY} is damaged ({error}); export the set anew") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise RunError(
            f"{path}: record 0: schema version {manifest.schema_version}, this release reads {SCHEMA_VERSION}; export "
            "the set anew with it"
        )
    return manifest


def _import_ours(
    records: Iterator[tuple[int, Record]], before: Manifest, config: ImportConfig, folder: Path, faults: Faults
) -> Manifest:
    if config.tokenizer is not None:
        _check_tokenizer(config.tokenizer, before)
    manifest = replace(before, shards={}, num_shards=0)
    writer = SetWriter(folder, manifest, sys.maxsize)

    def advance(number: int) -> None:
        while len(manifest.shards) < number:
            shard = before.shards[len(manifest.shards)]
            writer.note(shard.skipped, shard.num_unconverged)
            writer.end_shard()

    num_groups = 0
    for index, group in _groups(records, faults):
        num_groups += 1
        try:
            shard_number = _shard_of(group, before, len(manifest.shards))
            row = row_of_ours(group)
        except FaultyRecordError as fault:
            faults.note(index, fault)
            continue
        advance(shard_number)
        writer.add(row)
    advance(before.num_shards)
    if num_groups < before.num_rows:
        missing = FaultyRecordError("trajectories missing", f"{num_groups} of {before.num_rows} are in the file")
        faults.note(num_groups, missing, place=f"after trajectory {num_groups - 1}", count=before.num_rows - num_groups)
    for number, shard in before.shards.items():
        if manifest.shards[number].num_rows == shard.num_rows:
            # The counts as they were; the hash is that of what was written now.
            manifest.shards[number] = replace(shard, sha256=manifest.shards[number].sha256)
    if faults.counts:
        manifest.bad_input = dict(sorted((Counter(before.bad_input) + faults.counts).items()))
    elif manifest.data_sha256 != before.data_sha256:
        print(
            "note: the rows are those that were exported, but this version of pyarrow writes other bytes: the set has "
            f"another data_sha256 ({before.data_sha256[:12]}… before)",
            file=sys.stderr,
        )
    return writer.finish()


def _shard_of(group: Sequence[Record], before: Manifest, least: int) -> int:
    about = group[0].get(OURS)
    if not isinstance(about, dict) or not isinstance(about.get("shard"), int):
        raise FaultyRecordError(f"the key {OURS} is missing or damaged")
    number = int(about["shard"])
    if number not in before.shards or number < least:
        raise FaultyRecordError("not in its place", f"shard {number}")
    return number


def _check_tokenizer(name: str, manifest: Manifest) -> None:
    from jacobi_llm.infer.models import load_tokenizer

    here, there = tokenizer_sha256(load_tokenizer(name)), manifest.settings.get("tokenizer_sha256")
    if here != there:
        raise UsageError(f"imports.tokenizer: {name} is another tokenizer than the one that made the exported set")


# Another file ------------------------------------------------------------------------------------------------------


def _import_original(
    records: Iterator[tuple[int, Record]], config: ImportConfig, folder: Path, faults: Faults, repairs: Counter[str]
) -> Manifest:
    if config.tokenizer is None:
        raise UsageError(f"imports.tokenizer: {config.path} does not say whose token ids it holds; name the model")
    vocabulary, settings = _vocabulary(config.tokenizer)
    manifest = Manifest(settings, package_versions(), 0)
    writer = SetWriter(folder, manifest, config.shard_size)
    source = Path(config.path).name
    used: set[int] = set()
    windows: set[int] = set()
    for index, group in _groups(records, faults):
        made: Counter[str] = Counter()
        try:
            source_index = _source_index(group, used)
            row = row_of_original(group, source, source_index, vocabulary, made)
        except FaultyRecordError as fault:
            faults.note(index, fault)
            continue
        used.add(source_index)
        windows.add(row.window)
        repairs.update(made)
        writer.add(row)
    settings["window"] = sorted(windows)
    manifest.bad_input = dict(sorted(faults.counts.items()))
    manifest.cleaning = {"import": drop_zeros(repairs.items())}
    manifest = writer.finish()
    manifest.parents = [{"name": source, "format": "consistency-llm", "num_rows_taken": manifest.num_rows}]
    manifest.write(folder)
    return manifest


def _source_index(group: Sequence[Record], used: set[int]) -> int:
    number = number_of(str(group[0].get("data_id")))
    if number is None:
        raise FaultyRecordError("data_id is not data_N")
    if number in used:
        raise FaultyRecordError("records of one completion do not stand together", f"data_{number}")
    return number


def _vocabulary(name: str) -> tuple[Vocabulary, dict[str, Any]]:
    from transformers import GenerationConfig

    from jacobi_llm.infer.models import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(name)
    try:
        stops = GenerationConfig.from_pretrained(resolve_model(name)).eos_token_id
    except OSError:
        stops = None
    listed = stops if isinstance(stops, list) else [stops]
    eos = frozenset(one for one in [*listed, tokenizer.eos_token_id] if one is not None)
    pad = tokenizer.pad_token_id
    special = eos | {tokenizer.bos_token_id, tokenizer.unk_token_id}
    settings = {
        "tokenizer": name,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "eos_token_ids": sorted(eos),
        "target_source": "model",
        # What the original collector runs in; it says nothing of it.
        "dtype": Dtype.BFLOAT16.value,
    }
    return Vocabulary(len(tokenizer), eos, None if pad in special else pad), settings


def _groups(records: Iterator[tuple[int, Record]], faults: Faults) -> Iterator[tuple[int, list[Record]]]:
    """Records of one completion, with the index of the first."""
    group: list[Record] = []
    start = 0
    for index, record in records:
        if not isinstance(record.get("data_id"), str):
            faults.note(index, FaultyRecordError("data_id is no text"))
            continue
        if group and record["data_id"] != group[0]["data_id"]:
            yield start, group
            group = []
        if not group:
            start = index
        group.append(record)
    if group:
        yield start, group
