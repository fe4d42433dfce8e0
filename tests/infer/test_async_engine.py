"""The engine for asyncio: many consumers, aborts in every state, failures, slow readers, several event loops."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest
import torch

from jacobi_llm.configs.errors import AbortedError, QueueFullError, RunError, UsageError
from jacobi_llm.infer.async_engine import AsyncEngine
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import Request, RequestOutput, StepOutput
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.stream import Delta
from tests.infer.decoding import make_engine, make_request, random_prompt
from tests.tiny_models import tiny_loaded as build_loaded

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "jacobi-llm engine"]


def make_requests(num_requests: int, max_tokens: int = 20) -> list[Request]:
    draw = random.Random(4)
    return [
        make_request(str(n), random_prompt(draw, 2 + n % 9), max_tokens, window=draw.choice([1, 4, 16]))
        for n in range(num_requests)
    ]


async def collect(engine: AsyncEngine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


async def one_pass(engine: AsyncEngine) -> None:
    """Wait until what was submitted before has been done."""
    await engine.abort("nobody")


def all_free(engine: LLMEngine) -> bool:
    return engine.pool.num_free == engine.pool.num_pages and not engine._sequences


def joined(deltas: Sequence[Delta]) -> tuple[tuple[int, ...], str, RequestOutput | None]:
    return (
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        deltas[-1].finished,
    )


class Gate:
    """Lets an engine's passes run one by one: each waits until it is let through."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._step = engine.step
        self._may_run = threading.Semaphore(0)
        self.num_steps = 0
        monkeypatch.setattr(engine, "step", self._gated)

    def open(self, num_steps: int = 1) -> None:
        self._may_run.release(num_steps)

    def _gated(self) -> list[StepOutput]:
        assert self._may_run.acquire(timeout=30), "nobody let the next pass run"
        self.num_steps += 1
        return self._step()


def test_many_consumers_get_what_a_list_would_get(loaded: LoadedModel) -> None:
    requests = make_requests(30)
    expected = {output.id: output.token_ids for output in make_engine(loaded).generate(requests)}
    engine = make_engine(loaded, max_num_seqs=8)

    async def main() -> list[list[Delta]]:
        async with AsyncEngine(engine) as running:
            return await asyncio.gather(*(collect(running, request) for request in requests))

    for request, deltas in zip(requests, asyncio.run(main()), strict=True):
        token_ids, text, output = joined(deltas)
        assert output is not None
        assert token_ids == output.token_ids == expected[request.id]
        assert text == output.text
    assert all_free(engine)


