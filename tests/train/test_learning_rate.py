"""The schedule of the learning rate."""

from __future__ import annotations

import math

import pytest

from jacobi_llm.configs.schema import LrSchedule, TrainConfig
from jacobi_llm.train.deepspeed_engine import learning_rate


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    train = TrainConfig(lr=1.0, warmup_ratio=0.1)
    assert [learning_rate(train, step, 40) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_cosine_falls_from_the_peak_to_nearly_zero() -> None:
    train = TrainConfig(lr=2.0, warmup_ratio=0.0)
    rates = [learning_rate(train, step, 100) for step in range(100)]
    assert rates[0] == 2.0
    assert rates[50] == pytest.approx(1.0)
    assert rates[75] == pytest.approx(1.0 + math.cos(0.75 * math.pi))
    assert 0 < rates[99] < 0.001
    assert rates == sorted(rates, reverse=True)


def test_constant_stays_and_does_not_depend_on_the_number_of_updates() -> None:
    train = TrainConfig(lr=2.0, warmup_ratio=0.0, lr_schedule=LrSchedule.CONSTANT)
    assert {learning_rate(train, step, total) for total in (10, 1000) for step in range(10)} == {2.0}


def test_every_rate_is_positive_even_when_all_is_warm_up() -> None:
    for ratio in (0.0, 0.03, 0.5, 1.0):
        for total in (1, 2, 7):
            train = TrainConfig(lr=1.0, warmup_ratio=ratio)
            assert all(0 < learning_rate(train, step, total) <= 1.0 for step in range(total))
