"""Chooses one token per logit row.

The choice is a function of the row's prefix and of its key, never of the pass or the batch it is computed in; that is
what makes Jacobi decoding converge to the AR output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CHUNK = 256


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
    token_ids: list[int] = greedy_ids(logits).tolist()
    return token_ids


def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """``logits.argmax(-1)`` with ties to the lowest id: [N, vocab] -> [N] int64. A NaN counts as the largest.

    torch's argmax on the CPU looks at one number after the other (0.16 ms for a row of 49,152 in bfloat16), its amax
    at many at once: the chunk is found by its maximum, and only that chunk is searched (0.024 ms).
    """
    vocab_size = logits.shape[-1]
    num_whole = vocab_size // _CHUNK
    if logits.device.type != "cpu" or num_whole < 2:
        return logits.argmax(dim=-1)
    maxima = logits[:, : num_whole * _CHUNK].unflatten(1, (num_whole, _CHUNK)).amax(dim=-1)
    if num_whole * _CHUNK < vocab_size:
        maxima = torch.cat((maxima, logits[:, num_whole * _CHUNK :].amax(dim=-1, keepdim=True)), dim=-1)
    # The last chunk may reach back into the one before it, which holds nothing as large or it would have been first.
    starts = (maxima.argmax(dim=-1) * _CHUNK).clamp_max(vocab_size - _CHUNK)
    columns = starts[:, None] + torch.arange(_CHUNK)
    chosen: torch.Tensor = starts + logits.gather(1, columns).argmax(dim=-1)
    return chosen
