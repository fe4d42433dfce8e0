"""Random LoRA adapters in peft's format, and the base model with each of them merged by peft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

# One on every linear layer, one on attention alone with another rank and scale.
_SETTINGS: dict[str, dict[str, Any]] = {
    "everywhere": {"r": 6, "lora_alpha": 10, "target_modules": "all-linear"},
    "attention": {"r": 17, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
}
_GPT2: dict[str, dict[str, Any]] = {
    "everywhere": _SETTINGS["everywhere"] | {"fan_in_fan_out": True},
    "attention": _SETTINGS["attention"] | {"target_modules": ["c_attn"], "fan_in_fan_out": True},
}
ADAPTERS = tuple(_SETTINGS)


def save_adapters(folder: Path, model: PreTrainedModel, spread: float) -> dict[str, Path]:
    """Write an adapter of each name for ``model``.

    Args:
        folder: gets a folder for each.
        model: stays as it is.
        spread: standard deviation of the adapters' weights.
    """
    settings = _GPT2 if model.config.model_type == "gpt2" else _SETTINGS
    paths = {}
    for seed, (name, config) in enumerate(settings.items()):
        draw = torch.Generator().manual_seed(seed)
        with _quiet_peft():
            tuned = get_peft_model(copy.deepcopy(model), LoraConfig(**config), autocast_adapter_dtype=False)
            for parameter_name, parameter in tuned.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * spread)
            tuned.save_pretrained(folder / name)
        paths[name] = folder / name
    return paths


def merged(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A copy of ``model`` with the adapter at ``path`` merged by peft."""
    with _quiet_peft():
        tuned = PeftModel.from_pretrained(copy.deepcopy(model), str(path), autocast_adapter_dtype=False)
        whole = tuned.merge_and_unload()
    assert isinstance(whole, PreTrainedModel)
    return whole.eval()


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """It warns of weights that are tied, which no adapter here touches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
