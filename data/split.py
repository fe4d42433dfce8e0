"""jacobi-data split: two trajectory sets of one, train and heldout, by a hash of the key that rows have.

The key is the source row (so that all windows of a prompt are on one side), the prompt's tokens, or the group that a
prompt file names. The same key is on the same side in every set and at every share below: a larger share only adds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import OnBadInput, Recipe, SplitBy, SplitConfig
from jacobi_llm.data.merge import read_shards
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.set_writer import SetWriter, fresh_folder, parent_record, read_complete
from jacobi_llm.data.store import Manifest
from jacobi_llm.infer.prompt import read_prompt_file

SIDES = ("train", "heldout")


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data split``.

    Raises:
        UsageError: no finished set there, a group file that cannot be read, or an output that holds something.
        RunError: a damaged shard, or a side that would have no row.
    """
    config = recipe.split
    folder, manifest = read_complete(config.path)
    key_of = key_function(config)
    with fresh_folder(config.output, "split.output") as staging:
        sides = split_set(folder, manifest, staging, config, key_of)
    for name, side in sides.items():
        print(f"{Path(config.output) / name}: {side.num_rows} trajectories", file=sys.stderr)
    if options.json:
        report = {
            name: {
                "output": str(Path(config.output) / name),
                "num_trajectories": side.num_rows,
                "data_sha256": side.data_sha256,
            }
            for name, side in sides.items()
        }
        print(json.dumps(report, ensure_ascii=False))
    return 0


def split_set(
    folder: Path, manifest: Manifest, output: Path, config: SplitConfig, key_of: Callable[[Trajectory], str]
) -> dict[str, Manifest]:
    """Write every row of a set into ``output/train`` or ``output/heldout``; returns their manifests.

    Raises:
        RunError: a damaged shard, a full disk, or a side without a row.
    """
    settings = {**manifest.settings, "shard_size": config.shard_size}
    writers = {
        side: SetWriter(output / side, Manifest(settings, manifest.versions, num_shards=0), config.shard_size)
        for side in SIDES
    }
    num_taken = dict.fromkeys(SIDES, 0)
    for _, rows in read_shards(folder, manifest):
        for row in rows:
            side = side_of(row, config, key_of)
            num_taken[side] += 1
            writers[side].add(row)
    if empty := [side for side in SIDES if not num_taken[side]]:
        raise RunError(
            f"{folder}: no row for {' and '.join(empty)} with split.heldout_share {config.heldout_share}; give another "
            "share or seed"
        )
    for side, writer in writers.items():
        writer.manifest.parents = [
            {**parent_record(folder, manifest, num_taken[side]), "split": _recorded(config), "side": side}
        ]
    return {side: writer.finish() for side, writer in writers.items()}


def side_of(row: Trajectory, config: SplitConfig, key_of: Callable[[Trajectory], str]) -> str:
    """The set that a row belongs to."""
    return SIDES[hash_share(config.seed, key_of(row)) < config.heldout_share]


def hash_share(seed: int, key: str) -> float:
    """Where a key stands between 0 and 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") / 2**64


def key_function(config: SplitConfig) -> Callable[[Trajectory], str]:
    """What rows are kept together by.

    Raises:
        UsageError: a group file that cannot be read.
    """

    def own_key(row: Trajectory) -> str:
        if config.by is SplitBy.PROMPT:
            return f"prompt/{row.prompt_ids}"
        return f"row/{row.source}/{row.source_index}"

    if config.groups is None:
        return own_key
    group_of = {
        prompt.id: prompt.group
        for prompt in read_prompt_file(config.groups, OnBadInput.FAIL).prompts
        if prompt.group is not None
    }

    def group_key(row: Trajectory) -> str:
        return f"group/{group_of[row.id]}" if row.id in group_of else own_key(row)

    return group_key


def _recorded(config: SplitConfig) -> dict[str, Any]:
    groups = None if config.groups is None else Path(config.groups).name
    return {"heldout_share": config.heldout_share, "by": config.by.value, "seed": config.seed, "groups": groups}
