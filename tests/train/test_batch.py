"""Micro-batches: padding by place, and row numbers of the flattened batch."""

from __future__ import annotations

import random

import torch

from jacobi_llm.configs.schema import ObjectiveConfig
from jacobi_llm.train.batch import collate
from jacobi_llm.train.sample import Sample, build_sample, choose_noise
from tests.train.runs import EOS, make_trajectories


def samples_of(count: int) -> list[Sample]:
    rows = make_trajectories(count)
    noise = [choose_noise(row, ObjectiveConfig(), random.Random(0), 1000) for row in rows]
    return [
        build_sample(row, some, include_last_row=True, eos_token_ids=(EOS,), max_length=1000)
        for row, some in zip(rows, noise, strict=True)
    ]


def test_rows_of_the_flattened_batch_hold_what_the_samples_held() -> None:
    samples = samples_of(4)
    batch = collate(samples, pad_token_id=7)
    length = max(sample.num_rows for sample in samples)
    assert batch.token_ids.shape == batch.position_ids.shape == (4, length)
    assert batch.mask.shape == (4, 1, length, length)
    assert batch.num_rows == sum(sample.num_rows for sample in samples)
    for kind in ("ar_rows", "student_rows", "teacher_rows"):
        expected = torch.cat([sample.token_ids[getattr(sample, kind)] for sample in samples])
        assert batch.token_ids.flatten()[getattr(batch, kind)].equal(expected), kind
    assert batch.ar_targets.equal(torch.cat([sample.ar_targets for sample in samples]))
    assert batch.num_ar_tokens == len(batch.ar_rows) == len(batch.ar_targets)
    assert batch.consistency_weight == len(batch.student_rows) == len(batch.teacher_rows)


def test_no_row_sees_another_sample_or_padding() -> None:
    samples = samples_of(3)
    batch = collate(samples, pad_token_id=0)
    for number, sample in enumerate(samples):
        alone = collate([sample], pad_token_id=0)
        count = sample.num_rows
        assert batch.mask[number, 0, :count, :count].equal(alone.mask[0, 0])
        assert not batch.mask[number, 0, :count, count:].any()
        assert not batch.mask[number, 0, count:, :count].any()


def test_field_case_t07_pad_may_be_eos() -> None:
    """Every true EOS is a target, padding never is, whatever the pad id."""
    samples = samples_of(6)
    with_eos_as_pad, with_other_pad = collate(samples, pad_token_id=EOS), collate(samples, pad_token_id=0)
    num_true = sum(int((sample.ar_targets == EOS).sum()) for sample in samples)
    assert num_true == 2
    assert int((with_eos_as_pad.ar_targets == EOS).sum()) == num_true
    for kind in ("ar_rows", "ar_targets", "student_rows", "teacher_rows", "mask"):
        assert getattr(with_eos_as_pad, kind).equal(getattr(with_other_pad, kind)), kind
    length = with_eos_as_pad.token_ids.shape[1]
    loss_rows = torch.cat((with_eos_as_pad.ar_rows, with_eos_as_pad.student_rows, with_eos_as_pad.teacher_rows))
    for row in loss_rows.tolist():
        assert row % length < samples[row // length].num_rows
