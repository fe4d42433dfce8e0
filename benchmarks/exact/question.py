"""What is asked, what is answered, and the cells in which the engine has to answer it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput

# How cells get their guesses: a fill policy of the engine, or an oracle (``benchmarks/exact/oracle.py``).
ORACLE = "oracle"
FILLS = (*(policy.value for policy in FillPolicy), ORACLE, ORACLE)
# None is chosen by the engine, step by step.
WINDOWS: tuple[int | None, ...] = (1, 2, 3, 5, 8, 16, 32, None)


@dataclass(frozen=True)
class Question:
    """Everything that an answer depends on.

    Attributes:
        id: unique in its part of the report.
        prompt, processor, stop: what the kinds of its parts are called.
        params: window, mode and fill in it are those of a cell, and nothing depends on them.
    """

    id: str
    prompt: str
    processor: str
    stop: str
    prompt_ids: tuple[int, ...]
    params: DecodeParams
    adapter: str | None = None


@dataclass(frozen=True)
class Answer:
    """What is compared.

    Attributes:
        finish_reason: "stop" or "length".
        text: before the stop, without special tokens.
        is_streamed_alike: whether what came step by step is the same in the end.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    text: str
    is_streamed_alike: bool = True

    @classmethod
    def of(cls, output: RequestOutput, streamed_ids: Sequence[int], streamed_text: str) -> Answer:
        """What the engine answered, and streamed."""
        assert output.text is not None, "requests of the harness ask for text"
        is_streamed_alike = tuple(streamed_ids) == output.token_ids and streamed_text == output.text
        return cls(output.token_ids, output.finish_reason.value, output.text, is_streamed_alike)


@dataclass(frozen=True)
class Cell:
    """One question in one batch mix.

    Attributes:
        window: None leaves it to the engine.
        fill: one of ``FILLS``.
        mix: what the batch mix is called.
    """

    question: Question
    window: int | None
    mode: DecodeMode
    fill: str
    mix: str

    @classmethod
    def draw(cls, question: Question, window: int | None, mix: str, draw: random.Random) -> Cell:
        """Draw how the window moves and is filled."""
        mode = DecodeMode.SLIDING if window is None else draw.choice(list(DecodeMode))
        return cls(question, window, mode, draw.choice(FILLS), mix)

    @classmethod
    def plain(cls, question: Question, mix: str) -> Cell:
        """One token per pass."""
        return cls(question, 1, DecodeMode.SLIDING, FillPolicy.REPEAT_LAST.value, mix)

    def request(self, request_id: str) -> Request:
        """Ask the engine."""
        fill = FillPolicy.REPEAT_LAST if self.fill == ORACLE else FillPolicy(self.fill)
        params = replace(self.question.params, window=self.window, mode=self.mode, fill=fill)
        return Request(request_id, self.question.prompt_ids, params, adapter=self.question.adapter, detokenize=True)
