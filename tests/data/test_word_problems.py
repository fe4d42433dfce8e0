"""The committed word problems and their grader."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from jacobi_llm.configs.schema import Split
from jacobi_llm.data.word_problems import as_prompts, is_correct, read_word_problems

ROOT = Path(__file__).resolve().parents[2]


def installed_reasoning_gym() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return ""


def test_counts_and_a_split_by_template() -> None:
    problems = read_word_problems()
    per_split = Counter(problem.split for problem in problems)
    assert per_split == {Split.TRAIN: 68 * 24, Split.HELDOUT: 17 * 12}
    templates = {split: {problem.template for problem in problems if problem.split is split} for split in per_split}
    assert templates[Split.TRAIN].isdisjoint(templates[Split.HELDOUT])
    assert len({problem.id for problem in problems}) == len({problem.question for problem in problems}) == len(problems)


def test_every_solution_gives_its_answer() -> None:
    for problem in read_word_problems():
        assert is_correct(problem.answer, problem.solution), problem.id
        assert problem.solution.splitlines()[-1].startswith("#### ")
        assert problem.question.endswith("Give the result as your final answer. Do not include units.")


def test_prompts_carry_solution_answer_and_template() -> None:
    problem, prompt = read_word_problems()[5], as_prompts()[5]
    assert (prompt.id, prompt.source, prompt.source_index) == (problem.id, "math", 5)
    assert (prompt.text, prompt.completion) == (problem.question, problem.solution)
    assert (prompt.answer, prompt.group) == (problem.answer, problem.template)


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("so it is 1200", True),
        ("#### 1,200", True),
        ("#### 1200.00 and then 7", True),
        ("#### 7\n#### $1,200.", True),
        ("1000+200=1200.", True),
        ("2400-1200", True),
        ("He has -1200", False),
        ("#### 12", False),
        ("1200 or 3", False),
        ("none", False),
        ("", False),
        ("####", False),
    ],
)
def test_grader(text: str, correct: bool) -> None:
    assert is_correct("1200", text) is correct


def test_grader_reads_negative_numbers() -> None:
    assert is_correct("-2", "3 - 5 = -2")
    assert is_correct("3", "9-6=3")
    assert not is_correct("2", "#### -2")


@pytest.mark.skipif(installed_reasoning_gym() != "0.1.25", reason="needs reasoning-gym 0.1.25")
def test_the_command_writes_the_same_bytes(tmp_path: Path) -> None:
    target = tmp_path / "again.jsonl"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_word_problems", target], check=True, capture_output=True)
    assert target.read_bytes() == (ROOT / "data" / "word_problems.jsonl").read_bytes()
