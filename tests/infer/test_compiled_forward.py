"""The compiled forward against the eager one, in bfloat16 bit for bit, and what it does when it cannot compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import CompileMode, EngineConfig
from jacobi_llm.infer import compiled_forward, native
from jacobi_llm.infer.model_runner import ModelRunner, make_runner
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.row_group import RowGroup

NUM_PAGES = 24


def groups_of(num_rows: int, num_logit_rows: int) -> list[RowGroup]:
    """A prefix of 40 tokens in pages that are not in order, then rows behind it, and a branch."""
    table = [7, 2, 19, 4, 11, 0]
    return [
        RowGroup([3, 9], 0, [5, 6, 7], num_logit_rows=0),
        RowGroup(table, 40, list(range(10, 10 + num_rows)), num_logit_rows=num_logit_rows),
        RowGroup(table, 33, [60, 61, 62], writes_pages=False, num_logit_rows=num_logit_rows and 2),
    ]


def prefill(runner: ModelRunner) -> None:
    runner.forward([RowGroup([7, 2, 19, 4, 11, 0], 0, list(range(100, 140)), num_logit_rows=0)])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_of_the_eager_forward(
    dtype: torch.dtype, tiny_model: Callable[..., PreTrainedModel], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fused and packed projections, one program for all sizes; a second engine loads what the first one compiled."""
    model = tiny_model("qwen2", dtype)
    with mock.patch.object(compiled_forward, "cache_dir", return_value=cache):
        eager = make_runner(model, EngineConfig(compile=CompileMode.OFF, batch_invariant=True), NUM_PAGES, "tiny")
        compiled = make_runner(model, EngineConfig(compile=CompileMode.ON, batch_invariant=True), NUM_PAGES, "tiny")
        assert "tiny: compiled in " in capsys.readouterr().err
        model.config._name_or_path = "elsewhere"
        make_runner(model, EngineConfig(compile=CompileMode.ON), NUM_PAGES, "tiny")
        assert capsys.readouterr().err == ""
    assert compiled.is_compiled
    for runner in (eager, compiled):
        prefill(runner)
    one = [RowGroup([7, 2, 19, 4, 11, 0], 40, [9])]
    for groups in (one, groups_of(1, 1), groups_of(17, 17), groups_of(30, 0), groups_of(30, 4)):
        expected = eager.forward(groups)
        if dtype == torch.bfloat16:
            assert torch.equal(compiled.forward(groups), expected)
        else:  # norms are summed in another order
            torch.testing.assert_close(compiled.forward(groups), expected, rtol=1e-4, atol=1e-5)
        assert expected.shape[0] == sum(group.num_logit_rows for group in groups)


def test_a_model_that_does_not_compile(
    tiny_loaded: Callable[..., LoadedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_loaded("llama").model
    with (
        mock.patch.object(compiled_forward, "cache_dir", return_value=tmp_path),
        mock.patch.object(torch.export, "export", side_effect=ValueError("no\nway")),
        mock.patch("jacobi_llm.infer.model_runner.MIN_WEIGHTS_TO_COMPILE", 0),
    ):
        with pytest.raises(RunError, match=r"tiny: the forward pass does not compile \(no\); use --engine.compile off"):
            make_runner(model, EngineConfig(compile=CompileMode.ON), NUM_PAGES, "tiny")
        runner = make_runner(model, EngineConfig(), NUM_PAGES, "tiny")
        assert "going on uncompiled" in capsys.readouterr().err
    assert not runner.is_compiled
    prefill(runner)
    assert not list((tmp_path / "compiled").glob("*.pt2"))


def test_no_compiler(tiny_loaded: Callable[..., LoadedModel]) -> None:
    model = tiny_loaded("llama").model
    with mock.patch.object(native.shutil, "which", return_value=None):
        runner = make_runner(model, EngineConfig(), NUM_PAGES, "tiny")
        assert runner.backend.attention_name == "jacobi_paged"
        with pytest.raises(UsageError, match=r"engine.compile: on needs the native attention"):
            make_runner(model, EngineConfig(compile=CompileMode.ON), NUM_PAGES, "tiny")
