"""Names in, models out: resolves a model name, refuses what the engine cannot run, loads weights and tokenizer.

    loaded = load_model("smollm2-135m", dtype=Dtype.BFLOAT16)

A name is the embedded ``smollm2-135m`` (no hub needed), a folder with ``config.json``, or a hub id. Only safetensors
are read. Every refusal is one line that says what was asked, what was found and what to do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jacobi_llm.configs.checkpoint import load_checkpoint_config
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Dtype
from jacobi_llm.infer.adapters import check_adapter_folder
from jacobi_llm.infer.embedded import EMBEDDED_NAME, embedded_model_dir
from jacobi_llm.infer.quiet import quiet_libraries

HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_REMEDY = f"give a folder with config.json, a hub id (owner/name), or {EMBEDDED_NAME}"

_RECURRENT = "its layers keep a recurrent state, which cannot be rolled back to the accepted tokens"
_MLA = "its multi-head latent attention keeps compressed K/V, which the paged attention backends cannot read"
_SINKS = "its attention sinks change the softmax, which the attention backends do not do"
_ALIBI = "it adds position biases (ALiBi) inside its own attention code"
_SPARSE = "its attention picks keys by a learned index"
_BIDIRECTIONAL = "it is an encoder, whose attention is not causal"

# model_type -> why. Families that no field of the config gives away, or whose reason deserves better words.
_REFUSED_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("bloom", "mpt", "falcon"), _ALIBI),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "kimi_k2"), _MLA),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), _SPARSE),
    **dict.fromkeys(("gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), _SINKS),
    **dict.fromkeys(("doge", "diffllama"), "it changes masks or weights inside its own attention code"),
    **dict.fromkeys(
        ("hrm_text", "dory"), "it runs the same layers several times in one pass, and each run needs K/V of its own"
    ),
    **dict.fromkeys(("git", "got_ocr2"), "its text layers do not take another attention implementation"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "it drafts for another model, whose states it reads"
    ),
    "blt": "it reads bytes in patches of varying length, not tokens",
    **dict.fromkeys(
        (
            *(
                "mamba",
                "mamba2",
                "falcon_mamba",
                "rwkv",
                "xlstm",
                "recurrent_gemma",
                "jamba",
                "bamba",
                "zamba",
                "zamba2",
            ),
            *(
                "falcon_h1",
                "nemotron_h",
                "olmo_hybrid",
                "qwen3_next",
                "qwen3_5",
                "qwen3_5_moe",
                "kimi_linear",
                "minimax",
            ),
            *("lfm2", "lfm2_moe", "lfm3", "granitemoehybrid"),
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        (
            *("bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "electra"),
            *("data2vec-text", "ernie", "xmod", "bert-generation", "roc_bert"),
        ),
        _BIDIRECTIONAL,
    ),
}
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LAYER_REASONS = {
    "chunked_attention": "its chunked attention has a visibility rule that the attention backends do not have",
    "indexed_attention": _SPARSE,
}
# These narrow their mask to the sliding window but do not name it to the attention function, which would see every key.
_MASK_ONLY_WINDOW = frozenset({"phimoe", "qwen2_moe"})
# These pick their frequencies from the longest position in a pass, so rows of other requests would change a row.
_REFUSED_ROPE = frozenset({"dynamic", "longrope"})


@dataclass
class LoadedModel:
    """A model ready to decode.

    Attributes:
        model: weights in eval mode, on their device, transformers' own attention (the engine installs its own backend).
        tokenizer: the tokenizer of the same checkpoint.
        name: the name as it was asked for.
        path: the folder or hub id that was read.
        eos_token_ids: every id that ends a completion, ascending; empty when the checkpoint names none.
        max_context: positions the model can read, prompt and completion together (tokens).
        acceptance_by_depth: item d-1 is P(guess at depth d accepted | depth d-1 accepted) as the checkpoint states it;
            empty when it states none.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: str
    eos_token_ids: tuple[int, ...]
    max_context: int
    acceptance_by_depth: tuple[float, ...] = ()


