"""Noise: the generator's published answers, the joint distribution, and what it may and may not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.infer.noise import BLOCK, RowKey, RowNoise, philox_4x32

# Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# G(seed 42, choice 1, t 5, v) of tokens 0, 1, 63 and 49151.
GOLDEN = [3.081045707021192, -0.5217153761180078, 0.36582538199006537, 1.3952751349904744]


def all_of_row(key: RowKey, num_tokens: int) -> np.ndarray:
    return RowNoise([key]).gumbel(np.zeros(num_tokens, dtype=np.int64), np.arange(num_tokens))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]) -> None:
    words = philox_4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0].tolist()) == output


def test_all_known_answers_in_one_call() -> None:
    counters, keys, outputs = (np.array(column, dtype=np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True))
    assert np.array_equal(philox_4x32(counters, keys), outputs)


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    t=st.integers(0, 2**32 - 1),
    token_ids=st.lists(st.integers(0, 2**18), min_size=1, max_size=30),
)
def test_a_tokens_noise_does_not_depend_on_its_company(seed: int, choice: int, t: int, token_ids: list[int]) -> None:
    other = RowKey(seed ^ 1, choice, t)
    key = RowKey(seed, choice, t)
    together = RowNoise([other, key]).gumbel(np.ones(len(token_ids), dtype=np.int64), np.array(token_ids))
    alone = [RowNoise([key]).gumbel(np.zeros(1, dtype=np.int64), np.array([one]))[0] for one in token_ids]
    assert together.tolist() == pytest.approx(alone, abs=1e-13)
    assert np.isfinite(together).all()
    bounds = -np.log(RowNoise([key]).block_minima(np.zeros(len(token_ids), int), np.array(token_ids) // BLOCK)[0])
    assert (together <= bounds + 1e-13).all()


@pytest.mark.parametrize("other", [RowKey(8, 0, 3), RowKey(7, 1, 3), RowKey(7, 0, 4), RowKey(7 + 2**40, 0, 3)])
def test_every_part_of_the_key_counts(other: RowKey) -> None:
    assert not np.isclose(all_of_row(RowKey(7, 0, 3), 500), all_of_row(other, 500)).any()


def test_a_seed_is_64_bits_signed_or_not() -> None:
    assert np.array_equal(all_of_row(RowKey(-1, 0, 0), 99), all_of_row(RowKey(2**64 - 1, 0, 0), 99))


def test_noise_is_the_same_for_ever() -> None:
    """A change here changes every seeded text: the changelog must say so."""
    found = RowNoise([RowKey(42, 1, 5)]).gumbel(np.zeros(4, dtype=np.int64), np.array([0, 1, 63, 49151]))
    assert found.tolist() == pytest.approx(GOLDEN, abs=1e-12)


def exponentials(num_rows: int, num_tokens: int) -> torch.Tensor:
    noise = RowNoise([RowKey(3, 0, t) for t in range(num_rows)])
    rows = np.repeat(np.arange(num_rows), num_tokens)
    gumbel = noise.gumbel(rows, np.tile(np.arange(num_tokens), num_rows)).reshape(num_rows, num_tokens)
    return torch.from_numpy(np.exp(-gumbel))


def test_exponentials_are_independent_with_mean_1() -> None:
    """Mean, variance, tail, correlations within and between blocks, and the smallest of each block."""
    num_rows, num_tokens = 4000, 2 * BLOCK
    found = exponentials(num_rows, num_tokens)
    size = num_rows * num_tokens
    assert abs(found.mean() - 1) < 5 / size**0.5
    assert abs(found.var() - 1) < 5 * 8**0.5 / size**0.5
    for bound in (0.001, 0.1, 1.0, 3.0, 8.0):
        expected = 1 - np.exp(-bound)
        assert abs((found < bound).double().mean() - expected) < 5 * (expected * (1 - expected) / size) ** 0.5
    correlations = torch.corrcoef(found.T) - torch.eye(num_tokens)
    assert correlations.abs().max() < 6 / num_rows**0.5
    least = found.unflatten(1, (2, BLOCK)).amin(-1)
    assert abs(least.mean() * BLOCK - 1) < 5 / (2 * num_rows) ** 0.5


def test_columns_are_uniform() -> None:
    """Kolmogorov-Smirnov of 1 - exp(-E), for single tokens and over one whole row."""
    found = exponentials(20000, 8)
    for column in found.T:
        assert ks_distance(-torch.expm1(-column)) < 2.2 / 20000**0.5
    row = torch.from_numpy(np.exp(-all_of_row(RowKey(11, 0, 0), 49152)))
    assert ks_distance(-torch.expm1(-row)) < 2.2 / 49152**0.5


def ks_distance(uniform: torch.Tensor) -> float:
    steps = torch.arange(len(uniform) + 1, dtype=torch.float64) / len(uniform)
    ordered = uniform.sort().values
    return float(torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
