"""The harness of all console commands: flags made from the schema, one loader, errors as plain lines.

A command names the sections that it reads; every setting of those becomes a flag ``--section.key``, and those of the
first section, and of the engine, also ``--key``. All faults of the flags, of the recipe and of the values are reported
at once. Only the standard library, pydantic and yaml are imported here, and a command's own module only when it runs,
so that ``--help`` answers at once.

Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import jacobi_llm
from jacobi_llm.configs.errors import JacobiError, UsageError
from jacobi_llm.configs.fields import SettingField, normalise, section_types, setting_fields, suggestion
from jacobi_llm.configs.loader import FlagValue, dump_recipe, resolve, shipped_names

if TYPE_CHECKING:
    from jacobi_llm.configs.schema import Recipe

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# What a missing module means for the person who installed only a part.
_EXTRA_OF_MODULE = {
    "datasets": "data",
    "ijson": "data",
    "pyarrow": "data",
    "deepspeed": "train",
    "ninja": "train",
    "matplotlib": "plot",
    "flash_attn": "flash",
}
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_FORMAT_SHORTHANDS = ("chat", "raw")
_ENGINE = "engine"


@dataclass(frozen=True)
class Command:
    """One command of a console program.

    Attributes:
        name: the word after the program's name.
        summary: one line for the help.
        sections: sections of the recipe that it reads; the first one's and the engine's settings have short flags too.
        run: ``module:function``, imported when the command runs; called with (recipe, options), returns the exit code.
        example: one command line for the help.
        supports_json: whether ``--json`` is a flag of it.
        supports_dry_run: whether ``--dry-run`` is a flag of it.
        accepts_local_rank: whether ``--local_rank=N``, which the DeepSpeed launcher adds, is accepted and ignored.
        positional: the setting (``section.key``) that arguments without a flag are for; None refuses them.
    """

    name: str
    summary: str
    sections: tuple[str, ...]
    run: str
    example: str
    supports_json: bool = False
    supports_dry_run: bool = False
    accepts_local_rank: bool = False
    positional: str | None = None


@dataclass(frozen=True)
class Options:
    """The flags that are no settings.

    Attributes:
        json: print results as JSON on standard output.
        dry_run: print the plan and stop.
        debug: print tracebacks.
        explicit: settings (``section.key``) that a flag or the recipe file has set.
    """

    json: bool = False
    dry_run: bool = False
    debug: bool = False
    explicit: frozenset[str] = frozenset()


@dataclass
class _Parsed:
    """What a command line asks for, with the faults found on the way."""

    config: str | None = None
    switches: set[str] = field(default_factory=set)
    flags: list[FlagValue] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def main(
    program: str,
    summary: str,
    commands: Sequence[Command],
    argv: Sequence[str] | None = None,
    *,
    single_command: bool = False,
) -> int:
    """Runs a console program.

    Args:
        program: its name, as typed.
        summary: one line for the help.
        commands: what it can do.
        argv: arguments without the program's name; None takes those of the process, and ends it.
        single_command: the program is ``commands[0]``, and takes no word for it.

    Returns:
        The exit code; nothing is raised for an error, which is printed on standard error instead.
    """
    if argv is None:
        _end_process(_run(program, summary, commands, sys.argv[1:], single_command))
    return _run(program, summary, commands, argv, single_command)


def _end_process(code: int) -> NoReturn:
    """End as Python does, but without C++'s static destructors: threads of the libraries below us sometimes outlive
    their owners there, and the process would abort after its work is done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _run(program: str, summary: str, commands: Sequence[Command], argv: Sequence[str], single_command: bool) -> int:
    arguments = list(argv)
    debug = "--debug" in arguments
    try:
        code = _dispatch(program, summary, commands, arguments, single_command)
        sys.stdout.flush()
        return code
    except JacobiError as error:
        if debug:
            traceback.print_exc()
        _print_errors(error)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_explain_unexpected(error, program, debug)}", file=sys.stderr)
        return 1


