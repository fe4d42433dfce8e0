"""Pairs of runs: the plan of turns, and what the ratios of its pairs say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Pair:
    """Two turns, one right after the other, over the same prompts.

    Attributes:
        peer: the engine that ours is compared with.
        batch_size: requests, all of them there from the start.
        repeat: counts from 0; it chooses the prompts.
        ours_first: our turn is the first of the two.
    """

    peer: str
    batch_size: int
    repeat: int
    ours_first: bool


@dataclass(frozen=True)
class Turn:
    """One engine, one batch.

    Attributes:
        wall_s: seconds from the requests to the last completion, prefill included.
        cpu_s: CPU seconds of the engine's processes.
        others_cpu_s: CPU seconds of everything else on the machine.
        token_ids: one completion per prompt.
    """

    wall_s: float
    cpu_s: float
    others_cpu_s: float
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def tps(self) -> float:
        """Completion tokens per second."""
        return sum(map(len, self.token_ids)) / self.wall_s


def plan(peers: Sequence[str], batch_sizes: Sequence[int], repeats: int) -> Iterator[Pair]:
    """Yield every pair, repeat by repeat, so that a drifting machine meets all of them.

    Of the repeats of one comparison every other one begins with us, and so does every other pair of one repeat.
    """
    for repeat in range(repeats):
        for batch_size in batch_sizes:
            for index, peer in enumerate(peers):
                yield Pair(peer, batch_size, repeat, ours_first=(repeat + index) % 2 == 0)


def prompts_of(batch_size: int, repeat: int, prompts: Prompts) -> Prompts:
    """The prompts of one batch: repeats walk through all of them, and begin again when they are used up."""
    start = repeat * batch_size
    return [prompts[index % len(prompts)] for index in range(start, start + batch_size)]


def distinct_batches(batch_size: int, repeats: int, prompts: Prompts) -> list[Prompts]:
    """All batches that the repeats use, each once, in their order."""
    batches = {tuple(prompts_of(batch_size, repeat, prompts)): None for repeat in range(repeats)}
    return [list(batch) for batch in batches]


def compare_speed(ours: Sequence[Turn], theirs: Sequence[Turn], target: float) -> dict[str, Any]:
    """Return medians and the quartiles of the ratio (ours to theirs, pair by pair) as plain JSON values.

    Args:
        ours, theirs: the two turns of every pair, in the same order; at least one.
        target: the least median ratio that was asked for.
    """
    ratios = [mine.tps / other.tps for mine, other in zip(ours, theirs, strict=True)]
    low, median, high = quartiles(ratios)
    return {
        "pairs": len(ratios),
        "our_tps": round(statistics.median(turn.tps for turn in ours), 2),
        "their_tps": round(statistics.median(turn.tps for turn in theirs), 2),
        "ratio": round(median, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "target": target,
        "is_met": median >= target,
    }


def compare_passes(one_row_ms: Sequence[float], many_rows_ms: Sequence[float], target: float) -> dict[str, Any]:
    """Return medians and the quartiles of the ratio (many rows to one, pair by pair) as plain JSON values.

    Args:
        one_row_ms, many_rows_ms: the two passes of every pair, in the same order; at least one.
        target: the largest median ratio that was asked for.
    """
    low, median, high = quartiles([many / one for one, many in zip(one_row_ms, many_rows_ms, strict=True)])
    return {
        "pairs": len(one_row_ms),
        "one_row_ms": round(statistics.median(one_row_ms), 3),
        "many_rows_ms": round(statistics.median(many_rows_ms), 3),
        "ratio": round(median, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "target": target,
        "is_met": median <= target,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile; of one value, that value thrice."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
