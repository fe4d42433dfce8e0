"""The engine against plain one-token decoding: batches, windows, budgets, stops, memory pressure, aborts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer import fill as fill_module
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.rule import FinishReason
from tests.infer.decoding import (
    Tape,
    checked_step,
    cut,
    decode_ar,
    generate,
    make_engine,
    make_request,
    random_prompt,
    run_checked,
)
from tests.tiny_models import MAX_CONTEXT, VOCAB_SIZE, one_product_rows
from tests.tiny_models import tiny_loaded as build_loaded

ANSWER_LEN = 50
WINDOWS = (1, 2, 4, 8, 16, 32)
# A prompt of the tiny llama, and its answer of 30 tokens, of which the first 20 differ: an EOS among them is met once.
DISTINCT = (
    (157, 233, 40),
    [
        *(133, 95, 72, 173, 250, 186, 177, 159, 198, 139, 33, 54, 255, 19, 4, 137, 8, 96, 10, 2),
        *(136, 136, 28, 32, 166, 48, 19, 171, 37, 87),
    ],
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(5)
    return [random_prompt(draw, n) for n in (1, 2, 3, 5, 8, 15, 16, 17, 31, 40)] + [(60,) * 48]


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """The endless greedy answer of every prompt; transformers' generate says the same."""
    found = {prompt: decode_ar(loaded.model, prompt, ANSWER_LEN) for prompt in prompts}
    for prompt, answer in found.items():
        assert generate(loaded.model, prompt, ANSWER_LEN) == answer
        assert len(set(answer)) > 8, "a reference that repeats itself proves little"
    return found


def all_free(engine: LLMEngine) -> bool:
    return engine.pool.num_free == engine.pool.num_pages and not engine._sequences


# ---------------------------------------------------------------- windows, modes, fills


@pytest.mark.parametrize(
    ("mode", "fill"),
    [(DecodeMode.SLIDING, FillPolicy.REPEAT_LAST), (DecodeMode.BLOCK, FillPolicy.PROMPT_DRAW)],
)
@pytest.mark.parametrize("window", WINDOWS)
def test_alone_equals_ar(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], window: int, fill: FillPolicy, mode: DecodeMode
) -> None:
    engine = make_engine(loaded)
    for prompt, answer in answers.items():
        tape = run_checked(engine, [make_request("a", prompt, ANSWER_LEN, window=window, fill=fill, mode=mode)])
        assert list(tape.outputs["a"].token_ids) == answer
    assert all_free(engine)