def _dispatch(
    program: str, summary: str, commands: Sequence[Command], arguments: list[str], single_command: bool
) -> int:
    if single_command:
        return _run_command(program, commands[0], arguments)
    names = [command.name for command in commands]
    word = arguments[0] if arguments else None
    if word in ("-h", "--help"):
        print(_program_help(program, summary, commands), end="")
        return 0
    if word == "--version":
        print(_version(program))
        return 0
    if word is None:
        raise UsageError(f"{program} needs a command: {', '.join(names)} (see {program} --help)")
    for command in commands:
        if normalise(word) == normalise(command.name):
            return _run_command(f"{program} {command.name}", command, arguments[1:])
    if word.startswith("-"):
        raise UsageError(f"{word}: the command comes first: {program} COMMAND {word}; commands are {', '.join(names)}")
    raise UsageError(f"{program}: unknown command {word}{suggestion(word, names)}; commands are {', '.join(names)}")


def _run_command(usage: str, command: Command, arguments: list[str]) -> int:
    parsed = _parse(usage, command, arguments)
    if "help" in parsed.switches:
        print(_command_help(usage, command), end="")
        return 0
    if "version" in parsed.switches:
        print(_version(usage.split()[0]))
        return 0
    recipe, explicit = resolve(parsed.config, parsed.flags, parsed.faults)
    if "print_config" in parsed.switches:
        if _is_first_rank():
            print(dump_recipe(recipe), end="")
        return 0
    options = Options(
        json="json" in parsed.switches,
        dry_run="dry_run" in parsed.switches,
        debug="debug" in parsed.switches,
        explicit=explicit,
    )
    return _load_run(command)(recipe, options)


def _load_run(command: Command) -> Callable[[Recipe, Options], int]:
    module, _, function = command.run.partition(":")
    run: Callable[[Recipe, Options], int] = getattr(importlib.import_module(module), function)
    return run


# Flags -------------------------------------------------------------------------------------------------------------


def _switches(command: Command) -> dict[str, str]:
    """The flags without a value, with their help."""
    switches = {
        "print_config": "print every resolved setting as YAML and stop",
        "dry_run": "print the plan and stop",
        "json": "print results as JSON on standard output",
        "debug": "print tracebacks",
        "help": "print this help and stop",
        "version": "print the version and stop",
    }
    if not command.supports_dry_run:
        del switches["dry_run"]
    if not command.supports_json:
        del switches["json"]
    return switches


def _flag_fields(command: Command) -> dict[str, SettingField]:
    """Settings by normalised flag name, without dashes: as ``section.key``, and as ``key`` where that is short."""
    settings = [setting for setting in setting_fields().values() if setting.section in command.sections]
    fields = {setting.key: setting for setting in settings}
    fields.update({setting.name: setting for setting in settings if _has_short_flag(command, setting)})
    return fields


def _has_short_flag(command: Command, setting: SettingField) -> bool:
    """Whether ``--key`` alone names it: settings of the first section, and those of the engine that it has no namesake
    of.
    """
    primary = command.sections[0]
    return setting.section == primary or (
        setting.section == _ENGINE and f"{primary}.{setting.name}" not in setting_fields()
    )


def _shorthands(command: Command) -> dict[str, SettingField]:
    """``--chat`` and ``--raw``, where the first section has a prompt format."""
    setting = setting_fields().get(f"{command.sections[0]}.format")
    return dict.fromkeys(_FORMAT_SHORTHANDS, setting) if setting else {}


def _is_flag(argument: str) -> bool:
    """Whether an argument is a flag rather than the value of the one before it (prompts may begin with dashes)."""
    return re.fullmatch(r"--?[A-Za-z][^\s=]*(=.*)?", argument, flags=re.DOTALL) is not None


