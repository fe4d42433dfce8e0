"""jacobi-train eval: the base against the trained model on held-out prompts, plain AR and Jacobi, in pairs."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.files import make_folder
from jacobi_llm.configs.schema import Auto, Recipe
from jacobi_llm.infer.device import resolve_device
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.measurement import Measurement, agreement
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.train.evaluation_report import print_answer, print_table, write_report
from jacobi_llm.train.export import FINAL
from jacobi_llm.train.heldout import HeldOut, common_share, repetition


@dataclass(frozen=True)
class EvaluationRow:
    """One model at one window.

    Attributes:
        model: base or trained.
        window: 1 is plain AR; None was chosen by the engine.
        tokens_per_forward: TPF, of the first repeat (it does not change).
        tokens_per_s: TPS, median over repeats, prefill included.
        ratio: TPS over the base's AR TPS of the same repeat, median.
        same_as_own_ar: share of answers with the ids of the same model's AR answer.
        same_as_base: share of the base's AR tokens before the first divergence.
        repetition: share of repeated 4-grams.
        share_correct: share of right answers, None when prompts carry none.
    """

    model: str
    window: int | None
    tokens_per_forward: float
    tokens_per_s: float
    ratio: float
    same_as_own_ar: float
    same_as_base: float
    repetition: float
    share_correct: float | None


def run(recipe: Recipe, options: Options) -> int:
    """Measure base and trained model, print the table, write the report when ``eval.output`` is set."""
    trained_path = Path(recipe.train.output) / FINAL
    if not trained_path.is_dir():
        raise UsageError(f"{trained_path}: no trained model here; run jacobi-train run first, or set train.output")
    if recipe.eval.output:
        make_folder(Path(recipe.eval.output), "eval.output")
    device = resolve_device("auto")
    models = {
        "base": load_model(recipe.train.model, dtype=recipe.train.dtype, device=device),
        "trained": load_model(str(trained_path), dtype=recipe.train.dtype, device=device),
    }
    heldout = HeldOut.read(recipe.eval, models["base"])
    measured = measure_all(models, heldout, recipe)
    rows = summarise(models, heldout, measured)
    print_table(rows, len(heldout.prompts), recipe.eval.batch_size, as_json=options.json)
    shown = measured["trained", _window(recipe)][0].outputs[0]
    if not options.json:
        print_answer(shown, heldout.prompts[0], models["trained"].tokenizer)
    if recipe.eval.output:
        write_report(Path(recipe.eval.output), recipe, rows, shown, models["trained"].tokenizer)
    return 0


def measure_all(
    models: dict[str, LoadedModel], heldout: HeldOut, recipe: Recipe
) -> dict[tuple[str, int | None], list[Measurement]]:
    """Every (model, window) cell once per repeat, in turn, so that drift of the machine hits all alike."""
    engines = {name: LLMEngine(loaded, recipe.engine) for name, loaded in models.items()}
    cells = [(name, window) for name in models for window in dict.fromkeys((1, _window(recipe)))]
    measured: dict[tuple[str, int | None], list[Measurement]] = {cell: [] for cell in cells}
    for name, window in cells:
        heldout.first(1).decode(engines[name], window=window)
    for repeat in range(recipe.eval.repeats):
        for name, window in cells:
            measured[name, window].append(heldout.decode(engines[name], window=window))
            last = measured[name, window][-1]
            print(
                f"repeat {repeat + 1}/{recipe.eval.repeats} {name} window {window or 'auto'}: "
                f"TPF {last.tpf:.2f}, {last.tps:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    return measured


def _window(recipe: Recipe) -> int | None:
    return None if recipe.eval.window is Auto.AUTO else recipe.eval.window


def summarise(
    models: dict[str, LoadedModel], heldout: HeldOut, measured: dict[tuple[str, int | None], list[Measurement]]
) -> list[EvaluationRow]:
    """One row per cell; ratios are taken within a repeat, then the median over repeats."""
    base_ar = measured["base", 1]
    rows = []
    for (name, window), runs in measured.items():
        outputs = runs[0].outputs
        rows.append(
            EvaluationRow(
                model=name,
                window=window,
                tokens_per_forward=runs[0].tpf,
                tokens_per_s=statistics.median(run.tps for run in runs),
                ratio=statistics.median(run.tps / ar.tps for run, ar in zip(runs, base_ar, strict=True)),
                same_as_own_ar=agreement(outputs, measured[name, 1][0].outputs),
                same_as_base=common_share(outputs, base_ar[0].outputs),
                repetition=repetition(outputs),
                share_correct=heldout.share_correct(outputs, models[name].tokenizer),
            )
        )
    return rows
