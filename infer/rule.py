"""The decoding rule, as pure functions on plain token ids.

Everything that decodes (engine, collector, evaluation) calls these functions, so there is one place where "accepted"
is defined. Notation (docs/algorithm.md): row i of a window reads the token at position s+i, where s is the position
of the last committed token; its prediction p_i is for position s+i+1. Row 0 reads the last committed token, rows
1..n-1 read the guesses g_1..g_(n-1).

Source: Jacobi decoding, Song et al. 2021 (arXiv 2002.03629) and Santilli et al. 2023 (arXiv 2305.10427); the greedy
acceptance is that of CLLM, Kou et al. 2024 (arXiv 2403.00835), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Commit:
    """What one pass proved.

    Attributes:
        token_ids: tokens appended for good, never empty; the stop token, or the token that completes a stop string, is
            the last one.
        next_guesses: predictions of the rejected rows; element k is a guess for the k-th position after the commit.
        finish_reason: set when the request ends with this commit.
    """

    token_ids: list[int]
    next_guesses: list[int]
    finish_reason: FinishReason | None


def count_accepted(guesses: Sequence[int], predictions: Sequence[int]) -> int:
    """Number of predictions proved by one pass: 1 + the run of guesses that equal the prediction before them.

    Args:
        guesses: g_1..g_(n-1).
        predictions: p_0..p_(n-1), the chosen token after each row.

    Returns:
        a in 1..n such that p_0..p_(a-1) are the AR output.
    """
    if len(predictions) != len(guesses) + 1:
        raise ValueError(f"{len(guesses)} guesses need {len(guesses) + 1} predictions, got {len(predictions)}")
    accepted = 1
    for guess, prediction in zip(guesses, predictions, strict=False):
        if guess != prediction:
            break
        accepted += 1
    return accepted


def commit(
    guesses: Sequence[int],
    predictions: Sequence[int],
    *,
    stop_token_ids: Collection[int],
    num_tokens_left: int,
    stop_at: Callable[[Sequence[int]], int | None] | None = None,
) -> Commit:
    """Apply the rule to one window.

    The first stop token or stop string ends the request even in mid-window; the budget is met exactly; a stop inside
    the budget wins over the budget.

    Args:
        guesses: g_1..g_(n-1).
        predictions: p_0..p_(n-1).
        stop_token_ids: every id that ends the request; empty with ``ignore_eos``.
        num_tokens_left: completion tokens that may still be committed, at least 1.
        stop_at: called once, with the tokens that would be committed before a stop token; returns how many of them are
            kept when one completes a stop string (that one included), else None.
    """
    if num_tokens_left < 1:
        raise ValueError("a request without budget cannot take part in a pass")
    accepted = count_accepted(guesses, predictions)
    taken = list(predictions[: min(accepted, num_tokens_left)])
    num_before_stop = next((index for index, token_id in enumerate(taken) if token_id in stop_token_ids), len(taken))
    num_kept = stop_at(taken[:num_before_stop]) if stop_at else None
    if num_kept is not None:
        return Commit(taken[:num_kept], [], FinishReason.STOP)
    if num_before_stop < len(taken):
        return Commit(taken[: num_before_stop + 1], [], FinishReason.STOP)
    if len(taken) == num_tokens_left:
        return Commit(taken, [], FinishReason.LENGTH)
    return Commit(taken, list(predictions[accepted:]), None)


def next_window(carried: Sequence[int], num_guesses: int, fill: Callable[[list[int], int], list[int]]) -> list[int]:
    """Guesses of the next pass: carried predictions first, then what the fill policy writes.

    Args:
        carried: guesses left from the last pass (:attr:`Commit.next_guesses`).
        num_guesses: guesses wanted, n - 1.
        fill: ``fill(guesses so far, how many more)``.
    """
    kept = list(carried[:num_guesses])
    missing = num_guesses - len(kept)
    return kept + fill(kept, missing) if missing > 0 else kept


def first_wrong(state: Sequence[int], target: Sequence[int]) -> int:
    """Index d of the first token of ``state`` that differs from ``target``; the length when none does."""
    for index, (guess, right) in enumerate(zip(state, target, strict=True)):
        if guess != right:
            return index
    return len(target)
