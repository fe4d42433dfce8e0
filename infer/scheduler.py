"""Chooses the rows of the next pass: which requests take part, with how many rows each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.fill import Filler, make_fillers
from jacobi_llm.infer.kv_pages import PagePool
from jacobi_llm.infer.request import Sequence
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.rule import Commit, next_window
from jacobi_llm.infer.window_policy import FixedWindows, WindowPolicy


@dataclass(frozen=True)
class ScheduledRows:
    """One request's part of a pass: its row group, and the guesses at the end of it."""

    sequence: Sequence
    group: RowGroup
    guesses: list[int]


@dataclass(frozen=True)
class _Shape:
    """Row counts of one request in the next pass; ``is_whole`` when every committed token without K/V is in it."""

    num_committed: int
    num_guesses: int
    is_whole: bool

    @property
    def num_rows(self) -> int:
        return self.num_committed + self.num_guesses


class Scheduler:
    """First come, first served; running requests before waiting ones.

    When pages run out, the request that arrived last gives its pages up and is recomputed later: its tokens are kept,
    so its output does not change.

    Attributes:
        windows: chooses the windows of a step.
        fillers: write the guesses that no pass has left, by the request's policy.
    """

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_num_rows: int, max_context: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_rows = max_num_rows
        self.max_context = max_context
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.windows: WindowPolicy = FixedWindows()
        self.fillers: dict[FillPolicy, Filler] = make_fillers()
        self._planned: Mapping[str, int] = {}

    def schedule(self) -> list[ScheduledRows]:
        """Row groups of the next pass; empty when nothing waits or runs, or when held pages leave no room."""
        scheduled: list[ScheduledRows] = []
        rows_left = self.max_num_rows
        joining = islice(self.waiting, self.max_num_seqs - len(self.running))
        self._planned = self.windows.plan([*self.running, *joining], rows_left, self.fillers)
        for sequence in list(self.running):
            if rows_left < 1:
                break
            if sequence not in self.running:
                continue
            shape = self._shape_of(sequence, rows_left)
            if self._grow(sequence, shape):
                scheduled.append(self._rows_of(sequence, shape))
                rows_left -= shape.num_rows
        while self.waiting and rows_left > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            shape = self._shape_of(sequence, rows_left)
            if not self.pool.grow(sequence.block_table, sequence.num_computed + shape.num_rows):
                break
            self.running.append(self.waiting.popleft())
            scheduled.append(self._rows_of(sequence, shape))
            rows_left -= shape.num_rows
        return scheduled

    def learn(self, part: ScheduledRows, result: Commit) -> None:
        """Take note of what a pass proved of ``part``; its sequence is up to date."""
        sequence = part.sequence
        if result.finish_reason is None:
            # A request that ends hides how far its guesses would have gone.
            num_guesses, num_accepted = len(part.guesses), len(result.token_ids) - 1
            self.windows.learn(sequence, num_guesses, num_accepted)
            self.fillers[sequence.request.params.fill].learn(sequence, num_guesses, num_accepted)

    def finish(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it is; its pages stay in its block table."""
        self.windows.forget(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _shape_of(self, sequence: Sequence, rows_left: int) -> _Shape:
        """Committed rows first; guesses only when all of those fit into the pass."""
        num_committed = min(sequence.num_pending, rows_left)
        if num_committed < sequence.num_pending:
            return _Shape(num_committed, num_guesses=0, is_whole=False)
        params = sequence.request.params
        window = self._planned[sequence.request.id]
        if params.mode is DecodeMode.BLOCK:
            num_tokens = len(sequence.completion_ids)
            if num_tokens >= sequence.block_end:
                sequence.block_end = num_tokens + window
            window = sequence.block_end - num_tokens
        num_guesses = min(
            window - 1,
            sequence.num_tokens_left - 1,
            self.max_context - sequence.committed_len,
            rows_left - num_committed,
        )
        return _Shape(num_committed, num_guesses, is_whole=True)

    def _grow(self, sequence: Sequence, shape: _Shape) -> bool:
        """Give ``sequence`` the pages of its next rows, preempting later arrivals; False when it was itself."""
        while not self.pool.grow(sequence.block_table, sequence.num_computed + shape.num_rows):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.pool.release(victim.block_table)
        victim.num_computed = 0
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _rows_of(self, sequence: Sequence, shape: _Shape) -> ScheduledRows:
        guesses = self._guesses_of(sequence, shape.num_guesses) if shape.is_whole else []
        group = RowGroup(
            block_table=sequence.block_table,
            prefix_len=sequence.num_computed,
            token_ids=sequence.tokens_from(sequence.num_computed, shape.num_committed) + guesses,
            num_logit_rows=len(guesses) + 1 if shape.is_whole else 0,
            adapter=sequence.request.adapter,
        )
        return ScheduledRows(sequence, group, guesses)

    def _guesses_of(self, sequence: Sequence, num_guesses: int) -> list[int]:
        filler = self.fillers[sequence.request.params.fill]
        return next_window(sequence.carried, num_guesses, partial(filler.fill, sequence))
