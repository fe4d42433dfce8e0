"""Which sample comes when: a pure function of seed and position, so that resuming needs no state but the step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import ObjectiveConfig, TrainConfig
from jacobi_llm.data.record import Trajectory
from jacobi_llm.train.batch import Batch, collate
from jacobi_llm.train.sample import Sample, build_sample, choose_noise


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int
    world_size: int


class DataOrder:
    """Serves the micro-batches of any update of a run.

    Sample number g of the run is trajectory ``permutation(epoch)[g mod N]`` with epoch = g // N: every trajectory once
    per epoch, in an order of its own each time. A global batch is the same set of samples at every world size; rank r
    takes samples r, r + world_size, ... of it.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        train: TrainConfig,
        objective: ObjectiveConfig,
        ranks: Ranks,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
    ) -> None:
        if not trajectories:
            raise UsageError(f"train.data: {train.data} holds no trajectory that can be trained on")
        self.trajectories = trajectories
        self.train = train
        self.objective = objective
        self.ranks = ranks
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.num_steps = num_updates(train, len(trajectories))

    def sample_indices(self, step: int) -> list[int]:
        """Indices into the trajectories of the whole global batch of update ``step``."""
        first = step * self.train.global_batch_size
        return [self._index_of(number) for number in range(first, first + self.train.global_batch_size)]

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of update ``step``."""
        first = step * self.train.global_batch_size
        numbers = range(first + self.ranks.rank, first + self.train.global_batch_size, self.ranks.world_size)
        size = self.train.micro_batch_size
        return [
            collate([self._sample(number) for number in numbers[begin : begin + size]], self.pad_token_id)
            for begin in range(0, len(numbers), size)
        ]

    def _sample(self, number: int) -> Sample:
        trajectory = self.trajectories[self._index_of(number)]
        rng = random.Random(f"{self.train.seed}/{number}")
        return build_sample(
            trajectory,
            choose_noise(trajectory, self.objective, rng, self.train.max_length),
            include_last_row=self.objective.include_last_row,
            depth_discount=self.objective.depth_discount,
            eos_token_ids=self.eos_token_ids,
            max_length=self.train.max_length,
        )

    def _index_of(self, number: int) -> int:
        size = len(self.trajectories)
        return _permutation(size, self.train.seed, number // size)[number % size]


def num_micro_batches(train: TrainConfig, ranks: Ranks) -> int:
    """Forward passes of one rank per update.

    Raises:
        UsageError: the global batch cannot be split evenly.
    """
    per_pass = train.micro_batch_size * ranks.world_size
    if train.global_batch_size % per_pass:
        raise UsageError(
            f"train.global_batch_size: {train.global_batch_size} is not a multiple of micro_batch_size x ranks = "
            f"{train.micro_batch_size} x {ranks.world_size}; choose a multiple of {per_pass}"
        )
    return train.global_batch_size // per_pass


def num_updates(train: TrainConfig, num_trajectories: int) -> int:
    """Updates of a run."""
    return train.max_steps or math.ceil(train.epochs * num_trajectories / train.global_batch_size)


def split_usable(
    trajectories: Sequence[Trajectory], max_length: int, max_context: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Part what can be trained on from what cannot.

    Args:
        trajectories: all.
        max_length: rows of a packed sample.
        max_context: positions that the model can read.

    Returns:
        Those of which at least prompt, first block and its noisy state fit; and the others.
    """

    def is_usable(trajectory: Trajectory) -> bool:
        prompt_len, first_len = len(trajectory.prompt_ids), min(trajectory.window, len(trajectory.completion_ids))
        fits_model = prompt_len + len(trajectory.completion_ids) <= max_context
        return prompt_len > 0 and first_len > 0 and fits_model and prompt_len + 2 * first_len <= max_length

    usable = [trajectory for trajectory in trajectories if is_usable(trajectory)]
    return usable, [trajectory for trajectory in trajectories if not is_usable(trajectory)]


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/epoch {epoch}").shuffle(order)
    return order