def test_tokens_leave_within_the_step_that_committed_them(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass runs only after the consumer has the tokens of this one: otherwise this would hang."""
    engine = make_engine(loaded)
    gate = Gate(engine, monkeypatch)

    async def main() -> int:
        num_deltas = 0
        async with AsyncEngine(engine) as running:
            gate.open()
            async for _ in running.generate(make_request("a", (5, 6, 7), 12, window=1)):
                num_deltas += 1
                assert gate.num_steps == num_deltas
                gate.open()
        return num_deltas

    assert asyncio.run(main()) == 12


@pytest.mark.parametrize("max_num_rows", [4, 2048])
def test_a_closed_iterator_frees_its_pages(loaded: LoadedModel, max_num_rows: int) -> None:
    engine = make_engine(loaded, max_num_rows=max_num_rows, page_size=4)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            deltas = running.generate(make_request("a", (5,) * 30, 200, window=1))
            await anext(deltas)
            await deltas.aclose()
            await one_pass(running)
            assert all_free(engine)
            # The id is free again, and nothing of the first request ends the second.
            assert len(joined(await collect(running, make_request("a", (5, 6), 9)))[0]) == 9

    asyncio.run(main())


def test_leaving_the_loop_early_frees_the_pages(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            async for _ in running.generate(make_request("a", (5, 6), 200, window=1)):
                break
            for _ in range(100):
                if all_free(engine):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the request is still there")

    asyncio.run(main())


def test_s01_cancelled_in_the_queue_in_the_prompt_and_while_decoding(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(loaded, max_num_seqs=2, max_num_rows=4, page_size=4)
    gate = Gate(engine, monkeypatch)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            tasks = {}
            for id, prompt_len in (("decoding", 2), ("prompt", 100), ("queue", 3)):
                tasks[id] = asyncio.create_task(collect(running, make_request(id, (5,) * prompt_len, 100, window=1)))
                await asyncio.sleep(0.05)
                gate.open()
            gate.open(6)
            await one_pass(running)
            sequences = engine._sequences
            assert sequences["decoding"].completion_ids
            assert 0 < sequences["prompt"].num_computed < 100
            assert sequences["queue"] in engine.scheduler.waiting
            gate.open(100)
            for id in ("queue", "prompt", "decoding"):
                tasks[id].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await tasks[id]
                await one_pass(running)
                assert id not in engine._sequences
            assert all_free(engine)

    asyncio.run(main())


def test_s01_two_hundred_clients_give_up(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)

    async def give_up(running: AsyncEngine, request: Request) -> bool:
        try:
            await asyncio.wait_for(collect(running, request), timeout=0.3)
        except TimeoutError:
            return True
        return False

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            requests = [make_request(str(n), (5 + n,), 10000, window=1) for n in range(200)]
            assert sum(await asyncio.gather(*(give_up(running, request) for request in requests))) > 100
            start_s = time.perf_counter()
            await one_pass(running)
            assert time.perf_counter() - start_s < 1
            assert all_free(engine)
            assert len(joined(await collect(running, make_request("small", (5, 6), 5)))[0]) == 5

    asyncio.run(main())


def test_abort_by_another_reaches_the_consumer(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            deltas = running.generate(make_request("a", (5, 6), 200, window=1))
            await anext(deltas)
            await running.abort("a")
            assert all_free(engine)
            with pytest.raises(AbortedError, match="request a: aborted"):
                assert [delta async for delta in deltas]
            await running.abort("a")

    asyncio.run(main())


def test_a_failed_pass_reaches_everybody(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(loaded, max_num_seqs=2)
    forward = engine.runner.forward

    def failing(groups: Sequence[RowGroup]) -> torch.Tensor:
        if engine.runner.num_passes == 5:
            raise MemoryError("no room\nfor logits")
        return forward(groups)

    monkeypatch.setattr(engine.runner, "forward", failing)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            answers = await asyncio.gather(
                *(collect(running, request) for request in make_requests(5)), return_exceptions=True
            )
            # A request that comes after the failure is told of it, too.
            assert {type(answer) for answer in answers} <= {MemoryError, RunError}
            assert any(isinstance(answer, MemoryError) for answer in answers)
            assert all_free(engine)
            for _ in range(2):
                with pytest.raises(RunError, match="a pass failed with MemoryError: no room for logits"):
                    await collect(running, make_request("later", (5, 6), 4))
            with pytest.raises(RunError, match="a pass failed with MemoryError"):
                await running.abort("0")

    asyncio.run(main())


def test_refusals_touch_nobody_else(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request with an id in use is refused, and its end must not abort the first."""
    engine = make_engine(loaded, max_num_waiting=3, max_num_seqs=1)
    gate = Gate(engine, monkeypatch)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            tasks = [asyncio.create_task(collect(running, request)) for request in make_requests(3, max_tokens=4)]
            await asyncio.sleep(0.05)
            refused = [
                asyncio.create_task(collect(running, request))
                for request in (
                    make_request("0", (7, 8), 4),
                    make_request("empty", (), 4),
                    make_request("kept", (5,), 4, keep_pages=True),
                )
            ]
            # What is asked for is done between two passes: it must be there before this one may end.
            await asyncio.sleep(0.05)
            gate.open(1)
            errors = await asyncio.gather(*refused, return_exceptions=True)
            assert [type(error) for error in errors] == [UsageError] * 3
            assert "this id is in use" in str(errors[0])
            assert "keep_pages" in str(errors[2])
            gate.open(1000)
            for task in tasks:
                assert len(joined(await task)[0]) == 4

    asyncio.run(main())
    assert all_free(engine)


def test_a_full_queue_refuses_and_serves_in_order(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(loaded, max_num_waiting=3, max_num_seqs=1)
    gate = Gate(engine, monkeypatch)
    ended: list[str] = []

    async def collect_and_note(running: AsyncEngine, request: Request) -> None:
        await collect(running, request)
        ended.append(request.id)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            tasks = [
                asyncio.create_task(collect_and_note(running, make_request(str(n), (5, 6), 3, window=1)))
                for n in range(5)
            ]
            gate.open(1000)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [n for n, answer in enumerate(answers) if isinstance(answer, QueueFullError)]
        assert all(answer is None or isinstance(answer, QueueFullError) for answer in answers)
        assert refused in ([3, 4], [4], [])
        assert ended == [str(n) for n in range(5) if n not in refused]

    asyncio.run(main())


def test_a_slow_reader_holds_nobody_up_and_loses_nothing(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            slow = running.generate(make_request("slow", (5, 6), 100, window=1))
            first = await anext(slow)
            for n in range(3):
                assert len(joined(await collect(running, make_request(str(n), (7, 8), 60, window=1)))[0]) == 60
            deltas = [first] + [delta async for delta in slow]
            assert len(deltas) < 20, "what was not read in time comes as one delta"
            token_ids, text, output = joined(deltas)
            assert output is not None
            assert (token_ids, text) == (output.token_ids, output.text)
            assert len(token_ids) == 100

    asyncio.run(main())
    assert all_free(engine)


def test_several_event_loops(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    requests = make_requests(12)
    expected = {output.id: output.token_ids for output in make_engine(loaded).generate(requests)}
    found: dict[str, tuple[int, ...]] = {}

    async def consume(running: AsyncEngine, part: Sequence[Request]) -> None:
        for request, deltas in zip(
            part, await asyncio.gather(*(collect(running, request) for request in part)), strict=True
        ):
            found[request.id] = joined(deltas)[0]

    running = AsyncEngine(engine)
    threads = [threading.Thread(target=asyncio.run, args=(consume(running, requests[n::3]),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(running.close())
    assert found == expected
    assert all_free(engine)


def test_a_loop_that_died_leaves_the_others_alone(loaded: LoadedModel) -> None:
    """Its requests are dropped when their tokens find no loop."""
    engine = make_engine(loaded)
    running = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    orphan = running.generate(make_request("orphan", (5, 6), 200, window=1))
    loop.run_until_complete(anext(orphan))
    loop.close()

    async def main() -> None:
        assert len(joined(await collect(running, make_request("a", (7, 8), 20, window=1)))[0]) == 20
        assert all_free(engine)
        await running.close()

    asyncio.run(main())
    del orphan


def test_close_ends_everything_and_may_come_twice(loaded: LoadedModel) -> None:
    engine = make_engine(loaded, max_num_seqs=1)

    async def main() -> None:
        running = AsyncEngine(engine)
        tasks = [asyncio.create_task(collect(running, request)) for request in make_requests(3, max_tokens=200)]
        await asyncio.sleep(0.1)
        await asyncio.gather(running.close(), running.close())
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [RunError] * 3
        assert all_free(engine)
        await running.close()
        late: list[Coroutine[Any, Any, Any]] = [running.abort("0"), collect(running, make_request("b", (5,), 3))]
        for call in late:
            with pytest.raises(RunError, match="the engine was closed"):
                await call

    asyncio.run(main())


def test_random_clients(loaded: LoadedModel) -> None:
    """Clients come, read at their own pace, leave early or are aborted, in few pages; every answer is right."""
    draw = random.Random(11)
    requests = make_requests(60)
    expected = {output.id: output.token_ids for output in make_engine(loaded).generate(requests)}
    engine = make_engine(loaded, num_pages=24, page_size=4, max_num_seqs=6)
    plans = [(draw.random() * 0.3, draw.choice(["all", "all", "slow", "leave", "cancel", "abort"])) for _ in requests]

    async def client(running: AsyncEngine, request: Request, delay_s: float, plan: str) -> None:
        await asyncio.sleep(delay_s)
        token_ids: list[int] = []
        try:
            async for delta in running.generate(request):
                token_ids += delta.token_ids
                assert tuple(token_ids) == expected[request.id][: len(token_ids)]
                if plan == "leave" and len(token_ids) > 3:
                    return
                if plan == "abort" and len(token_ids) > 3:
                    await running.abort(request.id)
                if plan == "slow":
                    await asyncio.sleep(0.01)
        except AbortedError:
            assert plan == "abort"
            return
        assert tuple(token_ids) == expected[request.id]

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            tasks = [
                asyncio.create_task(client(running, request, *plan))
                for request, plan in zip(requests, plans, strict=True)
            ]
            await asyncio.sleep(0.2)
            for task, (_, plan) in zip(tasks, plans, strict=True):
                if plan == "cancel":
                    task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [answer for answer in answers if isinstance(answer, Exception)]
        assert all_free(engine)
        engine.check_integrity()

    asyncio.run(main())
