"""The result of training: a folder that transformers can load, and with LoRA the adapter beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from jacobi_llm.configs.checkpoint import (
    JacobiCheckpointConfig,
    load_checkpoint_config,
    save_checkpoint_config,
)
from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Recipe, Tune
from jacobi_llm.infer.model_folder import save_model_folder
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.quiet import quiet_libraries
from jacobi_llm.train.data_order import Ranks
from jacobi_llm.train.deepspeed_engine import TrainingModel

FINAL = "final"
ADAPTER = "adapter"


def export_final(recipe: Recipe, training: TrainingModel, ranks: Ranks, about: JacobiCheckpointConfig) -> Path:
    """Write ``final/`` (and ``adapter/`` with LoRA) into the run folder; called by every rank.

    ZeRO-3 shards are gathered parameter by parameter. Rank 0 writes, then loads what it wrote and compares every
    name, shape and value.

    Raises:
        RunError: the folder cannot be written, or does not load as it was saved.
    """
    folder = Path(recipe.train.output)
    weights = gather_weights(training, ranks)
    if ranks.rank == 0:
        if recipe.train.tune is Tune.LORA:
            _write_adapter(folder / ADAPTER, training, weights, about)
            merge(recipe, about)
        else:
            _write_model(folder / FINAL, training.loaded, training.loaded.model, weights, about)
    dist.barrier()
    return folder / FINAL


def gather_weights(training: TrainingModel, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole trained weights by name on rank 0's CPU, tied ones once; other ranks take part and get nothing."""
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    for name, parameter in training.module.named_parameters():
        if not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=training.zero_stage == 3):
            if ranks.rank == 0:
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
    adapter = Path(recipe.train.output) / ADAPTER
    about = load_checkpoint_config(adapter) if adapter.is_dir() else None
    if about is None:
        raise UsageError(f"{adapter}: no adapter of ours here; train with --train.tune lora first")
    recipe.train.model = about.base_model
    final = merge(recipe, about)
    print(json.dumps({"output": str(final)}) if options.json else final)
    return 0


def _write_adapter(
    target: Path, training: TrainingModel, weights: dict[str, torch.Tensor], about: JacobiCheckpointConfig
) -> None:
    from peft import PeftModel

    module = training.module
    if not isinstance(module, PeftModel):
        raise AssertionError("a LoRA run trains a peft model")
    with _replaced(target) as temporary:
        with quiet_libraries():
            module.save_pretrained(str(temporary), state_dict=weights, safe_serialization=True)
        _name_base(temporary / "adapter_config.json", about.base_model)
        # peft writes a model card full of placeholders.
        (temporary / "README.md").unlink(missing_ok=True)
        save_checkpoint_config(about, temporary)


def _name_base(adapter_config: Path, base: str) -> None:
    """Name the base as it was asked for: where it lies on this machine means nothing elsewhere."""
    content = json.loads(adapter_config.read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = Path(base).name if Path(base).is_dir() else base
    adapter_config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
    with quiet_libraries():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", output_loading_info=True, use_safetensors=True, local_files_only=True
        )
    model, info = loaded
    stray = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if stray:
        raise RunError(f"{folder}: saved, but loading misses or does not know {', '.join(stray[:5])}")
    for name, parameter in model.named_parameters():
        if name not in weights or not torch.equal(parameter.detach(), weights[name].detach().cpu()):
            raise RunError(f"{folder}: tensor {name} is not what was saved")


@contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """Write into a folder beside ``target``, which takes its place when all went well.

    Raises:
        RunError: the disk is full or the folder cannot be written; ``target`` is what it was.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{target}: not written ({error}); run the same command again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
