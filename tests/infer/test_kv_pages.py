"""Who holds which page, the K/V tensors, and the sizes derived from a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.kv_pages import KVCache, PageKey, PagePool, bytes_per_token, describe_pages, num_pages_for


class PoolMachine(RuleBasedStateMachine):
    """Tables grow, share and are released in any order; plain dictionaries say what should be held and known."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.cleared: list[int] = []
        self.pool = PagePool(num_pages, page_size, clear=self.cleared.extend)
        self.live: list[list[int]] = []

    @rule(target=tables)
    def new_table(self) -> list[int]:
        table: list[int] = []
        self.live.append(table)
        return table

    @rule(table=tables, num_tokens=st.integers(0, 40))
    def grow(self, table: list[int], num_tokens: int) -> None:
        before, free = list(table), self.pool.num_free
        wanted = max(0, -(-num_tokens // self.pool.page_size) - len(before))
        held = {page for one in self.live for page in one}
        capacity = self.pool.capacity(table)
        grew = self.pool.grow(table, num_tokens)
        assert grew == (wanted <= free) == (num_tokens <= max(capacity, len(before) * self.pool.page_size))
        assert table[: len(before)] == before, "pages in use were moved"
        assert len(table) == len(before) + (wanted if grew else 0)
        assert held.isdisjoint(table[len(before) :]), "a page in use was given away"
        assert all(self.pool.key_of(page) is None for page in table[len(before) :])
        assert self.pool.num_free == free - (wanted if grew else 0)

    @rule(table=tables, text=st.integers(0, 2))
    def publish(self, table: list[int], text: int) -> None:
        for page, key in zip(table, keys_of(text, self.pool.page_size), strict=False):
            self.pool.publish(page, key)

    @rule(text=st.integers(0, 2), num_pages=st.integers(0, 4), target=tables)
    def share(self, text: int, num_pages: int) -> list[int]:
        table: list[int] = []
        free = self.pool.num_free
        idle = set(range(self.pool.num_pages)) - {page for one in self.live for page in one}
        keys = keys_of(text, self.pool.page_size)[:num_pages]
        self.pool.share(table, keys)
        assert [self.pool.key_of(page) for page in table] == keys[: len(table)]
        assert self.pool.num_free == free - len(idle & set(table))
        self.live.append(table)
        return table

    @rule(table=tables)
    def release(self, table: list[int]) -> None:
        free = self.pool.num_free
        own = [page for page in table if self.pool.num_holders(page) == 1]
        self.pool.release(table)
        assert table == []
        assert self.pool.num_free == free + len(own)

    @rule(table=tables, num_clean=st.integers(0, 3))
    def release_and_clear(self, table: list[int], num_clean: int) -> None:
        self.cleared.clear()
        rest = table[num_clean:]
        self.pool.release(table, num_clean_pages=num_clean)
        assert self.cleared == rest

    @rule()
    def forget(self) -> None:
        free = self.pool.num_free
        self.pool.forget_keys()
        assert self.pool.num_free == free
        assert all(self.pool.key_of(page) is None for page in range(self.pool.num_pages))

    @rule(table=consumes(tables))
    def drop(self, table: list[int]) -> None:
        self.pool.release(table)
        self.live = [one for one in self.live if one is not table]

    @rule(table=tables)
    def releasing_too_often_is_caught(self, table: list[int]) -> None:
        pages = [page for page in table if self.pool.num_holders(page) == 1]
        self.pool.release(table)
        if pages:
            with pytest.raises(AssertionError, match="freed twice"):
                self.pool.release(pages)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.live)
        pages = {page for table in self.live for page in table}
        assert all(0 <= page < self.pool.num_pages for page in pages)
        assert self.pool.num_free == self.pool.num_pages - len(pages)


def keys_of(text: int, page_size: int) -> list[PageKey]:
    """Keys of four pages of one token over and over."""
    keys: list[PageKey] = []
    for _ in range(4):
        keys.append(PageKey.of(keys[-1].digest if keys else b"", (text,) * page_size))
    return keys


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def make_pool() -> tuple[PagePool, list[int], list[int], list[int]]:
    """A pool of 4 pages: two tables that share their first page, one with a page of its own, nothing cached."""
    pool = PagePool(4, 2)
    first: list[int] = []
    second: list[int] = []
    third: list[int] = []
    assert pool.grow(first, 4)
    pool.publish(first[0], PageKey.of(b"", (1, 2)))
    pool.share(second, [PageKey.of(b"", (1, 2))])
    assert pool.grow(third, 2)
    return pool, first, second, third


def test_check_integrity_sees_every_kind_of_fault() -> None:
    pool, *tables = make_pool()
    pool.check_integrity(tables)
    first, second, third = tables
    with pytest.raises(AssertionError, match="1 block tables hold it, 2 are counted"):
        pool.check_integrity([first, third])
    with pytest.raises(AssertionError, match=r"0 block tables hold it, 1 are counted \(leaked\?\)"):
        pool.check_integrity([first, second])
    with pytest.raises(AssertionError, match="2 block tables hold it, 1 are counted"):
        pool.check_integrity([first, second, [*third, first[1]]])
    with pytest.raises(AssertionError, match="holds a page twice"):
        pool.check_integrity([first, second, third * 2])
    pool._free.append(first[0])
    with pytest.raises(AssertionError, match="both free and held"):
        pool.check_integrity(tables)
    pool._free[:] = pool._free[:1] * 2
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity(tables)
    pool._free.clear()
    with pytest.raises(AssertionError, match="a page is lost"):
        pool.check_integrity(tables)


def test_check_integrity_sees_wrong_keys() -> None:
    pool, first, second, third = make_pool()
    tables = [first, second, third]
    key = pool._key_of[first[0]]
    for wrong, message in [
        (replace(key, token_ids=(1, 3)), "not that of its tokens"),
        (replace(key, digest=b"other"), "keys and pages disagree"),
        (PageKey.of(b"", (1,)), "keys and pages disagree"),
    ]:
        pool._key_of[first[0]] = wrong
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity(tables)
    pool._key_of[first[0]] = key
    free = pool._free.pop()
    pool._cached[free] = None
    with pytest.raises(AssertionError, match="a cached page cannot be found"):
        pool.check_integrity(tables)
    pool._free.append(pool._cached.popitem()[0])
    pool.publish(free, PageKey.of(b"", (5, 6)))
    with pytest.raises(AssertionError, match="a free page can be found"):
        pool.check_integrity(tables)


def test_the_first_of_two_equal_pages_is_the_one_that_is_found() -> None:
    pool = PagePool(2, 2)
    first: list[int] = []
    second: list[int] = []
    key = PageKey.of(b"", (1, 2))
    for table in (first, second):
        assert pool.grow(table, 2)
        pool.publish(table[0], key)
    pool.check_integrity([first, second])
    found: list[int] = []
    pool.share(found, [key])
    assert found == first
    for table in (first, second, found):
        pool.release(table)
    assert (pool.num_free, len(pool._free)) == (2, 1)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0), (-1, 4)])
