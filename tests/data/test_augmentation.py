"""Augmented states: CLLM's published behaviour, and tokens that are wrong for certain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.schema import Augmentation
from jacobi_llm.data.augmentation import augmented_states
from jacobi_llm.infer.models import LoadedModel
from tests.data.trajectories import make_collector, make_prompts

FIXED = [1, 2, 3, 4, 5, 6]


def made(policy: Augmentation, states: list[list[int]], *, share: float = 0.3, seed: int = 0) -> list[list[int]]:
    return augmented_states(policy, states, FIXED, vocab_size=9, share=share, rng=random.Random(seed))


def test_none_makes_nothing() -> None:
    assert made(Augmentation.NONE, [[0] * 6]) == []


def test_cllm_mends_one_token_and_passes_over_the_state_before_a_copy() -> None:
    # Six states and the fixed point; state j has j + 1 right tokens.
    states = [[*FIXED[: j + 1], *[0] * (5 - j)] for j in range(5)]
    copies = made(Augmentation.CLLM, states)
    # j = 3 is copied; the copy, put in front, moves y(1) to place 2.
    assert len(copies) == 2
    for copy, origin in zip(copies, (states[1], states[3]), strict=True):
        [position] = [i for i in range(6) if copy[i] != origin[i]]
        assert copy[position] == FIXED[position]


def test_cllm_copies_of_copies_as_published() -> None:
    states = [[0] * 6 for _ in range(6)]
    copies = made(Augmentation.CLLM, states)
    # j = 4, 3, 2: the first takes a state, and every insertion moves the states on by one.
    assert len(copies) == 3
    assert all(1 <= sum(a == b for a, b in zip(copy, FIXED, strict=True)) <= 2 for copy in copies)
    assert made(Augmentation.CLLM, states[:3]) == []


@given(
    states=st.lists(st.lists(st.integers(0, 8), min_size=6, max_size=6), max_size=5),
    share=st.floats(0.01, 1),
    seed=st.integers(0, 99),
)
def test_random_wrong_tokens_are_wrong_and_as_many_as_asked(states: list[list[int]], share: float, seed: int) -> None:
    copies = made(Augmentation.RANDOM_WRONG, states, share=share, seed=seed)
    assert len(copies) == len(states)
    for state, copy in zip(states, copies, strict=True):
        changed = [i for i in range(6) if copy[i] != state[i]]
        assert len(changed) <= max(1, round(share * 6))
        assert all(copy[i] != FIXED[i] and 0 <= copy[i] < 9 for i in changed)


@pytest.mark.parametrize("policy", [Augmentation.CLLM, Augmentation.RANDOM_WRONG])
def test_collected_states_stay_what_they_are(tiny_loaded: Callable[..., LoadedModel], policy: Augmentation) -> None:
    loaded = tiny_loaded("llama", torch.float64)
    prompts = make_prompts(3)
    plain = make_collector(loaded).collect(prompts).trajectories
    rows = make_collector(loaded, augment=policy).collect(prompts).trajectories
    assert [[b.states for b in row.blocks] for row in rows] == [[b.states for b in row.blocks] for row in plain]
    assert any(block.augmented_states for row in rows for block in row.blocks)
    assert all(block.augmented_states is None for row in plain for block in row.blocks)
    for row in rows:
        row.check()
    assert rows == make_collector(loaded, augment=policy, wave_size=1).collect(prompts).trajectories
