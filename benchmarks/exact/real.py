"""The real model: fp32 against transformers, bf16 against the engine's own plain decoding, batch-invariant mode."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.exact.adapters import merged, save_adapters
from benchmarks.exact.kinds import PROCESSORS, SMOOTH, STOPS, make_question
from benchmarks.exact.mix import Happened, Mix, Run
from benchmarks.exact.prompts import real_prompts
from benchmarks.exact.question import WINDOWS, Answer, Cell, Question
from benchmarks.exact.reference import Forward, GrowingText, Reference
from benchmarks.exact.verdict import Part, add_against_reference, first_difference
from jacobi_llm.configs.schema import Dtype, EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.near_tie import FP32_BOUND, reference_ids
from jacobi_llm.infer.request import DecodeParams, Request

KV_MEMORY_MIB = 512
ALONE = Mix("alone", prefix_sharing=True)
BATCH_OF_8 = Mix("batch of 8", in_flight=8, prefix_sharing=True)
MIXED = Mix("mixed", in_flight=16, prefix_sharing=True)
CROWDED = Mix(
    "crowded",
    in_flight=12,
    num_pages=56,
    has_aborts=True,
    max_num_rows=128,
    max_prefill_rows=50,
    prefix_sharing=True,
)
# A question has a cell for every window in a mixed batch, and for so many of the windows alone and in a crowd.
_WINDOWS_APART = 2
CELLS_PER_QUESTION = len(WINDOWS) + 2 * _WINDOWS_APART
_ORDERS_OF_AR = 2
_GENERATE_CELLS = 12
# Cost of batch-invariant mode.
COST_BATCHES = (1, 16)
_COST_PROMPT_TOKENS = 32
_COST_PASSES = 12
_COST_PAIRS = 9

ADAPTER_SPREAD = 0.04

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """How much is decoded.

    Attributes:
        num_cells: cells of the fp32 part, and of the bf16 part; half as many in batch-invariant mode.
        num_tokens: longest answer.
        model: its name.
    """

    num_cells: int
    num_tokens: int
    model: str

    @property
    def num_questions(self) -> int:
        return -(-self.num_cells // CELLS_PER_QUESTION)


@dataclass(frozen=True)
class Judge:
    """The model in fp32 as transformers runs it, its adapters, and what it was asked so far."""

    load: Load
    loaded: LoadedModel
    adapters: dict[str, Path]
    reference: Reference

    @classmethod
    def of(cls, load: Load, folder: Path) -> Judge:
        """Load the model, and put random adapters into ``folder``."""
        loaded = load_model(load.model, dtype=Dtype.FLOAT32)
        adapters = save_adapters(folder, loaded.model, ADAPTER_SPREAD)
        forwards: dict[str | None, Forward] = {None: GrowingText(loaded.model)}
        forwards |= {name: GrowingText(merged(loaded.model, path)) for name, path in adapters.items()}
        return cls(load, loaded, adapters, Reference(forwards, loaded.tokenizer, loaded.max_context))

    def questions(self, count: int, processors: Collection[str]) -> list[Question]:
        """The first ``count`` questions with one of ``processors``; always in the same order."""
        prompts = real_prompts(self.loaded.tokenizer)
        names = (None, *self.adapters)
        pairs = [(processor, stop) for stop in STOPS for processor in PROCESSORS]
        random.Random(0).shuffle(pairs)
        kinds = ((number, *pairs[number % len(pairs)]) for number in itertools.count())
        wanted = itertools.islice((kind for kind in kinds if kind[1] in processors), count)
        return [
            make_question(
                f"real/{number}",
                prompt=prompts[number % len(prompts)],
                processor=processor,
                stop=stop,
                reference=self.reference,
                max_tokens=self.load.num_tokens,
                vocab_size=int(self.loaded.model.config.vocab_size),
                eos_token_ids=self.loaded.eos_token_ids,
                adapter=names[number % len(names)],
            )
            for number, processor, stop in wanted
        ]


def run_fp32(judge: Judge, say: Say) -> Part:
    """The engine in fp32 against the loop over transformers' model in fp32."""
    started_s = time.perf_counter()
    questions = judge.questions(judge.load.num_questions, PROCESSORS)
    expected = {question.id: judge.reference.answer(question) for question in questions}
    say(f"fp32: {len(questions)} references in {time.perf_counter() - started_s:.0f} s")
    part = Part("real model, fp32", bound=FP32_BOUND)
    _add_generate(part, judge, questions[:_GENERATE_CELLS])
    _decode_all(part, judge, judge.loaded, _config(), questions, expected, say)
    part.wall_s = time.perf_counter() - started_s
    return part


