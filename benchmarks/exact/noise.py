"""The sampling noise a second time, one number after the other, in plain integers and floats.

Written from the published definitions, not from the engine's code: Philox 4x32-10 as in Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011), keyed by the seed, with the counter (number, t, choice, purpose); and
G_v = -log E_v with E_v = A_b for the holder of v's block of 64 tokens and A_b + D_v for the others, where A_b (purpose
0) is exponential with mean 1/64 and D_v (purpose 1) with mean 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

BLOCK = 64
_WORD = 0xFFFFFFFF


@lru_cache(maxsize=1 << 17)
def gumbel(seed: int, choice: int, t: int, token_id: int) -> float:
    """G(seed, choice, t, v)."""
    minimum, holder = block_minimum(seed, choice, t, token_id // BLOCK)
    if token_id == holder:
        return -math.log(minimum)
    words = _philox((token_id, t, choice, 1), _key_of(seed))
    return -math.log(minimum + _exponential(words[0], words[1]))


@lru_cache(maxsize=1 << 17)
def block_minimum(seed: int, choice: int, t: int, block: int) -> tuple[float, int]:
    """A_b, and the token that has it; no G of the block is above -log A_b."""
    words = _philox((block // 2, t, choice, 0), _key_of(seed))
    high, low = words[2:] if block % 2 else words[:2]
    return _exponential(high, low) / BLOCK, block * BLOCK + high % BLOCK


def best_token(z: Sequence[float], seed: int, choice: int, t: int) -> int:
    """argmax over v of z_v + G_v, ties to the lowest id; -inf is banned, something is not.

    Blocks are looked at in the order of what they can reach at most, until no other can reach what was found.
    """
    bounds = []
    for block in range(-(-len(z) // BLOCK)):
        best_z = max(z[block * BLOCK : (block + 1) * BLOCK])
        if best_z > -math.inf:
            bounds.append((best_z - math.log(block_minimum(seed, choice, t, block)[0]), block))
    best = (-math.inf, 0)
    # Rounding may put a sum above its bound by its last bits.
    slack = 1e-9
    for bound, block in sorted(bounds, reverse=True):
        if bound + slack < best[0]:
            break
        for token_id in range(block * BLOCK, min((block + 1) * BLOCK, len(z))):
            if z[token_id] > -math.inf:
                best = max(best, (z[token_id] + gumbel(seed, choice, t, token_id), -token_id))
    return -best[1]


def _key_of(seed: int) -> tuple[int, int]:
    bits = seed % 2**64
    return bits & _WORD, bits >> 32


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _WORD, (first >> 32) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _exponential(high: int, low: int) -> float:
    x = (high >> 6 << 26) | (low >> 6)
    return -math.log((2 * x + 1) / 2**53)
