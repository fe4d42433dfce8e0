"""What an engine and the comparison say to each other: one JSON object per line, over the worker's pipes.

The worker loads its engine once, says so, and then answers commands until its standard input ends:

    -> {"ready": {"version": "0.32.0", "settings": {...}, "load_s": 12.3}}
    <- {"command": "generate", "prompts": [[5, 6], [7]], "max_tokens": 64}
    -> {"token_ids": [[...], [...]], "wall_s": 0.91}

A command that fails is answered with ``{"error": "one line"}``. This module needs the standard library only: it runs in
every engine's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

TokenIds = list[list[int]]


@dataclass(frozen=True)
class Flags:
    """What every worker is started with.

    Attributes:
        model: folder or hub id.
        variant: settings of the engine to try, by the worker's own names.
        num_threads: CPU threads.
        max_batch_size: requests in the largest batch.
        max_context: tokens of the longest prompt with its completion.
    """

    model: str
    variant: str
    num_threads: int
    max_batch_size: int
    max_context: int

    def as_arguments(self) -> list[str]:
        """Return the command line that :func:`read_flags` reads back."""
        return [
            *("--model", self.model, "--variant", self.variant, "--threads", str(self.num_threads)),
            *("--max-batch-size", str(self.max_batch_size), "--max-context", str(self.max_context)),
        ]


def read_flags(variants: Sequence[str]) -> Flags:
    """Read the worker's command line.

    Args:
        variants: those that the worker knows.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True, choices=variants)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--max-context", type=int, required=True)
    args = parser.parse_args()
    return Flags(args.model, args.variant, args.threads, args.max_batch_size, args.max_context)


@dataclass(frozen=True)
class Served:
    """A loaded engine.

    Attributes:
        version: of the engine's package.
        settings: what it runs with, for the result file: no paths.
        decode: ``decode(prompts, max_tokens)`` returns the greedy completions, each of exactly ``max_tokens`` tokens.
        others: further commands by name; they take the command's other keys and return plain JSON values.
    """

    version: str
    settings: Mapping[str, Any]
    decode: Callable[[TokenIds, int], TokenIds]
    others: Mapping[str, Callable[..., dict[str, Any]]] = field(default_factory=dict)


def serve(load: Callable[[], Served]) -> None:
    """Load the engine, then answer commands until standard input ends."""
    commands, replies = _own_pipes()
    start_s = time.perf_counter()
    try:
        served = load()
    except Exception as error:
        traceback.print_exc()
        _say(replies, {"error": _one_line(error)})
        raise SystemExit(1) from error
    ready = {"version": served.version, "settings": dict(served.settings), "load_s": time.perf_counter() - start_s}
    _say(replies, {"ready": ready})
    for line in commands:
        try:
            _say(replies, _answer(served, json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            _say(replies, {"error": _one_line(error)})


def _answer(served: Served, command: dict[str, Any]) -> dict[str, Any]:
    name = command.pop("command")
    if name != "generate":
        return served.others[name](**command)
    start_s = time.perf_counter()
    token_ids = served.decode(command["prompts"], command["max_tokens"])
    return {"token_ids": token_ids, "wall_s": time.perf_counter() - start_s}


def _own_pipes() -> tuple[TextIO, TextIO]:
    """Keep the pipes to ourselves: what a library or a child process prints goes to standard error."""
    commands, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return commands, replies


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
