"""How many rows each request gets in the next pass. A window changes the speed of decoding, never its output."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.configs.schema import FillPolicy
from jacobi_llm.infer.acceptance import AcceptanceTable, Trial
from jacobi_llm.infer.cost_model import CostModel
from jacobi_llm.infer.fill import Filler, GuessKind
from jacobi_llm.infer.probing import Probing
from jacobi_llm.infer.request import Sequence
from jacobi_llm.infer.row_allocation import allocate
from jacobi_llm.infer.row_group import RowGroup

Integers = NDArray[np.int64]

MAX_WINDOW = 64
# No request may get less than this share of the tokens per second that it would have with all windows at 1.
FLOOR = 0.97
# What a row brings as a carried guess of the next pass counts so much, what it brings now the rest (from simulation).
LATER_WEIGHT = 2 / 3
# Guesses must promise at least this much more; below it, AR is as good and has no estimates that may be wrong.
LEAST_GAIN = 1.04
# With guesses all the time, a pass without any would never be timed again: one is run after so many steps.
CHECK_AFTER_STEPS = (32, 64, 128, 256)
# Planning costs what a row costs. Where it has just found that guesses do not pay, so many passes go by without it;
# with few requests it is cheap, and what pays changes quickly.
REST_STEPS = 3
REST_FROM_REQUESTS = 8
KEPT_STEPS = 16_384

# Guesses of all requests together that are looked at, unless that leaves a request less than the second.
_MOST_GUESSES = 256
_LEAST_DEPTH = 4
# Totals that are tried: every number at first, then coarser.
_TOTALS = np.unique([*range(9), *(step * n for step in (1, 2, 4, 8, 16, 32) for n in range(9, 17))])


class StepChoice(NamedTuple):
    """What was chosen for one pass; ``mean_window`` is over the requests whose window is automatic."""

    step: int
    num_requests: int
    num_rows: int
    mean_window: float
    num_context_tokens: int


class WindowPolicy(Protocol):
    """Chooses windows, and is told what became of them."""

    def plan(
        self, sequences: Seq[Sequence], rows_available: int, fillers: Mapping[FillPolicy, Filler]
    ) -> Mapping[str, int]:
        """Windows of the next pass.

        Args:
            sequences: those that run, then those that may join.
            rows_available: rows of the pass.
            fillers: write the guesses that are not carried.

        Returns:
            Rows from the last committed token on, at least 1, by request id.
        """

    def learn(self, sequence: Sequence, num_guesses: int, num_accepted: int) -> None:
        """Take note of what a pass proved for a request that goes on."""

    def observe_pass(self, groups: Seq[RowGroup], measured_s: float) -> None:
        """Take note of how long a pass took."""

    def forget(self, sequence: Sequence) -> None:
        """A request has ended."""


class FixedWindows:
    """Every request has the window it asked for."""

    def plan(
        self, sequences: Seq[Sequence], rows_available: int, fillers: Mapping[FillPolicy, Filler]
    ) -> Mapping[str, int]:
        return {sequence.request.id: sequence.request.params.window or 1 for sequence in sequences}

    def learn(self, sequence: Sequence, num_guesses: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def observe_pass(self, groups: Seq[RowGroup], measured_s: float) -> None:
        """Nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""


