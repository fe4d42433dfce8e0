"""The textbook procedure, one prompt and one block at a time: what the branches are checked against and compared with.

Block after block, the whole block is iterated until y(j+1) = y(j); its fixed point joins the prefix of the next one
(CLLM, Kou et al. 2024, arXiv 2403.00835, algorithm 1). No y* is known beforehand and no row is spared. One
iteration is one forward pass at batch 1, in one of two ways:

- :class:`CachedPredictor`, on the engine's runner: the prefix's K/V stands in pages, the prompt is read together with
  the first state, and every pass rewrites the block's own slots, so that the last one leaves them right;
- :class:`UncachedPredictor`, on the model itself: prompt, prefix and block are read again in every pass, and logits
  are made for all of these rows, as public collectors do (CLLM's data/generate_trajectory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import CollectConfig, FillPolicy, TargetSource
from jacobi_llm.data.block_starts import block_starts
from jacobi_llm.data.branches import initial_state
from jacobi_llm.data.record import Block
from jacobi_llm.data.target_sampling import noise_seed, target_sampling
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.near_tie import choice_gap
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.rule import first_wrong
from jacobi_llm.infer.sampler import RequestRows, choose
from jacobi_llm.infer.sampling_params import GREEDY, SamplingParams


class Predictor(Protocol):
    """Predicts a block, one completion at a time.

    Attributes:
        num_passes, num_rows: passes run and rows forwarded since construction.
    """

    num_passes: int
    num_rows: int

    def start(self, prompt_ids: Sequence[int], num_tokens: int, chooser: Chooser) -> None:
        """Begin a completion of at most ``num_tokens`` tokens, which ``chooser`` chooses."""

    def predict(self, prefix_ids: Sequence[int], state: Sequence[int]) -> list[int]:
        """The next state: for every i, the token chosen after ``prefix_ids`` and ``state[:i]``.

        ``prefix_ids`` (prompt and finished blocks) only grows between calls.
        """

    def finish(self) -> None:
        """End the completion and free what it held."""


@dataclass(frozen=True)
class Chooser:
    """How the tokens of one completion are chosen: greedily, or with noise keyed by their place in it."""

    num_prompt_tokens: int
    sampling: SamplingParams
    noise_seed: int

    def choose(self, logits: torch.Tensor, prefix_ids: Sequence[int], state: Sequence[int]) -> list[int]:
        """The tokens after ``prefix_ids`` (prompt and completion) and each beginning of ``state``: [n, vocab] -> n."""
        completion_ids = prefix_ids[self.num_prompt_tokens :]
        rows = RequestRows(len(state), self.sampling, None, self.noise_seed, 0, completion_ids, state[:-1])
        [chosen] = choose(logits, [rows])
        return chosen


class CachedPredictor:
    """Batch 1 on the engine's runner and pages; the engine must be idle meanwhile."""

    def __init__(self, engine: LLMEngine) -> None:
        self.num_passes = 0
        self.num_rows = 0
        self._engine = engine
        self._block_table: list[int] = []
        self._num_computed = 0
        self._chooser = Chooser(0, GREEDY, 0)

    def start(self, prompt_ids: Sequence[int], num_tokens: int, chooser: Chooser) -> None:
        """Take the pages.

        Raises:
            UsageError: they do not fit the pool.
        """
        self.finish()
        self._chooser = chooser
        if not self._engine.pool.grow(self._block_table, len(prompt_ids) + num_tokens):
            raise UsageError(
                f"{len(prompt_ids)} prompt + {num_tokens} completion tokens do not fit the free K/V pages; "
                "raise engine.kv_memory_mib"
            )

    def predict(self, prefix_ids: Sequence[int], state: Sequence[int]) -> list[int]:
        """One pass over what has no K/V yet; K/V is valid below the last token of ``prefix_ids`` afterwards."""
        token_ids = [*prefix_ids[self._num_computed :], *state[:-1]]
        group = RowGroup(self._block_table, self._num_computed, token_ids, num_logit_rows=len(state))
        logits = self._engine.runner.forward([group])
        self._num_computed = len(prefix_ids) - 1
        self.num_passes += 1
        self.num_rows += group.num_rows
        return self._chooser.choose(logits, prefix_ids, state)

    def finish(self) -> None:
        """Give the pages back."""
        self._engine.pool.release(self._block_table)
        self._num_computed = 0


