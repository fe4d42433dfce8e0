"""The kinds of processors and of stops, made for a prompt so that they come into play.

A stop that never occurs, or a bad word that nobody would say, tests nothing: both are taken from what the model answers
without them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from benchmarks.exact.question import Question
from benchmarks.exact.reference import Reference
from jacobi_llm.infer.request import DecodeParams
from jacobi_llm.infer.sampling_params import SamplingParams


@dataclass(frozen=True)
class Plain:
    """What processors are made from.

    Attributes:
        question: without any.
        reference: answers it, if that is needed.
        vocab_size: of the model.
        draw: of this question.
    """

    question: Question
    reference: Reference
    vocab_size: int
    draw: random.Random

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The greedy answer."""
        return self.reference.answer(self.question).token_ids


def _bad_words(plain: Plain) -> SamplingParams:
    """Words of one, two and three tokens that the greedy answer has."""
    answer = plain.answer_ids
    places = [plain.draw.randrange(max(len(answer) - 3, 1)) for _ in range(3)]
    words = {answer[place : place + length] for length, place in enumerate(places, start=1)}
    return SamplingParams(bad_words_ids=tuple(sorted(words)))


def _bias(plain: Plain) -> SamplingParams:
    ids = plain.draw.sample(sorted({*plain.answer_ids, 5, 6, 7}), k=3)
    return SamplingParams(logit_bias=((ids[0], -4.0), (ids[1], 1.5), (ids[2], 0.25)))


