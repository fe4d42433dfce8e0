"""What sampling costs: tokens per second of sampled decoding over those of greedy decoding, in pairs.

    python benchmarks/sampling_speed.py --threads 2            plain AR at batch 1, 4, 16, 64, and a window of 16
    python benchmarks/sampling_speed.py --repeats 2 --batch-sizes 1 --max-tokens 16 --output /tmp/sampling_speed.json

Both decode the same prompts with the same number of tokens in one engine (end-of-sequence tokens are ignored, so that
the work is the same), prefill counted; they take turns within a repeat, and every ratio is taken within its repeat:
medians are reported. With a window above 1 guesses are right at other rates in sampled text, so there the time of a
pass is compared too: it tells the sampler's own cost from that of worse guesses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, EngineConfig, PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.measurement import Measurement, measure
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.prompt import render_prompt
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.sampling_params import SamplingParams

RESULT = Path(__file__).parent / "results" / "sampling_speed.json"
SAMPLERS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "temperature 0.7, top-k 50, top-p 0.95": SamplingParams(temperature=0.7, top_k=50, top_p=0.95),
}
GREEDY = "greedy"
BOUND = 0.85


def main(argv: Seq[str] | None = None) -> int:
    """Run all cells, print a line each, write the file; return 1 when a cell of plain AR is below the bound."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=Dtype(args.dtype))
    engine = LLMEngine(loaded, EngineConfig(max_num_seqs=max(args.batch_sizes)))
    prompts = read_source("stdlib", Split.HELDOUT, limit=max(args.batch_sizes), seed=0).prompts
    prompt_ids = [tuple(render_prompt(prompt, loaded.tokenizer, PromptFormat.CHAT)) for prompt in prompts]
    cells = [
        run_cell(engine, prompt_ids[:batch_size], window, args)
        for window in args.windows
        for batch_size in args.batch_sizes
        if window * batch_size <= engine.config.max_num_rows // 2
    ]
    result = {
        **describe_run(args.threads),
        "model": args.model,
        "dtype": args.dtype,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "bound": BOUND,
        "cells": cells,
    }
    write_atomically(args.output, json.dumps(result, indent=2) + "\n")
    missed = [
        f"batch {cell['batch_size']}, {name}"
        for cell in cells
        for name, sampled in cell["sampled"].items()
        if cell["window"] == 1 and sampled["tps_ratio"] < BOUND
    ]
    print(f"below {BOUND} of greedy: {'; '.join(missed) or 'none'}")
    return 1 if missed else 0


def run_cell(
    engine: LLMEngine, prompt_ids: Seq[tuple[int, ...]], window: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Greedy and every sampler with one window and batch size."""
    samplers = {GREEDY: SamplingParams(), **SAMPLERS}
    runs: dict[str, list[Measurement]] = {name: [] for name in samplers}
    for sampling in samplers.values():
        measure(engine, make_requests(prompt_ids, window, sampling, 4))
    for repeat in range(args.repeats):
        # Every other repeat runs backwards: what a drifting clock gives to one half it takes from the other.
        for name in samplers if repeat % 2 == 0 else reversed(samplers):
            runs[name].append(measure(engine, make_requests(prompt_ids, window, samplers[name], args.max_tokens)))
    greedy = runs.pop(GREEDY)
    cell = {
        "window": window,
        "batch_size": len(prompt_ids),
        "greedy_tps": median(run.tps for run in greedy),
        "greedy_ms_per_pass": median(run.ms_per_pass for run in greedy),
        "sampled": {
            name: {
                "tps_ratio": median(run.tps / other.tps for run, other in zip(taken, greedy, strict=True)),
                "pass_ratio": median(
                    other.ms_per_pass / run.ms_per_pass for run, other in zip(taken, greedy, strict=True)
                ),
                "tpf": median(run.tpf for run in taken),
            }
            for name, taken in runs.items()
        },
        "greedy_tpf": median(run.tpf for run in greedy),
    }
    print(json.dumps(cell), flush=True)
    return cell


def make_requests(
    prompt_ids: Seq[tuple[int, ...]], window: int, sampling: SamplingParams, max_tokens: int
) -> list[Request]:
    """Requests of one batch; each has a seed of its own."""
    return [
        Request(str(number), ids, DecodeParams(max_tokens, window, sampling=sampling, seed=number))
        for number, ids in enumerate(prompt_ids)
    ]


def median(values: Any) -> float:
    return round(statistics.median(values), 4)


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--dtype", default=Dtype.BFLOAT16.value, choices=[one.value for one in Dtype])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="requests in flight")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 16], help="windows (tokens)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of every completion")
    parser.add_argument("--repeats", type=int, default=7, help="paired repeats")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
