"""Schemas of prompt records: what is recognised, and what a record of each says.

=============  ===========================================================  ==========================================
schema         columns                                                      a sample
=============  ===========================================================  ==========================================
messages       ``messages``: a list of ``{"role", "content"}``              a dialogue
sharegpt       ``conversations`` (or ``conversation``): ``{"from",          a dialogue; human is the user, gpt the
               "value"}``, or ``{"role", "content"}``; ``system``           assistant
alpaca         ``instruction``; ``input`` or ``context``; ``output``,       instruction and, on a new line, the input if
               ``completion`` or ``response``; ``system``                   there is one; the output is the completion
prompt         ``prompt``, or ``question``; ``completion``, ``response``,   the prompt and its completion
               or, beside a question, ``answer``
text           ``text`` alone                                               the text is the prompt
=============  ===========================================================  ==========================================

``id``, ``group`` and ``answer`` (what a grader compares with) are read in every schema. Columns that are null are not
there; others are ignored.

A dialogue is a system turn or none, then user and assistant in turn. It is left out, and counted by this reason, when
it is *empty*, *only system*, *assistant first*, has *two user turns in a row* (or two assistant ones), a *system turn
inside*, an *empty user turn*, a *tool turn* (also the calls of an assistant), or an *unknown role*. Null and missing
content are empty; an empty assistant turn stays in the history. What follows the last user turn is the completion; if
that is empty there is none, and where the user has the last word a ``completion`` column counts. A dialogue of one user
turn is a plain prompt, so that it is the same in every schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jacobi_llm.configs.schema import PromptSchema, Turns
from jacobi_llm.infer.prompt import (
    BadRecordError,
    Message,
    checked_text,
    content_text,
    kind_of,
    parse_id,
    text_or_none,
    text_or_number,
)

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
_TOOL_ROLES = frozenset(
    ("tool", "function", "observation", "function_call", "function_response", "ipython", "tool_call")
)
_DIALOGUES = ("messages", "conversations", "conversation")
_KNOWN = (*_DIALOGUES, "instruction", "prompt", "question", "text")
NAMES = {
    PromptSchema.MESSAGES: "messages",
    PromptSchema.SHAREGPT: "ShareGPT",
    PromptSchema.ALPACA: "Alpaca",
    PromptSchema.PROMPT: "prompt/completion",
    PromptSchema.TEXT: "text",
}


# Of each schema, those of which a record must have one.
_COLUMNS = {
    PromptSchema.MESSAGES: _DIALOGUES,
    PromptSchema.SHAREGPT: _DIALOGUES,
    PromptSchema.ALPACA: ("instruction",),
    PromptSchema.PROMPT: ("prompt", "question"),
    PromptSchema.TEXT: ("text",),
}


class LeftOutError(Exception):
    """A well-formed record that gives no sample; the text is the reason that is counted."""


@dataclass(frozen=True)
class Sample:
    """One prompt of a record. Exactly one of ``messages`` and ``text`` is set."""

    id: str
    messages: tuple[Message, ...] | None
    text: str | None
    completion: str | None
    group: str | None
    answer: str | None
    adapter: str | None


def detect(record: Mapping[str, Any]) -> PromptSchema:
    """The schema of a record, by its columns.

    Raises:
        BadRecordError: none, or more than one.
    """
    there = {key for key, value in record.items() if value is not None}
    found: list[PromptSchema] = []
    if "messages" in there:
        found.append(PromptSchema.MESSAGES)
    if there & {"conversations", "conversation"}:
        found.append(PromptSchema.SHAREGPT)
    if "instruction" in there:
        found.append(PromptSchema.ALPACA)
    if there & {"prompt", "question"}:
        found.append(PromptSchema.PROMPT)
    if not found and "text" in there:
        found.append(PromptSchema.TEXT)
    if len(found) > 1:
        names = " and ".join(NAMES[schema] for schema in found)
        raise BadRecordError("columns of two schemas", f"columns of two schemas: {names}; name one with source.layout")
    if not found:
        columns = ", ".join(sorted(map(str, record))[:12]) or "none"
        raise BadRecordError(
            "no prompt in the record",
            f"no prompt in the record (columns found: {columns}); known are {', '.join(_KNOWN)}, "
            "others are named by source.columns",
        )
    return found[0]


def renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The record with columns under the names that this module knows; the mapped ones stand for nothing else."""
    # Where the prompt is named, no other column is taken for one.
    dropped = {*columns.values(), *(_KNOWN if set(columns) & set(_KNOWN) else ())}
    kept = {key: value for key, value in record.items() if key not in dropped}
    return {**kept, **{name: record.get(column) for name, column in columns.items()}}


