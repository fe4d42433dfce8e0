"""Sampled and processed decoding through the engine: the ids of a plain one-token loop at every window and batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.request import Request, expand_choices
from jacobi_llm.infer.rule import FinishReason
from jacobi_llm.infer.sampler import RequestRows
from jacobi_llm.infer.sampling_params import SamplingParams
from tests.infer import test_processors, test_truncation
from tests.infer.decoding import make_engine, make_request, run_checked
from tests.tiny_models import VOCAB_SIZE, tiny_loaded

NUM_TOKENS = 24
WINDOWS = (1, 2, 5, 16)
STOP_IDS = frozenset({0, 2})
PROMPT = (157, 233, 40, 40, 9)
# The logits of the tiny model have a spread of about 1: penalties and biases of this size change most tokens.
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all warpers": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "rewards": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "bias": {"logit_bias": ((5, 4.0), (133, -100.0))},
    "bad words": {"bad_words_ids": ((202,), (32, 5, 7), (40, 9, 32), (200, 54), (1, 2, 3))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 7))},
    "min tokens": {"logit_bias": ((2, 100.0),), "min_tokens": 9},
    "everything": {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "logit_bias": ((5, 2.0), (6, 2.0)),
        "bad_words_ids": ((5, 6), (6,)),
        "allowed_token_ids": tuple(range(200)),
        "min_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded("llama")


@torch.inference_mode()
def decode_plainly(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    seed: int = 0,
    choice: int = 0,
    max_tokens: int = NUM_TOKENS,
) -> list[int]:
    """One token per forward pass over the whole text, transformers' processors and warpers, noise for every token."""
    completion: list[int] = []
    processors = test_processors.transformers_processors(sampling, len(prompt_ids))
    while len(completion) < max_tokens and not (completion and completion[-1] in STOP_IDS):
        ids = torch.tensor([[*prompt_ids, *completion]])
        scores = processors(ids, loaded.model(ids, use_cache=False).logits[:, -1].clone())
        if sampling.temperature:
            scores = test_truncation.warped(scores / sampling.temperature, sampling)
            (token_id,) = test_truncation.plain_argmax(scores, [RowKey(seed, choice, len(completion))])
        else:
            token_id = int(scores[0].argmax())
        completion.append(token_id)
    return completion


def sampled_request(
    id: str,
    sampling: SamplingParams,
    *,
    prompt_ids: Sequence[int] = PROMPT,
    max_tokens: int = NUM_TOKENS,
    **params: Any,
) -> Request:
    return make_request(id, prompt_ids, max_tokens, sampling=sampling, stop_token_ids=STOP_IDS, **params)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_window_gives_the_ids_of_a_plain_loop(loaded: LoadedModel, name: str) -> None:
    """Alone, and all windows and three seeds in one batch; also field case D09: no processor is ever ignored."""
    sampling = SamplingParams(**SETTINGS[name])
    expected = {seed: decode_plainly(loaded, PROMPT, sampling, seed=seed) for seed in (0, 1, 2**63 + 11)}
    if sampling.has_processors:
        bare = SamplingParams(temperature=sampling.temperature)
        assert expected[0] != decode_plainly(loaded, PROMPT, bare), "the processor makes no difference here"
    for window in WINDOWS:
        (output,) = make_engine(loaded).generate([sampled_request("a", sampling, window=window)])
        assert list(output.token_ids) == expected[0]
    requests = [
        sampled_request(f"{window}/{seed}", sampling, window=window, seed=seed)
        for window in WINDOWS
        for seed in expected
    ]
    for output in make_engine(loaded).generate(requests):
        assert list(output.token_ids) == expected[int(output.id.partition("/")[2])]


