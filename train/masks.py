"""Which rows of a packed sample may see which: the clean-context mask of Jacobi Forcing (arXiv 2512.14681)."""

from __future__ import annotations

import torch


def clean_context_mask(
    position_BT: torch.Tensor,
    is_noisy_BT: torch.Tensor,
    block_BT: torch.Tensor,
    block_start_BT: torch.Tensor,
    is_row_BT: torch.Tensor,
) -> torch.Tensor:
    """Visibility of keys.

    A clean row (prompt or l_b) sees clean rows at positions up to its own. A noisy row of k_b sees clean rows before
    its block, and k_b's rows up to itself. A padded row sees itself, so that no row is fully masked.

    Args:
        position_BT, block_BT, block_start_BT: [B, T] int64, as in :class:`jacobi_llm.train.sample.Sample`.
        is_noisy_BT, is_row_BT: [B, T] bool; ``is_row_BT`` is False where padded.

    Returns:
        [B, 1, T, T] bool, True where query (third axis) sees key (fourth axis).
    """
    query, key = (slice(None), slice(None), None), (slice(None), None, slice(None))
    is_causal = position_BT[key] <= position_BT[query]
    is_clean_key = ~is_noisy_BT[key]
    clean = ~is_noisy_BT[query] & is_clean_key & is_causal
    context = is_noisy_BT[query] & is_clean_key & (position_BT[key] < block_start_BT[query])
    own = is_noisy_BT[query] & is_noisy_BT[key] & (block_BT[query] == block_BT[key]) & is_causal
    both = is_row_BT[query] & is_row_BT[key]
    itself = torch.eye(position_BT.shape[1], dtype=torch.bool, device=position_BT.device)
    return (((clean | context | own) & both) | itself)[:, None]