def run_bf16(judge: Judge, loaded: LoadedModel, say: Say) -> Part:
    """The engine in bf16 against its own plain decoding at batch 1."""
    started_s = time.perf_counter()
    questions = judge.questions(judge.load.num_questions, SMOOTH)
    engine = ALONE.engine(loaded, _config(), judge.adapters)
    expected = _plain_answers(engine, ALONE, questions, order=0)
    gaps = []
    for order in range(_ORDERS_OF_AR):
        answers = _plain_answers(engine, BATCH_OF_8, questions, order)
        for question in questions:
            gaps += _gap_of(judge.reference, question, expected[question.id], answers[question.id])
    del engine
    part = Part("real model, bf16", bound=2 * max(gaps, default=0.0))
    part.notes.append(
        f"window 1 at batch 8 leaves window 1 at batch 1 in {len(gaps)} of {_ORDERS_OF_AR * len(questions)} answers,"
        f" largest gap {part.bound / 2:.3g}"
    )
    _decode_all(part, judge, loaded, _config(), questions, expected, say)
    part.facts |= {
        "ar_batch_8_answers": _ORDERS_OF_AR * len(questions),
        "ar_batch_8_divergences": len(gaps),
        "ar_batch_8_largest_gap": max(gaps, default=0.0),
        "share_equal": round(1 - len(part.mismatches) / part.num_cells, 4),
    }
    part.notes.append(f"equal: {part.facts['share_equal']:.1%}")
    part.wall_s = time.perf_counter() - started_s
    return part


