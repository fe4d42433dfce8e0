"""Do two engines compute the same thing? Their greedy completions are equal, or part at a near tie.

In bf16 the rounding depends on the kernels and on how many rows share a pass, so two right engines may part where two
tokens are nearly as likely. How near is measured in the same run: a peer's completions alone and in a batch of 8 differ
by rounding only. The gap of a difference is taken from the same weights in float32, and one is explained up to twice
the largest gap that the peers' own differences have. Our engine has no say in that bound, and no bound is wider than
what rounding can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from benchmarks.peers.pairs import Turn
from jacobi_llm.infer.near_tie import FP32_BOUND, first_difference

Completions = Sequence[tuple[int, ...]]
BOUND_FACTOR = 2.0
# A logit of 16 to 32 moves in steps of 0.125 in bf16: eight steps are a fault, whoever makes it.
WIDEST_BOUND = 1.0


@dataclass(frozen=True)
class Parting:
    """Two completions of one prompt that differ.

    Attributes:
        position: the first token that differs, from 0.
        gap: distance of the lower of the two tokens' float32 logits from the best one; infinite when one just ends.
    """

    position: int
    gap: float


class Judge:
    """Finds where completions part, and how near the tie was.

    Args:
        model: the weights of the comparison in float32.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], Parting | None] = {}

    def partings(self, prompts: Completions, ours: Completions, theirs: Completions) -> list[Parting | None]:
        """Return one entry per prompt, None where the completions are equal."""
        return [self._parting(*three) for three in zip(prompts, ours, theirs, strict=True)]

    def _parting(self, prompt: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]) -> Parting | None:
        # Repeats come round to the same prompts, and mostly to the same completions.
        key = (prompt, ours, theirs)
        if key not in self._known:
            found = first_difference(self._model, prompt, theirs, ours)
            self._known[key] = None if found is None else Parting(found.position, found.gap)
        return self._known[key]


def rounding_bound(alone_and_batched: Mapping[str, Sequence[Parting | None]]) -> float:
    """Return the gap up to which a difference is explained by rounding.

    Args:
        alone_and_batched: for each peer, where its completions alone and in a batch part.
    """
    gaps = [parting.gap for partings in alone_and_batched.values() for parting in partings if parting]
    return min(max(BOUND_FACTOR * max(gaps, default=0.0), FP32_BOUND), WIDEST_BOUND)


def summarise(partings: Iterable[Parting | None], bound: float) -> dict[str, Any]:
    """Count equal, explained and unexplained completions; plain JSON values.

    Args:
        partings: of all compared completions.
        bound: see :func:`rounding_bound`.
    """
    partings = list(partings)
    differing = [parting for parting in partings if parting]
    explained = sum(parting.gap < bound for parting in differing)
    return {
        "completions": len(partings),
        "equal": len(partings) - len(differing),
        "explained_by_rounding": explained,
        "unexplained": len(differing) - explained,
        "first_differences": sorted(parting.position for parting in differing),
        "largest_gap": round(max((parting.gap for parting in differing), default=0.0), 4),
    }


def has_exact_length(turn: Turn, batch_size: int, max_tokens: int) -> bool:
    """Tell whether the engine returned what was asked for: nobody wins by computing less."""
    return len(turn.token_ids) == batch_size and all(len(ids) == max_tokens for ids in turn.token_ids)
