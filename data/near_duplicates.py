"""Near duplicates: MinHash signatures and locality-sensitive hashing (Broder 1997; Leskovec et al., chapter 3).

Two texts are near duplicates when the Jaccard similarity of their sets of 7-character pieces, estimated by the share
of equal signature entries, reaches a threshold. Characters, not words, so that scripts without spaces work as well.

A text is compared with the latest few texts of each of its buckets only: prompts of one template fill the same buckets
by the thousand, and comparing with all of them would take the square of their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np

PIECE_CHARS = 7
_NUM_PERMUTATIONS = 128
_RECALL = 0.98
_BUCKET_TEXTS = 4
_BATCH = 512
Item = TypeVar("Item")


class NearDuplicates:
    """Finds texts that nearly repeat one that came before; one signature per kept text stays in memory."""

    def __init__(self, threshold: float, seed: int = 0) -> None:
        """Open an empty index; ``threshold``: least similarity in (0, 1); ``seed``: of the permutations."""
        import rensa

        self._rensa: Any = rensa
        self._threshold = threshold
        self._seed = seed
        self._num_bands = num_bands(threshold)
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._kept: list[Any] = []

    def flagged(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[bool, Item]]:
        """Yield (nearly repeats an earlier text that was kept, item), for (text, item) in their order."""
        source = iter(items)
        while batch := list(islice(source, _BATCH)):
            signatures = self._rensa.RMinHash.from_token_sets(
                [pieces(text) for text, _ in batch], _NUM_PERMUTATIONS, self._seed
            )
            for (_, item), signature in zip(batch, signatures, strict=True):
                yield self._is_repeat(signature), item

    def _is_repeat(self, signature: Any) -> bool:
        raw = np.array(signature.digest(), dtype=np.uint32).tobytes()
        width = len(raw) // self._num_bands
        keys = [hash((band, raw[band * width : (band + 1) * width])) for band in range(self._num_bands)]
        candidates = {number for key in keys for number in self._buckets.get(key, ())}
        # Latest first, so that what is compared does not depend on the order of a set.
        if any(signature.jaccard(self._kept[n]) >= self._threshold for n in sorted(candidates, reverse=True)):
            return True
        number = len(self._kept)
        self._kept.append(signature)
        for key in keys:
            self._buckets[key] = (number, *self._buckets.get(key, ())[: _BUCKET_TEXTS - 1])
        return False


def pieces(text: str) -> list[str]:
    """Return the 7-character pieces of a text, case and runs of white space ignored; a shorter text is one piece."""
    plain = " ".join(text.lower().split())
    return [plain[start : start + PIECE_CHARS] for start in range(max(1, len(plain) - PIECE_CHARS + 1))]


def num_bands(threshold: float) -> int:
    """Return the fewest bands that still find 98% of the pairs at the threshold.

    A pair of similarity s shares one of b bands of r rows with probability 1 - (1 - s^r)^b.
    """
    for bands in (bands for bands in range(1, _NUM_PERMUTATIONS + 1) if _NUM_PERMUTATIONS % bands == 0):
        if 1 - (1 - threshold ** (_NUM_PERMUTATIONS // bands)) ** bands >= _RECALL:
            return bands
    return _NUM_PERMUTATIONS
