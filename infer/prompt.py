"""Prompts: the JSON of one request, files of them, and the token ids that the model reads.

One record of a prompt file (JSON Lines, UTF-8) is an object with

- ``prompt`` (a string), or ``messages`` (a list of ``{"role", "content"}``) - exactly one of the two;
- ``id`` (a string or an integer; the line number when absent);
- ``completion`` or ``response`` (a given answer), ``answer`` (what a grader compares with), ``group`` (what a split
  keeps together): all optional strings.

Content is a string, null (an empty turn) or a list of text parts, which are joined with nothing between them, so that
a text cut into parts reads the same as the whole. Unknown keys are ignored: prompt files carry other tools' columns.
"""

from __future__ import annotations

import codecs
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import OnBadInput, PromptFormat

ROLES = ("system", "developer", "user", "assistant")
MAX_LINE_BYTES = 16 << 20
MAX_REPORTED_FAULTS = 20
_BOM = b"\xef\xbb\xbf"
_TEMPLATE_FAULTS = (TemplateError, ValueError, TypeError, KeyError)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. ``content`` is plain text; null and parts are resolved when parsed."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One prompt, not yet rendered for a model. Exactly one of ``messages`` and ``text`` is set.

    Attributes:
        id: unique within its source.
        source: where it comes from (a source name or a file).
        source_index: position in the whole source, from 0, counted before any split or draw.
        messages: the conversation, the last turn not being the assistant's.
        text: a plain prompt.
        completion: a given answer, or None.
        group: what a split keeps together (a module, a problem template), or None.
        answer: the result that a grader compares with, or None.
        adapter: name of the adapter that answers, or None for the base weights.
    """

    id: str
    source: str
    source_index: int
    messages: tuple[Message, ...] | None
    text: str | None
    completion: str | None = None
    group: str | None = None
    answer: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class PromptFile:
    """What one file held: the prompts in file order, and how many lines were skipped for each reason."""

    prompts: list[Prompt]
    num_skipped_by_reason: dict[str, int] = field(default_factory=dict)


class BadRecordError(ValueError):
    """One record cannot be used.

    Attributes:
        reason: a short fixed phrase, which is counted.
        detail: the phrase with the value, which is shown.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail or reason


