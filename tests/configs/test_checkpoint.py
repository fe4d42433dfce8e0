"""jacobi_config.json: keys that stay, and clear words about a damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jacobi_llm
from jacobi_llm.configs.checkpoint import (
    CHECKPOINT_CONFIG_NAME,
    JacobiCheckpointConfig,
    load_checkpoint_config,
    save_checkpoint_config,
)
from jacobi_llm.configs.errors import RunError

CONTENT: dict[str, Any] = {
    "schema_version": 1,
    "mode": "merged",
    "window": 16,
    "fill": "repeat-last",
    "acceptance_by_depth": [0.8, 0.5, 0.0],
    "objective": "jacobi-forcing",
    "data_sha256": "0" * 64,
    "base_model": "smollm2-135m",
    "tokens_trained": 1000,
    "jacobi_llm_version": "0.1.0",
}


def write(folder: Path, content: object) -> Path:
    path = folder / CHECKPOINT_CONFIG_NAME
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_keys_are_fixed() -> None:
    assert list(JacobiCheckpointConfig.model_fields) == list(CONTENT)
    # vLLM takes any model whose config has this key for a diffusion model.
    assert "canvas_length" not in JacobiCheckpointConfig.model_fields
    assert all(info.description for info in JacobiCheckpointConfig.model_fields.values())


def test_round_trip(tmp_path: Path) -> None:
    config = JacobiCheckpointConfig.model_validate(CONTENT)
    path = save_checkpoint_config(config, tmp_path / "model")
    assert load_checkpoint_config(tmp_path / "model") == config
    assert json.loads(path.read_text()) == CONTENT


def test_version_is_filled_in() -> None:
    content = {key: value for key, value in CONTENT.items() if key not in ("schema_version", "jacobi_llm_version")}
    config = JacobiCheckpointConfig.model_validate(content)
    assert (config.schema_version, config.jacobi_llm_version) == (1, jacobi_llm.__version__)


def test_a_model_without_the_file_is_no_error(tmp_path: Path) -> None:
    assert load_checkpoint_config(tmp_path) is None
    assert load_checkpoint_config(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", ":1: not valid JSON"),
        ([1], "not a JSON object"),
        (CONTENT | {"schema_version": 2}, "schema_version 2 is newer than 1"),
        (CONTENT | {"acceptance_by_depth": [1.5]}, r"acceptance_by_depth\.0: .*less than or equal to 1"),
        (CONTENT | {"mode": "merge"}, "mode: .*'merged' or 'lossless'"),
        (CONTENT | {"data_sha256": "abc"}, "data_sha256"),
        (CONTENT | {"canvas_length": 16}, "canvas_length: Extra inputs"),
    ],
)
def test_damaged_file(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RunError, match=message) as caught:
        load_checkpoint_config(tmp_path)
    assert caught.value.faults[0].startswith(str(path))


def test_all_faults_at_once(tmp_path: Path) -> None:
    write(tmp_path, CONTENT | {"window": 0, "fill": "none"})
    with pytest.raises(RunError) as caught:
        load_checkpoint_config(tmp_path)
    assert len(caught.value.faults) == 2
