"""K/V pages: who owns which page (PagePool), and the tensors they live in (KVCache)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from jacobi_llm.configs.errors import UsageError


class PagePool:
    """Free list of page numbers. Every page is free or owned by exactly one holder.

    Mutates only its own lists. ``allocate`` returns None, and takes nothing, when too few pages are free.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError("a pool needs at least one page of at least one token")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend ``block_table`` in place until it holds ``num_tokens`` tokens; False (and no change) if it cannot."""
        missing = self.pages_for(num_tokens) - len(block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._owned.add(page)
            block_table.append(page)
        return True

    def release(self, block_table: list[int]) -> None:
        """Free every page of ``block_table`` and empty it."""
        for page in reversed(block_table):
            if page not in self._owned:
                raise AssertionError(f"page {page} was freed twice")
            self._owned.remove(page)
            self._free.append(page)
        block_table.clear()

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Prove that every page is free or held once, and that the holders are exactly those given.

        Raises:
            AssertionError: a page is shared, leaked, or both free and held.
        """
        held = [page for table in block_tables for page in table]
        assert len(held) == len(set(held)), "a page has two owners"
        assert set(held) == self._owned, f"leaked pages: {sorted(self._owned - set(held))}"
        assert self._owned.isdisjoint(self._free), "a page is both free and owned"
        assert len(self._owned) + len(self._free) == self.num_pages, "a page is lost"


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
