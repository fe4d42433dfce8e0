"""Prompt records, prompt files and their rendering (field cases P04, P06, P08, K01)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import OnBadInput, PromptFormat
from jacobi_llm.infer.prompt import (
    MAX_LINE_BYTES,
    MAX_REPORTED_FAULTS,
    BadRecordError,
    Message,
    as_messages,
    decode_line,
    parse_prompt,
    read_prompt_file,
    render_prompt,
)
from tests.tiny_models import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yes"}


def write(folder: Path, content: bytes | str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_prompt_and_its_optional_fields() -> None:
    prompt = parse_prompt({"id": 7, "prompt": "a  b\n", "response": "r", "answer": "4", "group": "g", "other": [1]})
    assert (prompt.id, prompt.text, prompt.messages) == ("7", "a  b\n", None)
    assert (prompt.completion, prompt.answer, prompt.group) == ("r", "4", "g")
    assert as_messages(prompt) == (Message("user", "a  b\n"),)


def test_content_null_and_parts() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    prompt = parse_prompt({"messages": [{"role": "system", "content": None}, {"role": "user", "content": parts}]})
    assert prompt.messages == (Message("system", ""), Message("user", "a b"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (5, "not a JSON object"),
        (None, "not a JSON object"),
        ({}, "no 'prompt' or 'messages'"),
        ({"prompt": "a", "messages": [USER]}, "both 'prompt' and 'messages'"),
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": 3}, "'prompt' is not a string"),
        ({"prompt": "a\ud800"}, "text that is not Unicode"),
        ({"prompt": "a", "id": 1.5}, "bad id"),
        ({"prompt": "a", "answer": [4]}, "'answer' is not a string"),
        ({"messages": []}, "empty 'messages'"),
        ({"messages": "hi"}, "'messages' is not a list"),
        ({"messages": ["hi"]}, "message is not an object"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, "no user turn"),
        ({"messages": [BOT, USER]}, "first turn is the assistant's"),
        ({"messages": [USER, BOT]}, "last turn is the assistant's"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty prompt"),
        ({"messages": [{"role": "user", "content": None}]}, "empty prompt"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role"),
        ({"messages": [USER, {"role": "tool", "content": "3"}]}, "tool messages are not supported"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad message content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": [3]}]}, "bad message content"),
    ],
)
def test_bad_records_say_why(record: object, reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        parse_prompt(record)
    assert caught.value.reason == reason


def test_two_user_turns_in_a_row_are_legal() -> None:
    assert parse_prompt({"messages": [USER, USER]}).messages == (Message("user", "hi"),) * 2


def test_file_with_bom_blank_lines_crlf_and_no_final_newline(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "\xc3\xa9", "id": "x"}')
    prompts = read_prompt_file(path).prompts
    assert [(prompt.id, prompt.text, prompt.source_index) for prompt in prompts] == [("1", "a", 0), ("x", "é", 3)]


BAD_LINES = [
    b"5",
    b'{"prompt": ',
    b"\x00\x00\x00",
    b'{"prompt": "\xff"}',
    b'{"prompt": "again", "id": "first"}',
    b'{"prompt": NaN}',
    b"[" * 100_000,
    b'{"prompt": "' + b"x" * (MAX_LINE_BYTES + 10) + b'"}',
]


def test_every_bad_line_is_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"prompt": "a", "id": "first"}\n' + b"\n".join(BAD_LINES) + b'\n{"prompt": "z"}')
    with pytest.raises(UsageError) as caught:
        read_prompt_file(path)
    places = [fault.split(" ")[0] for fault in caught.value.faults]
    assert places == [f"{path}:{number}:" for number in range(2, 10)] + [f"{path}:"]
    assert all("\n" not in fault and len(fault) < 300 for fault in caught.value.faults)


def test_skip_counts_and_logs_each_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, b'{"prompt": "a", "id": "first"}\n' + b"\n".join(BAD_LINES) + b'\n{"prompt": "z"}')
    read = read_prompt_file(path, OnBadInput.SKIP)
    assert [prompt.text for prompt in read.prompts] == ["a", "z"]
    assert read.prompts[1].source_index == 9
    assert read.num_skipped_by_reason == {
        "not a JSON object": 1,
        "broken JSON": 3,
        "NUL bytes": 1,
        "not UTF-8": 1,
        "duplicate id": 1,
        "line too long": 1,
    }
    assert len(caplog.records) == len(BAD_LINES)
    assert f"{path}:2: " in caplog.text


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"id": ' + b"9" * 5000 + b"}", "a number with thousands of digits"),
        (b'{"id": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_json_that_python_reads_and_json_does_not_have(line: bytes, detail: str) -> None:
    with pytest.raises(BadRecordError, match=detail) as caught:
        decode_line(line)
    assert caught.value.reason == "broken JSON"


def test_a_file_of_other_data_reports_the_first_lines_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompt_file(write(tmp_path, "a,b,c\n" * 500))
    assert len(caught.value.faults) == MAX_REPORTED_FAULTS + 2
    assert "480 more bad lines" in caught.value.faults[-2]


@pytest.mark.parametrize("content", ["", "\n\n", "5\n"])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="no prompt in this file"):
        read_prompt_file(write(tmp_path, content), OnBadInput.SKIP)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read the prompt file"):
            read_prompt_file(path)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\nx\n')))
    with pytest.raises(UsageError, match="<stdin>:2: broken JSON"):
        read_prompt_file("-")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
near_prompts = st.dictionaries(
    st.sampled_from(["id", "prompt", "messages", "completion", "answer", "group"]),
    json_values
    | st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": json_values})),
)
file_lines = st.binary(max_size=60) | (near_prompts | json_values).map(lambda value: json.dumps(value).encode())


@given(st.lists(file_lines, max_size=6).map(b"\n".join))
def test_no_bytes_make_anything_but_prompts_or_a_usage_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(content)
    for mode in OnBadInput:
        try:
            read = read_prompt_file(path, mode)
        except UsageError:
            continue
        assert len({prompt.id for prompt in read.prompts}) == len(read.prompts)
        for prompt in read.prompts:
            assert (prompt.text is None) != (prompt.messages is None)
            assert render_prompt(prompt, tiny_tokenizer(), PromptFormat.CHAT)


def test_chat_equals_the_tokenizers_own_template() -> None:
    tokenizer = tiny_tokenizer()
    expected = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    one_part = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for record in ({"prompt": "hi"}, {"messages": [USER]}, {"messages": one_part}):
        assert render_prompt(parse_prompt(record), tokenizer, PromptFormat.CHAT) == expected


def test_chat_has_no_second_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = "<|endoftext|>" + str(tokenizer.chat_template)
    prompt = parse_prompt({"prompt": "hi"})
    assert render_prompt(prompt, tokenizer, PromptFormat.CHAT).count(0) == 1
    assert render_prompt(prompt, tokenizer, PromptFormat.RAW)[0] == 0


def test_raw_keeps_white_space() -> None:
    tokenizer = tiny_tokenizer()
    text = "def f():\n\n    \treturn  1 \n"
    assert tokenizer.decode(render_prompt(parse_prompt({"prompt": text}), tokenizer, PromptFormat.RAW)) == text


def test_earlier_turns_with_eos_are_part_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    ids = render_prompt(parse_prompt({"messages": [USER, BOT, USER]}), tokenizer, PromptFormat.CHAT)
    assert ids.count(2) == 3


def test_rendering_refuses_clearly() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UsageError, match="chat format"):
        render_prompt(parse_prompt({"messages": [USER]}), tokenizer, PromptFormat.RAW)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="roles must alternate"):
        render_prompt(parse_prompt({"messages": [USER, USER]}), tokenizer, PromptFormat.CHAT)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="--raw"):
        render_prompt(parse_prompt({"prompt": "hi"}), tokenizer, PromptFormat.CHAT)


def test_answers_and_groups_may_be_numbers() -> None:
    prompt = parse_prompt({"prompt": "2 + 2?", "answer": 4, "group": 3})
    assert (prompt.answer, prompt.group) == ("4", "3")


def test_system_text_of_templates_without_a_place_for_it() -> None:
    tokenizer = tiny_tokenizer()
    prompt = parse_prompt({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]})
    joined = parse_prompt({"prompt": "Be brief.\n\nq"})
    users = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + users
    for template in (users, refuses):
        tokenizer.chat_template = template
        ids = render_prompt(prompt, tokenizer, PromptFormat.CHAT)
        assert ids == render_prompt(joined, tokenizer, PromptFormat.CHAT)
        assert tokenizer.decode(ids) == "[Be brief.\n\nq]"
