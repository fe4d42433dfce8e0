"""Every causal language model of transformers at tiny size: the engine gives its numbers, or refuses it by name.

Nothing else is allowed: a family that decodes wrongly fails here. ``python -m pytest -m slow`` runs it (minutes).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import AttentionBackend, CompileMode, EngineConfig
from jacobi_llm.infer.model_runner import make_runner
from jacobi_llm.infer.models import check_supported
from jacobi_llm.infer.row_group import RowGroup
from tests.infer.decoding import random_prompt

VOCAB_SIZE, MAX_CONTEXT, WINDOW = 300, 256, 8
# Settings by every name that families have for them; each config takes those that it knows.
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_CONTEXT,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_layer_start_index": 0,
    "query_pre_attn_scalar": 8,
    "n_shared_experts": 1,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "image_size": 32,
    "patch_size": 16,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# Families with sizes of their own.
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Build a config whose sizes are tiny wherever it has one of the names above."""
    default = config_class()
    known = default.to_dict()
    settings: dict[str, Any] = {}
    for name, value in _TINY.items():
        own_name = getattr(config_class, "attribute_map", {}).get(name, name)
        if own_name in known and not (name == "sliding_window" and known[own_name] is None):
            settings[own_name] = value
    own = _OWN.get(config_class.model_type, {})
    for part in config_class.sub_configs:
        sub_config = getattr(default, part, None)
        if isinstance(sub_config, PretrainedConfig) and part not in own:
            settings[part] = tiny_config(type(sub_config)).to_dict()
    return config_class(**{**settings, **own})


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A random model whose numbers spread enough for errors to show."""
    config._experts_implementation = "eager"
    with torch.device("meta"):
        num_weights = AutoModelForCausalLM.from_config(config).num_parameters()
    assert num_weights < 20_000_000, f"a size is missing above: {num_weights} weights"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
            elif "norm" not in name and "ln" not in name:
                nn.init.normal_(parameter, std=0.1)
    assert isinstance(model, PreTrainedModel)
    return model.to(dtype=torch.float64).eval()


@torch.no_grad()
def is_telling(model: PreTrainedModel) -> bool:
    """Whether the last logits depend on a token within the window, and differ from each other."""
    text = list(random_prompt(random.Random(0), 44))
    one, other = (
        model(input_ids=torch.tensor([[*text[:-3], token, *text[-2:]]]), use_cache=False).logits[0, -1]
        for token in (5, 6)
    )
    return bool((one - other).abs().max() > 1e-3 * one.std() > 0)


@torch.no_grad()
def largest_difference(model: PreTrainedModel, engine_config: EngineConfig) -> float:
    """Logits of a text read in chunks, windows of one row and of several, beside another request, against one pass.

    Relative to the spread of the logits.
    """
    draw = random.Random(0)
    text, other = list(random_prompt(draw, 44)), list(random_prompt(draw, 30))
    expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    runner = make_runner(model, engine_config, 12, "tiny")
    logits, at = [], 0
    for chunk in (19, 1, 8, 16):
        groups = [
            RowGroup([5, 1, 7], at // 2, other[at // 2 : at // 2 + 5]),
            RowGroup([3, 9, 0], at, text[at : at + chunk], num_logit_rows=chunk),
        ]
        logits.append(runner.forward(groups)[1:])
        at += chunk
    return float((torch.cat(logits) - expected).abs().max() / expected.std())


def verdict(model_type: str) -> tuple[str, str]:
    """('refused', why), ('equal', figure), or ('wrong', what) for one family."""
    config_class = next(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.model_type == model_type)
    try:
        check_supported(config_class(**_OWN.get(model_type, {})))
        config = tiny_config(config_class)
        check_supported(config)
    except UsageError as error:
        return "refused", str(error)
    model = build(config)
    if not is_telling(model):
        return "says nothing", "the logits do not depend on the tokens"
    differences = {}
    for name, engine_config in {
        "sdpa": EngineConfig(attention=AttentionBackend.SDPA),
        "native": EngineConfig(attention=AttentionBackend.NATIVE, compile=CompileMode.OFF),
        "packed": EngineConfig(attention=AttentionBackend.NATIVE, compile=CompileMode.OFF, batch_invariant=True),
    }.items():
        try:
            differences[name] = largest_difference(model, engine_config)
        except UsageError as error:
            if name != "packed" or "batch_invariant" not in str(error):
                return "refused late", str(error)
    worst = max(differences.values())
    # Some families compute softmax or routing in float32 whatever their weights are.
    return "equal" if worst < 1e-5 else "wrong", f"{worst:.1e} ({', '.join(differences)})"


MODEL_TYPES = sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_equal_or_refused(model_type: str) -> None:
    try:
        kind, detail = verdict(model_type)
    except ImportError as error:
        pytest.skip(f"it wants a package that is not there: {error}")
    assert kind in ("equal", "refused"), detail
