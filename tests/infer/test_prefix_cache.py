"""Which pages are found, by whom, and what may never be found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.kv_pages import PageKey, PagePool
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prefix_cache import PrefixCache, root_digest
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.request import Sequence as RunningSequence
from jacobi_llm.infer.row_group import RowGroup
from tests.infer.decoding import decode_ar, make_engine, make_request, random_prompt, run_checked
from tests.tiny_models import tiny_loaded as build_loaded

PAGE = 4
PROMPT = random_prompt(random.Random(7), 13)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


def rows_for(engine: LLMEngine, prompt: Sequence[int], max_tokens: int = 1, **params: Any) -> int:
    """Rows that the engine computes for one request alone."""
    before = engine.runner.num_rows
    run_checked(engine, [make_request("a", prompt, max_tokens, window=1, **params)])
    return engine.runner.num_rows - before


def computed(tokens: Sequence[int], adapter: str | None = None) -> RunningSequence:
    """A sequence all of whose tokens but the last have proven K/V."""
    sequence = RunningSequence(Request("a", tuple(tokens), DecodeParams(1), adapter), arrived_s=0.0)
    sequence.num_computed = sequence.num_proven = len(tokens) - 1
    return sequence


# ---------------------------------------------------------------- keys


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_longest_common_run_of_pages_is_found(first: list[int], second: list[int]) -> None:
    """As a comparison of the tokens themselves would say; one token always stays to be computed."""
    pool = PagePool(20, 2)
    prefixes = PrefixCache(pool, b"salt")
    owner, other = computed(first), computed(second)
    other.num_computed = other.num_proven = 0
    assert pool.grow(owner.block_table, len(first))
    prefixes.offer(owner)
    prefixes.find(other)
    expected = 0
    while (expected + 1) * 2 <= min(len(first), len(second)) - 1 and (
        first[: (expected + 1) * 2] == second[: (expected + 1) * 2]
    ):
        expected += 1
    assert other.block_table == owner.block_table[:expected]
    assert other.num_computed == other.num_proven == expected * 2
    pool.check_integrity([owner.block_table, other.block_table])


def test_salt_and_adapter_keep_pages_apart() -> None:
    pool = PagePool(8, 2)
    owner = computed((5, 6, 7), "lora")
    assert pool.grow(owner.block_table, 3)
    PrefixCache(pool, b"float32").offer(owner)
    for salt, adapter, num_found in [
        (b"float32", "lora", 1),
        (b"float32", None, 0),
        (b"float32", "None", 0),
        (b"bfloat16", "lora", 0),
    ]:
        other = computed((5, 6, 7), adapter)
        PrefixCache(pool, salt).find(other)
        assert len(other.block_table) == num_found
    assert root_digest(b"a", "b") != root_digest(b"ab", "") != root_digest(b"ab", None)


def test_engines_of_different_precision_have_different_salts(loaded: LoadedModel) -> None:
    engines = [make_engine(build_loaded("llama", dtype)) for dtype in (torch.float32, torch.float64)]
    salts = {engine.prefixes.salt for engine in engines if engine.prefixes}
    assert len(salts) == 2


# ---------------------------------------------------------------- what a request computes


def test_a_known_prompt_costs_its_last_page_only(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, page_size=PAGE)
    assert rows_for(engine, PROMPT) == 13
    assert rows_for(engine, PROMPT) == 13 - 12
    assert rows_for(engine, PROMPT[:12]) == 12 - 8
    assert rows_for(engine, (*PROMPT[:8], 3, 3)) == 10 - 8
    assert rows_for(engine, (PROMPT[0] + 1, *PROMPT[1:])) == 13
    assert rows_for(engine, PROMPT[:4]) == 4


def test_own_output_is_found_up_to_the_last_token(loaded: LoadedModel) -> None:
    """The last token of an answer has no K/V; a page that ends with it is not whole."""
    engine = make_engine(loaded, page_size=PAGE)
    answer = decode_ar(loaded.model, PROMPT, 7)
    rows_for(engine, PROMPT, 7)
    assert rows_for(engine, (*PROMPT, *answer, 9)) == 21 - 16
    engine.reset_prefix_cache()
    rows_for(engine, PROMPT, 8)
    assert rows_for(engine, (*PROMPT, *answer, 9, 9)) == 22 - 20


@pytest.mark.parametrize("window", [1, 8])
def test_answers_are_the_same_with_pages_found(loaded: LoadedModel, window: int) -> None:
    expected = decode_ar(loaded.model, PROMPT, 20)
    engine = make_engine(loaded, page_size=PAGE)
    for turn in range(3):
        text = (*PROMPT, *expected[: turn * 5])
        tape = run_checked(engine, [make_request(str(n), text, 20 - turn * 5, window=window) for n in range(3)])
        for output in tape.outputs.values():
            assert list(output.token_ids) == expected[turn * 5 :]
    assert engine.scheduler.num_hit_tokens == 3 * (16 + 20)


def test_a_preempted_request_finds_its_own_pages_again(loaded: LoadedModel) -> None:
    draw = random.Random(2)
    first, second = (random_prompt(draw, 8) for _ in range(2))
    engine = make_engine(loaded, num_pages=9, page_size=PAGE)
    requests = [make_request("first", first, 13, window=1), make_request("second", second, 20, window=1)]
    tape = run_checked(engine, requests)
    for request in requests:
        expected = decode_ar(loaded.model, request.prompt_ids, request.params.max_tokens)
        assert list(tape.outputs[request.id].token_ids) == expected
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.num_hit_tokens > 0


def test_pages_that_are_needed_are_given_up_the_longest_unused_first(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_pages=8, page_size=PAGE)
    draw = random.Random(4)
    first, second, third = (random_prompt(draw, 13) for _ in range(3))
    rows_for(engine, first)
    rows_for(engine, second)
    assert rows_for(engine, first) == 1
    rows_for(engine, third)
    assert rows_for(engine, first) == 1, "the last one used was given up"
    assert rows_for(engine, second) > 1
    assert engine.pool.num_free == 8


def test_kept_pages_stay_right_while_others_read_them(loaded: LoadedModel) -> None:
    """A branch reads a finished request's pages; meanwhile another request starts from them and goes another way."""
    engine = make_engine(loaded, page_size=PAGE)
    run_checked(engine, [make_request("kept", PROMPT, 8, window=8, keep_pages=True)])
    text = [*PROMPT, *decode_ar(loaded.model, PROMPT, 8)]
    run_checked(engine, [make_request("other", (*text[:16], 3, 4), 6, window=8)])
    group = RowGroup(engine.pages_of("kept"), len(text) - 1, [40, 41, 42], writes_pages=False, num_logit_rows=3)
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([[*text[:-1], 40, 41, 42]]), use_cache=False).logits[0, -3:]
    torch.testing.assert_close(engine.runner.forward([group]), expected, rtol=1e-9, atol=1e-9)
    engine.release("kept")
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages


