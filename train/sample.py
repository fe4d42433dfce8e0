"""One packed training sample: ``[prompt][k0][l0][k1][l1]...``, l_b a clean block and k_b a noisy state of it.

Both sit at the same position ids. What a row may see depends on its kind alone (train/masks.py), so that one forward
pass gives the clean rows' targets and the noisy rows' predictions. Layout: Jacobi Forcing, arXiv 2512.14681.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jacobi_llm.configs.schema import ObjectiveConfig, ObjectiveName
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.infer.rule import first_wrong


@dataclass(frozen=True)
class NoisyBlock:
    """A noisy state chosen for training.

    Attributes:
        start: index of its first token in the completion.
        state: token ids, as many as the block has.
        num_right: d, the leading tokens equal to y*.
    """

    start: int
    state: list[int]
    num_right: int


@dataclass(frozen=True)
class Sample:
    """A packed sequence of T rows, as tensors [T] of int64 (bool for ``is_noisy``).

    Attributes:
        token_ids, position_ids: inputs.
        is_noisy: rows of the k_b.
        block: index of the block a noisy row belongs to; -1 for clean rows.
        block_start: position at which a noisy row's block starts; 0 for clean rows.
        ar_rows, ar_targets: [A], clean rows and the y* tokens they predict (the prompt predicts nothing).
        student_rows, teacher_rows: [C], noisy rows i >= d and the clean rows at the same position.
        student_weights: [C] float32, depth_discount ** (i - d).
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    is_noisy: torch.Tensor
    block: torch.Tensor
    block_start: torch.Tensor
    ar_rows: torch.Tensor
    ar_targets: torch.Tensor
    student_rows: torch.Tensor
    teacher_rows: torch.Tensor
    student_weights: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def choose_noise(
    trajectory: Trajectory, objective: ObjectiveConfig, rng: random.Random, max_length: int
) -> list[NoisyBlock]:
    """The noisy states of one sample, drawn with ``rng``.

    - ``ar``: none.
    - ``cllm-global``: one block and one of its states, uniformly (CLLM, arXiv 2403.00835, algorithm 2), among the
      blocks that fit ``max_length`` rows.
    - ``jacobi-forcing``: every block; block b gets the state whose share of wrong tokens is nearest to the b-th value
      of linspace(0, 1, w), repeated every w blocks from a drawn offset (Jacobi Forcing, arXiv 2512.14681, section 3.1).
    """
    if objective.name is ObjectiveName.AR:
        return []
    if objective.name is ObjectiveName.CLLM_GLOBAL:
        usable = [block for block in trajectory.blocks if block.noisy_states and _fits(trajectory, block, max_length)]
        if not usable:
            return []
        block = rng.choice(usable)
        return [_noisy(trajectory, block, rng.choice(block.noisy_states))]
    offset = rng.randrange(objective.schedule_blocks)
    return [
        _noisy(trajectory, block, _nearest(block, trajectory.target_of(block), _ratio(objective, number + offset)))
        for number, block in enumerate(trajectory.blocks)
        if block.noisy_states
    ]