def test_outputs_come_in_the_order_of_the_requests(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]
) -> None:
    lengths = range(len(answers), 0, -1)
    requests = [make_request(str(n), prompt, n, window=4) for n, prompt in zip(lengths, answers, strict=True)]
    outputs = make_engine(loaded).generate(requests)
    assert [output.id for output in outputs] == [request.id for request in requests]
    for output, answer, n in zip(outputs, answers.values(), lengths, strict=True):
        assert list(output.token_ids) == answer[:n]


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_any_mix_equals_ar(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], data: st.DataObject, seed: int
) -> None:
    """Requests of every kind join and are aborted at random steps, under any limits; each ends as if it were alone."""
    draw = random.Random(seed)
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    requests, expected = [], {}
    for number in range(data.draw(st.integers(1, 7))):
        prompt, answer = draw.choice(list(answers.items()))
        max_tokens = draw.randint(1, ANSWER_LEN)
        stops = frozenset(draw.sample(answer, draw.choice([0, 0, 1, 2])))
        requests.append(
            make_request(
                str(number),
                prompt,
                max_tokens,
                window=draw.choice([*WINDOWS, 3, 5, 17]),
                mode=draw.choice(list(DecodeMode)),
                fill=draw.choice(list(FillPolicy)),
                stop_token_ids=stops,
                seed=draw.randrange(100),
            )
        )
        expected[str(number)] = cut(answer, max_tokens, stops)
    least = max(-(-(len(r.prompt_ids) + r.params.max_tokens) // page_size) for r in requests)
    engine = make_engine(
        loaded,
        num_pages=least + data.draw(st.sampled_from([0, 1, 4, 400])),
        page_size=page_size,
        max_num_rows=data.draw(st.sampled_from([1, 2, 5, 9, 33, 2048])),
        max_num_seqs=data.draw(st.sampled_from([1, 2, 64])),
    )
    aborted = {r.id: draw.randint(0, 40) for r in requests if draw.random() < 0.2}

    def abort(step: int) -> None:
        for id, when in aborted.items():
            if when == step:
                engine.abort(id)
                engine.check_integrity()

    tape = run_checked(engine, requests, join_at=[draw.randint(0, 20) for _ in requests], before_step=abort)
    assert set(expected) - set(tape.outputs) <= set(aborted)
    for id, output in tape.outputs.items():
        assert (list(output.token_ids), output.finish_reason) == expected[id]
        assert output.forward_passes <= len(output.token_ids)
    for id, tokens in tape.streamed.items():
        assert tokens == expected[id][0][: len(tokens)]
    assert all_free(engine)


def test_d01_one_word_repeated(loaded: LoadedModel) -> None:
    prompt = (77,) * 48
    expected = decode_ar(loaded.model, prompt, 32)
    for window in (1, 2, 4, 8, 16, 32, 64):
        [output] = make_engine(loaded).generate([make_request("a", prompt, 32, window=window)])
        assert list(output.token_ids) == expected


def test_d13_rows_that_accept_different_counts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request guesses everything right, one nothing, one ends early: each equals its solo run."""
    draw = random.Random(2)
    requests = [
        make_request(str(i), random_prompt(draw, n), tokens, window=8, seed=i)
        for i, (n, tokens) in enumerate([(7, 40), (21, 40), (2, 5)])
    ]
    expected = [decode_ar(loaded.model, r.prompt_ids, r.params.max_tokens) for r in requests]
    monkeypatch.setattr(fill_module, "fill_guesses", oracle_fill(dict(enumerate(expected)), {0: 0.0, 1: 1.0, 2: 0.5}))
    tape = run_checked(make_engine(loaded), requests)
    assert [list(tape.outputs[str(i)].token_ids) for i in range(3)] == expected
    assert tape.outputs["0"].forward_passes == 5
    assert tape.outputs["1"].forward_passes > 20


# ---------------------------------------------------------------- fills that always, sometimes, never agree


def oracle_fill(answers: dict[int, list[int]], error_rate: dict[int, float]) -> Callable[..., list[int]]:
    """Guesses replay the answer of the request whose seed is ``key[0]``, each token wrong with its error rate."""
    draw = random.Random(9)

    def fill(policy: FillPolicy, *, num_guesses: int, key: tuple[int, int, int], **_: Any) -> list[int]:
        answer = answers[key[0]]
        return [
            (answer[t] + (draw.random() < error_rate[key[0]])) % VOCAB_SIZE for t in range(key[2], key[2] + num_guesses)
        ]

    return fill


@pytest.mark.parametrize("mode", DecodeMode)
@pytest.mark.parametrize("window", WINDOWS)
def test_right_guesses_give_a_window_per_pass(
    loaded: LoadedModel, prompts: list[tuple[int, ...]], window: int, mode: DecodeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = decode_ar(loaded.model, prompts[7], 64)
    monkeypatch.setattr(fill_module, "fill_guesses", oracle_fill({3: answer}, {3: 0.0}))
    tape = run_checked(make_engine(loaded), [make_request("a", prompts[7], 64, window=window, mode=mode, seed=3)])
    output = tape.outputs["a"]
    assert list(output.token_ids) == answer
    assert output.commit_lengths == (window,) * (64 // window)
    assert output.tokens_per_forward == window


@pytest.mark.parametrize("error_rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("mode", DecodeMode)
@pytest.mark.parametrize("window", [2, 5, 16])
def test_wrong_guesses_change_the_speed_only(
    loaded: LoadedModel,
    prompts: list[tuple[int, ...]],
    window: int,
    mode: DecodeMode,
    error_rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [decode_ar(loaded.model, prompt, 40) for prompt in prompts[:6]]
    fill = oracle_fill(dict(enumerate(expected)), dict.fromkeys(range(6), error_rate))
    monkeypatch.setattr(fill_module, "fill_guesses", fill)
    requests = [make_request(str(i), p, 40, window=window, mode=mode, seed=i) for i, p in enumerate(prompts[:6])]
    tape = run_checked(make_engine(loaded), requests)
    for i, answer in enumerate(expected):
        output = tape.outputs[str(i)]
        assert list(output.token_ids) == answer
        assert 40 // window <= output.forward_passes <= 40
        assert max(output.commit_lengths) <= window


# ---------------------------------------------------------------- budgets and stops


@pytest.mark.parametrize("k", range(1, 17))
def test_d05_eos_at_every_place(loaded: LoadedModel, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 15 guesses are right, so the EOS is accepted in mid-window; nothing behind it is left anywhere."""
    prompt, answer = DISTINCT
    assert decode_ar(loaded.model, prompt, 30) == answer
    monkeypatch.setattr(fill_module, "fill_guesses", oracle_fill({0: answer}, {0: 0.0}))
    for stops in ({answer[k - 1]}, {answer[k - 1], answer[18]}, {answer[k - 1], 1}):
        engine = make_engine(loaded)
        request = make_request("a", prompt, 30, window=16, stop_token_ids=frozenset(stops), keep_pages=True)
        tape = run_checked(engine, [request])
        output = tape.outputs["a"]
        assert list(output.token_ids) == answer[:k] == tape.streamed["a"]
        assert (output.finish_reason, output.commit_lengths) == (FinishReason.STOP, (k,))
        assert engine._sequences["a"].num_computed == len(prompt) + k - 1
        engine.release("a")
        assert all_free(engine)
    ignoring = run_checked(make_engine(loaded), [make_request("a", prompt, 30, window=16)]).outputs["a"]
    assert (list(ignoring.token_ids), ignoring.finish_reason) == (answer[:30], FinishReason.LENGTH)


@pytest.mark.parametrize("window", [1, 2, 8, 16])
@pytest.mark.parametrize("error_rate", [0.0, 1.0])
def test_d06_budgets_are_met_exactly(
    loaded: LoadedModel,
    prompts: list[tuple[int, ...]],
    answers: dict[tuple[int, ...], list[int]],
    window: int,
    error_rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, answer = prompts[4], answers[prompts[4]]
    monkeypatch.setattr(fill_module, "fill_guesses", oracle_fill({0: answer}, {0: error_rate}))
    engine = make_engine(loaded)
    for mode in DecodeMode:
        for max_tokens in sorted({1, 2, max(window - 1, 1), window, window + 1, 17, 2 * window}):
            for stop_at in (None, max_tokens - 1, max_tokens, max_tokens + 1):
                stops = frozenset() if stop_at is None else frozenset({answer[max(stop_at - 1, 0)]})
                request = make_request("a", prompt, max_tokens, window=window, mode=mode, stop_token_ids=stops)
                output = run_checked(engine, [request]).outputs["a"]
                assert (list(output.token_ids), output.finish_reason) == cut(answer, max_tokens, stops)


def test_stop_token_of_the_prompt_does_not_stop(
    loaded: LoadedModel, prompts: list[tuple[int, ...]], answers: dict[tuple[int, ...], list[int]]
) -> None:
    prompt = prompts[5]
    stops = frozenset(prompt) - set(answers[prompt])
    assert stops
    [output] = make_engine(loaded).generate([make_request("a", prompt, 20, window=8, stop_token_ids=stops)])
    assert list(output.token_ids) == answers[prompt][:20]


# ---------------------------------------------------------------- what a pass is


@pytest.mark.parametrize("max_num_rows", [1, 3, 7, 2048])
def test_ar_is_one_token_per_pass_however_prefill_is_chunked(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], max_num_rows: int
) -> None:
    engine = make_engine(loaded, max_num_rows=max_num_rows)
    for prompt, answer in answers.items():
        before = engine.runner.num_passes
        output = run_checked(engine, [make_request("a", prompt, 20, window=1)]).outputs["a"]
        assert list(output.token_ids) == answer[:20]
        assert output.forward_passes == 20
        assert output.tokens_per_forward == 1.0
        assert engine.runner.num_passes - before == -(-len(prompt) // max_num_rows) + 19


def test_a_window_never_outgrows_the_pass(loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]) -> None:
    engine = make_engine(loaded, max_num_rows=5)
    for prompt, answer in answers.items():
        output = run_checked(engine, [make_request("a", prompt, 20, window=32)]).outputs["a"]
        assert list(output.token_ids) == answer[:20]


@pytest.mark.parametrize("window", [4, 16])
def test_block_mode_fills_block_after_block(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], window: int
) -> None:
    """No commit crosses a block's end, and no block takes more passes than it has tokens."""
    for prompt, answer in answers.items():
        request = make_request("a", prompt, 48, window=window, mode=DecodeMode.BLOCK)
        output = run_checked(make_engine(loaded), [request]).outputs["a"]
        assert list(output.token_ids) == answer[:48]
        ends = {sum(output.commit_lengths[: i + 1]) for i in range(len(output.commit_lengths))}
        assert set(range(window, 49, window)) <= ends


# ---------------------------------------------------------------- pages


def test_d17_preempted_requests_give_the_same_text(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]
) -> None:
    engine = make_engine(loaded, num_pages=30, page_size=4)
    requests, expected = [], {}
    for number, (prompt, answer) in enumerate(list(answers.items()) * 2):
        requests.append(make_request(str(number), prompt, 40, window=WINDOWS[number % len(WINDOWS)]))
        expected[str(number)] = answer[:40]
    tape = run_checked(engine, requests)
    assert {id: list(output.token_ids) for id, output in tape.outputs.items()} == expected
    assert engine.scheduler.num_preemptions > 5
    assert all_free(engine)


