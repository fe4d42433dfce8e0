"""Sampling parameters: every fault is found when they are made, all of them at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.request import MAX_CHOICES, DecodeParams, Request, expand_choices
from jacobi_llm.infer.sampling_params import SamplingParams

WRONG: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 1e-9},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 2.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"frequency_penalty": 2.1},
    {"presence_penalty": -2.1},
    {"presence_penalty": math.nan},
    {"logit_bias": ((1, 101.0),)},
    {"logit_bias": ((1, -math.inf),)},
    {"logit_bias": ((-1, 1.0),)},
    {"logit_bias": ((1, 1.0), (1, 2.0))},
    {"bad_words_ids": ((),)},
    {"bad_words_ids": ((3, -4),)},
    {"allowed_token_ids": ()},
    {"allowed_token_ids": (-1,)},
    {"min_tokens": -1},
    {"num_logprobs": -1},
    {"num_logprobs": 21},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_a_wrong_value_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(UsageError) as caught:
        SamplingParams(**settings)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{name}: ")


def test_all_faults_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(temperature=-1, top_p=0, logit_bias=((0, 500.0),), bad_words_ids=((),))
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        *("temperature", "top_p", "logit_bias", "bad_words_ids")
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": ((9, 1.0),)}, "logit_bias: token id 9 is not in the vocabulary of 9"),
        ({"bad_words_ids": ((1, 10),)}, "bad_words_ids: token id 10 is not in the vocabulary of 9"),
        ({"allowed_token_ids": (1, 11)}, "allowed_token_ids: token id 11 is not in the vocabulary of 9"),
        ({"min_tokens": 6}, "min_tokens: 6 is above max_tokens (5)"),
        ({"allowed_token_ids": (3,), "bad_words_ids": ((3, 3),)}, "every allowed token may be banned"),
        ({"allowed_token_ids": (0,), "min_tokens": 1}, "every allowed token may be banned"),
        ({"bad_words_ids": tuple((token_id,) for token_id in range(9))}, "every allowed token may be banned"),
    ],
)
def test_faults_that_only_a_model_shows(settings: dict[str, Any], message: str) -> None:
    (fault,) = SamplingParams(**settings).faults_for(vocab_size=9, stop_token_ids={0}, max_tokens=5)
    assert message in fault


def test_what_fits_has_no_faults() -> None:
    sampling = SamplingParams(allowed_token_ids=(0, 3), min_tokens=5, bad_words_ids=((0,),), logit_bias=((8, 1.0),))
    assert sampling.faults_for(vocab_size=9, stop_token_ids={0}, max_tokens=5) == []


@pytest.mark.parametrize(("seed", "choice"), [(2**64, 0), (-(2**63) - 1, 0), (0, -1), (0, 2**32)])
def test_seed_and_choice_have_bounds(seed: int, choice: int) -> None:
    with pytest.raises(UsageError, match="a seed has 64 bits"):
        DecodeParams(1, seed=seed, choice=choice)


def test_choices_are_requests_of_their_own() -> None:
    request = Request("a", (1, 2), DecodeParams(4, seed=9), keep_pages=True)
    choices = expand_choices(request, 3)
    assert [choice.id for choice in choices] == ["a/0", "a/1", "a/2"]
    assert [choice.params.choice for choice in choices] == [0, 1, 2]
    assert {(choice.prompt_ids, choice.params.seed, choice.keep_pages) for choice in choices} == {((1, 2), 9, True)}
    assert expand_choices(request, 1) == [request]


@pytest.mark.parametrize("num_choices", [0, -1, MAX_CHOICES + 1, 10**9])
def test_a_wrong_number_of_choices_is_refused(num_choices: int) -> None:
    with pytest.raises(UsageError, match=f"n: {num_choices}: give a number of choices from 1 to 128"):
        expand_choices(Request("a", (1,), DecodeParams(1)), num_choices)