def _parse(usage: str, command: Command, arguments: Sequence[str]) -> _Parsed:
    """Reads a command line to its end, whatever faults it has.

    This is not left to argparse because it stops at the first fault, guesses abbreviations, and knows one spelling.
    """
    parsed = _Parsed()
    fields, switches, shorthands = _flag_fields(command), _switches(command), _shorthands(command)
    pending = list(arguments)
    bare: list[str] = []
    while pending:
        argument = pending.pop(0)
        if not _is_flag(argument) and command.positional is not None:
            bare.append(argument)
            continue
        if not _is_flag(argument):
            parsed.faults.append(f"unexpected argument {argument!r}: settings are flags, see {usage} --help")
            continue
        typed, has_value, attached = argument.partition("=")
        name = "help" if argument == "-h" else normalise(typed.removeprefix("--"))
        inverted = fields.get(_without_no(name))
        if name == "local_rank" and command.accepts_local_rank:
            if not has_value:
                _take_values(pending, at_most=1)
        elif name == "config":
            values = [attached] if has_value else _take_values(pending, at_most=1)
            if values and values[0]:
                parsed.config = values[0]
            else:
                parsed.faults.append(f"{typed} needs a recipe: {', '.join(shipped_names())}, or a YAML file")
        elif name in switches or name in shorthands:
            if has_value:
                parsed.faults.append(f"{argument}: {typed} takes no value")
            elif name in switches:
                parsed.switches.add(name)
            else:
                parsed.flags.append(FlagValue(shorthands[name].key, (name,), typed))
        elif name in fields:
            _parse_setting(fields[name], typed, attached if has_value else None, pending, parsed)
        elif inverted is not None and inverted.base is bool:
            if has_value:
                parsed.faults.append(f"{argument}: {typed} takes no value")
            else:
                parsed.flags.append(FlagValue(inverted.key, ("false",), typed))
        else:
            _take_values(pending)
            parsed.faults.append(_unknown_flag(usage, command, typed, name))
    if command.positional is not None and bare:
        _take_bare(setting_fields()[command.positional], bare, parsed)
    return parsed


def _take_bare(setting: SettingField, bare: list[str], parsed: _Parsed) -> None:
    """Arguments without a flag are values of ``setting``."""
    if not setting.many and len(bare) > 1:
        parsed.faults.append(f"unexpected argument {bare[1]!r}: {setting.key} takes one value, {bare[0]!r} is it")
    else:
        parsed.flags.append(FlagValue(setting.key, tuple(bare), setting.key))


def _without_no(name: str) -> str:
    """``section.no_key`` and ``no_section.key`` and ``no_key``, without the ``no_``."""
    section, dot, key = name.rpartition(".")
    return f"{section.removeprefix('no_')}{dot}{key.removeprefix('no_')}" if "no_" in name else ""


def _parse_setting(
    setting: SettingField, typed: str, attached: str | None, pending: list[str], parsed: _Parsed
) -> None:
    if attached is not None:
        values = [attached]
    elif setting.base is bool:
        follows = bool(pending) and pending[0].lower() in _BOOLEAN_WORDS
        values = [pending.pop(0)] if follows else ["true"]
    else:
        values = _take_values(pending, at_most=None if setting.many else 1)
    if values:
        parsed.flags.append(FlagValue(setting.key, tuple(values), typed))
    else:
        parsed.faults.append(f"{typed} needs a value: {setting.info.description}")


def _take_values(pending: list[str], at_most: int | None = None) -> list[str]:
    values: list[str] = []
    while pending and not _is_flag(pending[0]) and (at_most is None or len(values) < at_most):
        values.append(pending.pop(0))
    return values


def _unknown_flag(usage: str, command: Command, typed: str, name: str) -> str:
    fields = _flag_fields(command)
    known = [*fields, *_switches(command), *_shorthands(command), "config"]
    other = setting_fields().get(name)
    if other is not None:
        return f"{typed}: {usage} does not read section {other.section} (it reads {', '.join(command.sections)})"
    homes = [key for key, setting in fields.items() if key == setting.key and setting.name == name]
    if homes:
        return f"unknown flag {typed} (did you mean {' or '.join(_dashed(home) for home in homes)}?)"
    return f"unknown flag {typed}{suggestion(typed, [_dashed(flag) for flag in known])}"


def _dashed(name: str) -> str:
    """A flag as the help spells it: short ones with dashes, long ones as the key stands in YAML."""
    return f"--{name}" if "." in name else f"--{name.replace('_', '-')}"


