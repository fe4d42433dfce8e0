"""Processors row by row against transformers' own classes; frequency and presence penalty against OpenAI's formula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.sampling_params import SamplingParams

VOCAB_SIZE = 12
STOP_IDS = (0, 2)
TOKENS = st.integers(0, VOCAB_SIZE - 1)


class CountPenalties(LogitsProcessor):
    """What the OpenAI API documents: logit - count * frequency penalty - (count > 0) * presence penalty."""

    def __init__(self, sampling: SamplingParams, prompt_len: int) -> None:
        self.sampling, self.prompt_len = sampling, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token_id, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token_id] -= self.sampling.frequency_penalty * count
            scores[0, token_id] -= self.sampling.presence_penalty
        return scores


def transformers_processors(sampling: SamplingParams, prompt_len: int) -> LogitsProcessorList:
    """In the order of ``generate``."""
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in sampling.logit_bias]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(CountPenalties(sampling, prompt_len))
    if [word for word in sampling.bad_words_ids if word not in ((0,), (2,))]:
        words = [list(word) for word in sampling.bad_words_ids]
        processors.append(NoBadWordsLogitsProcessor(words, list(STOP_IDS)))
    processors.append(MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_tokens, list(STOP_IDS)))
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1))
    return processors


def row_by_row(
    sampling: SamplingParams, scores: torch.Tensor, prompt: list[int], completion: list[int], guesses: list[int]
) -> torch.Tensor:
    processors = transformers_processors(sampling, len(prompt))
    return torch.cat(
        [
            processors(torch.tensor([prompt + completion + guesses[:row]]), scores[row : row + 1].clone())
            for row in range(len(guesses) + 1)
        ]
    )


SAMPLINGS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.3, 2.0]),
    # theirs keeps biases in float32
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 3.25, 100.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    bad_words_ids=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=5, unique=True).map(tuple),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, unique=True).map(tuple),
    min_tokens=st.integers(0, 12),
)


@given(
    sampling=SAMPLINGS,
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    commits=st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=4),
    guesses=st.lists(TOKENS, max_size=7),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_row_has_the_processors_of_transformers(
    sampling: SamplingParams,
    prompt: list[int],
    commits: list[list[int]],
    guesses: list[int],
    seed: int,
    dtype: torch.dtype,
) -> None:
    """One object through a whole request: a window after every commit, with guesses that are forgotten again."""
    processors = LogitsProcessors(
        sampling, prompt_ids=prompt, stop_token_ids=frozenset(STOP_IDS), vocab_size=VOCAB_SIZE, max_tokens=40
    )
    generator = torch.Generator().manual_seed(seed)
    completion: list[int] = []
    for commit in [*commits, []]:
        scores = torch.randn(len(guesses) + 1, VOCAB_SIZE, generator=generator, dtype=torch.float64).to(dtype) * 3
        expected = row_by_row(sampling, scores, prompt, completion, guesses)
        processors.apply(scores, completion, guesses)
        assert torch.equal(scores, expected)
        completion += commit


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"bad_words_ids": ((4, 5),)},
        {"min_tokens": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_prefix_of_the_first_row_for_all_rows_is_seen(settings: dict[str, Any]) -> None:
    """The planted fault: penalties and bans of a window from its committed prefix alone, or with all of its guesses."""
    sampling = SamplingParams(**settings)
    prompt, completion, guesses = [4, 3], [7, 7], [4, 7, 9]
    scores = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = row_by_row(sampling, scores, prompt, completion, guesses)
    for wrong_prefix in (completion, completion + guesses):
        wrong = scores.clone()
        for row in range(4):
            processors = LogitsProcessors(
                sampling, prompt_ids=prompt, stop_token_ids=frozenset(STOP_IDS), vocab_size=VOCAB_SIZE, max_tokens=9
            )
            processors.apply(wrong[row : row + 1], wrong_prefix, [])
        assert not torch.equal(wrong, expected)


def test_only_what_is_asked_for_counts_as_a_processor() -> None:
    assert not SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, num_logprobs=3).has_processors
    for settings in ({"logit_bias": ((1, 0.5),)}, {"min_tokens": 1}, {"allowed_token_ids": (1,)}):
        assert SamplingParams(**settings).has_processors  # type: ignore[arg-type]
