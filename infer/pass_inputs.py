"""What a model reads in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jacobi_llm.infer.row_group import RowGroup


@dataclass(frozen=True)
class PassInputs:
    """Rows of all groups, one after the other.

    Attributes:
        input_ids, position_ids: [1, R] int64.
        logit_rows: [N] int64, rows whose logits are wanted, in order of groups.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[1]

    @classmethod
    def build(cls, groups: Sequence[RowGroup], device: torch.device | None = None) -> PassInputs:
        """Lay out ``groups``."""
        input_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for group in groups:
            input_ids.extend(group.token_ids)
            positions.extend(range(group.prefix_len, group.prefix_len + group.num_rows))
            logit_rows.extend(range(len(input_ids) - group.num_logit_rows, len(input_ids)))
        return cls(
            torch.tensor([input_ids], dtype=torch.int64, device=device),
            torch.tensor([positions], dtype=torch.int64, device=device),
            torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