# Help --------------------------------------------------------------------------------------------------------------


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def _version(program: str) -> str:
    return f"{program} {jacobi_llm.__version__}"


def _program_help(program: str, summary: str, commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"usage: {program} COMMAND [flags]", "", summary, "", "commands:"]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    lines += ["", f"{program} COMMAND --help lists the flags of a command.", "", "examples:"]
    lines += [f"  {command.example}" for command in commands]
    return "\n".join(lines) + "\n"


def _command_help(usage: str, command: Command) -> str:
    primary = command.sections[0]
    parser = argparse.ArgumentParser(
        prog=usage,
        usage=f"{usage}{_bare_help(command)} [--config NAME|FILE] [flags]",
        description=f"{command.summary}\n\nFlags win over the recipe, the recipe over the defaults shown here. "
        f"- and _ are alike in flags.\nEvery flag of {primary} can also be written --{primary}.KEY, as in the recipe "
        "(--engine.KEY for the engine's).\n"
        "A true|false flag may stand alone, or as --no-KEY.",
        epilog=f"example:\n  {command.example}",
        formatter_class=_HelpFormatter,
        add_help=False,
    )
    common = parser.add_argument_group("common")
    names = ", ".join(shipped_names())
    common.add_argument("--config", metavar="NAME|FILE", help=f"recipe: a shipped one ({names}) or a YAML file")
    for name, text in _switches(command).items():
        flags = ["-h", "--help"] if name == "help" else [_dashed(name)]
        common.add_argument(*flags, action="store_true", help=text)
    for section in command.sections:
        group = parser.add_argument_group(section, _section_summary(section))
        for setting in setting_fields().values():
            if setting.section != section:
                continue
            if setting.key == f"{primary}.format":
                group.add_argument("--chat", action="store_true", help="the same as --format chat")
                group.add_argument("--raw", action="store_true", help="the same as --format raw")
            flag = _dashed(setting.name if _has_short_flag(command, setting) else setting.key)
            # argparse expands %, and has its own idea of defaults
            text = f"{setting.info.description} (default: {setting.default_text()})".replace("%", "%%")
            group.add_argument(flag, metavar=_metavar(setting), help=text, dest=setting.key)
    return parser.format_help()


def _bare_help(command: Command) -> str:
    if command.positional is None:
        return ""
    setting = setting_fields()[command.positional]
    return f" [{setting.name.upper()}{' ...' if setting.many else ''}]"


def _section_summary(section: str) -> str:
    document = section_types()[section].__doc__ or ""
    return document.strip().partition("\n")[0]


def _metavar(setting: SettingField) -> str:
    if setting.choices:
        word = "|".join(setting.choices)
    elif setting.base is bool:
        word = "true|false"
    else:
        word = "|".join([{"int": "N", "float": "X", "str": "TEXT"}[setting.base.__name__], *setting.words])
    if setting.many:
        return f"{word} ..." if setting.verbatim else f"{word},..."
    return word


# Errors ------------------------------------------------------------------------------------------------------------


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_errors(error: JacobiError) -> None:
    # Every rank of a launch finds the same faults in the same command line: one rank tells.
    if isinstance(error, UsageError) and not _is_first_rank():
        return
    for fault in error.faults:
        print(f"error: {' '.join(_lines(fault))}", file=sys.stderr)


def _explain_unexpected(error: Exception, program: str, debug: bool) -> str:
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module in _EXTRA_OF_MODULE:
            return f"{program} needs {module}: pip install 'jacobi-llm[{_EXTRA_OF_MODULE[module]}]'"
    message = " ".join(_lines(str(error)))
    hint = "" if debug else " (run again with --debug for the traceback)"
    return f"internal: {type(error).__name__}{': ' if message else ''}{message}{hint}"


def _lines(text: str) -> Iterable[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _silence_stdout() -> None:
    """Keeps the interpreter from failing again when it flushes standard output at exit."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    except (OSError, ValueError):
        # Standard output is no real file (a test, a notebook): there is nothing left to flush.
        return
