"""The choice of tokens: torch's argmax when greedy, position-keyed noise when not, each row for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.sampler import RequestRows, choose, greedy_ids
from jacobi_llm.infer.sampling_params import SamplingParams


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 255, 259, 511, 512, 513, 1000, 49152])
def test_it_is_argmax(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(greedy_ids(logits), logits.argmax(dim=-1))


@given(
    vocab_size=st.integers(2, 900),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
    top=st.sampled_from([1.0, float("inf"), float("nan")]),
)
def test_ties_go_to_the_lowest_id(vocab_size: int, places: list[float], top: float) -> None:
    logits = torch.zeros(1, vocab_size)
    ids = [int(place * vocab_size) for place in places]
    logits[0, ids] = top
    assert greedy_ids(logits).tolist() == [min(ids)]


def test_a_row_of_one_value_and_rows_of_a_larger_tensor() -> None:
    assert greedy_ids(torch.full((2, 700), float("-inf"))).tolist() == [0, 0]
    wide = torch.randn(4, 1400, generator=torch.Generator().manual_seed(1))
    assert torch.equal(greedy_ids(wide[:, :700]), wide[:, :700].argmax(dim=-1))
    assert greedy_ids(torch.zeros(0, 700)).tolist() == []


def rows_of(num_rows: int, processors: LogitsProcessors | None = None, **settings: Any) -> RequestRows:
    sampling = SamplingParams(**settings)
    return RequestRows(num_rows, sampling, processors, 3, 0, (), (0,) * (num_rows - 1))


def test_choose_wants_the_rows_of_the_requests() -> None:
    with pytest.raises(ValueError, match="2 logit rows, but the requests have 3"):
        choose(torch.zeros(2, 5), [rows_of(1), rows_of(2)])


def test_rows_go_to_their_requests_whatever_the_mix() -> None:
    """Plain, processed and sampled requests, prefill chunks between them, more rows than are worked on together."""
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(2))
    banned = LogitsProcessors(
        SamplingParams(allowed_token_ids=(7,)), prompt_ids=(1,), stop_token_ids=(), vocab_size=300, max_tokens=9
    )
    requests = [
        rows_of(9, temperature=1),
        rows_of(0, temperature=1),
        rows_of(20),
        rows_of(3, banned, allowed_token_ids=(7,)),
        rows_of(0),
        rows_of(18, temperature=1, top_k=1),
        rows_of(10, temperature=1),
    ]
    chosen = choose(logits, requests)
    assert [len(tokens) for tokens in chosen] == [9, 0, 20, 3, 0, 18, 10]
    assert chosen[2] == logits[9:29].argmax(-1).tolist()
    assert chosen[3] == [7, 7, 7]
    assert chosen[5] == logits[32:50].argmax(-1).tolist()
    assert chosen[0] == choose(logits[:9], [rows_of(9, temperature=1)])[0]
    assert chosen[6] == choose(logits[50:], [rows_of(10, temperature=1)])[0]
    assert chosen[0] != logits[:9].argmax(-1).tolist()


@pytest.mark.parametrize("num_passes", [1, 3, 12])
def test_a_choice_does_not_depend_on_the_pass(num_passes: int) -> None:
    """12 rows of one request, in one pass or in several: the noise belongs to the position."""
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(4))
    sampling = SamplingParams(temperature=0.8, top_p=0.9)
    found: list[int] = []
    size = 12 // num_passes
    for first in range(0, 12, size):
        request = RequestRows(size, sampling, None, 3, 1, [0] * first, [0] * (size - 1))
        found += choose(logits[first : first + size], [request])[0]
    assert found == choose(logits, [RequestRows(12, sampling, None, 3, 1, [], [0] * 11)])[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gets_its_argmax_and_spoils_no_other(bad: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    right = choose(logits, [rows_of(4, temperature=1)])[0]
    logits[2, 17] = bad
    assert choose(logits, [rows_of(4, temperature=1)])[0] == [*right[:2], 17, right[3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_z_is_float32_unless_the_logits_are_float64(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 400, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 3).to(dtype)
    precision = torch.float64 if dtype is torch.float64 else torch.float32
    z = logits.to(precision) / torch.tensor(0.7, dtype=precision)
    noise = RowNoise([RowKey(3, 0, t) for t in range(8)])
    gumbel = noise.gumbel(np.repeat(np.arange(8), 400), np.tile(np.arange(400), 8)).reshape(8, 400)
    expected = (z.double() + torch.from_numpy(gumbel)).argmax(-1).tolist()
    assert choose(logits, [rows_of(8, temperature=0.7)]) == [expected]


def test_an_exact_tie_at_temperature_0_is_broken_by_id_whatever_the_seed() -> None:
    """Field case D04: greedy that is encoded as top_k=1 picks among tied tokens by seed."""
    logits = torch.zeros(1, 300)
    logits[0, [40, 250]] = 5.0
    found = {
        choose(logits, [RequestRows(1, SamplingParams(top_k=1), None, seed, 0, (), ())])[0][0]
        for seed in range(20)
        for _ in range(20)
    }
    assert found == {40}
