"""Equal, explained or a fault: what becomes of a cell, and the sums of a part of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.exact.question import Answer, Cell
from benchmarks.exact.reference import Reference

# Of two tokens at a position of the answer.
GapAt = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Mismatch:
    """A cell that left the reference.

    Attributes:
        position: of the first token that differs; the length of the shorter answer when none does.
        gap: see ``Reference.gap``; None when no token differs, but length, finish reason or text do.
    """

    question: str
    prompt: str
    processor: str
    stop: str
    window: str
    mode: str
    fill: str
    mix: str
    adapter: str
    position: int
    gap: float | None
    is_explained: bool
    expected: Answer
    got: Answer

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Part:
    """A part of the report.

    Attributes:
        name: of the part.
        bound: a mismatch with a gap below it is explained; 0 explains nothing.
        num_cells: cells compared.
        num_by: cells by what they have, as ``{"window": {"16": 120, ...}, ...}``.
        facts: what else is worth telling, as plain JSON values.
        notes: the same for a reader, a line each.
    """

    name: str
    bound: float
    num_cells: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    num_by: dict[str, Counter[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def num_explained(self) -> int:
        return sum(mismatch.is_explained for mismatch in self.mismatches)

    @property
    def num_unexplained(self) -> int:
        return len(self.mismatches) - self.num_explained

    def add(self, cell: Cell, expected: Answer, got: Answer, gap: GapAt) -> None:
        """Compare one cell.

        Args:
            cell: what was asked.
            expected, got: the reference's answer and the engine's.
            gap: of the two tokens at a position of the answer.
        """
        self.num_cells += 1
        for name, value in kinds_of(cell).items():
            self.num_by.setdefault(name, Counter())[value] += 1
        if got != expected:
            self.mismatches.append(self._mismatch(cell, expected, got, gap))

    def as_json(self) -> dict[str, Any]:
        return {
            "cells": self.num_cells,
            "equal": self.num_cells - len(self.mismatches),
            "mismatches": len(self.mismatches),
            "explained": self.num_explained,
            "unexplained": self.num_unexplained,
            "threshold": self.bound,
            "wall_s": round(self.wall_s, 1),
            **self.facts,
            "cells_by": {name: dict(sorted(counts.items())) for name, counts in self.num_by.items()},
            "mismatch_list": [mismatch.as_json() for mismatch in self.mismatches],
        }

    def _mismatch(self, cell: Cell, expected: Answer, got: Answer, gap_at: GapAt) -> Mismatch:
        position = first_difference(expected, got)
        gap = None
        if position < min(len(expected.token_ids), len(got.token_ids)):
            gap = gap_at(position, expected.token_ids[position], got.token_ids[position])
        return Mismatch(
            question=cell.question.id,
            **kinds_of(cell),
            position=position,
            gap=gap,
            is_explained=gap is not None and gap < self.bound and got.is_streamed_alike,
            expected=expected,
            got=got,
        )


def add_against_reference(part: Part, cell: Cell, expected: Answer, got: Answer, reference: Reference) -> None:
    """Compare one cell, gaps being those of ``reference`` after the tokens that are expected."""

    def gap(position: int, *token_ids: int) -> float:
        return reference.gap(cell.question, expected.token_ids[:position], token_ids)

    part.add(cell, expected, got, gap)


def first_difference(expected: Answer, got: Answer) -> int:
    """Position of the first token that differs; the length of the shorter answer when none does."""
    pairs = enumerate(zip(expected.token_ids, got.token_ids, strict=False))
    shorter = min(len(expected.token_ids), len(got.token_ids))
    return next((position for position, (one, other) in pairs if one != other), shorter)


def kinds_of(cell: Cell) -> dict[str, str]:
    """What a cell has, by name."""
    question = cell.question
    return {
        "prompt": question.prompt,
        "processor": question.processor,
        "stop": question.stop,
        "window": "auto" if cell.window is None else str(cell.window),
        "mode": cell.mode.value,
        "fill": cell.fill,
        "mix": cell.mix,
        "adapter": question.adapter or "none",
    }
