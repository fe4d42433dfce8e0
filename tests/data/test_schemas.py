"""Layouts of rows: the same dialogue in each gives the same prompt; what cannot be used is counted by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import OnBadInput, PromptFormat, PromptSchema, SourceConfig, Split, Turns
from jacobi_llm.data.cli import main
from jacobi_llm.data.prompt_reader import PromptReader
from jacobi_llm.data.sources import PromptSet, PromptStream, is_heldout, read_source
from jacobi_llm.infer.prompt import Message, render_prompt
from tests.data.test_readers import write

DIALOGUES = [("Name a colour.", "Blue."), ("Add.\n2 and 3", "5"), ("Say <nothing> twice  ", "nothing nothing")]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in DIALOGUES
    ],
    "parts": [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": q[:3]}, {"type": "text", "text": q[3:]}]},
                {"role": "assistant", "content": a, "tool_calls": None},
            ]
        }
        for q, a in DIALOGUES
    ],
    "sharegpt": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in DIALOGUES],
    "alpaca": [{"instruction": q.partition("\n")[0], "input": q.partition("\n")[2], "output": a} for q, a in DIALOGUES],
    "completion": [{"prompt": q, "completion": a} for q, a in DIALOGUES],
    "response": [{"prompt": q, "response": a} for q, a in DIALOGUES],
}


def read(folder: Path, *records: object, **reading: Any) -> PromptSet:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return read_source(str(path), Split.ALL, reading=SourceConfig.model_validate(reading))


def turns(*pairs: tuple[str, str | None]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_prompts(tmp_path: Path, layout: str, ending: str) -> None:
    if (layout, ending) == ("parts", "parquet"):
        pytest.skip("a Parquet column holds text or lists, not both")
    found = read_source(str(write(tmp_path / f"a.{ending}", LAYOUTS[layout])), Split.ALL).prompts
    assert [(prompt.id, prompt.messages, prompt.text, prompt.completion) for prompt in found] == [
        (str(number), None, question, answer) for number, (question, answer) in enumerate(DIALOGUES, start=1)
    ]


def test_every_layout_gives_the_same_tokens(tmp_path: Path, tiny_loaded: Any) -> None:
    tokenizer = tiny_loaded("llama", torch.float64).tokenizer
    ids = {
        name: [
            render_prompt(prompt, tokenizer, PromptFormat.CHAT)
            for prompt in read_source(str(write(tmp_path / f"{name}.jsonl", rows)), Split.ALL).prompts
        ]
        for name, rows in LAYOUTS.items()
    }
    assert all(one == ids["messages"] for one in ids.values())
    assert all(ids["messages"])


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"ask": "q", "reply": "a", "topic": "t"}]
    with pytest.raises(UsageError, match=r"columns found: ask, reply, topic.*source\.columns"):
        read(tmp_path, *rows)
    [prompt] = read(tmp_path, *rows, columns=["prompt=ask", "completion=reply"], group_column="topic").prompts
    assert (prompt.text, prompt.completion, prompt.group, prompt.answer) == ("q", "a", "t", None)
    for pair in ("promt=ask", "x", "prompt="):
        with pytest.raises(UsageError, match=r"source\.columns: .*is not NAME=COLUMN"):
            read(tmp_path, *rows, columns=[pair])


def test_the_instructions_of_dolly_keep_context_and_response(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Who?", "context": "Ann did it.", "response": "Ann", "category": "qa"},
        {"instruction": "Why?", "context": "", "response": "So."},
        {"instruction": "", "input": "only input", "output": "o", "response": None},
    ]
    assert [(prompt.text, prompt.completion) for prompt in read(tmp_path, *rows).prompts] == [
        ("Who?\nAnn did it.", "Ann"),
        ("Why?", "So."),
        ("only input", "o"),
    ]


def test_a_named_schema_wins_over_what_a_row_looks_like(tmp_path: Path) -> None:
    row = {"prompt": "p", "messages": turns(("user", "q"), ("assistant", "a"))["messages"]}
    with pytest.raises(UsageError, match=r"columns of two schemas: messages and prompt.*source\.layout"):
        read(tmp_path, row)
    assert read(tmp_path, row, layout=PromptSchema.MESSAGES).prompts[0].text == "q"
    assert read(tmp_path, row, layout=PromptSchema.PROMPT).prompts[0].text == "p"


LEFT_OUT = {
    "empty": [turns(), turns(("user", "")), {"conversations": []}],
    "only system": [turns(("system", "s"))],
    "assistant first": [turns(("assistant", "a"), ("user", "q")), turns(("system", "s"), ("assistant", "a"))],
    "unknown role": [turns(("narrator", "n"), ("user", "q"))],
    "tool turn": [
        turns(("user", "q"), ("tool", "t")),
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
    ],
    "two user turns in a row": [turns(("user", "a"), ("user", "b"), ("assistant", "c"))],
    "two assistant turns in a row": [turns(("user", "a"), ("assistant", "b"), ("assistant", "c"))],
    "system turn inside": [turns(("user", "a"), ("system", "b"), ("user", "c"))],
    "empty user turn": [turns(("user", None), ("assistant", "a"))],
    "empty prompt": [{"prompt": ""}, {"instruction": " ", "output": "x"}],
}


def test_dialogues_that_are_none_are_counted_by_name(tmp_path: Path) -> None:
    rows = [row for rows in LEFT_OUT.values() for row in rows]
    found = read(tmp_path, *rows, {"prompt": "good"})
    assert found.num_skipped == {reason: len(rows) for reason, rows in LEFT_OUT.items()}
    assert [prompt.text for prompt in found.prompts] == ["good"]
    assert found.summary is not None
    assert "read as prompt/completion: 1 prompt, 15 skipped: 3 empty, 2 assistant first" in found.summary
    with pytest.raises(RunError, match="15 of 16 records are bad"):
        read(tmp_path, *rows, {"prompt": "good"}, max_bad_share=0.9)
    with pytest.raises(UsageError, match="no prompt in it"):
        read(tmp_path, *rows)


def test_parts_that_are_no_text_are_bad_records(tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "url": "u"}]}]}
    with pytest.raises(UsageError, match="content of type 'image_url' is not supported"):
        read(tmp_path, image)


def test_null_content_is_an_empty_turn_never_a_word(tmp_path: Path) -> None:
    rows = [turns(("user", "q"), ("assistant", content), ("user", "r"), ("assistant", "a")) for content in (None, "")]
    del rows[0]["messages"][1]["content"]
    first, second = read(tmp_path, *rows).prompts
    assert first.messages == second.messages == (Message("user", "q"), Message("assistant", ""), Message("user", "r"))
    unanswered = read(tmp_path, turns(("user", "q"), ("assistant", None))).prompts[0]
    assert (unanswered.text, unanswered.completion) == ("q", None)


def test_every_assistant_turn_or_the_last(tmp_path: Path) -> None:
    row = turns(
        ("system", "s"),
        ("user", "1"),
        ("assistant", "a"),
        ("user", "2"),
        ("assistant", ""),
        ("user", "3"),
        ("assistant", "c"),
    )
    other = {"prompt": "p", "id": "x"}
    [last, plain] = read(tmp_path, row, other).prompts
    assert (last.id, last.source_index, last.completion, plain.source_index) == ("1", 0, "c", 1)
    assert last.messages is not None
    assert [turn.content for turn in last.messages] == ["s", "1", "a", "2", "", "3"]
    found = read(tmp_path, row, other, turns=Turns.ALL).prompts
    assert [(p.id, p.source_index, p.completion, p.group) for p in found] == [
        ("1/0", 0, "a", "1"), ("1/2", 1, "c", "1"), ("x", 2, None, None),
    ]  # fmt: skip
    assert found[0].messages == (Message("system", "s"), Message("user", "1"))
    assert found[1].messages == last.messages


def test_samples_of_one_dialogue_stay_in_one_part(tmp_path: Path) -> None:
    rows = [turns(("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")) for _ in range(100)]
    path = write(tmp_path / "a.jsonl", rows)
    parts = {
        split: {
            p.id.partition("/")[0] for p in read_source(str(path), split, reading=SourceConfig(turns=Turns.ALL)).prompts
        }
        for split in (Split.TRAIN, Split.HELDOUT)
    }
    assert parts[Split.TRAIN].isdisjoint(parts[Split.HELDOUT])
    assert all(is_heldout(one) for one in parts[Split.HELDOUT])


def test_system_text_from_a_column(tmp_path: Path) -> None:
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    alpaca = {"system": "Be brief.", "instruction": "q", "input": "", "output": "a"}
    for prompt in read(tmp_path, row, alpaca).prompts:
        assert prompt.messages == (Message("system", "Be brief."), Message("user", "q"))
        assert prompt.completion == "a"


def test_the_command_reports_and_writes_what_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*LAYOUTS["sharegpt"], {"conversations": []}, turns(("user", "a"), ("assistant", "b"), ("user", "c"))]
    path = str(write(tmp_path / "in.json", rows))
    for name in ("out.jsonl", "out.parquet"):
        flags = ["prompts", "--input", path, "--split", "all", "--output", str(tmp_path / name)]
        assert main(flags) == 0
        assert (
            "in.json: read as ShareGPT: 3 dialogues and messages: 1 dialogue, 1 skipped: 1 empty"
            in capsys.readouterr().err
        )
    first, second = (read_source(str(tmp_path / name), Split.ALL).prompts for name in ("out.jsonl", "out.parquet"))
    assert [(p.id, p.messages, p.text, p.completion) for p in first] == [
        (p.id, p.messages, p.text, p.completion) for p in second
    ]
    assert [p.id for p in first] == ["1", "2", "3", "5"]
    assert (
        main(["prompts", "--input", path, "--output", str(tmp_path / "no.jsonl"), "--source.max-bad-share", "0.1"]) == 1
    )
    assert not (tmp_path / "no.jsonl").exists()


# Any row at all -------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
)
NAMES = st.sampled_from(
    [
        *("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "response", "text"),
        *("id", "system", "group", "answer", "role", "content", "from", "value", "tool_calls", "type", "other"),
    ]
)
ROLES = st.sampled_from(("user", "human", "assistant", "gpt", "system", "tool", "function", "narrator", ""))
TURN = st.fixed_dictionaries({}, optional={"role": ROLES, "from": ROLES, "content": SCALARS, "value": SCALARS})
VALUES = st.recursive(
    SCALARS | st.lists(TURN, max_size=4),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(NAMES, VALUES, max_size=5) | VALUES, min_size=1, max_size=8),
    schema=st.sampled_from(PromptSchema),
    which=st.sampled_from(Turns),
    ending=st.sampled_from(("jsonl", "json")),
)
def test_every_row_is_in_the_output_or_counted(
    tmp_path: Path, rows: list[Any], schema: PromptSchema, which: Turns, ending: str
) -> None:
    path = tmp_path / f"any.{ending}"
    lines = map(json.dumps, rows)
    path.write_text("\n".join(lines) if ending == "jsonl" else json.dumps(rows), encoding="utf-8")
    reader = PromptReader(str(path), SourceConfig(layout=schema, turns=which), OnBadInput.SKIP)
    prompts = []
    try:
        for prompt in reader.prompts():
            prompts.append(prompt)
    except UsageError as error:
        assert "no prompt in it" in str(error)  # noqa: PT017
        assert not prompts
    assert reader.num_records == len(rows)
    assert reader.num_read.total() + reader.num_skipped.total() == len(rows)
    assert len(prompts) >= reader.num_read.total()
    assert which is Turns.ALL or len(prompts) == reader.num_read.total()
    assert len({prompt.source_index for prompt in prompts}) == len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(reason for reason in reader.num_skipped)


def test_a_stream_is_not_gathered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": str(index)} for index in range(100)])
    stream = iter(PromptStream(str(path), Split.ALL))
    assert [next(stream).text for _ in range(3)] == ["0", "1", "2"]
