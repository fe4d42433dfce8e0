"""Prompt sources by name: ``math``, ``stdlib``, files, folders, globs, hub data sets; and ``jacobi-data prompts``.

Every source has a train and a held-out part that share no group: problem templates of ``math``, modules of ``stdlib``.
Records of files have no group unless they say so, and about a tenth is held out by the hash of group or id.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.fields import suggestion
from jacobi_llm.configs.files import atomic_writer
from jacobi_llm.configs.schema import CleanConfig, OnBadInput, SourceConfig, Split
from jacobi_llm.configs.wording import counted
from jacobi_llm.data import stdlib_functions, word_problems
from jacobi_llm.data.cleaning import Candidate, Cleaning
from jacobi_llm.data.evaluation_sets import read_evaluation_set
from jacobi_llm.data.prompt_reader import HUB_PREFIX, PromptReader
from jacobi_llm.data.readers import STDIN
from jacobi_llm.infer.prompt import Prompt

if TYPE_CHECKING:
    from jacobi_llm.configs.cli import Options
    from jacobi_llm.configs.schema import Recipe

NAMED_SOURCES = (word_problems.SOURCE_NAME, stdlib_functions.SOURCE_NAME)
HELDOUT_ONE_IN = 10
_ROWS_TOGETHER = 1024


@dataclass(frozen=True)
class PromptSet:
    """What was read from a source.

    Attributes:
        prompts: in source order; ``source_index`` is the place in the whole source.
        num_skipped: bad records of a file, by reason.
        cleaning: what was done to the prompts, with counts; empty when nothing was.
        summary: what was recognised, in one line; None for the named sources.
    """

    prompts: list[Prompt]
    num_skipped: dict[str, int] = field(default_factory=dict)
    cleaning: dict[str, Any] = field(default_factory=dict)
    summary: str | None = None


class PromptStream:
    """The prompts of one part of a source, one at a time and once; counts are whole when they have come to an end."""

    def __init__(
        self,
        source: str,
        split: Split,
        *,
        limit: int | None = None,
        seed: int = 0,
        on_bad_input: OnBadInput = OnBadInput.FAIL,
        reading: SourceConfig | None = None,
        cleaning: CleanConfig | None = None,
    ) -> None:
        """See :func:`read_source`."""
        self._source = source
        self._split = split
        self._limit = limit
        self._seed = seed
        self._reader: PromptReader | None = None
        if source not in NAMED_SOURCES:
            _check_exists(source)
            self._reader = PromptReader(source, reading or SourceConfig(), on_bad_input)
        elif reading is not None and (changed := reading.model_dump(exclude_defaults=True)):
            names = ", ".join(f"source.{name}" for name in changed)
            raise UsageError(f"{names}: says how records of files are read, and '{source}' is shipped; leave it out")
        self._cleaning = Cleaning(cleaning or CleanConfig(), read_evaluation_set)

    def __iter__(self) -> Iterator[Prompt]:
        heldout = self._split is Split.HELDOUT
        # Where everything is asked for, everything may be trained on.
        candidates = (
            Candidate(prompt, heldout if self._split is Split.ALL else is_held)
            for prompt, is_held in self._split_prompts()
        )
        kept = (
            one.prompt
            for one in self._cleaning.apply(candidates)
            if self._split is Split.ALL or one.is_heldout is heldout
        )
        num_prompts = 0
        for prompt in kept if self._limit is None else _draw(kept, self._limit, self._seed):
            num_prompts += 1
            yield prompt
        if not num_prompts:
            remedy = "loosen the clean settings" if self._cleaning.report() else "try --split all"
            raise UsageError(f"prompt source '{self._source}': no prompt in its {self._split.value} part; {remedy}")

    @property
    def num_skipped(self) -> dict[str, int]:
        """Bad records, by reason."""
        return dict(self._reader.num_skipped) if self._reader is not None else {}

    @property
    def cleaning(self) -> dict[str, Any]:
        """What cleaning did."""
        return self._cleaning.report()

    @property
    def summary(self) -> str | None:
        """What was recognised, in one line."""
        return self._reader.summary() if self._reader is not None else None

    def _split_prompts(self) -> Iterator[tuple[Prompt, bool]]:
        """All prompts, each with whether it is held out."""
        if self._reader is not None:
            for prompt in self._reader.prompts():
                yield prompt, is_heldout(prompt.group or prompt.id)
        elif self._source == word_problems.SOURCE_NAME:
            split_of = {problem.id: problem.split for problem in word_problems.read_word_problems()}
            for prompt in word_problems.as_prompts():
                yield prompt, split_of[prompt.id] is Split.HELDOUT
        else:
            yield from self._stdlib_functions()

    def _stdlib_functions(self) -> Iterator[tuple[Prompt, bool]]:
        prompts = stdlib_functions.read_stdlib_functions()
        heldout_of = {group: is_heldout(group) for group in {prompt.group or "" for prompt in prompts}}
        # Modules repeat each other ("def close(self)" with the same docstring): what is trained on is not held out.
        train_texts = {prompt.text for prompt in prompts if not heldout_of[prompt.group or ""]}
        for prompt in prompts:
            is_held = heldout_of[prompt.group or ""]
            if not (is_held and self._split is Split.HELDOUT and prompt.text in train_texts):
                yield prompt, is_held


def read_source(
    source: str,
    split: Split,
    *,
    limit: int | None = None,
    seed: int = 0,
    on_bad_input: OnBadInput = OnBadInput.FAIL,
    reading: SourceConfig | None = None,
    cleaning: CleanConfig | None = None,
) -> PromptSet:
    """Read one part of a prompt source.

    Args:
        source: ``math``, ``stdlib``, a file, folder or glob, ``hub:OWNER/NAME[:CONFIG[:SPLIT]]``, or ``-`` for standard
            input.
        split: the part to read.
        limit: number of prompts to draw without replacement; all if None. A larger limit with the same seed contains
            the smaller draw, so that a longer run continues a shorter one.
        seed: seed of the draw.
        on_bad_input: what a bad record of a file does.
        reading: how records of files are read.
        cleaning: what is dropped before the split and the draw.

    Raises:
        UsageError: no such source, a bad record (FAIL), or nothing in this part.
        RunError: a larger share of bad records than ``reading`` allows.
    """
    stream = PromptStream(
        source, split, limit=limit, seed=seed, on_bad_input=on_bad_input, reading=reading, cleaning=cleaning
    )
    prompts = list(stream)
    return PromptSet(prompts, stream.num_skipped, stream.cleaning, stream.summary)


def is_heldout(key: str) -> bool:
    """Say whether a group (or id) belongs to the held-out part: a tenth of all keys, by their hash."""
    return int(hashlib.sha256(key.encode("utf-8")).hexdigest()[:8], 16) % HELDOUT_ONE_IN == 0


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data prompts``: write a part of a prompt source as a JSON Lines (or Parquet) file.

    Returns:
        The exit code.

    Raises:
        UsageError: as :func:`read_source`.
        RunError: an output that cannot be written.
    """
    settings = recipe.prompts
    stream = PromptStream(
        settings.input,
        settings.split,
        limit=settings.limit,
        seed=settings.seed,
        on_bad_input=settings.on_bad_input,
        reading=recipe.source,
        cleaning=recipe.clean,
    )
    if options.dry_run:
        num_prompts = sum(1 for _ in stream)
    elif settings.output == STDIN:
        num_prompts = _write_stdout(stream)
    else:
        num_prompts = write_prompts(Path(settings.output).expanduser(), stream)
    place = "standard output" if settings.output == STDIN else settings.output
    summary = f"{counted(num_prompts, 'prompt')} of '{settings.input}' ({settings.split.value}) to {place}"
    report = {
        "input": settings.input,
        "split": settings.split.value,
        "num_prompts": num_prompts,
        "num_skipped": stream.num_skipped,
        "cleaning": stream.cleaning,
        "output": settings.output,
    }
    tell(stream)
    if options.dry_run:
        print(json.dumps(report) if options.json else f"would write {summary}")
        return 0
    print(f"wrote {summary}", file=sys.stderr)
    if options.json and settings.output != STDIN:
        print(json.dumps(report))
    return 0


