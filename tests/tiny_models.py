"""Tiny random models of many families, with a real tokenizer, for tests that need no download.

Weights are drawn with a large spread: with the usual small one, a random model repeats one token for ever, and a test
of a decoder would see nothing but that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from jacobi_llm.infer.models import LoadedModel, eos_token_ids, max_context

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
EOS_TOKEN_IDS = (0, 2)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": list(EOS_TOKEN_IDS),
}
_SLIDING = ["sliding_attention", "full_attention"]

# family -> what differs from the common settings
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING, "query_pre_attn_scalar": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt2": {"n_positions": MAX_CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
    "gpt_neox": {"rotary_pct": 0.25},
    "olmo2": {},
    "stablelm": {"partial_rotary_factor": 0.25},
    "granite": {"attention_multiplier": 0.35, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "cohere": {},
    "cohere2": {"sliding_window": 8, "layer_types": _SLIDING},
    "starcoder2": {"sliding_window": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"head_dim": 8},
    "gpt_bigcode": {"n_positions": MAX_CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
    "gptj": {"n_positions": MAX_CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_dim": 4},
    "nemotron": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "olmo3": {"sliding_window": 8, "layer_types": _SLIDING},
    "exaone4": {"sliding_window": 8, "layer_types": _SLIDING},
    "biogpt": {},
    "vaultgemma": {"head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1,
    },
    # the grouped matrix product of experts has no float64 kernel
    "mixtral": {"num_local_experts": 4, "sliding_window": 8, "experts_implementation": "eager"},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"experts_implementation": "eager"},
}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
_NOT_TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), _SIZES),
    **dict.fromkeys(("gpt_neox", "persimmon", "biogpt"), ("num_key_value_heads",)),
    "opt": ("intermediate_size", "num_key_value_heads"),
}
_MULTI_HEAD = frozenset({"phi3", "olmo2"})


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, *, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Build a fresh random model in eval mode on the CPU.

    Args:
        family: a key of :data:`FAMILIES` (transformers' model_type).
        dtype: precision of the weights; drawn in float64 first, so that all dtypes hold the same numbers.
        seed: of the weights; torch's global generator is left as it was.
        overrides: settings of the config that replace the ones here.
    """
    settings = {key: value for key, value in _COMMON.items() if key not in _NOT_TAKEN.get(family, ())}
    if family in _MULTI_HEAD:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    config = AutoConfig.for_model(family, **{**settings, **FAMILIES[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        # Families draw some of their weights with a spread of their own, and set norms and biases to constants.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=config.initializer_range)
            elif "norm" not in name and "ln" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id = list(EOS_TOKEN_IDS)
    assert isinstance(model, PreTrainedModel)
    model.to(dtype=dtype)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte tokenizer (one token per UTF-8 byte) with a ChatML template; ids 0..2 are the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_loaded(
    family: str = "llama", dtype: torch.dtype = torch.float64, *, seed: int = 0, **overrides: Any
) -> LoadedModel:
    """Return :func:`tiny_model` with :func:`tiny_tokenizer`, as ``load_model`` would."""
    model = tiny_model(family, dtype, seed=seed, **overrides)
    tokenizer = tiny_tokenizer()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=f"tiny-{family}",
        path=f"tiny-{family}",
        eos_token_ids=eos_token_ids(model),
        max_context=max_context(model.config, tokenizer),
    )


def save_tiny_checkpoint(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a tiny model and its tokenizer as a folder that ``load_model`` reads, and return it."""
    tiny_model(family, dtype, seed=seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def one_product_rows(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a head with one number each that is not 0: a logit is then a single product.

    Equal rows give equal logits on every processor. Sums do not: a kernel may add up the last columns in another order.
    """
    num_rows, width = weight.shape
    rows = torch.zeros_like(weight)
    numbers = torch.arange(num_rows)
    signs = 1 - 2 * (numbers // width % 2)
    rows[numbers, numbers % width] = (signs * (1 + numbers // (2 * width) / 8)).to(weight.dtype)
    return rows
