"""LoRA adapters beside the base weights: several at once, chosen per request, mixed in one pass.

    adapter = read_adapter("runs/train/adapter")
    adapters.add("mine", adapter)        # rows of groups that name "mine" are updated from now on

Peft's folders are read as they are: adapter_config.json and adapter_model.safetensors. An update is
x -> scale * B (A x), with scale alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Hu et al. 2021,
arXiv 2106.09685; Kalajdzievski 2023, arXiv 2312.03732). The operators of infer/csrc add it to the rows that ask for it;
the other rows keep their bits.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer.native_attention import NativeBackend
from jacobi_llm.infer.projections import Projections, weight_of

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
# Initialisations that leave the base weights alone; pissa, olora and their like change them, and the file does not.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", None)
# Settings of peft that change nothing once an adapter is trained, or that are read here.
_NEUTRAL_SETTINGS = frozenset(
    {
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        *("bias", "init_lora_weights", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)


@dataclass(frozen=True)
class LowRankUpdate:
    """The update of one linear layer: output += scale * B (A input).

    Attributes:
        a: [rank, in_features].
        b: [out_features, rank].
        scale: alpha / rank, or alpha / sqrt(rank).
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as its folder holds it.

    Attributes:
        path: the folder.
        updates: by the name of the layer in the base model.
        base_weights: weights of the base that peft saved along (it does when the head is a target), by name.
    """

    path: str
    updates: Mapping[str, LowRankUpdate]
    base_weights: Mapping[str, torch.Tensor]


def check_adapter_folder(adapter: str) -> Path:
    """Return the folder ``adapter``, which holds what peft saves.

    Raises:
        UsageError: no such folder, or a file is missing.
    """
    path = Path(adapter).expanduser()
    if not path.is_dir():
        raise UsageError(f"adapter '{adapter}': no such folder")
    if not (path / "adapter_config.json").is_file():
        raise UsageError(
            f"adapter '{adapter}': the folder has no adapter_config.json; give a LoRA folder saved by peft"
        )
    if not (path / "adapter_model.safetensors").is_file():
        raise UsageError(f"adapter '{adapter}': the folder has no adapter_model.safetensors")
    return path


def read_adapter(path: str) -> Adapter:
    """Read a LoRA folder in peft's format.

    Raises:
        UsageError: not such a folder, a damaged file, or an adapter that is more than plain LoRA, by what it is.
    """
    folder = check_adapter_folder(path)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except Exception as error:  # json, unicode and safetensors raise their own
        raise UsageError(f"adapter '{path}': it cannot be read: {str(error).splitlines()[0]}") from error
    reason = _refusal(config)
    if reason is not None:
        raise UsageError(f"adapter '{path}': {reason}; only plain LoRA can be loaded beside the base weights")
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    base_weights: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        match = _TENSOR.fullmatch(name)
        if match:
            matrices.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in name:
            raise UsageError(f"adapter '{path}': it holds {key}; only plain LoRA can be loaded beside the base weights")
        else:
            base_weights[name.replace(".base_layer.", ".")] = tensor
    if not matrices:
        raise UsageError(f"adapter '{path}': adapter_model.safetensors holds no LoRA matrices")
    updates = {layer: _update_of(path, layer, pair, config) for layer, pair in sorted(matrices.items())}
    return Adapter(path, updates, base_weights)


def _refusal(config: Any) -> str | None:
    """Return what makes an adapter more than plain LoRA, or None."""
    if not isinstance(config, dict) or "peft_type" not in config:
        return "its adapter_config.json is not peft's"
    if config["peft_type"] != "LORA":
        return f"its type is {config['peft_type']}"
    if config.get("bias", "none") != "none":
        return f"it trains biases (bias={config['bias']})"
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in _PLAIN_INITIALISATIONS:
        return f"its initialisation {initialisation} changes the base weights"
    for key in sorted(config.keys() - _NEUTRAL_SETTINGS):
        if config[key]:
            return f"it sets {key}"
    return None


def _update_of(path: str, layer: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> LowRankUpdate:
    missing = next((name for name in "AB" if name not in pair), None)
    if missing:
        raise UsageError(f"adapter '{path}': {layer} has no lora_{missing}")
    a, b = pair["A"], pair["B"]
    rank = int(_setting(config, "rank_pattern", "r", layer))
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UsageError(
            f"adapter '{path}': {layer} has matrices of {tuple(a.shape)} and {tuple(b.shape)}, its rank is {rank}"
        )
    alpha = float(_setting(config, "alpha_pattern", "lora_alpha", layer))
    return LowRankUpdate(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _setting(config: Mapping[str, Any], patterns: str, default: str, layer: str) -> Any:
    """The first pattern that matches the end of the name wins, as in peft (utils.other.get_pattern_key)."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return config[default]


