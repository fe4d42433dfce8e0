"""A trajectory set that is being collected, by one process or by several that know each other only by its folder."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jacobi_llm.configs.checkpoint import load_checkpoint_config
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import make_folder
from jacobi_llm.configs.loader import save_resolved
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.data.collector import Collector, collection_settings
from jacobi_llm.data.disk_space import check_disk_space
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.sources import PromptSet
from jacobi_llm.data.store import (
    MANIFEST,
    Manifest,
    Shard,
    claimed_shard,
    close_set,
    locked_for_writing,
    read_shard,
    record_name,
    write_record,
    write_shard,
)
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.prompt import Prompt


class Watcher(Protocol):
    """Is told how the work goes, and may end it between two shards."""

    @property
    def wants_stop(self) -> bool:
        """Whether no further shard shall be begun."""

    def opened(self, manifest: Manifest) -> None:
        """The set has been opened; its finished shards are those of ``manifest``."""

    def finished(self, number: int, shard: Shard) -> None:
        """A shard has been collected."""


class Collection:
    """One worker's hold on the set.

    Attributes:
        recipe: of the command.
        folder: of the set.
        found: all prompts of the set, in its order.
        ranks: this worker among all that share the set.
        collector: with a model of its own.
    """

    def __init__(self, recipe: Recipe, found: PromptSet, ranks: Ranks, collector: Collector | None = None) -> None:
        """Load the model, unless a collector is given.

        Raises:
            UsageError, RunError: a model that cannot be loaded.
        """
        self.recipe = recipe
        self.folder = Path(recipe.collect.output).expanduser()
        self.found = found
        self.ranks = ranks
        if collector is None:
            loaded = load_model(recipe.collect.model, dtype=recipe.collect.dtype)
            collector = Collector(LLMEngine(loaded, recipe.engine), loaded, recipe.collect)
        self.collector = collector

    def open(self) -> Manifest:
        """Begin the set, or find what there is of it; shards of this worker's share that are damaged are forgotten.

        Raises:
            UsageError: the folder cannot be written, or the set in it was collected with other settings.
            RunError: its manifest is damaged, or the disk is too full.
        """
        make_folder(self.folder, "collect.output")
        with locked_for_writing(self.folder):
            fresh = self._fresh_manifest()
            if (self.folder / MANIFEST).exists():
                manifest = Manifest.read(self.folder)
                _check_settings(self.folder, manifest.settings, fresh.settings)
                self._forget_damaged(manifest)
            else:
                if orphans := sorted(path.name for path in self.folder.glob("shard-*.parquet")):
                    raise UsageError(
                        f"collect.output: {self.folder} holds shards ({orphans[0]} and others) but no {MANIFEST}; "
                        "restore it, or choose another folder"
                    )
                manifest = fresh
                manifest.write(self.folder)
                save_resolved(self.recipe, self.folder)
            check_disk_space(self.folder, self.recipe.collect, len(self.found.prompts), manifest)
        return manifest

    def work(self, watcher: Watcher) -> Manifest:
        """Open the set, collect the shards that nobody else has or holds, and close it when that was all.

        Returns:
            The manifest, complete unless other workers still collect or the watcher wanted to stop.

        Raises:
            UsageError, RunError: as :meth:`open`; a prompt that cannot be rendered; a shard that cannot be written.
        """
        manifest = self.open()
        watcher.opened(manifest)
        self._collect_all(self._missing(manifest), watcher)
        # Once more: a worker that has died since leaves the shard that it held.
        self._collect_all(self._missing(Manifest.read(self.folder)), watcher)
        return close_set(self.folder)

    def collect_shard(self, number: int, watcher: Watcher) -> None:
        """Collect one shard, unless another worker has it or holds it."""
        with claimed_shard(self.folder, number) as is_ours:
            if not is_ours:
                return
            collected = self.collector.collect(self.prompts_of(number))
            name, digest = write_shard(self.folder, number, collected.trajectories)
            shard = Shard(
                name,
                len(collected.trajectories),
                digest,
                collected.skipped,
                collected.num_unconverged,
                collected.num_tokens,
                collected.num_passes,
            )
            write_record(self.folder, number, shard)
        watcher.finished(number, shard)

    def prompts_of(self, number: int) -> Sequence[Prompt]:
        """The prompts of one shard."""
        size = self.recipe.collect.shard_size
        return self.found.prompts[number * size : (number + 1) * size]

    def _collect_all(self, numbers: Sequence[int], watcher: Watcher) -> None:
        for number in numbers:
            if watcher.wants_stop:
                break
            self.collect_shard(number, watcher)

    def _missing(self, manifest: Manifest) -> list[int]:
        return [number for number in self.ranks.order(manifest.num_shards) if number not in manifest.shards]

    def _fresh_manifest(self) -> Manifest:
        config = self.recipe.collect
        return Manifest(
            collection_settings(config, self.collector.loaded, self.found.prompts),
            package_versions(),
            num_shards=-(-len(self.found.prompts) // config.shard_size),
            bad_input=self.found.num_skipped,
            cleaning=self.found.cleaning,
            previous=_previous_round(self.collector.loaded),
        )

    def _forget_damaged(self, manifest: Manifest) -> None:
        damaged = []
        for number in sorted(manifest.shards):
            if number % self.ranks.world_size != self.ranks.rank:
                continue
            try:
                read_shard(self.folder, manifest.shards[number])
            except RunError as error:
                print(f"warning: {str(error).partition(';')[0]}; collecting this shard again", file=sys.stderr)
                damaged.append(number)
        if damaged:
            for number in damaged:
                del manifest.shards[number]
                (self.folder / record_name(number)).unlink(missing_ok=True)
            manifest.write(self.folder)


def package_versions() -> dict[str, str]:
    """Versions that a set or a run records."""
    names = ("jacobi-llm", "torch", "transformers", "pyarrow")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _previous_round(loaded: LoadedModel) -> dict[str, Any]:
    """What a checkpoint says of the set that it was trained on: rounds of collection and training form a chain."""
    checkpoint = load_checkpoint_config(loaded.path)
    if checkpoint is None:
        return {}
    return checkpoint.model_dump(mode="json", include={"data_sha256", "window", "objective", "base_model"})


def _check_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    keys = sorted(key for key in before | now if before.get(key) != now.get(key))
    if keys:
        differences = ", ".join(f"{key}: {_shown(before.get(key))} there, {_shown(now.get(key))} now" for key in keys)
        raise UsageError(
            f"{folder}: holds a set collected with other settings ({differences}); "
            "choose another collect.output, or the same settings"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:12]}…" if isinstance(value, str) and len(value) == 64 else text