def _allowed(plain: Plain) -> SamplingParams:
    """A third of the vocabulary, with half of what the greedy answer says."""
    ids = {*plain.draw.sample(range(plain.vocab_size), plain.vocab_size // 3), *sorted(set(plain.answer_ids))[::2]}
    return SamplingParams(allowed_token_ids=tuple(sorted(ids)))


def _mixed_greedy(plain: Plain) -> SamplingParams:
    return replace(_bad_words(plain), repetition_penalty=1.2, frequency_penalty=0.4, logit_bias=((5, 2.0),))


def _mixed_sampled(plain: Plain) -> SamplingParams:
    return replace(_mixed_greedy(plain), temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)


# Those that only scale or shift scores, or ban tokens for good, keep a token's score a smooth function of the logits:
# a rounding error moves it a little. What top-k, top-p and min-p cut depends on the other tokens, by a step.
SMOOTH: dict[str, Callable[[Plain], SamplingParams]] = {
    "greedy": lambda plain: SamplingParams(),
    "repetition": lambda plain: SamplingParams(repetition_penalty=1.4),
    "frequency, presence": lambda plain: SamplingParams(frequency_penalty=0.8, presence_penalty=0.5),
    "frequency -2": lambda plain: SamplingParams(frequency_penalty=-2.0),
    "bad words": _bad_words,
    "logit bias": _bias,
    "allowed ids": _allowed,
    "bad words, penalties, bias": _mixed_greedy,
    "temperature 1": lambda plain: SamplingParams(temperature=1.0),
    "temperature 0.6, frequency": lambda plain: SamplingParams(temperature=0.6, frequency_penalty=0.7),
}
PROCESSORS: dict[str, Callable[[Plain], SamplingParams]] = SMOOTH | {
    "temperature 0.7, top-k": lambda plain: SamplingParams(temperature=0.7, top_k=12),
    "temperature 1.3, top-p": lambda plain: SamplingParams(temperature=1.3, top_p=0.8),
    "temperature 0.9, min-p": lambda plain: SamplingParams(temperature=0.9, min_p=0.05),
    "sampled, all of them": _mixed_sampled,
}
# Seeds at the ends of their range, and several choices of one seed.
KEYS = ((0, 0), (7, 0), (7, 1), (7, 2), (-1, 0), (2**64 - 1, 3), (-(2**63), 0))


def _budget(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    return question


def _one_token(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    return _with(question, max_tokens=1)


def _stop_id(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    return _stopping(question, {draw.choice(free)})


def _stop_ids(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    late = free[len(free) // 2 :]
    return _stopping(question, {draw.choice(late), draw.choice(late), 1})


def _stop_at_budget(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    """The last token that the budget allows is the stop token."""
    stop = draw.choice(free)
    return _stopping(question, {stop}, max_tokens=free.index(stop) + 1)


def _stop_after_budget(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    """The first token that the budget does not allow is the stop token."""
    stop = draw.choice(free)
    return _stopping(question, {stop}, max_tokens=max(free.index(stop), 1))


def _min_tokens(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    """The answer would stop before it may."""
    stop = draw.choice(free)
    sampling = replace(question.params.sampling, min_tokens=min(free.index(stop) + 3, question.params.max_tokens))
    if sampling.allowed_token_ids is not None:
        sampling = replace(sampling, allowed_token_ids=(*sampling.allowed_token_ids, 0))
    return _stopping(question, {stop}, sampling=sampling)


def _stop_string(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    return _with(question, stop=(_string_of(reference.text(free), draw),))


def _stop_strings(question: Question, free: Sequence[int], reference: Reference, draw: random.Random) -> Question:
    """One holds another, the longest comes first, one never occurs; and a stop token late in the answer."""
    word = _string_of(reference.text(free), draw, length=4)
    stops = dict.fromkeys((word + "\x07never", word, word[1:] or word, _string_of(reference.text(free), draw)))
    return _stopping(question, {free[-1]}, stop=tuple(stops))


STOPS: dict[str, Callable[[Question, Sequence[int], Reference, random.Random], Question]] = {
    "budget": _budget,
    "one token": _one_token,
    "stop id": _stop_id,
    "stop ids": _stop_ids,
    "stop at budget": _stop_at_budget,
    "stop after budget": _stop_after_budget,
    "stop id, min tokens": _min_tokens,
    "stop string": _stop_string,
    "stop strings": _stop_strings,
}


def make_question(
    question_id: str,
    *,
    prompt: tuple[str, tuple[int, ...]],
    processor: str,
    stop: str,
    reference: Reference,
    max_tokens: int,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
    adapter: str | None = None,
) -> Question:
    """Make a question of these kinds.

    Args:
        question_id: also seeds what is drawn.
        prompt: its name and ids.
        processor, stop: keys of ``PROCESSORS`` and ``STOPS``.
        reference: answers it without the processors, and without the stops.
        max_tokens: budget, unless the stop is about that.
        vocab_size: of the model.
        eos_token_ids: end every answer, besides what the stop says.
        adapter: as in ``Question``.
    """
    draw = random.Random(question_id)
    name, prompt_ids = prompt
    seed, choice = draw.choice(KEYS)
    params = DecodeParams(max_tokens, seed=seed, choice=choice, stop_token_ids=frozenset(eos_token_ids))
    question = Question(question_id, name, processor, stop, prompt_ids, params, adapter)
    question = _with(question, sampling=PROCESSORS[processor](Plain(question, reference, vocab_size, draw)))
    return STOPS[stop](question, reference.answer(question).token_ids, reference, draw)


def _stopping(question: Question, stop_token_ids: set[int], **changes: object) -> Question:
    return _with(question, stop_token_ids=question.params.stop_token_ids | stop_token_ids, **changes)


def _with(question: Question, **changes: object) -> Question:
    return replace(question, params=replace(question.params, **changes))  # type: ignore[arg-type]


def _string_of(text: str, draw: random.Random, length: int = 2) -> str:
    """A piece of ``text``, in letters that no half character can look like."""
    places = [place for place in range(len(text)) if text[place] in string.printable]
    if not places:
        return "never"
    place = draw.choice(places)
    piece = ""
    for char in text[place : place + length]:
        if char not in string.printable:
            break
        piece += char
    return piece
