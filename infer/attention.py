"""Attention over row groups: the pass layout, and the ``sdpa`` backend.

Any Hugging Face decoder runs unchanged: its attention layers call the function registered here, which writes K/V into
our pages and attends per request. The metadata of the running pass travels in a context variable, because some models
drop unknown keyword arguments.

Shape suffixes: R rows of the pass, H query heads, K key/value heads, G query heads per key/value head, D head size,
E head size of the values where it differs, S requests of a bucket, Q padded rows, L padded key slots, P padded own
rows, X = G * Q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.kv_pages import KVCache
from jacobi_llm.infer.pass_inputs import PassInputs
from jacobi_llm.infer.row_group import RowGroup

ATTENTION_NAME = "jacobi_paged"

_IGNORED_KWARGS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache",
        "past_key_values",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


@dataclass
class Bucket:
    """Requests of one pass with similar row counts, padded to one rectangle.

    Attributes:
        rows_SQ: [S, Q] int64, index into the pass's rows (0 where padded).
        is_row_SQ: [S, Q] bool.
        position_SQ: [S, Q] int64, position of the row.
        page_limit_SQ: [S, Q] int64, keys in pages at positions below this are visible.
        pages_SM: [S, M] int64, pages in order of position; padded with the request's own first one, so that nothing
            of another request is ever read. L = M * page_size key slots.
        page_size: K/V slots per page.
        own_SP: [S, P] int64, rows of groups that do not write pages; P may be 0.
        own_position_SP: [S, P] int64.
        own_group_SP: [S, P] int64, group number, -1 where padded.
        group_SQ: [S, Q] int64, group number of a row that sees own rows, -2 for rows that do not.
    """

    rows_SQ: torch.Tensor
    is_row_SQ: torch.Tensor
    position_SQ: torch.Tensor
    page_limit_SQ: torch.Tensor
    pages_SM: torch.Tensor
    page_size: int
    own_SP: torch.Tensor
    own_position_SP: torch.Tensor
    own_group_SP: torch.Tensor
    group_SQ: torch.Tensor
    _masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [S, 1, G*Q, L+P]: key j is visible to query q iff q - W < j <= q, within the limits above.

        Padded rows see key 0, so that no row is fully masked.
        """
        cache_key = (sliding_window, num_groups, dtype)
        if cache_key not in self._masks:
            key_L = torch.arange(self.pages_SM.shape[1] * self.page_size, device=self.pages_SM.device)
            pages = key_L[None, None, :] < self.page_limit_SQ[:, :, None]
            own = (self.group_SQ[:, :, None] == self.own_group_SP[:, None, :]) & (
                self.own_position_SP[:, None, :] <= self.position_SQ[:, :, None]
            )
            if sliding_window is not None:
                oldest = self.position_SQ[:, :, None] - sliding_window
                pages = pages & (key_L[None, None, :] > oldest)
                own = own & (self.own_position_SP[:, None, :] > oldest)
            pages[:, :, 0] |= ~self.is_row_SQ
            visible = torch.cat((pages, own), dim=-1).repeat(1, num_groups, 1)
            additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[cache_key] = additive.masked_fill_(~visible, float("-inf"))[:, None]
        return self._masks[cache_key]


