"""Samples in, one padded micro-batch out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from jacobi_llm.train.masks import clean_context_mask
from jacobi_llm.train.sample import Sample


@dataclass(frozen=True)
class Batch:
    """A right-padded micro-batch of B samples, T rows each.

    Row indices (``*_rows``) count rows of the flattened [B*T] batch.

    Attributes:
        token_ids, position_ids: [B, T] int64.
        mask: [B, 1, T, T] bool, True where visible.
        ar_rows, ar_targets: [A] int64.
        student_rows, teacher_rows: [C] int64.
        student_weights: [C] float32.
        num_rows: rows without padding.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    ar_rows: torch.Tensor
    ar_targets: torch.Tensor
    student_rows: torch.Tensor
    teacher_rows: torch.Tensor
    student_weights: torch.Tensor
    num_rows: int

    @property
    def num_ar_tokens(self) -> int:
        return len(self.ar_targets)

    @property
    def consistency_weight(self) -> float:
        """Sum of the student rows' weights: their number without a discount."""
        return float(self.student_weights.sum())


def collate(samples: Sequence[Sample], pad_token_id: int) -> Batch:
    """Pad ``samples`` to one rectangle. Padding is marked by place, never by token id, so pad may equal EOS."""
    length = max(sample.num_rows for sample in samples)

    def pad(name: str, value: int | bool) -> torch.Tensor:
        return pad_sequence([getattr(sample, name) for sample in samples], batch_first=True, padding_value=value)

    def rows(name: str) -> torch.Tensor:
        return torch.cat([getattr(sample, name) + number * length for number, sample in enumerate(samples)])

    is_row = torch.arange(length)[None] < torch.tensor([sample.num_rows for sample in samples])[:, None]
    position_ids = pad("position_ids", 0)
    return Batch(
        token_ids=pad("token_ids", pad_token_id),
        position_ids=position_ids,
        mask=clean_context_mask(position_ids, pad("is_noisy", False), pad("block", -1), pad("block_start", 0), is_row),
        ar_rows=rows("ar_rows"),
        ar_targets=torch.cat([sample.ar_targets for sample in samples]),
        student_rows=rows("student_rows"),
        teacher_rows=rows("teacher_rows"),
        student_weights=torch.cat([sample.student_weights for sample in samples]),
        num_rows=sum(sample.num_rows for sample in samples),
    )
