"""All blocks of all completions at once: every block's Jacobi run is a branch that shares its completion's pages.

Block b starts from the finished prefix y*_<b, so the runs do not depend on each other, and one ragged pass advances
all of them. Tokens that are final and equal to y* leave the rows: their K/V stands in the pages already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jacobi_llm.configs.schema import FillPolicy, TargetSource
from jacobi_llm.data.record import Block
from jacobi_llm.infer.fill import copy_guesses, fill_guesses
from jacobi_llm.infer.model_runner import ModelRunner
from jacobi_llm.infer.ngram_index import NgramMemory
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.rule import first_wrong
from jacobi_llm.infer.sampler import RequestRows, choose
from jacobi_llm.infer.sampling_params import GREEDY, SamplingParams


@dataclass(frozen=True)
class Target:
    """A finished completion whose K/V lies in pages.

    Attributes:
        prompt_ids, completion_ids: token ids; the completion is y*.
        block_table: pages with K/V of every token but the last.
        source_index: key of the initial guesses.
        target_source: with ``model``, y* is known to be the fixed point.
        sampling, noise_seed: how tokens are chosen. The noise is keyed by position, so that a sampled y* is the fixed
            point of its own iteration just as a greedy one is.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    block_table: Sequence[int]
    source_index: int
    target_source: TargetSource
    sampling: SamplingParams = GREEDY
    noise_seed: int = 0


def initial_state(
    policy: FillPolicy,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    start: int,
    length: int,
    key: tuple[int, int],
) -> list[int]:
    """y(0) of the block at ``start``: depends on the prompt, y*_<start and ``key`` (seed, source index) only.

    A shorter state is the beginning of a longer one: a block that is cut later has the states of the whole, cut.
    """
    if policy is FillPolicy.NGRAM:
        memory = NgramMemory()
        memory.catch_up(prompt_ids, completion_ids[:start])
        return copy_guesses(memory, (), length)
    last_token_id = completion_ids[start - 1] if start else prompt_ids[-1]
    return fill_guesses(
        policy, prompt_ids=prompt_ids, last_token_id=last_token_id, num_guesses=length, key=(*key, start)
    )


class Branch:
    """The Jacobi run of one block.

    One iteration computes y(j+1)_i = argmax p(. | x, y*_<start, y(j)_<i) for all i of the block (with the noise of its
    position where y* was sampled). A token is final when no token before it changed in the iteration that wrote it. The
    run ends when all tokens are final, when the state repeats, when it reaches a y* that is known to be the fixed
    point, or after ``max_iterations``, n + 1 unless told otherwise.

    Attributes:
        states: y(0), y(1), ... before the present ``state``.
        num_dropped: leading tokens that are final and equal to y*; they need no rows.
        is_done, is_converged: whether the run has ended, and in a fixed point.
        is_finite: False once a logit row held no finite maximum; the run has then ended, and means nothing.
    """

    def __init__(self, target: Target, start: int, state: list[int], max_iterations: int | None = None) -> None:
        self.target = target
        self.start = start
        self.state = state
        self.max_iterations = max_iterations or len(state) + 1
        self.right = list(target.completion_ids[start : start + len(state)])
        self.states: list[list[int]] = []
        self.num_dropped = 0
        self.num_iterations = 0
        self.is_done = False
        self.is_converged = False
        self.is_finite = True
        self._num_final = 0
        self._settle()

    def group(self) -> RowGroup:
        """Rows of the next iteration: the token before the first open one, then the open ones but the last."""
        first_open = self.start + self.num_dropped
        before = self.target.completion_ids[first_open - 1] if first_open else self.target.prompt_ids[-1]
        token_ids = [before, *self.state[self.num_dropped : -1]]
        return RowGroup(
            block_table=self.target.block_table,
            prefix_len=len(self.target.prompt_ids) + first_open - 1,
            token_ids=token_ids,
            writes_pages=False,
            num_logit_rows=len(token_ids),
        )

    def rows(self) -> RequestRows:
        """How the tokens of :meth:`group`'s rows are chosen."""
        first_open = self.start + self.num_dropped
        return RequestRows(
            num_rows=len(self.state) - self.num_dropped,
            sampling=self.target.sampling,
            processors=None,
            seed=self.target.noise_seed,
            choice=0,
            completion_ids=self.target.completion_ids[:first_open],
            guesses=self.state[self.num_dropped : -1],
        )

    def advance(self, predictions: Sequence[int]) -> None:
        """Take the predictions of :meth:`group`'s rows as the next state."""
        following = self.state[: self.num_dropped] + list(predictions)
        self.num_iterations += 1
        unchanged = first_wrong(self.state, following)
        if unchanged == len(self.state):
            self.is_done = self.is_converged = True
            return
        self.states.append(self.state)
        self.state = following
        self._num_final = max(self._num_final, unchanged + 1)
        self._settle()
        if self.num_iterations >= self.max_iterations:
            self.is_done = True

    def give_up(self) -> None:
        """End a run whose logits are not finite."""
        self.is_done = True
        self.is_finite = False

    def block(self) -> Block:
        """The finished block. A run that was cut short of a known fixed point keeps its last state as one more."""
        if self.state == self.right:
            return Block(self.start, self.states, None)
        if self.target.target_source is TargetSource.MODEL and not self.is_converged:
            return Block(self.start, [*self.states, self.state], None)
        return Block(self.start, self.states, self.state)

    def _settle(self) -> None:
        """Count what needs no rows any more; end the run when that is everything."""
        num_right = first_wrong(self.state, self.right)
        is_known = self.target.target_source is TargetSource.MODEL
        self.num_dropped = num_right if is_known else min(num_right, self._num_final)
        if self._num_final == len(self.state) or (is_known and num_right == len(self.state)):
            self.is_done = self.is_converged = True


def run_branches(branches: Sequence[Branch], runner: ModelRunner, max_num_rows: int) -> None:
    """Iterate every branch to its end; each round advances all that are open, in passes of at most ``max_num_rows``."""
    open_branches = [branch for branch in branches if not branch.is_done]
    while open_branches:
        batch: list[tuple[Branch, RowGroup]] = []
        num_rows = 0
        for branch in open_branches:
            group = branch.group()
            if batch and num_rows + group.num_rows > max_num_rows:
                _advance(batch, runner)
                batch, num_rows = [], 0
            batch.append((branch, group))
            num_rows += group.num_rows
        _advance(batch, runner)
        open_branches = [branch for branch in open_branches if not branch.is_done]


def _advance(batch: Sequence[tuple[Branch, RowGroup]], runner: ModelRunner) -> None:
    logits = runner.forward([group for _, group in batch])
    chosen = [token_id for ids in choose(logits, [branch.rows() for branch, _ in batch]) for token_id in ids]
    # NaN is the largest of all to argmax, so the chosen logit tells whether the row has one.
    is_finite = logits[torch.arange(len(chosen)), torch.tensor(chosen)].isfinite().tolist()
    first = 0
    for branch, group in batch:
        last = first + group.num_rows
        if all(is_finite[first:last]):
            branch.advance(chosen[first:last])
        else:
            branch.give_up()
        first = last
