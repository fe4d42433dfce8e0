"""Tiny random models in float64: every cell has to equal the reference, without exception."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.exact.adapters import merged, save_adapters
from benchmarks.exact.kinds import PROCESSORS, STOPS, make_question
from benchmarks.exact.mix import Happened, Mix, Run
from benchmarks.exact.question import WINDOWS, Answer, Cell, Question
from benchmarks.exact.reference import Forward, Reference, WholeText
from benchmarks.exact.verdict import Part, add_against_reference
from jacobi_llm.configs.schema import AttentionBackend, CompileMode, EngineConfig
from jacobi_llm.infer.cost_model import CostModel, PassTimes
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.window_policy import AutoWindows
from tests.tiny_models import VOCAB_SIZE, tiny_loaded

# A prompt with its name; a prompt, a kind of processor and a kind of stop.
Prompt = tuple[str, tuple[int, ...]]
Kinds = tuple[Prompt, str, str]

NUM_TOKENS = 24
ADAPTER_SPREAD = 0.2
MIXES = (
    Mix("alone"),
    Mix("mixed", in_flight=10, prefix_sharing=True),
    Mix(
        "crowded",
        in_flight=10,
        num_pages=19,
        has_aborts=True,
        max_num_rows=37,
        max_prefill_rows=11,
        prefix_sharing=True,
    ),
)
# Times of a machine that does not exist: windows of several rows pay, and no calibration has to run.
_PASS_TIMES = PassTimes((1, 8, 32, 64), (1.0, 1.1, 1.6, 2.5), 64, 0.02, 0.0005, 0.0005)


@dataclass(frozen=True)
class Subject:
    """A model and a way to run it."""

    family: str
    attention: AttentionBackend
    overrides: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.family}, {self.attention.value}"

    def load(self) -> LoadedModel:
        return tiny_loaded(self.family, **dict(self.overrides))

    @property
    def has_adapters(self) -> bool:
        """Adapters chosen per request are there with the native attention only."""
        return self.attention is AttentionBackend.NATIVE

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(attention=self.attention, compile=CompileMode.OFF, kv_memory_mib=4)


# With a cap this low, a soft cap that is left out is seen.
_GEMMA2 = (("attn_logit_softcapping", 2.0),)
SUBJECTS = (
    Subject("llama", AttentionBackend.NATIVE),
    Subject("gemma2", AttentionBackend.NATIVE, _GEMMA2),
    Subject("gpt2", AttentionBackend.NATIVE),
    Subject("qwen2", AttentionBackend.NATIVE, (("tie_word_embeddings", True),)),
    Subject("llama", AttentionBackend.SDPA),
    Subject("gemma2", AttentionBackend.SDPA, _GEMMA2),
    Subject("mistral", AttentionBackend.NATIVE),
    Subject("gpt_neox", AttentionBackend.SDPA),
)


def run_tiny(
    num_cells: int, say: Callable[[str], None], subjects: Sequence[Subject] = SUBJECTS, mixes: Sequence[Mix] = MIXES
) -> Part:
    """Compare at least ``num_cells`` cells.

    Args:
        num_cells: every subject is asked the same number of questions, each with every window in every mix.
        say: progress, a line at a time.
        subjects, mixes: what cells are made of.
    """
    started_s = time.perf_counter()
    part = Part("tiny, float64", bound=0.0)
    num_questions = -(-num_cells // (len(subjects) * len(WINDOWS) * len(mixes)))
    kinds = _kinds(num_questions * len(subjects))
    happened = Happened.nothing()
    with TemporaryDirectory() as folder:
        for subject in subjects:
            asked = _Asked.about(subject, Path(folder) / subject.name, islice(kinds, num_questions))
            for mix in mixes:
                happened += _run_mix(part, asked, mix)
            say(f"tiny: {subject.name}: {part.num_cells} cells, {len(part.mismatches)} mismatches")
    part.facts = {"subjects": [subject.name for subject in subjects], **asdict(happened)}
    part.notes = [happened.describe()]
    part.wall_s = time.perf_counter() - started_s
    return part


@dataclass(frozen=True)
class _Asked:
    """A subject, the questions it is asked, and the right answers by question."""

    subject: Subject
    loaded: LoadedModel
    adapters: dict[str, Path]
    reference: Reference
    questions: list[Question]
    expected: dict[str, Answer]

    @classmethod
    def about(cls, subject: Subject, folder: Path, kinds: Iterable[Kinds]) -> _Asked:
        loaded = subject.load()
        adapters = save_adapters(folder, loaded.model, ADAPTER_SPREAD) if subject.has_adapters else {}
        forwards: dict[str | None, Forward] = {None: WholeText(loaded.model)}
        forwards |= {name: WholeText(merged(loaded.model, path)) for name, path in adapters.items()}
        reference = Reference(forwards, loaded.tokenizer, loaded.max_context)
        # Two of three questions are for an adapter, each about a prompt that others are asked too.
        names = (None, *adapters)
        questions = [
            _question(f"{subject.name}/{number}", reference, names[number % len(names)], *kind)
            for number, kind in enumerate(kinds)
        ]
        expected = {question.id: reference.answer(question) for question in questions}
        return cls(subject, loaded, adapters, reference, questions, expected)


def _run_mix(part: Part, asked: _Asked, mix: Mix) -> Happened:
    draw = random.Random(f"{asked.subject.name} {mix.name}")
    engine = mix.engine(asked.loaded, asked.subject.config, asked.adapters)
    _without_calibration(engine)
    cells = [Cell.draw(question, window, mix.name, draw) for question in asked.questions for window in WINDOWS]
    answers, happened = Run(engine, mix, draw).decode(cells, asked.expected)
    for cell, answer in zip(cells, answers, strict=True):
        add_against_reference(part, cell, asked.expected[cell.question.id], answer, asked.reference)
    return happened


def _without_calibration(engine: LLMEngine) -> None:
    engine.scheduler.windows = AutoWindows(CostModel(_PASS_TIMES))


def _question(
    question_id: str, reference: Reference, adapter: str | None, prompt: Prompt, processor: str, stop: str
) -> Question:
    return make_question(
        question_id,
        prompt=prompt,
        processor=processor,
        stop=stop,
        reference=reference,
        max_tokens=NUM_TOKENS,
        vocab_size=VOCAB_SIZE,
        adapter=adapter,
    )


def _kinds(count: int) -> Iterator[Kinds]:
    """Prompts, processors and stops: every pair of the last two before any comes again, prompts in turn."""
    draw = random.Random(0)
    prompts = list(_prompts().items())
    pairs: list[tuple[str, str]] = []
    for number in range(count):
        if not pairs:
            pairs = [(processor, stop) for processor in PROCESSORS for stop in STOPS]
            draw.shuffle(pairs)
        yield (prompts[number % len(prompts)], *pairs.pop())


def _prompts() -> dict[str, tuple[int, ...]]:
    """Prompts of random bytes; sliding windows are 8 tokens, pages 16, the context 256."""
    draw = random.Random(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(count))

    beginning = some(37)
    return {
        "one token": some(1),
        "seven": some(7),
        "a page": some(16),
        "shared beginning, 3 more": (*beginning, *some(3)),
        "shared beginning, 12 more": (*beginning, *some(12)),
        "shared beginning": beginning[:33],
        "one word repeated": some(1) * 48,
        "nearly the context": some(241),
    }
