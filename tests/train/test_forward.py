"""One forward pass of a micro-batch: only the rows with loss reach the output embedding, and the sums are right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.schema import ObjectiveConfig, ObjectiveName
from jacobi_llm.train.batch import Batch, collate
from jacobi_llm.train.forward import loss_sums, only_rows
from jacobi_llm.train.objectives import ar_loss_sum, consistency_loss_sum
from jacobi_llm.train.sample import build_sample, choose_noise
from tests.train.runs import EOS, make_trajectories

CPU = torch.device("cpu")


def batch_of(count: int, *, padding: int = 0, name: ObjectiveName = ObjectiveName.JACOBI_FORCING) -> Batch:
    rows = make_trajectories(count)
    noise = [choose_noise(row, ObjectiveConfig(name=name), random.Random(0), 1000) for row in rows]
    samples = [
        build_sample(row, some, include_last_row=True, eos_token_ids=(EOS,), max_length=1000)
        for row, some in zip(rows, noise, strict=True)
    ]
    return collate(samples, pad_token_id=padding)


# With logit scales that are applied behind the output embedding, and tied and untied ones.
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("cohere", {}),
        ("granite", {}),
        ("gemma", {"tie_word_embeddings": True}),
    ],
)
def test_sums_equal_those_of_all_logits(
    tiny_model: Callable[..., PreTrainedModel], family: str, settings: dict[str, object]
) -> None:
    model = tiny_model(family, torch.float64, **settings)
    model.set_attn_implementation("sdpa")
    batch = batch_of(3)
    sums = loss_sums(model, model, batch, CPU)
    logits = model(
        input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
    ).logits.flatten(0, 1)
    expected_ar = ar_loss_sum(logits[batch.ar_rows], batch.ar_targets)
    expected_consistency = consistency_loss_sum(
        logits[batch.student_rows], logits[batch.teacher_rows], batch.student_weights
    )
    assert torch.allclose(sums.ar, expected_ar, rtol=1e-12)
    assert torch.allclose(sums.consistency, expected_consistency, rtol=1e-12)
    # One backward gives the gradient of both terms.
    (sums.ar + 2 * sums.consistency).backward()
    ours = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    (expected_ar + 2 * expected_consistency).backward()
    theirs = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(ours) == len(theirs) > 0
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(ours, theirs, strict=True))


def test_only_the_wanted_rows_get_logits_and_the_hook_goes_away(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama", torch.float64)
    ids = torch.arange(12).view(2, 6)
    whole = model(ids, use_cache=False).logits.flatten(0, 1)
    rows = torch.tensor([1, 7, 10])
    with only_rows(model, rows):
        some = model(ids, use_cache=False).logits
    assert some.shape == (1, 3, whole.shape[-1])
    assert torch.allclose(some[0], whole[rows], rtol=1e-12)
    with pytest.raises(ZeroDivisionError), only_rows(model, rows):
        _ = 1 / 0
    assert model(ids, use_cache=False).logits.shape[:2] == (2, 6)


def test_padding_token_has_no_influence(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("qwen2", torch.float64)
    one, other = (loss_sums(model, model, batch_of(4, padding=pad), CPU) for pad in (0, EOS))
    assert torch.equal(one.ar, other.ar)
    assert torch.equal(one.consistency, other.consistency)


def test_ar_alone_has_a_consistency_of_zero(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama", torch.float64)
    sums = loss_sums(model, model, batch_of(2, name=ObjectiveName.AR), CPU)
    assert sums.consistency.item() == 0.0
    assert sums.ar.item() > 0
