"""jacobi-data show: one trajectory, state by state.

Every token stands with a mark, which colours only repeat: ``+`` it and all before it are final, ``~`` it is right
already, though one before it is wrong (a stationary token), ``-`` it is wrong. Right means equal to the fixed point.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Recipe, ShowConfig
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.stats import profile_block
from jacobi_llm.data.store import Manifest, read_shard
from jacobi_llm.infer.rule import first_wrong

LEGEND = "+ final   ~ right already, after a wrong one   - wrong"
_LONGEST_PROMPT = 400  # characters of its end that are shown


class Mark(StrEnum):
    """How a token of a state relates to the fixed point."""

    FINAL = "+"
    EARLY = "~"
    WRONG = "-"


STYLES = {Mark.FINAL: "green", Mark.EARLY: "yellow", Mark.WRONG: "red"}


Decoder = Callable[[list[int]], str]


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data show``: text, or one JSON object per trajectory, on standard output.

    Raises:
        UsageError: no set there, no such trajectory or block, or an unknown tokenizer.
        RunError: a damaged shard or manifest.
    """
    config = recipe.show
    folder = Path(config.path).expanduser()
    manifest = Manifest.read(folder)
    rows = find_rows(folder, manifest, config)
    for row in rows:
        if config.block is not None and config.block >= len(row.blocks):
            raise UsageError(f"show.block {config.block}: trajectory {row.id} has blocks 0 to {len(row.blocks) - 1}")
    decoder = _decoder(manifest, config)
    if options.json:
        for row in rows:
            print(json.dumps(describe(row, decoder, config.block), ensure_ascii=False))
        return 0
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    for row in rows:
        for line in render(row, decoder, config.block):
            console.print(line)
    return 0


def find_rows(folder: Path, manifest: Manifest, config: ShowConfig) -> list[Trajectory]:
    """The trajectories that are asked for; only the shards that may hold them are read.

    Raises:
        UsageError: there is none.
        RunError: a damaged shard.
    """
    number_of_first = 0
    found: list[Trajectory] = []
    for number in sorted(manifest.shards):
        shard = manifest.shards[number]
        if config.id is not None:
            found += [row for row in read_shard(folder, shard, manifest.remedy) if row.id == config.id]
        elif (wanted := (config.row or 0) - number_of_first) < shard.num_rows:
            return [read_shard(folder, shard, manifest.remedy)[wanted]]
        number_of_first += shard.num_rows
    if found:
        return found
    asked = f"show.id {config.id!r}" if config.id is not None else f"show.row {config.row or 0}"
    raise UsageError(f"{asked}: no such trajectory in {folder}, which has {number_of_first}, numbered from 0")


def marks_of(state: Sequence[int], fixed_point: Sequence[int]) -> list[Mark]:
    """A mark for each of the n tokens of ``state``."""
    num_final = first_wrong(state, fixed_point)
    return [
        Mark.FINAL if i < num_final else Mark.EARLY if token_id == right else Mark.WRONG
        for i, (token_id, right) in enumerate(zip(state, fixed_point, strict=True))
    ]


def describe(row: Trajectory, decoder: Decoder | None, only_block: int | None) -> dict[str, Any]:
    """The trajectory as plain JSON values: for every state its ids, their text and their marks."""
    return {
        **{name: value for name, value in row.to_row().items() if name not in ("blocks", "target_source")},
        "target_source": row.target_source.value,
        "prompt_text": None if decoder is None else decoder(row.prompt_ids),
        "completion_text": None if decoder is None else decoder(row.completion_ids),
        "blocks": [
            {
                "number": number,
                "start": block.start,
                "iterations": len(block.states),
                "passes": profile_block(block.states, row.fixed_point_of(block)).num_passes,
                "target_ids": row.target_of(block),
                "fixed_point": block.fixed_point,
                "states": [
                    {
                        "ids": state,
                        "texts": [token_text(token_id, decoder) for token_id in state],
                        "marks": [mark.name.lower() for mark in marks_of(state, row.fixed_point_of(block))],
                    }
                    for state in [*block.states, row.fixed_point_of(block)]
                ],
                "augmented_states": block.augmented_states,
            }
            for number, block in _blocks(row, only_block)
        ],
    }


def render(row: Trajectory, decoder: Decoder | None, only_block: int | None) -> Iterator[Text]:
    """Lines for a person; without their styles they say the same."""
    yield Text(
        f"{printable(row.id)}: {printable(row.source)}, source index {row.source_index}, window {row.window}, "
        f"target: {row.target_source.value}, {len(row.prompt_ids)} prompt and {len(row.completion_ids)} completion "
        f"tokens, ends by {row.finish_reason}",
        style="bold",
    )
    if decoder is not None:
        yield Text(f"prompt      {_tail(printable(decoder(row.prompt_ids)))}")
        yield Text(f"completion  {printable(decoder(row.completion_ids))}")
    yield Text(LEGEND, style="dim")
    for number, block in _blocks(row, only_block):
        yield from _render_block(row, number, block, decoder)


def _render_block(row: Trajectory, number: int, block: Block, decoder: Decoder | None) -> Iterator[Text]:
    fixed_point = row.fixed_point_of(block)
    profile = profile_block(block.states, fixed_point)
    yield Text(
        f"block {number}: tokens {block.start} to {row.end_of(block) - 1}, {profile.num_iterations} iterations, "
        f"{profile.num_passes} passes, {profile.num_stationary} stationary tokens",
        style="bold",
    )
    for j, state in enumerate([*block.states, fixed_point]):
        yield _render_state(f"y({j})", state, fixed_point, decoder)
    if block.fixed_point is not None:
        yield _render_state("y*", row.target_of(block), fixed_point, decoder)
    for state in block.augmented_states or ():
        yield _render_state("made", state, fixed_point, decoder)


def _render_state(label: str, state: Sequence[int], fixed_point: Sequence[int], decoder: Decoder | None) -> Text:
    line = Text(f"  {label:<6}")
    for token_id, mark in zip(state, marks_of(state, fixed_point), strict=True):
        line.append(f" {mark.value}{token_text(token_id, decoder)}", style=STYLES[mark])
    return line


def token_text(token_id: int, decoder: Decoder | None) -> str:
    """A token as text without white space or control characters; ``<id>`` where it has no text of its own."""
    text = "" if decoder is None else decoder([token_id])
    if not text or "\ufffd" in text:  # part of a character
        return f"<{token_id}>"
    return printable(text).replace(" ", "␣")


def printable(text: str) -> str:
    """Escapes what moves the cursor, hides text or turns its direction: what a model writes is shown, not obeyed."""
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode() for char in text
    )


def _tail(text: str) -> str:
    return text if len(text) <= _LONGEST_PROMPT else f"…{text[-_LONGEST_PROMPT:]}"


def _blocks(row: Trajectory, only_block: int | None) -> list[tuple[int, Block]]:
    return [(number, block) for number, block in enumerate(row.blocks) if only_block in (None, number)]


def _decoder(manifest: Manifest, config: ShowConfig) -> Decoder | None:
    from jacobi_llm.infer.models import load_tokenizer

    name = config.tokenizer or manifest.settings.get("tokenizer") or manifest.settings.get("model")
    try:
        if not isinstance(name, str):
            raise UsageError("the set names no model")
        tokenizer = load_tokenizer(name)
    except (UsageError, RunError) as error:
        if config.tokenizer is not None:
            raise
        print(f"note: token ids are shown, not text: {error}; give show.tokenizer", file=sys.stderr)
        return None
    return lambda ids: str(tokenizer.decode(ids))
