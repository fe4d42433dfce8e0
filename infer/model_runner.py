"""Runs a Hugging Face model over row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.attention import ATTENTION_NAME, PassLayout, running_pass
from jacobi_llm.infer.kv_pages import KVCache
from jacobi_llm.infer.row_group import RowGroup


class ModelRunner:
    """One model, one set of pages.

    The model's attention implementation is switched for the length of a pass only, so that the trainer can decode
    with the module it trains.

    Attributes:
        num_passes, num_rows: passes run and rows forwarded since construction.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.num_passes = 0
        self.num_rows = 0

    @torch.no_grad()
    def forward(self, groups: Sequence[RowGroup]) -> torch.Tensor:
        """One ragged forward pass.

        Args:
            groups: at least one group with at least one row.

        Returns:
            Logits [N, vocab] in the model's dtype, for the logit rows of every group in order.
        """
        if any(group.adapter is not None for group in groups):
            raise UsageError("adapters chosen per request are not supported yet; merge one with --adapter")
        layout = PassLayout.build(groups, self.cache.page_size, self.cache.device)
        with self._paged_attention(), running_pass(layout, self.cache) as running:
            output = self.model(
                input_ids=layout.input_ids,
                position_ids=layout.position_ids,
                use_cache=False,
                logits_to_keep=layout.logit_rows,
            )
        if not running.layers_seen:
            raise UsageError(
                f"{type(self.model).__name__} does not call the attention it was given; this model is not supported"
            )
        self.num_passes += 1
        self.num_rows += layout.num_rows
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def _paged_attention(self) -> Iterator[None]:
        config = self.model.config
        before = config._attn_implementation
        if before != ATTENTION_NAME:
            self.model.set_attn_implementation(ATTENTION_NAME)
            if config._attn_implementation != ATTENTION_NAME:
                raise UsageError(f"model type {config.model_type} does not take another attention implementation")
        try:
            yield
        finally:
            if before != ATTENTION_NAME:
                self.model.set_attn_implementation(before)
