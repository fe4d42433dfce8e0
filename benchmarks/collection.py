"""Collection three ways, on the same prompts in one run.

    python benchmarks/collection.py                                  32 prompts, float32, 3 repeats
    python benchmarks/collection.py --num-prompts 4 --max-tokens 32 --repeats 1 --output /tmp/collection.json

- branches: all blocks of all completions as branches of one ragged batch, the decoding of y* included;
- sequential: the textbook procedure at batch 1 on the same engine, with paged K/V;
- uncached: the textbook procedure at batch 1 on the plain model: every pass reads prompt, prefix and block, and makes
  logits of all their rows, as public collectors do (tokens are chosen for the block's rows only).

The ways take turns within a repeat, so that a drifting machine meets all of them; a ratio is taken within its repeat,
and medians are reported. States are compared too: a difference counts as explained in float32 when the two best
logits at its place are closer than 1e-4, and in bfloat16, where rounding depends on the rows of a pass, it is counted.
Exit status: 0, or 1 when states differ and rounding does not explain it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import CollectConfig, Dtype, EngineConfig, Split
from jacobi_llm.data.collector import Collector
from jacobi_llm.data.record import Block
from jacobi_llm.data.sequential import (
    BlockSettings,
    CachedPredictor,
    Predictor,
    UncachedPredictor,
    first_state_difference,
    run_sequential,
)
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.near_tie import FP32_BOUND
from jacobi_llm.infer.prompt import Prompt

RESULT = Path(__file__).parent / "results" / "collection.json"
Result = TypeVar("Result")
WAYS = ("branches", "sequential", "uncached")


@dataclass(frozen=True)
class Outcome:
    """One completion: what one way made of one prompt."""

    prompt_ids: list[int]
    completion_ids: list[int]
    blocks: list[Block]

    def target_of(self, block: Block) -> list[int]:
        """y*'s tokens of ``block``, whose states are as long as itself."""
        following = [other.start for other in self.blocks if other.start > block.start]
        return self.completion_ids[block.start : min(following, default=len(self.completion_ids))]


@dataclass(frozen=True)
class Timing:
    """One way, one repeat; CPU seconds are those of all threads, which other load on the machine disturbs less."""

    wall_s: float
    cpu_s: float
    num_rows: int
    num_passes: int
    outcomes: list[Outcome]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all repeats, write the result file, print the table and one line of JSON; return the exit status."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = Dtype(args.dtype)
    loaded = load_model(args.model, dtype=dtype)
    config = CollectConfig(
        model=args.model,
        dtype=dtype,
        window=args.window,
        max_tokens=args.max_tokens,
        wave_size=args.wave_size,
        shard_size=args.num_prompts,
    )
    prompts = read_source(args.input, Split.TRAIN, limit=args.num_prompts, seed=0).prompts
    engine = LLMEngine(loaded, EngineConfig(kv_memory_mib=args.kv_memory_mib, max_num_rows=args.max_num_rows))
    runs = _ways(loaded, engine, config, prompts)
    _warm_up(runs, prompts)
    timings: dict[str, list[Timing]] = {way: [] for way in WAYS if way not in args.skip}
    for repeat in range(args.repeats):
        for way, taken in timings.items():
            taken.append(runs[way](prompts))
            say(f"repeat {repeat + 1} of {args.repeats}: {way} {taken[-1].wall_s:.1f} s, {taken[-1].num_rows} rows")
    result = {
        **describe_run(args.threads),
        "model": args.model,
        "dtype": dtype.value,
        "input": args.input,
        "num_prompts": len(prompts),
        "window": config.window,
        "max_tokens": config.max_tokens,
        "wave_size": config.wave_size,
        "max_num_rows": args.max_num_rows,
        "repeats": args.repeats,
        "completion_tokens": sum(len(outcome.completion_ids) for outcome in timings["branches"][0].outcomes),
        "blocks": sum(len(outcome.blocks) for outcome in timings["branches"][0].outcomes),
        "states": sum(len(b.states) for outcome in timings["branches"][0].outcomes for b in outcome.blocks),
        "ways": {way: _summary(way, timings) for way in timings},
        "states_compared_with_branches": {
            way: compare(loaded, dtype, timings["branches"][0].outcomes, timings[way][0].outcomes)
            for way in timings
            if way != "branches"
        },
    }
    write_atomically(args.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(table(result))
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}))
    is_right = all(found["unexplained"] == 0 for found in result["states_compared_with_branches"].values())
    return 0 if is_right else 1


def compare(loaded: LoadedModel, dtype: Dtype, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, Any]:
    """Count completions with the same y* and states; a completion is not read on after its first difference."""
    gaps = []
    for mine, other in zip(ours, theirs, strict=True):
        if mine == other:
            continue
        gap = float("inf")
        for a, b in zip(mine.blocks, other.blocks, strict=False):
            target = mine.target_of(a)
            prefix_ids = [*mine.prompt_ids, *mine.completion_ids[: a.start]]
            resolved = Block(b.start, b.states, other.target_of(b) if b.fixed_point is None else b.fixed_point)
            found = first_state_difference(loaded.model, prefix_ids, a, resolved, target)
            if found is not None:
                gap = found.gap
                break
        gaps.append(gap)
    bound = {Dtype.FLOAT64: 0.0, Dtype.FLOAT32: FP32_BOUND, Dtype.BFLOAT16: float("inf")}[dtype]
    explained = sum(gap < bound for gap in gaps)
    return {
        "completions": len(ours),
        "identical": len(ours) - len(gaps),
        "explained_by_rounding": explained,
        "unexplained": 0 if dtype is Dtype.BFLOAT16 else len(gaps) - explained,
        "gaps": [round(gap, 9) if gap != float("inf") else None for gap in gaps],
    }


