"""Batch-invariant mode: the bits of a row do not depend on what shares its passes, now or when its prefix was read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import CompileMode, EngineConfig
from jacobi_llm.infer.model_runner import ModelRunner, make_runner
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.row_group import RowGroup

SETTINGS = EngineConfig(compile=CompileMode.OFF, batch_invariant=True)
TABLE = [7, 2, 19, 4, 11, 0]
TEXT = [random.Random(3).randrange(3, 250) for _ in range(70)]


def others(count: int) -> list[RowGroup]:
    draw = random.Random(count)
    return [
        RowGroup([20 + i], 0, [draw.randrange(3, 250) for _ in range(1 + i % 9)], num_logit_rows=1)
        for i in range(count)
    ]


def last_rows(runner: ModelRunner, chunks: list[int], num_others: int) -> torch.Tensor:
    """Logits of the last row of each chunk of TEXT, read while others share the pass."""
    rows, at = [], 0
    for chunk in chunks:
        before = others(num_others)
        group = RowGroup(TABLE, at, TEXT[at : at + chunk], num_logit_rows=1)
        rows.append(runner.forward([*before, group, *others(num_others // 2)])[len(before)])
        at += chunk
    return rows[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_bits_do_not_depend_on_the_batch(
    family: str, dtype: torch.dtype, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model(family, dtype, hidden_size=64) if family == "llama" else tiny_model(family, dtype)
    runner = make_runner(model, SETTINGS, 60, "tiny")
    alone = last_rows(runner, [70], 0)
    for chunks, num_others in (([70], 30), ([69, 1], 0), ([69, 1], 13), ([33, 20, 1, 16], 7), ([1] * 70, 2)):
        assert torch.equal(last_rows(runner, chunks, num_others), alone), (chunks, num_others)


def test_models_with_products_that_no_tile_reaches_are_refused(tiny_loaded: Callable[..., LoadedModel]) -> None:
    model = tiny_loaded("llama").model
    model.model.register_parameter("experts", torch.nn.Parameter(torch.zeros(2, 3)))
    with pytest.raises(UsageError, match=r"engine.batch_invariant: model.experts of model type llama"):
        make_runner(model, SETTINGS, 60, "tiny")
