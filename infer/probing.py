"""Gives requests at window 1 a few guesses now and then: without any, nothing would tell that they are right again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.infer.cost_model import CostModel

Integers = NDArray[np.int64]

AFTER_STEPS = 32
# The first of these passes has no carried guesses to try, the others do.
NUM_STEPS = 3
NUM_GUESSES = 3
COST_SHARE = 0.01
# Credit may be saved up for so many probes, so that not all of them come at once.
_MOST_SAVED = 2


class Probing:
    """Who is probed, paid from a share of the time of all passes.

    Attributes:
        num_started: probes since construction.
        spent_s, passed_s: seconds that probing has cost, and those of all passes, as predicted.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self.spent_s = 0.0
        self.passed_s = 0.0
        self._credit_s = 0.0
        self._idle_steps: Integers = np.zeros(0, dtype=np.int64)
        self._steps_left: Integers = np.zeros(0, dtype=np.int64)

    def add(
        self, guesses: Integers, slots: Integers, most: Integers, load: tuple[int, int, int], cost: CostModel
    ) -> Integers:
        """Guesses of each request, probes added.

        Args:
            guesses: [S], as chosen without probing.
            slots: [S], numbers of the requests.
            most: [S], guesses that each of them can have.
            load: rows without any guesses, requests, and context tokens of the pass.
            cost: pass times.
        """
        self._make_room(int(slots.max()) + 1)
        num_rows, num_requests, num_context_tokens = load
        is_idle = guesses == 0
        idle = np.where(is_idle, self._idle_steps[slots] + 1, 0)
        self._idle_steps[slots] = idle
        rows = num_rows + int(guesses.sum())
        seconds = cost.predict(np.array([rows, rows + NUM_GUESSES]), num_requests, num_context_tokens)
        step_s, probe_s = float(seconds[0]), float(seconds[1] - seconds[0])
        price_s = NUM_STEPS * max(probe_s, 0.0)
        self.passed_s += step_s
        self._credit_s = min(self._credit_s + COST_SHARE * step_s, max(_MOST_SAVED * price_s, step_s))
        left = self._steps_left[slots]
        if self._credit_s >= price_s and int(idle.max()) >= AFTER_STEPS:
            oldest = int(np.where(left == 0, idle, 0).argmax())
            if idle[oldest] >= AFTER_STEPS and most[oldest] > 0:
                left[oldest] = NUM_STEPS
                self._idle_steps[slots[oldest]] = 0
                self._credit_s -= price_s
                self.spent_s += price_s
                self.num_started += 1
        is_probed = left > 0
        self._steps_left[slots] = np.maximum(left - 1, 0)
        return np.where(is_probed, np.maximum(guesses, np.minimum(NUM_GUESSES, most)), guesses)

    def forget(self, slot: int) -> None:
        """A request has ended; its number may go to another."""
        if slot < len(self._idle_steps):
            self._idle_steps[slot] = self._steps_left[slot] = 0

    def _make_room(self, num_slots: int) -> None:
        missing = num_slots - len(self._idle_steps)
        if missing > 0:
            more = np.zeros(missing + len(self._idle_steps), dtype=np.int64)
            self._idle_steps = np.concatenate((self._idle_steps, more))
            self._steps_left = np.concatenate((self._steps_left, more))