def tell(found: PromptSet | PromptStream) -> None:
    """Say on standard error what was recognised, skipped and dropped."""
    if found.summary is not None:
        print(found.summary, file=sys.stderr)
    for step in found.cleaning.get("steps", ()):
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in step["num_dropped"].items()) or "none"
        print(f"{step['step']}: {counted(step['num_in'], 'prompt')}, dropped: {dropped}", file=sys.stderr)


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write prompts as they come, JSON Lines or, by the name's ending, Parquet; returns how many.

    Raises:
        RunError: the file cannot be written; then, and when ``prompts`` raises, it is what it was.
    """
    with atomic_writer(path) as file:
        return _write_parquet(file, prompts) if path.suffix == ".parquet" else _write_lines(file, prompts)


def _write_stdout(prompts: Iterable[Prompt]) -> int:
    # Aside at first: a fault at the end of the source must not leave half an output.
    with tempfile.TemporaryFile() as file:
        num_prompts = _write_lines(file, prompts)
        file.seek(0)
        sys.stdout.flush()
        if hasattr(sys.stdout, "buffer"):
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            sys.stdout.write(file.read().decode())
    return num_prompts


def _write_lines(file: BinaryIO, prompts: Iterable[Prompt]) -> int:
    num_prompts = 0
    for prompt in prompts:
        file.write(to_json_line(prompt).encode("utf-8"))
        num_prompts += 1
    return num_prompts


def _write_parquet(file: BinaryIO, prompts: Iterable[Prompt]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    names = ("id", "prompt", "completion", "answer", "group", "adapter")
    schema = pa.schema([*((name, pa.string()) for name in names), ("messages", pa.list_(turn))])
    num_prompts = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        for prompt in prompts:
            rows.append(to_record(prompt))
            num_prompts += 1
            if len(rows) == _ROWS_TOGETHER:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                rows = []
        if rows:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return num_prompts


def to_json_line(prompt: Prompt) -> str:
    """Return the prompt as one line of a prompt file, which ``read_prompt_file`` reads back."""
    return json.dumps(to_record(prompt), ensure_ascii=False) + "\n"


def to_record(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as a record of the messages or prompt schema."""
    record: dict[str, Any] = {"id": prompt.id}
    if prompt.messages is not None:
        record["messages"] = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    else:
        record["prompt"] = prompt.text
    names = ("completion", "answer", "group", "adapter")
    optional = {name: getattr(prompt, name) for name in names}
    record.update({key: value for key, value in optional.items() if value is not None})
    return record


def _draw(prompts: Iterable[Prompt], limit: int, seed: int) -> list[Prompt]:
    """The ``limit`` prompts with the smallest hashes of seed and id, in source order; no others are kept meanwhile."""
    ranked = (
        (hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest(), number, prompt)
        for number, prompt in enumerate(prompts)
    )
    drawn = heapq.nsmallest(limit, ranked, key=lambda one: one[:2])
    return [prompt for _, _, prompt in sorted(drawn, key=lambda one: one[1])]


def _check_exists(source: str) -> None:
    is_elsewhere = source == STDIN or source.startswith(HUB_PREFIX) or any(char in source for char in "*?[")
    if not is_elsewhere and not Path(source).expanduser().exists():
        raise UsageError(
            f"prompt source '{source}': no such file or folder, and not one of {', '.join(NAMED_SOURCES)}"
            f"{suggestion(source, NAMED_SOURCES)}; a data set of the hub is written {HUB_PREFIX}OWNER/NAME"
        )
