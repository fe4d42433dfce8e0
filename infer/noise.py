"""Position-keyed Gumbel noise: G(seed, choice, t, v), a pure function of its four arguments.

The generator is Philox 4x32-10, a counter-based one: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy
as 1, 2, 3", SC 2011. Its key is the seed, its counter says what the number is for, and nothing is carried from one
number to the next, so that a token's noise can be computed alone, in any order and in any pass.

Noise that sampling can bound. G_v = -log E_v with E_v independent and exponential with mean 1. Tokens are taken in
blocks of ``BLOCK``, and the E of a block are drawn from the smallest one upwards:

- A_b, the smallest of ``BLOCK`` exponentials, is exponential with mean 1 / BLOCK;
- which token has it, the block's holder, is uniform;
- the others exceed it by D_v, exponential with mean 1 again, independent of everything before: an exponential has no
  memory.

So E_v = A_b for the holder and A_b + D_v for the rest; the joint distribution is that of BLOCK independent
exponentials, and -log A_b bounds the noise of a whole block (``infer/gumbel_max.py`` skips tokens by it). A_b, the
holder and D_v are functions of (seed, choice, t) and of b or v.

One output of the generator is four words of 32 bits. Two make a uniform number (2x + 1) / 2^53, x being the upper 26
bits of each: strictly inside (0, 1), so that noise is finite (between -3.7 and 40.9). The lowest 6 bits of the first,
which x does not use, name the holder. Blocks 2i and 2i + 1 share an output, a token has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 64

_MASK_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_NUM_ROUNDS = 10
_UNUSED_BITS = np.uint64(6)
_HOLDER_BITS = np.uint64(BLOCK - 1)
# What a counter is for, its last word.
_BLOCK_DRAW = 0
_TOKEN_DRAW = 1


@dataclass(frozen=True)
class RowKey:
    """What noise may depend on: the request's seed, its choice index, and t, the completion tokens before this one.

    Attributes:
        seed: any 64-bit integer, signed or not.
        choice, t: 0 or more, below 2^32.
    """

    seed: int
    choice: int
    t: int


class RowNoise:
    """Noise of several rows; pure, nothing is remembered between calls."""

    def __init__(self, keys: Sequence[RowKey]) -> None:
        seeds = np.array([key.seed & 0xFFFFFFFFFFFFFFFF for key in keys], dtype=np.uint64)
        self._seeds = np.stack((seeds & _MASK_32, seeds >> _SHIFT_32))
        self._is_one_seed = len(set(seeds.tolist())) == 1
        self._ts = np.array([key.t for key in keys], dtype=np.uint64)
        self._choices = np.array([key.choice for key in keys], dtype=np.uint64)

    def block_minima(
        self, rows: NDArray[np.int64], blocks: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """A_b and the token id of its holder for pairs of a row and a block: [M], [M] -> [M], [M]."""
        pairs = blocks >> 1
        is_new = np.ones(len(rows), dtype=np.bool_)
        is_new[1:] = (rows[1:] != rows[:-1]) | (pairs[1:] != pairs[:-1])
        words = self._words(rows[is_new], pairs[is_new], _BLOCK_DRAW)
        # One line for each output, with its even block and its odd one: [outputs, 2].
        minima = np.stack((_exponential(words[0], words[1]), _exponential(words[2], words[3])), axis=1) / BLOCK
        places = (words[0::2].T & _HOLDER_BITS).astype(np.int64)
        wanted = 2 * (np.cumsum(is_new) - 1) + (blocks & 1)
        return minima.ravel()[wanted], blocks * BLOCK + places.ravel()[wanted]

    def excesses(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """D_v for pairs of a row and a token: [M], [M] -> [M]; the holder of a block does not use its own."""
        words = self._words(rows, token_ids, _TOKEN_DRAW)
        return _exponential(words[0], words[1])

    def gumbel(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """G for pairs of a row and a token: [M], [M] -> [M]."""
        minima, holders = self.block_minima(rows, token_ids // BLOCK)
        excesses = self.excesses(rows, token_ids)
        noise: NDArray[np.float64] = -np.log(minima + np.where(token_ids == holders, 0.0, excesses))
        return noise

    def _words(self, rows: NDArray[np.int64], numbers: NDArray[np.int64], purpose: int) -> NDArray[np.uint64]:
        counter = np.empty((4, len(rows)), dtype=np.uint64)
        counter[0] = numbers
        counter[1] = self._ts[rows]
        counter[2] = self._choices[rows]
        counter[3] = purpose
        return philox_4x32(counter, self._seeds[:, :1] if self._is_one_seed else self._seeds[:, rows])


def philox_4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox 4x32-10, words of 32 bits in arrays of 64: counter [4, M], key [2, M] or [2, 1] -> [4, M]."""
    words = np.empty((4, counter.shape[1]), dtype=np.uint64)
    words[:] = counter
    even, odd = words[0::2], words[1::2]
    product = np.empty_like(even)
    swapped = product[::-1]
    for _ in range(_NUM_ROUNDS):
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(swapped, _SHIFT_32, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(swapped, _MASK_32, out=odd)
        key = (key + _WEYL) & _MASK_32
    return words


def _exponential(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.float64]:
    """-log u, with u from the upper 26 bits of two words: [M], [M] -> [M], above 0."""
    bits = ((high >> _UNUSED_BITS) << np.uint64(26)) | (low >> _UNUSED_BITS)
    uniform = (2.0 * bits.astype(np.float64) + 1.0) * 2.0**-53
    exponential: NDArray[np.float64] = -np.log(uniform)
    return exponential
