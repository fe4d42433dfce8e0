"""The losses against a slow reference written from the formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from jacobi_llm.train.objectives import ar_loss_sum, consistency_loss_sum


def reference_ar(logits: torch.Tensor, targets: torch.Tensor) -> float:
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        highest = max(row)
        total += math.log(sum(math.exp(z - highest) for z in row)) + highest - row[target]
    return total


def probabilities(row: list[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(z - highest) for z in row]
    return [weight / sum(weights) for weight in weights]


def reference_kl(student: torch.Tensor, teacher: torch.Tensor) -> float:
    total = 0.0
    for student_row, teacher_row in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = probabilities(student_row), probabilities(teacher_row)
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(7, 31, dtype=torch.float64, generator=generator)
    teacher = 3 * torch.randn(7, 31, dtype=torch.float64, generator=generator)
    return student, teacher


def test_values_equal_the_reference(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    student, teacher = logits
    targets = torch.arange(7) * 4
    assert float(ar_loss_sum(student, targets)) == pytest.approx(reference_ar(student, targets), rel=1e-12)
    assert float(consistency_loss_sum(student, teacher, torch.ones(len(student)))) == pytest.approx(
        reference_kl(student, teacher), rel=1e-12
    )


def test_gradients_are_those_of_the_formulas(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """d/dz of cross-entropy is softmax - onehot; of KL(p || q) it is q - p."""
    student, teacher = (tensor.clone().requires_grad_() for tensor in logits)
    targets = torch.arange(7)
    ar_loss_sum(student, targets).backward()
    assert student.grad is not None
    expected = student.softmax(-1) - torch.nn.functional.one_hot(targets, 31)
    assert torch.allclose(student.grad, expected, atol=1e-12)
    student.grad = None
    consistency_loss_sum(student, teacher, torch.ones(len(student))).backward()
    assert torch.allclose(student.grad, student.softmax(-1) - teacher.softmax(-1), atol=1e-12)


def test_no_gradient_reaches_the_teacher(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    student, teacher = (tensor.clone().requires_grad_() for tensor in logits)
    consistency_loss_sum(student, teacher, torch.ones(len(student))).backward()
    assert teacher.grad is None


def test_a_right_student_costs_nothing_and_no_rows_cost_nothing() -> None:
    same = torch.randn(5, 11, dtype=torch.float64)
    assert float(consistency_loss_sum(same, same, torch.ones(len(same)))) == pytest.approx(0.0, abs=1e-12)
    none = torch.zeros(0, 11, requires_grad=True)
    loss = consistency_loss_sum(none, none, torch.ones(len(none))) + ar_loss_sum(
        none, torch.zeros(0, dtype=torch.int64)
    )
    assert loss.item() == 0.0
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_wide(logits: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    student, teacher = (tensor.to(dtype) for tensor in logits)
    loss = consistency_loss_sum(student, teacher, torch.ones(len(student)))
    assert loss.dtype is torch.float32
    assert float(loss) == pytest.approx(reference_kl(student.double(), teacher.double()), rel=1e-5)
