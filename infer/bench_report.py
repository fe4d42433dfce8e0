"""What a bench shows and keeps: a table, ``bench.json`` and ``bench.png``."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.infer.bench_cell import CellResult
from jacobi_llm.infer.environment import describe_run

_PIPED_TABLE_WIDTH = 140


def print_table(results: Sequence[CellResult], title: str) -> None:
    """Print the results on standard output."""
    table = Table(title=title, title_justify="left")
    headers = ("batch", "window", "TPF", "TPS", "x AR", "TTFT ms", "latency ms", "passes", "ms/pass", "same ids")
    for header in headers:
        table.add_column(header, justify="left" if header == "window" else "right", no_wrap=True)
    for row in results:
        table.add_row(
            str(row.batch_size),
            "1 (AR)" if row.mode == "ar" else f"{row.window or 'auto'} {row.mode}",
            f"{row.tpf:.2f}",
            f"{row.tps:.1f}",
            f"{row.ratio:.2f}",
            f"{row.ttft_ms_p50:.0f}",
            f"{row.latency_ms_p50:.0f}",
            f"{row.num_passes:g}",
            f"{row.ms_per_pass:.1f}",
            f"{row.agreement:.0%}",
        )
    console = Console(file=sys.stdout)
    # rich folds a table to 80 columns when nobody's terminal says otherwise; a file has no such limit.
    Console(file=sys.stdout, width=None if console.is_terminal else _PIPED_TABLE_WIDTH).print(table)


def check_plotting() -> None:
    """Find out before a long run, not after it, that no picture can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("bench.output: bench.png needs matplotlib: pip install 'jacobi-llm[plot]'")


def write_results(folder: Path, recipe: Recipe, device: str, num_prompts: int, results: Sequence[CellResult]) -> None:
    """Write ``bench.json`` and ``bench.png``.

    Raises:
        RunError: the folder cannot be written.
    """
    config = recipe.bench
    record = {
        **describe_run(recipe.engine.num_threads),
        "model": config.model,
        "adapter": config.adapter,
        "dtype": config.dtype.value,
        "device": device,
        "threads": torch.get_num_threads(),
        "num_prompts": num_prompts,
        "config": config.model_dump(mode="json"),
        "engine": recipe.engine.model_dump(mode="json"),
        "cells": [asdict(result) for result in results],
    }
    path = write_atomically(folder / "bench.json", json.dumps(record, indent=2) + "\n")
    png = draw_png(results, f"{config.model}, {config.dtype.value}, {device}")
    png_path = write_atomically(folder / "bench.png", png)
    print(f"wrote {path} and {png_path}", file=sys.stderr)


def draw_png(results: Sequence[CellResult], title: str) -> bytes:
    """Return a PNG: speed over AR and tokens per pass against the window, a line per batch size and mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface leaves alone the global state of a program that plots on its own.
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    jacobi_modes = list(dict.fromkeys(row.mode for row in results if row.mode != "ar")) or ["ar"]
    for batch_size in dict.fromkeys(row.batch_size for row in results):
        for mode in jacobi_modes:
            rows = [row for row in results if row.batch_size == batch_size and row.mode in ("ar", mode)]
            label = f"batch {batch_size}" + (f", {mode}" if len(jacobi_modes) > 1 else "")
            fixed = [row for row in rows if row.window]
            windows = [row.window for row in fixed]
            [line, *_] = axes[0].plot(windows, [row.ratio for row in fixed], marker="o", label=label)
            axes[1].plot(windows, [row.tpf for row in fixed], marker="o", label=label)
            for row in rows:
                if row.window is None:
                    for axis, value in zip(axes, (row.ratio, row.tpf), strict=True):
                        axis.axhline(value, color=line.get_color(), linestyle="--", label=f"{label}, auto")
    ticks = sorted({row.window for row in results if row.window})
    for axis, name in zip(axes, ("tokens per second, times plain AR", "tokens per forward pass"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("window (tokens)")
        axis.set_ylabel(name)
        axis.set_ylim(0, 1.08 * max(1.0, axis.dataLim.y1))
        axis.axhline(1.0, color="0.7", linewidth=1, zorder=0)
        axis.legend()
    figure.suptitle(title)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
    return png.getvalue()