def test_d17_impossible_request_is_refused_with_numbers(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_pages=2, page_size=4)
    with pytest.raises(
        UsageError, match=r"request big: 6 prompt \+ 40 completion tokens need \d+ K/V pages, the pool has 2"
    ):
        engine.add_request(make_request("big", range(3, 9), 40))
    assert all_free(engine)
    requests = [make_request(str(i), (10 + i, 20), 6, window=4) for i in range(5)]
    tape = run_checked(engine, requests)
    for request in requests:
        assert list(tape.outputs[request.id].token_ids) == decode_ar(loaded.model, request.prompt_ids, 6)
    assert all_free(engine)


@pytest.mark.parametrize("window", [1, 4, 32])
@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(1, 8), (8, 1), (4, 5)])
def test_a_request_that_just_fits_is_taken(loaded: LoadedModel, prompt_len: int, max_tokens: int, window: int) -> None:
    """The last token never gets K/V, so 8 slots are enough for prompt + completion = 9."""
    prompt = random_prompt(random.Random(3), prompt_len)
    engine = make_engine(loaded, num_pages=2, page_size=4)
    output = run_checked(engine, [make_request("a", prompt, max_tokens, window=window)]).outputs["a"]
    assert list(output.token_ids) == decode_ar(loaded.model, prompt, max_tokens)
    with pytest.raises(UsageError, match="need 3 K/V pages, the pool has 2"):
        engine.add_request(make_request("b", prompt, max_tokens + 1, window=window))


