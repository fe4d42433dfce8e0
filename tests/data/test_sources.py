"""Prompt sources by name, their splits and draws, and jacobi-data prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import OnBadInput, SourceConfig, Split, Turns
from jacobi_llm.data.cli import main
from jacobi_llm.data.sources import is_heldout, read_source, to_json_line
from jacobi_llm.infer.prompt import Message, parse_prompt, read_prompt_file


def prompt_file(folder: Path, count: int = 200) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{index}", "prompt": f"say {index}"}) + "\n" for index in range(count)))
    return path


@pytest.mark.parametrize("source", ["math", "stdlib"])
def test_train_and_heldout_share_nothing(source: str) -> None:
    train, heldout = (read_source(source, split).prompts for split in (Split.TRAIN, Split.HELDOUT))
    everything = {prompt.id: prompt for prompt in read_source(source, Split.ALL).prompts}
    for field in ("id", "group", "text"):
        assert {getattr(prompt, field) for prompt in train}.isdisjoint(getattr(prompt, field) for prompt in heldout)
    assert 0.05 < len(heldout) / len(everything) < 0.2
    assert len(train) + len(heldout) > 0.99 * len(everything)
    assert all(everything[prompt.id] == prompt for prompt in train + heldout)


def test_a_file_is_split_by_hash(tmp_path: Path) -> None:
    path = str(prompt_file(tmp_path))
    train, heldout, everything = (read_source(path, split).prompts for split in (Split.TRAIN, Split.HELDOUT, Split.ALL))
    assert sorted(train + heldout, key=lambda prompt: prompt.source_index) == everything
    assert {prompt.id for prompt in heldout} == {prompt.id for prompt in everything if is_heldout(prompt.id)}
    assert 5 <= len(heldout) <= 40


def test_a_group_stays_together(tmp_path: Path) -> None:
    path = tmp_path / "grouped.jsonl"
    lines = [{"id": str(index), "prompt": "x", "group": f"g{index % 30}"} for index in range(90)]
    path.write_text("\n".join(map(json.dumps, lines)))
    train, heldout = (read_source(str(path), split).prompts for split in (Split.TRAIN, Split.HELDOUT))
    assert {prompt.group for prompt in train}.isdisjoint(prompt.group for prompt in heldout)


def test_a_draw_is_seeded_and_grows(tmp_path: Path) -> None:
    path = str(prompt_file(tmp_path))

    def draw(limit: int | None, seed: int) -> list[int]:
        return [prompt.source_index for prompt in read_source(path, Split.ALL, limit=limit, seed=seed).prompts]

    assert len(draw(10, 0)) == len(set(draw(10, 0))) == 10
    assert draw(10, 0) == sorted(draw(10, 0)) != draw(10, 1)
    assert set(draw(10, 0)) < set(draw(11, 0))
    assert draw(10**6, 0) == draw(None, 0) == list(range(200))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean stdlib"):
        read_source("stdlb", Split.ALL)
    with pytest.raises(UsageError, match="no such file or folder"):
        read_source(str(tmp_path / "none.jsonl"), Split.ALL)
    with pytest.raises(UsageError, match="a folder without data files"):
        read_source(str(tmp_path), Split.ALL)
    with pytest.raises(UsageError, match="--split all"):
        read_source(str(prompt_file(tmp_path, 1)), Split.HELDOUT)


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"source\.columns, source\.turns: says how records of files are read"):
        read_source("math", Split.ALL, reading=SourceConfig(columns=["prompt=x"], turns=Turns.ALL))
    with pytest.raises(UsageError, match="hub: without a name"):
        read_source("hub:", Split.ALL)


def test_skipped_lines_are_counted_and_renumber_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\nbroken\n{"prompt": "b"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: broken JSON"):
        read_source(str(path), Split.ALL)
    found = read_source(str(path), Split.ALL, on_bad_input=OnBadInput.SKIP)
    assert [prompt.source_index for prompt in found.prompts] == [0, 2]
    assert found.num_skipped == {"broken JSON": 1}


def test_a_written_line_reads_back() -> None:
    record = {
        "id": "a",
        "messages": [{"role": "user", "content": "é\n"}],
        "completion": "c",
        "answer": "4",
        "group": "g",
        "adapter": "french",
    }
    prompt = parse_prompt(record)
    assert prompt.messages == (Message("user", "é\n"),)
    assert json.loads(to_json_line(prompt)) == record


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_read_is_written(ending: str, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": "a", "prompt": "x", "completion": "y", "answer": "4", "group": "g", "adapter": "french"},
        {"id": "b", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    first, second = str(tmp_path / "in.jsonl"), str(tmp_path / f"out.{ending}")
    assert main(["prompts", "--input", first, "--split", "all", "--output", second]) == 0
    before, after = (read_source(path, Split.ALL).prompts for path in (first, second))
    assert [replace(prompt, source="") for prompt in before] == [replace(prompt, source="") for prompt in after]
    assert before[0].adapter == "french"


def test_the_command_writes_a_file_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "out.jsonl"
    arguments = ["prompts", "--input", "math", "--split", "heldout", "--limit", "5"]
    assert main([*arguments, "--output", str(target), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_prompts"], report["output"]) == (5, str(target))
    assert [path.name for path in target.parent.iterdir()] == ["out.jsonl"]
    expected = read_source("math", Split.HELDOUT, limit=5).prompts
    assert [(prompt.id, prompt.text) for prompt in read_prompt_file(target).prompts] == [
        (prompt.id, prompt.text) for prompt in expected
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out == target.read_text()


def test_the_command_reports_its_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "--input", "maths"]) == 2
    assert "did you mean math" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["prompts", "--output", str(tmp_path / "file" / "out.jsonl")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert main(["prompts", "--dry-run", "--output", str(tmp_path / "out.jsonl")]) == 0
    assert not (tmp_path / "out.jsonl").exists()
