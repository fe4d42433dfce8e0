"""benchmarks/distribution.py, in small: right sampling passes, and planted faults do not."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jacobi_llm.infer import truncation
from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.sampler import RequestRows

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distribution.py"
SMALL = ["--draws", "4000", "--engine-tokens", "200", "--contextual-tokens", "200"]
SMALL += ["--temperatures", "0.8", "--top-k", "6", "--top-p", "0.85", "--min-p", "0", "--windows", "1", "16"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("distribution", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "distribution", module)
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, folder: Path) -> tuple[int, dict[str, Any]]:
    status = benchmark.main([*SMALL, "--output", str(folder / "result.json")])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return status, result


def test_right_sampling_passes(benchmark: ModuleType, tmp_path: Path) -> None:
    status, result = run(benchmark, tmp_path)
    assert status == 0
    assert (result["cells"], result["draws"], result["engine_tokens"]) == (2, 8000, 2 * 200 + 3 * 200)
    assert (result["outside"], result["unequal_engine_tokens"], result["unequal_texts"]) == (0, 0, 0)


def test_noise_that_is_not_gumbel_is_seen(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minima = RowNoise.block_minima
    monkeypatch.setattr(RowNoise, "block_minima", lambda *place: (minima(*place)[0] * 8, minima(*place)[1]))
    status, result = run(benchmark, tmp_path)
    assert status == 1
    assert result["smallest_p_value"] < 1e-4


def test_a_token_outside_is_seen(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mass_before = truncation._mass_before
    monkeypatch.setattr(truncation, "_mass_before", lambda *place: mass_before(*place) * 0.8)
    status, result = run(benchmark, tmp_path)
    assert status == 1
    assert result["outside"] > 0


def test_noise_keyed_by_the_pass_is_seen(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = iter(range(10**9))
    monkeypatch.setattr(
        RequestRows, "noise_keys", lambda self: [RowKey(self.seed, 0, next(passes)) for _ in range(self.num_rows)]
    )
    status, result = run(benchmark, tmp_path)
    assert status == 1
    assert result["unequal_engine_tokens"] > 0
    assert result["unequal_texts"] > 0


def test_p_values(benchmark: ModuleType) -> None:
    """Against tables: chi-square 3.841 at 1 degree and 18.307 at 10 leave 5%."""
    assert benchmark.upper_tail(3.8414588, 1) == pytest.approx(0.05, abs=1e-7)
    assert benchmark.upper_tail(18.3070381, 10) == pytest.approx(0.05, abs=1e-7)
    counts, expected = np.array([55, 45, 0]), np.array([50.0, 50.0, 0.0])
    assert benchmark.chi_square(counts, expected) == pytest.approx(0.3173105, abs=1e-6)
