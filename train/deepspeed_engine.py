"""Brings up DeepSpeed: process group, config, model under its ZeRO stage, optimizer."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.resources
import io
import json
import logging
import math
import os
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import nn

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.fields import suggestion
from jacobi_llm.configs.schema import Dtype, LoraConfig, LrSchedule, TrainConfig, Tune
from jacobi_llm.infer.embedded import cache_dir
from jacobi_llm.infer.models import LoadedModel, load_model, resolve_model
from jacobi_llm.infer.quiet import quiet_libraries
from jacobi_llm.train.data_order import Ranks, num_micro_batches

OWNED_KEYS = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("optimizer", "scheduler", "bf16", "fp16", "gradient_clipping"),
    )
)
# Other keys ask for kinds of run that this trainer does not make: they would be heeded in part, or not at all.
KNOWN_KEYS = frozenset(
    (
        *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio"),
        *("communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
        *("wall_clock_breakdown", "comms_logger", "flops_profiler", "memory_breakdown"),
    )
)


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
    # DeepSpeed calls collectives by names that this torch calls old.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not dist.is_initialized():
        # The op that it compiles here is reported on standard output, where our JSON goes.
        with contextlib.redirect_stdout(sys.stderr if os.environ["RANK"] == "0" else io.StringIO()):
            _compile_collectives()
            deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        # Its threads must have ended before C++ tears down its statics, or the process may abort after its last line.
        atexit.register(_leave_distributed)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return Ranks(dist.get_rank(), dist.get_world_size())


def _leave_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _compile_collectives() -> None:
    """Compile DeepSpeed's CPU collectives, or load them, one process after the other.

    torch marks a running compilation by a file that outlives a killed process; whoever comes later waits for ever.
    Here the lock dies with its holder, the folder is ours alone, and a mark that is found under the lock is stale.
    """
    if torch.cuda.is_available():
        return
    from deepspeed.accelerator import get_accelerator

    environment = hashlib.sha256(f"{sys.prefix} {torch.__version__}".encode()).hexdigest()[:12]
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_dir() / "torch_extensions" / environment)))
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0" and not any(folder.glob("*/*.so")):
        print("compiling DeepSpeed's CPU collectives (once, up to 2 minutes)", file=sys.stderr, flush=True)
    with FileLock(folder / "jacobi-llm.lock"):
        for mark in folder.glob("*/lock"):
            mark.unlink()
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible(verbose=False):
            builder.load(verbose=False)


def deepspeed_config(train: TrainConfig, ranks: Ranks) -> dict[str, Any]:
    """The shipped or given JSON, completed by what the schema owns (batch sizes, precision, clipping).

    Raises:
        UsageError: unknown name or file, broken JSON, a key that belongs to the schema, an unknown key or a bad value.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    given = _read_json(train.deepspeed)
    owned = sorted(set(given) & OWNED_KEYS)
    if owned:
        raise UsageError(
            f"train.deepspeed: {train.deepspeed}: {', '.join(owned)} come from the train section; remove them from it"
        )
    unknown = [f"{key}{suggestion(key, KNOWN_KEYS)}" for key in sorted(set(given) - KNOWN_KEYS)]
    if unknown:
        raise UsageError(f"train.deepspeed: {train.deepspeed}: unknown or unsupported: {', '.join(unknown)}")
    config = {
        **given,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches(train, ranks),
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": train.dtype is Dtype.BFLOAT16},
        "steps_per_print": 10**9,
    }
    try:
        DeepSpeedConfig(config)
    except Exception as error:  # pydantic's, DeepSpeed's own, and whatever a value of the wrong type causes
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UsageError(f"train.deepspeed: {train.deepspeed}: {': '.join(lines[:3])}") from error
    return config


def build(train: TrainConfig, lora: LoraConfig, config: dict[str, Any]) -> TrainingModel:
    """Load the model under its ZeRO stage and wrap it.

    Args:
        train, lora: settings.
        config: from :func:`deepspeed_config`.

    Raises:
        UsageError: settings that exclude each other.
    """
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if train.dtype is Dtype.FLOAT64:
        raise UsageError("train.dtype: float64 is for tests of the engine; train in bfloat16 or float32")
    if train.num_threads:
        torch.set_num_threads(train.num_threads)
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    resolve_model(train.model)
    # Alive until the weights are loaded, so that transformers partitions them under ZeRO-3 while it reads them.
    partitioning = HfDeepSpeedConfig(config) if stage == 3 else None
    loaded = load_model(train.model, dtype=train.dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    _check_trainable(loaded)
    # Eager attention would add our boolean mask to the scores.
    loaded.model.set_attn_implementation("sdpa")
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
    _forget_step_of_zeros(engine)
    return TrainingModel(engine, module, loaded, stage)


def optimizer_step(engine: Any) -> float:
    """Clip, update the weights, clear the gradients.

    Returns:
        Global norm of the gradients before clipping; not finite, or negative, when one was not finite.
    """
    # Without ZeRO in float32 DeepSpeed tells no norm, but leaves the averaged gradients at hand until it steps.
    if hasattr(engine.optimizer, "_global_grad_norm"):
        engine.step()
        return float(engine.get_global_grad_norm())
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    engine.step()
    return norm


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Rate of update ``step`` (counted from 0): linear warm-up, then cosine to 0 or constant."""
    num_warmup = num_warmup_steps(train, num_steps)
    if step < num_warmup:
        return train.lr * (step + 1) / num_warmup
    if train.lr_schedule is LrSchedule.CONSTANT:
        return train.lr
    progress = (step - num_warmup) / max(num_steps - num_warmup, 1)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def num_warmup_steps(train: TrainConfig, num_steps: int) -> int:
    """Updates before the peak rate."""
    return math.ceil(train.warmup_ratio * num_steps)


def _optimizer(train: TrainConfig, parameters: list[nn.Parameter], config: dict[str, Any]) -> torch.optim.Optimizer:
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if offload != "none" and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, adamw_mode=True
        )
        return optimizer
    return torch.optim.AdamW(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True)


def _forget_step_of_zeros(engine: Any) -> None:
    """Without ZeRO in bfloat16 DeepSpeed allocates Adam's state by a step on zero gradients, and Adam counts that step.

    Its bias correction would then make the first updates too small; ZeRO 1 to 3 do not have this.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.optimizer.optimizer.state.clear()


def _with_lora(loaded: LoadedModel, lora: LoraConfig, seed: int) -> nn.Module:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    torch.manual_seed(seed)
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    with quiet_libraries():
        return get_peft_model(loaded.model, config, autocast_adapter_dtype=False)


def _check_trainable(loaded: LoadedModel) -> None:
    text = loaded.model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None) or []
    if window and (not layers or "sliding_attention" in layers):
        raise UsageError(
            f"train.model: {loaded.name} uses sliding-window attention ({window} tokens), which the packed mask does "
            "not express yet; train a full-attention model"
        )
    if not loaded.model._supports_sdpa:
        raise UsageError(
            f"train.model: {loaded.name} (model type {text.model_type}) does not take scaled_dot_product_attention, "
            "which the packed mask needs; train another model"
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
