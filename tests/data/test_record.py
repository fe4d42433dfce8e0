"""A trajectory's row layout and structural check."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.record import ARROW_SCHEMA, Block, Trajectory

GOOD = Trajectory(
    id="a",
    source_index=7,
    source="test",
    prompt_ids=[5, 6],
    completion_ids=[1, 2, 3, 4, 5],
    finish_reason="length",
    window=3,
    target_source=TargetSource.GIVEN,
    blocks=[
        Block(0, [[9, 9, 9], [1, 9, 9]], None),
        Block(3, [[9, 9]], [4, 6]),
    ],
)


def test_check_passes_and_the_views_agree() -> None:
    GOOD.check()
    assert GOOD.target_of(GOOD.blocks[1]) == [4, 5]
    assert GOOD.fixed_point_of(GOOD.blocks[0]) == [1, 2, 3]
    assert GOOD.fixed_point_of(GOOD.blocks[1]) == [4, 6]


def test_a_jittered_first_block_is_short() -> None:
    row = replace(GOOD, blocks=[Block(0, [[9]], None), Block(1, [[9, 9, 9]], None), Block(4, [], None)])
    row.check()
    assert [row.target_of(block) for block in row.blocks] == [[1], [2, 3, 4], [5]]


def test_row_survives_arrow() -> None:
    table = pa.Table.from_pylist([GOOD.to_row()], schema=ARROW_SCHEMA)
    assert [Trajectory.from_row(row) for row in table.to_pylist()] == [GOOD]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_ids": []}, "empty"),
        ({"prompt_ids": []}, "empty"),
        ({"blocks": []}, "no block starts at 0"),
        ({"blocks": GOOD.blocks[:1]}, "block 0: has 5 tokens, the window is 3"),
        ({"blocks": GOOD.blocks[1:]}, "no block starts at 0"),
        ({"blocks": [Block(0, [[9, 9]], None), Block(2, [[9]], None), GOOD.blocks[1]]}, "block 1: has 1 tokens"),
        ({"blocks": [Block(0, [], None), Block(2, [], None), Block(5, [], None)]}, "block 2: has 0 tokens"),
        ({"blocks": [Block(0, [[9, 9]], None), GOOD.blocks[1]]}, "block 0: a state is not 3"),
        ({"blocks": [GOOD.blocks[0], Block(3, [[9, 9]], [4])]}, "block 1: a state is not 2"),
        ({"blocks": [Block(0, [[9, 9, 9], [9, 9, 9]], None), GOOD.blocks[1]]}, "equals the next"),
        ({"blocks": [Block(0, [[1, 2, 3]], None), GOOD.blocks[1]]}, "equals the next"),
        ({"blocks": [GOOD.blocks[0], Block(3, [[9, 9]], [4, 5])]}, "stored although"),
    ],
)
def test_check_names_the_row_and_the_block(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=r"trajectory a") as caught:
        replace(GOOD, **changes).check()  # type: ignore[arg-type]
    assert message in str(caught.value)
