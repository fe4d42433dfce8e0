"""Where blocks start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.data.block_starts import block_starts


@given(st.integers(1, 200), st.integers(2, 40), st.booleans(), st.tuples(st.integers(0, 9), st.integers(0, 99)))
def test_blocks_cover_and_a_longer_completion_only_adds(
    num_tokens: int, window: int, jitter: bool, key: tuple[int, int]
) -> None:
    starts = block_starts(num_tokens, window, jitter, key)
    lengths = [b - a for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)]
    assert starts[0] == 0
    assert sum(lengths) == num_tokens
    assert all(0 < length <= window for length in lengths)
    assert all(length == window for length in lengths[1:-1])
    assert block_starts(num_tokens + 1, window, jitter, key)[: len(starts)] == starts


def test_jitter_draws_every_length() -> None:
    assert {block_starts(99, 4, True, (0, index))[1] for index in range(99)} == {1, 2, 3, 4}