def test_guesses_are_accepted(loaded: LoadedModel) -> None:
    sampling = SamplingParams(temperature=1.0, allowed_token_ids=(7,))
    (output,) = make_engine(loaded).generate([make_request("a", PROMPT, 61, window=16, sampling=sampling)])
    assert output.commit_lengths == (1, 16, 16, 16, 12)


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_any_mix_equals_the_plain_loop(loaded: LoadedModel, data: st.DataObject, seed: int) -> None:
    """Requests of every kind join at random steps under any limits, preemption included."""
    draw = random.Random(seed)
    requests, expected = [], {}
    for number in range(data.draw(st.integers(1, 5))):
        prompt = tuple(draw.randrange(3, 250) for _ in range(draw.randint(1, 20)))
        sampling = SamplingParams(**SETTINGS[draw.choice(list(SETTINGS))])
        max_tokens, key = draw.randint(9, 20), draw.randrange(3)
        request = sampled_request(
            str(number),
            sampling,
            prompt_ids=prompt,
            max_tokens=max_tokens,
            window=draw.choice([1, 2, 3, 8, 16]),
            mode=draw.choice(list(DecodeMode)),
            fill=draw.choice(list(FillPolicy)),
            seed=key,
            choice=key,
        )
        requests.append(request)
        expected[request.id] = decode_plainly(loaded, prompt, sampling, seed=key, choice=key, max_tokens=max_tokens)
    engine = make_engine(
        loaded,
        num_pages=11 + data.draw(st.sampled_from([0, 3, 100])),
        page_size=4,
        max_num_rows=data.draw(st.sampled_from([3, 9, 2048])),
    )
    tape = run_checked(engine, requests, join_at=[draw.randint(0, 10) for _ in requests])
    assert {id: list(output.token_ids) for id, output in tape.outputs.items()} == expected


def test_float32_logits_give_one_text_at_every_window() -> None:
    loaded = tiny_loaded("llama", torch.float32)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    found = {
        make_engine(loaded).generate([sampled_request("a", sampling, window=window)])[0].token_ids for window in WINDOWS
    }
    assert len(found) == 1


# ---------------------------------------------------------------- planted faults


def test_noise_keyed_by_the_pass_is_seen(loaded: LoadedModel) -> None:
    sampling = SamplingParams(temperature=1.0)
    expected = decode_plainly(loaded, PROMPT, sampling)
    num_calls = 0

    def noise_keys(self: RequestRows) -> list[RowKey]:
        nonlocal num_calls
        num_calls += 1
        return [RowKey(self.seed, self.choice, 1000 * num_calls + row) for row in range(self.num_rows)]

    with mock.patch.object(RequestRows, "noise_keys", noise_keys):
        (output,) = make_engine(loaded).generate([sampled_request("a", sampling, window=5)])
    assert list(output.token_ids) != expected


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "bad words", "min tokens"])
def test_a_prefix_without_the_guesses_is_seen(loaded: LoadedModel, name: str) -> None:
    """An oracle's guesses are all right, so every row commits, and the wrong prefix of each shows."""
    sampling = SamplingParams(**SETTINGS[name])
    expected = decode_plainly(loaded, PROMPT, sampling)
    engine = make_engine(loaded)

    def oracle(carried: list[int], num_guesses: int, fill: Any) -> list[int]:
        done = len(engine._sequences["a"].completion_ids)
        return (expected + [0] * num_guesses)[done : done + num_guesses]

    def without(
        self: LogitsProcessors, scores: torch.Tensor, completion: Sequence[int], guesses: Sequence[int]
    ) -> None:
        for row in range(len(guesses) + 1):
            apply(self, scores[row : row + 1], completion, ())

    def decode() -> list[int]:
        with mock.patch("jacobi_llm.infer.scheduler.next_window", oracle):
            return list(engine.generate([sampled_request("a", sampling, window=8)])[0].token_ids)

    apply = LogitsProcessors.apply
    assert decode() == expected
    with mock.patch.object(LogitsProcessors, "apply", without):
        assert decode() != expected


# ---------------------------------------------------------------- refusals, choices, logprobs


