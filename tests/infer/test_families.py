"""Greedy equality over tiny random models of many families in float64: 0 differing ids; and the families refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import DecodeMode, Dtype, FillPolicy
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, check_supported, load_model
from tests.infer.decoding import decode_ar, generate, make_engine, make_request, random_prompt, run_checked
from tests.tiny_models import FAMILIES, one_product_rows, save_tiny_checkpoint, tiny_loaded

WINDOWS = (1, 2, 4, 8, 16, 32)
NUM_TOKENS = 32
EXPERTS = ("mixtral", "qwen3_moe")
PROMPT_LENGTHS = (1, 4, 7, 8, 9, 15, 20, 33)


@cache
def reference(family: str) -> tuple[LoadedModel, dict[tuple[int, ...], list[int]]]:
    """A model and its greedy answers, which do not depend on a cache: transformers' generate says the same.

    Sliding windows are 8 tokens long: crossed by the longer prompts, by windows and by every answer (case D11).
    """
    loaded = tiny_loaded(family)
    draw = random.Random(family)
    answers = {}
    for length in PROMPT_LENGTHS:
        prompt = random_prompt(draw, length)
        answers[prompt] = decode_ar(loaded.model, prompt, NUM_TOKENS)
        assert generate(loaded.model, prompt, NUM_TOKENS) == answers[prompt]
    distinct = {token for answer in answers.values() for token in answer}
    assert len(distinct) > 25, "references that repeat themselves prove little"
    return loaded, answers


BACKENDS = ("sdpa", "native", "packed")


def engine_on(backend: str, family: str, loaded: LoadedModel, **config: Any) -> LLMEngine:
    """Build an engine on a path that this family can take: small pages where the attention allows them."""
    if backend == "sdpa":
        return make_engine(loaded, page_size=4, attention="sdpa", **config)
    if backend == "packed" and family in EXPERTS:
        pytest.skip("its experts are no linear layers: refused by name")
    return make_engine(loaded, attention="native", batch_invariant=backend == "packed", **config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family: str, backend: str) -> None:
    loaded, answers = reference(family)
    engine = engine_on(backend, family, loaded)
    prompts = list(answers)
    for window, prompt in zip(WINDOWS, prompts[1:], strict=False):
        output = run_checked(engine, [make_request("a", prompt, NUM_TOKENS, window=window)]).outputs["a"]
        assert list(output.token_ids) == answers[prompt]


def check_mixed_batch(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], backend: str, family: str
) -> None:
    """Mixed windows, modes and fills, joining at different steps, prefill in chunks, too few pages for all."""
    draw = random.Random(1)
    for has_room, max_num_rows in ((True, 2048), (False, 21)):
        num_pages = 400 if has_room else 24 if backend == "sdpa" else 6
        engine = engine_on(backend, family, loaded, num_pages=num_pages, max_num_rows=max_num_rows)
        windows = draw.sample([*WINDOWS, 3, 16], k=8)
        requests = [
            make_request(
                str(number),
                prompt,
                NUM_TOKENS,
                window=window,
                mode=draw.choice(list(DecodeMode)),
                fill=draw.choice(list(FillPolicy)),
            )
            for number, (prompt, window) in enumerate(zip(answers, windows, strict=True))
        ]
        tape = run_checked(engine, requests, join_at=[draw.randint(0, 6) for _ in requests])
        for request in requests:
            assert list(tape.outputs[request.id].token_ids) == answers[request.prompt_ids]
        assert (engine.scheduler.num_preemptions == 0) == has_room


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_of_8(family: str, backend: str) -> None:
    loaded, answers = reference(family)
    check_mixed_batch(loaded, answers, backend, family)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("stablelm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_kinds_of_one_family(family: str, overrides: dict[str, Any], backend: str) -> None:
    """MQA, as many K/V heads as heads, biases, tied heads, strong caps, the narrowest window, windows by layer."""
    loaded = tiny_loaded(family, **overrides)
    draw = random.Random(family)
    prompts = [random_prompt(draw, length) for length in PROMPT_LENGTHS]
    answers = {prompt: decode_ar(loaded.model, prompt, NUM_TOKENS) for prompt in prompts}
    check_mixed_batch(loaded, answers, backend, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_ties_go_to_the_lowest_id(family: str) -> None:
    """Equal rows of the head, next to each other and far apart: every choice is a tie of two (case D02)."""
    loaded = tiny_loaded(family)
    head = loaded.model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    head.weight.data.copy_(one_product_rows(head.weight.data))
    for tensor in (head.weight.data, *([] if head.bias is None else [head.bias.data])):
        tensor[1:128:2] = tensor[0:128:2]
        tensor[192:256] = tensor[128:192]
        tensor[256:] = tensor[:3]
    prompt = random_prompt(random.Random(2), 9)
    expected = decode_ar(loaded.model, prompt, NUM_TOKENS)
    for window in WINDOWS:
        [output] = make_engine(loaded).generate([make_request("a", prompt, NUM_TOKENS, window=window)])
        assert all((token < 128 and token % 2 == 0) or 128 <= token < 192 for token in output.token_ids)
        assert list(output.token_ids) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_here_loads_from_a_folder(family: str, tmp_path: Path) -> None:
    """Its checkpoint is accepted, whatever attention transformers itself can give it (gemma2 has no sdpa there)."""
    save_tiny_checkpoint(tmp_path, family)
    loaded = load_model(str(tmp_path), dtype=Dtype.FLOAT32)
    assert loaded.eos_token_ids == (0, 2)
    assert loaded.max_context == 256
    prompt = random_prompt(random.Random(3), 9)
    expected = decode_ar(loaded.model, prompt, 8)
    [output] = make_engine(loaded).generate([make_request("a", prompt, 8, window=4)])
    assert list(output.token_ids) == expected


@pytest.mark.parametrize(
    "family",
    [
        *("falcon", "bloom", "mpt", "mamba", "mamba2", "rwkv", "jamba", "recurrent_gemma", "gpt_oss", "deepseek_v2"),
        *("flint", "granite_swa", "mimo_v2_flash", "dory", "git", "got_ocr2", "roc_bert"),
        *("deepseek_v3", "qwen3_next", "falcon_h1", "lfm2", "t5", "bart", "bert", "llama4_text", "doge", "diffllama"),
    ],
)
def test_families_the_engine_would_decode_wrongly_are_refused_by_name(family: str) -> None:
    with pytest.raises(UsageError, match=rf"^model family '{family}' is not supported: .+"):
        check_supported(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe"])
def test_sliding_window_that_only_the_mask_knows_is_refused(family: str) -> None:
    config = AutoConfig.for_model(family, max_position_embeddings=4096)
    config.sliding_window = 1024
    with pytest.raises(UsageError, match=f"'{family}' is not supported: it does not name its sliding window of 1024"):
        check_supported(config)
    config.sliding_window = 4096
    check_supported(config)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(rope_type: str) -> None:
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UsageError, match=f"'llama' is not supported: its rope scaling '{rope_type}'"):
        check_supported(config)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_rope_that_is_fixed_at_load_is_exact(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    loaded = tiny_loaded("llama", rope_parameters=rope)
    check_supported(loaded.model.config)
    prompt = random_prompt(random.Random(4), 60)
    expected = decode_ar(loaded.model, prompt, NUM_TOKENS)
    for window in (1, 16):
        [output] = make_engine(loaded).generate([make_request("a", prompt, NUM_TOKENS, window=window)])
        assert list(output.token_ids) == expected


def test_a_model_that_goes_around_the_attention_interface_is_refused(
    tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of its own code may ignore the implementation set on its config; then nothing reaches our pages."""
    loaded = tiny_loaded("llama")
    for layer in loaded.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(UsageError, match="LlamaForCausalLM does not call the attention it was given"):
        make_engine(loaded).generate([make_request("a", (5, 6), 4)])


def test_a_layer_that_attends_twice_in_a_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second K/V would overwrite the first, which later passes need."""
    loaded = tiny_loaded("llama")
    loaded.model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UsageError, match="layer 0 of LlamaAttention attends more than once in a pass"):
        make_engine(loaded).generate([make_request("a", (5, 6), 4)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [4, 16])
def test_lower_precisions_run(family: str, dtype: torch.dtype, page_size: int) -> None:
    """No equality is claimed for random weights here; budgets and pages hold all the same."""
    loaded = tiny_loaded(family, dtype)
    requests = [make_request(str(window), (5, 6, 7), 20, window=window) for window in WINDOWS]
    engine = make_engine(loaded, page_size=page_size)
    tape = run_checked(engine, requests)
    assert all(len(output.token_ids) == 20 for output in tape.outputs.values())
    assert engine.runner.backend.keys[0].dtype == dtype
