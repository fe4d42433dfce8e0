"""Every shipped recipe and DeepSpeed file is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jacobi_llm.configs.loader import load_recipe, shipped_names

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEEPSPEED = sorted((CONFIGS / "deepspeed").glob("*.json"))


def test_the_recipes_that_the_docs_name_are_there() -> None:
    assert set(shipped_names()) >= {"math", "python", "quickstart", "smoke"}
    assert {path.stem for path in DEEPSPEED} == {"zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"}


@pytest.mark.parametrize("name", shipped_names())
def test_recipe_is_valid_and_its_steps_fit_together(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.train.data == recipe.collect.output == recipe.stats.path
    assert recipe.collect.output.startswith(f"runs/{name}/")
    assert recipe.train.output.startswith(f"runs/{name}/")
    assert recipe.train.global_batch_size % recipe.train.micro_batch_size == 0
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_deepspeed_file_is_valid(path: Path) -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    content = json.loads(path.read_text())
    assert set(content) <= {"zero_optimization", "zero_force_ds_cpu_optimizer"}, "the trainer fills in the rest"
    parsed = zero.DeepSpeedZeroConfig(**content["zero_optimization"])
    assert int(parsed.stage) == int(path.stem[4])
    assert (parsed.offload_optimizer is not None) == path.stem.endswith("-offload")
