"""jacobi-data export: a trajectory set as a data set folder for the hub, or as the JSON of Consistency_LLM.

The folder holds Parquet files under ``data/`` and ``README.md``, a data card whose header and figures are made of the
set itself; ``datasets.load_dataset(folder)`` reads it. What split has written becomes one data set of two splits.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import atomic_writer, remove_leftovers, write_atomically
from jacobi_llm.configs.schema import ExportConfig, ExportFormat, Recipe
from jacobi_llm.data.consistency_llm import MANIFEST_KEY, records_of
from jacobi_llm.data.data_card import SplitFigures, data_card
from jacobi_llm.data.merge import read_shards
from jacobi_llm.data.record import ARROW_SCHEMA
from jacobi_llm.data.set_writer import fresh_folder, only_writer, read_complete
from jacobi_llm.data.split import SIDES
from jacobi_llm.data.stats import SetProfile
from jacobi_llm.data.store import MANIFEST, Manifest, read_shard


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data export``.

    Raises:
        UsageError: no finished set with a row there, or an output that holds something already.
        RunError: a damaged shard, or an output that cannot be written.
    """
    config = recipe.export
    splits = _splits(config)
    num_rows = sum(manifest.num_rows for _, manifest in splits.values())
    if not num_rows:
        raise UsageError(f"export.path: {config.path} holds no trajectory; there is nothing to export")
    report: dict[str, Any] = {"output": config.output, "to": config.to.value, "num_trajectories": num_rows}
    if config.to is ExportFormat.CONSISTENCY_LLM:
        if len(splits) > 1:
            raise UsageError(f"export.path: {config.path} holds two sets; export {' and '.join(SIDES)} one by one")
        [(folder, manifest)] = splits.values()
        path = _json_path(config)
        is_device = path.exists() and not path.is_file()
        with nullcontext() if is_device else only_writer(path, config.output, "export.output"):
            if not is_device:
                remove_leftovers(path)
            report["num_records"] = write_json(folder, manifest, path)
    else:
        with fresh_folder(config.output, "export.output") as staging:
            figures = [_write_split(name, *one, staging) for name, one in splits.items()]
            write_atomically(staging / "README.md", data_card(config, figures))
        report["splits"] = {one.name: one.num_rows for one in figures}
    print(f"{config.output}: {num_rows} trajectories", file=sys.stderr)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    return 0


def _splits(config: ExportConfig) -> dict[str, tuple[Path, Manifest]]:
    """The sets by the name of their split: one set, or the two of ``jacobi-data split``."""
    root = Path(config.path).expanduser()
    if not (root / MANIFEST).is_file() and all((root / side / MANIFEST).is_file() for side in SIDES):
        return {side: read_complete(str(root / side)) for side in SIDES}
    return {"train": read_complete(config.path)}


def _write_split(name: str, folder: Path, manifest: Manifest, output: Path) -> SplitFigures:
    """One Parquet file for each shard that has rows, named as the hub wants them."""
    (output / "data").mkdir(exist_ok=True)
    num_files = sum(shard.num_rows > 0 for shard in manifest.shards.values())
    profiles: dict[int, SetProfile] = {}
    num_bytes = num_file_bytes = number = 0
    for shard, rows in read_shards(folder, manifest):
        if not shard.num_rows:
            continue
        table = pa.Table.from_pylist([row.to_row() for row in rows], schema=ARROW_SCHEMA)
        path = output / "data" / f"{name}-{number:05d}-of-{num_files:05d}.parquet"
        try:
            pq.write_table(table, path, compression="zstd")
        except OSError as error:
            raise RunError(f"{path.name}: cannot be written ({error.strerror or error})") from error
        number += 1
        num_bytes += table.nbytes
        num_file_bytes += path.stat().st_size
        for row in rows:
            profiles.setdefault(row.window, SetProfile()).add(row)
    return SplitFigures(name, manifest, dict(sorted(profiles.items())), num_bytes, num_file_bytes)


def write_json(folder: Path, manifest: Manifest, path: Path) -> int:
    """Write the set as a list of Consistency_LLM's records; one shard is in memory at a time.

    Returns:
        The number of records.

    Raises:
        RunError: a damaged shard, or ``path`` cannot be written.
    """
    num_rows = num_records = 0
    with atomic_writer(path) as file:
        for number in sorted(manifest.shards):
            for row in read_shard(folder, manifest.shards[number], manifest.remedy):
                for record in records_of(row, num_rows, number):
                    if not num_records:
                        record[MANIFEST_KEY] = manifest.to_payload()
                    file.write(b",\n" if num_records else b"[\n")
                    file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode())
                    num_records += 1
                num_rows += 1
        file.write(b"\n]\n")
    return num_records


def _json_path(config: ExportConfig) -> Path:
    path = Path(config.output).expanduser()
    if path.is_dir():
        raise UsageError(f"export.output: {config.output} is a folder; name the JSON file to write")
    return path