class AutoWindows:
    """Windows that bring the most tokens per second, by what passes cost and how often guesses are right.

    With E(R) the tokens that a pass of R rows is expected to commit, and T(R) its seconds, the policy takes the R with
    the largest E(R) / T(R), the next row always going to the request where it brings most; such that every request has
    E_i(R) / T(R) >= ``FLOOR`` / T(all windows 1). A row at depth d brings the product of the acceptances of depths 1 to
    d. Its prediction, if it is not proved at once, is a guess of the next pass: where guesses of the fill policy are
    worse than carried ones, a mean of both counts, or nobody would ever take the first step.

    Requests that stay at window 1 are probed (:class:`Probing`). Requests with a window of their own keep it.

    Attributes:
        cost: pass times.
        probing: who gets guesses to see whether they are right again.
        history: what was chosen in the last passes.
    """

    def __init__(self, cost: CostModel, prior: Seq[float] = ()) -> None:
        """Start from pass times, and from P(accepted) by depth as a checkpoint states it (empty: not known)."""
        self.cost = cost
        self.probing = Probing()
        self.history: deque[StepChoice] = deque(maxlen=KEPT_STEPS)
        self._table = AcceptanceTable(MAX_WINDOW - 1, prior)
        self._guessed: dict[str, tuple[int, int, GuessKind]] = {}
        self._num_steps = 0
        self._num_checks = 0
        self._unchecked_steps = 0
        self._rested_steps = 0
        self._num_at_rest = 0

    def plan(
        self, sequences: Seq[Sequence], rows_available: int, fillers: Mapping[FillPolicy, Filler]
    ) -> Mapping[str, int]:
        load = _Load.of(sequences, rows_available)
        if not load.auto:
            return load.windows
        self._num_steps += 1
        if self._rests(load):
            return load.windows
        slots = [self._table.slot(sequence.request.id) for sequence in load.auto]
        guesses = self._best(load, slots, fillers)
        if any(guesses):
            self._unchecked_steps += 1
            if self._unchecked_steps >= CHECK_AFTER_STEPS[min(self._num_checks, len(CHECK_AFTER_STEPS) - 1)]:
                self._num_checks += 1
                self._unchecked_steps = 0
                guesses = [0] * len(guesses)
        pass_load = (load.num_rows, load.num_requests, load.num_context_tokens)
        self.probing.add(guesses, slots, load.most_guesses, pass_load, self.cost, 1 + self._rested_steps)
        is_at_rest = len(load.auto) >= REST_FROM_REQUESTS and not any(guesses)
        self._num_at_rest = len(load.auto) if is_at_rest else 0
        self._rested_steps = 0
        for sequence, num_guesses in zip(load.auto, guesses, strict=True):
            load.windows[sequence.request.id] = 1 + num_guesses
        self._note(load, sum(guesses))
        return load.windows

    def learn(self, sequence: Sequence, num_guesses: int, num_accepted: int) -> None:
        guessed = self._guessed.get(sequence.request.id)
        if num_guesses and guessed is not None:
            slot, num_carried, kind = guessed
            self._table.add(Trial(slot, min(num_carried, num_guesses), kind, num_guesses, num_accepted))

    def observe_pass(self, groups: Seq[RowGroup], measured_s: float) -> None:
        num_rows = sum(group.num_rows for group in groups)
        # Rows of a prompt cost something else: they need no logits, and have long contexts of their own.
        if num_rows == sum(group.num_logit_rows for group in groups):
            self.cost.observe(num_rows, len(groups), sum(group.prefix_len + 1 for group in groups), measured_s)

    def forget(self, sequence: Sequence) -> None:
        guessed = self._guessed.pop(sequence.request.id, None)
        if guessed is not None:
            self.probing.forget(guessed[0])
        self._table.forget(sequence.request.id)

    def _rests(self, load: _Load) -> bool:
        """Whether this pass goes without guesses because a plan for the same requests has just said so."""
        if self._rested_steps >= REST_STEPS or len(load.auto) != self._num_at_rest:
            return False
        self._rested_steps += 1
        self._note(load, 0)
        return True

    def _note(self, load: _Load, num_guesses: int) -> None:
        mean_window = 1 + num_guesses / len(load.auto)
        self.history.append(
            StepChoice(
                self._num_steps, load.num_requests, load.num_rows + num_guesses, mean_window, load.num_context_tokens
            )
        )

    def _best(self, load: _Load, slots: list[int], fillers: Mapping[FillPolicy, Filler]) -> list[int]:
        num_requests = len(load.auto)
        room = load.rows_available - load.num_rows
        depth = min(max(load.most_guesses), max(-(-_MOST_GUESSES // num_requests), _LEAST_DEPTH), MAX_WINDOW - 1)
        num_carried, kinds = [], []
        for sequence, slot in zip(load.auto, slots, strict=True):
            carried = len(sequence.carried)
            kind = GuessKind.CARRIED if carried >= depth else fillers[sequence.request.params.fill].kind(sequence)
            self._guessed[sequence.request.id] = (slot, carried, kind)
            num_carried.append(carried)
            kinds.append(kind)
        if room < 1:
            return [0] * num_requests
        now_SD, carried_SD = self._table.estimate(np.array(slots), np.array(num_carried), np.array(kinds), depth)
        gains_SD, later_SD = now_SD.cumprod(axis=1), carried_SD.cumprod(axis=1)
        gains_SD += LATER_WEIGHT * np.maximum(later_SD - gains_SD, 0.0)
        if min(load.most_guesses) < depth:
            gains_SD[np.arange(depth) >= np.array(load.most_guesses)[:, None]] = 0.0
        totals = _TOTALS[: _TOTALS.searchsorted(min(room, num_requests * depth), side="right")]
        seconds = self.cost.predict(load.num_rows + totals, load.num_requests, load.num_context_tokens)
        if load.num_decode_rows < load.num_rows:
            # Prompts have to be read whatever is guessed: their time must not make guesses look cheap.
            ar_s = self.cost.predict_one(load.num_decode_rows, load.num_requests, load.num_context_tokens)
            seconds += ar_s - seconds[0]
        guesses: list[int] = allocate(gains_SD, totals, seconds, floor=FLOOR, least_gain=LEAST_GAIN).tolist()
        return guesses


@dataclass
class _Load:
    """What the next pass consists of before automatic windows are chosen.

    Attributes:
        windows: by request id; 1 where it is still to be chosen.
        auto: requests whose window is to be chosen and that can have a guess.
        most_guesses: [S] of those.
        num_rows: rows of the pass without guesses of these requests.
        num_decode_rows: those of them that are no rows of a prompt.
        num_requests, num_context_tokens: of all requests.
        rows_available: rows of the pass.
    """

    rows_available: int
    windows: dict[str, int] = field(default_factory=dict)
    auto: list[Sequence] = field(default_factory=list)
    most_guesses: list[int] = field(default_factory=list)
    num_rows: int = 0
    num_decode_rows: int = 0
    num_requests: int = 0
    num_context_tokens: int = 0

    @classmethod
    def of(cls, sequences: Seq[Sequence], rows_available: int) -> _Load:
        load = cls(rows_available)
        num_rows = num_context_tokens = 0
        for sequence in sequences:
            request = sequence.request
            params = request.params
            num_tokens = len(sequence.completion_ids)
            committed_len = len(request.prompt_ids) + num_tokens
            num_pending = committed_len - sequence.num_computed
            num_left = params.max_tokens - num_tokens - 1
            num_context_tokens += committed_len
            load.num_decode_rows += 1
            if params.window is not None:
                load.windows[request.id] = params.window
                num_guesses = min(params.window - 1, num_left)
                num_pending += num_guesses
                load.num_decode_rows += num_guesses
            else:
                load.windows[request.id] = 1
                if num_left > 0 and num_rows + num_pending < rows_available:
                    load.auto.append(sequence)
                    load.most_guesses.append(num_left)
            num_rows += num_pending
        load.num_rows = min(num_rows, rows_available)
        load.num_decode_rows = min(load.num_decode_rows, load.num_rows)
        load.num_requests = len(sequences)
        load.num_context_tokens = num_context_tokens
        return load
