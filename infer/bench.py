"""``jacobi-infer bench``: modes x windows x batch sizes over one set of prompts, every cell against plain AR.

    jacobi-data prompts --input math --output prompts.jsonl
    jacobi-infer bench --input prompts.jsonl --windows 1,8,16 --batch-sizes 1,4 --output runs/bench

Speeds drift on a shared machine, so a ratio is taken within one repeat, where AR and the other cells of a batch size
ran within minutes of each other, and the median over the repeats is reported.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.files import make_folder
from jacobi_llm.configs.schema import Auto, BenchConfig, DecodeMode, EngineConfig, Recipe
from jacobi_llm.infer.bench_cell import Cell, CellResult, summarise
from jacobi_llm.infer.bench_report import check_plotting, print_table, write_results
from jacobi_llm.infer.device import resolve_device
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.generate import check_format
from jacobi_llm.infer.measurement import Measurement, measure
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.prompt import Prompt, read_prompt_file, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request

WARM_UP_TOKENS = 8


def run(recipe: Recipe, options: Options) -> int:
    """Run the command; return its exit code."""
    config = recipe.bench
    device = resolve_device(config.device)
    if config.output is not None:
        check_plotting()
        make_folder(Path(config.output), "bench.output")
    prompts = _draw_prompts(config)
    cells = make_cells(config, len(prompts))
    if options.dry_run:
        _print_plan(config, device, prompts, cells, as_json=options.json)
        return 0
    loaded = load_model(config.model, dtype=config.dtype, device=device, adapter=config.adapter)
    check_format(config.format, loaded.tokenizer, config.model)
    prompt_ids = [tuple(render_prompt(prompt, loaded.tokenizer, config.format)) for prompt in prompts]
    results = run_cells(loaded, _engine_config(recipe.engine, cells), config, prompt_ids, cells)
    if options.json:
        for result in results:
            print(json.dumps(asdict(result)))
    else:
        print_table(results, f"{config.model}, {config.dtype.value}, {device}, {len(prompts)} prompts")
    if config.output is not None:
        write_results(Path(config.output), recipe, device, len(prompts), results)
    return 0


def make_cells(config: BenchConfig, num_prompts: int) -> list[Cell]:
    """Return the cells by batch size, AR first.

    Raises:
        UsageError: fewer prompts than a batch holds, so that it would never be full.
    """
    too_large = [size for size in config.batch_sizes if size > num_prompts]
    if too_large:
        raise UsageError(
            f"bench.batch_sizes: {max(too_large)} requests in flight need as many prompts, there are {num_prompts}; "
            "raise bench.num_prompts or give a longer file"
        )
    fixed = sorted({window for window in config.windows if not isinstance(window, Auto)} - {1})
    auto = [None] if Auto.AUTO in config.windows else []
    return [
        cell
        for batch_size in sorted(set(config.batch_sizes))
        for cell in (
            Cell(batch_size, DecodeMode.SLIDING, 1),
            *(
                Cell(batch_size, mode, window)
                for mode in dict.fromkeys(config.modes)
                # A block has a fixed length.
                for window in [*fixed, *(auto if mode is DecodeMode.SLIDING else [])]
            ),
        )
    ]


def run_cells(
    loaded: LoadedModel,
    engine_config: EngineConfig,
    config: BenchConfig,
    prompt_ids: Sequence[tuple[int, ...]],
    cells: Sequence[Cell],
) -> list[CellResult]:
    """Measure every cell ``config.repeats`` times, after a warm-up of each; results in the order of ``cells``.

    Raises:
        UsageError: a prompt that the engine refuses.
    """
    engine = LLMEngine(loaded, engine_config)
    print(engine.describe_memory(), file=sys.stderr)
    for cell in cells:
        measure(engine, _requests(loaded, config, prompt_ids[: cell.batch_size], cell, WARM_UP_TOKENS))
    measured: dict[Cell, list[Measurement]] = {cell: [] for cell in cells}
    for repeat in range(config.repeats):
        # Every other repeat runs backwards: what a drifting clock gives to one half it takes from the other.
        for cell in cells if repeat % 2 == 0 else reversed(cells):
            requests = _requests(loaded, config, prompt_ids, cell, config.max_tokens)
            measured[cell].append(measure(engine, requests, in_flight=cell.batch_size))
            _note_progress(repeat, config.repeats, cell, measured[cell][-1])
    return [summarise(cell, measured[cell], measured[Cell(cell.batch_size, DecodeMode.SLIDING, 1)]) for cell in cells]


def _draw_prompts(config: BenchConfig) -> list[Prompt]:
    if config.input is None:
        raise UsageError(
            "bench.input: give a JSONL file of prompts (jacobi-data prompts --input math --output FILE makes one)"
        )
    prompts = read_prompt_file(config.input).prompts
    if len(prompts) <= config.num_prompts:
        if len(prompts) < config.num_prompts:
            print(f"{config.input}: {len(prompts)} prompts, fewer than bench.num_prompts", file=sys.stderr)
        return prompts
    drawn = sorted(random.Random(config.seed).sample(range(len(prompts)), config.num_prompts))
    return [prompts[index] for index in drawn]


def _engine_config(config: EngineConfig, cells: Sequence[Cell]) -> EngineConfig:
    """Lift the limits that would turn a cell into another one: a batch that waits, or windows that are cut."""
    return config.model_copy(
        update={
            "max_num_seqs": max(config.max_num_seqs, *(cell.batch_size for cell in cells)),
            "max_num_rows": max(config.max_num_rows, *(cell.batch_size * (cell.window or 1) for cell in cells)),
        }
    )


def _requests(
    loaded: LoadedModel, config: BenchConfig, prompt_ids: Sequence[tuple[int, ...]], cell: Cell, max_tokens: int
) -> list[Request]:
    params = DecodeParams(
        max_tokens=max_tokens,
        window=cell.window,
        mode=cell.mode,
        fill=config.fill,
        stop_token_ids=frozenset(loaded.eos_token_ids),
        seed=config.seed,
    )
    return [Request(str(index), ids, params) for index, ids in enumerate(prompt_ids)]


def _note_progress(repeat: int, repeats: int, cell: Cell, measured: Measurement) -> None:
    print(
        f"repeat {repeat + 1}/{repeats}: batch {cell.batch_size}, {cell.label}: "
        f"TPF {measured.tpf:.2f}, TPS {measured.tps:.1f}",
        file=sys.stderr,
        flush=True,
    )


def _print_plan(
    config: BenchConfig, device: str, prompts: Sequence[Prompt], cells: Sequence[Cell], *, as_json: bool
) -> None:
    plan: dict[str, Any] = {
        "model": config.model,
        "adapter": config.adapter,
        "dtype": config.dtype.value,
        "device": device,
        "prompts": len(prompts),
        "cells": [f"batch {cell.batch_size}, {cell.label}" for cell in cells],
        "repeats": config.repeats,
        "completion_tokens_at_most": len(prompts) * len(cells) * config.repeats * config.max_tokens,
        "output": config.output,
    }
    if as_json:
        print(json.dumps(plan))
        return
    for key, value in plan.items():
        print(f"{key}: {'; '.join(value) if isinstance(value, list) else value}")
