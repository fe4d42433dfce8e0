"""jacobi-infer env: always an answer, whatever is missing."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from jacobi_llm.infer import cli, environment


def test_plain_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    plain = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    for name in ("python", "torch", "transformers", "peft", "deepspeed", "jacobi-llm"):
        assert name in described["versions"]
        assert name in plain
    assert described["versions"]["torch"] in plain
    assert described["cpu"]["cores"] >= 1
    assert described["memory_mib"]["total"] > described["memory_mib"]["available"] > 0
    assert described["attention_backends"]["sdpa"] == "ready"


def test_nothing_installed_and_nothing_readable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def no_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("not here")

    monkeypatch.setattr(builtins, "__import__", no_torch)
    monkeypatch.setattr(importlib.metadata, "version", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(environment.os, "sched_getaffinity", fail)
    monkeypatch.setattr(Path, "iterdir", fail)
    assert cli.main(["env"]) == 0
    plain = capsys.readouterr().out
    assert "torch" in plain
    assert "not installed" in plain
    assert "unknown" in plain
    described = environment.describe_environment()
    assert json.loads(json.dumps(described)) == described
    assert described["cpu"]["torch_threads"] is None
    assert described["gpus"] == []


def test_caches_follow_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own" / "some-model").mkdir(parents=True)
    monkeypatch.setenv("JACOBI_LLM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    caches = environment.describe_environment()["caches"]
    assert caches["jacobi-llm"] == {"path": str(tmp_path / "own"), "exists": True, "models": ["some-model"]}
    assert caches["huggingface"]["exists"] is False


def test_threads_of_the_recipe_win(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json", "--engine.num_threads", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["cpu"]["torch_threads"] == 3