@dataclass
class PassLayout:
    """One forward pass, laid out as tensors.

    Attributes:
        input_ids: [1, R] int64.
        position_ids: [1, R] int64.
        write_rows: [W] int64 or None when every row writes its K/V.
        write_slots: [W] int64, where they go.
        logit_rows: [N] int64, rows whose logits are wanted, in order of groups.
        buckets: the rectangles attention runs on.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write_rows: torch.Tensor | None
    write_slots: torch.Tensor
    logit_rows: torch.Tensor
    buckets: list[Bucket]

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[1]

    @classmethod
    def build(cls, groups: Sequence[RowGroup], page_size: int, device: torch.device) -> PassLayout:
        """Lay out ``groups``; groups of one request must share the same block table object."""
        input_ids: list[int] = []
        positions: list[int] = []
        write_rows: list[int] = []
        write_slots: list[int] = []
        logit_rows: list[int] = []
        requests: dict[int, list[tuple[int, int, RowGroup]]] = {}
        for number, group in enumerate(groups):
            first = len(input_ids)
            input_ids.extend(group.token_ids)
            span = range(group.prefix_len, group.prefix_len + group.num_rows)
            positions.extend(span)
            if group.writes_pages:
                write_rows.extend(range(first, first + group.num_rows))
                write_slots.extend(group.block_table[p // page_size] * page_size + p % page_size for p in span)
            logit_rows.extend(range(first + group.num_rows - group.num_logit_rows, first + group.num_rows))
            requests.setdefault(id(group.block_table), []).append((number, first, group))
        by_size: dict[int, list[list[tuple[int, int, RowGroup]]]] = {}
        for members in requests.values():
            num_rows = sum(group.num_rows for _, _, group in members)
            by_size.setdefault(max(num_rows - 1, 15).bit_length(), []).append(members)

        def as_tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            input_ids=as_tensor(input_ids)[None],
            position_ids=as_tensor(positions)[None],
            write_rows=None if len(write_rows) == len(input_ids) else as_tensor(write_rows),
            write_slots=as_tensor(write_slots),
            logit_rows=as_tensor(logit_rows),
            buckets=[_build_bucket(requests_, page_size, device) for requests_ in by_size.values()],
        )


def _build_bucket(
    requests: Sequence[Sequence[tuple[int, int, RowGroup]]], page_size: int, device: torch.device
) -> Bucket:
    rows: list[list[int]] = []
    positions: list[list[int]] = []
    limits: list[list[int]] = []
    row_groups: list[list[int]] = []
    pages: list[list[int]] = []
    own: list[list[int]] = []
    own_positions: list[list[int]] = []
    own_groups: list[list[int]] = []
    for members in requests:
        rows.append([])
        positions.append([])
        limits.append([])
        row_groups.append([])
        own.append([])
        own_positions.append([])
        own_groups.append([])
        num_keys = 1
        for number, first, group in members:
            span = list(range(group.prefix_len, group.prefix_len + group.num_rows))
            indices = list(range(first, first + group.num_rows))
            rows[-1].extend(indices)
            positions[-1].extend(span)
            if group.writes_pages:
                limits[-1].extend(position + 1 for position in span)
                row_groups[-1].extend([-2] * group.num_rows)
                num_keys = max(num_keys, group.prefix_len + group.num_rows)
            else:
                limits[-1].extend([group.prefix_len] * group.num_rows)
                row_groups[-1].extend([number] * group.num_rows)
                own[-1].extend(indices)
                own_positions[-1].extend(span)
                own_groups[-1].extend([number] * group.num_rows)
                num_keys = max(num_keys, group.prefix_len)
        pages.append(list(members[0][2].block_table[: -(-num_keys // page_size)]))
    most_pages = max(len(one) for one in pages)

    def pad(lists: list[list[int]], value: int) -> torch.Tensor:
        width = max(len(one) for one in lists)
        return torch.tensor([one + [value] * (width - len(one)) for one in lists], dtype=torch.int64, device=device)

    rows_SQ = pad(rows, -1)
    return Bucket(
        rows_SQ=rows_SQ.clamp_min(0),
        is_row_SQ=rows_SQ >= 0,
        position_SQ=pad(positions, 0),
        page_limit_SQ=pad(limits, 0),
        pages_SM=pad([one + one[:1] * (most_pages - len(one)) for one in pages], 0),
        page_size=page_size,
        own_SP=pad(own, 0),
        own_position_SP=pad(own_positions, 0),
        own_group_SP=pad(own_groups, -1),
        group_SQ=pad(row_groups, -2),
    )


@dataclass(frozen=True)
class RunningPass:
    """What the attention layers of the running pass share; ``layers_seen`` are those that attended so far."""

    layout: PassLayout
    cache: KVCache
    layers_seen: set[int] = field(default_factory=set)


_running_pass: ContextVar[RunningPass | None] = ContextVar("running_pass", default=None)


@contextmanager
def running_pass(layout: PassLayout, cache: KVCache) -> Iterator[RunningPass]:
    """Make ``layout`` and ``cache`` known to the attention layers of a model called inside the block."""
    running = RunningPass(layout, cache)
    token = _running_pass.set(running)
    try:
        yield running
    finally:
        _running_pass.reset(token)


def paged_attention(
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
    """The ``sdpa`` backend, in the signature of transformers' attention interface.

    Args:
        module: attention layer; ``module.layer_idx`` names its pages.
        query: [1, H, R, D]; key: [1, K, R, D]; value: [1, K, R, E].
        attention_mask: unused, visibility comes from the running pass.
        scaling: factor of the scores, 1/sqrt(D) when None.
        sliding_window: W, in tokens.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        [1, R, H, E] in the dtype of ``query``, and None for the weights.

    Raises:
        UsageError: the layer asks for something this backend does not compute.
    """
    refuse_unknown(module, kwargs, is_causal)
    running = _running_pass.get()
    if running is None:
        raise RuntimeError("paged attention was called outside a pass of the engine")
    layout, cache = running.layout, running.cache
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    refuse_repeated_layer(module, layer_idx, running.layers_seen)
    running.layers_seen.add(layer_idx)
    query_RHD, key_RKD, value_RKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if layout.write_rows is None:
        cache.write(layer_idx, layout.write_slots, key_RKD, value_RKD)
    else:
        cache.write(layer_idx, layout.write_slots, key_RKD[layout.write_rows], value_RKD[layout.write_rows])
    out_RHE = query_RHD.new_empty(*query_RHD.shape[:2], value_RKD.shape[-1])
    for bucket in layout.buckets:
        out_SQHE = _attend(
            bucket,
            query_RHD,
            (key_RKD, value_RKD),
            (cache.keys[layer_idx], cache.values[layer_idx]),
            scaling,
            sliding_window,
            softcap,
        )
        out_RHE[bucket.rows_SQ[bucket.is_row_SQ]] = out_SQHE[bucket.is_row_SQ]
    return out_RHE[None], None


def _attend(
    bucket: Bucket,
    query_RHD: torch.Tensor,
    own_kv: tuple[torch.Tensor, torch.Tensor],
    paged_kv: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One rectangle: queries grouped by key/value head, so that K/V are never copied per query head."""
    num_requests, num_rows = bucket.rows_SQ.shape
    num_heads, head_dim = query_RHD.shape[1:]
    num_kv_heads = own_kv[0].shape[1]
    num_groups = num_heads // num_kv_heads
    query_SKXD = (
        query_RHD[bucket.rows_SQ]
        .view(num_requests, num_rows, num_kv_heads, num_groups, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_requests, num_kv_heads, num_groups * num_rows, head_dim)
    )
    keys_values = []
    for own_RKD, paged_NKD in zip(own_kv, paged_kv, strict=True):
        stored = _gather(paged_NKD, bucket)
        if bucket.own_SP.shape[1]:
            stored = torch.cat((stored, own_RKD[bucket.own_SP].to(stored.dtype)), dim=1)
        keys_values.append(stored.transpose(1, 2))
    mask = bucket.mask(sliding_window, num_groups, query_SKXD.dtype)
    key, value = keys_values
    if softcap is None:
        out = F.scaled_dot_product_attention(query_SKXD, key, value, attn_mask=mask, scale=scaling)
    else:
        scale = head_dim**-0.5 if scaling is None else scaling
        scores = (query_SKXD @ key.transpose(-1, -2)).to(torch.promote_types(query_SKXD.dtype, torch.float32)) * scale
        scores = softcap * torch.tanh(scores / softcap) + mask
        out = torch.softmax(scores, dim=-1).to(value.dtype) @ value
    return (
        out.view(num_requests, num_kv_heads, num_groups, num_rows, value.shape[-1])
        .permute(0, 3, 1, 2, 4)
        .reshape(num_requests, num_rows, num_heads, value.shape[-1])
    )


