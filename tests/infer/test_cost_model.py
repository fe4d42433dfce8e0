"""Pass times: interpolation, correction by what is seen, calibration and its cache."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from jacobi_llm.infer import calibration
from jacobi_llm.infer.cost_model import CostModel, PassTimes
from jacobi_llm.infer.request import DecodeParams, Request
from tests.infer.decoding import make_engine
from tests.tiny_models import tiny_loaded

TIMES = PassTimes((1, 8, 16, 64), (0.020, 0.021, 0.030, 0.080), 64, 1e-4, 1e-6, 1e-6)


def seconds(cost: CostModel, *num_rows: int, requests: int = 1, context: int = 64) -> list[float]:
    return cost.predict(np.array(num_rows), requests, context).tolist()


def test_prediction_is_linear_between_the_points_and_goes_on_behind_them() -> None:
    cost = CostModel(TIMES)
    assert seconds(cost, 1, 8, 12, 16, 40) == pytest.approx([0.020, 0.021, 0.0255, 0.030, 0.055])
    assert seconds(cost, 112) == pytest.approx([0.080 + 48 * 0.05 / 48])
    assert seconds(cost, 16, requests=11, context=1064) == pytest.approx([0.030 + 10e-4 + 1e-3])


def test_a_slower_machine_changes_no_ratio() -> None:
    """A noisy neighbour makes every pass 1.6 times as long: no number of rows is to blame."""
    cost = CostModel(TIMES)
    before = seconds(cost, 1, 8, 16, 64)
    for turn in range(300):
        num_rows = (1, 8, 16, 64)[turn % 4]
        cost.observe(num_rows, 1, 64, 1.6 * before[turn % 4])
    after = seconds(cost, 1, 8, 16, 64)
    ratios = [a / b for a, b in zip(after, before, strict=True)]
    assert max(ratios) / min(ratios) < 1.15


def test_a_wrong_point_is_corrected() -> None:
    cost = CostModel(TIMES)
    for turn in range(300):
        num_rows = (1, 8, 16)[turn % 3]
        cost.observe(num_rows, 1, 64, 0.0315 if num_rows == 8 else seconds(CostModel(TIMES), num_rows)[0])
    one, eight, sixteen = seconds(cost, 1, 8, 16)
    assert eight / one == pytest.approx(1.575, rel=0.06)
    assert sixteen / one == pytest.approx(1.5, rel=0.06)


def test_one_pass_changes_little_and_all_together_are_bounded() -> None:
    cost = CostModel(TIMES)
    cost.observe(8, 1, 64, 60.0)
    assert seconds(cost, 8)[0] < 1.25 * 0.021
    for turn in range(2000):
        cost.observe(8 if turn % 2 else 1, 1, 64, 60.0 if turn % 2 else 0.02)
    assert seconds(cost, 8)[0] <= 2 * 0.021 + 1e-9
    cost.observe(1 << 18, 1, 64, 1.0)
    cost.observe(8, 1, 64, 0.0)


def test_calibration_leaves_the_engine_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBI_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "LEAST_CACHED_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "MOST_SECONDS", 0.2)
    engine = make_engine(tiny_loaded(dtype=torch.float32), max_num_rows=100)
    times = calibration.pass_times(engine.runner, engine.pool, engine.config)
    assert times.num_rows[:2] == (1, 2)
    assert times.num_rows[-1] <= 100
    assert min(times.seconds) > 0
    assert (engine.runner.num_passes, engine.runner.num_rows) == (0, 0)
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    with mock.patch.object(calibration, "calibrate", side_effect=AssertionError("measured again")):
        assert calibration.pass_times(engine.runner, engine.pool, engine.config) == times
        [file] = (tmp_path / calibration.FOLDER).iterdir()
        file.write_text('{"num_rows": [1, 2], "seconds": [0.1]', encoding="utf-8")
        with pytest.raises(AssertionError, match="measured again"):
            calibration.pass_times(engine.runner, engine.pool, engine.config)


def test_other_models_and_settings_have_times_of_their_own() -> None:
    keys = set()
    for dtype, hidden, page_size in (
        (torch.float32, 64, 16),
        (torch.float64, 64, 16),
        (torch.float32, 32, 16),
        (torch.float32, 64, 8),
    ):
        engine = make_engine(tiny_loaded(dtype=dtype, hidden_size=hidden), page_size=page_size)
        keys.add(calibration._key(engine.runner, engine.config))
    assert len(keys) == 4


def test_a_pool_of_a_few_pages_is_calibrated_too() -> None:
    engine = make_engine(tiny_loaded(dtype=torch.float32), num_pages=6)
    with mock.patch.object(calibration, "MOST_SECONDS", 0.1):
        times = calibration.calibrate(engine.runner, engine.pool, 2048)
    assert times.num_rows[-1] <= 6 * 16 - calibration.CONTEXT_TOKENS
    assert times.per_context_token_s == 0.0


def test_pages_that_calibration_wrote_are_not_shared() -> None:
    engine = make_engine(tiny_loaded(dtype=torch.float64), num_pages=8)
    prompt_ids = tuple(range(3, 70))
    params = DecodeParams(8, 1)
    first = engine.generate([Request("first", prompt_ids, params)])
    with mock.patch.object(calibration, "MOST_SECONDS", 0.1):
        calibration.calibrate(engine.runner, engine.pool, 64)
    assert engine.generate([Request("second", prompt_ids, params)])[0].token_ids == first[0].token_ids
    engine.check_integrity()
