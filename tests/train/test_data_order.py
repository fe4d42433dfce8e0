"""Which sample comes when."""

from __future__ import annotations

from collections import Counter

import pytest

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import ObjectiveConfig, TrainConfig
from jacobi_llm.train.data_order import DataOrder, Ranks, num_micro_batches, num_updates, split_usable
from tests.train.runs import EOS, make_trajectories, make_trajectory

ROWS = make_trajectories(200)


def order_of(rank: int = 0, world_size: int = 1, *, seed: int = 0, **settings: object) -> DataOrder:
    train = TrainConfig.model_validate({"global_batch_size": 4, "micro_batch_size": 2, "seed": seed, **settings})
    ranks = Ranks(rank, world_size)
    return DataOrder(ROWS, train, ObjectiveConfig(), ranks, eos_token_ids=(EOS,), pad_token_id=0)


def test_field_case_t11_each_id_once_per_epoch_from_wherever_a_run_resumes() -> None:
    order = order_of(epochs=2)
    assert order.num_steps == 100
    whole = [index for step in range(100) for index in order.sample_indices(step)]
    for epoch in range(2):
        assert sorted(whole[200 * epoch : 200 * epoch + 200]) == list(range(200))
    assert whole[:200] != whole[200:]
    # A resumed run builds its order anew and starts at any step.
    for first in (7, 60, 61, 99):
        again = order_of(epochs=2)
        assert [index for step in range(first, 100) for index in again.sample_indices(step)] == whole[4 * first :]


def test_an_epoch_may_end_within_a_batch() -> None:
    order = order_of(global_batch_size=6, micro_batch_size=3, max_steps=100)
    drawn = [index for step in range(100) for index in order.sample_indices(step)]
    for epoch in range(3):
        assert sorted(drawn[200 * epoch : 200 * epoch + 200]) == list(range(200))


def test_the_seed_decides() -> None:
    assert order_of(seed=1).sample_indices(0) == order_of(seed=1).sample_indices(0)
    assert order_of(seed=1).sample_indices(0) != order_of(seed=2).sample_indices(0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_the_global_batch_is_the_same_at_every_world_size(world_size: int, micro_batch_size: int) -> None:
    """Same samples with the same noise, whoever computes them."""

    def contents(orders: list[DataOrder]) -> Counter[tuple[tuple[int, ...], int, int]]:
        found: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        for order in orders:
            for batch in order.micro_batches(3):
                for row, visible in zip(batch.token_ids, batch.mask[:, 0].sum(-1), strict=True):
                    # Padding sees itself only and reads token 0.
                    count = int(((row != 0) | (visible > 1)).sum())
                    found[tuple(row[:count].tolist()), count, 0] += 1
        return found

    sizes = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    reference = contents([order_of(global_batch_size=8, micro_batch_size=8)])
    assert contents([order_of(rank, world_size, **sizes) for rank in range(world_size)]) == reference


def test_a_batch_that_cannot_be_split_evenly_is_refused() -> None:
    train = TrainConfig(global_batch_size=6, micro_batch_size=2)
    assert num_micro_batches(train, Ranks(0, 3)) == 1
    with pytest.raises(UsageError, match=r"global_batch_size: 6 is not a multiple .* 2 x 2; choose a multiple of 4"):
        num_micro_batches(train, Ranks(0, 2))


def test_number_of_updates() -> None:
    assert num_updates(TrainConfig(epochs=1.5, global_batch_size=4), 10) == 4
    assert num_updates(TrainConfig(epochs=1.5, global_batch_size=4, max_steps=7), 10) == 7


def test_what_leaves_no_room_is_set_aside() -> None:
    short, long = make_trajectory(1, length=16), make_trajectory(2, length=16)
    long.prompt_ids.extend([9] * 60)
    assert split_usable([short, long], max_length=64, max_context=256) == ([short], [long])
    assert split_usable([short, long], max_length=256, max_context=256) == ([short, long], [])
    assert split_usable([short, long], max_length=256, max_context=64) == ([short], [long])
    with pytest.raises(UsageError, match="no trajectory that can be trained on"):
        DataOrder([], TrainConfig(), ObjectiveConfig(), Ranks(0, 1), eos_token_ids=(), pad_token_id=0)
