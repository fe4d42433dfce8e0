"""The collector: what it makes of prompts, and that it is clear about what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import EngineConfig, OnBadInput, TargetSource
from jacobi_llm.data import cli, collection
from jacobi_llm.data.collector import given_completion_ids
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prompt import Message, Prompt
from tests.data.trajectories import make_collector, make_prompts

LoadedFactory = Callable[..., LoadedModel]
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def loaded(tiny_loaded: LoadedFactory) -> LoadedModel:
    return tiny_loaded("llama", torch.float64)


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_completion_ends_where_the_context_ends(loaded: LoadedModel) -> None:
    prompt = make_prompts(1)[0]
    long = replace(prompt, text="x" * (loaded.max_context - 5))
    fills = replace(prompt, id="full", text="x" * loaded.max_context, source_index=1)
    got = make_collector(loaded).collect([long, fills])
    assert [len(row.completion_ids) for row in got.trajectories] == [5]
    got.trajectories[0].check()
    assert got.skipped == {"prompt fills the model's context": [1]}


def test_a_given_completion_is_cut_to_budget_and_context(loaded: LoadedModel) -> None:
    prompt = replace(make_prompts(1)[0], completion="y" * 50)
    near_end = replace(prompt, text="x" * (loaded.max_context - 7), source_index=1)
    one_left = replace(prompt, text="x" * (loaded.max_context - 1), source_index=2)
    nothing = replace(prompt, completion=None, source_index=3)
    prompts = [prompt, near_end, one_left, nothing]
    got = make_collector(loaded, target_source=TargetSource.GIVEN).collect(prompts)
    assert [len(row.completion_ids) for row in got.trajectories] == [20, 7, 1]
    assert [row.finish_reason for row in got.trajectories] == ["length"] * 3
    assert got.skipped == {"no completion given": [3]}
    for row in got.trajectories:
        row.check()


@pytest.mark.parametrize("max_tokens", [1, 7, 8, 9])
def test_blocks_cover_completions_of_any_length(loaded: LoadedModel, max_tokens: int) -> None:
    prompts = make_prompts(2)
    for row in make_collector(loaded, max_tokens=max_tokens).collect(prompts).trajectories:
        row.check()
        assert len(row.completion_ids) == max_tokens
        assert [len(row.target_of(block)) for block in row.blocks][-1] == (max_tokens - 1) % 8 + 1


def test_given_text_ends_at_the_eos_it_spells_out(loaded: LoadedModel) -> None:
    prompt = replace(make_prompts(1)[0], completion="ab<|im_end|>cd")
    ids = given_completion_ids(prompt, loaded, 99)
    assert len(ids) == 3
    assert ids[-1] == loaded.tokenizer.eos_token_id
    assert given_completion_ids(replace(prompt, completion="ab"), loaded, 99) == ids
    assert given_completion_ids(replace(prompt, completion="ab"), loaded, 2) == ids[:2]
    assert given_completion_ids(replace(prompt, completion=""), loaded, 9) == []


def test_long_prompts_are_counted_not_collected(loaded: LoadedModel) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    got = make_collector(loaded, max_prompt_tokens=12).collect(prompts)
    [(reason, indices)] = got.skipped.items()
    assert "max_prompt_tokens" in reason
    assert indices
    assert len(indices) + len(got.trajectories) == NUM_PROMPTS


def test_a_prompt_that_cannot_be_rendered_stops_or_is_counted(loaded: LoadedModel) -> None:
    good = make_prompts(1)[0]
    bad = Prompt("bad", "test", 9, (Message("user", "raw format takes no messages"),), None)
    with pytest.raises(UsageError, match="bad"):
        make_collector(loaded).collect([good, bad])
    got = make_collector(loaded, on_bad_input=OnBadInput.SKIP).collect([good, bad])
    assert got.skipped == {"prompt cannot be rendered": [9]}
    assert len(got.trajectories) == 1


def test_waves_fit_the_pages_and_change_nothing(loaded: LoadedModel) -> None:
    prompts = make_prompts(6)
    roomy = make_collector(loaded)
    tight = make_collector(loaded, EngineConfig(kv_memory_mib=1, page_size=16))
    tight.engine.pool._free = tight.engine.pool._free[:8]
    tight.engine.pool.num_pages = 8
    waves = list(tight._waves(tight._jobs_of(prompts, {})))
    assert len(waves) > 1
    assert tight.collect(prompts).trajectories == roomy.collect(prompts).trajectories
    assert tight.engine.scheduler.num_preemptions == 0
    assert tight.engine.pool.num_free == 8


def test_a_prompt_that_never_fits_is_a_clear_error_and_leaks_nothing(loaded: LoadedModel) -> None:
    prompts = make_prompts(2)
    tight = make_collector(loaded, EngineConfig(kv_memory_mib=1))
    tight.engine.pool._free = tight.engine.pool._free[:1]
    tight.engine.pool.num_pages = 1
    with pytest.raises(UsageError, match=r"engine\.kv_memory_mib"):
        tight.collect(prompts)
    assert tight.engine.pool.num_free == 1


# Not finite ---------------------------------------------------------------------------------------------------------


def poisoned(tiny_loaded: LoadedFactory, rows: slice) -> LoadedModel:
    loaded = tiny_loaded("llama", torch.float64)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[rows] = float("nan")  # type: ignore[index]
    return loaded


@pytest.mark.parametrize("source", list(TargetSource))
def test_a_model_of_nan_ends_with_one_line(
    tiny_loaded: LoadedFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: TargetSource,
) -> None:
    monkeypatch.setattr(collection, "load_model", lambda *_, **__: poisoned(tiny_loaded, slice(None)))
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{c}", "completion": "abcdef"}}\n' for c in "abc"))
    argv = ["collect", "--input", str(tmp_path / "p.jsonl"), "--split", "all", "--raw", "--dtype", "float64"]
    argv += ["--max-tokens", "20", "--target-source", source.value, "--output", str(tmp_path / "set")]
    assert cli.main(argv) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "no trajectory" in errors[0]
    assert "logits are not finite" in errors[0]


@pytest.mark.parametrize("wave_size", [1, 3])
def test_one_completion_that_meets_nan_costs_no_other(tiny_loaded: LoadedFactory, wave_size: int) -> None:
    # The byte '!' poisons whatever reads it.
    loaded = tiny_loaded("llama", torch.float64)
    token = loaded.tokenizer("!", add_special_tokens=False)["input_ids"][0]
    prompts = make_prompts(3)
    plain = make_collector(loaded).collect(prompts).trajectories
    assert all(token not in row.completion_ids for row in plain), "choose another byte"
    broken = poisoned(tiny_loaded, slice(token, token + 1))
    mixed = [prompts[0], replace(prompts[1], text="a!" + "b" * 60), prompts[2]]
    got = make_collector(broken, wave_size=wave_size).collect(mixed)
    assert got.skipped == {"logits are not finite": [prompts[1].source_index]}
    assert got.trajectories == [plain[0], plain[2]]
