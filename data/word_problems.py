"""The prompt source ``math``: the committed file of grade-school word problems, with worked solutions.

``word_problems.jsonl`` is written by ``scripts/make_word_problems`` (see ``word_problems.md`` for seed and licence).
The user turn is the problem as generated; the given completion is the worked solution, which ends in ``#### answer``.
Train and held-out part share no problem template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from importlib import resources

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import Split
from jacobi_llm.infer.prompt import Prompt

SOURCE_NAME = "math"
_FILE = "word_problems.jsonl"

# A minus sign belongs to the number unless it stands behind one ("9-6=3", "9 - 6").
_NUMBER = r"(?<![\d.,])(?:(?<!\d)(?<!\d\s)-)?\$?\d[\d,]*(?:\.\d+)?"
_LAST_LINE_ANSWER = re.compile(rf"####\s*({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)


@dataclass(frozen=True)
class WordProblem:
    """One line of the file.

    Attributes:
        id: ``math-TEMPLATE-NUMBER``.
        template: name of the generator; the unit of the split.
        split: train or held-out.
        question: the problem as generated.
        answer: the number, as text.
        solution: worked steps, one a line, the last being ``#### answer``.
    """

    id: str
    template: str
    split: Split
    question: str
    answer: str
    solution: str


@lru_cache(maxsize=1)
def read_word_problems() -> tuple[WordProblem, ...]:
    """Return all problems in file order.

    Raises:
        RunError: the installed file is missing or damaged.
    """
    try:
        text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
        records = [json.loads(line) for line in text.splitlines()]
        return tuple(WordProblem(**{**record, "split": Split(record["split"])}) for record in records)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{_FILE}: the installed file is missing or damaged ({error}); install the package again"
        ) from error


def as_prompts() -> list[Prompt]:
    """Return all problems as prompts, with solution (completion), answer and template (group)."""
    return [
        Prompt(
            id=problem.id,
            source=SOURCE_NAME,
            source_index=index,
            messages=None,
            text=problem.question,
            completion=problem.solution,
            group=problem.template,
            answer=problem.answer,
        )
        for index, problem in enumerate(read_word_problems())
    ]


def is_correct(problem_answer: str, text: str) -> bool:
    """Say whether a completion gives the right number.

    The number read is the one behind the last ``####``, else the last number in the text; thousands separators, a
    dollar sign and trailing zeros do not matter.
    """
    marked = _LAST_LINE_ANSWER.findall(text)
    numbers = marked or _ANY_NUMBER.findall(text)
    if not numbers:
        return False
    given, expected = _number(numbers[-1]), _number(problem_answer)
    return given is not None and expected is not None and given == expected


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip().replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
