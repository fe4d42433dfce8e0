"""Top-k, top-p and min-p: which tokens of a row may be drawn.

The meaning is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, one after the other on
scores that are divided by the temperature. Where theirs leaves open which of equally likely tokens are cut by top-p
(their sort is not stable), the lowest ids stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.infer.sampling_params import SamplingParams
from jacobi_llm.infer.score_rows import ScoreRows, Scores

# How far below the best score the nucleus is looked for, each further step only when the ones before did not reach it.
_DEPTHS = (4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Kept:
    """Tokens that score above ``threshold``, and those that score as much and have an id up to ``last_id``."""

    threshold: float
    last_id: int


def kept_tokens(scores: ScoreRows, row: int, sampling: SamplingParams) -> Kept:
    """What top-k, top-p and min-p leave of ``row``: the likeliest token at least, and none that scores -inf."""
    kept = Kept(scores.lowest, scores.width)
    if 0 < sampling.top_k < scores.width:
        kept = Kept(max(scores.kth_largest(row, sampling.top_k), scores.lowest), scores.width)
    if sampling.top_p < 1:
        kept = _nucleus(scores, row, sampling.top_p, kept)
    if sampling.min_p > 0:
        floor = float(scores.row_max[row]) + math.log(sampling.min_p)
        # In the scores' own precision, in which it is compared.
        floor = float(scores.values.dtype.type(floor))
        kept = Kept(floor, scores.width) if floor > kept.threshold else kept
    return kept


def _nucleus(scores: ScoreRows, row: int, top_p: float, kept: Kept) -> Kept:
    """Keep a token when the tokens before it, in order of score and then id, have less than ``top_p`` together."""
    token_ids, values, masses, wanted = _likeliest(scores, row, top_p, kept)
    order = np.argsort(-values, kind="stable")
    num_kept = 1 + int(np.searchsorted(np.cumsum(masses[order]), wanted, side="left"))
    last = order[min(num_kept, len(order)) - 1]
    return Kept(float(values[last]), int(token_ids[last]))


def _likeliest(
    scores: ScoreRows, row: int, top_p: float, kept: Kept
) -> tuple[NDArray[np.int64], Scores, NDArray[np.float64], float]:
    """Ids, scores and masses of tokens among which the whole nucleus is, and the mass that the nucleus must reach.

    Masses are relative to the likeliest token. If the tokens above a bound have ``top_p`` of the whole mass, every
    token below it has that mass before it and is none of the nucleus.
    """
    if kept.threshold > scores.lowest:
        token_ids, values = scores.at_least(row, kept.threshold)
        masses = _masses(scores, row, values)
        return token_ids, values, masses, top_p * float(masses.sum())
    wanted = top_p * scores.exp_sum(row)
    best = float(scores.row_max[row])
    for depth in _DEPTHS:
        token_ids, values = scores.at_least(row, best - depth)
        masses = _masses(scores, row, values)
        if float(masses.sum()) >= wanted:
            return token_ids, values, masses, wanted
    token_ids, values = scores.at_least(row, scores.lowest)
    return token_ids, values, _masses(scores, row, values), wanted


def _masses(scores: ScoreRows, row: int, values: Scores) -> NDArray[np.float64]:
    masses: NDArray[np.float64] = np.exp(values.astype(np.float64) - float(scores.row_max[row]))
    return masses
