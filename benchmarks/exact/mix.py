"""Batch mixes: cells decoded in an engine, alone or beside others, with what disturbs them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from benchmarks.exact.oracle import OracleFill, told_with_errors
from benchmarks.exact.question import ORACLE, Answer, Cell
from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import Request, StepOutput

# A step commits a token of the oldest request or reads a piece of a prompt: no run is as long as this.
_MAX_STEPS_PER_REQUEST = 400


@dataclass(frozen=True)
class Mix:
    """How cells share passes.

    Attributes:
        name: of the mix.
        in_flight: requests in the engine at a time.
        num_pages: K/V pages of the engine; None as many as its config says. With few, requests are preempted.
        has_aborts: others join and are aborted in the middle.
        max_num_rows, max_prefill_rows: of a pass; low ones cut prompts into chunks, and windows.
        prefix_sharing: whether requests share the pages of what they begin with.
    """

    name: str
    in_flight: int = 1
    num_pages: int | None = None
    has_aborts: bool = False
    max_num_rows: int = 2048
    max_prefill_rows: int = 512
    prefix_sharing: bool = False

    def engine(
        self, loaded: LoadedModel, config: EngineConfig, adapters: Mapping[str, Path] | None = None
    ) -> LLMEngine:
        """Make an engine for this mix out of ``config``, with ``adapters`` loaded."""
        config = config.model_copy(
            update={
                "max_num_rows": self.max_num_rows,
                "max_prefill_rows": self.max_prefill_rows,
                "prefix_sharing": self.prefix_sharing,
            }
        )
        # The config counts in MiB, which is many pages of a small model.
        num_pages = mock.patch("jacobi_llm.infer.engine.num_pages_for", return_value=self.num_pages)
        with num_pages if self.num_pages else nullcontext():
            engine = LLMEngine(loaded, config)
        for name, path in (adapters or {}).items():
            engine.load_adapter(name, str(path))
        return engine


@dataclass(frozen=True)
class Happened:
    """What a run of cells saw.

    Attributes:
        tokens, passes: of all cells; a pass counts for each request in it.
    """

    tokens: int
    passes: int
    preemptions: int
    prefix_hit_tokens: int
    aborts: int

    @classmethod
    def nothing(cls) -> Happened:
        return cls(0, 0, 0, 0, 0)

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.tokens / self.passes:.2f} tokens a pass, {self.preemptions} preemptions, {self.aborts} aborts, "
            f"{self.prefix_hit_tokens} tokens found in shared pages"
        )

    def __add__(self, other: Happened) -> Happened:
        return Happened(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.preemptions + other.preemptions,
            self.prefix_hit_tokens + other.prefix_hit_tokens,
            self.aborts + other.aborts,
        )


class Run:
    """Decodes cells in one engine, in an order and with arrivals drawn from ``draw``."""

    def __init__(self, engine: LLMEngine, mix: Mix, draw: random.Random) -> None:
        self.engine = engine
        self.mix = mix
        self.draw = draw
        self.num_aborts = 0
        self._streamed: dict[str, tuple[list[int], list[str]]] = {}
        self._answers: dict[str, Answer] = {}
        self._doomed: set[str] = set()
        self._num_passes = 0

    def decode(self, cells: Sequence[Cell], expected: Mapping[str, Answer]) -> tuple[list[Answer], Happened]:
        """Answers in the order of ``cells``.

        Args:
            cells: what is asked.
            expected: by question, for the oracle.

        Raises:
            AssertionError: the engine breaks an invariant of its own, or does not come to an end.
        """
        scheduler = self.engine.scheduler
        before = scheduler.num_preemptions, scheduler.num_hit_tokens
        self._ask_oracle(cells, expected)
        order = list(enumerate(cells))
        self.draw.shuffle(order)
        waiting = deque((f"cell-{number}", cell) for number, cell in order)
        running: set[str] = set()
        for step in range(_MAX_STEPS_PER_REQUEST * len(cells) + 1):
            while waiting and len(running) < self.mix.in_flight and (not running or self.draw.random() < 0.4):
                request_id, cell = waiting.popleft()
                self.engine.add_request(cell.request(request_id))
                running.add(request_id)
                if self.mix.has_aborts and self.draw.random() < 0.3:
                    self._add_doomed(self.draw.choice(cells).request(f"doomed-{step}-{request_id}"))
            self._abort_some(all_of_them=not running)
            for out in self.engine.step():
                self._take(out)
            running.difference_update(self._answers)
            if step % 8 == 0:
                self.engine.check_integrity()
            if not waiting and not running and not self.engine.has_unfinished:
                break
        else:
            raise AssertionError(f"{len(running)} of {len(cells)} requests did not end")
        self.engine.check_integrity()
        answers = [self._answers[f"cell-{number}"] for number in range(len(cells))]
        happened = Happened(
            sum(len(answer.token_ids) for answer in answers),
            self._num_passes,
            scheduler.num_preemptions - before[0],
            scheduler.num_hit_tokens - before[1],
            self.num_aborts,
        )
        return answers, happened

    def _ask_oracle(self, cells: Sequence[Cell], expected: Mapping[str, Answer]) -> None:
        told = {
            f"cell-{number}": told_with_errors(
                expected[cell.question.id].token_ids, self.engine.vocab_size, random.Random(number)
            )
            for number, cell in enumerate(cells)
            if cell.fill == ORACLE
        }
        OracleFill.install(self.engine, told)

    def _add_doomed(self, request: Request) -> None:
        self.engine.add_request(request)
        self._doomed.add(request.id)

    def _abort_some(self, *, all_of_them: bool) -> None:
        for request_id in sorted(self._doomed):
            if all_of_them or self.draw.random() < 0.15:
                self.engine.abort(request_id)
                self._doomed.remove(request_id)
                self.num_aborts += 1

    def _take(self, out: StepOutput) -> None:
        token_ids, pieces = self._streamed.setdefault(out.request_id, ([], []))
        token_ids.extend(out.new_token_ids)
        pieces.append(out.new_text)
        if out.finished is None:
            return
        if out.request_id in self._doomed:
            self._doomed.remove(out.request_id)
            return
        self._num_passes += out.finished.forward_passes
        self._answers[out.request_id] = Answer.of(out.finished, token_ids, "".join(pieces))
