"""Where the blocks of a completion start."""

from __future__ import annotations

import random


def block_starts(num_tokens: int, window: int, jitter: bool, key: tuple[int, int]) -> list[int]:
    """Starts of the blocks of a completion of ``num_tokens`` tokens, at least one.

    Serving windows start anywhere in a text. With ``jitter`` the first block is 1 to ``window`` tokens long, drawn with
    ``key`` and the window; all that follow are ``window`` long, the last one what remains.

    Args:
        num_tokens: at least 1. More tokens only add starts.
        window: block size n (tokens).
        jitter: draw the first block's length.
        key: seed and source index.
    """
    first = random.Random("/".join(map(str, (*key, window, "starts")))).randint(1, window) if jitter else window
    return [0, *range(first, num_tokens, window)]
