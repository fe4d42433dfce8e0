"""Chooses one token per logit row.

The choice is a function of the row's prefix and of its key, never of the pass or the batch it is computed in; that is
what makes Jacobi decoding converge to the AR output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowKey:
    """What noise may depend on: the request's seed, its choice index, and t, the completion tokens before this one."""

    seed: int
    choice: int
    t: int


def choose(logits: torch.Tensor, keys: Sequence[RowKey]) -> list[int]:
    """Greedy choice; ties go to the lowest id.

    Args:
        logits: [N, vocab], any float dtype.
        keys: one per row, the place of the noise in sampled decoding (greedy has none).

    Returns:
        N token ids.
    """
    if logits.shape[0] != len(keys):
        raise ValueError(f"{logits.shape[0]} logit rows need as many keys, got {len(keys)}")
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    return token_ids