class UncachedPredictor:
    """Batch 1 on the plain model, with transformers' own attention and no cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_passes = 0
        self.num_rows = 0
        self._model = model
        self._chooser = Chooser(0, GREEDY, 0)

    def start(self, prompt_ids: Sequence[int], num_tokens: int, chooser: Chooser) -> None:
        """Nothing else to prepare."""
        self._chooser = chooser

    @torch.inference_mode()
    def predict(self, prefix_ids: Sequence[int], state: Sequence[int]) -> list[int]:
        """One pass over everything."""
        token_ids = [*prefix_ids, *state[:-1]]
        input_ids = torch.tensor([token_ids], device=self._model.device)
        logits = self._model(input_ids=input_ids, use_cache=False).logits[0, -len(state) :]
        self.num_passes += 1
        self.num_rows += len(token_ids)
        return self._chooser.choose(logits, prefix_ids, state)

    def finish(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class BlockSettings:
    """What the states depend on, beside prompt, model and source index.

    Attributes:
        window: block size n (tokens).
        max_tokens: longest completion (tokens); with the prompt it must fit the model's context.
        init: initial guesses.
        seed: of everything that is drawn.
        stop_token_ids: every id that ends a completion.
        jitter_starts: whether the first block has a drawn length.
        max_iterations: passes of a block's run; None allows n + 1.
        sampling: how tokens are chosen.
    """

    window: int
    max_tokens: int
    init: FillPolicy
    seed: int
    stop_token_ids: frozenset[int]
    jitter_starts: bool = False
    max_iterations: int | None = None
    sampling: SamplingParams = GREEDY

    @classmethod
    def of(cls, config: CollectConfig, window: int, stop_token_ids: Sequence[int]) -> BlockSettings:
        """Those of a collection, for one of its windows."""
        return cls(
            window=window,
            max_tokens=config.max_tokens,
            init=config.init,
            seed=config.seed,
            stop_token_ids=frozenset(stop_token_ids),
            jitter_starts=config.jitter_starts,
            max_iterations=config.max_iterations,
            sampling=target_sampling(config),
        )


@dataclass(frozen=True)
class SequentialResult:
    """A completion by the textbook procedure; ``num_unconverged`` counts blocks that hit the bound of n + 1."""

    completion_ids: list[int]
    blocks: list[Block]
    num_unconverged: int


def run_sequential(
    predictor: Predictor,
    prompt_ids: Sequence[int],
    source_index: int,
    settings: BlockSettings,
    given_ids: Sequence[int] | None = None,
    target_source: TargetSource | None = None,
) -> SequentialResult:
    """Iterate the blocks of one completion, one after the other.

    Args:
        predictor: runs the passes.
        prompt_ids: at least one token.
        source_index: key of the initial guesses.
        settings: see :class:`BlockSettings`.
        given_ids: y* when it is known: the prefix of every block is then cut from it. None lets the fixed points be y*,
            which needs runs that are not cut short.
        target_source: of ``given_ids``; with ``model``, a run that is cut short is known to lead to y*.
    """
    completion: list[int] = []
    blocks: list[Block] = []
    num_unconverged = 0
    num_tokens = settings.max_tokens if given_ids is None else len(given_ids)
    seed = noise_seed(settings.seed, source_index)
    predictor.start(prompt_ids, num_tokens, Chooser(len(prompt_ids), settings.sampling, seed))
    starts = block_starts(num_tokens, settings.window, settings.jitter_starts, (settings.seed, source_index))
    try:
        for start, end in zip(starts, [*starts[1:], num_tokens], strict=True):
            length = end - start
            key = (settings.seed, source_index)
            state = initial_state(settings.init, prompt_ids, completion, start, length, key)
            bound = settings.max_iterations or length + 1
            states, is_converged = _iterate(predictor, [*prompt_ids, *completion], state, bound)
            num_unconverged += not is_converged
            if given_ids is None:
                states = _cut(states, _length_to_stop(states[-1], settings.stop_token_ids))
                target = states[-1]
            else:
                target = list(given_ids[start : start + length])
            is_cut_short = not is_converged and target_source is TargetSource.MODEL and states[-1] != target
            fixed_point = target if is_cut_short else states.pop()
            blocks.append(Block(start, states, None if fixed_point == target else fixed_point))
            completion += target
            if given_ids is None and completion[-1] in settings.stop_token_ids:
                break
    finally:
        predictor.finish()
    return SequentialResult(completion, blocks, num_unconverged)


def _iterate(
    predictor: Predictor, prefix_ids: Sequence[int], state: list[int], max_iterations: int
) -> tuple[list[list[int]], bool]:
    """States from y(0) to the last one, and whether that one repeated itself."""
    states = [state]
    for _ in range(max_iterations):
        following = predictor.predict(prefix_ids, states[-1])
        if following == states[-1]:
            return states, True
        states.append(following)
    return states, False


def _length_to_stop(state: Sequence[int], stop_token_ids: frozenset[int]) -> int:
    return next((i + 1 for i, token_id in enumerate(state) if token_id in stop_token_ids), len(state))


def _cut(states: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """States cut to ``length`` tokens; those that only repeat the last one are dropped."""
    cut = [list(state[:length]) for state in states]
    while len(cut) > 1 and cut[-2] == cut[-1]:
        cut.pop()
    return cut


@dataclass(frozen=True)
class StateDifference:
    """Where two runs of one block part.

    Attributes:
        start: of the block (tokens).
        iteration: index j of the first state that differs; the fixed point counts as the last.
        position: index in the block of the first token that differs.
        gap: distance of the lower of the two chosen logits from the best one; infinite when one run only ended earlier.
    """

    start: int
    iteration: int
    position: int
    gap: float


def first_state_difference(
    model: PreTrainedModel, prefix_ids: Sequence[int], stored: Block, rerun: Block, target: Sequence[int]
) -> StateDifference | None:
    """Return where the states of one block differ, with the logit gap there; None when they are the same.

    Args:
        model: judges the gap, on transformers' own attention.
        prefix_ids: prompt and finished blocks before this one.
        stored, rerun: the block by two procedures, with one y*.
        target: y*'s tokens of the block.
    """
    mine = [*stored.states, list(target) if stored.fixed_point is None else stored.fixed_point]
    other = [*rerun.states, list(target) if rerun.fixed_point is None else rerun.fixed_point]
    for iteration, (a, b) in enumerate(zip(mine, other, strict=False)):
        if len(a) != len(b):
            return StateDifference(stored.start, iteration, min(len(a), len(b)), float("inf"))
        position = first_wrong(a, b)
        if position < len(a):
            known = [*prefix_ids, *mine[iteration - 1][:position]]
            gap = choice_gap(model, known, (a[position], b[position])) if iteration else float("inf")
            return StateDifference(stored.start, iteration, position, gap)
    if len(mine) != len(other):
        return StateDifference(stored.start, min(len(mine), len(other)), 0, float("inf"))
    return None
