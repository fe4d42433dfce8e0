"""Shares of several processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.data.ranks import Ranks


@given(st.integers(1, 7), st.integers(0, 40))
def test_everyone_goes_through_all_shards_and_begins_with_its_own(world_size: int, num_shards: int) -> None:
    orders = [Ranks(rank, world_size).order(num_shards) for rank in range(world_size)]
    own = [order[: len(range(rank, num_shards, world_size))] for rank, order in enumerate(orders)]
    assert sorted(number for numbers in own for number in numbers) == list(range(num_shards))
    assert all(sorted(order) == list(range(num_shards)) for order in orders)


def test_launchers() -> None:
    assert Ranks.of_environment({}) == Ranks(0, 1)
    assert Ranks.of_environment({"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Ranks(
        2, 4
    )
    assert Ranks.of_environment({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == Ranks(1, 2)
    assert Ranks.of_environment({"RANK": "1"}) == Ranks(0, 1)
    assert Ranks(1, 2).worker(1, 3) == Ranks(4, 6)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "2"), ("x", "2"), ("0", "")])
def test_nonsense_is_refused(rank: str, size: str) -> None:
    with pytest.raises(UsageError, match=f"RANK={rank} and WORLD_SIZE={size}"):
        Ranks.of_environment({"RANK": rank, "WORLD_SIZE": size})
