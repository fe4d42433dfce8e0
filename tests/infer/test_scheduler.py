"""Who gets rows and pages: order, fairness, preemption."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import RequestOutput
from jacobi_llm.infer.scheduler import ScheduledRows
from tests.infer.decoding import decode_ar, make_engine, make_request, random_prompt, run_checked
from tests.tiny_models import tiny_loaded as build_loaded


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return random_prompt(random.Random(f"{seed} {num_tokens}"), num_tokens)


def watch(engine: LLMEngine) -> list[dict[str, tuple[int, int]]]:
    """For every pass to come: request id -> (rows of committed tokens, guesses)."""
    passes: list[dict[str, tuple[int, int]]] = []
    schedule = engine.scheduler.schedule

    def watched() -> list[ScheduledRows]:
        parts = schedule()
        passes.append({p.sequence.request.id: (p.group.num_rows - len(p.guesses), len(p.guesses)) for p in parts})
        return parts

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    return passes


def decoding_engine(loaded: LoadedModel, requests: Sequence[Any], **config: Any) -> LLMEngine:
    """An engine in which ``requests`` are past their prompts."""
    engine = make_engine(loaded, **config)
    for request in requests:
        engine.add_request(request)
    while any(sequence.num_pending > 1 for sequence in engine._sequences.values()):
        engine.step()
    return engine


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Run what is in the engine to its end; outputs in the order in which they ended."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(500):
        if not engine._sequences:
            return outputs
        outputs.update({out.request_id: out.finished for out in engine.step() if out.finished})
        engine.check_integrity()
    raise AssertionError("no end")


def test_a_long_prompt_does_not_starve_those_that_decode(loaded: LoadedModel) -> None:
    """They keep a full window in every pass of its prefill, and it goes on by ``max_prefill_rows`` in each."""
    short = [make_request(str(n), prompt(3, n), 60, window=4) for n in range(3)]
    engine = decoding_engine(loaded, short, max_num_rows=40, max_prefill_rows=16)
    passes = watch(engine)
    engine.add_request(make_request("long", prompt(100), 4, window=4))
    while engine._sequences["long"].num_pending > 1:
        engine.step()
    assert [one["long"][0] for one in passes] == [16] * 6 + [4]
    assert all(one[request.id] == (1, 3) for one in passes for request in short)
    engine.check_integrity()


def test_prompts_share_the_rows_in_order_of_arrival(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_rows=40, max_prefill_rows=10)
    passes = watch(engine)
    for n, length in enumerate((6, 12, 7)):
        engine.add_request(make_request(str(n), prompt(length, n), 20, window=3))
    for _ in range(3):
        engine.step()
    assert passes == [
        {"0": (6, 2), "1": (4, 0)},
        {"0": (1, 2), "1": (8, 2), "2": (2, 0)},
        {"0": (1, 2), "1": (1, 2), "2": (5, 2)},
    ]


def test_every_request_that_decodes_has_a_row_before_any_has_a_guess(loaded: LoadedModel) -> None:
    requests = [make_request(str(n), prompt(2, n), 20, window=8) for n in range(4)]
    engine = decoding_engine(loaded, requests)
    engine.scheduler.max_num_rows = 6
    passes = watch(engine)
    engine.step()
    assert passes == [{"0": (1, 2), "1": (1, 0), "2": (1, 0), "3": (1, 0)}]


def test_windows_that_fill_the_pass_hold_a_prompt_up_and_no_longer(loaded: LoadedModel) -> None:
    requests = [make_request(str(n), prompt(2, n), 20, window=8) for n in range(2)]
    engine = decoding_engine(loaded, requests, max_num_rows=16)
    engine.add_request(make_request("late", prompt(30), 5, window=8))
    passes = watch(engine)
    outputs = finish(engine)
    assert list(outputs["late"].token_ids) == decode_ar(loaded.model, prompt(30), 5)
    assert list(passes[0]) == ["0", "1"]
    assert list(outputs)[-1] == "late"


def test_no_more_requests_run_than_a_pass_has_rows(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_rows=3)
    tape = run_checked(engine, [make_request(str(n), prompt(3, n), 6, window=4) for n in range(7)])
    assert len(tape.outputs) == 7
    assert engine.scheduler.max_num_seqs == 3


def test_nobody_is_preempted_for_guesses(loaded: LoadedModel) -> None:
    """4 pages of 4: two requests fill them exactly, whatever their windows would like to have."""
    requests = [make_request(str(n), prompt(3, n), 6, window=8) for n in range(2)]
    engine = make_engine(loaded, num_pages=4, page_size=4)
    tape = run_checked(engine, requests)
    for request in requests:
        assert list(tape.outputs[request.id].token_ids) == decode_ar(loaded.model, request.prompt_ids, 6)
    assert engine.scheduler.num_preemptions == 0


def test_a_preempted_request_waits_for_the_next_step_and_nobody_passes_it(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_pages=6, page_size=4, max_num_seqs=2)
    for n in range(3):
        engine.add_request(make_request(str(n), prompt(7, n), 14, window=1))
    passes = watch(engine)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert list(passes[-1]) == ["0"]
    assert [sequence.request.id for sequence in engine.scheduler.waiting] == ["1", "2"]
    assert list(finish(engine)) == ["0", "1", "2"]


def test_the_oldest_never_loses_its_pages(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, num_pages=7, page_size=4)
    preempted: list[str] = []
    preempt = engine.scheduler._preempt

    def watched(victim: Any) -> None:
        assert victim is not oldest
        preempted.append(victim.request.id)
        preempt(victim)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    for n in range(5):
        engine.add_request(make_request(str(n), prompt(5, n), 20, window=1 + 3 * (n % 2)))
    while engine._sequences:
        oldest = min(engine._sequences.values(), key=lambda sequence: sequence.arrived_s)
        before = oldest.num_computed
        engine.step()
        assert oldest.num_computed > before or oldest.finish_reason
    assert preempted


def test_sequences_are_compared_by_identity(loaded: LoadedModel) -> None:
    """A comparison field by field would cost more than the rest of the step."""
    engine = make_engine(loaded)
    for n in range(2):
        engine.add_request(make_request(str(n), (5, 6), 4))
    first, second = engine._sequences.values()
    first.arrived_s = second.arrived_s
    first.request = second.request
    assert first != second


@pytest.mark.slow
def test_a_step_of_64_requests_costs_little(loaded: LoadedModel) -> None:
    """Python of the scheduler, median: it runs between passes of 15 ms and more."""
    requests = [make_request(str(n), prompt(40, n), 200, window=16) for n in range(64)]
    engine = decoding_engine(loaded, requests, kv_memory_mib=64)
    times_s = []
    for _ in range(50):
        start_s = time.perf_counter()
        engine.scheduler.schedule()
        times_s.append(time.perf_counter() - start_s)
    assert sorted(times_s)[25] < 2e-3
