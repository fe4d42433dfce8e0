"""The engine for asyncio programs: one thread steps it, coroutines put requests in and take deltas out.

    async with AsyncEngine(LLMEngine(loaded)) as engine:
        async for delta in engine.generate(request):
            print(delta.text, end="", flush=True)

The thread alone touches the engine; everything else reaches it as a call that runs between two passes. The thread never
waits for a consumer: what a slow one has not taken is merged, so it holds at most its own answer. A consumer may live
in any event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType

from jacobi_llm.configs.errors import AbortedError, RunError, UsageError
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.request import Request, StepOutput
from jacobi_llm.infer.stream import Delta

Call = Callable[[], None]


class AsyncEngine:
    """Owns ``engine`` from construction to :meth:`close`; nobody else may use it in between."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._consumers: dict[str, _Consumer] = {}  # by request id; the thread's own
        self._changed = threading.Condition()  # guards the four below
        self._calls: list[tuple[Call, Future[None]]] = []
        self._is_closing = False
        self._has_ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jacobi-llm engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Decode ``request``; yields its deltas, the last one with ``finished``.

        When the iterator is closed, or the task that reads it is cancelled, the request is aborted and its pages are
        free before the next pass.

        Raises:
            UsageError: the engine refuses the request, or it wants to keep its pages.
            QueueFullError: too many requests wait.
            AbortedError: :meth:`abort` ended it.
            RunError: the engine was closed, or a pass had failed before.
            Exception: whatever a pass failed with while this request was open.
        """
        if request.keep_pages:
            raise UsageError(f"request {request.id}: keep_pages is for synchronous use, nobody could release them here")
        consumer = _Consumer(request.id, asyncio.get_running_loop())
        is_open = True
        try:
            await self._call(partial(self._add, replace(request, detokenize=True), consumer))
            while is_open:
                delta = await consumer.take()
                is_open = delta.finished is None
                yield delta
        finally:
            if is_open:
                self._submit(partial(self._drop, consumer))

    async def abort(self, request_id: str) -> None:
        """End a request and free its pages; its consumer gets an AbortedError. Unknown ids are ignored.

        Raises:
            RunError: the engine was closed, or a pass had failed before.
        """
        await self._call(partial(self._abort, request_id))

    async def close(self) -> None:
        """Abort all requests (their consumers get a RunError) and end the thread. May be called again."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------ on any thread

    async def _call(self, call: Call) -> None:
        await asyncio.wrap_future(self._submit(call))

    def _submit(self, call: Call) -> Future[None]:
        """Let the thread run ``call`` between two passes, in the order of submission."""
        future: Future[None] = Future()
        with self._changed:
            if self._has_ended:
                future.set_exception(self._refusal())
            else:
                self._calls.append((call, future))
                self._changed.notify()
        return future

    def _refusal(self) -> RunError:
        if self._failure is None:
            return RunError("the engine was closed")
        error = RunError(f"the engine has stopped: a pass failed with {_one_line(self._failure)}")
        error.__cause__ = self._failure
        return error

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._run_calls():
                if self._engine.has_unfinished:
                    self._deliver(self._engine.step())
        except BaseException as error:  # whatever it is, somebody waits for an answer
            failure = error
        with self._changed:
            self._has_ended = True
            self._failure = failure
            calls, self._calls = self._calls, []
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())
        consumers, self._consumers = self._consumers, {}
        try:
            for request_id in consumers:
                self._engine.abort(request_id)
        finally:
            # Last: who is told finds the pages free.
            for consumer in consumers.values():
                consumer.post_error(failure or self._refusal())

    def _run_calls(self) -> bool:
        """Wait until there is something to do, run what was submitted; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_closing or self._engine.has_unfinished)
            if self._is_closing:
                return False
            calls, self._calls = self._calls, []
        for call, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        return True

    def _add(self, request: Request, consumer: _Consumer) -> None:
        self._engine.add_request(request)
        self._consumers[request.id] = consumer

    def _drop(self, consumer: _Consumer) -> None:
        # By now the id may be another consumer's.
        if self._consumers.get(consumer.request_id) is consumer:
            del self._consumers[consumer.request_id]
            self._engine.abort(consumer.request_id)

    def _abort(self, request_id: str) -> None:
        consumer = self._consumers.pop(request_id, None)
        if consumer is not None:
            self._engine.abort(request_id)
            consumer.post_error(AbortedError(f"request {request_id}: aborted"))

    def _deliver(self, steps: Iterable[StepOutput]) -> None:
        """Hand out a step's deltas, waking each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Consumer, Delta]]] = {}
        for step in steps:
            consumer = self._consumers[step.request_id]
            if step.finished:
                del self._consumers[step.request_id]
            by_loop.setdefault(consumer.loop, []).append((consumer, Delta.of_step(step)))
        for loop, deltas in by_loop.items():
            if not _post(loop, partial(_put_all, deltas)):
                for consumer, _ in deltas:
                    self._drop(consumer)


class _Consumer:
    """What one coroutine waits for. All but the two ``post`` functions belongs to its event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self._deltas: list[Delta] = []
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    async def take(self) -> Delta:
        """Wait for news; all that has gathered, as one delta, before an error that came behind it."""
        await self._has_news.wait()
        if not self._deltas and self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        if self._error is None:
            self._has_news.clear()
        return _merge(deltas)

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._has_news.set()

    def post_error(self, error: BaseException) -> None:
        """Called on the engine's thread: nothing comes any more."""
        _post(self.loop, partial(self._put_error, error))

    def _put_error(self, error: BaseException) -> None:
        self._error = error
        self._has_news.set()


def _put_all(deltas: Iterable[tuple[_Consumer, Delta]]) -> None:
    for consumer, delta in deltas:
        consumer.put(delta)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Let ``loop`` run ``callback``; False when the loop has been closed, and its coroutines with it."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


def _merge(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        request_id=deltas[0].request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finished=deltas[-1].finished,
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__
