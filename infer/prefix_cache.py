"""Prefix sharing: requests that begin with the same tokens read the same K/V pages.

A full page is known by a key over its own tokens and all before them, chained from page to page, and over what else
its K/V depends on: model, precision, kernels (the salt) and adapter. What is shared is the K/V that an earlier request
computed. With exact arithmetic that is what this one would compute; in low precision the rounding of a row depends on
the rows it shared a pass with, here as everywhere.
"""

from __future__ import annotations

import hashlib

from jacobi_llm.infer.kv_pages import PageKey, PagePool
from jacobi_llm.infer.request import Sequence


class PrefixCache:
    """Finds pages for requests that arrive or come back, and offers those that are fit for others.

    Weights and kernels must stay what ``salt`` says while pages are known; ``PagePool.forget_keys`` drops them all.
    """

    def __init__(self, pool: PagePool, salt: bytes) -> None:
        self.pool = pool
        self.salt = salt

    def find(self, sequence: Sequence) -> None:
        """Give ``sequence``, which holds no pages, the longest known run of its own.

        At least one committed token stays to be computed: the pass needs the logits of the last one.
        """
        assert not sequence.block_table, "only a request without pages can start from those of others"
        num_pages = (sequence.committed_len - 1) // self.pool.page_size
        self._extend_keys(sequence, num_pages)
        self.pool.share(sequence.block_table, sequence.page_keys[:num_pages])
        sequence.num_offered_pages = len(sequence.block_table)
        sequence.num_computed = sequence.num_proven = len(sequence.block_table) * self.pool.page_size

    def offer(self, sequence: Sequence) -> None:
        """Let others find the pages of ``sequence`` that lie wholly below what is proven."""
        num_pages = sequence.num_proven // self.pool.page_size
        if num_pages <= sequence.num_offered_pages:
            return
        self._extend_keys(sequence, num_pages)
        for index in range(sequence.num_offered_pages, num_pages):
            self.pool.publish(sequence.block_table[index], sequence.page_keys[index])
        sequence.num_offered_pages = num_pages

    def _extend_keys(self, sequence: Sequence, num_pages: int) -> None:
        keys = sequence.page_keys
        size = self.pool.page_size
        while len(keys) < num_pages:
            parent = keys[-1].digest if keys else root_digest(self.salt, sequence.request.adapter)
            keys.append(PageKey.of(parent, tuple(sequence.tokens_from(len(keys) * size, size))))


def root_digest(salt: bytes, adapter: str | None) -> bytes:
    """16 bytes that stand before a request's first page; they differ where the K/V of equal tokens may differ."""
    return hashlib.blake2b(repr((salt, adapter)).encode(), digest_size=16).digest()
