"""Fill policies against each other: tokens per forward pass on held-out prompts, every policy on the same ones.

    python benchmarks/fills.py                                 SmolLM2-135M, 16 prompts of each source, windows 8, 16
    python benchmarks/fills.py --model runs/quickstart/train/final

Answers are the same under every policy up to rounding, and passes are counted, not timed: a loaded machine changes
nothing. The microseconds that a policy takes per request and step are measured too, in the engine's own run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, EngineConfig, FillPolicy, PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.fill import Filler, GuessKind, make_fillers
from jacobi_llm.infer.measurement import measure
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.prompt import render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, Sequence

RESULT = Path(__file__).parent / "results" / "fills.json"


@dataclass
class _Timed:
    """A filler, and the time it takes."""

    filler: Filler
    seconds: list[float] = field(default_factory=list)

    def kind(self, sequence: Sequence) -> GuessKind:
        return self._time(lambda: self.filler.kind(sequence))

    def fill(self, sequence: Sequence, kept: Seq[int], num_guesses: int) -> list[int]:
        return self._time(lambda: self.filler.fill(sequence, kept, num_guesses))

    def learn(self, sequence: Sequence, num_guesses: int, num_accepted: int) -> None:
        self._time(lambda: self.filler.learn(sequence, num_guesses, num_accepted))

    def _time(self, work: Any) -> Any:
        started_s = time.perf_counter()
        result = work()
        self.seconds.append(time.perf_counter() - started_s)
        return result


def main(argv: Seq[str] | None = None) -> int:
    """Run every cell, print a line each, write the result file."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=Dtype(args.dtype))
    engine = LLMEngine(loaded, EngineConfig())
    cells: list[dict[str, Any]] = []
    for source in args.inputs:
        prompts = read_source(source, Split.HELDOUT, limit=args.num_prompts, seed=0).prompts
        prompt_ids = [tuple(render_prompt(prompt, loaded.tokenizer, PromptFormat.CHAT)) for prompt in prompts]
        for window in args.windows:
            for policy in FillPolicy:
                timed = _Timed(make_fillers()[policy])
                engine.scheduler.fillers[policy] = timed
                params = DecodeParams(
                    args.max_tokens, window, fill=policy, stop_token_ids=frozenset(loaded.eos_token_ids)
                )
                requests = [Request(str(number), ids, params) for number, ids in enumerate(prompt_ids)]
                measured = measure(engine, requests, in_flight=args.batch_size)
                cells.append(
                    {
                        "source": source,
                        "window": window,
                        "fill": policy.value,
                        "tpf": round(measured.tpf, 4),
                        "tokens": measured.num_completion_tokens,
                        "fill_us": round(1e6 * sum(timed.seconds) / measured.num_forward_passes, 1),
                    }
                )
                print(json.dumps(cells[-1]), flush=True)
    result = {
        **describe_run(args.threads),
        "model": args.label or args.model,
        "dtype": args.dtype,
        "num_prompts": args.num_prompts,
        "max_tokens": args.max_tokens,
        "cells": cells,
    }
    known = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    known[result["model"]] = result
    write_atomically(args.output, json.dumps(known, indent=2) + "\n")
    return 0


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--label", help="name of the model in the result file; its name or folder by default")
    parser.add_argument("--dtype", default=Dtype.BFLOAT16.value, choices=[one.value for one in Dtype])
    parser.add_argument("--inputs", nargs="+", default=["stdlib", "math"], help="prompt sources, their held-out part")
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts of each source")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16], help="windows (tokens)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest completion (tokens)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests in flight")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file; other models in it stay")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
