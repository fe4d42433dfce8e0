"""Random trajectory sets that are sound, for properties: no model has made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.set_writer import SetWriter
from jacobi_llm.data.store import Manifest

EOS = 0
_TOKENS = st.integers(1, 40)


@st.composite
def blocks(draw: st.DrawFn, completion: list[int], window: int, *, can_differ: bool) -> list[Block]:
    """Blocks that cover ``completion``; the first may be shorter."""
    first = draw(st.integers(1, window))
    starts = [0, *range(first, len(completion), window)]
    made = []
    for start, end in pairwise([*starts, len(completion)]):
        target = completion[start:end]
        token_lists = st.lists(_TOKENS, min_size=len(target), max_size=len(target))
        other = draw(st.none() | token_lists.filter(lambda ids, own=target: ids != own)) if can_differ else None
        states = draw(st.lists(token_lists, max_size=4))
        chain = [*states, target if other is None else other]
        states = [state for state, following in pairwise(chain) if state != following]
        augmented = draw(st.none() | st.lists(token_lists, max_size=2))
        made.append(Block(start, states, other, augmented))
    return made


@st.composite
def trajectories(draw: st.DrawFn, source: str, source_index: int, window: int) -> Trajectory:
    completion = draw(st.lists(_TOKENS, min_size=1, max_size=14))
    stops = draw(st.booleans())
    completion = [*completion, EOS] if stops else completion
    target_source = draw(st.sampled_from(TargetSource))
    return Trajectory(
        id=draw(st.text(st.characters(codec="utf-8"), max_size=4)),
        source_index=source_index,
        source=source,
        prompt_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)),
        completion_ids=completion,
        finish_reason="stop" if stops else "length",
        window=window,
        target_source=target_source,
        blocks=draw(blocks(completion, window, can_differ=target_source is TargetSource.GIVEN)),
    )


@st.composite
def rows_of_sets(draw: st.DrawFn, *, max_size: int = 8, min_size: int = 0) -> list[Trajectory]:
    """Rows with keys of their own."""
    keys = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5), st.sampled_from([4, 8]))
    chosen = draw(st.lists(keys, unique=True, min_size=min_size, max_size=max_size))
    return [draw(trajectories(*key)) for key in chosen]


def settings(**changes: Any) -> dict[str, Any]:
    known = {"window": [4, 8], "dtype": "bfloat16", "eos_token_ids": [EOS], "tokenizer_sha256": "t", "seed": 0}
    return {**known, **changes}


def write_rows(folder: Path, rows: Sequence[Trajectory], shard_size: int = 3, **changes: Any) -> Manifest:
    """Write a set; one prompt is skipped, one block has not converged."""
    writer = SetWriter(folder, Manifest(settings(**changes), {"python": "3"}, num_shards=0), shard_size)
    for row in rows:
        writer.add(row)
    writer.note({"too long": [99]}, 1)
    return writer.finish()


def keys(rows: Sequence[Trajectory]) -> list[tuple[str, int, int]]:
    return [(row.source, row.source_index, row.window) for row in rows]


def with_window(row: Trajectory, window: int) -> Trajectory:
    """The same row for a larger window, in one block."""
    return replace(row, window=window, completion_ids=row.completion_ids[:1], blocks=[Block(0, [], None)])
