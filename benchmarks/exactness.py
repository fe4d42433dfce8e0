"""Is every answer of the engine the one of plain decoding? One report: tiny models, and the real one in fp32 and bf16.

    python -m benchmarks.exactness                            everything, on 2 cores
    python -m benchmarks.exactness --part tiny --cells 600    under a minute

A cell is a question (prompt, processors, stops, seed) with one window in one batch mix: alone, beside others that
join in a drawn order, or in a crowd that is short of K/V pages, reads prompts in chunks and has requests aborted in its
midst. Its ids, finish reason and text (as streamed) are compared with those of a loop over transformers' model that
decodes one token at a time (``benchmarks/exact/reference.py``).

- tiny: random models of several families in float64. Every difference is a fault.
- fp32: a difference is explained when, where it begins, both tokens lie less than 1e-4 below the reference's best
  choice (noise included).
- bf16: against the engine's own window 1 at batch 1. A difference is explained up to twice the largest gap at which the
  same at batch 8 differs in this run; gaps are those of the fp32 model. Processors that cut at a threshold (top-k,
  top-p, min-p) are left to batch-invariant mode: what they let through depends on rounding by more than a gap.
- bf16 in batch-invariant mode: against its own window 1 at batch 1. Every difference is a fault. What the mode costs is
  measured in the same run.

Exit status: 0; 1 when something is unexplained; 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.exact.real import Judge, Load, run_bf16, run_fp32, run_invariant
from benchmarks.exact.tiny import run_tiny
from benchmarks.exact.verdict import Part
from jacobi_llm.configs.errors import JacobiError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.models import load_model

RESULT = Path(__file__).parent / "results" / "exactness.json"
PARTS = ("tiny", "fp32", "bf16")
TINY_CELLS, REAL_CELLS = 9_000, 600
NUM_TOKENS = 32
_COLUMNS = ("part", "cells", "mismatches", "explained", "unexplained", "threshold", "seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write the result file, print the table; return the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        parts = run_parts(args.part, args)
    except JacobiError as error:
        say(f"error: {error}")
        return error.exit_code
    result = {**{part.name: part.as_json() for part in parts}, **describe_run(args.threads)}
    write_atomically(args.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(table(parts))
    for part in parts:
        for note in part.notes:
            print(f"{part.name}: {note}")
        print_faults(part)
    return 1 if any(part.num_unexplained for part in parts) else 0


def run_parts(part: str, args: argparse.Namespace) -> list[Part]:
    """Run one of ``PARTS``, or all."""
    parts = []
    if part in ("tiny", "all"):
        parts.append(run_tiny(args.cells or TINY_CELLS, say))
    if part == "tiny":
        return parts
    with TemporaryDirectory() as folder:
        judge = Judge.of(Load(args.cells or REAL_CELLS, args.tokens, args.model), Path(folder))
        if part in ("fp32", "all"):
            parts.append(run_fp32(judge, say))
        if part in ("bf16", "all"):
            loaded = load_model(args.model, dtype=Dtype.BFLOAT16)
            parts.append(run_bf16(judge, loaded, say))
            parts.append(run_invariant(judge, loaded, say))
    return parts


def table(parts: Sequence[Part]) -> str:
    """The report, a line for each part."""
    lines = [_COLUMNS]
    for part in parts:
        counts = (part.num_cells, len(part.mismatches), part.num_explained, part.num_unexplained)
        lines.append((part.name, *(f"{count:,}" for count in counts), f"{part.bound:.3g}", f"{part.wall_s:.0f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]

    def padded(line: Sequence[str]) -> str:
        return "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])))

    return "\n".join(map(padded, lines))


def print_faults(part: Part, most: int = 20) -> None:
    """Say what is unexplained, the first of it, on stderr."""
    faults = [mismatch for mismatch in part.mismatches if not mismatch.is_explained]
    for fault in faults[:most]:
        say(f"unexplained: {part.name}: {fault}")
    if len(faults) > most:
        say(f"... and {len(faults) - most} more in the result file")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exactness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="what to run")
    parser.add_argument(
        "--cells", type=_positive, help=f"least cells of each part (default: tiny {TINY_CELLS}, others {REAL_CELLS})"
    )
    parser.add_argument("--tokens", type=_positive, default=NUM_TOKENS, help="longest answer, real model (tokens)")
    parser.add_argument("--model", default="smollm2-135m", help="the real model: name or folder")
    parser.add_argument("--threads", type=_positive, default=2, help="CPU threads")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