class Adapters:
    """The adapters of one model runner."""

    def __init__(
        self, model: PreTrainedModel, backend: NativeBackend, projections: Projections, probe: Callable[[], int]
    ) -> None:
        """Find out which layers can take an update.

        Args:
            model: calls its own linear layers now.
            backend: its ``adapter_numbers`` is kept here.
            projections: of ``model``.
            probe: runs the model once and returns the number of rows.
        """
        self._model = model
        self._backend = backend
        self._projections = projections
        self._numbers = itertools.count()
        with _rows_seen(model, projections) as seen:
            num_rows = probe()
        self._layers = {name for name, counts in seen.items() if counts == [num_rows] or name == projections.head}

    @property
    def names(self) -> list[str]:
        return list(self._backend.adapter_numbers)

    def add(self, name: str, adapter: Adapter) -> None:
        """Make ``adapter`` known to later passes as ``name``.

        Raises:
            UsageError: the name is in use, or the adapter was made for another model.
        """
        if not name:
            raise UsageError(f"adapter '{adapter.path}': its name is empty")
        if name in self._backend.adapter_numbers:
            raise UsageError(f"adapter '{name}' is loaded already; unload it first or use another name")
        for layer, update in adapter.updates.items():
            self._check_fits(name, layer, update)
        for weight_name, weight in adapter.base_weights.items():
            self._check_is_base(name, weight_name, weight)
        number = next(self._numbers)
        for layer, update in adapter.updates.items():
            index, first, _ = self._projections.places[layer]
            a, b = update.a.to(self._model.dtype), update.b.to(self._model.dtype)
            torch.ops.jacobi_llm.add_low_rank_update(self._backend.handle, number, index, a, b, update.scale, first)
        self._backend.adapter_numbers[name] = number

    def remove(self, name: str) -> None:
        """Forget an adapter; no group of a later pass may name it.

        Raises:
            UsageError: no such adapter.
        """
        self.check_known(name)
        torch.ops.jacobi_llm.drop_adapter(self._backend.handle, self._backend.adapter_numbers.pop(name))

    def check_known(self, name: str) -> None:
        """Refuse a name that no loaded adapter has.

        Raises:
            UsageError: it lists those that are loaded.
        """
        if name not in self._backend.adapter_numbers:
            raise UsageError(unknown_adapter(name, self.names))

    def _check_fits(self, name: str, layer: str, update: LowRankUpdate) -> None:
        kind = self._model.config.model_type
        if layer not in self._projections.places:
            raise UsageError(f"adapter '{name}': {layer} is not a linear layer of this model ({kind})")
        if layer not in self._layers:
            raise UsageError(
                f"adapter '{name}': {layer} of model type {kind} does not see every row of a pass (an expert, say); "
                "merge this adapter at load instead"
            )
        weight, _ = weight_of(self._model.get_submodule(layer))
        if (update.b.shape[0], update.a.shape[1]) != tuple(weight.shape):
            raise UsageError(
                f"adapter '{name}': its update of {layer} is {update.b.shape[0]} x {update.a.shape[1]}, the layer "
                f"{weight.shape[0]} x {weight.shape[1]}; it was made for another model"
            )

    def _check_is_base(self, name: str, weight_name: str, saved: torch.Tensor) -> None:
        """Peft saves the embeddings along when the head is a target; they must be the ones that are there."""
        own = self._model.state_dict().get(weight_name)
        if (
            own is None
            or own.shape != saved.shape
            or not (torch.equal(saved.to(own.dtype), own) or torch.equal(saved, own.to(saved.dtype)))
        ):
            raise UsageError(
                f"adapter '{name}': it brings {weight_name} of its own; only plain LoRA can be loaded beside the base "
                "weights, merge this adapter at load instead"
            )


def adapter_folders(settings: Sequence[str]) -> dict[str, str]:
    """Read ``NAME=FOLDER`` settings.

    Raises:
        UsageError: one of another form, a name given twice, or a folder that is none of peft's; all of them at once.
    """
    folders: dict[str, str] = {}
    faults: list[str] = []
    for setting in settings:
        name, _, folder = setting.partition("=")
        if not name or not folder:
            faults.append(f"adapters: '{setting}' is not NAME=FOLDER")
        elif name in folders:
            faults.append(f"adapters: the name '{name}' is given twice")
        else:
            folders[name] = folder
            try:
                check_adapter_folder(folder)
            except UsageError as error:
                faults.extend(error.faults)
    if faults:
        raise UsageError(faults)
    return folders


def unknown_adapter(name: str, known: list[str]) -> str:
    """The message for a name that no loaded adapter has."""
    loaded = f"loaded are {', '.join(known)}" if known else "none is loaded"
    return f"no adapter '{name}'; {loaded}"


@contextmanager
def _rows_seen(model: PreTrainedModel, projections: Projections) -> Iterator[dict[str, list[int]]]:
    """Note how many rows each linear layer is called with, call by call."""
    seen: dict[str, list[int]] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen.setdefault(name, []).append(inputs[0].shape[:-1].numel())

        return note

    hooks = [model.get_submodule(name).register_forward_pre_hook(noting(name)) for name in projections.places]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
