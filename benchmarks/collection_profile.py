"""Where the time of a collection goes, and how its rate compares with plain AR decoding of the same prompts.

    python benchmarks/collection_profile.py                               64 prompts, bfloat16, 5 repeats
    python benchmarks/collection_profile.py --num-prompts 8 --max-tokens 24 --repeats 1 --output /tmp/profile.json

One shard is collected and written as the command does it. Each stage's time is its own, without that of stages inside
it; what no stage took is Python around them. AR is the engine at window 1 with all prompts in one batch, prefill
included, no trajectories. Both run once before the clock and then take turns; the ratio (completion tokens per second
of the collection over those of AR) is taken within a repeat, and medians are reported. The targets of a collection are
decoded in the same way, so it is below 1, and what it lacks is what the trajectories cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import CollectConfig, Dtype, EngineConfig, Split
from jacobi_llm.data import branches, collector
from jacobi_llm.data.collector import Collected, Collector
from jacobi_llm.data.sources import read_source
from jacobi_llm.data.store import write_shard
from jacobi_llm.infer import engine as engine_module
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.measurement import measure
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.prompt import Prompt
from jacobi_llm.infer.request import DecodeParams, Request

RESULT = Path(__file__).parent / "results" / "collection_profile.json"
STAGES = {
    "targets/forward": "target decoding: passes",
    "targets/choose": "target decoding: argmax or sampling",
    "targets": "target decoding: scheduling, the rest",
    "branches/forward": "branches: passes",
    "branches/choose": "branches: argmax or sampling",
    "branches": "branches: Python",
    "initial guesses": "initial guesses",
    "render": "chat template and tokenizer",
    "write": "Parquet, sha256, fsync",
    "": "rows of the set, the rest",
}


class Clock:
    """Wall seconds by stage, each without the stages inside it; a stage inside another has both names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._path: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def stage(self, *names: str) -> Iterator[None]:
        self._switch()
        self._path += names
        try:
            yield
        finally:
            self._switch()
            del self._path[len(self._path) - len(names) :]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its time in a stage of that name."""

        def run(*args: Any, **settings: Any) -> Any:
            with self.stage(name):
                return call(*args, **settings)

        return run

    def _switch(self) -> None:
        now_s = time.perf_counter()
        self.seconds["/".join(self._path)] += now_s - self._since_s
        self._since_s = now_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start anew; what no stage takes is that of the empty name."""
        self.seconds.clear()
        self._since_s = time.perf_counter()
        yield
        self._switch()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all repeats, write the result file, print the table and one line of JSON; return the exit status."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    started_s = time.perf_counter()
    loaded = load_model(args.model, dtype=Dtype(args.dtype))
    load_s = time.perf_counter() - started_s
    config = CollectConfig(
        dtype=Dtype(args.dtype),
        window=args.window,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        wave_size=args.num_prompts,
        shard_size=args.num_prompts,
    )
    prompts = read_source(args.input, Split.TRAIN, limit=args.num_prompts, seed=0).prompts
    engine = LLMEngine(loaded, EngineConfig(kv_memory_mib=args.kv_memory_mib, max_num_seqs=args.num_prompts))
    taken = run_repeats(Collector(engine, loaded, config), prompts, args.repeats)
    result = {
        **describe_run(args.threads),
        "model": args.model,
        "dtype": args.dtype,
        "input": args.input,
        "num_prompts": len(prompts),
        "window": config.window,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "repeats": args.repeats,
        "model_load_s": round(load_s, 2),
        **summary(taken),
    }
    write_atomically(args.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(table(result))
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}))
    return 0


