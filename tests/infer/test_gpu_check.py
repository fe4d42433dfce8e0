"""scripts/gpu_check, tried on a CPU: the road that the first lent GPU will take."""

from __future__ import annotations

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err.startswith("error: device 'cuda': ")


def test_the_whole_road_on_a_cpu(
    gpu_check: ModuleType, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    flags = [
        "--device",
        "cpu",
        "--kv-memory-mib",
        "4",
        "--model",
        str(tiny_checkpoint),
        "--tokens",
        "6",
        "--bench-tokens",
        "3",
    ]
    flags += ["--prompts", "3", "--batch-sizes", "1,2", "--windows", "1,4", "--repeats", "1", "--output", str(path)]
    assert gpu_check.main(flags) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    assert len(record["equality"]) == 7
    assert all(row["equal"] + row["explained"] == 3 and row["wrong"] == 0 for row in record["equality"])
    assert [(cell["batch_size"], cell["window"]) for cell in record["bench"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert "fp32, batch of 3, mixed windows: 3 equal" in capsys.readouterr().out


def test_a_wrong_decode_fails_the_check(
    gpu_check: ModuleType, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--device",
        "cpu",
        "--kv-memory-mib",
        "4",
        "--model",
        str(tiny_checkpoint),
        "--tokens",
        "4",
        "--bench-tokens",
        "2",
    ]
    flags += ["--prompts", "1", "--batch-sizes", "1", "--windows", "1", "--repeats", "1"]
    with mock.patch.object(gpu_check, "reference_ids", return_value=[7, 7, 7, 7]):
        assert gpu_check.main([*flags, "--output", str(tmp_path / "gpu.json")]) == 1
    assert "7 decodes differ from generate" in capsys.readouterr().err
