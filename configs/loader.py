"""Recipes: from a shipped name or a YAML file, plus flags, to one checked ``Recipe``; and back to YAML.

Every fault of the file and of the flags is found and reported in one go, each on its own line with file and line (or
flag), key, value and remedy. ``load_recipe`` is the front door; the command line uses ``resolve``, which also takes the
faults that parsing the flags has already found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.fields import (
    NULL_WORDS,
    SettingField,
    normalise,
    remedy,
    section_types,
    setting_fields,
    suggest_key,
    suggestion,
    value_from_list,
    value_from_text,
)
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Recipe

RESOLVED_NAME = "config.yaml"
_LONGEST_VALUE = 80


@dataclass(frozen=True)
class FlagValue:
    """One setting given on the command line.

    Attributes:
        key: full key as the schema spells it, ``section.name``.
        texts: the value, one item unless the setting is a list given as several arguments.
        label: the flag as it was typed, for messages.
    """

    key: str
    texts: tuple[str, ...]
    label: str


@dataclass
class _Source:
    """Settings gathered from one place, with where each was found."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)  # full key, or section -> start of the fault line
    faults: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, label: str) -> None:
        section, _, name = key.partition(".")
        self.data.setdefault(section, {})[name] = value
        self.labels[key] = label
        self.labels.setdefault(section, f"{label.partition(' ')[0].rstrip(':')}:")


