"""What the schema says of each setting: its kind, how text becomes its value, and how a wrong value is explained.

YAML scalars and flag values go through the same functions here, so that ``train.lr: 1e-4`` in a file and
``--train.lr 1e-4`` on the command line cannot differ.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from jacobi_llm.configs.schema import Recipe, Section

NULL_WORDS = frozenset({"null", "Null", "NULL", "~"})


@dataclass(frozen=True)
class SettingField:
    """One setting of one section.

    Attributes:
        key: full name, ``section.name``.
        base: type of one value: ``str``, ``int``, ``float``, ``bool`` or a ``StrEnum``.
        optional: whether null is a value.
        many: whether the value is a list (or a tuple of fixed length).
        single_too: whether one bare value may stand for a list of one (``str | list[str]``).
        verbatim: whether one bare value is one item as it stands, commas and white space included.
        words: values that are words where the others are numbers (``int | Auto``).
        info: pydantic's own record, with description and default.
    """

    key: str
    base: type
    optional: bool
    many: bool
    single_too: bool
    verbatim: bool
    words: tuple[str, ...]
    info: FieldInfo

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]

    @property
    def choices(self) -> list[str]:
        """The values of an enumeration; empty for the other types."""
        return [str(member) for member in self.base] if issubclass(self.base, StrEnum) else []

    def default_text(self) -> str:
        """The default as a person would type it after the flag."""
        return as_text(self.info.get_default(call_default_factory=True))


def as_text(value: object) -> str:
    """Writes a value of the schema as a person would type it: ``null``, ``true``, ``1,8,16``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(as_text(item) for item in value)
    return str(value)


def _describe(key: str, info: FieldInfo) -> SettingField:
    members = _members(info.annotation)
    optional = type(None) in members
    members = [member for member in members if member is not type(None)]
    lists = [member for member in members if typing.get_origin(member) in (list, tuple)]
    single_too = bool(lists) and len(members) > 1
    scalars = _members(typing.get_args(lists[0])[0]) if lists else members
    base = scalars[0]
    if not isinstance(base, type):
        raise TypeError(f"{key}: settings of type {info.annotation} are not supported")
    words = tuple(str(word) for other in scalars[1:] if issubclass(other, StrEnum) for word in other)
    extra = info.json_schema_extra
    verbatim = isinstance(extra, dict) and bool(extra.get("verbatim"))
    return SettingField(key, base, optional, bool(lists), single_too, verbatim, words, info)


def _members(annotation: Any) -> list[Any]:
    """The types of a union, or the one type, without their constraints."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return [typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in members]


@cache
def section_types() -> Mapping[str, type[Section]]:
    """Sections of a recipe in their order, by name."""
    sections: dict[str, type[Section]] = {}
    for name, info in Recipe.model_fields.items():
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, Section)):
            raise TypeError(f"Recipe.{name} must be a Section")
        sections[name] = info.annotation
    return sections


@cache
def setting_fields() -> Mapping[str, SettingField]:
    """Every setting by its full key (``section.name``), in the order of the schema."""
    return {
        f"{section}.{name}": _describe(f"{section}.{name}", info)
        for section, model in section_types().items()
        for name, info in model.model_fields.items()
    }


def normalise(name: str) -> str:
    """Spells a key as the schema does: ``-`` and ``_`` are alike."""
    return name.strip().replace("-", "_")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)``, or nothing when no known name is near."""
    by_spelling = {normalise(candidate): candidate for candidate in known}
    wanted = normalise(name)
    near = difflib.get_close_matches(wanted, by_spelling, n=1, cutoff=0.6)
    return f" (did you mean {by_spelling[near[0]]}?)" if near else ""


def suggest_key(key: str) -> str:
    """Suggestion for an unknown ``section.name`` (or bare name): a typo, or a setting that lives in another section."""
    known = setting_fields()
    leaf = normalise(key).rpartition(".")[2]
    moved = leaf.replace("_", ".", 1)
    homes = [moved] if moved in known else [field.key for field in known.values() if field.name == leaf]
    if homes:
        return f" (did you mean {' or '.join(homes)}?)"
    return suggestion(key, known)


def value_from_text(field: SettingField, text: str, *, quoted: bool = False) -> Any:
    """Turns one scalar, from a YAML file or a flag, into what the schema validates.

    Numbers and booleans stay text here: pydantic reads them, so that ``1e-4`` is a float although YAML 1.1 calls it a
    string, and text settings keep ``010`` or ``yes`` as they were written.
    """
    if field.optional and not quoted and text in NULL_WORDS:
        return None
    if field.verbatim:
        return [text]
    if field.many and not quoted and (not field.single_too or "," in text):
        return [_scalar(field, part.strip()) for part in text.strip("[]").split(",") if part.strip()]
    return _scalar(field, text)


def value_from_list(field: SettingField, texts: Iterable[str]) -> list[Any]:
    """Turns the scalars of a list into what the schema validates."""
    return [_scalar(field, text) for text in texts]


def _scalar(field: SettingField, text: str) -> Any:
    words = field.choices or field.words
    if not words:
        return text
    spelling = {normalise(word): word for word in words}
    return spelling.get(normalise(text).lower(), text)


def remedy(field: SettingField | None, error: Mapping[str, Any]) -> str:
    """What to write instead, for one error record of pydantic."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if value is None and kind != "missing":
        return "it needs a value"
    if kind in ("too_short", "too_long", "missing") and field is not None and field.many:
        length = context.get("min_length") or context.get("max_length")
        if isinstance(field.info.default, tuple):
            return f"give {len(field.info.default)} values, such as {field.default_text()}"
        return f"give at least {length} value{'s' if length != 1 else ''}, such as {field.default_text()}"
    if kind == "enum" and field is not None:
        return f"use one of {', '.join(field.choices)}{suggestion(str(value), field.choices)}"
    if kind == "int_parsing" and field is not None and field.words:
        return f"give a whole number, or {' or '.join(field.words)}"
    fixed = {
        "int_parsing": "give a whole number",
        "int_type": "give a whole number",
        "int_from_float": "give a whole number",
        "int_parsing_size": "give a smaller number",
        "float_parsing": "give a number",
        "float_type": "give a number",
        "finite_number": "give a finite number",
        "bool_parsing": "give true or false",
        "bool_type": "give true or false",
        "string_type": "give text",
        "list_type": "give a list, such as [1, 8, 16]",
        "tuple_type": "give a list of numbers",
    }
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    if kind in bounds:
        word, bound = bounds[kind]
        return f"it must be {word} {context[bound]}"
    return fixed.get(kind) or str(error["msg"]).removeprefix("Value error, ")