def resolve_model(name: str) -> str:
    """Return the folder or hub id that ``name`` stands for.

    ``smollm2-135m`` becomes its folder in the user's cache, made on first use. An existing folder must hold a
    ``config.json``. Anything else has to look like a hub id and is returned unchanged; the hub is not asked yet.

    Raises:
        UsageError: the folder has no config.json, or the name can be neither a folder nor a hub id.
        RunError: the embedded model could not be fetched.
    """
    if name.lower() == EMBEDDED_NAME:
        return str(embedded_model_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = " (this is a LoRA adapter: give it as adapter)" if (path / "adapter_config.json").is_file() else ""
            raise UsageError(f"model '{name}': the folder has no config.json{hint}; {_REMEDY}")
        return str(path)
    if path.is_file():
        raise UsageError(f"model '{name}': this is a file, not a folder; {_REMEDY}")
    if not _HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise UsageError(f"model '{name}': no such folder, and not a hub id; {_REMEDY}")
    return name


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``name`` (as in :func:`resolve_model`).

    The template of ``chat_template.jinja`` wins over one in ``tokenizer_config.json``, as in transformers.

    Raises:
        UsageError: unknown model, or a checkpoint without a tokenizer.
    """
    path = resolve_model(name)
    local_only = _check_reachable(name, path, needs_weights=False)
    return _read_tokenizer(name, path, local_only, trust_remote_code)


def load_model(
    name: str,
    *,
    dtype: Dtype,
    device: str = "cpu",
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load weights and tokenizer of ``name`` for decoding.

    Args:
        name: ``smollm2-135m``, a folder with config.json, or a hub id.
        dtype: precision of the weights.
        device: a torch device.
        adapter: LoRA folder in peft's format, merged into the weights.
        trust_remote_code: run the model's own Python code if it brings some.

    Raises:
        UsageError: unknown model, unsupported family, no safetensors, no tokenizer, or a bad adapter.
        RunError: weights that are there but cannot be read.
    """
    path = resolve_model(name)
    adapter_path = None if adapter is None else str(check_adapter_folder(adapter))
    local_only = _check_reachable(name, path, needs_weights=True)
    config = _read_config(name, path, local_only, trust_remote_code)
    check_supported(config)
    tokenizer = _read_tokenizer(name, path, local_only, trust_remote_code)
    model = _read_weights(name, path, dtype, local_only, trust_remote_code)
    if adapter_path is not None:
        model = _merge_adapter(model, adapter_path)
    model.eval()
    model.to(torch.device(device))  # type: ignore[arg-type]
    about = load_checkpoint_config(path if adapter_path is None else adapter_path)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        path=path,
        eos_token_ids=eos_token_ids(model),
        max_context=max_context(model.config, tokenizer),
        acceptance_by_depth=tuple(about.acceptance_by_depth) if about else (),
    )


def check_supported(config: PretrainedConfig) -> None:
    """Refuse, by name and with the reason, model families that the engine would decode wrongly.

    Raises:
        UsageError: encoder-decoder, encoder, recurrent or hybrid, MLA, ALiBi, attention sinks, chunked or indexed
            attention, rope scaling that depends on the batch, or no use of transformers' attention interface.
    """
    family = str(config.model_type)
    reason = _refusal(config)
    if reason is not None:
        raise UsageError(
            f"model family '{family}' is not supported: {reason}; use a causal decoder such as llama or qwen3"
        )


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return every end-of-sequence id that the generation config and the config name (each an id or a list)."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, _text_config(model.config)):
        value = getattr(source, "eos_token_id", None)
        if value is None:
            continue
        values: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
        found.update(int(token) for token in values if int(token) >= 0)
    return tuple(sorted(found))


def max_context(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Return the number of positions the model can read (tokens).

    Taken from the config; a checkpoint that states none falls back to the tokenizer's length, then to 2048.
    """
    text = _text_config(config)
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    stated = 0 if tokenizer is None else int(tokenizer.model_max_length)
    return stated if 0 < stated < 10**9 else 2048


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    try:
        return config.get_text_config(decoder=True)
    except (ValueError, AttributeError):
        return config


def _refusal(config: PretrainedConfig) -> str | None:
    """Return why this config cannot run, or None when it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    text = _text_config(config)
    for part in (config, text):
        family_reason = _REFUSED_FAMILIES.get(str(part.model_type))
        if family_reason is not None:
            return family_reason
    for layer_type in sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _KNOWN_LAYER_TYPES):
        return _LAYER_REASONS.get(layer_type, _RECURRENT if "linear" in layer_type else f"it has '{layer_type}' layers")
    if getattr(text, "kv_lora_rank", None):
        return _MLA
    if getattr(text, "alibi", False):
        return _ALIBI
    sliding_window = getattr(text, "sliding_window", None)
    if text.model_type in _MASK_ONLY_WINDOW and sliding_window and sliding_window < max_context(text):
        return f"it does not name its sliding window of {sliding_window} tokens to the attention backends"
    refused_rope = sorted(_rope_types(text) & _REFUSED_ROPE)
    if refused_rope:
        return f"its rope scaling '{refused_rope[0]}' depends on the longest request in the batch"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if not _uses_attention_interface(model_class):
            return "it does not use transformers' attention interface"
    elif not getattr(config, "auto_map", None):
        return "it is not a causal language model"
    return None


