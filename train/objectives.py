"""What is minimised, as pure functions on logits.

With p the model's distribution, x the prompt, y* the completion and y(j) a noisy state of the block [s, s+n):

AR        mean over t of -log p(y*_t | x, y*_<t)
GC (CLLM) mean over rows i >= d of KL( sg p(. | x, y*_<=s+i) || p(. | x, y*_<s, y(j)_<=i) ),
          d the first i with y(j)_i != y*_i

Row i may be weighted by a power of i - d: the further behind the first wrong token, the less likely it is reached.
GC is "global consistency" of CLLM (arXiv 2403.00835, equation 5). Jacobi Forcing (arXiv 2512.14681, equation 4)
minimises the same quantity for every block at once. Both are written as soft cross-entropy, which differs from the KL
by the teacher's entropy, a constant for the gradient; the KL is what is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of one micro-batch; dividing by token counts is the caller's, who knows the global batch.

    Attributes:
        ar: scalar, sum of -log p(y*_t).
        consistency: scalar, weighted sum of KL over the student rows.
    """

    ar: torch.Tensor
    consistency: torch.Tensor


def ar_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies.

    Args:
        logits: [A, vocab], any float dtype; computed in float32 or wider.
        targets: [A] int64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="sum")


def consistency_loss_sum(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over rows of KL(teacher || student); no gradient reaches the teacher.

    Args:
        student_logits, teacher_logits: [C, vocab], any float dtype; computed in float32 or wider.
        weights: [C] float.
    """
    wide = torch.promote_types(student_logits.dtype, torch.float32)
    student = F.log_softmax(student_logits.to(wide), dim=-1)
    with torch.no_grad():
        teacher = F.log_softmax(teacher_logits.detach().to(wide), dim=-1)
    rows = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
    return (rows * weights.to(wide)).sum()
