"""Cleaning of prompts: every step is optional, and counts what it drops. Nothing is gathered but hashes.

Lengths and duplicates are looked at in the whole source, so that the held-out part repeats nothing of the train part.
Contamination and degenerate completions matter to what is trained on: held-out prompts are never dropped for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jacobi_llm.configs.schema import CleanConfig, Duplicates
from jacobi_llm.data.contamination import Contamination
from jacobi_llm.data.degeneration import TEXT_LIMITS, degeneration
from jacobi_llm.data.near_duplicates import NearDuplicates
from jacobi_llm.infer.prompt import Prompt, as_messages


@dataclass(frozen=True)
class Candidate:
    """A prompt, and whether it belongs to the held-out part."""

    prompt: Prompt
    is_heldout: bool


@dataclass
class Step:
    """One step that has run: its settings, and prompts that came and that it dropped, by reason."""

    name: str
    settings: dict[str, Any]
    num_in: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return {"step": self.name, **self.settings, "num_in": self.num_in, "num_dropped": self.num_dropped}


class Cleaning:
    """The steps of one configuration, in their order."""

    def __init__(self, config: CleanConfig, read_evaluation_set: Callable[[str], Iterable[str]]) -> None:
        """Prepare the steps.

        Args:
            config: what is asked for.
            read_evaluation_set: texts of an evaluation set, by name.

        Raises:
            UsageError: an evaluation set that cannot be read.
        """
        self._steps: list[Step] = []
        self._passes: list[Callable[[Iterator[Candidate]], Iterator[Candidate]]] = []
        if config.min_chars or config.max_chars is not None:
            bounds = {"min_chars": config.min_chars, "max_chars": config.max_chars}
            self._add_test("length", bounds, lambda one: _length_fault(one.prompt, config))
        if config.duplicates is not Duplicates.KEEP:
            seen: set[bytes] = set()
            self._add_test("exact duplicates", {}, lambda one: _repeats(one.prompt, seen))
        if config.duplicates is Duplicates.NEAR:
            self._add_near(config.near_threshold)
        if config.decontaminate:
            texts = [text for name in config.decontaminate for text in read_evaluation_set(name)]
            known = Contamination(texts, config.decontaminate_words)
            settings = {
                "against": list(config.decontaminate),
                "num_words": config.decontaminate_words,
                "num_texts": known.num_texts,
            }
            self._add_test("contamination", settings, lambda one: _contamination(one, known))
        if config.drop_degenerate:
            self._add_test("degenerate completions", {}, _degenerate)

    def apply(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """The candidates that no step drops, in their order."""
        stream = iter(candidates)
        for one in self._passes:
            stream = one(stream)
        return stream

    def report(self) -> dict[str, Any]:
        """What was done, with counts; whole when what :meth:`apply` gave has come to its end."""
        return {"steps": [step.report() for step in self._steps]} if self._steps else {}

    def _add_test(self, name: str, settings: dict[str, Any], fault: Callable[[Candidate], str | None]) -> None:
        step = Step(name, settings)

        def run(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            for candidate in candidates:
                step.num_in += 1
                reason = fault(candidate)
                if reason is None:
                    yield candidate
                else:
                    step.num_dropped[reason] = step.num_dropped.get(reason, 0) + 1

        self._steps.append(step)
        self._passes.append(run)

    def _add_near(self, threshold: float) -> None:
        step = Step("near duplicates", {"threshold": threshold})
        index = NearDuplicates(threshold)

        def run(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            for is_repeat, candidate in index.flagged((prompt_text(one.prompt), one) for one in candidates):
                step.num_in += 1
                if is_repeat:
                    step.num_dropped["near duplicate"] = step.num_dropped.get("near duplicate", 0) + 1
                else:
                    yield candidate

        self._steps.append(step)
        self._passes.append(run)


def prompt_text(prompt: Prompt) -> str:
    """All turns of a prompt in one text, without the completion."""
    return prompt.text if prompt.text is not None else "\n".join(turn.content for turn in prompt.messages or ())


def _length_fault(prompt: Prompt, config: CleanConfig) -> str | None:
    length = sum(len(turn.content) for turn in as_messages(prompt))
    if length < config.min_chars:
        return "prompt too short"
    return "prompt too long" if config.max_chars is not None and length > config.max_chars else None


def _repeats(prompt: Prompt, seen: set[bytes]) -> str | None:
    turns = [(turn.role, turn.content) for turn in as_messages(prompt)]
    key = hashlib.blake2b(repr(turns).encode("utf-8"), digest_size=16).digest()
    if key in seen:
        return "exact duplicate"
    seen.add(key)
    return None


def _contamination(candidate: Candidate, known: Contamination) -> str | None:
    if candidate.is_heldout:
        return None
    prompt = candidate.prompt
    return "contaminated" if known.touches([prompt_text(prompt), prompt.completion or ""]) else None


def _degenerate(candidate: Candidate) -> str | None:
    completion = candidate.prompt.completion
    return None if candidate.is_heldout or not completion else degeneration(completion, TEXT_LIMITS)
