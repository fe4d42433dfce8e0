"""One forward pass of a packed micro-batch: logits of the rows that carry loss, and the loss sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi_llm.train.batch import Batch
from jacobi_llm.train.objectives import LossSums, ar_loss_sum, consistency_loss_sum


def loss_sums(module: nn.Module, model: PreTrainedModel, batch: Batch, device: torch.device) -> LossSums:
    """Forward ``batch`` once and sum each term over its tokens.

    Args:
        module: what is called (the DeepSpeed engine, a peft model, or the model itself).
        model: the Hugging Face model inside, whose output embedding computes the logits.
        batch: see :class:`jacobi_llm.train.batch.Batch`.
        device: where the model lives.
    """
    wanted = torch.cat((batch.ar_rows, batch.teacher_rows, batch.student_rows)).to(device)
    rows, place = torch.unique(wanted, return_inverse=True)
    with only_rows(model, rows):
        output = module(
            input_ids=batch.token_ids.to(device),
            position_ids=batch.position_ids.to(device),
            attention_mask=batch.mask.to(device),
            use_cache=False,
        )
    logits = output.logits[0]
    ar, teacher, student = torch.split(place, [len(batch.ar_rows), len(batch.teacher_rows), len(batch.student_rows)])
    return LossSums(
        ar=ar_loss_sum(logits[ar], batch.ar_targets.to(device)),
        consistency=consistency_loss_sum(logits[student], logits[teacher], batch.student_weights.to(device)),
    )


@contextmanager
def only_rows(model: PreTrainedModel, rows: torch.Tensor) -> Iterator[None]:
    """Let the output embedding see ``rows`` [R] of the flattened batch alone; the logits become [1, R, vocab].

    A pre-hook does this for every family, soft caps and logit scales included.
    """

    def select(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].flatten(0, 1)[rows][None], *inputs[1:])

    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(model).__name__} has no output embedding")
    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
