"""What LoRA adapters beside the base weights cost: milliseconds per pass on SmolLM2-135M.

    OMP_NUM_THREADS=2 python benchmarks/adapter_cost.py      batch 1, 4 x window 1, 16 x no, one, two adapters

Random adapters on every linear layer of the body; each request has 128 tokens in its pages. With one adapter all
requests use it, with two they take turns (batch 1 has one request, so it has no such cell). The ways alternate within a
repeat; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, EngineConfig
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.model_runner import ModelRunner, make_runner
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.quiet import quiet_libraries
from jacobi_llm.infer.row_group import RowGroup

PREFIX_TOKENS = 128
BATCH_SIZES, WINDOWS, RANK = (1, 4), (1, 16), 32
WAYS: dict[str, tuple[str | None, ...]] = {"none": (None,), "one": ("a",), "two": ("a", "b"), "one of two": ("a", None)}
RESULT = Path(__file__).parent / "results" / "adapter_cost.json"


def make_adapters(model: str, rank: int, runner: ModelRunner) -> None:
    """Load two random adapters of ``rank`` as a and b."""
    for name in ("a", "b"):
        with tempfile.TemporaryDirectory() as folder, quiet_libraries():
            base = load_model(model, dtype=Dtype.BFLOAT16).model
            config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False)
            get_peft_model(base, config).save_pretrained(folder)
            runner.load_adapter(name, folder)


def groups_of(batch_size: int, window: int, adapters: Sequence[str | None], page_size: int) -> list[RowGroup]:
    """One pass of ``batch_size`` requests that take ``adapters`` in turn."""
    pages_each = -(-(PREFIX_TOKENS + window) // page_size)
    return [
        RowGroup(
            block_table=list(range(i * pages_each, (i + 1) * pages_each)),
            prefix_len=PREFIX_TOKENS,
            token_ids=[100 + i] * window,
            num_logit_rows=window,
            adapter=adapters[i % len(adapters)],
        )
        for i in range(batch_size)
    ]


def pass_ms(runner: ModelRunner, groups: Sequence[RowGroup]) -> float:
    start_s = time.perf_counter()
    runner.forward(groups)
    return (time.perf_counter() - start_s) * 1e3


def measure(runner: ModelRunner, repeats: int, page_size: int) -> list[dict[str, object]]:
    """Median milliseconds of every cell."""
    records: list[dict[str, object]] = []
    for batch_size in BATCH_SIZES:
        for window in WINDOWS:
            passes = {
                way: groups_of(batch_size, window, adapters, page_size)
                for way, adapters in WAYS.items()
                if len(adapters) <= batch_size
            }
            for groups in passes.values():
                runner.forward([replace(group, prefix_len=0, token_ids=[5] * PREFIX_TOKENS) for group in groups])
            samples: dict[str, list[float]] = {way: [] for way in passes}
            for _ in range(repeats):
                for way, groups in passes.items():
                    samples[way].append(pass_ms(runner, groups))
            cell: dict[str, object] = {"batch_size": batch_size, "window": window}
            cell |= {f"{way}_ms": round(statistics.median(values), 2) for way, values in samples.items()}
            print(json.dumps(cell), file=sys.stderr)
            records.append(cell)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=25, help="passes per cell")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    loaded = load_model(args.model, dtype=Dtype.BFLOAT16)
    config = EngineConfig()
    runner = make_runner(loaded.model, config, 64, loaded.name)
    make_adapters(args.model, args.rank, runner)
    result = {
        "what": f"ms per pass, compiled={runner.is_compiled}, rank {args.rank}, {args.repeats} repeats",
        "run": describe_run(),
        "cells": measure(runner, args.repeats, config.page_size),
    }
    write_atomically(args.output, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["cells"]))
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
