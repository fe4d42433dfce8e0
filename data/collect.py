"""jacobi-data collect: prompts in, a trajectory set out.

A shard is the unit of work and of resume; batches form only within it, so that content depends neither on kills nor on
the number of workers (with the same number of threads each: sums in another order round in another way).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import CollectConfig, Executor, Recipe
from jacobi_llm.configs.wording import counted
from jacobi_llm.data.collection import Collection
from jacobi_llm.data.progress import Progress
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.sources import PromptSet, read_source, tell
from jacobi_llm.data.stop_signals import StopSignals
from jacobi_llm.data.store import Manifest
from jacobi_llm.data.workers import run_workers

EXIT_INTERRUPTED = 130


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data collect``; 130 when a signal ended it between two shards.

    Raises:
        UsageError: a wrong setting or input, or a folder that holds another set.
        RunError: nothing could be collected, or what is there is damaged.
    """
    config = recipe.collect
    ranks = Ranks.of_environment()
    found = read_source(
        config.input,
        config.split,
        limit=config.limit,
        seed=config.seed,
        on_bad_input=config.on_bad_input,
        reading=recipe.source,
        cleaning=recipe.clean,
    )
    if not ranks.rank:
        tell(found)
    if options.dry_run:
        if not ranks.rank:
            print(json.dumps(_plan(config, found)) if options.json else _plan_line(config, found))
        return 0
    started_s = time.perf_counter()
    signals = StopSignals()
    with signals.kept(), Progress(len(found.prompts), config.shard_size, signals) as progress:
        manifest, passes = _collect(recipe, found, ranks, signals, progress)
    if ranks.rank:
        return EXIT_INTERRUPTED if signals.is_set else 0
    _tell(Path(config.output).expanduser(), manifest)
    if options.json:
        print(json.dumps(_report(config, manifest, passes, time.perf_counter() - started_s), ensure_ascii=False))
    if signals.is_set and not manifest.is_complete:
        print("stopped; the same command goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if manifest.is_complete and not manifest.num_rows:
        raise RunError(f"{config.output}: no trajectory; every prompt was skipped ({', '.join(manifest.num_skipped)})")
    return 0


def _collect(
    recipe: Recipe, found: PromptSet, ranks: Ranks, signals: StopSignals, progress: Progress
) -> tuple[Manifest, dict[str, int]]:
    """The manifest, and what this process ran itself."""
    config = recipe.collect
    if config.executor is Executor.RAY:
        from jacobi_llm.data.ray_executor import run_ray

        return run_ray(recipe, found, signals, progress), {}
    if config.num_workers > 1:
        return run_workers(recipe, found, ranks, signals, progress), {}
    collection = Collection(recipe, found, ranks)
    manifest = collection.work(progress)
    runner = collection.collector.engine.runner
    return manifest, {"forward_passes": runner.num_passes, "forward_rows": runner.num_rows}


def _tell(folder: Path, manifest: Manifest) -> None:
    for reason, count in sorted([*manifest.bad_input.items(), *manifest.num_skipped.items()]):
        print(f"skipped {count}: {reason}", file=sys.stderr)
    if manifest.num_unconverged:
        print(f"warning: {manifest.num_unconverged} blocks did not converge within their iterations", file=sys.stderr)
    tpf = manifest.tokens_per_forward
    size = f"{manifest.num_rows} trajectories in {len(manifest.shards)} of {manifest.num_shards} shards"
    print(f"{folder}: {size}{f', TPF {tpf:.2f}' if tpf else ''}", file=sys.stderr)


def _plan(config: CollectConfig, found: PromptSet) -> dict[str, Any]:
    num_prompts = len(found.prompts)
    num_shards = -(-num_prompts // config.shard_size)
    return {"num_prompts": num_prompts, "num_shards": num_shards, **config.model_dump(mode="json")}


def _plan_line(config: CollectConfig, found: PromptSet) -> str:
    num_prompts = len(found.prompts)
    num_shards = -(-num_prompts // config.shard_size)
    windows = f"window{'s' if len(config.window) > 1 else ''} {', '.join(map(str, config.window))}"
    return (
        f"would collect {counted(num_prompts, 'prompt')} of {config.input} ({config.split.value}) with {config.model} "
        f"in {config.dtype.value}, {windows}, at most {config.max_tokens} tokens each, targets: "
        f"{config.target_source.value}; {counted(num_shards, 'shard')} into {config.output}"
    )


def _report(config: CollectConfig, manifest: Manifest, passes: dict[str, int], wall_s: float) -> dict[str, Any]:
    return {
        "output": str(Path(config.output).expanduser()),
        "num_trajectories": manifest.num_rows,
        "num_shards": len(manifest.shards),
        "is_complete": manifest.is_complete,
        "skipped": manifest.num_skipped,
        "bad_input": manifest.bad_input,
        "num_unconverged": manifest.num_unconverged,
        "tokens_per_forward": manifest.tokens_per_forward,
        "data_sha256": manifest.data_sha256,
        **passes,
        "wall_s": round(wall_s, 3),
    }
