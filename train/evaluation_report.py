"""What an evaluation shows and keeps: a table, one answer coloured by pass, JSON, PNG and HTML."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.infer.detokenizer import token_texts
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.prompt import Prompt
from jacobi_llm.infer.request import RequestOutput
from jacobi_llm.infer.view import render_ansi, render_html

if TYPE_CHECKING:
    from jacobi_llm.train.evaluation import EvaluationRow

_PIPED_TABLE_WIDTH = 120
_COLOURS = {"base": "#8c8c8c", "trained": "#d1495b"}


def print_table(rows: Sequence[EvaluationRow], num_prompts: int, batch_size: int, *, as_json: bool) -> None:
    """Print the rows on standard output."""
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    table = Table(title=f"{num_prompts} held-out prompts, {batch_size} in flight", title_justify="left")
    for header in (
        "model",
        "decoding",
        "TPF",
        "TPS",
        "x base AR",
        "same as own AR",
        "same as base",
        "right",
        "repeats",
    ):
        table.add_column(header, justify="left" if header in ("model", "decoding") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model,
            _decoding(row),
            f"{row.tokens_per_forward:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.ratio:.2f}",
            f"{row.same_as_own_ar:.0%}",
            f"{row.same_as_base:.0%}",
            "-" if row.share_correct is None else f"{row.share_correct:.0%}",
            f"{row.repetition:.1%}",
        )
    is_terminal = Console(file=sys.stdout).is_terminal
    # rich folds a table to 80 columns when nobody's terminal says otherwise; a file has no such limit.
    Console(file=sys.stdout, width=None if is_terminal else _PIPED_TABLE_WIDTH).print(table)


def print_answer(output: RequestOutput, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print one answer, every pass's tokens in a colour of their own."""
    question = prompt.text or (prompt.messages[-1].content if prompt.messages else "")
    print(f"\n{question.strip()}\n")
    print(render_ansi(token_texts(tokenizer, output.token_ids), output.commit_lengths))


def write_report(
    folder: Path,
    recipe: Recipe,
    rows: Sequence[EvaluationRow],
    output: RequestOutput,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write ``evaluation.json``, ``answer.html`` and, with matplotlib installed, ``evaluation.png``.

    Raises:
        RunError: the folder cannot be written.
    """
    record = {
        **describe_run(recipe.engine.num_threads),
        "eval": recipe.eval.model_dump(mode="json"),
        "base_model": recipe.train.model,
        "dtype": recipe.train.dtype.value,
        "rows": [asdict(row) for row in rows],
    }
    write_atomically(folder / "evaluation.json", json.dumps(record, indent=2) + "\n")
    html = render_html(
        token_texts(tokenizer, output.token_ids), output.commit_lengths, title="Which pass fixed which token"
    )
    write_atomically(folder / "answer.html", html)
    try:
        write_atomically(folder / "evaluation.png", draw_png(rows))
    except ImportError:
        print("note: no evaluation.png without matplotlib: pip install 'jacobi-llm[plot]'", file=sys.stderr)
    print(f"wrote {folder}/evaluation.json, answer.html and evaluation.png", file=sys.stderr)


def draw_png(rows: Sequence[EvaluationRow]) -> bytes:
    """Return a PNG: tokens per forward pass, and tokens per second, one bar per row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = [f"{row.model}, {_decoding(row)}" for row in rows]
    colours = [_COLOURS[row.model] for row in rows]
    panels = (
        ("tokens per forward pass", [row.tokens_per_forward for row in rows], "{:.2f}"),
        ("tokens per second", [row.tokens_per_s for row in rows], "{:.1f}"),
    )
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        bars = axis.barh(labels, values, color=colours)
        axis.bar_label(bars, [form.format(value) for value in values], padding=3)
        axis.set_xlabel(title)
        axis.set_xlim(0, 1.15 * max(values))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
    return png.getvalue()


def _decoding(row: EvaluationRow) -> str:
    return "AR" if row.window == 1 else f"Jacobi {row.window or 'auto'}"
