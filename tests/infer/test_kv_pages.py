"""Page ownership, the K/V tensors, and the sizes derived from a config."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.kv_pages import KVCache, PagePool, bytes_per_token, num_pages_for


class PoolMachine(RuleBasedStateMachine):
    """Tables grow and are released in any order; a plain dictionary says who should own what."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
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
        grew = self.pool.grow(table, num_tokens)
        assert grew == (wanted <= free)
        assert table[: len(before)] == before, "pages in use were moved"
        assert len(table) == len(before) + (wanted if grew else 0)
        assert self.pool.num_free == free - (wanted if grew else 0)

    @rule(table=tables)
    def release(self, table: list[int]) -> None:
        free, held = self.pool.num_free, len(table)
        self.pool.release(table)
        assert table == []
        assert self.pool.num_free == free + held

    @rule(table=consumes(tables))
    def drop(self, table: list[int]) -> None:
        self.pool.release(table)
        self.live = [one for one in self.live if one is not table]

    @rule(table=tables)
    def releasing_a_copy_again_is_caught(self, table: list[int]) -> None:
        copy = list(table)
        self.pool.release(table)
        if copy:
            with pytest.raises(AssertionError, match="freed twice"):
                self.pool.release(copy)

    @invariant()
    def every_page_has_one_holder(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.live)
        pages = [page for table in self.live for page in table]
        assert all(0 <= page < self.pool.num_pages for page in pages)
        assert self.pool.num_free == self.pool.num_pages - len(pages)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_check_integrity_sees_every_kind_of_fault() -> None:
    pool = PagePool(4, 2)
    first: list[int] = []
    second: list[int] = []
    assert pool.grow(first, 4)
    assert pool.grow(second, 2)
    pool.check_integrity([first, second])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([first, first, second])
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity([first])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([first, [*second, first[0]]])
    pool._free.append(first[0])
    with pytest.raises(AssertionError, match="both free and owned"):
        pool.check_integrity([first, second])
    pool._free.clear()
    with pytest.raises(AssertionError, match="a page is lost"):
        pool.check_integrity([first, second])


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
