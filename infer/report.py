"""How ``jacobi-infer generate`` shows its answers: text for people, JSON lines for programs.

Answers go to standard output as soon as they are due, everything else to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from jacobi_llm.infer.request import RequestOutput
from jacobi_llm.infer.stream import Delta


class Report(Protocol):
    """Shows requests, each by its id, as they go on."""

    def add(self, delta: Delta) -> None:
        """Tokens and text arrived for a request, and perhaps its end."""

    def add_failure(self, request_id: str, reason: str) -> None:
        """A request cannot run."""

    def close(self) -> None:
        """Show what is finished and not shown yet; also called when the run is interrupted."""


class JsonReport:
    """One JSON object per line, in the order of the requests; a line waits only for the requests before it."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._due = list(reversed(request_ids))
        self._lines: dict[str, str] = {}

    def add(self, delta: Delta) -> None:
        if delta.finished:
            self._show(delta.request_id, output_record(delta.finished))

    def add_failure(self, request_id: str, reason: str) -> None:
        self._show(request_id, {"id": request_id, "error": reason})

    def close(self) -> None:
        while self._due:
            line = self._lines.pop(self._due.pop(), None)
            if line is not None:
                print(line)
        sys.stdout.flush()

    def _show(self, request_id: str, record: dict[str, Any]) -> None:
        self._lines[request_id] = json.dumps(record, ensure_ascii=False)
        while self._due and self._due[-1] in self._lines:
            print(self._lines.pop(self._due.pop()), flush=True)


class StreamReport:
    """The text of a single request, printed while it is decoded."""

    def __init__(self) -> None:
        self._is_mid_line = False

    def add(self, delta: Delta) -> None:
        if delta.text:
            print(delta.text, end="", flush=True)
            self._is_mid_line = not delta.text.endswith("\n")

    def add_failure(self, request_id: str, reason: str) -> None:
        _print_failure(request_id, reason)

    def close(self) -> None:
        if self._is_mid_line:
            print(flush=True)
            self._is_mid_line = False


class TextReport:
    """The text of each of several requests under a line with its id, in the order in which they finish."""

    def __init__(self) -> None:
        self._gap = ""

    def add(self, delta: Delta) -> None:
        if delta.finished:
            text = delta.finished.text or ""
            end = "" if text.endswith("\n") else "\n"
            print(f"{self._gap}==> {delta.request_id} <==\n{text}", end=end, flush=True)
            self._gap = "\n"

    def add_failure(self, request_id: str, reason: str) -> None:
        _print_failure(request_id, reason)

    def close(self) -> None:
        """Everything finished is out already."""


def output_record(output: RequestOutput) -> dict[str, Any]:
    """Return the JSON object of a finished request; times in milliseconds since its arrival.

    ``index`` is the choice among several answers to the prompt; ``logprobs`` is there when they were asked for.
    """
    record: dict[str, Any] = {
        "id": output.id,
        "index": output.choice,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "forward_passes": output.forward_passes,
        "tokens_per_forward": round(output.tokens_per_forward, 4),
        "ttft_ms": round(output.ttft_ms, 2),
        "latency_ms": round(output.latency_ms, 2),
    }
    if output.logprobs is not None:
        record["logprobs"] = [
            {
                "token_id": one.token_id,
                "logprob": round(one.logprob, 6),
                "top": [{"token_id": token_id, "logprob": round(logprob, 6)} for token_id, logprob in one.top],
            }
            for one in output.logprobs
        ]
    return record


def _print_failure(request_id: str, reason: str) -> None:
    where = "" if request_id in reason else f"request {request_id}: "
    print(f"error: {where}{' '.join(reason.split())}", file=sys.stderr)