def _uses_attention_interface(model_class: type) -> bool:
    # The flag is missing from a few families whose code does use the interface (stablelm), hence the second look.
    has_flag = bool(getattr(model_class, "_supports_attention_backend", False))
    return has_flag or hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Collect the rope types of all layers; transformers keeps one mapping, or one per layer type."""
    types: set[str] = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = getattr(config, key, None)
        if not isinstance(value, dict):
            continue
        for mapping in (value, *(inner for inner in value.values() if isinstance(inner, dict))):
            types.update(str(mapping[field]) for field in ("rope_type", "type") if isinstance(mapping.get(field), str))
    return types


def _check_reachable(name: str, path: str, *, needs_weights: bool) -> bool:
    """Make sure that ``path`` can be read; return True when only the local hub cache may be used.

    One short request replaces transformers' retries, which take minutes on a machine without network.
    """
    if Path(path).is_dir():
        if needs_weights:
            _check_safetensors(name, [file.name for file in Path(path).iterdir()])
        return True
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    is_cached = isinstance(try_to_load_from_cache(path, "config.json"), str)
    try:
        info = HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        raise UsageError(f"model '{name}': the hub wants a login for this model; log in to the hub first") from None
    except RepositoryNotFoundError:
        raise UsageError(f"model '{name}': no such folder, and the hub knows no such model; {_REMEDY}") from None
    except Exception as error:  # no network, offline mode, a proxy, a server fault: each library raises its own
        if is_cached:
            return True
        kind = type(error).__name__
        raise UsageError(f"model '{name}': no such folder, and the hub cannot be reached ({kind}); {_REMEDY}") from None
    if needs_weights:
        _check_safetensors(name, [sibling.rfilename for sibling in info.siblings or ()])
    return False


def _check_safetensors(name: str, files: list[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")))
    if pickles:
        raise UsageError(
            f"model '{name}': only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them to safetensors first"
        )
    raise UsageError(f"model '{name}': no weights found (*.safetensors)")


def _read_config(name: str, path: str, local_only: bool, trust_remote_code: bool) -> PretrainedConfig:
    try:
        with quiet_libraries():
            config = AutoConfig.from_pretrained(path, local_files_only=local_only, trust_remote_code=trust_remote_code)
    except Exception as error:  # a field of the wrong type raises the hub library's own error
        raise UsageError(f"model '{name}': its config.json cannot be used: {_one_line(error)}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def _read_tokenizer(name: str, path: str, local_only: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=local_only, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise UsageError(f"model '{name}': its tokenizer cannot be loaded: {_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or len(tokenizer) == 0:
        raise UsageError(f"model '{name}': the checkpoint has no tokenizer")
    return tokenizer


def _read_weights(name: str, path: str, dtype: Dtype, local_only: bool, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with quiet_libraries():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype.value),
                use_safetensors=True,
                local_files_only=local_only,
                trust_remote_code=trust_remote_code,
            )
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:  # safetensors, transformers and torch each raise their own for damaged files
        raise RunError(f"model '{name}': the weights in {path} cannot be loaded: {_one_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def _merge_adapter(model: PreTrainedModel, adapter_path: str) -> PreTrainedModel:
    from peft import PeftModel

    try:
        with quiet_libraries():
            merged = PeftModel.from_pretrained(model, adapter_path).merge_and_unload(safe_merge=True)
    except Exception as error:  # a wrong base model shows as KeyError, RuntimeError or ValueError
        raise UsageError(f"adapter '{adapter_path}': does not fit the model: {_one_line(error)}") from error
    assert isinstance(merged, PreTrainedModel)
    return merged


def _one_line(error: BaseException) -> str:
    """Return the first sentence-like line of an error, short enough for one report line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
