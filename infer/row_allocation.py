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
    tokens_SD = np.concatenate((np.ones((num_requests, 1)), 1 + gains_SD.cumsum(axis=1)), axis=1)
    least_J = floor * seconds_J / seconds_J[0]
    needed_JS = (tokens_SD[None] < least_J[:, None, None]).sum(axis=2)
    spare_J = totals_J - needed_JS.sum(axis=1)
    is_possible_J = (needed_JS.max(axis=1) <= depth) & (spare_J >= 0)

    order_E = np.argsort(-gains_SD, axis=None, kind="stable")
    request_E, depth_E = np.divmod(order_E, depth)
    is_needed_JE = depth_E < needed_JS[:, request_E]
    is_taken_JE = is_needed_JE | ((~is_needed_JE).cumsum(axis=1) <= spare_J[:, None])
    tokens_J = num_requests + is_taken_JE @ gains_SD.ravel()[order_E]
    tokens_per_s_J = np.where(is_possible_J, tokens_J / seconds_J, 0.0)
    best = int(tokens_per_s_J.argmax())
    if tokens_per_s_J[best] < least_gain * tokens_per_s_J[0]:
        return np.zeros(num_requests, dtype=np.int64)
    taken = request_E[is_taken_JE[best] & (gains_SD.ravel()[order_E] > 0)]
    return np.bincount(taken, minlength=num_requests)
