"""Recipes: what is read, what is refused, and that all faults come at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.fields import SettingField, as_text, setting_fields
from jacobi_llm.configs.loader import dump_recipe, load_recipe, save_resolved
from jacobi_llm.configs.schema import Auto, FillPolicy, Recipe, Window


def faults_of(config: str | None = None, overrides: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(config, overrides)
    assert caught.value.exit_code == 2
    assert all("\n" not in fault for fault in caught.value.faults)
    return caught.value.faults


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def test_nothing_given_is_the_defaults() -> None:
    assert load_recipe() == Recipe()


def test_shipped_name_path_and_flags(recipe_file: Path) -> None:
    assert load_recipe("math").collect.output == "runs/math/trajectories"
    recipe_file.write_text("collect:\n  window: 8\ntrain:\n")
    assert load_recipe(str(recipe_file)).collect.window == [8]
    assert load_recipe(str(recipe_file), {"collect.window": "4,8"}).collect.window == [4, 8]


def test_values_of_every_kind_from_flags() -> None:
    recipe = load_recipe(
        None,
        {
            "train.lr": "1e-4",
            "train.betas": "0.8,0.9",
            "train.gradient-checkpointing": "yes",
            "collect.limit": "null",
            "collect.output": "007",
            "eval.fill": "prompt_draw",
            "bench.windows": "[1, 4, Auto]",
            "generate.window": "auto",
            "eval.window": "4",
            "bench.modes": "block,sliding",
            "lora.target_modules": "q_proj,v_proj",
            "generate.prompt": "yes: [no",
        },
    )
    assert recipe.train.lr == 1e-4
    assert recipe.train.betas == (0.8, 0.9)
    assert recipe.train.gradient_checkpointing is True
    assert recipe.collect.limit is None
    assert recipe.collect.output == "007"
    assert recipe.eval.fill is FillPolicy.PROMPT_DRAW
    assert recipe.bench.windows == [1, 4, Auto.AUTO]
    assert (recipe.generate.window, recipe.eval.window) == (Auto.AUTO, 4)
    assert [str(mode) for mode in recipe.bench.modes] == ["block", "sliding"]
    assert recipe.lora.target_modules == ["q_proj", "v_proj"]
    assert recipe.generate.prompt == "yes: [no"
    assert load_recipe(None, {"lora.target_modules": "all-linear"}).lora.target_modules == "all-linear"


def test_values_of_every_kind_from_yaml(recipe_file: Path) -> None:
    recipe_file.write_text(
        "train:\n  lr: 1e-4\n  betas: [0.8, 0.9]\n  max-steps: 010\ncollect:\n  output: 2024\n  limit: ~\n"
        "generate:\n  prompt: 'null'\nlora:\n  target_modules: [q_proj]\nbench:\n  windows:\n  - 2\n"
    )
    recipe = load_recipe(str(recipe_file))
    assert recipe.train.lr == 1e-4
    assert recipe.train.max_steps == 10  # YAML 1.1 would read octal 8
    assert recipe.collect.output == "2024"
    assert recipe.collect.limit is None
    assert recipe.generate.prompt == "null"
    assert recipe.lora.target_modules == ["q_proj"]
    assert recipe.bench.windows == [2]


def test_three_wrong_keys_are_told_at_once_with_line_and_suggestion(recipe_file: Path) -> None:
    recipe_file.write_text("collect:\n  windw: 3\n  modle: x\ntrian:\n  lr: 1\n")
    assert faults_of(str(recipe_file)) == [
        f"{recipe_file}:2: unknown key collect.windw (did you mean collect.window?)",
        f"{recipe_file}:3: unknown key collect.modle (did you mean collect.model?)",
        f"{recipe_file}:4: unknown key trian (did you mean train?)",
    ]


def test_faults_of_file_and_flags_come_together(recipe_file: Path) -> None:
    recipe_file.write_text("collect:\n  window: 1\n  dtype: bf16\nbench:\n  windows: [1, x]\n  modes: block\n")
    faults = faults_of(str(recipe_file), {"train.lr": "fast", "engine.page-size": "0", "train.epoch": "1"})
    assert sorted(faults) == sorted(
        [
            f"{recipe_file}:2: collect.window = 1: it must be at least 2",
            f"{recipe_file}:3: collect.dtype = bf16: use one of bfloat16, float32, float64 (did you mean bfloat16?)",
            f"{recipe_file}:5: bench.windows = x: give a whole number, or auto",
            "--train.lr fast: give a number",
            "--engine.page-size 0: it must be at least 1",
            "unknown key train.epoch (did you mean train.epochs?)",
        ]
    )


def test_a_wrong_value_of_the_file_is_told_even_when_a_flag_replaces_it(recipe_file: Path) -> None:
    recipe_file.write_text("collect:\n  window: 1\n")
    assert faults_of(str(recipe_file), {"collect.window": "8"}) == [
        f"{recipe_file}:2: collect.window = 1: it must be at least 2"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("collect:\n  window: 4\n  window: 8\n", ":3: collect.window is set twice (first in line 2)"),
        ("collect:\n  max_tokens: 4\n  max-tokens: 8\n", ":3: collect.max_tokens is set twice (first in line 2)"),
        ("collect: {}\ncollect: {}\n", ":2: collect is set twice (first in line 1)"),
        ("collect:\n  window: [4\n", ":3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2\n", ":2: not valid YAML: but found another document"),
        ("- collect\n", ":1: a recipe is a mapping of sections, such as 'collect:'"),
        ("collect: 4\n", ":1: collect is a section: write its keys below it, indented"),
        ("train:\n  lr: [4]\n", ":2: train.lr = a list: it takes one value"),
        ("bench:\n  windows: {a: 1}\n", ":2: bench.windows = a mapping: it takes a list of plain values"),
        ("bench:\n  windows: []\n", ":2: bench.windows = []: give at least 1 value, such as 1,8,16"),
        ("bench:\n  windows: [0]\n", ":2: bench.windows = 0: it must be at least 1"),
        ("train:\n  betas: [0.9]\n", ":2: train.betas = [0.9]: give 2 values, such as 0.9,0.95"),
        ("train:\n  betas: [0.9, 0.9, 0.9]\n", ":2: train.betas = [0.9, 0.9, 0.9]: give 2 values, such as 0.9,0.95"),
        ("train:\n  lr: .inf\n", ":2: train.lr = .inf: give a number"),
        ("train:\n  lr: inf\n", ":2: train.lr = inf: give a finite number"),
        ("train:\n  lr:\n", ":2: train.lr = null: it needs a value"),
        ("collect:\n  window: true\n", ":2: collect.window = true: give a whole number"),
        ("generate:\n  window: many\n", ":2: generate.window = many: give a whole number, or auto"),
        ("generate:\n  window: 2000\n", ":2: generate.window = 2000: it must be at most 1024"),
        ("collect:\n  window: [4, 4]\n", ":2: collect.window = [4, 4]: the same window twice; give each once"),
        ("collect:\n  temperature: 1e-4\n", ":2: collect.temperature = 1e-4: give 0 (greedy), or at least 0.001"),
        ("collect:\n  window: 4.5\n", ":2: collect.window = 4.5: give a whole number"),
        ("window: 4\n", ":1: unknown key window (did you mean collect.window or eval.window or generate.window?)"),
        ("train:\n  lora_rank: 4\n", ":2: unknown key train.lora_rank (did you mean lora.rank?)"),
        ("collect:\n  ? [a]\n  : 4\n", ":2: keys are plain words"),
    ],
)
def test_one_fault(recipe_file: Path, text: str, fault: str) -> None:
    recipe_file.write_text(text)
    assert faults_of(str(recipe_file)) == [f"{recipe_file}{fault}"]


def test_files_that_cannot_be_read(recipe_file: Path, tmp_path: Path) -> None:
    assert faults_of("mth") == [
        "--config mth: no shipped recipe has this name (did you mean math?); there are math, python, quickstart, smoke"
    ]
    assert faults_of(str(recipe_file)) == [f"{recipe_file}: no such file"]
    assert "is a folder" in faults_of(str(tmp_path))[0]
    recipe_file.write_bytes(b"collect:\n  output: \xff\n")
    assert faults_of(str(recipe_file)) == [f"{recipe_file}: is not UTF-8 text"]
    recipe_file.write_text("[" * 100_000)
    assert "not valid YAML" in faults_of(str(recipe_file))[0]


def test_flag_faults_are_told_when_the_file_cannot_be_read() -> None:
    assert len(faults_of("mth", {"train.lr": "fast"})) == 2


def test_resolved_config_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe("math", {"generate.prompt": "null ", "train.lr": "3e-5", "collect.output": "naïve: #1"})
    path = save_resolved(recipe, tmp_path / "run" / "a")
    assert path.name == "config.yaml"
    assert load_recipe(str(path)) == recipe
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]
    assert path.read_text() == dump_recipe(recipe)


def test_resolved_config_into_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        save_resolved(Recipe(), tmp_path / "file" / "run")


@given(
    prompt=st.none() | st.text(st.characters(blacklist_categories=("Cs",))),
    lr=st.floats(min_value=1e-12, max_value=1e3),
    limit=st.none() | st.integers(1, 10**9),
    windows=st.lists(st.integers(1, 1024) | st.just(Auto.AUTO), min_size=1, max_size=4),
)
def test_any_recipe_survives_yaml(
    tmp_path_factory: pytest.TempPathFactory, prompt: str | None, lr: float, limit: int | None, windows: list[Window]
) -> None:
    recipe = Recipe()
    recipe.generate.prompt = prompt
    recipe.train.lr = lr
    recipe.collect.limit = limit
    recipe.bench.windows = windows
    path = save_resolved(recipe, tmp_path_factory.getbasetemp() / "any")
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("', '", [", "]),
        ('"\\n"', ["\n"]),
        ("a, b", ["a, b"]),
        ("['a, ', b]", ["a, ", "b"]),
        ("null", None),
        ("'null'", ["null"]),
    ],
)
def test_stop_strings_in_a_recipe(tmp_path: Path, text: str, stop: list[str] | None) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"generate:\n  stop: {text}\n", encoding="utf-8")
    recipe = load_recipe(str(path))
    assert recipe.generate.stop == stop
    assert load_recipe(str(save_resolved(recipe, tmp_path))) == recipe


@pytest.mark.parametrize("setting", setting_fields().values(), ids=lambda setting: setting.key)
def test_every_default_can_be_typed(setting: SettingField) -> None:
    default = setting.info.get_default(call_default_factory=True)
    recipe = load_recipe(None, {setting.key: as_text(default)})
    assert getattr(getattr(recipe, setting.section), setting.name) == default
