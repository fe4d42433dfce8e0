"""Streams: joined deltas are the answer, and closing one leaves nothing behind. The bounded queue."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from jacobi_llm.configs.errors import QueueFullError, UsageError
from jacobi_llm.infer.detokenizer import decode
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.measurement import measure
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import Request
from jacobi_llm.infer.rule import FinishReason
from jacobi_llm.infer.stream import Delta, stream
from tests.infer.decoding import Tape, checked_step, decode_ar, make_engine, make_request, random_prompt
from tests.tiny_models import tiny_loaded as build_loaded
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


def make_requests(num_requests: int, **params: int) -> list[Request]:
    draw = random.Random(4)
    return [
        make_request(str(n), random_prompt(draw, 3 + n), 12 + n, window=draw.choice([1, 4, 16]), **params)
        for n in range(num_requests)
    ]


def all_free(engine: LLMEngine) -> bool:
    engine.check_integrity()
    return engine.pool.num_free == engine.pool.num_pages and not engine._sequences


@pytest.mark.parametrize("max_num_waiting", [1, 2, 1024])
def test_joined_deltas_are_the_answers(loaded: LoadedModel, max_num_waiting: int) -> None:
    """Also when the queue has room for few of the requests: the rest is taken as it empties."""
    requests = make_requests(7)
    expected = {output.id: output for output in make_engine(loaded).generate(requests)}
    engine = make_engine(loaded, max_num_waiting=max_num_waiting, max_num_seqs=3)
    deltas: dict[str, list[Delta]] = defaultdict(list)
    for delta in stream(engine, iter(requests)):
        deltas[delta.request_id].append(delta)
    assert set(deltas) == set(expected)
    for id, parts in deltas.items():
        output = parts[-1].finished
        assert output is not None
        assert all(part.finished is None for part in parts[:-1])
        assert all(part.token_ids for part in parts)
        assert tuple(token for part in parts for token in part.token_ids) == output.token_ids == expected[id].token_ids
        assert "".join(part.text for part in parts) == output.text == decode(TOKENIZER, output.token_ids)
    assert all_free(engine)


def test_a_delta_is_there_before_the_next_pass(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    for delta, num_passes in zip(
        stream(engine, [make_request("a", (5, 6, 7), 9, window=1)]), range(1, 10), strict=True
    ):
        assert engine.runner.num_passes == num_passes
        assert len(delta.token_ids) == 1


def test_text_is_held_back_only_while_it_may_be_a_stop_string(loaded: LoadedModel) -> None:
    prompt = (157, 233, 40)
    answer = decode_ar(loaded.model, prompt, 30)
    text = decode(TOKENIZER, answer)
    start = next(n for n in range(4, len(text)) if "\ufffd" not in text[n : n + 3] and len(text[n : n + 3]) == 3)
    stop = text[start : start + 2] + "no"
    shown = ""
    for delta in stream(make_engine(loaded), [make_request("a", prompt, 30, window=1, stop=(stop,))]):
        shown += delta.text
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize("num_deltas", [0, 1, 5])
def test_a_closed_stream_frees_all(loaded: LoadedModel, num_deltas: int) -> None:
    """Requests in the queue, in the middle of their prompt, and decoding."""
    engine = make_engine(loaded, max_num_rows=4, max_num_seqs=2, page_size=4)
    deltas = stream(engine, make_requests(5))
    for _ in range(num_deltas):
        next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert all_free(engine)
    assert not engine.has_unfinished


def test_s01_abort_in_the_middle_of_a_prompt(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_rows=4, page_size=4)
    engine.add_request(make_request("a", (5,) * 40, 10))
    tape = Tape({}, {})
    for _ in range(3):
        assert checked_step(engine, tape) == 0
    assert engine.pool.num_free == engine.pool.num_pages - 10, "it was admitted with pages for its whole prompt"
    engine.abort("a")
    assert all_free(engine)


def test_a_refused_request_ends_the_stream_or_is_told(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    good, bad = make_requests(2), make_request("bad", (), 4)
    with pytest.raises(UsageError, match="request bad: the prompt has no tokens"):
        list(stream(engine, [good[0], bad, good[1]]))
    assert all_free(engine)
    refused: list[tuple[str, str]] = []
    deltas = stream(
        engine, [good[0], bad, good[1]], on_refused=lambda request, error: refused.append((request.id, str(error)))
    )
    assert {delta.request_id for delta in deltas} == {"0", "1"}
    assert refused == [("bad", "request bad: the prompt has no tokens")]


def test_an_error_of_the_source_leaves_nothing_behind(loaded: LoadedModel) -> None:
    def source() -> Iterator[Request]:
        yield from make_requests(2)
        raise OSError("torn file")

    engine = make_engine(loaded)
    with pytest.raises(OSError, match="torn file"):
        list(stream(engine, source()))
    assert all_free(engine)


def test_stream_wants_an_idle_engine(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    engine.add_request(make_request("other", (5, 6), 4))
    with pytest.raises(UsageError, match="stream wants an idle engine"):
        next(stream(engine, make_requests(1)))


# ---------------------------------------------------------------- the queue


def test_a_full_queue_refuses_and_keeps_its_order(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_waiting=2, max_num_seqs=1)
    requests = [make_request(str(n), (5 + n, 6), 6) for n in range(4)]
    engine.add_request(requests[0])
    engine.add_request(requests[1])
    with pytest.raises(QueueFullError, match=r"request 2: 2 requests wait already; .* engine\.max_num_waiting"):
        engine.add_request(requests[2])
    tape = Tape({}, {})
    checked_step(engine, tape)
    engine.add_request(requests[2])
    with pytest.raises(QueueFullError):
        engine.add_request(requests[3])
    engine.abort("1")
    engine.add_request(requests[3])
    while engine.has_unfinished:
        checked_step(engine, tape)
    assert list(tape.outputs) == ["0", "2", "3"]
    for request in (requests[0], requests[2], requests[3]):
        output = tape.outputs[request.id]
        assert list(output.token_ids) == decode_ar(loaded.model, request.prompt_ids, 6)
        assert output.finish_reason is FinishReason.LENGTH
    assert all_free(engine)


def test_lists_longer_than_the_queue_run_to_their_end(loaded: LoadedModel) -> None:
    requests = make_requests(9)
    engine = make_engine(loaded, max_num_waiting=2)
    expected = [output.token_ids for output in make_engine(loaded).generate(requests)]
    assert [output.token_ids for output in engine.generate(requests)] == expected
    assert [output.token_ids for output in measure(engine, requests).outputs] == expected
    assert [output.token_ids for output in measure(engine, requests, in_flight=20).outputs] == expected
    assert all_free(engine)
