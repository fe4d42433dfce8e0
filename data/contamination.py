"""Decontamination: training text that shares a run of words with an evaluation set.

The rule is that of GPT-3 (arXiv 2005.14165, appendix C): a run of 13 words, case and punctuation ignored. Texts of the
evaluation set that are shorter count where a training text equals them. Characters of scripts that are written without
spaces are words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # Thai, Lao, Khmer, kana, Han
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")


class Contamination:
    """The runs of words of some evaluation texts. ``num_texts``: how many texts; ``num_runs``: different runs."""

    def __init__(self, texts: Iterable[str], num_words: int) -> None:
        self._num_words = num_words
        self._runs: set[str] = set()
        self._whole: set[str] = set()
        self.num_texts = 0
        for text in texts:
            self.num_texts += 1
            found = words(text)
            if len(found) >= num_words:
                self._runs.update(self._runs_of(found))
            elif found:
                self._whole.add(" ".join(found))

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def touches(self, texts: Iterable[str]) -> bool:
        """Say whether one of the texts shares a run of words with the evaluation set, or is one of its short texts."""
        return any(self._touches(words(text)) for text in texts)

    def _touches(self, found: list[str]) -> bool:
        if len(found) < self._num_words:
            return " ".join(found) in self._whole
        return not self._runs.isdisjoint(self._runs_of(found))

    def _runs_of(self, found: list[str]) -> Iterator[str]:
        size = self._num_words
        return (" ".join(found[start : start + size]) for start in range(len(found) - size + 1))


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())
