"""Log-probabilities of committed tokens, from the pass that accepted them.

They are the log-softmax of the model's own logits, before processors, temperature and truncation (what vLLM calls raw
logprobs and returns by default), in float32, or float64 for float64 logits. A row that accepts a token has that token's
true prefix before it, so they are those of AR decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jacobi_llm.infer.score_rows import ScoreRows, copy_scores


@dataclass(frozen=True)
class TokenLogprob:
    """One completion token.

    Attributes:
        token_id, logprob: the chosen token.
        top: the likeliest tokens of its place and their logprobs, best first, ties by id; empty when none are asked.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the logprobs of chosen tokens.

    Args:
        logits: [n, vocab], the model's, of at least as many rows as there are tokens.
        token_ids: what was chosen in the first rows.
        num_top: likeliest tokens wanted besides, 0 for none.
    """
    vocab_size = logits.shape[1]
    rows = copy_scores(logits[: len(token_ids)])
    sums = rows.logsumexp(dim=-1)
    chosen = (rows[torch.arange(len(token_ids)), list(token_ids)] - sums).tolist()
    tops = _top(ScoreRows(rows), sums.tolist(), min(num_top, vocab_size)) if num_top else [()] * len(chosen)
    return [TokenLogprob(*one) for one in zip(token_ids, chosen, tops, strict=True)]


def _top(rows: ScoreRows, sums: Sequence[float], num_top: int) -> list[tuple[tuple[int, float], ...]]:
    found = []
    for row, log_sum in enumerate(sums):
        token_ids, scores = rows.at_least(row, rows.kth_largest(row, num_top))
        order = np.argsort(-scores, kind="stable")[:num_top]
        pairs = zip(token_ids[order].tolist(), (scores[order] - log_sum).tolist(), strict=True)
        found.append(tuple(pairs))
    return found
