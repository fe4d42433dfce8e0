"""Chooses one token per logit row.

The choice is a function of the row's own prefix and of its request's parameters, seed, choice index and t, never of the
pass or the batch it is computed in; that is what makes Jacobi decoding converge to the AR output, greedy and sampled.

Scores are float32, float64 where the logits are. z = scores after the processors, divided by the temperature; the
chosen token is argmax over the kept v of z_v + G(seed, choice, t, v), in float64, ties to the lowest id
(``infer/processors.py``, ``infer/truncation.py``, ``infer/noise.py``, ``infer/gumbel_max.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.sampling_params import SamplingParams
from jacobi_llm.infer.score_rows import ScoreRows, copy_scores
from jacobi_llm.infer.truncation import draw_tokens

_CHUNK = 256
_UNCHOSEN = -1
# Rows whose scores are worked on together: their numbers still fit the processor's cache.
_MAX_ROWS_TOGETHER = 16


@dataclass(frozen=True)
class RequestRows:
    """The logit rows of one request in a pass; row i is preceded by prompt, completion and the guesses before it.

    Attributes:
        num_rows: 0 for a prefill chunk, else 1 + the number of guesses.
        sampling: how the request chooses.
        processors: of the request; None when nothing changes its logits.
        seed, choice: the key of its noise.
        completion_ids: committed tokens.
        guesses: what the rows after the first read.
    """

    num_rows: int
    sampling: SamplingParams
    processors: LogitsProcessors | None
    seed: int
    choice: int
    completion_ids: Sequence[int]
    guesses: Sequence[int]

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the logits as they are is the choice."""
        return self.processors is None and self.sampling.temperature == 0

    def noise_keys(self) -> list[RowKey]:
        """The noise key of every row."""
        t = len(self.completion_ids)
        return [RowKey(self.seed, self.choice, t + row) for row in range(self.num_rows)]


def choose(logits: torch.Tensor, requests: Sequence[RequestRows]) -> list[list[int]]:
    """Choose a token for every row. A row whose scores are not finite gets the argmax of its logits (a NaN, if any).

    Args:
        logits: [N, vocab], any float dtype and device.
        requests: whose rows those are, in order.

    Returns:
        The token ids of each request's rows.
    """
    num_rows = sum(request.num_rows for request in requests)
    if logits.shape[0] != num_rows:
        raise ValueError(f"{logits.shape[0]} logit rows, but the requests have {num_rows}")
    if all(request.is_plain for request in requests):
        token_ids: list[int] = greedy_ids(logits).tolist()
        return _split(token_ids, requests)
    token_ids = [_UNCHOSEN] * num_rows
    first_rows = np.cumsum([0, *(request.num_rows for request in requests)]).tolist()
    special = [(first, request) for first, request in zip(first_rows, requests, strict=False) if not request.is_plain]
    for group in _groups(special):
        places = [first + row for first, request in group for row in range(request.num_rows)]
        for place, token_id in zip(places, _choose_special(logits, places, group), strict=True):
            token_ids[place] = token_id
    rest = [place for place, token_id in enumerate(token_ids) if token_id == _UNCHOSEN]
    if rest:
        for place, token_id in zip(rest, greedy_ids(logits[rest]).tolist(), strict=True):
            token_ids[place] = token_id
    return _split(token_ids, requests)


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


def _split(token_ids: Sequence[int], requests: Sequence[RequestRows]) -> list[list[int]]:
    remaining = iter(token_ids)
    return [list(islice(remaining, request.num_rows)) for request in requests]


def _groups(special: Sequence[tuple[int, RequestRows]]) -> Iterator[list[tuple[int, RequestRows]]]:
    """Cut into groups of a bounded number of rows; a wider window is a group of its own."""
    group: list[tuple[int, RequestRows]] = []
    num_rows = 0
    for first, request in special:
        if group and num_rows + request.num_rows > _MAX_ROWS_TOGETHER:
            yield group
            group, num_rows = [], 0
        if request.num_rows:
            group.append((first, request))
            num_rows += request.num_rows
    if group:
        yield group


def _choose_special(logits: torch.Tensor, places: Sequence[int], group: Sequence[tuple[int, RequestRows]]) -> list[int]:
    """Choose for rows with processors or a temperature; ``_UNCHOSEN`` where the scores are not finite."""
    requests = [request for _, request in group]
    # One stretch of rows is a view; only rows of scattered requests are copied.
    is_stretch = places[-1] - places[0] == len(places) - 1
    some = logits[places[0] : places[-1] + 1] if is_stretch else logits[places]
    rows = ScoreRows(_processed(some, requests))
    owners = [request for request in requests for _ in range(request.num_rows)]
    chosen = np.where(np.isfinite(rows.row_max), rows.best_ids(), _UNCHOSEN)
    is_sampled = np.array([owner.sampling.temperature > 0 for owner in owners])
    sampled = np.flatnonzero(is_sampled & (chosen != _UNCHOSEN))
    if len(sampled):
        noise = RowNoise([key for request in requests for key in request.noise_keys()])
        chosen[sampled] = draw_tokens(rows, sampled, [owner.sampling for owner in owners], noise)
    token_ids: list[int] = chosen.tolist()
    return token_ids


def _processed(logits: torch.Tensor, requests: Sequence[RequestRows]) -> torch.Tensor:
    """Scores of the requests' rows after their processors and, where they sample, divided by the temperature."""
    vocab_size = logits.shape[1]
    scores = copy_scores(logits)
    temperatures: list[float] = []
    for request in requests:
        if request.processors is not None:
            window = scores[len(temperatures) : len(temperatures) + request.num_rows, :vocab_size]
            request.processors.apply(window, request.completion_ids, request.guesses)
        temperatures += [request.sampling.temperature or 1.0] * request.num_rows
    if any(temperature != 1 for temperature in temperatures):
        scores.div_(torch.tensor(temperatures, dtype=scores.dtype)[:, None])
    return scores