def parse_prompt(record: object, *, source: str = "-", source_index: int = 0, default_id: str | None = None) -> Prompt:
    """Read one record.

    Args:
        record: a decoded JSON value.
        source: name of the source, kept in the prompt.
        source_index: position in the source, from 0.
        default_id: used when the record has no id; the position plus 1 (the line number of a plain file) if None.

    Raises:
        BadRecordError: the record is not a prompt; the reason says why.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError("not a JSON object", f"not a JSON object but {kind_of(record)}")
    has_prompt = record.get("prompt") is not None
    has_messages = record.get("messages") is not None
    if has_prompt and has_messages:
        raise BadRecordError("both 'prompt' and 'messages'")
    if not has_prompt and not has_messages:
        found = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
        raise BadRecordError("no 'prompt' or 'messages'", f"no 'prompt' or 'messages' (keys found: {found})")
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    if has_prompt:
        text = text_or_none(record, "prompt")
        if text == "":
            raise BadRecordError("empty prompt")
    else:
        messages = _parse_messages(record["messages"])
    completion = text_or_none(record, "completion")
    return Prompt(
        id=parse_id(record.get("id"), default_id or str(source_index + 1)),
        source=source,
        source_index=source_index,
        messages=messages,
        text=text,
        completion=text_or_none(record, "response") if completion is None else completion,
        group=text_or_number(record, "group"),
        answer=text_or_number(record, "answer"),
        adapter=text_or_none(record, "adapter"),
    )


def read_prompt_file(path: str | Path, on_bad_input: OnBadInput = OnBadInput.FAIL) -> PromptFile:
    """Read a JSON Lines file of prompts; ``-`` reads standard input.

    A byte-order mark, blank lines and a missing final newline are fine. ``source_index`` of a prompt is its line
    number minus 1, so that skipping a bad line renumbers nothing.

    Args:
        path: the file.
        on_bad_input: FAIL reports the bad lines (the first 20) in one error; SKIP logs and counts each.

    Raises:
        UsageError: the file cannot be read or holds no prompt, or (FAIL) a line is bad: ``file:line: reason``.
    """
    name = "<stdin>" if str(path) == "-" else str(path)
    prompts: list[Prompt] = []
    faults: list[str] = []
    skipped: Counter[str] = Counter()
    first_line_of: dict[str, int] = {}
    for number, line in _lines(str(path), name):
        try:
            prompt = parse_prompt(decode_line(line), source=name, source_index=number - 1, default_id=str(number))
            if prompt.id in first_line_of:
                raise BadRecordError(
                    "duplicate id", f"duplicate id '{prompt.id}' (first on line {first_line_of[prompt.id]})"
                )
        except BadRecordError as error:
            skipped[error.reason] += 1
            fault = f"{name}:{number}: {printable(error.detail)}"
            if on_bad_input is OnBadInput.SKIP:
                _LOGGER.warning("%s; skipped", fault)
            elif len(faults) < MAX_REPORTED_FAULTS:
                faults.append(fault)
            continue
        first_line_of[prompt.id] = number
        prompts.append(prompt)
    if on_bad_input is OnBadInput.FAIL and faults:
        num_more = sum(skipped.values()) - len(faults)
        more = [f"{name}: {num_more} more bad lines"] if num_more else []
        raise UsageError([*faults, *more, f"{name}: mend these lines, or skip them with on_bad_input=skip"])
    if not prompts:
        num_skipped = sum(skipped.values())
        raise UsageError(
            f"{name}: no prompt in this file" + (f" ({num_skipped} bad lines skipped)" if num_skipped else "")
        )
    return PromptFile(prompts, dict(skipped))


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """Return the conversation; a plain prompt is one user turn."""
    if prompt.messages is not None:
        return prompt.messages
    return (Message("user", prompt.text or ""),)


def render_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, format: PromptFormat) -> list[int]:
    """Return the token ids that the model reads before it answers.

    CHAT renders the conversation with the tokenizer's chat template and opens the assistant's turn. Where the template
    refuses a system turn, or leaves it out, its text, a blank line and the first user turn are one user turn. RAW
    tokenises the text with the tokenizer's own rule for special tokens; white space is kept as it is in both.

    Raises:
        UsageError: no chat template, a template that refuses the conversation, messages in raw format, or a prompt
            that gives no token.
    """
    if prompt.text == "":
        raise UsageError(f"prompt '{prompt.id}': it is empty; give at least one character")
    if format is PromptFormat.RAW:
        if prompt.text is None:
            raise UsageError(f"prompt '{prompt.id}': 'messages' need the chat format; give 'prompt', or drop --raw")
        ids = _token_ids(tokenizer(prompt.text, add_special_tokens=True))
    else:
        ids = _render_chat(prompt, tokenizer)
    if not ids:
        raise UsageError(f"prompt '{prompt.id}': it gives no token")
    return ids


def _render_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise UsageError(f"prompt '{prompt.id}': the model's tokenizer has no chat template; use --raw")
    turns = as_messages(prompt)
    has_system = len(turns) > 1 and turns[0].role in ("system", "developer") and turns[1].role == "user"
    system = turns[0].content.strip() if has_system else ""
    try:
        text = _templated(turns, tokenizer)
        is_whole = system in text
    except _TEMPLATE_FAULTS as error:
        if not system:
            raise UsageError(f"prompt '{prompt.id}': the chat template refuses it: {_first_line(error)}") from error
        is_whole = False
    if not is_whole:
        # Some templates have no place for a system turn: they refuse it, or leave it out without a word.
        joined = (Message("user", f"{turns[0].content}\n\n{turns[1].content}"), *turns[2:])
        try:
            text = _templated(joined, tokenizer)
        except _TEMPLATE_FAULTS as error:
            raise UsageError(f"prompt '{prompt.id}': the chat template refuses it: {_first_line(error)}") from error
    # The template writes the beginning-of-sequence token itself where the model wants one.
    return _token_ids(tokenizer(text, add_special_tokens=False))


def _templated(turns: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    plain = [{"role": turn.role, "content": turn.content} for turn in turns]
    return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _token_ids(encoded: Mapping[str, Any]) -> list[int]:
    return [int(token) for token in encoded["input_ids"]]


def _parse_messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadRecordError("'messages' is not a list", f"'messages' is {kind_of(value)}, not a list")
    if not value:
        raise BadRecordError("empty 'messages'")
    turns = tuple(_parse_message(item, index) for index, item in enumerate(value))
    if next((turn.role for turn in turns if turn.role not in ("system", "developer")), "user") != "user":
        raise BadRecordError(
            "first turn is the assistant's", "the first turn is the assistant's: give a user turn first"
        )
    if turns[-1].role == "assistant":
        raise BadRecordError(
            "last turn is the assistant's", "the last turn is the assistant's: nothing is left to answer"
        )
    if all(turn.role in ("system", "developer") for turn in turns):
        raise BadRecordError("no user turn")
    if not any(turn.content for turn in turns):
        raise BadRecordError("empty prompt", "all turns are empty")
    return turns


def _parse_message(item: object, index: int) -> Message:
    if not isinstance(item, Mapping):
        raise BadRecordError("message is not an object", f"messages[{index}] is {kind_of(item)}, not an object")
    role = item.get("role")
    if role in ("tool", "function"):
        raise BadRecordError("tool messages are not supported", f"messages[{index}]: role '{role}' is not supported")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecordError("unknown role", f"messages[{index}]: unknown role {role!r}; roles: {', '.join(ROLES)}")
    return Message(role, content_text(item.get("content"), f"messages[{index}]"))


def content_text(value: object, place: str) -> str:
    """Return the text of a turn: null is empty, text parts are joined with nothing between them.

    Raises:
        BadRecordError: it holds something else than text.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return checked_text(value, place)
    if not isinstance(value, list):
        raise BadRecordError("bad message content", f"{place}: content is {kind_of(value)}, not text")
    return "".join(_part(part, place) for part in value)


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return checked_text(part, place)
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        if kind != "text":
            raise BadRecordError(
                "content that is not text", f"{place}: content of type {kind!r} is not supported, only text"
            )
        text = part.get("text")
        if isinstance(text, str):
            return checked_text(text, place)
    raise BadRecordError("bad message content", f"{place}: a content part has no text")


