"""One trajectory: a completion and, for each of its blocks, the states the Jacobi iteration went through."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import pyarrow as pa

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import TargetSource

SCHEMA_VERSION = 2

_BLOCK_TYPE = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("states", pa.list_(pa.list_(pa.int32())), nullable=False),
        pa.field("fixed_point", pa.list_(pa.int32())),
        pa.field("augmented_states", pa.list_(pa.list_(pa.int32()))),
    ]
)
ARROW_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source_index", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("window", pa.int32(), nullable=False),
        pa.field("target_source", pa.string(), nullable=False),
        pa.field("blocks", pa.list_(_BLOCK_TYPE), nullable=False),
    ]
)


@dataclass(frozen=True)
class Block:
    """Block b of a completion, from ``start`` to where the next block starts or the completion ends.

    Attributes:
        start: index of the block's first token in the completion.
        states: y(0), y(1), ... in time order, up to the last one before the fixed point; empty when y(0) is it.
        fixed_point: the model's fixed point when it differs from the completion's tokens, else None.
        augmented_states: states that were made from the true ones to train on (``data/augmentation.py``), in no order
            of time; None without augmentation.
    """

    start: int
    states: list[list[int]]
    fixed_point: list[int] | None
    augmented_states: list[list[int]] | None = None

    @property
    def noisy_states(self) -> list[list[int]]:
        """All states that may be trained on as noise."""
        return [*self.states, *(self.augmented_states or ())]


@dataclass(frozen=True)
class Trajectory:
    """One row of a trajectory set (design: section 6).

    Attributes:
        id, source_index, source: where the prompt came from; ``source_index`` is unique within ``source`` and window.
        prompt_ids, completion_ids: token ids; the completion is y* with its EOS if reached.
        finish_reason: stop or length.
        window: block size n (tokens).
        target_source: whether y* was decoded by the model or given.
        blocks: in order of ``start``; they cover the completion. All have n tokens, but the last, and, where block
            starts are jittered, the first.
    """

    id: str
    source_index: int
    source: str
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str
    window: int
    target_source: TargetSource
    blocks: list[Block]

    def target_of(self, block: Block) -> list[int]:
        """y*'s tokens of ``block``."""
        return self.completion_ids[block.start : self.end_of(block)]

    def end_of(self, block: Block) -> int:
        """Index in the completion behind the block's last token."""
        following = bisect_right(self._starts, block.start)
        return self._starts[following] if following < len(self._starts) else len(self.completion_ids)

    @cached_property
    def _starts(self) -> list[int]:
        return [block.start for block in self.blocks]

    def fixed_point_of(self, block: Block) -> list[int]:
        """The state the model's iteration ends in."""
        return self.target_of(block) if block.fixed_point is None else block.fixed_point

    def to_row(self) -> dict[str, Any]:
        """Plain values in the layout of :data:`ARROW_SCHEMA`."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trajectory:
        """Inverse of :meth:`to_row`."""
        blocks = [Block(**block) for block in row["blocks"]]
        return cls(**{**row, "target_source": TargetSource(row["target_source"]), "blocks": blocks})

    def check(self) -> None:
        """Structural checks: blocks cover the completion in order, states have the block's length and follow time.

        Raises:
            RunError: naming the row and the block.
        """
        if not self.prompt_ids or not self.completion_ids:
            raise RunError(f"trajectory {self.id}: the prompt or the completion is empty")
        if not self.blocks or self.blocks[0].start != 0:
            raise RunError(f"trajectory {self.id}: no block starts at 0")
        for number, block in enumerate(self.blocks):
            where = f"trajectory {self.id}, block {number}"
            target = self.target_of(block)
            is_inner = 0 < number < len(self.blocks) - 1
            if not 0 < len(target) <= self.window or (is_inner and len(target) < self.window):
                raise RunError(f"{where}: has {len(target)} tokens, the window is {self.window}")
            end = self.fixed_point_of(block)
            if any(len(state) != len(target) for state in [*block.noisy_states, end]):
                raise RunError(f"{where}: a state is not {len(target)} tokens long")
            if any(a == b for a, b in pairwise([*block.states, end])):
                raise RunError(f"{where}: a state equals the next one before the fixed point")
            if block.fixed_point == target:
                raise RunError(f"{where}: a fixed point is stored although it equals y*")
