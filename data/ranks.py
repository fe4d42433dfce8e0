"""Which process of several this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from jacobi_llm.configs.errors import UsageError

# What torchrun and the deepspeed launcher set, then Slurm's srun.
_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


@dataclass(frozen=True)
class Ranks:
    """This process among those that share one collection."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """What the launcher says; one process alone without a launcher.

        Raises:
            UsageError: variables that make no sense.
        """
        for rank_name, size_name in _VARIABLES:
            if rank_name in environment and size_name in environment:
                texts = environment[rank_name], environment[size_name]
                rank, size = (int(text) if text.isdecimal() else -1 for text in texts)
                if not 0 <= rank < size:
                    raise UsageError(
                        f"environment: {rank_name}={texts[0]} and {size_name}={texts[1]}: the rank must be a number "
                        "below the size; unset both to collect in one process"
                    )
                return cls(rank, size)
        return cls()

    def worker(self, number: int, num_workers: int) -> Ranks:
        """Worker ``number`` of this process, among all workers of all processes."""
        return Ranks(self.rank * num_workers + number, self.world_size * num_workers)

    def order(self, num_shards: int) -> list[int]:
        """All shards, this process's share of them first; then those after it, which others may not have begun."""
        own = list(range(self.rank, num_shards, self.world_size))
        others = [number for number in range(num_shards) if number % self.world_size != self.rank]
        # The others go through theirs from the front: what is left to help with is at the back.
        return own + others[::-1]