def parse_id(value: object, default: str) -> str:
    """Return an id as text.

    Raises:
        BadRecordError: it is neither a string nor an integer.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        found = str(value) if isinstance(value, float) else kind_of(value)
        raise BadRecordError("bad id", f"'id' is {found}, not a string or an integer")
    return checked_text(str(value), "'id'")


def text_or_none(record: Mapping[Any, Any], key: str) -> str | None:
    """Return an optional text of a record.

    Raises:
        BadRecordError: it is no string.
    """
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRecordError(f"'{key}' is not a string", f"'{key}' is {kind_of(value)}, not a string")
    return checked_text(value, f"'{key}'")


def text_or_number(record: Mapping[Any, Any], key: str) -> str | None:
    """Return an optional text or number of a record, as text.

    Raises:
        BadRecordError: it is neither.
    """
    value = record.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return text_or_none(record, key)


def checked_text(text: str, place: str) -> str:
    # A lone surrogate (a JSON escape such as \ud800) cannot be written back as UTF-8 or tokenised.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError("text that is not Unicode", f"{place}: half of a surrogate pair in the text") from None
    return text


def kind_of(value: object) -> str:
    """Name the JSON type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def printable(text: str) -> str:
    """Return the text with line breaks and control characters escaped, so that one fault stays one line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def decode_line(line: bytes) -> object:
    """Decode one JSON line.

    Raises:
        BadRecordError: not UTF-8, or not JSON.
    """
    if len(line) > MAX_LINE_BYTES:
        raise BadRecordError("line too long", f"line longer than {MAX_LINE_BYTES >> 20} MiB")
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadRecordError("not UTF-8", "not UTF-8: the file is UTF-16; save it as UTF-8")
    if b"\x00" in line:
        raise BadRecordError("NUL bytes", "NUL bytes in the line: the file is damaged or not text")
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRecordError("not UTF-8", f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRecordError("broken JSON", f"broken JSON: {error.msg} (column {error.colno})") from None
    except BadRecordError:
        raise
    except RecursionError:
        raise BadRecordError("broken JSON", "broken JSON: nested too deep") from None
    except ValueError:
        # Python's own limit, which is there against texts that take hours to convert.
        raise BadRecordError("broken JSON", "broken JSON: a number with thousands of digits") from None


def _refuse_constant(name: str) -> object:
    raise BadRecordError("broken JSON", f"broken JSON: {name} is not JSON")


def _lines(path: str, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes without the line end) of every line that is not blank.

    Raises:
        UsageError: the file cannot be opened or read.
    """
    try:
        if path == "-":
            yield from numbered_lines(sys.stdin.buffer)
        else:
            with Path(path).expanduser().open("rb") as stream:
                yield from numbered_lines(stream)
    except OSError as error:
        raise UsageError(f"{name}: cannot read the prompt file: {error.strerror or error}") from error


def numbered_lines(stream: BinaryIO) -> Iterable[tuple[int, bytes]]:
    """Yield (number from 1, bytes without the line end) of every line that is not blank; memory stays bounded."""
    number = 0
    while True:
        # Bounded, so that a file without line breaks cannot take all memory; the rest of a long line is read past.
        line = stream.readline(MAX_LINE_BYTES + 2)
        if not line:
            return
        number += 1
        tail = line
        while not tail.endswith(b"\n") and len(tail) > MAX_LINE_BYTES:
            tail = stream.readline(MAX_LINE_BYTES + 2)
            if not tail:
                break
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.rstrip(b"\r\n")
        if line.strip():
            yield number, line
