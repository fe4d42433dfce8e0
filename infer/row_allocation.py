"""Shares guess rows out among requests: the number of rows, and whose, that bring the most tokens per second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def allocate(gains_SD: Floats, totals_J: Integers, seconds_J: Floats, *, floor: float, least_gain: float) -> Integers:
    """Guesses of each request, [S].

    Every total is tried. First the requests get what keeps them at ``floor``, then each further row goes where it
    brings most. A total at which some request cannot be kept there is out.

    Args:
        gains_SD: [S, D], tokens that the guess at depth d + 1 is expected to bring, never increasing along D; 0 where
            a request can have no more guesses.
        totals_J: [J], ascending, from 0; guesses of all requests together.
        seconds_J: [J], what a pass with so many takes.
        floor: least tokens per second of a request, as a share of what it has without any guess.
        least_gain: the best total must bring so many times the tokens per second of no guesses, or there are none.
    """
    num_requests, depth = gains_SD.shape
    gains_E = gains_SD.ravel()
    order_E = (-gains_E).argsort(kind="stable")
    sorted_E = gains_E[order_E]
    tokens_E = np.concatenate(((num_requests,), num_requests + sorted_E.cumsum()))
    best = int((tokens_E[totals_J] / seconds_J).argmax())
    if not _is_worth_it(tokens_E[totals_J[best]], seconds_J[best], num_requests / seconds_J[0], least_gain):
        return np.zeros(num_requests, dtype=np.int64)
    taken = order_E[: totals_J[best]]
    tokens_S = 1 + np.bincount(taken // depth, weights=gains_E[taken], minlength=num_requests)
    if tokens_S.min() < floor * seconds_J[best] / seconds_J[0]:
        is_taken_E = _allocate_with_floor(gains_SD, order_E, totals_J, seconds_J, floor, least_gain)
        taken = order_E[is_taken_E]
    return np.bincount(taken[gains_E[taken] > 0] // depth, minlength=num_requests)


def _allocate_with_floor(
    gains_SD: Floats, order_E: Integers, totals_J: Integers, seconds_J: Floats, floor: float, least_gain: float
) -> NDArray[np.bool_]:
    """Which guesses to take, [E] in the order ``order_E`` of what they bring."""
    num_requests, depth = gains_SD.shape
    tokens_SD = np.concatenate((np.ones((num_requests, 1)), 1 + gains_SD.cumsum(axis=1)), axis=1)
    least_J = floor * seconds_J / seconds_J[0]
    needed_JS = (tokens_SD[None] < least_J[:, None, None]).sum(axis=2)
    spare_J = totals_J - needed_JS.sum(axis=1)
    is_possible_J = (needed_JS.max(axis=1) <= depth) & (spare_J >= 0)
    request_E, depth_E = np.divmod(order_E, depth)
    is_needed_JE = depth_E < needed_JS[:, request_E]
    is_taken_JE = is_needed_JE | ((~is_needed_JE).cumsum(axis=1) <= spare_J[:, None])
    tokens_J = num_requests + is_taken_JE @ gains_SD.ravel()[order_E]
    tokens_per_s_J = np.where(is_possible_J, tokens_J / seconds_J, 0.0)
    best = int(tokens_per_s_J.argmax())
    if not _is_worth_it(tokens_J[best], seconds_J[best], num_requests / seconds_J[0], least_gain):
        best = 0
    is_taken: NDArray[np.bool_] = is_taken_JE[best]
    return is_taken


def _is_worth_it(tokens: float, seconds: float, ar_tokens_per_s: float, least_gain: float) -> bool:
    return bool(tokens / seconds >= least_gain * ar_tokens_per_s)