def build_sample(
    trajectory: Trajectory,
    noise: Sequence[NoisyBlock],
    *,
    include_last_row: bool,
    depth_discount: float = 1.0,
    eos_token_ids: Sequence[int],
    max_length: int,
) -> Sample:
    """Pack one trajectory with its noisy blocks.

    Blocks that would exceed ``max_length`` rows are left out from the end, a clean block together with its noisy one.
    So are blocks behind y*'s first EOS; tokens behind it carry no loss.

    Args:
        trajectory: prompt and y*.
        noise: at most one state per block.
        include_last_row: count the last row of a block, whose prediction is the next block's first token.
        depth_discount: weight of a student row per row behind the first wrong one; 1 weighs all alike, as published.
        eos_token_ids: every id that ends a completion; a row that reads y*'s EOS carries no loss.
        max_length: rows.
    """
    num_tokens = _length_to_eos(trajectory.completion_ids, eos_token_ids)
    has_eos = trajectory.completion_ids[num_tokens - 1] in eos_token_ids
    rows = _Rows()
    prompt_len = len(trajectory.prompt_ids)
    rows.add_clean(trajectory.prompt_ids, 0)
    noisy_at = {noisy.start: noisy for noisy in noise}
    clean_row_of = {prompt_len - 1: prompt_len - 1}
    student_positions: list[tuple[int, int, float]] = []
    num_kept = 0
    for number, block in enumerate(trajectory.blocks):
        target = trajectory.target_of(block)
        noisy = noisy_at.get(block.start)
        if block.start >= num_tokens or len(rows.token_ids) + len(target) * (2 if noisy else 1) > max_length:
            break
        position = prompt_len + block.start
        if noisy:
            first = len(rows.token_ids)
            rows.add_noisy(noisy.state, position, number)
            last = len(target) if include_last_row else len(target) - 1
            if has_eos:
                last = min(last, num_tokens - 1 - block.start)
            student_positions += [
                (first + i, position + i, depth_discount ** (i - noisy.num_right)) for i in range(noisy.num_right, last)
            ]
        clean_row_of.update({position + i: len(rows.token_ids) + i for i in range(len(target))})
        rows.add_clean(target, position)
        num_kept = min(block.start + len(target), num_tokens)
    ar_positions = range(prompt_len - 1, prompt_len + num_kept - 1)
    return rows.build(
        ar_rows=[clean_row_of[position] for position in ar_positions],
        ar_targets=trajectory.completion_ids[:num_kept],
        student_rows=[row for row, _, _ in student_positions],
        teacher_rows=[clean_row_of[position] for _, position, _ in student_positions],
        student_weights=[weight for _, _, weight in student_positions],
    )


def _length_to_eos(completion_ids: Sequence[int], eos_token_ids: Sequence[int]) -> int:
    """Tokens up to the first EOS, that one included; all of them without one."""
    for index, token_id in enumerate(completion_ids):
        if token_id in eos_token_ids:
            return index + 1
    return len(completion_ids)


def _fits(trajectory: Trajectory, block: Block, max_length: int) -> bool:
    """Whether prompt, clean blocks up to this one and one noisy block fit."""
    length = len(trajectory.target_of(block))
    return len(trajectory.prompt_ids) + block.start + 2 * length <= max_length


def _noisy(trajectory: Trajectory, block: Block, state: list[int]) -> NoisyBlock:
    return NoisyBlock(block.start, state, first_wrong(state, trajectory.target_of(block)))


def _ratio(objective: ObjectiveConfig, number: int) -> float:
    steps = objective.schedule_blocks
    return 1.0 if steps == 1 else (number % steps) / (steps - 1)


def _nearest(block: Block, target: Sequence[int], ratio: float) -> list[int]:
    def share_wrong(state: Sequence[int]) -> float:
        return sum(a != b for a, b in zip(state, target, strict=True)) / len(target)

    return min(block.noisy_states, key=lambda state: abs(share_wrong(state) - ratio))


class _Rows:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.position_ids: list[int] = []
        self.is_noisy: list[bool] = []
        self.block: list[int] = []
        self.block_start: list[int] = []

    def add_clean(self, token_ids: Sequence[int], position: int) -> None:
        self._add(token_ids, position, is_noisy=False, block=-1, block_start=0)

    def add_noisy(self, token_ids: Sequence[int], position: int, block: int) -> None:
        self._add(token_ids, position, is_noisy=True, block=block, block_start=position)

    def _add(self, token_ids: Sequence[int], position: int, *, is_noisy: bool, block: int, block_start: int) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.position_ids += range(position, position + count)
        self.is_noisy += [is_noisy] * count
        self.block += [block] * count
        self.block_start += [block_start] * count

    def build(
        self,
        *,
        ar_rows: list[int],
        ar_targets: list[int],
        student_rows: list[int],
        teacher_rows: list[int],
        student_weights: list[float],
    ) -> Sample:
        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64)

        return Sample(
            token_ids=tensor(self.token_ids),
            position_ids=tensor(self.position_ids),
            is_noisy=torch.tensor(self.is_noisy, dtype=torch.bool),
            block=tensor(self.block),
            block_start=tensor(self.block_start),
            ar_rows=tensor(ar_rows),
            ar_targets=tensor(ar_targets),
            student_rows=tensor(student_rows),
            teacher_rows=tensor(teacher_rows),
            student_weights=torch.tensor(student_weights, dtype=torch.float32),
        )
