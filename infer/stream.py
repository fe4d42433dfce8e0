"""Answers as they come: what each step adds to each request, tokens and text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.request import Request, RequestOutput, StepOutput


@dataclass(frozen=True)
class Delta:
    """What was added to one request since its last delta.

    Attributes:
        text: new text that is certain: no half character, and nothing that a stop string may still take. Joined, the
            texts of a request are the ``text`` of its output. Often empty while text is held back.
        token_ids: tokens committed, at least one. They may run ahead of the text.
        finished: the whole output, with the last delta of a request.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finished: RequestOutput | None

    @classmethod
    def of_step(cls, step: StepOutput) -> Delta:
        return cls(step.request_id, step.new_text, step.new_token_ids, step.finished)


def stream(
    engine: LLMEngine,
    requests: Iterable[Request],
    *,
    on_refused: Callable[[Request, UsageError], None] | None = None,
) -> Iterator[Delta]:
    """Decode ``requests`` together; each step's deltas are yielded before the next step runs.

    Requests are taken from the iterable as the queue has room. When the iterator is closed, or an error leaves it, none
    of them stays in the engine.

    Args:
        engine: idle.
        requests: their ids differ from each other.
        on_refused: called for a request that the engine refuses; the others go on. Without it the refusal is raised.

    Raises:
        UsageError: the engine is not idle, or it refuses a request.
    """
    if engine.has_unfinished:
        raise UsageError("stream wants an idle engine; use add_request and step to let requests join")
    source = iter(requests)
    open_ids: set[str] = set()
    try:
        while True:
            _fill_queue(engine, source, open_ids, on_refused)
            if not open_ids:
                return
            for step in engine.step():
                if step.finished:
                    open_ids.discard(step.request_id)
                yield Delta.of_step(step)
    finally:
        for request_id in open_ids:
            engine.abort(request_id)


def _fill_queue(
    engine: LLMEngine,
    source: Iterator[Request],
    open_ids: set[str],
    on_refused: Callable[[Request, UsageError], None] | None,
) -> None:
    while not engine.is_full:
        request = next(source, None)
        if request is None:
            return
        try:
            engine.add_request(replace(request, detokenize=True))
        except UsageError as error:
            if on_refused is None:
                raise
            on_refused(request, error)
        else:
            open_ids.add(request.id)
