"""Gives requests at window 1 a few guesses now and then: without any, nothing would tell that they are right again."""

from __future__ import annotations

from collections.abc import Sequence

from jacobi_llm.infer.cost_model import CostModel

AFTER_STEPS = 32
# The first of these passes has no carried guesses to try, the others do.
NUM_STEPS = 3
NUM_GUESSES = 3
COST_SHARE = 0.005
# At first nothing is known: so many probes start at once, on credit of this share of a pass.
NUM_FIRST = 4
FIRST_COST_SHARE = 0.5
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
        self._credit_s: float | None = None
        self._idle_steps: dict[int, int] = {}
        self._steps_left: dict[int, int] = {}

    def add(
        self,
        guesses: list[int],
        slots: Sequence[int],
        most: Sequence[int],
        load: tuple[int, int, int],
        cost: CostModel,
        num_steps: int = 1,
    ) -> None:
        """Add probes to the guesses of a pass, in place.

        Args:
            guesses: [S], as chosen without probing.
            slots: [S], numbers of the requests.
            most: [S], guesses that each of them can have.
            load: rows without any guesses, requests, and context tokens of the pass.
            cost: pass times.
            num_steps: passes since the last call, all like this one.
        """
        num_rows, num_requests, num_context_tokens = load
        idle = self._idle_steps
        longest, oldest = 0, -1
        for index, (slot, count) in enumerate(zip(slots, guesses, strict=True)):
            steps = idle[slot] = 0 if count else idle.get(slot, 0) + num_steps
            if steps > longest and slot not in self._steps_left:
                longest, oldest = steps, index
        rows = num_rows + sum(guesses)
        step_s = cost.predict_one(rows, num_requests, num_context_tokens)
        probe_s = cost.predict_one(rows + NUM_GUESSES, num_requests, num_context_tokens) - step_s
        price_s = NUM_STEPS * max(probe_s, 0.0)
        self.passed_s += num_steps * step_s
        saved_s = FIRST_COST_SHARE * step_s if self._credit_s is None else self._credit_s
        self._credit_s = min(saved_s + num_steps * COST_SHARE * step_s, max(_MOST_SAVED * price_s, step_s))
        is_due = longest >= (AFTER_STEPS if self.num_started >= NUM_FIRST else 1)
        if is_due and self._credit_s >= price_s:
            self._steps_left[slots[oldest]] = NUM_STEPS
            idle[slots[oldest]] = 0
            self._credit_s -= price_s
            self.spent_s += price_s
            self.num_started += 1
        if self._steps_left:
            for index, slot in enumerate(slots):
                if slot in self._steps_left:
                    guesses[index] = max(guesses[index], min(NUM_GUESSES, most[index]))
                    self._steps_left[slot] -= 1
                    if not self._steps_left[slot]:
                        del self._steps_left[slot]

    def forget(self, slot: int) -> None:
        """A request has ended; its number may go to another."""
        self._idle_steps.pop(slot, None)
        self._steps_left.pop(slot, None)
