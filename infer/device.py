"""Where a model runs: the ``device`` setting, resolved and checked before anything is loaded."""

from __future__ import annotations

import torch

from jacobi_llm.configs.errors import UsageError


def resolve_device(name: str) -> str:
    """Return the torch device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for.

    Raises:
        UsageError: another word, or a GPU that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (":" in name and not index.isdecimal())):
        raise UsageError(f"device '{name}': give auto, cpu, cuda or cuda:N")
    if kind == "cuda":
        if not torch.cuda.is_available():
            reason = "no CUDA device was found" if torch.version.cuda else "this torch was built without CUDA"
            raise UsageError(f"device '{name}': {reason}; give cpu, or auto")
        if index and int(index) >= torch.cuda.device_count():
            raise UsageError(f"device '{name}': this machine has {torch.cuda.device_count()} CUDA devices")
    return name
