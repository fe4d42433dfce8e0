"""Greedy choice: torch's argmax, whatever the vocabulary, ties and NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.infer.sampler import RowKey, choose, greedy_ids


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


def test_choose_wants_a_key_for_every_row() -> None:
    with pytest.raises(ValueError, match="2 logit rows"):
        choose(torch.zeros(2, 5), [RowKey(0, 0, 0)])
