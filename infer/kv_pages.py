"""K/V pages: who holds which page (PagePool), and the tensors they live in (KVCache)."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig

from jacobi_llm.configs.errors import UsageError


@dataclass(frozen=True)
class PageKey:
    """Names the content of a full page: its tokens, and through ``parent`` all tokens before them.

    Pages are found by ``digest`` alone. It has 128 bits (BLAKE2b, RFC 7693): among 2^40 pages the odds that any two
    share one are below 2^-48.

    Attributes:
        parent: digest of the page before, or of what a first page depends on; 16 bytes.
        token_ids: as many as a page has slots.
        digest: of the two above; 16 bytes.
    """

    parent: bytes
    token_ids: tuple[int, ...]
    digest: bytes

    @classmethod
    def of(cls, parent: bytes, token_ids: tuple[int, ...]) -> PageKey:
        return cls(parent, token_ids, page_digest(parent, token_ids))


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """16 bytes for the page of ``token_ids`` behind the page of ``parent``."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PagePool:
    """Page numbers. Every page is free, cached, or held by as many block tables as its count says.

    A page that was published under a key is found by it from then on, held or not, and is never written again. When
    nobody holds it, it is cached: its K/V stays, until free pages run out and the one that was let go longest ago is
    given up. So cached pages count as free.

    Mutates its own lists and the block tables it is handed, and zeroes pages through ``clear``.
    """

    def __init__(
        self, num_pages: int, page_size: int, clear: Callable[[Sequence[int]], None] = lambda pages: None
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError("a pool needs at least one page of at least one token")
        self.num_pages = num_pages
        self.page_size = page_size
        self._clear = clear
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_pages
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def capacity(self, block_table: Sequence[int]) -> int:
        """Tokens that ``block_table`` could hold if it took every free page."""
        return (len(block_table) + self.num_free) * self.page_size

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend ``block_table`` in place until it holds ``num_tokens`` tokens; False (and no change) if it cannot."""
        missing = self.pages_for(num_tokens) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._evict()
            self._num_holders[page] = 1
            block_table.append(page)
        return True

    def share(self, block_table: list[int], keys: Sequence[PageKey]) -> None:
        """Append the pages of ``keys`` to ``block_table`` up to the first that is not known; they are for reading."""
        for key in keys:
            page = self._page_of.get(key.digest)
            if page is None:
                return
            if not self._num_holders[page]:
                del self._cached[page]
            self._num_holders[page] += 1
            block_table.append(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Let ``page``, which is held, be found by ``key``; no change when another page with that content is known."""
        if key.digest not in self._page_of and page not in self._key_of:
            self._page_of[key.digest] = page
            self._key_of[page] = key

    def key_of(self, page: int) -> PageKey | None:
        """The key under which ``page`` can be found."""
        return self._key_of.get(page)

    def num_holders(self, page: int) -> int:
        """Block tables that hold ``page``."""
        return self._num_holders[page]

    def release(self, block_table: list[int], *, num_clean_pages: int | None = None) -> None:
        """Give up every page of ``block_table`` and empty it.

        Args:
            block_table: its pages stay with whoever else holds them.
            num_clean_pages: leading pages whose content can do no harm; the rest, which must be the caller's own, is
                zeroed. None for all.

        Raises:
            AssertionError: a page that nobody holds.
        """
        if num_clean_pages is not None and num_clean_pages < len(block_table):
            self._clear(block_table[num_clean_pages:])
        # The end of a text first: it is of use only with the pages before it.
        for page in reversed(block_table):
            if not self._num_holders[page]:
                raise AssertionError(f"page {page} was freed twice")
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)
        block_table.clear()

    def forget_keys(self) -> None:
        """Nothing computed so far is found again; pages that are held stay with their holders."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Prove that every page is free, cached, or counted once for each of ``block_tables`` that holds it.

        Raises:
            AssertionError: a page is leaked, lost, counted wrongly, or known under a key that is not its own.
        """
        held: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), "a block table holds a page twice"
            held.update(table)
        for page, count in enumerate(self._num_holders):
            assert count == held[page], f"page {page}: {held[page]} block tables hold it, {count} are counted (leaked?)"
        idle = [*self._free, *self._cached]
        assert len(set(idle)) == len(idle), "a page is free twice"
        assert held.keys().isdisjoint(idle), "a page is both free and held"
        assert len(held) + len(idle) == self.num_pages, "a page is lost"
        assert self._cached.keys() <= self._key_of.keys(), "a cached page cannot be found"
        assert self._key_of.keys().isdisjoint(self._free), "a free page can be found"
        assert self._page_of == {key.digest: page for page, key in self._key_of.items()}, "keys and pages disagree"
        for key in self._key_of.values():
            assert len(key.token_ids) == self.page_size, "a page that is not full can be found"
            assert key.digest == page_digest(key.parent, key.token_ids), "a key is not that of its tokens"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page).digest]
        return page


class KVCache:
    """Paged K/V tensors of every layer.

    ``keys[layer]`` and ``values[layer]`` have shape [num_slots, num_kv_heads, head_dim] with
    slot = page * page_size + offset; layers may differ in heads and head size, so each layer is allocated when its
    first K/V arrives.
    """

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_pages * page_size
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def write(self, layer_idx: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows. ``slots`` [R] int64; ``key`` and ``value`` [R, num_kv_heads, head_dim]."""
        if layer_idx not in self.keys:
            self.keys[layer_idx] = lazy_zeros((self.num_slots, *key.shape[1:]), self.dtype, self.device)
            self.values[layer_idx] = lazy_zeros((self.num_slots, *value.shape[1:]), self.dtype, self.device)
        self.keys[layer_idx].index_copy_(0, slots, key.to(self.dtype))
        self.values[layer_idx].index_copy_(0, slots, value.to(self.dtype))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the slots of ``pages``: a NaN in a slot that is masked would still spoil the sums of who reads it."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.view(-1, self.page_size, *stored.shape[1:]).index_fill_(0, index, 0)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU their memory is taken as it is written, so that a large pool costs nothing idle."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch fills zeros by hand, which touches the whole pool.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """K/V bytes of one token over all layers."""
    text = config.get_text_config()
    # Families whose layers differ (gemma4) refuse to answer for all layers at once.
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    return sum(map(_num_kv_values, layers)) * dtype.itemsize


def _num_kv_values(layer: PretrainedConfig) -> int:
    """Numbers that one layer stores per token."""
    num_kv_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return int(2 * num_kv_heads * head_dim)


def num_pages_for(config: PretrainedConfig, dtype: torch.dtype, page_size: int, memory_bytes: int) -> int:
    """Pages that fit into ``memory_bytes``.

    Raises:
        UsageError: not even one page fits.
    """
    page_bytes = bytes_per_token(config, dtype) * page_size
    num_pages = memory_bytes // page_bytes
    if num_pages < 1:
        raise UsageError(f"engine.kv_memory_mib: {memory_bytes >> 20} MiB hold no page of {page_bytes} bytes; raise it")
    return num_pages


def describe_pages(num_pages: int, page_size: int, bytes_per_token: int) -> str:
    """One line on what fits: ``1,024 MiB = 46,592 tokens in 2,912 pages of 16 (22.5 KiB a token)``."""
    num_tokens = num_pages * page_size
    mib = num_tokens * bytes_per_token / 2**20
    return (
        f"{mib:,.{0 if mib >= 10 else 2}f} MiB = {num_tokens:,} tokens in {num_pages:,} pages of {page_size} "
        f"({bytes_per_token / 2**10:.4g} KiB a token)"
    )
