"""How often each token stands in the prefix of each row of a window, kept per request and not recounted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowCounts:
    """Counts of n rows over the K tokens that stand in the prefix of any of them.

    Attributes:
        token_ids: [K], distinct.
        in_completion: [n, K], occurrences in the completion before the row, the window's guesses included.
        is_seen: [n, K], whether the token stands in prompt or completion before the row.
    """

    token_ids: NDArray[np.int64]
    in_completion: NDArray[np.int64]
    is_seen: NDArray[np.bool_]


class PrefixCounts:
    """Counts of prompt and committed completion of one request; tokens are only ever appended."""

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._columns = {token_id: column for column, token_id in enumerate(distinct)}
        self._token_ids = np.empty(len(distinct) + max_tokens, dtype=np.int64)
        self._token_ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(distinct) + max_tokens, dtype=np.int64)
        self._num_counted = 0

    def extend(self, completion_ids: Sequence[int]) -> None:
        """Count what was committed since the last call; ``completion_ids`` is the whole completion so far."""
        for token_id in completion_ids[self._num_counted :]:
            column = self._columns.setdefault(token_id, len(self._columns))
            self._token_ids[column] = token_id
            self._counts[column] += 1
        self._num_counted = len(completion_ids)

    def of_rows(self, guesses: Sequence[int]) -> RowCounts:
        """Counts of row 0, which has the committed tokens before it, and of a row more after each guess."""
        num_committed = len(self._columns)
        columns = dict(self._columns) if guesses else self._columns
        for guess in guesses:
            columns.setdefault(guess, len(columns))
        new_ids = [token_id for token_id in dict.fromkeys(guesses) if token_id not in self._columns]
        counts = np.zeros((len(guesses) + 1, len(columns)), dtype=np.int64)
        counts[:, :num_committed] = self._counts[:num_committed]
        for row, guess in enumerate(guesses, start=1):
            counts[row:, columns[guess]] += 1
        is_seen = counts > 0
        is_seen[:, :num_committed] = True
        token_ids = np.concatenate((self._token_ids[:num_committed], np.array(new_ids, dtype=np.int64)))
        return RowCounts(token_ids, counts, is_seen)
