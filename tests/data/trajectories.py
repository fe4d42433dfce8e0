"""Small trajectory sets of tiny models, in memory and on disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_llm.configs.schema import CollectConfig, Dtype, EngineConfig, PromptFormat, Recipe
from jacobi_llm.data.collection import Collection
from jacobi_llm.data.collector import Collector
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.sequential import BlockSettings
from jacobi_llm.data.sources import PromptSet
from jacobi_llm.data.store import Manifest, Shard, write_shard
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prompt import Prompt


def make_prompts(count: int, *, with_completions: bool = False, seed: int = 0) -> list[Prompt]:
    """Random ASCII prompts of different lengths; the source indices have gaps, as a draw has."""
    draw = random.Random(seed)

    def text(low: int, high: int) -> str:
        return "".join(chr(draw.randrange(97, 123)) for _ in range(draw.randrange(low, high)))

    return [
        Prompt(f"p{i}", "test", 3 * i, None, text(3, 30), text(5, 40) if with_completions else None)
        for i in range(count)
    ]


def make_config(**settings: Any) -> CollectConfig:
    defaults = {"dtype": Dtype.FLOAT64, "format": PromptFormat.RAW, "window": 8, "max_tokens": 20, "shard_size": 3}
    return CollectConfig.model_validate({**defaults, **settings})


def make_collector(loaded: LoadedModel, engine: EngineConfig | None = None, **settings: Any) -> Collector:
    llm = LLMEngine(loaded, engine or EngineConfig(kv_memory_mib=8))
    return Collector(llm, loaded, make_config(**settings))


def settings_of(config: CollectConfig, loaded: LoadedModel, window: int | None = None) -> BlockSettings:
    return BlockSettings.of(config, window or config.window[0], loaded.eos_token_ids)


class Unwatched:
    """Lets the work go on to its end."""

    wants_stop = False

    def __init__(self) -> None:
        self.finished_numbers: list[int] = []

    def opened(self, manifest: Manifest) -> None:
        pass

    def finished(self, number: int, shard: Shard) -> None:
        self.finished_numbers.append(number)


def collection_of(
    collector: Collector, prompts: Sequence[Prompt], folder: Path, ranks: Ranks | None = None
) -> Collection:
    """A hold on the set of ``prompts`` in ``folder``."""
    recipe = Recipe(collect=collector.config.model_copy(update={"output": str(folder)}))
    return Collection(recipe, PromptSet(list(prompts)), ranks or Ranks(), collector)


def write_set(collector: Collector, prompts: Sequence[Prompt], folder: Path) -> Manifest:
    """Collect into ``folder`` as the command does, and return the manifest."""
    return collection_of(collector, prompts, folder).work(Unwatched())


def replace_shard(folder: Path, number: int, rows: Sequence[Trajectory], **changes: Any) -> None:
    """Put other rows into a shard, with a manifest that knows them: hashes do not give this fault away."""
    manifest = Manifest.read(folder)
    name, digest = write_shard(folder, number, rows)
    before = manifest.shards[number]
    known = {"num_rows": len(rows), "skipped": before.skipped, "num_unconverged": before.num_unconverged}
    manifest.shards[number] = Shard(name, sha256=digest, **{**known, **changes})
    manifest.write(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a set by name, locks and the resolved config aside."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name not in (".lock", "config.yaml")
    }
