"""Writes model folders that every engine can read: safetensors, configs, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jacobi_llm.infer.quiet import quiet_libraries

_PRIVATE_CONFIG_KEYS = ("_model_name_or_path", "_name_or_path", "quantization_config", "is_local")
_PRIVATE_TOKENIZER_KEYS = ("is_local", "local_files_only", "backend", "name_or_path")


def save_model_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write ``model`` and ``tokenizer`` into ``folder``.

    Args:
        folder: exists and is empty.
        model: its config and generation config are written.
        tokenizer: its chat template becomes ``chat_template.jinja``.
        weights: tensors by name, each tied weight once; the model's own by default.
    """
    with quiet_libraries():
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        tokenizer.save_pretrained(folder)
    # safetensors writes files that only their owner can read; a shared folder needs the usual mode.
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)
    _rewrite(folder / "config.json", drop=_PRIVATE_CONFIG_KEYS)
    # transformers 5 names a class that version 4 cannot import; this one both know.
    is_fast = tokenizer.is_fast
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    _rewrite(
        folder / "tokenizer_config.json",
        drop=_PRIVATE_TOKENIZER_KEYS,
        **({"tokenizer_class": "PreTrainedTokenizerFast"} if is_fast else {}),
        **({"model_max_length": context} if context else {}),
    )


def _rewrite(path: Path, *, drop: tuple[str, ...], **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps({**kept, **values}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