def test_what_the_model_shows_to_be_wrong_is_refused_and_costs_nobody_else(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    sampling = SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),), allowed_token_ids=(0,), min_tokens=NUM_TOKENS + 1)
    with pytest.raises(UsageError) as caught:
        engine.add_request(sampled_request("a", sampling))
    assert [fault.partition(": ")[2].partition(":")[0] for fault in caught.value.faults] == ["logit_bias", "min_tokens"]
    assert not engine._sequences


def test_choices_differ_under_one_seed_and_each_has_its_own_end(loaded: LoadedModel) -> None:
    """Field case S11."""
    engine = make_engine(loaded)
    hot = SamplingParams(temperature=1.0)
    outputs = engine.generate(expand_choices(sampled_request("a", hot, seed=4, max_tokens=60), 3))
    assert [(output.id, output.choice) for output in outputs] == [("a/0", 0), ("a/1", 1), ("a/2", 2)]
    assert len({output.token_ids for output in outputs}) == 3
    for output in outputs:
        expected = decode_plainly(loaded, PROMPT, hot, seed=4, choice=output.choice, max_tokens=60)
        assert list(output.token_ids) == expected
        ended = expected[-1] in STOP_IDS
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    greedy = engine.generate(expand_choices(sampled_request("a", SamplingParams(), seed=4), 3))
    assert len({output.token_ids for output in greedy}) == 1


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_are_those_of_the_raw_logits(loaded: LoadedModel, window: int, num_logprobs: int) -> None:
    sampling = SamplingParams(temperature=0.8, presence_penalty=1.0, num_logprobs=num_logprobs)
    engine = make_engine(loaded)
    tape = run_checked(engine, [sampled_request("a", sampling, window=window), make_request("b", PROMPT, 9)])
    output = tape.outputs["a"]
    assert tape.outputs["b"].logprobs is None
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, *output.token_ids]])
        rows = loaded.model(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, one in zip(rows, output.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-9)
        best = row.topk(num_logprobs) if num_logprobs else None
        assert [token_id for token_id, _ in one.top] == (best.indices.tolist() if best else [])
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist() if best else [], abs=1e-9)


def test_steps_carry_the_logprobs_of_what_they_commit_and_no_more(loaded: LoadedModel) -> None:
    """A stop in the middle of a window: as many logprobs as tokens (field case D08)."""
    plain = decode_plainly(loaded, PROMPT, SamplingParams())
    engine = make_engine(loaded)
    sampling = SamplingParams(num_logprobs=2)
    for stop in plain[:9]:
        stop_token_ids = frozenset({stop})
        engine.add_request(make_request("a", PROMPT, 20, window=16, sampling=sampling, stop_token_ids=stop_token_ids))
        streamed = []
        while engine._sequences:
            for step in engine.step():
                assert step.logprobs is not None
                assert [one.token_id for one in step.logprobs] == list(step.new_token_ids)
                streamed += step.logprobs
                finished = step.finished
        assert finished is not None
        assert list(finished.logprobs or ()) == streamed
        assert len(streamed) == len(finished.token_ids) == plain.index(stop) + 1


def test_noise_is_drawn_for_sampled_rows_only(loaded: LoadedModel) -> None:
    with mock.patch.object(RowNoise, "block_minima", side_effect=AssertionError("no noise is needed")):
        make_engine(loaded).generate([sampled_request("a", SamplingParams(repetition_penalty=1.5), window=4)])
        with pytest.raises(AssertionError, match="no noise"):
            make_engine(loaded).generate([sampled_request("a", SamplingParams(temperature=1.0))])


def test_a_seeded_text_is_the_same_for_ever(loaded: LoadedModel) -> None:
    """The ids of one seed; a change of noise, order or precision shows here."""
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.95)
    (output,) = make_engine(loaded).generate([make_request("a", PROMPT, 8, seed=42, window=4, sampling=sampling)])
    assert output.token_ids == (157, 9, 32, 171, 96, 229, 179, 54)
