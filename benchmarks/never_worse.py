"""Automatic windows against plain AR and against every fixed window, with guesses of three qualities.

    python benchmarks/never_worse.py                          all batch sizes, 7 repeats: 25 to 40 minutes on 2 cores
    python benchmarks/never_worse.py --batch-sizes 1 4 --repeats 2 --max-tokens 32 --output /tmp/never_worse.json

Guesses come from the model as it is (n-gram fill), and from an oracle that replays the answer with 10% or 30% of the
tokens wrong. All requests of a batch start together, in one engine. The decodings take turns within a repeat, and every
ratio is taken within its repeat: medians are reported. The fixed windows run in the first repeats only; those with too
many rows in all are left out, since they are far from being the best and take minutes.

`auto_vs_ar` is tokens per second over AR's; `slowest_vs_ar` compares each request's own tokens per second with the same
request's under AR, and takes the worst of the batch; `auto_vs_best_fixed` divides by the fixed window that is the
fastest over the repeats, AR included. Writes the result file and, with matplotlib, a picture: tokens per second in all
against those of one user.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import OracleFiller

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, EngineConfig, FillPolicy, PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.fill import make_fillers
from jacobi_llm.infer.measurement import Measurement, measure
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.prompt import render_prompt
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.window_policy import AutoWindows

RESULT = Path(__file__).parent / "results" / "never_worse.json"
PICTURE = Path(__file__).parents[1] / "docs" / "never_worse.png"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
WINDOWS = (4, 8, 16, 32)
ERROR_RATES = {"base": None, "oracle 10%": 0.1, "oracle 30%": 0.3}
AUTO, AR = "auto", "1"
# A single request is over in a second: small batches run one after the other until so many requests are done.
LEAST_REQUESTS = 4
BOUNDS = {"auto_vs_ar": 0.97, "slowest_vs_ar": 0.95, "auto_vs_best_fixed": 0.95}


@dataclass(frozen=True)
class Bench:
    """What is decoded, and with what."""

    engine: LLMEngine
    prompt_ids: Seq[tuple[int, ...]]
    answers: dict[tuple[int, ...], tuple[int, ...]]
    stop_token_ids: frozenset[int]
    max_tokens: int

    def requests(self, window: str, count: int, max_tokens: int | None = None) -> list[Request]:
        params = DecodeParams(
            max_tokens or self.max_tokens,
            None if window == AUTO else int(window),
            fill=FillPolicy.NGRAM,
            stop_token_ids=self.stop_token_ids,
        )
        return [Request(str(number), ids, params) for number, ids in enumerate(self.prompt_ids[:count])]

    def set_guesses(self, error_rate: float | None) -> None:
        """Install the oracle, or the engine's own fill policies; the policy starts with nothing learnt."""
        engine = self.engine
        engine.scheduler.fillers = make_fillers()
        if error_rate is not None:
            oracle = OracleFiller(engine.vocab_size)
            for number, (prompt_ids, answer_ids) in enumerate(self.answers.items()):
                oracle.add(prompt_ids, answer_ids, error_rate, seed=number)
            oracle.install(engine)
        engine.use_auto_windows()
        policy = engine.scheduler.windows
        assert isinstance(policy, AutoWindows)
        engine.scheduler.windows = AutoWindows(policy.cost, engine.acceptance_by_depth)


def main(argv: Seq[str] | None = None) -> int:
    """Run all cells, write the files, print the table; return 1 when a bound is missed."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    started_s = time.perf_counter()
    bench = make_bench(args)
    cells = [cell for name in args.guesses for cell in run_guesses(bench, name, args)]
    result = {
        **describe_run(args.threads),
        "model": args.model,
        "dtype": args.dtype,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "fixed_repeats": args.fixed_repeats,
        "most_fixed_rows": args.most_fixed_rows,
        "bounds": BOUNDS,
        "cells": cells,
        "wall_s": round(time.perf_counter() - started_s, 1),
    }
    write_atomically(args.output, json.dumps(result, indent=2) + "\n")
    print(table(cells))
    if args.picture is not None:
        write_atomically(args.picture, draw(cells, f"{args.model}, {args.dtype}"))
    missed = [cell for cell in cells if any(cell[name] < bound for name, bound in BOUNDS.items())]
    print(f"{len(cells) - len(missed)} of {len(cells)} cells within the bounds; {result['wall_s']:.0f} s")
    return 1 if missed else 0


def make_bench(args: argparse.Namespace) -> Bench:
    """Load the model, render the prompts, decode the answers that the oracle replays."""
    loaded = load_model(args.model, dtype=Dtype(args.dtype))
    count = max(*args.batch_sizes, LEAST_REQUESTS)
    engine = LLMEngine(loaded, EngineConfig(max_num_seqs=count, kv_memory_mib=args.kv_memory_mib))
    # A few more than needed: some prompts may be the same.
    half = count // 2 + 4
    sources = [read_source(name, Split.HELDOUT, limit=half, seed=0).prompts for name in ("stdlib", "math")]
    prompts = [prompt for pair in zip(*sources, strict=False) for prompt in pair]
    prompt_ids = list(
        dict.fromkeys(tuple(render_prompt(prompt, loaded.tokenizer, PromptFormat.CHAT)) for prompt in prompts)
    )
    if len(prompt_ids) < count:
        raise SystemExit(f"{count} different prompts are needed, there are {len(prompt_ids)}")
    bench = Bench(engine, prompt_ids, {}, frozenset(loaded.eos_token_ids), args.max_tokens)
    for request, output in zip(requests := bench.requests(AR, count), engine.generate(requests), strict=True):
        bench.answers[request.prompt_ids] = output.token_ids
    engine.use_auto_windows()
    say(f"{count} answers; pass times {engine.scheduler.windows.cost.times}")  # type: ignore[attr-defined]
    return bench


def run_guesses(bench: Bench, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All batch sizes with one quality of guesses."""
    cells = []
    for batch_size in args.batch_sizes:
        bench.set_guesses(ERROR_RATES[name])
        count = max(batch_size, LEAST_REQUESTS)
        fixed = [str(w) for w in args.windows if w * batch_size <= args.most_fixed_rows]
        for window in (AR, AUTO, *fixed):
            measure(bench.engine, bench.requests(window, count, 4), in_flight=batch_size)
        runs: dict[str, list[Measurement]] = {window: [] for window in (AR, AUTO, *fixed)}
        for repeat in range(args.repeats):
            windows = [window for window in runs if repeat < args.fixed_repeats or window in (AR, AUTO)]
            # Every other repeat runs backwards: what a drifting clock gives to one half it takes from the other.
            for window in windows if repeat % 2 == 0 else reversed(windows):
                runs[window].append(measure(bench.engine, bench.requests(window, count), in_flight=batch_size))
        cells.append({"guesses": name, "batch_size": batch_size, **summarise(runs)})
        say(json.dumps({key: value for key, value in cells[-1].items() if key != "decodings"}))
    return cells


