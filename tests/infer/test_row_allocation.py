"""The allocation against trying every way to share out the rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.infer.row_allocation import Floats, allocate

DEPTH = 3


def rate(gains: Floats, guesses: tuple[int, ...], seconds: Floats) -> float:
    """Tokens per second of one way to share out."""
    tokens = sum(1 + row[:count].sum() for row, count in zip(gains, guesses, strict=True))
    return float(tokens / seconds[sum(guesses)])


def keeps_floor(gains: Floats, guesses: tuple[int, ...], seconds: Floats, floor: float) -> bool:
    return all(
        (1 + row[:count].sum()) / seconds[sum(guesses)] >= floor / seconds[0] * (1 - 1e-12)
        for row, count in zip(gains, guesses, strict=True)
    )


@given(
    acceptances=st.lists(st.lists(st.floats(0.02, 0.98), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=3),
    steps=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    floor=st.sampled_from([0.0, 0.9, 0.97]),
)
def test_no_way_to_share_out_is_better(acceptances: list[list[float]], steps: list[float], floor: float) -> None:
    gains = np.array(acceptances).cumprod(axis=1)
    totals = np.arange(gains.size + 1)
    seconds = 1 + np.concatenate(([0.0], np.cumsum(steps)[: gains.size]))
    chosen = tuple(allocate(gains, totals, seconds, floor=floor, least_gain=1.0).tolist())
    assert keeps_floor(gains, chosen, seconds, floor)
    ways = itertools.product(range(DEPTH + 1), repeat=len(gains))
    best = max(rate(gains, way, seconds) for way in ways if keeps_floor(gains, way, seconds, floor))
    assert rate(gains, chosen, seconds) == pytest.approx(best)


def test_rows_go_where_they_bring_most() -> None:
    gains = np.array([[0.9, 0.81, 0.73], [0.2, 0.04, 0.01]])
    totals, seconds = np.arange(7), np.linspace(1.0, 1.3, 7)
    assert allocate(gains, totals, seconds, floor=0.0, least_gain=1.0).tolist() == [3, 1]


def test_the_poor_request_is_kept_at_its_floor() -> None:
    """Alone, the good one would take a window that costs the other a fifth; with a row for the other it may."""
    gains = np.array([[0.9] * 6, [0.3] + [0.0] * 5]) ** np.arange(1, 7)
    totals, seconds = np.arange(13), 1 + 0.04 * np.arange(13)
    free = allocate(gains, totals, seconds, floor=0.0, least_gain=1.0)
    assert free[0] == 6
    kept = allocate(gains, totals, seconds, floor=0.97, least_gain=1.0)
    assert keeps_floor(gains, tuple(kept.tolist()), seconds, 0.97)
    assert kept[1] == 1


def test_a_small_promise_is_not_worth_a_guess() -> None:
    gains, totals = np.array([[0.1]]), np.arange(2)
    assert allocate(gains, totals, np.array([1.0, 1.09]), floor=0.9, least_gain=1.02).tolist() == [0]
    assert allocate(gains, totals, np.array([1.0, 1.01]), floor=0.9, least_gain=1.02).tolist() == [1]


def test_a_step_of_the_staircase_is_filled() -> None:
    """Rows up to 8 cost nothing, the ninth doubles the time."""
    gains = np.full((1, 15), 0.6).cumprod(axis=1)
    seconds = np.where(np.arange(16) < 8, 1.0, 2.0)
    assert allocate(gains, np.arange(16), seconds, floor=0.97, least_gain=1.02).tolist() == [7]
