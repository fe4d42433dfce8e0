"""``jacobi-infer env``: what this machine and installation offer; also the machine part of every written result.

Nothing here may fail: what cannot be found out is null.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jacobi_llm
from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.schema import Recipe

_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "deepspeed",
    "safetensors",
    "tokenizers",
    "numpy",
    "datasets",
    "pyarrow",
    "matplotlib",
    "flash-attn",
)
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TORCH_EXTENSIONS_DIR")


def run(recipe: Recipe, options: Options) -> int:
    """Run the command; always 0."""
    described = describe_environment(num_threads=recipe.engine.num_threads)
    print(json.dumps(described, ensure_ascii=False) if options.json else "\n".join(_lines(described)))
    return 0


def describe_environment(num_threads: int = 0) -> dict[str, Any]:
    """Return versions, CPU, memory (MiB), GPUs, caches, attention backends and variables as plain JSON values.

    Args:
        num_threads: the ``engine.num_threads`` that would apply; 0 asks torch for its own choice.
    """
    return {
        "versions": {
            "python": platform.python_version(),
            "jacobi-llm": jacobi_llm.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "system": _quietly(platform.platform),
        "cpu": {
            "model": _quietly(cpu_model),
            "features": _quietly(_cpu_features),
            "cores": os.cpu_count(),
            "usable_cores": _quietly(_usable_cores),
            "torch_threads": num_threads or _quietly(_torch_threads),
        },
        "memory_mib": {
            "total": _quietly(lambda: _meminfo_mib("MemTotal")),
            "available": _quietly(lambda: _meminfo_mib("MemAvailable")),
            "container_limit": _quietly(_container_limit_mib),
        },
        "gpus": _quietly(_gpus) or [],
        "attention_backends": _quietly(_attention_backends) or {},
        "caches": _quietly(_caches) or {},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def describe_run(num_threads: int = 0) -> dict[str, Any]:
    """Return what a result file says of its run: date, command and machine, without paths of this machine.

    Args:
        num_threads: as in :func:`describe_environment`.
    """
    environment = describe_environment(num_threads)
    for private in ("caches", "variables"):
        del environment[private]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "environment": environment,
    }


def _quietly(find_out: Callable[[], Any]) -> Any:
    try:
        return find_out()
    except Exception:  # broken drivers and half-installed packages raise anything; a report must still appear
        return None


def _version(package: str) -> str | None:
    version = _quietly(lambda: importlib.metadata.version(package))
    return version if isinstance(version, str) else None


def cpu_model() -> str | None:
    """Return the name of the CPU, as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            present = set(value.split())
            return [name for name in _CPU_FEATURES if name in present]
    return []


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _meminfo_mib(key: str) -> int | None:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) >> 10
    return None


def _container_limit_mib() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text(encoding="utf-8").strip()
            # The older interface writes a huge number for "no limit".
            return int(text) >> 20 if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_mib": properties.total_memory >> 20,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
            }
        )
    return found


def _attention_backends() -> dict[str, str]:
    """Backends the engine has, each with ``ready`` or what is missing."""
    has_torch = importlib.util.find_spec("torch") is not None
    return {"sdpa": "ready" if has_torch else "torch is not installed"}


def _caches() -> dict[str, Any]:
    own = os.environ.get("JACOBI_LLM_CACHE") or str(_cache_home() / "jacobi-llm")
    hub = os.environ.get("HF_HUB_CACHE") or str(
        Path(os.environ.get("HF_HOME") or _cache_home() / "huggingface") / "hub"
    )
    return {name: _folder(Path(path).expanduser()) for name, path in (("jacobi-llm", own), ("huggingface", hub))}


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _folder(path: Path) -> dict[str, Any]:
    models = sorted(child.name for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return {"path": str(path), "exists": path.is_dir(), "models": [name for name in models if not name.startswith(".")]}


def _lines(described: dict[str, Any]) -> list[str]:
    cpu, memory = described["cpu"], described["memory_mib"]
    rows: list[tuple[str, str]] = [
        (name, version or "not installed") for name, version in described["versions"].items()
    ]
    rows.append(("system", _show(described["system"])))
    rows.append(("cpu", f"{_show(cpu['model'])} ({', '.join(cpu['features'] or ['no known features'])})"))
    rows.append(("cores", f"{_show(cpu['usable_cores'])} usable of {_show(cpu['cores'])}"))
    rows.append(("threads", f"{_show(cpu['torch_threads'])} used by torch"))
    limit = memory["container_limit"]
    rows.append(
        (
            "memory",
            f"{_show(memory['available'])} MiB free of {_show(memory['total'])} MiB"
            + (f", container limit {limit} MiB" if limit else ""),
        )
    )
    for gpu in described["gpus"]:
        rows.append(
            (
                "gpu",
                f"{gpu['name']}, {gpu['memory_mib']} MiB, capability {gpu['compute_capability']}, CUDA {gpu['cuda']}",
            )
        )
    if not described["gpus"]:
        rows.append(("gpu", "none"))
    rows += [(f"attention {name}", state) for name, state in described["attention_backends"].items()]
    for name, cache in described["caches"].items():
        held = ", ".join(cache["models"]) or ("empty" if cache["exists"] else "not there yet")
        rows.append((f"cache {name}", f"{cache['path']} ({held})"))
    rows += [(name, value) for name, value in described["variables"].items()]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _show(value: object) -> str:
    return "unknown" if value is None else str(value)
