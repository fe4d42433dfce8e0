"""Rows of scores in blocks, with the largest score of each block: what lies above a bound is found without a sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jacobi_llm.infer.noise import BLOCK

Scores = NDArray[np.floating[Any]]


def copy_scores(logits: torch.Tensor) -> torch.Tensor:
    """Copy logits to the CPU in the precision of choosing: [R, vocab] -> [R, width], width a multiple of ``BLOCK``.

    That is float64 for float64 logits and float32 for all others. The columns behind the vocabulary are -inf.
    """
    num_rows, vocab_size = logits.shape
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    scores = torch.empty((num_rows, -(-vocab_size // BLOCK) * BLOCK), dtype=dtype)
    scores[:, :vocab_size] = logits
    scores[:, vocab_size:] = float("-inf")
    return scores


class ScoreRows:
    """Finished scores, to be read only.

    Attributes:
        values: [R, width], shares the memory of the tensor.
        blocks: the same as [R, width / BLOCK, BLOCK].
        block_max: [R, width / BLOCK]; NaN where a block has one.
        row_max: [R].
    """

    def __init__(self, scores: torch.Tensor) -> None:
        blocks = scores.unflatten(1, (-1, BLOCK))
        self.values: Scores = scores.numpy()
        self.blocks: Scores = blocks.numpy()
        self.block_max: Scores = blocks.amax(dim=-1).numpy()
        self.row_max: Scores = self.block_max.max(axis=1)

    @property
    def width(self) -> int:
        """Columns, the vocabulary rounded up: above every token id."""
        return int(self.values.shape[1])

    @property
    def lowest(self) -> float:
        """The lowest finite score of this precision: everything but -inf is at least this."""
        return float(np.finfo(self.values.dtype).min)

    def best_ids(self) -> NDArray[np.int64]:
        """The token with the largest score of each row, of several the lowest id: [R]."""
        rows = np.arange(len(self.values))
        blocks = self.block_max.argmax(axis=1)
        best: NDArray[np.int64] = blocks * BLOCK + self.blocks[rows, blocks].argmax(axis=1)
        return best

    def at_least(self, row: int, bound: float) -> tuple[NDArray[np.int64], Scores]:
        """Token ids, ascending, and scores of all tokens of ``row`` that score at least ``bound``."""
        blocks = np.flatnonzero(self.block_max[row] >= bound)
        tile = self.blocks[row, blocks]
        places, columns = np.nonzero(tile >= bound)
        return blocks[places] * BLOCK + columns, tile[places, columns]

    def kth_largest(self, row: int, k: int) -> float:
        """The k-th largest score of ``row``, k from 1 to the size of the vocabulary.

        k blocks have a maximum of at least the k-th largest block maximum, so k tokens score at least that, and only
        those need to be looked at.
        """
        values = self.values[row]
        num_blocks = self.block_max.shape[1]
        if k <= num_blocks:
            bound = float(np.partition(self.block_max[row], num_blocks - k)[num_blocks - k])
            values = self.at_least(row, bound)[1]
        return float(np.partition(values, len(values) - k)[len(values) - k])

    def exp_sum(self, row: int) -> float:
        """Sum over the vocabulary of exp(score - largest score), added up in float64."""
        return float(np.exp(self.values[row] - self.row_max[row]).sum(dtype=np.float64))