def samples(
    record: Mapping[str, Any], schema: PromptSchema, turns: Turns, default_id: str, id_prefix: str = ""
) -> Iterator[Sample]:
    """The samples of one record: one, or with ``turns=all`` one for each assistant turn of a dialogue.

    Args:
        record: columns by name.
        schema: how they are read.
        turns: which turns of a dialogue are answered.
        default_id: of a record without one.
        id_prefix: what all ids begin with.

    Raises:
        BadRecordError: a value of a wrong type.
        LeftOutError: a dialogue that is none, or an empty prompt.
    """
    if all(record.get(column) is None for column in _COLUMNS[schema]):
        found = ", ".join(sorted(map(str, record))[:12]) or "none"
        reason = f"no {' or '.join(_COLUMNS[schema])} in the record"
        raise BadRecordError(reason, f"{reason} (columns found: {found})")
    id = id_prefix + parse_id(record.get("id"), default_id)
    text: str | None
    completion: str | None
    common = {"group": text_or_number(record, "group"), "adapter": text_or_none(record, "adapter")}
    answer = text_or_number(record, "answer")
    match schema:
        case PromptSchema.MESSAGES | PromptSchema.SHAREGPT:
            yield from _turn_samples(record, turns, id, {**common, "answer": answer})
            return
        case PromptSchema.ALPACA:
            text, completion = _alpaca_text(record), _first_text(record, ("output", "completion", "response"))
        case PromptSchema.TEXT:
            text, completion = text_or_none(record, "text"), None
        case _:
            is_question = record.get("prompt") is None
            text = text_or_none(record, "question" if is_question else "prompt")
            completion = _first_text(record, ("completion", "response"))
            if completion is None and is_question:
                completion = answer
    if not text or not text.strip():
        raise LeftOutError("empty prompt")
    system = _system_text(record)
    if system:
        messages = (Message("system", system), Message("user", text))
        yield Sample(id, messages, None, completion or None, answer=answer, **common)
    else:
        yield Sample(id, None, text, completion or None, answer=answer, **common)


def _system_text(record: Mapping[str, Any]) -> str | None:
    return text_or_none(record, "system") or text_or_none(record, "system_prompt")


def _alpaca_text(record: Mapping[str, Any]) -> str:
    parts = (text_or_none(record, "instruction"), _first_text(record, ("input", "context")))
    return "\n".join(part for part in parts if part and part.strip())


def _first_text(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of the texts under ``keys`` that is there; all of them must be texts."""
    return next((text for text in [text_or_none(record, key) for key in keys] if text is not None), None)


def _dialogue(record: Mapping[str, Any]) -> list[Message]:
    key = next(key for key in _DIALOGUES if record.get(key) is not None)
    value = record[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRecordError(f"'{key}' is not a list", f"'{key}' is {kind_of(value)}, not a list")
    turns = [_turn(item, f"{key}[{index}]") for index, item in enumerate(value)]
    system = _system_text(record)
    if system and not (turns and turns[0].role == "system"):
        turns.insert(0, Message("system", system))
    return _checked_dialogue(turns)


def _turn(item: object, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise BadRecordError("turn is not an object", f"{place} is {kind_of(item)}, not an object")
    role = item.get("role") if item.get("role") is not None else item.get("from")
    if not isinstance(role, str):
        raise BadRecordError("turn without a role", f"{place}: the role is {kind_of(role)}, not text")
    if role.lower() in _TOOL_ROLES or item.get("tool_calls") or item.get("function_call"):
        raise LeftOutError("tool turn")
    if role.lower() not in _ROLES:
        raise LeftOutError("unknown role")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    return Message(_ROLES[role.lower()], content_text(content, place))


def _checked_dialogue(turns: list[Message]) -> list[Message]:
    """The turns, if they are a dialogue.

    Raises:
        LeftOutError: they are no dialogue.
    """
    if not turns or all(not turn.content.strip() for turn in turns):
        raise LeftOutError("empty")
    spoken = turns[1:] if turns[0].role == "system" else turns
    if not spoken:
        raise LeftOutError("only system")
    for index, turn in enumerate(spoken):
        expected = ("user", "assistant")[index % 2]
        if turn.role == "system":
            raise LeftOutError("system turn inside")
        if turn.role != expected:
            raise LeftOutError("assistant first" if index == 0 else f"two {turn.role} turns in a row")
        if turn.role == "user" and not turn.content.strip():
            raise LeftOutError("empty user turn")
    return turns


def _turn_samples(record: Mapping[str, Any], turns: Turns, id: str, common: dict[str, Any]) -> Iterator[Sample]:
    dialogue = _dialogue(record)
    given = text_or_none(record, "completion") or text_or_none(record, "response")
    users = [index for index, turn in enumerate(dialogue) if turn.role == "user"]
    chosen = users if turns is Turns.ALL else users[-1:]
    kept = {**common, "group": common["group"] or (id if turns is Turns.ALL else None)}
    for number, index in enumerate(chosen):
        completion = (dialogue[index + 1].content if index + 1 < len(dialogue) else given) or None
        if completion is None and index != users[-1]:
            continue
        history = tuple(dialogue[: index + 1])
        is_plain = len(history) == 1
        yield Sample(
            f"{id}/{number}" if turns is Turns.ALL and len(users) > 1 else id,
            None if is_plain else history,
            history[0].content if is_plain else None,
            completion,
            **kept,
        )


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """``name=column`` pairs of ``source.columns``.

    Raises:
        ValueError: a pair that is none, or a name that no schema has.
    """
    names = {
        *_KNOWN,
        "input",
        "context",
        "output",
        "system",
        "system_prompt",
        "completion",
        "response",
        "answer",
        "id",
        "group",
        "adapter",
    }
    columns: dict[str, str] = {}
    for pair in pairs:
        name, sign, column = pair.partition("=")
        if not sign or not column or name not in names:
            raise ValueError(f"{pair!r} is not NAME=COLUMN with a NAME of {', '.join(sorted(names))}")
        columns[name] = checked_text(column, "source.columns")
    return columns
