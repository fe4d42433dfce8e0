"""The result of training: a folder that transformers can load, and with LoRA the adapter beside it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from jacobi_llm.configs.checkpoint import CheckpointMode, JacobiCheckpointConfig, save_checkpoint_config
from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Recipe, Tune
from jacobi_llm.infer.model_folder import save_model_folder
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.train.data_order import Ranks
from jacobi_llm.train.deepspeed_engine import TrainingModel

FINAL = "final"
ADAPTER = "adapter"


def export_final(
    recipe: Recipe,
    training: TrainingModel,
    ranks: Ranks,
    evaluation: dict[str, Any],
    data_sha256: str,
    num_tokens_trained: int,
) -> Path:
    """Write ``final/`` (and ``adapter/`` with LoRA) into the run folder; called by every rank.

    ZeRO-3 shards are gathered parameter by parameter. Rank 0 writes, then loads what it wrote and compares every
    name, shape and value.

    Raises:
        RunError: the folder cannot be written, or does not load as it was saved.
    """
    folder = Path(recipe.train.output)
    weights = gather_weights(training)
    if ranks.rank == 0:
        about = JacobiCheckpointConfig(
            mode=CheckpointMode.MERGED,
            window=recipe.eval.window,
            fill=recipe.eval.fill,
            acceptance_by_depth=evaluation["acceptance_by_depth"],
            objective=recipe.objective.name,
            data_sha256=data_sha256,
            base_model=recipe.train.model,
            tokens_trained=num_tokens_trained,
        )
        if recipe.train.tune is Tune.LORA:
            _write_adapter(folder / ADAPTER, training, weights, recipe.train.model, about)
            merge(recipe, about)
        else:
            _write_model(folder / FINAL, training.loaded, training.loaded.model, weights, about)
    dist.barrier()
    return folder / FINAL


def gather_weights(training: TrainingModel) -> dict[str, torch.Tensor]:
    """Whole trainable weights by name, on the CPU; tied names once each, as ``state_dict`` lists them."""
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    for name, parameter in training.module.named_parameters():
        if not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=training.zero_stage == 3):
            weights[name] = parameter.detach().cpu().clone()
    return weights


def merge(recipe: Recipe, about: JacobiCheckpointConfig) -> Path:
    """Merge ``adapter/`` of the run folder into its base and write ``final/``."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    folder = Path(recipe.train.output)
    merged = load_model(recipe.train.model, dtype=recipe.train.dtype, adapter=str(folder / ADAPTER))
    _write_model(folder / FINAL, merged, merged.model, dict(merged.model.named_parameters()), about)
    return folder / FINAL


def run(recipe: Recipe, options: Options) -> int:
    """jacobi-train merge: write ``final/`` anew from ``adapter/``."""
    from jacobi_llm.configs.checkpoint import load_checkpoint_config

    adapter = Path(recipe.train.output) / ADAPTER
    about = load_checkpoint_config(adapter) if adapter.is_dir() else None
    if about is None:
        raise UsageError(f"{adapter}: no adapter of ours here; train with --train.tune lora first")
    recipe.train.model = about.base_model
    final = merge(recipe, about)
    print(json.dumps({"output": str(final)}) if options.json else final)
    return 0


def _write_adapter(
    target: Path, training: TrainingModel, weights: dict[str, torch.Tensor], base: str, about: JacobiCheckpointConfig
) -> None:
    from peft import PeftModel

    module = training.module
    if not isinstance(module, PeftModel):
        raise AssertionError("a LoRA run trains a peft model")
    with _replaced(target) as temporary:
        module.peft_config["default"].base_model_name_or_path = base
        module.save_pretrained(str(temporary), state_dict=weights, safe_serialization=True)
        # peft writes a model card full of placeholders.
        (temporary / "README.md").unlink(missing_ok=True)
        save_checkpoint_config(about, temporary)


def _write_model(
    target: Path,
    loaded: LoadedModel,
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    about: JacobiCheckpointConfig,
) -> None:
    with _replaced(target) as temporary:
        model.config.use_cache = True
        save_model_folder(
            temporary, model, loaded.tokenizer, {name: tensor.detach().cpu() for name, tensor in weights.items()}
        )
        save_checkpoint_config(about, temporary)
        _check_loads(temporary, weights)


def _check_loads(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Load what was written and compare it.

    Raises:
        RunError: naming the first tensor that is missing, unexpected, or differs.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype="auto", output_loading_info=True, use_safetensors=True, local_files_only=True
    )
    stray = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if stray:
        raise RunError(f"{folder}: saved, but loading misses or does not know {', '.join(stray[:5])}")
    for name, parameter in model.named_parameters():
        if name not in weights or not torch.equal(parameter.detach(), weights[name].detach().cpu()):
            raise RunError(f"{folder}: tensor {name} is not what was saved")


class _replaced:
    """Write into a folder beside ``target`` and put it in its place when all went well."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self.target, ignore_errors=True)
            self.temporary.replace(self.target)
        else:
            print(f"{self.target}: not written", file=sys.stderr)
            shutil.rmtree(self.temporary, ignore_errors=True)
