"""Whether the disk has room for a trajectory set, told before the work starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import Augmentation, CollectConfig
from jacobi_llm.data.store import Manifest

_TOKEN_BYTES = 4
# Of the largest size that a row can have: completions end early, blocks converge early, and zstd packs what repeats.
# Sets of the default model took 2 to 8 hundredths.
_LIKELY_SHARE = 0.08
_MIB = 1 << 20


def check_disk_space(folder: Path, config: CollectConfig, num_prompts: int, manifest: Manifest) -> None:
    """Compare what the missing shards will take with what is free.

    Once there are shards, the missing ones are taken to be as large as those. Before, they take at most what their
    token ids are in bytes, and likely about a twelfth of it.

    Args:
        folder: of the set; exists.
        config: of the collection.
        num_prompts: of the whole set.
        manifest: with the shards that are there.

    Raises:
        RunError: what they are likely to take is not free. When only the largest possible size is not, a warning is
            printed.
    """
    num_missing = manifest.num_shards - len(manifest.shards)
    if not num_missing:
        return
    free_bytes = shutil.disk_usage(folder).free
    sizes = [path.stat().st_size for one in manifest.shards.values() if (path := folder / one.file).is_file()]
    if sizes:
        likely_bytes = most_bytes = num_missing * sum(sizes) // len(sizes)
    else:
        most_bytes = num_prompts * most_row_bytes(config)
        likely_bytes = int(_LIKELY_SHARE * most_bytes)
    if likely_bytes > free_bytes:
        raise RunError(
            f"{folder}: the {num_missing} missing shards will take about {_mib(likely_bytes)}, "
            f"{_mib(free_bytes)} are free; free some, choose another collect.output, or set collect.limit"
        )
    if most_bytes > free_bytes:
        print(
            f"warning: {folder}: the set may take up to {_mib(most_bytes)}, {_mib(free_bytes)} are "
            "free; a full disk loses no finished shard, and the same command goes on",
            file=sys.stderr,
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB" if num_bytes >= 10 * _MIB else f"{num_bytes / _MIB:.3g} MiB"


def most_row_bytes(config: CollectConfig) -> int:
    """Bytes of the token ids of one prompt's trajectories, when nothing ends early."""
    num_tokens = 0
    for window in config.window:
        num_states = (config.max_iterations or window + 1) + 1
        augmented = 1 if config.augment is Augmentation.NONE else 2
        num_tokens += config.max_prompt_tokens + config.max_tokens * (1 + augmented * num_states)
    return _TOKEN_BYTES * num_tokens
