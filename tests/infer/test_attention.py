"""Paged attention over row groups against one plain softmax per row, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer import attention
from jacobi_llm.infer.attention import ATTENTION_NAME, Bucket, PassLayout, SdpaBackend, paged_attention, running_pass
from jacobi_llm.infer.kv_pages import KVCache
from jacobi_llm.infer.model_runner import ModelRunner
from jacobi_llm.infer.native_attention import NativeBackend
from jacobi_llm.infer.row_group import RowGroup

CPU = torch.device("cpu")
HEAD_DIM = 4


class Layer(nn.Module):
    layer_idx = 0


@dataclass
class World:
    """Requests with K/V of random numbers in shuffled pages, and row groups on top of them."""

    page_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    seed: int = 0
    groups: list[RowGroup] = field(default_factory=list)
    num_pages: int = 256

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        # Every slot holds something, so that a row that reads a wrong slot is seen.
        self.keys, self.values = (self.randn(self.num_pages * self.page_size, self.num_kv_heads) for _ in range(2))
        self.free = list(range(self.num_pages))
        random.Random(self.seed).shuffle(self.free)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEAD_DIM, dtype=torch.float64, generator=self.generator)

    def request(self, num_tokens: int, *parts: tuple[int, int, bool]) -> None:
        """Add a request of ``num_tokens`` slots with groups (prefix_len, rows, writes_pages)."""
        table = [self.free.pop() for _ in range(-(-num_tokens // self.page_size))]
        for prefix_len, num_rows, writes in parts:
            self.groups.append(RowGroup(table, prefix_len, [1] * num_rows, writes_pages=writes))

    def check(
        self, *, sliding_window: int | None = None, softcap: float | None = None, scaling: float | None = 0.7
    ) -> None:
        """Run one pass and compare every row, and every slot, with the reference."""
        num_rows = sum(group.num_rows for group in self.groups)
        query = self.randn(num_rows, self.num_heads)
        key, value = self.randn(num_rows, self.num_kv_heads), self.randn(num_rows, self.num_kv_heads)
        cache = KVCache(self.num_pages, self.page_size, torch.float64, CPU)
        cache.keys[0], cache.values[0] = self.keys.clone(), self.values.clone()
        layout = PassLayout.build(self.groups, self.page_size, CPU)
        with running_pass(layout, cache):
            out, weights = paged_attention(
                Layer(),
                *(x.transpose(0, 1)[None] for x in (query, key, value)),
                attention_mask=None,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        assert weights is None
        keys, values = self._pages_after(key, value)
        torch.testing.assert_close(cache.keys[0], keys, rtol=0, atol=0)
        torch.testing.assert_close(cache.values[0], values, rtol=0, atol=0)
        expected = self._reference(query, key, value, keys, values, sliding_window, softcap, scaling)
        torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)

    def _slot(self, group: RowGroup, position: int) -> int:
        return group.block_table[position // self.page_size] * self.page_size + position % self.page_size

    def _pages_after(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        row = 0
        for group in self.groups:
            for offset in range(group.num_rows):
                if group.writes_pages:
                    slot = self._slot(group, group.prefix_len + offset)
                    keys[slot], values[slot] = key[row], value[row]
                row += 1
        return keys, values

    def _reference(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sliding_window: int | None,
        softcap: float | None,
        scaling: float | None,
    ) -> torch.Tensor:
        scale = 1 / math.sqrt(HEAD_DIM) if scaling is None else scaling
        out = torch.empty_like(query)
        per_kv_head = self.num_heads // self.num_kv_heads
        first = 0
        for group in self.groups:
            for offset in range(group.num_rows):
                position = group.prefix_len + offset
                seen = []
                for j in range(position + 1):
                    if sliding_window is not None and j <= position - sliding_window:
                        continue
                    if j < group.prefix_len:
                        seen.append((keys[self._slot(group, j)], values[self._slot(group, j)]))
                    else:
                        own = first + j - group.prefix_len
                        seen.append((key[own], value[own]))
                for head in range(self.num_heads):
                    kv_head = head // per_kv_head
                    scores = torch.stack([query[first + offset, head] @ k[kv_head] for k, _ in seen]) * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = torch.softmax(scores, dim=0)
                    out[first + offset, head] = sum(w * v[kv_head] for w, (_, v) in zip(weights, seen, strict=True))
            first += group.num_rows
        return out


def everything(page_size: int = 4, seed: int = 0, num_heads: int = 4, num_kv_heads: int = 2) -> World:
    """Every kind of group at once, over several buckets."""
    world = World(page_size, num_heads, num_kv_heads, seed)
    world.request(9, (0, 9, True))  # whole prefill
    world.request(30, (7, 23, True))  # prefill chunk that starts mid-page, in a larger bucket
    world.request(22, (21, 1, True))  # one AR row
    world.request(20, (13, 5, True))  # verify window that ends before its pages do
    world.request(24, (13, 3, False), (9, 6, False), (0, 2, False), (17, 4, False))  # branches over written slots
    world.request(26, (10, 6, True), (11, 5, False), (16, 3, False), (13, 2, False))  # verify rows and guess rows
    world.request(8, (8, 3, False))  # a branch behind the last page: it owns no slot
    world.request(60, (2, 50, True))
    return world


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_kind_of_group(page_size: int, num_kv_heads: int) -> None:
    everything(page_size, num_kv_heads=num_kv_heads).check()


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sliding_window", [None, 1, 2, 5, 8, 1000])
def test_every_mask_and_score(sliding_window: int | None, softcap: float | None, scaling: float | None) -> None:
    everything().check(sliding_window=sliding_window, softcap=softcap, scaling=scaling)


def test_several_buckets_are_built() -> None:
    layout = PassLayout.build(everything().groups, 4, CPU)
    assert len(layout.buckets) >= 3
    seen = torch.cat([bucket.rows_SQ[bucket.is_row_SQ] for bucket in layout.buckets])
    assert sorted(seen.tolist()) == list(range(layout.num_rows))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World(
        page_size=draw(st.sampled_from([1, 2, 3, 4, 16])),
        num_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 1000)),
        num_pages=400,
    )
    for _ in range(draw(st.integers(1, 4))):
        committed = draw(st.integers(0, 12))
        parts = []
        end = committed
        if draw(st.booleans()):
            rows = draw(st.integers(1, 20))
            parts.append((committed, rows, True))
            end += rows
        for _ in range(draw(st.integers(0 if parts else 1, 3))):
            parts.append((draw(st.integers(0, end)), draw(st.integers(1, 5)), False))
        if draw(st.booleans()):
            parts.reverse()
        world.request(max(end, 1), *parts)
    return world


@settings(max_examples=60)
@given(world=worlds(), sliding_window=st.sampled_from([None, 1, 3, 8]), softcap=st.sampled_from([None, 0.7]))
def test_random_layouts(world: World, sliding_window: int | None, softcap: float | None) -> None:
    world.check(sliding_window=sliding_window, softcap=softcap)


@dataclass(frozen=True)
class Planted:
    """A fault of the mask; all zero and False is the right one."""

    limit: int = 0
    causal: int = 0
    window: int = 0
    own_window: int = 0
    mixes_groups: bool = False
    forgets_own: bool = False

    def mask(self, bucket: Bucket, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
        key_L = torch.arange(bucket.pages_SM.shape[1] * bucket.page_size)
        row, own_key = bucket.position_SQ[:, :, None], bucket.own_position_SP[:, None, :]
        pages = key_L < bucket.page_limit_SQ[:, :, None] + self.limit
        own = own_key <= row + self.causal
        same = bucket.group_SQ[:, :, None] == bucket.own_group_SP[:, None, :]
        if self.mixes_groups:
            same = (bucket.group_SQ[:, :, None] >= 0) & (bucket.own_group_SP[:, None, :] >= 0)
        own = own & same & (not self.forgets_own)
        if sliding_window is not None:
            pages = pages & (key_L > row - sliding_window + self.window)
            own = own & (own_key > row - sliding_window + self.own_window)
        visible = torch.cat((pages, own), dim=-1).repeat(1, num_groups, 1)
        # A row that sees nothing at all would be NaN, which no comparison misses; it must not hide the planted fault.
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -1e9)[:, None]


@pytest.mark.parametrize(
    "planted",
    [
        Planted(limit=1),
        Planted(limit=-1),
        Planted(causal=1),
        Planted(causal=-1),
        Planted(window=1),
        Planted(window=-1),
        Planted(own_window=1),
        Planted(own_window=-1),
        Planted(mixes_groups=True),
        Planted(forgets_own=True),
    ],
)
def test_planted_mask_faults_are_seen(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "mask", lambda self, *args: Planted().mask(self, *args))
    everything().check(sliding_window=3)
    monkeypatch.setattr(Bucket, "mask", lambda self, *args: planted.mask(self, *args))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        everything().check(sliding_window=3)


@pytest.mark.parametrize("shift", [1, -1])
def test_planted_page_faults_are_seen(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build = attention._build_bucket

    def shifted(*args: Any) -> Bucket:
        bucket = build(*args)
        bucket.pages_SM = bucket.pages_SM.roll(shift, dims=1)
        return bucket

    monkeypatch.setattr(attention, "_build_bucket", shifted)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        everything().check()


def test_layout_of_a_small_pass() -> None:
    table, other = [5, 2], [7]
    layout = PassLayout.build(
        [
            RowGroup(table, 3, [10, 11, 12], num_logit_rows=2),
            RowGroup(other, 0, [20, 21], num_logit_rows=0),
            RowGroup(table, 4, [30], writes_pages=False),
        ],
        page_size=4,
        device=CPU,
    )
    assert layout.input_ids.tolist() == [[10, 11, 12, 20, 21, 30]]
    assert layout.position_ids.tolist() == [[3, 4, 5, 0, 1, 4]]
    assert layout.write_rows is not None
    assert layout.write_rows.tolist() == [0, 1, 2, 3, 4]
    assert layout.write_slots.tolist() == [23, 8, 9, 28, 29]
    assert layout.logit_rows.tolist() == [1, 2, 5]


def test_layers_that_store_values_of_another_size() -> None:
    """Keys of 4 numbers and values of 6, as some families have them."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 5, 4, dtype=torch.float64, generator=generator) for heads in (4, 2))
    value = torch.randn(1, 2, 5, 6, dtype=torch.float64, generator=generator)
    layout = PassLayout.build([RowGroup([1, 0], 0, [1] * 5)], 4, CPU)
    for softcap in (None, 1e9):
        with running_pass(layout, KVCache(2, 4, torch.float64, CPU)):
            out, _ = paged_attention(Layer(), query, key, value, attention_mask=None, softcap=softcap)
        expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("kwargs", [{"s_aux": torch.zeros(4)}, {"position_bias": 1}, {"is_causal": False}])
