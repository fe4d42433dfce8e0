"""What automatic windows are chosen as the load rises and falls: a picture.

    python benchmarks/window_policy.py --picture docs/window_policy.png

Requests join in waves, 1, then 4, 16 and 64 in all, and leave as they end; then a single one goes on. Guesses are those
of an oracle with a set error rate, or the model's own. Above: requests in the engine; below: the mean window.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from never_worse import AUTO, Bench, make_bench

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.window_policy import AutoWindows

RESULT = Path(__file__).parent / "results" / "window_policy.json"
WAVES = (1, 4, 16, 64)
STEPS_BETWEEN = 12


def main(argv: Seq[str] | None = None) -> int:
    """Run once for every quality of guesses; write figures and picture."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.batch_sizes = [args.waves[-1]]
    bench = make_bench(args)
    series = {}
    for name, rate in (("base", None), *((f"oracle {rate:.0%}", rate) for rate in args.error_rates)):
        bench.set_guesses(rate)
        series[name] = run(bench, args)
    result = {**describe_run(args.threads), "model": args.model, "waves": args.waves, "series": series}
    write_atomically(args.output, json.dumps(result) + "\n")
    if args.picture is not None:
        write_atomically(args.picture, draw(series))
    return 0


def run(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run: what the policy chose, step by step."""
    engine: LLMEngine = bench.engine
    policy = engine.scheduler.windows
    assert isinstance(policy, AutoWindows)
    requests = bench.requests(AUTO, args.waves[-1])
    waves = list(args.waves)
    num_added = steps = 0
    started_s = time.perf_counter()
    chosen: list[dict[str, Any]] = []
    while waves or engine.scheduler.running or engine.scheduler.waiting:
        if waves and steps % STEPS_BETWEEN == 0:
            for request in requests[num_added : waves[0]]:
                engine.add_request(request)
            num_added = waves.pop(0)
        engine.step()
        steps += 1
        if policy.history:
            last = policy.history[-1]
            chosen.append(
                {
                    "s": round(time.perf_counter() - started_s, 4),
                    "requests": last.num_requests,
                    "rows": last.num_rows,
                    "mean_window": round(last.mean_window, 3),
                }
            )
    return chosen


def draw(series: dict[str, list[dict[str, Any]]]) -> bytes:
    """Return a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(series), 4.6), layout="constrained")
    axes = figure.subplots(2, len(series), squeeze=False, sharex="col")
    for (above, below), (name, steps) in zip(axes.T, series.items(), strict=True):
        seconds = [step["s"] for step in steps]
        above.step(seconds, [step["requests"] for step in steps], where="post", color="0.3")
        above.set_title(name)
        above.set_ylabel("requests")
        below.step(seconds, [step["mean_window"] for step in steps], where="post")
        below.set_ylabel("mean window (tokens)")
        below.set_xlabel("seconds")
        below.set_ylim(bottom=0)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--dtype", default=Dtype.BFLOAT16.value, choices=[one.value for one in Dtype])
    parser.add_argument("--error-rates", type=float, nargs="*", default=[0.3, 0.1], help="of the oracle")
    parser.add_argument("--waves", type=int, nargs="+", default=WAVES, help="requests in all after each wave")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest completion (tokens)")
    parser.add_argument("--kv-memory-mib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    parser.add_argument("--picture", type=Path, help="PNG to draw (needs matplotlib); none by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