def summarise(runs: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Ratios within repeats, then medians."""
    ar, auto = runs[AR], runs[AUTO]
    # One window for all repeats: the fastest of each repeat would be the luckiest of several.
    num_fixed = min(len(taken) for taken in runs.values())
    best = max(
        (window for window in runs if window != AUTO),
        key=lambda window: statistics.median(run.tps for run in runs[window][:num_fixed]),
    )
    return {
        "auto_vs_ar": _median(run.tps / reference.tps for run, reference in zip(auto, ar, strict=True)),
        "slowest_vs_ar": _median(
            min(a / b for a, b in zip(user_speeds(run), user_speeds(reference), strict=True))
            for run, reference in zip(auto, ar, strict=True)
        ),
        "best_fixed": best,
        "auto_vs_best_fixed": _median(
            run.tps / reference.tps for run, reference in zip(auto, runs[best], strict=False)
        ),
        "decodings": {
            window: {
                "tps": _median(run.tps for run in taken),
                "user_tps": _median(statistics.fmean(user_speeds(run)) for run in taken),
                "tpf": _median(run.tpf for run in taken),
                "ms_per_pass": _median(run.ms_per_pass for run in taken),
                "rows_per_pass": _median(run.num_rows / run.num_passes for run in taken),
            }
            for window, taken in runs.items()
        },
    }


def user_speeds(run: Measurement) -> list[float]:
    """Tokens per second of each request, from its arrival."""
    return [len(output.token_ids) / output.latency_ms * 1e3 for output in run.outputs]


def table(cells: Seq[dict[str, Any]]) -> str:
    """One line per cell."""
    head = f"{'guesses':<12}{'batch':>6}{'AR TPS':>9}{'auto TPS':>10}{'TPF':>6}"
    lines = [f"{head}{'x AR':>7}{'slowest':>9}{'x best fixed':>14}"]
    for cell in cells:
        ar, auto = cell["decodings"][AR], cell["decodings"][AUTO]
        lines.append(
            f"{cell['guesses']:<12}{cell['batch_size']:>6}{ar['tps']:>9.1f}{auto['tps']:>10.1f}{auto['tpf']:>6.2f}"
            f"{cell['auto_vs_ar']:>7.3f}{cell['slowest_vs_ar']:>9.3f}{cell['auto_vs_best_fixed']:>14.3f}"
        )
    return "\n".join(lines)


def draw(cells: Seq[dict[str, Any]], title: str) -> bytes:
    """A PNG: total tokens per second against those of one user, a line per decoding, a point per batch size."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell["guesses"] for cell in cells))
    figure = Figure(figsize=(5 * len(names), 4.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        chosen = [cell for cell in cells if cell["guesses"] == name]
        windows = sorted(
            {window for cell in chosen for window in cell["decodings"]}, key=lambda w: (w == AUTO, len(w), w)
        )
        for window in windows:
            points = [cell["decodings"][window] for cell in chosen if window in cell["decodings"]]
            label = {AR: "AR", AUTO: "auto"}.get(window, f"window {window}")
            is_auto = window == AUTO
            axis.plot(
                [point["user_tps"] for point in points],
                [point["tps"] for point in points],
                marker="o",
                markersize=4,
                label=label,
                color="black" if is_auto else None,
                linewidth=2.2 if is_auto else 1.2,
            )
        axis.set_title(name)
        axis.set_xlabel("tokens per second of one user")
        axis.set_ylabel("tokens per second in all")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.suptitle(title)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--dtype", default=Dtype.BFLOAT16.value, choices=[one.value for one in Dtype])
    parser.add_argument("--guesses", nargs="+", default=list(ERROR_RATES), choices=list(ERROR_RATES))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="requests in flight")
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS, help="fixed windows beside AR (tokens)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest completion (tokens)")
    parser.add_argument("--repeats", type=int, default=7, help="paired repeats of AR and auto")
    parser.add_argument("--fixed-repeats", type=int, default=3, help="repeats in which the fixed windows run too")
    parser.add_argument("--most-fixed-rows", type=int, default=512, help="fixed windows with more rows are left out")
    parser.add_argument("--kv-memory-mib", type=int, default=EngineConfig().kv_memory_mib)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    parser.add_argument("--picture", type=Path, help="PNG to draw (needs matplotlib); none by default")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


if __name__ == "__main__":
    sys.exit(main())