def test_unknown_demands_are_refused_by_name(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"Layer asks its attention for {next(iter(kwargs))}"):
        paged_attention(Layer(), *torch.zeros(3, 1, 4, 1, 4), attention_mask=None, **kwargs)


def test_outside_a_pass_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="outside a pass"):
        paged_attention(Layer(), *torch.zeros(3, 1, 4, 1, 4), attention_mask=None)


@pytest.mark.parametrize("kind", ["sdpa", "native"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_neox", "opt"])
def test_branches_and_guess_rows_equal_plain_forwards(
    family: str, kind: str, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """Logits of every kind of group equal those of the whole text read by transformers alone."""
    model = tiny_model(family)
    draw = random.Random(1)
    text = [draw.randrange(3, 250) for _ in range(23)]
    page_size = 4 if kind == "sdpa" else 16
    if kind == "sdpa":
        cache: KVCache | NativeBackend = KVCache(12, page_size, model.dtype, CPU)
        runner = ModelRunner(model, SdpaBackend(cache))
    else:
        cache = NativeBackend(12, page_size, model.dtype)
        runner = ModelRunner(model, cache)
    table, other = [9, 2, 7, 4, 11, 0, 5], [1, 3, 6]
    runner.forward([RowGroup(table, 0, text[:10], num_logit_rows=0), RowGroup(other, 0, text[5:9], num_logit_rows=0)])
    runner.forward([RowGroup(table, 10, text[10:19], num_logit_rows=0)])
    before = {layer: keys.clone() for layer, keys in cache.keys.items()}
    verify, branch, guess = text[19:23], [40, 41, 42, 43, 44], [50, 51, 52]
    groups = [
        RowGroup(table, 19, verify, num_logit_rows=4),
        RowGroup(table, 13, branch, writes_pages=False, num_logit_rows=5),
        RowGroup(table, 21, guess, writes_pages=False, num_logit_rows=3),
        RowGroup(other, 4, text[9:12], num_logit_rows=3),
        RowGroup(other, 2, branch, writes_pages=False, num_logit_rows=1),
    ]
    logits = runner.forward(groups).split([group.num_logit_rows for group in groups])
    texts = [text, text[:13] + branch, text[:21] + guess, text[5:12], text[5:7] + branch]
    for group, own, whole in zip(groups, logits, texts, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([whole]), use_cache=False).logits[0, -group.num_logit_rows :]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    written = {(table[position // page_size], position % page_size) for position in range(19, 23)}
    written |= {(other[position // page_size], position % page_size) for position in range(4, 7)}
    for layer, keys in before.items():
        differs = keys != cache.keys[layer]
        by_slot = differs.any(dim=(1, 2)).flatten().nonzero().flatten().tolist()
        assert {divmod(slot, page_size) for slot in by_slot} == written


def test_the_models_own_attention_is_put_back(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama")
    runner = ModelRunner(model, SdpaBackend(KVCache(2, 4, model.dtype, CPU)))
    with runner._own_attention():
        assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        runner.forward([RowGroup([0], 0, [10**6])])
    assert model.config._attn_implementation == "sdpa"
