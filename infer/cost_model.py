"""T(rows, requests, context): seconds that one decoding pass takes, calibrated once and corrected by what is seen."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Beyond the last measured point the last slope goes on to here.
_FAR_ROWS = 1 << 20
# A calibrated point counts as this many passes seen there.
_CALIBRATED_PASSES = 4
_LEAST_RATE = 0.02
_DRIFT_RATE = 0.1
_LARGEST_ERROR = math.log(2.0)
_LARGEST_CORRECTION = math.log(2.0)
_LARGEST_DRIFT = math.log(8.0)


@dataclass(frozen=True)
class PassTimes:
    """What a calibration measured.

    T(R, S, C) = t(R) + (S - 1) * per_request_s + (C - context) * c(S), with t linear between the measured points: steps
    (tiles of a kernel, captured graphs) stay where they were measured. A token of context costs
    c(S) = shared + (alone - shared) / S: one request's heads keep the cores less busy than several requests do.
    Neglected are that context costs more for more rows, padding between requests of different length, and what a
    sampler adds.

    Attributes:
        num_rows: ascending, from 1.
        seconds: t at those, one request. More rows may take less: kernels for one row are not always the fastest.
        num_context_tokens: context of that request (tokens).
        per_request_s: seconds that each further request adds at the same number of rows.
        per_context_token_s: seconds for a token of context of a request alone ("alone").
        per_shared_context_token_s: the same with very many requests ("shared").
    """

    num_rows: tuple[int, ...]
    seconds: tuple[float, ...]
    num_context_tokens: int
    per_request_s: float
    per_context_token_s: float
    per_shared_context_token_s: float

    def __post_init__(self) -> None:
        if len(self.num_rows) != len(self.seconds) or len(self.num_rows) < 2 or min(self.seconds) <= 0:
            raise ValueError("a calibration has at least two points, with positive seconds")


class CostModel:
    """Pass times, corrected while passes run.

    A pass that takes longer than predicted may mean that the whole machine is slower now, or that this number of rows
    is dearer than calibrated. The first is followed quickly, as one factor (which no choice between windows depends
    on); what it leaves is learnt slowly, point by point. Both are bounded, and so is what one pass can change.
    """

    def __init__(self, times: PassTimes) -> None:
        self.times = times
        slope = (times.seconds[-1] - times.seconds[-2]) / (times.num_rows[-1] - times.num_rows[-2])
        mean_slope = (times.seconds[-1] - times.seconds[0]) / (times.num_rows[-1] - times.num_rows[0])
        far_s = times.seconds[-1] + max(slope, mean_slope) * (_FAR_ROWS - times.num_rows[-1])
        self._point_list = [*times.num_rows, _FAR_ROWS]
        self._points: Floats = np.array(self._point_list, dtype=np.float64)
        self._calibrated: Floats = np.array([*times.seconds, far_s])
        self._now = self._calibrated.copy()
        self._corrections = [0.0] * len(self._points)
        self._num_seen = [0.0] * len(self._points)
        self._drift = 0.0
        self._num_passes = 0

    def predict(self, num_rows: NDArray[np.int64], num_requests: int, num_context_tokens: int) -> Floats:
        """Seconds of passes with so many rows [J], all with the same requests; without the machine's present drift."""
        seconds: Floats = np.interp(num_rows, self._points, self._now)
        seconds += self._offset(num_requests, num_context_tokens)
        return seconds

    def predict_one(self, num_rows: int, num_requests: int, num_context_tokens: int) -> float:
        """Seconds of one pass, as :meth:`predict` gives them."""
        high = bisect.bisect_left(self._point_list, num_rows)
        low = max(high - 1, 0)
        width = self._point_list[high] - self._point_list[low]
        share = (num_rows - self._point_list[low]) / width if width else 0.0
        left, right = float(self._now[low]), float(self._now[high])
        return left + share * (right - left) + self._offset(num_requests, num_context_tokens)

    def _offset(self, num_requests: int, num_context_tokens: int) -> float:
        times = self.times
        context = max(num_context_tokens - times.num_context_tokens, 0)
        shared_s = times.per_shared_context_token_s
        per_token_s = shared_s + (times.per_context_token_s - shared_s) / num_requests
        return (num_requests - 1) * times.per_request_s + context * per_token_s

    def observe(self, num_rows: int, num_requests: int, num_context_tokens: int, measured_s: float) -> None:
        """Learn from a decoding pass that ran."""
        if num_rows > self.times.num_rows[-1] or measured_s <= 0:
            return
        predicted_s = self.predict_one(num_rows, num_requests, num_context_tokens)
        error = _clip(math.log(measured_s / predicted_s) - self._drift, _LARGEST_ERROR)
        self._num_passes += 1
        rate = max(_DRIFT_RATE, 1 / (self._num_passes + 1))
        self._drift = _clip(self._drift + rate * error, _LARGEST_DRIFT)
        high = bisect.bisect_left(self._point_list, num_rows)
        if num_rows == self._point_list[high]:
            self._correct(high, 1.0, error)
        else:
            share = (num_rows - self._point_list[high - 1]) / (self._point_list[high] - self._point_list[high - 1])
            self._correct(high - 1, 1 - share, error)
            self._correct(high, share, error)

    def _correct(self, point: int, weight: float, error: float) -> None:
        rate = max(1 / (_CALIBRATED_PASSES + self._num_seen[point]), _LEAST_RATE)
        self._num_seen[point] += weight
        self._corrections[point] = _clip(self._corrections[point] + rate * weight * error, _LARGEST_CORRECTION)
        self._now[point] = self._calibrated[point] * math.exp(self._corrections[point])


def _clip(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))
