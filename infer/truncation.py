"""Top-k, top-p and min-p: which tokens of a row may be drawn, and the draw among them.

The meaning is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, one after the other on
scores that are divided by the temperature. Where theirs leaves open which of equally likely tokens top-p cuts (their
sort is not stable), the lowest ids stay.

Top-k and min-p are bounds on the score. Top-p keeps a token when the tokens before it, by score and then by id, have
less than ``top_p`` of the mass together. To list what it keeps would take a sort of many thousand tokens where the
distribution is flat, so it is not listed: draw among all tokens; when what is drawn is kept, it is the best of those
kept too. When it is not, neither is any token after it, so draw again among the tokens before it, with the same noise.
At a probability p of the nucleus this takes about 1 + log(1/p) draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.infer.gumbel_max import Kept, gumbel_argmax
from jacobi_llm.infer.noise import RowNoise
from jacobi_llm.infer.sampling_params import SamplingParams
from jacobi_llm.infer.score_rows import ScoreRows, Scores


@dataclass(frozen=True)
class _Limits:
    """What a row keeps: tokens inside ``bounds`` with less than ``mass`` before them, relative to the likeliest one."""

    bounds: Kept
    mass: float


def draw_tokens(
    scores: ScoreRows, active: NDArray[np.int64], sampling: Sequence[SamplingParams], noise: RowNoise
) -> NDArray[np.int64]:
    """Draw a token for each of the active rows.

    Args:
        scores: z of R rows; the largest score of each active row is finite.
        active: [M] rows.
        sampling: parameters of each of the R rows.
        noise: of the R rows.

    Returns:
        [M] token ids.
    """
    limits = [_limits(scores, row, sampling[row]) for row in active.tolist()]
    kept = [one.bounds for one in limits]
    chosen = np.empty(len(active), dtype=np.int64)
    places = np.arange(len(active))
    while len(places):
        chosen[places] = gumbel_argmax(scores, active[places], [kept[place] for place in places], noise)
        left = []
        for place in places.tolist():
            row, token_id = int(active[place]), int(chosen[place])
            if limits[place].mass < math.inf and _mass_before(scores, row, token_id) >= limits[place].mass:
                kept[place] = Kept(float(scores.values[row, token_id]), token_id - 1)
                left.append(place)
        places = np.array(left, dtype=np.int64)
    return chosen


def _limits(scores: ScoreRows, row: int, sampling: SamplingParams) -> _Limits:
    bound, mass = scores.lowest, math.inf
    if 0 < sampling.top_k < scores.width:
        bound = max(scores.kth_largest(row, sampling.top_k), bound)
    if sampling.top_p < 1:
        is_cut = bound > scores.lowest
        mass = sampling.top_p * (_mass(scores, row, scores.at_least(row, bound)[1]) if is_cut else scores.exp_sum(row))
    if sampling.min_p > 0:
        floor = float(scores.row_max[row]) + math.log(sampling.min_p)
        # In the scores' own precision, in which it is compared.
        bound = max(float(scores.values.dtype.type(floor)), bound)
    return _Limits(Kept(bound, scores.width), mass)


def _mass_before(scores: ScoreRows, row: int, token_id: int) -> float:
    score = float(scores.values[row, token_id])
    token_ids, values = scores.at_least(row, score)
    return _mass(scores, row, values[(values > score) | (token_ids < token_id)])


def _mass(scores: ScoreRows, row: int, values: Scores) -> float:
    return float(np.exp(values.astype(np.float64) - float(scores.row_max[row])).sum())