def test_after_a_reset_nothing_is_found(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, page_size=PAGE)
    run_checked(engine, [make_request("kept", PROMPT, 8, keep_pages=True)])
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert rows_for(engine, PROMPT) == 13
    engine.release("kept")
    engine.check_integrity()


# ---------------------------------------------------------------- not finite

BAD = 200


@pytest.fixture
def poisoned() -> LoadedModel:
    """Whatever reads token 200 gives NaN."""
    loaded = build_loaded("llama")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[BAD] = float("nan")  # type: ignore[index]
    return loaded


def has_nan(engine: LLMEngine) -> bool:
    cache = engine.runner.backend
    return any(bool(kept.isnan().any()) for part in (cache.keys, cache.values) for kept in part.values())


@pytest.mark.parametrize("window", [1, 4])
def test_pages_with_nan_are_neither_found_nor_left_behind(poisoned: LoadedModel, window: int) -> None:
    good = tuple(token for token in PROMPT if token != BAD)
    engine = make_engine(poisoned, num_pages=8, page_size=PAGE)
    assert rows_for(engine, good) == 13
    run_checked(engine, [make_request("bad", (*good[:8], BAD, *good[9:]), 6, window=window)])
    assert not has_nan(engine)
    # Pages from before the bad token are good, the others are not there.
    before = engine.runner.num_rows
    engine.add_request(make_request("bad", (*good[:8], BAD, *good[9:]), 1))
    engine.step()
    assert engine.runner.num_rows - before == 13 - 8
    expected = decode_ar(poisoned.model, good, 12)
    assert BAD not in expected
    tape = run_checked(engine, [make_request(str(n), good, 12, window=window) for n in range(2)])
    assert all(list(output.token_ids) == expected for output in tape.outputs.values())


def test_an_abort_amid_a_prompt_leaves_no_nan(poisoned: LoadedModel) -> None:
    """No logits have told yet that there is one."""
    engine = make_engine(poisoned, num_pages=8, page_size=PAGE, max_num_rows=6)
    engine.add_request(make_request("bad", (*PROMPT[:3], BAD, *PROMPT[4:]), 6))
    assert engine.step() == []
    assert has_nan(engine)
    engine.abort("bad")
    assert not has_nan(engine)
    engine.check_integrity()
    assert rows_for(engine, PROMPT) == 13


def test_a_request_with_nan_does_not_touch_the_others_of_its_pass(poisoned: LoadedModel) -> None:
    draw = random.Random(9)
    prompts = [random_prompt(draw, n) for n in (6, 9, 5)]
    assert all(BAD not in prompt for prompt in prompts)
    engine = make_engine(poisoned, num_pages=14, page_size=PAGE)
    requests = [make_request(str(n), prompt, 10, window=4) for n, prompt in enumerate(prompts)]
    tape = run_checked(engine, [*requests, make_request("bad", (4, BAD, 5), 10, window=4)])
    for request in requests:
        assert list(tape.outputs[request.id].token_ids) == decode_ar(poisoned.model, request.prompt_ids, 10)
    assert not has_nan(engine)


def test_keys_are_compared_by_all_tokens_before(loaded: LoadedModel) -> None:
    first = PageKey.of(b"\0" * 16, (1, 2))
    assert PageKey.of(first.digest, (1, 2)).digest != first.digest
    assert len(first.digest) == 16