def test_first_come_first_served_under_pressure(loaded: LoadedModel) -> None:
    """With equal work the earlier request never ends after a later one."""
    engine = make_engine(loaded, num_pages=9, page_size=4)
    draw = random.Random(8)
    requests = [make_request(str(i), random_prompt(draw, 6), 24, window=1) for i in range(6)]
    tape = run_checked(engine, requests)
    assert list(tape.outputs) == [request.id for request in requests]
    assert engine.scheduler.num_preemptions > 0


def test_kept_pages_hold_the_kv_of_the_answer(
    loaded: LoadedModel, prompts: list[tuple[int, ...]], answers: dict[tuple[int, ...], list[int]]
) -> None:
    """A branch that starts from any position of a finished request reads what a fresh run would have written."""
    prompt, answer = prompts[7], answers[prompts[7]][:20]
    engine = make_engine(loaded, page_size=4)
    run_checked(engine, [make_request("a", prompt, 20, window=8, keep_pages=True)])
    assert engine.pool.num_free < engine.pool.num_pages
    with pytest.raises(UsageError, match="request a: this id is in use"):
        engine.add_request(make_request("a", prompt, 5))
    table = engine.pages_of("a")
    text = [*prompt, *answer]
    for start in (1, len(prompt), len(prompt) + 3, len(text) - 1):
        group = RowGroup(table, start, [40, 41, 42], writes_pages=False, num_logit_rows=3)
        with torch.inference_mode():
            expected = loaded.model(torch.tensor([[*text[:start], 40, 41, 42]]), use_cache=False).logits[0, -3:]
        torch.testing.assert_close(engine.runner.forward([group]), expected, rtol=1e-5, atol=1e-5)
    engine.check_integrity()
    engine.release("a")
    assert all_free(engine)
    engine.check_integrity()