def run_invariant(judge: Judge, loaded: LoadedModel, say: Say) -> Part:
    """The engine in bf16 and batch-invariant mode against its own plain decoding at batch 1; and the mode's cost."""
    started_s = time.perf_counter()
    questions = judge.questions(-(-judge.load.num_questions // 2), PROCESSORS)
    engine = ALONE.engine(loaded, _config(batch_invariant=True), judge.adapters)
    expected = _plain_answers(engine, ALONE, questions, order=0)
    part = Part("real model, bf16, batch-invariant", bound=0.0)
    part.facts["cost"] = _cost(engine, ALONE.engine(loaded, _config(), judge.adapters))
    part.notes = [
        f"{batch}: {cost['invariant_ms_per_pass']} ms a pass, {cost['normal_ms_per_pass']} without ({cost['ratio']}x)"
        for batch, cost in part.facts["cost"].items()
    ]
    del engine
    _decode_all(part, judge, loaded, _config(batch_invariant=True), questions, expected, say)
    part.wall_s = time.perf_counter() - started_s
    return part


def _config(*, batch_invariant: bool = False) -> EngineConfig:
    return EngineConfig(kv_memory_mib=KV_MEMORY_MIB, batch_invariant=batch_invariant)


def _decode_all(
    part: Part,
    judge: Judge,
    loaded: LoadedModel,
    config: EngineConfig,
    questions: Sequence[Question],
    expected: dict[str, Answer],
    say: Say,
) -> None:
    """Every cell of ``questions``, in mixed batches, alone, and in a crowd that is short of pages."""
    draw = random.Random(part.name)
    happened = Happened.nothing()
    roomy = MIXED.engine(loaded, config, judge.adapters)
    for mix in (MIXED, ALONE, CROWDED):
        engine = CROWDED.engine(loaded, config, judge.adapters) if mix is CROWDED else roomy
        cells = [
            Cell.draw(question, window, mix.name, draw)
            for number, question in enumerate(questions)
            for window in _windows(mix, number)
        ]
        answers, more = Run(engine, mix, draw).decode(cells, expected)
        happened += more
        for cell, answer in zip(cells, answers, strict=True):
            add_against_reference(part, cell, expected[cell.question.id], answer, judge.reference)
        say(f"{part.name}: {mix.name}: {part.num_cells} cells, {len(part.mismatches)} mismatches")
    part.facts |= asdict(happened)
    part.notes.append(happened.describe())


def _windows(mix: Mix, number: int) -> Sequence[int | None]:
    """All windows in a mixed batch; elsewhere two of them, other ones for the next question."""
    if mix is MIXED:
        return WINDOWS
    shift = 0 if mix is ALONE else 1
    return [WINDOWS[(2 * number + shift + 3 * index) % len(WINDOWS)] for index in range(_WINDOWS_APART)]


def _plain_answers(engine: LLMEngine, mix: Mix, questions: Sequence[Question], order: int) -> dict[str, Answer]:
    """Window 1; answers by question."""
    cells = [Cell.plain(question, mix.name) for question in questions]
    answers, _ = Run(engine, mix, random.Random(order)).decode(cells, {})
    return {question.id: answer for question, answer in zip(questions, answers, strict=True)}


def _gap_of(reference: Reference, question: Question, one: Answer, other: Answer) -> list[float]:
    """The gap where two answers part; empty when they do not."""
    position = first_difference(one, other)
    if position == min(len(one.token_ids), len(other.token_ids)):
        return []
    pair = (one.token_ids[position], other.token_ids[position])
    return [reference.gap(question, one.token_ids[:position], pair)]


def _add_generate(part: Part, judge: Judge, questions: Sequence[Question]) -> None:
    """The loop itself against transformers' ``generate``, where both can do the same: greedily, to the end."""
    eos, num_tokens = judge.loaded.eos_token_ids, judge.load.num_tokens
    for question in questions:
        params = DecodeParams(num_tokens, stop_token_ids=frozenset(eos))
        plain = Question(f"{question.id}, generate", question.prompt, "greedy", "budget", question.prompt_ids, params)
        expected = judge.reference.answer(plain)
        ids = tuple(reference_ids(judge.loaded.model, plain.prompt_ids, max_tokens=num_tokens, stop_token_ids=eos))
        is_stopped = ids[-1] in eos
        text = judge.reference.text(ids[:-1] if is_stopped else ids)
        got = Answer(ids, "stop" if is_stopped else "length", text)
        add_against_reference(part, Cell.plain(plain, "transformers generate"), expected, got, judge.reference)


def _cost(invariant: LLMEngine, normal: LLMEngine) -> dict[str, Any]:
    """Milliseconds of a pass with one row per request, the two modes taking turns; medians."""
    cost: dict[str, Any] = {}
    for batch in COST_BATCHES:
        _ms_per_pass(invariant, batch), _ms_per_pass(normal, batch)
        pairs = [(_ms_per_pass(invariant, batch), _ms_per_pass(normal, batch)) for _ in range(_COST_PAIRS)]
        cost[f"batch {batch}"] = {
            "invariant_ms_per_pass": round(statistics.median(pair[0] for pair in pairs), 2),
            "normal_ms_per_pass": round(statistics.median(pair[1] for pair in pairs), 2),
            "ratio": round(statistics.median(pair[0] / pair[1] for pair in pairs), 3),
            "pairs": _COST_PAIRS,
        }
    return cost


def _ms_per_pass(engine: LLMEngine, batch: int) -> float:
    draw = random.Random(batch)
    for number in range(batch):
        prompt = tuple(draw.randrange(100, 1000) for _ in range(_COST_PROMPT_TOKENS))
        engine.add_request(Request(str(number), prompt, DecodeParams(_COST_PASSES + 2, window=1)))
    engine.step()
    started_s = time.perf_counter()
    for _ in range(_COST_PASSES):
        assert len(engine.step()) == batch
    elapsed_s = time.perf_counter() - started_s
    for number in range(batch):
        engine.abort(str(number))
    return elapsed_s * 1e3 / _COST_PASSES
