"""How often guesses are right: P(guess at depth d accepted | depth d-1 accepted), per request and kind of guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jacobi_llm.infer.fill import GuessKind

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Where nothing is known. Low, so that a model that guesses badly is found out cheaply.
_DEFAULT_PRIOR = {GuessKind.CARRIED: 0.4, GuessKind.MATCHED: 0.4, GuessKind.BLIND: 0.1}
# Weights in observations: of the prior, of the mean over depths, of the other requests.
_PRIOR_WEIGHT = 4.0
_DEPTH_WEIGHT = 4.0
_POOL_WEIGHT = 4.0
# A request is followed over about 30 passes, all of them together over about 500.
_REQUEST_DECAY = 1 - 1 / 30
_POOL_DECAY = 1 - 1 / 500
_LEAST, _MOST = 0.005, 0.99
# The mean is taken over depth 1 alone, which is unlike the others, and over the others.
_PARTS = [0, 1]


@dataclass(frozen=True)
class Trial:
    """What one pass showed of one request's guesses.

    Attributes:
        slot: the request.
        num_carried: guesses at the front that the pass before had predicted.
        kind: of the others.
        num_guesses: all of them, at least 1.
        num_accepted: right ones at the front.
    """

    slot: int
    num_carried: int
    kind: GuessKind
    num_guesses: int
    num_accepted: int


class AcceptanceTable:
    """Counts of guesses reached and accepted.

    Carried guesses are counted by their depth in the window, the others by their depth behind the carried ones. A
    request's estimate leans on that of all requests together (scaled by how much better or worse this request has been
    so far), that one on its mean over the depths, and the mean on the prior. Old passes count less and less.
    """

    def __init__(self, max_depth: int, prior: Sequence[float] = ()) -> None:
        """Count guesses down to ``max_depth``; ``prior`` is P by depth of carried guesses (empty: not known)."""
        kinds = len(GuessKind)
        self.max_depth = max_depth
        self._prior = np.array([[_DEFAULT_PRIOR[kind]] * max_depth for kind in GuessKind])
        if prior:
            known = np.array([*prior[:max_depth], *[prior[-1]] * (max_depth - len(prior))])
            self._prior[GuessKind.CARRIED] = np.clip(known, _LEAST, _MOST)
        self._part = np.minimum(np.arange(max_depth), len(_PARTS) - 1)
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._reached: Floats = np.zeros((0, kinds, max_depth))
        self._accepted: Floats = np.zeros((0, kinds, max_depth))
        self._expected: Floats = np.zeros(0)
        self._got: Floats = np.zeros(0)
        self._pool_reached: Floats = np.zeros((kinds, max_depth))
        self._pool_accepted: Floats = np.zeros((kinds, max_depth))
        self._pool: Floats = self._prior.copy()
        self._trials: list[Trial] = []

    def slot(self, request_id: str) -> int:
        """Number of a request, a new one with nothing known if it has none yet."""
        slot = self._slot_of.get(request_id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[request_id] = self._free.pop()
        return slot

    def forget(self, request_id: str) -> None:
        """Free what is kept of a request."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self.flush()
            self._reached[slot] = self._accepted[slot] = 0.0
            self._expected[slot] = self._got[slot] = 0.0
            self._free.append(slot)

    def add(self, trial: Trial) -> None:
        """Take note of a pass; it counts from the next estimate on."""
        self._trials.append(trial)

    def estimate(self, slots: Integers, num_carried: Integers, kinds: Integers, depth: int) -> tuple[Floats, Floats]:
        """P(accepted | the one before accepted) of the next guesses.

        Args:
            slots: [S].
            num_carried: [S], carried guesses of each request.
            kinds: [S], kind of the guesses behind them.
            depth: D.

        Returns:
            [S, D] for the guesses there are now, and [S, D] as if all of them were carried.
        """
        self.flush()
        depths = np.arange(depth)
        behind = depths >= num_carried[:, None]
        kind_SD = np.where(behind, kinds[:, None], int(GuessKind.CARRIED))
        depth_SD = np.where(behind, depths - num_carried[:, None], depths)
        scale = ((self._got[slots] + _POOL_WEIGHT) / (self._expected[slots] + _POOL_WEIGHT))[:, None]
        slot_S1 = slots[:, None]
        now = self._blend(self._pool[kind_SD, depth_SD], scale, (slot_S1, kind_SD, depth_SD))
        carried = self._blend(self._pool[GuessKind.CARRIED, :depth], scale, (slot_S1, int(GuessKind.CARRIED), depths))
        return now, carried

    def _blend(self, pool: Floats, scale: Floats, where: tuple[object, ...]) -> Floats:
        shared = np.minimum(pool * scale, _MOST)
        own: Floats = self._accepted[where] + _POOL_WEIGHT * shared  # type: ignore[index]
        own /= self._reached[where] + _POOL_WEIGHT  # type: ignore[index]
        return own

    def flush(self) -> None:
        """Work the noted passes into the counts."""
        if not self._trials:
            return
        slots, num_carried, kinds, num_guesses, num_accepted = np.array(
            [(t.slot, t.num_carried, t.kind, t.num_guesses, t.num_accepted) for t in self._trials]
        ).T
        self._trials.clear()
        depths = np.arange(min(int(num_guesses.max()), self.max_depth))
        behind = depths >= num_carried[:, None]
        kind_TD = np.where(behind, kinds[:, None], int(GuessKind.CARRIED))
        depth_TD = np.where(behind, depths - num_carried[:, None], depths)
        reached_TD = depths < np.minimum(num_accepted + 1, num_guesses)[:, None]
        accepted_TD = (depths < num_accepted[:, None]).astype(np.float64)
        expected_T = (self._pool[kind_TD, depth_TD] * reached_TD).sum(axis=1)
        self._reached[slots] *= _REQUEST_DECAY
        self._accepted[slots] *= _REQUEST_DECAY
        self._expected[slots] = self._expected[slots] * _REQUEST_DECAY + expected_T
        self._got[slots] = self._got[slots] * _REQUEST_DECAY + accepted_TD.sum(axis=1)
        # A request has at most one trial per pass, and trials are worked in before the next pass.
        slot_TD = np.broadcast_to(slots[:, None], kind_TD.shape)
        self._reached[slot_TD, kind_TD, depth_TD] += reached_TD
        self._accepted[slot_TD, kind_TD, depth_TD] += accepted_TD
        decay = _POOL_DECAY ** len(slots)
        self._pool_reached *= decay
        self._pool_accepted *= decay
        np.add.at(self._pool_reached, (kind_TD, depth_TD), reached_TD)
        np.add.at(self._pool_accepted, (kind_TD, depth_TD), accepted_TD)
        self._pool = self._pooled()

    def _pooled(self) -> Floats:
        """Estimate of all requests together, [kinds, max_depth]."""
        reached, accepted = self._pool_reached, self._pool_accepted
        expected = np.add.reduceat(reached * self._prior, _PARTS, axis=1)
        scale = (np.add.reduceat(accepted, _PARTS, axis=1) + _PRIOR_WEIGHT) / (expected + _PRIOR_WEIGHT)
        base = np.minimum(self._prior * scale[:, self._part], _MOST)
        pooled: Floats = (accepted + _DEPTH_WEIGHT * base) / (reached + _DEPTH_WEIGHT)
        return pooled

    def _grow(self) -> None:
        old = len(self._got)
        new = max(2 * old, 16)
        for name in ("_reached", "_accepted", "_expected", "_got"):
            array: Floats = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros((new - old, *array.shape[1:])))))
        self._free.extend(range(new - 1, old - 1, -1))
