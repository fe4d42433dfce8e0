"""Fill policies: guesses that no earlier pass wrote. They change the speed of decoding, never its output."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jacobi_llm.configs.schema import FillPolicy


def fill_guesses(
    policy: FillPolicy,
    *,
    prompt_ids: Sequence[int],
    last_token_id: int,
    num_guesses: int,
    key: tuple[int, int, int],
) -> list[int]:
    """Write ``num_guesses`` token ids.

    Args:
        policy: repeat-last repeats ``last_token_id``; prompt-draw draws from the prompt with replacement, as CLLM's
            training data does (arXiv 2403.00835, algorithm 1).
        prompt_ids: the prompt, not empty.
        last_token_id: the token before the first guess.
        num_guesses: how many, 0 or more.
        key: seed, request or source index, completion position of the first guess; the draw depends on nothing else.
    """
    match policy:
        case FillPolicy.REPEAT_LAST:
            return [last_token_id] * num_guesses
        case FillPolicy.PROMPT_DRAW:
            return random.Random("/".join(map(str, key))).choices(prompt_ids, k=num_guesses)
