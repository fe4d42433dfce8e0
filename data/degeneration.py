"""Outputs that repeat themselves: a pure function of token ids, or of text, to a reason or None.

It looks at repetition alone, so that it is the same for every language and for code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LOOP = "output ends in a loop"
REPETITIVE = "output repeats itself"


@dataclass(frozen=True)
class RepetitionLimits:
    """When repetition counts.

    Attributes:
        min_loop_items: shortest run at the end that is a loop (items).
        min_periods: fewest repeats of one period in that run.
        max_period: longest period that is looked for (items).
        ngram: length of the pieces that are compared (items).
        min_items: shortest output whose pieces are compared (items).
        max_repeated_share: largest share of pieces that repeat an earlier one.
    """

    min_loop_items: int
    min_periods: int
    max_period: int
    ngram: int
    min_items: int
    max_repeated_share: float


TOKEN_LIMITS = RepetitionLimits(
    min_loop_items=24, min_periods=4, max_period=64, ngram=4, min_items=64, max_repeated_share=0.5
)
TEXT_LIMITS = RepetitionLimits(
    min_loop_items=64, min_periods=4, max_period=200, ngram=20, min_items=200, max_repeated_share=0.75
)


def degeneration(items: Sequence[Hashable], limits: RepetitionLimits = TOKEN_LIMITS) -> str | None:
    """Return why an output is degenerate (``LOOP`` or ``REPETITIVE``), or None.

    Args:
        items: token ids (with ``TOKEN_LIMITS``) or a text (with ``TEXT_LIMITS``).
        limits: when repetition counts.
    """
    if _ends_in_loop(items, limits):
        return LOOP
    if len(items) >= limits.min_items and repeated_share(items, limits.ngram) > limits.max_repeated_share:
        return REPETITIVE
    return None


def repeated_share(items: Sequence[Hashable], ngram: int) -> float:
    """Return the share of n-grams that repeat an earlier one, from 0 to 1; 0 when there is none."""
    num_ngrams = len(items) - ngram + 1
    if num_ngrams < 1:
        return 0.0
    if isinstance(items, str):
        num_distinct = len({items[start : start + ngram] for start in range(num_ngrams)})
    else:
        num_distinct = len({tuple(items[start : start + ngram]) for start in range(num_ngrams)})
    return 1 - num_distinct / num_ngrams


def _ends_in_loop(items: Sequence[Hashable], limits: RepetitionLimits) -> bool:
    length = len(items)
    if length < limits.min_loop_items:
        return False
    for period in range(1, min(limits.max_period, length // limits.min_periods) + 1):
        wanted = max(limits.min_loop_items, limits.min_periods * period)
        if items[-1] != items[-1 - period] or wanted > length:
            continue
        if isinstance(items, str) and not any(char.isalnum() for char in items[-period:]):
            continue  # a rule of dashes, blank lines
        if all(items[place] == items[place - period] for place in range(length - 2, length - wanted + period - 1, -1)):
            return True
    return False
