"""Brings up DeepSpeed: process group, config, model under its ZeRO stage, optimizer."""

from __future__ import annotations

import importlib.resources
import json
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import Dtype, LoraConfig, TrainConfig, Tune
from jacobi_llm.infer.models import LoadedModel, load_model, resolve_model
from jacobi_llm.train.data_order import Ranks

OWNED_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer")
OWNED_KEYS += ("scheduler", "bf16", "fp16", "gradient_clipping")


@dataclass
class TrainingModel:
    """The trained model in its three guises.

    Attributes:
        engine: DeepSpeed's, for backward, step and checkpoints.
        module: what the forward pass calls (a peft model with LoRA).
        loaded: the Hugging Face model inside, with tokenizer and EOS ids; decoding runs on it.
        zero_stage: 0 to 3.
    """

    engine: Any
    module: nn.Module
    loaded: LoadedModel
    zero_stage: int


def init_distributed() -> Ranks:
    """Join the process group; a plain ``python train/cllm.py`` becomes a group of one.

    DeepSpeed looks for MPI when the launcher's variables are absent, so they are set here.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return Ranks(dist.get_rank(), dist.get_world_size())


def deepspeed_config(train: TrainConfig, ranks: Ranks) -> dict[str, Any]:
    """The shipped or given JSON, completed by what the schema owns (batch sizes, precision, clipping).

    Raises:
        UsageError: unknown name or file, broken JSON, or a key that belongs to the schema.
    """
    config = _read_json(train.deepspeed)
    owned = sorted(set(config) & set(OWNED_KEYS))
    if owned:
        raise UsageError(
            f"{train.deepspeed}: {', '.join(owned)} come from the train section; remove them from the JSON"
        )
    return {
        **config,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.global_batch_size // (train.micro_batch_size * ranks.world_size),
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": train.dtype is Dtype.BFLOAT16},
        "steps_per_print": 10**9,
    }


def build(train: TrainConfig, lora: LoraConfig, ranks: Ranks) -> TrainingModel:
    """Load the model under its ZeRO stage and wrap it.

    Raises:
        UsageError: settings that exclude each other.
    """
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    if train.dtype is Dtype.FLOAT64:
        raise UsageError("train.dtype: float64 is for tests of the engine; train in bfloat16 or float32")
    if train.num_threads:
        torch.set_num_threads(train.num_threads)
    config = deepspeed_config(train, ranks)
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    resolve_model(train.model)
    # Alive until the weights are loaded, so that transformers partitions them under ZeRO-3 while it reads them.
    partitioning = HfDeepSpeedConfig(config) if stage == 3 else None
    loaded = load_model(train.model, dtype=train.dtype, device="cpu" if not torch.cuda.is_available() else "cuda")
    _check_trainable(loaded)
    module: nn.Module = loaded.model
    if train.tune is Tune.LORA:
        module = _with_lora(loaded, lora, train.seed)
    if train.gradient_checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.model.enable_input_require_grads()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=parameters, optimizer=_optimizer(train, parameters, config), config=config
    )
    del partitioning
    return TrainingModel(engine, module, loaded, stage)


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Rate of update ``step`` (counted from 0): linear warm-up, then cosine to 0 or constant."""
    import math

    from jacobi_llm.configs.schema import LrSchedule

    num_warmup = math.ceil(train.warmup_ratio * num_steps)
    if step < num_warmup:
        return train.lr * (step + 1) / num_warmup
    if train.lr_schedule is LrSchedule.CONSTANT:
        return train.lr
    progress = (step - num_warmup) / max(num_steps - num_warmup, 1)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def _optimizer(train: TrainConfig, parameters: list[nn.Parameter], config: dict[str, Any]) -> torch.optim.Optimizer:
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if offload != "none" and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, adamw_mode=True
        )
        return optimizer
    return torch.optim.AdamW(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True)


def _with_lora(loaded: LoadedModel, lora: LoraConfig, seed: int) -> nn.Module:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(
        loaded.model,
        PeftLoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
        ),
        autocast_adapter_dtype=False,
    )


def _check_trainable(loaded: LoadedModel) -> None:
    window = getattr(loaded.model.config.get_text_config(), "sliding_window", None)
    layers = getattr(loaded.model.config.get_text_config(), "layer_types", None) or []
    if window and (not layers or "sliding_attention" in layers):
        raise UsageError(
            f"train.model: {loaded.name} uses sliding-window attention ({window} tokens), which the packed mask does "
            "not express yet; train a full-attention model"
        )


def _read_json(name: str) -> dict[str, Any]:
    shipped = importlib.resources.files("jacobi_llm.configs") / "deepspeed"
    names = sorted(entry.name.removesuffix(".json") for entry in shipped.iterdir() if entry.name.endswith(".json"))
    is_shipped = name in names
    if not is_shipped and not Path(name).is_file():
        raise UsageError(f"train.deepspeed: {name!r} is neither shipped ({', '.join(names)}) nor a file")
    try:
        text = (shipped / f"{name}.json").read_text() if is_shipped else Path(name).read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"train.deepspeed: {name}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"train.deepspeed: {name}: a JSON object is expected")
    return content


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