def test_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(num_pages, page_size)


def test_pages_for() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_cache_keeps_layers_of_different_shapes_apart() -> None:
    cache = KVCache(3, 4, torch.float64, torch.device("cpu"))
    slots = torch.tensor([11, 0, 5])
    expected = {}
    for layer, (heads, size) in enumerate([(2, 4), (1, 8)]):
        key, value = torch.randn(2, 3, heads, size, dtype=torch.float64)
        cache.write(layer, slots, key, value)
        expected[layer] = (key, value)
    for layer, (key, value) in expected.items():
        assert torch.equal(cache.keys[layer][slots], key)
        assert torch.equal(cache.values[layer][slots], value)
        untouched = [slot for slot in range(12) if slot not in slots.tolist()]
        assert not cache.keys[layer][untouched].any()
        assert not cache.values[layer][untouched].any()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gemma3_text", "phi3"])
def test_bytes_per_token_is_what_the_layers_store(family: str, tiny_model: Callable[..., PreTrainedModel]) -> None:
    from jacobi_llm.infer.attention import SdpaBackend
    from jacobi_llm.infer.model_runner import ModelRunner
    from jacobi_llm.infer.row_group import RowGroup

    model = tiny_model(family, torch.float32)
    cache = KVCache(2, 4, torch.float32, torch.device("cpu"))
    ModelRunner(model, SdpaBackend(cache)).forward([RowGroup([1], 0, [5, 6])])
    stored = sum(t.nbytes for part in (cache.keys, cache.values) for t in part.values())
    assert bytes_per_token(model.config, torch.float32) * cache.num_slots == stored


def test_num_pages_for(tiny_model: Callable[..., PreTrainedModel]) -> None:
    config = tiny_model("llama", torch.float32).config
    per_token = bytes_per_token(config, torch.float32)
    assert per_token == 2 * 2 * 2 * 8 * 4
    assert num_pages_for(config, torch.float32, 16, 16 * per_token * 3 + 5) == 3
    with pytest.raises(UsageError, match=r"engine\.kv_memory_mib"):
        num_pages_for(config, torch.float32, 16, 16 * per_token - 1)


@pytest.mark.parametrize(
    ("pages", "line"),
    [
        ((2912, 16, 23040), "1,024 MiB = 46,592 tokens in 2,912 pages of 16 (22.5 KiB a token)"),
        ((2, 4, 256), "0.00 MiB = 8 tokens in 2 pages of 4 (0.25 KiB a token)"),
        ((40960, 16, 131072), "81,920 MiB = 655,360 tokens in 40,960 pages of 16 (128 KiB a token)"),
    ],
)
def test_what_fits_is_said_in_one_line(pages: tuple[int, int, int], line: str) -> None:
    assert describe_pages(*pages) == line
