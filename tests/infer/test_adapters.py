"""LoRA adapters beside the base weights: exact against peft's merged models, mixed in one batch; refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from jacobi_llm.infer.request import DecodeParams, Request
from tests.infer.decoding import decode_ar, make_engine, random_prompt, run_checked
from tests.tiny_models import tiny_loaded, tiny_model

NUM_TOKENS = 24
WINDOWS = (1, 2, 5, 16)
ALL_LINEAR: dict[str, Any] = {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"}
Q_AND_V: dict[str, Any] = {"r": 20, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
BY_LAYER: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["k_proj", "down_proj", "lm_head"],
    "rank_pattern": {"layers.1.self_attn.k_proj": 17, "down_proj": 3},
    "alpha_pattern": {"^model.layers.0.mlp.down_proj": 9.0},
}


def save_adapter(folder: Path, model: PreTrainedModel, *, seed: int = 1, spread: float = 0.3, **config: Any) -> Path:
    """Let peft write a random adapter for ``model``, which is changed on the way."""
    tuned = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * spread)
    tuned.save_pretrained(folder)
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return peft's merge of an adapter into ``model``, in eval mode."""
    whole = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).merge_and_unload()
    assert isinstance(whole, PreTrainedModel)
    return whole.eval()


def request(id: str, prompt: tuple[int, ...], adapter: str | None, window: int) -> Request:
    return Request(id, prompt, DecodeParams(NUM_TOKENS, window=window), adapter=adapter)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_a_mixed_batch_gives_the_ids_of_the_merged_models(family: str, tmp_path: Path) -> None:
    """Two adapters and none, mixed windows, prompts in chunks, joining at different steps, preempted: 0 differ."""
    settings = {"a": ALL_LINEAR, "b": Q_AND_V, "c": BY_LAYER}
    if family == "gpt2":
        settings = {"a": ALL_LINEAR, "b": {"r": 3, "target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}}
    folders = {
        name: save_adapter(tmp_path / name, tiny_model(family), seed=number, **config)
        for number, (name, config) in enumerate(settings.items())
    }
    models = {None: tiny_model(family), **{name: merged(tiny_model(family), path) for name, path in folders.items()}}
    draw = random.Random(family)
    wanted = [(name, random_prompt(draw, draw.randint(1, 40)), window) for name in models for window in WINDOWS]
    answers = [decode_ar(models[name], prompt, NUM_TOKENS) for name, prompt, _ in wanted]
    assert len({tuple(decode_ar(model, wanted[-1][1], NUM_TOKENS)) for model in models.values()}) == len(models)
    for num_pages, max_num_rows in ((200, 2048), (6, 19)):
        engine = make_engine(tiny_loaded(family), num_pages=num_pages, max_num_rows=max_num_rows)
        for name, path in folders.items():
            engine.load_adapter(name, str(path))
        order = draw.sample(range(len(wanted)), k=len(wanted))
        requests = [request(str(i), wanted[i][1], wanted[i][0], wanted[i][2]) for i in order]
        tape = run_checked(engine, requests, join_at=[draw.randint(0, 9) for _ in order])
        for i in order:
            assert list(tape.outputs[str(i)].token_ids) == answers[i], (wanted[i][0], wanted[i][2])
        assert (engine.scheduler.num_preemptions > 0) == (num_pages == 6)


def test_known_pages_belong_to_an_adapter_and_not_to_its_name(tmp_path: Path) -> None:
    """One prompt, whose pages are known, under the base and two adapters; then a name goes to another adapter."""
    folders = {
        name: save_adapter(tmp_path / name, tiny_model("llama"), seed=number, **ALL_LINEAR)
        for number, name in enumerate("ab")
    }
    prompt = random_prompt(random.Random(5), 41)
    models = {None: tiny_model("llama"), **{name: merged(tiny_model("llama"), path) for name, path in folders.items()}}
    answers = {name: decode_ar(model, prompt, NUM_TOKENS) for name, model in models.items()}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    engine = make_engine(tiny_loaded("llama"))
    for name, path in folders.items():
        engine.load_adapter(name, str(path))
    for turn in range(2):
        for name, answer in answers.items():
            [output] = engine.generate([request(f"{turn} {name}", prompt, name, 4)])
            assert list(output.token_ids) == answer
    assert engine.scheduler.num_hit_tokens == 3 * 32
    engine.unload_adapter("a")
    engine.load_adapter("a", str(folders["b"]))
    [output] = engine.generate([request("renamed", prompt, "a", 4)])
    assert list(output.token_ids) == answers["b"]
