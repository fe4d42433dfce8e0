"""The token with the largest z_v + G_v among those kept, without noise for the whole vocabulary.

A sample from softmax(z) is argmax over v of z_v + G_v with independent Gumbel noise G (Gumbel 1954; Maddison, Tarlow
and Minka, "A* Sampling", NeurIPS 2014, who also draw the largest noise first).

Why no token is missed. Write A_b for the smallest exponential of v's block (``infer/noise.py``): G_v <= -log A_b, so
z_v - log A_b bounds what v can reach. The holder of a block reaches its bound; let L be the best that a kept holder
reaches in the row. A token whose bound is below L cannot win and is skipped; noise is computed for the others. Sums and
logarithms are rounded, by less than 1e-14 (1 + |L|) together, so tokens are skipped only when they are below
L - 1e-12 (1 + |L|). The tokens that remain are about 64 and those that are likelier than all of the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.infer.noise import BLOCK, RowNoise
from jacobi_llm.infer.score_rows import ScoreRows, Scores

_SLACK = 1e-12


@dataclass(frozen=True)
class Kept:
    """Tokens that score above ``threshold``, and those that score as much and have an id up to ``last_id``."""

    threshold: float
    last_id: int


def gumbel_argmax(
    scores: ScoreRows, active: NDArray[np.int64], kept: Sequence[Kept], noise: RowNoise
) -> NDArray[np.int64]:
    """argmax over the kept tokens of z + G, ties to the lowest id.

    Args:
        scores: z; the largest score of each active row is finite.
        active: [M] the rows of ``scores`` and ``noise`` that are wanted.
        kept: of each active row, with at least one token in it.
        noise: of the rows of ``scores``.

    Returns:
        [M] token ids.
    """
    num_blocks = scores.block_max.shape[1]
    thresholds = np.array([one.threshold for one in kept], dtype=scores.values.dtype)
    last_ids = np.array([one.last_id for one in kept], dtype=np.int64)
    block_max = scores.block_max[active]

    flat = np.flatnonzero(block_max >= thresholds[:, None])
    wanted, blocks = np.divmod(flat, num_blocks)
    rows = active[wanted]
    minima, holders = noise.block_minima(rows, blocks)
    bounds = -np.log(minima)
    held = scores.values[rows, holders]
    reached = np.where(_is_kept(held, holders, thresholds[wanted], last_ids[wanted]), held + bounds, -np.inf)
    least = np.maximum.reduceat(reached, _starts(wanted, len(active)))
    least -= _SLACK * (1 + np.abs(least))

    # Both bounds in one: a token below its row's threshold is not kept, one below the other cannot win.
    lowest = np.maximum(least[wanted] - bounds, thresholds[wanted])
    hopeful = np.flatnonzero(block_max.ravel()[flat] >= lowest)
    tile = scores.blocks[rows[hopeful], blocks[hopeful]]
    places, columns = np.divmod(np.flatnonzero(tile >= lowest[hopeful, None]), BLOCK)
    found = hopeful[places]
    token_ids = blocks[found] * BLOCK + columns
    z = tile[places, columns]
    is_kept = _is_kept(z, token_ids, thresholds[wanted[found]], last_ids[wanted[found]])
    found, token_ids, z = found[is_kept], token_ids[is_kept], z[is_kept]
    excesses = np.where(token_ids == holders[found], 0.0, noise.excesses(rows[found], token_ids))
    values = z.astype(np.float64) - np.log(minima[found] + excesses)
    return _first_best(wanted[found], token_ids, values, len(active))


def _is_kept(
    scores: Scores, token_ids: NDArray[np.int64], thresholds: Scores, last_ids: NDArray[np.int64]
) -> NDArray[np.bool_]:
    kept: NDArray[np.bool_] = (scores > thresholds) | ((scores == thresholds) & (token_ids <= last_ids))
    return kept


def _starts(rows: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Where each row begins in ``rows``, which is ascending and has every row."""
    return np.searchsorted(rows, np.arange(num_rows))


def _first_best(
    rows: NDArray[np.int64], token_ids: NDArray[np.int64], values: NDArray[np.float64], num_rows: int
) -> NDArray[np.int64]:
    """Of each row the token with the largest value; of several, the first."""
    best = np.maximum.reduceat(values, _starts(rows, num_rows))
    winners = np.flatnonzero(values == best[rows])[::-1]
    chosen = np.empty(num_rows, dtype=np.int64)
    chosen[rows[winners]] = token_ids[winners]
    return chosen