def test_kept_pages_that_block_everything_are_named(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_pages=4, page_size=4)
    run_checked(engine, [make_request("kept", (5,) * 8, 4, window=2, keep_pages=True)])
    engine.add_request(make_request("next", (6,) * 8, 4, window=2))
    with pytest.raises(RunError, match="finished ones keep all K/V pages"):
        engine.step()
    engine.check_integrity()
    engine.release("kept")
    tape = Tape({}, {})
    while not tape.outputs:
        checked_step(engine, tape)
    assert list(tape.outputs["next"].token_ids) == decode_ar(loaded.model, (6,) * 8, 4)
    assert all_free(engine)


def test_abort_in_every_state(loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]) -> None:
    engine = make_engine(loaded, num_pages=20, page_size=4, max_num_rows=8, max_num_seqs=2)
    prompt, answer = max(answers.items(), key=lambda pair: len(pair[0]))
    for id in ("prefilling", "waiting", "also waiting"):
        engine.add_request(make_request(id, prompt, 10, window=4))
    engine.abort("also waiting")
    tape = Tape({}, {})
    checked_step(engine, tape)
    engine.abort("prefilling")
    engine.check_integrity()
    engine.abort("prefilling")
    engine.abort("never seen")
    while not tape.outputs:
        checked_step(engine, tape)
    assert list(tape.outputs["waiting"].token_ids) == answer[:10]
    assert all_free(engine)
    run_checked(engine, [make_request("kept", prompt, 3, keep_pages=True)])
    engine.abort("kept")
    assert all_free(engine)
    assert engine.step() == []


def test_id_can_be_used_again(loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]) -> None:
    engine = make_engine(loaded)
    prompt, answer = next(iter(answers.items()))
    engine.add_request(make_request("a", prompt, 5))
    with pytest.raises(UsageError, match="this id is in use"):
        engine.add_request(make_request("a", prompt, 5))
    engine.abort("a")
    [output] = engine.generate([make_request("a", prompt, 5)])
    assert list(output.token_ids) == answer[:5]


# ---------------------------------------------------------------- limits and refusals


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("window", [1, 7, 32])
def test_context_limit(family: str, window: int) -> None:
    """The window shrinks at the end: a row past the context would crash a model with learned positions."""
    overrides = {"n_positions": 40} if family == "gpt2" else {"max_position_embeddings": 40}
    loaded = build_loaded(family, **overrides)
    assert loaded.max_context == 40
    prompt = random_prompt(random.Random(1), 21)
    expected = decode_ar(loaded.model, prompt, 19)
    for mode in DecodeMode:
        request = make_request("a", prompt, 1000, window=window, mode=mode)
        output = run_checked(make_engine(loaded), [request]).outputs["a"]
        assert (list(output.token_ids), output.finish_reason) == (expected, FinishReason.LENGTH)


