"""The clean-context mask against its definition, and what it is for: a packed forward equals plain forwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.schema import ObjectiveConfig
from jacobi_llm.train.batch import Batch, collate
from jacobi_llm.train.sample import NoisyBlock, build_sample, choose_noise
from tests.train.runs import EOS, make_trajectories

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox", "phi", "gemma", "granite", "cohere", "olmo2")


def packed(count: int, seed: int = 0) -> tuple[Batch, list[list[NoisyBlock]]]:
    rows = make_trajectories(count)
    noise = [choose_noise(row, ObjectiveConfig(), random.Random(seed), 1000) for row in rows]
    samples = [
        build_sample(row, some, include_last_row=True, eos_token_ids=(EOS,), max_length=1000)
        for row, some in zip(rows, noise, strict=True)
    ]
    return collate(samples, pad_token_id=0), noise


def test_mask_is_its_definition() -> None:
    rows = make_trajectories(3)
    samples = []
    for row in rows:
        noise = choose_noise(row, ObjectiveConfig(), random.Random(0), 1000)
        samples.append(build_sample(row, noise, include_last_row=True, eos_token_ids=(EOS,), max_length=1000))
    batch = collate(samples, pad_token_id=0)
    for number, sample in enumerate(samples):
        position, block = sample.position_ids.tolist(), sample.block.tolist()
        start, noisy = sample.block_start.tolist(), sample.is_noisy.tolist()
        for query in range(batch.mask.shape[2]):
            for key in range(batch.mask.shape[3]):
                if query >= sample.num_rows or key >= sample.num_rows:
                    visible = query == key
                elif not noisy[query]:
                    visible = not noisy[key] and position[key] <= position[query]
                elif not noisy[key]:
                    visible = position[key] < start[query]
                else:
                    visible = block[key] == block[query] and position[key] <= position[query]
                assert bool(batch.mask[number, 0, query, key]) == visible, (number, query, key)


def test_field_case_t15_no_row_is_fully_masked() -> None:
    batch, _ = packed(5)
    assert batch.mask.any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_field_case_t15_padding_gives_no_nan(tiny_model: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    batch, _ = packed(4)
    logits = model(
        input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
    ).logits
    assert torch.isfinite(logits).all()
    logits.float().logsumexp(-1).mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_plain_forwards(tiny_model: Callable[..., PreTrainedModel], family: str) -> None:
    """Row i of k_b predicts what a plain forward of prompt + y*_<s + y(j) does there; clean rows likewise on y*."""
    model = tiny_model(family, torch.float64)
    model.set_attn_implementation("sdpa")
    rows = make_trajectories(3)
    batch, noise = packed(3)
    with torch.no_grad():
        together = model(
            input_ids=batch.token_ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
        ).logits
        for number, row in enumerate(rows):
            plain = model(torch.tensor([row.prompt_ids + row.completion_ids]), use_cache=False).logits[0]
            first = len(row.prompt_ids)
            worst = (together[number, :first] - plain[:first]).abs().max()
            for noisy in noise[number]:
                length, position = len(noisy.state), len(row.prompt_ids) + noisy.start
                ids = row.prompt_ids + row.completion_ids[: noisy.start] + noisy.state
                alone = model(torch.tensor([ids]), use_cache=False).logits[0, -length:]
                worst = max(worst, (together[number, first : first + length] - alone).abs().max())
                first += length
                clean = plain[position : position + length]
                worst = max(worst, (together[number, first : first + length] - clean).abs().max())
                first += length
            assert worst < 1e-9
