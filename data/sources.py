"""Prompt sources by name: ``math``, ``stdlib``, or a JSON Lines file; and the command ``jacobi-data prompts``.

Every source has a train and a held-out part that share no group: problem templates of ``math``, modules of
``stdlib``. Lines of a file have no group unless they say so, and about a tenth is held out by the hash of group or id.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.fields import suggestion
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import OnBadInput, Split
from jacobi_llm.data import stdlib_functions, word_problems
from jacobi_llm.infer.prompt import Prompt, read_prompt_file

if TYPE_CHECKING:
    from jacobi_llm.configs.cli import Options
    from jacobi_llm.configs.schema import Recipe

NAMED_SOURCES = (word_problems.SOURCE_NAME, stdlib_functions.SOURCE_NAME)
HELDOUT_ONE_IN = 10


@dataclass(frozen=True)
class PromptSet:
    """What was read from a source.

    Attributes:
        prompts: in source order; ``source_index`` is the place in the whole source.
        num_skipped: bad lines of a file, by reason.
        cleaning: what was done to the prompts, with counts; empty when nothing was.
    """

    prompts: list[Prompt]
    num_skipped: dict[str, int] = field(default_factory=dict)
    cleaning: dict[str, Any] = field(default_factory=dict)


def read_source(
    source: str,
    split: Split,
    *,
    limit: int | None = None,
    seed: int = 0,
    on_bad_input: OnBadInput = OnBadInput.FAIL,
) -> PromptSet:
    """Read one part of a prompt source.

    Args:
        source: ``math``, ``stdlib``, or the path of a JSON Lines file (``-`` is standard input).
        split: the part to read.
        limit: number of prompts to draw without replacement; all if None. A larger limit with the same seed contains
            the smaller draw, so that a longer run continues a shorter one.
        seed: seed of the draw.
        on_bad_input: what a bad line of a file does.

    Raises:
        UsageError: no such source, a bad line (FAIL), or nothing in this part.
    """
    skipped: dict[str, int] = {}
    if source == word_problems.SOURCE_NAME:
        prompts = _word_problems(split)
    elif source == stdlib_functions.SOURCE_NAME:
        prompts = _stdlib_functions(split)
    else:
        _check_is_file(source)
        read = read_prompt_file(source, on_bad_input)
        skipped = read.num_skipped_by_reason
        prompts = [prompt for prompt in read.prompts if _is_in(split, is_heldout(prompt.group or prompt.id))]
    if not prompts:
        raise UsageError(f"prompt source '{source}': no prompt in its {split.value} part; try split=all")
    return PromptSet(_draw(prompts, limit, seed), skipped)


def is_heldout(key: str) -> bool:
    """Say whether a group (or id) belongs to the held-out part: a tenth of all keys, by their hash."""
    return int(hashlib.sha256(key.encode("utf-8")).hexdigest()[:8], 16) % HELDOUT_ONE_IN == 0


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data prompts``: write a part of a prompt source as a JSON Lines file.

    Returns:
        The exit code.

    Raises:
        UsageError: as :func:`read_source`.
        RunError: an output that cannot be written.
    """
    settings = recipe.prompts
    found = read_source(
        settings.input, settings.split, limit=settings.limit, seed=settings.seed, on_bad_input=settings.on_bad_input
    )
    place = "standard output" if settings.output == "-" else settings.output
    summary = f"{len(found.prompts)} prompts of '{settings.input}' ({settings.split.value}) to {place}"
    report = {
        "input": settings.input,
        "split": settings.split.value,
        "num_prompts": len(found.prompts),
        "num_skipped": found.num_skipped,
        "output": settings.output,
    }
    if options.dry_run:
        print(json.dumps(report) if options.json else f"would write {summary}")
        return 0
    text = "".join(to_json_line(prompt) for prompt in found.prompts)
    if settings.output == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_atomically(Path(settings.output).expanduser(), text)
    for reason, count in sorted(found.num_skipped.items()):
        print(f"skipped {count}: {reason}", file=sys.stderr)
    print(f"wrote {summary}", file=sys.stderr)
    if options.json and settings.output != "-":
        print(json.dumps(report))
    return 0


def to_json_line(prompt: Prompt) -> str:
    """Return the prompt as one line of a prompt file, which :func:`read_prompt_file` reads back."""
    record: dict[str, Any] = {"id": prompt.id}
    if prompt.messages is not None:
        record["messages"] = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    else:
        record["prompt"] = prompt.text
    optional = {"completion": prompt.completion, "answer": prompt.answer, "group": prompt.group}
    record.update({key: value for key, value in optional.items() if value is not None})
    return json.dumps(record, ensure_ascii=False) + "\n"


def _word_problems(split: Split) -> list[Prompt]:
    split_of = {problem.id: problem.split for problem in word_problems.read_word_problems()}
    return [prompt for prompt in word_problems.as_prompts() if _is_in(split, split_of[prompt.id] is Split.HELDOUT)]


def _stdlib_functions(split: Split) -> list[Prompt]:
    prompts = stdlib_functions.read_stdlib_functions()
    heldout_of = {group: is_heldout(group) for group in {prompt.group or "" for prompt in prompts}}
    wanted = [prompt for prompt in prompts if _is_in(split, heldout_of[prompt.group or ""])]
    if split is not Split.HELDOUT:
        return wanted
    # Modules repeat each other ("def close(self)" with the same docstring): what is trained on is not held out.
    train_texts = {prompt.text for prompt in prompts if not heldout_of[prompt.group or ""]}
    return [prompt for prompt in wanted if prompt.text not in train_texts]


def _is_in(split: Split, heldout: bool) -> bool:
    return split is Split.ALL or heldout is (split is Split.HELDOUT)


def _draw(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return list(prompts)
    ranked = sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest())
    return sorted(ranked[:limit], key=lambda prompt: prompt.source_index)


def _check_is_file(source: str) -> None:
    if source == "-" or Path(source).expanduser().is_file():
        return
    names = ", ".join(NAMED_SOURCES)
    if Path(source).expanduser().is_dir():
        raise UsageError(f"prompt source '{source}': this is a folder; give a JSONL file, or one of: {names}")
    hint = suggestion(source, NAMED_SOURCES)
    raise UsageError(f"prompt source '{source}': no such file{hint}; give a JSONL file, or one of: {names}")
