"""jacobi-infer bench and the clock under it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import Auto, BenchConfig, DecodeMode, EngineConfig
from jacobi_llm.infer import cli
from jacobi_llm.infer.bench import make_cells, run_cells
from jacobi_llm.infer.bench_cell import Cell, summarise
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.measurement import Measurement, agreement, measure
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput
from jacobi_llm.infer.rule import FinishReason
from tests.tiny_models import tiny_loaded


def output(name: str, token_ids: tuple[int, ...], passes: int = 1) -> RequestOutput:
    return RequestOutput(
        name, 3, token_ids, FinishReason.LENGTH, passes, (len(token_ids),), ttft_ms=1.0, latency_ms=2.0
    )


def run_of(wall_s: float, *outputs: RequestOutput) -> Measurement:
    return Measurement(outputs, wall_s=wall_s, num_passes=4, num_rows=9, num_preemptions=0)


def requests(num: int, window: int = 1, max_tokens: int = 8) -> list[Request]:
    return [
        Request(str(index), tuple(range(3 + index, 12 + index)), DecodeParams(max_tokens, window))
        for index in range(num)
    ]


@pytest.fixture
def bench_flags(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(6)), encoding="utf-8")
    flags = ["bench", "--model", str(tiny_checkpoint), "--dtype", "float64", "--device", "cpu", "--input", str(path)]
    return [*flags, "--num-prompts", "4", "--max-tokens", "6", "--repeats", "2", "--engine.kv_memory_mib", "4"]


def test_measure_counts_tokens_passes_and_rows() -> None:
    engine = LLMEngine(tiny_loaded(), EngineConfig(kv_memory_mib=4))
    ended = []
    measured = measure(engine, requests(3), on_finished=lambda finished: ended.append(finished.id))
    assert [one.id for one in measured.outputs] == ["0", "1", "2"]
    assert sorted(ended) == ["0", "1", "2"]
    assert measured.num_completion_tokens == 24
    assert measured.num_forward_passes == 24
    assert measured.tpf == 1.0
    assert measured.num_passes == 8
    assert measured.num_rows == 3 * (9 + 7)
    assert measured.tps == pytest.approx(24 / measured.wall_s)
    assert 0 < measured.ttft_ms_p50 < measured.latency_ms_p50
    engine.check_integrity()
    assert measure(engine, requests(1)).num_passes == 8


def test_in_flight_bounds_the_batch() -> None:
    engine = LLMEngine(tiny_loaded(), EngineConfig(kv_memory_mib=4))
    most = 0
    real_step = engine.step

    def step() -> Any:
        nonlocal most
        most = max(most, len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return real_step()

    engine.step = step  # type: ignore[method-assign]
    measured = measure(engine, requests(5), in_flight=2)
    assert most == 2
    assert measured.num_passes == 3 * 8
    with pytest.raises(ValueError, match="at least one"):
        measure(engine, [])
    with pytest.raises(ValueError, match="at least one"):
        measure(engine, requests(1), in_flight=0)


def test_agreement_is_the_share_of_equal_answers() -> None:
    left = [output("a", (1, 2)), output("b", (3,)), output("c", (4,)), output("d", (5,))]
    right = [output("a", (1, 2)), output("b", (9,)), output("c", (4,)), output("d", (5, 6))]
    assert agreement(left, right) == 0.5


def test_ratio_is_paired_by_repeat() -> None:
    # The machine slows down threefold between the repeats; the cell is twice as fast as AR in each.
    ar = [run_of(2.0, output("a", (1, 2), 2)), run_of(6.0, output("a", (1, 2), 2))]
    jacobi = [run_of(1.0, output("a", (1, 2))), run_of(3.0, output("a", (1, 9)))]
    result = summarise(Cell(1, DecodeMode.SLIDING, 8), jacobi, ar)
    assert result.ratio == 2.0
    assert result.tpf == 2.0
    assert result.agreement == 0.5
    assert result.ms_per_pass == 500.0


def test_cells_always_hold_plain_ar_once() -> None:
    config = BenchConfig(batch_sizes=[4, 1], windows=[8], modes=[DecodeMode.SLIDING, DecodeMode.BLOCK])
    assert [(cell.batch_size, cell.label) for cell in make_cells(config, 4)] == [
        (1, "AR"),
        (1, "sliding 8"),
        (1, "block 8"),
        (4, "AR"),
        (4, "sliding 8"),
        (4, "block 8"),
    ]
    auto = BenchConfig(batch_sizes=[1], windows=[Auto.AUTO, 8], modes=[DecodeMode.SLIDING, DecodeMode.BLOCK])
    labels = [cell.label for cell in make_cells(auto, 4)]
    assert labels == ["AR", "sliding 8", "sliding auto", "block 8"], "a block has a fixed length"
    with pytest.raises(UsageError, match="4 requests in flight need as many prompts, there are 3"):
        make_cells(config, 3)


def test_a_window_changes_no_answer_in_float64() -> None:
    loaded = tiny_loaded(dtype=torch.float64)
    config = BenchConfig(windows=[1, 4], batch_sizes=[2], max_tokens=10, repeats=1)
    prompts = [tuple(range(3 + index, 12 + index)) for index in range(3)]
    results = run_cells(loaded, EngineConfig(kv_memory_mib=4), config, prompts, make_cells(config, 3))
    assert [result.agreement for result in results] == [1.0, 1.0]
    assert results[0].tpf == 1.0
    assert results[1].tpf >= 1.0
    assert results[0].ratio == 1.0


def test_json_and_files(bench_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "out"
    flags = ["--windows", "1,4", "--batch-sizes", "1,2", "--output", str(folder), "--json"]
    assert cli.main([*bench_flags, *flags]) == 0
    captured = capsys.readouterr()
    cells = [json.loads(line) for line in captured.out.splitlines()]
    assert [(cell["batch_size"], cell["mode"], cell["window"]) for cell in cells] == [
        (1, "ar", 1),
        (1, "sliding", 4),
        (2, "ar", 1),
        (2, "sliding", 4),
    ]
    assert all(cell["agreement"] == 1.0 for cell in cells)
    record = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert record["cells"] == cells
    for key in ("date", "command", "model", "dtype", "device", "threads", "environment", "config", "engine"):
        assert key in record
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_table_on_standard_output(bench_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*bench_flags, "--windows", "4", "--batch-sizes", "1", "--repeats", "1"]) == 0
    captured = capsys.readouterr()
    assert "1 (AR)" in captured.out
    assert "4 sliding" in captured.out
    assert "same ids" in captured.out
    assert "repeat 1/1: batch 1, AR" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sizes", "8"], "bench.num_prompts"),
        (["--windows", "0"], "--windows 0: it must be at least 1"),
    ],
)
def test_wrong_requests(
    bench_flags: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.main([*bench_flags, *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_prompt_file_says_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "jacobi-data prompts" in capsys.readouterr().err


def test_no_matplotlib_is_found_out_before_the_run(
    bench_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name))
    assert cli.main([*bench_flags, "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: bench.output: bench.png needs matplotlib: pip install 'jacobi-llm[plot]'\n"
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_cells(bench_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*bench_flags, "--windows", "1,4", "--batch-sizes", "2", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cells"] == ["batch 2, AR", "batch 2, sliding 4"]
    assert plan["prompts"] == 4
    assert plan["completion_tokens_at_most"] == 4 * 2 * 2 * 6
