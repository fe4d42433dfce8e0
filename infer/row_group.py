"""Row groups: what one forward pass is made of (design: verify, prefill, collection branch and guess rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RowGroup:
    """Rows of one request in one pass.

    The rows sit at positions ``prefix_len .. prefix_len + num_rows - 1``. They attend to the K/V of the pages at
    positions below ``prefix_len`` and to the group's own rows causally. Only groups that write put their K/V into the
    pages; for the others the pages end at ``prefix_len``, whatever the slots behind it hold.

    Attributes:
        block_table: page numbers of the request, in order of position.
        prefix_len: positions with valid K/V in the pages (tokens).
        token_ids: the rows' input tokens.
        writes_pages: True for prefill and verify rows; False for branches and guess rows.
        num_logit_rows: the last rows whose logits are wanted (0 for a prefill chunk that is not the last).
        adapter: name of the adapter applied to these rows; None for the base weights.
    """

    block_table: Sequence[int]
    prefix_len: int
    token_ids: Sequence[int]
    writes_pages: bool = True
    num_logit_rows: int = 1
    adapter: str | None = field(default=None)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)
