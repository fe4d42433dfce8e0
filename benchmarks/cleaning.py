"""Reading and cleaning of many prompts: rows per second of each stage, and the memory that all of it takes.

    python benchmarks/cleaning.py                                  1,000,000 rows, near duplicates on 100,000
    python benchmarks/cleaning.py --rows 20000 --near-rows 5000 --output /tmp/cleaning.json

Rows are short and generated: half of one template ("Please add 12 and 7, …"), half of drawn words; one in ten repeats
an earlier row exactly, one in ten with a word changed, one in a hundred holds a run of words of the evaluation set.
Stages are switched on one by one (each figure is of reading, that stage, the split and writing, over the same file),
then all together. Every measurement is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import CleanConfig, Split
from jacobi_llm.data.sources import PromptStream, write_prompts
from jacobi_llm.infer.environment import describe_run

RESULT = Path(__file__).parent / "results" / "cleaning.json"
STAGES: dict[str, dict[str, Any]] = {
    "reading": {},
    "length": {"min_chars": 10, "max_chars": 2000},
    "exact duplicates": {"duplicates": "exact"},
    "contamination": {"decontaminate": ["EVALUATION"]},
    "degenerate completions": {"drop_degenerate": True},
    "all but near duplicates": {
        "min_chars": 10,
        "max_chars": 2000,
        "duplicates": "exact",
        "decontaminate": ["EVALUATION"],
        "drop_degenerate": True,
    },
}
NEAR = {"near duplicates": {"duplicates": "near"}}


def main(argv: Sequence[str] | None = None) -> int:
    """Generate the rows, measure every stage, write the file."""
    args = parse_args(argv)
    if args.measure:
        print(json.dumps(measure(Path(args.measure), json.loads(args.settings))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        evaluation = folder / "evaluation.jsonl"
        runs = [drawn_words(random.Random(number), 20) for number in range(500)]
        evaluation.write_text("".join(json.dumps({"prompt": run}) + "\n" for run in runs))
        cells = []
        for count, stages in ((args.rows, STAGES), (args.near_rows, NEAR)):
            path = folder / f"{count}.jsonl"
            with path.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(count, runs))
            for stage, settings in stages.items():
                known = json.loads(json.dumps(settings).replace("EVALUATION", str(evaluation)))
                cells.append({"stage": stage, "num_rows": count, **in_process(path, known)})
                print(json.dumps({k: v for k, v in cells[-1].items() if k != "cleaning"}), file=sys.stderr, flush=True)
    result = {**describe_run(1), "rows": args.rows, "near_rows": args.near_rows, "cells": cells}
    # What was cleaned against lay in a folder that is gone.
    text = json.dumps(result, indent=2).replace(str(evaluation), "evaluation.jsonl")
    write_atomically(args.output, text + "\n")
    return 0


def rows(count: int, evaluation: Sequence[str]) -> Iterator[dict[str, str]]:
    """Generated prompts with completions, the same for every call."""
    draw = random.Random(0)
    earlier: list[str] = []
    for number in range(count):
        kind = draw.random()
        if kind < 0.1 and earlier:
            prompt = draw.choice(earlier)
        elif kind < 0.2 and earlier:
            words = draw.choice(earlier).split()
            words[draw.randrange(len(words))] = "other"
            prompt = " ".join(words)
        elif kind < 0.21:
            prompt = f"{drawn_words(draw, 5)} {draw.choice(evaluation)} {drawn_words(draw, 3)}"
        elif kind < 0.6:
            prompt = f"Please add {draw.randrange(10**6)} and {draw.randrange(10**6)}, then say what it is."
        else:
            prompt = drawn_words(draw, 18)
        if len(earlier) < 10_000:
            earlier.append(prompt)
        yield {"id": f"r{number}", "prompt": prompt, "completion": drawn_words(draw, 12)}


def drawn_words(draw: random.Random, count: int) -> str:
    """Words of four to nine letters."""
    return " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(4, 9))) for _ in range(count))


def in_process(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(path), "--settings", json.dumps(settings)]
    measured: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return measured


def measure(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read, clean, split and write the train part; seconds, rows per second and peak memory of this process."""
    started_s = time.perf_counter()
    stream = PromptStream(str(path), Split.TRAIN, cleaning=CleanConfig.model_validate(settings))
    num_kept = write_prompts(path.with_suffix(".out.jsonl"), stream)
    wall_s = time.perf_counter() - started_s
    num_rows = int(path.stem)
    return {
        "num_kept": num_kept,
        "wall_s": round(wall_s, 2),
        "rows_per_s": round(num_rows / wall_s),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "cleaning": stream.cleaning,
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="generated rows")
    parser.add_argument("--near-rows", type=int, default=100_000, help="rows of the near-duplicate stage")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
