"""The collection as a Ray Data job: shards are its rows, a pool of actors with a model each its one stage.

Everything that makes a set whole (claims, atomic shards, records) is in the folder, which all nodes must share; Ray
places the workers, and starts others where one dies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.configs.errors import JacobiError, RunError, UsageError
from jacobi_llm.configs.files import make_folder
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.data.collection import Collection
from jacobi_llm.data.progress import Progress
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.sources import PromptSet
from jacobi_llm.data.stop_signals import StopSignals
from jacobi_llm.data.store import MANIFEST, Manifest, Shard, close_set

# In the folder of the set, where every node sees it: no actor shall begin another shard.
STOP = ".stop"


def run_ray(recipe: Recipe, found: PromptSet, signals: StopSignals, progress: Progress) -> Manifest:
    """Collect on the Ray cluster of this process (``RAY_ADDRESS``), or on one started on this machine.

    Returns:
        The manifest, complete unless a signal came, or another process still collects.

    Raises:
        UsageError: ray is not installed; otherwise as :meth:`Collection.work`.
        RunError: a worker failed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError("collect.executor ray: needs Ray: pip install 'jacobi-llm[ray]'") from error
    recipe = recipe.model_copy(deep=True)
    # An actor asks for one core unless told otherwise, and computes with as many threads.
    recipe.engine.num_threads = recipe.engine.num_threads or 1
    folder = make_folder(Path(recipe.collect.output).expanduser(), "collect.output")
    (folder / STOP).unlink(missing_ok=True)
    signals.on_first = (folder / STOP).touch
    if signals.is_set:
        raise KeyboardInterrupt
    if (folder / MANIFEST).exists():
        progress.opened(Manifest.read(folder))
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        # Once more, since ray.init puts a handler of its own in the place of ours, which ends the process.
        with signals.kept():
            for row in _finished_shards(recipe, found):
                _hear(row, progress)
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a Ray worker failed ({str(error).strip().splitlines()[-1]}); the same command goes on"
        ) from None
    finally:
        if started_here:
            ray.shutdown()
        (folder / STOP).unlink(missing_ok=True)
    return close_set(folder)


def _finished_shards(recipe: Recipe, found: PromptSet) -> Iterator[dict[str, Any]]:
    """What the actors tell of each shard, in the order in which they finish."""
    import ray
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    num_shards = -(-len(found.prompts) // recipe.collect.shard_size)
    # A block for each shard from the start: to cut blocks later, Ray would need a core that the actors may hold.
    shards = [{"number": number} for number in range(num_shards)]
    done = ray.data.from_items(shards, override_num_blocks=num_shards).map_batches(
        ShardStage,
        fn_constructor_args=(ray.put((recipe, found)),),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=recipe.collect.num_workers),
        num_cpus=recipe.engine.num_threads,
    )
    yield from done.iter_rows()


def _hear(row: dict[str, Any], progress: Progress) -> None:
    if row["fault"]:
        raise (UsageError if row["is_usage"] else RunError)(str(row["fault"]).split("\n"))
    if row["file"]:
        shard = Shard(
            row["file"],
            int(row["num_rows"]),
            "",
            num_completion_tokens=int(row["num_tokens"]),
            num_block_passes=int(row["num_passes"]),
        )
        progress.finished(int(row["number"]), shard)


class ShardStage:
    """One actor: a model, and a hold on the set."""

    def __init__(self, shared: Any) -> None:
        import ray

        self._told: dict[str, Any] = {}
        self._fault: JacobiError | None = None
        try:
            recipe, found = ray.get(shared)
            self._collection = Collection(recipe, found, Ranks())
            self._collection.open()
        except JacobiError as error:
            self._fault = error

    @property
    def wants_stop(self) -> bool:
        return (self._collection.folder / STOP).exists()

    def opened(self, manifest: Manifest) -> None:
        """Nobody needs to know."""

    def finished(self, number: int, shard: Shard) -> None:
        self._told = {
            "file": shard.file,
            "num_rows": shard.num_rows,
            "num_tokens": shard.num_completion_tokens,
            "num_passes": shard.num_block_passes,
        }

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, list[Any]]:
        """Collect the shard of a batch of one."""
        [number] = batch["number"].tolist()
        self._told = {"file": "", "num_rows": 0, "num_tokens": 0, "num_passes": 0}
        try:
            if self._fault is None and not self.wants_stop:
                self._collection.collect_shard(number, self)
        except JacobiError as error:
            self._fault = error
        fault = "\n".join(self._fault.faults) if self._fault is not None else ""
        told = {**self._told, "number": number, "fault": fault, "is_usage": isinstance(self._fault, UsageError)}
        return {key: [value] for key, value in told.items()}