def table(result: dict[str, Any]) -> str:
    """The figures of the three ways, and what became of the states, as plain text."""
    title = (
        f"{result['num_prompts']} prompts of {result['input']}, {result['model']} {result['dtype']}, "
        f"window {result['window']}, {result['completion_tokens']} tokens, medians of {result['repeats']}"
    )
    lines = [title, f"{'way':<12}{'wall s':>9}{'CPU s':>9}{'passes':>8}{'rows':>8}{'ms/row':>8}{'times ours':>12}"]
    for way, row in result["ways"].items():
        lines.append(
            f"{way:<12}{row['wall_s']:>9.2f}{row['cpu_s']:>9.2f}{row['passes']:>8}{row['rows']:>8}"
            f"{row['ms_per_row']:>8.3f}{row['ratio']:>12.2f}"
        )
    for way, found in result["states_compared_with_branches"].items():
        lines.append(
            f"states against {way}: {found['identical']} of {found['completions']} completions identical, "
            f"{found['explained_by_rounding']} explained by rounding, {found['unexplained']} unexplained"
        )
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--dtype", default=Dtype.FLOAT32.value, choices=[one.value for one in Dtype])
    parser.add_argument("--input", default="math", help="prompt source, its train part")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128, help="longest completion (tokens)")
    parser.add_argument("--window", type=int, default=16, help="block size (tokens)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wave-size", type=int, default=CollectConfig().wave_size, help="completions at a time")
    parser.add_argument("--max-num-rows", type=int, default=EngineConfig().max_num_rows, help="rows of one pass")
    parser.add_argument("--kv-memory-mib", type=int, default=EngineConfig().kv_memory_mib)
    parser.add_argument("--skip", nargs="*", default=[], choices=WAYS[1:], help="ways to leave out")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ways(
    loaded: LoadedModel, engine: LLMEngine, config: CollectConfig, prompts: Sequence[Prompt]
) -> dict[str, Callable[[Sequence[Prompt]], Timing]]:
    collector = Collector(engine, loaded, config)

    def branches(some: Sequence[Prompt]) -> Timing:
        runner = engine.runner
        rows, passes = runner.num_rows, runner.num_passes
        collected, wall_s, cpu_s = _timed(lambda: collector.collect(some))
        if len(collected.trajectories) != len(some):
            raise SystemExit(f"prompts were skipped: {collected.skipped}")
        outcomes = [Outcome(one.prompt_ids, one.completion_ids, one.blocks) for one in collected.trajectories]
        return Timing(wall_s, cpu_s, runner.num_rows - rows, runner.num_passes - passes, outcomes)

    def textbook(make: Callable[[], Predictor]) -> Callable[[Sequence[Prompt]], Timing]:
        def run(some: Sequence[Prompt]) -> Timing:
            predictor = make()

            def collect_one(prompt: Prompt) -> Outcome:
                prompt_ids = collector.prompt_ids_of(prompt)
                settings = _settings(config, loaded, prompt_ids)
                done = run_sequential(predictor, prompt_ids, prompt.source_index, settings)
                return Outcome(prompt_ids, done.completion_ids, done.blocks)

            outcomes, wall_s, cpu_s = _timed(lambda: [collect_one(prompt) for prompt in some])
            return Timing(wall_s, cpu_s, predictor.num_rows, predictor.num_passes, outcomes)

        return run

    return {
        "branches": branches,
        "sequential": textbook(lambda: CachedPredictor(engine)),
        "uncached": textbook(lambda: UncachedPredictor(loaded.model)),
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """The result, wall seconds and CPU seconds."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started_s, time.process_time() - cpu_started_s


def _settings(config: CollectConfig, loaded: LoadedModel, prompt_ids: Sequence[int]) -> BlockSettings:
    max_tokens = min(config.max_tokens, loaded.max_context - len(prompt_ids))
    return replace(BlockSettings.of(config, config.window[0], loaded.eos_token_ids), max_tokens=max_tokens)


def _warm_up(runs: dict[str, Callable[[Sequence[Prompt]], Timing]], prompts: Sequence[Prompt]) -> None:
    """The first passes allocate pages and pick kernels; they are in nobody's time."""
    for run in runs.values():
        run(prompts[:1])


def _summary(way: str, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    ours, taken = timings["branches"], timings[way]
    wall_s = statistics.median(one.wall_s for one in taken)
    return {
        "wall_s": round(wall_s, 3),
        "walls_s": [round(one.wall_s, 3) for one in taken],
        "cpu_s": round(statistics.median(one.cpu_s for one in taken), 3),
        "rows": taken[0].num_rows,
        "passes": taken[0].num_passes,
        "ms_per_row": round(1e3 * wall_s / taken[0].num_rows, 4),
        "ratio": round(statistics.median(a.wall_s / b.wall_s for a, b in zip(taken, ours, strict=True)), 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
