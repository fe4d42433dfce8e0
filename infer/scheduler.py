"""Chooses the rows of the next pass: which requests take part, with how many rows each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.fill import Filler, make_fillers
from jacobi_llm.infer.kv_pages import PagePool
from jacobi_llm.infer.prefix_cache import PrefixCache
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

    A pass has at most ``max_num_rows`` rows. Requests that decode come first, in order of arrival: each has the row of
    its last token for certain, and guesses as far as those rows leave room. Then come prompts (and what has to be
    recomputed), also in order of arrival, with at most ``max_prefill_rows`` rows of committed tokens, so that a long
    prompt slows the others' passes by that much and no more. Prompts cannot be shut out either: only a request whose
    prompt is done joins those that decode, and each of these ends.

    When pages run out, the request that arrived last gives its pages up and is recomputed later: its tokens are kept,
    so its output does not change. Nobody is preempted for another's guesses: a window shrinks to the pages that are
    free.

    No livelock: ``running`` and ``waiting`` are in order of arrival, and all of ``running`` arrived before all of
    ``waiting`` (requests are admitted from the front of ``waiting``, and preempted ones go back to it, latest first).
    Pages are only ever taken from the end of ``running``, so the oldest request loses its own only when it is alone
    and the pool, less what finished requests keep, cannot hold it. Otherwise it takes part in every pass as one that
    decodes, or is the first whose prompt goes on, and ends after a bounded number of passes; then the next one is the
    oldest. A request that was preempted waits at least until the next step, and nobody is admitted before it.

    Attributes:
        num_preemptions: times a running request lost its pages.
        num_hit_tokens: tokens of admitted requests that needed no rows, because their pages were known.
        windows: chooses the windows of a step.
        fillers: write the guesses that no pass has left, by the request's policy.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_rows: int,
        max_prefill_rows: int,
        max_context: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.pool = pool
        # With more of them than rows, some that decode would have no row in a pass.
        self.max_num_seqs = min(max_num_seqs, max_num_rows)
        self.max_num_rows = max_num_rows
        self.max_prefill_rows = max_prefill_rows
        self.max_context = max_context
        self.prefixes = prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.windows: WindowPolicy = FixedWindows()
        self.fillers: dict[FillPolicy, Filler] = make_fillers()
        self._planned: Mapping[str, int] = {}

    def schedule(self) -> list[ScheduledRows]:
        """Row groups of the next pass; empty when nothing waits or runs, or when held pages leave no room."""
        joining = islice(self.waiting, self.max_num_seqs - len(self.running))
        self._planned = self.windows.plan([*self.running, *joining], self.max_num_rows, self.fillers)
        num_preemptions = self.num_preemptions
        scheduled = self._schedule_decoding()
        rows_left = self.max_num_rows - sum(part.group.num_rows for part in scheduled)
        prefill_left = self.max_prefill_rows
        if rows_left < 1:
            return scheduled
        for sequence in self._prefilling(may_admit=self.num_preemptions == num_preemptions):
            shape = self._shape_of(sequence, min(rows_left, prefill_left), rows_left)
            has_pages = self.pool.grow(sequence.block_table, sequence.num_computed + shape.num_rows)
            assert has_pages, "a request is admitted with pages for its tokens, and guesses keep to what is free"
            scheduled.append(self._rows_of(sequence, shape))
            rows_left -= shape.num_rows
            prefill_left -= shape.num_committed
            if rows_left < 1 or prefill_left < 1:
                break
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

    def free_pages(self, sequence: Sequence) -> None:
        """Give up the pages of ``sequence``; what of its K/V is not proven finite is zeroed.

        A NaN in a slot would spoil the sums of the page's next owner even where it is masked.
        """
        is_proven = sequence.num_proven == sequence.num_computed
        num_clean_pages = None if is_proven else sequence.num_proven // self.pool.page_size
        self.pool.release(sequence.block_table, num_clean_pages=num_clean_pages)
        sequence.num_computed = sequence.num_proven = sequence.num_offered_pages = 0
        sequence.is_finite = True

    def _schedule_decoding(self) -> list[ScheduledRows]:
        """Rows of the running requests whose prompts are done, oldest first."""
        scheduled: list[ScheduledRows] = []
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        rows_left = self.max_num_rows
        for num_behind, sequence in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):
            # Once one was preempted for those before it, so were all behind it.
            if rows_left < 1 or not sequence.block_table:
                break
            shape = self._shape_of(sequence, 1, max(rows_left - num_behind, 1))
            if not self._grow(sequence, shape):
                break
            scheduled.append(self._rows_of(sequence, shape))
            rows_left -= shape.num_rows
        return scheduled

    def _prefilling(self, *, may_admit: bool) -> Iterator[Sequence]:
        """Requests whose prompts go on, oldest first; then waiting ones, admitted as they are asked for."""
        yield from [sequence for sequence in self.running if sequence.num_pending > 1]
        num_growing = sum(map(self._will_grow, self.running)) if self.waiting else 0
        while may_admit and self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence, num_growing):
                return
            self.running.append(self.waiting.popleft())
            num_growing += self._will_grow(sequence)
            yield sequence

    def _admit(self, sequence: Sequence, num_growing: int) -> bool:
        """Give ``sequence`` the pages of all its committed tokens, with a page left for each request that will grow.

        Without that page the next step might take back what is given now.
        """
        if self.prefixes:
            self.prefixes.find(sequence)
        num_missing = self.pool.pages_for(sequence.committed_len) - len(sequence.block_table)
        if num_missing + num_growing > self.pool.num_free:
            self.free_pages(sequence)
            return False
        self.num_hit_tokens += sequence.num_computed
        return self.pool.grow(sequence.block_table, sequence.committed_len)

    def _will_grow(self, sequence: Sequence) -> bool:
        # The last token is returned, never read: it needs no slot.
        num_slots = sequence.committed_len + sequence.num_tokens_left - 1
        return self.pool.pages_for(num_slots) > len(sequence.block_table)

    def _shape_of(self, sequence: Sequence, committed_left: int, rows_left: int) -> _Shape:
        """Committed rows first; guesses only when all of those fit into the pass, and as far as pages are free."""
        num_committed = min(sequence.num_pending, committed_left)
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
            self.pool.capacity(sequence.block_table) - sequence.committed_len,
        )
        return _Shape(num_committed, max(num_guesses, 0), is_whole=True)

    def _grow(self, sequence: Sequence, shape: _Shape) -> bool:
        """Give ``sequence`` the pages of its next rows, preempting later arrivals; False when it was itself."""
        while not self.pool.grow(sequence.block_table, sequence.num_computed + shape.num_rows):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.free_pages(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _rows_of(self, sequence: Sequence, shape: _Shape) -> ScheduledRows:
        first_written = sequence.block_table[sequence.num_computed // self.pool.page_size]
        assert self.pool.key_of(first_written) is None, "a page that others may read would be written"
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
