"""The ``native`` backend: attention over pages by the project's own C++ operator, for CPUs.

The operator (infer/csrc/operators.cpp) is told of a pass once; each layer then calls it with its index alone. It
is opaque to a compiler, so the same function serves the eager and the compiled forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.attention import refuse_repeated_layer, refuse_unknown
from jacobi_llm.infer.kv_pages import lazy_zeros
from jacobi_llm.infer.native import load_operators
from jacobi_llm.infer.pass_inputs import PassInputs
from jacobi_llm.infer.row_group import RowGroup

PAGE_SIZES = (16, 32, 64)


class NativeBackend:
    """Pages and passes of one engine.

    K pages lie transposed, [num_pages, num_kv_heads, head_dim, page_size]; V pages are [num_pages, num_kv_heads,
    page_size, value_dim]. A layer's pages are allocated when its first K/V arrives, which is in an eager pass: the
    compiled forward finds them there.

    Attributes:
        adapter_numbers: adapters that row groups may name, as the operators know them (infer/adapters.py fills it).
    """

    attention_name = "jacobi_native"

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype, *, is_batch_invariant: bool = False) -> None:
        if page_size not in PAGE_SIZES:
            raise UsageError(
                f"engine.page_size: the native attention has pages of {', '.join(map(str, PAGE_SIZES))} tokens, not "
                f"{page_size}; use one of these, or --engine.attention sdpa"
            )
        load_operators()
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.is_batch_invariant = is_batch_invariant
        self.adapter_numbers: dict[str, int] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.handle: int = torch.ops.jacobi_llm.add_model(page_size)
        weakref.finalize(self, torch.ops.jacobi_llm.drop_model, self.handle)
        self._layers_seen: set[int] = set()

    @contextmanager
    def running(self, groups: Sequence[RowGroup]) -> Iterator[PassInputs]:
        """Announce a pass over ``groups``; yields what the model reads."""
        inputs = PassInputs.build(groups)
        self._announce(groups)
        self._layers_seen.clear()
        token = _running.set(self)
        try:
            yield inputs
        finally:
            _running.reset(token)

    @property
    def has_attended(self) -> bool:
        """Whether any layer called the attention since the last pass was announced (eager passes only)."""
        return bool(self._layers_seen)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the slots of ``pages``."""
        index = torch.tensor(pages, dtype=torch.int64)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.index_fill_(0, index, 0)

    def attend(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, module: nn.Module) -> None:
        """Note that a layer attends, with ``key`` [1, K, R, D] and ``value`` [1, K, R, E]; allocate its pages once."""
        refuse_repeated_layer(module, layer_idx, self._layers_seen)
        self._layers_seen.add(layer_idx)
        if layer_idx not in self.keys:
            cpu = torch.device("cpu")
            self.keys[layer_idx] = lazy_zeros(
                (self.num_pages, key.shape[1], key.shape[3], self.page_size), self.dtype, cpu
            )
            self.values[layer_idx] = lazy_zeros(
                (self.num_pages, value.shape[1], self.page_size, value.shape[3]), self.dtype, cpu
            )
            torch.ops.jacobi_llm.set_pages(self.handle, layer_idx, self.keys[layer_idx], self.values[layer_idx])

    def _announce(self, groups: Sequence[RowGroup]) -> None:
        table: list[int] = []
        columns: list[tuple[int, ...]] = []
        first_row = 0
        for group in groups:
            num_rows = group.num_rows
            end = group.prefix_len + (num_rows if group.writes_pages else 0)
            adapter = -1 if group.adapter is None else self.adapter_numbers[group.adapter]
            columns.append(
                (
                    *(first_row, num_rows, group.prefix_len, int(group.writes_pages), len(table)),
                    *(adapter, group.num_logit_rows),
                )
            )
            table.extend(group.block_table[: -(-end // self.page_size)])
            first_row += num_rows
        torch.ops.jacobi_llm.set_pass(
            self.handle,
            torch.tensor(columns, dtype=torch.int64),
            torch.tensor(table, dtype=torch.int64),
            self.is_batch_invariant,
        )


_running: ContextVar[NativeBackend | None] = ContextVar("running_native", default=None)


def native_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The backend in the signature of transformers' attention interface; shapes as in :func:`paged_attention`.

    Raises:
        UsageError: the layer asks for something this backend does not compute.
    """
    refuse_unknown(module, kwargs, is_causal)
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    if not torch.compiler.is_compiling():
        running = _running.get()
        if running is None:
            raise RuntimeError("paged attention was called outside a pass of the engine")
        running.attend(layer_idx, key, value, module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.jacobi_llm.attend(query, key, value, layer_idx, scale, sliding_window or 0, softcap or 0.0)
    return out, None


AttentionInterface.register(NativeBackend.attention_name, native_attention)
