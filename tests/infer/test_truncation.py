"""Truncation and draw against transformers' warpers and the plain formula over the whole vocabulary."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jacobi_llm.infer import gumbel_max, truncation
from jacobi_llm.infer.gumbel_max import Kept, gumbel_argmax
from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.sampling_params import SamplingParams
from jacobi_llm.infer.score_rows import ScoreRows, copy_scores
from jacobi_llm.infer.truncation import draw_tokens

NOISES = [RowKey(seed, choice, t) for seed, choice, t in ((0, 0, 0), (1, 0, 0), (2**64 - 1, 3, 7), (-5, 1, 10**6))]


def warped(scores: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """transformers' warpers in the order of ``generate``."""
    warpers = LogitsProcessorList()
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.zeros(scores.shape[0], 1, dtype=torch.int64), scores)


def plain_argmax(scores: torch.Tensor, keys: list[RowKey]) -> list[int]:
    """argmax of z + G with noise for every token, -inf included."""
    num_rows, vocab_size = scores.shape
    rows = np.repeat(np.arange(num_rows), vocab_size)
    noise = RowNoise(keys).gumbel(rows, np.tile(np.arange(vocab_size), num_rows)).reshape(num_rows, vocab_size)
    found: list[int] = (scores.double() + torch.from_numpy(noise)).argmax(dim=-1).tolist()
    return found


def draw(scores: torch.Tensor, sampling: SamplingParams, keys: list[RowKey]) -> list[int]:
    rows = ScoreRows(copy_scores(scores))
    found: list[int] = draw_tokens(rows, np.arange(len(keys)), [sampling] * len(keys), RowNoise(keys)).tolist()
    return found


@st.composite
def some_scores(draw_value: st.DrawFn) -> torch.Tensor:
    """Rows of scores from flat to peaked, with ties and banned tokens."""
    vocab_size = draw_value(st.sampled_from([1, 2, 7, 63, 64, 65, 200, 1000]))
    generator = torch.Generator().manual_seed(draw_value(st.integers(0, 10**6)))
    scale = draw_value(st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]))
    scores = torch.randn(len(NOISES), vocab_size, generator=generator, dtype=torch.float64) * scale
    if draw_value(st.booleans()):
        scores = (scores * 2).round() / 2
    banned = torch.rand(scores.shape, generator=generator) < draw_value(st.sampled_from([0.0, 0.3, 0.99]))
    banned[torch.arange(len(NOISES)), torch.randint(vocab_size, (len(NOISES),), generator=generator)] = False
    return scores.masked_fill(banned, float("-inf"))


@given(scores=some_scores(), is_single=st.booleans())
def test_no_token_is_missed(scores: torch.Tensor, is_single: bool) -> None:
    scores = scores.float() if is_single else scores
    assert draw(scores, SamplingParams(temperature=1), NOISES) == plain_argmax(scores, NOISES)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5, 8.0])
def test_no_token_is_missed_in_a_real_vocabulary(scale: float) -> None:
    scores = torch.randn(8, 49152, generator=torch.Generator().manual_seed(1)) * scale
    keys = [RowKey(5, 0, t) for t in range(8)]
    assert draw(scores, SamplingParams(temperature=1), keys) == plain_argmax(scores, keys)


def test_most_tokens_need_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    excesses = RowNoise.excesses
    monkeypatch.setattr(
        RowNoise, "excesses", lambda self, rows, ids: sizes.append(len(ids)) or excesses(self, rows, ids)
    )
    scores = torch.randn(16, 49152, generator=torch.Generator().manual_seed(2)) * 2.5
    draw(scores, SamplingParams(temperature=1), [RowKey(0, 0, t) for t in range(16)])
    assert sum(sizes) / 16 < 1500


def test_a_bound_that_is_too_tight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: tokens are skipped that could win."""
    monkeypatch.setattr(gumbel_max, "_SLACK", -0.3)
    keys = [RowKey(5, 0, t) for t in range(64)]
    scores = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with contextlib.suppress(IndexError, ValueError):  # raised where nothing is left of a row
        assert draw(scores, SamplingParams(temperature=1), keys) != plain_argmax(scores, keys)


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 100, 999, 5000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.97]),
)


@given(scores=some_scores(), sampling=SAMPLINGS)
def test_the_kept_tokens_are_those_of_transformers(scores: torch.Tensor, sampling: SamplingParams) -> None:
    """Ties aside: theirs cuts equally likely tokens at the edge of top-p in any order."""
    jitter = torch.linspace(0, 1e-3, scores.shape[1], dtype=torch.float64)
    scores = scores + jitter if sampling.top_p < 1 else scores
    assert draw(scores, sampling, NOISES) == plain_argmax(warped(scores, sampling), NOISES)


def test_top_k_keeps_the_ties_of_its_last_token() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    keys = [[RowKey(0, 0, t)] for t in range(200)]
    assert {draw(scores, SamplingParams(temperature=1, top_k=2), key)[0] for key in keys} == {1, 2, 3, 4}


def test_top_p_cuts_ties_at_the_highest_ids() -> None:
    scores = torch.zeros(1, 10)
    keys = [[RowKey(0, 0, t)] for t in range(200)]
    assert {draw(scores, SamplingParams(temperature=1, top_p=0.35), key)[0] for key in keys} == {0, 1, 2, 3}
    assert {draw(scores, SamplingParams(temperature=1, top_p=0.01), key)[0] for key in keys} == {0}


def test_min_p_of_1_keeps_the_likeliest() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    keys = [[RowKey(0, 0, t)] for t in range(100)]
    assert {draw(scores, SamplingParams(temperature=1, min_p=1.0), key)[0] for key in keys} == {1, 2}


def test_a_nucleus_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the token that reaches top-p is left out."""
    mass_before = truncation._mass_before
    monkeypatch.setattr(truncation, "_mass_before", lambda *place: mass_before(*place) + 0.3)
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    keys = [[RowKey(0, 0, t)] for t in range(300)]
    sampling = SamplingParams(temperature=1, top_p=0.8)
    right = [plain_argmax(warped(scores, sampling), key) for key in keys]
    assert [draw(scores, sampling, key) for key in keys] != right


def test_ties_of_value_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowNoise, "excesses", lambda self, rows, ids: np.zeros(len(rows)))
    monkeypatch.setattr(RowNoise, "block_minima", lambda self, rows, blocks: (np.ones(len(rows)), blocks * 64 + 63))
    scores = ScoreRows(copy_scores(torch.tensor([[0.0] * 70 + [1.0] * 130, [2.0] * 200])))
    kept = [Kept(scores.lowest, 999)] * 2
    assert gumbel_argmax(scores, np.arange(2), kept, RowNoise(NOISES[:2])).tolist() == [70, 0]


@given(scores=some_scores(), k=st.integers(1, 1000))
def test_kth_largest_is_that_of_a_sort(scores: torch.Tensor, k: int) -> None:
    k = min(k, scores.shape[1])
    rows = ScoreRows(copy_scores(scores))
    for row in range(len(scores)):
        assert rows.kth_largest(row, k) == float(scores[row].sort(descending=True).values[k - 1])
        assert rows.best_ids()[row] == int(scores[row].argmax())
        bound = float(scores[row].max()) - 1
        ids, values = rows.at_least(row, bound)
        assert ids.tolist() == torch.nonzero(scores[row] >= bound)[:, 0].tolist()
        assert values.tolist() == scores[row][ids].tolist()
