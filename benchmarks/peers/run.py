"""Plain decoding (window 1) of our engine against vLLM and transformers, in bf16 on a CPU.

    benchmarks/peers/setup_vllm                                         once
    python -m benchmarks.peers.run                                      9 repeats, batch sizes 1, 4, 16
    python -m benchmarks.peers.run --peers vllm:compiled transformers:eager --repeats 15

All engines are loaded from the start, each in a process of its own, and take turns: the one whose turn it is runs, the
others are stopped. Every pair of turns decodes the same token ids (chat-rendered by us) greedily to exactly N tokens,
prefill counted, end-of-sequence ignored; who goes first alternates. A ratio is taken within its pair, and medians with
quartiles are reported. Of several settings of a peer the fastest is kept (first, by trials at all batch sizes).

The completions are compared too: where two engines differ, the float32 gap of the two tokens says whether rounding
explains it (see ``same_tokens``). Exit status: 0; 1 when something unexplained is found or an engine fails; 2 for a
wrong flag. Whether the targets are met is told, and does not change the status.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.engines import OURS, ROW_TARGET, VARIANTS, find_vllm, parse_peers, start, target_of
from benchmarks.peers.pairs import Pair, Prompts, Turn, compare_passes, compare_speed, prompts_of
from benchmarks.peers.protocol import Flags
from benchmarks.peers.same_tokens import Judge, rounding_bound, summarise
from benchmarks.peers.table import table
from benchmarks.peers.turns import fastest, run_pairs, run_trials, say, take_turn, warm_up
from benchmarks.peers.worker import Worker
from jacobi_llm.configs.errors import JacobiError, UsageError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.embedded import cache_dir
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.models import load_model, load_tokenizer, resolve_model
from jacobi_llm.infer.prompt import render_prompt

RESULT = Path(__file__).parents[1] / "results" / "peers.json"
INPUTS = ("math", "stdlib")
LARGE_BATCH = 8
ROW_CONTEXT = 150
MANY_ROWS = 16
ROW_PAIRS = 31


@dataclass(frozen=True)
class Measured:
    """All that the engines did.

    Attributes:
        workers: by engine, ended; with what they said of themselves.
        trials: median tokens/s by peer, variant and batch size; only where there was a choice.
        alone, batched: by engine, completions of all prompts one by one and in batches of ``LARGE_BATCH``.
        pairs: (our turn, the peer's turn).
        passes: what the worker's ``time_rows`` returned.
    """

    workers: dict[str, Worker]
    trials: dict[str, dict[str, dict[int, float]]]
    alone: dict[str, list[tuple[int, ...]]]
    batched: dict[str, list[tuple[int, ...]]]
    pairs: dict[Pair, tuple[Turn, Turn]]
    passes: dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result file, print the table (or with --json one line); return the exit status."""
    args = parse_args(argv)
    try:
        peers = parse_peers(args.peers)
        if "vllm" in peers:
            find_vllm(args.vllm_env)
        prompts = draw_prompts(args)
        result = report(args, prompts, measure(args, peers, prompts))
        write_atomically(args.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    except JacobiError as error:
        for fault in error.faults:
            print(f"error: {fault}" if fault is error.faults[0] else f"  {fault}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result, ensure_ascii=False) if args.json else table(result))
    return 1 if any(found["unexplained"] for found in result["same_tokens"]["pairs"].values()) else 0


def draw_prompts(args: argparse.Namespace) -> Prompts:
    """Render held-out prompts of all sources, one of each in turn.

    Raises:
        UsageError: fewer prompts than the largest batch, or a model without a chat template.
    """
    if args.num_prompts < max(args.batch_sizes):
        raise UsageError(f"--num-prompts: {args.num_prompts} prompts do not fill a batch of {max(args.batch_sizes)}")
    tokenizer = load_tokenizer(args.model)
    per_source = -(-args.num_prompts // len(INPUTS))
    drawn = [read_source(source, Split.HELDOUT, limit=per_source).prompts for source in INPUTS]
    mixed = [prompt for together in zip(*drawn, strict=True) for prompt in together][: args.num_prompts]
    return [tuple(render_prompt(prompt, tokenizer, PromptFormat.CHAT)) for prompt in mixed]


def measure(args: argparse.Namespace, peers: dict[str, list[str]], prompts: Prompts) -> Measured:
    """Start the engines, let them take their turns, and end them."""
    path = resolve_model(args.model)
    max_context = max(map(len, prompts)) + args.max_tokens

    with ExitStack() as stack:

        def started(engine: str, variant: str) -> Worker:
            flags = Flags(path, variant, args.threads, max(*args.batch_sizes, LARGE_BATCH), max_context)
            worker = stack.enter_context(start(engine, flags, args.vllm_env))
            say(f"{worker.name}: loaded in {worker.ready['load_s']:.0f} s")
            return worker

        workers = {OURS: started(OURS, "default")}
        trials: dict[str, dict[str, dict[int, float]]] = {}
        for peer, variants in peers.items():
            tried = {variant: started(peer, variant) for variant in variants}
            if len(tried) > 1:
                trials[peer] = run_trials(tried, args.batch_sizes, prompts, args.max_tokens)
            kept = fastest(trials[peer]) if len(tried) > 1 else variants[0]
            workers[peer] = tried.pop(kept)
            for worker in tried.values():
                worker.close()
        warm_up(list(workers.values()), args.batch_sizes, args.repeats, prompts, args.max_tokens)
        alone = {name: complete(worker, 1, prompts, args.max_tokens) for name, worker in workers.items()}
        batched = {name: complete(worker, LARGE_BATCH, prompts, args.max_tokens) for name, worker in workers.items()}
        others = {name: worker for name, worker in workers.items() if name != OURS}
        pairs = run_pairs(workers[OURS], others, args.batch_sizes, args.repeats, prompts, args.max_tokens)
        with workers[OURS].awake():
            passes = workers[OURS].ask("time_rows", num_rows=MANY_ROWS, context=ROW_CONTEXT, repeats=ROW_PAIRS)
    return Measured(workers, trials, alone, batched, pairs, passes)


def complete(worker: Worker, batch_size: int, prompts: Prompts, max_tokens: int) -> list[tuple[int, ...]]:
    """Decode all prompts in batches of ``batch_size``."""
    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    return [ids for batch in batches for ids in take_turn(worker, batch, max_tokens).token_ids]


def report(args: argparse.Namespace, prompts: Prompts, measured: Measured) -> dict[str, Any]:
    """Return everything that the result file holds."""
    lengths = sorted(map(len, prompts))
    peers = [name for name in measured.workers if name != OURS]
    turns = [turn for both in measured.pairs.values() for turn in both]
    return {
        **describe_run(args.threads),
        "command": public_command(sys.argv[1:]),
        "model": Path(args.model).name,
        "inputs": list(INPUTS),
        "num_prompts": len(prompts),
        "prompt_tokens": {"min": lengths[0], "median": statistics.median(lengths), "max": lengths[-1]},
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "repeats": args.repeats,
        "engines": {name: _about(worker, measured.trials.get(name)) for name, worker in measured.workers.items()},
        "speed": {peer: {str(size): _speed(measured.pairs, peer, size) for size in args.batch_sizes} for peer in peers},
        "passes": {
            "context": ROW_CONTEXT,
            "many_rows": MANY_ROWS,
            **compare_passes(measured.passes["one_row_ms"], measured.passes["many_rows_ms"], ROW_TARGET),
        },
        "same_tokens": _same_tokens(args, prompts, measured, peers),
        "noise": {
            # Both tell whether the figures deserve trust: 0 is a machine that did nothing else.
            "others_cores_median": round(statistics.median(turn.others_cpu_s / turn.wall_s for turn in turns), 3),
            "others_cores_max": round(max(turn.others_cpu_s / turn.wall_s for turn in turns), 3),
            "stopped_engines_cpu_s": round(sum(worker.idle_cpu_s for worker in measured.workers.values()), 2),
        },
    }


def public_command(words: Sequence[str]) -> str:
    """The command line with the last part of paths only."""

    def shorten(word: str) -> str:
        flag, equals, value = word.rpartition("=")
        return flag + equals + Path(value).name if "/" in value else word

    return shlex.join(["python", "-m", "benchmarks.peers.run", *map(shorten, words)])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(VARIANTS),
        metavar="PEER[:VARIANT]",
        help="engines to compare with; one without a variant tries "
        + "; ".join(f"{peer}: {', '.join(variants)}" for peer, variants in VARIANTS.items()),
    )
    parser.add_argument("--vllm-env", type=Path, default=cache_dir() / "vllm", help="folder that setup_vllm was given")
    parser.add_argument("--batch-sizes", type=_sizes, default=[1, 4, 16], help="such as 1,4,16")
    parser.add_argument("--max-tokens", type=int, default=64, help="completion tokens of every request, exactly")
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts, half of each source")
    parser.add_argument("--repeats", type=int, default=9, help="pairs per peer and batch size")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each engine")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, not the table")
    return parser.parse_args(argv)


def _sizes(text: str) -> list[int]:
    sizes = sorted(set(map(int, text.split(","))))
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError("batch sizes start at 1")
    return sizes


def _about(worker: Worker, trials: dict[str, dict[int, float]] | None) -> dict[str, Any]:
    about = {**worker.ready, "variant": worker.name.partition(":")[2], "load_s": round(worker.ready["load_s"], 1)}
    if trials:
        about["trials_tps"] = {
            variant: {str(size): round(tps, 1) for size, tps in by_size.items()} for variant, by_size in trials.items()
        }
    return about


def _speed(pairs: dict[Pair, tuple[Turn, Turn]], peer: str, batch_size: int) -> dict[str, Any]:
    chosen = [turns for pair, turns in pairs.items() if pair.peer == peer and pair.batch_size == batch_size]
    return compare_speed([mine for mine, _ in chosen], [other for _, other in chosen], target_of(peer, batch_size))


def _same_tokens(
    args: argparse.Namespace, prompts: Prompts, measured: Measured, peers: Sequence[str]
) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    judge = Judge(load_model(args.model, dtype=Dtype.FLOAT32).model)
    partings = {
        name: judge.partings(prompts, measured.alone[name], measured.batched[name]) for name in measured.workers
    }
    bound = rounding_bound({peer: partings[peer] for peer in peers})
    found: dict[str, list[Any]] = {peer: [] for peer in peers}
    for pair, (mine, other) in measured.pairs.items():
        batch = prompts_of(pair.batch_size, pair.repeat, prompts)
        found[pair.peer] += judge.partings(batch, mine.token_ids, other.token_ids)
    return {
        "bound": round(bound, 4),
        "alone_and_batched": {name: summarise(of_engine, bound) for name, of_engine in partings.items()},
        "pairs": {peer: summarise(of_peer, bound) for peer, of_peer in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
