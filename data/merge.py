"""jacobi-data merge: one trajectory set of several: other prompts, windows or rounds, of one tokenizer.

A row is known by source, source index and window. Rows are read and written shard by shard; only their keys are held.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Dtype, MergeConfig, OnDuplicate, Recipe
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.set_writer import SetWriter, fresh_folder, parent_record, read_complete
from jacobi_llm.data.store import Manifest, Shard, read_shard

Key = tuple[str, int, int]
_MOST_NAMED = 10
# What must be equal: ids mean the same text, and the same tokens end a completion.
_SHARED = ("tokenizer_sha256", "eos_token_ids")
# A larger value covers a smaller one.
_LARGEST = ("max_tokens", "max_prompt_tokens")
_BY_PRECISION = (Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT64)


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data merge``.

    Raises:
        UsageError: fewer than two sets, an unfinished one, several tokenizers, or an output that holds something.
        RunError: a damaged shard, or one row in two sets (on_duplicate=fail).
    """
    config = recipe.merge
    if len(config.paths) < 2:
        raise UsageError("merge.paths: give two folders or more, such as jacobi-data merge A B --output BOTH")
    sets = [read_complete(path) for path in config.paths]
    settings = merged_settings(sets, config.shard_size)
    with fresh_folder(config.output, "merge.output") as staging:
        manifest, num_dropped = merge_sets(sets, settings, staging, config)
    if num_dropped:
        print(f"dropped {num_dropped}: in an earlier set already", file=sys.stderr)
    print(f"{config.output}: {manifest.num_rows} trajectories of {len(sets)} sets", file=sys.stderr)
    if options.json:
        report = {
            "output": config.output,
            "num_trajectories": manifest.num_rows,
            "num_dropped": num_dropped,
            "windows": manifest.windows,
            "data_sha256": manifest.data_sha256,
        }
        print(json.dumps(report, ensure_ascii=False))
    return 0


def merge_sets(
    sets: Sequence[tuple[Path, Manifest]], settings: dict[str, Any], folder: Path, config: MergeConfig
) -> tuple[Manifest, int]:
    """Write the rows of ``sets`` into ``folder``; returns the manifest and the number of rows left out.

    Raises:
        RunError: a damaged shard, a full disk, or the first rows that come twice.
    """
    writer = SetWriter(folder, Manifest(settings, sets[0][1].versions, num_shards=0), config.shard_size)
    first_set_of: dict[Key, int] = {}
    twice: list[str] = []
    num_twice = 0
    for number, (path, manifest) in enumerate(sets):
        num_taken = 0
        for shard, rows in read_shards(path, manifest):
            for row in rows:
                key = (row.source, row.source_index, row.window)
                if key in first_set_of:
                    num_twice += 1
                    twice += [_named(key, sets[first_set_of[key]][0], path)] if len(twice) < _MOST_NAMED else []
                    continue
                first_set_of[key] = number
                num_taken += 1
                writer.add(row)
            writer.note(shard.skipped, shard.num_unconverged)
        writer.manifest.parents.append(parent_record(path, manifest, num_taken))
    if num_twice and config.on_duplicate is OnDuplicate.FAIL:
        more = [f"and {num_twice - len(twice)} more"] if num_twice > len(twice) else []
        raise RunError([*twice, *more])
    return writer.finish(), num_twice


def _named(key: Key, first: Path, second: Path) -> str:
    source, index, window = key
    return (
        f"{second}: source {source}, source index {index}, window {window} is in {first} already; keep the first with "
        "--on-duplicate first"
    )


def read_shards(folder: Path, manifest: Manifest) -> Iterator[tuple[Shard, list[Trajectory]]]:
    """Every shard with its rows."""
    for number in sorted(manifest.shards):
        yield manifest.shards[number], read_shard(folder, manifest.shards[number], manifest.remedy)


def merged_settings(sets: Sequence[tuple[Path, Manifest]], shard_size: int) -> dict[str, Any]:
    """What holds for all rows: settings that are equal in all sets, and those that can be joined.

    Raises:
        UsageError: other tokenizers, or other end-of-sequence tokens.
    """
    first_path, first = sets[0]
    faults = [
        f"merge.paths: {path}: {key} is {_shown(manifest.settings.get(key))}, that of {first_path} is "
        f"{_shown(first.settings.get(key))}; only sets of one tokenizer can be merged"
        for path, manifest in sets[1:]
        for key in _SHARED
        if manifest.settings.get(key) != first.settings.get(key)
    ]
    if faults:
        raise UsageError(faults)
    all_settings = [manifest.settings for _, manifest in sets]
    shared = {
        key: value
        for key, value in first.settings.items()
        if all(key in settings and settings[key] == value for settings in all_settings)
    }
    for key in _LARGEST:
        if all(key in settings for settings in all_settings):
            shared[key] = max(settings[key] for settings in all_settings)
    shared["window"] = sorted({window for _, manifest in sets for window in manifest.windows})
    shared["dtype"] = _least_precise(all_settings).value
    shared["shard_size"] = shard_size
    return shared


def _least_precise(all_settings: Sequence[dict[str, Any]]) -> Dtype:
    names = {str(settings.get("dtype")) for settings in all_settings}
    return next((dtype for dtype in _BY_PRECISION if dtype.value in names), Dtype.BFLOAT16)


def _shown(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