def test_bad_requests_are_refused_and_leave_the_engine_well(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]
) -> None:
    engine = make_engine(loaded)
    params = DecodeParams(5)
    for request, message in [
        (Request("a", (), params), "request a: the prompt has no tokens"),
        (Request("a", (5,) * MAX_CONTEXT, params), "256 prompt tokens leave no room in the context of 256"),
        (Request("a", (5, VOCAB_SIZE), params), f"token id {VOCAB_SIZE} .* vocabulary of {VOCAB_SIZE}"),
        (Request("a", (5, -1), params), f"token id -1 .* vocabulary of {VOCAB_SIZE}"),
        (Request("a", (5,), params, adapter="lora"), "no adapter 'lora'; none is loaded"),
    ]:
        with pytest.raises(UsageError, match=message):
            engine.add_request(request)
    assert all_free(engine)
    prompt, answer = next(iter(answers.items()))
    [output] = engine.generate([make_request("a", prompt, 5)])
    assert list(output.token_ids) == answer[:5]


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 5, "window": 0}])
def test_bad_params_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        DecodeParams(**bad)


def test_generate_wants_an_idle_engine(loaded: LoadedModel) -> None:
    """It could not hand out the outputs of requests that others added."""
    engine = make_engine(loaded)
    engine.add_request(make_request("other", (5, 6), 4))
    with pytest.raises(UsageError, match="generate wants an idle engine"):
        engine.generate([make_request("a", (7, 8), 4)])
    tape = Tape({}, {})
    while not tape.outputs:
        checked_step(engine, tape)
    assert list(tape.outputs["other"].token_ids) == decode_ar(loaded.model, (5, 6), 4)
    assert all_free(engine)


def test_generate_refuses_all_when_one_is_bad(loaded: LoadedModel) -> None:
    """A bad request in the middle of a list leaves nothing of the list behind in the engine."""
    engine = make_engine(loaded)
    with pytest.raises(UsageError, match="request b: the prompt has no tokens"):
        engine.generate([make_request("a", (5, 6), 4), make_request("b", (), 4)])
    assert all_free(engine)
    assert not engine.scheduler.waiting


def test_a_fault_of_the_model_can_be_survived(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that raises commits nothing: the next step repeats it."""
    engine = make_engine(loaded, num_pages=40, page_size=4)
    forward = engine.runner.forward
    num_calls = 0

    def sometimes_failing(groups: Sequence[RowGroup]) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        logits = forward(groups)
        if num_calls % 3 == 0:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(engine.runner, "forward", sometimes_failing)
    requests = [make_request(str(i), prompt, 20, window=4) for i, prompt in enumerate(answers)]
    for request in requests:
        engine.add_request(request)
    tape = Tape({}, {})
    while len(tape.outputs) < len(requests):
        try:
            checked_step(engine, tape)
        except RuntimeError:
            engine.check_integrity()
    for request in requests:
        assert list(tape.outputs[request.id].token_ids) == answers[request.prompt_ids][:20]
    assert all_free(engine)


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_d02_d04_exact_ties_go_to_the_lowest_id(tiny_model: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    """The rows of the head are equal in pairs, so every choice is an exact tie."""
    loaded = build_loaded("llama", dtype)
    weight = loaded.model.get_output_embeddings().weight.data
    weight.copy_(one_product_rows(weight))
    weight[129:258] = weight[:129]
    prompt = random_prompt(random.Random(4), 9)
    outputs = []
    for window in WINDOWS:
        engine = make_engine(loaded)
        [output] = engine.generate([make_request("a", prompt, 40, window=window)])
        assert all(token < 129 or token == 258 for token in output.token_ids)
        outputs.append(output.token_ids)
    if dtype is not torch.bfloat16:
        assert len(set(outputs)) == 1
        assert list(outputs[0]) == decode_ar(loaded.model, prompt, 40)