def shipped_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files("jacobi_llm.configs").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(config: str | None = None, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Loads a recipe and lays overrides over it.

    Args:
        config: name of a shipped recipe or path of a YAML file; None starts from the defaults.
        overrides: text values by ``section.name`` (``-`` and ``_`` alike).

    Raises:
        UsageError: with one line for every fault of the file and of the overrides.
    """
    faults: list[str] = []
    flags: list[FlagValue] = []
    for name, text in (overrides or {}).items():
        key = normalise(name)
        if key in setting_fields():
            flags.append(FlagValue(key, (text,), f"--{name}"))
        else:
            faults.append(f"unknown key {name}{suggest_key(name)}")
    recipe, _ = resolve(config, flags, faults)
    return recipe


def resolve(
    config: str | None, flags: Sequence[FlagValue], faults: Iterable[str] = ()
) -> tuple[Recipe, frozenset[str]]:
    """Checks file and flags together.

    Args:
        config: name of a shipped recipe or path of a YAML file, or None.
        flags: settings of the command line; the last one of a key wins, and flags win over the file.
        faults: lines that parsing the command line has already found.

    Returns:
        The recipe, and the keys (``section.name``) that the file or a flag has set.

    Raises:
        UsageError: with all faults.
    """
    from_file = _read_file(config) if config is not None else _Source()
    from_flags = _read_flags(flags)
    merged = _Source(
        data={
            section: {**from_file.data.get(section, {}), **from_flags.data.get(section, {})}
            for section in [*from_file.data, *from_flags.data]
        },
        labels={**from_file.labels, **from_flags.labels},
    )
    lines = [*faults, *from_file.faults, *_check(from_file), *from_flags.faults, *_check(merged)]
    unique = list(dict.fromkeys(lines))
    if unique:
        raise UsageError(unique)
    keys = frozenset(f"{section}.{name}" for section, values in merged.data.items() for name in values)
    return Recipe.model_validate(merged.data), keys


def dump_recipe(recipe: Recipe) -> str:
    """Writes every resolved value as YAML, sections and keys in the order of the schema; ``load_recipe`` reads it."""
    dumped: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return dumped


def save_resolved(recipe: Recipe, folder: str | Path) -> Path:
    """Writes ``config.yaml`` into a run folder, which is made if need be; a reader never sees half a file.

    Raises:
        RunError: when the folder or the file cannot be written.
    """
    return write_atomically(Path(folder) / RESOLVED_NAME, dump_recipe(recipe))


def _locate(config: str) -> Traversable | Path:
    shipped = shipped_names()
    if config in shipped:
        return resources.files("jacobi_llm.configs") / f"{config}.yaml"
    path = Path(config)
    looks_like_path = path.suffix in (".yaml", ".yml") or os.sep in config
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"{config}: is a folder, --config takes a YAML file or a shipped name ({', '.join(shipped)})")
    near = suggestion(path.stem if looks_like_path else config, shipped)
    if looks_like_path:
        raise UsageError(f"{config}: no such file{near}")
    raise UsageError(f"--config {config}: no shipped recipe has this name{near}; there are {', '.join(shipped)}")


def _read_file(config: str) -> _Source:
    source = _Source()
    try:
        text = _locate(config).read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UsageError as error:
        source.faults.extend(error.faults)
    except OSError as error:
        source.faults.append(f"{config}: cannot be read ({error.strerror or error})")
    except UnicodeDecodeError:
        source.faults.append(f"{config}: is not UTF-8 text")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context or error).split())
        source.faults.append(f"{config}{line}: not valid YAML: {problem}")
    except (yaml.YAMLError, RecursionError) as error:
        source.faults.append(f"{config}: not valid YAML: {_first_line(error)}")
    else:
        if isinstance(root, yaml.MappingNode):
            _read_sections(config, root, source)
        elif root is not None:
            source.faults.append(f"{_at(config, root)}: a recipe is a mapping of sections, such as 'collect:'")
    return source


def _read_sections(config: str, root: yaml.MappingNode, source: _Source) -> None:
    sections = section_types()
    for name, key_node, node in _entries(config, "", root, source):
        if name not in sections:
            near = suggestion(name, sections)
            if not near:
                near = suggest_key(name)
            source.faults.append(f"{_at(config, key_node)}: unknown key {name}{near}")
        elif isinstance(node, yaml.MappingNode):
            source.labels[name] = f"{_at(config, key_node)}:"
            for entry, entry_key, value in _entries(config, f"{name}.", node, source):
                _read_setting(config, f"{name}.{entry}", entry_key, value, source)
        elif not (isinstance(node, yaml.ScalarNode) and _is_null(node)):
            source.faults.append(f"{_at(config, node)}: {name} is a section: write its keys below it, indented")


def _entries(
    config: str, prefix: str, mapping: yaml.MappingNode, source: _Source
) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """Entries of a mapping by normalised key, without second ones of the same key (which are faults)."""
    seen: dict[str, int] = {}
    entries: list[tuple[str, yaml.Node, yaml.Node]] = []
    for key_node, value in mapping.value:
        if not isinstance(key_node, yaml.ScalarNode):
            source.faults.append(f"{_at(config, key_node)}: keys are plain words")
            continue
        name = normalise(key_node.value)
        if name in seen:
            source.faults.append(f"{_at(config, key_node)}: {prefix}{name} is set twice (first in line {seen[name]})")
            continue
        seen[name] = key_node.start_mark.line + 1
        entries.append((name, key_node, value))
    return entries


def _read_setting(config: str, key: str, key_node: yaml.Node, node: yaml.Node, source: _Source) -> None:
    place = _at(config, key_node)
    setting = setting_fields().get(key)
    if setting is None:
        source.faults.append(f"{place}: unknown key {key}{suggest_key(key)}")
        return
    label = f"{place}: {key} ="
    if isinstance(node, yaml.ScalarNode):
        value = None if _is_null(node) else value_from_text(setting, node.value, quoted=node.style in ("'", '"'))
        source.put(key, value, label)
    elif (
        isinstance(node, yaml.SequenceNode)
        and setting.many
        and all(isinstance(item, yaml.ScalarNode) for item in node.value)
    ):
        source.put(key, value_from_list(setting, [item.value for item in node.value]), label)
    else:
        wanted = "a list of plain values" if setting.many else "one value"
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        source.faults.append(f"{label} {found}: it takes {wanted}")


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.style is None and (node.value == "" or node.value in NULL_WORDS)


def _read_flags(flags: Sequence[FlagValue]) -> _Source:
    source = _Source()
    for flag in flags:
        setting = setting_fields()[flag.key]
        if len(flag.texts) == 1:
            value = value_from_text(setting, flag.texts[0])
        else:
            value = value_from_list(setting, flag.texts)
        source.put(flag.key, value, flag.label)
    return source


def _check(source: _Source) -> list[str]:
    """The faults of values, one line for each setting (or list item) that the schema refuses."""
    try:
        Recipe.model_validate(source.data)
    except ValidationError as error:
        lines: dict[tuple[object, ...], str] = {}
        for record in error.errors(include_url=False):
            location = tuple(record["loc"])
            if len(location) < 2:  # a rule over several settings of the section
                label = source.labels.get(str(location[0]), "") if location else ""
                lines.setdefault(location, f"{label} {remedy(None, record)}".strip())
                continue
            setting = setting_fields()[f"{location[0]}.{location[1]}"]
            # Below the key stand list positions, and the branches of a union, of which one line is enough.
            position = location[2:3] if len(location) > 2 and isinstance(location[2], int) else ()
            lines.setdefault(location[:2] + position, _value_fault(source, setting, record))
        return list(lines.values())
    return []


def _value_fault(source: _Source, setting: SettingField, record: Mapping[str, Any]) -> str:
    label = source.labels.get(setting.key, setting.key)
    value = source.data.get(setting.section, {}).get(setting.name)
    if record["type"] != "missing" and isinstance(value, list) and not isinstance(record["input"], list | dict):
        value = record["input"]
    return f"{label} {_show(value)}: {remedy(setting, record)}"


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return _shorten(f"[{', '.join(str(item) for item in value)}]")
    text = str(value)
    return _shorten(text if text and text.isprintable() and text == text.strip() else repr(text))


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _at(config: str, node: yaml.Node) -> str:
    return f"{config}:{node.start_mark.line + 1}"