def run_repeats(collect: Collector, prompts: Sequence[Prompt], repeats: int) -> list[dict[str, Any]]:
    """Collection and AR in turn; the first round is not kept."""
    clock = Clock()
    put_clock(clock, collect)
    taken = []
    for repeat in range(repeats + 1):
        with clock.running():
            collected = collect_and_write(clock, collect, prompts)
        stages_s = dict(clock.seconds)
        tokens = sum(len(row.completion_ids) for row in collected.trajectories) // len(collect.config.window)
        ar = measure(collect.engine, ar_requests(collect, prompts))
        wall_s = sum(stages_s.values())
        taken.append(
            {
                "wall_s": wall_s,
                "stages_s": stages_s,
                "tokens": tokens,
                "tps": tokens / wall_s,
                "ar_tps": ar.tps,
                "ratio": tokens / wall_s / ar.tps,
                "tpf": collected.num_tokens / max(collected.num_passes, 1),
            }
        )
        print(f"repeat {repeat} of {repeats}: {wall_s:.1f} s, AR {ar.wall_s:.1f} s", file=sys.stderr, flush=True)
    return taken[1:]


def put_clock(clock: Clock, collect: Collector) -> None:
    """Let the parts of a collection run by the clock."""
    runner = collect.engine.runner
    for holder, name, stage in (
        (runner, "forward", "forward"),
        (engine_module, "choose", "choose"),
        (branches, "choose", "choose"),
        (collector, "run_branches", "branches"),
        (collector, "open_branches", "initial guesses"),
        (collector, "render_prompt", "render"),
        (collect.engine, "generate", "targets"),
    ):
        setattr(holder, name, clock.timed(stage, getattr(holder, name)))


def collect_and_write(clock: Clock, collect: Collector, prompts: Sequence[Prompt]) -> Collected:
    """One shard, written as the command writes it."""
    collected = collect.collect(prompts)
    with clock.stage("write"), TemporaryDirectory() as folder:
        write_shard(Path(folder), 0, collected.trajectories)
    return collected


def ar_requests(collect: Collector, prompts: Sequence[Prompt]) -> list[Request]:
    """The same targets at window 1, and nothing else."""
    params = DecodeParams(
        max_tokens=collect.config.max_tokens,
        window=1,
        stop_token_ids=frozenset(collect.loaded.eos_token_ids),
        sampling=collect.sampling,
    )
    return [Request(str(one.source_index), tuple(collect.prompt_ids_of(one)), params) for one in prompts]


def summary(taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats; stages are shares of the collection's wall time."""

    def median(key: str) -> float:
        return statistics.median(one[key] for one in taken)

    unknown = {name for one in taken for name in one["stages_s"]} - set(STAGES)
    if unknown:
        raise SystemExit(f"stages without a line in the table: {sorted(unknown)}")
    stages_s = {name: statistics.median(one["stages_s"].get(name, 0.0) for one in taken) for name in STAGES}
    return {
        "completion_tokens": taken[0]["tokens"],
        "tokens_per_forward": round(median("tpf"), 3),
        "wall_s": round(median("wall_s"), 3),
        "tps": round(median("tps"), 1),
        "ar_tps": round(median("ar_tps"), 1),
        "ratio_to_ar": round(median("ratio"), 3),
        "ratios": [round(one["ratio"], 3) for one in taken],
        "stages_s": {STAGES[name]: round(seconds, 3) for name, seconds in stages_s.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The stages with their shares, and the ratio, as plain text."""
    title = (
        f"{result['num_prompts']} prompts of {result['input']}, {result['model']} {result['dtype']}, window "
        f"{', '.join(map(str, result['window']))}, {result['completion_tokens']} tokens, medians of "
        f"{result['repeats']}; model load {result['model_load_s']:.1f} s, once"
    )
    lines = [title]
    lines += [
        f"{name:<40}{seconds:>8.2f} s{seconds / result['wall_s']:>7.1%}"
        for name, seconds in sorted(result["stages_s"].items(), key=lambda one: -one[1])
    ]
    lines.append(
        f"{result['tps']:.1f} completion tokens/s, AR {result['ar_tps']:.1f}: {result['ratio_to_ar']:.2f} of AR's rate"
    )
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--dtype", default=Dtype.BFLOAT16.value, choices=[one.value for one in Dtype])
    parser.add_argument("--input", default="math", help="prompt source, its train part")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts, all in one wave and one AR batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest completion (tokens)")
    parser.add_argument("--window", type=int, nargs="+", default=[16], help="block sizes (tokens)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the targets; 0 is greedy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-memory-mib", type=int, default=EngineConfig().kv_memory_mib)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