def _gather(paged_NKD: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """K or V of all page slots, [S, L, K, D]; whole pages at a time, which costs a third of picking slots."""
    by_page = paged_NKD.view(-1, bucket.page_size * paged_NKD[0].numel())
    picked = by_page.index_select(0, bucket.pages_SM.flatten())
    return picked.view(bucket.pages_SM.shape[0], -1, *paged_NKD.shape[1:])


def refuse_repeated_layer(module: nn.Module, layer_idx: int, layers_seen: set[int]) -> None:
    """Refuse a layer that attends a second time in one pass.

    Raises:
        UsageError: ``layer_idx`` is in ``layers_seen``.
    """
    if layer_idx in layers_seen:
        raise UsageError(
            f"layer {layer_idx} of {type(module).__name__} attends more than once in a pass, and each time would need "
            "K/V pages of its own; this model is not supported"
        )


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any], is_causal: bool | None) -> None:
    """Refuse what no backend computes.

    Raises:
        UsageError: a keyword argument that is set and not known, by name.
    """
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _IGNORED_KWARGS)
    if is_causal is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UsageError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which the attention backends do not "
            "compute; this model is not supported"
        )


class SdpaBackend:
    """Pages and passes of one engine, on any device, in plain torch; the reference of the other backends."""

    attention_name = ATTENTION_NAME

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.keys = cache.keys
        self.values = cache.values
        self._layers_seen: set[int] = set()

    @contextmanager
    def running(self, groups: Sequence[RowGroup]) -> Iterator[PassInputs]:
        """Announce a pass over ``groups``; yields what the model reads."""
        layout = PassLayout.build(groups, self.cache.page_size, self.cache.device)
        with running_pass(layout, self.cache) as running:
            self._layers_seen = running.layers_seen
            yield PassInputs(layout.input_ids, layout.position_ids, layout.logit_rows)

    @property
    def has_attended(self) -> bool:
        """Whether any layer called the attention since the last pass was announced."""
        return bool(self._layers_seen)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the slots of ``pages``."""
        self.cache.clear(pages)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
